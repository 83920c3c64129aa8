"""The notice about lagging BatchNorm statistics: the methods' results with re-estimated statistics.

Runs record it once, at the reported round (:mod:`fedshift.evaluation.statistics_lag`). Reported values do not change.
"""

from __future__ import annotations

import pandas as pd

from ..results.schema import REESTIMATED, RunSummary, compute_metric, is_lower_better
from .formatting import difference_unit
from .progress import remembered
from .tables import select_reported_rows

LEAST = 0.01
"""Change of a mean that is worth a notice: absolute for shares, relative to the reported value for other metrics."""
KEY = ["method", "seed", "client"]


@remembered
def lag_table(summary: RunSummary, split: str = "test") -> pd.DataFrame:
    """Return the effect of lagging statistics on the personal model's metric, for each method that was measured again.

    Index: method. Columns: ``reported`` and ``reestimated``, means over clients and then seeds, over the clients that
    have both; ``gain``, their difference; ``updates`` (fewest) and ``remaining`` (largest) over seeds.
    """
    if not len(summary.lag):
        return pd.DataFrame(columns=["reported", "reestimated", "gain", "updates", "remaining"], dtype=float)
    columns = {}
    for name, moment in (("reported", "loaded"), (REESTIMATED, REESTIMATED)):
        rows = select_reported_rows(summary, "personal", split, moment)
        columns[name] = rows.assign(value=compute_metric(rows, summary.metric).astype(float)).set_index(KEY)["value"]
    both = pd.DataFrame(columns).dropna()
    means = both.groupby(["method", "seed"]).mean().groupby("method").mean()
    facts = summary.lag.groupby("method").agg(updates=("updates", "min"), remaining=("remaining", "max"))
    means = means.assign(gain=means[REESTIMATED] - means["reported"]).join(facts)
    return means.reindex([name for name in summary.methods if name in means.index]).rename_axis("method")


def describe_lag(summary: RunSummary) -> str:
    """Return the notice for the table of the summary's metric; empty where statistics do not lag noticeably."""
    table, lower = lag_table(summary), is_lower_better(summary.metric)
    unit = difference_unit(summary.metric, numbers=summary.of_numbers)
    least = LEAST if unit.scale > 1 else LEAST * table["reported"].abs()
    table = table[table["gain"].abs() >= least]
    if not len(table):
        return ""
    changes = ", ".join(
        f"{method} {unit.format(row[REESTIMATED])} ({unit.format_signed(row['gain'])})"
        for method, row in table.iterrows()
    )
    part = float(table["remaining"].max())
    held = f", which still hold up to {100 * part:.2g} percent of their initial values," if part >= LEAST / 100 else ""
    updates = int(table["updates"].min())
    return (
        f"BatchNorm lags: running statistics{held} do not fit the models after {updates} update{'s' * (updates != 1)}. "
        f"With statistics re-estimated on training data, means over clients would be: {changes}."
        f"{_describe_order(summary, lower=lower)}"
    )


def _describe_order(summary: RunSummary, *, lower: bool) -> str:
    """Return how the notice ends: which method would be best instead of the present one."""
    rows = select_reported_rows(summary)
    values = rows.assign(value=compute_metric(rows, summary.metric).astype(float))
    before = values.groupby(["method", "seed"])["value"].mean().groupby("method").mean()
    after = before.add(lag_table(summary)["gain"], fill_value=0.0)
    first, then = (str(means.idxmin() if lower else means.idxmax()) for means in (before, after))
    changed = f" The best would be {then}, not {first}." if first != then else ""
    return f"{changed} Train for more rounds before ranking methods." if len(summary.methods) > 1 else ""
