"""Regression: T numbers per sample, float ``[N, T]``; the network outputs as many.

Networks learn targets in units of their spread over all clients' training samples, so that the same learning rate works
for any unit; errors are counted in the unit of the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..utils.errors import UsageError
from .task import Counts, Task, drop_infinite

ROUNDED = 1 + 1e-6
"""Tolerated ratio of a squared sum to its Cauchy-Schwarz bound, because both are rounded."""


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """T numbers.

    Attributes:
        standardize: Subtract the mean of each target and divide by its standard deviation: statistics of all clients'
            training samples, or given ones, ``((mean, deviation), ...)``, for sites that do not share theirs.
        scales: Mean and standard deviation that were removed from each target; empty if none were.

    """

    name = "regression"
    metrics = ("rmse", "mae", "r2", "loss")
    loss = "mse"
    output = "target"
    standardize: bool | tuple[tuple[float, float], ...] = True
    scales: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        pairs = [name for name in ("standardize", "scales") if not isinstance(getattr(self, name), bool)]
        try:
            for name in pairs:
                scales = tuple((float(mean), float(deviation)) for mean, deviation in getattr(self, name))
                object.__setattr__(self, name, scales)
            sound = all(math.isfinite(a) and 0 < b < math.inf for name in pairs for a, b in getattr(self, name))
        except (TypeError, ValueError):
            sound = False
        if not sound:
            raise UsageError(
                f"regression: standardize={self.standardize!r}: give True, False, or mean and standard deviation of "
                "each target, ((0.0, 1.0),)"
            )

    @override
    def prepare(self, targets: Sequence[Tensor]) -> Regression:
        if self.scales or self.standardize is False:
            return self
        if not isinstance(self.standardize, bool):
            return replace(self, scales=self.standardize)
        y = torch.cat(tuple(targets)).double()
        deviation = y.std(dim=0, correction=0)
        pairs = zip(y.mean(dim=0).tolist(), torch.where(deviation > 0, deviation, 1).tolist(), strict=True)
        return replace(self, scales=tuple(pairs))

    @override
    def unfitted(self) -> Regression:
        return replace(self, scales=())

    @override
    def encode(self, y: Tensor) -> Tensor:
        if not self.scales:
            return y
        if len(self.scales) != y.shape[1]:
            raise UsageError(
                f"regression: standardize has mean and deviation of {len(self.scales)} targets, and the data have "
                f"{y.shape[1]}: give one pair for each"
            )
        mean_T, std_T = torch.tensor(self.scales, dtype=torch.float64, device=y.device).T
        encoded: Tensor = (y.double() - mean_T) / std_T
        return encoded.float()

    @override
    def decode(self, outputs: Tensor) -> Tensor:
        if not self.scales:
            return outputs
        mean_T, std_T = torch.tensor(self.scales, dtype=torch.float64).T
        numbers: Tensor = outputs.double() * std_T + mean_T
        return numbers

    @override
    def check_targets(self, y: Tensor, shape: tuple[int, ...], outputs: int, where: str) -> None:
        if y.ndim != 2 or y.shape[1] != outputs or not y.is_floating_point():
            raise UsageError(
                f"{where}: targets of shape {tuple(y.shape)} and type {y.dtype}; they must be numbers, "
                f"[samples, {outputs} targets]"
            )
        bad = (~y.isfinite()).any(dim=1).nonzero()
        if len(bad):
            raise UsageError(f"{where}: the target of sample {int(bad[0, 0])} is NaN or infinite; remove or impute it")

    @override
    def count(self, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        loss_N, error, target = self._compare(predictions, y)
        reference = target.mean(dim=0)
        return {
            "samples": len(y),
            "loss_sum": float(loss_N.sum()),
            "squared": error.square().sum(dim=0).tolist(),
            "absolute": error.abs().sum(dim=0).tolist(),
            "invalid": int((~error.isfinite()).any(dim=1).sum()),
            "reference": reference.tolist(),
            "total": (target - reference).sum(dim=0).tolist(),
            "square": (target - reference).square().sum(dim=0).tolist(),
        }

    @override
    def record(self, predictions: Tensor, y: Tensor, outputs: int) -> Mapping[str, NDArray[Any]]:
        loss_N, error, target = self._compare(predictions, y)
        return {"error": error.numpy(), "target": target.numpy(), "loss": loss_N.float().numpy()}

    def _compare(self, predictions: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of each sample, and errors (NaN: infinite) and targets ``[N, T]`` in the unit of the data."""
        error = drop_infinite((predictions - y).double())
        scale = 1.0
        if self.scales:
            _, scale = torch.tensor(self.scales, dtype=torch.float64).T
        return error.square().mean(dim=1), error * scale, self.decode(y.double())

    @override
    def is_possible(self, counts: Counts) -> bool:
        pairs = [*zip(counts["absolute"], counts["squared"], strict=True)]
        pairs += zip(counts["total"], counts["square"], strict=True)
        bounded = not any(one**2 > counts["samples"] * two * ROUNDED for one, two in pairs)  # Cauchy and Schwarz
        sound = min(counts["loss_sum"], *counts["absolute"]) >= 0
        return bounded and (sound or 0 < counts["invalid"] <= counts["samples"])
