"""Verdicts on reproduced tables: values within the paper's spread, and methods in the paper's order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from ..analysis.similarity import CONCORDANT
from ..analysis.statistics import FEWEST, Moments, correct_family, mean_and_std, paired_difference, welch_interval
from ..report.formatting import TextTable, explain_spread, format_mean, format_signed, make_table
from .planning import DISCORDANCE, FINAL
from .published_tables import Block, PublishedValue, Table
from .recipes import find_recipe

MARGIN = 2.0
"""Number of standard deviations of the difference within which two means are considered equal."""
APART = ("method", "lr", "seeds")
"""Keys in which compared rows may differ, unless a recipe specifies others."""
SHORTEST = 0.25
"""Fraction of the paper's rounds below which a table is not judged.

The paper compares methods at the end of training. Early in training, their order reflects their speed, and it reverses:
local training is ahead at first, because FedBN's clients must agree on common layers (measured in ``docs/papers.md``).
"""


@dataclass(frozen=True, kw_only=True)
class ReproducedBlock:
    """A block of a table with the reproduced values: by row and column, one for each seed, NaN if missing.

    ``scale`` and ``seeds`` are the options of the runs. ``notes`` describe substitutes for the paper's data and network
    (which are then not its ``own``) and omitted clients; ``missing`` lists data without a substitute. ``shown`` maps
    replaced clients to their substitutes. ``part``: how many runs have finished, if not all have. ``grid``: the
    variance due to each cell's measurement grid (:func:`fedshift.report.claims.grid_variance`).
    """

    table: Table
    block: Block
    scale: float
    seeds: int
    values: Mapping[tuple[int, int], tuple[float, ...]]
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    shown: Mapping[str, str]
    own: bool = True
    part: str = ""
    grid: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @cached_property
    def ours(self) -> Mapping[tuple[int, int], PublishedValue]:
        """Mean and standard deviation over seeds, by row and column."""
        return {where: PublishedValue(*mean_and_std(values)) for where, values in self.values.items()}

    def published_value(self, row: int, column: int) -> PublishedValue | None:
        """Return the paper's value of a cell."""
        return self.block.rows[row][1][column]

    def measure(self, column: int) -> str:
        """Return the measure of a column."""
        return str(self._recipe.get("measures", {}).get(self.block.columns[column], FINAL))

    @property
    def remarks(self) -> list[str]:
        """Sentences about substitutes for data and networks."""
        return list_remarks(self.notes, self.missing, own=self.own)

    @property
    def is_faithful(self) -> bool:
        """Return whether network, data and rounds are the paper's, so that numbers and not only methods compare."""
        return self.own and not self.notes and self.scale == 1

    @property
    def is_short(self) -> bool:
        """Return whether too few rounds were run for any verdict: a fraction below :data:`SHORTEST`."""
        return self.scale < SHORTEST

    @property
    def order(self) -> tuple[int, int]:
        """Number of method pairs in the paper's order, and total number of pairs whose rows are otherwise equal.

        Methods are ordered by their means over columns. Pairs that differ by at most half of a printed digit in the
        paper do not count; no pairs count if too few rounds were run.
        """
        gaps = [(theirs, mean_and_std(ours)[0]) for theirs, ours, _ in self._gaps() if ours]
        return sum(theirs * ours > 0 for theirs, ours in gaps), len(gaps)

    @property
    def claims(self) -> tuple[int, int]:
        """Number of these pairs that differ significantly, in the paper's order and against it.

        The rule is the same as in every report (:mod:`fedshift.analysis.statistics`): paired over at least three seeds,
        corrected for the number of pairs.
        """
        gaps = list(self._gaps())
        tests = correct_family([paired_difference(ours, [0.0] * len(ours), grid=grid) for _, ours, grid in gaps])
        agrees = [theirs * each.mean > 0 for (theirs, *_), each in zip(gaps, tests, strict=True) if each.is_significant]
        return sum(agrees), len(agrees) - sum(agrees)

    @property
    def within(self) -> tuple[int, int]:
        """Number of cells within the paper's printed spread, and number of cells with such a spread.

        Both are 0 if data, network or rounds differ from the paper's.
        """
        if not self.is_faithful:
            return 0, 0
        judged = [
            self.is_close(*where)
            for where in self.ours
            if (paper := self.published_value(*where)) and not math.isnan(paper.std)
        ]
        return sum(judged), len(judged)

    @property
    def consistent(self) -> tuple[int, int]:
        """Number of intervals of the difference that contain 0, and number of cells with an interval."""
        found = [interval for where in self.ours if (interval := self.interval(*where))]
        return sum(low <= 0 <= high for low, high in found), len(found)

    @property
    def concordant(self) -> tuple[int, int]:
        """Number of discordances below FedMMB's threshold, and number of discordances; 0 if too few rounds were run."""
        if self.is_short:
            return 0, 0
        deltas = [number.mean for (_, column), number in self.ours.items() if self.measure(column) == DISCORDANCE]
        return sum(delta < CONCORDANT for delta in deltas), len(deltas)

    def is_close(self, row: int, column: int) -> bool:
        """Return whether a value is within :data:`MARGIN` combined standard deviations of the paper's.

        The paper's spread is at least the rounding error, half of the last digit.
        """
        ours, paper = self.ours[row, column], self.published_value(row, column)
        if paper is None or math.isnan(paper.std):
            return False
        spread = math.hypot(max(paper.std, paper.unit / 2), 0.0 if math.isnan(ours.std) else ours.std)
        return abs(ours.mean - paper.mean) <= MARGIN * spread

    def interval(self, row: int, column: int) -> tuple[float, float] | None:
        """Return Welch's 95 % interval of the difference, ours minus the paper's; None if there is none.

        Numbers must be comparable (:attr:`is_faithful`), the paper print a spread over :data:`~fedshift.analysis
        .statistics.FEWEST` seeds or more, and as many be run. Seeds are not paired: a seed of the paper's program draws
        other weights and orders than ours. The paper's spread is at least the rounding error, as in :meth:`is_close`.
        """
        ours, paper = self.ours[row, column], self.published_value(row, column)
        if paper is None or math.isnan(paper.std) or not self.is_faithful:
            return None
        count = sum(not math.isnan(value) for value in self.values[row, column])
        seeds = self.block.rows[row][0].get("seeds", self.table.seeds)
        theirs = Moments(paper.mean, max(paper.std, paper.unit / 2), seeds)
        low, high = welch_interval(Moments(ours.mean, ours.std, count), theirs)
        return None if math.isnan(low) else (low, high)

    @property
    def verdict(self) -> str:
        """The verdict in short: within the paper's spread, same order of methods, neither, or why there is none."""
        if self.is_short:
            return "too short to judge"
        (close, judged), (same, pairs), (below, deltas) = self.within, self.order, self.concordant
        if judged and close == judged:
            return "within the paper's spread"
        if pairs and same == pairs:
            return "same order of methods"
        if deltas:
            return "concordant throughout" if below == deltas else f"concordant in {below} of {deltas}"
        return "neither" if pairs else "nothing to compare"

    @property
    def summary(self) -> str:
        """One or two sentences on how the block was run, and on the verdict."""
        version = f"version {self.block.version}, " if self.block.version else ""
        share = f", {self.scale:.2g} of the rounds" if self.scale < 1 else ""
        part = f", {self.part}" if self.part else ""
        (close, judged), (same, pairs), (below, deltas) = self.within, self.order, self.concordant
        at_zero, intervals = self.consistent
        said = [self.verdict]
        said += [f"the order of methods is not meaningful below {SHORTEST:g} of the rounds"] if self.is_short else []
        said += [f"{same} of {pairs} pairs of methods in the paper's order"] if pairs else []
        said += [f"{close} of {judged} cells within the paper's spread"] if judged else []
        said += [f"{at_zero} of {intervals} intervals of the difference contain 0"] if intervals else []
        said += [f"{below} of {deltas} discordances below {CONCORDANT:g}"] if deltas else []
        verdict = f"Verdict ({version}{self.seeds} seed{'s' * (self.seeds > 1)}{share}{part}): {'; '.join(said)}."
        if not pairs:
            return verdict
        if self.seeds < FEWEST:
            return f"{verdict} Fewer than {FEWEST} seeds: do not claim any order from ours (--seeds 5)."
        agree, disagree = self.claims
        significant = f"{agree} in the paper's order, {disagree} against it"
        return f"{verdict} Significantly different pairs over seeds, corrected for their number: {significant}."

    @property
    def _recipe(self) -> Mapping[str, Any]:
        return find_recipe(self.table) or {}

    def _gaps(self) -> Iterator[tuple[float, tuple[float, ...], float]]:
        """Yield the differences of comparable pairs: the paper's, ours by seed, and the grid's error."""
        if self.is_short:
            return
        groups: dict[str, list[int]] = {}
        for row in sorted({row for row, column in self.values if self._ranks(column)}):
            keys = {**self.block.keys, **self.block.rows[row][0]}
            within = self._recipe.get("within", [key for key in keys if key not in APART])
            groups.setdefault(repr([keys.get(key) for key in within]), []).append(row)
        for pair in (pair for rows in groups.values() for pair in combinations(rows, 2)):
            ranked = filter(self._ranks, range(len(self.block.columns)))
            shared = [column for column in ranked if all((row, column) in self.values for row in pair)]
            # the paper's average may include clients that are not here
            columns = [column for column in shared if self.block.columns[column] != "average"] or shared
            cells = [[(row, column) for column in columns] for row in pair]
            printed = [[value for cell in row if (value := self.published_value(*cell))] for row in cells]
            if not columns:
                continue
            theirs, other = (_mean([value.mean for value in row]) for row in printed)
            rounding = 0.5 * max(value.unit for row in printed for value in row) * (1 + 1e-9)  # rounding tolerance
            if abs(theirs - other) > rounding:
                seeds = range(min(len(self.values[cell]) for row in cells for cell in row))
                ours = ([_mean([self.values[cell][seed] for cell in row]) for seed in seeds] for row in cells)
                gaps = (one - two for one, two in zip(*ours, strict=True) if not math.isnan(one - two))
                steps = sum(self.grid.get(cell, 0.0) for row in cells for cell in row)
                yield theirs - other, tuple(gaps), math.sqrt(steps) / len(columns)

    def _ranks(self, column: int) -> bool:
        ranked, measure = self._recipe.get("ranked"), self.measure(column)
        return bool(measure == ranked if ranked else measure not in (DISCORDANCE, "rounds"))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def list_remarks(notes: Iterable[str], missing: Iterable[str], *, own: bool = False) -> list[str]:
    """Return sentences about substitutes, or about smaller ``own`` data, and about missing data."""
    sentences = [f"{'Data' if own else 'Stand-in'}: {note}." for note in notes]
    return [*sentences, *(f"Left out: {data}, which is missing and has no substitute." for data in missing)]


def compare_values(reproduced: ReproducedBlock) -> TextTable:
    """Return a table with our value and the paper's for each reproduced cell.

    If network, data and rounds are the paper's, it also shows the difference, its interval, and whether our value is
    within the paper's spread.
    """
    judged, bounded = reproduced.within[1] > 0, reproduced.consistent[1] > 0
    grid = arrange_values(reproduced)
    rows = []
    for row, column in sorted(reproduced.ours):
        cell = grid.rows[row][1][column]
        cells = [f"{grid.rows[row][0]}: {grid.columns[column]}", cell.ours, cell.paper]
        cells += [cell.difference] if reproduced.is_faithful else []
        rows.append([*cells, *([cell.interval] if bounded else []), *([cell.spread] if judged else [])])
    extra = (("difference", reproduced.is_faithful), ("95% interval", bounded), ("paper's spread", judged))
    header = ("", "ours" if reproduced.own else "ours (stand-in)", "paper", *(title for title, has in extra if has))
    return make_table(header, rows, note=explain_spread(reproduced.seeds))


@dataclass(frozen=True, kw_only=True)
class ComparedCell:
    """Text of a cell in a paper's table: ``paper`` as printed, ``ours``, and the ``difference``, ours minus theirs.

    ``ours`` and ``difference`` are empty if nothing was run. ``interval`` belongs to the difference and is empty if
    there is none (:meth:`ReproducedBlock.interval`). ``spread`` is "within" or "outside" the paper's spread; it
    is empty if the paper prints none or numbers cannot be compared. ``sign`` is "above" or "below" if numbers can be
    compared and differ.
    """

    paper: str = ""
    ours: str = ""
    difference: str = ""
    interval: str = ""
    spread: str = ""
    sign: str = ""


@dataclass(frozen=True)
class ValueGrid:
    """Named rows and columns of a paper's table, with the paper's and our value in each cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[ComparedCell, ...]], ...]


def arrange_values(reproduced: ReproducedBlock) -> ValueGrid:
    """Return all rows and columns of the paper's table, with our value and the paper's in each cell."""
    rows = []
    for row, (keys, printed) in enumerate(reproduced.block.rows):
        named = {key: _name_client(value, reproduced) if key == "client" else value for key, value in keys.items()}
        others = [f"{key} {value}" for key, value in named.items() if key not in ("method", "seeds")]
        cells = tuple(_compare_cell(reproduced, row, column) for column in range(len(printed)))
        rows.append((", ".join([str(keys["method"]), *others]), cells))
    return ValueGrid(tuple(_name_client(name, reproduced) for name in reproduced.block.columns), tuple(rows))


def _compare_cell(reproduced: ReproducedBlock, row: int, column: int) -> ComparedCell:
    paper, ours = reproduced.published_value(row, column), reproduced.ours.get((row, column))
    if paper is None:
        return ComparedCell()
    digits = _decimal_digits(paper)
    printed = format_mean(paper.mean, paper.std, f".{digits}f")
    if ours is None:
        return ComparedCell(paper=printed)
    gap, comparable = round(ours.mean - paper.mean, digits), reproduced.is_faithful
    within = "within" if reproduced.is_close(row, column) else "outside"
    bounds = reproduced.interval(row, column) or ()
    return ComparedCell(
        paper=printed,
        ours=format_mean(ours.mean, ours.std, f".{digits}f"),
        difference=format_signed(ours.mean - paper.mean, digits),
        interval=" to ".join(format_signed(bound, digits) for bound in bounds),
        spread=within if comparable and not math.isnan(paper.std) else "",
        sign=("above" if gap > 0 else "below" if gap < 0 else "") if comparable else "",
    )


def _name_client(client: str, reproduced: ReproducedBlock) -> str:
    """Return the paper's name for a client, and the name of its substitute, if any."""
    substitute = reproduced.shown.get(client, client)
    return client if substitute == client else f"{client} (here {substitute})"


def _decimal_digits(paper: PublishedValue) -> int:
    """Return the number of decimals that distinguish the paper's number from others."""
    if paper.mean >= 1:
        return 2 if paper.mean <= 100 else 0
    return min(8, 3 - math.floor(math.log10(paper.mean))) if paper.mean > 0 else 4
