"""Survival of test patients by predicted risk, from the records of single patients: curves, and a table of shares.

Risks rank the patients of one client only (:mod:`fedshift.tasks.survival`), so each client's test patients are divided
into thirds by their ranks, and thirds of the same rank are joined over clients. Ranks are means over seeds, and do not
depend on times and events. The better a model ranks patients, the more the curves separate.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from ..analysis.clinical import estimate_survival
from ..analysis.influence import FEWEST_OF_CLASS
from ..analysis.statistics import FEWEST_UNITS
from ..results.run_directory import to_file_name
from ..results.schema import RunSummary
from ..utils.words import join_some
from .formatting import MISSING, make_table
from .progress import remembered
from .report import ReportTable, detail_table
from .tables import find_reported_rounds

THIRDS = ("low risk", "middle risk", "high risk")
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

    Clients that share test patients count once. A client needs a patient for each third to count. A patient whose risk
    is not a number under any seed is in no third.
    """
    reported, parts = find_reported_rounds(summary), []
    cases = [summary.read_cases(method, seed) for seed in summary.seeds if (method, seed) in reported.index]
    for client in map(str, summary.clients):
        records = [case.records.get((client, model), {}) for case in cases if case is not None]
        if len(records) < len(cases) or not cases or summary.same_test.get(client, client) != client:
            continue
        if not all(
            "risk" in r and all(np.array_equal(r[n], records[0][n]) for n in ("time", "event")) for r in records
        ):
            continue
        rank_N = pd.DataFrame([r["risk"] for r in records]).rank(axis="columns").mean().rank()
        third_N = (len(THIRDS) * (rank_N - 0.5) // rank_N.count()).fillna(-1).astype(int)
        columns = {"time": records[0]["time"].astype(float), "event": records[0]["event"].astype(bool)}
        if len(rank_N) >= len(THIRDS):
            parts.append(pd.DataFrame({"client": client, **columns, "third": third_N}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["client", "time", "event", "third"])


def estimate_thirds(summary: RunSummary, method: str, model: str = "personal") -> dict[str, pd.DataFrame]:
    """Return the survival curve of each third of the test patients that has any; empty without records."""
    patients = divide_patients(summary, method, model)
    thirds = {name: patients[patients["third"] == number] for number, name in enumerate(THIRDS)}
    return {
        name: estimate_survival(third["time"].to_numpy(float), third["event"].to_numpy(bool))
        for name, third in thirds.items()
        if len(third)
    }


def tabulate_survival(summary: RunSummary, method: str, model: str = "personal") -> pd.DataFrame:
    """Return the curves of :func:`estimate_thirds` in one frame, whose first index is the third."""
    curves = estimate_thirds(summary, method, model)
    return pd.concat(curves, names=["third"]) if curves else pd.DataFrame(columns=["share", "low", "high", "at_risk"])


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
            third = patients[patients["third"] == THIRDS.index(name)]
            sure = len(third) >= FEWEST_UNITS and int(third["event"].sum()) >= FEWEST_OF_CLASS
            cells = [_write_share(curve, at, int((third["time"] >= at).sum()), sure=sure) for at in times]
            rows.append((name, f"{len(third):,}", f"{int(third['event'].sum()):,}", *cells))
        header = ("test patients", "number", "events", *(f"at {at:g}" for at in times))
        caption = f"{method}: percent of test patients without an event, by predicted risk, and [number still observed]"
        note, held = NOTE, set(patients["client"])
        if lost := [name for name in map(str, summary.clients) if summary.same_test.get(name, name) not in held]:
            note += f" Without {join_some(lost)}: no records, or fewer than {len(THIRDS)} patients."
        if unranked := int((patients["third"] < 0).sum()):
            note += f" Patients whose predicted risk is not a number are in no third: {unranked}."
        text, file = make_table(header, rows, note=note), f"survival-{to_file_name(method)}"
        tables.append(detail_table(file, caption, tabulate_survival(summary, method), text))
    return tables


def _write_share(curve: pd.DataFrame, at: float, at_risk: int, *, sure: bool) -> str:
    """Return the share without an event at a time, its interval if ``sure``, and the number of patients at risk."""
    if not at_risk:
        return MISSING
    if not (curve.index <= at).any():
        return f"100.0 [{at_risk:,}]"
    share, low, high = 100 * curve.loc[curve.index <= at, ["share", "low", "high"]].iloc[-1]
    between = f" ({low:.1f} to {high:.1f})" if sure and low >= 0 else ""
    return f"{share:.1f}{between} [{at_risk:,}]"
