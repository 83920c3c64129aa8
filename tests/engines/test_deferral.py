"""Steps that hold back updates of large linear layers, against ``torch.optim.SGD`` on the network, in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.kernel import client_final, client_init, init_client, init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.step import client_step_
from fedshift.core.work import Work
from fedshift.engines import deferral
from fedshift.engines.deferral import deferred_steps
from fedshift.methods.agc import agc
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedprox import fedprox
from fedshift.nn import deferred
from fedshift.nn.deferred import FEW, HeldUpdates
from fedshift.nn.linear import ALONE, set_products

WIDE, STEPS, BATCH, LR = 12, 11, 4, 0.2


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Every layer is large, few rows are held; the rows of updates that were added at a time."""
    monkeypatch.setattr(deferral, "LEAST", WIDE)
    monkeypatch.setattr(deferred, "ROWS", 3 * BATCH)
    rows, settle = [], HeldUpdates.settle

    def count(self):
        rows.extend([self.rows] if self.rows else [])
        settle(self)

    monkeypatch.setattr(HeldUpdates, "settle", count)
    return rows


class Usual(nn.Module):
    """Two linear layers, the second of them used with and without a dimension more."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDE), nn.Linear(WIDE, 3, bias=False)
        self.norm = nn.BatchNorm1d(WIDE)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


class Repeated(Usual):
    def forward(self, x):
        return self.last(F.linear(self.first(x).tanh(), self.first.weight.t()) @ self.first.weight.t()) + self.last(
            self.first(x.cos()).sin().unsqueeze(1)
        ).squeeze(1)


class Twice(Usual):
    def forward(self, x):
        return self.last(self.first(x).tanh() + self.first(x.cos()))


class Penalized(Usual):
    def forward(self, x):
        return (
            super().forward(x) + self.last.weight.square().mean() + sum(p.abs().sum() for p in self.first.parameters())
        )


class Watched(Usual):
    def forward(self, x):
        with torch.no_grad():
            scale = torch.cat([p.flatten() for p in self.parameters()]).norm()
        return super().forward(x) / scale


class Inward(Usual):
    """Differentiates itself within its forward pass, by inputs and by weights."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            slopes = torch.autograd.grad(super().forward(x).square().sum(), [x, self.last.weight], create_graph=True)
            (plain,) = torch.autograd.grad(self.first(x).square().sum(), self.first.weight)
        return super().forward(x) + slopes[0].square().mean() + slopes[1].square().mean() + plain.mean()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Custom(Usual):
    def forward(self, x):
        return self.last(self.first(x).tanh()) + Own.apply(self.first(x), self.last.weight)


def batches(dtype=torch.float64):
    drawn = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randn(BATCH, 6, generator=drawn).to(dtype), torch.randint(3, (BATCH,), generator=drawn)


def make_plan(network, method=None, *, batch_size=BATCH, lr=LR, **options):
    return prepare(
        method or fedavg(), network, work=Work(batch_size=batch_size, epochs=1), optimizer=SGD(lr=lr, **options)
    )


def take_steps(plan):
    """Return losses, entries and the kind of steps."""
    job = client_init(plan, init_client(plan), init_server(plan), planned_steps=STEPS)
    losses = []
    with deferred_steps(plan, job, client_step_) as step:
        for x, y in batches(plan.dtype):
            job, loss = step(plan, job, x, y, torch.tensor(0))
            losses.append(loss)
    _, update = client_final(plan, job)
    assert (update.steps, update.weight) == (STEPS, STEPS * BATCH)
    return torch.stack(losses), update.shared, step


def train_plainly(network, lr=LR):
    sgd, losses = torch.optim.SGD(network.parameters(), lr=lr), []
    for x, y in batches():
        sgd.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        sgd.step()
        losses.append(loss.detach())
    return torch.stack(losses), network.state_dict()


@pytest.mark.parametrize("kind", [Usual, Repeated, Twice, Penalized, Watched, Inward, Custom])
def test_steps_equal_those_of_torchs_optimizer(settled, kind):
    torch.manual_seed(0)
    network = kind().double()
    losses, state, step = take_steps(make_plan(copy.deepcopy(network)))
    assert step is not client_step_
    expected_losses, expected = train_plainly(network)
    assert (losses - expected_losses).abs().max() <= 1e-11
    for name, tensor in expected.items():
        assert (state[name].double() - tensor.double()).abs().max() <= 1e-11, name
    if kind is Usual:  # of each layer three times what is held, then the rest
        assert sorted(settled) == sorted([3 * BATCH] * 6 + [2 * BATCH] * 2)


def test_products_by_onednn_equal_those_of_float64():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 2**13), nn.ReLU(), nn.Linear(2**13, 3))
    plan = make_plan(copy.deepcopy(network), lr=0.001)
    set_products(plan.module, {"0": ALONE, "2": ALONE})
    losses, state, _ = take_steps(plan)
    expected_losses, expected = train_plainly(network.double(), lr=0.001)
    assert (losses - expected_losses).abs().max() <= 1e-5
    for name, tensor in expected.items():
        assert (state[name] - tensor).abs().max() <= 1e-5, name


def test_steps_repeat_bit_for_bit():
    plan = make_plan(Usual())
    (one, first, _), (other, second, _) = take_steps(plan), take_steps(plan)
    assert torch.equal(one, other)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9}, {"weight_decay": 0.1}, {"batch_size": FEW + 1}, {"batch_size": None},
        {"method": fedprox(mu=0.1)}, {"method": agc(clip=0.1)},
    ],
    ids=["momentum", "weight decay", "larger batches", "full batches", "fedprox", "agc"],
)  # fmt: skip
def test_updates_are_held_back_only_where_nothing_else_reads_gradients(options):
    plan = make_plan(Usual(), **options)
    job = client_init(plan, init_client(plan), init_server(plan), planned_steps=STEPS)
    with deferred_steps(plan, job, client_step_) as step:
        assert step is client_step_


def test_small_layers_are_updated_at_every_step(monkeypatch):
    monkeypatch.setattr(deferral, "LEAST", 6 * WIDE + 1)
    plan = make_plan(Usual())
    with deferred_steps(plan, client_init(plan, init_client(plan), init_server(plan)), client_step_) as step:
        assert step is client_step_


def test_larger_batches_and_other_inputs_are_torchs():
    layer = nn.Linear(5, 4)
    weight, x = HeldUpdates(layer.weight.detach(), fast=False).expose(), torch.randn(3, FEW, 5)
    assert torch.equal(F.linear(x, weight, layer.bias), layer(x))
    assert torch.equal(F.linear(x[:0], weight), F.linear(x[:0], layer.weight))
    with pytest.raises(RuntimeError, match="same dtype"):
        F.linear(x[0].double(), weight)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.linear(x[0, :, 1:], weight)
