"""Multilabel classification: any number of L labels, float ``[N, L]`` of 0 and 1; the network outputs L scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..utils.errors import UsageError
from .classification import SCORED, mean_area, mean_area_parts
from .task import Counts, Task, drop_infinite, is_overlap


@dataclass(frozen=True, kw_only=True)
class Multilabel(Task):
    """Any number of L labels; a label is predicted if its score is above 0, a probability of one half."""

    name = "multilabel"
    metrics = ("f1", "auc", "exact_match", "loss")
    loss = "binary_cross_entropy"
    output = "label"

    @override
    def read_targets(self, y: NDArray[Any], shape: tuple[int, ...], where: str) -> Tensor:
        return super().read_targets(y, shape, where).float()

    @override
    def predict(self, outputs: Tensor) -> Tensor:
        """Return the labels with a probability above one half, bool ``[N, L]``."""
        return outputs > 0

    @override
    def entropy(self, outputs: Tensor) -> Tensor:
        """Return the sum of the entropies of the predicted probabilities of all labels."""
        share = outputs.sigmoid()
        return -(share * F.logsigmoid(outputs) + (1 - share) * F.logsigmoid(-outputs)).sum(1)

    @override
    def check_targets(self, y: Tensor, shape: tuple[int, ...], outputs: int, where: str) -> None:
        if y.ndim != 2 or y.shape[1] != outputs:
            raise UsageError(f"{where}: targets of shape {tuple(y.shape)}; they must be [samples, {outputs} labels]")
        wrong = y[(y != 0) & (y != 1)]
        if len(wrong):
            raise UsageError(f"{where}: a label is {float(wrong[0]):g}; it must be 0 or 1")

    @override
    def count(self, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        chosen, given = self._choose(predictions, y), y > 0
        return {
            "samples": len(y),
            "loss_sum": float(F.binary_cross_entropy_with_logits(predictions, y, reduction="sum")) / outputs,
            "hits": (chosen & given).sum(dim=0).tolist(),
            "support": given.sum(dim=0).tolist(),
            "predicted": chosen.sum(dim=0).tolist(),
            "invalid": int((~predictions.isfinite()).any(dim=1).sum()),
            "exact": int((chosen == given).all(dim=1).sum()),
            "auc": mean_area(drop_infinite(predictions).T, given.T),
        }

    @override
    def record(self, predictions: Tensor, y: Tensor, outputs: int) -> Mapping[str, NDArray[Any]]:
        odds_NL = drop_infinite(predictions)
        loss_NL = F.binary_cross_entropy_with_logits(predictions, y, reduction="none")
        return {
            "given": (y > 0).numpy(),
            "chosen": self._choose(predictions, y).numpy(),
            **({"odds": odds_NL.numpy()} if outputs <= SCORED else {}),
            "loss": loss_NL.mean(dim=1).float().numpy(),
            "area": mean_area_parts(odds_NL.T, (y > 0).T).numpy(),
        }

    def _choose(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the predicted labels, and the wrong value where the score is not a number."""
        return torch.where(predictions.isfinite(), self.predict(predictions), y <= 0)

    @override
    def is_possible(self, counts: Counts) -> bool:
        most = max(*counts["support"], *counts["predicted"], counts["exact"])
        return is_overlap(counts) and bool(most <= counts["samples"])

    @override
    def count_classes(self, y: Tensor, outputs: int) -> Tensor:
        return y.sum(dim=0).to(torch.int64).cpu()
