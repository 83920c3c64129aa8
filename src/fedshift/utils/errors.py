"""Errors for users: each message names the value, the allowed values, and the fix.

Messages refer to settings by :class:`Ref`, because the same setting is an argument in Python and a flag on the command
line. ``str(error)`` speaks Python; the command line prints ``error.render(as_flag)`` and exits with
``exit_code``; ``--debug`` shows the traceback. A test asserts ``error.settings``, which no better sentence changes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from typing_extensions import override

Spelling: TypeAlias = Callable[..., str]
"""Function that writes a setting, given its name, and possibly its value: :func:`as_argument` or :func:`as_flag`."""


def as_argument(name: str, *value: object) -> str:
    """Write a setting as in Python: ``validation=0.1``, ``weights``."""
    return "=".join([name, *(repr(str(each)) if isinstance(each, Path) else repr(each) for each in value)])


def as_flag(name: str, *value: object) -> str:
    """Write a setting as on the command line: ``--validation 0.1``, ``--weights``; True is only the flag."""
    flag = f"--{name.replace('_', '-')}"
    return " ".join([flag, *(shlex.quote(str(each)) for each in value if each is not True)])


class Ref:
    """Settings in a message: ``Ref("weights")``, or with a value, ``Ref(validation=0.1)``."""

    def __init__(self, *names: str, **values: object) -> None:
        self.spelled: Final[list[tuple[Any, ...]]] = [*((name,) for name in names), *values.items()]

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings."""
        return tuple(name for name, *_ in self.spelled)

    def render(self, spelling: Spelling) -> str:
        """Return the settings as ``spelling`` writes them."""
        return ", ".join(spelling(*each) for each in self.spelled)

    @override
    def __str__(self) -> str:
        return self.render(as_argument)


class Sentence:
    """A text whose last ``{}`` are replaced by ``parts``: references, other sentences, errors, or texts."""

    def __init__(self, text: str, *parts: Part) -> None:
        self.text, self.parts = text, parts

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings in the text, each once."""
        return tuple(dict.fromkeys(name for part in self.parts if not isinstance(part, str) for name in part.settings))

    def render(self, spelling: Spelling) -> str:
        """Return the text with its settings as ``spelling`` writes them."""
        pieces = self.text.rsplit("{}", len(self.parts)) if self.parts else [self.text]
        assert len(pieces) == len(self.parts) + 1, f"{self.text!r} has no {{}} for each of {self.parts}"
        rendered = (*(part if isinstance(part, str) else part.render(spelling) for part in self.parts), "")
        return "".join(piece + part for piece, part in zip(pieces, rendered, strict=True))

    @override
    def __str__(self) -> str:
        return self.render(as_argument)


class FedshiftError(Exception):
    """Failure during a run (disk, checkpoint, divergence); the message is a :class:`Sentence`."""

    exit_code = 1

    def __init__(self, text: str = "", *parts: Part) -> None:
        super().__init__(text, *parts)
        self._concerned: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings that the error is about: those whose value it refuses, and those that it refers to."""
        return tuple(dict.fromkeys((*self._concerned, *self._sentence.settings)))

    def about(self, *names: str) -> Self:
        """Return the error, whose message is about the settings ``names`` although it does not refer to them."""
        self._concerned = (*self._concerned, *names)
        return self

    @property
    def _sentence(self) -> Sentence:
        text, *parts = self.args or ("",)
        return Sentence(str(text), *parts)

    def render(self, spelling: Spelling) -> str:
        """Return the message with its settings as ``spelling`` writes them."""
        return self._sentence.render(spelling)

    @override
    def __str__(self) -> str:
        return self.render(as_argument)


Part: TypeAlias = Ref | Sentence | FedshiftError | str
"""Replacement of a ``{}`` in a message."""


class UsageError(FedshiftError, ValueError):
    """Request that cannot be carried out; nothing was started."""

    exit_code = 2


def unknown_name(kind: str, value: str, allowed: Iterable[str]) -> UsageError:
    """Return the error for a name that is not among ``allowed``, with the nearest valid one."""
    allowed = sorted(allowed)
    near = get_close_matches(value, allowed, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {kind} {value!r}: {hint}allowed are {', '.join(allowed)}")
