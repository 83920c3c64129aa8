"""Comparison with the printed numbers: one table of cells, one of pairs of methods, and the verdict that follows.

A cell agrees if our mean is within :data:`MARGIN` standard deviations (both spreads combined) of the paper's. Methods
are ordered by their means over columns; a pair is claimed to differ if the interval of its difference excludes 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np
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


class ComparedCell(NamedTuple):
    """A reproduced number, in the table's unit: mean and deviation over seeds, as printed and ``ours``.

    ``difference`` is ours minus the paper's, ``low`` to ``high`` its 95 % interval (Welch's, since seeds of two
    programs are not paired). Interval and ``agrees`` are NaN and None unless network, data and rounds are the paper's
    and it prints a deviation, taken to be at least half of its last digit; the interval also is for so few seeds on
    either side that it would not decide.
    """

    row: int
    column: int
    measure: str
    paper: float
    paper_std: float
    ours: float
    std: float
    difference: float
    low: float
    high: float
    agrees: bool | None


class ComparedPair(NamedTuple):
    """The difference of two methods' means over columns, the paper's and ours, and the interval of ours over seeds."""

    paper: float
    ours: float
    low: float
    high: float


def compare_cells(result: Result) -> list[ComparedCell]:
    """Return the reproduced cells, by row and column."""
    cells = []
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
        numbers = (paper, paper_std, mean, std, gap, gap - half, gap + half)
        cells.append(ComparedCell(row, column, measure, *numbers, agrees))
    return cells


def _half_welch_interval(variances: np.ndarray, freedoms: np.ndarray) -> float:
    """Return half of the 95 % interval of the difference of two means with these ``variances``, which are not paired.

    Welch 1947, "The generalization of 'Student's' problem when several different population variances are involved",
    Biometrika 34(1-2).
    """
    freedom = variances.sum() ** 2 / (variances**2 / freedoms).sum()
    return float(stdtrit(freedom, 0.975) * np.sqrt(variances.sum()))


def compare_pairs(result: Result) -> list[ComparedPair]:
    """Return the pairs of methods whose rows are otherwise equal; none if too few rounds were run.

    Intervals are paired over seeds and hold together at 95 % (Bonferroni); they are NaN where so few seeds do not
    decide so many pairs (:func:`~fedshift.analysis.statistics.decides`), or where all seeds have the same difference.
    Pairs that differ by at most half of a printed digit in the paper do not count.
    """
    gaps = [] if result.options.scale < SHORTEST else [gap for gap in _list_gaps(result) if gap[1]]
    pairs = []
    for paper, ours in gaps:
        mean, std = mean_and_std(ours)
        known = decides(len(ours), len(gaps)) and std > 1e-9 * max(map(abs, ours))
        half = half_interval(std / math.sqrt(len(ours)), len(ours), comparisons=len(gaps)) if known else math.nan
        pairs.append(ComparedPair(paper, mean, mean - half, mean + half))
    return pairs


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
    judged = [cell.agrees for cell in cells if cell.agrees is not None]
    bounded = [cell.low <= 0 <= cell.high for cell in cells if not math.isnan(cell.low)]
    ordered = [pair.paper * pair.ours > 0 for pair in pairs]
    concordant = [cell.ours < CONCORDANT for cell in cells if cell.measure == DISCORDANCE]
    short = "neither" if pairs else "nothing to compare"
    if judged and all(judged):
        short = "within the paper's spread"
    elif ordered and all(ordered):
        short = "same order of methods"
    elif concordant:
        count = f"in {sum(concordant)} of {len(concordant)}"
        short = f"concordant {'throughout' if all(concordant) else count}"
    counts = {
        "pairs of methods in the paper's order": ordered,
        "cells within the paper's spread": judged,
        "intervals of the difference contain 0": bounded,
        f"discordances below {CONCORDANT:g}": concordant,
    }
    said = [short, *(f"{sum(each)} of {len(each)} {what}" for what, each in counts.items() if each)]
    return short, f"Verdict ({run}): {'; '.join(said)}.{_describe_claims(seeds, pairs)}"


def _describe_claims(seeds: int, pairs: Sequence[ComparedPair]) -> str:
    if not pairs:
        return ""
    if not decides(seeds, len(pairs)):
        needed = count_needed_seeds(len(pairs))
        return f" {seeds} seed{'s' * (seeds > 1)} cannot decide an order: --seeds {needed} can."
    claims = [pair.paper * pair.ours > 0 for pair in pairs if pair.low > 0 or pair.high < 0]
    against = len(claims) - sum(claims)
    return f" Intervals that exclude 0, at 95 % together: {sum(claims)} in the paper's order, {against} against it."


def compare_values(result: Result) -> TextTable:
    """Return :func:`compare_cells` as text, without the columns that it has no values for."""
    cells = compare_cells(result)
    bounded = any(not math.isnan(cell.low) for cell in cells)
    judged = any(cell.agrees is not None for cell in cells)
    header = ["", "ours" if result.own else "ours (stand-in)", "paper"]
    header += ["difference"] * result.is_faithful + ["95% interval"] * bounded + ["paper's spread"] * judged
    rows = []
    for cell in cells:
        digits = _count_decimals(cell.paper)
        ours, paper = (
            format_mean(*pair, f".{digits}f") for pair in ((cell.ours, cell.std), (cell.paper, cell.paper_std))
        )
        row = [f"{_name_row(result, cell.row)}: {_name_client(result.block.columns[cell.column], result)}", ours, paper]
        row += [format_signed(cell.difference, digits)] * result.is_faithful
        bounds = [] if math.isnan(cell.low) else [cell.low, cell.high]
        row += [" to ".join(format_signed(bound, digits) for bound in bounds)] * bounded
        row += [{True: "within", False: "outside", None: ""}[cell.agrees]] * judged
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
