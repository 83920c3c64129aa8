"""Directories of images: ``DIR/<client>/<class>/<image>`` or ``DIR/<client>/{train,validation,test}/<class>/<image>``.

This is how federations of domains are published (Office-Caltech10, Office-Home, PACS, DomainNet): a folder for each
domain, in it a folder for each class.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from ...utils.errors import UsageError
from .image_decoding import SUFFIXES
from .image_store import ImageFile

PARTS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
"""Names of folders that are parts of a client's data, and how the part is called here."""

LAYOUT = "images belong in DIR/<client>/<class>/, or in DIR/<client>/train/<class>/ and DIR/<client>/test/<class>/"

_NOT_MEANT = frozenset({"thumbs.db", "desktop.ini", "__macosx"})
_DEEPEST = 4  # levels below DIR at which an image is looked for: client, part, class, and one too deep


def holds_images(path: Path) -> bool:
    """Whether an image is in a folder of ``path`` or up to three levels below it; stops at the first."""

    def below(folder: Path, levels: int) -> bool:
        files, folders = _list_content(folder)
        return any(map(_is_image, files)) or (levels > 1 and any(below(Path(f), levels - 1) for f in folders))

    return path.is_dir() and any(below(Path(folder), _DEEPEST) for folder in _list_content(path)[1])


def find_clients(path: Path) -> dict[str, Path]:
    """The clients' folders by name. Raises :class:`UsageError` where ``path`` is arranged in another way."""
    if not path.is_dir():
        raise UsageError(f"{path} is no directory: give one in which {LAYOUT}")
    files, folders = _list_content(path)
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
    """Names of the class folders of all clients, by name, or by number where all are numbers."""
    return sort_classes(
        {folder.name for client in clients for folders in _find_parts(client).values() for folder in folders}
    )


def sort_classes(found: Collection[str]) -> tuple[str, ...]:
    """Names of classes by name, or by number where all are numbers."""
    if all(name.isascii() and name.isdecimal() for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def list_files(root: Path, client: Path) -> tuple[tuple[ImageFile, ...], tuple[str, ...]]:
    """A client's images in order of part, class and name, and notices of what a person may not expect.

    Raises :class:`UsageError` where images are outside of class folders or below them, parts are unclear, or there is
    no image.
    """
    name, parts, found, notices = client.name, _find_parts(client), [], []
    others: Counter[str] = Counter()
    _refuse_unclear(client, parts)
    for part, folders in parts.items():
        for folder in folders:
            files, deeper = _list_content(Path(folder))
            if deeper:
                raise UsageError(f"{deeper[0].path} is a folder inside of a class folder: {LAYOUT}")
            images = [file for file in files if _is_image(file)]
            others.update(Path(file.name).suffix for file in files if not _is_image(file))
            if not images:
                notices.append(f"client {name!r}: {folder.path} holds no image")
            for file in images:
                found.append(ImageFile(Path(file).relative_to(root).as_posix(), part, folder.name, *_file_stamp(file)))
    if others:
        kinds = ", ".join(sorted(suffix or "no suffix" for suffix in others))
        notices.append(f"client {name!r}: {others.total()} files that are no images left out ({kinds})")
    if not found:
        raise UsageError(f"client {name!r} has no image ({', '.join(sorted(SUFFIXES))}) in {client}: {LAYOUT}")
    return tuple(found), tuple(notices)


def _refuse_unclear(client: Path, parts: dict[str, list[os.DirEntry[str]]]) -> None:
    files, folders = _list_content(client)
    named = [folder for folder in folders if folder.name.lower() in PARTS]
    for folder in named:
        files += _list_content(Path(folder))[0]
    stray = next(filter(_is_image, files), None)
    if stray is not None:
        raise UsageError(f"{stray.path} is an image outside of any class folder: {LAYOUT}")
    if not named:
        return
    if len(named) < len(folders):
        odd = next(folder for folder in folders if folder not in named)
        raise UsageError(f"{client} holds both {named[0].name} and {odd.name}, parts and classes: {LAYOUT}")
    if len(parts) < len(named):
        raise UsageError(
            f"{client} holds {', '.join(folder.name for folder in named)}, of which two are the same part: "
            "keep one folder each for train, validation and test"
        )
    if "train" not in parts:
        raise UsageError(f"{client} holds {', '.join(folder.name for folder in named)} but no train: {LAYOUT}")


def _find_parts(client: Path) -> dict[str, list[os.DirEntry[str]]]:
    """Class folders by part, as found; the part is "" where the client's folder holds classes."""
    folders = _list_content(client)[1]
    named = [folder for folder in folders if folder.name.lower() in PARTS]
    if not named:
        return {"": folders}
    return {PARTS[folder.name.lower()]: _list_content(Path(folder))[1] for folder in named}


def _list_content(folder: Path) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Files and folders in ``folder``, by name, without those that a system or an archive left there."""
    with os.scandir(folder) as entries:
        seen = [e for e in entries if not e.name.startswith(".") and e.name.lower() not in _NOT_MEANT]
    seen.sort(key=lambda e: e.name)
    return [e for e in seen if not e.is_dir()], [e for e in seen if e.is_dir()]


def _file_stamp(file: os.DirEntry[str]) -> tuple[int, int]:
    """Size in bytes and time of change in nanoseconds, zeros for a link to nothing, which cannot be read later."""
    try:
        stat = file.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def _is_image(file: os.DirEntry[str]) -> bool:
    return Path(file.name).suffix.lower() in SUFFIXES
