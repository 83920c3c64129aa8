"""Users' metrics: values, names, refusals, resumed runs."""

import math
import re

import numpy as np
import pytest
import torch

from fedshift.analysis.influence import find_influence
from fedshift.report.tables import pool_metric
from fedshift.results.schema import compute_metric, is_lower_better, name_metric, rows_to_frame
from fedshift.tasks import METRICS, Classification, Regression
from fedshift.utils.errors import FedshiftError, UsageError


def margin(outputs, targets):
    """The highest score minus that of the true class."""
    return outputs.amax(dim=1) - outputs.gather(1, targets[:, None])[:, 0]


margin.higher_is_better = False


def largest_margin(outputs, targets):
    return float(margin(outputs, targets).max()) if len(targets) > 1 else None


class Power:
    def __init__(self, power=2):
        self.power = power

    def __call__(self, outputs, targets):
        return (margin(outputs, targets) ** self.power).numpy().tolist()


def draw(samples=30, classes=3):
    random = torch.Generator().manual_seed(0)
    return torch.randn(samples, classes, generator=random), torch.randint(classes, (samples,), generator=random)


def measure(task, given, outputs, y):
    metric = METRICS.parse(given)
    rows = rows_to_frame([type(task)(requested=(metric,)).measure(outputs, y, outputs.shape[1])])
    return float(compute_metric(rows, metric.name).iloc[0])


def test_values_of_samples_are_averaged_pooled_and_paired():
    outputs, y = draw()
    metric = METRICS.parse(margin)
    assert metric.name == f"{__name__}:margin(lower_is_better=True)"
    assert is_lower_better(metric.name)
    assert name_metric(metric.name) == "margin"
    expected = (outputs.numpy().max(axis=1) - outputs.numpy()[np.arange(30), y]).mean()
    assert measure(Classification(), margin, outputs, y) == pytest.approx(expected)
    task = Classification(requested=(metric,))
    rows = [
        {"method": "m", "seed": 0, "client": client, **task.measure(outputs[part], y[part], 3)}
        for client, part in (("a", slice(0, 20)), ("b", slice(20, 30)))
    ]
    assert pool_metric(rows_to_frame(rows), metric.name).item() == pytest.approx(expected)
    records = task.record_all(outputs, y, 3)
    assert records[metric.name].mean() == pytest.approx(expected)
    assert find_influence(records, metric.name) == pytest.approx(records[metric.name] - expected)


def test_one_number_for_all_samples_is_that_of_a_client_alone():
    outputs, y = draw()
    assert measure(Classification(), largest_margin, outputs, y) == pytest.approx(float(margin(outputs, y).max()))
    assert math.isnan(measure(Classification(), largest_margin, outputs[:1], y[:1]))
    task = Classification(requested=(METRICS.parse(largest_margin),))
    assert find_influence(task.record_all(outputs, y, 3), METRICS.parse(largest_margin).name) is None
    rows = rows_to_frame([{"method": "m", "seed": 0, "client": "a", **task.measure(outputs, y, 3)}])
    assert math.isnan(pool_metric(rows, METRICS.parse(largest_margin).name).item())


def test_a_class_takes_arguments_and_its_name_makes_it_again():
    outputs, y = draw()
    text = f"{__name__}.Power( power=3,lower_is_better = True )"
    name = METRICS.parse(text).name
    assert name == f"{__name__}:Power(power=3, lower_is_better=True)"
    assert METRICS.parse(name).name == name
    assert name_metric(name) == "Power"
    assert measure(Classification(), text, outputs, y) == pytest.approx(float((margin(outputs, y) ** 3).mean()))
    assert METRICS.write_all(margin) == f"{__name__}:margin(lower_is_better=True)"
    assert METRICS.write_all(lambda outputs, targets: 1.0) is None


def test_numbers_come_in_the_unit_of_the_data():
    scaled = Regression(scales=((10.0, 2.0),))
    seen = []
    metric = METRICS.parse(lambda outputs, targets: seen.append((outputs, targets)) or 0.0)
    metric.count(scaled, torch.zeros(3, 1), torch.ones(3, 1), 1)
    assert [each.flatten().tolist() for each in seen[0]] == [[10.0] * 3, [12.0] * 3]


def divide(outputs, targets):
    return outputs / 0 if len(targets) < 0 else 1 / 0


def infinite(outputs, targets):
    return torch.where(torch.arange(len(targets)) == 2, torch.inf, 1.0)


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (divide, r"metric divide \(.*own_metrics.py, line \d+\), called with outputs \[12, 3\] and targets \[12\], "
                 r"failed: ZeroDivisionError: division by zero; in .*own_metrics.py, line \d+, in divide. A metric "),
        (infinite, r"returned inf for sample 2: return a finite number"),
        (lambda outputs, targets: outputs, r"returned shape \[12, 3\]: return one value for each sample, \[N\]"),
        (lambda outputs, targets: {"loss": 1.0}, "returned a dict: return one value for each sample"),
        (lambda outputs: 1.0, "takes 1 positional argument but 2 were given"),
        ([margin, lambda outputs, targets: 1.0, lambda outputs, targets: 2.0], "two metrics are called .*lambda"),
        (f"{__name__}:Power(powers=3)", "unknown argument 'powers'; .*power"),
        (f"{__name__}:margin(wide=3)", "unknown argument 'wide'; .*lower_is_better"),
        ("no.module:at_all", "No module named 'no'"),
    ],
)  # fmt: skip
def test_what_a_function_does_wrong_is_said_before_anything_starts(make, metric, told):
    with pytest.raises(UsageError) as refused:
        make(**({"metrics": metric} if isinstance(metric, list) else {"metric": metric}))
    assert re.search(told, str(refused.value)), refused.value
    assert {"metric", "metrics"} & set(refused.value.settings)


def test_a_failure_in_a_round_says_how_to_go_on():
    outputs, y = draw()
    with pytest.raises(FedshiftError, match="All rounds so far are saved: then continue with resume=True"):
        Classification(requested=(METRICS.parse(divide),)).measure(outputs, y, 3)
