"""Errors that a person reads: each names the value, what was allowed, and the fix.

The command line prints the message alone and exits with ``exit_code``; ``--debug`` shows the traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FedshiftError(Exception):
    """Something failed while it ran (disk, checkpoint, divergence)."""

    exit_code = 1


class UsageError(FedshiftError, ValueError):
    """What was asked for cannot be done; nothing was started."""

    exit_code = 2


def unknown_name(kind: str, value: str, allowed: Iterable[str]) -> UsageError:
    """The error for a name that is not among ``allowed``, with the nearest valid one."""
    allowed = sorted(allowed)
    near = get_close_matches(value, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {kind} {value!r}: {hint}allowed are {', '.join(allowed)}")
