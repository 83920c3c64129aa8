"""Settings as given, in TOML files or as Python values: read, and checked by their declarations in ``spec``."""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..utils.errors import FedshiftError, Ref, UsageError, unknown_name
from ..utils.files import read_text
from .seeds import write_seeds
from .settings_file import FILE, WRITTEN
from .spec import OF_ONE, PYTHON


def find_settings(config: Path | None, resume: Path | None) -> Path:
    """Return the TOML file ``config``, or the one of the run in ``resume``; raise :class:`UsageError` without one."""
    path = config or (resume or Path()) / FILE
    if not path.is_file():
        kind = "settings file" if config else "run to resume"
        raise UsageError(f"no {kind} at {path}: give the path of one that exists")
    return path


def read_settings(path: Path, allowed: Sequence[str]) -> dict[str, Any]:
    """Return the settings in a TOML file by their Python names, with lists in the form of the flags."""
    text = read_text(path)
    try:
        values = tomllib.loads(text)
    except ValueError as error:
        paths = "; in quotes, write / for each \\, or use single quotes" if "\\" in text else ""
        raise UsageError(
            f'{path} is not valid TOML: {error}. Write lines such as lr = 0.01 or model = "name"{paths}'
        ) from error
    values.pop(WRITTEN, None)
    return select_settings(values, path, allowed)


def select_settings(
    values: Mapping[str, Any], path: Path, allowed: Sequence[str], given: Collection[str] = ()
) -> dict[str, Any]:
    """Return ``values`` of the TOML file ``path`` as :func:`read_settings` does.

    Also raises :class:`UsageError` if a run from Python had a value that a file cannot store and that is not in
    ``given``.
    """
    settings, values = dict[str, Any](), dict(values)
    for name, said in dict(values.pop(PYTHON, {})).items():
        if name not in given:
            raise UsageError(
                f"{path}: {name} was given from Python, {said}, which no file can hold: go on there with the same "
                f"{name} (fedshift.compare(..., resume=...) or fedshift.read_run(..., {name}=...))"
            )
    for name, command in OF_ONE.items():
        if name not in allowed and {name, name.replace("_", "-")} & values.keys():
            raise UsageError(f"{path} has {name!r}: use it with `fedshift {command}`")
    for key, value in values.items():
        name = key.replace("-", "_")
        if isinstance(value, dict):
            raise UsageError(f"{path}: {key!r} is a table; write settings at the top, key = value, without [tables]")
        if name not in allowed:
            raise UsageError(f"{path}: {{}}", unknown_name("setting", name, allowed))
        if name in settings:
            raise UsageError(f"{path} has {name!r} twice, with a dash and with an underscore: write it once")
        if isinstance(value, list):
            value = write_seeds(value) if name == "seeds" and len(value) == 1 else ",".join(map(str, value))
        settings[name] = value
    return settings


def check_settings(settings: object, kind: type) -> None:
    """Raise :class:`UsageError` listing each value of ``settings`` that does not match its field in ``kind``."""
    problems = list[FedshiftError]()
    for name, (hint, adapter) in _adapters(kind).items():
        value = getattr(settings, name)
        try:
            adapter.validate_python(value, strict=True)  # "3", 3.0 and True are not integers
        except ValidationError as error:
            problem = error.errors()[0]
            if problem["type"] == "literal_error" and isinstance(value, str):
                problems.append(unknown_name(f"value of {name}", value, _list_choices(hint)).about(name))
            else:
                problems.append(UsageError(f"{{}}: {explain(problem)}", Ref(**{name: value})))
    if problems:
        raise UsageError("; ".join(["{}"] * len(problems)), *problems)


S = TypeVar("S")


def make_settings(given: Mapping[str, Any], kind: type[S], role: str = "setting") -> S:
    """Return a ``kind`` with the values ``given`` by name; ``role``: word for a setting in messages.

    Raises :class:`UsageError` for an unknown name, or listing each invalid value with the allowed values.
    """
    defaults = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in defaults:
            raise unknown_name(role, name, list(defaults))
    check_settings(SimpleNamespace(**{**defaults, **given}), kind)
    try:
        return kind(**given)
    except ValidationError as error:
        raise find_refusal(error) or error from None


def _list_choices(hint: Any) -> list[str]:
    """Return the texts that a type allows."""
    return [each for part in get_args(hint) for each in ([part] if isinstance(part, str) else _list_choices(part))]


def explain(problem: Mapping[str, Any]) -> str:
    """Return what a value "should be" according to one error of a pydantic ``ValidationError``."""
    return str(problem["msg"]).removeprefix("Input ")


def find_refusal(error: ValidationError) -> UsageError | None:
    """Return the refusal of settings that do not fit each other, if that is what a ``ValidationError`` says."""
    causes = (problem.get("ctx", {}).get("error") for problem in error.errors())
    return next((cause for cause in causes if isinstance(cause, UsageError)), None)


@cache
def _adapters(kind: type) -> dict[str, tuple[Any, TypeAdapter[Any]]]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: (hint, TypeAdapter(hint)) for name, hint in hints.items()}


def read_help(kind: type) -> dict[str, str]:
    """Return the help of each field of dataclass ``kind`` in one line: the string below it in the source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (definition,) = ast.parse(dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
