"""A new site's data, prepared like a run's data: image size, channels, scale, labels; and its overlap with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..analysis.statistics import FEWEST_UNITS
from ..config.spec import DataSpec
from ..data.checks.quality import check_data
from ..data.decoding.dicom import holds_slices
from ..data.decoding.images import SUFFIXES
from ..data.decoding.volumes import is_volume
from ..data.far_values import judge_newcomers
from ..data.federation import ClientData, Federation
from ..data.files.listing import describe_broken, describe_lost
from ..data.formats import explain_errors, open_arrays
from ..data.joining import join_schema
from ..data.patches import Patches
from ..data.readers.arrays import holds_hub_datasets, holds_tables
from ..data.readers.folders import read_unlabeled
from ..data.samples import Samples, digest_each, join_several, to_samples
from ..data.schema import Schema
from ..data.source import Progress, ReadOptions
from ..data.sources import READ, load_source
from ..experiments.experiment import Experiment
from ..nn.several_inputs import Inputs
from ..utils.errors import UsageError


def load_site(
    data: object, spec: DataSpec, schema: Schema, clients: str | None = None, progress: Progress | None = None
) -> Federation:
    """Load the clients of ``data``, given as for ``--data`` or as objects, as samples of a run's ``schema``.

    ``spec``: the run's settings for reading files; its split, samples and validation apply to the run only.
    ``clients``: names or patterns; None: all. Raises :class:`UsageError` naming both if shapes or classes differ, or if
    the clients have errors that are to be refused.
    """
    own: dict[str, Any] = {}
    read = Path(data).exists() if isinstance(data, str) else holds_tables(data) or holds_hub_datasets(data)
    if not read:  # settings for the run's files do not apply to data by name, nor to arrays
        own = {field.name: field.default for field in fields(DataSpec) if field.name in READ or field.name == "task"}
    asked = replace(spec, domains=clients, split=None, samples=None, validation=0.0, classes=None, **own)
    size = () if schema.preparation.patched else schema.preparation.shape[1:]
    size_if_mixed = (size[0], size[1]) if len(size) == 2 else None
    made = join_schema(load_source(data, asked, progress, size_if_mixed, schema), schema)
    return check_data(made, spec.on_data_error)


def load_unlabeled(
    path: Path, spec: DataSpec, schema: Schema, progress: Progress | None = None, notices: list[str] | None = None
) -> Samples:
    """Load unlabeled samples, from a folder of images or array ``x`` of an .npz file, as a run's ``schema`` describes.

    Several inputs are the arrays ``x.NAME``. Images may be in subfolders. Every target of the result is 0 and has no
    meaning. ``notices`` receives a sentence if unreadable files are left out. Raises :class:`UsageError` as
    :func:`load_site` does.
    """
    inputs = Inputs()
    if path.suffix == ".npz":
        x, inputs = _read_array(path, [each.name for each in schema.preparation.inputs])
    else:
        x = _read_images(path, spec, schema, progress, notices)
    x = x.replace(y=schema.task.make_blank_targets(len(x), x.whole_shape, schema.classes))
    only = ClientData(name=client_name(path), train=x, test=x)
    data = Federation(name=str(path), clients=(only,), classes=schema.classes, task=schema.task, inputs=inputs)
    return join_schema(data, schema).clients[0].train


def client_name(path: Path) -> str:
    """Return the name of the client whose unlabeled samples are in ``path``."""
    return path.stem if path.suffix == ".npz" else path.resolve().name


def _read_array(path: Path, names: Sequence[str]) -> tuple[Samples, Inputs]:
    """Return the samples of array ``x`` or, of several inputs in the order of ``names``, of arrays ``x.NAME``."""
    wanted = [f"x.{name}" for name in names] or ["x"]
    with explain_errors(path, "arrays"), open_arrays(path) as packed:
        for key in wanted:
            if key not in packed:
                has = ", ".join(packed) or "none"
                raise UsageError(f"{path} has no array {key!r} (it has {has}): name the samples {', '.join(wanted)}")
        given = {name: packed[f"x.{name}"] for name in names} or packed["x"]
        x, inputs = join_several(given, str(path), names)
        return to_samples(x, np.zeros(len(x), np.int64), str(path)), inputs


def _read_images(
    path: Path, spec: DataSpec, schema: Schema, progress: Progress | None, notices: list[str] | None
) -> Samples:
    """Read the images in folder ``path``, and pictures below it, decoded once, like clients' images.

    Raises :class:`UsageError` naming a file that cannot be read, or that has another grid if there are no patches.
    """
    prepared, wanted = schema.preparation, "give a folder of images, or an .npz file with an array x"
    if not path.is_dir():
        raise UsageError(f"{path} is no folder: {wanted}")
    volumes, (_, *places) = prepared.decoding.kind == "volume", prepared.shape
    if volumes:
        files = {f.name: f for f in sorted(path.iterdir()) if (holds_slices(f) if f.is_dir() else is_volume(f))}
        lacking = "holds no NIfTI or DICOM file, and the run was trained on such: give a folder of them"
    elif len(places) != 2:
        raise UsageError(f"{path}: the run was trained on samples of shape {prepared.shape}, not on images: {wanted}")
    else:
        named = sorted(file.relative_to(path) for file in path.rglob("*"))
        shown = [name for name in named if not any(part[0] == "." for part in name.parts)]
        files = {str(name): path / name for name in shown if name.suffix.lower() in SUFFIXES}
        lacking = f"holds no image ({', '.join(sorted(SUFFIXES))}): {wanted}"
        if notices is not None:
            notices += describe_lost(client_name(path), shown)
    if not files:
        raise UsageError(f"{path} {lacking}")
    patched = prepared.patched or volumes
    reading = ReadOptions(
        image_size=None if volumes else spec.image_size, size_if_mixed=None if volumes else (places[0], places[1]),
        on_data_error=spec.on_data_error, progress=progress, schema=schema,
        patch=",".join(map(str, places[::-1])) if patched else None,
    )  # fmt: skip
    size = (prepared.resized if prepared.patched else tuple(places)) if volumes else ()
    store, sizes, broken = read_unlabeled(path, files, reading, volumes=volumes, size=size)
    if broken and notices is not None:
        notices.append(describe_broken(client_name(path), broken, len(files)))
    usable = torch.tensor([row for row, name in enumerate(files) if name not in broken], dtype=torch.int64)
    patches = Patches(tuple(places), sizes, prepared.resized) if prepared.patched else None
    return Samples(x=store, y=torch.zeros(len(usable), dtype=torch.int64), rows=usable, patches=patches)


def describe_newcomers(data: Federation, experiment: Experiment) -> list[str]:
    """Return the notices about clients that join ``experiment``, alone and compared with its training clients."""
    far = judge_newcomers(data, experiment.data, experiment.settings.newcomers)
    return [*data.notices, *far, *find_overlap(data, experiment)]


def find_overlap(data: Federation, experiment: Experiment) -> list[str]:
    """Return sentences on the clients of ``data`` that share samples with a training client, whatever their labels.

    Stored samples are compared value by value, training, validation and test data alike.
    """
    trained = [client for client in experiment.data.clients if client.name not in experiment.settings.newcomers]
    owner = {key: client.name for client in trained for key in _list_digests(client)}
    said = []
    for client in data.clients:
        keys = _list_digests(client)
        if found := Counter(owner[key] for key in keys if key in owner):
            whose, count = found.most_common(1)[0][0], found.total()
            share = "its samples" if count == len(keys) else f"{count:,} of its {len(keys):,} samples"
            said.append(f"client {client.name!r} is not unknown: the run has {share}, as client {whose!r}")
    return said


def _list_digests(client: ClientData) -> set[tuple[int, int]]:
    """Return the digest of each sample."""
    pieces = (split.copy_rows(piece) for split in client.splits.values() for piece in split.pieces())
    arrays = (np.ascontiguousarray(x.cpu().numpy()) for x in pieces)
    return {(high, low) for array in arrays for high, low in digest_each(array).tolist()}


def describe_splits(data: Federation) -> Iterator[str]:
    """Yield the numbers of samples, and of patients where they are known, in each client's splits."""
    for client in data.clients:
        counts = [
            count_samples(split, "training" if name == "train" else name) for name, split in client.splits.items()
        ]
        few = client.test.count_units() < FEWEST_UNITS
        end = f": no policy can be recommended below {FEWEST_UNITS}" if few else ""
        yield f"{client.name}: {', '.join(counts)}{end}"


def count_samples(split: Samples, name: str) -> str:
    """Return the number of samples of the split ``name``, and of patients where they are known, in words."""
    units = split.count_units()
    told = "" if split.group is None else f" of {units:,} patient{'s' * (units != 1)}"
    return f"{len(split):,} {name} sample{'s' * (len(split) != 1)}{told}"
