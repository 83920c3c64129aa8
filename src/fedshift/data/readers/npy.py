"""Arrays on disk: ``x.npy`` and ``y.npy`` in ``client/train``, ``client/test`` and optionally ``client/val``.

Inputs stay on disk and are read when a batch needs them; targets are in memory. Shapes are as in ``.npz`` files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.files import open_regular
from ..files.read_options import ReadOptions
from ..samples import keep_or_map, read_targets, to_store
from ..scan import Assign, Loaded, Part, Scan, choose_clients
from . import arrays
from .arrays import SUFFIXES

holds = ".npy files"
options = frozenset({"image_size", "groups"})


def can_read(source: object) -> bool:
    """Return whether ``source`` is a directory of clients with ``train/x.npy``, or one such client."""
    return isinstance(source, Path) and (_is_client(source) or any(source.glob("*/train/x.npy")))


def scan(source: Path, reading: ReadOptions) -> Scan:
    """Return the clients in ``source``, which is one itself if it joins others."""
    if reading.schema is not None and _is_client(source):
        found = {source.resolve().name: source}
    else:
        found = {file.parts[-3]: file.parents[1] for file in sorted(source.glob("*/train/x.npy"))}
    parts = [part for name in choose_clients(found, reading) for part in _scan_client(name, found[name], reading)]
    return Scan(name=source.resolve().name, parts=tuple(parts), task=reading.task, note="{clients} folders of .npy")


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return stores of the mapped inputs."""
    return Loaded(stores=[to_store(part.source, part.where) for part in scan.parts])


def _is_client(path: Path) -> bool:
    return (path / "train" / "x.npy").exists()


def _scan_client(name: str, folder: Path, reading: ReadOptions) -> Iterator[Part]:
    for split, part in SUFFIXES.items():
        files = [folder / part / each for each in ("x.npy", "y.npy")]
        if split == "validation" and not any(file.exists() for file in files):
            continue
        where = f"{folder}, {split} data"
        x, y = map(_map, files)
        kept = keep_or_map(x, where)
        targets = read_targets(kept, y, where, reading.task)
        named = {file.stem: file for file in (folder / part).glob("*.npy")}
        group = arrays.check_groups(reading, named, str(reading.groups), targets, where, _map)
        yield Part.whole(name, where, targets, split, kept, group)


def _map(file: Path) -> NDArray[Any]:
    if not file.exists():
        raise UsageError(f"{file} is missing: every client has x.npy and y.npy in train and in test")
    try:
        with open_regular(file):
            mapped: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
            return mapped
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"{file} cannot be mapped ({error}): write it again with numpy.save, with an array of numbers"
        ) from error
