"""Which library forms the products of large layers: the one measured as faster, the same throughout a trial."""

import shutil

import pytest
import torch
from torch import nn

from fedshift.core.network import forward
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.engines import cost_model
from fedshift.engines.cost_model import PAIRS, choose_products, count_rows, time_products
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.nn import linear
from fedshift.nn.linear import ALONE, LANES, FastLinear, list_products
from fedshift.results.checkpoint import load_checkpoint
from fedshift.utils.execution.shared_memory import pickle_without_tensors, unpickle_with_tensors
from fedshift.utils.state import is_equal

INPUTS, WIDE = 192, 200
KINDS = [*ALONE, *LANES]


def network(shape=(3, 8, 8), classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, WIDE), nn.Tanh(), nn.Linear(WIDE, classes))


class Clock:
    """Seconds that torch's library takes for each product, where oneDNN takes one; ``timed``: how many were."""

    def __init__(self):
        self.usual, self.timed = {}, 0

    def __call__(self, work):
        self.timed += 1
        kind, fast = work
        return 1.0 if fast else self.usual.get(kind, 1.0)


def round_once(x, w, b):
    """A product that stands in for oneDNN's, of other bits than torch's."""
    made = x.double() @ w.double().t()
    return (made if b is None else made + b).float()


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """The clock that decides, in place of this machine's, with a cache that holds nothing yet."""
    made = Clock()
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_model, "SPAN", 0)
    monkeypatch.setattr(cost_model, "make_products", lambda *_: {kind: ((kind, False), (kind, True)) for kind in KINDS})
    monkeypatch.setattr(cost_model, "_time_processor", made)
    monkeypatch.setattr(linear, "is_available", lambda: True)
    monkeypatch.setattr(linear, "multiply_by_onednn", round_once)
    time_products.cache_clear()
    yield made
    time_products.cache_clear()


def plan(module=None, batch_size=32, sample=(1, INPUTS), **changes):
    made = prepare(
        fedavg(), module or network(), optimizer=SGD(lr=0.1), work=Work(batch_size=batch_size, epochs=1), **changes
    )
    with count_rows(made.module) as rows:
        forward(made, made.initial, torch.zeros(sample, dtype=made.dtype))
    choose_products(made, rows)
    return made


def test_the_faster_library_forms_each_product_and_torchs_own_where_they_are_close(clock):
    clock.usual = dict(zip(KINDS, (2.0, 1.09, 1.11, 0.5, 1.0, 3.0), strict=True))
    assert list_products(plan().module) == {"1": [KINDS[0], KINDS[2], KINDS[5]]}


@pytest.mark.parametrize(("gain", "chosen"), [(2.0, KINDS), (1.0, [])])
def test_work_beside_it_that_slows_single_products_does_not_decide(clock, monkeypatch, gain, chosen):
    clock.usual = dict.fromkeys(KINDS, gain)
    monkeypatch.setattr(cost_model, "PAIRS", 20)
    slow = [20, 3, 1, 7, 2]  # four of five runs are slowed, each by another factor
    monkeypatch.setattr(cost_model, "_time_processor", lambda work: clock(work) * slow[clock.timed % 5])
    assert list_products(plan().module) == {"1": chosen}


def test_timing_goes_on_until_the_shortest_time_has_come_twice_or_the_time_is_up(clock, monkeypatch):
    monkeypatch.setattr(cost_model, "_time_processor", lambda work: clock(work) * 1.5**-clock.timed)
    monkeypatch.setattr(cost_model, "LONGEST", 0)
    plan()
    least = clock.timed
    assert least == 2 * len(KINDS) * (PAIRS + 1)
    monkeypatch.setattr(cost_model, "LONGEST", 60)
    clock.timed = 0
    alone = 2 * len(KINDS)
    monkeypatch.setattr(cost_model, "_time_processor", lambda work: clock(work) * max(1, 20 - clock.timed // alone))
    plan(batch_size=8)
    assert clock.timed == alone * 21  # the shortest comes in the 20th turn


def test_a_shape_is_timed_once_and_remembered(clock):
    clock.usual = dict.fromkeys(KINDS, 2.0)
    chosen = list_products(plan().module)
    once = 2 * len(KINDS) * (PAIRS + 1)
    assert clock.timed == once
    clock.usual = {}
    time_products.cache_clear()  # as in another process
    assert list_products(plan().module) == chosen
    assert clock.timed == once
    assert list_products(plan(batch_size=8).module) == {"1": []}
    assert clock.timed == 2 * once


def test_without_a_cache_a_process_decides_once(clock, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "file" / "below"))
    clock.usual = dict.fromkeys(KINDS, 2.0)
    chosen = list_products(plan().module)
    clock.usual = {}
    assert list_products(plan().module) == chosen == {"1": KINDS}


def test_the_choice_does_not_depend_on_threads(clock):
    clock.usual = dict.fromkeys(KINDS, 2.0)
    seen, before = [], torch.get_num_threads()
    time_one = cost_model._time_processor
    cost_model._time_processor = lambda work: seen.append(torch.get_num_threads()) or time_one(work)
    torch.set_num_threads(2)
    try:
        plan()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        cost_model._time_processor = time_one
    assert set(seen) == {1}


def test_only_large_layers_in_float32_on_the_cpu_are_timed(clock):
    plan(nn.Linear(INPUTS, 3))
    plan(network().double())
    plan(precision="bfloat16")
    elsewhere = prepare(fedavg(), network(), optimizer=SGD(lr=0.1))
    elsewhere.module.to("meta")
    choose_products(elsewhere, {"1": 1})
    assert not clock.timed
    plan()
    assert clock.timed


class Words(nn.Module):
    """A separate layer for each of seven words."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(INPUTS, WIDE)

    def forward(self, x):
        return self.layer(input=x).mean(1)


@pytest.mark.parametrize(
    ("module", "sample", "batch_size", "shape"),
    [
        (network(), (1, INPUTS), 32, (32, INPUTS, WIDE)),
        (network(), (1, INPUTS), None, (64, INPUTS, WIDE)),
        (network(), (1, INPUTS), 1, (1, INPUTS, WIDE)),
        (Words(), (1, 7, INPUTS), 4, (28, INPUTS, WIDE)),
        (nn.Linear(6000, 2000), (1, 6000), 16, (16, 375, 500)),
        (nn.Linear(6000, 2000), (1, 6000), 500, (250, 187, 125)),
    ],
    ids=["batch", "full batch", "one sample", "words", "wide", "large"],
)
def test_products_are_timed_in_the_shape_of_training_or_a_smaller_one(
    clock, monkeypatch, module, sample, batch_size, shape
):
    asked = []
    monkeypatch.setattr(cost_model, "time_products", lambda shape: asked.append(shape) or {})
    plan(module, batch_size, sample)
    assert asked == [shape]


def trial(engine):
    x, y = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(1)).numpy(), torch.arange(40).numpy() % 3
    data = federation({name: (x[k:30], y[k:30], x[30:], y[30:]) for k, name in enumerate("ab")})
    settings = {"work": Work(batch_size=8, epochs=1), "optimizer": SGD(lr=0.1), "evaluate_every": 9}
    return Trial(fedavg(), network, data, Settings(rounds=3, engine=engine, **settings), 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ["sequential", "stacked", "auto"])
@pytest.mark.parametrize("begun", [[], KINDS], ids=["torch", "oneDNN"])
def test_a_resumed_trial_keeps_its_libraries_whatever_is_faster_by_then(clock, tmp_path, engine, begun):
    clock.usual = dict.fromkeys(begun, 2.0)
    whole, broken = trial(engine), trial(engine)
    for _ in range(3):
        whole.advance()
    broken.advance()
    broken.save(tmp_path, "checkpoint.safetensors")
    shutil.rmtree(tmp_path / "cache")
    time_products.cache_clear()
    clock.usual = dict.fromkeys(set(KINDS).difference(begun), 2.0)
    other, resumed = trial(engine), trial(engine)
    assert list_products(other.plan.module) != list_products(whole.plan.module)
    other.advance()
    assert not is_equal(other.server.shared, broken.server.shared)
    resumed.restore(*load_checkpoint(tmp_path / "checkpoint.safetensors"), tmp_path)
    assert list_products(resumed.plan.module) == list_products(resumed.engine.plan.module) == {"1": begun}
    for _ in range(2):
        resumed.advance()
    assert is_equal(resumed.to_tensors()[0], whole.to_tensors()[0])
    assert resumed._facts() == whole._facts()


def test_an_engine_that_knew_other_libraries_is_made_anew(clock, tmp_path):
    begun = trial("stacked")
    begun.save(tmp_path, "checkpoint.safetensors")
    facts = load_checkpoint(tmp_path / "checkpoint.safetensors")
    same = trial("stacked")
    shutil.rmtree(tmp_path / "cache")
    time_products.cache_clear()
    clock.usual = dict.fromkeys(KINDS, 2.0)
    other = trial("stacked")
    for resumed, kept in ((same, True), (other, False)):
        before = resumed.engine, resumed.plan
        resumed.restore(*facts, tmp_path)
        assert (resumed.engine is before[0]) is (resumed.plan is before[1]) is kept
        assert resumed.engine.plan is resumed.plan


def test_a_worker_gets_the_choice_with_the_plan(clock):
    clock.usual = dict.fromkeys(LANES, 2.0)
    tensors, packed = pickle_without_tensors(plan())
    arrived = unpickle_with_tensors(packed, lambda number, dtype, shape: tensors[number])
    assert list_products(arrived.module) == {"1": [*LANES]}
    assert type(arrived.module[1]) is FastLinear


def test_works_take_turns_of_one_length_whatever_slows_them(monkeypatch):
    now, ran = [0.0], []
    monkeypatch.setattr(cost_model.time, "perf_counter", lambda: now[0])

    def work(name, seconds):
        def run():
            ran.append(name)
            now[0] += seconds * (10 if 0.5 < now[0] < 1.0 else 1)  # something else runs for half a second

        return run

    found = cost_model.time_in_turns({"short": work("short", 0.001), "long": work("long", 0.03)}, 5, 0.05)
    assert found == {"short": pytest.approx(0.001), "long": pytest.approx(0.03)}
    turns = ran[4:]  # two runs of each to see how long one takes
    assert turns == (["short"] * 50 + ["long"] * 2) * 5
