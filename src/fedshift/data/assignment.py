"""Assignments of samples to clients as tables: a split can be saved to a CSV file and loaded from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from os.path import commonprefix
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ..utils.csv_cells import unescape_cell
from ..utils.errors import UsageError
from ..utils.files import open_regular
from .federation import ClientData, Federation
from .partition import Change
from .samples import Samples, join_samples
from .source import SPLITS

SPLIT_COLUMNS = ["client", "split", "domain", "source", "row"]


def saved(*, path: str) -> Change:
    """Apply a split that :func:`describe_assignment` saved in a CSV file to the same data."""
    if not isinstance(path, str):
        raise UsageError(f"saved(path={path!r}): give the path of a CSV file as text")
    return partial(_read_assignment, path=Path(path))


def describe_assignment(data: Federation, changes: Sequence[Change]) -> pd.DataFrame:
    """Return a table with a row ``client split domain source row`` for every sample after ``changes``.

    ``domain`` and ``source`` are the client and split in ``data`` that the sample comes from; ``row`` is its index
    there. ``client`` is a name, or a prefix followed by ``*`` that matches all clients that share the sample. Changes
    depend only on labels and names, and here each sample is its own number.
    """
    splits = [(client.name, name, len(split)) for client in data.clients for name, split in client.splits.items()]
    rows = [(domain, source, row) for domain, source, size in splits for row in range(size)]
    origin = pd.DataFrame(rows, columns=SPLIT_COLUMNS[2:])
    numbers = torch.arange(len(origin))[:, None]
    places = iter(torch.split(torch.arange(len(origin)), [size for *_, size in splits]))

    def number(split: Samples) -> Samples:
        return Samples(x=numbers, y=split.y, rows=next(places), group=split.group)

    clients = [c.with_splits({name: number(split) for name, split in c.splits.items()}) for c in data.clients]
    changed = replace(data, clients=tuple(clients))
    for change in changes:
        changed = change(changed)
    users: dict[Samples, list[str]] = {}
    for client in changed.clients:
        for split in client.splits.values():
            users.setdefault(split, []).append(client.name)
    blocks = {
        (_abbreviate(users[split], changed.names) or client.name, name): split.rows.numpy()
        for client in changed.clients
        for name, split in client.splits.items()
    }
    tables = [origin.iloc[rows].assign(client=who, split=name) for (who, name), rows in blocks.items()]
    return pd.concat(tables, ignore_index=True)[SPLIT_COLUMNS]


def _abbreviate(names: Sequence[str], known: Sequence[str]) -> str | None:
    """Return the common prefix of ``names`` followed by a star, or None if other names in ``known`` match too."""
    start = commonprefix(names)  # noqa: RUF071 - of names, not of paths
    return f"{start}*" if 1 < len(names) == sum(name.startswith(start) for name in known) else None


def _read_assignment(data: Federation, path: Path) -> Federation:
    try:
        with open_regular(path) as file:
            table = pd.read_csv(file, dtype=dict.fromkeys(SPLIT_COLUMNS[:4], str), keep_default_na=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"saved split {path} cannot be read ({error}): give a CSV file that fedshift saved") from error
    if list(table.columns) != SPLIT_COLUMNS:
        raise UsageError(f"{path} has columns {', '.join(table.columns)}: a saved split has {', '.join(SPLIT_COLUMNS)}")
    if table["row"].dtype.kind != "i" or not set(table["split"]) <= set(SPLITS):
        raise UsageError(f"{path}: rows must be whole numbers, and splits one of {', '.join(SPLITS)}")
    table = table.assign(client=table["client"].map(unescape_cell), domain=table["domain"].map(unescape_cell))
    origins = _read_origins(data, table, path)
    splits: dict[str, dict[str, Samples]] = {}
    for (client, split), wanted in table.groupby(SPLIT_COLUMNS[:2], sort=False):
        splits.setdefault(str(client), {})[str(split)] = _gather(origins, wanted)
    shared = {name.removesuffix("*"): splits.pop(name) for name in list(splits) if name.endswith("*")}
    clients = []
    for name, parts in splits.items():
        for start, common in shared.items():
            parts = {**common, **parts} if name.startswith(start) else parts
        if not {"train", "test"} <= parts.keys():
            raise UsageError(f"{path}: client {name!r} has {' and '.join(parts)} samples; it needs train and test")
        clients.append(ClientData.from_splits(name, parts))
    return replace(data, clients=tuple(clients)).tell_shared_tests()


def _read_origins(data: Federation, table: pd.DataFrame, path: Path) -> dict[tuple[str, str], Samples]:
    """Return the splits of ``data`` that ``table`` takes samples from, by client and split.

    Splits of one type and scaling share a store, so that a sample of several clients is recognized as one.
    """
    found: dict[tuple[str, str], Samples] = {}
    for (domain, source), group in table.groupby(SPLIT_COLUMNS[2:4], sort=False):
        origin = data.client(str(domain)).splits.get(str(source))
        size = 0 if origin is None else len(origin)
        if origin is None or not group["row"].between(0, size - 1).all():
            raise UsageError(
                f"{path} takes rows {group['row'].min()} to {group['row'].max()} of client {domain!r}, {source} data, "
                f"which has {size} samples here: use the data with which the split was saved"
            )
        found[str(domain), str(source)] = origin
    if table.drop_duplicates(SPLIT_COLUMNS[:4]).groupby(SPLIT_COLUMNS[:2]).size().max() == 1:  # nothing is joined
        return found
    kinds: dict[object, dict[Samples, None]] = {}
    for split in found.values():
        kinds.setdefault((split.shape, split.dtype, split.normalization, split.lazy), {})[split] = None
    shared: dict[Samples, Samples] = {}
    for splits in kinds.values():
        joined = join_samples(list(splits))
        places = torch.split(torch.arange(len(joined)), list(map(len, splits)))
        shared.update(zip(splits, map(joined.take, places), strict=True))
    return {key: shared[split] for key, split in found.items()}


def _gather(origins: Mapping[tuple[str, str], Samples], wanted: pd.DataFrame) -> Samples:
    """Return the samples in the rows of ``wanted``, in the same order."""
    parts, places = [], []
    for (domain, source), group in wanted.reset_index().groupby(SPLIT_COLUMNS[2:4], sort=False):
        parts.append(origins[str(domain), str(source)].take(torch.tensor(group["row"].to_list())))
        places.append(group.index.to_numpy())
    return join_samples(parts).take(torch.from_numpy(np.argsort(np.concatenate(places))))
