"""Batches, passes and groups: nothing lost, nothing repeated, FedMMB's Algorithm 1."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.core.work import AMOUNTS, Work, iterate_batches
from fedshift.utils.errors import UsageError


@given(samples=st.integers(1, 200), size=st.integers(1, 50), smallest=st.integers(1, 2))
def test_bounds_cover_every_sample_once(samples, size, smallest):
    bounds = Work(batch_size=size, epochs=1).batch_bounds(samples, smallest)
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == samples
    assert all(stop - start <= size + smallest - 1 for start, stop in bounds)
    if samples >= smallest and size >= smallest:
        assert all(stop - start >= smallest for start, stop in bounds)


def test_a_single_left_over_sample_joins_the_batch_before_it_only_where_it_must():
    assert Work(batch_size=4, epochs=1).batch_bounds(9) == ((0, 4), (4, 8), (8, 9))
    assert Work(batch_size=4, epochs=1).batch_bounds(9, smallest=2) == ((0, 4), (4, 9))


def test_groups_follow_fedmmbs_algorithm_1():
    # Ten batches a pass in groups of four: 4, 4, 2, then the next pass begins.
    work, done, groups = Work(batch_size=1, batches=4), 0, []
    for _ in range(6):
        steps = work.steps_of_round(done, 10)
        groups.append(list(steps))
        done = steps.stop
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]


@given(per_pass=st.integers(1, 12), count=st.integers(1, 5), kind=st.sampled_from(AMOUNTS))
def test_rounds_are_told_from_the_steps_that_were_done(per_pass, count, kind):
    work, done = Work(**{kind: count}), 0
    for number in range(20):
        assert work.rounds(done, per_pass) == number
        assert work.passes(number, per_pass) == -(-done // per_pass)
        done = work.steps_of_round(done, per_pass).stop


def test_an_amount_of_work_takes_the_place_of_another():
    assert Work(batch_size=4, steps=9).change({"batches": 2}) == Work(batch_size=4, batches=2)
    assert Work(epochs=2).change({"epochs": None, "steps": 3}) == Work(steps=3)
    assert Work(steps=9).change({"batch_size": None}) == Work(batch_size=None, steps=9)


@given(samples=st.integers(1, 40), size=st.integers(1, 9), passes=st.integers(1, 3))
def test_every_pass_uses_every_sample_once_in_a_new_order(samples, size, passes):
    work = Work(batch_size=size, epochs=passes)
    bounds = work.batch_bounds(samples)
    batches = iterate_batches(0, "c", samples, bounds, work.steps_of_round(0, len(bounds)))
    drawn = torch.cat([index for _, index in batches]).tolist()
    orders = [drawn[start : start + samples] for start in range(0, passes * samples, samples)]
    assert all(sorted(order) == list(range(samples)) for order in orders)
    if samples > 12 and passes > 1:
        assert orders[0] != orders[1]


def test_the_order_depends_on_seed_and_client_and_on_the_step_alone():
    bounds = Work(batch_size=5, epochs=1).batch_bounds(20)

    def draw(seed, client, steps):
        return {step: index.tolist() for step, index in iterate_batches(seed, client, 20, bounds, steps)}

    whole = draw(1, "a", range(8))
    assert draw(1, "a", range(3, 6)) == {step: whole[step] for step in (3, 4, 5)}
    assert draw(2, "a", range(8)) != whole
    assert draw(1, "b", range(8)) != whole


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Work(), "none of them: give exactly one of epochs, batches, steps"),
        (lambda: Work(epochs=1, batches=2), "epochs=1 and batches=2: give exactly one of epochs, batches, steps"),
        (lambda: Work(batches=1, steps=2), "batches=1 and steps=2: give exactly one"),
        (lambda: Work(steps=0), "steps=0: must be at least 1"),
        (lambda: Work(epochs=0), "epochs=0"),
        (lambda: Work(batches=-1), "batches=-1"),
        (lambda: Work(batch_size=0, epochs=1), "batch_size=0"),
    ],
)
def test_impossible_work_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_pass_of_one_batch_keeps_the_stored_order():
    for work in (Work(batch_size=None, epochs=2), Work(batch_size=20, batches=1)):
        bounds = work.batch_bounds(20)
        steps = list(iterate_batches(0, "c", 20, bounds, work.steps_of_round(3, len(bounds))))
        assert [number for number, _ in steps] == ([3, 4] if work.epochs else [3])
        assert all(index.tolist() == list(range(20)) for _, index in steps)


@pytest.mark.parametrize(
    ("work", "sizes", "smallest", "expected"),
    [
        (Work(batch_size=8, batches=1), (30, 5), 1, True),
        (Work(batch_size=8, batches=2), (30, 5), 1, False),
        (Work(batch_size=8, steps=1), (30, 5), 1, True),
        (Work(batch_size=8, steps=2), (8, 5), 1, False),
        (Work(batch_size=8, epochs=1), (8, 5), 1, True),
        (Work(batch_size=8, epochs=1), (9, 5), 1, False),
        (Work(batch_size=8, epochs=1), (9, 5), 2, True),
        (Work(batch_size=None, epochs=2), (9, 5), 1, False),
    ],
)
def test_a_round_is_one_step(work, sizes, smallest, expected):
    assert work.is_one_step(sizes, smallest) is expected
