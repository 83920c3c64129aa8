"""Clients that join others: converted to the shape, scale and labels of the others' schema, or refused."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..tasks import Classification
from ..utils.errors import UsageError
from ..utils.words import join_some
from .agreement import name_scales, refuse_other_scales
from .federation import PLURALS, Federation
from .identity import match_name
from .inputs import require_layout
from .preparation import HALF, Normalization
from .samples import is_whole, map_store
from .schema import Layout, Schema


def join_schema(data: Federation, schema: Schema) -> Federation:
    """Convert ``data`` to the shape, scale and labels of a run's ``schema``, and check them.

    Where the scaling of ``schema`` is fitted to each client, so it is here, to the training images. Raises
    :class:`UsageError` naming both if shapes, columns, classes or scales do not match.
    """
    whose = f"the run's data, {schema.name},"
    if data.columns:  # else arrays, prepared elsewhere
        schema.require_columns(data, whose)
    require_layout(data.inputs, schema.preparation.inputs, data.name, whose.removesuffix(","))
    shape = schema.preparation.shape
    if schema.preparation.patched:
        data = data.cut_patches(shape[1:])
    size = schema.preparation.resized if schema.preparation.patched else shape[1:]
    images = len(shape) == len(data.sample_shape) == 3
    data = data.fit_images(size[0] if images and size and size[0] == size[1] else None)
    if (data.sample_shape[:1], shape[:1], len(shape)) == ((1,), (3,), 3):
        data = data.map_splits(lambda split: split.replace(x=map_store(split.store, lambda x: x.expand(-1, 3, -1, -1))))
    for where, split in data.named_splits().items():
        if split.shape != shape:
            raise UsageError(
                f"{data.name}, {where}: samples of shape {split.shape}, but the run was trained on {schema.name} with "
                f"samples of shape {shape}: bring them to that shape"
            )
    data = _match_scale(match_labels(data, schema, whose), schema)
    scaling = schema.preparation.scaling
    if isinstance(scaling, Normalization):
        data = data.normalize_clients() if scaling.fitted else data.normalize(scaling)
    return data.check(allow_single_class=True)


def _match_scale(data: Federation, schema: Schema) -> Federation:
    """Return ``data``, with integers as floats if ``schema`` has floats; refuse samples of another scale."""
    preparation = schema.preparation
    for where, split in data.named_splits().items():
        if preparation.is_whole and not is_whole(split.store):
            held = f"{data.name}, {where}: {split.dtype}"
            raise UsageError(f"{held} where the run has whole numbers, such as tokens: give those")
    if not preparation.is_whole:
        data = data.map_splits(
            lambda split: split.replace(x=map_store(split.store, Tensor.float)) if is_whole(split.store) else split
        )
    if preparation.inputs:
        return data
    ours = {f"{data.name}, {where}": split for where, split in data.named_splits().items()}
    theirs = {f"the run's {'other ' * at}data": kind for at, kind in enumerate(preparation.values)}
    refuse_other_scales(theirs | name_scales(ours), preparation.shape, half=preparation.scaling == HALF)
    return data


def match_labels(data: Federation, layout: Layout, whose: str) -> Federation:
    """Map the labels of ``data`` to the classes of ``layout``: by name if both have names, else as numbers.

    ``whose``: the owner of those classes, for errors. Raises :class:`UsageError` for a class that it lacks.
    """
    ours, theirs, task = data.meanings, layout.meanings, layout.task
    if data.task.name != task.name:
        raise UsageError(f"{data.name} is for {data.task}, and {whose} for {task}: give targets of that kind")
    if data.task != task:  # not yet as the networks learn them
        data = replace(data.map_splits(lambda split: split.replace(y=task.encode(split.y))), task=task)
    if not isinstance(task, Classification):
        if (data.classes, ours) != (layout.classes, theirs) and not (data.classes == layout.classes and not ours):
            raise UsageError(
                f"{data.name} has {data.classes} {PLURALS[task.output]} {', '.join(ours)}, and {whose} "
                f"{layout.classes} {', '.join(theirs)}: give the same, in the same order"
            )
    elif ours and theirs:
        matched = {name: match_name(name, theirs) for name in ours}
        for name, match in matched.items():
            if match is None:
                raise UsageError(
                    f"{data.name} has a class {name!r}, which is not among the classes of {whose} {', '.join(theirs)}: "
                    "leave it out, or rename it"
                )
        number = torch.tensor([theirs.index(match) for match in matched.values() if match is not None])
        data = data.map_splits(lambda split: split.replace(y=number[split.y]))
        respelled = [f"{name!r} is read as {match!r}" for name, match in matched.items() if match != name]
        if respelled:
            told = f"{data.name}: classes are spelled as in {whose.removesuffix(',')}: {join_some(respelled)}"
            data = replace(data, notices=(*data.notices, told))
    elif data.classes > layout.classes:
        raise UsageError(
            f"{data.name} has labels up to {data.classes - 1}, but the classes of {whose} are {layout.classes}: leave "
            "the others out, or number them alike"
        )
    return replace(data, classes=layout.classes, class_names=layout.class_names)
