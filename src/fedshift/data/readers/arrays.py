"""Arrays and datasets: dictionaries in memory, ``.npz`` and ``.npy`` files, datasets of torch and HuggingFace.

A client has arrays by name, from a dictionary, a file ``client.npz`` or files ``client/train/x.npy``: ``x_train y_train
x_test y_test``, optionally ``x_val y_val`` (or ``valid``, ``validation``, ``dev``), masks also as ``m_train``, groups
as ``NAME_train``; or ``x y``, to be divided. Several inputs of a sample are ``x_train.NAME``, by the
names of the network's parameters. Or a client has pairs of arrays or datasets, or one dataset. Files are read without
pickle, so they cannot run code; ``.npy`` files stay on disk. For shapes see :func:`fedshift.data.samples.to_samples`.

Objects of pandas, Arrow and HuggingFace are recognized by their attributes; these libraries are not imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ...utils.errors import Ref, UsageError, unknown_name
from ...utils.files import open_regular
from ...utils.words import join_some
from ..agreement import refuse_other_class_names
from ..array_notices import describe_arrays
from ..arrays import LazyDataset, find_item_groups, holds_arrays, is_hub_dataset, list_class_names, read_part
from ..formats import explain_errors, open_arrays
from ..groups import read_groups
from ..identity import sort_names
from ..samples import join_several, read_targets, to_store
from ..schema import Schema
from ..source import SPLITS, Array, Decoded, Divide, ReadOptions, Rows, Source, choose_clients
from ..stores import DatasetStore

holds = "arrays"
options = frozenset({"test_fraction", "client_column", "target", "image_size", "groups"})

NAME = "own data"
"""Name of the federation of objects in memory."""
SPLIT_ENDS = {"train": ("train",), "validation": ("val", "valid", "validation", "dev"), "test": ("test",)}
"""Ends of array names, and names of folders of ``.npy`` files, of each split."""
SPLIT_OF = {end: split for split, ends in SPLIT_ENDS.items() for end in ends} | {"": ""}
"""Split of each end; samples without one are divided."""
ARRAY_FILE = re.compile(r"\.(np[yz]|pth?|pkl|mat|h5|hdf5)(\.gz)?$", re.IGNORECASE)
"""The end of the name of a file of arrays."""
UNPICKLED = "arrays of numbers, without pickle"
"""Contents of files, in messages."""
ACCEPTED = (
    "give (x_train, y_train, x_test, y_test), (x, y), which is divided, one map-style torch dataset or "
    "two, (train, test), whose samples are pairs (input, label), or a dictionary of either"
)


def can_read(source: object) -> bool:
    """Return whether ``source`` is a path to arrays, a dictionary of clients without tables, or a dataset of arrays."""
    if isinstance(source, Path):
        return bool(_find_files(source))
    return (isinstance(source, Mapping) or is_hub_dataset(source)) and not holds_tables(source)


def read(source: Any, reading: ReadOptions) -> Source:
    """Return the clients in ``source``; datasets and ``.npz`` files are read now."""
    if not holds_hub_datasets(source):
        for name in sorted({"client_column", "target"} & reading.changed if reading.schema is None else ()):
            raise UsageError("{} is for tables and datasets of HuggingFace, not for arrays: leave it out", Ref(name))
    if not isinstance(source, Path) and hold_all_clients(source, reading):
        return _read_whole(source if isinstance(source, Mapping) else {"": source}, reading)
    files = _find_files(source) if isinstance(source, Path) else {}
    if source in files.values() and reading.schema is None:
        raise UsageError(f"{source} is one client: give a directory with a file or folder for each client")
    splits, class_names, notices = list[_Split](), dict[str, Sequence[str]](), _name_unread(source, files)
    chosen = choose_clients(sort_names(files) or source, reading)
    for done, client in enumerate(chosen, 1):
        where = str(files.get(client, f"client {client!r}"))
        opened = _open(files[client], reading.groups) if files else nullcontext(_name_arrays(where, source[client]))
        with opened as arrays:
            given = _list_splits(where, arrays, reading.groups, notices if files else None)
            for split, (part, group) in given.items():
                told = f"{where}, {split or 'train'} data"
                class_names[told] = list_class_names(part, reading.target)
                made = _read_split(client, told, split, part, group, reading, splits)
                splits.append(made._replace(x=to_store(made.x, told)) if files else made)
        if files and reading.progress:
            reading.progress("arrays", done, len(chosen))
    refuse_other_class_names(class_names)
    name = source.resolve().name if files else NAME
    note = f"{{clients}} {'files of .npz' if files[chosen[0]].is_file() else 'folders of .npy'}" if files else ""
    return _make_source(splits, reading, name=name, note=note, notices=tuple(notices))


class _Split(NamedTuple):
    """Samples of one array: ``x`` as given, the array's targets, and their rows."""

    x: Any
    array: Array
    rows: Rows


def _make_source(splits: Sequence[_Split], reading: ReadOptions, **facts: Any) -> Source:
    rows = Rows.join([replace(own.rows, array=np.full(len(own.rows), at)) for at, own in enumerate(splits)])
    arrays = tuple(split.array for split in splits)
    return Source(rows=rows, arrays=arrays, decode=partial(_open_stores, splits, rows), task=reading.task, **facts)


def _open_stores(splits: Sequence[_Split], rows: Rows, divide: Divide) -> Decoded:
    """Return the clients' inputs; splits with one array share its store."""
    first = {id(split.x): split for split in reversed(splits)}
    stores = {key: to_store(split.x, split.array.where) for key, split in first.items()}
    trained = set(rows.array[divide(()) == "train"].tolist())
    named = {split.array.where: stores[id(split.x)] for at, split in enumerate(splits) if at in trained}
    notices = describe_arrays(named, several=any(split.array.inputs for split in splits))
    return Decoded(stores=[stores[id(split.x)] for split in splits], notices=tuple(notices))


# Files


def _find_files(path: Path) -> dict[str, Path]:
    """Return the ``.npz`` file, or folder of ``.npy`` files, of each client by name; ``path`` may be one itself."""
    if path.is_file() and path.suffix.lower() == ".npz":
        return {path.stem: path}
    if any((path / place).is_file() for place in ("x.npy", "train/x.npy")):
        return {path.resolve().name: path}
    files = {file.stem: file for file in sorted(path.glob("*")) if file.suffix.lower() == ".npz" and not file.is_dir()}
    mapped = sorted([*path.glob("*/x.npy"), *path.glob("*/*/x.npy")])
    folders = {name: path / name for name in (file.relative_to(path).parts[0] for file in mapped)}
    if files and folders:
        raise UsageError(f"{path} holds .npz files and folders of .npy files: put each kind into its own directory")
    return files or folders


def _name_unread(source: Any, clients: Mapping[str, Path]) -> list[str]:
    """Return a notice of files of arrays in a directory that belong to no client, if there are any."""
    found = sorted(source.iterdir()) if clients and source.is_dir() else []
    lost = [file.name for file in found if ARRAY_FILE.search(file.name) and file not in clients.values()]
    return [f"{source}: files that are not read: {join_some(lost)}: see the layouts of .npz and .npy"] if lost else []


@contextmanager
def _open(path: Path, groups: str | None) -> Iterator[Mapping[str, Any]]:
    """Open the arrays of a client by name; raise :class:`UsageError` if they are damaged or would need pickle."""
    if path.is_dir():
        wanted = ("x", "y", "m", *([groups] if groups else []))
        files = sorted(file for file in path.rglob("*.npy") if file.stem in wanted)
        yield {"_".join([file.stem, *file.relative_to(path).parts[:-1]]): _map(file) for file in files}
    else:
        fix = "write it again with numpy.savez, or leave it out"
        with explain_errors(path, UNPICKLED, fix), open_arrays(path) as arrays:
            yield arrays


def _map(file: Path) -> NDArray[Any]:
    with explain_errors(file, UNPICKLED, "write it again with numpy.save"), open_regular(file):
        mapped: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        return mapped


# Splits of a client


def _name_arrays(where: str, data: Any) -> Mapping[str, Any]:
    """Return arrays, or pairs or datasets of splits, by name; raise :class:`UsageError` for other ``data``."""
    if isinstance(data, Mapping):
        return data
    parts = list(data) if isinstance(data, tuple | list) else [data]
    pairs = all(_is_dataset(part) or (isinstance(part, tuple | list) and len(part) == 2) for part in parts)
    arrays = all(isinstance(part, list | Mapping) or hasattr(part, "__array__") for part in parts)
    names = {1: ("",) if _is_dataset(data) else (), 2: ("train", "test") if pairs else ("x", "y") if arrays else ()}
    if chosen := {**names, 4: ("x_train", "y_train", "x_test", "y_test")}.get(len(parts)):
        return dict(zip(chosen, parts, strict=True))
    kinds = ", ".join(type(part).__name__ for part in parts[:4]) + ", ..." * (len(parts) > 4)
    raise UsageError(
        f"{where}: {kinds or 'nothing'} given: {ACCEPTED}; columns of a table as pandas.DataFrame({{name: column}})"
    )


def _is_dataset(part: object) -> bool:
    return isinstance(part, Dataset | LazyDataset) or is_hub_dataset(part)


def _list_splits(
    where: str, arrays: Mapping[str, Any], groups: str | None, notices: list[str] | None
) -> dict[str, tuple[Any, Any]]:
    """Return a pair of arrays or a dataset, and the array of groups or None, by split; of ``""``, test data are drawn.

    ``groups``: name of the arrays with the group of each sample. ``notices`` receives the names of arrays that are not
    read; None: they are refused.
    """
    roles = [groups] if groups else []
    names, ends = _sort_names(where, arrays, ["", "x", "y", "m", *roles])
    if any("" in own for own in names.values()):
        roles = [""]
    else:
        masks = "m" in names.get("train", ()) and "y" not in names["train"]
        roles = ["x", "m" if masks else "y", *roles]
    found, used = dict[str, tuple[Any, Any]](), list[str]()
    wanted = [split for split in SPLITS if split in names or split != "validation"]
    for split in [""] if list(names) == [""] else wanted:
        for role in roles:
            if role not in names.get(split, ()):
                _refuse_lack(where, arrays, "_".join(filter(None, [role, ends.get(split, split)])))
            used += names[split][role].values()
        data, *others = (_take_arrays(where, arrays, names[split][role]) for role in roles)
        found[split] = ((data, others[0]) if others else data), others[1] if groups and others else None
    unused = [str(name) for name in arrays if str(name) not in used]
    if unused and notices is None:
        raise unknown_name(f"array of {where}", unused[0], used)
    if unused and notices is not None:
        notices.append(f"{where}: arrays that are not read: {join_some(unused)}; the data are {', '.join(used)}")
    return found


def _sort_names(
    where: str, arrays: Mapping[str, Any], roles: Sequence[str]
) -> tuple[dict[str, dict[str, dict[str, str]]], dict[str, str]]:
    """Return the names of ``arrays`` by split, role and input, and the end of each split's names; others are left out.

    The role of a dataset, or of a pair of arrays, is ``""``, and so is the input of samples with one.
    """
    names, ends = dict[str, dict[str, dict[str, str]]](), dict[str, str]()
    for name in map(str, arrays):
        stem, _, one = name.partition(".")
        role, _, end = (stem, "", "") if stem in roles else stem.rpartition("_")
        if role in roles and end in SPLIT_OF and (role == "x" or not one):
            split = SPLIT_OF[end]
            if (known := ends.setdefault(split, end)) != end:
                raise UsageError(f"{where} has {split} data twice, as {known!r} and {end!r}: leave one out")
            names.setdefault(split, {}).setdefault(role, {})[one] = name
    if len(names) > 1:
        names.pop("", None)
    return names, ends


def _take_arrays(where: str, arrays: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """Return the array of one name, or arrays by input."""
    if "" in names and len(names) > 1:
        raise UsageError(f"{where}: both arrays {' and '.join(map(repr, list(names.values())[:2]))}: leave one out")
    return {one: arrays[name] for one, name in names.items()} if "" not in names else arrays[names[""]]


def _refuse_lack(where: str, arrays: Mapping[str, Any], name: str) -> NoReturn:
    file = "/".join([*name.split("_")[:0:-1], f"{name.split('_')[0]}.npy"])
    raise UsageError(
        f"{where} has no array {name!r}, or file {file} (it has {join_some(map(str, arrays)) or 'none'}): "
        "name the arrays x_train, y_train, x_test, y_test, or x and y, to be divided; "
        "give columns of a table as pandas.DataFrame, or choose other clients ({})",
        Ref("domains"),
    )


def _read_split(
    client: str, where: str, split: str, data: Any, group: Any, reading: ReadOptions, before: Sequence[_Split],
    skip: Sequence[str] = (),
) -> _Split:  # fmt: skip
    """Return the samples of a split, with several inputs as those ``before``; ``skip``: columns of another role."""
    joined = reading.schema.preparation.inputs if isinstance(reading.schema, Schema) else ()
    order = [each.name for each in joined or (before[0].array.inputs if before else ())]
    if isinstance(data, LazyDataset):
        x: Any = DatasetStore(data, where, reading.target, order)
        y, inputs = x.targets, x.inputs
    else:
        x, y = read_part(data, where, reading.target, skip or list(filter(None, [reading.groups])))
        x, inputs = join_several(x, where, order)
    targets = read_targets(x, y, where, reading.task)
    if reading.groups and group is None and not _is_dataset(data):
        names = f"x_train, y_train, {reading.groups}_train and so on"
        raise UsageError(f"{{}}: {where} have no names: give a dictionary with {names}", Ref(groups=reading.groups))
    groups = find_item_groups(data, reading.groups, where) if _is_dataset(data) else None
    groups = groups if group is None else read_groups(group, where)
    if group is not None and np.shape(group) != (len(targets),):
        raise UsageError(f"{where}: groups of shape {np.shape(group)} for {len(targets)} samples: give each one group")
    rows = Rows.of(client, 0, len(targets), split=split, group=groups)
    return _Split(x, Array(where=where, y=targets, inputs=inputs), rows)


# Datasets of all clients


def _read_whole(datasets: Mapping[str, Any], reading: ReadOptions) -> Source:
    """Return the clients of datasets with a column of clients, by split (``""``: all in one)."""
    column, splits = str(reading.client_column), list[_Split]()
    skip = [column, *([reading.groups] if reading.groups else [])]
    refuse_other_class_names(
        {f"{split} data": list_class_names(data, reading.target, skip) for split, data in datasets.items()}
    )
    for split, data in datasets.items():
        for name in skip:
            if name not in data.column_names:
                raise unknown_name("column", name, data.column_names)
        where = f"data, {split} data" if split else "data"
        drawn = split != "validation" and "test" not in datasets
        made = _read_split("", where, "" if drawn else split, data, None, reading, splits, skip)
        splits.append(
            made._replace(
                rows=Rows.of(
                    list(map(str, data[column])), 0, len(made.rows), split=made.rows.split, group=made.rows.group
                )
            )
        )
    source = _make_source(splits, reading, name=NAME)
    chosen = choose_clients(sort_names(set(source.rows.client.tolist())), reading)
    rows = Rows.join([source.rows.take(source.rows.client == client) for client in chosen])
    return replace(source, rows=rows, decode=partial(_open_stores, splits, rows))


# Objects that hold clients


def is_table(thing: Any) -> bool:
    """Return whether ``thing`` is a table of pandas or Arrow, or a dataset of HuggingFace with single values."""
    if is_hub_dataset(thing):
        return not any(holds_arrays(thing, name) for name in thing.column_names)
    named = hasattr(thing, "columns") or hasattr(thing, "column_names")
    return named and (hasattr(thing, "iloc") or hasattr(thing, "to_pandas"))


def holds_tables(data: object) -> bool:
    """Return whether ``data`` are or contain tables."""
    return _holds(is_table, data)


def holds_hub_datasets(data: object) -> bool:
    """Return whether ``data`` are or contain HuggingFace datasets."""
    return _holds(lambda each: is_hub_dataset(each.dataset if isinstance(each, LazyDataset) else each), data)


def _holds(kind: Callable[[Any], bool], data: object) -> bool:
    if isinstance(data, NpzFile):
        return False
    if isinstance(data, Mapping):
        return any(_holds(kind, each) for each in data.values())
    return any(_holds(kind, each) for each in data) if isinstance(data, tuple | list) else kind(data)


def hold_all_clients(data: Any, reading: ReadOptions) -> bool:
    """Return whether ``data`` is one table or dataset of all clients, or one for each split, and not one by client.

    Raises :class:`UsageError` if no option names its column of clients, or one is named for a dictionary by client, or
    a client is named by something else than a text.
    """
    parts = data if isinstance(data, Mapping) else {"train": data}
    whole = bool(parts) and set(parts) <= set(SPLITS) and all(is_table(x) or is_hub_dataset(x) for x in parts.values())
    if whole and reading.client_column is None and reading.schema is None:
        raise UsageError(
            f"data is one {type(data).__name__} of all clients: say which column holds the client of each row "
            "({}), or give a dictionary, {client: data}",
            Ref("client_column"),
        )
    if not whole and reading.client_column is not None and reading.schema is None:
        raise UsageError(
            f"client_column={reading.client_column!r}: data is a dictionary by client already: leave it out"
        )
    for name in [] if whole else data:
        if not isinstance(name, str):
            raise UsageError(f"the client {name!r} of data is named by a {type(name).__name__}: give a text")
    return whole
