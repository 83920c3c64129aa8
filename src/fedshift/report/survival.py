"""Survival of test patients by predicted risk, from the records of single patients: curves, and a table of shares.

Risks rank the patients of one client only (:mod:`fedshift.tasks.survival`), so each client's test patients are divided
into thirds by their ranks, and thirds of the same rank are joined over clients. Ranks are means over seeds, and do not
depend on times and events. The better a model ranks patients, the more the curves separate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ..analysis.clinical import SurvivalCurve, estimate_survival
from ..results.run_directory import to_file_name
from ..results.schema import RunSummary
from ..utils.words import join_some
from .differences import FEWEST_UNITS
from .formatting import MISSING, make_table
from .progress import remembered
from .report import ReportTable, detail_table
from .tables import find_reported_rounds

THIRDS = ("low risk", "middle risk", "high risk")
FEWEST_OF_CLASS = 5
"""Fewest events of a curve with intervals."""
TIMES = 4
"""Approximate number of times in a table."""
NOTE = (
    "Each client's test patients in thirds by predicted risk (mean rank over seeds), joined over clients. Kaplan-Meier "
    "estimates with 95 % intervals (log-log, Greenwood), which cover patients and not seeds; there are none for fewer "
    f"than {FEWEST_UNITS} patients or {FEWEST_OF_CLASS} events."
)


@remembered
def divide_patients(summary: RunSummary, method: str, model: str = "personal") -> pd.DataFrame:
    """Return time, event, client and third (0: lowest risk) of each test patient; empty without records of all seeds.

    Clients that share test patients count once. A client needs a patient for each third to count.
    """
    reported = find_reported_rounds(summary)
    cases = [summary.read_cases(method, seed) for seed in summary.seeds if (method, seed) in reported.index]
    parts = []
    for client in map(str, summary.clients):
        held = [each.records.get((client, model)) for each in cases if each is not None]
        known = [each for each in held if each is not None and "risk" in each]
        if not known or len(known) < len(cases) or summary.same_test.get(client, client) != client:
            continue
        if any(not np.array_equal(each[name], known[0][name]) for each in known for name in ("time", "event")):
            continue
        rank_N = np.mean([_rank(each["risk"]) for each in known], axis=0)
        parts.append(
            pd.DataFrame(
                {
                    "client": client,
                    "time": known[0]["time"].astype(float),
                    "event": known[0]["event"].astype(bool),
                    "third": _divide(rank_N),
                }
            )
        )
    parts = [part for part in parts if len(part) >= len(THIRDS)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["client", "time", "event", "third"])


def _rank(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value, from 1; equal ones share the mean of their ranks."""
    from scipy.stats import rankdata  # takes longer to import than a small run

    return np.asarray(rankdata(values_N))


def _divide(rank_N: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the third of each patient; equal ranks are in the same one."""
    share_N = (_rank(rank_N) - 0.5) / max(len(rank_N), 1)
    return np.floor(len(THIRDS) * share_N).astype(np.int64)


def estimate_thirds(summary: RunSummary, method: str, model: str = "personal") -> Mapping[str, SurvivalCurve]:
    """Return the survival curve of each third of the test patients that has any; empty without records."""
    patients = divide_patients(summary, method, model)
    return {
        name: estimate_survival(part["time"].to_numpy(float), part["event"].to_numpy(bool))
        for number, name in enumerate(THIRDS)
        if len(part := patients[patients["third"] == number])
    }


def tabulate_survival(summary: RunSummary, method: str, model: str = "personal") -> pd.DataFrame:
    """Return the curves of :func:`estimate_thirds`, a row for each third and time of an event.

    Columns: share without an event, its 95 % interval ``low`` to ``high``, and the number of patients ``at_risk``.
    """
    curves = estimate_thirds(summary, method, model)
    columns = ["share", "low", "high", "at_risk"]
    frames = {name: pd.DataFrame(vars(curve)).set_index("time")[columns] for name, curve in curves.items()}
    if not frames:
        return pd.DataFrame(columns=columns)
    return pd.concat(frames, names=["third", "time"])


def list_survival_tables(summary: RunSummary) -> list[ReportTable]:
    """Return a table of each method's survival by third."""
    tables = []
    for method in summary.methods:
        patients = divide_patients(summary, method)
        if patients.empty:
            continue
        end = float(patients["time"].max())
        times = [at for at in MaxNLocator(TIMES).tick_values(0, end) if 0 < at <= end]
        rows = []
        for name, curve in estimate_thirds(summary, method).items():
            part = patients[patients["third"] == THIRDS.index(name)]
            sure = len(part) >= FEWEST_UNITS and int(part["event"].sum()) >= FEWEST_OF_CLASS
            cells = [_write_share(curve, at, int((part["time"] >= at).sum()), sure=sure) for at in times]
            rows.append((name, f"{len(part):,}", f"{int(part['event'].sum()):,}", *cells))
        header = ("test patients", "number", "events", *(f"at {at:g}" for at in times))
        caption = f"{method}: percent of test patients without an event, by predicted risk, and [number still observed]"
        held = set(patients["client"])
        lost = [name for name in map(str, summary.clients) if summary.same_test.get(name, name) not in held]
        note = f"{NOTE} Without {join_some(lost)}: no records, or fewer than {len(THIRDS)} patients." if lost else NOTE
        text, file = make_table(header, rows, note=note), f"survival-{to_file_name(method)}"
        tables.append(detail_table(file, caption, tabulate_survival(summary, method), text))
    return tables


def _write_share(curve: SurvivalCurve, at: float, at_risk: int, *, sure: bool) -> str:
    """Return the share without an event at a time, its interval if ``sure``, and the number of patients at risk."""
    if not at_risk:
        return MISSING
    place = int(np.searchsorted(curve.time, at, side="right")) - 1
    if place < 0:
        return f"100.0 [{at_risk:,}]"
    low, high = float(curve.low[place]), float(curve.high[place])
    between = f" ({100 * low:.1f} to {100 * high:.1f})" if sure and not math.isnan(low) else ""
    return f"{100 * float(curve.share[place]):.1f}{between} [{at_risk:,}]"
