"""The sentence about lagging BatchNorm statistics, with which terminal and page begin.

Runs measure models with running and with re-estimated statistics at the reported round
(:mod:`fedshift.evaluation.statistics_lag`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..results.schema import REESTIMATED, RUNNING, RunSummary, is_share, name_file, select_large_moves
from ..utils.words import join_some
from .formatting import difference_unit
from .progress import describe_partial
from .tables import AFTER_WORK

OTHER_STATISTICS = {"loaded": RUNNING, REESTIMATED: REESTIMATED}
"""Ending of the file of a table with the statistics that are not reported, by moment."""


def find_other_moment(summary: RunSummary) -> str | None:
    """Return the moment of the table with the statistics that are not reported; None: it would say nothing else."""
    if summary.statistics == REESTIMATED:
        return "loaded"
    return None if summary.unmeasured or select_large_moves(summary.moves, summary.metric).empty else REESTIMATED


def share_statistics(summaries: Sequence[RunSummary]) -> list[RunSummary]:
    """Return runs to compare with the same statistics: re-estimated if one has them and all were measured so."""
    again = any(each.statistics == REESTIMATED for each in summaries) and not any(each.unmeasured for each in summaries)
    return [replace(each, statistics=REESTIMATED if again else RUNNING) for each in summaries]


def describe_moment(summary: RunSummary, moment: str | None) -> str:
    """Return the unusual moment or the statistics of a table's models for its caption; empty if there are none."""
    if moment == "trained":
        return f" {AFTER_WORK}"
    shown, several = moment or summary.moment, find_other_moment(summary)
    words = "re-estimated" if shown == REESTIMATED else "running"
    return f" with {words} BatchNorm statistics" if several or shown == REESTIMATED else ""


def describe_lag(summary: RunSummary) -> str:
    """Return which statistics the reported values have, and why; empty if running ones have no known lag."""
    large, least = select_large_moves(summary.moves, summary.metric), "a point" if is_share(summary.metric) else "1 %"
    again, other = summary.statistics == REESTIMATED, OTHER_STATISTICS[find_other_moment(summary) or "loaded"]
    kept, replaced = ("re-estimated", "running") if again else ("running", "re-estimated")
    asked = "" if again and len(large) else ", as asked for"
    why = f"{asked} (those with {replaced} ones: on the page and in tables/{name_file(summary.metric)}-{other})"
    if summary.unmeasured:
        reason = "estimates would have to leave the sites" if summary.served else "the run has not ended"
        why = f", since {join_some(summary.unmeasured)} could not be measured with re-estimated statistics ({reason})"
    if large.empty:
        silent = describe_partial(summary) or not (again or summary.unmeasured)
        return "" if silent else f"All values are with {kept} BatchNorm statistics{why}."
    unit, most = difference_unit(summary.metric, numbers=summary.of_numbers), large.iloc[0]
    seed = f", seed {most['seed']}," if len(summary.seeds) > 1 else ""
    rank = f"the largest of {len(large)} changes" if len(large) > 1 else "the only change"
    return (
        f"BatchNorm's running statistics lag behind the weights: with re-estimated ones, {summary.metric_name} on "
        f"{most['split']} data of client {most['client']} under {most['method']}{seed} is "
        f"{unit.format(most[REESTIMATED])} in place of {unit.format(most[RUNNING])}, {rank} of {least} or more. "
        f"All values are with {kept} statistics{why}."
    )
