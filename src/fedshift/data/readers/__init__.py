"""Readers of data, one module for each kind of data; modules that begin with an underscore are not readers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import cast

from ...utils.errors import Ref, UsageError
from ..schema import Schema
from ..source import Reader, ReadOptions

FORMS = (
    "a name, a directory, a Federation, {client: (x_train, y_train, x_test, y_test)}, {client: (train, test)} with "
    "torch or HuggingFace datasets or pandas frames, or one frame or HuggingFace dataset with client_column"
)
"""Supported kinds of data."""


@cache
def list_readers() -> Mapping[str, Reader]:
    """Return the modules of this package, which are readers, by name."""
    names = sorted(found.name for found in iter_modules(__path__) if not found.name.startswith("_"))
    return {name: cast("Reader", import_module(f".{name}", __name__)) for name in names}


def find_reader(source: object) -> Reader:
    """Return the reader of ``source``; raise :class:`UsageError` if there is none, or several."""
    found = [reader for reader in list_readers().values() if reader.can_read(source)]
    if len(found) == 1:
        return found[0]
    if found:
        kinds = " and ".join(reader.holds for reader in found)
        raise UsageError(f"{source} holds {kinds}: put each kind into its own directory")
    if isinstance(source, Path):
        raise UsageError(
            f"{source} holds no data: give a directory with client/class/*.png (or client/train/class/*.png), or "
            "recordings (.hea, .edf, .bdf) in place of images, with one .npz, .csv or .parquet file per client, with "
            "client/train/x.npy and y.npy and test next to train, or one table ({})",
            Ref("client_column"),
        )
    raise UsageError(f"data of type {type(source).__name__}: give {FORMS}")


def refuse_unused(reading: ReadOptions, honored: Collection[str], data: str) -> None:
    """Raise :class:`UsageError` for a changed option that readers honor and ``data`` do not, naming the readers' kinds.

    The options of joining clients come from a run, and may be for another kind of data.
    """
    if isinstance(reading.schema, Schema):
        return
    for name in sorted(reading.changed):
        honoring = [each.holds for each in list_readers().values() if name in each.options]
        if honoring and name not in honored:
            raise UsageError(f"{{}} is for {', '.join(honoring)}, not for {data}: leave it out", Ref(name))
