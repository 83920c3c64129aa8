"""Text tables as papers print them, and every form in which they are written.

A cell reads ``76.93 (0.25)`` in percent, the best one of a row is bold, and ``-`` marks a missing value. A
:class:`TextTable` is written as Markdown, LaTeX (booktabs), a terminal table or, by ``macros.html.j2``, HTML. CSV files
contain the underlying data frame unscaled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from ..results.schema import is_lower_better, is_share, metric_unit
from ..utils.csv_cells import escape_table
from ..utils.files import write_atomically

if TYPE_CHECKING:
    from rich.console import RenderableType

MISSING, LEVEL = "-", "level"
MINUS = "\N{MINUS SIGN}"
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", MINUS: "$-$",
    "<": "$<$", ">": "$>$", "|": r"\textbar{}", **{sign: "\\" + sign for sign in "&%$#_{}"},
}  # fmt: skip

VARIED_BY_SEED = "initialization and order of samples, not the test samples and not the split"
"""Sources of variation between seeds, which a spread over seeds therefore covers."""
BOLD = "Bold marks the best mean as printed; it does not imply significance."
SIGNIFICANT = (
    "Bold: better than every other method on new samples of these clients too (paired over seeds and test samples, "
    "corrected for all comparisons, Holm)."
)
BOOKTABS = r"% \usepackage{booktabs}"
PADDING = 2
"""Spaces and lines around a column of a terminal table."""
NARROW = 60
"""Characters in a line of the note below a narrower terminal table."""
NAME = 32
"""Width of a column of names that a terminal table never breaks."""
FEW = 5
"""Maximum number of methods in the columns of a LaTeX table, by default, and of columns in normal size."""
_MEAN_AND_STD = re.compile(r"(\d[\d.]*) \((\d[\d.]*)\)")


@dataclass(frozen=True, kw_only=True)
class TextCell:
    """Text of one cell; ``best`` makes it bold (in LaTeX, ``significant`` does).

    ``link`` is its target and ``tone`` its class in HTML.
    """

    text: str
    best: bool = False
    significant: bool = False
    link: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Header, and rows whose first cell names the row; a line is drawn above row number ``rule`` (0: none).

    ``note`` is printed below the table in every format except CSV, and explains spreads and intervals. ``partial`` is a
    line above it in files, if some of the compared runs have not ended. ``corner``: what columns are, so that they may
    become rows; empty: they may not.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    rule: int = 0
    note: str = ""
    partial: str = ""
    corner: str = ""

    @property
    def values(self) -> list[str]:
        """Text of every cell except the row names."""
        return [cell.text for row in self.rows for cell in row[1:]]


def make_table(
    header: Iterable[str], rows: Iterable[Iterable[object]], *, rule: int = 0, note: str = "", partial: str = ""
) -> TextTable:
    """Return a table of ``rows``, whose values other than :class:`TextCell` are converted to text."""
    cells = (tuple(cell if isinstance(cell, TextCell) else TextCell(text=str(cell)) for cell in row) for row in rows)
    return TextTable(header=tuple(header), rows=tuple(cells), rule=rule, note=note, partial=partial)


def explain_spread(seeds: float) -> str:
    """Return a sentence about the variation that standard deviations over this many seeds cover."""
    if seeds < 2:
        varied = VARIED_BY_SEED.replace(", not", " nor of").replace(" and not", " or")
        return f"One seed shows no spread, neither of {varied}."
    return f"(std) is over seeds: {VARIED_BY_SEED}."


class Unit(NamedTuple):
    """How differences of a metric are printed: multiplied by ``scale``, with so many ``digits``, in a unit ``name``."""

    scale: float
    digits: int
    name: str

    def format(self, value: float) -> str:
        """Return a value of the metric itself; ``-`` for NaN."""
        return format_mean(self.scale * value, math.nan, f".{self.digits}f")

    def format_signed(self, difference: float) -> str:
        """Return :func:`format_signed` of a difference."""
        return format_signed(self.scale * difference, self.digits)

    def format_interval(self, low: float, high: float) -> str:
        """Return ``+0.10 to +0.30``, ``level`` for an interval without length, ``-`` for NaN."""
        if math.isnan(low):
            return MISSING
        return LEVEL if low == high else f"{self.format_signed(low)} to {self.format_signed(high)}"


def difference_unit(metric: str, *, numbers: bool = False) -> Unit:
    """Return how differences of ``metric`` are printed; ``numbers``: of such targets."""
    scale, digits, unit = metric_unit(metric, numbers=numbers)
    return Unit(scale, digits, "points" if is_share(metric) else unit)


def format_metric_table(
    table: pd.DataFrame,
    metric: str = "accuracy",
    *,
    one_by_one: bool = True,
    digits: int | None = None,
    even: bool = True,
) -> TextTable:
    """Return an accuracy table as text: shares in percent with 2 decimals, loss in nats with 3, the best in bold.

    Args:
        table: Table of :func:`~fedshift.report.tables.accuracy_table`.
        metric: Metric of its values.
        one_by_one: Begin with the clients; otherwise with the aggregates, and the header states their number.
        digits: Number of decimals; None: the metric's.
        even: Methods have reached the same rounds; otherwise none is the best.

    """
    methods = list(table.columns.get_level_values("method").unique())
    means, stds, counts = (table.to_numpy()[:, statistic::3] for statistic in range(3))
    macro = len(table) - 1 - list(table.index)[::-1].index("macro")  # below all clients, as a client may be named macro
    scale, standard, _ = difference_unit(metric)
    digits = standard if digits is None else digits
    rows: list[tuple[str | TextCell, ...]] = []
    first = 0 if one_by_one else macro
    for number, name in enumerate(table.index[first:], start=first):
        values = [round(scale * mean, digits) for mean in means[number]]
        measured = [value for value in values if not math.isnan(value)]
        best = (min if is_lower_better(metric) else max)(measured) if len(measured) > 1 and even else None
        cells = (
            TextCell(
                text=format_mean(value, scale * std, f".{digits}f"),
                best=value == best,
            )
            for value, std in zip(values, stds[number], strict=True)
        )
        rows.append((str(name), *cells))
    note = explain_spread(max(counts.max(initial=0), 0))
    if any(isinstance(cell, TextCell) and cell.best for row in rows for cell in row):
        note = f"{note} {BOLD}"
    whose = "client" if one_by_one else f"{macro:,} clients"
    return replace(make_table((whose, *methods), rows, rule=macro - first, note=note), corner="method")


def format_cross_table(table: pd.DataFrame, metric: str = "accuracy") -> TextTable:
    """Return a table of :func:`~fedshift.report.tables.cross_table` as text, the best model on each client in bold."""
    clients = list(table.columns.get_level_values("client").unique())
    means_OC, stds_OC, counts_OC = (table.to_numpy()[:, statistic::3] for statistic in range(3))
    scale, digits, _ = difference_unit(metric)
    rounded_OC = [[round(scale * mean, digits) for mean in means] for means in means_OC]
    better = min if is_lower_better(metric) else max
    measured = [[value for value in values if not math.isnan(value)] for values in zip(*rounded_OC, strict=True)]
    best_C = [better(values) if len(values) > 1 else None for values in measured]
    rows = [
        (
            str(owner),
            *(
                TextCell(text=format_mean(value, scale * std, f".{digits}f"), best=value == best)
                for value, std, best in zip(values, stds, best_C, strict=True)
            ),
        )
        for owner, values, stds in zip(table.index, rounded_OC, stds_OC, strict=True)
    ]
    note = explain_spread(max(counts_OC.max(initial=0), 0))
    note += f" {BOLD}" if any(best is not None for best in best_C) else ""
    return make_table(("model of", *clients), rows, note=note)


def transpose(table: TextTable) -> TextTable:
    """Return ``table`` with rows as columns, without the line between rows."""
    names = [row[0].text for row in table.rows]
    columns = zip(*(row[1:] for row in table.rows), strict=True)
    rows = [(TextCell(text=name), *cells) for name, cells in zip(table.header[1:], columns, strict=True)]
    return replace(table, header=(table.corner, *names), rows=tuple(rows), rule=0, corner=table.header[0])


def turn_if_wide(table: TextTable, width: int) -> TextTable:
    """Return ``table``, with columns as rows if its lines then take ``width`` characters, and not otherwise."""
    blocks = fit_width(table, width) if table.corner else [table]
    return blocks[0] if len(blocks) == 1 else table


def rename(table: TextTable, names: Mapping[str, str]) -> TextTable:
    """Return ``table`` with other names of columns and rows, where ``names`` has some."""
    rows = ((replace(row[0], text=names.get(row[0].text, row[0].text)), *row[1:]) for row in table.rows)
    return replace(table, header=tuple(names.get(each, each) for each in table.header), rows=tuple(rows))


def fit_width(table: TextTable, width: int) -> list[TextTable]:
    """Return ``table``, transposed or as several tables of some columns each, so that lines take ``width`` characters.

    A table whose columns may not become rows stays one; names of rows and columns then break after each ``+``.
    """
    if _measure_width(table) <= width:
        return [table]
    if not table.corner:
        broken = {name: name.replace("+", "+\n") for name in (*table.header, *(row[0].text for row in table.rows))}
        return [rename(table, broken)]
    turned = transpose(table)
    if _measure_width(turned) <= width:
        return [turned]
    blocks = min((_split_columns(each, width) for each in (table, turned)), key=len)
    return [replace(block, note=table.note if block is blocks[-1] else "") for block in blocks]


def _measure_columns(table: TextTable) -> list[int]:
    cells = zip(table.header, *([cell.text for cell in row] for row in table.rows), strict=True)
    return [max(map(len, "\n".join(column).splitlines()), default=0) + PADDING for column in cells]


def _measure_width(table: TextTable) -> int:
    return sum(_measure_columns(table)) + 1


def _split_columns(table: TextTable, width: int) -> list[TextTable]:
    """Return tables with the first column and as many others as fit, at least one."""
    first, *others = _measure_columns(table)
    blocks, used = list[list[int]](), width
    for place, each in enumerate(others, start=1):
        if used + each > width:
            blocks.append([])
            used = first + PADDING
        blocks[-1].append(place)
        used += each
    return [
        replace(
            table,
            header=(table.header[0], *(table.header[place] for place in block)),
            rows=tuple((row[0], *(row[place] for place in block)) for row in table.rows),
        )
        for block in blocks
    ]


def to_markdown(table: TextTable) -> str:
    """Return a GitHub-flavored Markdown table, between its partial line and its note as paragraphs."""
    body = [
        [f"**{text}**" if cell.best else text for cell in row for text in [_escape_markdown(cell.text)]]
        for row in table.rows
    ]
    lines = [[_escape_markdown(name) for name in table.header], ["---", *["---:"] * (len(table.header) - 1)], *body]
    note = f"\n{_escape_markdown(table.note)}\n" if table.note else ""
    partial = f"{_escape_markdown(table.partial)}\n\n" if table.partial else ""
    return partial + "".join(f"| {' | '.join(line)} |\n" for line in lines) + note


def to_latex(table: TextTable, caption: str = "", label: str = "") -> str:
    r"""Return a LaTeX ``table`` with its note, or without ``caption`` only its ``tabular``.

    It requires ``\usepackage{booktabs}``, as its first line says, and is small if there are many columns. Means with
    standard deviations are written as ``$76.93 \pm 0.25$``, and bold marks what is significant, not what is merely
    largest.
    """
    lines = [rf"\par\textbf{{{escape_latex(table.partial)}}}\par"] if table.partial else []
    lines += [r"\begin{tabular}{l" + "r" * (len(table.header) - 1) + "}", r"\toprule"]
    lines += [" & ".join(map(escape_latex, table.header)) + r" \\", r"\midrule"]
    for number, row in enumerate(table.rows):
        if number and number == table.rule:
            lines.append(r"\midrule")
        lines.append(" & ".join(map(_cell_to_latex, row)) + r" \\")
    marked = any(cell.significant for row in table.rows for cell in row)
    text = table.note.replace(BOLD, SIGNIFICANT if marked else "").strip()
    text = escape_latex(text).replace("(std) is", r"$\pm$: standard deviation")
    lines += [r"\bottomrule", r"\end{tabular}", *([rf"\par{{\footnotesize {text}}}"] if text else [])]
    if caption:
        titles = [BOOKTABS, r"\begin{table}", r"\centering", *([r"\small"] if len(table.header) > FEW + 1 else [])]
        titles.append(rf"\caption{{{escape_latex(caption)}.}}")
        lines = [*titles, *([rf"\label{{{label}}}"] if label else []), *lines, r"\end{table}"]
    first = [f"% {table.partial}"] if table.partial else []
    return "\n".join([*first, *lines, ""])


def _cell_to_latex(cell: TextCell) -> str:
    if match := _MEAN_AND_STD.fullmatch(cell.text):
        mean = rf"\mathbf{{{match[1]}}}" if cell.significant else match[1]
        return rf"${mean} \pm {match[2]}$"
    return rf"\textbf{{{escape_latex(cell.text)}}}" if cell.significant else escape_latex(cell.text)


def to_csv(table: pd.DataFrame, partial: str = "") -> str:
    """Return the data frame as CSV with one header line (``fedbn mean``, ``fedbn std``) and six significant digits.

    ``partial``: line of the table, which becomes a comment before the header.
    """
    flat = table.copy()
    flat.columns = pd.Index(
        [" ".join(name).strip() if isinstance(name, tuple) else str(name) for name in table.columns]
    )
    return (f"# {partial}\n" if partial else "") + escape_table(flat).to_csv(float_format="%.6g", lineterminator="\n")


def to_terminal(table: TextTable) -> RenderableType:
    """Return a table that ``rich`` prints, with its note; text is printed literally, never read as markup.

    Lines of the note are as wide as the table, or :data:`NARROW` characters below a narrower one.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    inside, first = _measure_width(table) >= NARROW, next(iter(_measure_columns(table)), 0)
    note = Text(table.note) if table.note and inside else None
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=note, caption_justify="left", caption_style="")
    for number, name in enumerate(table.header):
        whole = number == 0 and first <= NAME
        grid.add_column(Text(name), justify="right" if number else "left", overflow="fold", no_wrap=whole)
    for number, row in enumerate(table.rows, start=1):
        texts = [Text(cell.text, style="bold" if cell.best else "") for cell in row]
        grid.add_row(*texts, end_section=number == table.rule)
    return grid if inside or not table.note else Group(grid, Text(fill(table.note, NARROW, break_on_hyphens=False)))


def write_table(
    directory: Path, name: str, table: TextTable, frame: pd.DataFrame | None = None, caption: str = ""
) -> list[Path]:
    """Write ``table`` as Markdown and LaTeX, and ``frame`` as CSV, into ``directory``; return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    latex = to_latex(table, caption, f"tab:{name}")
    contents = {"md": to_markdown(table), "tex": latex} | (
        {} if frame is None else {"csv": to_csv(frame, table.partial)}
    )
    for suffix, content in contents.items():
        write_atomically(directory / f"{name}.{suffix}", content.encode())
    return [directory / f"{name}.{suffix}" for suffix in contents]


def format_mean(mean: float, std: float, number: str = ".2f") -> str:
    """Return ``mean (std)``, both in format ``number``; ``-`` for NaN, and only the mean if the std is NaN."""
    if math.isnan(mean):
        return MISSING
    return f"{mean:{number}}" if math.isnan(std) else f"{mean:{number}} ({std:{number}})"


def format_signed(value: float, digits: int = 2) -> str:
    """Return ``+1.20`` or, with a true minus sign, ``-1.20``; ``0.00`` where it rounds to zero, ``-`` for NaN."""
    if math.isnan(value):
        return MISSING
    return f"{value:+.{digits}f}".replace("-", MINUS) if round(value, digits) else f"{0:.{digits}f}"


def format_p_value(p: float) -> str:
    """Return a p-value with three decimals, ``<0.001`` below that and ``-`` for NaN."""
    return MISSING if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def format_bytes(count: float) -> str:
    """Return bytes in decimal units: ``1.23 MB``."""
    if math.isnan(count):
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def flatten_settings(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return nested mappings and sequences of mappings as ``("a.b", "value")`` pairs in order."""
    if isinstance(tree, Mapping) and tree:
        items = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple) and any(isinstance(value, Mapping) for value in tree):
        items = [(f"{prefix}[{number}]", value) for number, value in enumerate(tree)]
    elif isinstance(tree, list | tuple):
        return [(prefix, ", ".join(map(str, tree)) or MISSING)]
    else:
        return [(prefix, MISSING if tree is None or isinstance(tree, Mapping) else str(tree))]
    return [pair for name, value in items for pair in flatten_settings(value, name)]


def escape_latex(text: str) -> str:
    """Return ``text`` with LaTeX's special characters escaped."""
    return "".join(_LATEX.get(sign, sign) for sign in text)


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", text).replace("\n", " ")
