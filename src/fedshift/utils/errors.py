"""Errors for users: each message names the value, the allowed values, and the fix.

The command line prints only the message and exits with ``exit_code``; ``--debug`` shows the traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FedshiftError(Exception):
    """Failure during a run (disk, checkpoint, divergence)."""

    exit_code = 1


class UsageError(FedshiftError, ValueError):
    """Request that cannot be carried out; nothing was started."""

    exit_code = 2


def unknown_name(kind: str, value: str, allowed: Iterable[str]) -> UsageError:
    """Return the error for a name that is not among ``allowed``, with the nearest valid one."""
    allowed = sorted(allowed)
    near = get_close_matches(value, allowed, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {kind} {value!r}: {hint}allowed are {', '.join(allowed)}")
