"""Federations for segmentation from directories, ``DIR/<client>/images/`` and ``DIR/<client>/masks/``.

With parts, ``DIR/<client>/train/images/``, ``DIR/<client>/train/masks/`` and so on. An image and its mask have the same
name except for the suffix, and the same size. Images are read like those in class folders
(:mod:`fedshift.data.files.images`). A mask contains the class 0, 1, ... of each pixel, or 255 for ignored pixels. Masks
that contain only 0 and 255 have two classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...tasks.segmentation import IGNORED, Segmentation
from ...utils.errors import Ref, UsageError
from ..federation import Federation
from . import image_store, images
from .image_store import ImageFile, ImageStore
from .images import format_few
from .read_options import ReadOptions
from .volume_decoding import find_stem

IMAGES, MASKS = "images", "masks"
TWO_VALUES = "masks hold 0 and 255, which are read as the classes 0 and 1"

Pair = tuple[ImageFile, ImageFile]


def holds_masks(path: Path) -> bool:
    """Return whether a client in ``path``, or ``path`` itself, has folders of images and of masks."""
    return bool(find_places(path))


def find_places(path: Path) -> list[Path]:
    """Return the folders in ``path`` that contain folders of images and of masks: clients or their parts."""
    clients = [path, *_list_folders(path)]
    parts = [folder for client in clients for folder in _list_folders(client) if folder.name.lower() in images.PARTS]
    return [
        place
        for place in clients + parts
        if {IMAGES, MASKS} <= {folder.name.lower() for folder in _list_folders(place)}
    ]


def _list_folders(path: Path) -> list[Path]:
    return [Path(folder) for folder in images.list_content(path)[1]]


def read_masked_images(path: Path, reading: ReadOptions) -> Federation:
    """Return the federation for segmentation in directory ``path``.

    Args:
        path: Directory of clients, or of one client that joins others (``schema``).
        reading: Options as for :func:`~fedshift.data.files.images.read_images`.

    Returns:
        Images as in :func:`~fedshift.data.files.images.read_images`, and masks uint8 ``[N, H, W]``.

    Raises:
        UsageError: The directory has another layout, an image has no mask or one of another size, a mask has no image
            or a value that is not a class, or files cannot be read.

    """
    folders = images.choose_folders(path, reading)
    notices: list[str] = []
    faults: list[str] = []
    pairs: dict[str, tuple[Pair, ...]] = {}
    for name in folders if reading.domains is None else reading.domains:
        files, remarks = images.list_files(path, folders[name])
        pairs[name] = pair_files(path, name, files)
        notices += remarks
    shown = {name: tuple(image for image, _ in own) for name, own in pairs.items()}
    stores = images.load_stores(path, shown, reading)
    masks = {name: _load_masks(path, name, pairs[name], stores[name], reading) for name in stores}
    both = [*stores.values(), *masks.values()]
    broken = {file: why for store in both for file, why in store.facts.broken.items()}
    images.refuse_broken(path, broken, 2 * sum(map(len, pairs.values())), reading)
    held = {name: find_values(masks[name].pixels) for name in masks}
    classes = number_classes(path, pairs, held, reading)
    clients = []
    for name, store in stores.items():
        facts = masks[name].facts
        unusable = {image.path for image, mask in pairs[name] if mask.path in facts.broken} | store.facts.broken.keys()
        y = torch.from_numpy(masks[name].pixels[:, 0])
        if classes is None:
            y = (y > 0).to(torch.uint8)
        x = torch.from_numpy(store.pixels)
        clients.append(images.make_client(name, shown[name], x, y, unusable, reading))
        notices += images.list_notices(name, shown[name], store.facts, reading)
        everything = replace(store.facts, broken=store.facts.broken | facts.broken)
        faults += images.list_faults(
            folders[name], name, tuple(file for pair in pairs[name] for file in pair), everything
        )
        notices += list_empty(name, pairs[name], held[name], unusable, classes)
    if classes is None:
        notices.append(TWO_VALUES)
    notices += images.list_unkept(both, reading)
    return Federation(
        name=path.resolve().name,
        clients=tuple(clients),
        classes=classes or 2,
        note=f"{sum(map(len, pairs.values()))} images with masks of {len(clients)} clients",
        notices=tuple(notices),
        faults=tuple(faults),
        task=reading.task or Segmentation(),
    )


def list_empty(
    name: str, pairs: tuple[Pair, ...], held: NDArray[np.bool_], unusable: Collection[str], classes: int | None
) -> list[str]:
    """Return a notice about the client's masks that contain only background, if any.

    Arguments are as in :func:`number_classes`, which returns ``classes``; ``unusable``: images that are skipped.
    """
    empty = [
        mask.path
        for (image, mask), values in zip(pairs, held, strict=True)
        if image.path not in unusable and not values[1:IGNORED].any() and (classes is not None or not values[IGNORED])
    ]
    return [f"client {name!r}: {len(empty)} of {len(pairs)} masks are empty ({format_few(empty)})"] if empty else []


def pair_files(path: Path, name: str, files: tuple[ImageFile, ...]) -> tuple[Pair, ...]:
    """Return the client's images, each with its mask, in the order of the images.

    Raises :class:`UsageError` for files in other folders, images without a mask, and masks without an image.
    """
    sides: dict[str, dict[tuple[str, str], ImageFile]] = {IMAGES: {}, MASKS: {}}
    for file in files:
        side = sides.get(file.category.lower())
        if side is None:
            raise UsageError(
                f"{path / file.path} is neither in {IMAGES} nor in {MASKS}: a client with masks has these two folders"
            )
        key = file.part, find_stem(Path(file.path).name)
        if key in side:
            raise UsageError(
                f"{path / side[key].path} and {path / file.path} have the same name but for the suffix, by which an "
                "image and its mask are found: rename one"
            )
        side[key] = file
    for (one, ones), (other, others) in (tuple(sides.items()), tuple(sides.items())[::-1]):
        alone = [file.path for key, file in ones.items() if key not in others]
        if alone:
            raise UsageError(
                f"client {name!r}: {len(alone)} of {len(ones)} files in {one} have none of the same name in {other}, "
                f"the first is {path / alone[0]}: add it, or take the file away"
            )
    return tuple((image, sides[MASKS][key]) for key, image in sides[IMAGES].items())


def _load_masks(path: Path, name: str, pairs: tuple[Pair, ...], store: ImageStore, reading: ReadOptions) -> ImageStore:
    """Return a client's masks, uint8 ``[N, 1, H, W]``, from the cache or decoded at the size of its images.

    Raises :class:`UsageError` for a mask file whose size differs from its image's.
    """
    seen, masks = zip(*pairs, strict=True)
    height, width = store.facts.height, store.facts.width
    entry = image_store.cache_entry(reading.cache_directory, path, (*seen, *masks), MASKS, height, width)
    found = image_store.load_store(entry)
    if found is not None:
        return found
    theirs, _ = image_store.inspect_all(path, seen, f"headers of {name}", reading.progress)
    headers, broken = image_store.inspect_all(path, masks, f"headers of masks of {name}", reading.progress)
    for image, mask in pairs:
        sizes = [(h.width, h.height) for h in (headers.get(mask.path), theirs.get(image.path)) if h]
        if len(set(sizes)) > 1:
            (across, down), (wide, high) = sizes
            raise UsageError(
                f"mask {path / mask.path} has {across} x {down} pixels, but its image {path / image.path} has "
                f"{wide} x {high}: give both the same size"
            )
    facts = replace(image_store.describe_headers(headers, broken, height, width), kind="mask", channels=1, frames={})
    what = f"masks of {name}"
    return image_store.decode_all(path, masks, facts, entry, lambda _: {"train": ()}, what, reading.progress)


def find_values(masks: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return which values 0..255 each mask contains, ``[N, 256]``."""
    return np.stack([np.bincount(mask.ravel(), minlength=256) > 0 for mask in masks])


def number_classes(
    path: Path, pairs: Mapping[str, tuple[Pair, ...]], held: Mapping[str, NDArray[np.bool_]], reading: ReadOptions
) -> int | None:
    """Return the number of classes in masks with the values ``held``, or None if 0 and 255 are the only values.

    Raises :class:`UsageError` for values outside of the requested classes, and if the number of classes is ambiguous.
    """
    asked = reading.classes or (reading.schema.classes if reading.schema else 0) or None
    values = np.flatnonzero(np.any([own.any(axis=0) for own in held.values()], axis=0))
    if set(values) == {0, IGNORED} and asked in (None, 2):
        return None
    top = max((int(value) for value in values if value != IGNORED), default=0)
    if asked is None:
        if len(values) == 2 and values[0] == 0 and top > 1:
            raise UsageError(
                f"the masks in {path} hold 0 and {top} alone: write 1 in place of {top} if these are two classes, or "
                f"give the number of classes ({{}})",
                Ref(classes=top + 1),
            )
        return max(top + 1, 2)
    for name, own in held.items():
        wrong = np.flatnonzero(own[:, asked:IGNORED].any(axis=1))
        if len(wrong):
            value = asked + int(own[wrong[0], asked:].argmax())
            raise UsageError(
                f"mask {path / pairs[name][wrong[0]][1].path} has the value {value}, but classes={asked} means "
                f"0..{asked - 1} (and {IGNORED} for ignored pixels), as have {len(wrong)} of {len(own)} masks of "
                f"client {name!r}: correct the masks, or give the number of classes ({{}})",
                Ref("classes"),
            )
    return asked
