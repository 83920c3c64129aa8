"""A new site's data, prepared like a run's own: image size, channels, scale, labels; and its overlap with the run."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.spec import DataSpec
from ..data.agreement import check_scales
from ..data.federation import PLURALS, ClientData, Federation
from ..data.files.image_decoding import SUFFIXES
from ..data.files.image_store import ImageFile, cache_entry, decode_all, describe_headers, inspect_all, load_store
from ..data.files.images import SizesDiffer
from ..data.files.read_options import Progress
from ..data.files.table_schema import Column
from ..data.formats import open_arrays
from ..data.readers._objects import holds_hub_datasets, holds_tables
from ..data.samples import Samples, is_whole, map_store, to_samples
from ..data.sources import READ, load_source, normalize
from ..experiments.experiment import Experiment
from ..tasks import Classification
from ..utils.errors import Ref, UsageError
from ..utils.files import cache_directory


def load_site(
    data: object,
    spec: DataSpec,
    run: Federation,
    clients: str | None = None,
    progress: Progress | None = None,
) -> Federation:
    """Load the clients of ``data``, given as for ``--data`` or as objects, as samples of the run's kind.

    ``spec``: the run's settings for reading files; its split, samples and validation apply to the run only.
    ``clients``: names or patterns; None: all. Raises :class:`UsageError` naming both if shapes or classes differ.
    """
    own: dict[str, Any] = {}
    read = Path(data).exists() if isinstance(data, str) else holds_tables(data) or holds_hub_datasets(data)
    if not read:  # settings for the run's files do not apply to data by name, nor to arrays
        own = {field.name: field.default for field in fields(DataSpec) if field.name in READ or field.name == "task"}
    asked = replace(spec, domains=clients, split=None, samples=None, validation=0.0, classes=None, **own)
    try:
        found = load_source(data, asked, progress, like=run)
    except SizesDiffer:
        if len(run.sample_shape) != 3:
            raise
        size = run.sample_shape[-1]
        found = load_source(data, replace(asked, image_size=size), progress, like=run)
        said = f"images of several sizes are resized to the run's {size} x {size} pixels"
        found = replace(found, notices=(*found.notices, said))
    return prepare_clients(found, run, own_scale=spec.normalize == "client")


def load_unlabeled(
    path: Path, spec: DataSpec, run: Federation, progress: Progress | None = None, notices: list[str] | None = None
) -> Samples:
    """Load samples without labels as samples of the run's kind, from a folder of images or array ``x`` of an .npz file.

    Images may be in subfolders. Every target of the result is 0 and has no meaning. ``notices`` receives a sentence if
    unreadable images are left out. Raises :class:`UsageError` as :func:`load_site` does.
    """
    x = _read_array(path) if path.suffix == ".npz" else _read_images(path, spec, run, progress, notices)
    x = x.with_targets(run.task.make_blank_targets(len(x), x.shape, run.classes))
    only = ClientData(name=client_name(path), train=x, test=x)
    data = Federation(name=str(path), clients=(only,), classes=run.classes, task=run.task)
    return prepare_clients(data, run, own_scale=spec.normalize == "client").clients[0].train


def client_name(path: Path) -> str:
    """Return the name of the client whose unlabeled samples are in ``path``."""
    return path.stem if path.suffix == ".npz" else path.resolve().name


def prepare_clients(data: Federation, run: Federation, *, own_scale: bool = False) -> Federation:
    """Convert ``data`` to the shape, scale and labels of the ``run``'s data, and check them.

    ``own_scale``: each client of the run was scaled by its own training images, and so are these. Raises
    :class:`UsageError` naming both if shapes, classes or scales do not match.
    """
    _require_columns(data, run)
    shape, square = run.sample_shape, run.sample_shape[1:2] == run.sample_shape[2:]
    images = len(shape) == len(data.sample_shape) == 3
    data = data.fit_images(shape[1] if images and square else None)
    if (data.sample_shape[:1], shape[:1], len(shape)) == ((1,), (3,), 3):
        data = data.map_splits(
            lambda split: split.with_samples(map_store(split.store, lambda x: x.expand(-1, 3, -1, -1)))
        )
    for client in data.clients:
        for name, split in client.splits.items():
            if split.shape != shape:
                raise UsageError(
                    f"{data.name}, client {client.name!r}, {name} data: samples of shape {split.shape}, but the run "
                    f"was trained on {run.name} with samples of shape {shape}: bring them to that shape"
                )
    data = map_labels(data, run, f"the run's data, {run.name},")
    data = _match_scale(data, run)
    if len(shape) == 3:
        scales = {client.train.normalization for client in run.clients}
        data = normalize(data, "client") if own_scale or len(scales) > 1 else data.normalize(scales.pop())
    return data.check(allow_single_class=True)


def _require_columns(data: Federation, run: Federation) -> None:
    """Refuse tables with other columns or categories than the run's, or in another order."""
    if data.columns and run.columns and data.columns != run.columns:
        pairs = zip_longest(data.columns, run.columns)
        ours, theirs = next((ours, theirs) for ours, theirs in pairs if ours != theirs)
        raise UsageError(
            f"{data.name} lacks the columns and categories of the run's data, {run.name}, in their order: first "
            f"{_describe_column(ours)} where the run has {_describe_column(theirs)}. Read it by those of the run: "
            "read_folder(..., like=data of the run)"
        )


def _describe_column(column: Column | None) -> str:
    """Describe a column in errors, with its categories."""
    if column is None:
        return "nothing"
    return repr(column.name) if column.categories is None else f"{column.name!r} ({', '.join(column.categories)})"


def _match_scale(data: Federation, run: Federation) -> Federation:
    """Return ``data``, with integers as floats if the run's samples are; refuse samples of another scale."""
    whole = is_whole(run.clients[0].train.store)
    if not whole:
        data = data.map_splits(
            lambda split: split.with_samples(map_store(split.store, Tensor.float)) if is_whole(split.store) else split
        )
    theirs = {f"the run's {where}": split for where, split in run.named_splits().items() if len(split)}
    ours = {f"{data.name}, {where}": split for where, split in data.named_splits().items()}
    for where, split in ours.items():
        if whole and not is_whole(split.store):
            raise UsageError(f"{where}: {split.dtype} where the run has whole numbers, such as tokens: give those")
    scales = [split.normalization for split in theirs.values()]
    ours = {where: split.with_samples(split.store, scales[0]) for where, split in ours.items()}
    check_scales(theirs | ours, run.sample_shape)
    return data


def map_labels(data: Federation, run: Federation, whose: str) -> Federation:
    """Map the labels of ``data`` to the run's classes: by name if both have names, else as numbers.

    ``whose``: the owner of the run's classes, for errors. Raises :class:`UsageError` for a class that it lacks.
    """
    ours, theirs = data.meanings, run.meanings
    if data.task.name != run.task.name:
        raise UsageError(f"{data.name} is for {data.task}, and {whose} for {run.task}: give targets of that kind")
    if data.task != run.task:  # not yet as the networks learn them
        data = replace(data.map_splits(lambda split: split.with_targets(run.task.encode(split.y))), task=run.task)
    if not isinstance(run.task, Classification):
        if (data.classes, ours) != (run.classes, theirs) and not (data.classes == run.classes and not ours):
            raise UsageError(
                f"{data.name} has {data.classes} {PLURALS[run.task.output]} {', '.join(ours)}, and {whose} "
                f"{run.classes} {', '.join(theirs)}: give the same, in the same order"
            )
    elif ours and theirs:
        for name in ours:
            if name not in theirs:
                raise UsageError(
                    f"{data.name} has a class {name!r}, which is not among those of {whose} {', '.join(theirs)}: "
                    "leave it out, or rename it"
                )
        number = torch.tensor([theirs.index(name) for name in ours])
        data = data.map_splits(lambda split: split.relabel(number))
    elif data.classes > run.classes:
        raise UsageError(
            f"{data.name} has labels up to {data.classes - 1}, but the classes of {whose} are {run.classes}: leave "
            "the others out, or number them alike"
        )
    return replace(data, classes=run.classes, class_names=run.class_names)


def _read_array(path: Path) -> Samples:
    try:
        with open_arrays(path) as packed:
            if "x" not in packed:
                raise UsageError(f"{path} has no array 'x' (it has {', '.join(packed) or 'none'}): name the samples x")
            return to_samples(packed["x"], np.zeros(len(packed["x"]), np.int64), str(path))
    except (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{path} cannot be read as arrays ({error}): write it with numpy.savez(file, x=samples)"
        ) from error


def _read_images(
    path: Path, spec: DataSpec, run: Federation, progress: Progress | None, notices: list[str] | None
) -> Samples:
    """Read the images in folder ``path`` and below it, decoded once as those of clients are."""
    wanted = "give a folder of images, or an .npz file with an array x"
    if not path.is_dir():
        raise UsageError(f"{path} is no folder: {wanted}")
    if len(run.sample_shape) != 3:
        raise UsageError(f"{path}: the run was trained on samples of shape {run.sample_shape}, not on images: {wanted}")
    below = {file.relative_to(path): file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES}
    found = {name: below[name] for name in sorted(below) if not any(part[0] == "." for part in name.parts)}
    if not found:
        raise UsageError(f"{path} holds no image ({', '.join(sorted(SUFFIXES))}): {wanted}")
    files = [ImageFile(str(n), "", "", f.stat().st_size, f.stat().st_mtime_ns) for n, f in found.items()]
    headers, broken = inspect_all(path, files, "headers", progress)
    kinds = sorted({header.kind for header in headers.values()})
    if len(kinds) > 1:
        raise UsageError(f"{path} has images of different depth, {kinds[0]} and {kinds[1]}: convert all to one")
    sizes = {(header.height, header.width) for header in headers.values()}
    size = (spec.image_size,) * 2 if spec.image_size else sizes.pop() if len(sizes) == 1 else run.sample_shape[1:]
    entry = cache_entry(cache_directory(), path, files, "unlabeled", size)
    facts = describe_headers(headers, broken, *size)

    def list_usable(broken: Collection[str]) -> dict[str, list[int]]:
        return {"train": [row for row, file in enumerate(files) if file.path not in broken]}

    store = load_store(entry) or decode_all(path, files, facts, entry, list_usable, "images", progress)
    unread = store.facts.broken
    if unread:
        file, why = next(iter(unread.items()))
        said = f"{len(unread)} of {len(files)} images in {path} cannot be read: {file}: {why}"
        if spec.on_unreadable == "refuse" or len(unread) == len(files):
            raise UsageError(f"{said}; remove them, or leave them out ({{}})", Ref(on_data_error="warn"))
        if notices is not None:
            notices.append(f"{said}; left out")
    rows = torch.tensor(list_usable(unread)["train"])
    return Samples(x=torch.from_numpy(store.pixels), y=torch.zeros(len(rows), dtype=torch.int64), rows=rows)


def find_overlap(data: Federation, experiment: Experiment) -> list[str]:
    """Return sentences on the clients of ``data`` that share samples with a training client, whatever their labels.

    Stored samples are compared value by value, training, validation and test data alike.
    """
    trained = [client for client in experiment.data.clients if client.name not in experiment.settings.newcomers]
    owner = {key: client.name for client in trained for key in _sample_keys(client)}
    said = []
    for client in data.clients:
        keys = set(_sample_keys(client))
        if found := Counter(owner[key] for key in keys if key in owner):
            whose, count = found.most_common(1)[0][0], found.total()
            share = "its samples" if count == len(keys) else f"{count:,} of its {len(keys):,} samples"
            said.append(f"client {client.name!r} is not unknown: the run has {share}, as client {whose!r}")
    return said


def _sample_keys(client: ClientData) -> Iterator[bytes]:
    """Yield a 128-bit digest of each sample."""
    for split in client.splits.values():
        for piece in split.pieces():
            for sample in split.copy_rows(piece).cpu().contiguous().numpy():
                yield blake2b(sample, digest_size=16).digest()
