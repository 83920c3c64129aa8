"""Images whose files, labels and splits are known in advance, from a publisher's lists or from folders.

They are decoded once into the cache of images (:mod:`fedshift.data.files.image_store`), always in color, resized to
one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..files.image_store import ImageFacts, ImageFile, cache_entry, decode_all, load_store
from ..files.images import list_files
from ..files.read_options import Progress, ReadOptions
from ..pickles import read_pickle
from ..stratification import split_stratified


@dataclass(frozen=True, kw_only=True)
class ListedImage:
    """An image at ``path``, relative to a known directory, with its label and part (train, validation or test)."""

    path: str
    label: int
    part: str


@dataclass(frozen=True, kw_only=True)
class DomainFolders:
    """Folders of clients under ``root``, by client; each holds a folder for every class."""

    root: Path
    folders: Mapping[str, Path]


Lists = dict[str, dict[str, list[str]]]
"""Paths of images that a publisher lists, by client and part."""


def find_domains(folder: Path, names: Iterable[str], below: Iterable[str] = ()) -> DomainFolders | None:
    """Return the folders called ``names`` (in any case) in ``folder`` or one ``below`` it, None unless all exist."""
    wanted = {name.lower(): name for name in names}
    for root in (folder, *(folder / place for place in below)):
        if root.is_dir():
            found = {wanted[sub.name.lower()]: sub for sub in sorted(root.iterdir()) if sub.name.lower() in wanted}
            folders = {name: found[name] for name in wanted.values() if name in found and found[name].is_dir()}
            if len(folders) == len(wanted):
                return DomainFolders(root=root, folders=folders)
    return None


def list_from_folders(
    domains: DomainFolders, labels: Mapping[str, int], fraction: float
) -> dict[str, list[ListedImage]]:
    """List every image in a class folder named in ``labels``; ``fraction`` of each class is for testing.

    A client's folder with folders for train and test keeps that split.
    """
    lists = {}
    for client, folder in domains.folders.items():
        files = [file for file in list_files(domains.root, folder)[0] if file.category in labels]
        listed = [ListedImage(path=file.path, label=labels[file.category], part=file.part or "train") for file in files]
        if not any(file.part == "test" for file in files):
            y = np.array([image.label for image in listed])
            drawn = set(split_stratified(y, fraction, stream(0, "test", client))[1].tolist())
            listed = [replace(image, part="test" if row in drawn else "train") for row, image in enumerate(listed)]
        lists[client] = listed
    return lists


def list_from_lists(domains: DomainFolders, lists: Lists, labels: Mapping[str, int]) -> dict[str, list[ListedImage]]:
    """List the images of classes in ``labels`` that ``lists[client][part]`` names.

    Only the end of a path, ``<class>/<file>``, counts: the rest is the publisher's own directory.
    """
    listed: dict[str, list[ListedImage]] = {}
    for client, parts in lists.items():
        own = domains.folders[client].relative_to(domains.root).as_posix()
        listed[client] = []
        for part, names in parts.items():
            for name in names:
                category, file = PurePosixPath(name.replace("\\", "/")).parts[-2:]
                if category in labels:
                    path = f"{own}/{category}/{file}"
                    listed[client].append(ListedImage(path=path, label=labels[category], part=part))
    return listed


def read_text_lists(domains: DomainFolders, names: Mapping[str, str]) -> Lists:
    """Read lists of lines ``<path> <label>``; empty unless all lists are there.

    ``names`` gives the file name of each part's lists, with ``{}`` for the client. Lists lie beside the clients'
    folders, above them, or in a folder ``splits`` there.
    """
    root = domains.root
    for place in (root, root.parent, root.parent.parent, root / "splits", root.parent / "splits"):
        if lists := _read_lists(place, domains.folders, names, _read_text_list):
            return lists
    return {}


def read_fedbn_lists(domains: DomainFolders) -> Lists:
    """Read FedBN's published split, ``<domain>_train.pkl`` and ``<domain>_test.pkl``; empty unless all are there.

    Each holds paths of images, from the directory above the data set's own, and the names of their classes
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
    lists: Mapping[str, Sequence[ListedImage]], samples: int | None, validation: int | None, *, shuffle: bool
) -> dict[str, list[ListedImage]]:
    """Keep each client's first ``samples`` training images (None: all) and its last ``validation`` to select on.

    FedBN's loaders choose in this way from the training images that its lists name. ``shuffle``: put the images in an
    order drawn by the client's name first, for lists that are sorted by class. Images for testing stay. Raises
    :class:`UsageError` where a client has fewer images.
    """
    for name, number in (("samples", samples), ("validation", validation)):
        if number is not None and number < 1:
            raise UsageError(f"{name}={number}: must be at least 1, or None")
    held, made = validation or 0, {}
    for client, listed in lists.items():
        if shuffle:
            listed = [listed[row] for row in stream(0, "listed", client).permutation(len(listed))]
        train = [image for image in listed if image.part == "train"]
        kept = len(train) - held if samples is None else samples
        if not 0 < kept <= len(train) - held:
            raise UsageError(
                f"client {client!r} has {len(train)} training images, too few for samples={samples} and "
                f"validation={validation}: ask for fewer"
            )
        last = [replace(image, part="validation") for image in train[len(train) - held :]]
        made[client] = [*train[:kept], *last, *(image for image in listed if image.part != "train")]
    return made


def read_listed(
    root: Path,
    clients: Mapping[str, Sequence[ListedImage]],
    *,
    name: str,
    class_names: Sequence[str],
    size: int | tuple[int, int],
    note: str,
    progress: Progress | None,
) -> Federation:
    """Return clients with uint8 images ``[N, 3, H, W]``; raise :class:`UsageError` for missing or damaged files.

    ``size`` in pixels: the side of a square, or height and width.
    """
    height, width = size if isinstance(size, tuple) else (size, size)
    if min(height, width) < 1:
        raise UsageError(f"size={size} pixels: must be at least 1")
    facts = ImageFacts(kind="byte", channels=3, height=height, width=width)
    data = []
    for client, listed in clients.items():
        files = _stat_files(root, client, listed)
        place = cache_entry(ReadOptions().cache_directory, root, files, "listed", client, size)
        data.append(_read_client(root, client, listed, place, facts, progress))
    return Federation(
        name=name, clients=tuple(data), classes=len(class_names), note=note, class_names=tuple(class_names)
    )


def _stat_files(root: Path, client: str, listed: Sequence[ListedImage]) -> list[ImageFile]:
    files, missing = [], []
    for image in listed:
        try:
            stat = (root / image.path).stat()
        except FileNotFoundError:
            missing.append(image.path)
        else:
            files.append(ImageFile(image.path, image.part, str(image.label), stat.st_size, stat.st_mtime_ns))
    if missing:
        raise UsageError(
            f"client {client!r}: {len(missing)} of {len(listed)} images are not there, first {root / missing[0]}: "
            "put all of its images there (unpack the archive again)"
        )
    return files


def _read_client(
    root: Path, client: str, listed: Sequence[ListedImage], place: Path, facts: ImageFacts, progress: Progress | None
) -> ClientData:
    part = np.array([image.part for image in listed], dtype=str)
    rows = {one: np.flatnonzero(part == one) for one in ("train", "validation", "test")}
    lacking = [one for one in ("train", "test") if not len(rows[one])]
    if lacking:
        raise UsageError(f"client {client!r} has no image for {lacking[0]} under {root}: get its files again")
    store = load_store(place)
    if store is None:
        paths = [image.path for image in listed]
        store = decode_all(root, paths, facts, place, lambda _: (), f"images of {client}", progress)
    if store.facts.broken:
        first, why = next(iter(store.facts.broken.items()))
        raise UsageError(
            f"client {client!r}: {len(store.facts.broken)} of {len(listed)} images cannot be read, first "
            f"{root / first}: {why}; get them again"
        )
    x, y = torch.from_numpy(store.pixels), torch.tensor([image.label for image in listed])
    return ClientData.from_rows(client, x, y, rows)
