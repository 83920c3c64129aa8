"""Counts of sites' training cases, and the voxels and patches that nnU-Net's rule derives from them.

The rule comes from nnU-Net 2 (Isensee et al. 2021, doi:10.1038/s41592-020-01008-z, supplementary note 2;
``ExperimentPlanner``), except that a patch is bounded by its voxels, not by an estimate of the GPU's memory:

- Spacing: the median over cases along each axis. An axis whose median is over 3 times the others', with under a third
  of their voxels, takes the 10th percentile, but no less than the largest of the others.
- Patch: sides in inverse proportion to the spacing, of 256^3 voxels (pictures: 2048^2), but no more than the median
  size after resampling, rounded up to what the U-Net's poolings divide. Then the side that is the largest in
  proportion to the median size is shortened, until the patch has few enough voxels.

Cases of sites are pooled by adding their counts, so that nothing else leaves a site. Lengths in counts have three
digits. Axes are columns, rows and slices, in this order.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..utils.errors import UsageError

ANISOTROPIC = 3.0
FINE = 0.1
"""Percentile of the spacing along an axis that is much coarser than the others."""
_BEGIN = {2: 2048, 3: 256}
_UNIT = {2: 16, 3: 8}
"""Voxels along an axis that the U-Net pools to one, by the number of axes."""
LARGEST = {2: 512**2, 3: 96**3}
"""Default of the most voxels in a patch, by the number of axes."""
_FORMAT = 1

Counts = Mapping[float, int]


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Counts of a site's training cases.

    Attributes:
        cases: Number of training cases.
        sizes: Cases by number of voxels, along each axis.
        spacings: Cases by millimeters between voxels, along each axis; empty for pictures.
        extents: Cases by millimeters from end to end, along each axis; empty for pictures.
        voxels: Voxels of each class; ignored ones are not counted.

    """

    cases: int
    sizes: tuple[Counts, ...]
    spacings: tuple[Counts, ...] = ()
    extents: tuple[Counts, ...] = ()
    voxels: tuple[int, ...] = ()

    @classmethod
    def count(
        cls, sizes: Sequence[Sequence[int]], spacings: Sequence[Sequence[float]], voxels: Sequence[int]
    ) -> Fingerprint:
        """Return the counts of cases with ``sizes``, and ``spacings`` unless these are empty, by case and axis."""
        extents = [
            [n * step for n, step in zip(*case, strict=True)] for case in zip(sizes, spacings, strict=bool(spacings))
        ]

        def count_axes(lengths: Sequence[Sequence[float]]) -> tuple[Counts, ...]:
            return tuple(_sort(Counter(map(float, along))) for along in zip(*lengths, strict=True))

        spacings, extents = ([[float(f"{each:.3g}") for each in case] for case in own] for own in (spacings, extents))
        return cls(
            cases=len(sizes), sizes=count_axes(sizes), spacings=count_axes(spacings), extents=count_axes(extents),
            voxels=tuple(voxels),
        )  # fmt: skip

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Fingerprint:
        """Return counts from a JSON object; raise :class:`ValueError`, in words, if they cannot be counts of cases."""
        cases, voxels = given["cases"], tuple(given["voxels"])
        named = {
            name: tuple({float(length): count for length, count in along.items()} for along in given[name])
            for name in ("sizes", "spacings", "extents")
        }
        for along in (each for axes in named.values() for each in axes):
            if not all(type(n) is int and n > 0 for n in along.values()) or sum(along.values()) != cases:
                raise ValueError(f"numbers of cases that do not add up to {cases}")
            if not all(0 < length < math.inf for length in along):
                raise ValueError("lengths that are not positive")
        if not all(type(n) is int and n >= 0 for n in voxels) or type(cases) is not int:
            raise ValueError("numbers that are not counts")
        axes = len(named["sizes"])
        if axes not in _UNIT or {len(named["spacings"]), len(named["extents"])} not in ({axes}, {0}):
            raise ValueError("other axes than two or three")
        return cls(cases=cases, voxels=voxels, **named)

    def find_medians(self) -> tuple[tuple[float, ...], ...]:
        """Return the medians of spacings, extents and sizes along the axes; empty where there are no counts."""
        return tuple(
            tuple(find_percentile(each, 0.5) for each in axes) for axes in (self.spacings, self.extents, self.sizes)
        )


@dataclass(frozen=True, kw_only=True)
class GridPlan:
    """Millimeters between voxels (empty: files keep theirs) and voxels of a patch, along columns, rows and slices."""

    spacing: tuple[float, ...]
    patch: tuple[int, ...]

    @property
    def settings(self) -> dict[str, str | None]:
        """The settings of the plan."""
        return {
            "spacing": ",".join(f"{step:g}" for step in self.spacing) or None,
            "patch": ",".join(map(str, self.patch)),
        }


def _sort(counts: Counts) -> Counts:
    """Return counts in the order of their lengths, which does not reveal the order of cases."""
    return dict(sorted(counts.items()))


def find_percentile(counts: Counts, share: float) -> float:
    """Return the percentile of lengths by their number, interpolated linearly as by ``numpy.percentile``."""
    lengths = sorted(counts)
    ends = list(accumulate(counts[length] for length in lengths))
    place = (ends[-1] - 1) * share
    low, high = (lengths[bisect_right(ends, number)] for number in (math.floor(place), math.ceil(place)))
    return low + (high - low) * (place - math.floor(place))


def add_fingerprints(sites: Mapping[str, Fingerprint]) -> Fingerprint:
    """Return the counts of all sites' cases; raise :class:`UsageError` if they have other axes or no spacings."""
    (first, one), *others = sites.items()
    for name, other in others:
        if (len(one.sizes), len(one.spacings)) != (len(other.sizes), len(other.spacings)):
            described = (
                f"{len(each.sizes)} axes {'with' if each.spacings else 'without'} millimeters" for each in (one, other)
            )
            raise UsageError(
                f"site {first!r} has {next(described)} and site {name!r} has {next(described)}: make one plan for "
                "pictures and another for medical images"
            )

    def add(name: str) -> tuple[Counts, ...]:
        along = zip(*(getattr(site, name) for site in sites.values()), strict=True)
        return tuple(_sort(sum(map(Counter, each), Counter[float]())) for each in along)

    classes = max(len(site.voxels) for site in sites.values())
    padded = [(*site.voxels, *[0] * (classes - len(site.voxels))) for site in sites.values()]
    return Fingerprint(
        cases=sum(site.cases for site in sites.values()), sizes=add("sizes"), spacings=add("spacings"),
        extents=add("extents"), voxels=tuple(map(sum, zip(*padded, strict=True))),
    )  # fmt: skip


def make_plan(sites: Mapping[str, Fingerprint], largest: int | None = None) -> GridPlan:
    """Return the plan for the cases of all sites; ``largest``: most voxels in a patch, by default :data:`LARGEST`."""
    pooled = add_fingerprints(sites)
    axes = range(len(pooled.sizes))
    steps, extents, sizes = map(list, pooled.find_medians())
    if steps:
        coarse = max(axes, key=steps.__getitem__)
        others = [axis for axis in axes if axis != coarse]
        beside = max(steps[axis] for axis in others)
        if steps[coarse] > ANISOTROPIC * beside and sizes[coarse] * ANISOTROPIC < min(sizes[axis] for axis in others):
            steps[coarse] = max(find_percentile(pooled.spacings[coarse], FINE), beside)
        steps = [float(f"{step:.4g}") for step in steps]
        sizes = [max(1, round(extent / step)) for extent, step in zip(extents, steps, strict=True)]
    unit, edge = _UNIT[len(axes)], _BEGIN[len(axes)]
    aspect = [1 / step for step in steps or [1.0] * len(axes)]
    scale = edge / math.prod(aspect) ** (1 / len(axes))
    begin = [min(round(each * scale), size) for each, size in zip(aspect, sizes, strict=True)]
    patch = [max(1, -(-int(side) // unit)) * unit for side in begin]
    most = LARGEST[len(axes)] if largest is None else largest
    while math.prod(patch) > most and max(patch) > unit:
        shrinks = [axis for axis in axes if patch[axis] > unit]
        patch[max(shrinks, key=lambda axis: (patch[axis] / sizes[axis], axis))] -= unit
    return GridPlan(spacing=tuple(steps), patch=tuple(patch))


def format_plan(sites: Mapping[str, Fingerprint], plan: GridPlan) -> str:
    """Return the content of a plan's file: settings and counts, and nothing else."""

    def write(value: Any) -> Any:
        return [
            {f"{length:g}": n for length, n in each.items()} if isinstance(each, Mapping) else each for each in value
        ]

    counts = {
        name: {field: write(value) if isinstance(value, tuple) else value for field, value in asdict(site).items()}
        for name, site in sites.items()
    }
    return json.dumps({"fedshift plan": _FORMAT, **plan.settings, "sites": counts}, indent=1) + "\n"


def read_plan(path: Path) -> tuple[dict[str, str | None], dict[str, Fingerprint]]:
    """Return the settings and the sites' counts in a plan's file; raise :class:`UsageError` for another file."""
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["fedshift plan"] != _FORMAT:
            raise ValueError(f"format {found['fedshift plan']}")
        settings = {name: found[name] for name in ("spacing", "patch")}
        sites = {str(name): Fingerprint.read(site) for name, site in found["sites"].items()}
        if not all(map(str.isprintable, sites)):
            raise ValueError("names of sites that cannot be shown")
        if not sites or not isinstance(settings["patch"], str) or not isinstance(settings["spacing"], str | None):
            raise ValueError("no sites, or other settings")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give a file that `fedshift plan` wrote") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else f"has {error}"
        raise UsageError(f"{path} is not a plan: it {why}; give a file that `fedshift plan` wrote") from error
    return settings, sites
