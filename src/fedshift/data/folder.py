"""A directory with one ``.npz`` file a client: ``x_train y_train x_test y_test`` and perhaps ``x_val y_val``.

Arrays are read without pickle, so a file cannot run code; shapes as in :func:`fedshift.data.split.as_split`.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..base.errors import UsageError, unknown
from .federation import ClientData, Federation, class_count
from .split import as_split

SPLITS = {"train": "train", "validation": "val", "test": "test"}
"""Names of splits, and how the arrays' names end."""


def read_folder(path: Path, domains: Iterable[str] | None = None, classes: int | None = None) -> Federation:
    """The federation in directory ``path``, a client for each file; ``domains`` chooses and orders them.

    Raises :class:`UsageError` naming the file where one cannot be read, lacks an array, or is no such file.
    """
    files = {file.stem: file for file in sorted(path.glob("*.npz"))}
    if not files:
        raise UsageError(f"{path} holds no .npz file: give a directory with one .npz file a client")
    wanted = list(files) if domains is None else list(domains)
    for name in wanted:
        if name not in files:
            raise unknown("domain", name, files)
    clients = tuple(_read(name, files[name]) for name in wanted)
    classes = class_count(clients) if classes is None else classes
    return Federation(name=path.resolve().name, clients=clients, classes=classes, note=f"{len(clients)} files of .npz")


def _read(name: str, file: Path) -> ClientData:
    if not zipfile.is_zipfile(file):
        raise UsageError(f"{file} is no .npz file, or is cut short: write it again with numpy.savez, or leave it out")
    try:
        with np.load(file, allow_pickle=False) as packed:
            missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if key not in packed]
            if missing:
                raise UsageError(
                    f"{file} has no array {missing[0]!r} (it has {', '.join(packed) or 'none'}): name the arrays "
                    "x_train, y_train, x_test, y_test, or choose other files (--domains)"
                )
            parts = {
                split: as_split(packed[f"x_{end}"], packed[f"y_{end}"], f"{file}, {split} data")
                for split, end in SPLITS.items()
                if f"x_{end}" in packed and f"y_{end}" in packed
            }
    except UsageError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{file} cannot be read without pickle ({error}): write it again with arrays of numbers, or leave it out"
        ) from error
    return ClientData(name=name, **parts)
