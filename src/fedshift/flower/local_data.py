"""A site's own data: one client, read as `fedshift run` reads it among others, with labels that mean what all mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..base.errors import UsageError
from ..config import DataSpec
from ..data.federation import ClientData, Federation
from ..data.split import Split
from ..sources import source_of


def local(data: str, name: str | None, spec: DataSpec, place: Path) -> Federation:
    """The client in ``data``, read as ``spec`` says, as a federation of one.

    ``data``: a directory of class folders (or of train and test folders of these), an .npz file or a table: one
    client's. Or any data of several clients by name (digits, a benchmark), of which ``name`` is one. ``place``: a
    folder to work in. Raises :class:`UsageError` as reading does.
    """
    path = Path(data)
    if not path.exists():
        if name is None:
            raise UsageError(f"data {data!r} is no file or directory here; of data by name say which client (--name)")
        return source_of(data, spec).only([name]).fitted(spec.image_size)
    alone = place / "data"
    alone.mkdir(parents=True, exist_ok=True)
    called = name or (path.resolve().name if path.is_dir() else path.stem)
    link = alone / (called + ("" if path.is_dir() else path.suffix))
    for other in alone.iterdir():
        if other.is_symlink():
            other.unlink()
    link.symlink_to(path.resolve())  # a directory that holds this client and no other
    return source_of(str(alone), spec).only([called]).fitted(spec.image_size)


def meaning(data: Federation, classes: int, names: Sequence[str]) -> Federation:
    """``data`` with labels that count among ``names``, those of all sites; where there are none, as they are."""
    if not names or not data.class_names:
        return replace(data, classes=classes)
    place = torch.tensor([list(names).index(name) for name in data.class_names])

    def counted(split: Split) -> Split:
        return Split(x=split.store, y=place[split.y], rows=split.rows, normalization=split.normalization)

    clients = tuple(
        ClientData(name=client.name, **{part: counted(split) for part, split in client.splits.items()})
        for client in data.clients
    )
    return replace(data, clients=clients, classes=classes, class_names=tuple(names))
