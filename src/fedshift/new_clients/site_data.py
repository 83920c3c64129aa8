"""A new site's data, prepared like a run's data: image size, channels, scale, labels; and its overlap with the run."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..analysis.statistics import FEWEST_UNITS
from ..config.spec import DataSpec
from ..data.checks.quality import check_data
from ..data.decoding.dicom import holds_slices
from ..data.decoding.images import SUFFIXES
from ..data.decoding.volumes import UNMEASURED, is_volume, read_volume_header
from ..data.far_values import judge_newcomers
from ..data.federation import ClientData, Federation
from ..data.files.image_store import ImageFile, read_all
from ..data.files.images import describe_broken, describe_lost, refuse_broken
from ..data.files.read_options import Progress, ReadOptions
from ..data.files.volumes import KEPT, VolumeStore, refuse_other_kinds
from ..data.formats import open_arrays
from ..data.joining import join_schema
from ..data.patches import Patches
from ..data.readers.arrays import holds_hub_datasets, holds_tables
from ..data.readers.images import choose_decodings, decode_images, inspect_images, make_part
from ..data.samples import Samples, join_several, to_samples
from ..data.scan import Part
from ..data.schema import Schema
from ..data.sources import READ, load_source
from ..data.stores import RecentArrays
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
    differing = (size[0], size[1]) if len(size) == 2 else None
    made = join_schema(load_source(data, asked, progress, differing, schema), schema)
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
    x = x.with_targets(schema.task.make_blank_targets(len(x), x.whole_shape, schema.classes))
    only = ClientData(name=client_name(path), train=x, test=x)
    data = Federation(name=str(path), clients=(only,), classes=schema.classes, task=schema.task, inputs=inputs)
    return join_schema(data, schema).clients[0].train


def client_name(path: Path) -> str:
    """Return the name of the client whose unlabeled samples are in ``path``."""
    return path.stem if path.suffix == ".npz" else path.resolve().name


def _read_array(path: Path, names: Sequence[str]) -> tuple[Samples, Inputs]:
    """Return the samples of array ``x`` or, of several inputs in the order of ``names``, of arrays ``x.NAME``."""
    wanted = [f"x.{name}" for name in names] or ["x"]
    try:
        with open_arrays(path) as packed:
            for key in wanted:
                if key not in packed:
                    has = ", ".join(packed) or "none"
                    raise UsageError(
                        f"{path} has no array {key!r} (it has {has}): name the samples {', '.join(wanted)}"
                    )
            given = {name: packed[f"x.{name}"] for name in names} or packed["x"]
            x, inputs = join_several(given, str(path), names)
            return to_samples(x, np.zeros(len(x), np.int64), str(path)), inputs
    except UsageError:
        raise
    except (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        said = f"{path} cannot be read as arrays ({error}): write it with numpy.savez(file, x=samples)"
        raise UsageError(said) from error


def _read_images(
    path: Path, spec: DataSpec, schema: Schema, progress: Progress | None, notices: list[str] | None
) -> Samples:
    """Read the images in folder ``path`` and below it, decoded once, like clients' images."""
    wanted = "give a folder of images, or an .npz file with an array x"
    if not path.is_dir():
        raise UsageError(f"{path} is no folder: {wanted}")
    if schema.preparation.decoding.kind == "volume":
        return _read_volumes(path, spec, schema, progress, notices)
    if len(shape := schema.preparation.shape) != 3:
        raise UsageError(f"{path}: the run was trained on samples of shape {shape}, not on images: {wanted}")
    named = sorted(file.relative_to(path) for file in path.rglob("*"))
    shown = [name for name in named if not any(part[0] == "." for part in name.parts)]
    found = {name: path / name for name in shown if name.suffix.lower() in SUFFIXES}
    if notices is not None:
        notices += describe_lost(client_name(path), shown)
    if not found:
        raise UsageError(f"{path} holds no image ({', '.join(sorted(SUFFIXES))}): {wanted}")
    files = tuple(ImageFile(str(n), "", "", f.stat().st_size, f.stat().st_mtime_ns) for n, f in found.items())
    height, width = shape[1:]
    patch = (height, width) if schema.preparation.patched else ()
    reading = ReadOptions(
        image_size=spec.image_size, differing=(height, width), on_data_error=spec.on_data_error, progress=progress,
        patch=f"{width},{height}" if patch else None, schema=schema,
    )  # fmt: skip
    name = client_name(path)
    images = inspect_images(path, {name: files}, reading, cases=bool(patch))
    y = torch.zeros(len(files), dtype=torch.int64)
    part = make_part(name, files, y, path, reading)

    def find_usable(part: Part, broken: Collection[str]) -> NDArray[np.int8]:
        """Return 0, the split of training, for each file that can be read."""
        return np.array([-1 if file in broken else 0 for file in part.files], np.int8)

    (store,) = decode_images(images, [part], reading)
    broken = store.facts.broken
    (how,), _ = choose_decodings([part], [store], reading, lambda part: find_usable(part, broken))
    usable = torch.from_numpy(np.flatnonzero(find_usable(part, broken) == 0))
    _leave_out(path, broken, len(files), spec, notices)
    patches = Patches(patch, store.facts.list_extents(files), schema.preparation.resized) if patch else None
    return Samples(x=torch.from_numpy(how.rescale(store.pixels)), y=y[usable], rows=usable, patches=patches)


def _leave_out(path: Path, broken: Mapping[str, str], count: int, spec: DataSpec, notices: list[str] | None) -> None:
    """Add a notice about the ``broken`` ones of ``count`` files, or refuse them, as all files always are."""
    choice = spec.on_data_error if len(broken) < count else "refuse"
    refuse_broken(path, broken, count, ReadOptions(on_data_error=choice))
    if broken and notices is not None:
        notices.append(describe_broken(client_name(path), broken, count))


def _read_volumes(
    path: Path, spec: DataSpec, schema: Schema, progress: Progress | None, notices: list[str] | None
) -> Samples:
    """Return the medical images in folder ``path``, files and folders of slices, decoded when they are needed.

    Raises :class:`UsageError` naming a file that cannot be read, or that has another grid if there are no patches.
    """
    how, shape = schema.preparation.decoding, schema.preparation.shape
    files = [file for file in sorted(path.iterdir()) if (holds_slices(file) if file.is_dir() else is_volume(file))]
    if not files:
        raise UsageError(f"{path} holds no NIfTI or DICOM file, and the run was trained on such: give a folder of them")
    headers, broken = read_all({file.name: file for file in files}, read_volume_header, "headers", progress)
    _leave_out(path, broken, len(files), spec, notices)
    files = [file for file in files if file.name not in broken]
    refuse_other_kinds(path, headers)
    if how.spacing and (unmeasured := [name for name, header in headers.items() if not header.measured]):
        raise UsageError(f"{path / unmeasured[0]} {UNMEASURED}")
    found = {name: header.resample(how.spacing) if how.spacing else header for name, header in headers.items()}
    resized = schema.preparation.resized if schema.preparation.patched else shape[1:]
    sizes = np.array([resized or header.shape for header in found.values()], np.int64)
    store = VolumeStore(
        [(file,) for file in files], (next(iter(found.values())).channels, *sizes.max(axis=0).tolist()), str(path),
        RecentArrays(KEPT), extents=None if resized else sizes, window=how.window, spacing=how.spacing,
    )  # fmt: skip
    patches = Patches(shape[1:], sizes, schema.preparation.resized) if schema.preparation.patched else None
    return Samples(x=store, y=torch.zeros(len(files), dtype=torch.int64), patches=patches)


def describe_newcomers(data: Federation, experiment: Experiment) -> list[str]:
    """Return the notices about clients that join ``experiment``, alone and compared with its training clients."""
    far = judge_newcomers(data, experiment.data, experiment.settings.newcomers)
    return [*data.notices, *far, *find_overlap(data, experiment)]


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


def describe_splits(data: Federation) -> Iterator[str]:
    """Yield the numbers of samples, and of patients where they are known, in each client's splits."""
    for client in data.clients:
        counts = [
            count_samples(split, "training" if name == "train" else name) for name, split in client.splits.items()
        ]
        few = f": no policy can be recommended below {FEWEST_UNITS}" if count_units(client.test) < FEWEST_UNITS else ""
        yield f"{client.name}: {', '.join(counts)}{few}"


def count_samples(split: Samples, name: str) -> str:
    """Return the number of samples of the split ``name``, and of patients where they are known, in words."""
    units = "" if split.group is None else f" of {count_units(split):,} patient{'s' * (count_units(split) != 1)}"
    return f"{len(split):,} {name} sample{'s' * (len(split) != 1)}{units}"


def count_units(split: Samples) -> int:
    """Return the number of groups (patients) where they are known, else of samples."""
    return len(split) if split.group is None else len(torch.unique(split.group))
