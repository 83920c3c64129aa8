"""FedRoD equals a plain PyTorch loop with two heads and an optimizer for each part."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedrod import fedrod
from fedshift.utils.random_streams import stream
from fedshift.utils.state import clone
from tests.methods.plain import skewed_vectors as data
from tests.methods.plain import vector_network as network

SIZES, SEED, LR = {"a": 12, "b": 10}, 6, 0.1


@pytest.mark.parametrize("base", [fedavg(), fedbn()], ids=lambda method: method.name)
def test_rounds_equal_a_plain_loop_with_two_heads(base):
    settings = Settings(
        rounds=2, work=Work(batch_size=4, epochs=2), optimizer=SGD(lr=LR, momentum=0.9), evaluate_every=99
    )
    running = Trial(fedrod(base), network, data(), settings, SEED)
    models = {name: network() for name in SIZES}
    heads = {name: nn.Linear(5, 4).double() for name in SIZES}
    for name, model in models.items():
        model.load_state_dict(running.plan.initial)
        heads[name].load_state_dict(clone(model[3].state_dict()))
    for number in range(2):
        running.advance()
        for client in data().clients:
            model, head, x, y = models[client.name], heads[client.name], client.train.x, client.train.y
            counts = torch.tensor([int((y == label).sum()) for label in range(4)])
            sgd = [torch.optim.SGD(part.parameters(), lr=LR, momentum=0.9) for part in (model, head)]
            for epoch in (2 * number, 2 * number + 1):
                for batch in torch.from_numpy(stream(SEED, "order", client.name, epoch).permutation(len(y))).split(4):
                    z = model[:3](x[batch])
                    generic = model[3](z)
                    balanced = (generic.exp() * counts)[range(len(batch)), y[batch]] / (generic.exp() * counts).sum(1)
                    personal = F.cross_entropy(generic.detach() + head(z.detach()), y[batch])
                    for each, loss in zip(sgd, (-balanced.log().mean(), personal), strict=True):
                        each.zero_grad()
                        loss.backward()
                    for each in sgd:
                        each.step()
        states = {name: clone(model.state_dict()) for name, model in models.items()}
        for entry, tensor in running.plan.initial.items():
            if base.name == "fedbn" and entry.startswith("1."):
                continue
            mean = sum(states[name][entry].double() * size / 22 for name, size in SIZES.items())
            for model in models.values():
                model.state_dict()[entry].copy_(mean if tensor.is_floating_point() else mean.round())
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, model in models.items():
        used = network()
        used.load_state_dict(running.model_state(name))
        z = model.eval()[:3](x)
        assert (used.eval()(x) - (model[3](z) + heads[name](z))).abs().max() <= 1e-9
        for entry in running.server.shared:
            assert (running.server.shared[entry] - model.state_dict()[entry]).abs().max() <= 1e-9, entry


def test_the_personal_head_does_not_change_what_is_shared():
    """With classes equally frequent at every client, the balanced softmax is the softmax."""
    rng = np.random.default_rng(0)
    arrays = {name: (rng.normal(size=(12, 4)), np.arange(12) % 4) for name in "ab"}
    balanced = federation({name: (x, y, x, y) for name, (x, y) in arrays.items()})
    settings = Settings(rounds=2, work=Work(batch_size=4, epochs=1), optimizer=SGD(lr=LR), evaluate_every=99)
    plain, personal = (Trial(method, network, balanced, settings, SEED) for method in (fedavg(), fedrod()))
    for running in (plain, personal):
        running.advance()
        running.advance()
    for name, tensor in plain.server.shared.items():
        assert (tensor - personal.server.shared[name]).abs().max() <= 1e-12
    assert (personal.model_state("a")["3.weight"] - personal.server.shared["3.weight"]).abs().max() > 1e-3
