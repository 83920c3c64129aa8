"""One ``.npz`` file per client with ``x_train y_train x_test y_test`` and optionally ``x_val y_val``.

Masks may be named ``m_train m_test m_val``. Several inputs of a sample are ``x_train.NAME`` and so on, by the names of
the network's parameters. Arrays are read without pickle, so a file cannot run code; for shapes see
:func:`fedshift.data.samples.to_samples`.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from ...nn.several_inputs import Inputs
from ...utils.errors import Ref, UsageError
from ..files.read_options import ReadOptions
from ..formats import open_arrays, read_header
from ..inputs import arrange, find_layout, join_inputs
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
    parts = list[Part]()
    for name in choose_clients(found, reading):
        order = arrays.list_wanted(reading) or [each.name for part in parts[:1] for each in part.inputs]
        parts += _scan_file(name, found[name], reading, order)
    return Scan(name=source.resolve().name, parts=tuple(parts), task=reading.task, note="{clients} files of .npz")


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return the arrays of inputs."""
    files = dict.fromkeys(part.source[0] for part in scan.parts)
    stores: list[Tensor | LazyStore] = []
    for done, file in enumerate(files, 1):
        with _open(file) as packed:
            own = [part for part in scan.parts if part.source[0] == file]
            stores += [to_store(_read(packed, part), part.where) for part in own]
        if reading.progress:
            reading.progress("arrays", done, len(files))
    return Loaded(stores=stores)


def _find(path: Path) -> list[Path]:
    """Return the ``.npz`` files in a directory, by name, or the file itself."""
    return sorted(path.glob("*.npz")) if path.is_dir() else [path] if path.suffix == ".npz" else []


def _read(packed: NpzFile, part: Part) -> NDArray[Any]:
    """Return the inputs of a part, several as rows."""
    key = part.source[1]
    if not part.inputs:
        return packed[key]
    return join_inputs({each.name: packed[f"{key}.{each.name}"] for each in part.inputs}, part.inputs, part.where)


def _scan_file(name: str, file: Path, reading: ReadOptions, order: Sequence[str]) -> Iterator[Part]:
    with _open(file) as packed:
        y = "m" if "m_train" in packed and "y_train" not in packed else "y"
        several = {key: _list_several(packed, key) for key in (f"x_{end}" for end in SUFFIXES.values())}
        keys = {*packed, *(key for key, names in several.items() if names)}
        missing = [key for key in ("x_train", f"{y}_train", "x_test", f"{y}_test") if key not in keys]
        if missing:
            raise UsageError(
                f"{file} has no array {missing[0]!r} (it has {', '.join(packed) or 'none'}): name the arrays "
                "x_train, y_train, x_test, y_test, or choose other files ({})",
                Ref("domains"),
            )
        for split, end in SUFFIXES.items():
            key, inputs, where = f"x_{end}", Inputs(), f"{file}, {split} data"
            if key not in keys or f"{y}_{end}" not in packed:
                continue
            names = several[key]
            if names and key in packed:
                raise UsageError(f"{where}: both arrays {key!r} and '{key}.{names[0]}': leave one out")
            if len(names) > 1:
                named = {each: read_header(packed, f"{key}.{each}") for each in names}
                inputs = find_layout(arrange(named, order), where)
                order = [each.name for each in inputs]
                x = np.broadcast_to(np.float32(0), (len(named[order[0]]), sum(each.size for each in inputs)))
            else:
                key = f"{key}.{names[0]}" if names else key
                x = read_header(packed, key)
            targets = read_targets(x, packed[f"{y}_{end}"], where, reading.task)
            group = arrays.check_groups(reading, packed, f"{reading.groups}_{end}", targets, where)
            yield Part.whole(name, where, targets, split, (file, key), group, inputs)


def _list_several(packed: NpzFile, key: str) -> list[str]:
    """Return the names of the inputs whose arrays are called ``key.NAME``."""
    return [each.removeprefix(f"{key}.") for each in packed if each.startswith(f"{key}.")]


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
