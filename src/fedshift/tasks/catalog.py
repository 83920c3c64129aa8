"""Tasks and metrics on request by name, and the task inferred from arrays of targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from numpy.typing import NDArray

from ..config.catalog import Catalog
from ..utils.errors import Ref, UsageError
from ..utils.user_code import describe_error, find_import_path, identify_function
from .classification import CLASSIFICATION, Classification
from .metrics import F1, AveragePrecision, Brier, CalibrationError, Metric, TopK
from .multilabel import Multilabel
from .own_metrics import OwnMetric, make_metric, take_direction
from .own_metrics import spell as spell_metric
from .regression import Regression
from .segmentation import Segmentation
from .survival import Survival
from .task import Task


def _accept(task: object, text: str | None) -> Task:
    if isinstance(task, type) and issubclass(task, Task):
        try:
            return task()
        except Exception as error:
            raise UsageError(f"task {task.__name__}() makes none: {describe_error(error)}") from error
    if not isinstance(task, Task):
        known = ", ".join(TASKS.names())
        raise UsageError(
            f"{{}} is not a task: give {known}, or a subclass of fedshift.tasks.Task", Ref(task=text or task)
        )
    return task


def _hide_requested(kind: Callable[..., Any], _own: bool) -> Callable[..., Any]:
    """Return ``kind`` without the argument ``requested``, which other settings give."""
    made: Any = partial(kind)
    taken = inspect.signature(kind)
    made.__signature__ = taken.replace(parameters=[p for p in taken.parameters.values() if p.name != "requested"])
    return made  # type: ignore[no-any-return]


_KINDS: Mapping[str, type[Task]] = {
    kind.name: kind for kind in (Classification, Segmentation, Multilabel, Regression, Survival)
}
TASKS = Catalog[Task]("task", _KINDS, _accept, adapt=_hide_requested)
"""Tasks; your own is a subclass of :class:`Task`."""


def _accept_metric(given: object, text: str | None) -> Metric:
    if isinstance(given, OwnMetric) and not given.text:
        return make_metric(given, spell_metric(text or ""))
    if isinstance(given, Metric):
        return given
    if not callable(given):
        known = ", ".join(METRICS.names())
        raise UsageError(
            f"{{}} is not a metric: give one of {known}, or a function of outputs and targets", Ref(metric=given)
        )
    text = find_import_path(given) or identify_function(given)
    return make_metric(given() if isinstance(given, type) else given, text)


def _spell_metric(metric: Metric) -> str | None:
    return None if metric.name.startswith("__main__:") else metric.name  # another process has another __main__


METRICS = Catalog[Metric](
    "metric",
    {"f1": F1, "top_k": TopK, "brier": Brier, "ece": CalibrationError, "average_precision": AveragePrecision},
    _accept_metric,
    adapt=take_direction,
    spell=_spell_metric,
)
"""Metrics on request; your own is a function of outputs and targets (:mod:`fedshift.tasks.own_metrics`)."""


def describe_task(task: Task) -> dict[str, Any]:
    """Return the name of ``task`` (``module:Class`` for a user's task), and its fields except requested metrics."""
    kind = type(task)
    name = task.name if _KINDS.get(task.name) is kind else f"{kind.__module__}:{kind.__qualname__}"
    own = (each.name for each in fields(task) if each.name != "requested")
    return {"name": name, **{each: getattr(task, each) for each in own}}


def find_kind(task: Task) -> str:
    """Return the name of the task of :data:`TASKS` that ``task`` is or derives from; else its own name."""
    return next((name for name, kind in _KINDS.items() if isinstance(task, kind)), task.name)


def restore_task(described: Mapping[str, Any], own: Task | None = None) -> Task:
    """Return the task that :func:`describe_task` described; a user's task only if ``own`` is of its class.

    Raises :class:`UsageError` if there is none.
    """
    name, values = described.get("name"), {key: value for key, value in described.items() if key != "name"}
    kind = type(own) if own is not None and describe_task(own)["name"] == name else _KINDS.get(str(name))
    if kind is None:
        raise UsageError(f"task {name!r} is not known here: name it in the settings (task)")
    try:
        return kind(**values)
    except TypeError as error:
        raise UsageError(f"task {name!r} has other fields here: {error}") from error


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
        "labels one number per sample (of one-hot labels, y.argmax(axis=1)); for several numbers, name the task "
        "(task='multilabel', each label 0 or 1, or task='regression', numbers)"
    )
