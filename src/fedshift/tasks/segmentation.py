"""Segmentation: a class for each pixel or voxel, uint8 ``[N, H, W]`` or ``[N, D, H, W]``; 255 is ignored.

The network outputs a score for each class, ``[N, K, H, W]``. Dice (Dice 1945, doi:10.2307/1932409) and intersection
over union (Jaccard 1912) are means over images, or volumes, of each class, and then over classes except the background,
class 0, unless it is the only one. An image counts for a class that is true or predicted there, as in nnU-Net. Pooled
Dice and IoU, which large images and large objects dominate, are of the pixels of all images together. Distances between
surfaces (:mod:`fedshift.tasks.surfaces`) take time, and are counted only on request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..results.cases import compare_masks
from ..utils.errors import Ref, UsageError
from ..utils.words import join_some
from .surfaces import are_possible_surfaces, compare_surfaces
from .task import BATCH, ClassTask, Counts, describe_absent, find_invalid, is_overlap

IGNORED = 255
"""Class in masks for pixels that are neither trained on nor counted."""
LEFT_OUT = -100
"""Class that makes torch's losses ignore a pixel."""
SURFACE_METRICS = ("surface_distance", "hausdorff95")
"""Metrics that are counted with ``surface``."""
MANY_CLASSES, SPARSE = 32, 4
"""Classes beyond the first number are refused if more than this many times as many would be counted as occur."""
GRAY = 240
"""Masks with 255 and more than :data:`MANY_CLASSES` values below it, up to at least this one, hold gray levels."""
NAMED = 8
"""Maximum number of classes whose shares are reported."""


@dataclass(frozen=True, kw_only=True)
class Segmentation(ClassTask):
    """One of K classes for each pixel.

    Attributes:
        surface: Also count distances between the surfaces of predicted and true masks.
        spacing: Distance of neighboring pixels along each axis, (height, width) or (depth, height, width), which sets
            the unit of surface distances; empty: 1 pixel.

    """

    name = "segmentation"
    metrics = ("dice", "iou", "pooled_dice", "pooled_iou", "accuracy", "balanced_accuracy", "loss")
    loss = "dice_cross_entropy"
    surface: bool = False
    spacing: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        steps = self.spacing
        sound = isinstance(steps, tuple | list) and all(
            type(step) in (int, float) and 0 < step < math.inf for step in steps
        )
        if not sound or len(steps) not in (0, 2, 3) or not isinstance(self.surface, bool):
            raise UsageError(
                f"segmentation: surface={self.surface!r}, spacing={steps!r}: give True or False, and the distance of "
                "neighboring pixels along each axis, such as (0.5, 0.5), or (3.0, 1.0, 1.0) of volumes"
            )
        object.__setattr__(self, "spacing", tuple(map(float, steps)))
        if self.surface:
            object.__setattr__(self, "metrics", (*type(self).metrics[:-1], *SURFACE_METRICS, "loss"))

    @override
    def read_targets(self, y: NDArray[Any], shape: tuple[int, ...], where: str) -> Tensor:
        if y.ndim == len(shape) + 1:  # a channel of one
            y = y[:, 0] if y.shape[1] == 1 else y[..., 0] if y.shape[-1] == 1 else y
        if y.ndim != len(shape):
            gray = (
                f"; gray images are [N, 1, H, W], floats [N, {shape[0]}, {shape[1]}] signals" if len(shape) == 2 else ""
            )
            raise UsageError(
                f"{where}: masks of shape {y.shape} for samples of shape {shape}: give a class a pixel{gray}"
            )
        masks = y.astype(np.uint8) if y.size and y.min() >= 0 and y.max() <= IGNORED else np.zeros(0)
        if not np.array_equal(masks, y):
            raise UsageError(
                f"{where}: masks with values from {y.min()} to {y.max()}; give whole numbers, the class 0, 1, ... of "
                f"each pixel, or {IGNORED} where it is ignored"
            )
        return torch.from_numpy(masks)

    @override
    def make_blank_targets(self, samples: int, shape: tuple[int, ...], outputs: int) -> Tensor:
        return torch.zeros((1, *shape[1:]), dtype=torch.uint8).expand(samples, *shape[1:])

    @override
    def count_outputs(self, targets: Iterable[Tensor]) -> int:
        return 1 + max((int(y[y != IGNORED].max()) for y in targets if (y != IGNORED).any()), default=0)

    @override
    def check_outputs(self, targets: Mapping[str, Tensor], samples: int) -> tuple[str, ...]:
        counts = {where: torch.bincount(y.flatten(), minlength=IGNORED + 1) for where, y in targets.items()}
        held = sum(counts.values(), torch.zeros(IGNORED + 1, dtype=torch.int64)).nonzero()[:, 0].tolist()
        classes = [value for value in held if value != IGNORED]
        top = max(classes, default=0)
        where = next((place for place, count in counts.items() if count[top if top else IGNORED]), "masks")
        for place, count in counts.items():
            refuse_gray_levels(place, count.nonzero()[:, 0].tolist())
            if top <= 1 and count.nonzero()[:, 0].tolist() == [0, IGNORED]:
                raise UsageError(
                    f"{place}: masks hold only 0 and {IGNORED}, and {IGNORED} means that a pixel is ignored: write 1 "
                    f"in place of {IGNORED} if these are two classes, or else give their number ({{}})",
                    Ref(classes=2),
                )
        if (len(classes) == 2 and classes[0] == 0 and top > 1) or top > max(MANY_CLASSES, SPARSE * len(classes)):
            raise UsageError(
                f"{where}: masks hold class {top}, and only {len(classes)} of 0..{top} occur at any client: number "
                f"classes 0, 1, 2, ..., or give their number ({{}})",
                Ref(classes=top + 1),
            )
        return describe_absent("pixel", classes)

    @override
    def check_targets(self, y: Tensor, shape: tuple[int, ...], outputs: int, where: str) -> None:
        if y.dtype != torch.uint8:
            raise UsageError(f"{where}: masks of type {y.dtype}; they must be uint8, with {IGNORED} for ignored pixels")
        if tuple(y.shape[1:]) != tuple(shape[1:]):
            raise UsageError(
                f"{where}: masks of {' x '.join(map(str, y.shape[1:]))} for images of {' x '.join(map(str, shape[1:]))}"
                ": a mask must have its image's height and width"
            )
        if len(self.spacing) not in (0, y.ndim - 1):
            raise UsageError(
                f"{where}: masks of {' x '.join(map(str, y.shape[1:]))}, and spacing={self.spacing} of "
                f"{len(self.spacing)} axes: give one number for each axis"
            )
        counts = torch.bincount(y.flatten(), minlength=IGNORED + 1)
        wrong = counts[outputs:IGNORED].nonzero()
        if len(wrong):
            raise UsageError(
                f"{where}: a mask holds class {outputs + int(wrong[0, 0])}; classes must be 0..{outputs - 1}, or "
                f"{IGNORED} where a pixel is to be ignored (correct the masks, or say the number of classes)"
            )
        if not int(counts[:outputs].sum()):
            raise UsageError(f"{where}: every pixel is ignored: leave it out")

    @override
    def output_shape(self, shape: tuple[int, ...], outputs: int) -> tuple[int, ...]:
        return (outputs, *shape[1:])

    @override
    def count(self, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        cases = self.record(predictions, y, outputs)
        sums = {name: array.sum(axis=0).tolist() for name, array in (cases | compare_masks(cases)).items()}
        return {"samples": len(y), "loss_sum": sums.pop("loss"), **sums}

    @override
    def record(self, predictions: Tensor, y: Tensor, outputs: int) -> dict[str, NDArray[Any]]:
        """Return pixels by class of each image, and with ``surface`` its distances."""
        known, chosen = y != LEFT_OUT, self.predict(predictions).masked_fill(find_invalid(predictions), -1)
        losses = []
        for scores, masks in zip(torch.split(predictions, BATCH), torch.split(y, BATCH), strict=True):
            summed = F.cross_entropy(scores, masks, reduction="none", ignore_index=LEFT_OUT).flatten(1).sum(dim=1)
            losses.append(summed / (masks != LEFT_OUT).flatten(1).sum(dim=1).clamp(min=1))
        kept = {"hits": known & (chosen == y), "support": known, "predicted": known & (chosen >= 0)}
        return {
            **{name: _count_pixels(chosen if name == "predicted" else y, kept[name], outputs) for name in kept},
            "loss": torch.cat(losses).double().numpy(),
            "invalid": (known & (chosen < 0)).flatten(1).any(dim=1).numpy(),
            **(compare_surfaces(chosen, y, known, outputs, self.spacing) if self.surface else {}),
        }

    @override
    def is_possible(self, counts: Counts) -> bool:
        counted, predicted = sum(counts["support"]), sum(counts["predicted"])
        whole = predicted == counted or (predicted < counted and counts["invalid"] > 0)
        possible = whole and is_overlap(counts) and _are_possible_cases(counts)
        return possible and (not self.surface or are_possible_surfaces(counts))

    @override
    def count_classes(self, y: Tensor, outputs: int) -> Tensor:
        return torch.bincount(y.flatten(), minlength=IGNORED + 1)[:outputs].cpu()

    @override
    def describe(self, y: Tensor) -> Mapping[str, str]:
        counts = torch.bincount(y.flatten(), minlength=IGNORED + 1).double()
        known = counts[:IGNORED]
        shares = [(share, number) for number, share in enumerate((known / known.sum().clamp(min=1)).tolist()) if share]
        told = (f"{number}: {share:.1%}" for share, number in shares)
        facts = {"share of each class": join_some(told, shown=NAMED)}
        facts["empty masks"] = str(len(find_empty_masks(y)))
        if counts[IGNORED]:
            facts["ignored"] = f"{float(counts[IGNORED] / counts.sum()):.1%}"
        return facts


def _are_possible_cases(counts: Counts) -> bool:
    """Return whether so many cases may have each class, and such a Dice and IoU in total."""
    names = ("support", "predicted", "present", "cases", "case_iou", "case_dice")
    by_class = [*zip(*(counts[name] for name in names), strict=True)]
    return all(
        min(1, support) <= present <= min(support, cases)
        and min(1, support + predicted) <= cases <= min(support + predicted, counts["samples"])
        and 0 <= iou <= dice <= cases
        for support, predicted, present, cases, iou, dice in by_class[min(1, len(by_class) - 1) :]
    )


def _count_pixels(classes: Tensor, kept: Tensor, outputs: int) -> NDArray[np.int64]:
    """Return the number of pixels of each class ``[N, K]`` in each image of ``classes [N, ...]`` that are ``kept``."""
    place = classes.flatten(1) + outputs * torch.arange(len(classes))[:, None]
    counts = torch.bincount(place[kept.flatten(1)], minlength=outputs * len(classes))
    return counts.reshape(-1, outputs).numpy()


def refuse_gray_levels(where: str, values: Collection[int]) -> None:
    """Raise :class:`UsageError` if masks ``where`` hold ``values`` 0..255 that are no classes, as of smoothed edges."""
    between = [value for value in values if 0 < value < IGNORED]
    if IGNORED in values and len(between) > MANY_CLASSES and max(between) >= GRAY:
        raise UsageError(
            f"{where}: masks hold 255 and {len(between)} values between 0 and 255, as after smoothing: they would "
            "all be classes; write one number for each class, such as 1 from 128 on, or give the number of "
            "classes ({})",
            Ref(classes=IGNORED),
        )


def find_empty_masks(y: Tensor) -> Tensor:
    """Return the indices of masks ``y [N, ...]`` with only background and ignored pixels, int64."""
    return ((y == 0) | (y == IGNORED)).flatten(1).all(dim=1).nonzero()[:, 0].cpu()
