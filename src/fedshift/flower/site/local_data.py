"""A site's own data: one client, read as `fedshift run` reads it among others, with labels that mean what all mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...config.spec import DataSpec
from ...data.federation import ClientData, Federation
from ...data.files.images import holds_images
from ...data.files.table_schema import Column, find_tables, is_table
from ...data.samples import Samples
from ...data.sources import load_source
from ...utils.errors import UsageError
from ..server.merged_schema import require_repeating


class TableRefused(UsageError):
    """Why a table here cannot be used. It may show cells, so it is for this site's eyes alone."""


def load_local(
    data: str, name: str | None, spec: DataSpec, place: Path, columns: tuple[Column, ...] = ()
) -> Federation:
    """The client in ``data``, read as ``spec`` says, as a federation of one.

    ``data``: a directory of class folders (or of train and test folders of these), an .npz file, a table or a directory
    with one: one client's. Or any data of several clients by name (digits, a benchmark), of which ``name`` is one.
    ``place``: a folder to work in. ``columns``: those that the tables of all sites have together, by which a table is
    read; without them, by its own. Raises :class:`UsageError` as reading does.
    """
    path = Path(data)
    if not path.exists():
        if name is None:
            raise UsageError(f"data {data!r} is no file or directory here; of data by name say which client (--name)")
        made = load_source(data, spec).select_clients([name]).fit_images(spec.image_size)
        if columns and columns != made.columns:
            raise UsageError(
                f"{data} has not the columns and categories of all sites, which it must have in their order"
            )
        return made
    alone = place / "data"
    alone.mkdir(parents=True, exist_ok=True)
    called = name or (path.resolve().name if path.is_dir() else path.stem)
    path = _find_table(path)
    link = alone / (called + ("" if path.is_dir() else path.suffix))
    for other in alone.iterdir():
        if other.is_symlink():
            other.unlink()
    link.symlink_to(path.resolve())  # a directory that holds this client and no other
    if not is_table(link):
        return load_source(str(alone), spec).select_clients([called]).fit_images(spec.image_size)
    like = Federation(name="all sites", clients=(), classes=0, columns=columns)
    try:
        made = load_source(str(alone), replace(spec, domains=called), like=like)
        if not columns:
            require_repeating(made.columns, sum(map(len, made.clients[0].splits.values())))
    except UsageError as error:
        raise TableRefused(str(error)) from error
    return made


def _find_table(path: Path) -> Path:
    """The one table in directory ``path``; ``path`` itself where it is a file, or holds no table or images too."""
    tables = find_tables(path) if path.is_dir() and not holds_images(path) else []
    if len(tables) > 1:
        few = ", ".join(table.name for table in tables[:3])
        raise UsageError(f"{path} holds {len(tables)} tables ({few}), but a site is one client: give it one")
    return tables[0] if tables else path


def relabel(data: Federation, classes: int, names: Sequence[str]) -> Federation:
    """``data`` with labels that count among ``names``, those of all sites; where there are none, as they are."""
    own = data.meanings
    if not names or not own:
        return replace(data, classes=classes)
    place = torch.tensor([list(names).index(name) for name in own])

    def counted(split: Samples) -> Samples:
        return Samples(x=split.store, y=place[split.y], rows=split.rows, normalization=split.normalization)

    clients = tuple(
        ClientData(name=client.name, **{part: counted(split) for part, split in client.splits.items()})
        for client in data.clients
    )
    return replace(data, clients=clients, classes=classes, class_names=tuple(names))
