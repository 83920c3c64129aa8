"""Inputs and labels of one client from arrays, torch datasets or HuggingFace datasets.

HuggingFace datasets are recognized by their attributes (``column_names``, ``features``), so the library need not be
installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset, Subset

from ..utils.errors import Ref, UsageError
from ..utils.user_code import describe_error
from .groups import MARK, find_groups
from .inputs import arrange, refuse_several

INPUTS, LABELS = ("image", "img", "x", "pixel_values", "features"), ("label", "labels", "y", "target", "fine_label")
"""Usual names of the input and label columns of a HuggingFace dataset."""
Item = Callable[[Any], tuple[Any, Any]]
"""Function that returns input and target of an item."""


@dataclass(frozen=True, eq=False)
class LazyDataset:
    """A map-style dataset whose items are decoded when a batch needs them, instead of all at once.

    Random transforms are drawn each time, with a key of seed, client, step and item.

    Attributes:
        dataset: A torch dataset of pairs (input, target) or of dictionaries with both, or a HuggingFace dataset.
        targets: Targets of all items; None: the dataset's ``targets``, or else found by decoding every item once.
        workers: Number of processes that decode a batch together; fewer than 2: no extra processes.
        cache_bytes: Size in bytes of a cache of the most recently used decoded items. With a cache, random transforms
            draw only once for each item.

    """

    dataset: Any
    _: KW_ONLY
    targets: ArrayLike | None = None
    workers: int = 0
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("workers", "cache_bytes"):
            if type(value := getattr(self, name)) is not int or value < 0:
                raise UsageError(f"LazyDataset: {name}={value!r}: give a whole number of 0 or more")


def is_hub_dataset(thing: object) -> bool:
    """Return whether ``thing`` behaves like a HuggingFace ``datasets.Dataset``."""
    return isinstance(getattr(thing, "column_names", None), list) and hasattr(thing, "features")


def read_part(part: Any, where: str, target: str | None = None, skip: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return the inputs and labels of a split; a dataset is read once, sample by sample.

    Args:
        part: a pair of arrays; a map-style torch dataset of pairs (input, label); or a HuggingFace dataset.
        where: beginning of error messages.
        target: label column of a HuggingFace dataset; None: the column of classes, or one with a usual name.
        skip: columns of a HuggingFace dataset that are neither inputs nor labels.

    Raises:
        UsageError: samples are not such pairs, inputs differ in shape, or a sample cannot be read.

    """
    if isinstance(part, tuple | list) and len(part) == 2:
        return part[0], part[1]
    return _read_samples(part, where, item_reader(part, where, target, skip))


def item_reader(data: Any, where: str, target: str | None = None, skip: Sequence[str] = ()) -> Item:
    """Return a function that splits an item into input and target; arguments and errors as in :func:`read_part`."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        kind = "datasets.Dataset" if is_hub_dataset(data) else "torch.utils.data.Dataset"
        raise UsageError(f"{where}: {type(data).__name__} has no length: give a map-style {kind}")
    if not len(data):
        raise UsageError(f"{where}: empty; every client needs at least one sample in each split")
    if is_hub_dataset(data):
        inputs, label = find_columns(data, where, target, skip)
        return lambda row: ({name: row[name] for name in inputs}, row[label])
    return _require_pair


def find_targets(given: LazyDataset, where: str, target: str | None = None) -> NDArray[Any] | None:
    """Return the targets of all items, or None if only the items themselves have them."""
    data = given.dataset
    if given.targets is not None:
        found: Any = given.targets
    elif is_hub_dataset(data):
        found = data[find_columns(data, where, target, ())[1]]
    else:
        found = _list_targets(data)
    if found is None:
        return None
    targets = np.asarray(found)
    if targets.ndim < 1 or len(targets) != len(data):
        raise UsageError(f"{where}: targets of shape {targets.shape} for {len(data)} items; give one for each")
    return targets


def _list_targets(data: Any) -> NDArray[Any] | None:
    """Return the ``targets`` of a torchvision dataset or of a subset of one."""
    if isinstance(data, Subset):
        whole = _list_targets(data.dataset)
        return None if whole is None else whole[np.asarray(data.indices)]
    if getattr(data, "target_transform", None) is not None or not hasattr(data, "targets"):
        return None
    return np.asarray(data.targets)


def find_item_groups(data: Any, groups: str | None, where: str) -> NDArray[np.str_]:
    """Return the group of each item of a torch dataset; empty if there are none.

    Args:
        data: a dataset, or a subset or :class:`LazyDataset` of one.
        groups: attribute of the dataset with one value for each item; or, for datasets of files such as torchvision's
            ``ImageFolder``, as :func:`~fedshift.data.groups.find_groups` takes it.
        where: beginning of error messages.

    Raises:
        UsageError: the dataset has no such attribute and lists no files, or lengths differ.

    """
    if isinstance(data, LazyDataset):
        return find_item_groups(data.dataset, groups, where)
    if isinstance(data, Subset):
        whole = find_item_groups(data.dataset, groups, where)
        return whole[np.asarray(data.indices)] if len(whole) else whole
    files = _name_files(data)
    found = getattr(data, groups, None) if groups else None
    if found is None and files and (groups is None or MARK in groups or groups.endswith(".csv")):
        root = getattr(data, "root", "")
        return find_groups(groups, [os.path.relpath(file, root) if root else file for file in files])
    if groups is None:
        return np.array([], np.str_)
    if found is None:
        raise UsageError(
            f"{{}}: {where}: {type(data).__name__} has no attribute {groups!r}: give it the group of each item",
            Ref(groups=groups),
        )
    values = np.asarray(found)
    if values.shape != (len(data),):
        raise UsageError(f"{where}: {groups} of shape {values.shape} for {len(data)} items: give each one group")
    return values.astype(np.str_)


def list_files(data: Any) -> list[str]:
    """Return the file of each item that a dataset lists with its ``loader``, as torchvision's ``ImageFolder`` does.

    Empty if it is neither such a dataset nor a subset of one.
    """
    if isinstance(data, Subset):
        whole = list_files(data.dataset)
        return [whole[index] for index in data.indices] if whole else []
    return _name_files(data) if hasattr(data, "loader") else []


def _name_files(data: Any) -> list[str]:
    """Return the files in the ``samples`` of a dataset, if there is one for each item."""
    items = getattr(data, "samples", ())
    files = [str(item[0]) for item in items if isinstance(item, tuple) and isinstance(item[0], str | os.PathLike)]
    return files if len(files) == len(data) else []


def find_columns(data: Any, where: str, target: str | None, skip: Sequence[str]) -> tuple[list[str], str]:
    """Return the names of the input columns, all that hold images or arrays, and of the label column of HuggingFace."""
    names, label = [name for name in data.column_names if name not in skip], _find_label(data, target, skip)
    if label not in names:
        raise UsageError(
            f"{where}: say which column holds the label ({{}}): columns are {', '.join(names)}", Ref("target")
        )
    rest = [name for name in names if name != label]
    found = [name for name in rest if holds_arrays(data, name)]
    found = found or [name for name in INPUTS if name in rest][:1]
    if not found:
        raise UsageError(
            f"{where}: which of the columns {', '.join(rest)} holds the inputs is not clear: leave one of images or "
            "arrays, or several, which are then several inputs by name (select_columns)"
        )
    return found, label


def _find_label(data: Any, target: str | None, skip: Sequence[str]) -> str:
    """Return the name of the label column of a HuggingFace dataset; empty if there is none."""
    names = [name for name in data.column_names if name not in skip]
    classes = [name for name in names if type(data.features[name]).__name__ == "ClassLabel"]
    usual = [name for name in LABELS if name in names]
    return target or next(iter(classes if len(classes) == 1 else usual), "")


def list_class_names(part: Any, target: str | None = None, skip: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ... of a dataset, if it has any; arguments as in :func:`read_part`.

    They are in a ``ClassLabel`` of HuggingFace, or in the ``classes`` attribute of a torch dataset (of torchvision).
    """
    if isinstance(part, LazyDataset):
        part = None if part.targets is not None else part.dataset
    while isinstance(part, Subset):
        part = part.dataset
    if is_hub_dataset(part):
        label = _find_label(part, target, skip)
        names = getattr(part.features[label], "names", ()) if label in part.column_names else ()
    else:
        changed = getattr(part, "target_transform", None) is not None
        names = () if changed or not isinstance(part, Dataset) else getattr(part, "classes", ())
    return tuple(names) if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else ()


def holds_arrays(data: Any, column: str) -> bool:
    """Return whether a column of a HuggingFace dataset contains images or arrays rather than single values."""
    return type(data.features[column]).__name__ not in ("Value", "ClassLabel")


def _require_pair(sample: Any) -> tuple[Any, Any]:
    """Return input and target; of a dictionary, all other entries of numbers are inputs, and texts are none."""
    if isinstance(sample, Mapping):
        usual, label = (next((name for name in names if name in sample), None) for names in (INPUTS, LABELS))
        rest = {name: x for name, x in sample.items() if name != label}
        inputs = {name: x for name, x in rest.items() if name == usual or _holds_numbers(x)}
        if label and inputs:
            return inputs, sample[label]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise UsageError(f"is a {type(sample).__name__}, not a pair (input, label)")
    return sample[0], sample[1]


def _holds_numbers(x: Any) -> bool:
    """Return whether a value is a picture, a number or an array of numbers, rather than a file's name, for example."""
    if isinstance(getattr(x, "mode", None), str):
        return True
    return not isinstance(x, str | Mapping) and x is not None and np.asarray(x).dtype.kind in "uifb"


def read_item(data: Any, number: int, where: str, split: Item) -> tuple[Any, NDArray[Any]]:
    """Return an item's input, or dictionary of inputs, and target as arrays, separated by ``split``.

    Raises :class:`UsageError` if this fails.
    """
    try:
        x, y = split(data[number])
    except UsageError as error:
        raise UsageError(f"{where}: sample {number} {error}") from error
    except Exception as error:
        raise UsageError(
            f"{where}: sample {number} of {type(data).__name__} cannot be read: {describe_error(error)}"
        ) from error
    if isinstance(x, Mapping) and len(x) > 1:
        return {name: _to_array(each) for name, each in x.items()}, np.asarray(y)
    x = arrange(x, ())
    refuse_several(x, f"{where}: sample {number}")
    return _to_array(x), np.asarray(y)


def _to_array(x: Any) -> NDArray[Any]:
    mode = getattr(x, "mode", None)  # set for pictures; palette indices, for example, are not colors
    return np.asarray(x.convert("RGB") if isinstance(mode, str) and mode not in ("L", "RGB") else x)


def _read_samples(data: Any, where: str, split: Item) -> tuple[Any, np.ndarray]:
    inputs, labels = [], []
    for number in range(len(data)):
        x, y = read_item(data, number, where, split)
        inputs.append(x)
        labels.append(y)
        require_shape(x, inputs[0], number, where)
    if isinstance(inputs[0], Mapping):
        return {name: np.stack([x[name] for x in inputs]) for name in inputs[0]}, np.stack(labels)
    return np.stack(inputs), np.stack(labels)


def require_shape(x: Any, first: Any, number: int, where: str) -> None:
    """Raise :class:`UsageError` unless the item with this ``number`` has the inputs and shapes of the ``first``."""
    found, known = (
        {name: each.shape for name, each in one.items()} if isinstance(one, Mapping) else one.shape
        for one in (x, first)
    )
    if found != known:
        raise UsageError(
            f"{where}: sample {number} has shape {found} and the first {known}: bring all to one shape (a transform of "
            "the dataset; pad texts to one length)"
        )
