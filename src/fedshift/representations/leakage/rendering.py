"""Output of ``fedshift leak``: tables of similarity, differences and labels, and pictures of the reconstructions.

The unit of all statistics is the seed: images with the same seed share a network, so their mean is one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isnan
from pathlib import Path
from typing import Literal

import pandas as pd
from matplotlib.figure import Figure
from rich.console import RenderableType
from torch import Tensor

from ...analysis.statistics import PairedDifference, correct_family, mean_and_std, paired_difference
from ...report.figures import FigurePanel, save_each
from ...report.formatting import MISSING, TextTable, format_mean, format_signed, make_table, to_terminal, write_table
from ...report.style import figure_settings, shorten
from ...results.schema import find_baseline
from .study import ANOTHER, INFERRED, KNOWN, MEAN, ORIGINAL, Leakage, name_row

Measure = Literal["psnr", "correlation"]
MEASURES: Mapping[Measure, str] = {"psnr": "PSNR", "correlation": "correlation"}
"""Measures to compare, and their names in tables."""
SHOWN = 8
"""Maximum number of images in a row of a picture."""
_CELL, _LABEL = 0.5, 1.8  # inches


def render_leakage(found: Leakage) -> Iterator[RenderableType]:
    """Yield sentences and tables, in order."""
    setting = found.settings
    steps = f"{setting.steps} local step{'s' * (setting.steps > 1)}"
    yield (
        f"Uploads of {steps}, attacked with {setting.iterations} iterations; in each case "
        f"{setting.images} images or the next whole batch under each of {len(found.seeds)} seeds."
    )
    yield "Likeness of reconstructions and originals; the attacker knows the labels."
    for rounds in sorted(setting.rounds):
        yield to_terminal(likeness_table(found, rounds))
    for measure in MEASURES:
        yield to_terminal(difference_table(found, measure))
    if (found.records["labels"] == INFERRED).any():
        yield "Labels inferred from the gradient of the last bias: share found, and PSNR of the attack with them."
        yield to_terminal(label_table(found))


def tabulate_seeds(found: Leakage, labels: str = KNOWN) -> pd.DataFrame:
    """Return each measure's mean over images, by rounds, row, batch size and seed."""
    records = found.records[found.records["labels"] == labels]
    rows = [
        name_row(method, attack) if attack else method
        for method, attack in zip(records["method"], records["attack"], strict=True)
    ]
    keys = ["rounds", "row", "batch_size", "seed"]
    columns = ["psnr", "ssim", "correlation", "identified", "labels_found"]
    return records.assign(row=rows).groupby(keys, sort=False)[columns].mean()


def likeness_table(found: Leakage, rounds: int) -> TextTable:
    """Return PSNR, correlation and the fraction of images identified after ``rounds``, by row and batch size."""
    means, sizes = tabulate_seeds(found), found.settings.batch_sizes
    rows = []
    for row in _list_rows(means, rounds):
        cells = [row]
        for size in sizes:
            part = _pick(means, rounds, row, size)
            shares = f"{part['correlation'].mean():.2f}", f"{100 * part['identified'].mean():.0f}"
            cells += [format_mean(*mean_and_std(part["psnr"])), *shares]
        rows.append(cells)
    header = [f"{name} B={size}" for size in sizes for name in ("PSNR", "corr.", "found %")]
    note = (
        "PSNR in decibels, mean (std) over seeds. Corr.: correlation, whatever brightness and contrast. Found: images "
        "that correlate most, of all training images of their client, with their reconstruction. "
        f"{MEAN.capitalize()}, {ANOTHER}: guesses from the client's test images, without any upload."
    )
    return make_table((_name_rounds(rounds), *header), rows, rule=2, note=note)


def difference_table(found: Leakage, measure: Measure) -> TextTable:
    """Return differences in a measure, averaged over batch sizes, from FedAvg (else the first method) and a guess."""
    means = tabulate_seeds(found)[measure].groupby(["rounds", "row", "seed"], sort=False).mean()
    references = (find_baseline(found.methods), MEAN)
    places = [
        (rounds, row)
        for rounds in sorted(found.settings.rounds)
        for row in _list_rows(means.to_frame(), rounds)
        if row not in (MEAN, ANOTHER)
    ]

    def pick(rounds: int, row: str) -> list[float]:
        return [float(means[rounds, row, seed]) for seed in found.seeds]

    keys = [(*place, name) for place in places for name in references if place[1] != name]
    tested = correct_family([paired_difference(pick(rounds, row), pick(rounds, name)) for rounds, row, name in keys])
    pairs = dict(zip(keys, tested, strict=True))
    rows = [
        (_name_rounds(rounds), row, *(_format_difference(pairs.get((rounds, row, name))) for name in references))
        for rounds, row in places
    ]
    note = (
        "Mean over batch sizes and seeds (95% interval); *: significant. Paired over seeds, corrected for "
        f"{len(keys)} comparisons (Holm)."
    )
    return make_table(
        ("network", "upload", *(f"{MEASURES[measure]} minus that of {name}" for name in references)), rows, note=note
    )


def _format_difference(pair: PairedDifference | None) -> str:
    if pair is None:
        return MISSING
    ends = "" if isnan(pair.low) else f" ({format_signed(pair.low)} to {format_signed(pair.high)})"
    return f"{format_signed(pair.mean)}{ends}{'*' * pair.is_significant}"


def label_table(found: Leakage) -> TextTable:
    """Return the fraction of labels found, and the PSNR with them, by number of rounds, method and batch size."""
    means = tabulate_seeds(found, INFERRED)
    sizes = found.settings.batch_sizes
    rows = []
    for rounds in sorted(found.settings.rounds):
        for row in _list_rows(means, rounds):
            parts = [_pick(means, rounds, row, size) for size in sizes]
            shares = [f"{100 * part['labels_found'].mean():.0f}" for part in parts]
            rows.append([_name_rounds(rounds), row, *shares, *(format_mean(*mean_and_std(p["psnr"])) for p in parts)])
    header = [f"labels %, B={size}" for size in sizes] + [f"PSNR, B={size}" for size in sizes]
    return make_table(("network", "upload", *header), rows, note="Mean (std) over seeds.")


def write_files(found: Leakage, directory: Path) -> list[Path]:
    """Write tables (Markdown, LaTeX, CSV by seed), records (CSV) and pictures to ``directory``; return the paths."""
    tables = {f"likeness-{rounds}-rounds": likeness_table(found, rounds) for rounds in sorted(found.settings.rounds)}
    tables |= {f"differences-{measure}": difference_table(found, measure) for measure in MEASURES}
    if (found.records["labels"] == INFERRED).any():
        tables["labels"] = label_table(found)
    paths = [path for name, table in tables.items() for path in write_table(directory, name, table)]
    records = directory / "records.csv"
    found.records.to_csv(records, index=False, float_format="%.6g")
    return [*paths, records, *save_each({panel.name: panel.figure for panel in draw_panels(found)}, directory)]


def draw_panels(found: Leakage) -> Iterator[FigurePanel]:
    """Draw originals and reconstructions, with a picture for each number of rounds and batch size."""
    for (rounds, size), rows in found.pictures.items():
        with figure_settings():
            yield _draw_rows(f"{_name_rounds(rounds)}, batch of {size}", f"images-{rounds}-rounds-batch-{size}", rows)


def _draw_rows(title: str, name: str, rows: Mapping[str, Tensor]) -> FigurePanel:
    columns = min(SHOWN, len(next(iter(rows.values()))))
    figure = Figure(figsize=(_LABEL + _CELL * columns, 0.35 + _CELL * len(rows)), layout="constrained")
    figure.suptitle(shorten(title, 60), x=0.02, ha="left", fontsize=9, fontweight="bold")
    grid = figure.subplots(len(rows), 1 + columns, squeeze=False, width_ratios=[_LABEL / _CELL, *[1] * columns])
    for axes in grid.flat:
        axes.set_axis_off()
    for line, (row, images) in zip(grid, rows.items(), strict=True):
        line[0].text(1, 0.5, shorten(row, 40), transform=line[0].transAxes, ha="right", va="center")
        for axes, image in zip(line[1:], images[:columns], strict=True):
            pixels = image.permute(1, 2, 0).numpy() if len(image) == 3 else image[0].numpy()
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="none")
    others = ", ".join(row for row in rows if row != ORIGINAL)
    return FigurePanel(name=name, figure=figure, description=f"{title}. Originals above, then {others}.")


def _pick(means: pd.DataFrame, rounds: int, row: str, size: int) -> pd.DataFrame:
    """Return the means for one case, with a row for each seed."""
    index = means.index
    chosen = [
        index.get_level_values(level) == key for level, key in (("rounds", rounds), ("row", row), ("batch_size", size))
    ]
    return means[chosen[0] & chosen[1] & chosen[2]].sort_index(level="seed")


def _list_rows(means: pd.DataFrame, rounds: int) -> list[str]:
    """Return the names of the rows after ``rounds``, guesses first."""
    there = means[means.index.get_level_values("rounds") == rounds]
    names = list(dict.fromkeys(there.index.get_level_values("row")))
    return sorted(names, key=lambda name: name not in (MEAN, ANOTHER))


def _name_rounds(rounds: int) -> str:
    return f"after {rounds} round{'s' * (rounds > 1)}" if rounds else "fresh network"
