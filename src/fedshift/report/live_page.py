"""The page of ``fedshift watch``: progress of each method, and curves so far, for one or several runs.

A script on the page asks its server for newer versions. Methods at different rounds appear side by side, so the page
has no differences and claims; these are on the report's page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from secrets import token_urlsafe

from ..results.schema import RunSummary
from .curves import CurvePoint, format_setting
from .figures import make_panels, to_svg
from .formatting import MISSING, difference_unit, make_table
from .html import embed_svg, render_template
from .report import ReportTable
from .sweep_report import plot_rounds
from .tables import metric_history


@dataclass(frozen=True, kw_only=True)
class LiveView:
    """Progress of the directory ``name``: ``state`` in words, the runs in it, and remarks to read first."""

    name: str
    state: str
    points: tuple[CurvePoint, ...] = ()
    remarks: tuple[str, ...] = ()


def has_finished(summary: RunSummary) -> bool:
    """Return whether every method and seed has done all rounds, or was stopped."""
    done = summary.traffic.groupby(["method", "seed"])["round"].max()
    ended = (done == summary.rounds) | done.index.isin(summary.stopped)
    return len(done) == len(summary.methods) * len(summary.seeds) and bool(ended.all())


def render_live_page(view: LiveView, version: str, seconds: int) -> str:
    """Return the page's HTML.

    ``version`` identifies its content. The page asks for a newer one every ``seconds`` seconds.
    """
    begun = [point for point in view.points if len(point.summary.rows)]
    figures = {}
    if len(begun) == 1:
        panels = make_panels(begun[0].summary, curves_only=True)
        figures = {panel.name: embed_svg(to_svg(panel.figure), panel.name, panel.description) for panel in panels}
    elif begun:
        plots = plot_rounds(begun)
        figures = {name: embed_svg(to_svg(plot), name, f"{name}, a line for each run") for name, plot in plots.items()}
    nonce = token_urlsafe(12)
    return render_template(
        "live.html.j2",
        view=view,
        progress=_tabulate_progress(view.points),
        figures=figures,
        wide=len(begun) > 1,
        seen=version,
        seconds=seconds,
        nonce=nonce,
        policy=f"; script-src 'nonce-{nonce}'; connect-src 'self'",
    )


def _tabulate_progress(points: Sequence[CurvePoint]) -> ReportTable | None:
    if not points:
        return None
    keys = list(points[0].keys)
    metric = points[0].summary.metric_name
    header = (*keys, "method", "rounds done, by seed", f"macro {metric} of finished seeds", "of an unfinished seed")
    rows = [
        (*(format_setting(key, point.keys[key]) for key in keys), *row)
        for point in points
        for row in _describe_methods(point.summary)
    ]
    caption = (
        f"Test metric of the personal model in {points[0].summary.metric_unit}: mean over finished seeds, and the last "
        "value of a seed under way"
    )
    return ReportTable(file="methods", caption=caption, text=make_table(header, rows))


def _describe_methods(summary: RunSummary) -> Iterator[tuple[str, str, str, str]]:
    """Yield each method with its rounds done so far and its formatted macro test metric."""
    macro = metric_history(summary).groupby(["method", "seed", "round"])["value"].mean().dropna()
    unit = difference_unit(summary.metric)
    for method in summary.methods:
        done = summary.traffic[summary.traffic["method"] == method].groupby("seed")["round"].max()
        rounds = ", ".join(str(done.get(seed, 0)) for seed in summary.seeds)
        last = macro[macro.index.get_level_values("method") == method].groupby("seed").tail(1)
        ended = [round == summary.rounds or (name, seed) in summary.stopped for name, seed, round in last.index]
        finished, others = last[ended], last[[not each for each in ended]]
        mean = unit.format(finished.mean())
        unfinished = f"{unit.format(others.iloc[-1])} in round {others.index[-1][2]}" if len(others) else MISSING
        yield method, f"{rounds} of {summary.rounds}", mean, unfinished
