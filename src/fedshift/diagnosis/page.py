"""Page of a diagnosis in one self-contained file: tests, values of each client, advice, and pictures of the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data.federation import Federation
from ..report.figures import to_svg
from ..report.html import embed_svg, render_template
from ..utils.files import write_atomically
from . import Diagnosis
from .overview import make_overview
from .rendering import comparison_command, interpret, tabulate_diagnosis

PAGE = "diagnosis.html"
_DESCRIPTIONS = {
    "samples": "Training samples of each client",
    "features": "Features in which the clients' training samples differ most",
    "classes": "Training samples of each class at each client",
}


def write_page(
    diagnosis: Diagnosis, data: Federation, path: Path, command: str | None = None, remarks: Sequence[str] = ()
) -> Path:
    """Write the page of ``diagnosis`` atomically and return its path; equal inputs give equal bytes.

    Args:
        diagnosis: Result of :func:`~fedshift.diagnosis.diagnose`.
        data: The diagnosed federation, for the pictures.
        path: File to write.
        command: Argument of ``--data`` in the suggested command, quoted; None: the federation's name.
        remarks: Sentences to show first.

    """
    findings, *evidence = tabulate_diagnosis(diagnosis).items()
    figures = make_overview(data)
    text = render_template(
        "diagnosis.html.j2",
        name=diagnosis.federation,
        clients=len(diagnosis.clients),
        samples=sum(diagnosis.sizes),
        named=diagnosis.named,
        remarks=list(remarks),
        readings=list(interpret(diagnosis)),
        findings=findings,
        advice=diagnosis.advice,
        command=comparison_command(diagnosis, command),
        evidence=evidence,
        figures=[embed_svg(to_svg(figure), name, _DESCRIPTIONS[name]) for name, figure in figures.items()],
    )
    write_atomically(path, text.encode())
    return path
