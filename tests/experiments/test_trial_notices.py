"""Notices about a trial before it starts."""

import numpy as np
import pytest
from torch import nn

import fedshift
from fedshift.experiments.trial_notices import _list_low_rates


@pytest.mark.parametrize(
    ("optimizer", "advised"),
    [
        (fedshift.SGD(lr=0.01), "lr=0.03,0.1,0.3"),
        (fedshift.SGD(lr=0.001, momentum=0.9), "lr=0.003,0.01,0.03"),
        (fedshift.SGD(lr=0.003, momentum=0.9), None),
        (fedshift.SGD(lr=0.03), None),
        (fedshift.AdamW(lr=0.001), None),
    ],
)
def test_momentum_counts_in_what_is_a_low_rate(optimizer, advised):
    found = list(_list_low_rates(optimizer))
    assert (advised in found[0]) if advised else not found


def test_a_low_rate_for_masks_is_noted_once(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.random((4, 1, 4, 4), dtype=np.float32)
    data = {name: (x, (x[:, 0] > 0.5).astype(np.uint8), x, (x[:, 0] > 0.5).astype(np.uint8)) for name in "ab"}
    methods = "fedavg, fedprox, single+tuned(lr=0.1)"
    result = fedshift.compare(methods, data=data, model=lambda shape, k: nn.Conv2d(1, k, 1), rounds=1, out=tmp_path)
    low = [text for text in result.summary.notices if "low for segmentation" in text]
    assert low == [next(_list_low_rates(fedshift.SGD(lr=0.01)))]
