"""Expressions such as ``fedbn+fedprox(mu=0.1)``, resolved by name without a registry.

``fedprox(mu=0.1)`` calls ``fedshift.methods.fedprox:fedprox``; ``digit-cnn-bn`` is
``fedshift.models.digits:digit_cnn_bn``; ``my_package.module:function`` is a user's own function. Methods compose as in
Python, ``fedbn(fedprox(mu=0.1))``, or with ``+``: ``fedbn+fedprox(mu=0.1)``. Expressions are parsed, not evaluated, and
may contain only calls of such names with literals.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..utils.errors import Ref, UsageError
from ..utils.user_code import describe_error

EMBEDDED: Mapping[str, str] = {"digits": "fedshift.data.digits:digits", "nuclei": "fedshift.data.nuclei:nuclei"}
"""Federations that come with fedshift: the functions that make them, imported on demand."""
OF_TORCH = frozenset(("torch.optim", "torch.optim.lr_scheduler"))
"""Modules of torch whose classes expressions may name without permission, since calls of them only compute."""
BY_MODULE = ("methods", "evaluation.policies")
"""Packages whose modules each define one function with the module's name, in the spelling of Python."""


@cache
def list_catalog(package: str) -> Mapping[str, Callable[..., Any]]:
    """Return the public functions of the modules of ``fedshift.<package>``, by the name in expressions."""
    root = importlib.import_module(f"fedshift.{package}")
    found: dict[str, Callable[..., Any]] = {}
    for module_info in pkgutil.iter_modules(root.__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{root.__name__}.{module_info.name}")
        for name, function in vars(module).items():
            if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_"):
                found[spell(package, name)] = function
    return found


TITLE = 40
"""Maximum length of a title before a colon."""


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """Description of a function in the catalog, read from its source without importing it (and torch).

    ``arguments``: keyword arguments with their defaults. ``summary``: first paragraph of the docstring.
    """

    arguments: str
    summary: str


@cache
def read_catalog(package: str) -> Mapping[str, CatalogEntry]:
    """Describe the functions of :func:`list_catalog` from the source of ``fedshift.<package>``, in the same order."""
    found: dict[str, CatalogEntry] = {}
    for path in sorted(Path(__file__).parents[1].joinpath(*package.split(".")).glob("[!_]*.py")):
        found |= {
            spell(package, name): entry for name, entry in read_functions(path, by_module=package in BY_MODULE).items()
        }
    return found


def find_title(package: str, name: str) -> str:
    """Return what the first sentence of an entry calls it before a colon, such as FedBN for fedbn; else ``name``."""
    entry = read_catalog(package).get(name)
    title, colon, _ = entry.summary.partition(":") if entry else (name, "", "")
    return title if colon and len(title) <= TITLE else name


def read_functions(path: Path, *, by_module: bool = False) -> dict[str, CatalogEntry]:
    """Describe the public functions of a source file, with the module's docstring if the module defines one thing only.

    With ``by_module`` that is the function with the file's name; in data sets, modules that assign ``CARD``.
    """
    module = ast.parse(path.read_text(encoding="utf-8"))
    names = {ast.unparse(target) for node in module.body if isinstance(node, ast.Assign) for target in node.targets}
    described = module if by_module or "CARD" in names else None
    return {
        node.name: CatalogEntry(
            arguments=", ".join(_list_defaults(node)),
            summary=(ast.get_docstring(described or node) or "").split("\n\n")[0].replace("\n", " ").replace("``", ""),
        )
        for node in module.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and (not by_module or node.name == path.stem)
    }


def _list_defaults(function: ast.FunctionDef) -> Iterator[str]:
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if default is None:
            yield argument.arg
        else:
            value = repr(default.value) if isinstance(default, ast.Constant) else ast.unparse(default)
            yield f"{argument.arg}={value}"


def spell(package: str, name: str) -> str:
    """Return ``name`` in the package's spelling, models with dashes, methods with underscores; both are accepted."""
    return name.replace("-", "_").lower() if package in BY_MODULE else name.replace("_", "-").lower()


@contextmanager
def trust_only(names: Iterable[str], source: object = "") -> Iterator[None]:
    """In this block, resolve only ``names`` and functions of fedshift, because expressions came from elsewhere.

    ``source``: the file with the expressions, for errors.
    """
    token = distrust(names, source)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def distrust(names: Iterable[str], source: object) -> Token[_Trust | None]:
    """Apply :func:`trust_only` from now on in this context."""
    return _TRUSTED.set((frozenset(name.replace(":", ".") for name in names), str(source)))


def find_functions(text: str) -> list[str]:
    """Return every part of ``text`` that could be the name of a user's function, ``package.module:function``."""
    return re.findall(r"[A-Za-z_][\w.]*[:.]\w+", re.sub(r"'[^']*'|\"[^\"]*\"", "''", text))


_Trust = tuple[frozenset[str], str]
_TRUSTED: ContextVar[_Trust | None] = ContextVar("trusted", default=None)


def require_trusted(kind: str, written: str) -> None:
    """Raise :class:`UsageError` if expressions came from elsewhere and nobody allowed ``written``."""
    trusted, source = _TRUSTED.get() or (None, "")
    if trusted is not None and written.replace(":", ".") not in trusted:
        told = f"{source}: " if source else ""
        raise UsageError(
            f"{told}{kind} {written!r} is a function of this machine that nobody allowed: allow it ({{}})",
            Ref(code=written),
        )


def find_user_function(kind: str, name: str) -> Callable[..., Any]:
    """Return the function ``package.module:function``; raise :class:`UsageError` about a ``kind`` if there is none."""
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    written = f"{module_name}:{attribute}"
    if not (written in EMBEDDED.values() or (module_name in OF_TORCH and attribute[:1].isupper())):
        require_trusted(kind, written)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise UsageError(f"{kind} {written!r}: {error}; install it, or run where Python finds it") from error
    except AttributeError as error:
        raise UsageError(f"{kind} {written!r}: module {module_name} has no {attribute!r}") from error
    if not callable(function):
        raise UsageError(f"{kind} {written!r}: {attribute} is not a function")
    return function  # type: ignore[no-any-return]


def expressions(kind: str, text: str, lookup: Callable[[str], Callable[..., Any]]) -> list[Any]:
    """Return the values of a comma-separated list of expressions, for example ``fedavg, fedbn+fedprox(mu=0.1)``.

    ``lookup`` returns the function of a name; ``kind`` is the subject of errors.
    """
    source = re.sub(r"(?<=\w):(?=\w)", ".", text)
    try:
        tree = ast.parse(f"[{source}]", mode="eval").body
    except SyntaxError as error:
        raise UsageError(f"{kind} {text!r} cannot be read: write name, name(key=value) or name+name") from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise UsageError(f"{kind} {text!r} names none: write name, name(key=value) or name+name")
    return [_value(kind, node, lookup) for node in tree.elts]


def split_expressions(kind: str, text: str) -> list[str]:
    """Split ``text`` at commas outside brackets and quotes; raise :class:`UsageError` if one is not closed."""
    found, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        if sign == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += sign
    if depth or quote:
        raise UsageError(f"{kind} {text!r}: a bracket or a quotation mark is not closed")
    return [part.strip() for part in found]


def tidy(text: str) -> str:
    """Return an expression with spaces only after its commas; quoted texts stay unchanged."""
    found = re.split(r"""('[^']*'|"[^"]*")""", text.strip())
    found[::2] = (re.sub(r"\s*,\s*", ", ", re.sub(r"\s*([-+=:.()\[\]{}])\s*", r"\1", part)) for part in found[::2])
    return "".join(found)


def _describe_parameters(signature: inspect.Signature) -> str:
    """Return the arguments as a user writes them, ``clients, seed=0``, without the base method that ``+`` passes."""
    shown = [
        f"{each.replace(annotation=each.empty)}{' (by position)' if each.kind is each.POSITIONAL_ONLY else ''}"
        for each in signature.parameters.values()
        if each.kind is not each.POSITIONAL_OR_KEYWORD or each.default is not None
    ]
    return ", ".join(shown) or "no arguments"


def _read_literal(node: ast.expr) -> Any:
    return float("inf") if isinstance(node, ast.Name) and node.id == "inf" else ast.literal_eval(node)


def _value(kind: str, node: ast.expr, lookup: Callable[[str], Callable[..., Any]], *inner: Any) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _value(kind, node.left, lookup, _value(kind, node.right, lookup, *inner))
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name | ast.Attribute):
        raise UsageError(f"{kind} {ast.unparse(node)!r} is not a name: write name, name(key=value) or name+name")
    function = lookup(ast.unparse(call.func))
    arguments = [_value(kind, argument, lookup) for argument in call.args] + list(inner)
    try:
        takes = inspect.signature(function)
    except ValueError as error:
        raise UsageError(f"{kind} {ast.unparse(node)!r}: {error}; give a function of Python") from error
    written, usage = ast.unparse(node), f"{ast.unparse(call.func)} takes {_describe_parameters(takes)}"
    try:
        keywords = {str(keyword.arg): _read_literal(keyword.value) for keyword in call.keywords}
    except ValueError as error:
        raise UsageError(
            f"{kind} {written!r}: values must be numbers, strings or True, False, None; {usage}"
        ) from error
    if len(keywords) < len(call.keywords):
        raise UsageError(f"{kind} {written!r}: an argument is given twice; {usage}")
    known = takes.parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in known):
        for name in keywords.keys() - takes.parameters.keys():
            raise UsageError(f"{kind} {written!r}: unknown argument {name!r}; {usage}")
    for each in known:
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty and each.name not in keywords:
            raise UsageError(f"{kind} {written!r}: argument {each.name!r} is missing; {usage}")
    try:
        takes.bind(*arguments, **keywords)
        return function(*arguments, **keywords)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{kind} {written!r}: {describe_error(error)}; {usage}") from error
