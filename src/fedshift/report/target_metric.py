"""How soon a method was good enough: rounds and bytes to a target, and the best round of a run.

Both go by evaluated rounds and by the macro test metric of the personal model, just after aggregation. FedMMB
(arXiv:2011.07006) reports them in its tables 4 and 5.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.statistics import mean_and_std
from ..results.schema import RunSummary
from .formatting import TextCell, TextTable, format_bytes, spread_note
from .tables import metric_history

NOT_REACHED = "never"
ROUNDING = 1e-9
"""What a mean may lack of a target that it is equal to."""


def find_reached(study: RunSummary, target: float, metric: str | None = None) -> pd.DataFrame:
    """When each run first was at least as good as ``target``: index (method, seed), columns round, bytes, share.

    ``round`` is the first evaluated round whose macro test ``metric`` (of the personal model, just after aggregation)
    is at least ``target``, a share (loss: at most, in nats); ``bytes`` is what all clients moved up to it, down and up;
    ``share`` is the round as a share of the rounds planned. All are NaN where it was never reached. Rounds that
    measured fewer clients than the run ever did do not count.
    """
    found = _macro(study, metric)
    good = found <= target + ROUNDING if (metric or study.metric) == "loss" else found >= target - ROUNDING
    first = good[good].reset_index().groupby(["method", "seed"])["round"].min()
    rounds = first.reindex(_list_runs(study)).astype(float)
    moved = [_bytes_moved(study, run, number) for run, number in rounds.items()]
    return pd.DataFrame({"round": rounds, "bytes": moved, "share": rounds / study.rounds})


def find_best(study: RunSummary, metric: str | None = None) -> pd.DataFrame:
    """The best macro test ``metric`` of each run over evaluated rounds: index (method, seed), columns value, round.

    ``round`` is the first that reached it. To choose a round by test data is to report what nobody could have known:
    this is the papers' own figure (FedMMB's tables 4 and 5), to stand beside theirs, and never a result to select by.
    """
    found = _macro(study, metric).groupby(["method", "seed"])
    where = (found.idxmin() if (metric or study.metric) == "loss" else found.idxmax()).reindex(_list_runs(study))
    values = found.min() if (metric or study.metric) == "loss" else found.max()
    rounds = [math.nan if isinstance(place, float) else float(place[2]) for place in where]
    return pd.DataFrame({"value": values.reindex(where.index), "round": rounds}, dtype=float)


def target_table(study: RunSummary, target: float) -> pd.DataFrame:
    """:func:`find_reached` over seeds: index method; rounds and bytes (mean and std over seeds that reached it), how many.

    Columns: rounds mean, rounds std, bytes mean, bytes std, reached (seeds that did), seeds (those evaluated).
    """
    found, evaluated = find_reached(study, target), _macro(study).groupby(["method", "seed"]).size()
    rows = {}
    for method in study.methods:
        runs = found.loc[method]
        rows[method] = [
            *mean_and_std(runs["round"]),
            *mean_and_std(runs["bytes"]),
            int(runs["round"].notna().sum()),
            sum((method, seed) in evaluated.index for seed in study.seeds),
        ]
    columns = ["rounds mean", "rounds std", "bytes mean", "bytes std", "reached", "seeds"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("method")


def target_cells(table: pd.DataFrame) -> TextTable:
    """A target table as text: ``12.0 (1.0)`` rounds, ``1.2 MB (0.1 MB)``, ``2 of 3`` seeds; ``never`` for none."""
    rows = []
    for method, row in table.iterrows():
        rounds, moved = format_rounds(row), format_traffic(row)
        texts = (str(method), rounds, moved, f"{row['reached']:.0f} of {row['seeds']:.0f}")
        rows.append(tuple(TextCell(text=text) for text in texts))
    return TextTable(
        header=("method", "rounds", "bytes", "seeds that reached it"),
        rows=tuple(rows),
        note=spread_note(table["reached"].max()),
    )


def format_rounds(row: pd.Series) -> str:
    """The rounds of one row of a target table."""
    mean, std = row["rounds mean"], row["rounds std"]
    return NOT_REACHED if math.isnan(mean) else f"{mean:g}" if math.isnan(std) else f"{mean:.1f} ({std:.1f})"


def format_traffic(row: pd.Series) -> str:
    """The bytes of one row of a target table."""
    mean, std = row["bytes mean"], row["bytes std"]
    return (
        NOT_REACHED
        if math.isnan(mean)
        else format_bytes(mean)
        if math.isnan(std)
        else f"{format_bytes(mean)} ({format_bytes(std)})"
    )


def target_title(study: RunSummary, target: float, what: str = "Rounds and bytes (all clients, down and up)") -> str:
    """What a target table counts, and how finely, as a sentence says it."""
    rounds = [0, *sorted(set(metric_history(study)["round"]))]
    spacing = int(max(np.diff(rounds), default=1))
    every = "every round" if spacing == 1 else f"every {spacing} rounds, --evaluate-every 1 finds the very one"
    return (
        f"{what} to a macro test {study.metric_name} of {100 * target:g} %, over seeds that reached it; "
        f"evaluated {every}"
    )


def _macro(study: RunSummary, metric: str | None = None) -> pd.Series:
    """Macro test metric over (method, seed, round), of the rounds that measured as many clients as the run ever did."""
    values = metric_history(study, metric).groupby(["method", "seed", "round"])["value"].agg(["mean", "count"])
    most = values.groupby(["method", "seed"])["count"].transform("max")
    return values.loc[values["count"] == most, "mean"].dropna()


def _list_runs(study: RunSummary) -> pd.MultiIndex:
    return pd.MultiIndex.from_product([list(study.methods), study.seeds], names=["method", "seed"])


def _bytes_moved(study: RunSummary, run: Any, number: float) -> float:
    """Bytes that all clients of a run moved up to and including a round; NaN where there is no such round."""
    if math.isnan(number):
        return math.nan
    rows = study.traffic
    rows = rows[(rows["method"] == run[0]) & (rows["seed"] == run[1]) & (rows["round"] <= number)]
    return float(rows["down"].sum() + rows["up"].sum())
