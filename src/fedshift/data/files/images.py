"""Federations from directories of images, ``DIR/<client>/<class>/<image>`` or ``DIR/<client>/<part>/<class>/<image>``.

Federations of domains are published in this form (Office-Caltech10, Office-Home, PACS, DomainNet). A part is train,
validation or test. If a client has no parts, ``test_fraction`` of every class is used for testing; if it has no test
folder, ``test_fraction`` of its train folder. Train, validation and test are rows of one array, which is decoded once
and then mapped from the cache (:mod:`fedshift.data.files.image_store`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils.errors import Ref, UsageError, unknown_name
from ...utils.random_streams import stream
from ..agreement import refuse_other_labels
from ..federation import ClientData, Federation
from ..partition import split_stratified
from ..stores import LazyStore
from . import image_store
from .image_decoding import SUFFIXES, Header
from .image_store import ImageFacts, ImageFile, ImageStore
from .read_options import ReadOptions
from .volume_decoding import is_volume

PARTS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
"""Parts of a client's data, by folder name."""

LAYOUT = (
    "images belong in DIR/<client>/<class>/, or in DIR/<client>/train/<class>/ and DIR/<client>/test/<class>/ "
    "(with masks: the folders images and masks in place of classes)"
)

UNREAD = frozenset({".avif", ".dcm", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".pgm", ".ppm", ".tga", ".webp"})
"""Suffixes of image formats that cannot be read; skipping such files loses data."""

_IGNORED = frozenset({"thumbs.db", "desktop.ini", "__macosx"})
_DEEPEST = 4  # levels below DIR to search for images: client, part, class, and one level too deep
_LISTED = 5

Rows = NDArray[np.int64]


class SizesDiffer(UsageError):
    """Images have different sizes, and no common size was given."""


def read_images(path: Path, reading: ReadOptions) -> Federation:
    """Return the federation in directory ``path``.

    A client is gray (C = 1) unless one of its images is in color. Labels number the class folders of all clients,
    selected or not.

    Args:
        path: Directory of clients, or of the class folders or parts of one client that joins others (``schema``).
        reading: ``domains``, ``classes``, ``image_size``, ``on_unreadable``, ``test_fraction``, ``cache`` and
            ``progress`` apply.

    Returns:
        Images uint8 ``[N, C, H, W]``; float32 in [-1, 1] for gray of more than 8 bits.

    Raises:
        UsageError: The directory has another layout, domains are unknown, files cannot be read (unless they are to be
            skipped), sizes differ and ``image_size`` is not given, or a client mixes gray of 8 bits and of more.

    """
    folders = choose_folders(path, reading)
    refuse_other_labels({name: list_categories([folder]) for name, folder in folders.items()})
    labels = {name: label for label, name in enumerate(list_categories(folders.values()))}
    classes = len(labels) if reading.classes is None else reading.classes
    if classes < len(labels):
        raise UsageError(
            f"classes={classes}: {path} has {len(labels)} class folders ({format_few(labels)}); ask for as many"
        )
    notices: list[str] = []
    faults: list[str] = []
    files: dict[str, tuple[ImageFile, ...]] = {}
    for name in folders if reading.domains is None else reading.domains:
        files[name], remarks = list_files(path, folders[name])
        notices += remarks
    stores = load_stores(path, files, reading)
    broken = {file: why for store in stores.values() for file, why in store.facts.broken.items()}
    refuse_broken(path, broken, sum(map(len, files.values())), reading)
    clients = []
    for name, store in stores.items():
        y = torch.tensor([labels[file.category] for file in files[name]])
        x = torch.from_numpy(store.pixels)
        clients.append(make_client(name, files[name], x, y, store.facts.broken, reading))
        notices += list_notices(name, files[name], store.facts, reading)
        faults += list_faults(folders[name], name, files[name], store.facts)
    notices += list_unkept(stores.values(), reading)
    count = sum(len(split) for client in clients for split in client.splits.values())
    return Federation(
        name=path.resolve().name,
        clients=tuple(clients),
        classes=classes,
        note=f"{count} images of {len(clients)} clients",
        class_names=tuple(labels),
        notices=tuple(notices),
        faults=tuple(faults),
    )


def choose_folders(path: Path, reading: ReadOptions) -> dict[str, Path]:
    """Return the client folders in ``path`` by name, or ``path`` itself if it is one client that joins others.

    Raises :class:`UsageError` for an impossible image size and for unknown client names.
    """
    if reading.image_size is not None and reading.image_size < 1:
        raise UsageError(f"image_size={reading.image_size} pixels: must be at least 1")
    alone = reading.schema is not None and holds_one_client(path)
    folders = {path.resolve().name: path} if alone else find_clients(path)
    for name in reading.domains or ():
        if name not in folders:
            raise unknown_name("domain", name, folders)
    return folders


def refuse_broken(path: Path, broken: Mapping[str, str], count: int, reading: ReadOptions) -> None:
    """Raise :class:`UsageError` if some of ``count`` files are ``broken``, unless they are to be skipped."""
    if broken and reading.on_unreadable == "refuse":
        raise UsageError(
            f"{len(broken)} of {count} files cannot be read: "
            f"{format_few(f'{path / file}: {why}' for file, why in broken.items())}; "
            "mend or remove them, or leave them out ({})",
            Ref(on_data_error="warn"),
        )


def list_unkept(stores: Iterable[ImageStore], reading: ReadOptions) -> list[str]:
    """Return notices that explain why decoded files are not in the cache."""
    reasons = {store.unkept for store in stores if store.unkept}
    return [f"{reading.cache_directory} cannot be written ({why}): images are kept in memory" for why in reasons]


def holds_images(path: Path) -> bool:
    """Return whether there is an image in a folder of ``path`` or up to three levels below it; stop at the first."""

    def below(folder: Path, levels: int) -> bool:
        files, folders = list_content(folder)
        return any(map(_is_image, files)) or (levels > 1 and any(below(Path(f), levels - 1) for f in folders))

    return path.is_dir() and any(below(Path(folder), _DEEPEST) for folder in list_content(path)[1])


def holds_one_client(path: Path) -> bool:
    """Return whether the folders in ``path`` belong to one client: parts, or classes that directly contain images."""
    folders = list_content(path)[1]
    if folders and all(folder.name.lower() in PARTS for folder in folders):
        return True
    inside = [list_content(Path(folder)) for folder in folders]
    return any(_is_image(file) for files, _ in inside for file in files) and not any(deeper for _, deeper in inside)


def find_clients(path: Path) -> dict[str, Path]:
    """Return the clients' folders by name; raise :class:`UsageError` if ``path`` has another layout."""
    if not path.is_dir():
        raise UsageError(f"{path} is no directory: give one in which {LAYOUT}")
    files, folders = list_content(path)
    stray = next(filter(_is_image, files), None)
    if stray is not None:
        raise UsageError(f"{stray.path} is an image outside of any client's folder: {LAYOUT}")
    names = {folder.name: Path(folder) for folder in folders}
    if not names:
        raise UsageError(f"{path} holds no folder: {LAYOUT}")
    if all(name.lower() in PARTS for name in names):
        raise UsageError(f"{path} holds {', '.join(names)}, but no folder of a client: {LAYOUT}")
    return names


def list_categories(clients: Iterable[Path]) -> tuple[str, ...]:
    """Return the sorted names of the class folders of all clients, see :func:`sort_classes`."""
    return sort_classes(
        {folder.name for client in clients for folders in _find_parts(client).values() for folder in folders}
    )


def sort_classes(found: Collection[str]) -> tuple[str, ...]:
    """Sort class names, numerically if all are numbers."""
    if all(name.isascii() and name.isdecimal() for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def list_files(
    root: Path, client: Path, suffixes: Collection[str] = SUFFIXES
) -> tuple[tuple[ImageFile, ...], tuple[str, ...]]:
    """Return a client's images with ``suffixes``, ordered by part, class and name, and notices of ignored files.

    Raises :class:`UsageError` if images are outside of class folders or below them, parts are unclear, or there are no
    images.
    """
    name, found, notices = client.name, [], []
    others: Counter[str] = Counter()
    for part, folders in _find_parts(client, check=True).items():
        for folder in folders:
            files, deeper = list_content(Path(folder))
            if deeper:
                raise UsageError(f"{deeper[0].path} is a folder inside of a class folder: {LAYOUT}")
            images = [file for file in files if file.name.lower().endswith(tuple(suffixes))]
            lost = [file for file in files if file not in images]
            others.update(Path(file.name).suffix for file in lost if not _is_lost(file))
            if not images:
                notices.append(f"client {name!r}: {folder.path} holds no image")
            for file in images:
                try:
                    stat = file.stat()
                    stamp = stat.st_size, stat.st_mtime_ns
                except OSError:  # a dangling link, which is later reported as unreadable
                    stamp = 0, 0
                found.append(ImageFile(Path(file).relative_to(root).as_posix(), part, folder.name, *stamp))
    if others:
        kinds = ", ".join(sorted(suffix or "no suffix" for suffix in others))
        notices.append(f"client {name!r}: {others.total()} files that are no images left out ({kinds})")
    if not found:
        raise UsageError(f"client {name!r} has no image ({', '.join(sorted(suffixes))}) in {client}: {LAYOUT}")
    return tuple(found), tuple(notices)


def _find_parts(client: Path, *, check: bool = False) -> dict[str, list[os.DirEntry[str]]]:
    """Return class folders by part; the part is "" if the client's folder contains the classes directly.

    With ``check``, raises :class:`UsageError` if images are outside of class folders, or parts are unclear.
    """
    files, folders = list_content(client)
    named = {folder.name: folder for folder in folders if folder.name.lower() in PARTS}
    inside = {name: list_content(Path(folder)) for name, folder in named.items()}
    parts = {PARTS[name.lower()]: classes for name, (_, classes) in inside.items()} or {"": folders}
    if not check:
        return parts
    stray = next(filter(_is_image, chain(files, *(strays for strays, _ in inside.values()))), None)
    if stray is not None:
        raise UsageError(f"{stray.path} is an image outside of any class folder: {LAYOUT}")
    if named and len(named) < len(folders):
        odd = next(folder.name for folder in folders if folder.name not in named)
        raise UsageError(f"{client} holds both {next(iter(named))} and {odd}, parts and classes: {LAYOUT}")
    if len(parts) < len(named):
        raise UsageError(
            f"{client} holds {', '.join(named)}, of which two are the same part: "
            "keep one folder each for train, validation and test"
        )
    if named and "train" not in parts:
        raise UsageError(f"{client} holds {', '.join(named)} but no train: {LAYOUT}")
    return parts


def list_content(folder: Path) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Return the files and folders in ``folder``, by name, without leftovers of operating systems and archives."""
    with os.scandir(folder) as entries:
        seen = [e for e in entries if not e.name.startswith(".") and e.name.lower() not in _IGNORED]
    seen.sort(key=lambda e: e.name)
    return [e for e in seen if not e.is_dir()], [e for e in seen if e.is_dir()]


def _is_lost(file: os.DirEntry[str]) -> bool:
    return Path(file.name).suffix.lower() in UNREAD


def _is_image(file: os.DirEntry[str]) -> bool:
    return Path(file.name).suffix.lower() in SUFFIXES or is_volume(file.name)


def load_stores(path: Path, files: Mapping[str, tuple[ImageFile, ...]], reading: ReadOptions) -> dict[str, ImageStore]:
    """Return every client's array, from the cache or decoded; all headers are read before any image is decoded."""
    entries: dict[str, Path] = {}
    stores: dict[str, ImageStore] = {}
    inspected: dict[str, tuple[dict[str, Header], dict[str, str]]] = {}
    sizes: dict[tuple[int, int], str] = {}  # the first file of each (width, height)
    for name, own in files.items():
        fraction = None if any(file.part == "test" for file in own) else reading.test_fraction
        entries[name] = image_store.cache_entry(reading.cache_directory, path, own, name, reading.image_size, fraction)
        store = image_store.load_store(entries[name])
        if store is None:
            inspected[name] = headers, _ = image_store.inspect_all(path, own, f"headers of {name}", reading.progress)
            example = {header.kind: file for file, header in reversed(headers.items())}  # the first of each kind
            if len(example) > 1:
                first, second = sorted(example)[:2]
                raise UsageError(
                    f"client {name!r} has images of different depth, {path / example[first]} ({first}) and "
                    f"{path / example[second]} ({second}): convert all of a client's images to one"
                )
            for file, header in headers.items():
                sizes.setdefault((header.width, header.height), file)
        else:
            stores[name] = store
            for file in [file.path for file in own if file.path not in store.facts.broken][:1]:
                sizes.setdefault((store.facts.width, store.facts.height), file)
    width, height = (reading.image_size,) * 2 if reading.image_size else _find_common_size(path, sizes)
    for name, (headers, broken) in inspected.items():
        stores[name] = image_store.decode_all(
            path,
            files[name],
            image_store.describe_headers(headers, broken, height, width),
            entries[name],
            partial(_split_rows, name, files[name], reading),
            f"images of {name}",
            reading.progress,
        )
    return {name: stores[name] for name in files}


def _find_common_size(path: Path, sizes: dict[tuple[int, int], str]) -> tuple[int, int]:
    """Return the common width and height of all images; 1 x 1 if none can be read."""
    if len(sizes) > 1:
        small, large = (pick(sizes, key=lambda size: (size[0] * size[1], size)) for pick in (min, max))
        ranges = (f"{min(side)} to {max(side)}" for side in zip(*sizes, strict=True))
        raise SizesDiffer(
            f"images differ in size: {path / sizes[small]} has {small[0]} x {small[1]} pixels, "
            f"{path / sizes[large]} has {large[0]} x {large[1]} (widths {next(ranges)}, heights {next(ranges)}): "
            "give one size for all ({})",
            Ref(image_size=64),
        )
    return next(iter(sizes), (1, 1))


def _split_rows(
    name: str, files: tuple[ImageFile, ...], reading: ReadOptions, broken: Collection[str]
) -> dict[str, Rows]:
    """Return the indices in ``files`` for training, validation and testing, without ``broken`` files."""
    usable = np.array([row for row, file in enumerate(files) if file.path not in broken], dtype=np.int64)
    part = np.array([files[row].part or "train" for row in usable], dtype=str)
    rows = {one: usable[part == one] for one in ("train", "validation", "test")}
    if not any(file.part == "test" for file in files):
        category = np.unique([files[row].category for row in rows["train"]], return_inverse=True)[1]
        rest, drawn = split_stratified(category, reading.test_fraction, stream(0, "test", name))
        rows["train"], rows["test"] = rows["train"][rest], rows["train"][drawn]
    return rows


def make_client(
    name: str, files: tuple[ImageFile, ...], x: torch.Tensor | LazyStore, y: torch.Tensor, broken: Collection[str],
    reading: ReadOptions,
) -> ClientData:  # fmt: skip
    """Return a client with images ``x`` and their targets ``y [N, ...]``, without ``broken`` files.

    Raises :class:`UsageError` if no image is left for training or testing.
    """
    rows = _split_rows(name, files, reading, broken)
    if not len(rows["train"]):
        raise UsageError(
            f"client {name!r} has no training image that can be read: leave the client out ({{}})", Ref("domains")
        )
    if not len(rows["test"]):
        raise UsageError(
            f"client {name!r} has no test image, and no two training images of one class to draw one from: "
            "add images, or leave the client out ({})",
            Ref("domains"),
        )
    return ClientData.from_rows(name, x, y, rows, tuple(file.path for file in files))


def list_notices(name: str, files: tuple[ImageFile, ...], facts: ImageFacts, reading: ReadOptions) -> list[str]:
    """Return remarks on how the client's images were read."""
    said = []
    if facts.frames:
        frames = format_few(f"{file}: {count}" for file, count in facts.frames.items())
        said.append(f"client {name!r}: {len(facts.frames)} files hold several frames, the first is read ({frames})")
    if facts.bits:
        said.append(f"client {name!r}: gray read as {facts.bits} bits, 0..{2**facts.bits - 1} scaled to [-1, 1]")
    if any(file.part for file in files) and not any(file.part == "test" for file in files):
        said.append(f"client {name!r}: no test folder, so {reading.test_fraction:g} of its train folder is for testing")
    return said


def list_faults(folder: Path, name: str, files: tuple[ImageFile, ...], facts: ImageFacts) -> list[str]:
    """Return sentences about skipped images of client ``name`` in ``folder``."""
    said = []
    if facts.broken:
        why = format_few(f"{file}: {why}" for file, why in facts.broken.items())
        said.append(f"client {name!r}: {len(facts.broken)} of {len(files)} files cannot be read, left out ({why})")
    folders = [Path(inside) for several in _find_parts(folder).values() for inside in several]
    lost = Counter(Path(file.name).suffix for inside in folders for file in list_content(inside)[0] if _is_lost(file))
    if lost:
        kinds = ", ".join(sorted(lost))
        images = f"{lost.total()} image{'s' * (lost.total() > 1)}"
        said.append(f"client {name!r}: {images} in a format that is not read, left out ({kinds})")
    return said


def format_few(items: Iterable[str]) -> str:
    """Return the first five items and the number of the remaining ones."""
    named = list(items)
    more = f", and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
    return ", ".join(named[:_LISTED]) + more
