"""Metrics that are counted on request, in addition to a task's metrics: ``brier``, ``top_k(k=3)``.

:mod:`fedshift.results.schema` defines the counts. Metrics that are means over samples add up over clients, and their
results on single samples yield an interval of differences for new samples. Average precision and calibration error have
no interval: both are biased in small samples, by an amount that depends on the model, so that intervals from a variance
alone (the delta method, a bootstrap) cover a difference of two models too rarely.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..utils.errors import UsageError
from .classification import find_log_odds, split_rows
from .task import Counts, Task, drop_infinite, find_invalid

BINS = 15
"""Bins of the calibration error, as in Guo et al. 2017."""


class Metric(ABC):
    """A metric on request.

    Attributes:
        name: Its name in files and settings, which :data:`~fedshift.tasks.METRICS` reads.
        tasks: Names of the tasks that it is for; empty: any.
        travels: Whether sites of a deployment compute it.

    """

    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    travels: ClassVar[bool] = True

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in files and settings."""

    def check(self, outputs: int) -> None:  # noqa: B027 - most suit any number
        """Raise :class:`UsageError` if the metric is undefined for this number of classes, labels or targets."""

    def try_out(self, task: Task, predictions: Tensor, y: Tensor) -> None:  # noqa: B027 - ours work
        """Raise :class:`UsageError` if the metric cannot be computed for outputs like these."""

    @abstractmethod
    def count(self, task: Task, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        """Return counts of a split, for the arguments of :meth:`Task.count`."""

    def record(self, task: Task, predictions: Tensor, y: Tensor, outputs: int) -> Mapping[str, NDArray[Any]]:
        """Return results of single samples, ``[N]``, that the task lacks; by default none."""
        return {}

    def is_possible(self, counts: Counts) -> bool:
        """Return whether :meth:`count` can return its part of ``counts``."""
        return True


class SampleMetric(Metric):
    """A metric that is a mean over samples of values from 0 to ``most``."""

    most: ClassVar[float] = 1.0

    @abstractmethod
    def measure(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the value of each sample, ``[N]``, bool or float64."""

    @override
    def count(self, task: Task, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        total = float(self.measure(predictions, y).sum())
        return {"sums": {self.name: total if math.isfinite(total) else None}}

    @override
    def record(self, task: Task, predictions: Tensor, y: Tensor, outputs: int) -> Mapping[str, NDArray[Any]]:
        return {self.name: self.measure(predictions, y).numpy()}

    @override
    def is_possible(self, counts: Counts) -> bool:
        total = counts["sums"][self.name]
        if total is None:
            return bool(counts["invalid"] > 0)
        return bool(0 <= total <= self.most * counts["samples"] * (1 + 1e-9))


@dataclass(frozen=True, kw_only=True)
class TopK(SampleMetric):
    """The share of samples whose class has one of the ``k`` highest scores; of equal scores the first is higher."""

    k: int = 5

    def __post_init__(self) -> None:
        if type(self.k) is not int or self.k < 1:
            raise UsageError(f"top_k(k={self.k!r}): give a whole number of classes, from 1 on")

    @property
    @override
    def name(self) -> str:
        return f"top_k(k={self.k})"

    @override
    def check(self, outputs: int) -> None:
        if self.k >= outputs:
            raise UsageError(
                f"metric {self.name} is 100 % for every model, since the data have {outputs} classes: give a smaller k"
            ).about("metric")

    @override
    def measure(self, predictions: Tensor, y: Tensor) -> Tensor:
        own_N1 = predictions.gather(1, y[:, None])
        earlier_NK = torch.arange(predictions.shape[1]) < y[:, None]
        above_NK = ~(predictions <= own_N1) | ((predictions == own_N1) & earlier_NK)  # NaN counts as above
        return above_NK.sum(dim=1) < self.k


@dataclass(frozen=True, kw_only=True)
class Brier(SampleMetric):
    """The squared distance of the predicted probabilities from the true class (Brier 1950, Mon. Weather Rev. 78(1)).

    The sum of (p_k - y_k)^2 over classes, from 0 to 2; with two classes half of it, (p_1 - y_1)^2, as scikit-learn's.
    """

    name = "brier"
    most = 2.0

    @override
    def measure(self, predictions: Tensor, y: Tensor) -> Tensor:
        share_NK = predictions.double().softmax(dim=1)
        truth_NK = torch.nn.functional.one_hot(y, share_NK.shape[1])
        distance_N = (share_NK - truth_NK).square().sum(dim=1)
        return distance_N / 2 if share_NK.shape[1] == 2 else distance_N


@dataclass(frozen=True, kw_only=True)
class F1(Metric):
    """The mean of 2 TP / (2 TP + FP + FN) over the classes that occur or are predicted (macro F1)."""

    name = "f1"

    @override
    def count(self, task: Task, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        chosen = task.predict(predictions)[~find_invalid(predictions)]
        return {"predicted": torch.bincount(chosen, minlength=outputs).tolist()}

    @override
    def is_possible(self, counts: Counts) -> bool:
        return bool(sum(counts["predicted"]) == counts["samples"] - counts["invalid"])


@dataclass(frozen=True, kw_only=True)
class CalibrationError(Metric):
    """The expected calibration error (Guo et al. 2017, arXiv:1706.04599, equation 3), in equal bins.

    Sum over bins ((m - 1) / M, m / M] of the highest probability, weighted by samples, of |accuracy - mean confidence|.
    """

    name = "ece"

    @override
    def count(self, task: Task, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        confidence_N = predictions.double().softmax(dim=1).amax(dim=1)
        right_N = (task.predict(predictions) == y).double()
        edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]
        gaps_M = torch.zeros(BINS, dtype=torch.float64)
        gaps_M.index_add_(0, torch.bucketize(confidence_N, edges), right_N - confidence_N)
        return {"gaps": gaps_M.tolist()}

    @override
    def is_possible(self, counts: Counts) -> bool:
        total = sum(map(abs, counts["gaps"]))
        return bool(total <= counts["samples"] * (1 + 1e-9)) or (math.isnan(total) and counts["invalid"] > 0)


@dataclass(frozen=True, kw_only=True)
class AveragePrecision(Metric):
    """The average precision: the mean over positive samples of the precision at their score, without interpolation.

    With two classes, the second is positive; otherwise it is the mean over classes, each against the rest, or labels,
    that some samples have and others lack.
    """

    name = "average_precision"
    tasks = ("classification", "multilabel")

    @override
    def count(self, task: Task, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        found = [value for rows in split_rows(*_rank(predictions, y)) for value in _precisions(*rows).tolist()]
        return {"values": {self.name: sum(found) / len(found) if found else None}}

    @override
    def is_possible(self, counts: Counts) -> bool:
        value = counts["values"][self.name]
        return value is None or bool(0 <= value <= 1 + 1e-9)


def _rank(predictions: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and whether a sample is positive, ``[K, N]``, of each class or label; of two classes the second."""
    if y.ndim == 2:
        return drop_infinite(predictions).T, y.T > 0
    score_KN = find_log_odds(predictions).T
    positive_KN = y == torch.arange(len(score_KN))[:, None]
    return (score_KN[1:], positive_KN[1:]) if len(score_KN) == 2 else (score_KN, positive_KN)


def _precisions(score_KN: Tensor, positive_KN: Tensor) -> Tensor:
    """Return each row's mean over positive samples of the share of positives among those scored at least as high."""
    order_KN = score_KN.sort(dim=1)
    ordered_KN, hit_KN = order_KN.values.contiguous(), positive_KN.gather(1, order_KN.indices).double()
    first_KN = torch.searchsorted(ordered_KN, ordered_KN, right=False)
    above_KN = hit_KN.flip(1).cumsum(dim=1).flip(1).gather(1, first_KN)
    precision_KN = above_KN / (score_KN.shape[1] - first_KN)
    return (hit_KN * precision_KN).sum(dim=1) / hit_KN.sum(dim=1)
