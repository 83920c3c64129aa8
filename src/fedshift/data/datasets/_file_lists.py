"""Images whose files, labels and splits are known in advance, from a publisher's lists or from folders.

They are decoded once into the image cache (:mod:`fedshift.data.files.image_store`), always in color and resized to one
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.files import cache_directory
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..files.image_store import ImageFacts, ImageFile, cache_entry, decode_all, load_store
from ..files.images import list_files
from ..files.read_options import Progress
from ..partition import split_stratified
from ..pickles import read_pickle

LISTED = ["path", "label", "part"]
"""Columns of an image table; ``path`` is relative to a known directory, ``part`` is train, validation or test."""

Lists = dict[str, dict[str, list[str]]]
"""Paths of images in a publisher's lists, by client and part."""


@dataclass(frozen=True, kw_only=True)
class DomainFolders:
    """Client folders under ``root``, by client; each contains a folder for every class."""

    root: Path
    folders: Mapping[str, Path]


def find_domains(folder: Path, names: Iterable[str], below: Iterable[str] = ()) -> DomainFolders | None:
    """Return the folders ``names`` (ignoring case) in ``folder`` or in one ``below`` it, or None unless all exist."""
    names = list(names)
    for root in (folder, *(folder / place for place in below)):
        if root.is_dir():
            found = {sub.name.lower(): sub for sub in sorted(root.iterdir()) if sub.is_dir()}
            if all(name.lower() in found for name in names):
                return DomainFolders(root=root, folders={name: found[name.lower()] for name in names})
    return None


def list_from_folders(domains: DomainFolders, labels: Mapping[str, int], fraction: float) -> dict[str, pd.DataFrame]:
    """List every image in a class folder named in ``labels``; ``fraction`` of each class is used for testing.

    A client's folder that has train and test folders keeps this split.
    """
    lists = {}
    for client, folder in domains.folders.items():
        files = [file for file in list_files(domains.root, folder)[0] if file.category in labels]
        listed = pd.DataFrame([(f.path, labels[f.category], f.part or "train") for f in files], columns=LISTED)
        if "test" not in set(listed["part"]):
            drawn = split_stratified(listed["label"].to_numpy(), fraction, stream(0, "test", client))[1]
            listed.loc[drawn, "part"] = "test"
        lists[client] = listed
    return lists


def list_from_lists(domains: DomainFolders, lists: Lists, labels: Mapping[str, int]) -> dict[str, pd.DataFrame]:
    """List the images in ``lists[client][part]`` whose class is in ``labels``.

    Only the end of a path, ``<class>/<file>``, matters: the rest is the publisher's own directory.
    """
    listed = {}
    for client, parts in lists.items():
        own = domains.folders[client].relative_to(domains.root).as_posix()
        ends = [(part, *PurePosixPath(name.replace("\\", "/")).parts[-2:]) for part in parts for name in parts[part]]
        rows = [(f"{own}/{kind}/{file}", labels[kind], part) for part, kind, file in ends if kind in labels]
        listed[client] = pd.DataFrame(rows, columns=LISTED)
    return listed


def read_text_lists(domains: DomainFolders, names: Mapping[str, str]) -> Lists:
    """Read lists of lines ``<path> <label>``; empty if any list is missing.

    ``names`` gives the file name of each part's lists, with ``{}`` for the client. Lists are next to the clients'
    folders, in a directory above, or in a folder ``splits`` there.
    """
    root = domains.root
    for place in (root, root.parent, root.parent.parent, root / "splits", root.parent / "splits"):
        if lists := _read_lists(place, domains.folders, names, _read_text_list):
            return lists
    return {}


def read_fedbn_lists(domains: DomainFolders) -> Lists:
    """Read FedBN's published split, ``<domain>_train.pkl`` and ``<domain>_test.pkl``; empty if any is missing.

    Each contains image paths, starting from the parent of the data set's directory, and the names of their classes
    (``data_utils`` in https://github.com/med-air/FedBN). The pickles are read without running code in them.
    """
    names = {"train": "{}_train.pkl", "test": "{}_test.pkl"}
    return _read_lists(domains.root, domains.folders, names, _read_fedbn_list)


def _read_lists(
    place: Path, clients: Iterable[str], names: Mapping[str, str], read: Callable[[Path], list[str]]
) -> Lists:
    files = {client: {part: place / name.format(client) for part, name in names.items()} for client in clients}
    if not all(file.is_file() for parts in files.values() for file in parts.values()):
        return {}
    return {client: {part: read(file) for part, file in parts.items()} for client, parts in files.items()}


def _read_text_list(file: Path) -> list[str]:
    lines = [line.rsplit(maxsplit=1) for line in file.read_text("utf-8").splitlines() if line.strip()]
    odd = [line for line in lines if len(line) != 2 or "/" not in line[0] or not line[1].isdigit()]
    if odd:
        raise UsageError(f"{file} has a line {' '.join(odd[0])!r}, expected were <path> <label>: get it again")
    return [path for path, _ in lines]


def _read_fedbn_list(file: Path) -> list[str]:
    content = read_pickle(file)
    try:
        paths, names = ([str(item) for item in part] for part in content)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{file} holds no paths with names of classes: get it again") from error
    if len(paths) != len(names):
        raise UsageError(f"{file} holds {len(paths)} paths and {len(names)} names of classes: get it again")
    odd = [path for path, name in zip(paths, names, strict=True) if path.replace("\\", "/").split("/")[-2:-1] != [name]]
    if odd:
        raise UsageError(f"{file} gives {odd[0]!r} another class than its folder: get it again")
    return paths


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
    held, made = validation or 0, {}
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
        made[client] = pd.concat([train[:kept], last, listed[listed["part"] != "train"]])
    return made


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

    ``clients``: tables with the columns path, label and part, and group if groups are known. ``size``: the side of a
    square, or height and width, in pixels.
    """
    data = []
    for client, listed in clients.items():
        pixels = decode_listed(root, client, listed, size, progress)
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


def decode_listed(
    root: Path,
    client: str,
    listed: pd.DataFrame,
    size: int | tuple[int, int],
    progress: Progress | None,
    kind: Literal["byte", "mask"] = "byte",
) -> NDArray[Any]:
    """Return the images or masks of a client, uint8 ``[N, C, H, W]``, from the cache or decoded."""
    height, width = size if isinstance(size, tuple) else (size, size)
    if min(height, width) < 1:
        raise UsageError(f"size={size} pixels: must be at least 1")
    facts = ImageFacts(kind=kind, channels=1 if kind == "mask" else 3, height=height, width=width)
    files, what = _stat_files(root, client, listed), "masks" if kind == "mask" else "images"
    place = cache_entry(cache_directory(), root, files, "listed", kind, client, size)
    store = load_store(place) or decode_all(root, files, facts, place, f"{what} of {client}", progress)
    for file, why in store.facts.broken.items():
        raise UsageError(
            f"client {client!r}: {len(store.facts.broken)} of {len(listed)} {what} cannot be read, first "
            f"{root / file}: {why}; get them again"
        )
    return store.pixels


def _stat_files(root: Path, client: str, listed: pd.DataFrame) -> list[ImageFile]:
    files, missing = [], []
    for path, label, part in zip(listed["path"], listed["label"], listed["part"], strict=True):
        try:
            stat = (root / path).stat()
        except FileNotFoundError:
            missing.append(path)
        else:
            files.append(ImageFile(path, part, str(label), stat.st_size, stat.st_mtime_ns))
    if missing:
        raise UsageError(
            f"client {client!r}: {len(missing)} of {len(listed)} images are not there, first {root / missing[0]}: "
            "put all of its images there (unpack the archive again)"
        )
    return files
