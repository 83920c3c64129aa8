"""Page of a diagnosis in one self-contained file: tests, values of each client, advice, and pictures of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..data.federation import Federation
from ..report.figures import FigurePanel
from ..report.html import describe_pictures, render_template
from ..report.report import Report, ReportTable
from ..utils.files import write_atomically
from . import Diagnosis
from .overview import SHOWN, make_overview
from .rendering import comparison_command, interpret, tabulate_diagnosis

PAGE = "diagnosis.html"
_DESCRIPTIONS = {
    "samples": "Training samples of each client",
    "features": "Features in which the clients' training samples differ most",
    "classes": "Training samples of each class at each client",
}


def write_page(
    diagnosis: Diagnosis, data: Federation, path: Path, command: str | None = None, remarks: Sequence[str] = (),
    *, pictures: bool = True,
) -> Path:  # fmt: skip
    """Write the page of ``diagnosis`` atomically and return its path; equal inputs give equal bytes.

    Args:
        diagnosis: Result of :func:`~fedshift.diagnosis.diagnose`.
        data: The diagnosed federation, for the pictures.
        path: File to write.
        command: Argument of ``--data`` in the suggested command, quoted; None: the federation's name.
        remarks: Sentences to show first.
        pictures: Whether to show images of samples.

    """
    tables = [
        ReportTable(file=f"evidence-{number}", caption=caption, text=text, section="evidence")
        for number, (caption, text) in enumerate(tabulate_diagnosis(diagnosis).items())
    ]
    findings = replace(tables[0], section="findings", kind="findings")
    figures = make_overview(data, pictures=pictures)
    panels = (FigurePanel(name=name, figure=figures[name], description=_DESCRIPTIONS[name]) for name in figures)
    html = render_template(
        "diagnosis.html.j2",
        name=diagnosis.federation,
        clients=len(diagnosis.clients),
        samples=sum(diagnosis.sizes),
        named=diagnosis.named,
        report=Report(tables=(findings, *tables[1:]), panels=tuple(panels), notices=tuple(remarks)),
        readings=list(interpret(diagnosis)),
        advice=diagnosis.advice,
        command=comparison_command(diagnosis, command),
        shown=describe_pictures("training", data.names[:SHOWN] if "samples" in figures else ()),
    )
    write_atomically(path, html.encode())
    return path
