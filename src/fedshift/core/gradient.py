"""Gradient estimators: combine the gradients of samples into the gradient of a batch, where that is not their mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from ..utils.state import State


class GradientEstimator(ABC):
    """Computes the gradient of a batch from the gradients of its samples, before any rule sees it.

    Attributes:
        secret: Whether random draws come from the operating system, so that engines must not record or share them.

    """

    secret: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def combine(self, parts: Iterable[State], key: Tensor) -> State:
        """Return the gradients of the model's trained entries.

        ``parts``: the gradients of the batch's samples in chunks ``[samples, ...]``. ``key``: int64 scalar that keys
        random draws.
        """
