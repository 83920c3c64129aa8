"""The page of reproduced tables and figures next to the papers', with verdicts, in one self-contained file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..report.formatting import TextCell, make_table
from ..report.html import embed_svg, render_template
from ..report.report import ReportTable
from ..utils.files import write_atomically
from .figures import load_figures
from .published_tables import PAPERS, Table, load_tables
from .results import read_results
from .verdict import SHORTEST, arrange_values, compare_values, list_remarks


def write_results_page(directory: Path) -> Path:
    """Write a page with the results in ``directory`` to that directory, atomically; return its path."""
    entries = [entry for table in load_tables().values() if (entry := _make_entry(table, directory))]
    text = render_template(
        "papers.html.j2",
        overview=_make_overview(entries),
        entries=entries,
        shortest=SHORTEST,
    )
    path = directory / "index.html"
    write_atomically(path, text.encode())
    return path


def _make_entry(table: Table, directory: Path) -> dict[str, Any] | None:
    """Return the page's content for a table, or None if nothing was run."""
    blocks, figures = read_results(table, directory), load_figures(table, directory)
    if not blocks and not (figures and figures["pictures"]):
        return None
    return {
        "paper": PAPERS[table.paper],
        "id": table.key.replace("/", "-"),
        "table": table,
        "blocks": [(block, compare_values(block), arrange_values(block)) for block in blocks],
        "figures": figures,
        "remarks": list_remarks(figures["notes"], figures["missing"]) if figures else [],
        "pictures": [embed_svg(p["svg"], p["name"], p["description"]) for p in figures["pictures"]] if figures else [],
    }


def _make_overview(entries: list[dict[str, Any]]) -> ReportTable:
    """Return the table of all verdicts."""
    rows: list[tuple[object, ...]] = []
    for entry in entries:
        key, link, figures = entry["table"].key, f"#{entry['id']}", entry["figures"]
        for block, *_ in entry["blocks"]:
            name = f"{key}, version {block.block.version}" if block.block.version else key
            same, pairs = block.order
            source, scale = "the paper's" if block.own else "stand-in", f"{block.scale:.2g}"
            order = f"{same} of {pairs}" if pairs else ""
            verdict = TextCell(text=block.verdict, tone="warn" if block.is_short else "")
            rows.append((TextCell(text=name, link=link), verdict, order, source, block.seeds, scale))
        if entry["pictures"]:
            source, scale = "stand-in" if figures["notes"] else "the paper's", f"{figures['scale']:.2g}"
            rows.append((TextCell(text=key, link=link), "drawn", "", source, figures["seeds"], scale))
    caption = (
        "Pairs: pairs of methods, all else in their rows equal, whose order by the mean over columns is the paper's"
    )
    text = make_table(("table", "verdict", "pairs", "data and network", "seeds", "share of rounds"), rows)
    return ReportTable(file="overview", caption=f"{caption}paper's", text=text, kind="verdicts")
