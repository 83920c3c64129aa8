"""The papers' figures drawn from runs: curves over rounds, over a setting or over clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..report.curves import CurvePoint, make_round_panels, make_setting_panels
from ..report.figures import FigurePanel, to_svg
from ..report.style import figure_settings
from ..representations import figures as representations
from ..results.summary import read_summary
from ..utils.files import write_atomically
from .measurements import load_features
from .planning import PanelPlan
from .published_tables import Table
from .results import run_folder
from .toy import compute_toy, draw_toy_panels


def draw_panels(table: Table, panel: PanelPlan, directory: Path, *, mark: str = "") -> dict[str, str]:
    """Write pictures of ``panel`` of finished runs in ``directory`` as SVG and PNG; return descriptions by file name.

    ``mark`` is a title, for data that are not the paper's.
    """
    folder = directory / "results" / table.paper
    folder.mkdir(parents=True, exist_ok=True)
    pictures = list(_draw_panel(table, panel, directory))
    for picture in pictures:
        with figure_settings():
            picture.figure.suptitle(mark, fontsize=8)
            picture.figure.savefig(folder / f"{picture.name}.png", dpi=200, metadata={"Software": None})
        write_atomically(folder / f"{picture.name}.svg", to_svg(picture.figure).encode())
    return {picture.name: picture.description for picture in pictures}


def _draw_panel(table: Table, panel: PanelPlan, directory: Path) -> Iterator[FigurePanel]:
    if panel.x in ("toy", "features"):
        for picture in _draw_pictures(panel, directory):
            if picture.name.startswith(panel.y):
                yield replace(picture, name=f"{panel.name}-{picture.name}")
        return
    points = [CurvePoint(keys, read_summary(run_folder(spec, directory))) for keys, spec in panel.points]
    points = [point for point in points if (point.summary.rows["moment"] == "loaded").any()]
    if not points:  # all runs diverged before they were measured
        return
    if panel.x == "round":
        yield from make_round_panels(points, panel.y, panel.name, panel=panel.by)
        return
    shown = list(_split_clients(points)) if panel.x == "client" else points
    for picture in make_setting_panels(shown, panel.x, panel.y, panel.name, panel=panel.by):
        values = "; ".join(text for *_, text in picture.points)
        yield replace(picture, description=f"{table.title}. Macro {panel.y.replace('_', ' ')}: {values}.")


def _draw_pictures(panel: PanelPlan, directory: Path) -> Iterable[FigurePanel]:
    """Return figures of the toy example, or of the representations in the runs, all methods side by side."""
    if panel.x == "toy":
        with figure_settings():
            return list(draw_toy_panels(compute_toy(0)))
    runs = [run for _, spec in panel.points if (run := load_features(spec, directory))]
    drawn = {name: data for run in runs for name, data in run.drawn.items()}
    return representations.draw_panels(replace(runs[0], drawn=drawn)) if runs else ()  # all runs diverged


def _split_clients(points: Sequence[CurvePoint]) -> Iterator[CurvePoint]:
    """Yield a point for each client, with the client's results."""
    for point in points:
        for client, sizes in point.summary.clients.items():
            rows = point.summary.rows[point.summary.rows["client"] == client]
            yield CurvePoint(
                {**point.keys, "client": client}, replace(point.summary, rows=rows, clients={client: sizes})
            )
