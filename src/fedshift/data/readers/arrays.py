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
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from ..files.read_options import ReadOptions
from ..formats import open_arrays
from ..groups import read_groups
from ..identity import sort_names
from ..samples import join_several, read_targets, to_store
from ..scan import SPLITS, UNGROUPED, Assign, Loaded, Part, Scan, choose_clients
from ..schema import Schema
from ..stores import DatasetStore

holds = "arrays"
options = frozenset({"test_fraction", "client_column", "target", "image_size", "groups"})

NAME = "own data"
"""Name of the federation of objects in memory."""
SPLIT_ENDS = {"train": ("train",), "validation": ("val", "valid", "validation", "dev"), "test": ("test",)}
"""Ends of array names, and names of folders of ``.npy`` files, of each split."""
ARRAY_FILE = re.compile(r"\.(np[yz]|pth?|pkl|mat|h5|hdf5)(\.gz)?$", re.IGNORECASE)
"""The end of the name of a file of arrays."""
ACCEPTED = (
    "give (x_train, y_train, x_test, y_test), (x, y), which is divided, one map-style torch dataset or "
    "two, (train, test), whose samples are pairs (input, label), or a dictionary of either"
)


def can_read(source: object) -> bool:
    """Return whether ``source`` is a path to arrays, a dictionary of clients without tables, or a dataset of arrays."""
    if isinstance(source, Path):
        return bool(_find_files(source))
    return (isinstance(source, Mapping) or is_hub_dataset(source)) and not holds_tables(source)


def scan(source: Any, reading: ReadOptions) -> Scan:
    """Return the clients in ``source``; datasets and ``.npz`` files are read now."""
    if not holds_hub_datasets(source):
        for name in sorted({"client_column", "target"} & reading.changed if reading.schema is None else ()):
            raise UsageError("{} is for tables and datasets of HuggingFace, not for arrays: leave it out", Ref(name))
    if not isinstance(source, Path) and hold_all_clients(source, reading):
        return _scan_whole(source if isinstance(source, Mapping) else {"": source}, reading)
    files = _find_files(source) if isinstance(source, Path) else {}
    if source in files.values() and reading.schema is None:
        raise UsageError(f"{source} is one client: give a directory with a file or folder for each client")
    parts, class_names, notices = list[Part](), dict[str, Sequence[str]](), _name_unread(source, files)
    chosen = choose_clients(sort_names(files) or source, reading)
    for done, client in enumerate(chosen, 1):
        where = str(files.get(client, f"client {client!r}"))
        opened = _open(files[client], reading.groups) if files else nullcontext(_name_arrays(where, source[client]))
        with opened as arrays:
            splits = _list_splits(where, arrays, reading.groups, notices if files else None)
            for split, (part, group) in splits.items():
                told = f"{where}, {split or 'train'} data"
                class_names[told] = list_class_names(part, reading.target)
                made = _scan_split(client, told, split, part, group, reading, _list_inputs(reading, parts))
                parts.append(replace(made, source=to_store(made.source, told)) if files else made)
        if files and reading.progress:
            reading.progress("arrays", done, len(chosen))
    refuse_other_class_names(class_names)
    name = source.resolve().name if files else NAME
    note = f"{{clients}} {'files of .npz' if files[chosen[0]].is_file() else 'folders of .npy'}" if files else ""
    return Scan(name=name, parts=tuple(parts), task=reading.task, note=note, notices=tuple(notices))


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return the clients' inputs; parts with one array share its store."""
    keys = [id(part.source) for part in scan.parts]
    sources = dict(zip(reversed(keys), reversed(scan.parts), strict=True))  # the first of those that share an array
    stores = {key: to_store(part.source, part.where) for key, part in sources.items()}
    trained = {
        part.where: stores[key]
        for key, part in zip(keys, scan.parts, strict=True)
        if (assign(part, ()) == SPLITS.index("train")).any()
    }
    notices = describe_arrays(trained, several=any(part.inputs for part in scan.parts))
    return Loaded(stores=[stores[key] for key in keys], notices=tuple(notices))


# Files


def _find_files(path: Path) -> dict[str, Path]:
    """Return the ``.npz`` file, or folder of ``.npy`` files, of each client by name; ``path`` may be one itself."""
    if path.is_file() and path.suffix.lower() == ".npz":
        return {path.stem: path}
    if any((path / place).is_file() for place in ("x.npy", "train/x.npy")):
        return {path.resolve().name: path}
    files = {file.stem: file for file in sorted(path.glob("*")) if file.suffix.lower() == ".npz" and file.is_file()}
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
        files = {file: "_".join([file.stem, *file.relative_to(path).parts[:-1]]) for file in path.rglob("*.npy")}
        wanted = ("x", "y", "m", *([groups] if groups else []))
        yield {name: _map(file) for file, name in sorted(files.items()) if file.stem in wanted}
        return
    if not zipfile.is_zipfile(path):
        raise UsageError(
            f"{path} is not an .npz file, or is cut short: write it again with numpy.savez, or leave it out"
        )
    try:
        with open_arrays(path) as arrays:
            yield arrays
    except UsageError:
        raise
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{path} cannot be read without pickle ({error}): write it again with arrays of numbers, or leave it out"
        ) from error


def _map(file: Path) -> NDArray[Any]:
    try:
        with open_regular(file):
            mapped: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
            return mapped
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"{file} cannot be mapped ({error}): write it again with numpy.save, with an array of numbers"
        ) from error


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
    if keys := {"": ""} if "" in arrays else _find_ends(where, arrays, ("",)):
        keys = keys if "" in keys else {"train": "train", "test": "test"} | keys
        _require_arrays(where, arrays, keys.values())
        _name_unused(where, arrays, keys.values(), notices)
        return {split: (arrays[key], None) for split, key in keys.items()}
    ends = _find_ends(where, {str(name).partition(".")[0] for name in arrays}, ("x_", "y_", "m_"))
    named = {split: f"_{ends.get(split, split)}" for split in SPLIT_ENDS if split in ends or split != "validation"}
    named = named if ends or not ("x" in arrays and "y" in arrays) else {"": ""}
    target = "m" if "m_train" in arrays and "y_train" not in arrays else "y"
    found, used = dict[str, tuple[Any, Any]](), list[str]()
    for split, end in named.items():
        inputs = [str(name) for name in arrays if str(name).startswith(f"x{end}.")]
        others = [f"{target}{end}", *([f"{groups}{end}"] if groups else [])]
        used += [*(inputs or [f"x{end}"]), *others]
        _require_arrays(where, arrays, used)
        if inputs and f"x{end}" in arrays:
            raise UsageError(f"{where}: both arrays 'x{end}' and {inputs[0]!r}: leave one out")
        x = {name.removeprefix(f"x{end}."): arrays[name] for name in inputs} if inputs else arrays[f"x{end}"]
        found[split] = (x, arrays[others[0]]), arrays[others[1]] if groups else None
    _name_unused(where, arrays, used, notices)
    return found


def _find_ends(where: str, names: Collection[str], starts: Sequence[str]) -> dict[str, str]:
    """Return the end of the names of each split's arrays if, after one of ``starts``, it is among ``names``."""
    found = dict[str, str]()
    for split, ends in SPLIT_ENDS.items():
        here = [end for end in ends if any(f"{start}{end}" in names for start in starts)]
        if len(here) > 1:
            raise UsageError(f"{where} has {split} data twice, as {' and '.join(map(repr, here))}: leave one out")
        if here:
            found[split] = here[0]
    return found


def _require_arrays(where: str, arrays: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise :class:`UsageError` unless there are ``arrays`` of all ``names``."""
    for name in names:
        if name not in arrays:
            file = "/".join([*name.split("_")[:0:-1], f"{name.split('_')[0]}.npy"])
            raise UsageError(
                f"{where} has no array {name!r}, or file {file} (it has {join_some(map(str, arrays)) or 'none'}): "
                "name the arrays x_train, y_train, x_test, y_test, or x and y, to be divided; "
                "give columns of a table as pandas.DataFrame, or choose other clients ({})",
                Ref("domains"),
            )


def _name_unused(where: str, arrays: Iterable[object], used: Collection[str], notices: list[str] | None) -> None:
    """Add names of ``arrays`` that are not ``used`` to ``notices``; without these, refuse them."""
    unused = [str(name) for name in arrays if name not in used]
    if unused and notices is None:
        raise unknown_name(f"array of {where}", unused[0], used)
    if unused and notices is not None:
        notices.append(f"{where}: arrays that are not read: {join_some(unused)}; the data are {', '.join(used)}")


def _scan_split(
    client: str, where: str, split: str, data: Any, group: Any, reading: ReadOptions, order: Sequence[str],
    skip: Sequence[str] = (),
) -> Part:  # fmt: skip
    """Return the samples of a split; ``order`` of several inputs, ``skip``: columns with another role."""
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
    groups = find_item_groups(data, reading.groups, where) if _is_dataset(data) else UNGROUPED
    if group is not None:
        groups = read_groups(group, where)
        if groups.shape != (len(targets),):
            raise UsageError(f"{where}: groups of shape {groups.shape} for {len(targets)} samples: give each one group")
    return Part.whole(client, where, targets, split, x, groups, inputs)


def _list_inputs(reading: ReadOptions, parts: Sequence[Part]) -> list[str]:
    """Return the names of several inputs, in the order of the run that the data join, or else of the first part."""
    inputs = reading.schema.preparation.inputs if isinstance(reading.schema, Schema) else ()
    return [each.name for each in inputs or [each for part in parts[:1] for each in part.inputs]]


# Datasets of all clients


def _scan_whole(splits: Mapping[str, Any], reading: ReadOptions) -> Scan:
    """Return the clients of datasets with a column of clients, by split (``""``: all in one)."""
    column, parts = str(reading.client_column), list[Part]()
    skip = [column, *([reading.groups] if reading.groups else [])]
    refuse_other_class_names(
        {f"{split} data": list_class_names(data, reading.target, skip) for split, data in splits.items()}
    )
    for split, data in splits.items():
        for name in skip:
            if name not in data.column_names:
                raise unknown_name("column", name, data.column_names)
        where = f"data, {split} data" if split else "data"
        drawn = split != "validation" and "test" not in splits
        part = _scan_split("", where, "" if drawn else split, data, None, reading, _list_inputs(reading, parts), skip)
        owner = np.array(list(map(str, data[column])))
        for client in np.unique(owner).tolist():
            rows = np.flatnonzero(owner == client)
            told = f"client {client!r}, {split or 'train'} data"
            group = part.group[rows] if len(part.group) else UNGROUPED
            y, side = part.y[rows], part.side[rows]
            parts.append(replace(part, client=client, where=told, y=y, side=side, rows=rows, group=group))
    chosen = choose_clients(sort_names({part.client for part in parts}), reading)
    ordered = tuple(part for client in chosen for part in parts if part.client == client)
    return Scan(name=NAME, parts=ordered, task=reading.task)


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
    parts = data.values() if isinstance(data, Mapping) else [data]
    whole = (not isinstance(data, Mapping) or (bool(data) and set(data) <= set(SPLITS))) and all(
        is_table(part) or is_hub_dataset(part) for part in parts
    )
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
