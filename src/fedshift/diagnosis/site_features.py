"""Simple features of patients: statistics of colors and intensities, small pictures, columns; and their targets.

A row is a patient (a group of samples), or a sample where none are known: the mean over its samples, which are not
independent. Copies of a sample at a site are one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..data.copies import MANY_NUMBERS
from ..data.federation import ClientData, Federation
from ..tasks import find_kind
from ..utils.random_streams import key_bits, stream

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GRID = 16
"""Approximate number of pixels of a channel in a small picture: 16, 4 x 4, or 3 x 3 x 3."""
MOST_COLUMNS = 256
"""Features beyond this number have no squares, and are reduced to as many principal components."""
MOST_STRATA, ROWS_IN_STRATUM = 10, 40
"""Largest number of groups of similar targets that are not classes, and rows for each."""


class SiteRows(NamedTuple):
    """Features ``x`` and ``targets`` ``[N, columns]`` of patients; their ``site`` and ``stratum``, from 0, ``[N]``.

    Rows of a stratum have similar targets: shares of classes (of a mask: of its pixels) or labels, or numbers with
    their squares. ``x`` is what is not linear in them, such as a sample's difference from its class, and its square,
    which shows spread; columns of a table are turned to their principal components before, to show correlation.
    """

    x: Floats
    targets: Floats
    site: Ints
    stratum: Ints


def read_rows(data: Federation, members: Sequence[ClientData], seed: int, most: int) -> SiteRows:
    """Return a row for each patient in at most ``most`` random training samples of each of ``members``.

    Raises :class:`~fedshift.utils.errors.FedshiftError` if a sample cannot be read.
    """
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LinearRegression
    from sklearn.preprocessing import StandardScaler

    state, kind, scale = key_bits(seed, "diagnose/rows") % 2**32, find_kind(data.task), StandardScaler().fit_transform
    samples = pd.concat([_read_samples(data, each, seed, most) for each in members], keys=range(len(members)))
    x, y = scale(samples["x"].to_numpy()), scale(samples["y"].to_numpy())
    if kind not in ("classification", "multilabel", "segmentation"):
        y = np.hstack([y, y**2])
    x -= LinearRegression().fit(y, x).predict(y)
    bases = x if x.shape[1] <= MOST_COLUMNS else x[:, :0]
    if len(data.sample_shape) == 1 and bases.size:
        bases = PCA(random_state=state).fit_transform(bases)
    rows = pd.DataFrame(np.hstack([y, x, bases**2]), index=samples.index).groupby(level=(0, 1)).mean()
    targets, x = np.split(scale(rows.to_numpy()), [y.shape[1]], axis=1)
    if x.shape[1] > 2 * MOST_COLUMNS:
        x = PCA(min(MOST_COLUMNS, *x.shape), random_state=state).fit_transform(x)
    strata = min(MOST_STRATA, max(1, len(x) // ROWS_IN_STRATUM), len(np.unique(targets.round(6), axis=0)))
    shares = samples["y"].groupby(level=(0, 1)).mean().to_numpy()
    clusters = KMeans(strata, n_init=4, random_state=state)
    stratum = shares.argmax(axis=1) if kind == "classification" else clusters.fit_predict(targets)
    return SiteRows(x, targets, rows.index.get_level_values(0).to_numpy(), stratum.astype(np.int64))


def _read_samples(data: Federation, client: ClientData, seed: int, most: int) -> pd.DataFrame:
    """Return features ``x`` and targets ``y`` of random training samples of ``client``, indexed by patient."""
    split = client.train
    order = stream(seed, "diagnose/samples", client.name).permutation(len(split))
    drawn = torch.from_numpy(np.sort(order[:most]))
    x = (
        torch.cat([_measure(split.read(drawn[piece])) for piece in split.pieces(len(drawn))])
        .double()
        .nan_to_num(0, 0, 0)
    )
    patient = split.units[drawn].numpy()
    if split.group is None and np.prod(split.whole_shape) >= MANY_NUMBERS:  # copies are equal in all features
        patient = np.unique(x.numpy().round(6), axis=0, return_inverse=True)[1].reshape(-1)
    y, kind = split.take_targets(drawn), find_kind(data.task)
    if kind == "classification":
        y = F.one_hot(y, data.classes)
    elif kind == "segmentation":
        counts = torch.stack([torch.bincount(mask, minlength=256)[: data.classes] for mask in y.flatten(1).int()])
        y = counts / counts.sum(dim=1, keepdim=True).clamp_min(1)
    frames = {"x": pd.DataFrame(x.numpy()), "y": pd.DataFrame(y.reshape(len(y), -1).double().numpy())}
    return pd.concat(frames, axis=1).set_index(pd.Index(patient))


def _measure(x: Tensor) -> Tensor:
    """Return statistics of each channel and a small picture of ``x`` ``[N, C, ...]``, or the columns of ``[N, D]``."""
    x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
    if x.ndim < 3:
        return x.reshape(len(x), -1)
    x = x if x.ndim < 6 else x.flatten(2)
    flat = x.flatten(2)
    steps = [x.diff(dim=axis).abs().flatten(2).mean(dim=2) for axis in range(2, x.ndim) if x.shape[axis] > 1]
    statistics = [flat.mean(dim=2), flat.std(dim=2, correction=0), flat.amin(dim=2), flat.amax(dim=2), *steps]
    pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[x.ndim - 3]
    small = pool(x, [min(round(GRID ** (1 / (x.ndim - 2))), side) for side in x.shape[2:]])
    return torch.cat([*statistics, small.flatten(1)], dim=1)
