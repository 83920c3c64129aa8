"""Pairs of images and masks in directories, and the classes that the masks hold."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...tasks.segmentation import IGNORED, refuse_gray_levels
from ...utils.errors import Ref, UsageError
from ...utils.words import Information, join_some
from ..decoding.volumes import find_stem
from ..patches import make_box
from ..source import ReadOptions
from .listing import ImageFile

IMAGES, MASKS, FIELDS = "images", "masks", "fov"
"""Folders of a client: images, their masks and, optionally, the fields of view, outside of which pixels are ignored."""
TWO_VALUES = "masks hold 0 and 255, which are read as the classes 0 and 1"

Pair = tuple[ImageFile, ImageFile]
Name = tuple[str, str]
"""A part, such as ``train``, and the name of a file without its suffix."""


def list_empty(
    name: str, pairs: tuple[Pair, ...], held: NDArray[np.bool_], unusable: Collection[str], *, white: bool
) -> list[str]:
    """Return a notice about the client's masks that contain only background, if any.

    Arguments are as in :func:`number_classes`; ``white``: the client writes 1 as 255; ``unusable``: images that are
    skipped.
    """
    empty = [
        mask.path
        for (image, mask), values in zip(pairs, held, strict=True)
        if image.path not in unusable and not values[1:IGNORED].any() and not (white and values[IGNORED])
    ]
    return [f"client {name!r}: {len(empty)} of {len(pairs)} masks are empty ({join_some(empty)})"] if empty else []


def pair_files(
    path: Path, name: str, files: tuple[ImageFile, ...]
) -> tuple[tuple[ImageFile, ...], tuple[ImageFile, ...], tuple[ImageFile, ...]]:
    """Return the client's images, the mask of each, and the field of view of each, if it has such.

    Raises :class:`UsageError` for files in other folders, images without a mask, and masks without an image.
    """
    sides: dict[str, dict[Name, ImageFile]] = {IMAGES: {}, MASKS: {}, FIELDS: {}}
    for file in files:
        side = sides.get(file.category.lower())
        if side is None:
            raise UsageError(
                f"{path / file.path} is in none of the folders {', '.join(sides)}: a client with masks has the first "
                "two and may have the third, its images' fields of view. Masks of a second annotator belong elsewhere"
            )
        other = side.setdefault((file.part, find_stem(Path(file.path).name)), file)
        if other is not file:
            raise UsageError(
                f"{path / other.path} and {path / file.path} have the same name but for the suffix, by which an "
                "image and its mask are found: rename one"
            )
    masks = _find_partners(path, name, sides, MASKS)
    return tuple(sides[IMAGES].values()), masks, _find_partners(path, name, sides, FIELDS) if sides[FIELDS] else ()


def _find_partners(
    path: Path, name: str, sides: Mapping[str, dict[Name, ImageFile]], second: str
) -> tuple[ImageFile, ...]:
    """Return the file in folder ``second`` of each image; raise :class:`UsageError` for a file without another."""
    partners = match_names(sides[IMAGES], sides[second])
    if partners is not None and len(sides[IMAGES]) == len(sides[second]):
        return tuple(sides[second][partner] for partner in partners.values())
    one, other = (IMAGES, second) if not sides[IMAGES].keys() <= sides[second].keys() else (second, IMAGES)
    ones, others = sides[one], sides[other]
    alone = [key for key in ones if key not in others]
    part, stem = alone[0]
    near = get_close_matches(stem, [key[1] for key in others if key[0] == part], n=2, cutoff=0.4)
    hint = f" (closest: {' and '.join(others[part, end].path for end in near)})" if near else ""
    fix = "rename or add it, or take the file away"
    if one == IMAGES and len(others) > len(ones) and len(others) % len(ones) == 0:
        fix = f"{other} has {len(others) // len(ones)} files for each image: keep one annotator's, and put the "
        fix += "others' outside of the directory"
    raise UsageError(
        f"client {name!r}: {len(alone)} of {len(ones)} files in {one} have none of the same name in {other}, "
        f"the first is {path / ones[alone[0]].path}{hint}: {fix}"
    )


def match_names(ones: Collection[Name], others: Collection[Name]) -> dict[Name, Name] | None:
    """Return the name in ``others`` of each name in ``ones``: the same, or else the one that differs in the same way.

    Names differ in the same way if they are equal without the beginning and the end that all names of a side share:
    ``im01, im02`` and ``im01_mask, im02_mask``, but not ``im11, im12`` and ``im21, im22``, since numbers stay whole.
    ``others`` may have more. None if a name has no partner, if two would share one, or if ``ones`` is a single name
    that ``others`` lacks, which shows no common parts.
    """
    if set(ones) <= set(others):
        return {name: name for name in ones}
    cut = [_cut_common(side) for side in (ones, others)]
    if len(ones) < 2 or [*map(len, cut)] != [len(ones), len(others)] or not cut[0].keys() <= cut[1].keys():
        return None
    return {name: cut[1][key] for key, name in cut[0].items()}


def _cut_common(names: Collection[Name]) -> dict[Name, Name]:
    """Return ``names`` by what is left without the beginning and the end of all stems, but for digits of a number."""
    stems = [stem for _, stem in names]
    start = len(re.sub(r"\d+$", "", _find_beginning(stems)))
    end = len(re.sub(r"\d+$", "", _find_beginning([stem[start:][::-1] for stem in stems])))
    return {(part, stem[start : len(stem) - end]): (part, stem) for part, stem in names}


def _find_beginning(texts: Sequence[str]) -> str:
    """Return the longest text with which all ``texts`` begin."""
    return "".join(letters[0] for letters in takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False)))


def describe_partners(name: str, pairs: Sequence[Pair]) -> list[str]:
    """Return a notice if images of a client are paired with files of other names."""
    unlike = [
        f"{image.path} with {file.path}"
        for image, file in pairs
        if find_stem(Path(image.path).name) != find_stem(Path(file.path).name)
    ]
    if not unlike:
        return []
    text = f"client {name!r}: {len(unlike)} files are paired by the parts in which their names differ, as {unlike[0]}"
    return [Information(text)]


def number_classes(
    path: Path, pairs: Mapping[str, tuple[Pair, ...]], held: Mapping[str, NDArray[np.bool_]], reading: ReadOptions
) -> tuple[int, frozenset[str]]:
    """Return the number of classes in masks with the values ``held``, and the clients that write 1 as 255.

    Raises :class:`UsageError` for values outside of the requested classes, and if the number of classes is ambiguous.
    """
    asked = reading.classes or (reading.schema.classes if reading.schema else 0) or None
    found = {name: {int(value) for value in np.flatnonzero(own.any(axis=0))} for name, own in held.items()}
    values = set[int]().union(*found.values())
    white = frozenset(name for name, own in found.items() if IGNORED in own and own <= {0, IGNORED})
    if white and asked in (None, 2):
        others = set[int]().union(*(own for name, own in found.items() if name not in white))
        if others <= {0, 1}:
            return 2, white
        if others <= {0, 1, IGNORED}:
            mixed = next(name for name, own in found.items() if {1, IGNORED} <= own)
            raise UsageError(
                f"masks of client {min(white)!r} hold 0 and {IGNORED}, those of {mixed!r} 0, 1 and {IGNORED}, where "
                f"{IGNORED} is an ignored pixel: write 1 in place of {IGNORED} at {min(white)!r} if it is the class 1"
            )
    top = max(values - {IGNORED}, default=0)
    if asked is None:
        for name, own in found.items():
            refuse_gray_levels(f"client {name!r}", own)
            _refuse_two_ways(path, name, pairs[name], held[name])
        classes = sorted(values - {IGNORED})
        if (len(values) == 2 and classes[0] == 0 and top > 1) or len(classes) < (top + 1) / 2:
            alone = " alone" if len(values) == 2 else ""
            name = next(name for name, own in found.items() if top in own)
            raise UsageError(
                f"the masks in {path} hold {join_some(map(str, classes))}{alone}, the {top} first at client {name!r}: "
                f"write 1, 2, ... for the classes after 0, or give the number of classes ({{}})",
                Ref(classes=top + 1),
            )
        return max(top + 1, 2), frozenset()
    for name, each in held.items():
        wrong = np.flatnonzero(each[:, asked:IGNORED].any(axis=1))
        if len(wrong):
            value = asked + int(each[wrong[0], asked:].argmax())
            raise UsageError(
                f"mask {path / pairs[name][wrong[0]][1].path} has the value {value}, but classes={asked} means "
                f"0..{asked - 1} (and {IGNORED} for ignored pixels), as have {len(wrong)} of {len(each)} masks of "
                f"client {name!r}: correct the masks, or give the number of classes ({{}})",
                Ref("classes"),
            )
    return asked, frozenset()


def _refuse_two_ways(path: Path, name: str, pairs: Sequence[Pair], held: NDArray[np.bool_]) -> None:
    """Raise :class:`UsageError` if some masks of a client are 0 and 1, others 0 and 255, and none has all of these."""
    one, white = held[:, 1], held[:, IGNORED]
    if one.any() and white.any() and not (one & white).any() and not held[:, 2:IGNORED].any():
        ones, whites = (path / pairs[int(rows.argmax())][1].path for rows in (one, white))
        raise UsageError(
            f"masks of client {name!r} hold 0 and 1, such as {ones}, or 0 and {IGNORED}, such as {whites}, and "
            f"{IGNORED} means that a pixel is ignored: write 1 in place of {IGNORED} if it is the class 1, or give the "
            "number of classes ({})",
            Ref(classes=2),
        )


def to_classes(
    masks: NDArray[Any], *, white: bool, fields: NDArray[Any] | None, sizes: Sequence[tuple[int, ...]]
) -> NDArray[Any]:
    """Return the class of each pixel of ``masks [N, *axes]``; pixels outside of their fields or sizes are ignored.

    ``white``: 255 is the class 1; ``fields``: 0 is outside; ``sizes``: of each mask without padding.
    """
    classes = (masks > 0).astype(np.uint8) if white else masks
    classes = classes if fields is None else np.where(fields > 0, classes, np.uint8(IGNORED))
    if set(sizes) <= {masks.shape[1:]}:
        return classes
    inside = np.zeros(masks.shape, bool)
    for row, size in enumerate(sizes):
        inside[row][make_box([0] * len(size), size)] = True
    return np.where(inside, classes, np.uint8(IGNORED))


def describe_values(white: Collection[str], clients: Collection[str]) -> list[str]:
    """Return a notice about clients whose masks write the class 1 as 255, ``white``, among all ``clients``."""
    if len(white) == len(clients):
        return [Information(TWO_VALUES)]
    named = join_some(map(repr, sorted(white)))
    return [Information(f"{TWO_VALUES}, at {named}; elsewhere they hold 0 and 1")] if white else []
