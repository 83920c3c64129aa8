"""No weight among three or more is above the bound, what is within it keeps its bits, and ratios below it stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshift.core.means import bound_shares

WEIGHTS = st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=9)


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
