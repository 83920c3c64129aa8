"""Federations from user directories with images, ``.npz`` or ``.npy`` files, or tables; the kind is detected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...tasks import Classification, Segmentation
from ...utils.errors import Ref, UsageError
from ..assembly import assemble
from ..federation import Federation
from ..readers import npy, npz, tables
from .image_decoding import SUFFIXES
from .images import holds_images, read_images
from .masks import holds_masks, read_masked_images
from .read_options import CLASS_FOLDERS, MASKS, NPY, NPZ, TABLES, VOLUMES, ReadOptions
from .volumes import holds_volumes, read_masked_volumes


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
        ".npz files": npz.can_read(path) and (path.is_dir() or reading.schema is not None),
        ".npy files": npy.can_read(path),
        "tables": tables.can_read(path),
        "images": path.is_dir() and any(file.suffix.lower() in SUFFIXES for file in path.glob("*/*/*")),
    }
    kinds = [kind for kind, there in found.items() if there]
    if len(kinds) > 1:
        raise UsageError(f"{path} holds {' and '.join(kinds)}: put each kind into its own directory")
    for reader, kind, name in ((npz, ".npz files", NPZ), (npy, ".npy files", NPY), (tables, "tables", TABLES)):
        if found[kind]:
            reading.refuse_unused(name, path)
            return assemble(reader, reader.scan(path, reading), reading)
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
        "({})",
        Ref("client_column"),
    )
