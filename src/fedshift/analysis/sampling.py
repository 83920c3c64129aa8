"""Variance of a metric's difference over test samples, from both methods' results on the same samples.

Every metric here is, to first order, a sum over strata of weighted means, ``sum_k w_k mean_{i in k} x_i``:

* accuracy exactly, with x the hits; balanced accuracy with a stratum and w = 1/K for each class;
* a ratio of sums R = sum(a) / sum(b), such as Dice, by the delta method, with ``x_i = n (a_i - R b_i) / sum(b)``;
* the area under the ROC curve with a stratum for each class, and the placements of DeLong, DeLong and Clarke-Pearson
  1988 (Biometrics 44(3)).

For two methods, d_i is the difference of their x_i on the same sample, averaged over seeds and, where clients share a
test set, summed over clients with the weights of the macro mean. The variance is ``sum_k w_k^2 S^2(d) / n_k``, with the
sample variance S^2 of d in the stratum (for hits of one seed, that of McNemar's discordant pairs). Hits have half a
sample more in each of McNemar's four cells, so that few discordant samples still have an error (Agresti and Min 2005,
"Simple improved confidence intervals for comparing matched proportions", Statistics in Medicine 24(5)). Degrees of
freedom are Satterthwaite's (1946, Biometrics Bulletin 2(6)) over strata.

Samples of one group (a patient) are not independent. The contributions ``w_k (d_i - mean_k) / n_k`` of its samples are
therefore summed, and the variance of G groups is ``G / (G - 1)`` times the sum of squares of these sums, with G - 1
degrees of freedom (Liang and Zeger 1986, "Longitudinal data analysis using generalized linear models", Biometrika
73(1); for areas, Obuchowski 1997, "Nonparametric analysis of clustered ROC curve data", Biometrics 53(2)), but at least
that of independent samples.

Seeds share the test samples, so their number does not reduce this variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FREE = 1e9
"""Degrees of freedom of a variance without uncertainty."""


@dataclass(frozen=True, kw_only=True)
class SampleVariance:
    """Variance of a difference over test samples, with its degrees of freedom.

    ``paired``: whether both methods have results on the same samples; otherwise their errors count as independent.
    ``differing``: number of samples, or groups, on which their results differ; None: a few would have an error, too.
    """

    variance: float
    freedom: float = FREE
    paired: bool = False
    differing: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleValues:
    """Values ``x [N]`` of a metric on N samples, the stratum of each, int64 ``[N]``, and the weight of each stratum.

    ``bounded``: values are 0 or 1. ``fewest``: samples of the rarest class, or events, where the metric needs them.
    ``group``: group of each sample, numbered from 0, int64 ``[N]``; None: each is one by itself.
    """

    x: Floats
    stratum: NDArray[np.int64]
    weight: Floats
    bounded: bool
    fewest: int
    group: NDArray[np.int64] | None = None

    @property
    def units(self) -> int:
        """Number of groups, or of samples where there are none."""
        return len(self.x) if self.group is None else len(np.unique(self.group))


def mean_values(x_N: NDArray[np.generic], *, bounded: bool = False) -> SampleValues:
    """Return the values of the mean of ``x_N``."""
    stratum = np.zeros(len(x_N), np.int64)
    return SampleValues(x=np.asarray(x_N, float), stratum=stratum, weight=np.ones(1), bounded=bounded, fewest=len(x_N))


def ratio_values(a_NK: NDArray[np.generic], b_NK: NDArray[np.generic], scale: float = 1.0) -> SampleValues:
    """Return the values of the mean over columns of sum(a) / sum(b), of the columns with a sum of b above 0."""
    a_NK, b_NK = np.asarray(a_NK, float), np.asarray(b_NK, float)
    total_K = b_NK.sum(axis=0)
    a_NK, b_NK, total_K = a_NK[:, total_K > 0], b_NK[:, total_K > 0], total_K[total_K > 0]
    if not len(total_K):
        return mean_values(np.full(len(a_NK), math.nan))
    ratio_K = a_NK.sum(axis=0) / total_K
    return mean_values(scale * len(a_NK) * ((a_NK - ratio_K * b_NK) / total_K).mean(axis=1))


def class_values(x_N: NDArray[np.generic], truth_N: NDArray[np.generic], *, mean: bool) -> SampleValues:
    """Return values with a stratum for each class; ``mean``: of the mean over classes of hits, else of the sum."""
    classes, stratum_N, count_K = np.unique(truth_N, return_inverse=True, return_counts=True)
    weight, stratum = np.full(len(classes), 1 / len(classes) if mean else 1.0), stratum_N.astype(np.int64)
    return SampleValues(
        x=np.asarray(x_N, float), stratum=stratum, weight=weight, bounded=mean, fewest=int(count_K.min(initial=0))
    )


def difference_variance(
    d_N: Floats,
    stratum_N: NDArray[np.int64],
    weight_K: Floats,
    most_K: Floats | None = None,
    group_N: NDArray[np.int64] | None = None,
) -> SampleVariance:
    """Return the variance of ``sum_k w_k mean_{i in k} d_i`` over samples; NaN if a stratum has a single sample.

    Args:
        d_N: Differences.
        stratum_N: Stratum of each sample; each stratum has at least one.
        weight_K: Weight of each stratum.
        most_K: For hits, the largest absolute difference in each stratum, for Agresti and Min's correction.
        group_N: Group of each sample, from 0; None: each is one by itself.

    """
    count_K: Floats = np.bincount(stratum_N, minlength=len(weight_K)).astype(np.float64)
    sum_K = np.bincount(stratum_N, weights=d_N, minlength=len(weight_K))
    square_K = np.bincount(stratum_N, weights=np.square(d_N), minlength=len(weight_K))
    if most_K is None:
        if count_K.min(initial=2) < 2:
            return SampleVariance(variance=math.nan, paired=True)
        center_K = (sum_K / count_K)[stratum_N]
        spread_K = np.bincount(stratum_N, weights=np.square(d_N - center_K), minlength=len(weight_K))
        each_K = weight_K**2 * spread_K / (count_K * (count_K - 1))
        free_K = count_K - 1
    else:
        more_K = count_K + 2
        each_K = weight_K**2 * (square_K + most_K**2 - sum_K**2 / more_K) / more_K**2
        free_K = more_K - 1
    variance = float(each_K.sum())
    freedom = variance**2 / float((each_K**2 / free_K).sum()) if variance else FREE
    if group_N is not None and (groups := len(np.unique(group_N))) < len(d_N):
        if groups < 2:
            return SampleVariance(variance=math.nan, paired=True)
        part_N = (weight_K / count_K)[stratum_N] * (d_N - (sum_K / count_K)[stratum_N])
        together = float(np.square(np.bincount(group_N, weights=part_N)).sum()) * groups / (groups - 1)
        variance, freedom = max(variance, together), min(freedom, groups - 1.0)
    differing = None
    if most_K is None:
        differs_N = np.abs(d_N) > 1e-12 * np.abs(d_N).max(initial=0.0)
        differing = len(np.unique(group_N[differs_N])) if group_N is not None else int(differs_N.sum())
    return SampleVariance(variance=variance, freedom=freedom, paired=True, differing=differing)
