"""Cards: what ``fedshift data list`` says of a benchmark, and how its files are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...utils.errors import UsageError

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file at its publisher: ``name`` relative to the benchmark's folder; checksums as published, None if none is."""

    url: str
    name: str
    md5: str | None = None
    sha256: str | None = None
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a benchmark is: facts for a person, and where its files come from.

    ``samples``: sizes in words, with what the papers use. ``license``: as the publisher states it. ``layout``: the
    files that are looked for, in words. ``find(folder)`` gives what of them is in a folder, None where they are not
    all there; ``lacks(found)`` the benchmark's arguments that these cannot serve. ``remotes`` can be fetched with no
    account; ``hub``: the data set at huggingface.co, empty if none. ``generated``: made by fedshift, so that no file is
    needed.
    """

    title: str
    clients: tuple[str, ...]
    classes: int
    samples: str
    license: str
    homepage: str
    source: str
    layout: str = ""
    find: Callable[[Path], Any | None] = field(default=lambda _: None)
    lacks: Callable[[Any], frozenset[str]] = field(default=lambda _: frozenset())
    remotes: tuple[Remote, ...] = ()
    hub: str = ""
    generated: bool = False

    def present(self, name: str, root: Path | None, arguments: frozenset[str] = frozenset()) -> bool:
        """Whether files of benchmark ``name`` that serve ``arguments`` are under ``root``."""
        found = (self.find(folder) for folder in _folders(name, root)) if root else ()
        return self.generated or any(each is not None and not self.lacks(each) & arguments for each in found)

    def locate(self, name: str, root: Path, arguments: frozenset[str] = frozenset()) -> Any:
        """What :attr:`find` gives in ``root/<name>`` or ``root``, if it can what serves ``arguments``.

        Raises :class:`UsageError` saying what to put where.
        """
        places = [found for folder in _folders(name, root) if (found := self.find(folder)) is not None]
        if places:
            return min(places, key=lambda found: len(self.lacks(found) & arguments))
        how = f"`fedshift data fetch {name}` fetches it" if self.remotes or self.hub else f"get it from {self.homepage}"
        raise UsageError(
            f"benchmark {name!r} is not in {root / name} nor in {root}: {how}, or put there {self.layout} "
            "(--root, or FEDSHIFT_DATA, names another directory)"
        )


def _folders(name: str, root: Path) -> Iterator[Path]:
    for folder in (root / name, root / name.replace("-", "_"), root):
        if folder.is_dir():
            yield folder
