"""Names as their writers meant them: one comparison for classes, categories, groups and clients.

Programs and people write one name in several ways. Two spellings *look the same* if they differ only in the codes of
characters (Unicode's canonical equivalence, NFC; Unicode Standard Annex 15), in invisible characters, or in the width
of white space. They are *alike* if they differ only in case, compatible characters (NFKC), white space, hyphens and
underscores between letters, or the zeros of a number at the end: ``no_finding`` and ``No finding``, ``7`` and ``007``.

Spellings that look the same are one name everywhere. Alike spellings are one group, so that no patient is in training
and test data. They are one class and one category unless a client has two of them (``a`` and ``A`` in pictures of
letters). They are two clients. A notice names all of them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..utils.errors import UsageError
from ..utils.words import join_some

NUMBERED = re.compile(r"([^0-9]*)0*([0-9]+)(?:\.0+)?")
"""A name that is a number, or ends with its only one."""
GAP = re.compile(r"(?<=[^\W\d_])[-_ ]+(?=[^\W\d_])|(?<![0-9]) | (?![0-9])")
"""Separators of words, which distinguish no names; 1 12 and 11 2 are two names, and so are A- and A."""
DIFFER = "differ only in case, spaces, hyphens, zeros or codes of characters"


def clean_name(name: str) -> str:
    """Return the spelling of ``name`` that all spellings which look the same share."""
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)
        name = "".join(character for character in name if unicodedata.category(character) != "Cf")
    return " ".join(name.split())


def find_identity(name: str) -> str:
    """Return a key of ``name``, which alike names share."""
    if name.isascii() and name.isdigit():
        return name.lstrip("0") or "0"
    text = clean_name(name)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        text = "".join(str(unicodedata.decimal(each)) if each.isdecimal() else each for each in text)
    text = GAP.sub("", text.casefold())
    numbered = NUMBERED.fullmatch(text)
    return numbered[1] + numbered[2] if numbered else text


def group_alike(names: Iterable[str], key: Callable[[str], str] = find_identity) -> list[list[str]]:
    """Return the ``names`` of one ``key`` together; names that are like no other are left out."""
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(key(name), []).append(name)
    return [several for several in alike.values() if len(several) > 1]


def show_alike(several: Sequence[str]) -> str:
    """Format alike names as ``'cat' and 'Cat'``, with the codes of characters that look the same."""
    show = repr if len({clean_name(name) for name in several}) == len(several) == len({*several}) else ascii
    return " and ".join(map(show, several))


def describe_alike(what: str, names: Iterable[str]) -> str:
    """Return a sentence that lists alike ``names``; ``what``: their kind, such as ``classes``."""
    return f"{what} have names that {DIFFER}: {join_some(map(show_alike, group_alike(names)))}"


def merge_names(
    held: Mapping[str, Iterable[str]], what: str, *, together: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Return the spelling to use for each name, the shortest, and notices.

    Args:
        held: Names that each client has, by its name.
        what: The names in notices, such as ``classes``.
        together: Whether alike names of one client are one, too.

    """
    order = sorted({name for names in held.values() for name in names}, key=lambda name: (len(name), name))
    merged = group_alike(order)
    looks = [{clean_name(name): name for name in names}.values() for names in held.values()] if merged else []
    distinguished = not together and any(map(group_alike, looks))
    merged = group_alike(order, clean_name) if distinguished else merged
    stands = dict(zip(order, order, strict=True)) | {name: names[0] for names in merged for name in names}
    one = [f"{show_alike(names)} (as {names[0]!r})" for names in merged]
    notices = [f"{what} whose names {DIFFER} are one: {join_some(one)}"] if one else []
    if distinguished:
        notices.append(f"{describe_alike(what, order)}; spell them alike if they are one")
    return stands, notices


def match_name(name: str, known: Sequence[str]) -> str | None:
    """Return ``name`` if it is known, or the only known spelling of it; None without one."""
    if name in known:
        return name
    alike = [other for other in known if find_identity(other) == find_identity(name)]
    return alike[0] if len(alike) == 1 else None


def refuse_hidden(names: Iterable[str]) -> None:
    """Raise :class:`UsageError` for a name of a client or class with characters that cannot be printed."""
    for name in names:
        if not name.isprintable():
            raise UsageError(f"the name {name!r} of a client or class holds signs that cannot be shown: rename it")


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort names with their numbers by value: ``site2`` before ``site10``."""

    def cut(name: str) -> tuple[list[str | int], str]:
        pieces = re.split(r"([0-9]+)", name)
        return [int(piece) if place % 2 else piece for place, piece in enumerate(pieces)], name

    return sorted(names, key=cut)
