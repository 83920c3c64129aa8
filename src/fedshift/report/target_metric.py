"""Rounds and bytes until a method reaches a target, and the best round of each run.

Both use evaluated rounds and the macro test metric of the personal model, just after aggregation. FedMMB
(arXiv:2011.07006) reports them in its tables 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.statistics import mean_and_std
from ..results.schema import RunSummary, is_lower_better
from .formatting import TextTable, explain_spread, format_bytes, make_table
from .lag import describe_moment
from .tables import metric_history

NOT_REACHED = {True: "never", False: "not yet"}
"""Words for a target that was not reached, by whether the runs have ended."""
TOLERANCE = 1e-9
"""Tolerance when comparing a mean with the target."""


def find_reached(summary: RunSummary, target: float, metric: str | None = None) -> pd.DataFrame:
    """Return when each run first reached ``target``: index (method, seed), columns round, bytes, share.

    ``round`` is the first evaluated round whose macro test ``metric`` (of the personal model, just after aggregation)
    is at least ``target``, a share (errors: at most, in their unit); ``bytes`` is the sum that all clients exchanged up
    to it, down and up; ``share`` is the round as a share of the planned rounds. All are NaN where the target was never
    reached. Rounds that measured fewer clients than the run's largest number do not count.
    """
    macro = _macro(summary, metric)
    low = is_lower_better(metric or summary.metric)
    reached = macro[macro <= target + TOLERANCE if low else macro >= target - TOLERANCE]
    first = reached.reset_index().groupby(["method", "seed"])["round"].min()
    rounds = first.reindex(_list_runs(summary)).astype(float)
    moved = [_bytes_exchanged(summary, run, last) for run, last in rounds.items()]
    return pd.DataFrame({"round": rounds, "bytes": moved, "share": rounds / summary.rounds})


def find_best(summary: RunSummary, metric: str | None = None) -> pd.DataFrame:
    """Return the best macro test ``metric`` of each run: index (method, seed), columns value, round.

    ``round`` is the first evaluated round that reached it. Choosing a round by test data reports a number that nobody
    could have known: it exists for comparison with the papers' results (FedMMB's tables 4 and 5), not for selection.
    """
    runs = _macro(summary, metric).groupby(["method", "seed"])
    low = is_lower_better(metric or summary.metric)
    positions = (runs.idxmin() if low else runs.idxmax()).reindex(_list_runs(summary))
    values = (runs.min() if low else runs.max()).reindex(positions.index)
    rounds = [math.nan if isinstance(position, float) else float(position[2]) for position in positions]
    return pd.DataFrame({"value": values, "round": rounds}, dtype=float)


def target_table(summary: RunSummary, target: float) -> pd.DataFrame:
    """Return :func:`find_reached` over the seeds that reached the target: index method.

    Columns: rounds mean, rounds std, bytes mean, bytes std, reached (number of seeds that reached it), seeds (number of
    evaluated seeds).
    """
    reached, evaluated = find_reached(summary, target), _macro(summary).groupby(["method", "seed"]).size()
    rows = {}
    for method in summary.methods:
        runs = reached.loc[method]
        seeds = sum((method, seed) in evaluated.index for seed in summary.seeds)
        statistics = *mean_and_std(runs["round"]), *mean_and_std(runs["bytes"])
        rows[method] = [*statistics, int(runs["round"].notna().sum()), seeds]
    columns = ["rounds mean", "rounds std", "bytes mean", "bytes std", "reached", "seeds"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("method")


def format_target_table(table: pd.DataFrame, *, ended: bool = True) -> TextTable:
    """Return a target table as text: ``12.0 (1.0)`` rounds, ``1.2 MB (0.1 MB)``, ``2 of 3`` seeds, or ``never``.

    Unless all runs have ``ended``, ``not yet`` replaces ``never``.
    """
    rows = [
        (method, format_rounds(row, ended), format_traffic(row, ended), f"{row['reached']:.0f} of {row['seeds']:.0f}")
        for method, row in table.iterrows()
    ]
    header = ("method", "rounds", "bytes", "seeds that reached it")
    return make_table(header, rows, note=explain_spread(table["reached"].max()))


def format_rounds(row: pd.Series, ended: bool = True) -> str:
    """Return the rounds of one row of a target table, of runs that have ``ended`` or not."""
    return _format_statistic(row, "rounds", "{:g}".format if math.isnan(row["rounds std"]) else "{:.1f}".format, ended)


def format_traffic(row: pd.Series, ended: bool = True) -> str:
    """Return the bytes of one row of a target table, of runs that have ``ended`` or not."""
    return _format_statistic(row, "bytes", format_bytes, ended)


def describe_target(
    summary: RunSummary, target: float, quantity: str = "Rounds and bytes (all clients, down and up)"
) -> str:
    """Return the caption of a table that counts ``quantity`` up to ``target``, with the spacing of evaluations."""
    rounds = [0, *sorted(set(metric_history(summary)["round"]))]
    spacing = int(max(np.diff(rounds), default=1))
    every = "every round" if spacing == 1 else f"every {spacing} rounds, --evaluate-every 1 finds the exact one"
    unit = "%" if summary.metric_unit == "percent" else summary.metric_unit
    reached = f"a macro test {summary.metric_name} of {summary.scale * target:g} {unit}"
    running = describe_moment(summary, "loaded")
    return f"{quantity} to {reached}{running}, over seeds that reached it; evaluated {every}"


def _macro(summary: RunSummary, metric: str | None = None) -> pd.Series:
    """Return the macro test metric over (method, seed, round), for rounds with the run's largest number of clients."""
    values = metric_history(summary, metric).groupby(["method", "seed", "round"])["value"].agg(["mean", "count"])
    most = values.groupby(["method", "seed"])["count"].transform("max")
    return values.loc[values["count"] == most, "mean"].dropna()


def _list_runs(summary: RunSummary) -> pd.MultiIndex:
    return pd.MultiIndex.from_product([list(summary.methods), summary.seeds], names=["method", "seed"])


def _bytes_exchanged(summary: RunSummary, run: Any, last: float) -> float:
    """Return the bytes that all clients of a run exchanged up to round ``last``, inclusive; NaN where that is NaN."""
    rows = summary.traffic
    rows = rows[(rows["method"] == run[0]) & (rows["seed"] == run[1]) & (rows["round"] <= last)]
    return math.nan if math.isnan(last) else float(rows["down"].sum() + rows["up"].sum())


def _format_statistic(row: pd.Series, name: str, number: Callable[[float], str], ended: bool) -> str:
    mean, std = row[f"{name} mean"], row[f"{name} std"]
    if math.isnan(mean):
        return NOT_REACHED[ended]
    return number(mean) if math.isnan(std) else f"{number(mean)} ({number(std)})"
