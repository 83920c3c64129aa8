"""Overview of a federation's data on the terminal and in figures: sizes, findings of the check, images, classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..data.checks.findings import Finding, Severity
from ..data.checks.number_faults import list_features
from ..data.checks.quality import Quality
from ..data.checks.survey import survey_splits
from ..data.federation import PLURALS, ClientData, Federation
from ..data.files.grids import list_headers
from ..data.pictures import to_pictures
from ..report.figures import save_each
from ..report.gallery import COLUMNS, class_chart, contact_sheet, feature_chart, pick_samples
from ..utils.random_streams import stream
from ..utils.words import join_some

SHOWN = 20
"""Maximum number of clients in tables and sheets of images."""
_STYLE: Mapping[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def describe(data: Federation) -> Table:
    """Tabulate the size of each client's splits, its training targets and the sample shape, with totals.

    Sizes are samples, with their patients (groups) in brackets where these are known.
    """
    splits = [name for name in ("train", "validation", "test") if any(name in c.splits for c in data.clients)]
    table = Table(box=None, title=Text(f"{data.name}: {len(data.clients):,} clients"), title_justify="left")
    table.add_column("client", overflow="fold")
    outputs = PLURALS[data.task.output]
    grouped = any(split.group is not None for client in data.clients for split in client.splits.values())
    for title in (*(f"{name} (patients)" if grouped else name for name in splits), outputs):
        table.add_column(title, justify="right")
    table.add_column("sample")
    facts = [dict(data.task.describe(client.train.y)) for client in data.clients[:SHOWN]]
    if any(client.train.patches for client in data.clients):
        facts = [{name: fact for name, fact in each.items() if name != "ignored"} for each in facts]  # has padding
    columns = list(dict.fromkeys(name for each in facts for name in each))
    for name in columns:
        table.add_column(name)
    has_CK = _count_classes(data) > 0
    for client, has_K, each in zip(data.clients, has_CK, facts, strict=False):
        sizes = [count_cases([client], name) for name in splits]
        shape = " x ".join(map(str, client.train.shape))
        kind = f"{shape} {str(client.train.dtype).removeprefix('torch.')}"
        table.add_row(
            Text(client.name), *sizes, str(has_K.sum() or data.classes),
            Text(", ".join(each.name for each in data.inputs) or kind), *(each.get(name, "") for name in columns),
        )  # fmt: skip
    if len(data.clients) > SHOWN:
        table.add_row(Text(f"and {len(data.clients) - SHOWN:,} more", style="dim"))
    table.add_section()
    totals = (count_cases(data.clients, name) for name in splits)
    table.add_row("all", *totals, f"{has_CK.any(axis=0).sum() or data.classes} of {data.classes}", style="bold")
    return table


def count_cases(clients: Sequence[ClientData], split: str) -> str:
    """Return the samples in a split of all ``clients``, as ``120 (14)`` with patients; shared splits count once."""
    own = {id(held): held for client in clients if (held := client.splits.get(split)) is not None}
    groups = [np.unique(held.group.numpy()) for held in own.values() if held.group is not None]
    shared = {number for group in groups for number in group[group >= 0].tolist()}
    patients = f" ({len(shared) + sum(int((group < 0).sum()) for group in groups):,})" if groups else ""
    return f"{sum(map(len, own.values())):,}{patients}" if own else "-"


def summarize_sizes(data: Federation) -> str:
    """Return the samples and patients of each client and split in a line."""
    splits = [name for name in ("train", "validation", "test") if any(name in each.splits for each in data.clients)]
    sizes = (f"{each.name} {' / '.join(count_cases([each], name) for name in splits)}" for each in data.clients)
    grouped = any(each.train.group is not None for each in data.clients)
    return f"Samples{' (patients)' * grouped} to {' / '.join(splits)}: {join_some(sizes, shown=8)}"


def describe_grids(data: Federation) -> Table | None:
    """Tabulate the axes, voxels and sizes of each client's medical images, without resampling; None: no such."""
    headers = list_headers(data)
    if not headers:
        return None
    title = "medical images: axes as stored; columns x rows x slices as read"
    table = Table(box=None, title=title, title_justify="left", min_width=len(title))
    table.add_column("client", overflow="fold")
    for title in ("images", "axes", "voxels (mm)", "size"):
        table.add_column(title, justify="right" if title == "images" else "left")
    for name, own in list(headers.items())[:SHOWN]:
        axes = Counter(each.axes if each.placed and each.axes else "unknown" for each in own)
        directions = ", ".join(f"{code} {count}" if len(axes) > 1 else code for code, count in axes.most_common())
        table.add_row(
            Text(name), f"{len(own):,}", directions,
            _format_ranges([each.spacing for each in own]), _format_ranges([each.shape for each in own]),
        )  # fmt: skip
    return table


def _format_ranges(lengths: Sequence[Sequence[float]]) -> str:
    """Format lengths along axes, slices first, as ``0.5 x 0.5 to 0.7 x 3``, and how many do not say them."""
    known = [each for each in lengths if each]
    if not known or len(set(map(len, known))) > 1:
        return "unknown"
    ends = [(min(along), max(along)) for along in zip(*(each[::-1] for each in known), strict=True)]
    said = " x ".join(f"{low:g}" if low == high else f"{low:g} to {high:g}" for low, high in ends)
    return said + f" ({len(lengths) - len(known)} unknown)" * (len(known) < len(lengths))


def render_quality(quality: Quality) -> Iterator[RenderableType]:
    """Yield the findings of the check, worst first, with fixes and examples; then the number of each severity."""
    for finding in quality.findings:
        yield Padding(_render_finding(finding), (0, 0, 1, 0))
    samples, clients = sum(part["samples"] for part in quality.splits), len({part["client"] for part in quality.splits})
    counts = [(len(quality.of(severity)), severity) for severity in _STYLE]
    total = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for count, severity in counts if count) or "nothing"
    yield Text(f"Found {total} in {samples:,} samples of {clients:,} client{'s' * (clients != 1)}.", style="bold")


def _count_classes(data: Federation) -> NDArray[np.int64]:
    """Count each client's training samples (in masks: pixels) of each class, ignoring labels out of range.

    Returns:
        int64 ``[clients, classes]``; zeros for numeric targets.

    """
    targets = (client.train.y for client in data.clients)
    known = (y[(y >= 0) & (y < data.classes)] if y.ndim == 1 else y for y in targets)
    return np.stack([data.task.count_classes(y, data.classes).numpy() for y in known])


def _render_finding(finding: Finding) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=7)
    grid.add_column(overflow="fold")
    grid.add_row(Text(finding.severity, style=_STYLE[finding.severity]), Text(finding.text))
    lines = [Text(finding.fix, style="dim")]
    for example in finding.examples:
        lines.append(Text(" = ".join(example), style="dim"))
    grid.add_row("", Group(*lines))
    return grid


def draw_overview(data: Federation, directory: Path, *, pictures: bool = True) -> list[Path]:
    """Write the figures of :func:`make_overview` into ``directory``, as SVG, PNG and PDF, and return their paths."""
    return save_each(make_overview(data, pictures=pictures), directory)


def make_overview(data: Federation, *, pictures: bool = True) -> dict[str, Figure]:
    """Return figures of the training data by name.

    ``samples`` (for images, if ``pictures``): a sheet with some images of each client and the outlines of their masks.
    ``features`` (for vectors of one input): the features in which clients differ most. ``classes``: the number of each
    client's samples, or pixels, of each class.
    """
    classes = list(data.class_names) or [str(number) for number in range(data.classes)]
    counts = pd.DataFrame(_count_classes(data), index=list(data.names), columns=classes)
    figures: dict[str, Figure] = {}
    dimensions = len(data.clients[0].train.shape)
    if pictures and dimensions in (3, 4):
        figures["samples"] = _draw_sheet(data, classes)
    if dimensions == 1 and not data.inputs:
        trained = [part for part in survey_splits(data) if part.split == "train"]
        columns = list_features(data) or [f"column {number}" for number in range(data.clients[0].train.shape[0])]
        means, stds = (
            pd.DataFrame([getattr(part, name) for part in trained], index=list(data.names), columns=columns)
            for name in ("mean", "std")
        )
        figures["features"] = feature_chart(means, stds, f"{data.name}: where clients differ most")
    masked = data.clients[0].train.y.ndim in (3, 4)
    if masked:
        figures["classes"] = class_chart(counts, f"{data.name}: pixels of each class in training", "pixels")
    elif counts.to_numpy().any():
        figures["classes"] = class_chart(counts, f"{data.name}: training samples of each {data.task.output}")
    return figures


def _draw_sheet(data: Federation, classes: list[str]) -> Figure:
    """Draw a fixed random choice of the first clients' training images, balanced over classes if samples have one."""
    shown = data.clients[:SHOWN]
    rows = max(1, min(3, 2 * COLUMNS // len(shown)))
    stratified = data.task.strata(shown[0].train.y) is not None
    if not stratified:
        classes, per_class, total = [], 2 * COLUMNS, min(rows, 2) * COLUMNS
    elif len(classes) <= COLUMNS:
        per_class, total = rows, rows * len(classes)
    else:
        per_class, total = 1, rows * COLUMNS
    images, labels = {}, {}
    for client in shown:
        y = client.train.y.numpy() if stratified else np.zeros(len(client.train), np.int64)
        chosen = pick_samples(y, per_class=per_class, total=total, rng=stream(0, "gallery"))
        images[client.name] = to_pictures(client.train, torch.from_numpy(chosen), data.classes)
        labels[client.name] = [classes[label] if stratified else "" for label in y[chosen].tolist()]
    of = f", {len(shown)} of {len(data.clients):,} clients" if len(shown) < len(data.clients) else ""
    return contact_sheet(images, labels, classes, f"{data.name}: training samples{of}")
