"""Pairs of images and masks in directories, and the classes that the masks hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...tasks.segmentation import IGNORED
from ...utils.errors import Ref, UsageError
from ...utils.words import join_some
from .image_store import ImageFile
from .read_options import ReadOptions
from .volume_decoding import find_stem

IMAGES, MASKS = "images", "masks"
TWO_VALUES = "masks hold 0 and 255, which are read as the classes 0 and 1"

Pair = tuple[ImageFile, ImageFile]


def list_left_out(pairs: Mapping[str, tuple[Pair, ...]], broken: Collection[str]) -> set[str]:
    """Return the images of pairs that contain a ``broken`` file."""
    return {image.path for own in pairs.values() for image, mask in own if image.path in broken or mask.path in broken}


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
    return [f"client {name!r}: {len(empty)} of {len(pairs)} masks are empty ({join_some(empty)})"] if empty else []


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
