"""Inputs and labels of one client from arrays, torch datasets or HuggingFace datasets.

HuggingFace datasets are recognized by their attributes (``column_names``, ``features``), so the library need not be
installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from ..utils.errors import Ref, UsageError
from ..utils.user_code import describe_error
from .groups import MARK, TABLES, find_groups, read_groups
from .inputs import arrange, refuse_several, to_numbers

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
        cache_bytes: Size in bytes of a cache of the first decoded items. With a cache, random transforms draw only once
            for each item.

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
    split, inputs, labels = item_reader(part, where, target, skip), list[Any](), list[Any]()
    for number in range(len(part)):
        x, y = read_item(part, number, where, split)
        inputs.append(x)
        labels.append(y)
        require_shape(x, inputs[0], number, where)
        require_shape(y, labels[0], number, f"{where}, labels")
    if isinstance(inputs[0], Mapping):
        return {name: np.stack([x[name] for x in inputs]) for name in inputs[0]}, np.stack(labels)
    return np.stack(inputs), np.stack(labels)


def item_reader(data: Any, where: str, target: str | None = None, skip: Sequence[str] = ()) -> Item:
    """Return a function that splits an item into input and target; arguments and errors as in :func:`read_part`."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UsageError(f"{where}: {type(data).__name__} has no length: give a map-style dataset, not a stream")
    if not len(data):
        raise UsageError(f"{where}: empty; every client needs at least one sample in each split")
    if is_hub_dataset(data):
        inputs, label = _find_columns(data, where, target, skip)
        return lambda row: ({name: row[name] for name in inputs}, row[label])
    return _split_pair


def find_targets(given: LazyDataset, where: str, target: str | None = None) -> NDArray[Any] | None:
    """Return the targets of all items, or None if only the items themselves have them."""
    data, found = given.dataset, given.targets
    if found is None:  # unless a transform changes them
        hub = is_hub_dataset(data) and _find_columns(data, where, target, ())[1]
        found = data[hub] if hub else _take_items(data, lambda d: None if _changes(d) else getattr(d, "targets", None))
    if found is None:
        return None
    targets = to_numbers(found, f"{where}, targets")
    if targets.ndim < 1 or len(targets) != len(data):
        raise UsageError(f"{where}: targets of shape {targets.shape} for {len(data)} items; give one for each")
    return targets


def _take_items(data: Any, read: Callable[[Any], Any]) -> Any:
    """Return what ``read`` returns for all items of a dataset, or the items of a subset; None if it returns None."""
    if isinstance(data, LazyDataset):
        return _take_items(data.dataset, read)
    if isinstance(data, Subset):
        whole = _take_items(data.dataset, read)
        return None if whole is None else np.asarray(whole)[np.asarray(data.indices)]
    return read(data)


def _changes(data: Any) -> bool:
    """Return whether a dataset such as torchvision's changes its targets by a transform."""
    return getattr(data, "target_transform", None) is not None


def find_item_groups(data: Any, groups: str | None, where: str) -> NDArray[np.str_]:
    """Return the group of each item of a dataset; empty if there are none.

    Args:
        data: a dataset, or a subset or :class:`LazyDataset` of one.
        groups: column of a HuggingFace dataset, or attribute of a torch dataset, with one value for each item; or, for
            datasets of files such as torchvision's ``ImageFolder``, as :func:`~fedshift.data.groups.find_groups` takes
            it.
        where: beginning of error messages.

    Raises:
        UsageError: the dataset has no such column or attribute and lists no files, or lengths differ.

    """
    found = _take_items(data, partial(_list_groups, groups=groups, where=where))
    return read_groups([] if found is None else found, where)


def _list_groups(whole: Any, groups: str | None, where: str) -> Any:
    found: Any = None
    files = _name_files(whole)
    if groups is not None:
        hub = is_hub_dataset(whole) and groups in whole.column_names
        found = whole[groups] if hub else getattr(whole, groups, None)
    if found is None and files and (groups is None or MARK in groups or groups.lower().endswith(TABLES)):
        root = getattr(whole, "root", "")
        named = find_groups(groups, [os.path.relpath(file, root) if root else file for file in files])
        return named if len(named) else None
    if groups is not None and np.shape(found) != (len(whole),):
        lack = f"{type(whole).__name__} has no attribute or column {groups!r}"
        said = lack if found is None else f"{groups} of shape {np.shape(found)} for {len(whole)} items"
        raise UsageError(f"{{}}: {where}: {said}: give each item one group", Ref(groups=groups))
    return found


def list_files(data: Any) -> list[str]:
    """Return the file of each item that a dataset lists with its ``loader``, as torchvision's ``ImageFolder`` does.

    Empty if it is neither such a dataset nor a subset of one.
    """
    found = _take_items(data, lambda whole: _name_files(whole) or None if hasattr(whole, "loader") else None)
    return [] if found is None else list(map(str, found))


def _name_files(data: Any) -> list[str]:
    items = getattr(data, "samples", ())
    files = [str(item[0]) for item in items if isinstance(item, tuple) and isinstance(item[0], str | os.PathLike)]
    return files if len(files) == len(data) else []


def _find_columns(data: Any, where: str, target: str | None, skip: Sequence[str]) -> tuple[list[str], str]:
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
        names = () if _changes(part) or not isinstance(part, Dataset) else getattr(part, "classes", ())
    return tuple(names) if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else ()


def holds_arrays(data: Any, column: str) -> bool:
    """Return whether a column of a HuggingFace dataset contains images or arrays rather than single values."""
    return type(data.features[column]).__name__ not in ("Value", "ClassLabel")


def _split_pair(sample: Any) -> tuple[Any, Any]:
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
    if isinstance(x, Image.Image | Tensor):
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
    where = f"{where}: sample {number}"
    target = to_numbers(y, f"{where}, label")
    if isinstance(x, Mapping) and len(x) > 1:
        return {name: to_numbers(_to_pixels(each), where) for name, each in x.items()}, target
    x = arrange(x, ())
    refuse_several(x, where)
    return to_numbers(_to_pixels(x), where), target


def _to_pixels(x: Any) -> Any:
    """Return a picture in gray or RGB, composited over white; else ``x`` itself."""
    if not isinstance(x, Image.Image) or x.mode in ("L", "RGB", "F") or x.mode.startswith("I"):
        return x
    if "transparency" in x.info or x.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        over = x.convert("RGBA")
        x = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return x.convert("RGB")  # palette indices, for example, are not colors


def require_shape(x: Any, first: Any, number: int, where: str) -> None:
    """Raise :class:`UsageError` unless the item with this ``number`` has the inputs and shapes of the ``first``.

    Pixels, 8-bit integers and Booleans, must be so in both.
    """
    found, known = _describe(x), _describe(first)
    if found != known:
        raise UsageError(
            f"{where}: sample {number} has shape {found} and the first {known}: bring all to one shape and type (a "
            "transform of the dataset; pad texts to one length)"
        )


def _describe(x: Any) -> Any:
    """Return the shape of an array, or of several by name, with its type if values mean pixels."""
    if isinstance(x, Mapping):
        return {name: _describe(each) for name, each in x.items()}
    return f"{x.shape} of {x.dtype}" if x.ndim > 1 and x.dtype in (np.uint8, np.bool_) else x.shape
