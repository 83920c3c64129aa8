"""Whether the values of clients, or samples given to a model, are far from the training data's."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..utils.words import join_some
from .columns import Column
from .federation import ClientData, Federation
from .preparation import FeatureScaling, Preparation, find_numeric
from .samples import Samples, is_whole
from .usual_values import LOOKED_AT, PIECE, SCALE_RATIO, UNIT_RATIO, UsualValues

OWN_SCALE = (
    "each client is scaled by its own samples, so that another unit alone changes nothing: check that they measure the "
    "same"
)
FIX = "give them in the unit and on the scale of the training data, since the predictions may be wrong"


class FarValues(UserWarning):
    """Samples given to a model are far from its training data."""


def warn_far(preparation: Preparation, x: Tensor, above: int) -> None:
    """Issue a :class:`FarValues` warning if samples ``x``, as :meth:`Preparation.store` returns them, are far.

    ``above``: number of calls between the user's and this one.
    """
    if found := preparation.describe_far(x):
        text = f"values are far from the training data's: {join_some(found, '; ')}; {FIX}"
        warnings.warn(FarValues(text), stacklevel=above + 2)


def measure_training(data: Federation, newcomers: Collection[str] = ()) -> UsualValues | None:
    """Return the usual values of the training samples of all clients but ``newcomers``; None if none are known."""
    clients = [client for client in data.clients if client.name not in newcomers and len(client.train)]
    found = [(measure_client(client, data.columns), len(client.train)) for client in clients if not data.inputs]
    parts, counts = [usual for usual, _ in found if usual], [count for usual, count in found if usual]
    return UsualValues.pool(parts, counts) if parts and len({len(part.mean) for part in parts}) == 1 else None


def measure_client(client: ClientData, columns: Sequence[Column] = ()) -> UsualValues | None:
    """Return the usual values of a client's stored training samples, before scaling; None of tokens.

    A scaling states them; else they are measured, on at most :data:`~fedshift.data.usual_values.LOOKED_AT` samples.
    """
    split, scaling = client.train, client.train.normalization
    if isinstance(scaling, FeatureScaling) and (usual := scaling.find_usual(columns)):
        return usual
    if is_whole(split.store):
        return None
    rows = len(split.shape) == 1
    unit = UNIT_RATIO if rows else SCALE_RATIO
    signed = split.dtype != torch.uint8 and client.decoding.kind in ("integer", "real", "volume")
    found = [UsualValues.measure(x.cpu().numpy(), floor=-1.0 if signed else 0.0, factor=unit) for x in _sample(split)]
    usual = UsualValues.pool(found, [1] * len(found))
    if columns and isinstance(scaling, FeatureScaling):
        usual = replace(usual, mean=np.where(find_numeric(columns), usual.mean, np.nan))
    return usual


def _sample(split: Samples) -> list[Tensor]:
    """Return some stored samples, evenly spaced: together if they are in memory, else one by one."""
    if split.lazy and not split.patches:
        return list(split.probe())
    count = max(1, min(LOOKED_AT, len(split), 4 * PIECE // max(1, split.nbytes_each)))
    rows = np.unique(np.linspace(0, len(split) - 1, count).astype(np.int64))
    if split.patches:
        return [split.read_case(int(row))[0] for row in rows]
    return [split.copy_rows(torch.from_numpy(rows).to(split.y.device))]


def judge_newcomers(new: Federation, data: Federation, newcomers: Collection[str] = ()) -> list[str]:
    """Return a sentence on each client of ``new`` whose values are far from the training data's."""
    trained, said = measure_training(data, newcomers), []
    if trained is None:
        return []
    first = data.describe_client(data.clients[0]).preparation
    scaled = replace(trained, mean=0 * trained.mean, std=np.ones(len(trained.mean)))
    for client in new.clients:
        scaling, own = client.train.normalization, measure_client(client, new.columns)
        elsewhere = isinstance(first.scaling, FeatureScaling) and not isinstance(scaling, FeatureScaling)
        usual = scaled if elsewhere else trained  # arrays for a table's network were scaled before
        if own is None or len(own.mean) != len(usual.mean):
            continue
        if found := first.name_features(usual.list_apart(own, len(client.train) * prod(client.train.shape[1:]))):
            far, fix = join_some(found, "; "), OWN_SCALE if scaling.find_usual(new.columns) else FIX
            said.append(f"client {client.name!r}: values are far from the training data's: {far}; {fix}")
    return said
