"""Text tables as papers print them, and every form in which they are written.

A cell reads ``76.93 (0.25)`` in percent, the best one of a row is bold, and ``-`` marks a missing value. A
:class:`TextTable` is written as Markdown, LaTeX (booktabs), a terminal table or, by ``macros.html.j2``, HTML. CSV files
contain the underlying data frame unscaled, in full precision. One function each writes a value with its deviation
(:func:`format_mean`), a difference with its interval (:meth:`Unit.format_difference`), and a size
(:func:`format_bytes`).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from numpy.typing import NDArray

from ..results.schema import is_lower_better, is_share, metric_unit
from ..utils.csv_cells import escape_table
from ..utils.files import write_atomically

if TYPE_CHECKING:
    from rich.console import RenderableType

MISSING, LEVEL = "-", "level"
MINUS = "\N{MINUS SIGN}"
_MATHEMATICS = dict(zip(
    "αβγδεζηθικλμνξπρςστυφχψωΓΔΘΛΞΠΣΦΨΩ<>±×·≤≥≠≈∞→°µ" + MINUS,  # noqa: RUF001
    re.findall(
        r"\S+",
        r"\alpha \beta \gamma \delta \epsilon \zeta \eta \theta \iota \kappa \lambda \mu \nu \xi \pi \rho \varsigma "
        r"\sigma \tau \upsilon \phi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Pi \Sigma \Phi \Psi \Omega < > "
        r"\pm \times \cdot \leq \geq \neq \approx \infty \to ^\circ \mu -",
    ),
    strict=True,
))  # fmt: skip
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}",
    **{sign: "\\" + sign for sign in "&%$#_{}"}, **{sign: f"${text}$" for sign, text in _MATHEMATICS.items()},
}  # fmt: skip
_PUNCTUATION = "\u2013\u2014\u2018\u2019\u201c\u201d\u2026"
"""Signs beyond Latin letters that pdflatex reads."""

VARIED_BY_SEED = "initialization and order of samples, not the test samples and not the split"
"""Sources of variation between seeds, which a spread over seeds therefore covers."""
BOLD = "Bold marks the best mean as printed; it does not imply significance."
BOOKTABS = r"% \usepackage{booktabs}"
PADDING = 2
"""Spaces and lines around a column of a terminal table."""
NARROW = 60
"""Characters in a line of the note below a narrower terminal table."""
NAME = 32
"""Width of a column of names that a terminal table never breaks."""
FEW = 5
"""Maximum number of methods in the columns of a LaTeX table, by default, and of columns in normal size."""
_NUMBER = rf"{MINUS}?[\d.]+(?:e[+-]\d+)?"
_MEAN_AND_STD = re.compile(rf"({_NUMBER}) \(({_NUMBER})\)")
DIGITS, STD_DIGITS, MOST_DIGITS = 3, 2, 6
"""Significant digits of a value alone, of a standard deviation, and of a value beside a much smaller deviation."""
ROUNDING = 1e-9
"""Deviation relative to the largest value that floating-point rounding may cause."""
MOST_DECIMALS = 8
"""Largest number of decimals of a number that is written without an exponent."""


@dataclass(frozen=True, kw_only=True)
class TextCell:
    """Text of one cell; ``best`` makes it bold, ``link`` is its target and ``tone`` its class in HTML."""

    text: str
    best: bool = False
    link: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Header, and rows whose first cell names the row; a line is drawn above row number ``rule`` (0: none).

    ``note`` is printed below the table in every format except CSV, and explains spreads and intervals; LaTeX, for a
    paper, leaves out ``advice``, a part of it. ``partial`` is a line above the table in files, if some of the compared
    runs have not ended. ``corner``: what columns are, so that they may
    become rows; empty: they may not.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    rule: int = 0
    note: str = ""
    partial: str = ""
    corner: str = ""
    advice: str = ""

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
    """Form of values of a metric and of differences, in a unit ``name``: multiplied by ``scale``.

    ``digits``: number of decimals; None: as :func:`choose_decimals` has it, of a difference with half of its interval.
    """

    scale: float
    digits: int | None
    name: str

    @property
    def spec(self) -> str | None:
        """Format of a scaled value for :func:`format_mean`."""
        return _write_spec(self.digits)

    def format(self, value: float, std: float = math.nan) -> str:
        """Return :func:`format_mean` of a value of the metric itself."""
        return format_mean(self.scale * value, self.scale * std, self.spec)

    def format_signed(self, difference: float) -> str:
        """Return :func:`format_signed` of a difference."""
        return format_signed(self.scale * difference, self.digits)

    def format_difference(self, difference: float, low: float, high: float) -> str:
        """Return ``+0.20 (+0.10 to +0.30)``, and only the difference if the interval is NaN."""
        if math.isnan(low):
            return self.format_signed(difference)
        unit = self._fit([difference], low, high)
        return f"{unit.format_signed(difference)} ({unit.format_interval(low, high)})"

    def format_interval(self, low: float, high: float) -> str:
        """Return ``+0.10 to +0.30``, ``level`` for an interval without length, ``-`` for NaN."""
        if math.isnan(low) or low == high:
            return MISSING if math.isnan(low) else LEVEL
        unit = self._fit([low, high], low, high)
        return f"{unit.format_signed(low)} to {unit.format_signed(high)}"

    def _fit(self, values: Iterable[float], low: float, high: float) -> Unit:
        """Return the unit with the decimals for ``values`` with the interval ``low`` to ``high``."""
        decimals = choose_decimals([self.scale * value for value in values], [self.scale * (high - low) / 2])
        return self._replace(digits=decimals if self.digits is None else self.digits)


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
    """Return an accuracy table as text: shares in percent with 2 decimals, the best of each row in bold.

    Args:
        table: Table of :func:`~fedshift.report.tables.accuracy_table`.
        metric: Metric of its values.
        one_by_one: Begin with the clients; otherwise with the aggregates, and the header states their number.
        digits: Number of decimals; None: the metric's, or as deviations in the row have it.
        even: Methods have reached the same rounds; otherwise none is the best.

    """
    methods = list(table.columns.get_level_values("method").unique())
    macro = len(table) - 1 - list(table.index)[::-1].index("macro")  # below all clients, as a client may be named macro
    first = 0 if one_by_one else macro
    means, stds, counts = (table.to_numpy()[first:, statistic::3] for statistic in range(3))
    cells = [_make_cells(*row, metric, digits, even=even) for row in zip(means, stds, strict=True)]
    rows = [(str(name), *row) for name, row in zip(table.index[first:], cells, strict=True)]
    whose = "client" if one_by_one else f"{macro:,} clients"
    note = _explain_cells(cells, counts)
    return replace(make_table((whose, *methods), rows, rule=macro - first, note=note), corner="method")


def format_cross_table(table: pd.DataFrame, metric: str = "accuracy") -> TextTable:
    """Return a table of :func:`~fedshift.report.tables.cross_table` as text, the best model on each client in bold."""
    clients = list(table.columns.get_level_values("client").unique())
    means_CO, stds_CO, counts_CO = (table.to_numpy()[:, statistic::3].T for statistic in range(3))
    columns = [_make_cells(means_O, stds_O, metric) for means_O, stds_O in zip(means_CO, stds_CO, strict=True)]
    rows = [(str(owner), *row) for owner, row in zip(table.index, zip(*columns, strict=True), strict=True)]
    return make_table(("model of", *clients), rows, note=_explain_cells(columns, counts_CO))


def _make_cells(
    means: Iterable[float], stds: Iterable[float], metric: str, digits: int | None = None, *, even: bool = True
) -> list[TextCell]:
    """Return cells of values to compare, all with as many decimals, and the best as printed in bold, if ``even``."""
    scale, standard, _ = difference_unit(metric)
    values, spreads = [scale * mean for mean in means], [scale * std for std in stds]
    digits = standard if digits is None else digits
    digits = choose_decimals(values, spreads) if digits is None else digits
    values = [round(value, digits) for value in values]
    measured = [value for value in values if not math.isnan(value)]
    best = (min if is_lower_better(metric) else max)(measured) if len(measured) > 1 and even else None
    texts = [format_mean(*pair, _write_spec(digits)) for pair in zip(values, spreads, strict=True)]
    return [TextCell(text=text, best=value == best) for text, value in zip(texts, values, strict=True)]


def _explain_cells(rows: Iterable[Iterable[TextCell]], counts: NDArray[Any]) -> str:
    """Return the note of a table of means over so many seeds."""
    note = explain_spread(max(counts.max(initial=0), 0))
    return f"{note} {BOLD}" if any(cell.best for row in rows for cell in row) else note


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
    standard deviations are written as ``$76.93 \pm 0.25$``. Signs that pdflatex does not know become mathematics or,
    as in names in another script, ``U+4E2D``; Latin letters of other languages than English may need
    ``\usepackage[T1]{fontenc}``.
    """
    lines = [rf"\par\textbf{{{escape_latex(table.partial)}}}\par"] if table.partial else []
    lines += [r"\begin{tabular}{l" + "r" * (len(table.header) - 1) + "}", r"\toprule"]
    lines += [" & ".join(map(escape_latex, table.header)) + r" \\", r"\midrule"]
    for number, row in enumerate(table.rows):
        if number and number == table.rule:
            lines.append(r"\midrule")
        lines.append(" & ".join(map(_cell_to_latex, row)) + r" \\")
    text = escape_latex(table.note.replace(table.advice, "").strip()).replace("(std) is", r"$\pm$: standard deviation")
    lines += [r"\bottomrule", r"\end{tabular}", *([rf"\par{{\footnotesize {text}}}"] if text else [])]
    if caption:
        titles = [BOOKTABS, r"\begin{table}", r"\centering", *([r"\small"] if len(table.header) > FEW + 1 else [])]
        titles.append(rf"\caption{{{escape_latex(caption)}.}}")
        lines = [*titles, *([rf"\label{{{label}}}"] if label else []), *lines, r"\end{table}"]
    first = [f"% {table.partial}"] if table.partial else []
    return "\n".join([*first, *lines, ""])


def _cell_to_latex(cell: TextCell) -> str:
    if not (match := _MEAN_AND_STD.fullmatch(cell.text)):
        return rf"\textbf{{{escape_latex(cell.text)}}}" if cell.best else escape_latex(cell.text)
    mean, std = (_number_to_latex(text) for text in match.groups())
    return rf"$\mathbf{{{mean}}} \pm {std}$" if cell.best else rf"${mean} \pm {std}$"


def _number_to_latex(text: str) -> str:
    number, _, exponent = text.replace(MINUS, "-").partition("e")
    return rf"{number} \cdot 10^{{{int(exponent)}}}" if exponent else number


def to_csv(table: pd.DataFrame, partial: str = "") -> str:
    """Return the data frame as CSV with one header line (``fedbn mean``, ``fedbn std``), in full precision.

    ``partial``: line of the table, which becomes a comment before the header.
    """
    flat = table.copy()
    flat.columns = pd.Index(
        [" ".join(name).strip() if isinstance(name, tuple) else str(name) for name in table.columns]
    )
    return (f"# {partial}\n" if partial else "") + escape_table(flat).to_csv(float_format="%.15g", lineterminator="\n")


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


def choose_decimals(values: Iterable[float], stds: Iterable[float] = ()) -> int:
    """Return the number of decimals with which ``values`` that are compared, and their ``stds``, are printed.

    The largest deviation has :data:`STD_DIGITS` significant digits and the smallest one; without deviations, there are
    :data:`DIGITS` decimals, or as many significant digits of the smallest value. The largest value has at most
    :data:`MOST_DIGITS`.
    """
    sizes, spreads = ([abs(x) for x in given if x and math.isfinite(x)] for given in (values, stds))
    spreads = [std for std in spreads if std > ROUNDING * max(sizes, default=0.0)]
    if not sizes and not spreads:
        return DIGITS
    needed = DIGITS - 1 - _find_place(min([*sizes, 0.1]))
    if spreads:
        needed = max(STD_DIGITS - 1 - _find_place(max(spreads)), -_find_place(min(spreads)))
    return max(0, min(needed, MOST_DIGITS - 1 - _find_place(max([*sizes, *spreads]))))


def _find_place(size: float) -> int:
    """Return the exponent of the first significant digit."""
    return math.floor(math.log10(size))


def _write_spec(decimals: int | None) -> str | None:
    """Return the format of a number with so many decimals, or an exponent if they are many."""
    return None if decimals is None else f".{decimals}f" if decimals <= MOST_DECIMALS else f".{DIGITS - 1}e"


def _write_number(value: float, spec: str) -> str:
    """Return a number with a true minus sign, and no sign where it rounds to zero."""
    text = f"{value:{spec}}"
    return text.lstrip("+-") if not float(text) else text.replace("-", MINUS, 1) if text[0] == "-" else text


def format_mean(mean: float, std: float = math.nan, number: str | None = None) -> str:
    """Return ``mean (std)``, both in format ``number``; ``-`` for NaN, and only the mean if the std is NaN.

    ``number``: None has as many decimals as :func:`choose_decimals` gives.
    """
    if not math.isfinite(mean):
        return MISSING
    number = number or _write_spec(choose_decimals([mean], [std])) or ""
    text = _write_number(mean, number)
    return f"{text} ({_write_number(std, number)})" if math.isfinite(std) else text


def format_signed(value: float, digits: int | None = 2) -> str:
    """Return ``+1.20`` or, with a true minus sign, ``-1.20``; ``0.00`` where it rounds to zero, ``-`` for NaN."""
    digits = choose_decimals([value]) if digits is None else digits
    return _write_number(value, f"+{_write_spec(digits)}") if math.isfinite(value) else MISSING


def format_p_value(p: float) -> str:
    """Return a p-value with three decimals, ``<0.001`` below that and ``-`` for NaN."""
    return MISSING if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def format_bytes(count: float) -> str:
    """Return bytes in decimal units with three significant digits: ``1.23 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        text = f"{count:.0f}" if unit == "B" else f"{count:.3g}"
        if math.isnan(count) or float(text) < 1000:
            return MISSING if math.isnan(count) else f"{text} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


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
    """Return ``text`` as pdflatex typesets it literally, with signs that it does not know as mathematics or by code."""
    return "".join(map(_sign_to_latex, unicodedata.normalize("NFC", text)))


def _sign_to_latex(sign: str) -> str:
    kind, _, code = unicodedata.decomposition(sign).partition(" ")
    if kind in ("<super>", "<sub>"):
        return f"${'^' if kind == '<super>' else '_'}{{{chr(int(code, 16))}}}$"
    known = sign <= "\N{LATIN SMALL LETTER Z WITH CARON}" or sign in _PUNCTUATION
    return _LATEX.get(sign) or (sign if known else f"U+{ord(sign):04X}")


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", text).replace("\n", " ")
