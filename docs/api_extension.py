"""Griffe extension for the API reference: real signatures, and references that Markdown follows."""

import re
from pathlib import Path
from typing import Any

from griffe import (
    Attribute,
    Class,
    ExprBinOp,
    ExprSubscript,
    Extension,
    Function,
    Module,
    Object,
    Parameter,
    ParameterKind,
    Parameters,
)

ROLE = re.compile(r":(class|func|meth|data|mod|attr):`~?([\w.]+)`")
DOCUMENTED = {
    line.removeprefix("::: ").strip()
    for page in (Path(__file__).parent / "api").glob("*.md")
    for line in page.read_text(encoding="utf-8").splitlines()
    if line.startswith("::: ")
}
"""What the pages of the reference document, by its path."""
ALIASES = {
    "Positive": "int",
    "Number": "float",
    "Participation": "float | int | str",
    "Names": "str",
    "Seeds": "int | str",
}
"""Names of types of settings, and what they stand for."""
SHORT = {path.rpartition(".")[2]: path for path in DOCUMENTED}


def refer(match: re.Match[str]) -> str:
    """Return a Markdown reference to what a Sphinx role names, or its name as code if no page documents it."""
    role, target = match[1], match[2].lstrip(".")
    name, _, member = target.partition(".")
    if target in DOCUMENTED:
        return f"[`{target.rpartition('.')[2]}`][{target}]"
    if name not in SHORT:
        return f"`{target}`"
    anchor = f"{SHORT[name]}.{member}" if member and role == "meth" else SHORT[name]  # classes describe attributes
    return f"[`{target}`][{anchor}]"


class ApiExtension(Extension):
    """Rewrites Sphinx roles, and gives functions that take the fields of a dataclass these fields as arguments."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the roles of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(refer, obj.docstring.value)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Replace the one argument of decorated functions."""
        for function in self._list_functions(pkg):
            for decorator in function.decorators:
                if match := re.fullmatch(r"_take_fields_of\((\w+)\)", str(decorator.value)):
                    kind = function.module[match[1]]
                    take_fields(function, kind.final_target if kind.is_alias else kind)
                    function.decorators.remove(decorator)
                    break

    def _list_functions(self, module: Module) -> list[Function]:
        found = [each for each in module.functions.values() if not each.is_alias]
        return found + [
            each for inner in module.modules.values() if not inner.is_alias for each in self._list_functions(inner)
        ]


def take_fields(function: Function, kind: Class) -> None:
    """Give ``function`` the fields of ``kind`` as arguments, with their help."""
    fields, parameters = list_fields(kind), []
    for name, attribute in fields.items():
        place = (
            ParameterKind.positional_or_keyword
            if "kw_only=False" in str(attribute.value)
            else ParameterKind.keyword_only
        )
        default, annotation = find_default(kind, attribute), simplify(attribute.annotation)
        parameters.append(Parameter(name, annotation=annotation, kind=place, default=default))
    function.parameters = Parameters(*sorted(parameters, key=lambda each: each.kind is ParameterKind.keyword_only))
    lines = "\n".join(f"    {name}: {find_help(kind, name)}" for name in fields)
    assert function.docstring is not None
    function.docstring.value = function.docstring.value.replace("Returns:", f"Args:\n{lines}\n\nReturns:", 1)


def list_fields(kind: Class) -> dict[str, Attribute]:
    """Return the fields of a dataclass, its own first, then those of its bases."""
    fields: dict[str, Attribute] = {}
    for owner in [kind, *kind.mro()]:
        for name, member in owner.members.items():
            is_field = isinstance(member, Attribute) and member.annotation is not None and not name.startswith("_")
            if is_field and "property" not in member.labels and "init=False" not in str(member.value):
                fields.setdefault(name, member)
    return fields


def find_help(kind: Class, name: str) -> str:
    """Return the docstring of a field, from the class that describes it."""
    owners = (owner.members.get(name) for owner in [kind, *kind.mro()])
    found = next(each.docstring.value for each in owners if each is not None and each.docstring is not None)
    return " ".join(found.split())


def find_default(kind: Class, attribute: Attribute) -> str | None:
    """Return the source of a field's default; one that is another class's default is resolved."""
    value = None if attribute.value is None else str(attribute.value)
    while value is not None and value.startswith("Spec."):
        name = value.removeprefix("Spec.")
        owners = (owner.members.get(name) for owner in kind.mro())
        value = next(str(each.value) for each in owners if isinstance(each, Attribute) and each.value is not None)
    if value is not None and (match := re.fullmatch(r"field\(.*?default=([^,)]+).*\)", value)):
        return match[1]
    return None if value is None or value.startswith("field(") else value


def simplify(annotation: Any) -> str:
    """Return an annotation without what checks and groups settings."""
    text = str(annotation)
    if isinstance(annotation, ExprSubscript) and str(annotation.left) == "Annotated":
        return simplify(annotation.slice.elements[0])
    if isinstance(annotation, ExprBinOp):
        return f"{simplify(annotation.left)} {annotation.operator} {simplify(annotation.right)}"
    return ALIASES.get(text, text)
