"""How finely a metric is measured: the grid that counts lie on, and how much another test sample would change it.

Both are variances of the value in one row of records, which follow from its counts alone.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd


def grid_variance(rows: pd.DataFrame, metric: str) -> np.ndarray:
    """Variance h^2 / 12 of a uniform error within one step h of the grid that ``metric`` lies on, for each row.

    A step is one sample: 1/n of accuracy; of balanced accuracy 1/n_k of the recall of class k, weighted by 1/K; of AUC
    one pair, 1 / (n_k (n - n_k)) for each class k against the rest, likewise averaged. Loss is continuous: 0.
    """
    if metric == "loss" or rows.empty:
        return np.zeros(len(rows))
    support_NK = np.array(rows["support"].tolist(), dtype=float)
    n_N1 = support_NK.sum(axis=1, keepdims=True)
    if metric == "accuracy":
        return np.asarray(1 / (12 * n_N1[:, 0] ** 2))
    present_NK = support_NK > 0
    rest_NK = n_N1 - support_NK if metric == "auc" else np.ones_like(support_NK)
    squares_NK = (
        np.divide(1, support_NK * rest_NK, out=np.zeros_like(support_NK), where=present_NK & (rest_NK > 0)) ** 2
    )
    return np.asarray(squares_NK.sum(axis=1) / (12 * present_NK.sum(axis=1) ** 2))


def sampling_variance(rows: pd.DataFrame, metric: str) -> np.ndarray:
    """Variance of ``metric`` over test samples of the same size, for each row; NaN for AUC and loss, which counts lack.

    That of a parametric bootstrap, in closed form: hits redrawn as Binomial(n, p) give the accuracy a variance of
    p (1 - p) / n, and balanced accuracy the sum of that over classes over K^2. p is (hits + 1/2) / (n + 1), so that all
    right is not without error (Brown, Cai and DasGupta 2001, "Interval Estimation for a Binomial Proportion").
    """
    if metric not in ("accuracy", "balanced_accuracy") or rows.empty:
        return np.full(len(rows), math.nan)
    hits_NK, n_NK = (np.array(rows[name].tolist(), dtype=float) for name in ("hits", "support"))
    if metric == "accuracy":
        hits_NK, n_NK = hits_NK.sum(axis=1, keepdims=True), n_NK.sum(axis=1, keepdims=True)
    p_NK, present_NK = (hits_NK + 0.5) / (n_NK + 1), n_NK > 0
    each_NK = np.divide(p_NK * (1 - p_NK), n_NK, out=np.zeros_like(n_NK), where=present_NK)
    return np.asarray(each_NK.sum(axis=1) / present_NK.sum(axis=1) ** 2)
