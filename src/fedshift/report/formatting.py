"""Tables as papers print them: ``76.93 (0.25)`` in percent, the best in bold, ``-`` where nothing was measured.

A frame of :mod:`fedshift.report.tables` becomes a :class:`TextTable`, and that becomes Markdown, LaTeX (booktabs), a
terminal table or, in the page's template, HTML. CSV keeps the numbers at full scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from rich.table import Table

MISSING = "-"
MINUS = "\N{MINUS SIGN}"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    MINUS: "$-$",
}
_LATEX |= {sign: "\\" + sign for sign in "&%$#_{}"} | {"<": "$<$", ">": "$>$", "|": r"\textbar{}"}


COVERED = "initialization and order of samples, not the test samples and not the split"
"""What differs from seed to seed, and so what a spread over seeds covers."""
BOLD = "Bold: the best mean as printed, which by itself is no claim."


@dataclass(frozen=True, kw_only=True)
class TextCell:
    """One cell's text and whether it is the best of its row."""

    text: str
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Header, and rows whose first cell names the row; a line is drawn above row number ``rule`` (0: none).

    ``note`` stands below the table in every form but CSV: what spread and intervals cover.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    rule: int = 0
    note: str = ""

    @property
    def values(self) -> list[str]:
        """The text of every cell but the rows' names."""
        return [cell.text for row in self.rows for cell in row[1:]]


def spread_note(seeds: float) -> str:
    """What the standard deviations of a table over so many seeds cover, as a sentence."""
    if seeds < 2:
        return f"One seed shows no spread, neither of {COVERED.replace(', not', ' nor of').replace(' and not', ' or')}."
    return f"(std) is over seeds: {COVERED}."


def units(metric: str) -> tuple[int, int, str]:
    """Factor, digits and name of the unit in which differences of ``metric`` are printed."""
    return (1, 3, "nats") if metric == "loss" else (100, 2, "points")


def metric_cells(table: pd.DataFrame, metric: str = "accuracy", *, one_by_one: bool = True) -> TextTable:
    """An accuracy table as text: shares in percent with 2 decimals, loss in nats with 3; best as printed in bold.

    Without ``one_by_one`` it begins with the aggregates, and its header says of how many clients.
    """
    methods = list(table.columns.get_level_values("method").unique())
    means, stds = (table.to_numpy()[:, kind::3] for kind in range(2))
    rule = _macro_row(table)
    scale, digits, _ = units(metric)
    rows = []
    first = 0 if one_by_one else rule
    for number, name in enumerate(table.index[first:], start=first):
        values = [round(scale * mean, digits) for mean in means[number]]
        compared = [value for value in values if not math.isnan(value)]
        best = (min if metric == "loss" else max)(compared) if len(compared) > 1 else None
        cells = [
            TextCell(text=_format_value(value, scale * std, digits), best=value == best)
            for value, std in zip(values, stds[number], strict=True)
        ]
        rows.append((TextCell(text=str(name)), *cells))
    head = "client" if one_by_one else f"{rule:,} clients"
    seeds = max(table.to_numpy()[:, 2::3].max(initial=0), 0)
    note = f"{spread_note(seeds)} {BOLD if any(cell.best for row in rows for cell in row) else ''}".strip()
    return TextTable(header=(head, *methods), rows=tuple(rows), rule=rule - first, note=note)


def difference_cells(table: pd.DataFrame, metric: str = "accuracy", covered: str = COVERED) -> TextTable:
    """A difference table as text, in percentage points (loss: nats); ``covered`` says what its pairs vary.

    The interval with test samples has a column where it is known.
    """
    scale, digits, _ = units(metric)
    level = f"{100 * table['level'].iloc[0]:g}% interval" if len(table) else "interval"
    drawn = bool(table["test_low"].notna().any())
    rows = []
    for method, row in table.iterrows():
        intervals = [_interval(scale * row[f"{kind}low"], scale * row[f"{kind}high"], digits) for kind in ("", "test_")]
        texts = (
            str(method), format_signed(scale * row["difference"], digits), intervals[0], format_p_value(row["p"]), str(row["seeds"]),
            *intervals[1:][:drawn],
        )  # fmt: skip
        rows.append(tuple(TextCell(text=text) for text in texts))
    count = int(table["comparisons"].max()) if len(table) else 0
    number = f", corrected for {count} comparisons (Holm)," if count > 1 else ""
    note = f"Intervals and p{number} cover {covered}."
    if drawn:
        note += (
            " With test samples: what another test set of this size would change is added, each method's by itself; "
            "that is too wide rather than too narrow where methods get the same samples wrong, which is not recorded."
        )
    header = ("method", "difference", level, "p", "seeds", *["with test samples"][:drawn])
    return TextTable(header=header, rows=tuple(rows), note=note)


def to_markdown(table: TextTable) -> str:
    """A GitHub-flavored Markdown table, and its note as a paragraph."""
    body = [[_format_bold(_escape_markdown(cell.text), cell, "**{}**") for cell in row] for row in table.rows]
    lines = [[_escape_markdown(name) for name in table.header], ["---", *["---:"] * (len(table.header) - 1)], *body]
    note = f"\n{_escape_markdown(table.note)}\n" if table.note else ""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + note


def to_latex(table: TextTable) -> str:
    r"""A LaTeX ``tabular`` and its note; it needs ``\usepackage{booktabs}``."""
    lines = [r"\begin{tabular}{l" + "r" * (len(table.header) - 1) + "}", r"\toprule"]
    lines += [" & ".join(map(escape_latex, table.header)) + r" \\", r"\midrule"]
    for number, row in enumerate(table.rows):
        if number and number == table.rule:
            lines.append(r"\midrule")
        lines.append(" & ".join(_format_bold(escape_latex(cell.text), cell, r"\textbf{{{}}}") for cell in row) + r" \\")
    note = [rf"\par{{\footnotesize {escape_latex(table.note)}}}"] if table.note else []
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *note, ""])


def escape_latex(text: str) -> str:
    """``text`` as LaTeX prints it."""
    return "".join(_LATEX.get(sign, sign) for sign in text)


def to_csv(table: pd.DataFrame) -> str:
    """The frame itself as CSV, one header line (``fedbn mean``, ``fedbn std``), six significant digits."""
    flat = table.copy()
    flat.columns = pd.Index([" ".join(name) if isinstance(name, tuple) else str(name) for name in table.columns])
    return flat.to_csv(float_format="%.6g", lineterminator="\n")


def to_terminal(table: TextTable) -> Table:
    """A table that ``rich.print`` shows, with its note; names are printed literally, never read as markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    note = Text(table.note) if table.note else None
    shown = Table(box=box.SIMPLE_HEAD, caption=note, caption_justify="left", caption_style="")
    for number, name in enumerate(table.header):
        shown.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for number, row in enumerate(table.rows, start=1):
        texts = [Text(cell.text, style="bold" if cell.best else "") for cell in row]
        shown.add_row(*texts, end_section=number == table.rule)
    return shown


def format_signed(value: float, digits: int = 2) -> str:
    """``+1.20`` or, with a true minus sign, ``-1.20``; ``0.00`` for what rounds to it, ``-`` for NaN."""
    if math.isnan(value):
        return MISSING
    return f"{value:+.{digits}f}".replace("-", MINUS) if round(value, digits) else f"{0:.{digits}f}"


def format_p_value(p: float) -> str:
    """A p-value with three decimals, ``<0.001`` below."""
    return MISSING if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def format_bytes(count: float) -> str:
    """Bytes in decimal units: ``1.23 MB``."""
    if math.isnan(count):
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def flatten(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings and sequences of mappings as ``("a.b", "value")`` pairs in order."""
    if isinstance(tree, Mapping) and tree:
        return [
            pair for key, value in tree.items() for pair in flatten(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(tree, list | tuple):
        if any(isinstance(value, Mapping) for value in tree):
            return [pair for number, value in enumerate(tree) for pair in flatten(value, f"{prefix}[{number}]")]
        return [(prefix, ", ".join(map(str, tree)) or MISSING)]
    return [(prefix, MISSING if tree is None or isinstance(tree, Mapping) else str(tree))]


def _macro_row(table: pd.DataFrame) -> int:
    """The row of the mean over clients, below all clients, of which one may have its name."""
    return len(table) - 1 - list(table.index)[::-1].index("macro")


def _format_value(mean: float, std: float, digits: int) -> str:
    if math.isnan(mean):
        return MISSING
    return f"{mean:.{digits}f}" if math.isnan(std) else f"{mean:.{digits}f} ({std:.{digits}f})"


def _interval(low: float, high: float, digits: int) -> str:
    return MISSING if math.isnan(low) else f"{format_signed(low, digits)} to {format_signed(high, digits)}"


def _format_bold(text: str, cell: TextCell, form: str) -> str:
    return form.format(text) if cell.best else text


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", text).replace("\n", " ")
