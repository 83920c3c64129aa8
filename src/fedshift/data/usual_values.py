"""Usual values of training data, and how to tell that other data are far from them.

A network learns from numbers, not from units: a weight in grams at a new site, where training had kilograms, gives a
confident prediction and no error. Mean and standard deviation of each column or channel suffice to notice that; a
client's scaling states them already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST = 10
"""Minimum number of values to compare units and to find outlying values."""
UNIT_RATIO, SCALE_RATIO = 10.0, 15.0
"""Columns have other units, and images other scales, if means and standard deviations differ by such a factor.

Mean and spread of fluorescence and of bright-field microscopy differ by 11, of 12 and 16 bits by 16.
"""
ALIKE = 3.0
"""The two factors of another unit differ from each other by less than this."""
APART = 4.0
"""Means are too different beyond this times the sum of their standard deviations."""
FAR, FAR_OF_FEW = 100.0, 30.0
"""A value is far if it is this many standard deviations of training from its mean, among others and among few."""
GAP, GAP_OF_ONE = 100.0, 1e4
"""A value is far from all others at this many times their range, or if these are one value, at this many times it."""
NINES = re.compile(r"-?9{2,}(\.9+)?")
"""Usual codes for missing values, such as 999 and -99, which are far from the others beyond these' range."""
LOOKED_AT = 1000
"""Maximum number of samples of a client that usual values are computed on."""
PIECE = 2**22
"""Number of values to look at at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UsualValues:
    """Mean and standard deviation of each column or channel, float64 ``[F]``; NaN where nothing is known.

    ``floor``: the value of black, where factors begin. ``factor``: the least factor of another unit.
    """

    mean: Floats
    std: Floats
    floor: float = 0.0
    factor: float = UNIT_RATIO

    @classmethod
    def measure(cls, x: NDArray[Any], **more: float) -> UsualValues:
        """Return the usual values of samples ``x [N, F, ...]``, in which NaN is a missing value."""
        step = max(1, PIECE // max(1, x[:1].size))
        pieces = np.split(x, range(step, len(x), step))
        return cls.pool([cls._measure_piece(piece, **more) for piece in pieces], list(map(len, pieces)))

    @classmethod
    def _measure_piece(cls, x: NDArray[Any], **more: float) -> UsualValues:
        values = x.reshape(len(x), x.shape[1], -1)
        known = ~np.isnan(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)
        count = known.sum(axis=(0, 2))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = np.where(known, values, 0).sum(axis=(0, 2), dtype=np.float64) / count
            gaps = np.where(known, values - mean[:, None], 0)
            std = np.sqrt(np.einsum("nfp,nfp->f", gaps, gaps) / count)
        return cls(mean=mean, std=std, **more)

    @classmethod
    def pool(cls, parts: Sequence[UsualValues], counts: Sequence[int]) -> UsualValues:
        """Return the usual values of all ``parts`` together, which have ``counts`` samples."""
        mean_KF, std_KF = np.stack([part.mean for part in parts]), np.stack([part.std for part in parts])
        share_KF = np.where(np.isnan(mean_KF), 0, np.array(counts, np.float64)[:, None])
        with np.errstate(invalid="ignore", divide="ignore"):
            share_KF = share_KF / share_KF.sum(axis=0)
            mean = np.where(share_KF > 0, share_KF * mean_KF, 0).sum(axis=0) / share_KF.sum(axis=0)
            spread = np.where(share_KF > 0, share_KF * (std_KF**2 + (mean_KF - mean) ** 2), 0).sum(axis=0)
        return cls(mean=mean, std=np.sqrt(spread), floor=parts[0].floor, factor=parts[0].factor)

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON values of four digits, null where nothing is known."""
        rounded = [[float(f"{v:.4g}") if np.isfinite(v) else None for v in values] for values in (self.mean, self.std)]
        return {"mean": rounded[0], "std": rounded[1], "floor": self.floor, "factor": self.factor}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> UsualValues:
        """Return the values described by the result of :meth:`to_json`."""
        mean, std = (np.array(facts[name], dtype=np.float64) for name in ("mean", "std"))
        return cls(mean=mean, std=std, floor=float(facts["floor"]), factor=float(facts["factor"]))

    def list_apart(self, own: UsualValues, count: int, whose: str = "in training") -> dict[int, str]:
        """Return the features of ``own``, of ``count`` values each, whose values are far from these, each with numbers.

        Fewer than :data:`LEAST` values have no spread: their mean must be :data:`FAR_OF_FEW` deviations away.
        """
        with np.errstate(all="ignore"):
            gap, few = np.abs(own.mean - self.mean), count < LEAST
            apart = gap > (FAR_OF_FEW * self.std if few else APART * (self.std + own.std))
            level, spread = (own.mean - self.floor) / (self.mean - self.floor), own.std / self.std
            alike = (level > 0) & (np.abs(np.log(level / spread)) < np.log(ALIKE))
            least = np.log(self.factor)
            rescaled = alike & (np.abs(np.log(level)) > least) & (np.abs(np.log(spread)) > least) & (not few)
        chosen = np.flatnonzero((apart | rescaled) & (self.std > 0) & np.isfinite(own.mean)).tolist()
        return {number: self._describe(own, number, level[number], whose) for number in chosen}

    def _describe(self, own: UsualValues, number: int, level: float, whose: str) -> str:
        times = max(level, 1 / level) if level > 0 else 0.0
        way, rounded = "larger" if level > 1 else "smaller", float(f"{times:.2g}")
        factor = f"about {rounded:,.0f} times {way}: " if times > UNIT_RATIO else ""
        return (
            f"{factor}mean {own.mean[number]:.4g} (deviation {own.std[number]:.3g}), {whose} "
            f"{self.mean[number]:.4g} ({self.std[number]:.3g})"
        )

    def describe_far(self, x: NDArray[Any]) -> dict[int, str]:
        """Return the features in which samples ``x [N, F, ...]`` are far from these, or single values of rows are."""
        found = self.list_apart(UsualValues.measure(x), x[:, 0].size) if len(x) else {}
        if x.ndim > 2:
            return found
        least = FAR_OF_FEW if len(x) < LEAST else FAR
        with np.errstate(all="ignore"):
            far_NF = np.abs(x.astype(np.float64) - self.mean) > least * np.where(self.std > 0, self.std, np.inf)
        for number in set(np.flatnonzero(far_NF.any(axis=0)).tolist()).difference(found):
            rows = np.flatnonzero(far_NF[:, number])
            found[number] = (
                f"{x[rows[0], number]:.6g} in data row {rows[0] + 1}{f' and {len(rows) - 1:,} more' * (len(rows) > 1)}"
                f", in training mean {self.mean[number]:.4g} (deviation {self.std[number]:.3g})"
            )
        return found


def find_outlying(values: NDArray[Any]) -> Iterator[tuple[str, int]]:
    """Find the lowest and the highest of ``values [N]`` if it is far from all others.

    Yields its text, as ``-999 (1 of 60)``, and the place of the first such value. Where the others have few different
    values, it must be rare, or a usual code for a missing value.
    """
    levels, first, counts = np.unique(values.astype(np.float64).round(6), return_index=True, return_counts=True)
    levels = levels[np.isfinite(levels)]
    for at, near, others in ((0, 1, levels[1:]), (len(levels) - 1, -2, levels[:-1])):
        if not len(others) or counts[: len(levels)].sum() - counts[at] < LEAST:
            continue
        text, gap, spread = f"{levels[at]:.6g}", abs(levels[at] - levels[near]), others[-1] - others[0]
        code = NINES.fullmatch(text) is not None and spread > 0
        rare = len(others) >= LEAST or counts[at] <= max(1, len(values) // 100)
        if code or rare:
            most = 1 if code else GAP
            if gap > (most * spread if spread else GAP_OF_ONE * max(1.0, abs(others[0]))):
                yield f"{text} ({counts[at]:,} of {len(values):,})", int(first[at])
