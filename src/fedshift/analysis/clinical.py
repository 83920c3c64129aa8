"""Classification as clinics read it: shares with intervals, an operating point, calibration, and net benefit.

Functions take scores of N samples under R seeds, numpy arrays, and know neither methods nor clients. Every interval
covers test samples, or groups of these, and seeds: the variance of an estimate is that over samples, of the mean over
seeds (:mod:`fedshift.analysis.sampling`), plus S^2 / R over seeds, with Satterthwaite's degrees of freedom.

* Shares (sensitivity, specificity, predictive values) have Wilson's interval of p n of n samples, where n = p (1 - p) /
  variance is the number of independent samples with this variance, and at most the number there are, as for shares from
  surveys (Korn and Graubard 1998, "Confidence intervals for proportions with small expected number of positive counts
  estimated from survey data", Survey Methodology 24(2)). Symmetric intervals miss the truth near 0 and 1.
* Areas under the ROC curve have DeLong's variance on the logit scale (Qin and Hotilovac 2008, "Comparison of
  non-parametric confidence intervals for the area under the ROC curve", Statistics in Medicine 17(4)).
* Means, such as the Brier score, have symmetric ones.

Survival curves (:func:`estimate_survival`) take the patients of one model; their intervals do not cover seeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, ndtri, stdtrit

from ..utils.errors import UsageError
from .influence import Floats, vary

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
SENSITIVITY, SPECIFICITY, YOUDEN = "sensitivity", "specificity", "youden"
CLOSEST = 1e-6
"""Smallest distance of a probability from 0 and 1 where its logit is taken."""
FREE = 1e9
"""Degrees of freedom of a variance without uncertainty."""
WORST_CONDITION = 1e10
"""Smallest condition number of a Hessian that means that the likelihood has no maximum."""
STEPS = 50
"""Largest number of Newton's steps."""
QUANTILE = float(ndtri(0.975))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds of a measure, and its 95 % interval ``low`` to ``high``; NaN where it is not defined.

    ``samples``: number of samples that it is a share of, or a mean over.
    """

    value: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """Rule that chooses a threshold on validation data: a sample with at least this score counts as positive.

    ``youden`` maximizes sensitivity + specificity - 1 (Youden 1950, "Index for rating diagnostic tests", Cancer 3(1));
    ``sensitivity`` and ``specificity`` require ``least`` of one and maximize the other.
    """

    rule: str
    least: float = 0.0

    def choose(self, score_N: Floats, positive_N: Bools) -> float:
        """Return the threshold; NaN without a positive or without a negative sample.

        It lies half-way between the lowest score that counts as positive and the next one below.
        """
        if not positive_N.any() or positive_N.all():
            return math.nan
        levels_T = np.unique(score_N)[::-1]
        cuts_T = np.append((levels_T[:-1] + levels_T[1:]) / 2, -math.inf)  # the last calls every sample positive
        cuts_T = np.insert(cuts_T, 0, math.inf)
        positives, negatives = np.sort(score_N[positive_N]), np.sort(score_N[~positive_N])
        sensitivity_T = 1 - np.searchsorted(positives, cuts_T) / len(positives)
        specificity_T = np.searchsorted(negatives, cuts_T) / len(negatives)
        if self.rule == YOUDEN:
            return float(cuts_T[np.argmax(sensitivity_T + specificity_T)])
        required_T, other_T = sensitivity_T, specificity_T
        if self.rule == SPECIFICITY:
            required_T, other_T = specificity_T, sensitivity_T
        return float(cuts_T[np.argmax(np.where(required_T >= self.least - 1e-12, other_T, -1.0))])

    def __str__(self) -> str:
        return self.rule if self.rule == YOUDEN else f"{self.rule}>={self.least:g}"


def parse_operating_point(text: str) -> OperatingPoint:
    """Return the rule in ``text``: ``youden``, ``sensitivity>=0.95`` or ``specificity>=0.9``.

    Raises :class:`UsageError` for another one.
    """
    if text.strip().lower() == YOUDEN:
        return OperatingPoint(rule=YOUDEN)
    match = re.fullmatch(rf"({SENSITIVITY}|{SPECIFICITY})\s*>=\s*(0?\.\d+|1(?:\.0*)?)", text.strip().lower())
    if match is None:
        raise UsageError(
            f"{text!r} is no operating point: give youden, sensitivity>=0.95 or specificity>=0.9, with a share up to 1"
        )
    return OperatingPoint(rule=match[1], least=float(match[2]))


def estimate_share(hit_RN: Bools, of_RN: Bools, group_N: Ints | None = None) -> Estimate:
    """Return the mean over seeds of the share of ``hit`` samples among those ``of`` which it is a share."""
    of_R = of_RN.sum(axis=1)
    samples = round(float(of_R.mean())) if len(of_R) else 0
    if not len(of_R) or not of_R.all():
        return Estimate(value=math.nan, low=math.nan, high=math.nan, samples=samples)
    share_R = (hit_RN & of_RN).sum(axis=1) / of_R
    part_RN = np.where(of_RN, hit_RN - share_R[:, None], 0.0) / of_R[:, None]
    value, most = float(share_R.mean()), float(of_R.mean())
    variance, freedom = _vary(part_RN.mean(axis=0), share_R, group_N)
    known = value * (1 - value) / variance if variance > 0 else _count_units(of_RN, group_N)
    low, high = _wilson(value, min(most, known), freedom)
    return Estimate(value=value, low=low, high=high, samples=samples)


def estimate_mean(x_RN: Floats, group_N: Ints | None = None) -> Estimate:
    """Return the mean over seeds and samples of ``x``."""
    samples = x_RN.shape[1]
    if samples < 2:
        value = float(x_RN.mean()) if x_RN.size else math.nan
        return Estimate(value=value, low=math.nan, high=math.nan, samples=samples)
    mean_R = x_RN.mean(axis=1)
    variance, freedom = _vary((x_RN - mean_R[:, None]).mean(axis=0) / samples, mean_R, group_N)
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(variance)
    value = float(mean_R.mean())
    return Estimate(value=value, low=value - half, high=value + half, samples=x_RN.shape[1])


def estimate_area(score_RN: Floats, positive_N: Bools, group_N: Ints | None = None) -> Estimate:
    """Return the mean over seeds of the area under the ROC curve; NaN without a positive or a negative sample."""
    positives, samples = int(positive_N.sum()), len(positive_N)
    if positives in (0, samples):
        return Estimate(value=math.nan, low=math.nan, high=math.nan, samples=samples)
    placed_RN = np.stack([_place(score_N, positive_N) for score_N in score_RN])
    area_R = placed_RN[:, positive_N].mean(axis=1)
    value, smaller = float(area_R.mean()), min(positives, samples - positives)
    if smaller < 2:
        return Estimate(value=value, low=math.nan, high=math.nan, samples=samples)
    count_N = np.where(positive_N, positives, samples - positives)
    part_N = (placed_RN - area_R[:, None]).mean(axis=0) / np.sqrt(count_N * (count_N - 1.0))  # DeLong's
    variance, freedom = _vary(part_N, area_R, group_N)
    if not 0 < value < 1 or not variance > 0:
        low, high = _wilson(value, smaller, FREE)
    else:
        half = float(stdtrit(freedom, 0.975)) * math.sqrt(variance) / (value * (1 - value))
        low, high = (float(expit(logit(value) + side * half)) for side in (-1, 1))
    return Estimate(value=value, low=low, high=high, samples=samples)


def _place(score_N: Floats, positive_N: Bools) -> Floats:
    """Return each sample's share of the other kind that it is ranked correctly against; ties count one half."""
    placed_N = np.empty(len(score_N))
    for own_N, sign in ((positive_N, 1.0), (~positive_N, -1.0)):
        others = np.sort(sign * score_N[~own_N])
        own = sign * score_N[own_N]
        placed_N[own_N] = (
            (np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")) / 2 / len(others)
        )
    return placed_N


def _vary(part_N: Floats, value_R: Floats, group_N: Ints | None) -> tuple[float, float]:
    """Return the variance of a value over samples (or groups) and seeds, and its degrees of freedom (Satterthwaite).

    ``part``: each sample's part in the deviation of the value, so that parts add up over a group.
    """
    part_G = part_N if group_N is None else np.bincount(np.unique(group_N, return_inverse=True)[1], weights=part_N)
    units, seeds = len(part_G), len(value_R)
    sampled = vary(units * np.asarray(part_G, float))
    trained = float(value_R.var(ddof=1)) / seeds if seeds > 1 else 0.0
    total = sampled + trained
    if not total > 0:
        return total, FREE
    return total, total**2 / (sampled**2 / (units - 1) + trained**2 / max(1, seeds - 1))


def _count_units(of_RN: Bools, group_N: Ints | None) -> float:
    """Return the number of samples, or groups of these, that a share is of, averaged over seeds."""
    if group_N is None:
        return float(of_RN.sum(axis=1).mean())
    return float(np.mean([len(np.unique(group_N[of_N])) for of_N in of_RN]))


def _wilson(share: float, samples: float, freedom: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of so many independent samples, with Student's quantile."""
    z = float(stdtrit(freedom, 0.975))
    center, half = (
        share + z * z / (2 * samples),
        z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples**2)),
    )
    whole = 1 + z * z / samples
    return max(0.0, (center - half) / whole), min(1.0, (center + half) / whole)


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationBins:
    """Mean score and share of positive samples by tenth of the score: arrays ``[bins]``, NaN in empty bins."""

    count: Ints
    score: Floats
    share: Floats


def bin_scores(score_N: Floats, positive_N: Bools, bins: int = 10) -> CalibrationBins:
    """Return what a calibration curve is drawn of, in ``bins`` of equal width from 0 to 1."""
    place_N = np.minimum((score_N * bins).astype(np.int64), bins - 1)
    count = np.bincount(place_N, minlength=bins)
    with np.errstate(invalid="ignore"):
        score, share = (np.bincount(place_N, weights=each, minlength=bins) / count for each in (score_N, positive_N))
    return CalibrationBins(count=count, score=score, share=share)


def estimate_calibration(score_RN: Floats, positive_N: Bools, group_N: Ints | None = None) -> tuple[Estimate, Estimate]:
    """Return calibration's intercept and slope: 0 and 1 if scores are probabilities.

    The logistic regression of the outcome on the score's logit has them (Cox 1958, "Two further
    applications of a model for binary regression", Biometrika 45(3-4)), with the sandwich variance over samples or
    groups. NaN if the score separates the samples, so that the likelihood has no maximum.
    """
    fits = [_fit_logistic(score_N, positive_N) for score_N in score_RN]
    made = []
    for place in range(2):
        value_R = np.array([beta[place] for beta, _ in fits])
        value = float(value_R.mean()) if len(value_R) else math.nan
        half = math.nan
        if not math.isnan(value):
            part_N = np.mean([part_N2[:, place] for _, part_N2 in fits], axis=0) / len(positive_N)
            variance, freedom = _vary(part_N, value_R, group_N)
            half = float(stdtrit(freedom, 0.975)) * math.sqrt(variance)
        made.append(Estimate(value=value, low=value - half, high=value + half, samples=len(positive_N)))
    return made[0], made[1]


def _fit_logistic(score_N: Floats, positive_N: Bools) -> tuple[Floats, Floats]:
    """Return intercept and slope ``[2]`` by Newton's method, and N times each sample's part in them ``[N, 2]``."""
    x_N2 = np.column_stack([np.ones(len(score_N)), logit(np.clip(score_N, CLOSEST, 1 - CLOSEST))])
    none = np.full(2, math.nan), np.full_like(x_N2, math.nan)
    beta = np.zeros(2)
    for _ in range(STEPS):
        p_N = expit(x_N2 @ beta)
        hessian = (x_N2 * (p_N * (1 - p_N))[:, None]).T @ x_N2
        if not np.isfinite(hessian).all() or np.linalg.cond(hessian) > WORST_CONDITION:
            return none
        step = np.linalg.solve(hessian, x_N2.T @ (positive_N - p_N))
        beta = beta + step
        if np.abs(step).max() < CLOSEST:
            residual_N = positive_N - expit(x_N2 @ beta)
            part_2N = np.linalg.solve(hessian, (x_N2 * residual_N[:, None]).T)
            return beta, np.asarray(len(x_N2) * part_2N.T, np.float64)
    return none


def find_net_benefit(score_N: Floats, positive_N: Bools, thresholds: Sequence[float]) -> Floats:
    """Return the net benefit at each probability threshold t: (true positives - false positives * t / (1 - t)) / N.

    Vickers and Elkin 2006, "Decision curve analysis", Medical Decision Making 26(6).
    """
    t_T = np.asarray(thresholds, float)
    called_TN = score_N >= t_T[:, None]
    right, wrong = (called_TN & positive_N).sum(axis=1), (called_TN & ~positive_N).sum(axis=1)
    benefit: Floats = (right - wrong * t_T / (1 - t_T)) / len(score_N)
    return benefit


@dataclass(frozen=True, kw_only=True, eq=False)
class SurvivalCurve:
    """Share of patients without an event after each time of an event, and its 95 % interval ``low`` to ``high``.

    ``time [T]`` ascends; ``at_risk [T]``: patients under observation just before it; ``end``: the last observation.
    """

    time: Floats
    share: Floats
    low: Floats
    high: Floats
    at_risk: Ints
    end: float


def estimate_survival(time_N: Floats, event_N: Bools) -> SurvivalCurve:
    """Return the product-limit estimate of survival (Kaplan and Meier 1958, doi:10.1080/01621459.1958.10501452).

    The patients (at least one) have a ``time [N]`` to an event, where ``event [N]`` is true, or to the end of
    observation; one whose observation ends at the time of an event is still at risk then. The interval is symmetric for
    the logarithm of the cumulative hazard, with Greenwood's variance (Kalbfleisch and Prentice 2002, section 1.4); it
    is NaN while the share is 1 or 0.
    """
    time_T = np.unique(time_N[event_N])
    ordered_N = np.sort(time_N)
    at_risk_T = len(ordered_N) - np.searchsorted(ordered_N, time_T, side="left")
    events_T = np.bincount(np.searchsorted(time_T, time_N[event_N]), minlength=len(time_T))
    share_T = np.cumprod(1 - events_T / at_risk_T, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance_T = np.cumsum(events_T / (at_risk_T * (at_risk_T - events_T)))
        spread_T = QUANTILE * np.sqrt(variance_T) / np.log(share_T)
        low_T, high_T = share_T ** np.exp(-spread_T), share_T ** np.exp(spread_T)
    end = float(ordered_N[-1])
    return SurvivalCurve(time=time_T, share=share_T, low=low_T, high=high_T, at_risk=at_risk_T, end=end)
