"""Distances between the surfaces of predicted and true masks, of each image.

The surface of a class consists of its pixels (voxels) with a side neighbor that has another class or is outside the
image. Each element of one surface has a distance to the nearest element of the other:

- The average symmetric surface distance is the sum of the distances of both surfaces' elements over their number
  (Heimann et al. 2009, doi:10.1109/TMI.2009.2013851).
- The 95 % Hausdorff distance is the larger of the two surfaces' 95th percentiles, as in MONAI
  (``monai.metrics.compute_hausdorff_distance``).

Those of a split are means over images.

An image in which a class is neither true nor predicted does not count for that class. If it is only one of the two,
there is no surface to measure to: each element, and the Hausdorff distance, then count as the distance between the
image's opposite corners, which no distance exceeds. (For the same reason the BraTS challenge counts 374 mm for a missed
tumor: https://www.synapse.org/Synapse:syn51156910/discussion/threadId=10357.) An ignored pixel has no class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .task import Counts

PERCENTILE = 95.0
Mask = NDArray[np.bool_]
Distances = NDArray[np.float64]


def compare_surfaces(
    predicted: Tensor, y: Tensor, known: Tensor, classes: int, spacing: Sequence[float]
) -> dict[str, Distances]:
    """Return the average and the 95 % Hausdorff distance, ``distances`` and ``hausdorff [N, K]``, of N images by class.

    Entries are zero for the background, class 0, and for a class that is neither true nor predicted.

    Args:
        predicted: Predicted classes, int64 ``[N, H, W]`` or ``[N, D, H, W]``; -1: none.
        y: True classes.
        known: Whether a pixel counts.
        classes: Number of classes.
        spacing: Distance of neighboring pixels along each axis; empty: 1.

    """
    average_NK, worst_NK = np.zeros((len(y), classes)), np.zeros((len(y), classes))
    steps = tuple(spacing) or (1.0,) * (y.ndim - 1)
    farthest = math.hypot(*((size - 1) * step for size, step in zip(y.shape[1:], steps, strict=False)))
    for image, (guess, truth, seen) in enumerate(zip(predicted, y, known, strict=True)):
        for number in torch.unique(torch.cat((guess[seen], truth[seen]))).tolist():
            masks = [((mask == number) & seen).numpy() for mask in (guess, truth)]
            if number <= 0:
                continue
            if all(mask.any() for mask in masks):
                found = measure_surfaces(masks, steps)
                average_NK[image, number] = np.concatenate(found).mean()
                worst_NK[image, number] = max(np.percentile(each, PERCENTILE) for each in found)
            else:
                average_NK[image, number] = worst_NK[image, number] = farthest
    return {"distances": average_NK, "hausdorff": worst_NK}


def are_possible_surfaces(counts: Counts) -> bool:
    """Return whether the sums of distances are possible, given ``cases``, ``hits``, ``support`` and ``predicted``."""
    names = ("distances", "hausdorff", "cases", "hits", "support", "predicted")
    for distances, hausdorff, cases, hits, support, predicted in zip(*(counts[name] for name in names), strict=True):
        equal = not cases or hits == support == predicted
        if not (distances >= 0 and hausdorff >= 0) or (equal and (distances or hausdorff)):
            return False
    return True


def measure_surfaces(masks: Sequence[Mask], spacing: Sequence[float]) -> list[Distances]:
    """Return the distance of each element of one mask's surface to the other's, and the other way round.

    Both masks must have a pixel. Only the bounding box of both is examined, since nothing outside it matters.
    """
    from scipy.ndimage import binary_erosion, distance_transform_edt  # takes longer to import than a small run

    places = np.nonzero(masks[0] | masks[1])
    box = tuple(slice(int(place.min()), int(place.max()) + 1) for place in places)
    surfaces = [mask[box] & ~binary_erosion(mask[box]) for mask in masks]
    distances = [distance_transform_edt(~surface, sampling=spacing) for surface in surfaces]
    return [distances[1][surfaces[0]], distances[0][surfaces[1]]]
