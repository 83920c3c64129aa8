"""Users' functions: their source locations, import names, and the location of errors in them."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
from functools import partial
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
INSTALLED: tuple[str, ...] = tuple(
    {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Folders of Python and of installed packages, which are not the user's code."""


def locate_error(error: BaseException) -> str:
    """Return the location of ``error`` in a user's code, ``nets.py, line 12, in make``; empty if not in user code.

    It is the innermost frame outside of this package, Python and installed packages.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_user(frame.filename)]
    return f"{_shorten(frames[-1].filename)}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def describe_error(error: BaseException) -> str:
    """Return the message of ``error``, with its type unless it is a plain one, and its location in a user's code."""
    said = " ".join(str(error).split()) or type(error).__name__
    plain = isinstance(error, TypeError | ValueError | RuntimeError) or said == type(error).__name__
    where = locate_error(error)
    return (said if plain else f"{type(error).__name__}: {said}") + (f"; in {where}" if where else "")


def describe_function(function: Any) -> str:
    """Return name and place of a function, class or callable: ``network (nets.py, line 12)``."""
    if isinstance(function, partial):
        given = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"partial({', '.join([describe_function(function.func), *given])})"
    named = function if hasattr(function, "__qualname__") else type(function)
    try:
        code = inspect.unwrap(named)
        line = code.__code__.co_firstlineno if hasattr(code, "__code__") else inspect.getsourcelines(code)[1]
        place = f"{_shorten(inspect.getfile(code))}, line {line}"
    except (TypeError, OSError):  # written in C, or typed at a prompt
        place = str(named.__module__)
    return f"{named.__qualname__} ({place})"


def identify_function(function: Any) -> str:
    """Return a name of a function, class or callable that is the same in every process: ``__main__:network``."""
    if isinstance(function, partial):
        given = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"{identify_function(function.func)}({', '.join(given)})"
    if hasattr(function, "__qualname__"):
        return f"{function.__module__}:{function.__qualname__}"
    return f"{type(function).__module__}:{type(function).__qualname__}"


def find_import_path(thing: Any) -> str | None:
    """Return the ``package.module:name`` with which another process can import ``thing``, or None."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is thing else None


def _is_of_user(file: str) -> bool:
    if file == "<string>" or file.startswith("<frozen"):  # made by dataclasses, for example
        return False
    return not any(Path(file).is_relative_to(folder) for folder in (str(PACKAGE), *INSTALLED))


def _shorten(file: str) -> str:
    """Return the path, relative to the current directory if inside it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
