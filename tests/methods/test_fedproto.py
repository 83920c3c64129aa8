"""FedProto equals a plain PyTorch loop that lists features by class; by itself nothing but prototypes travels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.work import Work
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedproto import fedproto
from fedshift.methods.fedrod import fedrod
from fedshift.methods.fedsr import fedsr
from fedshift.methods.fpl import fpl
from fedshift.methods.single import single
from fedshift.tasks import Multilabel, Regression, Segmentation
from fedshift.utils.errors import UsageError
from tests.laws import test_tasks
from tests.methods import plain
from tests.methods.plain import LR, average, largest_difference, loaded_with, passes, skewed_vectors, step
from tests.methods.plain import vector_network as network

SIZES, LAM, DATA = {"a": 12, "b": 10}, 0.7, skewed_vectors()


def trial(method, model=network, **changes):
    return plain.trial(method, model, DATA, **{"work": Work(batch_size=4, epochs=2), **changes})


@pytest.mark.parametrize("base", [fedavg(), single()], ids=lambda method: method.name)
def test_rounds_equal_a_plain_loop(base):
    running = trial(fedproto(base, lam=LAM))
    models = {name: loaded_with(running.plan.initial, network) for name in SIZES}
    prototypes = {}
    for number in range(3):
        running.advance()
        uploaded = {}
        for client in DATA.clients:
            model = models[client.name]
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for epoch in (2 * number, 2 * number + 1):
                met = {}
                for x, y in passes(client, epoch):
                    z = model[:3](x)
                    target = z.detach().clone()
                    for row, label in enumerate(y.tolist()):
                        target[row] = prototypes.get(label, target[row])
                        met.setdefault(label, []).append(z[row].detach())
                    step(sgd, F.cross_entropy(model[3](z), y) + LAM * F.mse_loss(z, target))
            for label, features in met.items():
                uploaded.setdefault(label, []).extend([torch.stack(features).mean(0)] * len(features))
        prototypes = {label: torch.stack(each).mean(0) for label, each in uploaded.items()}
        if base.name == "fedavg":
            average(models, SIZES)
    for label, prototype in prototypes.items():
        assert (running.server.memory[0]["prototypes"][label] - prototype).abs().max() <= 1e-9
    for name, model in models.items():
        assert largest_difference(running.model_state(name), model.state_dict()) <= 1e-9


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
        trial(method(), convolutional)


def test_a_classifier_of_several_vectors_a_sample_is_refused():
    class Tokens(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.head = nn.Linear(2, classes)

        def forward(self, x):
            return self.head(x.reshape(-1, 2, 2)).mean(1)

    with pytest.raises(UsageError, match=r"fedproto needs one feature vector per sample.*has shape \(2, 2\)"):
        trial(fedproto(), lambda shape, classes: Tokens(classes))
