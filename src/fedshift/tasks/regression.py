"""Regression: T numbers a sample, float ``[N, T]``; the network gives as many.

Targets may be kept in units of their spread over all clients' training samples (``scales``), in which networks learn
alike whatever the unit; errors are counted in the unit of the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..utils.errors import UsageError
from .task import Counts, Task


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """T numbers; ``scales``: for each the mean and standard deviation that were taken out, (0, 1) where none was."""

    name = "regression"
    metrics = ("rmse", "mae", "r2", "loss")
    loss = "mse"
    output = "target"
    scales: tuple[tuple[float, float], ...] = ()

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
    def output_shape(self, shape: tuple[int, ...], outputs: int) -> tuple[int, ...]:
        return (outputs,)

    @override
    def count(self, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        error, target = (predictions - y).double(), y.double()
        loss = float(error.square().mean(dim=1).sum())
        if self.scales:
            mean_T, std_T = torch.tensor(self.scales, dtype=torch.float64).T
            error, target = error * std_T, target * std_T + mean_T
        return {
            "samples": len(y),
            "loss_sum": loss,
            "squared": error.square().sum(dim=0).tolist(),
            "absolute": error.abs().sum(dim=0).tolist(),
            "total": target.sum(dim=0).tolist(),
            "square": target.square().sum(dim=0).tolist(),
        }

    @override
    def strata(self, y: Tensor) -> Tensor | None:
        return None
