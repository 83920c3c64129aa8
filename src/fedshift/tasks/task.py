"""Interface of tasks, and functions that several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..utils.errors import UsageError
from ..utils.words import join_some

if TYPE_CHECKING:
    from .metrics import Metric

Counts = dict[str, Any]
"""Counts of a split, by the columns of :mod:`fedshift.results.schema`."""
PLURALS = {"class": "classes", "label": "labels", "target": "targets", "risk": "risks"}
"""Plural names of a task's outputs."""
BATCH = 250
"""Number of samples whose loss is computed at a time."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A kind of prediction, one for each sample.

    Attributes:
        name: Name of the task in a sentence.
        metrics: Metrics that its counts define (:data:`fedshift.results.schema.METRICS`), the usual one first.
        loss: Default training loss (:data:`fedshift.core.loss.LOSSES`).
        output: Name of one output of the network: a class, a label or a target.
        requested: Metrics that are counted in addition, on request (:mod:`fedshift.tasks.metrics`).

    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    loss: ClassVar[str]
    output: ClassVar[str]
    requested: tuple[Metric, ...] = field(default=(), repr=False)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of all metrics, the usual one first."""
        others = (metric.name for metric in self.requested if metric.name not in self.metrics)
        return (*self.metrics[:-1], *others, *self.metrics[-1:])

    def measure(self, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        """Return :meth:`count` and the counts of the requested metrics."""
        counts = self.count(predictions, y, outputs)
        for metric in self.requested:
            for name, value in metric.count(self, predictions, y, outputs).items():
                counts[name] = {**counts.get(name, {}), **value} if isinstance(value, dict) else value
        return counts

    def record_all(self, predictions: Tensor, y: Tensor, outputs: int) -> Mapping[str, NDArray[Any]]:
        """Return :meth:`record` and the results of single samples of the requested metrics."""
        made = self.record(predictions, y, outputs)
        parts = [metric.record(self, predictions, y, outputs) for metric in self.requested] if made else []
        return {**made, **{name: part for each in parts for name, part in each.items()}}

    def plausible(self, counts: Counts) -> bool:
        """Return whether :meth:`measure` can return ``counts``, which have its types (:meth:`is_possible`)."""
        return self.is_possible(counts) and all(metric.is_possible(counts) for metric in self.requested)

    def read_targets(self, y: NDArray[Any], shape: tuple[int, ...], where: str) -> Tensor:
        """Return an array of targets as the task keeps them, by default numbers, float64 ``[N, outputs]``.

        Args:
            y: Targets ``[N, ...]``, or ``[N]`` with one per sample.
            shape: Shape of one input.
            where: Beginning of messages.

        Raises:
            UsageError: They have another shape or type.

        """
        y = y[:, None] if y.ndim == 1 else y
        if y.ndim != 2:
            raise UsageError(f"{where}: targets of shape {y.shape}; give a row of numbers for each sample of {self}")
        return torch.from_numpy(y.astype(np.float64))

    def make_blank_targets(self, samples: int, shape: tuple[int, ...], outputs: int) -> Tensor:
        """Return zeros in place of unknown targets, for samples of ``shape``."""
        return torch.zeros(1, outputs).expand(samples, outputs)

    def count_outputs(self, targets: Iterable[Tensor]) -> int:
        """Return the number of classes, labels or targets in all clients' training ``targets``."""
        return max((y.shape[1] for y in targets), default=1)

    def check_outputs(self, targets: Mapping[str, Tensor], samples: int) -> tuple[str, ...]:
        """Return notices on :meth:`count_outputs` of training targets; by default none.

        Args:
            targets: Training targets of each client, by the beginning of messages.
            samples: Number of samples in all splits of all clients.

        Raises:
            UsageError: The number would be absurd.

        """
        return ()

    def prepare(self, targets: Sequence[Tensor]) -> Task:
        """Return the task fitted to all clients' training ``targets`` for :meth:`encode`; by default unchanged."""
        return self

    def unfitted(self) -> Task:
        """Return the task without what :meth:`prepare` added."""
        return self

    def encode(self, y: Tensor) -> Tensor:
        """Return targets as networks learn them, by default unchanged."""
        return y

    def decode(self, outputs: Tensor) -> Tensor:
        """Return the network's outputs as an exported model gives them, by default unchanged; torch traces it."""
        return outputs

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predictions for metrics from the network's ``outputs [N, ...]``; by default the outputs."""
        return outputs

    def entropy(self, outputs: Tensor) -> Tensor:
        """Return the entropy of each prediction, in nats, of the network's ``outputs [N, ...]``; it is differentiable.

        By default, predictions are not distributions.

        Raises:
            UsageError: The task's predictions have no entropy.

        """
        raise UsageError(f"predictions of {self} have no entropy")

    @abstractmethod
    def check_targets(self, y: Tensor, shape: tuple[int, ...], outputs: int, where: str) -> None:
        """Raise :class:`UsageError`, beginning with ``where``, unless ``y`` can be trained on.

        Args:
            y: Targets ``[N, ...]``.
            shape: Shape of one input.
            outputs: Number of the federation's classes, labels or targets.
            where: Beginning of messages.

        """

    def output_shape(self, shape: tuple[int, ...], outputs: int) -> tuple[int, ...]:
        """Return the shape of the network's output for one sample of ``shape``, by default a vector."""
        return (outputs,)

    @abstractmethod
    def count(self, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        """Return the counts that metrics need, for the network's ``predictions [N, ...]`` and targets ``y [N, ...]``.

        ``samples`` and ``loss_sum`` are always counted.
        """

    def record(self, predictions: Tensor, y: Tensor, outputs: int) -> Mapping[str, NDArray[Any]]:
        """Return arrays ``[N, ...]`` with the results of single samples (:mod:`fedshift.results.cases`); empty: none.

        Arguments as for :meth:`count`. Records of single samples never leave the machine that holds the samples.
        """
        return {}

    def is_possible(self, counts: Counts) -> bool:
        """Return whether predictions of ``samples`` samples can have ``counts``, of the types that :meth:`count` gives.

        A coordinator uses this to check a site's counts. By default everything is possible.
        """
        return True

    def strata(self, y: Tensor) -> Tensor | None:
        """Return a class for each sample to stratify splits by, int64 ``[N]``, or None."""
        return None

    def count_classes(self, y: Tensor, outputs: int) -> Tensor:
        """Return how often each class or label occurs in ``y``, int64 ``[outputs]``; zeros for other targets."""
        return torch.zeros(outputs, dtype=torch.int64)

    def describe(self, y: Tensor) -> Mapping[str, str]:
        """Return facts about targets in words, by name."""
        return {}

    def __str__(self) -> str:
        return self.name


class ClassTask(Task):
    """A task whose network scores the classes of each sample or pixel, ``[N, K, ...]``."""

    output = "class"

    @override
    def predict(self, outputs: Tensor) -> Tensor:
        """Return the class with the highest score, int64 ``[N, ...]``."""
        return outputs.argmax(dim=1)

    @override
    def entropy(self, outputs: Tensor) -> Tensor:
        return -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1)


def describe_absent(unit: str, classes: Sequence[int]) -> tuple[str, ...]:
    """Return a notice of the classes below the highest of ``classes`` that no training ``unit`` has, if any."""
    top, absent = max(classes, default=0), sorted({*range(max(classes, default=0))} - {*classes})
    if not absent:
        return ()
    return (
        f"no training {unit} has class {join_some(map(str, absent))}, and networks have {top + 1} outputs, for classes "
        f"0 to {top}: number classes 0, 1, 2, ... unless others have it",
    )


def find_invalid(outputs: Tensor) -> Tensor:
    """Return whether no class can be chosen from the scores ``outputs [N, K, ...]``, bool ``[N, ...]``.

    The highest score is then NaN or infinite, so that the softmax is not a number.
    """
    return ~outputs.amax(dim=1).isfinite()


def drop_infinite(outputs: Tensor) -> Tensor:
    """Return ``outputs`` in float64, NaN where they are not finite."""
    return torch.where(outputs.isfinite(), outputs.double(), torch.nan)


def has_possible_loss(counts: Counts) -> bool:
    """Return whether the summed loss is a number from 0 on, unless an output is not a number."""
    return bool(counts["loss_sum"] >= 0) or 0 < counts.get("invalid", 0) <= counts["samples"]


def is_overlap(counts: Counts) -> bool:
    """Return whether no class is hit more often than it occurs, nor more often than it is predicted."""
    least = map(min, counts["support"], counts["predicted"] if "predicted" in counts else counts["support"])
    return has_possible_loss(counts) and all(hits <= most for hits, most in zip(counts["hits"], least, strict=True))
