"""FedProto equals a plain PyTorch loop that lists features by class; by itself nothing but prototypes travels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedproto import fedproto
from fedshift.methods.fedrod import fedrod
from fedshift.methods.fedsr import fedsr
from fedshift.methods.fpl import fpl
from fedshift.methods.single import single
from fedshift.tasks import Multilabel, Regression, Segmentation
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from fedshift.utils.state import clone
from tests.laws import test_tasks
from tests.methods.plain import skewed_vectors as data
from tests.methods.plain import vector_network as network

SIZES, SEED, LR, LAM = {"a": 12, "b": 10}, 6, 0.1, 0.7


def trial(method, **changes):
    given = {"work": Work(batch_size=4, epochs=2), "optimizer": SGD(lr=LR), "evaluate_every": 99, **changes}
    return Trial(method, network, data(), Settings(rounds=3, **given), SEED)


@pytest.mark.parametrize("base", [fedavg(), single()], ids=lambda method: method.name)
def test_rounds_equal_a_plain_loop(base):
    running = trial(fedproto(base, lam=LAM))
    models = {name: network() for name in SIZES}
    for model in models.values():
        model.load_state_dict(running.plan.initial)
    prototypes = {}
    for number in range(3):
        running.advance()
        uploaded = {}
        for client in data().clients:
            model, x, y = models[client.name], client.train.x, client.train.y
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for epoch in (2 * number, 2 * number + 1):
                met = {}
                for batch in torch.from_numpy(stream(SEED, "order", client.name, epoch).permutation(len(y))).split(4):
                    z = model[:3](x[batch])
                    target = z.detach().clone()
                    for row, label in enumerate(y[batch].tolist()):
                        target[row] = prototypes.get(label, target[row])
                        met.setdefault(label, []).append(z[row].detach())
                    loss = F.cross_entropy(model[3](z), y[batch]) + LAM * F.mse_loss(z, target)
                    sgd.zero_grad()
                    loss.backward()
                    sgd.step()
            for label, features in met.items():
                uploaded.setdefault(label, []).extend([torch.stack(features).mean(0)] * len(features))
        prototypes = {label: torch.stack(each).mean(0) for label, each in uploaded.items()}
        if base.name == "fedavg":
            states = {name: clone(model.state_dict()) for name, model in models.items()}
            for entry, tensor in running.plan.initial.items():
                mean = sum(states[name][entry].double() * size / 22 for name, size in SIZES.items())
                for model in models.values():
                    model.state_dict()[entry].copy_(mean if tensor.is_floating_point() else mean.round())
    for label, prototype in prototypes.items():
        assert (running.server.memory[0]["prototypes"][label] - prototype).abs().max() <= 1e-9
    for name, model in models.items():
        for entry, tensor in model.state_dict().items():
            assert (running.model_state(name)[entry] - tensor).abs().max() <= 1e-9, (name, entry)


def test_a_class_that_no_participant_has_keeps_its_prototype():
    running = trial(fedproto(), participation=1)
    known = [(1.0, 1.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0)]
    before = running.server.memory[0]
    for _ in range(3):
        (who,) = running.advance().participants
        after = running.server.memory[0]
        for label, met in enumerate(known["ab".index(who)]):
            assert after["known"][label] == max(met, before["known"][label])
            assert torch.equal(after["prototypes"][label], before["prototypes"][label]) == (not met)
        before = after


@pytest.mark.parametrize("method", [fedproto(), fpl(), fedrod(), fedsr()], ids=lambda method: method.name)
@pytest.mark.parametrize("task", [Segmentation(), Multilabel(), Regression(scales=((1.0, 2.0), (0.0, 1.0)))], ids=str)
def test_tasks_without_one_class_a_sample_are_refused(method, task):
    with pytest.raises(UsageError, match=f"so each sample must have one class.*{task}.*{method.name}"):
        test_tasks.make(task, method)


@pytest.mark.parametrize("method", [fedproto, fpl, fedrod, fedsr], ids=lambda method: method.__name__)
def test_a_network_without_a_linear_classifier_is_refused(method):
    def convolutional(shape, classes):
        return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, classes, 4), nn.Flatten())

    with pytest.raises(UsageError, match=f"{method.__name__} needs a linear classifier.*which is a Conv1d"):
        Trial(method(), convolutional, data(), Settings(rounds=1, optimizer=SGD(lr=LR)), SEED)


def test_a_classifier_of_several_vectors_a_sample_is_refused():
    class Tokens(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.head = nn.Linear(2, classes)

        def forward(self, x):
            return self.head(x.reshape(-1, 2, 2)).mean(1)

    with pytest.raises(UsageError, match=r"fedproto needs one feature vector per sample.*has shape \(2, 2\)"):
        Trial(
            fedproto(), lambda shape, classes: Tokens(classes), data(), Settings(rounds=1, optimizer=SGD(lr=LR)), SEED
        )
