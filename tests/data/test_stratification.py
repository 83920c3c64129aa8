"""The draw that takes the same share of every class."""

import numpy as np
import pytest

from fedshift.data.stratification import split_stratified
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream


def test_every_place_is_in_one_of_both_and_every_class_gives_its_share():
    y = np.random.default_rng(0).permutation(np.repeat([0, 3, 7], [50, 20, 5]))
    rest, drawn = split_stratified(y, 0.2, stream(0, "test", "a"))
    assert sorted([*rest, *drawn]) == list(range(75))
    assert list(rest) == sorted(rest)
    assert list(drawn) == sorted(drawn)
    assert {label: int((y[drawn] == label).sum()) for label in (0, 3, 7)} == {0: 10, 3: 4, 7: 1}


@pytest.mark.parametrize(("fraction", "drawn"), [(0.001, [0, 1, 1]), (0.5, [0, 1, 2]), (0.999, [0, 1, 2])])
def test_a_class_of_two_or_more_is_on_both_sides_and_a_single_sample_stays(fraction, drawn):
    y = np.array([0, 1, 1, 2, 2, 2])
    _, places = split_stratified(y, fraction, stream(0, "test", "a"))
    assert [int((y[places] == label).sum()) for label in range(3)] == drawn


def test_the_draw_is_that_of_its_stream():
    y = np.zeros(100, dtype=np.int64)
    first, again, other = (split_stratified(y, 0.3, stream(0, "test", name))[1].tolist() for name in ("a", "a", "b"))
    assert first == again != other


def test_no_sample_gives_none():
    assert [len(part) for part in split_stratified(np.zeros(0, dtype=np.int64), 0.5, stream(0, "test", "a"))] == [0, 0]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_a_fraction_lies_between_0_and_1(fraction):
    with pytest.raises(UsageError, match=r"test_fraction=.*: must lie between 0 and 1"):
        split_stratified(np.zeros(3, dtype=np.int64), fraction, stream(0, "test", "a"))
