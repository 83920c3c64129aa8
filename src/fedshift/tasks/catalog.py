"""Tasks by name, and the task inferred from arrays of targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from numpy.typing import NDArray

from ..config.expressions import expressions, resolve
from ..utils.errors import UsageError, unknown_name
from ..utils.user_code import describe_error, find_import_path
from .classification import CLASSIFICATION, Classification
from .multilabel import Multilabel
from .regression import Regression
from .segmentation import Segmentation
from .task import Task

CATALOG: Mapping[str, type[Task]] = {kind.name: kind for kind in (Classification, Segmentation, Multilabel, Regression)}
"""Tasks that :func:`as_task` knows, by name."""


def as_task(task: Task | type[Task] | str) -> Task:
    """Return ``task``, or the task that a class or a text makes: ``regression``, or your ``my_package.module:Class``.

    Raises :class:`UsageError` that lists the tasks.
    """
    if isinstance(task, Task):
        return task
    made: list[Any] = expressions("task", task, _lookup) if isinstance(task, str) else [task]
    if isinstance(task, type) and issubclass(task, Task):
        try:
            made = [task()]
        except Exception as error:
            raise UsageError(f"task {task.__name__}() makes none: {describe_error(error)}") from error
    if len(made) != 1 or not isinstance(made[0], Task):
        raise UsageError(f"task={task!r} is no task: give {', '.join(CATALOG)}, or a subclass of fedshift.tasks.Task")
    return made[0]


def write_task(task: Task) -> str | None:
    """Return the text from which :func:`as_task` makes an equal task; None if there is none."""
    kind = type(task)
    name = task.name if CATALOG.get(task.name) is kind else find_import_path(kind)
    if name is None:
        return None
    given = [f"{each.name}={value!r}" for each in fields(task) if (value := getattr(task, each.name)) != each.default]
    text = f"{name}({', '.join(given)})" if given else name
    try:
        return text if as_task(text) == task else None
    except UsageError:
        return None


def describe_task(task: Task) -> dict[str, Any]:
    """Return the name of ``task`` (``module:Class`` for a user's task), and its fields."""
    kind = type(task)
    name = task.name if CATALOG.get(task.name) is kind else f"{kind.__module__}:{kind.__qualname__}"
    return {"name": name, **{each.name: getattr(task, each.name) for each in fields(task)}}


def find_kind(task: Task) -> str:
    """Return the name of the task of :data:`CATALOG` that ``task`` is or derives from; else its own name."""
    return next((name for name, kind in CATALOG.items() if isinstance(task, kind)), task.name)


def restore_task(described: Mapping[str, Any], own: Task | None = None) -> Task:
    """Return the task that :func:`describe_task` described; a user's task only if ``own`` is of its class.

    Raises :class:`UsageError` if there is none.
    """
    name, values = described.get("name"), {key: value for key, value in described.items() if key != "name"}
    kind = type(own) if own is not None and describe_task(own)["name"] == name else CATALOG.get(str(name))
    if kind is None:
        raise UsageError(f"task {name!r} is not known here: name it in the settings (task)")
    try:
        return kind(**values)
    except TypeError as error:
        raise UsageError(f"task {name!r} has other fields here: {error}") from error


def _lookup(name: str) -> Callable[..., Any]:
    if "." in name:
        return resolve("tasks", name)
    if name not in CATALOG:
        raise unknown_name("task", name, CATALOG)
    return CATALOG[name]


def infer_task(x: NDArray[Any], y: NDArray[Any], where: str) -> Task:
    """Return the task of targets ``y [N, ...]`` of inputs ``x [N, ...]``: a class per sample, or a mask per image.

    Raises :class:`UsageError`, beginning with ``where``, for several numbers per sample: they may be labels or targets.
    """
    if y.ndim == 1 or y.shape[1:] == (1,):
        return CLASSIFICATION
    if y.ndim >= 3 and x.ndim >= 3:
        return Segmentation()
    raise UsageError(
        f"{where}: samples of shape {x.shape} and labels of shape {y.shape}; samples need two or more dimensions, and "
        "labels one number a sample; of several, say what is predicted (task='multilabel', each label 0 or 1, or "
        "task='regression', numbers)"
    )
