"""What was reproduced as one page that loads nothing: each table and figure beside the paper's, with its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from ..report.formatting import to_latex, to_markdown
from ..report.inline_images import embed_svg
from ..utils.files import write_atomically
from ..utils.version import __version__
from .figures import load_figures
from .published_tables import PAPERS, Table, load_tables
from .results import read_results
from .verdict import compare_columns, remarks


def write_results_page(place: Path) -> Path:
    """Write the page of what is in ``place`` there: whole or not at all."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("fedshift", "papers"), PackageLoader("fedshift", "report")]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    shown = [found for table in load_tables().values() if (found := _render_table(table, place))]
    papers = {title: [each for each in shown if each["paper"] == paper] for paper, title in PAPERS.items()}
    text = environment.get_template("papers.html.j2").render(
        papers={title: found for title, found in papers.items() if found},
        version=__version__, latex=to_latex, markdown=to_markdown,
    )  # fmt: skip
    path = place / "index.html"
    write_atomically(path, text.encode())
    return path


def _render_table(table: Table, place: Path) -> dict[str, Any] | None:
    """What the page has of a table; None where nothing was run."""
    blocks, drawn = read_results(table, place), load_figures(table, place)
    if not blocks and not (drawn and drawn["pictures"]):
        return None
    return {
        "paper": table.paper,
        "id": table.key.replace("/", "-"),
        "table": table,
        "blocks": [(made, compare_columns(made)) for made in blocks],
        "drawn": drawn,
        "remarks": remarks(drawn["notes"], drawn.get("missing", ())) if drawn else [],
        "pictures": [embed_svg(p["svg"], p["name"], p["description"]) for p in drawn["pictures"]] if drawn else [],
    }
