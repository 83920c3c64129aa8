"""The command ``fedshift plan``: voxels and patches for segmentation, from counts of each site's cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from ..config.grid_plan import Counts, Fingerprint, add_fingerprints, find_percentile, format_plan, make_plan, read_plan
from ..config.spec import DataSpec
from ..console.terminal import make_console, print_line, print_parts, show_loading
from ..utils.errors import UsageError, as_flag
from ..utils.files import require_writable, write_atomically
from .data import Reading


def plan(
    *sources: str,
    spec: Reading = DataSpec(),
    patch_voxels: int | None = None,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
) -> int:
    """Choose voxels and patches for images with masks by nnU-Net's rule, from counts of each site's training cases.

    The file holds counts and the plan, no names of cases and no images: a site can read it before it sends it. Give it
    to `fedshift run` and others as --plan.

    Args:
        sources: Directories of your own, of one site or of a folder for each, or files that this command wrote apart,
            whose sites are put together.
        patch_voxels: Most voxels in a patch; by default 96 x 96 x 96, or 512 x 512 for pictures.
        out: File to write.

    """
    if not sources:
        raise UsageError("give a directory with images and masks, or files that `fedshift plan` wrote")
    if patch_voxels is not None and patch_voxels < 1:
        raise UsageError(f"--patch-voxels {patch_voxels}: give 1 or more")
    for name in ("spacing", "patch", "image_size"):
        if getattr(spec, name) is not None:
            raise UsageError(f"{as_flag(name)} is chosen by the plan: leave it out")
    console = make_console()
    if out:
        require_writable(out)
    sites: dict[str, Fingerprint] = {}
    for source in sources:
        read = read_plan(Path(source))[1] if source.lower().endswith(".json") else _count(source, spec)
        if twice := sites.keys() & read.keys():
            raise UsageError(f"site {min(twice)!r} is in {source} and in another source: give each site once")
        sites |= read
    made = make_plan(sites, patch_voxels)
    settings = {name: value for name, value in made.settings.items() if value}
    chosen = " ".join(as_flag(name, value) for name, value in settings.items())
    print_parts(console, [_tabulate(sites), Text(f"Plan of {add_fingerprints(sites).cases} cases: {chosen}")])
    if out:
        write_atomically(out, format_plan(sites, made).encode())
        print_line(console, f"Written: {out}; {as_flag('plan', out)} uses it")
    return 0


def _count(source: str, spec: DataSpec) -> dict[str, Fingerprint]:
    """Return the counts of each client in a directory, which may hold a single client."""
    from ..data.files.grids import count_cases
    from ..data.files.listing import holds_one_client
    from ..data.schema import Layout
    from ..data.sources import apply_splits, load_source

    alone = Path(source).is_dir() and holds_one_client(Path(source))
    with show_loading(make_console()) as progress:
        layout = Layout(name=source) if alone else None
        try:
            made = load_source(source, replace(spec, patch="8"), progress, schema=layout)
        except UsageError as error:
            if "patch" in error.settings:
                raise UsageError(f"{source} has no images with masks, for which a plan is: give such data") from error
            raise
        counts = count_cases(apply_splits(made, spec))
    print_parts(make_console(), (Text(f"Note: {notice}") for notice in (*made.notices, *made.faults)))
    return counts


def _tabulate(sites: Mapping[str, Fingerprint]) -> Table:
    """Return a table of the counts of each site and of all sites."""
    table = Table(box=None, title="training cases: columns x rows x slices, lowest to highest", title_justify="left")
    table.add_column("site", overflow="fold")
    measured = any(site.spacings for site in sites.values())
    for title in ("cases", *(("spacing (mm)", "extent (mm)") if measured else ("pixels",)), "share of each class"):
        table.add_column(title, justify="right" if title == "cases" else "left", overflow="fold")
    rows = {**sites, **({"all": add_fingerprints(sites)} if len(sites) > 1 else {})}
    for name, site in rows.items():
        total = max(1, sum(site.voxels))
        shares = ", ".join(f"{number}: {count / total:.2%}" for number, count in enumerate(site.voxels))
        axes = (site.spacings, site.extents) if measured else (site.sizes,)
        table.add_row(Text(name), f"{site.cases:,}", *map(_format_axes, axes), shares)
    return table


def _format_axes(axes: tuple[Counts, ...]) -> str:
    """Format lengths along axes as ``0.5 x 0.5 to 0.7 x 3 (median 0.5 x 0.6 x 3)``."""
    ends = [(min(along), max(along)) for along in axes]
    said = " x ".join(f"{low:g}" if low == high else f"{low:g} to {high:g}" for low, high in ends)
    medians = " x ".join(f"{find_percentile(along, 0.5):g}" for along in axes)
    return said if all(math.isclose(*each) for each in ends) else f"{said} (median {medians})"
