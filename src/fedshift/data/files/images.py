"""A federation from directories of images, see :mod:`fedshift.data.files.image_tree` for how they are arranged.

A client whose folder holds no parts gives ``test_fraction`` of every class for testing, and so does the train folder
of a client without a test folder. Train, validation and test are rows of one array, which is decoded once and mapped
from the cache afterwards (:mod:`fedshift.data.files.image_store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError, unknown_name
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..samples import Samples
from ..stratification import split_stratified
from .image_decoding import Header
from .image_store import ImageFacts, ImageFile, ImageStore, cache_entry, decode_all, inspect_all, load_store
from .image_tree import find_clients, list_categories, list_files
from .read_options import ReadOptions

Rows = NDArray[np.int64]
Sizes = dict[tuple[int, int], str]  # a file of each (width, height)

_LISTED = 5


class SizesDiffer(UsageError):
    """Images are of several sizes, and nobody said to which they are to be brought."""


def read_images(path: Path, reading: ReadOptions) -> Federation:
    """The federation in directory ``path``, uint8 ``[N, C, H, W]``; float32 in [-1, 1] for gray of more than 8 bits.

    A client is gray (C = 1) unless an image of its is in color. Labels count the class folders of all clients, whether
    chosen or not. Raises :class:`UsageError` for another arrangement, unknown domains, files that cannot be read
    (unless they are to be skipped), sizes that differ without ``reading.image_size``, and gray of 8 and of more bits
    in one client.
    """
    if reading.image_size is not None and reading.image_size < 1:
        raise UsageError(f"image_size={reading.image_size} pixels: must be at least 1")
    folders = find_clients(path)
    for name in reading.domains or ():
        if name not in folders:
            raise unknown_name("domain", name, folders)
    labels = {name: label for label, name in enumerate(list_categories(folders.values()))}
    classes = len(labels) if reading.classes is None else reading.classes
    if classes < len(labels):
        raise UsageError(
            f"classes={classes}: {path} has {len(labels)} class folders ({_format_few(labels)}); ask for as many"
        )
    notices: list[str] = []
    files: dict[str, tuple[ImageFile, ...]] = {}
    for name in folders if reading.domains is None else reading.domains:
        files[name], remarks = list_files(path, folders[name])
        notices += remarks
    stores = _load_stores(path, files, reading)
    broken = {file: why for store in stores.values() for file, why in store.facts.broken.items()}
    if broken and reading.on_unreadable == "refuse":
        raise UsageError(
            f"{len(broken)} of {sum(map(len, files.values()))} files cannot be read: "
            f"{_format_few(f'{path / file}: {why}' for file, why in broken.items())}; "
            "mend or remove them, or leave them out (--on-unreadable skip)"
        )
    clients = []
    for name, store in stores.items():
        clients.append(_make_client(name, files[name], store, labels, reading))
        notices += _list_notices(name, files[name], store.facts, reading)
    unkept = {store.unkept for store in stores.values() if store.unkept}
    notices += [f"{reading.cache_directory} cannot be written ({why}): images are kept in memory" for why in unkept]
    count = sum(len(split) for client in clients for split in client.splits.values())
    return Federation(
        name=path.resolve().name,
        clients=tuple(clients),
        classes=classes,
        note=f"{count} images of {len(clients)} clients",
        class_names=tuple(labels),
        notices=tuple(notices),
    )


def _load_stores(path: Path, files: Mapping[str, tuple[ImageFile, ...]], reading: ReadOptions) -> dict[str, ImageStore]:
    """Every client's array, from the cache or decoded; headers of all files are read before any is decoded."""
    places: dict[str, Path] = {}
    found: dict[str, ImageStore | None] = {}
    headers: dict[str, dict[str, Header]] = {}
    broken: dict[str, dict[str, str]] = {}
    sizes: Sizes = {}
    for name, own in files.items():
        fraction = None if any(file.part == "test" for file in own) else reading.test_fraction
        places[name] = cache_entry(reading.cache_directory, path, own, name, reading.image_size, fraction)
        store = found[name] = load_store(places[name])
        if store is None:
            paths = [file.path for file in own]
            headers[name], broken[name] = inspect_all(path, paths, f"headers of {name}", reading.progress)
            _refuse_mixed(path, name, headers[name])
            for file, header in headers[name].items():
                sizes.setdefault((header.width, header.height), file)
        elif len(store.facts.broken) < len(own):
            usable = next(file.path for file in own if file.path not in store.facts.broken)
            sizes.setdefault((store.facts.width, store.facts.height), usable)
    width, height = (reading.image_size,) * 2 if reading.image_size else _common_size(path, sizes)
    stores = {}
    for name, store in found.items():
        if store is None:
            own = files[name]
            facts = _common_facts(headers[name], broken[name], height, width)
            store = decode_all(
                path, [file.path for file in own], facts, places[name],
                partial(_training_rows, name, own, reading), f"images of {name}", reading.progress,
            )  # fmt: skip
        stores[name] = store
    return stores


def _refuse_mixed(path: Path, name: str, headers: Mapping[str, Header]) -> None:
    example: dict[str, str] = {}
    for file, header in headers.items():
        example.setdefault(header.kind, file)
    if len(example) > 1:
        first, second = sorted(example)[:2]
        raise UsageError(
            f"client {name!r} has images of different depth, {path / example[first]} ({first}) and "
            f"{path / example[second]} ({second}): convert all of a client's images to one"
        )


def _common_facts(headers: Mapping[str, Header], broken: dict[str, str], height: int, width: int) -> ImageFacts:
    return ImageFacts(
        kind=next((header.kind for header in headers.values()), "byte"),
        channels=max((header.channels for header in headers.values()), default=1),
        height=height,
        width=width,
        broken=broken,
        frames={file: header.frames for file, header in headers.items() if header.frames > 1},
    )


def _common_size(path: Path, sizes: Sizes) -> tuple[int, int]:
    """The one width and height of all images, 1 x 1 where none can be read."""
    if len(sizes) > 1:
        small, large = (pick(sizes, key=lambda size: (size[0] * size[1], size)) for pick in (min, max))
        ranges = (f"{min(side)} to {max(side)}" for side in zip(*sizes, strict=True))
        raise SizesDiffer(
            f"images differ in size: {path / sizes[small]} has {small[0]} x {small[1]} pixels, "
            f"{path / sizes[large]} has {large[0]} x {large[1]} (widths {next(ranges)}, heights {next(ranges)}): "
            "give one size for all (--image-size 64)"
        )
    return next(iter(sizes), (1, 1))


def _split_rows(
    name: str, files: tuple[ImageFile, ...], reading: ReadOptions, broken: Iterable[str]
) -> dict[str, Rows]:
    """Which images are for training, validation and testing: places in ``files``, without broken ones."""
    left_out = frozenset(broken)
    usable = np.array([row for row, file in enumerate(files) if file.path not in left_out], dtype=np.int64)
    part = np.array([files[row].part or "train" for row in usable], dtype=str)
    rows = {one: usable[part == one] for one in ("train", "validation", "test")}
    if not any(file.part == "test" for file in files):
        category = np.unique([files[row].category for row in rows["train"]], return_inverse=True)[1]
        rest, drawn = split_stratified(category, reading.test_fraction, stream(0, "test", name))
        rows["train"], rows["test"] = rows["train"][rest], rows["train"][drawn]
    return rows


def _training_rows(name: str, files: tuple[ImageFile, ...], reading: ReadOptions, broken: frozenset[str]) -> Rows:
    return _split_rows(name, files, reading, broken)["train"]


def _make_client(
    name: str, files: tuple[ImageFile, ...], store: ImageStore, labels: Mapping[str, int], reading: ReadOptions
) -> ClientData:
    y = torch.tensor([labels[file.category] for file in files])
    x = torch.from_numpy(store.pixels)
    rows = _split_rows(name, files, reading, store.facts.broken)
    if not len(rows["train"]):
        raise UsageError(f"client {name!r} has no training image that can be read: leave the client out (--domains)")
    if not len(rows["test"]):
        raise UsageError(
            f"client {name!r} has no test image, and no two training images of one class to draw one from: "
            "add images, or leave the client out (--domains)"
        )
    splits = {
        part: Samples(x=x, y=y[index], rows=index)
        for part, index in ((part, torch.from_numpy(chosen)) for part, chosen in rows.items())
        if len(index)
    }
    return ClientData(name=name, **splits)


def _list_notices(name: str, files: tuple[ImageFile, ...], facts: ImageFacts, reading: ReadOptions) -> list[str]:
    said = []
    if facts.broken:
        why = _format_few(f"{file}: {why}" for file, why in facts.broken.items())
        said.append(f"client {name!r}: {len(facts.broken)} of {len(files)} files cannot be read, left out ({why})")
    if facts.frames:
        frames = _format_few(f"{file}: {count}" for file, count in facts.frames.items())
        said.append(f"client {name!r}: {len(facts.frames)} files hold several frames, the first is read ({frames})")
    if facts.bits:
        said.append(f"client {name!r}: gray read as {facts.bits} bits, 0..{2**facts.bits - 1} scaled to [-1, 1]")
    if any(file.part for file in files) and not any(file.part == "test" for file in files):
        said.append(f"client {name!r}: no test folder, so {reading.test_fraction:g} of its train folder is for testing")
    return said


def _format_few(items: Iterable[str]) -> str:
    """The first five, and how many more there are."""
    named = list(items)
    more = f", and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
    return ", ".join(named[:_LISTED]) + more
