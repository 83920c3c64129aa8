"""Downloads of benchmarks from huggingface.co, written as files that the loaders can read.

Images of several clients become files ``hub/<client>/<split>/<class>/<number>.<format>``, byte for byte (without the
split level if there is only one split); other data sets become ``<name>.npz`` with x_train, y_train, x_test and y_test.
This needs the package ``datasets`` (``pip install 'fedshift[hub]'``), which caches its downloads.
"""

from __future__ import annotations

import importlib
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..utils.errors import FedshiftError, Ref, UsageError
from .datasets._card import Card
from .files.read_options import Progress

_IMAGE, _LABEL, _CLIENT = ("image", "img"), ("label", "fine_label"), ("domain", "center")
"""Names of the columns with the image, the label and the client in the data sets listed on cards."""


def fetch_from_hub(name: str, card: Card, folder: Path, *, progress: Progress | None = None) -> list[Path]:
    """Write the data set ``card.hub`` (``id`` or ``id:configuration``) into ``folder`` and return the path written.

    Existing files are kept. Raises :class:`UsageError` if the package ``datasets`` is missing, and
    :class:`FedshiftError` if the data set cannot be fetched, has other columns, or cannot be written.
    """
    tree, packed = folder / "hub", folder / f"{name}.npz"
    there = [place for place in (tree, packed) if place.exists()]
    if there:
        return there
    try:
        datasets: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"fetching {name!r} from huggingface.co needs the package datasets: pip install 'fedshift[hub]'"
        ) from error
    source = f"https://huggingface.co/datasets/{card.hub}"
    by_hand = f"get the files from {card.homepage} and put into {folder} {card.layout}"
    try:
        loaded = datasets.load_dataset(*card.hub.split(":"))
        image = _find_column(next(iter(loaded.values())), _IMAGE)
        splits = {split: rows.cast_column(image, datasets.Image(decode=False)) for split, rows in loaded.items()}
    except Exception as error:  # the library, the network or a server may raise anything
        raise FedshiftError(f"{source} cannot be fetched: {error}. Try again later, or {by_hand}") from error
    part = folder / "hub.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        if any(column in rows.features for rows in splits.values() for column in _CLIENT):
            for split, rows in splits.items():
                _write_tree(rows, part, split if len(splits) > 1 else "", progress)
        else:
            arrays: dict[str, Any] = {}
            for split in ("train", "test"):
                arrays[f"x_{split}"], arrays[f"y_{split}"] = _read_arrays(splits[split], split, progress)
            with part.open("wb") as file:
                np.savez_compressed(file, **arrays)
        written = tree if part.is_dir() else packed
        part.rename(written)
    except (KeyError, ValueError) as error:
        raise FedshiftError(f"{source} is not as expected ({error}): {by_hand}") from error
    except OSError as error:
        raise FedshiftError(
            f"cannot write {part}: {error.strerror or error}. Make room, or choose another directory ({{}})",
            Ref("root"),
        ) from error
    return [written]


def _write_tree(rows: Any, folder: Path, split: str, progress: Progress | None) -> None:
    image, label, client = (_find_column(rows, names) for names in (_IMAGE, _LABEL, _CLIENT))
    for number, row in enumerate(rows):
        content = row[image]["bytes"]
        with Image.open(io.BytesIO(content)) as opened:
            suffix = str(opened.format).lower()
        where = folder / _folder_name(rows, client, row) / split / _folder_name(rows, label, row)
        where.mkdir(parents=True, exist_ok=True)
        (where / f"{number:06d}.{suffix}").write_bytes(content)
        if progress is not None:
            progress(f"images {split}".strip(), number + 1, len(rows))


def _read_arrays(rows: Any, split: str, progress: Progress | None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images ``[N, H, W]`` or ``[N, H, W, 3]``, all with the same shape, and labels ``[N]``."""
    image, label = (_find_column(rows, names) for names in (_IMAGE, _LABEL))
    x, y = [], []
    for number, row in enumerate(rows):
        with Image.open(io.BytesIO(row[image]["bytes"])) as opened:
            x.append(np.asarray(opened if opened.mode in ("L", "RGB") else opened.convert("RGB")))
        y.append(int(row[label]))
        if progress is not None:
            progress(f"images {split}", number + 1, len(rows))
    return np.stack(x), np.array(y)


def _find_column(rows: Any, names: tuple[str, ...]) -> str:
    for name in names:
        if name in rows.features:
            return name
    raise KeyError(f"no column {' or '.join(names)}")


def _folder_name(rows: Any, column: str, row: Any) -> str:
    """Return the folder name for a row's class or client: the data set's name for its number, or the value itself."""
    value, names = row[column], getattr(rows.features[column], "names", None)
    text = str(names[value] if names and isinstance(value, int) else value)
    if text in ("", ".", "..") or set(text) & set("/\\\0"):
        raise ValueError(f"a class or client is called {text!r}, which cannot be the name of a folder")
    return text
