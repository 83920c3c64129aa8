"""One ``.npz`` file per client with ``x_train y_train x_test y_test`` and optionally ``x_val y_val``.

Masks may be named ``m_train m_test m_val``. Arrays are read without pickle, so a file cannot run code; for shapes see
:func:`fedshift.data.samples.to_samples`.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from numpy.lib.npyio import NpzFile
from torch import Tensor

from ...utils.errors import Ref, UsageError
from ..files.read_options import ReadOptions
from ..formats import open_arrays, read_header
from ..samples import read_targets, to_store
from ..scan import Assign, Loaded, Part, Scan, choose_clients
from ..stores import LazyStore
from . import arrays
from .arrays import SUFFIXES

holds = ".npz files"
options = frozenset({"image_size", "groups"})


def can_read(source: object) -> bool:
    """Return whether ``source`` is a directory with ``.npz`` files, or one such file."""
    return isinstance(source, Path) and bool(_find(source))


def scan(source: Path, reading: ReadOptions) -> Scan:
    """Return the clients in the files of ``source``; a single file is a client that joins others."""
    if not source.is_dir() and reading.schema is None:
        raise UsageError(f"{source} is one client: give a directory with a file for each client")
    found = {file.stem: file for file in _find(source)}
    names = choose_clients(found, reading)
    parts = [part for name in names for part in _scan_file(name, found[name], reading)]
    return Scan(name=source.resolve().name, parts=tuple(parts), task=reading.task, note="{clients} files of .npz")


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return the arrays of inputs."""
    files = dict.fromkeys(part.source[0] for part in scan.parts)
    stores: list[Tensor | LazyStore] = []
    for done, file in enumerate(files, 1):
        with _open(file) as packed:
            own = [part for part in scan.parts if part.source[0] == file]
            stores += [to_store(packed[part.source[1]], part.where) for part in own]
        if reading.progress:
            reading.progress("arrays", done, len(files))
    return Loaded(stores=stores)


def _find(path: Path) -> list[Path]:
    """Return the ``.npz`` files in a directory, by name, or the file itself."""
    return sorted(path.glob("*.npz")) if path.is_dir() else [path] if path.suffix == ".npz" else []


def _scan_file(name: str, file: Path, reading: ReadOptions) -> Iterator[Part]:
    with _open(file) as packed:
        y = "m" if "m_train" in packed and "y_train" not in packed else "y"
        missing = [key for key in ("x_train", f"{y}_train", "x_test", f"{y}_test") if key not in packed]
        if missing:
            raise UsageError(
                f"{file} has no array {missing[0]!r} (it has {', '.join(packed) or 'none'}): name the arrays "
                "x_train, y_train, x_test, y_test, or choose other files ({})",
                Ref("domains"),
            )
        for split, end in SUFFIXES.items():
            if f"x_{end}" in packed and f"{y}_{end}" in packed:
                where = f"{file}, {split} data"
                x = read_header(packed, f"x_{end}")
                targets = read_targets(x, packed[f"{y}_{end}"], where, reading.task)
                group = arrays.check_groups(reading, packed, f"{reading.groups}_{end}", targets, where)
                yield Part.whole(name, where, targets, split, (file, f"x_{end}"), group)


@contextmanager
def _open(file: Path) -> Iterator[NpzFile]:
    """Open a file of arrays; raise :class:`UsageError` if it is damaged or would need pickle."""
    if file.is_file() and not zipfile.is_zipfile(file):
        raise UsageError(
            f"{file} is not an .npz file, or is cut short: write it again with numpy.savez, or leave it out"
        )
    try:
        with open_arrays(file) as packed:
            yield packed
    except UsageError:
        raise
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{file} cannot be read without pickle ({error}): write it again with arrays of numbers, or leave it out"
        ) from error
