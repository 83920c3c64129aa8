"""Directories of images and recordings: clients, their parts, and folders of classes or of images and masks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ...utils.errors import UsageError
from ...utils.words import Information, join_some
from ..decoding.dicom import DICOM, holds_slices, is_dicom
from ..decoding.images import SUFFIXES
from ..decoding.signals import SIGNALS
from ..decoding.volumes import is_volume
from ..identity import sort_names
from ..source import ReadOptions

PARTS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
"""Parts of a client's data, by folder name."""

LAYOUT = (
    "images belong in DIR/<client>/<class>/, or in DIR/<client>/train/<class>/ and DIR/<client>/test/<class>/ "
    "(with masks: the folders images and masks in place of classes)"
)

UNREAD_IMAGES = frozenset({
    ".avif", ".czi", ".dcm", ".dng", ".exr", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".mgz", ".mha", ".mhd",
    ".ndpi", ".nrrd", ".psd", ".svs", ".tga", ".webp",
})  # fmt: skip
"""Suffixes of image formats that cannot be read; skipping such files loses data."""

CLASSES, MASKS, VOLUMES, RECORDINGS = ("classes", "masks", "volumes", "recordings")
"""Contents of directories: images in folders of classes, images with masks, medical images with masks, recordings."""

_IGNORED = frozenset({"thumbs.db", "desktop.ini", "__macosx", "dicomdir"})
_ARCHIVES = frozenset({".7z", ".bz2", ".gz", ".rar", ".tar", ".tgz", ".xz", ".zip"})
_DEEPEST = 4  # levels below DIR to search for images: client, part, class, and one level too deep


PathLike = os.PathLike[str]


class ImageFile(NamedTuple):
    """A client's file: ``path`` relative to a given directory, ``part`` (may be empty) and ``category``."""

    path: str
    part: str
    category: str
    size: int
    mtime_ns: int


def choose_folders(path: Path, reading: ReadOptions) -> dict[str, Path]:
    """Return the client folders in ``path`` by name, or ``path`` itself if it is one client that joins others.

    Raises :class:`UsageError` for an impossible image size, and if ``path`` has another layout.
    """
    if reading.image_size is not None and reading.image_size < 1:
        raise UsageError(f"image_size={reading.image_size} pixels: must be at least 1")
    if reading.schema is not None and holds_one_client(path):
        return {path.resolve().name: path}
    files, folders = list_content(path)
    if stray := next(filter(_is_image, files), None):
        raise UsageError(f"{stray.path} is an image outside of any client's folder: {LAYOUT}")
    names = sort_names(folder.name for folder in folders)
    if all(name.lower() in PARTS for name in names):
        raise UsageError(f"{path} holds {', '.join(names)}, but no folder of a client: {LAYOUT}")
    return {name: path / name for name in names}


def find_content(source: object) -> str:
    """Return what directory ``source`` holds, such as :data:`CLASSES`; empty for nothing of the kind.

    Images outside folders of classes, or of images and masks, do not count if there are tables or arrays.
    """
    if not isinstance(source, Path) or not source.is_dir():
        return ""
    if not holds_images(source):
        return RECORDINGS * any(_reach(folder, _is_recording, _DEEPEST - 1) for folder in list_content(source)[1])
    places = _find_places(source)
    deep = places or any(file.suffix.lower() in SUFFIXES for file in source.glob("*/*/*"))
    if not deep and any(file.suffix.lower() in (".npz", ".csv", ".tsv", ".parquet") for file in source.iterdir()):
        return ""
    images = [folder for place in places for folder in list_content(place)[1] if folder.name.lower() == "images"]
    volumes = any(
        any(is_volume(Path(file)) for file in files) or any(holds_slices(Path(series)) for series in deeper)
        for files, deeper in map(list_content, images)
    )
    return VOLUMES if volumes else MASKS if places else CLASSES


def _find_places(path: Path) -> list[PathLike]:
    """Return the folders in ``path`` that contain folders of images and of masks: clients or their parts."""
    clients: list[PathLike] = [path, *list_content(path)[1]]
    parts = [folder for client in clients for folder in list_content(client)[1] if folder.name.lower() in PARTS]
    return [place for place in [*clients, *parts] if _holds_masks(list_content(place)[1])]


def _holds_masks(folders: Iterable[os.DirEntry[str]]) -> bool:
    return {"images", "masks"} <= {folder.name.lower() for folder in folders}


def holds_images(path: Path) -> bool:
    """Return whether there is an image in a folder of ``path`` or up to three levels below it; stop at the first."""
    return path.is_dir() and any(_reach(folder, _is_image, _DEEPEST) for folder in list_content(path)[1])


def _reach(folder: PathLike, wanted: Callable[[os.DirEntry[str]], bool], levels: int) -> bool:
    """Return whether ``folder``, or a folder on the ``levels`` below, has a file that is ``wanted``."""
    files, folders = list_content(folder)
    return any(map(wanted, files)) or (levels > 1 and any(_reach(f, wanted, levels - 1) for f in folders))


def holds_one_client(path: Path) -> bool:
    """Return whether the folders in ``path`` belong to one client: parts, or classes that directly contain files."""
    folders = list_content(path)[1]
    if (folders and all(folder.name.lower() in PARTS for folder in folders)) or _holds_masks(folders):
        return True
    held, deeper = zip(*map(list_content, folders), strict=True) if folders else ((), ())
    return not any(deeper) and any(_is_image(file) or _is_recording(file) for file in chain(*held))


def list_categories(clients: Iterable[Path]) -> tuple[str, ...]:
    """Return the sorted names of the class folders of all clients, see :func:`sort_classes`."""
    parts = (folders for client in clients for folders in _find_parts(client).values())
    return sort_classes({folder.name for folder in chain.from_iterable(parts)})


def sort_classes(found: Collection[str]) -> tuple[str, ...]:
    """Sort class names, numerically if all are numbers."""
    if all(name.isascii() and name.isdecimal() for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def list_files(
    root: Path, client: Path, suffixes: Collection[str] = SUFFIXES, attached: Collection[str] = ()
) -> tuple[tuple[ImageFile, ...], list[str], list[str]]:
    """Return a client's images with ``suffixes``, by part, class and name, and notices and faults of ignored files.

    If DICOM files are images, so are folders of them; each folder is one series of slices. ``attached``: suffixes of
    files that belong to images.

    Raises :class:`UsageError` if images are outside of class folders or below them, parts are unclear, or images are
    missing.
    """
    name, slices = client.name, set(DICOM) <= set(suffixes)
    listed, notices, lost = list[ImageFile](), list[str](), list[str]()
    for part, folders in _find_parts(client, check=True).items():
        for folder in folders:
            files, deeper = list_content(folder)
            series = [inner for inner in deeper if slices and holds_slices(Path(inner))]
            if len(series) < len(deeper):
                _refuse_folder(next(inner for inner in deeper if inner not in series), slices)
            images = [f for f in files if f.name.lower().endswith(tuple(suffixes)) or (slices and is_dicom(Path(f)))]
            kept = {file.name for file in images}
            lost += [file.name for file in files if file.name not in kept]
            if not images and not series:
                notices.append(f"client {name!r}: {folder.path} holds no image")
            prefix = Path(folder).relative_to(root).as_posix()
            for file in sorted(images + series, key=lambda file: file.name):
                size, changed = 0, 0
                with suppress(OSError):  # a dangling link, which is later reported as unreadable
                    size, changed = (status := file.stat()).st_size, status.st_mtime_ns
                listed.append(ImageFile(f"{prefix}/{file.name}", part, folder.name, size, changed))
    others = [suffix for suffix in map(_find_suffix, lost) if suffix.lower() not in {*UNREAD_IMAGES, *attached}]
    if others:
        kinds = ", ".join(sorted({suffix or "no suffix" for suffix in others}))
        notices.append(Information(f"client {name!r}: {len(others)} files of other kinds left out ({kinds})"))
    if not listed:
        raise UsageError(f"client {name!r} has no file to read ({', '.join(sorted(suffixes))}) in {client}: {LAYOUT}")
    return tuple(listed), notices, describe_lost(name, lost)


def _find_suffix(name: str | Path) -> str:
    return os.path.splitext(name)[1]  # noqa: PTH122 - a Path takes ten times as long


def _refuse_folder(folder: os.DirEntry[str], slices: bool) -> None:
    """Raise :class:`UsageError` for a folder among images; ``slices``: folders of DICOM slices are images."""
    if any(Path(file.name).suffix.lower() in SUFFIXES for file in list_content(folder)[0]) and (
        slices or Path(folder.path).parent.name.lower() in ("images", "masks")
    ):
        raise UsageError(
            f"{folder.path} is a folder of pictures, which lack the distances between slices and pixels: write the "
            "slices of each case to one NIfTI file, for example with nibabel, and so its mask; or put single "
            "pictures directly into the folder"
        )
    if slices:
        raise UsageError(f"{folder.path} is a folder without DICOM files: move it elsewhere")
    raise UsageError(f"{folder.path} is a folder inside of a class folder: {LAYOUT}")


def _find_parts(client: Path, *, check: bool = False) -> dict[str, list[os.DirEntry[str]]]:
    """Return class folders by part; the part is "" if the client's folder contains the classes directly.

    With ``check``, raises :class:`UsageError` if images are outside of class folders, or parts are unclear.
    """
    files, folders = list_content(client)
    inside = {folder.name: list_content(folder) for folder in folders if folder.name.lower() in PARTS}
    parts = {PARTS[name.lower()]: classes for name, (_, classes) in inside.items()} or {"": folders}
    if not check:
        return parts
    if stray := next(filter(_is_image, chain(files, *(strays for strays, _ in inside.values()))), None):
        raise UsageError(f"{stray.path} is an image outside of any class folder: {LAYOUT}")
    if inside and len(inside) < len(folders):
        odd = next(folder.name for folder in folders if folder.name not in inside)
        raise UsageError(f"{client} holds both {next(iter(inside))} and {odd}, parts and classes: {LAYOUT}")
    if len(parts) < len(inside):
        raise UsageError(
            f"{client} holds {', '.join(inside)}, two of them for the same part: "
            "keep one folder each for train, validation and test"
        )
    if inside and "train" not in parts:
        raise UsageError(f"{client} holds {', '.join(inside)} but no train: {LAYOUT}")
    return parts


def list_content(folder: PathLike) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Return the files and folders in ``folder``, by name, without leftovers of operating systems and archives."""
    with os.scandir(folder) as entries:
        seen = [e for e in entries if not e.name.startswith(".") and e.name.lower() not in _IGNORED]
    seen.sort(key=lambda e: e.name)
    return [e for e in seen if not e.is_dir()], [e for e in seen if e.is_dir()]


def _is_image(file: os.DirEntry[str]) -> bool:
    return _find_suffix(file.name).lower() in SUFFIXES or is_volume(Path(file))


def _is_recording(file: os.DirEntry[str]) -> bool:
    return file.name.lower().endswith(SIGNALS)


def list_strays(path: Path) -> list[str]:
    """Return a notice about files beside the clients' folders that could be clients and are not read, if any."""
    files = [file.name for file in list_content(path)[0] if Path(file.name).suffix.lower() in _ARCHIVES | UNREAD_IMAGES]
    return [f"{path} holds files that are not read: {join_some(files)}; unpack clients into folders"] if files else []


def describe_broken(name: str, broken: Mapping[str, str], count: int) -> str:
    """Return a sentence about the ``broken`` ones of a client's ``count`` files."""
    why = join_some(f"{file}: {why}" for file, why in broken.items())
    return f"client {name!r}: {len(broken)} of {count} files cannot be read, left out ({why})"


def describe_lost(name: str, files: Iterable[str | Path]) -> list[str]:
    """Return a sentence about those of a client's ``files`` that are images in a format that is not read, if any."""
    lost = Counter(suffix for suffix in map(_find_suffix, files) if suffix.lower() in UNREAD_IMAGES)
    images, kinds = f"{lost.total()} image{'s' * (lost.total() > 1)}", ", ".join(sorted(lost))
    return [f"client {name!r}: {images} in a format that is not read, left out ({kinds})"] if lost else []
