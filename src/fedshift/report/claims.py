"""Claims of a report, tested as one family: each difference is tested once and has the same wording everywhere.

A table invites readers to compare any two of its methods and to rank them all. The family is therefore all pairs of
methods, by macro metric and paired over seeds, and with a pooled method all discordances against the threshold. A run
that was begun with ``compare_with`` has only the pairs with that method, a smaller family with narrower intervals; its
other pairs were not compared, and have neither interval nor p-value.
p-values and intervals are corrected for the size of the family (:mod:`fedshift.analysis.statistics`), so that at most 5
in 100 reports on methods that do not differ claim anything. Such a claim is about *these test samples*. A second family
has the same pairs with the variation over test samples (:mod:`fedshift.analysis.sampling`), and is about *new samples
of these clients*: another test set of the same size. Every sentence and table states which family it refers to. Nothing
else in a report is a claim: means and standard deviations describe the seeds that were run, and bold marks the best
printed mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations, pairwise

import numpy as np
import pandas as pd

from ..analysis.sampling import SampleVariance
from ..analysis.similarity import CONCORDANT
from ..analysis.statistics import (
    FEWEST,
    PairedDifference,
    correct_family,
    count_needed_pairs,
    include_samples,
    paired_difference,
)
from ..results.schema import TOP_K, RunSummary, compute_metric, find_baseline, is_lower_better, is_share
from ..utils.errors import UsageError, unknown_name
from ..utils.words import join_some
from .concordance import compute_discordances
from .formatting import (
    MINUS,
    TextCell,
    TextTable,
    difference_unit,
    format_difference_table,
    format_p_value,
    make_table,
)
from .paired_samples import PairedSamples, collect_samples
from .progress import find_reached_rounds, is_comparable, remembered
from .tables import accuracy_table, mask_incomparable, seed_table, select_reported_rows

LEAST_ERROR = CONCORDANT / 1000
"""Smallest standard error of a discordance, in squared nats; below it, seeds agree as far as losses can show."""
WORTH = 0.05
"""Difference of a metric for which a report gives the number of seeds."""
NAMED = 4
"""Maximum number of methods in the headline, and of neighbors with a sentence each."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """All comparisons of a report, corrected for their number.

    ``pairs``: macro difference of each pair of ``methods``, the earlier one's minus the later one's, on these test
    samples, over seeds; ``fresh``: the same on new test samples of these clients, a family by themselves, NaN where the
    variation over test samples is not known; ``concordance``: each federated method's discordance to a pooled one,
    minus the threshold; ``compare_with``: the method with which alone pairs are compared; empty: all pairs are.
    """

    methods: tuple[str, ...]
    pairs: Mapping[tuple[str, str], PairedDifference]
    fresh: Mapping[tuple[str, str], PairedDifference]
    concordance: Mapping[tuple[str, str], PairedDifference]
    compare_with: str = ""

    @property
    def baseline(self) -> str:
        """The method that others are compared with."""
        return self.compare_with or find_baseline(self.methods)

    @property
    def others(self) -> list[str]:
        """The methods that are compared with the baseline."""
        return [method for method in self.methods if self.compares(method, self.baseline)]

    def compares(self, one: str, other: str) -> bool:
        """Return whether the pair belongs to the family."""
        return (one, other) in self.pairs or (other, one) in self.pairs

    def between(self, one: str, other: str) -> PairedDifference:
        """Return the difference ``one - other``."""
        return self.pairs[one, other] if (one, other) in self.pairs else -self.pairs[other, one]

    def fresh_between(self, one: str, other: str) -> PairedDifference:
        """Return the difference ``one - other`` on new test samples."""
        return self.fresh[one, other] if (one, other) in self.fresh else -self.fresh[other, one]

    def judge(self, one: str, other: str) -> Verdict:
        """Return what may be claimed about the difference ``one - other``."""
        if not self.compares(one, other):
            return Verdict.OUTSIDE
        return judge(self.between(one, other), self.fresh_between(one, other))


class Verdict(Enum):
    """What may be claimed about a difference."""

    FRESH = "yes"
    THESE = "on these samples"
    UNTESTED = "on these samples, new ones not tested"
    NONE = "not significantly different"
    FEW = "too few seeds"
    OUTSIDE = "not compared"

    @property
    def holds(self) -> bool:
        """Whether the difference may be claimed, on these test samples at least."""
        return self in (Verdict.FRESH, Verdict.THESE, Verdict.UNTESTED)


def judge(gap: PairedDifference, fresh: PairedDifference | None) -> Verdict:
    """Return what may be claimed about ``gap``, which is ``fresh`` on new samples."""
    if gap.pairs < FEWEST:
        return Verdict.FEW
    if not gap.is_significant:
        return Verdict.NONE
    if fresh is None or math.isnan(fresh.p):
        return Verdict.UNTESTED
    return Verdict.FRESH if fresh.is_significant else Verdict.THESE


def collect_claims(
    summary: RunSummary, metric: str | None = None, model: str = "personal", level: float = 0.95
) -> Claims:
    """Return every comparison that a report of ``summary`` makes by ``metric`` (None: the run's) of ``model``.

    Each macro value is the one in the tables, over the clients that every method measured for that seed, so that a
    difference compares like with like. Seeds for which two methods have not reached the same round do not count.
    """
    return _collect_claims(summary, metric or summary.metric, model, level)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """A metric at the reported rounds and its variances, from which every difference of a report is computed.

    ``values``, ``grid``, ``sampling``: by method, the metric and both variances of it ``[clients, seeds]``; ``same``:
    for each pair of methods and seed, whether both have reached the same round; ``owners``: for each client the first
    with its test samples; ``sizes``: number of each client's test samples; ``recorded``: results of single samples.
    """

    clients: tuple[str, ...]
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    values: Mapping[str, np.ndarray]
    grid: Mapping[str, np.ndarray]
    sampling: Mapping[str, np.ndarray]
    same: Mapping[tuple[str, str], np.ndarray]
    owners: list[str]
    recorded: PairedSamples

    def count_both(self, one: str, other: str) -> np.ndarray:
        """Return whether both methods have a value after the same round, bool ``[clients, seeds]``."""
        return np.asarray(np.isfinite(self.values[one] + self.values[other]) & self.same[one, other])

    def compare(
        self, one: str, other: str, both_CS: np.ndarray, level: float
    ) -> tuple[PairedDifference, PairedDifference]:
        """Return ``one - other`` of the mean over the clients in ``both_CS``, on these and on new test samples."""
        count_S = np.where(both_CS.any(axis=0), both_CS.sum(axis=0), math.nan)
        ours_S, theirs_S = (np.where(both_CS, self.values[name], 0).sum(axis=0) / count_S for name in (one, other))
        steps_S = np.where(both_CS, self.grid[one] + self.grid[other], 0).sum(axis=0) / count_S**2
        step = math.sqrt(np.nanmean(steps_S)) if both_CS.any() else 0.0
        gap = paired_difference(ours_S.tolist(), theirs_S.tolist(), level, grid=step)
        sampled = self.recorded.find_variance(one, other, both_CS, self.seeds) or SampleVariance(
            variance=sum(_macro_variance(self.sampling[name], both_CS, self.owners) for name in (one, other))
        )
        return gap, include_samples(gap, sampled)


@remembered
def measure_methods(summary: RunSummary, metric: str, model: str) -> Measured:
    """Return ``metric`` of ``model`` for the clients that every method measured, with its variances."""
    reached = find_reached_rounds(summary)
    table = mask_incomparable(seed_table(summary, metric, model).iloc[: len(summary.clients)])
    rows = select_reported_rows(summary, model)
    variances = {"grid": grid_variance(rows, metric), "sampling": sampling_variance(rows, metric)}
    grid, sampling = (
        rows.assign(value=variance)
        .pivot(index="client", columns=["method", "seed"], values="value")
        .reindex(index=table.index)
        .reindex(columns=table.columns)
        for variance in variances.values()
    )
    methods = tuple(table.columns.unique("method"))
    values, grids, samplings = (
        {method: frame[method].to_numpy(dtype=float) for method in methods} for frame in (table, grid, sampling)
    )
    return Measured(
        clients=tuple(map(str, table.index)),
        sizes=tuple(rows.groupby("client")["samples"].max().reindex(table.index, fill_value=0).astype(int)),
        seeds=tuple(map(int, table.columns.unique("seed"))),
        values=values,
        grid=grids,
        sampling=samplings,
        same={
            (one, other): np.array(
                [is_comparable(reached, one, other, seed) for seed in table[one].columns], dtype=bool
            )
            for one in methods
            for other in methods
        },
        owners=[summary.same_test.get(str(name), str(name)) for name in table.index],
        recorded=collect_samples(summary, metric, model),
    )


@remembered
def _collect_claims(summary: RunSummary, metric: str, model: str, level: float) -> Claims:
    measured = measure_methods(summary, metric, model)
    pairs: dict[tuple[str, str], PairedDifference] = {}
    fresh: dict[tuple[str, str], PairedDifference] = {}
    chosen = summary.compare_with
    for one, other in combinations(measured.values, 2):
        if chosen and chosen not in (one, other):
            continue
        pairs[one, other], fresh[one, other] = measured.compare(one, other, measured.count_both(one, other), level)
    against_threshold = {
        pair: paired_difference(deltas, [CONCORDANT] * len(deltas), level, grid=LEAST_ERROR)
        for pair, deltas in compute_discordances(summary).items()
    }
    tested = correct_family([*pairs.values(), *against_threshold.values()])
    return Claims(
        methods=tuple(measured.values),
        pairs=dict(zip(pairs, tested, strict=False)),
        fresh=dict(zip(fresh, correct_family(list(fresh.values())), strict=True)),
        concordance=dict(zip(against_threshold, tested[len(pairs) :], strict=True)),
        compare_with=chosen,
    )


def grid_variance(rows: pd.DataFrame, metric: str) -> np.ndarray:
    """Return the variance h^2 / 12 of a uniform error within one step h of the grid of ``metric``, for each row.

    A step is one sample: 1/n of (top-k) accuracy; of balanced accuracy 1/n_k of the recall of class k, weighted by 1/K;
    of AUC one pair, 1 / (n_k (n - n_k)) for each class k against the rest, likewise averaged. Others count as
    continuous: 0.
    """
    if metric.startswith(TOP_K):
        return np.asarray(1 / (12 * rows["samples"].to_numpy(float) ** 2))
    if metric not in ("accuracy", "balanced_accuracy", "auc") or rows.empty:
        return np.zeros(len(rows))
    support_NK = np.array(rows["support"].tolist(), dtype=float)
    n_N1 = support_NK.sum(axis=1, keepdims=True)
    if metric == "accuracy":
        return np.asarray(1 / (12 * n_N1[:, 0] ** 2))
    rest_NK = n_N1 - support_NK if metric == "auc" else np.ones_like(support_NK)
    defined_NK = (support_NK > 0) & (rest_NK > 0)
    steps_NK = np.divide(1, support_NK * rest_NK, out=np.zeros_like(support_NK), where=defined_NK)
    return np.asarray((steps_NK**2).sum(axis=1) / (12 * np.maximum(1, defined_NK.sum(axis=1)) ** 2))


def sampling_variance(rows: pd.DataFrame, metric: str) -> np.ndarray:
    """Return the variance of ``metric`` over test samples of the same size, for each row; NaN without a closed form.

    It serves where the results of single samples are not recorded, and methods' errors count as independent. It is the
    variance of a parametric bootstrap in closed form: hits redrawn as Binomial(n, p) give the (top-k) accuracy a
    variance of p (1 - p) / n, and balanced accuracy the sum over classes of that variance, divided by K^2. p is (hits +
    1/2) / (n + 1), so that a perfect score still has an error (Brown, Cai and DasGupta 2001, "Interval Estimation for a
    Binomial Proportion").
    """
    binary = metric in ("accuracy", "balanced_accuracy") or metric.startswith(TOP_K)
    if not binary or rows.empty or rows["support"].isna().any():
        return np.full(len(rows), math.nan)
    hits_NK, n_NK = (np.array(rows[name].tolist(), dtype=float) for name in ("hits", "support"))
    samples_N = rows["samples"].to_numpy(float)
    if (n_NK.sum(axis=1) != samples_N).any():  # pixels of an image are not draws
        return np.full(len(rows), math.nan)
    if metric != "balanced_accuracy":
        hits_NK, n_NK = hits_NK.sum(axis=1, keepdims=True), samples_N[:, None]
    if metric.startswith(TOP_K):
        hits_NK = compute_metric(rows, metric).to_numpy(float)[:, None] * n_NK
    p_NK, present_NK = (hits_NK + 0.5) / (n_NK + 1), n_NK > 0
    variance_NK = np.divide(p_NK * (1 - p_NK), n_NK, out=np.zeros_like(n_NK), where=present_NK)
    return np.asarray(variance_NK.sum(axis=1) / present_NK.sum(axis=1) ** 2)


def _macro_variance(sampling_CS: np.ndarray, both_CS: np.ndarray, owners: list[str]) -> float:
    """Return the variance of the macro value over test samples, averaged over seeds.

    Clients with one test set vary together. Seeds share the test samples, so their number does not reduce the variance.
    """
    count_S = both_CS.sum(axis=0)
    if not count_S.any() or np.isnan(sampling_CS[both_CS]).any():
        return math.nan
    stds = pd.DataFrame(np.sqrt(np.where(both_CS, sampling_CS, 0)))
    squares = stds.groupby(owners).sum().pow(2).sum().to_numpy()
    return float(np.mean(squares[count_S > 0] / count_S[count_S > 0] ** 2))


def difference_table(
    summary: RunSummary,
    baseline: str | None = None,
    metric: str | None = None,
    model: str = "personal",
    level: float = 0.95,
) -> pd.DataFrame:
    """Return the macro difference of every other method to ``baseline``, paired over the seeds that both have.

    Index: method. Columns: baseline, seeds (number of pairs), difference, std, low, high, p (interval at ``level`` and
    p-value, corrected for the ``comparisons`` of all methods and NaN below three seeds), level, comparisons; test_low,
    test_high, test_p: interval and p-value on new test samples of these clients, corrected likewise; test_samples:
    ``paired`` if they come from both methods' results on the same samples, else ``unpaired``
    (:func:`sampling_variance`). The baseline is FedAvg where it takes part, else the first method; of a run with
    ``compare_with`` that method, and no other.
    """
    return tabulate_claims(collect_claims(summary, metric, model, level), baseline)


def tabulate_claims(claims: Claims, baseline: str | None = None) -> pd.DataFrame:
    """Return the :func:`difference_table` of collected ``claims``."""
    if baseline is None:
        baseline = claims.baseline
    elif baseline not in claims.methods:
        raise unknown_name("baseline", baseline, claims.methods)
    elif claims.compare_with not in ("", baseline):
        raise UsageError(
            f"baseline {baseline!r}: this run was begun to compare pairs with {claims.compare_with} alone "
            "(compare_with), whose p-values are corrected for these: leave the baseline out"
        )
    others = [method for method in claims.methods if claims.compares(method, baseline)]
    return tabulate_differences(
        baseline,
        {method: claims.between(method, baseline) for method in others},
        {method: claims.fresh_between(method, baseline) for method in others},
    )


def tabulate_differences(
    baseline: str, differences: Mapping[str, PairedDifference], fresh: Mapping[str, PairedDifference] | None = None
) -> pd.DataFrame:
    """Return a table with one row for each of ``differences``; ``fresh``: the same on new test samples."""
    columns = "baseline", "seeds", "difference", "std", "low", "high", "p", "level", "comparisons"
    rows = {}
    for name, gap in differences.items():
        seeds = baseline, gap.pairs, gap.mean, gap.std, gap.low, gap.high, gap.p, gap.level, gap.comparisons
        new = fresh[name] if fresh else None
        tested = new is not None and new.sampled is not None and not math.isnan(new.p)
        bounds = (new.low, new.high, new.p) if tested and new else (math.nan,) * 3
        paired = "" if not (tested and new and new.sampled) else "paired" if new.sampled.paired else "unpaired"
        rows[name] = [*seeds, *bounds, paired]
    names = [*columns, "test_low", "test_high", "test_p", "test_samples"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names).rename_axis("method")


def find_leader(claims: Claims, metric: str = "accuracy") -> str:
    """Return the method that is better than every other on new test samples too, or an empty string."""
    sign = -1 if is_lower_better(metric) else 1
    for method in claims.methods:
        others = [other for other in claims.methods if other != method]
        significant = all(claims.judge(method, other) is Verdict.FRESH for other in others)
        if others and significant and all(sign * claims.between(method, other).mean > 0 for other in others):
            return method
    return ""


def rank_methods(summary: RunSummary) -> list[str]:
    """Return the measured methods by the macro row of the summary's table, best first."""
    means = accuracy_table(summary).iloc[len(summary.clients)].unstack()["mean"]
    return list(means.dropna().sort_values(ascending=is_lower_better(summary.metric), kind="stable").index)


def describe_difference(
    one: str,
    other: str,
    gap: PairedDifference,
    metric: str = "accuracy",
    *,
    fresh: PairedDifference | None = None,
    numbers: bool = False,
) -> str:
    """Return the sentence that every report prints about ``gap``, the difference ``one - other``.

    ``fresh``: the same on new test samples, where it is known; ``numbers``: whether targets are numbers.
    """
    unit = difference_unit(metric, numbers=numbers)
    mean = round(unit.scale * gap.mean, unit.digits) if gap.pairs else math.nan
    size, side = f"{abs(mean):.{unit.digits}f} {unit.name}", "above" if mean > 0 else "below"
    if gap.pairs == 0:
        return f"{one} and {other} have no seed under which both have a value after the same round."
    if gap.pairs < FEWEST:
        seeds = "one seed" if gap.pairs == 1 else f"{gap.pairs} seeds"
        relation = f"is {size} {side}" if mean else "is level with"
        return f"{one} {relation} {other} over {seeds}: too few for a significance test."

    number = f", corrected for {gap.comparisons} comparisons" if gap.comparisons > 1 else ""
    interval = unit.format_interval(gap.low, gap.high)
    support = f"{100 * gap.level:g}% interval {interval} over {gap.pairs} seeds, p {format_p_value(gap.p)}{number}"
    if gap.low == gap.high:
        support = f"equal under each of {gap.pairs} seeds"
    if math.isnan(gap.p):
        support = f"the same difference under each of {gap.pairs} seeds, which allows no interval"
    if not mean:
        return f"{one} is level with {other} as printed, {unit.format_signed(gap.mean)} {unit.name} ({support})."
    verdict = judge(gap, fresh)
    if verdict is Verdict.NONE or fresh is None:
        significant = f"{one} is {side} {other} by {size}"
        insignificant = (
            f"{one} is not significantly different from {other}: difference {unit.format_signed(gap.mean)} {unit.name}"
        )
        return f"{significant if verdict.holds else insignificant} ({support})."
    again = unit.format_interval(fresh.low, fresh.high)
    where = {
        Verdict.FRESH: f"on new samples of these clients too ({support}; on new samples {again})",
        Verdict.THESE: f"on these test samples, but not on new samples of these clients ({support}; on new samples "
        f"{again})",
        Verdict.UNTESTED: f"on these test samples; new samples were not tested ({support})",
    }[verdict]
    return f"{one} is {side} {other} by {size} {where}."


def describe_baseline(summary: RunSummary, claims: Claims) -> list[str]:
    """Return one sentence on each method compared with the baseline."""
    one = claims.baseline
    metric, numbers = summary.metric, summary.of_numbers
    return [
        describe_difference(
            method, one, claims.between(method, one), metric, fresh=claims.fresh_between(method, one), numbers=numbers
        )
        for method in claims.others
    ]


def describe_leaders(claims: Claims, leaders: Iterable[str], others: Iterable[str]) -> str:
    """Return the end of a sentence that compares the methods of the best mean with ``others``; may be empty."""
    leaders, others = list(leaders), list(others)
    if not others or not leaders:
        return ""
    outside = [other for other in others if not all(claims.compares(leader, other) for leader in leaders)]
    gaps = {other: [claims.between(leader, other) for leader in leaders] for other in others if other not in outside}
    apart = f"not compared with {join_some(outside, shown=NAMED)}" if outside else ""
    compared = _describe_compared(claims, leaders, gaps, "every other method" if not outside else "") if gaps else ""
    return "; ".join(text for text in (compared, apart) if text)


def _describe_compared(
    claims: Claims, leaders: Sequence[str], gaps: Mapping[str, Sequence[PairedDifference]], whom: str
) -> str:
    """Return how ``leaders`` compare with the methods in ``gaps``, which are ``whom``; empty: name them."""
    if max(gap.pairs for several in gaps.values() for gap in several) < FEWEST:
        return f"too few seeds for a significance test, {FEWEST} at least"
    verdicts = {other: {claims.judge(leader, other) for leader in leaders} for other in gaps}

    def name(*those: Verdict) -> str:
        return join_some((other for other, several in verdicts.items() if several & set(those)), shown=NAMED)

    if similar := name(Verdict.NONE, Verdict.FEW):
        return f"not significantly different from {similar}"
    different = f"significantly different from {whom or join_some(gaps, shown=NAMED)}"
    if these := name(Verdict.THESE):
        return f"{different} on these test samples, but not from {these} on new samples"
    if name(Verdict.UNTESTED):
        return f"{different} on these test samples; new samples were not tested"
    return f"{different}, on new samples of these clients too"


def tabulate_pairs(summary: RunSummary, claims: Claims) -> TextTable | None:
    """Return the pairs of methods that a reader compares, and which difference may be claimed; None without pairs.

    With up to four methods, these are all pairs; with more, neighbors by the macro metric and pairs with the baseline;
    of the family that was chosen before the run, its pairs.
    """
    order, unit = rank_methods(summary), difference_unit(summary.metric)
    pairs = [pair for pair in combinations(order, 2) if claims.compares(*pair)]
    if len(order) > NAMED:
        pairs = [pair for pair in pairs if claims.baseline in pair or order.index(pair[1]) - order.index(pair[0]) == 1]
    pairs = [pair for pair in pairs if claims.between(*pair).pairs]
    if not pairs:
        return None
    gaps = {f"{one} {MINUS} {other}": claims.between(one, other) for one, other in pairs}
    fresh = {f"{one} {MINUS} {other}": claims.fresh_between(one, other) for one, other in pairs}
    text = format_difference_table(tabulate_differences("", gaps, fresh), summary.metric)
    rows = []
    for row, (name, gap) in zip(text.rows, gaps.items(), strict=True):
        verdict = judge(gap, fresh[name])
        level = verdict is Verdict.NONE and not round(unit.scale * gap.mean, unit.digits)
        text_of_claim = "level" if level else verdict.value
        rows.append((row[0], TextCell(text=text_of_claim, best=verdict is Verdict.FRESH), *row[1:]))
    return make_table(("difference of", "may be claimed", *text.header[1:]), rows, note=text.note)


def describe_needed_seeds(summary: RunSummary, claims: Claims) -> list[str]:
    """Return a sentence on the seeds that a difference of :data:`WORTH` takes, if there are fewer of them, but two.

    The spread is that of the paired differences to the baseline, pooled over the methods (root mean square).
    """
    gaps = [claims.between(method, claims.baseline) for method in claims.others]
    gaps = [gap for gap in gaps if gap.pairs > 1]
    if not is_share(summary.metric) or not gaps:
        return []
    freedom = sum(gap.pairs - 1 for gap in gaps)
    std = math.sqrt(sum((gap.pairs - 1) * gap.std**2 for gap in gaps) / freedom)
    family, most = len(claims.pairs) + len(claims.concordance), max(gap.pairs for gap in gaps)
    needed = count_needed_pairs(std, WORTH, comparisons=family, level=gaps[0].level)
    if needed is None or needed <= most:
        return []
    number = f", corrected for {family} comparisons" if family > 1 else ""
    return [
        f"To claim a difference of {100 * WORTH:g} points you need about {needed} seeds: the difference to "
        f"{claims.baseline} varies by {100 * std:.2f} points (std over {most} seeds), for a power of 80%{number}."
    ]


def describe_family(claims: Claims) -> str:
    """Return a sentence on the family of comparisons, if it was chosen before the run; else an empty text."""
    if not claims.compare_with:
        return ""
    return (
        f"The comparisons are those with {claims.compare_with}, as chosen before the run (--compare-with); other pairs "
        "of methods were not compared: do not claim an order of these."
    )


def describe_ranking(summary: RunSummary, claims: Claims | None = None) -> list[str]:
    """Return sentences about neighbors by macro metric, which show how much of the methods' order may be claimed."""
    claims = claims or collect_claims(summary)
    pairs = list(pairwise(rank_methods(summary)))
    if not pairs:
        return []
    if claims.compare_with:
        return [describe_family(claims)]
    most = max(claims.between(*pair).pairs for pair in pairs)
    if not most:
        return ["Do not claim an order of these methods: no seed has values of two methods after the same round."]
    if most < FEWEST:
        seeds = "one seed is" if most == 1 else f"{most} seeds are"
        return [f"Do not claim an order of these methods: {seeds} too few. Use --seeds 5 for intervals."]
    verdicts = {pair: claims.judge(*pair) for pair in pairs}
    named = pairs if len(pairs) <= NAMED else [pair for pair in pairs if not verdicts[pair].holds]
    sentences = []
    for one, other in named:  # a pair with the baseline reads as in :func:`describe_baseline`
        left, right = (other, one) if one == claims.baseline else (one, other)
        gap, fresh = claims.between(left, right), claims.fresh_between(left, right)
        metric, numbers = summary.metric, summary.of_numbers
        sentences.append(describe_difference(left, right, gap, metric, fresh=fresh, numbers=numbers))
    for verdict, where in (
        (Verdict.FRESH, "on new samples of these clients too"),
        (Verdict.THESE, "on these test samples, but not on new samples of these clients"),
        (Verdict.UNTESTED, "on these test samples; new samples were not tested"),
    ):
        if count := sum(verdicts[pair] is verdict for pair in pairs if pair not in named):
            noun = "pair of neighbors" if count == 1 else "pairs of neighbors"
            sentences.append(f"Significantly different {where}: {count} {noun} by macro {summary.metric_name}.")
    return sentences
