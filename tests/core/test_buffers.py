"""Buffers by kind, against plain PyTorch: what no mean fits stays whole, and BatchNorm of one's own is BatchNorm."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from fedshift.core.buffers import describe_buffers
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.evaluation.policy import explain_inapplicable
from fedshift.evaluation.statistics_lag import may_lag
from fedshift.methods import METHODS
from fedshift.tasks import CLASSIFICATION
from fedshift.utils.errors import UsageError
from tests.methods.plain import SHARES, trial

X = torch.zeros(1, 1, 4, 4, dtype=torch.float64)


class Buffered(nn.Module):
    """A layer ``[B, 4] -> [B, 4]`` with buffers, each changed by ``update`` in training."""

    def __init__(self, update=None, call=None, **buffers):
        super().__init__()
        self.update, self.call = update, call
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        if self.update and self.training:
            self.update(self, x.detach())
        return self.call(self, x) if self.call else x


def normalize(function):
    """Return a layer that calls ``function`` of BatchNorm with its own statistics."""

    def call(layer, x):
        affine, statistics = (layer.scale, layer.shift), (layer.mu, layer.spread)
        first, last = (statistics, affine) if function is F.batch_norm else (affine, statistics)
        return function(x, *first, *last, layer.training, 0.1, 1e-5, *([False] if function is torch.batch_norm else []))

    layer = Buffered(call=call, mu=zeros(4), spread=torch.ones(4, dtype=torch.float64), seen=torch.tensor(0))
    layer.update = lambda layer, _: layer.seen.add_(1)
    layer.scale, layer.shift = nn.Parameter(torch.ones(4).double()), nn.Parameter(zeros(4))
    return layer


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def queue(layer, x):
    layer.rows[layer.at % 5] = x[0]
    layer.at += 1


def observe(layer, x):
    layer.low.copy_(torch.minimum(layer.low, x.min()))


def hide(layer):
    layer._non_persistent_buffers_set.update(layer._buffers)
    return layer


def network(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), layer, nn.ReLU(), nn.Linear(4, 3)).double()


def recalled():
    """A network whose outputs depend on its queue."""
    layer = Buffered(queue, lambda layer, x: x + layer.rows.mean(dim=0), rows=zeros(5, 4), at=torch.tensor([0]))
    return network(layer)


def spectral(*_):
    torch.manual_seed(0)
    return network(nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4)))


def plan_of(method, model):
    return prepare(METHODS.parse(method), model, optimizer=SGD(lr=0.1), sample=X)


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (normalize(F.batch_norm), {"mu": "mean", "spread": "variance", "seen": "counter"}),
        (normalize(torch.batch_norm), {"mu": "mean", "spread": "variance", "seen": "counter"}),
        (Buffered(mask=torch.tensor([-torch.inf, torch.nan])), {"mask": "constant"}),
        (Buffered(odd=torch.ones(2) > 0), {"odd": "constant"}),
        (Buffered(queue, rows=zeros(5, 4), at=torch.tensor([0])), {"rows": "state", "at": "state"}),
        (Buffered(observe, low=torch.tensor(torch.inf).double()), {"low": "state"}),
        (Buffered(lambda layer, x: layer.n.add_(1.0), n=zeros()), {"n": "state"}),
        (hide(Buffered(lambda layer, x: layer.n.add_(1.0), n=zeros())), {"n": "hidden"}),
        (Buffered(lambda layer, x: layer.last.copy_(x.mean(0)), last=zeros(4)), {"last": "state"}),
        (Buffered(lambda layer, x: layer.center.lerp_(x.mean(0), 0.01), center=zeros(4)), {"center": "average"}),
        (Buffered(lambda layer, x: layer.order.copy_(layer.order.flip(0)), order=torch.arange(4)), {"order": "state"}),
    ],
)  # fmt: skip
def test_a_buffer_is_what_training_shows(layer, kinds):
    plan = plan_of("fedavg", network(layer))
    assert {entry.name[2:]: entry.kind for entry in plan.entries if entry.is_buffer} == kinds
    assert plan.has_global
    assert not plan.personalizes
    assert plan.personal == {f"2.{name}" for name, kind in kinds.items() if kind in ("state", "hidden")}
    assert plan.sent == {entry.name for entry in plan.entries if entry.kind != "hidden"}
    stays = any("each client keeps its state" in text for text in describe_buffers(plan))
    assert stays == ("state" in kinds.values())


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "median", "fedap", "dp(noise_multiplier=0.1)", "fedpac"])
def test_vectors_of_spectral_norm_belong_to_the_weight_of_every_model(method):
    running = trial(METHODS.parse(method), spectral)
    for _ in range(3):
        running.advance()
    for state in map(running.model_state, SHARES):
        model = copy.deepcopy(running.plan.module).eval()
        model.load_state_dict(state)
        assert torch.linalg.matrix_norm(model[2][0].weight, 2).item() == pytest.approx(1, abs=1e-9)


NAMES = dict(zip(nn.BatchNorm1d(1).state_dict(), ("scale", "shift", "mu", "spread", "seen"), strict=True))
TREATED = [
    (method, "sequential", F.batch_norm) for method in ("silobn", "fixbn", "fedap", "greg", "partialfed_adaptive")
]


@pytest.mark.parametrize(("method", "engine", "function"), [("fedbn", "stacked", torch.batch_norm), *TREATED])
def test_batch_norm_of_ones_own_is_treated_as_torchs(method, engine, function):
    makes = (lambda: nn.BatchNorm1d(4), lambda: normalize(function))
    runs = [
        trial(METHODS.parse(method), lambda *_, make=make: network(make()), engine=engine, rounds=4) for make in makes
    ]
    for _ in range(3):
        for running in runs:
            running.advance()
    for client in SHARES:
        wanted, state = (running.model_state(client) for running in runs)
        named = {name: name.replace(name[2:], NAMES[name[2:]]) if name[0] == "2" else name for name in wanted}
        assert all(torch.allclose(state[named[name]], tensor, atol=1e-12) for name, tensor in wanted.items())
    assert {named[name] for name in runs[0].plan.personal} == runs[1].plan.personal


class Foreign(Buffered):
    def __init__(self):
        super().__init__(running_mean=zeros(4), running_var=zeros(4) + 1)


@pytest.mark.parametrize("method", ["gn", "ln", "hbn"])
def test_methods_that_replace_batch_norm_refuse_another_by_name(method):
    beside = nn.Sequential(network(normalize(F.batch_norm)), nn.BatchNorm1d(3)).double()
    with pytest.raises(UsageError, match=r"its layer '0\.2' \(Buffered\) calls batch_norm"):
        plan_of(method, beside)
    with pytest.raises(UsageError, match="has none of torch's, but layer '2'"):
        plan_of(method, network(Foreign()))


CONSTANTS = {
    "mask": torch.tensor([0.0, -torch.inf]), "big": torch.tensor([6364136223846793005]), "odd": torch.tensor([True]),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "single", "dp", "apfl", "fedcac", "scaffold", "median", "ditto"])
def test_infinite_and_large_constants_diverge_nowhere(method, engine):
    running = trial(METHODS.parse(method), lambda *_: network(Buffered(**CONSTANTS)), engine=engine)
    for _ in range(2):
        running.advance()
    for state in map(running.model_state, SHARES):
        assert all(torch.equal(state[f"2.{name}"], value.to(state[f"2.{name}"])) for name, value in CONSTANTS.items())


@pytest.mark.parametrize("method", ["dp", "median", "krum", "trimmed_mean"])
def test_state_of_single_clients_is_refused_where_they_are_protected(method):
    with pytest.raises(UsageError, match=r"would take '2\.rows', a buffer of a Buffered, from one client"):
        plan_of(method, recalled())
    plan_of(method, network(Buffered(mask=torch.tensor([-torch.inf]))))


def frozen(*_):
    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    layer = Frozen(4)
    layer.running_var.fill_(4.0)
    return network(layer)


def test_frozen_statistics_are_said_to_be_frozen_and_never_estimated():
    assert not list(describe_buffers(plan_of("fedavg", frozen())))
    running = trial(METHODS.parse("fedbn"), frozen)
    running.advance()
    assert "(2 is frozen): there it differs" in next(describe_buffers(running.plan))
    assert not may_lag(running.plan, running.server)
    assert "frozen" in explain_inapplicable([running.plan], ["reestimate"], CLASSIFICATION)[0]
    assert torch.equal(running.model_state("a")["2.running_var"], torch.full((4,), 4.0).double())


class Root(nn.Linear):
    """A layer that normalizes what its own layers make."""

    def __init__(self):
        super().__init__(4, 4)
        self.inner = nn.Dropout(0.5)
        self.register_buffer("mu", zeros(4))
        self.register_buffer("spread", zeros(4) + 1)

    def forward(self, x):
        return F.batch_norm(self.inner(super().forward(x)), self.mu, self.spread, training=self.training)


def test_freezing_statistics_does_not_freeze_what_stands_beside_them():
    plan = plan_of("fedbn", network(Root()))
    assert plan.personal == {"2.mu", "2.spread"}
    with pytest.raises(UsageError, match=r"'2\.mu' belongs to a Root, which contains layers that would be frozen"):
        plan_of("fixbn", network(Root()))
