"""Tables of the policies' results, differences from the plain choice, and the policy that the evidence recommends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.influence import Floats, find_bound, vary
from ..analysis.statistics import FEWEST_UNITS, decides, half_interval
from ..report.formatting import VARIED_BY_SEED, TextTable, difference_unit, format_metric_table, make_table
from ..report.tables import ONE_BY_ONE, describe_missing, mask_incomparable, summarize_seeds
from ..results.schema import Row, compute_metric, is_lower_better, is_plain, is_share, name_metric
from .policies import NEEDS, UNCHANGED

Influences = Mapping[tuple[str, int, str], Floats]
"""Influences of test units, ``[G]``, by method and policy, seed, and client."""


def seed_table(rows: Iterable[Row], metric: str) -> pd.DataFrame:
    """Tabulate ``metric`` of each client, in the order of ``rows``, x (method and policy, seed); NaN where missing."""
    frame = pd.DataFrame(list(rows))
    values = frame.assign(value=compute_metric(frame, metric).astype(float))
    wide = values.pivot(index="client", columns=["title", "seed"], values="value")
    columns = pd.MultiIndex.from_product([frame["title"].unique(), sorted(frame["seed"].unique())])
    return wide.reindex(index=frame["client"].unique()).reindex(columns=columns)


def mean_over_seeds(seeds: pd.DataFrame) -> pd.DataFrame:
    """Summarize :func:`seed_table` and its mean over clients, ``macro``, x (method and policy, mean | std | seeds).

    ``macro`` is over the clients that every policy has with a seed.
    """
    macro = mask_incomparable(seeds).mean().to_frame("macro").T
    return summarize_seeds(pd.concat([seeds, macro])).rename_axis("client")


def policy_table(rows: list[Row], metric: str, *, partial: str = "", even: bool = True) -> TextTable:
    """Make a row per method and policy with its needs, the clients, and the mean of several; best in bold.

    ``partial``: line with which the table begins; ``even``: whether all methods have reached the same round.
    """
    table = mean_over_seeds(seed_table(rows, metric))
    cells = format_metric_table(table, metric, one_by_one=len(table) - 1 <= ONE_BY_ONE, even=even)
    columns = list(zip(*cells.rows[: 1 if len(table) == 2 else None], strict=True))
    needs = {row["title"]: row["needs"] or "nothing" for row in rows}
    body = [(title, needs[title], *column) for title, column in zip(cells.header[1:], columns[1:], strict=True)]
    header = ("method: policy", "needs", *(cell.text for cell in columns[0]))
    note = f"{cells.note} {describe_missing(pd.DataFrame(rows), metric)}".strip()
    return make_table(header, body, note=note, partial=partial)


def explain_needs(rows: Iterable[Row]) -> str:
    """Explain the words for needs that occur."""
    words = {word for row in rows for word in row["needs"].split(", ")}
    parts = "; ".join(f"{word}: {meaning}" for word, meaning in NEEDS.items() if word in words)
    return f"Needed besides the server's entries: {parts}." if parts else "Only the server's entries are needed."


def find_plain_choice(titles: Iterable[str]) -> str:
    """Return the first of: FedAvg's global model, a global model, an average, any of ``titles``."""
    names = [*titles]
    plain = [name for name in names if is_plain(name.removesuffix(f": {UNCHANGED}"), "fedavg")]
    usual = [name for end in (UNCHANGED, "average") for name in names if name.endswith(f": {end}")]
    return [*plain, *usual, *names][0]


def policy_differences(seeds: pd.DataFrame, metric: str, influences: Influences = MappingProxyType({})) -> pd.DataFrame:
    """Subtract the plain choice (:func:`find_plain_choice`) from each method and policy of :func:`seed_table`.

    Several clients are a sample of sites: each counts once, with its mean over seeds. Of a single one, the interval
    covers its test units (patients where they are known, else samples) by their ``influences``, and trainings where
    seeds decide (``analysis.statistics.decides``); without influences, only trainings. Intervals hold together for all
    rows (Bonferroni). They are NaN where nothing decides, and with fewer than :data:`FEWEST_UNITS` test units.

    Returns:
        Columns baseline, difference, low, high, pairs (clients, or seeds of a single one), units, decided (whether the
        interval covers other pairs) and comparisons.

    """
    titles = [*seeds.columns.unique(0)]
    baseline, rows = find_plain_choice(titles), {}
    for title in (title for title in titles if title != baseline):
        gaps = seeds[title] - seeds[baseline]
        pairs = (gaps.mean(axis=1) if len(gaps) > 1 else gaps.iloc[0]).dropna()
        places = [(seed, str(gaps.index[0])) for seed in pairs.index] if len(gaps) == 1 else []
        ours_G, theirs_G = (_average(influences, name, places) for name in (title, baseline))
        gap_G = None if ours_G is None or theirs_G is None else ours_G - theirs_G
        rows[title] = {"baseline": baseline, **_measure(pairs.to_numpy(float), gap_G, metric, len(titles) - 1)}
    columns = ["baseline", "difference", "low", "high", "pairs", "units", "decided", "comparisons"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("method")


def _average(influences: Influences, title: str, places: Iterable[tuple[int, str]]) -> Floats | None:
    """Return the mean influence of each test unit over seeds, ``[G]``; None if it is not known of one."""
    runs = [influences.get((title, *place)) for place in places]
    known = [influence_G for influence_G in runs if influence_G is not None]
    return np.asarray(np.mean(known, axis=0)) if known and len(known) == len(runs) else None


def _measure(gap_P: Floats, gap_G: Floats | None, metric: str, comparisons: int) -> dict[str, Any]:
    """Return difference and interval of P pairs, with the influences of G test units on their mean, if known."""
    pairs, units = len(gap_P), 0 if gap_G is None else len(gap_G)
    mean, decided = float(gap_P.mean()) if pairs else math.nan, decides(pairs, comparisons)
    sampled = math.nan if gap_G is None else math.sqrt(vary(gap_G, mean, find_bound(metric)))
    if decided:
        half = half_interval(float(gap_P.std(ddof=1)) / math.sqrt(pairs), pairs, sampled, units, comparisons)
    else:
        half = half_interval(sampled, units, comparisons=comparisons)
    most = 1.0 if is_share(metric) else math.inf
    if 0 < units < FEWEST_UNITS or (units and math.isnan(sampled)) or 2 * half > most or not half > 0:
        half = math.nan
    low, high = max(mean - half, -most), min(mean + half, most)
    return {"difference": mean, "low": low, "high": high, "pairs": pairs, "units": units, "decided": decided,
            "comparisons": comparisons}  # fmt: skip


def format_differences(table: pd.DataFrame, metric: str, clients: int) -> TextTable:
    """Format :func:`policy_differences` of ``clients`` clients as text."""
    unit, several = difference_unit(metric), clients > 1
    rows = [
        (method, unit.format_signed(row["difference"]), unit.format_interval(row["low"], row["high"]), row["pairs"])
        for method, row in table.iterrows()
    ]
    over = "which clients there are" if several else VARIED_BY_SEED
    note = f"95 % intervals cover {over}, and all {len(table)} hold together (Bonferroni)."
    if table["low"].isna().all():
        note = f"So few {'clients' if several else 'seeds'} cannot decide {len(table)} comparisons: no intervals."
    return make_table(("method", "difference", "interval", "pairs"), rows, note=note)


def recommend(
    rows: Iterable[Row], influences: Influences, metric: str, tested: str, *, numbers: bool = False
) -> tuple[str, str]:
    """Return the method and policy to use for a client, and a sentence with the evidence.

    A policy is recommended whose interval by :func:`policy_differences` is better than 0; of several, the one with the
    best mean. Otherwise it is the plain choice, and the sentence says why.

    Args:
        rows: Measurements of the client's models.
        influences: Influences of its test units.
        metric: The metric.
        tested: Its test data, in words.
        numbers: Whether targets are numbers.

    """
    seeds = seed_table(rows, metric)
    table = policy_differences(seeds, metric, influences)
    sign, plain = -1 if is_lower_better(metric) else 1, find_plain_choice(seeds.columns.unique(0))
    if table.empty:
        return plain, f"{plain} is the only model."
    table = table.loc[(sign * table["difference"]).sort_values(ascending=False, kind="stable").index]
    better = table[np.minimum(sign * table["low"], sign * table["high"]) > 0]
    best = (better if len(better) else table).iloc[0]
    evidence = _write_evidence(best, plain, len(seeds.columns.unique(1)), tested, metric, numbers=numbers)
    if not len(better):
        reason = f"no policy's interval is better than 0; the best, {best.name}: {evidence}"
        if math.isnan(best["low"]):
            few = f"an interval needs {FEWEST_UNITS}" if best["units"] < FEWEST_UNITS else "all intervals are too wide"
            reason = f"{tested}: {few}" if best["units"] else f"results of single samples give no {name_metric(metric)}"
        return plain, f"cannot tell: use {plain}, the default ({reason})."
    covered = [*["test data"] * bool(best["units"]), *["trainings"] * bool(best["decided"])]
    return str(best.name), (
        f"use {best.name}: {evidence}. The interval is about new {' and '.join(covered)}, and holds for all "
        f"{len(table)} comparisons together; the difference itself is optimistic, because the same data chose it."
    )


def _write_evidence(best: pd.Series, plain: str, seeds: int, tested: str, metric: str, *, numbers: bool) -> str:
    """Return the difference of a row of :func:`policy_differences` from ``plain`` in words."""
    unit = difference_unit(metric, numbers=numbers)
    interval = unit.format_interval(best["low"], best["high"])
    gain = f"{unit.format_signed(best['difference'])} {unit.name} of {name_metric(metric)} ({interval})"
    return f"{gain} from {plain} on {tested}, with {seeds} seed{'s' * (seeds != 1)}"
