"""Images whose files, labels and sides of the split are known beforehand, from a publisher's list or from folders.

They are decoded once into the cache of images (:mod:`fedshift.data.files.image_store`), always in color, resized to
one size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..files.image_store import ImageFacts, ImageFile, cache_entry, decode_all, load_store
from ..files.image_tree import list_files
from ..files.read_options import Progress, ReadOptions
from ..samples import Samples
from ..stratification import split_stratified


@dataclass(frozen=True, kw_only=True)
class ListedImage:
    """An image at ``path`` (from a directory that is known), its label, and its part: train, validation or test."""

    path: str
    label: int
    part: str


@dataclass(frozen=True, kw_only=True)
class DomainFolders:
    """Folders of clients under ``root``, by the client's name; in each a folder for every class."""

    root: Path
    folders: Mapping[str, Path]


def find_domains(folder: Path, names: Iterable[str], below: Iterable[str] = ()) -> DomainFolders | None:
    """The folders called ``names`` (in any case) in ``folder`` or in one ``below`` it, None unless all are there."""
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
    """Every image in a class folder named in ``labels``; ``fraction`` of each class is for testing.

    Where a client's folder has folders for train and test, those hold.
    """
    lists = {}
    for client, folder in domains.folders.items():
        files = [file for file in list_files(domains.root, folder)[0] if file.category in labels]
        listed = [ListedImage(path=file.path, label=labels[file.category], part=file.part or "train") for file in files]
        lists[client] = listed if any(file.part == "test" for file in files) else draw_test(client, listed, fraction)
    return lists


def list_from_lists(
    domains: DomainFolders, lists: Mapping[str, Mapping[str, Iterable[str]]], labels: Mapping[str, int]
) -> dict[str, list[ListedImage]]:
    """The images that ``lists[client][part]`` names, of classes in ``labels``.

    What counts in a name is its end, ``<class>/<file>``: what comes before is the publisher's own directory.
    """
    listed: dict[str, list[ListedImage]] = {}
    for client, parts in lists.items():
        own = domains.folders[client].relative_to(domains.root).as_posix()
        listed[client] = []
        for part, names in parts.items():
            for name in names:
                category, file = PurePosixPath(name.replace("\\", "/")).parts[-2:]
                if category in labels:
                    listed[client].append(
                        ListedImage(path=f"{own}/{category}/{file}", label=labels[category], part=part)
                    )
    return listed


def read_text_lists(domains: DomainFolders, names: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """Images named by lists of lines ``<path> <label>``, by client and part; empty unless all lists are there.

    ``names`` says for each part how its lists are called, ``{}`` standing for the client. They lie beside the clients'
    folders, above those, or in a folder ``splits`` there.
    """
    root = domains.root
    for place in (root, root.parent, root.parent.parent, root / "splits", root.parent / "splits"):
        lists = {
            client: {part: place / name.format(client) for part, name in names.items()} for client in domains.folders
        }
        if all(file.is_file() for parts in lists.values() for file in parts.values()):
            return {
                client: {part: _read_paths(file) for part, file in parts.items()} for client, parts in lists.items()
            }
    return {}


def _read_paths(file: Path) -> list[str]:
    lines = [line.rsplit(maxsplit=1) for line in file.read_text("utf-8").splitlines() if line.strip()]
    odd = [line for line in lines if len(line) != 2 or "/" not in line[0] or not line[1].isdigit()]
    if odd:
        raise UsageError(f"{file} has a line {' '.join(odd[0])!r}, expected were <path> <label>: get it again")
    return [path for path, _ in lines]


def draw_test(client: str, listed: Sequence[ListedImage], fraction: float) -> list[ListedImage]:
    """The same images, ``fraction`` of every class for testing, drawn by the client's name."""
    y = np.array([image.label for image in listed])
    drawn = set(split_stratified(y, fraction, stream(0, "test", client))[1].tolist())
    return [
        ListedImage(path=image.path, label=image.label, part="test" if row in drawn else "train")
        for row, image in enumerate(listed)
    ]


def mixed(lists: Mapping[str, Sequence[ListedImage]]) -> dict[str, list[ListedImage]]:
    """The same images of each client in an order drawn by its name, for lists that go class by class."""
    return {
        client: [listed[row] for row in stream(0, "listed", client).permutation(len(listed))]
        for client, listed in lists.items()
    }


def ends(
    lists: Mapping[str, Sequence[ListedImage]], samples: int | None, validation: int | None
) -> dict[str, list[ListedImage]]:
    """Each client with its first ``samples`` training images, None for all, and its last ``validation`` to select on.

    So FedBN's loaders choose from the training images that its lists name. Images for testing stay; the other training
    images are left out. Raises :class:`UsageError` where a client has fewer.
    """
    for name, number in (("samples", samples), ("validation", validation)):
        if number is not None and number < 1:
            raise UsageError(f"{name}={number}: must be at least 1, or None")
    held, made = validation or 0, {}
    for client, listed in lists.items():
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
    """Clients with uint8 images ``[N, 3, H, W]`` of ``size`` pixels: the side of a square, or height and width.

    Raises :class:`UsageError` for files that are missing or damaged.
    """
    if min(size if isinstance(size, tuple) else (size,)) < 1:
        raise UsageError(f"size={size} pixels: must be at least 1")
    return Federation(
        name=name,
        clients=tuple(_read_client(root, client, listed, size, progress) for client, listed in clients.items()),
        classes=len(class_names),
        note=note,
        class_names=tuple(class_names),
    )


def _read_client(
    root: Path, client: str, listed: Sequence[ListedImage], size: int | tuple[int, int], progress: Progress | None
) -> ClientData:
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
    part = np.array([image.part for image in listed], dtype=str)
    rows = {one: np.flatnonzero(part == one) for one in ("train", "validation", "test")}
    lacking = [one for one in ("train", "test") if not len(rows[one])]
    if lacking:
        raise UsageError(f"client {client!r} has no image for {lacking[0]} under {root}: get its files again")
    place = cache_entry(ReadOptions().cache_directory, root, files, "listed", client, size)
    store = load_store(place)
    if store is None:
        height, width = size if isinstance(size, tuple) else (size, size)
        facts = ImageFacts(kind="byte", channels=3, height=height, width=width)
        paths = [image.path for image in listed]
        store = decode_all(root, paths, facts, place, lambda _: (), f"images of {client}", progress)
    if store.facts.broken:
        first, why = next(iter(store.facts.broken.items()))
        raise UsageError(
            f"client {client!r}: {len(store.facts.broken)} of {len(listed)} images cannot be read, first "
            f"{root / first}: {why}; get them again"
        )
    x, y = torch.from_numpy(store.pixels), torch.tensor([image.label for image in listed])
    parts = {one: torch.from_numpy(index) for one, index in rows.items() if len(index)}
    return ClientData(name=client, **{one: Samples(x=x, y=y[index], rows=index) for one, index in parts.items()})
