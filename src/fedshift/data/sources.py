"""Federations from settings: data by name or directory, with splits and scaling, checked."""

from __future__ import annotations

import os
from dataclasses import replace
from inspect import signature
from pathlib import Path

import torch

from ..config.catalog import Catalog
from ..config.expressions import EMBEDDED, find_user_function, list_catalog, spell
from ..config.spec import DataSpec
from ..tasks import TASKS, Task
from ..utils.csv_cells import escape_table
from ..utils.errors import Ref, UsageError, unknown_name
from .assembly import read_source
from .assignment import describe_assignment, saved
from .federation import Federation
from .partition import CHANGES, Change, match_names
from .preparation import HALF, IMAGENET, UNIT
from .readers import refuse_unused
from .schema import Layout, Schema
from .source import Progress, ReadOptions


def _accept_change(change: object, text: str | None) -> Change:
    if not callable(change):
        raise UsageError("{}: {} is not a function of a federation", Ref(split=text), repr(change))
    return change


def _accept_data(made: object, text: str | None) -> Federation:
    if not isinstance(made, Federation):
        raise UsageError("{} made a {}, not a Federation", Ref(data=text), type(made).__name__)
    return made


SPLIT_CHANGES = Catalog[Change](
    "split", {made.__name__: made for made in (*CHANGES, saved)}, _accept_change, spell=lambda _: None
)
"""Changes of a federation by name, applied in turn if there are several; users' functions are called to make one."""
DATASETS = Catalog[Federation](
    "data", "data.datasets", _accept_data, spell=lambda _: None, settings=("root", "progress", "sites")
)
"""Benchmarks by name."""

READ = (
    "test_fraction", "client_column", "target", "split_column", "ignore_columns", "groups", "missing", "scaling",
    "window", "spacing",
)  # fmt: skip
"""Settings that apply to user files, in addition to the task."""


def data_root(spec: DataSpec) -> Path:
    """Return the directory of the benchmarks' files: ``--root``, else FEDSHIFT_DATA, else ``data``."""
    return Path(spec.root or os.environ.get("FEDSHIFT_DATA") or "data")


def load_source(
    data: object,
    spec: DataSpec,
    progress: Progress | None = None,
    size_if_mixed: tuple[int, int] | None = None,
    schema: Layout | None = None,
    task: Task | None = None,
) -> Federation:
    """Load the clients of ``data`` without splits or scaling; images have one shape, unless they join a run's.

    Args:
        data: Name of an embedded federation or a benchmark, a path to user files, or an object with clients
            (:data:`~fedshift.data.readers.FORMS`).
        spec: Settings of the data.
        progress: Callback for progress.
        size_if_mixed: Height and width for resizing images of different sizes; None: refuse such images.
        schema: Layout of the data that user files join, see :class:`~fedshift.data.source.ReadOptions`.
        task: The prediction task; None: the one in ``spec``, or else the task of the data.

    """
    task = TASKS.parse(spec.task) if task is None and spec.task else task
    kind = schema.task.unfitted() if isinstance(schema, Schema) else task
    reading = ReadOptions.from_spec(spec, task=kind, schema=schema, progress=progress, size_if_mixed=size_if_mixed)
    whole = True  # in which clients are still to be chosen
    if isinstance(data, Federation):
        refuse_unused(reading, (), "a Federation")
        made = _apply_task(data, task, "a Federation")
    elif not isinstance(data, str):
        made, whole = read_source(data, reading), False
    elif data in EMBEDDED:
        refuse_unused(reading, ("image_size",), data)
        made = _apply_task(find_user_function("data", EMBEDDED[data])(), task, data)
    elif Path(data).exists():
        try:
            made, whole = read_source(Path(data), reading), False
        except UsageError as error:
            if data not in list_catalog("data.datasets"):
                raise
            raise UsageError(f"{{}}. (./{data} was read, not the benchmark of that name: rename one)", error) from error
    else:
        made = _read_benchmark(data, spec, reading)
    if spec.root is not None and not schema and _leaves_root_unread(data, Path(spec.root)):
        raise UsageError(
            f"{{}} is for benchmarks, which {data if isinstance(data, str) else 'the data'} is not: leave it out",
            Ref(root=spec.root),
        )
    if reading.patch:
        by_name = isinstance(data, str) and not Path(data).exists()
        made = made.cut_patches(reading.patch_size, resized=by_name or spec.image_size is not None)
    made = made.select_clients(match_names(spec.domains, made.names)) if spec.domains and whole else made
    classes = spec.classes or made.classes
    unseen = (f"unseen {label}" for label in range(len(made.class_names), classes if made.class_names else 0))
    made = replace(made, classes=classes, class_names=(*made.class_names[:classes], *unseen))
    return made if isinstance(schema, Schema) else made.fit_images(spec.image_size)


def _leaves_root_unread(data: object, root: Path) -> bool:
    """Return whether ``data`` are neither a benchmark nor files below ``root``."""
    if not isinstance(data, str) or data in EMBEDDED:
        return True
    return Path(data).exists() and not Path(data).resolve().is_relative_to(root.resolve())


def _apply_task(data: Federation, task: Task | None, name: str) -> Federation:
    """Return data that define their own task with ``task`` instead, which must be of the same kind."""
    if task is None:
        return data
    if not isinstance(task, type(data.task)):
        raise UsageError(f"task {str(task)!r}: {name} is for {data.task}: leave the task out, or give one of this kind")
    return replace(data, task=task)


def find_data(data: str) -> str:
    """Return ``data`` if files exist there or it names an embedded federation, or else the name of the benchmark.

    Raises :class:`UsageError` if there is none of these.
    """
    if data in EMBEDDED or Path(data).exists():
        return data
    if "/" in data or "\\" in data or not data[:1].isalpha():
        raise UsageError(
            f"data {data!r}: there is no {Path(data).resolve()}; give a directory that exists, or a name"
        ).about("data")

    written = spell("data.datasets", data.partition("(")[0].strip())
    if written not in DATASETS.entries:
        near = unknown_name("data", written, [*EMBEDDED, *DATASETS.entries])
        raise UsageError(f"{near}; and there is no directory {Path(data).resolve()}").about("data")
    return written


def _read_benchmark(data: str, spec: DataSpec, reading: ReadOptions) -> Federation:
    known, written = DATASETS.entries, find_data(data)
    honored = {"image_size", *signature(known[written]).parameters} - {"window"}  # ABIDE's is another one, of frames
    refuse_unused(reading, honored, written)
    given: dict[str, object] = {name: getattr(spec, name) for name in READ if name in reading.changed}
    exact = isinstance(spec.domains, str) and not set("*?[!") & set(spec.domains)  # patterns choose among all
    names = tuple(map(str.strip, spec.domains.split(","))) if exact else None
    given |= {"progress": reading.progress, "size": spec.image_size, "domains": names, "sites": names}
    given |= {"root": data_root(spec)}
    made = DATASETS.parse(data, **{name: value for name, value in given.items() if value})
    return _apply_task(made, reading.task, data.partition("(")[0].strip())


def parse_changes(spec: DataSpec) -> tuple[Change, ...]:
    """Return the changes given by ``--split``, in order."""
    return SPLIT_CHANGES.parse_all(spec.split) if spec.split else ()


SCALES = {"half": HALF, "imagenet": IMAGENET, "unit": UNIT}
"""Scalings of pixels that do not depend on samples, by name."""


def normalize(data: Federation, choice: str | None) -> Federation:
    """Scale the images of ``data`` by ``choice``: client, half, imagenet or unit; None: unchanged."""
    if choice is None:
        return data
    for client in data.clients:
        if any(split.dtype != torch.uint8 for split in client.splits.values()):
            raise UsageError(
                f"normalize={choice!r} is for images of pixels 0..255, but client {client.name!r} has other "
                "samples: "
                "leave it out"
            )
    if choice == "client":
        return data.normalize_clients()
    return data.normalize(SCALES[choice])


def load_federation(
    data: object, spec: DataSpec, progress: Progress | None = None, size_if_mixed: tuple[int, int] | None = None
) -> Federation:
    """Load, split, scale and check the clients of ``data``, with unchanged targets.

    ``size_if_mixed``: as in :func:`load_source`.
    """
    return prepare_clients(load_source(data, spec, progress, size_if_mixed), spec)


def prepare_clients(data: Federation, spec: DataSpec) -> Federation:
    """Split, limit, scale and check the clients of ``data`` by ``spec``, with unchanged targets."""
    alone = spec.allow_single_class
    data = data.check(allow_single_class=alone or bool(spec.split))
    return normalize(apply_splits(data, spec), spec.normalize).check(allow_single_class=alone)


def apply_splits(data: Federation, spec: DataSpec) -> Federation:
    """Split and limit the clients of ``data`` by ``spec``."""
    for change in parse_changes(spec):
        data = change(data)
    data = data.limit_samples(spec.samples) if spec.samples else data
    return data.hold_out(spec.validation) if spec.validation else data


def write_assignment(source: Federation, spec: DataSpec) -> str:
    """Return the assignment of the samples of ``source`` to clients as CSV."""
    table = describe_assignment(source, [lambda data: apply_splits(data, spec)])
    return str(escape_table(table).to_csv(index=False))
