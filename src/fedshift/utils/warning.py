"""Notices as warnings, for those who call from Python."""

from __future__ import annotations

from collections.abc import Iterable
from warnings import warn

from .words import is_information


def warn_of(notices: Iterable[str]) -> None:
    """Warn whoever called the caller of each of ``notices`` that is not information."""
    for notice in notices:
        if not is_information(notice):
            warn(notice, stacklevel=3)
