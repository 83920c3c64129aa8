"""Means against NumPy in float64, exact cases, dtypes kept; weights within a bound keep their bits and ratios."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.core.means import StreamingMean, bound_shares, weighted_mean

WEIGHTS = st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=9)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_equals_numpys_average_in_float64(weights, seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(weights), 4, 3))
    share = [weight / sum(weights) for weight in weights]
    folded = weighted_mean([{"w": torch.from_numpy(value)} for value in values], share)
    assert np.abs(folded["w"].numpy() - np.average(values, axis=0, weights=weights)).max() <= 1e-13


def test_one_client_folds_to_itself_bit_for_bit_in_every_dtype():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        state = {"w": torch.arange(7).to(dtype) / 3 if dtype.is_floating_point else torch.arange(7).to(dtype)}
        folded = weighted_mean([state], [1.0])
        assert folded["w"].dtype == dtype
        assert torch.equal(folded["w"], state["w"])
        assert folded["w"].data_ptr() != state["w"].data_ptr()


def test_small_changes_survive_many_clients():
    # In float32, 1 + 2^-24 rounds to 1; a sum of 1,000 such values kept in float32 would drift.
    states = [{"w": torch.tensor(1.0 + i % 2 * 2**-22)} for i in range(1000)]
    assert weighted_mean(states, [1 / 1000] * 1000)["w"] == torch.tensor(1.0 + 2**-23)


def test_counters_are_rounded_means_and_stay_integers():
    states = [{"n": torch.tensor(value)} for value in (3, 2, 1)]
    folded = weighted_mean(states, [21 / 46, 16 / 46, 9 / 46])["n"]
    assert folded.dtype == torch.int64
    assert folded == 2


@given(
    st.lists(st.lists(st.floats(0.1, 100), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 2**32 - 1)
)
def test_sums_of_stacked_states_merge_to_numpys_average(weights, seed):
    rng = np.random.default_rng(seed)
    values = [torch.from_numpy(rng.normal(size=(len(own), 4, 3))) for own in weights]
    whole = StreamingMean()
    for own, lanes in zip(weights, values, strict=True):
        part = StreamingMean()
        part.add_stacked({"w": lanes, "h": lanes.float(), "n": torch.arange(len(own)).reshape(-1)}, own)
        whole.merge(part)
    flat = [weight for own in weights for weight in own]
    found = whole.result()
    expected = np.average(torch.cat(values).numpy(), axis=0, weights=flat)
    assert np.abs(found["w"].numpy() - expected).max() <= 1e-13
    assert found["h"].dtype == torch.float32
    assert np.abs(found["h"].numpy() - expected).max() <= 1e-6
    counts = [number for own in weights for number in range(len(own))]
    assert found["n"].dtype == torch.int64
    assert abs(found["n"].item() - np.average(counts, weights=flat)) <= 0.5 + 1e-9


def test_the_mean_of_equal_stacked_states_is_that_state_bit_for_bit():
    for dtype in (torch.float32, torch.float64):
        value = torch.randn(70, 50, generator=torch.Generator().manual_seed(0)).to(dtype) / 3
        whole = StreamingMean()
        whole.add({"w": value}, 7.0)
        for lanes in (1, 5):
            part = StreamingMean()
            part.add_stacked({"w": value.expand(lanes, 70, 50)}, [3.0 + lane for lane in range(lanes)])
            whole.merge(part)
        assert torch.equal(whole.result()["w"], value)


@given(WEIGHTS, st.floats(0.05, 0.99))
def test_no_share_is_above_the_bound_and_the_others_keep_their_weights(weights, most):
    bounded = bound_shares(weights, most)
    most = max(most, 1 / len(weights))
    assert max(bounded) <= most * sum(bounded) * (1 + 1e-8)
    level = max(bounded)
    assert all(after in (before, level) and after <= before for before, after in zip(weights, bounded, strict=True))
    if max(weights) <= most * sum(weights):
        assert bounded == weights


def test_of_two_the_weights_decide_and_a_bound_that_nobody_can_keep_makes_all_equal():
    assert bound_shares([1.0, 1e9], 0.5) == [1.0, 1e9]
    assert bound_shares([1.0, 2.0, 4.0], 0.1) == pytest.approx([1.0, 1.0, 1.0])
    assert bound_shares([24.0, 24.0, 4e7], 0.5) == [24.0, 24.0, 48.0]
    assert bound_shares([10.0, 45.0, 45.0], 0.4) == pytest.approx([10.0, 20.0, 20.0])
