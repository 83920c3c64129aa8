"""A site's own data: one client, read as ``fedshift run`` would, with labels numbered as at all sites."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import TypeAdapter

from ...config.spec import DataSpec
from ...data.columns import Column
from ...data.federation import Federation
from ...data.files.listing import holds_images
from ...data.readers.tables import find_tables, is_table
from ...data.schema import Layout
from ...data.sources import load_source
from ...utils.errors import UsageError

ALL_SITES = Layout(name="all sites")
"""Layout of the data of all sites before they have described themselves."""
COLUMNS = TypeAdapter(tuple[Column, ...])
"""Parses columns from JSON: each has a ``name``, ``categories`` (None for numbers) and what it ``holds``."""


class DataRefused(UsageError):
    """A site's data cannot be used. The reason may quote the data, so it must not leave the site."""


def load_local(
    data: str, name: str | None, spec: DataSpec, place: Path, layout: Layout = ALL_SITES, *,
    test_alone: bool = False,
) -> Federation:  # fmt: skip
    """Return the client in ``data`` as a federation of one.

    Args:
        data: one client's directory of class folders (or of train and test folders with class folders), .npz file,
            table or directory with a table; or the name of a data set with several clients (digits, a benchmark).
        name: the client's name; required if ``data`` is the name of a data set.
        spec: how to read the data.
        place: a working folder.
        layout: the merged columns of all sites' tables, used to read a table; without columns, the table's columns.
        test_alone: read a directory that has a ``test`` folder but no ``train`` folder, and use ``test`` for both.

    Raises:
        UsageError: if the data cannot be read.

    """
    path = Path(data)
    if not (path.suffix == ".npz" or (path / "train" / "x.npy").exists()):
        spec = replace(spec, classes=None)  # of the classes with names, a site reports only those that it has
    if path.suffix == ".npz" or (path / "test").is_dir():
        spec = replace(spec, test_fraction=DataSpec.test_fraction)  # the run's is for sites without a test part
    if not path.exists():
        if name is None:
            raise UsageError(
                f"data {data!r} is not a file or directory here; for data by name, choose a client (--name)"
            )
        made = load_source(data, spec).select_clients([name])
        layout.require_columns(made, layout.name)
        return made
    alone = place / "data"
    alone.mkdir(parents=True, exist_ok=True)
    called = name or (path.resolve().name if path.is_dir() else path.stem)
    path = _link_test(path, place / "test-alone") if test_alone else _find_table(path)
    link = alone / (called + ("" if path.is_dir() else path.suffix))
    for other in alone.iterdir():
        if other.is_symlink():
            other.unlink()
    link.symlink_to(path.resolve())  # its directory contains only this client
    if not is_table(link):
        made = load_source(str(alone), spec).select_clients([called])
        if any(client.decoding.kind == "signal" for client in made.clients):
            raise UsageError(
                f"{path} holds recordings, whose leads sites do not compare with each other's: write them to .npz "
                "files, with the same leads in the same order at all sites"
            )
        return made
    try:
        made = load_source(str(alone), replace(spec, domains=called), schema=layout)
        if not layout.columns:
            require_repeating(made.columns, sum(map(len, made.clients[0].splits.values())))
    except UsageError as error:
        raise DataRefused("{}", error) from error
    return made


def require_repeating(columns: Iterable[Column], rows: int) -> None:
    """Raise :class:`UsageError` if a list of categories would reveal individual rows of a site that has ``rows``."""
    for column in columns:
        if column.categories is not None and 2 * len(column.categories) > rows:
            raise UsageError(
                f"column {column.name!r} contains text with {len(column.categories)} different values in {rows} rows, "
                "and the list of values would leave this site: group them, convert them to numbers, or drop the column"
            )


def holds_test_alone(data: str) -> bool:
    """Return whether ``data`` is a directory with a ``test`` folder but no ``train`` folder."""
    return (Path(data) / "test").is_dir() and not (Path(data) / "train").exists()


def holds_table(data: str) -> bool:
    """Return whether ``data`` is a table, or a directory with one."""
    path = Path(data)
    return is_table(path) if not path.is_dir() else not holds_images(path) and bool(find_tables(path))


def _link_test(path: Path, place: Path) -> Path:
    """Link both ``train`` and ``test`` in ``place`` to the ``test`` folder of ``path``; return ``place``."""
    place.mkdir(exist_ok=True)
    for part in ("train", "test"):
        (place / part).unlink(missing_ok=True)
        (place / part).symlink_to((path / "test").resolve())
    return place


def drop_training(data: Federation) -> Federation:
    """Return ``data`` without training samples."""
    none = torch.zeros(0, dtype=torch.int64)
    return replace(data, clients=tuple(replace(client, train=client.train.take(none)) for client in data.clients))


def _find_table(path: Path) -> Path:
    """Return the one table in directory ``path``, or ``path`` itself if it is a file or not a directory of tables."""
    tables = find_tables(path) if path.is_dir() and not holds_images(path) else []
    if len(tables) > 1:
        few = ", ".join(table.name for table in tables[:3])
        raise UsageError(f"{path} holds {len(tables)} tables ({few}), but a site is one client: give it one")
    return tables[0] if tables else path
