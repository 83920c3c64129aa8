"""Cosine similarity and distances of statistics, against torch's own and closed cases."""

import math

import numpy as np
import pytest
import torch

from fedshift.analysis.similarity import EPSILON, cosine, mean_distance, variance_distance


def maps(key, *shape):
    return np.random.default_rng(key).normal(0.3, 1, shape)


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (2, 7, 9), (2, 3, 2, 3, 4), (3, 2, 1, 1)])
def test_cosine_is_that_of_torch_in_float64(shape):
    one, other = maps(0, *shape), maps(1, *shape)
    flat = (torch.from_numpy(each).flatten(2) for each in (one, other))
    expected = torch.nn.functional.cosine_similarity(*flat, dim=2).numpy()
    np.testing.assert_allclose(cosine(one, other), expected, rtol=0, atol=1e-14)


def test_float32_maps_are_compared_in_float64():
    one, other = maps(0, 2, 3, 4, 4).astype(np.float32), maps(1, 2, 3, 4, 4).astype(np.float32)
    np.testing.assert_array_equal(cosine(one, other), cosine(one.astype(np.float64), other.astype(np.float64)))


def test_closed_cases_of_cosine():
    one = maps(0, 2, 4, 5, 5)
    np.testing.assert_allclose(cosine(one, one), 1, atol=1e-14)
    np.testing.assert_allclose(cosine(one, 7 * one), 1, atol=1e-14)
    np.testing.assert_allclose(cosine(one, -0.1 * one), -1, atol=1e-14)
    apart = np.zeros((1, 1, 2, 2)), np.zeros((1, 1, 2, 2))
    apart[0][..., 0, :], apart[1][..., 1, :] = 1, 1
    assert cosine(*apart) == 0
    assert cosine(apart[0], apart[0] + apart[1]) == pytest.approx(math.sqrt(0.5))
    assert cosine(np.zeros((1, 1, 2, 2)), apart[0]) == 0
    for broken in (np.nan, np.inf, 1e300):
        assert np.isnan(cosine(np.full((1, 1, 2, 2), broken), apart[0] + broken))


def test_channels_are_compared_each_with_its_own():
    one, order = maps(0, 3, 4, 5, 5), [2, 0, 3, 1]
    other = maps(1, 3, 4, 5, 5)
    np.testing.assert_array_equal(cosine(one[:, order], other[:, order]), cosine(one, other)[:, order])
    assert cosine(one, one[:, order]).max() < 0.9


def test_means_one_pooled_deviation_apart_have_distance_one():
    mean, variance = np.array([0.0, -2.0, 5.0]), np.array([1.0, 4.0, 9.0])
    apart = mean_distance(mean, variance, mean + np.sqrt(variance + EPSILON), variance)
    assert apart == pytest.approx(1, abs=1e-12)
    assert mean_distance(mean, variance, mean, 2 * variance) == 0
    one = mean_distance(np.array([1.0]), np.array([2.0]), np.array([4.0]), np.array([6.0]))
    assert one == pytest.approx(3 / math.sqrt(4 + 1e-5), abs=1e-12)
    assert one == mean_distance(np.array([4.0]), np.array([6.0]), np.array([1.0]), np.array([2.0]))


def test_variances_are_compared_by_their_ratio_whichever_is_the_larger():
    large = np.array([100.0, 4000.0])
    assert variance_distance(large, 2 * large) == pytest.approx(math.log(2), abs=1e-6)
    assert variance_distance(large, large * np.array([2, 0.5])) == pytest.approx(math.log(2), abs=1e-6)
    assert variance_distance(large, large) == 0


def test_channels_that_never_vary_have_finite_distances():
    dead = np.zeros(2, np.float32)
    assert mean_distance(dead, dead, dead, dead) == variance_distance(dead, dead) == 0
    assert variance_distance(dead, dead + 1) == pytest.approx(math.log(1 + 1e5))
