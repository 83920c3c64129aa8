"""Images in folders of classes, ``DIR/<client>/<class>/<image>`` or ``DIR/<client>/<part>/<class>/<image>``.

Federations of domains are published in this form (Office-Home, PACS, VLCS). A part is train,
validation or test. A client without a test folder has test samples drawn from its train folder, or from all. Train,
validation and test are rows of one array, which is decoded once and then mapped from the cache
(:mod:`fedshift.data.files.image_store`).

Images are uint8 ``[N, C, H, W]``, or float32 in [-1, 1] for gray of more than 8 bits. A client is gray (C = 1) unless
one of its images is in color. Labels number the class folders of all clients, selected or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...tasks import CLASSIFICATION, Classification
from ...utils.errors import Ref, UsageError
from ...utils.words import Information, join_some
from ..agreement import refuse_other_labels
from ..decoding import Decoding
from ..decoding.images import SUFFIXES, Header
from ..decoding.ranges import choose_gray, describe_gray, parse_window
from ..files import image_store
from ..files import images as folders
from ..files.image_store import ImageFile, ImageStore
from ..files.read_options import ReadOptions
from ..groups import find_groups
from ..scan import SPLITS, UNGROUPED, UNSAID, Assign, Loaded, Part, Scan, Sides, choose_clients
from ..schema import Schema

holds = "images in class folders"
options = frozenset({"test_fraction", "image_size", "groups", "window"})


class Inspected(NamedTuple):
    """Headers of a client's files, the reason why each other file is broken, and the ``entry`` for its array."""

    entry: Path
    headers: dict[str, Header]
    broken: dict[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Files of all clients before they are decoded.

    Attributes:
        path: Directory of the clients.
        clients: Files of each client, by its name.
        found: Each client's array if it is in the cache, else what its files' headers say.
        size: Width and height of all images; of padded ones, the largest.
        resized: Whether images of several sizes are resized without having been asked to be.
        padded: Whether images keep their sizes, and are padded to the largest of their client.

    """

    path: Path
    clients: Mapping[str, tuple[ImageFile, ...]]
    found: Mapping[str, ImageStore | Inspected]
    size: tuple[int, int]
    resized: bool = False
    padded: bool = False

    def find_size(self, client: str) -> tuple[int, int]:
        """Return the width and height of a client's array."""
        own = self.found[client]
        if not self.padded:
            return self.size
        sizes = [own.facts] if isinstance(own, ImageStore) else list(own.headers.values())
        return max((each.width for each in sizes), default=1), max((each.height for each in sizes), default=1)

    @property
    def notices(self) -> list[str]:
        """Remarks on the images' sizes."""
        width, height = self.size
        said = Information(f"images of several sizes are resized to {width} x {height} pixels")
        return [said] if self.resized else []


def can_read(source: object) -> bool:
    """Return whether ``source`` is a directory of images without masks."""
    return folders.find_kind(source) == folders.CLASSES


def scan(source: Path, reading: ReadOptions) -> Scan:
    """Return the clients in directory ``source``, which is one itself if it joins others.

    Raises :class:`UsageError` if the directory has another layout, sizes differ without ``image_size``, or a client
    mixes gray of 8 bits and of more.
    """
    require_task(source, reading, Classification)
    places = folders.choose_folders(source, reading)
    labels = number_labels(source, places, reading)
    files, notices = list_clients(source, places, reading)
    parts = [
        make_part(name, own, torch.tensor([labels[file.category] for file in own]), places[name], reading)
        for name, own in files.items()
    ]
    images = inspect_images(source, files, reading)
    return Scan(
        name=source.resolve().name,
        parts=tuple(parts),
        task=reading.task or CLASSIFICATION,
        classes=reading.classes or len(labels),
        class_names=tuple(labels),
        note="{samples} images of {clients} clients",
        notices=(*notices, *images.notices),
        source=images,
    )


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return each client's images; raise :class:`UsageError` for broken ones, unless they are to be left out."""
    images: Images = scan.source
    stores = decode_images(images, scan.parts, reading)
    broken = {file: why for store in stores for file, why in store.facts.broken.items()}
    folders.refuse_broken(images.path, broken, sum(map(len, images.clients.values())), reading)
    notices, faults = [], []
    for part, store in zip(scan.parts, stores, strict=True):
        files = images.clients[part.client]
        notices += folders.list_notices(part.client, files, store.facts, reading)
        faults += folders.list_faults(part.source, part.client, store.facts.broken, len(files))
    decodings, said = choose_decodings(scan.parts, stores, reading, lambda part: assign(part, broken))
    return Loaded(
        stores=[torch.from_numpy(how.rescale(store.pixels)) for store, how in zip(stores, decodings, strict=True)],
        decodings=decodings,
        left_out=broken.keys(),
        notices=(*notices, *said, *folders.list_unkept(stores, reading)),
        faults=tuple(faults),
    )


def number_labels(source: Path, places: Mapping[str, Path], reading: ReadOptions) -> dict[str, int]:
    """Return the label of each class folder of the clients in ``places``, selected or not.

    Raises :class:`UsageError` for fewer ``classes`` than folders, and names of one kind at some clients alone.
    """
    refuse_other_labels({name: folders.list_categories([folder]) for name, folder in places.items()})
    labels = {name: label for label, name in enumerate(folders.list_categories(places.values()))}
    if reading.classes is not None and reading.classes < len(labels):
        raise UsageError(
            f"classes={reading.classes}: {source} has {len(labels)} class folders ({join_some(labels)}); ask for as "
            "many"
        )
    return labels


def require_task(source: Path, reading: ReadOptions, kind: type[Any]) -> None:
    """Raise :class:`UsageError` if the images in ``source`` are for another kind of task than the one asked for."""
    if reading.task and not isinstance(reading.task, kind):
        raise UsageError(f"{source} holds images for {kind.name}, not for {reading.task}: leave the task out")


def list_clients(
    source: Path,
    places: Mapping[str, Path],
    reading: ReadOptions,
    suffixes: Collection[str] = SUFFIXES,
    attached: Collection[str] = (),
) -> tuple[dict[str, tuple[ImageFile, ...]], list[str]]:
    """Return the files of each requested client, and notices of ignored files that are not ``attached`` to others."""
    files, notices = {}, list[str]()
    for name in choose_clients(places, reading):
        files[name], remarks = folders.list_files(source, places[name], suffixes, attached)
        notices += remarks
    return files, notices


def make_part(
    client: str,
    files: Sequence[ImageFile],
    y: Tensor,
    source: Any,
    reading: ReadOptions,
    patients: Sequence[str] = (),
) -> Part:
    """Return a client's images with their targets; without a test folder, training images are to be divided.

    ``patients``: patient of each file, by its content, which names its group where nothing else does.
    """
    names = tuple(file.path for file in files)
    train = SPLITS.index("train") if any(file.part == "test" for file in files) else UNSAID
    sides = {"": train, "train": train, **{split: SPLITS.index(split) for split in SPLITS[1:]}}
    group = find_groups(reading.groups, names)
    if not len(group) and all(patients):
        group = np.array(patients, np.str_)
    if reading.groups is None and len(set(group.tolist())) < 2:  # names that distinguish nothing
        group = UNGROUPED
    return Part(
        client=client, where=f"client {client!r}", y=y, side=np.array([sides[file.part] for file in files], np.int8),
        rows=np.arange(len(files)), files=names, group=group, source=source,
    )  # fmt: skip


def inspect_images(
    path: Path,
    clients: Mapping[str, tuple[ImageFile, ...]],
    reading: ReadOptions,
    size: tuple[int, int] | None = None,
    *,
    cases: bool = False,
) -> Images:
    """Find every client's array in the cache, or read the headers of its files; all are read before any is decoded.

    ``size``: height and width of the images, instead of the size in ``reading``. ``cases``: images are cases, which
    keep their sizes if patches are cut from them.
    """
    asked = size or ((reading.image_size,) * 2 if reading.image_size else None)
    padded = cases and bool(reading.patch) and not asked
    found: dict[str, ImageStore | Inspected] = {}
    sizes: dict[tuple[int, int], str] = {}  # the first file of each (width, height)
    for name, own in clients.items():
        entry = image_store.cache_entry(reading.cache_directory, path, own, name, asked, *["padded"] * padded)
        if (store := image_store.load_store(entry)) is None:
            headers, broken = image_store.inspect_all(path, own, f"headers of {name}", reading.progress)
            found[name] = Inspected(entry, headers, broken)
            _refuse_other_depths(path, name, headers)
            for file, header in headers.items():
                sizes.setdefault((header.width, header.height), file)
        else:
            found[name] = store
            for file in [file.path for file in own if file.path not in store.facts.broken][:1]:
                sizes.setdefault((store.facts.width, store.facts.height), file)
    if padded:
        largest = tuple(max((size[axis] for size in sizes), default=1) for axis in (0, 1))
        return Images(path=path, clients=clients, found=found, size=(largest[0], largest[1]), padded=True)
    if len(sizes) > 1 and not asked and reading.differing:  # the cache is asked again
        return replace(inspect_images(path, clients, reading, reading.differing), resized=True)
    wide = asked[::-1] if asked else _find_common_size(path, sizes, cases)
    return Images(path=path, clients=clients, found=found, size=wide)


def _refuse_other_depths(path: Path, name: str, headers: dict[str, Header]) -> None:
    """Raise :class:`UsageError` if images of one client are of 8 bits and of more."""
    example = {header.kind: file for file, header in reversed(headers.items())}  # the first of each kind
    if len(example) > 1:
        first, second = sorted(example)[:2]
        raise UsageError(
            f"client {name!r} has images of different depth, {path / example[first]} ({first}) and "
            f"{path / example[second]} ({second}): convert all of a client's images to one"
        )


def _find_common_size(path: Path, sizes: dict[tuple[int, int], str], cases: bool) -> tuple[int, int]:
    """Return the common width and height of all images; 1 x 1 if none can be read. ``cases``: they have masks."""
    if len(sizes) > 1:
        small, large = (pick(sizes, key=lambda size: (size[0] * size[1], size)) for pick in (min, max))
        ranges = (f"{min(side)} to {max(side)}" for side in zip(*sizes, strict=True))
        raise UsageError(
            f"images differ in size: {path / sizes[small]} has {small[0]} x {small[1]} pixels, "
            f"{path / sizes[large]} has {large[0]} x {large[1]} (widths {next(ranges)}, heights {next(ranges)}): "
            "give one size for all ({})" + (", or train on patches ({})" if cases else ""),
            *[Ref(image_size=64), Ref(patch=64)][: 1 + cases],
        )
    return next(iter(sizes), (1, 1))


def decode_images(images: Images, parts: Sequence[Part], reading: ReadOptions) -> list[ImageStore]:
    """Return the array of each part, from the cache or decoded, with the files' values."""
    stores = []
    for part in parts:
        store, files = images.found[part.client], images.clients[part.client]
        width, height = images.find_size(part.client)
        if isinstance(store, Inspected):
            facts = image_store.describe_headers(store.headers, store.broken, height, width, padded=images.padded)
            store = image_store.decode_all(
                images.path, files, facts, store.entry, f"images of {part.client}", reading.progress
            )
        stores.append(store)
    return stores


def choose_decodings(
    parts: Sequence[Part], stores: Sequence[ImageStore], reading: ReadOptions, assign: Callable[[Part], Sides]
) -> tuple[list[Decoding], list[str]]:
    """Return how the files of each part are decoded, and notices: one range for the gray of all clients together.

    Raises :class:`UsageError` if a window is asked for images that have none, of 8 bits or floats.
    """
    window, notices = parse_window(reading.window), list[str]()
    deep = [pair for pair in zip(parts, stores, strict=True) if pair[1].facts.kind == "integer"]
    if window and len(deep) < len(parts):
        other = next(part.client for part, store in zip(parts, stores, strict=True) if store.facts.kind != "integer")
        raise UsageError(
            f"{{}} is for gray of more than 8 bits, which the images of client {other!r} are not: leave it out",
            Ref(window=reading.window),
        )
    joined = reading.schema.preparation.decoding if isinstance(reading.schema, Schema) else None
    if joined and joined.kind == "integer":
        window = joined.window
    elif deep and not window:
        levels = [
            store.facts.levels[part.files[row]]
            for part, store in deep
            for row in np.flatnonzero(assign(part) == SPLITS.index("train"))
        ]
        window, count = choose_gray(levels)
        notices.append(describe_gray(window, count, sum(each[0] for each in levels)))
    kinds: list[Any] = [store.facts.kind for store in stores]
    return [Decoding(kind=kind, window=window if kind == "integer" else None) for kind in kinds], notices
