"""Everything that a report claims, as one family: each difference is tested once, and says the same wherever it stands.

A table invites the reader to compare any two of its methods, and which two are neighbors the data decide. The family is
therefore all pairs of methods, by macro metric and paired over seeds, and with a pooled method all discordances against
the threshold. p-values and intervals are corrected for its size (:mod:`fedshift.analysis.statistics`), so that of
reports on methods that do not differ at most 5 in 100 claim anything. Nothing else in a report is a claim: means and
standard deviations describe the seeds that were run, and bold is the best mean as printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy.special import ndtri

from ..analysis.concordance import CONCORDANT
from ..analysis.statistics import FEWEST, PairedDifference, corrected, paired_difference
from ..results.schema import RunSummary
from ..utils.errors import unknown_name
from .concordance import discordances
from .formatting import format_p_value, format_signed, units
from .precision import grid_variance, sampling_variance
from .tables import comparable, reported_rows, seed_table

COLUMNS = (
    "baseline", "seeds", "difference", "std", "low", "high", "p", "level", "comparisons", "test_low", "test_high",
)  # fmt: skip
"""Columns of a table of differences."""
EVEN = CONCORDANT / 1000
"""Standard error of a discordance at least, in squared nats: with less spread, seeds agree as far as losses tell."""
NAMED = 4
"""Methods that the headline names as not told apart."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """All comparisons of a report, corrected for their number.

    ``pairs``: macro difference of each two of ``methods``, the earlier one's minus the later one's; ``sampling``: the
    variance of that difference over test samples; ``concordance``: each federated method's discordance to a pooled one,
    minus the threshold.
    """

    methods: tuple[str, ...]
    pairs: Mapping[tuple[str, str], PairedDifference]
    sampling: Mapping[tuple[str, str], float]
    concordance: Mapping[tuple[str, str], PairedDifference]

    def between(self, one: str, other: str) -> PairedDifference:
        """The difference ``one - other``."""
        return self.pairs[one, other] if (one, other) in self.pairs else self.pairs[other, one].turned

    def sampling_between(self, one: str, other: str) -> float:
        """The variance of ``one - other`` over test samples."""
        return self.sampling[(one, other) if (one, other) in self.sampling else (other, one)]


def claims(study: RunSummary, metric: str | None = None, model: str = "personal", level: float = 0.95) -> Claims:
    """Every comparison that a report of ``study`` makes by ``metric`` (the study's own) of ``model``.

    Each macro figure is that of the tables, over the clients that every method measured under that seed, so that a
    difference compares like with like.
    """
    metric = metric or study.metric
    table = comparable(seed_table(study, metric, model).iloc[: len(study.clients)])
    rows = reported_rows(study, model)
    rows = rows.assign(grid=grid_variance(rows, metric), sampling=sampling_variance(rows, metric))
    grid, sampling = (
        rows.pivot(index="client", columns=["method", "seed"], values=name).reindex(index=table.index).reindex(
            columns=table.columns
        )
        for name in ("grid", "sampling")
    )  # fmt: skip
    methods = tuple(table.columns.unique("method"))
    owners = [study.same_test.get(str(name), str(name)) for name in table.index]
    values_, grid_, sampling_ = (
        {method: each[method].to_numpy(dtype=float) for method in methods} for each in (table, grid, sampling)
    )
    found: dict[tuple[str, str], PairedDifference] = {}
    drawn: dict[tuple[str, str], float] = {}
    for one, other in combinations(methods, 2):
        both_CS = np.isfinite(values_[one]) & np.isfinite(values_[other])
        count_S = np.where(both_CS.any(axis=0), both_CS.sum(axis=0), math.nan)
        ours_S, theirs_S = (np.where(both_CS, values_[name], 0).sum(axis=0) / count_S for name in (one, other))
        steps_S = np.where(both_CS, grid_[one] + grid_[other], 0).sum(axis=0) / count_S**2
        step = math.sqrt(np.nanmean(steps_S)) if both_CS.any() else 0.0
        found[one, other] = paired_difference(ours_S.tolist(), theirs_S.tolist(), level, grid=step)
        drawn[one, other] = sum(_macro_variance(sampling_[name], both_CS, owners) for name in (one, other))
    against = {
        pair: paired_difference(deltas, [CONCORDANT] * len(deltas), level, grid=EVEN)
        for pair, deltas in discordances(study).items()
    }
    tested = corrected([*found.values(), *against.values()])
    return Claims(
        methods=methods,
        pairs=dict(zip(found, tested, strict=False)),
        sampling=drawn,
        concordance=dict(zip(against, tested[len(found) :], strict=True)),
    )


def baseline_of(methods: Sequence[str]) -> str:
    """The method that others are put beside: FedAvg, else the first; empty where there is none."""
    return "fedavg" if "fedavg" in methods else next(iter(methods), "")


def difference_table(
    study: RunSummary,
    baseline: str | None = None,
    metric: str | None = None,
    model: str = "personal",
    level: float = 0.95,
) -> pd.DataFrame:
    """Macro difference of every other method to ``baseline``, paired over the seeds that both have.

    Index: method. Columns: baseline, seeds (how many pairs), difference, std, low, high, p (interval at ``level`` and
    p-value, corrected for the ``comparisons`` of all methods and NaN below three seeds), level, comparisons; test_low
    and test_high: the interval with what other test samples of the same size would change (:func:`precision
    <fedshift.report.precision.sampling_variance>`). The baseline is FedAvg where it takes part, else the first method.
    """
    return differences(claims(study, metric, model, level), baseline)


def differences(made: Claims, baseline: str | None = None) -> pd.DataFrame:
    """:func:`difference_table` of claims that are made."""
    if baseline is None:
        baseline = baseline_of(made.methods)
    elif baseline not in made.methods:
        raise unknown_name("baseline", baseline, made.methods)
    others = [method for method in made.methods if method != baseline]
    return difference_frame(
        baseline,
        {method: made.between(method, baseline) for method in others},
        {method: made.sampling_between(method, baseline) for method in others},
    )


def difference_frame(
    baseline: str, found: Mapping[str, PairedDifference], sampling: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """A table of differences, one row for each of ``found``; ``sampling``: their variances over test samples.

    Half of the interval with the test sample is sqrt(a^2 + b^2) of that over seeds, a, and of the normal one over test
    samples, b (Zou and Donner 2008, "Construction of confidence limits about effect measures", Statistics in Medicine
    27(10)).
    """
    rows = {}
    for name, each in found.items():
        drawn = math.sqrt((sampling or {}).get(name, math.nan)) * float(ndtri((1 + each.own_level) / 2))
        half = math.hypot(each.mean - each.low, drawn)
        rows[name] = {
            "baseline": baseline, "seeds": each.pairs, "difference": each.mean, "std": each.std, "low": each.low,
            "high": each.high, "p": each.p, "level": each.level, "comparisons": each.comparisons,
            "test_low": each.mean - half, "test_high": each.mean + half,
        }  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS)).rename_axis("method")


def sentence(one: str, other: str, found: PairedDifference, metric: str = "accuracy") -> str:
    """What ``found``, the difference ``one - other``, says, in the words of every report."""
    scale, digits, unit = units(metric)
    gap = round(scale * found.mean, digits) if found.pairs else math.nan
    size, side = f"{abs(gap):.{digits}f} {unit}", "above" if gap > 0 else "below"
    if found.pairs == 0:
        return f"{one} and {other} have no evaluated seed in common."
    if found.pairs < FEWEST:
        seeds = "one seed" if found.pairs == 1 else f"{found.pairs} seeds"
        lies = f"lies {size} {side}" if gap else "is level with"
        return f"{one} {lies} {other} over {seeds}: too few to tell them apart."
    low, high = (format_signed(scale * bound, digits) for bound in (found.low, found.high))
    number = f", corrected for {found.comparisons} comparisons" if found.comparisons > 1 else ""
    support = (
        f"{100 * found.level:g}% interval {low} to {high} over {found.pairs} seeds, p {format_p_value(found.p)}{number}"
    )
    if math.isnan(found.p):
        support = f"the same difference under each of {found.pairs} seeds, which no interval follows from"
    if not gap:
        return f"{one} is level with {other} as printed, {format_signed(gap, digits)} {unit} ({support})."
    if found.told_apart:
        return f"{one} is {side} {other} by {size} ({support})."
    return f"{one} is not told apart from {other}: difference {format_signed(gap, digits)} {unit} ({support})."


def readings(study: RunSummary, made: Claims) -> list[str]:
    """Each method beside the baseline, in sentences."""
    baseline = baseline_of(made.methods)
    others = (method for method in made.methods if method != baseline)
    return [sentence(method, baseline, made.between(method, baseline), study.metric) for method in others]


def standing(made: Claims, leaders: Iterable[str], others: Iterable[str]) -> str:
    """How the methods of the highest mean stand to ``others``, as the end of a sentence; empty without any."""
    ahead, behind = list(leaders), list(others)
    found = {other: [made.between(leader, other) for leader in ahead] for other in behind}
    if not found or not ahead:
        return ""
    if max(each.pairs for several in found.values() for each in several) < FEWEST:
        return f"too few seeds to tell it apart, {FEWEST} at least"
    open_ = [other for other, several in found.items() if not all(each.told_apart for each in several)]
    if not open_:
        return "told apart from every other method"
    more = f" and {len(open_) - NAMED} more" if len(open_) > NAMED else ""
    return f"not told apart from {', '.join(open_[:NAMED])}{more}"


def _macro_variance(sampling_CS: np.ndarray, both_CS: np.ndarray, owners: list[str]) -> float:
    """Variance of the macro figure over test samples, the mean over seeds; clients with one test set move together.

    Seeds share the test samples, so that their number does not lessen it.
    """
    count_S = both_CS.sum(axis=0)
    if not count_S.any():
        return math.nan
    stds = pd.DataFrame(np.sqrt(np.where(both_CS, sampling_CS, 0)))
    squares = stds.groupby(owners).sum().pow(2).sum().to_numpy()
    return float(np.mean(squares[count_S > 0] / count_S[count_S > 0] ** 2))
