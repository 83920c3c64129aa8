"""The sentence about lagging BatchNorm statistics, with which terminal and page begin.

Runs measure models with running and with re-estimated statistics at the reported round
(:mod:`fedshift.evaluation.statistics_lag`).
"""

from __future__ import annotations

from ..results.schema import REESTIMATED, RUNNING, RunSummary, is_share, name_file, select_large_moves
from ..utils.words import join_some
from .formatting import difference_unit
from .progress import describe_partial
from .tables import AFTER_WORK

OTHER_STATISTICS = {"loaded": RUNNING, REESTIMATED: REESTIMATED}
"""Ending of the file of a table with the statistics that are not reported, by moment."""
SPLITS = {"train": "training", "validation": "validation"}


def find_other_moment(summary: RunSummary) -> str | None:
    """Return the moment of the table with the statistics that are not reported; None: it would say nothing else."""
    if summary.statistics == REESTIMATED:
        return "loaded"
    return None if summary.unmeasured or select_large_moves(summary.moves, summary.metric).empty else REESTIMATED


def describe_moment(summary: RunSummary, moment: str | None) -> str:
    """Return the unusual moment or the statistics of a table's models for its caption; empty if there are none."""
    if moment == "trained":
        return f" {AFTER_WORK}"
    shown, several = moment or summary.moment, find_other_moment(summary)
    words = "re-estimated" if shown == REESTIMATED else "running"
    return f" with {words} BatchNorm statistics" if several or shown == REESTIMATED else ""


def describe_lag(summary: RunSummary) -> str:
    """Return which statistics the reported values have, and why; empty if running ones have no known lag."""
    moves, missing = _describe_moves(summary), _explain_unmeasured(summary)
    again = summary.statistics == REESTIMATED
    if not moves and not again:
        return "" if not missing or describe_partial(summary) else f"BatchNorm statistics are running ones: {missing}."
    other = RUNNING if again else REESTIMATED
    beside = f" (with {other} ones: page and tables/{name_file(summary.metric)}-{other})"
    if not moves:
        return (
            f"BatchNorm statistics are re-estimated ones, as asked for{beside}; no client changes by {_least(summary)}."
        )
    kept = "re-estimated" if again else "running"
    why = f", since {missing}" if missing else f"{'' if again else ', as asked for'}{beside}"
    return f"BatchNorm's running statistics lag: {moves}; all values are with {kept} ones{why}."


def _describe_moves(summary: RunSummary) -> str:
    """Return the largest change of a client by re-estimated statistics; empty if none is large."""
    unit = difference_unit(summary.metric, numbers=summary.of_numbers)
    large = select_large_moves(summary.moves, summary.metric)
    if large.empty:
        return ""
    most = large.iloc[0]
    seed = f", seed {most['seed']}," if len(summary.seeds) > 1 else ""
    return (
        f"re-estimated on training data, they take {most['client']} under {most['method']}{seed} from "
        f"{unit.format(most[RUNNING])} to {unit.format(most[REESTIMATED])} on {SPLITS[most['split']]} data, the "
        f"largest of {len(large)} changes of {_least(summary)} or more"
    )


def _least(summary: RunSummary) -> str:
    return "a point" if is_share(summary.metric) else "1 %"


def _explain_unmeasured(summary: RunSummary) -> str:
    if not summary.unmeasured:
        return ""
    reason = "estimates would have to leave the sites" if summary.served else "the run has not ended"
    return f"those of {join_some(summary.unmeasured)} were not re-estimated ({reason})"
