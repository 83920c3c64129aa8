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


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell's text and whether it is the best of its row."""

    text: str
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Header, and rows whose first cell names the row; a line is drawn above row number ``rule`` (0: none)."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    rule: int = 0

    @property
    def values(self) -> list[str]:
        """The text of every cell but the rows' names."""
        return [cell.text for row in self.rows for cell in row[1:]]


def metric_cells(table: pd.DataFrame, metric: str = "accuracy", *, one_by_one: bool = True) -> TextTable:
    """An accuracy table as text: shares in percent with 2 decimals, loss in nats with 3; best as printed in bold.

    Without ``one_by_one`` it begins with the aggregates, and its header says of how many clients.
    """
    methods = list(table.columns.get_level_values("method").unique())
    means, stds = (table.to_numpy()[:, kind::3] for kind in range(2))
    rule = _macro_row(table)
    scale, digits = (1, 3) if metric == "loss" else (100, 2)
    rows = []
    first = 0 if one_by_one else rule
    for number, name in enumerate(table.index[first:], start=first):
        values = [round(scale * mean, digits) for mean in means[number]]
        compared = [value for value in values if not math.isnan(value)]
        best = (min if metric == "loss" else max)(compared) if len(compared) > 1 else None
        cells = [
            Cell(text=_value(value, scale * std, digits), best=value == best)
            for value, std in zip(values, stds[number], strict=True)
        ]
        rows.append((Cell(text=str(name)), *cells))
    head = "client" if one_by_one else f"{rule:,} clients"
    return TextTable(header=(head, *methods), rows=tuple(rows), rule=rule - first)


def difference_cells(table: pd.DataFrame, metric: str = "accuracy") -> TextTable:
    """A difference table as text, in percentage points (loss: nats)."""
    scale, digits = (1, 3) if metric == "loss" else (100, 2)
    level = f"{100 * table['level'].iloc[0]:g}% interval" if len(table) else "interval"
    rows = []
    for method, row in table.iterrows():
        low, high = (signed(scale * row[bound], digits) for bound in ("low", "high"))
        interval = MISSING if math.isnan(row["low"]) else f"{low} to {high}"
        texts = (str(method), signed(scale * row["difference"], digits), interval, p_value(row["p"]), str(row["seeds"]))
        rows.append(tuple(Cell(text=text) for text in texts))
    return TextTable(header=("method", "difference", level, "p", "seeds"), rows=tuple(rows))


def reading(method: str, row: pd.Series, metric: str = "accuracy") -> str:
    """One row of a difference table as a sentence."""
    scale, digits, unit = (1, 3, "nats") if metric == "loss" else (100, 2, "points")
    gap, baseline, seeds = scale * row["difference"], row["baseline"], row["seeds"]
    size, side = f"{abs(gap):.{digits}f} {unit}", "above" if gap > 0 else "below"
    if seeds == 0:
        return f"{method} and {baseline} have no evaluated seed in common."
    if seeds == 1:
        return f"{method} lies {size} {side} {baseline} under the one seed they share; one seed gives no interval."
    low, high = (signed(scale * row[bound], digits) for bound in ("low", "high"))
    support = f"{100 * row['level']:g}% interval {low} to {high}, {seeds} seeds"
    if row["low"] > 0 or row["high"] < 0:
        return f"{method} is {side} {baseline} by {size} ({support})."
    return f"{method} is not told apart from {baseline}: difference {signed(gap, digits)} {unit} ({support})."


def markdown(table: TextTable) -> str:
    """A GitHub-flavored Markdown table."""
    body = [[_bold(_escape_markdown(cell.text), cell, "**{}**") for cell in row] for row in table.rows]
    lines = [[_escape_markdown(name) for name in table.header], ["---", *["---:"] * (len(table.header) - 1)], *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(table: TextTable) -> str:
    r"""A LaTeX ``tabular``; it needs ``\usepackage{booktabs}``."""
    lines = [r"\begin{tabular}{l" + "r" * (len(table.header) - 1) + "}", r"\toprule"]
    lines += [" & ".join(map(escape_latex, table.header)) + r" \\", r"\midrule"]
    for number, row in enumerate(table.rows):
        if number and number == table.rule:
            lines.append(r"\midrule")
        lines.append(" & ".join(_bold(escape_latex(cell.text), cell, r"\textbf{{{}}}") for cell in row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def escape_latex(text: str) -> str:
    """``text`` as LaTeX prints it."""
    return "".join(_LATEX.get(sign, sign) for sign in text)


def csv(table: pd.DataFrame) -> str:
    """The frame itself as CSV, one header line (``fedbn mean``, ``fedbn std``), six significant digits."""
    flat = table.copy()
    flat.columns = pd.Index([" ".join(name) if isinstance(name, tuple) else str(name) for name in table.columns])
    return flat.to_csv(float_format="%.6g", lineterminator="\n")


def terminal(table: TextTable) -> Table:
    """A table that ``rich.print`` shows; names are printed as they are, never read as markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(table.header):
        shown.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for number, row in enumerate(table.rows, start=1):
        texts = [Text(cell.text, style="bold" if cell.best else "") for cell in row]
        shown.add_row(*texts, end_section=number == table.rule)
    return shown


def signed(value: float, digits: int = 2) -> str:
    """``+1.20`` or, with a true minus sign, ``-1.20``; ``-`` for NaN."""
    return MISSING if math.isnan(value) else f"{value:+.{digits}f}".replace("-", MINUS)


def p_value(p: float) -> str:
    """A p-value with three decimals, ``<0.001`` below."""
    return MISSING if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def size(count: float) -> str:
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


def _value(mean: float, std: float, digits: int) -> str:
    if math.isnan(mean):
        return MISSING
    return f"{mean:.{digits}f}" if math.isnan(std) else f"{mean:.{digits}f} ({std:.{digits}f})"


def _bold(text: str, cell: Cell, form: str) -> str:
    return form.format(text) if cell.best else text


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", text).replace("\n", " ")
