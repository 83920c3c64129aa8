"""Images whose files, labels and splits are known in advance, from a publisher's lists or from folders.

They are decoded once into the image cache (:mod:`fedshift.data.files.cache`), always in color and resized to one
size. A list of images is a table with the columns ``path`` (relative to a known directory), ``label`` and ``part``
(train, validation or test), and ``group`` if groups are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.files import cache_directory
from ...utils.random_streams import stream
from ..decoding import Decoding, decode
from ..federation import ClientData, Federation
from ..files.cache import keep, read_all, stamp
from ..files.listing import list_files
from ..files.read_options import Progress
from ..formats import explain_errors, read_pickle
from ..partition import split_stratified

COLUMNS = ["path", "label", "part"]
Folders = Mapping[str, Path]
"""Clients' folders in one directory, each with a folder for every class."""
Lists = dict[str, dict[str, list[list[str]]]]
"""Ends of the paths, ``[class, file]``, of the images in a publisher's lists, by client and part."""


def find_domains(folder: Path, names: Iterable[str], below: Iterable[str] = ()) -> dict[str, Path] | None:
    """Return the folders ``names`` (ignoring case) in ``folder`` or in one ``below`` it, or None unless all exist."""
    names = list(names)
    for root in (folder, *(folder / place for place in below)):
        if root.is_dir():
            present = {sub.name.lower(): sub for sub in sorted(root.iterdir()) if sub.is_dir()}
            if all(name.lower() in present for name in names):
                return {name: present[name.lower()] for name in names}
    return None


def list_from_folders(domains: Folders, labels: Mapping[str, int], fraction: float) -> dict[str, pd.DataFrame]:
    """List every image in a class folder named in ``labels``; ``fraction`` of each class is used for testing.

    A client's folder that has train and test folders keeps this split.
    """
    lists = {}
    for client, folder in domains.items():
        files = [file for file in list_files(folder.parent, folder)[0] if file.category in labels]
        listed = pd.DataFrame([(f.path, labels[f.category], f.part or "train") for f in files], columns=COLUMNS)
        if "test" not in set(listed["part"]):
            drawn = split_stratified(listed["label"].to_numpy(), fraction, stream(0, "test", client))[1]
            listed.loc[drawn, "part"] = "test"
        lists[client] = listed
    return lists


def list_from_lists(domains: Folders, lists: Lists, labels: Mapping[str, int]) -> dict[str, pd.DataFrame]:
    """List the images in ``lists[client][part]`` whose class is in ``labels``."""
    listed = {}
    for client, parts in lists.items():
        ends = [(part, kind, file) for part in parts for kind, file in parts[part] if kind in labels]
        rows = [(f"{domains[client].name}/{kind}/{file}", labels[kind], part) for part, kind, file in ends]
        listed[client] = pd.DataFrame(rows, columns=COLUMNS)
    return listed


def read_publisher_lists(domains: Folders) -> Lists:
    """Read ``<domain>_train.txt`` and ``<domain>_test.txt``, lines ``<path> <label>``; empty if any is missing."""
    return _read_lists(domains, ".txt", _read_text_list)


def read_fedbn_lists(domains: Folders) -> Lists:
    """Read FedBN's published split, ``<domain>_train.pkl`` and ``<domain>_test.pkl``; empty if any is missing.

    Each contains image paths, starting from the parent of the data set's directory, and the names of their classes
    (``data_utils`` in https://github.com/med-air/FedBN). The pickles are read without running code in them.
    """
    return _read_lists(domains, ".pkl", _read_fedbn_list)


def _read_lists(domains: Folders, suffix: str, read: Callable[[Path], list[list[str]]]) -> Lists:
    """Read the lists next to the domains' folders; only the end of their paths matters."""
    files = {
        client: {part: folder.parent / f"{client}_{part}{suffix}" for part in ("train", "test")}
        for client, folder in domains.items()
    }
    if not all(file.is_file() for parts in files.values() for file in parts.values()):
        return {}
    return {client: {part: read(file) for part, file in parts.items()} for client, parts in files.items()}


def _cut_end(path: str) -> list[str]:
    kind, file = path.replace("\\", "/").split("/")[-2:]
    return [kind, file]


def _read_text_list(file: Path) -> list[list[str]]:
    with explain_errors(file, "a list of images with lines <path> <label>"):
        lines = [line.rsplit(maxsplit=1) for line in file.read_text("utf-8").splitlines() if line.strip()]
        return [_cut_end(path) for path, label in lines if int(label) >= 0]


def _read_fedbn_list(file: Path) -> list[list[str]]:
    with explain_errors(file, "paths with names of classes"):
        paths, names = ([str(item) for item in column] for column in read_pickle(file))
        odd = [path for path, name in zip(paths, names, strict=True) if _cut_end(path)[0] != name]
        if odd:
            raise ValueError(f"{odd[0]!r} has another class than its folder")
        return [_cut_end(path) for path in paths]


def limit_lists(
    lists: Mapping[str, pd.DataFrame], samples: int | None, validation: int | None, *, shuffle: bool
) -> dict[str, pd.DataFrame]:
    """Keep each client's first ``samples`` training images (None: all), and its last ``validation`` for selection.

    FedBN's loaders select the training images in its lists in this way. ``shuffle``: first shuffle the images by a draw
    keyed by the client's name, for lists that are sorted by class. Test images are unchanged. Raises
    :class:`UsageError` if a client has fewer images.
    """
    for name, number in (("samples", samples), ("validation", validation)):
        if number is not None and number < 1:
            raise UsageError(f"{name}={number}: must be at least 1, or None")
    held, limited = validation or 0, {}
    for client, listed in lists.items():
        listed = listed.iloc[stream(0, "listed", client).permutation(len(listed))] if shuffle else listed
        train = listed[listed["part"] == "train"]
        kept = len(train) - held if samples is None else samples
        if not 0 < kept <= len(train) - held:
            raise UsageError(
                f"client {client!r} has {len(train)} training images, too few for samples={samples} and "
                f"validation={validation}: ask for fewer"
            )
        last = train[len(train) - held :].assign(part="validation")
        limited[client] = pd.concat([train[:kept], last, listed[listed["part"] != "train"]])
    return limited


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
    """Return clients with uint8 images ``[N, 3, H, W]``; raise :class:`UsageError` for missing or damaged files.

    ``clients``: lists of images. ``size``: the side of a square, or height and width, in pixels.
    """
    data = []
    for client, listed in clients.items():
        pixels = _decode_listed(root, client, listed, size, progress)
        rows = {part: np.flatnonzero(listed["part"] == part) for part in ("train", "validation", "test")}
        lacking = [part for part in ("train", "test") if not len(rows[part])]
        if lacking:
            raise UsageError(f"client {client!r} has no image for {lacking[0]} under {root}: get its files again")
        y = torch.tensor(listed["label"].to_numpy())
        group = torch.tensor(listed["group"].to_numpy()) if "group" in listed else None
        data.append(ClientData.from_rows(client, torch.from_numpy(pixels), y, rows, group=group))
    return Federation(
        name=name, clients=tuple(data), classes=len(class_names), note=note, class_names=tuple(class_names)
    )


def _decode_listed(
    root: Path, client: str, listed: pd.DataFrame, size: int | tuple[int, int], progress: Progress | None
) -> NDArray[Any]:
    """Return a client's images, uint8 ``[N, 3, H, W]``, from the cache or decoded."""
    height, width = size if isinstance(size, tuple) else (size, size)
    if min(height, width) < 1:
        raise UsageError(f"size={size} pixels: must be at least 1")
    missing = [path for path in listed["path"] if not (root / path).is_file()]
    if missing:
        raise UsageError(
            f"client {client!r}: {len(missing)} of {len(listed)} images are not there, first {root / missing[0]}: "
            "put all of its images there (unpack the archive again)"
        )
    how, files = Decoding(kind="byte"), {path: root / path for path in listed["path"]}

    def work() -> tuple[NDArray[np.uint8], dict[str, str]]:
        pixels = np.zeros((len(files), 3, height, width), np.uint8)
        row_of = {file: row for row, file in enumerate(files.values())}

        def read(file: Path) -> None:
            pixels[row_of[file]], _ = decode(file, how, 3, (height, width))

        return pixels, read_all(files, read, f"images of {client}", progress)[1]

    facts = "listed", stamp(files.values()), height, width
    (pixels, broken), _ = keep(cache_directory(), facts, work)
    for file, why in broken.items():
        raise UsageError(
            f"client {client!r}: {len(broken)} of {len(listed)} images cannot be read, first "
            f"{root / file}: {why}; get them again"
        )
    return pixels
