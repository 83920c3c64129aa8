"""Catalogs: lists of what a setting may name (methods, models, losses, tasks, ...), each next to what it lists.

A value is given as a text, an expression (:mod:`fedshift.config.expressions`) of names in the list or of users'
functions, ``package.module:name``, or in Python as an object. ``parse`` reads either; ``write`` returns the text that a
settings file stores, and only if ``parse`` makes an equal value of it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ..utils.errors import UsageError, unknown_name
from ..utils.user_code import find_import_path
from .expressions import (
    BY_MODULE,
    expressions,
    find_user_function,
    list_catalog,
    read_catalog,
    require_trusted,
    spell,
    split_expressions,
)

Value = TypeVar("Value")
Made = TypeVar("Made", covariant=True)
Function = Callable[..., Any]
DASHED = re.compile(r"""(['"]).*?\1|(?<![\w.])[A-Za-z_]\w*(?:-\w+)+""")
"""A quoted text, or a name with dashes."""


def list_several(given: object) -> Sequence[object]:
    """Return the parts of a list or a tuple; anything else is one part."""
    return given if isinstance(given, list | tuple) else [given]


def bind_arguments(entry: Function, user_defined: bool) -> Function:
    """Return a factory for ``entry`` that binds the arguments of an expression to a user-defined function."""
    if not user_defined or isinstance(entry, type):
        return entry
    return lambda **arguments: partial(entry, **arguments) if arguments else entry


class Accept(Protocol[Made]):
    """A function that makes a value of a list from what an expression made, or from an object that a program gave."""

    def __call__(self, given: Any, text: str | None, /) -> Made:
        """Return the value; raise :class:`UsageError` if it is none. ``text``: the expression; None: an object."""
        ...


class Catalog(Generic[Value]):
    """A list of values by name.

    Args:
        kind: What is listed, for errors: ``loss``.
        entries: Functions or classes that make values, by name; or the package of fedshift with a function for each.
        accept: See :class:`Accept`.
        adapt: Function of an entry or a user's function that returns what to call with the arguments of an expression.
        spell: Function of a value that returns a text for it, None if there is none. Without one, or where it returns
            "", the text is the name of the value's class in ``entries``, or its import path, with the fields that
            differ from the defaults.
        key: Function of a value; values with equal keys are equal.
        join: Function of the values of an expression with commas, which makes one value; None: give one expression.
        setting: Setting whose value it reads; by default of the name ``kind``.
        settings: Supplied arguments that are settings by themselves, so that an expression cannot give them.
        libraries: Functions that return what is called ``name`` in an installed library, ``library:name``, by library.

    """

    def __init__(
        self,
        kind: str,
        entries: str | Mapping[str, Function],
        accept: Accept[Value],
        *,
        adapt: Callable[[Function, bool], Function] = lambda function, _own: function,
        spell: Callable[[Value], str | None] | None = None,
        key: Callable[[Value], object] = lambda value: value,
        join: Callable[..., Value] | None = None,
        setting: str | None = None,
        settings: Collection[str] = (),
        libraries: Mapping[str, Callable[[str], Function]] | None = None,
    ) -> None:
        self.setting = setting or kind
        self.kind, self._entries, self._accept, self._adapt = kind, entries, accept, adapt
        self._spell, self._key, self._join, self._settings = spell, key, join, settings
        self._libraries = libraries or {}

    @property
    def entries(self) -> Mapping[str, Function]:
        """Functions that make values, by name."""
        return list_catalog(self._entries) if isinstance(self._entries, str) else self._entries

    def names(self) -> tuple[str, ...]:
        """Return the names; modules of a package are listed without importing them."""
        return tuple(read_catalog(self._entries) if isinstance(self._entries, str) else self._entries)

    def find(self, name: str) -> Function:
        """Return the function called ``name``; raise :class:`UsageError` with the nearest name if there is none."""
        library, _, rest = name.replace(":", ".").partition(".")
        if library in self._libraries and rest and "." not in rest:
            require_trusted(self.kind, f"{library}:{rest}")
            return self._libraries[library](rest)
        if {".", ":"} & set(name):
            return find_user_function(self.kind, name)
        written = spell(self._entries, name) if isinstance(self._entries, str) else name
        if written not in self.entries:
            raise unknown_name(self.kind, written, self.entries)
        return self.entries[written]

    def parse_all(self, given: object, **supplied: object) -> tuple[Value, ...]:
        """Return the values of ``given``: expressions with commas between, an object, or a list of either.

        ``supplied`` as for :meth:`parse`.
        """
        found: list[Value] = []
        for one in list_several(given):
            if not isinstance(one, str):
                found.append(self.parse(one, **supplied))
                continue
            try:
                several = split_expressions(self.kind, one.rstrip().removesuffix(","))
                found += [self._accept(made, each) for each in several for made in self._call(each, supplied)]
            except UsageError as error:
                error.about(self.setting)
                raise
        return tuple(found)

    def parse(self, given: object, **supplied: object) -> Value:
        """Return the value that ``given``, a text or an object, is or makes.

        Args:
            given: Expression, or object.
            supplied: Arguments with which entries that take them are called, unless the expression gives others.

        Raises:
            UsageError: It is none.

        """
        try:
            if not isinstance(given, str) or not given.strip():
                return self._accept(given, None)
            made = self._call(given, supplied)
            if len(made) > 1 and self._join is None:
                raise UsageError(f"{self.kind} {given!r}: give one, not {len(made)}")
            return self._accept(made[0] if len(made) == 1 or self._join is None else self._join(*made), given)
        except UsageError as error:
            error.about(self.setting)
            raise

    def write(self, value: Value, **supplied: object) -> str | None:
        """Return a text that :meth:`parse` reads as an equal value, with equal ``supplied``; None if there is none."""
        text = self._spell(value) if self._spell else ""
        return self._confirm(self._describe(value, supplied) if text == "" else text, value, supplied)

    def _confirm(self, text: str | None, value: Value, supplied: Mapping[str, object]) -> str | None:
        """Return ``text`` if it makes a value equal to ``value``."""
        if text is None:
            return None
        try:
            return text if self._key(self.parse(text, **supplied)) == self._key(value) else None
        except UsageError:  # for example, the function has moved
            return None

    def write_all(self, given: object) -> str | None:
        """Return a text that :meth:`parse_all` reads as values equal to ``given``'s; None if there is none."""
        texts = [one if isinstance(one, str) else self._write_given(one) for one in list_several(given)]
        return None if None in texts else ",".join(map(str, texts))

    def _write_given(self, given: object) -> str | None:
        """Return a text for what :meth:`parse` takes: its value's, or its own import path."""
        made = self.parse(given)
        return self.write(made) or self._confirm(find_import_path(given), made, {})

    def _call(self, text: str, supplied: Mapping[str, object]) -> list[Any]:
        source = DASHED.sub(lambda found: found[0] if found[1] else found[0].replace("-", "_"), text)
        dashed = isinstance(self._entries, str) and self._entries not in BY_MODULE
        return expressions(self.kind, source if dashed else text, partial(self._look_up, supplied))

    def _look_up(self, supplied: Mapping[str, object], name: str) -> Function:
        function = self._adapt(self.find(name), "." in name)
        if not supplied:
            return function
        takes = inspect.signature(function)
        given = {key: value for key, value in supplied.items() if key in takes.parameters}
        made: Any = partial(function, **given)
        shown = inspect.signature(made).parameters.values()
        made.__signature__ = takes.replace(parameters=[each for each in shown if each.name not in self._settings])
        return made  # type: ignore[no-any-return]

    def _describe(self, value: Value, supplied: Mapping[str, object]) -> str | None:
        kind = type(value)
        names = (name for name, entry in self.entries.items() if entry is kind)
        name = next(names, None) or find_import_path(kind)
        if name is None:
            return None
        fields = inspect.signature(kind).parameters.values()
        changed = [
            f"{each.name}={getattr(value, each.name)!r}"
            for each in fields
            if getattr(value, each.name) != supplied.get(each.name, each.default) and each.name not in self._settings
        ]
        return f"{name}({', '.join(changed)})" if changed else name
