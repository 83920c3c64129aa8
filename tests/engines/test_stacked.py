"""The stacked engine: lanes in chunks, what they share, and what torch.vmap cannot run."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.loss import LOSSES
from fedshift.core.means import StreamingMean, weighted_mean
from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.rule import Rule
from fedshift.core.schedule import Cosine
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.augmentation import AUGMENTATIONS
from fedshift.engines import stacked, stepper
from fedshift.engines.engine import Diverged, measure_activations
from fedshift.engines.stacked import Stacked, defer
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.agc import agc
from fedshift.methods.ditto import ditto
from fedshift.methods.fedadam import fedadam
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.median import median
from fedshift.methods.partialfed_adaptive import partialfed_adaptive
from fedshift.methods.scaffold import scaffold
from fedshift.methods.silobn import silobn
from fedshift.methods.single import single
from fedshift.utils.errors import UsageError
from fedshift.utils.state import clone, is_equal

ONE = {"work": Work(batch_size=8, batches=1)}


def network(shape, classes):
    torch.manual_seed(2)
    layers = (
        nn.Conv2d(shape[0], 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64, classes),
    )
    return nn.Sequential(*layers).double()


def clients(sizes):
    rng = np.random.default_rng(0)
    made = {}
    for number, size in enumerate(sizes):
        x, y = rng.integers(0, 256, (size, 3, 6, 6), dtype=np.uint8), np.arange(size) % 3
        made[f"c{number}"] = (x, y, x, y)
    return federation(made)


def trial(engine, method=None, model=network, sizes=(21, 16, 9, 16, 33), **changes):
    settings = {"rounds": 5, "work": Work(batch_size=8, epochs=1), "optimizer": SGD(lr=0.05), "evaluate_every": 5}
    data = clients(sizes)
    return Trial(method or fedbn(), model, data, Settings(**{**settings, "engine": engine, **changes}), 3)


def assert_equal_rounds(one, other, rounds=3):
    for _ in range(rounds):
        one.advance()
        other.advance()
    expected, found = one.to_tensors()[0], other.to_tensors()[0]
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (tensor.double() - found[name].double()).abs().max() <= 1e-9, name


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (fedbn(), {"optimizer": SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)}),
        (fedbn(), {"optimizer": SGD(lr=0.05, momentum=0.9, keep=True)}),
        (fedbn(), {"optimizer": AdamW(lr=0.01, keep=True)}),
        (agc(fedavg(), clip=0.05), {"optimizer": SGD(lr=0.05, momentum=0.9)}),
        (scaffold(), {"participation": 3}),
        (ditto(), {"optimizer": SGD(lr=0.05, momentum=0.9)}),
        (partialfed_adaptive(), {"optimizer": AdamW(lr=0.01)}),
        (fedbn(), {"work": Work(batch_size=4, batches=3)}),
        (fedbn(), {"work": Work(batch_size=None, epochs=2)}),
        (fedbn(), {"augment": AUGMENTATIONS.parse("flip(), rotate(degrees=40), crop(padding=1)")}),
        (fedbn(), {"loss": LOSSES.parse("focal(weights='balanced')")}),
    ],
    ids=["nesterov", "momentum kept", "adamw kept", "agc", "scaffold sampled", "ditto", "partialfed", "groups",
         "full batch", "augmented", "focal"],
)  # fmt: skip
def test_it_equals_clients_one_by_one_whatever_the_settings(method, changes):
    assert_equal_rounds(trial("sequential", method, **changes), trial("stacked", method, **changes))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_may_go_in_chunks(lanes, monkeypatch):
    running = trial("stacked")
    held = sum(running.plan.initial[name].nbytes for name in running.plan.trained)
    monkeypatch.setattr(stacked, "CACHE", lanes * held)
    assert stacked.count_lanes(running.plan, running.train, 5) == lanes
    assert_equal_rounds(trial("sequential"), trial("stacked"))


def test_activations_bound_the_lanes_too(monkeypatch):
    running = trial("stacked", fedavg())
    # Of one sample, in float64: five layers of 64 values (4 x 4 x 4, then flat) and 3 scores.
    assert measure_activations(running.plan, running.train) == 8 * (5 * 64 + 3)
    monkeypatch.setattr(stacked, "ACTIVATIONS", 2 * 8 * 8 * (5 * 64 + 3))
    assert trial("stacked", fedavg()).engine.width == 2
    assert_equal_rounds(trial("sequential", fedavg()), trial("stacked", fedavg()))


@pytest.mark.parametrize("sizes", [(16,), (16, 16)], ids=["alone", "two"])
def test_what_the_server_holds_is_not_written_to(sizes):
    running = trial("stacked", fedavg(), sizes=sizes)
    before, held = clone(running.server.shared), running.server.shared
    updates = [trained.update for _, trained in running.engine.train(running.server, dict(running.clients))]
    assert is_equal(held, before)
    assert not any(is_equal(update.shared, before) for update in updates)


def test_a_client_keeps_no_memory_of_the_others():
    running = trial("stacked", single(), participation=3)  # if all take part, one array holds all, and nothing else
    running.advance()
    for client in running.clients.values():
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in client.personal.values())


def test_a_network_that_vmap_cannot_run_is_refused_saying_why():
    class Looking(nn.Module):
        def __init__(self, shape, classes):
            super().__init__()
            self.layer = nn.Linear(108, classes)

        def forward(self, x):
            return self.layer(x.flatten(1)) * (2 if x.mean() > 0 else 1)

    with pytest.raises(UsageError, match=r"the stacked engine cannot run fedavg on this model \(torch.vmap: .+"):
        trial("stacked", fedavg(), Looking)
    trial("sequential", fedavg(), Looking).advance()


@pytest.mark.parametrize("method", [fedavg(), fedbn(), agc(fedavg(), clip=0.05)], ids=lambda method: method.name)
def test_a_sum_of_uploads_holds_exactly_what_the_scope_sends(method):
    running = trial("stacked", method)
    plan, server, clients = running.plan, running.server, dict(running.clients)
    apart, together = (Stacked(plan, running.train, 3, separate_uploads=choice) for choice in (True, False))
    expected, found = (dict(engine.train(server, clients)) for engine in (apart, together))
    assert expected.keys() == found.keys()
    sums = list({id(result.summed): result.summed for result in found.values()}.values())
    whole = StreamingMean()
    for part in sums:
        assert part.nbytes == sum(plan.initial[name].nbytes for name in plan.sent)
        whole.merge(part)
    mean = whole.result()
    assert mean.keys() == plan.sent
    states, weights = zip(*((each.update.shared, each.update.weight) for each in expected.values()), strict=True)
    for name, tensor in weighted_mean(states, weights).items():
        assert (tensor.double() - mean[name].double()).abs().max() <= 1e-12
    for name, result in found.items():
        alone = expected[name]
        assert not result.update.shared
        assert (result.update.weight, result.update.steps) == (alone.update.weight, alone.update.steps)
        assert is_equal(result.client.personal, alone.client.personal)
        assert result.client.steps == alone.client.steps
        assert abs(result.loss_sum - alone.loss_sum) <= 1e-9


def test_chunks_go_on_several_threads_to_the_same_model():
    before = torch.get_num_threads()
    one, other = trial("stacked"), trial("stacked")
    try:
        for _ in range(3):
            torch.set_num_threads(1)
            one.advance()
            torch.set_num_threads(3)
            other.advance()
    finally:
        torch.set_num_threads(before)
    for name, tensor in one.to_tensors()[0].items():
        assert (tensor.double() - other.to_tensors()[0][name].double()).abs().max() <= 1e-12, name


class Decay(Rule):
    """Adds a multiple of the parameters' squares to the loss, as large as the learning rate where ``paced``."""

    def __init__(self, paced=False):
        self.paced = paced

    def loss(self, loss, step):
        strength = 2 * step.lr if self.paced else 0.1
        return loss + strength * sum(tensor.square().sum() for tensor in step.params.values())


@pytest.mark.parametrize("method", [fedavg(), fedavg().with_rule(Decay(paced=True))], ids=["plain", "rule"])
def test_steps_that_all_lanes_take_alike_are_recorded_once_whatever_the_rate(method, monkeypatch):
    made, sizes, settings = [], (20, 20, 20), {"optimizer": SGD(lr=0.1, schedule=Cosine(rounds=4))}

    class Counted(stepper.Tape):
        def __init__(self, function, inputs, **options):
            made.append(inputs[2].shape[:2])
            super().__init__(function, inputs, **options)

    monkeypatch.setattr(stepper, "Tape", Counted)
    one, other = (trial(engine, method, sizes=sizes, **settings) for engine in ("sequential", "stacked"))
    made.clear()
    assert_equal_rounds(one, other)
    assert made == [(3, 8), (3, 4)]  # two full batches, then four samples: of every round


def test_what_the_server_holds_is_not_written_to_where_updates_are_deferred():
    running = trial("stacked", fedbn(), wide(), **{**FEW, **ONE})
    before, held = clone(running.server.shared), running.server.shared
    running.advance()
    assert is_equal(held, before)
    assert not is_equal(running.server.shared, before)


@pytest.mark.parametrize("layer", [nn.Identity(), nn.ReLU(inplace=True)], ids=["reading", "writing"])
def test_batches_of_all_samples_are_gathered_once_unless_they_are_written_to(layer, monkeypatch):
    def floats(sizes):
        made = {}
        for number, size in enumerate(sizes):
            x, y = np.random.default_rng(number).normal(size=(size, 12)), np.arange(size) % 3
            made[f"c{number}"] = (x, y, x, y)
        return federation(made)

    def plain(shape, classes):
        torch.manual_seed(5)
        return nn.Sequential(layer, nn.Linear(*shape, classes)).double()

    gathered = []
    gather = stacked._gather_lanes
    monkeypatch.setattr(stacked, "_gather_lanes", lambda *given: gathered.append(1) or gather(*given))
    settings = {"rounds": 9, "work": Work(batch_size=None, epochs=1), "optimizer": SGD(lr=0.05)}
    one, other = (
        Trial(fedavg(), plain, floats((6, 6)), Settings(**settings, engine=engine), 3)
        for engine in ("sequential", "stacked")
    )
    assert_equal_rounds(one, other)
    assert len(gathered) == 1
    for running in (one, other):
        running.train["c1"].x.mul_(2)
    assert_equal_rounds(one, other, rounds=1)


FEW = {"work": Work(batch_size=4, epochs=2), "sizes": (18, 18, 18)}


def wide(*, middle=(), bias=True):
    """Two layers of 34,560 and 102,400 weights, with an odd one of 960."""

    def make(shape, classes):
        torch.manual_seed(6)
        first = nn.Linear(108, 320, bias=bias)
        layers = nn.Flatten(), first, nn.BatchNorm1d(320), nn.Tanh(), *middle, nn.Linear(320, 320), nn.Dropout(0.2)
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(320, classes)).double()

    return make


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "model", "changes", "deferred"),
    [
        (fedavg(), wide(), {}, {"1.weight", "4.weight"}),
        (fedbn(), wide(bias=False), {"participation": 2}, {"1.weight", "4.weight"}),
        (silobn(), wide(), {"augment": AUGMENTATIONS.parse("flip(), crop(padding=1)")}, {"1.weight", "4.weight"}),
        (fedadam(), wide(), {"work": Work(batch_size=17, batches=1)}, {"1.weight", "4.weight", "7.weight"}),
        (fedavg(), wide(), {"work": Work(batch_size=4, epochs=5)}, {"4.weight"}),  # 90 rows cost more than the first
        (fedavg(), wide(), {"sizes": (18, 13, 18)}, set()),
        (fedavg(), wide(), {"sizes": (16, 12, 16), "work": Work(batch_size=4, steps=2)}, set()),
        (
            fedavg(weighting="used"),
            wide(),
            {"sizes": (16, 12, 16), "work": Work(batch_size=4, steps=2)},
            {"1.weight", "4.weight"},
        ),
    ],
    ids=[
        "fedavg",
        "fedbn sampled",
        "silobn augmented",
        "fedadam one step",
        "many rows",
        "unequal clients",
        "unequal weights",
        "equal weights",
    ],
)
def test_lanes_defer_updates_of_large_layers(method, model, changes, deferred, monkeypatch):
    seen = []
    monkeypatch.setattr(stacked, "defer", lambda params, names, rows: seen.append(names) or defer(params, names, rows))
    one, other = (trial(engine, method, model, **{**FEW, **changes}) for engine in ("sequential", "stacked"))
    seen.clear()  # those of trials
    assert_equal_rounds(one, other)
    assert seen
    assert all(names == deferred for names in seen)


class Twice(nn.Module):
    """Calls a layer twice, another one on sequences, and reads the weight of a third."""

    def __init__(self, shape, classes):
        super().__init__()
        torch.manual_seed(7)
        self.twice, self.sequence, self.read = (nn.Linear(size, 320).double() for size in (320, 36, 320))
        self.first, self.last = nn.Linear(108, 320).double(), nn.Linear(320, classes).double()

    def forward(self, x):
        z = self.twice(self.twice(self.first(x.flatten(1)).tanh()).tanh())
        z = z + self.sequence(x.flatten(2)).mean(1) + self.read.weight.mean(0)
        return self.last(self.read(z))


@pytest.mark.slow
def test_layers_that_are_no_single_product_defer_nothing():
    one, other = (trial(engine, fedavg(), Twice, **FEW) for engine in ("sequential", "stacked"))
    assert other.engine._deferrable == {"first.weight"}
    assert_equal_rounds(one, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": SGD(lr=0.1, momentum=0.9)},
        {"optimizer": AdamW(lr=0.01)},
        {"work": Work(batch_size=17, epochs=1), "sizes": (36, 36)},
    ],
    ids=["momentum", "adamw", "large batches"],
)
def test_only_small_steps_of_plain_sgd_defer_updates(changes):
    assert not trial("stacked", fedavg(), wide(), **{**FEW, **changes}).engine._deferrable
    for method in (scaffold(), median(), single(), agc(fedavg(), clip=0.05)):
        assert not trial("stacked", method, wide(), **FEW).engine._deferrable


def test_equal_values_stay_exactly_equal_where_updates_are_deferred():
    running = trial("stacked", fedavg(), lambda *size: wide()(*size).float(), **FEW, optimizer=SGD(lr=0.0))
    before = clone(running.server.shared)
    assert running.engine._deferrable
    running.advance()
    for name in running.engine._deferrable:
        assert torch.equal(running.server.shared[name], before[name])


def test_a_client_that_diverges_is_named_where_updates_are_deferred():
    running = trial("stacked", fedavg(), lambda *size: wide()(*size).float(), **FEW, optimizer=SGD(lr=1e29))
    assert running.engine._deferrable
    with pytest.raises(Diverged, match=r"client 'c0', round 1, step \d of 10"):
        running.advance()
