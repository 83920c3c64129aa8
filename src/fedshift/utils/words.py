"""Kinds of notices, and lists of names and times in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Information(str):
    """A notice that does not change what one may conclude from results, such as which files were paired.

    All other notices are plain text. A page has them first, and information last.
    """

    __slots__ = ()


def is_information(notice: str) -> bool:
    """Return whether ``notice`` is :class:`Information`."""
    return isinstance(notice, Information)


def join_some(items: Iterable[str], separator: str = ", ", shown: int = 5, rest: str = "more") -> str:
    """Join the first items, as in ``a, b, c and 2 more``; ``rest`` names the others."""
    items = list(items)
    return separator.join(items[:shown]) + (f" and {len(items) - shown:,} {rest}" if len(items) > shown else "")


def join_choices(names: Sequence[str]) -> str:
    """Return ``names`` as choices, ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def format_time(seconds: float) -> str:
    """Return a rough time as ``40 s``, ``12 min`` or ``1.4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
