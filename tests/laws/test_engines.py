"""Law 1: every engine equals the loop, also over pairs (:mod:`tests.laws.test_pairs`), and repeats itself."""

import pytest
import torch
from torch import nn

from fedshift.core.work import Work
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbabu import fedbabu
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fednova import fednova
from fedshift.methods.fedrep import fedrep
from fedshift.utils.state import is_equal
from tests.laws.conftest import METHODS, by_name
from tests.laws.course import ROUNDS, make_trial
from tests.methods.plain import advance

TWO = ("sequential", "stacked")
POOLED = [method for method in METHODS if method.pooled]


def distance(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["pool", "ray"])
def test_other_processes_repeat_the_loop_bit_for_bit(course, method, engine):
    reference, other = course(method), course(method, engine)
    for number in range(1, ROUNDS + 1):
        expected, found = reference[number], other[number]
        assert found.rows == expected.rows
        assert is_equal(found.tensors, expected.tensors)
        assert found.facts == expected.facts
    assert [row["moment"] for row in found.rows if row["split"] == "test"].count("trained") == 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weighting", ["samples", "used", "uniform"])
@pytest.mark.parametrize("steps", [1, 2])
def test_every_engine_weighs_as_the_loop_where_it_sums_uploads(steps, weighting, other_engine):
    """Clients of unequal sizes take steps on batches of one size."""
    states = []
    for engine in ("sequential", other_engine):
        work = Work(batch_size=4, steps=steps)
        running = make_trial(fedbn(fedavg(weighting=weighting)), engine, work=work, moments=("loaded",))
        advance(running, rounds=2)
        running.close()
        states.append(running.to_tensors()[0])
    assert distance(*states) <= 1e-9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", [fedbn(), fedrep(), fednova(), ditto(epochs=1), fedbabu()], ids=by_name)
def test_every_engine_equals_the_loop_where_clients_take_equal_steps_over_unequal_passes(method, other_engine):
    """Five steps of clients with three, two and one batches a pass: rounds begin and end within passes."""
    states = []
    for engine in ("sequential", other_engine):
        running = make_trial(method, engine, work=Work(batch_size=8, steps=5))
        for number in range(1, 4):
            running.advance()
            assert set(running.clients.count_steps().values()) == {5 * number}
        running.close()
        states.append(running.to_tensors()[0])
    assert distance(*states) <= 1e-9


@pytest.mark.sampled(6)
def test_stacked_clients_equal_the_loop_for_one_step_in_float32(method):
    def network(shape, classes):
        return nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, classes))

    ends = [make_trial(method, engine, model=network, work=Work(batch_size=8, batches=1)) for engine in TWO]
    for running in ends:
        running.advance()
    assert ends[0].plan.dtype == torch.float32
    assert distance(*(running.to_tensors()[0] for running in ends)) <= 1e-4


@pytest.mark.parametrize("method", POOLED, ids=by_name)
def test_every_engine_repeats_pooled_training_bit_for_bit(trial, course, method, engine):
    """As it repeats federated training with clients in another order (:mod:`tests.laws.test_methods`)."""
    again = trial(method, engine)
    advance(again, rounds=2)
    assert is_equal(again.to_tensors()[0], course(method, engine)[2].tensors)


@pytest.mark.sampled(4)
def test_training_moves_the_model(course, method):
    running = course(method)
    initial, moved = running.plan.initial, running[1].states["a"]
    assert not torch.equal(moved["subnet.weight"], initial["subnet.weight"])
    assert torch.equal(moved["scale"], initial["scale"])


def assert_seed_matters(running, method, engine="sequential"):
    """From the same weights another seed leads elsewhere."""
    other = make_trial(method, engine)
    other.engine.seed += 1
    other.advance()
    assert not torch.equal(running[1].states["a"]["subnet.weight"], other.model_state("a")["subnet.weight"])


@pytest.mark.sampled(4)
def test_the_seed_matters_for_every_method(course, method):
    assert_seed_matters(course(method), method)


def test_the_seed_matters_for_every_engine(course, other_engine):
    assert_seed_matters(course(fedavg(), other_engine), fedavg(), other_engine)


def test_the_seed_draws_the_initial_weights():
    one, other = (make_trial(fedavg(), seed=seed).plan.initial for seed in (3, 4))
    assert not torch.equal(one["subnet.weight"], other["subnet.weight"])
