"""FedRoD equals a plain PyTorch loop with two heads and an optimizer for each part."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedrod import fedrod
from tests.methods.plain import LR, average, largest_difference, loaded_with, passes, skewed_vectors, trial
from tests.methods.plain import vector_network as network

SIZES, DATA = {"a": 12, "b": 10}, skewed_vectors()


@pytest.mark.parametrize("base", [fedavg(), fedbn()], ids=lambda method: method.name)
def test_rounds_equal_a_plain_loop_with_two_heads(base):
    optimizer = SGD(lr=LR, momentum=0.9)
    running = trial(fedrod(base), network, DATA, work=Work(batch_size=4, epochs=2), optimizer=optimizer)
    models = {name: loaded_with(running.plan.initial, network) for name in SIZES}
    heads = {name: nn.Linear(5, 4).double() for name in SIZES}
    for name, head in heads.items():
        head.load_state_dict(models[name][3].state_dict())
    for number in range(2):
        running.advance()
        for client in DATA.clients:
            model, head = models[client.name], heads[client.name]
            counts = torch.tensor([int((client.train.y == label).sum()) for label in range(4)])
            sgd = [torch.optim.SGD(part.parameters(), lr=LR, momentum=0.9) for part in (model, head)]
            for x, y in passes(client, 2 * number, 2 * number + 1):
                z = model[:3](x)
                generic = model[3](z)
                balanced = (generic.exp() * counts)[range(len(y)), y] / (generic.exp() * counts).sum(1)
                personal = F.cross_entropy(generic.detach() + head(z.detach()), y)
                for each, loss in zip(sgd, (-balanced.log().mean(), personal), strict=True):
                    each.zero_grad()
                    loss.backward()
                for each in sgd:
                    each.step()
        shared = average(models, SIZES, ("1.",) if base.name == "fedbn" else ())
    assert largest_difference(running.server.shared, {n: shared[n] for n in running.server.shared}) <= 1e-9
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, model in models.items():
        used = loaded_with(running.model_state(name), network)
        z = model.eval()[:3](x)
        assert (used.eval()(x) - (model[3](z) + heads[name](z))).abs().max() <= 1e-9
