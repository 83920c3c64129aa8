"""Values far from the training data's: told with the column or channel, its usual value there and in training."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedshift.data.assembly import federation
from fedshift.data.decoding import Decoding
from fedshift.data.digits import digits
from fedshift.data.far_values import FarValues, judge_newcomers, measure_training, warn_far
from fedshift.data.preparation import Preparation
from fedshift.data.usual_values import UsualValues


def draw(seed=0):
    return np.random.default_rng(seed)


measure = UsualValues.measure


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        ((75, 15), (75_000, 15_000), "about 990 times larger"),  # kg and g
        ((5.4, 1.2), (97, 21.6), "times larger"),  # glucose, mmol/L and mg/dL
        ((200, 40), (5.2, 1.0), "about 39 times smaller"),  # cholesterol, mg/dL and mmol/L
        ((80, 30), (0.9, 0.34), "about 90 times smaller"),  # creatinine
        ((14, 1.5), (140, 15), "mean 138.8"),  # hemoglobin, g/dL and g/L
        ((37, 0.7), (98.6, 1.3), "mean 98"),  # degrees Celsius and Fahrenheit
        ((60, 9), (48, 15), ""),  # ages
        ((0, 1), (1.5, 4), ""),
        ((300, 30), (0, 0), "mean 0 (deviation 0)"),
    ],
)
def test_another_unit_is_told_and_other_patients_are_not(here, there, told):
    first, second = (draw(seed).normal(*each, (400, 1)) for seed, each in enumerate((here, there)))
    found = measure(first).list_apart(measure(second), 400)
    assert list(found) == ([0] if told else [])
    assert told in found.get(0, "")


def test_a_single_value_is_told_with_its_row_and_outliers_of_the_same_distribution_are_not():
    rows, usual = draw().normal(50, 10, (200, 2)).astype(np.float32), measure(draw(1).normal(50, 10, (200, 2)))
    rows[[7, 9], 1] = 1e38, np.nan
    told = usual.describe_far(rows)
    assert list(told) == [1]
    assert told[1].startswith("1e+38 in data row 8, in training mean ")
    assert usual.describe_far(np.array([[50, 500]])).keys() == {1}
    first, second = (draw(seed).lognormal(1, 1.5, (300, 40)) for seed in (1, 2))
    assert not measure(first).describe_far(second)
    assert not measure(first).describe_far(second[:3])


@pytest.mark.parametrize(
    ("dtype", "kind", "factor"), [("uint8", "byte", 1), ("float32", "integer", 1 / 257), ("float32", "array", 1000)]
)
def test_images_on_another_scale_warn_and_others_do_not(dtype, kind, factor):
    x = torch.rand(6, 1, 8, 8)
    stored = (255 * x).byte() if dtype == "uint8" else 2 * x - 1 if kind == "integer" else x
    other = 2 * factor * x - 1 if kind == "integer" else factor * stored
    usual = measure(stored.numpy(), factor=15.0, floor=-1.0 if kind == "integer" else 0.0)
    preparation = Preparation(shape=(1, 8, 8), dtype=dtype, decoding=Decoding(kind=kind), measured=usual)
    kept = Preparation.from_json(preparation.to_json())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warn_far(kept, stored)
        warn_far(kept, other.to(stored.dtype))
    assert [w.category for w in warned] == [FarValues] * (factor != 1)
    assert all("channel 0: about" in str(w.message) for w in warned)


def test_a_new_client_with_a_gain_is_named_and_the_domains_of_one_federation_are_not():
    x, y = draw().random((40, 3, 4, 4), np.float32), np.arange(40) % 2
    data = federation({"a": (x, y) * 2, "b": (0.5 * x, y) * 2}, name="run")
    assert measure_training(data, ["b"]).mean == pytest.approx(measure(x).mean)  # without those that never train
    assert not judge_newcomers(data, data)
    (told,) = judge_newcomers(federation({"c": (1000 * x, y) * 2}, name="new"), data)
    assert told.startswith("client 'c': values are far from the training data's: channel 0: about 1,")
    assert "give them in the unit" in told
    assert measure_training(federation({"a": (np.arange(200).reshape(40, 5), y) * 2}, name="tokens")) is None
    own = digits()
    other = replace(own, clients=own.clients[-1:])
    assert not judge_newcomers(other, own.select_clients(own.names[:-1]))
