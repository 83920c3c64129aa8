"""Samples as pictures, uint8 ``[H, W, C]``, with the outlines of their masks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..tasks.segmentation import IGNORED
from .samples import Samples

Bytes = NDArray[np.uint8]

OUTLINES = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (213, 94, 0), (204, 121, 167), (0, 114, 178))
"""Colors of the classes 1, 2, ... in turn: Okabe and Ito's, "Color Universal Design" (2008)."""


def to_pictures(
    split: Samples, rows: torch.Tensor | slice, classes: int, predicted: torch.Tensor | None = None
) -> Bytes:
    """Return images as pictures uint8 ``[n, H, W, C]``; a volume is shown by the slice with the most labeled voxels.

    Floats are stretched from their lowest to their highest value. Channels that are neither gray nor red, green and
    blue are averaged. Masks are drawn as outlines; with ``predicted`` masks, ``[n, ...]``, each picture has their
    outlines on the right, and those of the true masks on the left. Of a case of which patches are cut,
    one patch is shown.
    """
    x = split.read(rows).cpu().numpy()
    x = x if x.shape[1] in (1, 3) else x.mean(axis=1, keepdims=True)
    if x.dtype != np.uint8:
        low, high = float(x.min()), float(x.max())
        x = ((x - low) / (high - low or 1.0) * 255).round().astype(np.uint8)
    masks = split.take_targets(rows).cpu().numpy() if split.y.ndim == x.ndim - 1 else None
    shown = [each for each in (masks, None if predicted is None else predicted.cpu().numpy()) if each is not None]
    if x.ndim == 5:
        depth = x.shape[2] // 2
        levels = [depth] * len(x) if masks is None else [_find_level(mask, depth) for mask in masks]
        x = np.stack([volume[:, level] for volume, level in zip(x, levels, strict=True)])
        shown = [np.stack([mask[k] for mask, k in zip(each, levels, strict=True)]) for each in shown]
    images = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    outlined = [
        np.stack([draw_overlay(image, mask, classes) for image, mask in zip(images, each, strict=True)])
        for each in shown
    ]
    return np.concatenate(outlined, axis=2) if outlined else images


def _find_level(mask: Bytes, middle: int) -> int:
    """Return the slice of a mask ``[D, H, W]`` with the most labeled voxels, or the middle one of an empty mask."""
    labeled = ((mask > 0) & (mask != IGNORED)).sum(axis=(1, 2))
    return int(labeled.argmax()) if labeled.any() else middle


def draw_overlay(image: Bytes, mask: Bytes, classes: int) -> Bytes:
    """Return ``image`` with the outline of each region of ``mask``, uint8 ``[H, W, 3]``.

    An outline is the outermost pixels of a region, in the color of its class; the background, class 0, has none.
    Ignored pixels are blended with gray. A dark image is brightened, since it would otherwise be black between
    outlines; contrast is preserved except in its brightest hundredth.

    Args:
        image: uint8 ``[H, W, C]`` with C 1 or 3.
        mask: Class of each pixel, uint8 ``[H, W]``; classes beyond ``classes`` are not drawn.
        classes: Number of classes.

    """
    bright = 255 / max(float(np.percentile(image, 99)), 32.0)
    levels = (image * bright).round().clip(0, 255).astype(np.uint8)
    drawn = np.broadcast_to(levels, (*mask.shape, 3)).copy()
    ignored = mask == IGNORED
    drawn[ignored] = drawn[ignored] // 2 + 64
    edge = np.zeros(mask.shape, dtype=bool)
    for one, other in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        differs = mask[one] != mask[other]
        edge[one] |= differs
        edge[other] |= differs
    for number in range(1, classes):
        drawn[edge & (mask == number)] = OUTLINES[(number - 1) % len(OUTLINES)]
    return drawn
