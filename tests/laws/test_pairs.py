"""Laws 1 and 2 over pairs of methods: every engine equals the loop in float64, and resumed rounds equal uninterrupted.

Pairs with ``fedavg`` are single methods. ``FEDSHIFT_LAWS`` names methods to pair with those of the catalog instead.
"""

from functools import partial

import pytest
from torch import nn

from fedshift.config.expressions import list_catalog
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.engines import ENGINES
from fedshift.methods import METHODS
from fedshift.utils.errors import UsageError
from fedshift.utils.state import clone, is_equal
from tests.laws.conftest import GIVEN, WITHOUT_BATCH_NORM, by_name
from tests.laws.course import make_trial
from tests.methods.plain import data

CATALOG = list_catalog("methods")
NAMES = sorted(CATALOG, key=lambda name: (name in WITHOUT_BATCH_NORM, name))
"""Methods that refuse this network stand last, composed on another method."""
PAIRS = [(outer, CATALOG[inner](WITHOUT_BATCH_NORM.get(inner))) for i, inner in enumerate(NAMES) for outer in NAMES[:i]]
PAIRS = [(outer, method) for outer in NAMES for method in GIVEN] or PAIRS


DATA = data({"a": 7, "b": 4, "c": 4})
"""Clients, two of which have batches of the same sizes."""


def network(shape, classes):
    """Layers whose state, draws and dependence on the batch tell engines apart."""
    layers = nn.Conv2d(shape[0], 2, 3, bias=False), nn.BatchNorm2d(2), nn.Tanh(), nn.Dropout(0.3), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, classes)).double()


def linear(shape, classes):
    """A layer that treats samples alone, as the identity engine needs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes)).double()


def begin(method, batch_size, *, engine="sequential", model=network):
    return make_trial(
        method, engine, data=DATA, model=model, work=Work(batch_size=batch_size, epochs=1), rounds=2, evaluate_every=2,
        optimizer=SGD(lr=0.01, weight_decay=0.1 if batch_size else 0.0), moments=("loaded",),
    )  # fmt: skip


def advance(running):
    """The states after each of two rounds, and the measurements; the second round is run again from the first's end."""
    running.advance()
    first = clone(running.to_tensors()[0]), running.to_tensors()[1]
    rows = running.advance().rows
    second = clone(running.to_tensors()[0]), running.to_tensors()[1]
    running.restore(*first)
    assert running.advance().rows == rows
    assert is_equal(running.to_tensors()[0], second[0])
    return first, second, rows


def assert_engines_agree(start, running, tolerance=1e-9):
    """``start`` begins a trial on an engine, as ``running`` on the sequential one."""
    *ends, rows = advance(running)
    for engine in ("stacked", "identity"):
        if engine == "identity" and ENGINES[engine].refusal(running.plan, running.train):
            continue
        *others, other_rows = advance(start(engine=engine))
        for (tensors, facts), (other_tensors, other_facts) in zip(ends, others, strict=True):
            assert facts == other_facts
            assert tensors.keys() == other_tensors.keys()
            for name, tensor in tensors.items():
                assert (tensor.double() - other_tensors[name].double()).abs().amax() <= tolerance, name
        for row, other in zip(rows, other_rows, strict=True):
            assert abs(row["loss_sum"] - other["loss_sum"]) <= tolerance


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("outer", "method"), PAIRS, ids=by_name)
def test_every_engine_equals_the_loop_and_resumes(outer, method):
    for batch_size, model in ((4, network), (None, network), (None, linear)):
        try:
            pair = CATALOG[outer](method)
            start = partial(begin, pair, batch_size, model=model)
            running = start()
        except UsageError:  # for a reason in the table of tests/methods/test_composition.py
            continue
        if model is network or not pair.rules:
            assert_engines_agree(start, running)


@pytest.mark.parametrize("mix", ["fedap", "fedcac", "fedpac"])
def test_lanes_that_restart_from_mixes_keep_their_steps_and_what_they_loaded(mix):
    start = partial(begin, METHODS.parse(f"fedala+{mix}+fedprox(mu=2.0)"), 4)
    assert_engines_agree(start, start())


@pytest.mark.parametrize("text", ["harmofl+gn", "feddg_elcfs+ln"])
def test_normalization_of_groups_runs_where_rules_differentiate_images(text):
    """Kernels are channels last, which ``torch.vmap`` cannot pass on to GroupNorm in a pass under ``torch.func``."""

    def model(shape, classes):
        return nn.Sequential(
            nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), *network(shape, classes)[2:]
        ).float()

    start = partial(begin, METHODS.parse(text), 4, model=model)
    assert_engines_agree(start, start(), tolerance=1e-5)
