"""A new site's data, prepared as a run's own were: size of images, channels, scale, and what labels mean."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base.errors import UsageError
from ..base.files import cache_directory
from ..config import DataSpec
from ..data.federation import ClientData, Federation
from ..data.files.decode import SUFFIXES
from ..data.files.image_store import Facts, ImageFile, decode_all, entry, inspect_all, kept
from ..data.files.reading import Progress
from ..data.split import Split, as_split, digest
from ..experiment import Experiment
from ..sources import READ, normalized, source_of


def site(
    data: str, spec: DataSpec, run: Federation, clients: str | None = None, progress: Progress | None = None
) -> Federation:
    """The clients of ``data``, which is what ``--data`` takes, as samples of the run's kind.

    ``spec``: the run's settings, by which files are read; its split, samples and validation are the run's own affair.
    ``clients``: names or patterns; None: all. Raises :class:`UsageError` naming both where shapes or classes differ.
    """
    own: dict[str, Any] = {}
    if not Path(data).exists():  # what was said of the run's files is not meant for data by name
        own = {field.name: field.default for field in fields(DataSpec) if field.name in READ}
    asked = replace(spec, domains=clients, split=None, samples=None, validation=0.0, classes=None, **own)
    size = run.sample_shape[-1] if len(run.sample_shape) == 3 else None
    return _prepared(source_of(data, asked, progress, size), spec, run)


def unlabeled(path: Path, spec: DataSpec, run: Federation, progress: Progress | None = None) -> Split:
    """Samples without labels as samples of the run's kind: a folder of images, or an .npz file with an array ``x``.

    Every label of the split is 0 and means nothing. Raises :class:`UsageError` as :func:`site` does.
    """
    x = _array(path) if path.suffix == ".npz" else _images(path, spec, run, progress)
    client = ClientData(name=path.stem, train=x, test=x)
    return _prepared(Federation(name=str(path), clients=(client,), classes=run.classes), spec, run).clients[0].train


def met(data: Federation, experiment: Experiment) -> list[str]:
    """Sentences on the clients of ``data`` whose samples are those of a client that took part in training."""
    trained = [client for client in experiment.data.clients if client.name not in experiment.settings.newcomers]
    known = {digest(split): client.name for client in trained for split in client.splits.values()}
    shared = {c.name: known[digest(s)] for c in data.clients for s in c.splits.values() if digest(s) in known}
    return [
        f"client {name!r} is not unknown: the run has its samples, as client {other!r}"
        for name, other in shared.items()
    ]


def _prepared(data: Federation, spec: DataSpec, run: Federation) -> Federation:
    """``data`` in the run's shape, with the run's scale and labels, checked."""
    shape, square = run.sample_shape, run.sample_shape[1:2] == run.sample_shape[2:]
    data = data.fitted(shape[1] if len(shape) == 3 and square else None)
    if (data.sample_shape[:1], shape[:1], len(shape)) == ((1,), (3,), 3):
        data = data.each(lambda split: split.changed(split.store.expand(-1, 3, -1, -1)))
    for client in data.clients:
        for name, split in client.splits.items():
            if split.shape != shape:
                raise UsageError(
                    f"{data.name}, client {client.name!r}, {name} data: samples of shape {split.shape}, but the run "
                    f"was trained on {run.name} with samples of shape {shape}: bring them to that shape"
                )
    data = _labeled(data, run)
    scales = {client.train.normalization for client in run.clients}
    if spec.normalize == "client":
        data = normalized(data, "client")
    elif len(scales) == 1:
        data = data.normalized(scales.pop())
    return data.check(allow_single_class=True)


def _labeled(data: Federation, run: Federation) -> Federation:
    """``data`` with labels that count the run's classes: by name where both name theirs, else as numbers."""
    if data.class_names and run.class_names:
        for name in data.class_names:
            if name not in run.class_names:
                raise UsageError(
                    f"{data.name} has a class {name!r}, which the run's data, {run.name}, have not: theirs are "
                    f"{', '.join(run.class_names)}. Leave it out, or rename it"
                )
        place = torch.tensor([run.class_names.index(name) for name in data.class_names])

        def counted(split: Split) -> Split:
            y = place.to(split.y.device)[split.y]
            return Split(x=split.store, y=y, rows=split.rows, normalization=split.normalization)

        data = data.each(counted)
    elif data.classes > run.classes:
        raise UsageError(
            f"{data.name} has labels up to {data.classes - 1}, but the run's data, {run.name}, have {run.classes} "
            "classes: leave the others out, or number them alike"
        )
    return replace(data, classes=run.classes, class_names=run.class_names)


def _array(path: Path) -> Split:
    try:
        with np.load(path, allow_pickle=False) as packed:
            if "x" not in packed:
                raise UsageError(f"{path} has no array 'x' (it has {', '.join(packed) or 'none'}): name the samples x")
            return as_split(packed["x"], np.zeros(len(packed["x"]), np.int64), str(path))
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{path} cannot be read as arrays ({error}): write it with numpy.savez(file, x=samples)"
        ) from error


def _images(path: Path, spec: DataSpec, run: Federation, progress: Progress | None) -> Split:
    """The images that lie in folder ``path``, decoded once as those of clients are."""
    wanted = "give a folder in which images lie side by side, or an .npz file with an array x"
    if not path.is_dir():
        raise UsageError(f"{path} is no folder: {wanted}")
    if len(run.sample_shape) != 3:
        raise UsageError(f"{path}: the run was trained on samples of shape {run.sample_shape}, not on images: {wanted}")
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != ".")
    if not found:
        raise UsageError(f"{path} holds no image ({', '.join(sorted(SUFFIXES))}): {wanted}")
    files = [ImageFile(file.name, "", "", file.stat().st_size, file.stat().st_mtime_ns) for file in found]
    names = [file.path for file in files]
    headers, broken = inspect_all(path, names, "headers", progress)
    kinds = sorted({header.kind for header in headers.values()})
    if len(kinds) > 1:
        raise UsageError(f"{path} has images of different depth, {kinds[0]} and {kinds[1]}: convert all to one")
    sizes = {(header.height, header.width) for header in headers.values()}
    size = (spec.image_size,) * 2 if spec.image_size else sizes.pop() if len(sizes) == 1 else run.sample_shape[1:]
    place = entry(cache_directory(), path, files, "unlabeled", size)
    facts = Facts(
        kind=kinds[0] if kinds else "byte", channels=max((h.channels for h in headers.values()), default=1),
        height=size[0], width=size[1], broken=broken,
    )  # fmt: skip

    def usable(broken: frozenset[str]) -> list[int]:
        return [row for row, name in enumerate(names) if name not in broken]

    store = kept(place) or decode_all(path, names, facts, place, usable, "images", progress)
    unread = store.facts.broken
    if unread and (spec.broken == "refuse" or len(unread) == len(names)):
        file, why = next(iter(unread.items()))
        raise UsageError(f"{len(unread)} of {len(names)} images in {path} cannot be read: {file}: {why}; remove them")
    rows = torch.tensor(usable(frozenset(unread)))
    return Split(x=torch.from_numpy(store.pixels), y=torch.zeros(len(rows), dtype=torch.int64), rows=rows)
