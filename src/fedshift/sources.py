"""The clients that a person asks for: names, directories, splits and scaling made into one checked federation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path

import torch

from .base.errors import UsageError, unknown
from .config import DataSpec
from .data.assignment import assignment, saved
from .data.federation import Federation
from .data.files.folder import read
from .data.files.images import SizesDiffer
from .data.files.reading import Progress, Reading
from .data.partition import (
    Change,
    dirichlet,
    ham_non_iid,
    iid,
    labels,
    matching,
    only,
    quantity,
    repeat,
    sample,
    truncate,
    validation,
)
from .data.split import HALF, IMAGENET, UNIT
from .names import catalog, expressions, resolve

EMBEDDED: Mapping[str, str] = {"digits": "fedshift.data.digits:digits"}
"""Federations that come with fedshift, and the functions that make them, imported when asked for."""

SPLITS: Mapping[str, Callable[..., Change]] = {
    made.__name__: made
    for made in (
        dirichlet, ham_non_iid, iid, labels, only, quantity, repeat, sample, saved, truncate, validation,
    )
}  # fmt: skip
"""Functions that a split may name."""

READ = (
    "broken", "test_fraction", "client_column", "target", "split_column", "group_column", "missing", "scaling",
)  # fmt: skip
"""Settings that say how a person's own files are read."""


def root_of(spec: DataSpec) -> Path:
    """The directory in which benchmarks' files are looked for: ``--root``, else FEDSHIFT_DATA, else ``data``."""
    return Path(spec.root or os.environ.get("FEDSHIFT_DATA") or "data")


def source_of(
    data: str,
    spec: DataSpec,
    progress: Progress | None = None,
    differing: int | None = None,
    like: Federation | None = None,
) -> Federation:
    """The clients of ``data`` as they are kept; ``differing``: pixels to which images of several sizes are brought.

    ``like``: the federation to which a person's own clients come, see :class:`~fedshift.data.files.reading.Reading`.
    """
    if data in EMBEDDED:
        _refuse(spec, READ, data)
        made: Federation = resolve("data", EMBEDDED[data])()
    elif Path(data).exists():
        try:
            made = _read(Path(data), spec, progress, differing, like)
        except UsageError as error:
            if data not in catalog("data.benchmarks"):
                raise
            raise UsageError(f"{error}. (./{data} was read, not the benchmark of that name: rename one)") from error
    else:
        made = _benchmark(data, spec, progress)
    made = made.only(matching(spec.domains, made.names)) if spec.domains else made
    classes = spec.classes or made.classes
    unseen = (f"unseen {label}" for label in range(len(made.class_names), classes if made.class_names else 0))
    return replace(made, classes=classes, class_names=(*made.class_names[:classes], *unseen))


def _refuse(spec: DataSpec, names: Iterable[str], data: str) -> None:
    """Raise :class:`UsageError` where one of these settings was given, which ``data`` has no use for."""
    for field in fields(spec):
        if field.name in names and getattr(spec, field.name) != field.default:
            raise UsageError(f"--{field.name.replace('_', '-')} says how your own files are read: {data} takes no such")


def _exact(domains: str | None) -> tuple[str, ...] | None:
    """The names in a list of clients; None where there is none, or a pattern that only all names can resolve."""
    if domains is None or set("*?[") & set(domains):
        return None
    return tuple(name.strip() for name in domains.split(","))


def _read(
    path: Path, spec: DataSpec, progress: Progress | None, differing: int | None, like: Federation | None
) -> Federation:
    reading = Reading(
        domains=_exact(spec.domains), classes=spec.classes, image_size=spec.image_size, progress=progress, like=like,
        **{name: getattr(spec, name) for name in READ},
    )  # fmt: skip
    try:
        return read(path, reading)
    except SizesDiffer:
        if differing is None:
            raise
        made = read(path, replace(reading, image_size=differing))
        said = f"images of several sizes are looked at in {differing} x {differing} pixels; training needs --image-size"
        return replace(made, notices=(*made.notices, said))


def _benchmark(data: str, spec: DataSpec, progress: Progress | None) -> Federation:
    if "/" in data or "\\" in data or not data[:1].isalpha():
        raise UsageError(f"data {data!r}: there is no {Path(data).resolve()}; give a directory that exists, or a name")

    def lookup(name: str) -> Callable[..., Federation]:
        known = catalog("data.benchmarks")
        written = name.replace("_", "-").lower()
        if written not in known:
            near = unknown("data", written, [*EMBEDDED, *known])
            raise UsageError(f"{near}; and there is no directory {Path(data).resolve()}")
        takes = signature(known[written]).parameters
        _refuse(spec, set(READ) - set(takes), written)
        given = {name: getattr(spec, name) for name in READ if getattr(spec, name) != getattr(DataSpec, name)}
        given |= {"progress": progress, "size": spec.image_size, "domains": _exact(spec.domains)}
        given["sites"] = given["domains"]
        return partial(known[written], root_of(spec), **{k: v for k, v in given.items() if v and k in takes})

    head, bracket, arguments = data.partition("(")
    made = expressions("data", head.replace("-", "_") + bracket + arguments, lookup)
    if len(made) != 1:
        raise UsageError(f"data {data!r}: give one, not {len(made)}")
    return made[0]  # type: ignore[no-any-return]


def changes_of(spec: DataSpec) -> tuple[Change, ...]:
    """The changes that ``--split`` names, in their order."""

    def lookup(name: str) -> Callable[..., Change]:
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
        return SPLITS[name]

    return tuple(expressions("split", spec.split, lookup)) if spec.split else ()


def normalized(data: Federation, choice: str | None) -> Federation:
    """``data`` with images scaled as ``choice`` says."""
    if choice is None:
        return data
    for client in data.clients:
        if client.train.store.dtype != torch.uint8:
            raise UsageError(
                f"normalize={choice!r} is for images of pixels 0..255, which those of client {client.name!r} are not: "
                "leave it out"
            )
    if choice == "client":
        return replace(data, clients=tuple(client.normalized() for client in data.clients))
    return data.normalized({"half": HALF, "imagenet": IMAGENET, "unit": UNIT}[choice])


def federation_of(
    data: str, spec: DataSpec, progress: Progress | None = None, differing: int | None = None
) -> Federation:
    """The clients that ``data`` and ``spec`` ask for, checked; ``differing`` as in :func:`source_of`."""
    return split_of(source_of(data, spec, progress, differing).fitted(spec.image_size), spec)


def split_of(data: Federation, spec: DataSpec) -> Federation:
    """The clients of ``data`` as ``spec`` splits, thins out and scales them, checked."""
    alone = spec.allow_single_class
    data = data.check(allow_single_class=alone or bool(spec.split))
    return normalized(dealt(data, spec), spec.normalize).check(allow_single_class=alone)


def dealt(data: Federation, spec: DataSpec) -> Federation:
    """The clients of ``data`` as ``spec`` splits and thins them out."""
    if spec.group_column and spec.validation:
        raise UsageError(
            f"validation={spec.validation:g} would cut groups of column {spec.group_column!r}: say in a column which "
            "rows are train, validation and test (--split-column)"
        )
    for change in changes_of(spec):
        data = change(data)
    data = data.limit(spec.samples) if spec.samples else data
    return data.hold_out(spec.validation) if spec.validation else data


def assigned(source: Federation, spec: DataSpec) -> str:
    """Who has which samples of ``source``, as CSV."""
    return str(assignment(source, [lambda data: dealt(data, spec)]).to_csv(index=False))
