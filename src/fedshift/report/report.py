"""A report as one value: sentences, tables and figures, made once and rendered for terminal, notebook, page and files.

Each table is declared once, as a :class:`ReportTable`. By default it is on the terminal, in its section of the page,
and in the files ``tables/<file>`` as Markdown, LaTeX and CSV.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..utils.files import write_atomically
from .formatting import TextTable, to_csv, write_table

if TYPE_CHECKING:
    from .figures import FigurePanel

TERMINAL, PAGE, FILES = "terminal", "page", "files"
"""Places of a table."""


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table of a report: its data ``frame``, the same as ``text``, its ``caption`` and its ``file`` name.

    ``section``: where the page has it; ``title``: what unfolds it there, if not the caption; ``kind``: its class in
    HTML. The accuracy of the most frequent classes, in the note of ``text``, is a column of ``frame``.
    """

    file: str
    caption: str
    text: TextTable
    frame: pd.DataFrame | None = None
    section: str = "results"
    places: tuple[str, ...] = (TERMINAL, PAGE, FILES)
    title: str = ""
    kind: str = "numbers"


def detail_table(file: str, caption: str, frame: pd.DataFrame, text: TextTable) -> ReportTable:
    """Return a table of classes, decisions or survival, which the terminal does not show."""
    return ReportTable(file=file, caption=caption, text=text, frame=frame, section="classes", places=(PAGE, FILES))


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a run or a sweep.

    ``partial``: line about runs that have not ended, with which everything begins; ``lead``: sentence with which the
    terminal then begins, if any; ``notices``: sentences that the page has first; ``sentences``: those below the
    terminal's tables; ``frames``: data that have a CSV file and no table.
    """

    tables: tuple[ReportTable, ...]
    panels: tuple[FigurePanel, ...] = ()
    partial: str = ""
    lead: str = ""
    notices: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    frames: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    def list_tables(self, place: str, section: str = "") -> list[ReportTable]:
        """Return the tables at ``place``, in order, marked as partial if they are; ``section``: only its tables."""
        return [
            replace(table, text=replace(table.text, partial=self.partial))
            for table in self.tables
            if place in table.places and section in ("", table.section)
        ]

    def list_parts(self) -> Iterator[str | TextTable]:
        """Yield the sentences and tables that the terminal shows, in order."""
        yield from filter(None, (self.partial, self.lead))
        for table in self.list_tables(TERMINAL):
            yield from (table.caption, table.text)
        yield from dict.fromkeys(self.sentences)

    def write_tables(self, directory: Path) -> None:
        """Write the tables into ``directory``, as Markdown, LaTeX and CSV."""
        for table in self.list_tables(FILES):
            write_table(directory, table.file, table.text, table.frame, table.caption)
        for name, frame in self.frames.items():
            write_atomically(directory / f"{name}.csv", to_csv(frame, self.partial).encode())
