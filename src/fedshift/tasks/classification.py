"""Classification: one class per sample, int64 ``[N]``; the network outputs a score for each class, ``[N, K]``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..utils.errors import Ref, UsageError
from .task import BATCH, ClassTask, Counts, describe_absent, find_invalid, is_overlap

RANKED = 1_000_000
"""Largest number of scores ranked at once."""
SCORED = 10
"""Largest number of classes whose scores are recorded for each sample."""
MOST_CLASSES = 1_000_000
"""Largest number of classes; a network with more outputs would take gigabytes."""
FEW_CLASSES = 1_000
"""Up to this number of classes, most may lack samples (a small part of ImageNet)."""


@dataclass(frozen=True, kw_only=True)
class Classification(ClassTask):
    """One of K classes."""

    name = "classification"
    metrics = ("accuracy", "balanced_accuracy", "auc", "loss")
    loss = "cross_entropy"

    @override
    def read_targets(self, y: NDArray[Any], shape: tuple[int, ...], where: str) -> Tensor:
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        if y.ndim != 1:
            raise UsageError(f"{where}: labels of shape {y.shape}; give one class per sample")
        fractions = np.flatnonzero(~(np.isfinite(y) & (y == np.round(y)))) if y.dtype.kind == "f" else np.empty(0, int)
        if len(fractions):
            raise UsageError(
                f"{where}: labels are not whole numbers; the label of sample {fractions[0]} is {y[fractions[0]]}: give "
                "classes as 0, 1, 2, ..., or predict numbers (task='regression')"
            )
        if y.dtype.kind != "b" and len(beyond := np.flatnonzero((y >= MOST_CLASSES) | (y <= -MOST_CLASSES))):
            raise UsageError(
                f"{where}: the label of sample {beyond[0]} is {y[beyond[0]]}, beyond any number of classes (at most "
                f"{MOST_CLASSES}): number classes 0, 1, 2, ..., or predict numbers (task='regression')"
            )
        return torch.from_numpy(y.astype(np.int64))

    @override
    def make_blank_targets(self, samples: int, shape: tuple[int, ...], outputs: int) -> Tensor:
        return torch.zeros(1, dtype=torch.int64).expand(samples)

    @override
    def count_outputs(self, targets: Iterable[Tensor]) -> int:
        return 1 + max((int(y.max()) for y in targets if len(y)), default=0)

    @override
    def check_outputs(self, targets: Mapping[str, Tensor], samples: int) -> tuple[str, ...]:
        for where, y in targets.items():
            if len(y) and int(y.max()) >= max(FEW_CLASSES, samples):
                top = int(y.max())
                raise UsageError(
                    f"{where}: the label of sample {int(y.argmax())} is {top}, which would mean {top + 1} classes in "
                    f"{samples} samples: number classes 0, 1, 2, ..., or give their number ({{}})",
                    Ref(classes=top + 1),
                )
        labels = torch.cat([torch.unique(y) for y in targets.values()]).tolist() if targets else []
        return describe_absent("sample", labels)

    @override
    def check_targets(self, y: Tensor, shape: tuple[int, ...], outputs: int, where: str) -> None:
        wrong = y[(y < 0) | (y >= outputs)]
        if len(wrong):
            raise UsageError(
                f"{where}: label {int(wrong[0])} is out of range; labels must be 0..{outputs - 1} "
                "(correct the labels, or say the number of classes)"
            )

    @override
    def count(self, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        loss = 0.0
        for part in zip(torch.split(predictions, BATCH), torch.split(y, BATCH), strict=True):
            loss += float(F.cross_entropy(*part)) * len(part[1])  # not the training loss
        invalid_N = find_invalid(predictions)
        correct_N = (self.predict(predictions) == y) & ~invalid_N
        return {
            "samples": len(y),
            "loss_sum": loss,
            "hits": torch.bincount(y[correct_N], minlength=outputs).tolist(),
            "support": torch.bincount(y, minlength=outputs).tolist(),
            "invalid": int(invalid_N.sum()),
            "auc": mean_area(find_log_odds(predictions).T, y == torch.arange(outputs)[:, None]),
        }

    @override
    def record(self, predictions: Tensor, y: Tensor, outputs: int) -> Mapping[str, NDArray[Any]]:
        odds_NK = find_log_odds(predictions)
        chosen = self.predict(predictions).masked_fill(find_invalid(predictions), -1)
        return {
            "truth": y.numpy().astype(np.min_scalar_type(outputs)),
            "chosen": chosen.numpy().astype(np.min_scalar_type(-outputs)),
            **({"odds": odds_NK.numpy()} if outputs <= SCORED else {}),
            "right": (chosen == y).numpy(),
            "loss": F.cross_entropy(predictions, y, reduction="none").float().numpy(),
            "area": mean_area_parts(odds_NK.T, y == torch.arange(outputs)[:, None]).numpy(),
        }

    @override
    def is_possible(self, counts: Counts) -> bool:
        return is_overlap(counts) and bool(sum(counts["support"]) == counts["samples"])

    @override
    def strata(self, y: Tensor) -> Tensor | None:
        return y

    @override
    def count_classes(self, y: Tensor, outputs: int) -> Tensor:
        return torch.bincount(y, minlength=outputs).cpu()


CLASSIFICATION = Classification()


def find_log_odds(scores_NK: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of each class's probability p, the softmax of ``scores``, float64 ``[N, K]``.

    It is a class's score minus the log of the sum of the others' exponentials, and exact where p would round to 1. With
    twelve decimals, equal probabilities tie although sums in another order are rounded differently.
    """
    scores_NK = scores_NK.double()
    if scores_NK.shape[1] == 2:
        return (scores_NK - scores_NK.flip(1)).round(decimals=12)
    top_N1 = scores_NK.argmax(dim=1, keepdim=True)
    others_N1 = scores_NK.scatter(1, top_N1, -torch.inf).logsumexp(dim=1, keepdim=True)
    log_NK = scores_NK.log_softmax(dim=1)
    odds_NK = log_NK - torch.log1p(-log_NK.exp())
    return odds_NK.scatter(1, top_N1, scores_NK.gather(1, top_N1) - others_N1).round(decimals=12)


def mean_area(score_KN: Tensor, positive_KN: Tensor) -> float | None:
    """Return the mean area under the ROC curve of the rows that have a positive and a negative sample.

    None if there is no such row, or a score is NaN.

    Args:
        score_KN: Scores of N samples for each of K classes or labels, float64.
        positive_KN: Whether a sample has the class or label, bool.

    """
    areas = [area for part in split_rows(score_KN, positive_KN) for area in _areas(*part)]
    return sum(areas) / len(areas) if areas else None


def mean_area_parts(score_KN: Tensor, positive_KN: Tensor) -> Tensor:
    """Return each sample's part ``[N]`` in the deviation of :func:`mean_area`, float64; NaN where it is None.

    A positive sample's part in a row's area A is (V - A) / positives, with its placement V, the share of negatives
    below it; a negative's is (V - A) / negatives, with the share of positives above it (DeLong, DeLong and
    Clarke-Pearson 1988, Biometrics 44(3)). A sample's part in the mean is the mean of its parts.
    """
    parts = [part_N for rows in split_rows(score_KN, positive_KN) for part_N in _area_parts(*rows)]
    return torch.stack(parts).mean(dim=0) if parts else score_KN.new_full((score_KN.shape[1],), torch.nan)


def split_rows(score_KN: Tensor, positive_KN: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows with both kinds of samples, a few at a time; none if a score is NaN."""
    two_K = positive_KN.any(dim=1) & ~positive_KN.all(dim=1)
    if not bool(two_K.any()) or bool(score_KN.isnan().any()):
        return
    most = max(1, RANKED // score_KN.shape[1])
    yield from zip(torch.split(score_KN[two_K], most), torch.split(positive_KN[two_K], most), strict=True)


def _areas(score_KN: Tensor, positive_KN: Tensor) -> list[float]:
    """Return the share of (positive, negative) pairs that each row's scores order correctly; ties count one half.

    The statistic of Mann and Whitney (1947), from ranks; scikit-learn's takes longer to import than a small run.
    """
    score_KN = score_KN.contiguous()
    ordered_KN = score_KN.sort(dim=1).values
    below_KN, upto_KN = (torch.searchsorted(ordered_KN, score_KN, right=right) for right in (False, True))
    rank_KN = (below_KN + upto_KN + 1).double() / 2
    p_K = positive_KN.sum(dim=1)
    n_K = score_KN.shape[1] - p_K
    areas: list[float] = (((rank_KN * positive_KN).sum(dim=1) - p_K * (p_K + 1) / 2) / (p_K * n_K)).tolist()
    return areas


def _area_parts(score_KN: Tensor, positive_KN: Tensor) -> Iterator[Tensor]:
    """Yield each sample's part ``[N]`` in the area of each row."""
    for score_N, positive_N in zip(score_KN, positive_KN, strict=True):
        part_N = torch.empty_like(score_N)
        for own_N, sign in ((positive_N, 1), (~positive_N, -1)):
            others = (sign * score_N[~own_N]).sort().values
            own = sign * score_N[own_N]
            ends = (torch.searchsorted(others, own, right=right) for right in (False, True))
            placement = sum(ends).double() / (2 * len(others))  # type: ignore[union-attr]
            part_N[own_N] = (placement - placement.mean()) / len(own)
        yield part_N
