"""Gradient estimators: how the gradient of a batch is made of those of its samples, where it is not their mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from ..utils.state import State


class GradientEstimator(ABC):
    """Makes the gradient of a batch, before any rule sees it.

    Attributes:
        secret: Draws come from the operating system, so that no engine may record or share them.

    """

    secret: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def source_method(self) -> str:
        """Name of the method that brings the estimator, used in messages: its module."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def combine(self, parts: Iterable[State], key: Tensor) -> State:
        """Return the gradients of the model's trained entries.

        ``parts``: those of the batch's samples, ``[samples, ...]``, some samples in each part. ``key``: int64 scalar
        from which the step draws.
        """
