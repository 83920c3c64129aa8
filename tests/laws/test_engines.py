"""Law 1: every engine equals the loop, and repeats itself bit for bit."""

import torch
from torch import nn

from fedshift.base.state import equal
from fedshift.core.work import Work


def distance(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def test_every_engine_equals_the_loop_over_rounds_in_float64(trial, method, engine):
    both = {"moments": ("loaded", "trained"), "evaluate_every": 3}
    reference, other = trial(method, "sequential", **both), trial(method, engine, **both)
    for _ in range(3):
        expected, found = reference.advance(), other.advance()
        places = [[(row["client"], row["model"], row["moment"]) for row in done.rows] for done in (expected, found)]
        assert places[0] == places[1]
        for row, same in zip(expected.rows, found.rows, strict=True):
            assert abs(row["loss_sum"] - same["loss_sum"]) <= 1e-9
    assert [row["moment"] for row in found.rows if row["split"] == "test"].count("trained") == 3
    assert distance(reference.tensors()[0], other.tensors()[0]) <= 1e-9
    assert reference.tensors()[1] == other.tensors()[1]


def test_every_engine_equals_the_loop_for_one_step_in_float32(trial, method, engine):
    def network(shape, classes):
        return nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, classes))

    reference, other = (
        trial(method, name, model=network, work=Work(batch_size=8, batches=1)) for name in ("sequential", engine)
    )
    reference.advance()
    other.advance()
    assert reference.plan.dtype == torch.float32
    assert distance(reference.tensors()[0], other.tensors()[0]) <= 1e-4


def test_every_engine_repeats_itself_bit_for_bit(trial, method, engine):
    first, second = trial(method, engine), trial(method, engine)
    for _ in range(2):
        first.advance()
        second.advance()
    assert equal(first.tensors()[0], second.tensors()[0])


def test_training_moves_the_model_and_the_seed_matters(trial, method, engine):
    first, second = trial(method, engine), trial(method, engine, seed=4)
    before = first.plan.initial["stem.weight"]
    first.advance()
    second.advance()
    name = first.data.names[0]
    assert not torch.equal(first.state_of(name)["stem.weight"], before)
    assert not torch.equal(first.state_of(name)["stem.weight"], second.state_of(name)["stem.weight"])
    assert torch.equal(first.state_of(name)["scale"], first.plan.initial["scale"])
