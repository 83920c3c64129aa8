"""Judgments of whether values of clients, or samples given to a model, are far from the training data's."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping, Sequence
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
from .usual_values import LOOKED_AT, PIECE, SCALE_RATIO, UNIT_RATIO, Floats, UsualValues

MOST = 50
"""Maximum number of clients to compare with all others, each; with more, each is compared with all."""
OWN_SCALE = (
    "each client is scaled by its own samples, so that another unit alone changes nothing: check that they measure the "
    "same"
)
FIX = "give them in the unit and on the scale of the training data, since the predictions may be wrong"


class FarValues(UserWarning):
    """Samples given to a model are far from its training data."""


def warn_far(preparation: Preparation, x: Tensor) -> None:
    """Issue a :class:`FarValues` warning if samples ``x``, as :meth:`Preparation.store` returns them, are far.

    It names the first line of code on the stack that is neither fedshift's nor torch's.
    """
    if found := preparation.describe_far(x):
        text = f"values are far from the training data's: {join_some(found, '; ')}; {FIX}"
        level, frame = 1, inspect.currentframe()
        while frame and frame.f_globals["__name__"].partition(".")[0] in ("fedshift", "torch"):
            level, frame = level + 1, frame.f_back
        warnings.warn(FarValues(text), stacklevel=level)


def measure_training(data: Federation, newcomers: Collection[str] = ()) -> UsualValues | None:
    """Return the usual values of the training samples of all clients but ``newcomers``; None if none are known."""
    clients = [client for client in data.clients if client.name not in newcomers and len(client.train)]
    found = [(measure_client(client, data.columns), len(client.train)) for client in clients if not data.inputs]
    parts, counts = [usual for usual, _ in found if usual], [count for usual, count in found if usual]
    return UsualValues.pool(parts, counts) if parts and len({len(part.mean) for part in parts}) == 1 else None


def measure_client(
    client: ClientData, columns: Sequence[Column] = (), measured: tuple[Floats, Floats] | None = None
) -> UsualValues | None:
    """Return the usual values of a client's stored training samples, before scaling; None of tokens.

    A scaling states them; else they are ``measured``, mean and standard deviation of each feature, by default on at
    most :data:`~fedshift.data.usual_values.LOOKED_AT` samples.
    """
    split, scaling = client.train, client.train.normalization
    if isinstance(scaling, FeatureScaling) and (usual := scaling.find_usual(columns)):
        return usual
    if is_whole(split.store):
        return None
    if measured is None:
        found = [UsualValues.measure(x.cpu().numpy()) for x in _sample(split)]
        usual = UsualValues.pool(found, [1] * len(found))
        measured = usual.mean, usual.std
    mean, std = measured
    if isinstance(scaling, FeatureScaling):
        return UsualValues(mean=np.where(find_numeric(columns) if columns else True, mean, np.nan), std=std)
    signed = split.dtype != torch.uint8 and client.decoding.kind in ("integer", "real", "volume")
    factor = UNIT_RATIO if len(split.shape) == 1 else SCALE_RATIO
    return UsualValues(mean=mean, std=std, floor=-1.0 if signed else 0.0, factor=factor)


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


def judge_clients(data: Federation, measured: Mapping[str, tuple[Floats, Floats]]) -> dict[str, list[str]]:
    """Return how the training values of each client are far from all others', in words; empty for most federations.

    ``measured``: by client, mean and standard deviation of each feature of its stored training samples. Of two clients,
    only the second is named.
    """
    found = {c.name: measure_client(c, data.columns, measured[c.name]) for c in data.clients if c.name in measured}
    known = {name: usual for name, usual in found.items() if usual}
    if len(known) < 2 or len({len(usual.mean) for usual in known.values()}) > 1:
        return {}
    counts = {client.name: len(client.train) for client in data.clients}
    told: dict[str, list[str]] = {}
    for name in list(known)[len(known) == 2 :]:
        others, client = [other for other in known if other != name or len(known) > MOST], data.client(name)
        usual = UsualValues.pool([known[other] for other in others], [counts[other] for other in others])
        count = counts[name] * prod(client.train.shape[1:])
        if apart := usual.list_apart(known[name], count, "at all others"):
            told[name] = data.describe_client(client).preparation.name_features(apart)
    return told
