"""Classification as clinics read it: shares with intervals, an operating point, calibration, and net benefit.

Functions take results on N samples under R seeds, numpy arrays, and know neither methods nor clients. Scores are the
log-odds of predicted probabilities, NaN where a network's output is not a number. Every interval covers test samples,
or groups of these (patients), and seeds: the variance of an estimate is that over groups of their influences on its
mean over seeds (:mod:`fedshift.analysis.influence`), plus S^2 / R over seeds, with Satterthwaite's degrees of freedom
(1946, Biometrics Bulletin 2(6)). Groups that are the shares w of all samples count as 1 / sum(w^2) equal ones (Kish
1965, "Survey sampling").

* Shares (sensitivity, specificity, predictive values) have Wilson's interval of p n of n samples, where n = p (1 - p) /
  variance is the number of independent samples with this variance (Korn and Graubard 1998, Survey Methodology 24(2)).
  Few patients with the rarer result tell little of how patients differ, and none tell nothing: where n is above the
  number K of patients, it is multiplied by (K / n)^(8 / (8 + k^2)), if k patients have that result. In simulations of 5
  to 50 patients with 4 to 20 samples, intraclass correlations of 0 to 0.95 and shares of 0.5 to 0.98, at least 0.93 of
  the intervals then contain the truth.
* Areas under the ROC curve have DeLong's variance, and Brier scores theirs, on the logit scale (Qin and Hotilovac 2008,
  Statistics in Medicine 17(4)).
* Calibration in the large and the calibration slope have symmetric intervals.

Survival curves (:func:`estimate_survival`) take the patients of one model; their intervals do not cover seeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import expit, logit, ndtri, stdtrit

from ..utils.errors import UsageError
from .influence import Floats, vary

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
SENSITIVITY, SPECIFICITY, YOUDEN = "sensitivity", "specificity", "youden"
AREA, BRIER, LARGE, SLOPE = "AUC", "Brier score", "calibration in the large", "calibration slope"
FREE = 1e9
"""Degrees of freedom of a variance without uncertainty."""
PRIOR = 8.0
"""Weight of the assumption that all samples of a patient have one result, in intervals of shares."""
STEPS, LAST_STEP = 100, 1e-6
"""Largest number of Newton's steps, and the size of one after which there is no other."""
WORST_CONDITION = 1e10
"""Smallest condition number of a Hessian that means that the likelihood has no maximum."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds of a measure, and its interval ``low`` to ``high``; NaN where they are not defined."""

    value: float
    low: float = math.nan
    high: float = math.nan


def parse_operating_point(text: str) -> tuple[str, float]:
    """Return the rule in ``text``, ``youden``, ``sensitivity>=0.95`` or ``specificity>=0.9``, and its share (0: none).

    Raises :class:`UsageError` for another one.
    """
    if text.strip().lower() == YOUDEN:
        return YOUDEN, 0.0
    match = re.fullmatch(rf"({SENSITIVITY}|{SPECIFICITY})\s*>=\s*(0?\.\d+|1(?:\.0*)?)", text.strip().lower())
    if match is None:
        raise UsageError(
            f"{text!r} is no operating point: give youden, sensitivity>=0.95 or specificity>=0.9, with a share up to 1"
        )
    return match[1], float(match[2])


def choose_threshold(operating_point: str, score_N: Floats, positive_N: Bools) -> float:
    """Return the threshold that validation data choose: a sample with at least this score counts as positive.

    ``youden`` maximizes sensitivity + specificity - 1 (Youden 1950, "Index for rating diagnostic tests", Cancer 3(1));
    ``sensitivity>=`` and ``specificity>=`` require a share of one and maximize the other. The threshold is half-way
    between the lowest score that counts as positive and the next one below, if there is one. NaN if none reaches the
    target, or there is no positive or no negative sample.
    """
    rule, least = parse_operating_point(operating_point)
    levels_T = np.unique(score_N[np.isfinite(score_N)])[::-1]
    if not len(levels_T) or not positive_N.any() or positive_N.all():
        return math.nan
    cuts_T = np.append((levels_T[:-1] + levels_T[1:]) / 2, levels_T[-1])  # the last calls every sample positive
    positives, negatives = (np.sort(score_N[kind_N & ~np.isnan(score_N)]) for kind_N in (positive_N, ~positive_N))
    sensitivity_T = (len(positives) - np.searchsorted(positives, cuts_T)) / positive_N.sum()
    specificity_T = np.searchsorted(negatives, cuts_T) / (~positive_N).sum()
    if rule == YOUDEN:
        return float(cuts_T[np.argmax(sensitivity_T + specificity_T)])
    required_T, other_T = sensitivity_T, specificity_T
    if rule == SPECIFICITY:
        required_T, other_T = specificity_T, sensitivity_T
    reached_T = required_T >= least - 1e-12
    return float(cuts_T[np.argmax(np.where(reached_T, other_T, -1.0))]) if reached_T.any() else math.nan


def share_interval(hit_N: Bools, group_N: Ints | None = None, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of :func:`estimate_share` of the share of N samples that are hits, under one seed."""
    share = estimate_share(hit_N[None], np.ones((1, len(hit_N)), bool), group_N, level)
    return share.low, share.high


def estimate_share(hit_RN: Bools, of_RN: Bools, group_N: Ints | None = None, level: float = 0.95) -> Estimate:
    """Return the mean over seeds of the share of ``hit`` samples among those ``of`` which it is a share.

    It has no interval if all samples are of one group, which does not tell how groups differ.
    """
    of_R = of_RN.sum(axis=1)
    if not len(of_R) or not of_R.all():
        return Estimate(value=math.nan)
    hit_RN = hit_RN & of_RN
    share_R = hit_RN.sum(axis=1) / of_R
    value, samples = float(share_R.mean()), float(of_R.mean())
    if group_N is None and len(of_R) == 1:
        return Estimate(value=value, **_find_wilson(value, samples, FREE, level))
    weight_N = (of_RN / of_R[:, None]).mean(axis=0)
    influence_N = ((hit_RN - of_RN * share_R[:, None]) / of_R[:, None]).mean(axis=0)
    variance, freedom = _vary(influence_N, share_R, weight_N, group_N)
    if math.isnan(variance):
        return Estimate(value=value)
    rare_N = (hit_RN if value < 0.5 else of_RN & ~hit_RN).mean(axis=0)
    patients, rare = count_equal(_add_up(weight_N, group_N)), count_equal(_add_up(rare_N, group_N))
    return Estimate(value=value, **limit_share(value, variance, freedom, patients, rare, level, most=samples))


def limit_share(
    value: float, variance: float, freedom: float, patients: float, rare: float, level: float = 0.95,
    most: float = math.inf,
) -> dict[str, float]:  # fmt: skip
    """Return the interval, ``low`` and ``high``, of a value between 0 and 1 whose variance over patients is estimated.

    It is Wilson's for as many independent samples as have this variance, at most ``most``; but where few patients,
    ``rare`` of all ``patients``, have what is rarer (errors, if the value is above one half), the samples of a patient
    count as alike, as far as :data:`PRIOR` has it.
    """
    independent = min(most, value * (1 - value) / variance) if variance else min(most, patients)
    independent *= min(1.0, patients / independent) ** (PRIOR / (PRIOR + rare**2))
    return _find_wilson(value, independent, freedom, level)


def _vary(influence_N: Floats, value_R: Floats, weight_N: Floats, group_N: Ints | None) -> tuple[float, float]:
    """Return the variance of a value over groups of samples and seeds, and its degrees of freedom.

    ``influence``: each sample's part in the deviation of the value; ``weight``: its share of all samples, of sum 1.
    """
    weight_G = _add_up(weight_N, group_N)
    influence_G, weight_G = _add_up(influence_N, group_N)[weight_G > 0], weight_G[weight_G > 0]
    units, seeds = len(weight_G), len(value_R)
    if units < 2:
        return math.nan, math.nan
    sampled, sampled_freedom = vary((units - 1) * influence_G / (1 - weight_G)), max(1.0, count_equal(weight_G) - 1)
    trained = float(value_R.var(ddof=1)) / seeds if seeds > 1 else 0.0
    total = sampled + trained
    if not total:
        return 0.0, sampled_freedom
    return total, total**2 / (sampled**2 / sampled_freedom + trained**2 / max(1, seeds - 1))


def _add_up(x_N: Floats, group_N: Ints | None) -> Floats:
    """Return the sum over each group, in order of their numbers; without groups, the values."""
    if group_N is None:
        return x_N
    return np.asarray(np.bincount(np.unique(group_N, return_inverse=True)[1], weights=x_N), np.float64)


def count_equal(size_G: Floats) -> float:
    """Return the number of equal groups whose mean has the variance of one over groups of these sizes (Kish)."""
    return float(size_G.sum() ** 2 / np.square(size_G).sum()) if size_G.any() else 0.0


def _find_wilson(share: float, samples: float, freedom: float, level: float = 0.95) -> dict[str, float]:
    """Return Wilson's interval of a share of so many independent samples, with Student's quantile."""
    z = float(stdtrit(freedom, (1 + level) / 2))
    center = share + z * z / (2 * samples)
    half = z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples**2))
    whole = 1 + z * z / samples
    return {"low": max(0.0, (center - half) / whole), "high": min(1.0, (center + half) / whole)}


def estimate(
    measure: str, odds_RN: Floats, positive_N: Bools, group_N: Ints | None = None, owner_N: NDArray[Any] | None = None
) -> Estimate:
    """Return the mean over seeds of a measure of scores against the outcomes ``positive``.

    Args:
        measure: :data:`AREA` under the ROC curve; :data:`BRIER`, the mean of (probability - outcome)^2; :data:`LARGE`,
            calibration in the large: the intercept of a logistic regression of the outcome with the log-odds as offset,
            0 if the mean probability is right, above 0 if probabilities are too low; :data:`SLOPE` of a regression on
            the log-odds, 1 if they are right, below 1 if too extreme (Cox 1958, Biometrika 45(3-4); Van Calster et al.
            2019, "Calibration: the Achilles heel of predictive analytics", BMC Medicine 17).
        odds_RN: Log-odds under R seeds.
        positive_N: Outcomes.
        group_N: Group of each sample; None: each is one by itself.
        owner_N: Model of each sample. The measure is the mean over models that define it, since scores of several
            models have no common scale; None: all samples have one model.

    Returns:
        NaN with log-odds of NaN, without positive or negative samples (except the Brier score), and where calibration's
        likelihood has no maximum, since scores separate the outcomes or are infinite.

    """
    value_R, influence_N, weight_N = _average_owners(measure, odds_RN, positive_N, owner_N)
    variance, freedom = _vary(influence_N, value_R, weight_N, group_N)
    value, half = float(value_R.mean()), float(stdtrit(freedom, 0.975)) * math.sqrt(variance)
    if measure not in (AREA, BRIER):
        return Estimate(value=value, low=value - half, high=value + half)
    unit_N = np.arange(len(positive_N)) if group_N is None else group_N
    fewest = min(len(np.unique(unit_N[kind_N])) for kind_N in (positive_N, ~positive_N))
    if math.isnan(half) or (measure == AREA and fewest < 2):
        return Estimate(value=value)
    if not half or not 0 < value < 1:
        return Estimate(value=value, **_find_wilson(value, max(1, fewest), FREE))
    low, high = expit(logit(value) + np.array([-1, 1]) * half / (value * (1 - value)))
    return Estimate(value=value, low=float(low), high=float(high))


def _average_owners(
    measure: str, odds_RN: Floats, positive_N: Bools, owner_N: NDArray[Any] | None
) -> tuple[Floats, Floats, Floats]:
    """Return the mean of a measure over models, ``[R]``, and each sample's influence and weight in it, ``[N]``."""
    owner_N = np.zeros(len(positive_N)) if owner_N is None else owner_N
    measured: list[tuple[Bools, Floats, Floats]] = []
    for owner in np.unique(owner_N):
        own_N = owner_N == owner
        values = [_MEASURES[measure](odds_N[own_N], positive_N[own_N]) for odds_N in odds_RN]
        value_R = np.array([value for value, _ in values])
        if np.isfinite(value_R).all():
            measured.append((own_N, value_R, np.mean([influence for _, influence in values], axis=0)))
    influence_N, weight_N = np.zeros((2, len(positive_N)))
    for own_N, _, influence in measured:
        influence_N[own_N] = influence / len(measured)
        for kind_N in (own_N & positive_N, own_N & ~positive_N):
            weight_N[kind_N] = np.square(influence_N[kind_N]).sum() / max(1, kind_N.sum())
    weight_N = weight_N / weight_N.sum() if weight_N.any() else np.full(len(weight_N), 1 / len(weight_N))
    none_R = np.full(len(odds_RN), math.nan)
    return np.mean([v for _, v, _ in measured] or [none_R], axis=0), influence_N, weight_N


def _measure_area(odds_N: Floats, positive_N: Bools) -> tuple[float, Floats]:
    """Return the area under the ROC curve and each sample's influence on it: DeLong's placements."""
    influence_N = np.zeros(len(odds_N))
    if positive_N.all() or not positive_N.any() or np.isnan(odds_N).any():
        return math.nan, influence_N
    for kind_N, sign in ((positive_N, 1.0), (~positive_N, -1.0)):
        others, scores = np.sort(sign * odds_N[~kind_N]), sign * odds_N[kind_N]
        placed = (np.searchsorted(others, scores, "left") + np.searchsorted(others, scores, "right")) / 2 / len(others)
        influence_N[kind_N] = (placed - placed.mean()) / math.sqrt(max(1, len(scores) * (len(scores) - 1)))
    return float(placed.mean()), influence_N


def _measure_brier(odds_N: Floats, positive_N: Bools) -> tuple[float, Floats]:
    """Return the Brier score and each sample's influence on it."""
    error_N = np.square(expit(odds_N) - positive_N)
    return float(error_N.mean()), (error_N - error_N.mean()) / len(error_N)


def _measure_calibration(odds_N: Floats, positive_N: Bools, *, slope: bool) -> tuple[float, Floats]:
    """Return the last coefficient of a logistic regression, by Newton's method, and each sample's influence on it.

    It is the slope of the log-odds, or the intercept with the log-odds as offset.
    """
    scale = (float(odds_N.std()) or 1.0) if slope else 1.0
    x_NK = np.column_stack([np.ones(len(odds_N)), odds_N / scale] if slope else [np.ones(len(odds_N))])
    offset_N, beta_K = 0.0 if slope else odds_N, np.zeros(x_NK.shape[1])

    def find_loss(beta_K: Floats) -> float:
        logit_N = x_NK @ beta_K + offset_N
        return float((np.logaddexp(0, logit_N) - positive_N * logit_N).sum())

    possible = positive_N.any() and not positive_N.all() and np.isfinite(odds_N).all()
    for _ in range(STEPS if possible else 0):
        p_N = expit(x_NK @ beta_K + offset_N)
        hessian = (x_NK * (p_N * (1 - p_N))[:, None]).T @ x_NK
        if not hessian[0, 0] or np.linalg.cond(hessian) > WORST_CONDITION:
            break
        influence_KN = np.linalg.solve(hessian, (x_NK * (positive_N - p_N)[:, None]).T)
        step_K = influence_KN.sum(axis=1)
        while find_loss(beta_K + step_K) > find_loss(beta_K) and np.abs(step_K).max() > LAST_STEP:
            step_K = step_K / 2
        beta_K = beta_K + step_K
        if np.abs(step_K).max() < LAST_STEP:
            return float(beta_K[-1]) / scale, influence_KN[-1] / scale
    return math.nan, np.zeros(len(odds_N))


_MEASURES: dict[str, Callable[[Floats, Bools], tuple[float, Floats]]] = {
    AREA: _measure_area,
    BRIER: _measure_brier,
    LARGE: partial(_measure_calibration, slope=False),
    SLOPE: partial(_measure_calibration, slope=True),
}


def bin_scores(score_N: Floats, positive_N: Bools, bins: int = 10) -> pd.DataFrame:
    """Return what a calibration curve is drawn of, a row for each of ``bins`` of equal width from 0 to 1.

    Columns: ``count`` of samples; mean ``score`` and ``share`` of positive samples, NaN in empty bins. Scores of NaN do
    not count.
    """
    frame = pd.DataFrame({"score": score_N, "share": positive_N.astype(float)}).dropna()
    bin_N = np.minimum((frame["score"] * bins).astype(int), bins - 1)
    means = frame.groupby(bin_N).mean().reindex(range(bins))
    return means.assign(count=np.bincount(bin_N, minlength=bins)).rename_axis("bin")


def find_net_benefit(score_N: Floats, positive_N: Bools, thresholds: Sequence[float]) -> Floats:
    """Return the net benefit at each probability threshold t: (true positives - false positives * t / (1 - t)) / N.

    Vickers and Elkin 2006, "Decision curve analysis", Medical Decision Making 26(6).
    """
    t_T = np.asarray(thresholds, float)
    called_TN = score_N >= t_T[:, None]
    right, wrong = (called_TN & positive_N).sum(axis=1), (called_TN & ~positive_N).sum(axis=1)
    benefit: Floats = (right - wrong * t_T / (1 - t_T)) / len(score_N)
    return benefit


def estimate_survival(time_N: Floats, event_N: Bools) -> pd.DataFrame:
    """Return the product-limit estimate of survival (Kaplan and Meier 1958, doi:10.1080/01621459.1958.10501452).

    The patients (at least one) have a ``time [N]`` to an event, where ``event [N]`` is true, or to the end of
    observation; one whose observation ends at the time of an event is still at risk then.

    Returns a row for each ``time`` of an event, and the last time. Columns: the ``share`` without an event until then;
    its 95 % interval ``low`` to ``high``, symmetric for the logarithm of the cumulative hazard, with Greenwood's
    variance (Kalbfleisch and Prentice 2002, section 1.4), NaN while the share is 1 or 0; patients ``at_risk``.
    """
    time_T, ordered_N = np.unique(np.append(time_N[event_N], time_N.max())), np.sort(time_N)
    at_risk_T = len(ordered_N) - np.searchsorted(ordered_N, time_T, side="left")
    events_T = np.bincount(np.searchsorted(time_T, time_N[event_N]), minlength=len(time_T))
    share_T = np.cumprod(1 - events_T / at_risk_T, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance_T = np.cumsum(events_T / (at_risk_T * (at_risk_T - events_T)))
        log_T = np.log(share_T)
        spread_T = ndtri(0.975) * np.sqrt(variance_T) / log_T
        low_T, high_T = (np.exp(log_T * np.exp(sign * spread_T)) for sign in (-1, 1))
    columns = {"share": share_T, "low": low_T, "high": high_T, "at_risk": at_risk_T}
    return pd.DataFrame(columns, index=pd.Index(time_T, name="time"))
