"""Differences of methods from a reference, at each client and for their mean: one frame, one interval, one rule.

References are FedAvg (else the first method, or the one of ``compare_with``) and ``single``, by which each client
trains alone. A difference is paired over seeds and test units (patients, else samples), and its interval covers both
(:func:`~fedshift.analysis.statistics.half_interval`): it is about new trainings and new test samples of these clients,
not about other training data. Intervals of means hold together for all of a report's comparisons (Bonferroni); those of
single clients hold one by one, as in a forest plot. A claim is: the interval excludes 0. No interval is given where it
could not decide: with too few seeds (:func:`~fedshift.analysis.statistics.decides`), fewer than :data:`FEWEST_UNITS`
test units, or where it would be wider than the metric's range.

``benchmarks/coverage.py`` measures by simulation how often intervals are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.influence import find_bound, find_influence, vary
from ..analysis.statistics import FEWEST_UNITS, count_needed_seeds, decides, half_interval
from ..results.schema import RunSummary, find_baseline, find_plain, is_lower_better, is_share
from ..utils.errors import UsageError, unknown_name
from ..utils.words import join_some
from .formatting import MISSING, TextCell, TextTable, Unit, difference_unit, make_table
from .progress import find_reached_rounds, is_comparable, remembered
from .tables import find_reported_rounds, mask_incomparable, seed_table

MEAN = "mean over clients"
"""Name of the mean over clients in frames, which no client has."""
COLUMNS = (
    "reference_value", "difference", "low", "high", "seeds", "units", "seed_error", "seed_freedom", "sample_error",
    "sample_freedom", "comparisons",
)  # fmt: skip
Influences = Mapping[tuple[str, int, str], np.ndarray]
"""Influences of test units by method, seed and client."""


def list_references(methods: Iterable[str], compare_with: str = "") -> list[str]:
    """Return the methods that others are compared with: ``compare_with``, else the baseline and training alone."""
    names = [*methods]
    single = find_plain(names, "single")
    return (
        [compare_with] if compare_with else list(dict.fromkeys([find_baseline(names), *([single] if single else [])]))
    )


def list_pairs(methods: Iterable[str], references: Sequence[str]) -> list[tuple[str, str]]:
    """Return each method with each of ``references``, but two references only once."""
    names = [*methods]
    return [
        (method, reference)
        for place, reference in enumerate(references)
        for method in names
        if method not in references[: place + 1]
    ]


def advise_seeds(methods: Iterable[str], seeds: int, compare_with: str = "") -> str:
    """Return a sentence on the seeds that a comparison needs before it can decide; empty if it has as many."""
    names = [*methods]
    references = list_references(names, compare_with)
    comparisons = len(list_pairs(names, references))
    if not comparisons or decides(seeds, comparisons):
        return ""
    needed, fewer = (count_needed_seeds(number) for number in (comparisons, len(names) - 1))
    given = f"{seeds} seed{'s' * (seeds != 1)} and {comparisons} difference{'s' * (comparisons != 1)}"
    alone = f", or {fewer} with --compare-with {references[0]}" if fewer < needed else ""
    return f"{given} cannot decide which method is better, and have no intervals: {needed} seeds can{alone}."


@remembered
def collect_influences(summary: RunSummary, metric: str, model: str) -> Influences:
    """Return the influence of each test unit on ``metric``, ``[G]``, of trials with results of single samples."""
    influences: dict[tuple[str, int, str], np.ndarray] = {}
    reported = find_reported_rounds(summary)
    for (method, seed), number in zip(reported.index.tolist(), reported.tolist(), strict=True):
        cases = summary.read_cases(method, seed)
        for (client, of), records in cases.records.items() if cases and cases.round == number else ():
            if of == model and (influence_G := find_influence(records, metric)) is not None:
                influences[method, seed, client] = influence_G
    return influences


def compare_methods(
    summary: RunSummary, reference: str | None = None, metric: str | None = None, model: str = "personal"
) -> pd.DataFrame:
    """Return each method's ``metric`` minus that of ``reference``: a row for each method, and the mean or a client.

    Index: method, client (:data:`MEAN` for the mean over clients). Columns: ``reference_value``; ``difference`` and its
    95 % interval ``low`` to ``high`` (NaN where it could not decide); ``seeds``, and ``units`` that were tested;
    ``seed_error`` and ``sample_error``, standard errors over seeds and over test units, with their degrees of freedom
    ``seed_freedom`` and ``sample_freedom`` (NaN, and not in the interval, where results of single samples are not
    here); ``comparisons``, the number of differences whose intervals hold together. Values are fractions.

    Raises :class:`UsageError` if ``reference`` is no method of the run, or the run was begun to compare with another.
    """
    chosen = reference or list_references(summary.methods, summary.compare_with)[0]
    if chosen not in summary.methods:
        raise unknown_name("baseline", chosen, summary.methods)
    if summary.compare_with not in ("", chosen):
        raise UsageError(f"baseline {chosen!r}: this run was begun to compare with {summary.compare_with} alone")
    return _compare(summary, chosen, metric or summary.metric, model)


@remembered
def _compare(summary: RunSummary, reference: str, metric: str, model: str) -> pd.DataFrame:
    clients = [*map(str, summary.clients)]
    table = mask_incomparable(seed_table(summary, metric, model).iloc[: len(clients)])
    references = dict.fromkeys([*list_references(summary.methods, summary.compare_with), reference])
    comparisons = len(list_pairs(summary.methods, [*references]))
    reached, influences = find_reached_rounds(summary), collect_influences(summary, metric, model)
    values = {method: table[method].to_numpy(float) for method in table.columns.unique("method")}
    rows = {}
    for method in (name for name in values if name != reference and reference in values):
        comparable_S = [is_comparable(reached, method, reference, seed) for seed in summary.seeds]
        known_CS = np.where(comparable_S, values[method], math.nan)
        reference_CS = np.where(np.isfinite(known_CS), values[reference], math.nan)
        gaps = pd.DataFrame(known_CS - reference_CS, index=clients, columns=summary.seeds)
        for place, name in enumerate([MEAN, *clients]):
            kept = gaps if place == 0 else gaps.iloc[place - 1 : place]
            parts = _weigh_influences(influences, summary.same_test, (method, reference), kept)
            theirs_CS = reference_CS if place == 0 else reference_CS[place - 1 : place]
            rows[method, name] = {
                "reference_value": float(pd.DataFrame(theirs_CS).mean().mean()),
                **measure_difference(kept.mean().dropna(), parts, metric, comparisons if place == 0 else 1),
            }
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=[*COLUMNS])
    frame.index = pd.MultiIndex.from_tuples(list(rows) or [("", "")], names=["method", "client"])[: len(rows)]
    return frame


def _weigh_influences(
    influences: Influences, same_test: Mapping[str, str], pair: tuple[str, str], gaps: pd.DataFrame
) -> list[tuple[np.ndarray, float]] | None:
    """Return influences on the mean of ``gaps`` by test set, ``[G]``, with the set's weight; None if some are lacking.

    ``gaps``: differences of the ``pair`` of methods, clients x seeds. Clients with one test set vary together.
    """
    seeds, clients = ([*gaps.columns[gaps.notna().any()]], [*gaps.index[gaps.notna().any(axis=1)]])
    weight, parts = 1 / max(1, len(clients)), dict[str, tuple[np.ndarray, float]]()
    for client in clients:
        runs = [influences.get((method, seed, client)) for seed in seeds for method in pair]
        known = [influence_G for influence_G in runs if influence_G is not None]
        if len(known) < len(runs) or len({*map(len, known)}) != 1:
            return None
        gap_G = weight * (np.mean(known[::2], axis=0) - np.mean(known[1::2], axis=0))
        owner = same_test.get(client, client)
        before_G, before = parts.get(owner, (np.zeros(1), 0.0))
        parts[owner] = before_G + gap_G, before + weight
    return list(parts.values())


def measure_difference(
    gap_S: pd.Series, parts: list[tuple[np.ndarray, float]] | None, metric: str, comparisons: int
) -> dict[str, float]:
    """Return a row of :data:`COLUMNS` for the differences ``gap_S`` under each seed."""
    seeds, units = len(gap_S), sum(len(influence_G) for influence_G, _ in parts or ())
    mean, bound = float(gap_S.mean()) if seeds else math.nan, find_bound(metric)
    error = float(gap_S.std(ddof=1)) / math.sqrt(seeds) if seeds > 1 else math.nan
    variance = sum(vary(influence_G, mean * weight, bound * weight) for influence_G, weight in parts or ())
    sample_error = math.sqrt(variance) if units else math.nan
    freedom = units - len(parts or ())
    half = half_interval(error, seeds, sample_error, freedom + 1, comparisons)
    least = 1.0 if is_share(metric) else math.inf
    few = 0 < units < FEWEST_UNITS or (units and math.isnan(sample_error)) or (error == 0 and not units)
    if few or not decides(seeds, comparisons) or 2 * half > least:
        half = math.nan
    return {
        "difference": mean, "low": max(mean - half, -least), "high": min(mean + half, least), "seeds": seeds,
        "units": units, "seed_error": error, "seed_freedom": seeds - 1, "sample_error": sample_error,
        "sample_freedom": freedom if units else math.nan, "comparisons": comparisons,
    }  # fmt: skip


def list_frames(summary: RunSummary, metric: str | None = None, model: str = "personal") -> dict[str, pd.DataFrame]:
    """Return :func:`compare_methods` for each reference that other methods are compared with, by its name."""
    names = [*summary.methods]
    references = list_references(names, summary.compare_with)
    frames, pairs = dict[str, pd.DataFrame](), list_pairs(names, references)
    for reference in references:
        kept = [method for method, other in pairs if other == reference]
        frame = compare_methods(summary, reference, metric, model)
        frames[reference] = frame[frame.index.get_level_values("method").isin(kept)]
    return {reference: frame for reference, frame in frames.items() if len(frame)}


def count_verdicts(frame: pd.DataFrame, *, lower: bool, margin: float | None = None) -> pd.DataFrame:
    """Return for each method of ``frame`` the number of clients where it is better, worse and neither.

    ``excluded``: clients whose interval excludes a loss above ``margin`` (a test for noninferiority: Piaggio et al.
    2012, doi:10.1001/jama.2012.87802); ``worst``: the client with the lowest benefit. ``lower``: lower values are
    better.
    """
    clients = frame.drop(index=MEAN, level="client")
    low, high = (-clients["high"], -clients["low"]) if lower else (clients["low"], clients["high"])
    benefit = -clients["difference"] if lower else clients["difference"]
    better, worse = low > 0, high < 0
    found = clients.assign(better=better, worse=worse, neither=~(better | worse), excluded=low > -(margin or math.nan))
    counts = found.groupby("method", sort=False)[["better", "worse", "neither", "excluded"]].sum()
    worst = benefit.dropna().groupby("method").idxmin().map(lambda place: place[1])
    return counts.assign(worst=worst)


def tabulate_means(summary: RunSummary, frame: pd.DataFrame, reference: str) -> TextTable:
    """Return a row for each method: the mean difference, and the clients where the method is better and worse."""
    unit, several = difference_unit(summary.metric, numbers=summary.of_numbers), len(summary.clients) > 1
    counts, rows = count_verdicts(frame, lower=is_lower_better(summary.metric), margin=summary.margin), []
    shown = ["better", "worse", "neither", *(["excluded"] if summary.margin else [])]
    for row in frame.xs(MEAN, level="client").reset_index().to_dict("records"):
        method, cells = str(row["method"]), [_write_cell(row, unit)]
        if several:
            worst = counts["worst"].to_dict()[method]
            least = float(frame["difference"].to_dict().get((method, worst), math.nan))
            cells += [TextCell(text=str(counts[name].to_dict()[method])) for name in shown]
            cells += [TextCell(text=MISSING if math.isnan(least) else f"{worst} {unit.format_signed(least)}")]
        rows.append((method, *cells))
    excluded = f"no loss above {unit.scale * (summary.margin or 0):g}"
    header = [*("better", "worse", "unclear", excluded)[: len(shown)], "worst client"] if several else []
    header = [f"minus {reference}", f"macro {summary.metric_name}, {unit.name}", *header]
    return _annotate(make_table(header, rows), summary, frame, means=True)


def tabulate_clients(summary: RunSummary, frame: pd.DataFrame, reference: str) -> TextTable:
    """Return a row for each client, and a column for each method: difference and interval."""
    unit, methods = difference_unit(summary.metric, numbers=summary.of_numbers), [*frame.index.unique("method")]
    by_place, rows = frame.reset_index().set_index(["client", "method"]).to_dict("index"), []
    for client in map(str, summary.clients):
        own = [by_place[client, method] for method in methods]
        tested, value = max(row["units"] for row in own), unit.format(own[0]["reference_value"])
        rows.append((client, f"{tested:,.0f}" if tested else MISSING, value, *(_write_cell(row, unit) for row in own)))
    header = ("client", "tested", reference, *methods)
    return _annotate(replace(make_table(header, rows), corner="method"), summary, frame, means=False)


def _write_cell(row: Mapping[Any, Any], unit: Unit) -> TextCell:
    text = unit.format_difference(row["difference"], row["low"], row["high"])
    return TextCell(text=text, best=bool(row["low"] > 0 or row["high"] < 0))


def _annotate(table: TextTable, summary: RunSummary, frame: pd.DataFrame, means: bool) -> TextTable:
    """Return ``table`` with a note on its intervals, of ``means`` or of single clients, and why some are lacking."""
    mean, clients = frame.xs(MEAN, level="client").iloc[0], frame.drop(index=MEAN, level="client")
    comparisons = int(mean["comparisons"]) if means else 1
    if not decides(len(summary.seeds), comparisons):
        advice = advise_seeds(summary.methods, len(summary.seeds), summary.compare_with)
        return replace(table, note=advice, advice=advice)
    covered = "seeds and test units (patients where they are known, else samples)"
    if math.isnan(mean["sample_error"]):
        covered = "seeds alone, since results of single samples are not here"
    held = f"together for all {comparisons} comparisons (Bonferroni)" if comparisons > 1 else "one by one"
    sentences = [f"95 % intervals over {covered} hold {held}; bold: the interval excludes 0."]
    if (frame["low"].isna() & ((frame["units"] == 0) | (frame["units"] >= FEWEST_UNITS))).any():
        sentences.append("There is none where seeds do not differ, or by more than the metric's range.")
    few = clients[(clients["units"] > 0) & (clients["units"] < FEWEST_UNITS)].groupby("client", sort=False)["units"]
    if len(few):
        named = join_some([f"{client} ({units:.0f})" for client, units in few.max().items()])
        sentences.append(f"No verdict with fewer than {FEWEST_UNITS} test units: {named}.")
    return replace(table, note=" ".join(sentences))
