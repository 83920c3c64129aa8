"""Thin, thick, swollen and fractured strokes of digits, as in Morpho-MNIST (Castro et al., arXiv:1809.10780).

Parameters and steps follow its authors' package (https://github.com/dccastro/Morpho-MNIST): a digit is enlarged four
times, binarized at half its range, changed, and reduced again. Enlarging and reducing are linear in each direction, so
each is a matrix product; erosion and dilation by a disk are thresholds of Euclidean distances. There are three
differences. The skeleton is by Zhang and Suen (Communications of the ACM 27(3), 1984) instead of the medial axis, so
the mean thickness differs slightly. A fracture is cut along an exact segment instead of one of pixels. Draws are keyed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import convolve, distance_transform_edt, gaussian_filter1d, map_coordinates, zoom

Bytes = NDArray[np.uint8]
Ink = NDArray[np.bool_]
Floats = NDArray[np.float64]

SCALE = 4
THINNING, THICKENING = 0.7, 1.0  # of the mean thickness
SWELLING_STRENGTH, SWELLING_RADIUS = 3, 7  # exponent; pixels times half the square root of the mean thickness
FRACTURES, FRACTURE_THICKNESS, FRACTURE_BEYOND = 3, 1.5, 0.5  # pixels
TIPS_AND_FORKS, ANGLE_WINDOW = 2, 2  # pixels around them that stay; pixels around a center that give its direction


def perturb(digits_NHW: Bytes, kinds: Sequence[str], streams: Sequence[np.random.Generator]) -> Bytes:
    """Change each digit by its kind, a key of :data:`KINDS`, with draws from its stream.

    A digit without a measurable stroke is only binarized.
    """
    ink = _enlarge(digits_NHW)
    skeletons = thin_to_skeleton(ink)
    changed = np.stack(
        [
            KINDS[kind](_Stroke(one, bones, rng)) if bones.any() else one
            for kind, one, bones, rng in zip(kinds, ink, skeletons, streams, strict=True)
        ]
    )
    return _reduce(changed.astype(np.float64))


def _enlarge(digits_NHW: Bytes) -> Ink:
    up = _resizing_matrix(digits_NHW.shape[1], SCALE), _resizing_matrix(digits_NHW.shape[2], SCALE)
    fine = np.floor((up[0] @ digits_NHW @ up[1].T).clip(0, 255))
    low, high = fine.min(axis=(1, 2), keepdims=True), fine.max(axis=(1, 2), keepdims=True)
    return np.asarray((fine >= low + (high - low) * 0.5) & (high > low))


def _reduce(fine_NHW: Floats) -> Bytes:
    down = _resizing_matrix(fine_NHW.shape[1], 1 / SCALE), _resizing_matrix(fine_NHW.shape[2], 1 / SCALE)
    return (255 * (down[0] @ fine_NHW @ down[1].T).clip(0, 1)).astype(np.uint8)


def _resizing_matrix(size: int, factor: float) -> Floats:
    """Return the matrix of a pyramid step up or down: cubic resampling, smoothed by a third of the factor."""
    sigma = 2 * SCALE / 6
    if factor > 1:
        return gaussian_filter1d(_resampling_matrix(np.eye(size), factor), sigma, axis=0, mode="mirror")
    return _resampling_matrix(gaussian_filter1d(np.eye(size), sigma, axis=0, mode="mirror"), factor)


def _resampling_matrix(rows: Floats, factor: float) -> Floats:
    return np.asarray(zoom(rows, (factor, 1), order=3, mode="mirror", grid_mode=True))


def thin_to_skeleton(ink_NHW: Ink) -> Ink:
    """Thin strokes to one-pixel lines with Zhang and Suen's two passes, until nothing changes."""
    padded = np.pad(ink_NHW, ((0, 0), (1, 1), (1, 1))).astype(np.uint8)
    flat, width = padded.reshape(-1), padded.shape[2]
    around = (-width, 1 - width, 1, width + 1, width, width - 1, -1, -width - 1)  # clockwise from the north
    alive, before = np.flatnonzero(flat), -1
    while len(alive) != before:
        before = len(alive)
        for removable in _REMOVABLE:
            pattern = np.zeros(len(alive), np.uint8)
            for bit, offset in enumerate(around):
                pattern |= flat[alive + offset] << np.uint8(bit)
            gone = removable[pattern]
            flat[alive[gone]] = 0
            alive = alive[~gone]
    return padded[:, 1:-1, 1:-1].astype(bool)


def _removable_pixels() -> tuple[Ink, Ink]:
    """Return which of the 256 neighborhoods allow removing a pixel, in the first and in the second pass."""
    near = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(bool)
    north, east, south, west = (near[:, place] for place in (0, 2, 4, 6))
    border = np.isin(near.sum(axis=1), range(2, 7)) & ((~near & np.roll(near, -1, axis=1)).sum(axis=1) == 1)
    first = border & ~(north & east & south) & ~(east & south & west)
    second = border & ~(north & east & west) & ~(north & south & west)
    return first, second


_REMOVABLE = _removable_pixels()


@dataclass(frozen=True)
class _Stroke:
    """An enlarged digit: its ink and skeleton ``[H, W]``, and its random stream."""

    ink: Ink
    bones: Ink
    rng: np.random.Generator

    @cached_property
    def depth(self) -> Floats:
        """Distance of each ink point from the background."""
        return np.asarray(distance_transform_edt(self.ink))

    @property
    def half_thickness(self) -> float:
        """Mean distance of the skeleton from the background, in enlarged pixels."""
        return float(self.depth[self.bones].mean())


def _swell(stroke: _Stroke) -> Floats:
    """Sample points at distance r < R from a point of the skeleton at distance ``(r / R) ** strength * R``."""
    center = stroke.rng.choice(np.argwhere(stroke.bones))
    radius = SWELLING_RADIUS / 2 * np.sqrt(2 * stroke.half_thickness / SCALE) * SCALE
    offsets = np.indices(stroke.ink.shape) - center[:, None, None]
    distance = np.hypot(*offsets)
    inside = distance < radius
    nearer = (distance[inside] / radius) ** (SWELLING_STRENGTH - 1)
    swollen = stroke.ink.astype(np.float64)
    swollen[inside] = map_coordinates(swollen, center[:, None] + nearer * offsets[:, inside], order=1)
    return swollen


def _fracture(stroke: _Stroke) -> Ink:
    """Cut across the stroke at points of the skeleton, away from tips and forks if possible."""
    points = np.argwhere(stroke.bones)
    neighbors = convolve(stroke.bones.astype(np.uint8), np.ones((3, 3), np.uint8), mode="constant")[stroke.bones] - 1
    ends = points[np.isin(neighbors, (1, 3))]
    apart = np.hypot(*(points[:, None] - ends).transpose(2, 0, 1)) > TIPS_AND_FORKS * SCALE
    whole = points[apart.all(axis=1)]
    brush = np.ceil((FRACTURE_THICKNESS * SCALE - 1) / 2)
    places = np.argwhere(stroke.ink)
    left = stroke.ink.copy()
    for center in stroke.rng.choice(whole if len(whole) else points, size=FRACTURES):
        across = _normal_direction(points[np.abs(points - center).max(axis=1) <= ANGLE_WINDOW * SCALE])
        reach = stroke.depth[tuple(center)] + FRACTURE_BEYOND * SCALE
        offsets = places - center
        along = (offsets @ across).clip(-reach, reach)
        cut = np.hypot(*(offsets - along[:, None] * across).T) <= brush
        left[tuple(places[cut].T)] = False
    return left


def _normal_direction(points: NDArray[np.int64]) -> Floats:
    """Return the direction (row, column) perpendicular to the main axis of points, from their second moments."""
    (rows, both), (_, columns) = np.cov(points.T, bias=True) if len(points) > 1 else np.zeros((2, 2))
    angle = 0.5 * np.arctan2(2 * both, columns - rows) + np.pi / 2
    return np.array([np.sin(angle), np.cos(angle)])


KINDS: dict[str, Callable[[_Stroke], Ink | Floats]] = {
    "plain": lambda stroke: stroke.ink,
    "thin": lambda stroke: stroke.depth > int(THINNING * stroke.half_thickness),
    "thick": lambda stroke: np.asarray(distance_transform_edt(~stroke.ink)) <= int(THICKENING * stroke.half_thickness),
    "swollen": _swell,
    "fractured": _fracture,
}
"""Functions that change binarized strokes, by name of the perturbation."""
