"""The kernel's functions alone: rules that chain with memories of their own, and refusals."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedshift.core.declarations import Send
from fedshift.core.kernel import client_final, client_init, init_client, init_server
from fedshift.core.method import Method
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.rule import Declared, Folded, Rule
from fedshift.core.selection import Scope, name_matches
from fedshift.core.server_round import server_round
from fedshift.core.step import client_step_
from fedshift.core.work import Work
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.utils.errors import UsageError

KEY = torch.tensor(7)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(27, 4)
    ).double()


def plan_of(method, model=None, optimizer=None):
    return prepare(method, model or network(), work=Work(epochs=1), optimizer=optimizer or SGD(lr=0.1, momentum=0.9))


class Counting(Rule):
    """Adds ``by`` to its memories each round, and ``by`` times the loss to the objective."""

    by: float

    def bind(self, plan):
        memory, server = {"seen": torch.zeros(1)}, {"total": torch.zeros(1)}
        return Declared(
            self, memory=memory, server=server, sends={"new": Send(shape=(1,), dtype=torch.float32, reveals="update")}
        )

    def loss(self, loss, step):
        return loss * self.by

    def gradients(self, grads, step):
        return {name: grad + self.by for name, grad in grads.items()}

    def end(self, client):
        return {"seen": client.memory["seen"] + self.by}, {"new": client.memory["seen"] + self.by}

    def fold(self, server):
        each = zip(server.received, server.uploads, strict=True)
        return Folded({"total": server.memory["total"] + sum(one.share * upload["new"] for one, upload in each)})


class CountingToo(Counting):
    """Another type, of which a method may have one, too."""


def test_rules_chain_in_order_and_never_meet():
    chained = replace(fedavg(), name="chained", rules=(Counting(2.0), CountingToo(10.0)))
    model = nn.Linear(2, 2, bias=False).double()
    plan = plan_of(chained, model, SGD(lr=1.0))
    plain = plan_of(fedavg(), model, SGD(lr=1.0))
    x, y = torch.randn(4, 2, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    moved = []
    for each in (plan, plain):
        job, _ = client_step_(each, client_init(each, init_client(each), init_server(each)), x, y, KEY)
        moved.append(each.initial["weight"] - job.params["weight"])
    # Both losses are scaled (2 * 10), then both constants are added, in order.
    assert (moved[0] - (20 * moved[1] + 12)).abs().max() <= 1e-12
    client, server = init_client(plan), init_server(plan)
    for _ in range(2):
        job, _ = client_step_(plan, client_init(plan, client, server), x, y, KEY)
        client, update = client_final(plan, job)
        server = server_round(plan, server, {"a": update}, {"a": 4, "b": 12})
    assert client.memory == ({"seen": 4.0}, {"seen": 20.0})
    # a quarter of what this client, who has a quarter of the samples, uploaded
    assert server.memory == ({"total": 1.5}, {"total": 7.5})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: prepare(fedavg(), nn.Linear(2, 2)), "no optimizer"),
        (lambda: plan_of(fedbn(), nn.Linear(2, 2)), "batch_norm matches no entry.*Linear"),
        (
            lambda: plan_of(Method(name="odd", scope=Scope(send=~name_matches("0.*")))),
            "loads '0.bias', which no client sends",
        ),
        (
            lambda: prepare(
                fedavg(), nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4)), optimizer=SGD(lr=0.1),
                sample=torch.zeros(1, 1, 3, 3),
            ),
            r"in layer '1' \(InstanceNorm2d, input \(4, 1, 1\)\): .*Normalization of one value has no variance",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_starts(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("model", "smallest"),
    [(nn.BatchNorm1d(2), 2), (nn.Linear(2, 2), 1), (nn.Sequential(nn.Unflatten(1, (1, 2)), nn.BatchNorm1d(1)), 1)],
)
def test_one_sample_is_refused_only_by_models_that_cannot_train_on_it(model, smallest):
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(2, 2))
    plan = prepare(fedavg(), model, optimizer=SGD(lr=0.1), sample=torch.zeros(1, 2))
    assert plan.smallest_batch == smallest
