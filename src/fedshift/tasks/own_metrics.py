"""Metrics from users: functions of a model's outputs and the targets of a split.

A function returns a value for each sample, ``[N]``, which add up over clients and have intervals over test samples, or
one number for all samples together, which does neither. It is called with the outputs as an exported model gives them
(of classification, the scores of classes ``[N, K]`` before the softmax; of regression, numbers in the unit of the data)
and with the targets (masks as losses take them, with -100 where a pixel is ignored).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..config.expressions import split_expressions, tidy
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.user_code import describe_error, describe_function
from .metrics import Metric
from .regression import Regression
from .task import Counts, Task

WANTED = "return one value for each sample, [N], or one number for all of them"
"""Requirement on the result of a metric's function, for messages."""


@dataclass(frozen=True, kw_only=True)
class OwnMetric(Metric):
    """The metric that a user's ``function(outputs, targets)`` computes.

    Attributes:
        function: Returns a value for each sample, ``[N]``, or one for all; None where the samples define none.
        text: Its import path, with arguments, ``package.module:function``; ``__main__:function`` of a notebook.
        lower: Whether a lower value is better.

    """

    tasks: ClassVar[tuple[str, ...]] = ()
    travels: ClassVar[bool] = False
    function: Callable[..., Any]
    text: str
    lower: bool = False

    @property
    @override
    def name(self) -> str:
        from ..results.schema import LOWER  # with it pandas, for which each worker process would wait

        path, _, rest = self.text.partition("(")
        arguments = [rest[:-1]] if rest else []
        marked = ", ".join([*arguments, LOWER] if self.lower else arguments)
        return f"{path}({marked})" if marked else path

    @override
    def count(self, task: Task, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        try:
            found = self.evaluate(task, predictions, y)
        except UsageError as error:
            raise FedshiftError(
                "{}. All rounds so far are saved: then continue with {}", error, Ref(resume=True)
            ) from error
        if isinstance(found, Tensor):
            return {"sums": {self.name: float(found.sum())}}
        return {"values": {self.name: found}}

    @override
    def record(self, task: Task, predictions: Tensor, y: Tensor, outputs: int) -> Mapping[str, NDArray[Any]]:
        found = self.evaluate(task, predictions, y)
        return {self.name: found.numpy()} if isinstance(found, Tensor) else {}

    @override
    def try_out(self, task: Task, predictions: Tensor, y: Tensor) -> None:
        self.evaluate(task, predictions, y)

    def evaluate(self, task: Task, predictions: Tensor, y: Tensor) -> Tensor | float | None:
        """Return the value of each sample, float64 ``[N]``, or one value of all; None if it is undefined.

        It is undefined if an output is not a number, and the function then not called.

        Raises :class:`UsageError` naming the function, its place and the cause if it fails or returns anything else.
        """
        if not bool(predictions.isfinite().all()):
            return None
        targets = task.decode(y.double()) if isinstance(task, Regression) else y
        shapes = f"outputs {list(predictions.shape)} and targets {list(targets.shape)}"
        called = f"metric {describe_function(self.function)}, called with {shapes},"
        try:
            made = self.function(task.decode(predictions), targets)
        except Exception as error:
            raise UsageError(
                f"{called} failed: {describe_error(error)}. A metric is a function of outputs and targets: correct it"
            ).about("metric") from error
        if made is None:
            return None
        try:
            found = torch.as_tensor(made, dtype=torch.float64).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{called} returned a {type(made).__name__}: {WANTED}").about("metric") from error
        if found.shape not in ((), (len(y),)):
            raise UsageError(f"{called} returned shape {list(found.shape)}: {WANTED}").about("metric")
        if found.ndim == 0 and bool(found.isnan()):
            return None
        if not bool(found.isfinite().all()):
            where = f" for sample {int((~found.isfinite()).nonzero()[0, 0])}" if found.ndim else ""
            value = float(found.flatten()[~found.isfinite().flatten()][0])
            raise UsageError(
                f"{called} returned {value}{where}: return a finite number, or None for all samples together where "
                "they do not define it"
            ).about("metric")
        return found if found.ndim else float(found)


def make_metric(function: Any, text: str = "", *, lower: bool | None = None) -> Metric:
    """Return the metric of ``function``, called ``text``; ``lower``: a lower value is better, or as it declares.

    Raises :class:`UsageError` if it is no function of outputs and targets.
    """
    if isinstance(function, OwnMetric):
        return replace(function, text=text or function.text, lower=function.lower if lower is None else lower)
    if isinstance(function, Metric):
        return function
    if not callable(function):
        raise UsageError(f"metric {text or repr(function)} is a {type(function).__name__}: {WANTED}")
    lower = getattr(function, "higher_is_better", None) is False if lower is None else lower
    return OwnMetric(function=function, text=text, lower=lower)


def spell(text: str) -> str:
    """Return an expression as the name of a metric: ``package.module:function``, without the mark of its direction."""
    from ..results.schema import LOWER

    path, _, rest = tidy(text).partition("(")
    path = path if ":" in path else ":".join(path.rpartition(".")[::2])
    parts = split_expressions("metric", rest[:-1]) if rest[:-1] else []
    kept = [part for part in parts if part.partition("=")[0].strip() != LOWER.partition("=")[0]]
    return f"{path}({', '.join(kept)})" if kept else path


def take_direction(function: Callable[..., Any], own: bool) -> Callable[..., Any]:
    """Return what makes the metric of a user's function, or of an instance of a class, with its direction."""
    if not own:
        return function
    is_class = isinstance(function, type)

    def make(*values: Any, lower_is_better: bool | None = None, **options: Any) -> Metric:
        return make_metric(function(*values, **options) if is_class else function, lower=lower_is_better)

    direction = inspect.Parameter("lower_is_better", inspect.Parameter.KEYWORD_ONLY, default=None)
    arguments = inspect.signature(function).parameters.values() if is_class else ()
    make.__signature__ = inspect.Signature(sorted([*arguments, direction], key=lambda each: each.kind))  # type: ignore[attr-defined]
    return make
