"""What was reproduced as one page that loads nothing: each table and figure beside the paper's, with its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from .. import __version__
from ..base.files import write_atomically
from ..report.inline import inline_svg
from ..report.text import latex, markdown
from .pictures import drawn_before
from .results import kept
from .tables import PAPERS, Table, tables
from .verdict import remarks, side_by_side


def write(place: Path) -> Path:
    """Write the page of what is in ``place`` there: whole or not at all."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("fedshift", "papers"), PackageLoader("fedshift", "report")]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    shown = [found for table in tables().values() if (found := _shown(table, place))]
    papers = {title: [each for each in shown if each["paper"] == paper] for paper, title in PAPERS.items()}
    text = environment.get_template("papers.html.j2").render(
        papers={title: found for title, found in papers.items() if found},
        version=__version__, latex=latex, markdown=markdown,
    )  # fmt: skip
    path = place / "index.html"
    write_atomically(path, text.encode())
    return path


def _shown(table: Table, place: Path) -> dict[str, Any] | None:
    """What the page has of a table; None where nothing was run."""
    blocks, drawn = kept(table, place), drawn_before(table, place)
    if not blocks and not (drawn and drawn["pictures"]):
        return None
    return {
        "paper": table.paper,
        "id": table.key.replace("/", "-"),
        "table": table,
        "blocks": [(made, side_by_side(made)) for made in blocks],
        "drawn": drawn,
        "remarks": remarks(drawn["notes"], drawn.get("missing", ())) if drawn else [],
        "pictures": [inline_svg(p["svg"], p["name"], p["description"]) for p in drawn["pictures"]] if drawn else [],
    }
