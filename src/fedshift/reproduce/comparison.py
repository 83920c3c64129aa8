"""Comparison with the printed numbers: one table of cells, one of pairs of methods, and the verdict that follows.

A cell agrees if our mean is within :data:`MARGIN` standard deviations (both spreads combined) of the paper's. Methods
are ordered by their means over columns; a pair is claimed to differ if the interval of its difference excludes 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from statistics import fmean

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from ..analysis.similarity import CONCORDANT
from ..analysis.statistics import count_needed_seeds, decides, half_interval, mean_and_std
from ..report.formatting import TextTable, explain_spread, format_mean, format_signed, make_table
from .planning import DISCORDANCE, FINAL
from .published_tables import PICTURES
from .recipes import find_recipe
from .results import Result

MARGIN = 2.0
"""Number of standard deviations of the difference within which two means are considered equal."""
APART = ("method", "lr", "seeds")
"""Keys in which compared rows may differ, unless a recipe specifies others."""
SHORTEST = 0.25
"""Fraction of the paper's rounds below which a table is not judged.

The paper compares methods at the end of training. Early in training, their order reflects their speed, and it reverses:
local training is ahead at first, because FedBN's clients must agree on common layers (measured in ``docs/papers.md``).
"""


def compare_cells(result: Result) -> pd.DataFrame:
    """Return a row for each reproduced cell, in the table's unit.

    Columns are ``row`` and ``column`` of the table, ``measure``, mean and deviation as printed (``paper``,
    ``paper_std``) and reproduced (``ours``, ``std``), ``difference``, ours minus the paper's, its 95 % interval ``low``
    to ``high`` (Welch's, since seeds of two programs are not paired), and ``agrees``. The last three are NaN and None
    unless network, data and rounds are the paper's and it prints a deviation, taken to be at least half of its last
    digit; the interval also is for so few seeds on either side that it would not decide.
    """
    rows = []
    for (row, column), values in sorted(result.values.items()):
        keys, printed = result.block.rows[row]
        (paper, paper_std, unit), (mean, std) = printed[column] or (math.nan,) * 3, mean_and_std(values)
        half, agrees = math.nan, None
        if result.is_faithful and not math.isnan(paper_std):
            stds = np.array([std, max(paper_std, unit / 2)])
            sizes = np.array([np.isfinite(values).sum(), keys.get("seeds", result.table.seeds)])
            agrees = bool(abs(mean - paper) <= MARGIN * np.sqrt(np.nansum(stds**2)))
            half = _half_welch_interval(stds**2 / sizes, sizes - 1) if decides(int(sizes.min())) else math.nan
        gap, measure = mean - paper, _find_measure(result, column)
        rows.append((row, column, measure, paper, paper_std, mean, std, gap, gap - half, gap + half, agrees))
    names = ("row", "column", "measure", "paper", "paper_std", "ours", "std", "difference", "low", "high", "agrees")
    return pd.DataFrame(rows, columns=names)


def _half_welch_interval(variances: np.ndarray, freedoms: np.ndarray) -> float:
    """Return half of the 95 % interval of the difference of two means with these ``variances``, which are not paired.

    Welch 1947, "The generalization of 'Student's' problem when several different population variances are involved",
    Biometrika 34(1-2).
    """
    freedom = variances.sum() ** 2 / (variances**2 / freedoms).sum()
    return float(stdtrit(freedom, 0.975) * np.sqrt(variances.sum()))


def compare_pairs(result: Result) -> pd.DataFrame:
    """Return a row for each pair of methods whose rows are otherwise equal; none if too few rounds were run.

    ``paper`` and ``ours`` are the differences of the means over columns, ``low`` and ``high`` the interval of ours over
    seeds, paired; intervals hold together at 95 % (Bonferroni), and are NaN where so few seeds do not decide so many
    pairs (:func:`~fedshift.analysis.statistics.decides`), or where all seeds have the same difference. Pairs that
    differ by at most half of a printed digit in the paper do not count.
    """
    gaps = [] if result.options.scale < SHORTEST else [gap for gap in _list_gaps(result) if gap[1]]
    rows = []
    for paper, ours in gaps:
        mean, std = mean_and_std(ours)
        known = decides(len(ours), len(gaps)) and std > 1e-9 * max(map(abs, ours))
        half = half_interval(std / math.sqrt(len(ours)), len(ours), comparisons=len(gaps)) if known else math.nan
        rows.append((paper, mean, mean - half, mean + half))
    return pd.DataFrame(rows, columns=["paper", "ours", "low", "high"], dtype=float)


def _list_gaps(result: Result) -> Iterator[tuple[float, list[float]]]:
    """Yield the differences of comparable pairs of rows: the paper's, and ours by seed."""
    block, recipe = result.block, find_recipe(result.table)
    ranked = [column for column in range(len(block.columns)) if _is_ranked(result, column)]
    groups: dict[str, list[int]] = {}
    for row in sorted({row for row, column in result.values if column in ranked}):
        keys = block.keyed[row]
        within = recipe.get("within", [key for key in keys if key not in APART])
        groups.setdefault(repr([keys.get(key) for key in within]), []).append(row)
    for pair in (pair for rows in groups.values() for pair in combinations(rows, 2)):
        shared = [column for column in ranked if all((row, column) in result.values for row in pair)]
        # the paper's average may include clients that are not here
        columns = [column for column in shared if block.columns[column] != "average"] or shared
        printed = [[value for column in columns if (value := block.rows[row][1][column])] for row in pair]
        if not columns:
            continue
        one, other = (fmean(value.mean for value in row) for row in printed)
        rounding = 0.5 * max(value.unit for row in printed for value in row) * (1 + 1e-9)  # rounding tolerance
        if abs(one - other) > rounding:
            cells = [[result.values[row, column] for column in columns] for row in pair]
            seeds = min(len(values) for row in cells for values in row)
            ours = np.array([[values[:seeds] for values in row] for row in cells]).mean(axis=1)
            yield one - other, [gap for gap in (ours[0] - ours[1]).tolist() if not math.isnan(gap)]


def _find_measure(result: Result, column: int) -> str:
    return str(find_recipe(result.table).get("measures", {}).get(result.block.columns[column], FINAL))


def _is_ranked(result: Result, column: int) -> bool:
    ranked, measure = find_recipe(result.table).get("ranked"), _find_measure(result, column)
    return bool(measure == ranked if ranked else measure not in (DISCORDANCE, "rounds"))


def describe_verdict(result: Result) -> tuple[str, str]:
    """Return the verdict in short, and one or two sentences on how the block was run and what follows."""
    seeds, scale, version = result.options.seeds, result.options.scale, result.block.version
    share = f"{scale:.2g} of the rounds" if scale < 1 else ""
    facts = [version and f"version {version}", f"{seeds} seed{'s' * (seeds > 1)}", share, result.unfinished]
    run = ", ".join(filter(None, facts))
    if result.block is PICTURES:
        return "drawn", f"Drawn ({run})."
    if scale < SHORTEST:
        short = "too short to judge"
        return short, f"Verdict ({run}): {short}; the order of methods means nothing below {SHORTEST:g} of the rounds."
    cells, pairs = compare_cells(result), compare_pairs(result)
    judged, bounded = cells["agrees"].dropna(), cells.dropna(subset="low")
    same, close = int((pairs["paper"] * pairs["ours"] > 0).sum()), int(judged.sum())
    deltas = cells[cells["measure"] == DISCORDANCE]["ours"]
    below = int((deltas < CONCORDANT).sum())
    short = "neither" if len(pairs) else "nothing to compare"
    if len(judged) and close == len(judged):
        short = "within the paper's spread"
    elif len(pairs) and same == len(pairs):
        short = "same order of methods"
    elif len(deltas):
        short = "concordant throughout" if below == len(deltas) else f"concordant in {below} of {len(deltas)}"
    containing = int(((bounded["low"] <= 0) & (bounded["high"] >= 0)).sum())
    counts = {
        "pairs of methods in the paper's order": (same, len(pairs)),
        "cells within the paper's spread": (close, len(judged)),
        "intervals of the difference contain 0": (containing, len(bounded)),
        f"discordances below {CONCORDANT:g}": (below, len(deltas)),
    }
    said = [short, *(f"{some} of {whole} {what}" for what, (some, whole) in counts.items() if whole)]
    return short, f"Verdict ({run}): {'; '.join(said)}.{_describe_claims(seeds, pairs)}"


def _describe_claims(seeds: int, pairs: pd.DataFrame) -> str:
    if pairs.empty:
        return ""
    if not decides(seeds, len(pairs)):
        return (
            f" {seeds} seed{'s' * (seeds > 1)} cannot decide an order; {count_needed_seeds(len(pairs))} can (--seeds)."
        )
    claimed = pairs[(pairs["low"] > 0) | (pairs["high"] < 0)]
    agree = int((claimed["paper"] * claimed["ours"] > 0).sum())
    against = len(claimed) - agree
    return f" Intervals that exclude 0, at 95 % together: {agree} in the paper's order, {against} against it."


def compare_values(result: Result) -> TextTable:
    """Return :func:`compare_cells` as text, without the columns that it has no values for."""
    cells = compare_cells(result)
    bounded, judged = cells["low"].notna().any(), cells["agrees"].notna().any()
    header = ["", "ours" if result.own else "ours (stand-in)", "paper"]
    header += ["difference"] * result.is_faithful + ["95% interval"] * bounded + ["paper's spread"] * judged
    rows = []
    for cell in cells.itertuples():
        digits = _count_decimals(cell.paper)
        ours, paper = (
            format_mean(*pair, f".{digits}f") for pair in ((cell.ours, cell.std), (cell.paper, cell.paper_std))
        )
        row = [f"{_name_row(result, cell.row)}: {_name_client(result.block.columns[cell.column], result)}", ours, paper]
        row += [format_signed(cell.difference, digits)] * result.is_faithful
        bounds = [] if math.isnan(cell.low) else [cell.low, cell.high]
        row += [" to ".join(format_signed(bound, digits) for bound in bounds)] * bounded
        row += [{True: "within", False: "outside"}.get(cell.agrees, "")] * judged
        rows.append(row)
    return make_table(header, rows, note=explain_spread(result.options.seeds))


def _name_row(result: Result, row: int) -> str:
    keys = result.block.rows[row][0]
    named = {key: _name_client(value, result) if key == "client" else value for key, value in keys.items()}
    return ", ".join([keys["method"], *(f"{key} {named[key]}" for key in named if key not in ("method", "seeds"))])


def _name_client(client: str, result: Result) -> str:
    """Return the paper's name for a client, and the name of its substitute, if any."""
    substitute = result.shown.get(client, client)
    return client if substitute == client else f"{client} (here {substitute})"


def _count_decimals(paper: float) -> int:
    """Return the number of decimals that distinguish the paper's number from others."""
    if paper >= 1:
        return 2 if paper <= 100 else 0
    return min(8, 3 - math.floor(math.log10(paper))) if paper > 0 else 4
