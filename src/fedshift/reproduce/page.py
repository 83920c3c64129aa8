"""The page of reproduced tables and figures next to the papers', with verdicts, in one self-contained file."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from ..report.html import embed_svg, render_template
from ..report.report import ReportTable
from ..utils.files import write_atomically
from .comparison import compare_values, describe_verdict
from .published_tables import PAPERS, load_tables
from .results import Result, read_results


def write_results_page(directory: Path) -> Path:
    """Write a page with the results in ``directory`` to that directory, atomically; return its path."""
    entries = []
    for table in load_tables().values():
        results = [
            (result, *describe_verdict(result), _make_table(result, number), _embed_pictures(result, directory))
            for number, result in enumerate(read_results(table, directory))
        ]
        entries += [{"paper": PAPERS[table.paper], "table": table, "results": results}] if results else []
    path = directory / "index.html"
    write_atomically(path, render_template("papers.html.j2", entries=entries).encode())
    return path


def _make_table(result: Result, number: int) -> ReportTable:
    version = f", version {result.block.version}" if result.block.version else ""
    caption = f"{result.table.key}{version}{'' if result.own else ', stand-in'}: ours and the paper's"
    return ReportTable(file=f"{result.table.name}-{number}", caption=caption, text=compare_values(result))


def _embed_pictures(result: Result, directory: Path) -> list[Markup]:
    folder = directory / "results" / result.table.paper
    return [
        embed_svg((folder / f"{name}.svg").read_text(encoding="utf-8"), name, description)
        for name, description in result.pictures.items()
    ]
