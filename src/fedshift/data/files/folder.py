"""Federations from user directories with images, ``.npz`` or ``.npy`` files, or tables; the kind is detected."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...tasks import Classification, Segmentation, Task
from ...utils.errors import UsageError, unknown_name
from ...utils.files import open_regular
from ..federation import ClientData, Federation, make_federation
from ..formats import open_arrays
from ..samples import to_samples
from .image_decoding import SUFFIXES
from .images import holds_images, read_images
from .masks import holds_masks, read_masked_images
from .read_options import CLASS_FOLDERS, MASKS, NPY, NPZ, TABLES, VOLUMES, ReadOptions
from .tables import holds_tables, read_tables
from .volumes import holds_volumes, read_masked_volumes

SPLITS = {"train": "train", "validation": "val", "test": "test"}
"""Suffixes of array names, by split."""


def read_folder(
    path: str | Path, domains: Iterable[str] | None = None, classes: int | None = None, **choices: Any
) -> Federation:
    """Read a federation from a directory or a table.

    Args:
        path: A directory with one of these layouts: ``client/class/*.png`` (jpg, tif, bmp), or
            ``client/train/class/*.png`` with test and val beside train; images with masks in ``client/images/*`` and
            ``client/masks/*`` (also NIfTI and DICOM), or with these folders in train, test and val; one ``.npz`` file
            per client; ``client/train/x.npy`` and ``y.npy`` with test and optionally val beside train, whose inputs
            stay on disk; one CSV or Parquet file per client. Or one table, with ``client_column``.
        domains: Names of the clients to read, in this order; None: all.
        classes: Number of classes; None: as found.
        choices: Further fields of :class:`~fedshift.data.files.read_options.ReadOptions`.

    Raises:
        UsageError: A file cannot be read, or the directory contains none or several of these layouts.

    """
    return read_directory(
        Path(path), ReadOptions(domains=None if domains is None else tuple(domains), classes=classes, **choices)
    )


def read_directory(path: Path, reading: ReadOptions) -> Federation:
    """Read a federation as :func:`read_folder` does, with all options in ``reading``."""
    found = {
        ".npz files": bool(_arrays_in(path, reading)),
        ".npy files": bool(_mapped_in(path, reading)),
        "tables": holds_tables(path),
        "images": path.is_dir() and any(file.suffix.lower() in SUFFIXES for file in path.glob("*/*/*")),
    }
    kinds = [kind for kind, there in found.items() if there]
    if len(kinds) > 1:
        raise UsageError(f"{path} holds {' and '.join(kinds)}: put each kind into its own directory")
    if found[".npz files"]:
        reading.refuse_unused(NPZ, path)
        return read_arrays(path, reading)
    if found[".npy files"]:
        reading.refuse_unused(NPY, path)
        return read_mapped_arrays(path, reading)
    if found["tables"]:
        reading.refuse_unused(TABLES, path)
        return read_tables(path, reading)
    if path.is_dir() and holds_images(path):
        masked = holds_masks(path)
        if reading.task and not isinstance(reading.task, Segmentation if masked else Classification):
            kind = "segmentation" if masked else "classification"
            raise UsageError(f"{path} holds images for {kind}, not for {reading.task}: leave the task out")
        volumes = masked and holds_volumes(path)
        reading.refuse_unused(VOLUMES if volumes else MASKS if masked else CLASS_FOLDERS, path)
        if volumes:
            return read_masked_volumes(path, reading)
        return read_masked_images(path, reading) if masked else read_images(path, reading)
    raise UsageError(
        f"{path} holds no data: give a directory with client/class/*.png (or client/train/class/*.png), with one "
        ".npz, .csv or .parquet file a client, with client/train/x.npy and y.npy and test beside train, or one table "
        "(--client-column)"
    )


def read_arrays(path: Path, reading: ReadOptions) -> Federation:
    """Read one ``.npz`` file per client with ``x_train y_train x_test y_test`` and optionally ``x_val y_val``.

    Masks may be named ``m_train m_test m_val``. Arrays are read without pickle, so a file cannot run code; for shapes
    see :func:`fedshift.data.samples.to_samples`.
    """
    return _read_clients(path, reading, {file.stem: file for file in _arrays_in(path, reading)}, _read, "files of .npz")


def read_mapped_arrays(path: Path, reading: ReadOptions) -> Federation:
    """Read ``x.npy`` and ``y.npy`` in ``client/train``, ``client/test`` and optionally ``client/val``.

    Inputs stay on disk and are read when a batch needs them; targets are in memory. Shapes are as in ``.npz`` files.
    """
    return _read_clients(path, reading, _mapped_in(path, reading), _read_mapped, "folders of .npy")


def _read_clients(
    path: Path,
    reading: ReadOptions,
    found: Mapping[str, Path],
    read: Callable[[str, Path, Task | None], ClientData],
    kind: str,
) -> Federation:
    wanted = list(found) if reading.domains is None else list(reading.domains)
    for name in wanted:
        if name not in found:
            raise unknown_name("domain", name, found)
    clients = []
    for done, name in enumerate(wanted, 1):
        clients.append(read(name, found[name], reading.task))
        if reading.progress:
            reading.progress("arrays", done, len(wanted))
    note = f"{len(clients)} {kind}"
    return make_federation(
        path.resolve().name, clients, task=reading.task, classes=reading.classes, note=note,
        locate=lambda name, split: f"{found[name]}, {split} data",
    )  # fmt: skip


def _mapped_in(path: Path, reading: ReadOptions) -> dict[str, Path]:
    """Return the folders with ``train/x.npy`` in ``path`` by name, or ``path`` if it is a client that joins others."""
    if reading.like is not None and (path / "train" / "x.npy").exists():
        return {path.resolve().name: path}
    return {file.parts[-3]: file.parents[1] for file in sorted(path.glob("*/train/x.npy"))}


def _read_mapped(name: str, folder: Path, task: Task | None) -> ClientData:
    parts = {}
    for split, part in SPLITS.items():
        files = [folder / part / each for each in ("x.npy", "y.npy")]
        if split == "validation" and not any(file.exists() for file in files):
            continue
        arrays = []
        for file in files:
            if not file.exists():
                raise UsageError(f"{file} is missing: every client has x.npy and y.npy in train and in test")
            try:
                with open_regular(file):
                    arrays.append(np.load(file, mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError, EOFError) as error:
                raise UsageError(
                    f"{file} cannot be mapped ({error}): write it again with numpy.save, with an array of numbers"
                ) from error
        parts[split] = to_samples(arrays[0], arrays[1], f"{folder}, {split} data", task)
    return ClientData.from_splits(name, parts)


def _arrays_in(path: Path, reading: ReadOptions) -> list[Path]:
    """Return the ``.npz`` files in directory ``path``, by name, or the file itself for a client that joins others."""
    if path.is_dir():
        return sorted(path.glob("*.npz"))
    return [path] if reading.like is not None and path.suffix == ".npz" else []


def _read(name: str, file: Path, task: Task | None) -> ClientData:
    if file.is_file() and not zipfile.is_zipfile(file):
        raise UsageError(f"{file} is no .npz file, or is cut short: write it again with numpy.savez, or leave it out")
    try:
        with open_arrays(file) as packed:
            y = "m" if "m_train" in packed and "y_train" not in packed else "y"
            missing = [key for key in ("x_train", f"{y}_train", "x_test", f"{y}_test") if key not in packed]
            if missing:
                raise UsageError(
                    f"{file} has no array {missing[0]!r} (it has {', '.join(packed) or 'none'}): name the arrays "
                    "x_train, y_train, x_test, y_test, or choose other files (--domains)"
                )
            parts = {
                split: to_samples(packed[f"x_{end}"], packed[f"{y}_{end}"], f"{file}, {split} data", task)
                for split, end in SPLITS.items()
                if f"x_{end}" in packed and f"{y}_{end}" in packed
            }
    except UsageError:
        raise
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{file} cannot be read without pickle ({error}): write it again with arrays of numbers, or leave it out"
        ) from error
    return ClientData.from_splits(name, parts)
