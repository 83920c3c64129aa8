"""What follows from a table that was run: is ours within the paper's spread, are methods in the paper's order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from ..analysis.concordance import CONCORDANT
from ..analysis.statistics import FEWEST, corrected, mean_and_std, paired_difference
from ..report.formatting import TextCell, TextTable, format_signed, spread_note
from .planning import DISCORDANCE, FINAL
from .published_tables import Block, PublishedValue, Table
from .recipes import find_recipe

MARGIN = 2.0
"""Standard deviations of the difference within which two means count as the same."""
APART = ("method", "lr", "seeds")
"""What rows may differ in to be compared, where a recipe does not say."""
SHORTEST = 0.25
"""Share of the paper's rounds below which a table is not judged.

Methods are compared where the paper leaves them, at the end of training. Early in training their order is that of
their speed, and it turns: training alone leads FedBN at first, which has to bring its clients together (measured in
``docs/papers.md``).
"""


@dataclass(frozen=True, kw_only=True)
class ReproducedBlock:
    """A block of a table: for each cell that was run, what came out here under each seed, NaN for a seed that has none.

    ``scale`` and ``seeds`` say how it was run, ``notes`` what stood in for the paper's data and network, which are then
    not ``own``, and who is left out; ``missing`` are data that nothing stood in for. ``shown`` is whose place other
    clients take. ``part``: from how many runs, where not all are done. ``grid`` is the variance that the grid of a
    cell's counts hides (:mod:`fedshift.report.precision`).
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
        """What the paper prints there."""
        return self.block.rows[row][1][column]

    def measure(self, column: int) -> str:
        """What the column shows."""
        recipe = find_recipe(self.table) or {}
        return str(recipe.get("measures", {}).get(self.block.columns[column], FINAL))

    @property
    def remarks(self) -> list[str]:
        """Sentences on data and networks that a reader must know."""
        return remarks(self.notes, self.missing, own=self.own)

    @property
    def alike(self) -> bool:
        """Whether network, data and rounds are the paper's, so that numbers can be compared, not methods alone."""
        return self.own and not self.notes and self.scale == 1

    @property
    def short(self) -> bool:
        """Whether too few rounds were run for any verdict: a share below :data:`SHORTEST`."""
        return self.scale < SHORTEST

    @property
    def order(self) -> tuple[int, int]:
        """Of the pairs of methods with all else in their rows equal, how many are in the paper's order, and all.

        Methods go by their means over columns. Pairs that the paper has level, less than half of a printed digit apart,
        are not counted; none is where too few rounds were run.
        """
        gaps = [(theirs, mean_and_std(ours)[0]) for theirs, ours, _ in self._gaps() if ours]
        return sum(theirs * ours > 0 for theirs, ours in gaps), len(gaps)

    @property
    def claims(self) -> tuple[int, int]:
        """How many of these pairs are told apart, in the paper's order and against it.

        By the rule of every report (:mod:`fedshift.analysis.statistics`): paired over three seeds or more, corrected
        for the number of pairs.
        """
        gaps = list(self._gaps())
        found = corrected([paired_difference(ours, [0.0] * len(ours), grid=grid) for _, ours, grid in gaps])
        told = [theirs * each.mean > 0 for (theirs, *_), each in zip(gaps, found, strict=True) if each.told_apart]
        return sum(told), len(told) - sum(told)

    @property
    def within(self) -> tuple[int, int]:
        """Of the cells whose spread the paper prints, how many of ours are within it, and how many there are.

        With other data, another network or other rounds than the paper's there is none to be within.
        """
        if not self.alike:
            return 0, 0
        judged = [
            self.is_close(*where)
            for where in self.ours
            if (paper := self.published_value(*where)) and not math.isnan(paper.std)
        ]
        return sum(judged), len(judged)

    @property
    def concordant(self) -> tuple[int, int]:
        """Of the discordances, how many are below FedMMB's threshold, and how many there are.

        None is counted where too few rounds were run.
        """
        if self.short:
            return 0, 0
        deltas = [number.mean for (_, column), number in self.ours.items() if self.measure(column) == DISCORDANCE]
        return sum(delta < CONCORDANT for delta in deltas), len(deltas)

    def is_close(self, row: int, column: int) -> bool:
        """Whether ours is within :data:`MARGIN` standard deviations of the paper's, both spreads taken together.

        The paper's is at least what rounding hides, half of the last digit.
        """
        ours, paper = self.ours[row, column], self.published_value(row, column)
        if paper is None or math.isnan(paper.std):
            return False
        spread = math.hypot(max(paper.std, paper.unit / 2), 0.0 if math.isnan(ours.std) else ours.std)
        return abs(ours.mean - paper.mean) <= MARGIN * spread

    @property
    def verdict(self) -> str:
        """One of: within the paper's spread, same order of methods, neither; or why none of them can be said."""
        if self.short:
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
        """How it was run and what came of it, in a sentence or two; why not, where too few rounds were run."""
        version = f"version {self.block.version}, " if self.block.version else ""
        share = f", {self.scale:.2g} of the rounds" if self.scale < 1 else ""
        part = f", {self.part}" if self.part else ""
        (close, judged), (same, pairs), (below, deltas) = self.within, self.order, self.concordant
        said = [self.verdict]
        said += [f"an order of methods says nothing below {SHORTEST:g} of the rounds"] if self.short else []
        said += [f"{same} of {pairs} pairs of methods in the paper's order"] if pairs else []
        said += [f"{close} of {judged} cells within the paper's spread"] if judged else []
        said += [f"{below} of {deltas} discordances below {CONCORDANT:g}"] if deltas else []
        verdict = f"Verdict ({version}{self.seeds} seed{'s' * (self.seeds > 1)}{share}{part}): {'; '.join(said)}."
        if not pairs:
            return verdict
        if self.seeds < FEWEST:
            return f"{verdict} Fewer than {FEWEST} seeds: do not claim any order from ours (--seeds 5)."
        for_it, against = self.claims
        told = f"{for_it} in the paper's order, {against} against it"
        return f"{verdict} Pairs told apart over seeds, corrected for their number: {told}."

    def _gaps(self) -> Iterator[tuple[float, tuple[float, ...], float]]:
        """The differences of pairs that can be compared: the paper's, ours by seed, and the error of the grid."""
        if self.short:
            return
        groups: dict[str, list[int]] = {}
        recipe = find_recipe(self.table) or {}
        for row in sorted({row for row, column in self.values if self._ranks(column)}):
            keys = {**self.block.keys, **self.block.rows[row][0]}
            of = recipe.get("within", [key for key in keys if key not in APART])
            groups.setdefault(repr([keys.get(key) for key in of]), []).append(row)
        for one, other in (pair for rows in groups.values() for pair in combinations(rows, 2)):
            columns = [column for column in range(len(self.block.columns)) if self._both(one, other, column)]
            clients = [column for column in columns if self.block.columns[column] != "average"]
            columns = clients or columns  # the paper's average may be over clients that are not here
            theirs = self._paper(one, columns) - self._paper(other, columns)
            if columns and abs(theirs) > self._half(one, other, columns):
                seeds = min(len(self.values[row, column]) for row in (one, other) for column in columns)
                gaps = (self._mean(one, columns, n) - self._mean(other, columns, n) for n in range(seeds))
                steps = sum(self.grid.get((row, column), 0.0) for row in (one, other) for column in columns)
                yield theirs, tuple(gap for gap in gaps if not math.isnan(gap)), math.sqrt(steps) / len(columns)

    def _ranks(self, column: int) -> bool:
        ranked = (find_recipe(self.table) or {}).get("ranked")
        measure = self.measure(column)
        return measure == ranked if ranked else measure not in (DISCORDANCE, "rounds")

    def _both(self, one: int, other: int, column: int) -> bool:
        return (one, column) in self.values and (other, column) in self.values and self._ranks(column)

    def _paper(self, row: int, columns: Sequence[int]) -> float:
        return sum(number.mean for column in columns if (number := self.published_value(row, column))) / max(
            1, len(columns)
        )

    def _half(self, one: int, other: int, columns: Sequence[int]) -> float:
        """Half of the paper's last digit, and what floating point makes of it."""
        printed = (self.published_value(row, column) for row in (one, other) for column in columns)
        return 0.5 * max(number.unit for number in printed if number) * (1 + 1e-9)

    def _mean(self, row: int, columns: Sequence[int], seed: int) -> float:
        return sum(self.values[row, column][seed] for column in columns) / len(columns)


def remarks(notes: Iterable[str], missing: Iterable[str], *, own: bool = False) -> list[str]:
    """Sentences on what stood in, or is ``own`` but smaller, and on data that were not here."""
    said = [f"{'Data' if own else 'Stand-in'}: {note}." for note in notes]
    return [*said, *(f"Left out: {data}, which is not here and for which nothing stands in." for data in missing)]


def compare_columns(made: ReproducedBlock) -> TextTable:
    """Each cell that was run: ours and the paper's.

    Where network, data and rounds are the paper's also the difference, and whether it is within the paper's spread.
    """
    rows = []
    judged = made.within[1] > 0
    for (row, column), ours in sorted(made.ours.items()):
        paper = made.published_value(row, column)
        assert paper
        keys, name = made.block.rows[row][0], made.block.columns[column]
        others = [f"{key} {value}" for key, value in keys.items() if key not in ("method", "seeds")]
        place = name if made.shown.get(name, name) == name else f"{name} (here {made.shown[name]})"
        where = f"{', '.join([str(keys['method']), *others])}: {place}"
        texts = [where, _format_number(ours, paper), _format_number(paper, paper)]
        if made.alike:
            texts.append(format_signed(ours.mean - paper.mean, _decimal_digits(paper)))
        if judged:
            texts.append("" if math.isnan(paper.std) else "within" if made.is_close(row, column) else "outside")
        rows.append(tuple(TextCell(text=text) for text in texts))
    ours_here = "ours" if made.own else "ours (stand-in)"
    more = (("difference", made.alike), ("paper's spread", judged))
    header = ("", ours_here, "paper", *(title for title, shown in more if shown))
    return TextTable(header=header, rows=tuple(rows), note=spread_note(made.seeds))


def _decimal_digits(paper: PublishedValue) -> int:
    """Digits after the point that tell the paper's number from others."""
    if paper.mean >= 1:
        return 2 if paper.mean <= 100 else 0
    return min(8, 3 - math.floor(math.log10(paper.mean))) if paper.mean > 0 else 4


def _format_number(number: PublishedValue, paper: PublishedValue) -> str:
    digits = _decimal_digits(paper)
    spread = "" if math.isnan(number.std) else f" ({number.std:.{digits}f})"
    return f"{number.mean:.{digits}f}{spread}"
