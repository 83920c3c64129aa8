"""Cards: facts about a benchmark (``cards.toml``, shown by ``fedshift data list``), and how to find its files."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...utils.errors import Ref, UsageError, unknown_name
from ...utils.words import join_some

_FACTS = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file at its publisher: ``name`` relative to the benchmark's folder, and ``checksum``.

    A published checksum is ``md5:`` or ``sha256:`` with hexadecimal digits; empty: none is published.
    """

    url: str
    name: str
    checksum: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Facts about a benchmark, and where its files come from.

    Attributes:
        classes: Number of classes; 0 for regression.
        samples: Sizes in words, including those used in the papers.
        license: License as stated by the publisher.
        layout: Expected files, in words.
        find: Function that returns the files in a folder, or None if any is missing.
        lacks: Function that returns the benchmark's arguments that the available files do not support.
        remotes: Files that can be downloaded without an account; in ``cards.toml``, checksums by address.
        generated: Whether fedshift generates or includes the data, so that no file is needed.

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
    generated: bool = False

    def move_remotes(self, folder: str) -> list[Remote]:
        """Return the remotes in ``folder`` of another benchmark."""
        return [replace(remote, name=f"{folder}/{remote.name}") for remote in self.remotes]

    def present(self, name: str, root: Path | None, arguments: frozenset[str] = frozenset()) -> bool:
        """Return whether files of benchmark ``name`` that support ``arguments`` are under ``root``."""
        found = (self.find(folder) for folder in _list_folders(name, root)) if root else ()
        return self.generated or any(each is not None and not self.lacks(each) & arguments for each in found)

    def locate(self, name: str, root: Path, arguments: frozenset[str] = frozenset()) -> Any:
        """Return the result of :attr:`find` for ``root/<name>`` or ``root``; prefer one that supports ``arguments``.

        Raises :class:`UsageError` with the expected files and their location if there is none.
        """
        places = [found for folder in _list_folders(name, root) if (found := self.find(folder)) is not None]
        if places:
            return min(places, key=lambda found: len(self.lacks(found) & arguments))
        how = f"`fedshift data fetch {name}` fetches it" if self.remotes else f"get it from {self.homepage}"
        raise UsageError(
            f"benchmark {name!r} is not in {root / name} nor in {root}: {how}, or put there {self.layout} "
            "({}, or FEDSHIFT_DATA, names another directory)",
            Ref("root"),
        )


def make_card(name: str, *, remotes: Iterable[Remote] = (), **functions: Any) -> Card:
    """Return the card of benchmark ``name``: its facts in ``cards.toml``, ``functions`` and further ``remotes``."""
    facts = dict(_FACTS[name])
    published = facts.pop("remotes", {}).items()
    files = (Remote(url=url, name=url.rpartition("/")[2], checksum=checksum) for url, checksum in published)
    return Card(clients=tuple(facts.pop("clients")), remotes=(*files, *remotes), **facts, **functions)


def get_card(loader: Callable[..., Any]) -> Card:
    """Return the card of a benchmark's loader: its module's constant with the same name in capitals, or ``CARD``."""
    constants = vars(sys.modules[loader.__module__])
    card: Card = constants.get(loader.__name__.upper()) or constants["CARD"]
    return card


def require_choices(setting: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise :class:`UsageError` unless ``given``, the value of ``setting``, are one or more of ``known``, each once."""
    for name in given:
        if name not in known:
            raise unknown_name(f"value of {setting}", name, known)
    if not given or len(set(given)) < len(given):
        raise UsageError(f"{setting}={list(given)}: give one or more of {join_some(known, shown=20)}, each once")


def _list_folders(name: str, root: Path) -> Iterator[Path]:
    for folder in (root / name, root / name.replace("-", "_"), root):
        if folder.is_dir():
            yield folder
