"""Images whose files, labels and splits are known in advance, from a publisher's lists or from folders.

A list of a client's images is a table with the columns ``path`` (relative to a known directory), ``label`` and
``part`` (train, validation or test), and ``group`` if groups are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from ...tasks import CLASSIFICATION
from ...utils.errors import UsageError
from ..assembly import assemble
from ..federation import Federation
from ..files.cache import stamp
from ..files.listing import CLASSES, ImageFile
from ..groups import number_groups
from ..readers.folders import Client, Folders, inspect, make_source
from ..source import Progress, ReadOptions, Source

COLUMNS = ["path", "label", "part"]


def read_listed(
    root: Path,
    clients: Mapping[str, pd.DataFrame],
    *,
    name: str,
    class_names: Sequence[str],
    size: int | tuple[int, int],
    note: str,
    progress: Progress | None,
) -> Federation:
    """Read color images and resize them to ``size`` pixels: a side, or height and width.

    Raises :class:`UsageError` for a size below 1, and if a file is missing or damaged.
    """
    height, width = size if isinstance(size, tuple) else (size, size)
    if min(height, width) < 1:
        raise UsageError(f"size={size} pixels: must be at least 1")
    reading = ReadOptions(size_if_mixed=(height, width), progress=progress, on_data_error="warn")
    places = {client: Client(images=_list_files(root, listed)) for client, listed in clients.items()}
    files, _ = inspect(Folders(path=root, content=CLASSES, clients=places, headers={}, broken={}), reading)
    headers = {path: replace(header, channels=3) for path, header in files.headers.items()}
    files = replace(files, headers=headers, sizes=dict.fromkeys(headers, (height, width)))
    y = {client: torch.tensor(listed["label"].to_numpy()) for client, listed in clients.items()}
    source = make_source(
        files, y, reading, task=CLASSIFICATION, classes=len(class_names), classes_checked=True,
        class_names=tuple(class_names),
    )  # fmt: skip
    data = assemble_listed(replace(source, name=name, note=note), clients)
    if data.faults:
        raise UsageError(f"{root}: {'; '.join(data.faults)}: {name} needs all of its files, get them again")
    return data


def _list_files(root: Path, listed: pd.DataFrame) -> tuple[ImageFile, ...]:
    stamps = stamp(root / path for path in listed["path"])
    rows = zip(listed["path"], listed["part"], listed["label"], stamps, strict=True)
    return tuple(ImageFile(path, part, str(label), size, changed) for path, part, label, (_, size, changed) in rows)


def assemble_listed(source: Source, clients: Mapping[str, pd.DataFrame]) -> Federation:
    """Return the federation of ``source``, with the groups in the lists of ``clients``, which may share some."""
    made = assemble(source, ReadOptions())
    listed = pd.concat(dict(clients))
    if "group" not in listed:
        return made
    listed["group"] = number_groups(listed["group"].fillna("").tolist()).numpy()
    changed = []
    for client in made.clients:
        own = listed.loc[client.name]
        groups = {part: torch.tensor(own["group"][own["part"] == part].to_numpy()) for part in client.splits}
        splits = {part: split.replace(group=groups[part]) for part, split in client.splits.items()}
        changed.append(client.with_splits(splits))
    return replace(made, clients=tuple(changed))
