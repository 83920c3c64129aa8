"""Images with masks, for segmentation: ``DIR/<client>/images/`` and ``DIR/<client>/masks/``.

With parts, ``DIR/<client>/train/images/``, ``DIR/<client>/train/masks/`` and so on. An image and its mask have the same
name except for the suffix, or names that differ in the same way (:func:`fedshift.data.files.masks.match_names`), and
the same size. Images are read like those in class folders
(:mod:`fedshift.data.readers.images`); masks are uint8 ``[N, H, W]``. A mask contains the class 0, 1, ... of each pixel,
or 255 for ignored pixels. A client's masks that contain only 0 and 255 have two classes. A third folder, ``fov``, may
contain each image's field of view: pixels where it is 0 are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...tasks.segmentation import Segmentation
from ...utils.errors import UsageError
from ...utils.words import Information
from ..files import image_store
from ..files import images as folders
from ..files import masks as pairing
from ..files.image_store import ImageStore
from ..files.masks import Pair
from ..files.read_options import ReadOptions
from ..scan import Assign, Loaded, Scan
from .images import Images, choose_decodings, decode_images, inspect_images, list_clients, make_part, require_task

holds = "images with masks"
options = frozenset({"test_fraction", "image_size", "groups", "window"})


@dataclass(frozen=True, kw_only=True, eq=False)
class _Masked:
    """Images of all clients with their decoded masks and fields of view, and the values that each mask contains.

    ``white``: clients whose masks are 0 and 255 for two classes.
    """

    images: Images
    pairs: dict[str, tuple[Pair, ...]]
    views: dict[str, tuple[Pair, ...]]
    masks: dict[str, ImageStore]
    fields: dict[str, ImageStore]
    held: dict[str, NDArray[np.bool_]]
    white: frozenset[str]


def can_read(source: object) -> bool:
    """Return whether ``source`` is a directory of images with masks."""
    return folders.find_kind(source) == folders.MASKS


def scan(source: Path, reading: ReadOptions) -> Scan:
    """Return the clients in directory ``source``, which is one itself if it joins others.

    Raises :class:`UsageError` as :func:`fedshift.data.readers.images.scan` does, and if an image has no mask or one of
    another size, or a mask has no image or a value that is not a class.
    """
    require_task(source, reading, Segmentation)
    places = folders.choose_folders(source, reading)
    files, notices = list_clients(source, places, reading)
    pairs = {name: pairing.pair_files(source, name, own) for name, own in files.items()}
    seen = {name: tuple(image for image, _ in own) for name, own in pairs.items()}
    images = inspect_images(source, seen, reading, cases=True)
    masks = {name: _load_masks(images, name, own, reading) for name, own in pairs.items()}
    views = {name: pairing.pair_files(source, name, own, pairing.FIELDS) for name, own in files.items()}
    fields = {name: _load_masks(images, name, own, reading) for name, own in views.items() if own}
    held = {name: pairing.find_values(store.pixels) for name, store in masks.items()}
    classes, white = pairing.number_classes(source, pairs, held, reading)
    parts = []
    for name, store in masks.items():
        field = fields[name].pixels[:, 0] if name in fields else None
        y = pairing.to_classes(store.pixels[:, 0], white=name in white, fields=field)
        if images.padded:
            y = pairing.ignore_outside(y, store.facts.list_extents(mask for _, mask in pairs[name]))
        parts.append(make_part(name, images.clients[name], torch.from_numpy(y), places[name], reading))
    return Scan(
        name=source.resolve().name,
        parts=tuple(parts),
        task=reading.task or Segmentation(),
        classes=classes,
        checked=True,
        note="{samples} images with masks of {clients} clients",
        notices=(*notices, *images.notices),
        source=_Masked(images=images, pairs=pairs, views=views, masks=masks, fields=fields, held=held, white=white),
    )


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return each client's images; raise :class:`UsageError` for broken files, unless they are to be left out."""
    found: _Masked = scan.source
    images = found.images
    stores = decode_images(images, scan.parts, reading)
    both = [*stores, *found.masks.values(), *found.fields.values()]
    broken = {file: why for store in both for file, why in store.facts.broken.items()}
    counts = {name: (3 if name in found.fields else 2) * len(own) for name, own in found.pairs.items()}
    folders.refuse_broken(images.path, broken, sum(counts.values()), reading)
    left_out = pairing.list_left_out(found.pairs, broken) | pairing.list_left_out(found.views, broken)
    notices, faults = [], []
    for part, store in zip(scan.parts, stores, strict=True):
        name, own = part.client, found.pairs[part.client]
        notices += folders.list_notices(name, images.clients[name], store.facts, reading)
        notices += pairing.describe_partners(name, (*own, *found.views[name]))
        lost = store.facts.broken | found.masks[name].facts.broken
        if name in found.fields:
            lost |= found.fields[name].facts.broken
        faults += folders.list_faults(part.source, name, lost, counts[name])
        notices += pairing.list_empty(name, own, found.held[name], left_out, white=name in found.white)
    notices += pairing.describe_values(found.white, found.pairs)
    if found.fields:
        outside = {name: float((store.pixels == 0).mean()) for name, store in found.fields.items()}
        shares = ", ".join(f"{share:.0%} at {name!r}" for name, share in outside.items())
        notices.append(Information(f"pixels outside of the fields of view are ignored: {shares}"))
    decodings, said = choose_decodings(scan.parts, stores, reading, lambda part: assign(part, left_out))
    return Loaded(
        stores=[torch.from_numpy(how.rescale(store.pixels)) for store, how in zip(stores, decodings, strict=True)],
        decodings=decodings,
        extents=[
            store.facts.list_extents(images.clients[part.client])
            for part, store in zip(scan.parts, stores, strict=True)
        ],
        left_out=left_out,
        notices=(*notices, *said, *folders.list_unkept(both, reading)),
        faults=tuple(faults),
    )


def _load_masks(images: Images, name: str, pairs: tuple[Pair, ...], reading: ReadOptions) -> ImageStore:
    """Return a client's masks, uint8 ``[N, 1, H, W]``, from the cache or decoded at the size of its images.

    Raises :class:`UsageError` for a mask file whose size differs from its image's.
    """
    path, (width, height) = images.path, images.find_size(name)
    seen, masks = zip(*pairs, strict=True)
    choices = (pairing.MASKS, height, width, *["padded"] * images.padded)
    entry = image_store.cache_entry(reading.cache_directory, path, (*seen, *masks), *choices)
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
    facts = image_store.describe_headers(headers, broken, height, width, padded=images.padded)
    facts = replace(facts, kind="mask", channels=1, frames={})
    what = f"masks of {name}"
    return image_store.decode_all(path, masks, facts, entry, what, reading.progress)
