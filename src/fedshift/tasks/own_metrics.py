"""Metrics from users and installed libraries: functions of a model's outputs and the targets of a split.

A function returns a value for each sample, ``[N]``, which add up over clients and have intervals over test samples, or
one number for all samples together, which does neither. It is called with the outputs as an exported model gives them
(of classification, the scores of classes ``[N, K]`` before the softmax; of regression, numbers in the unit of the data)
and with the targets (masks as losses take them, with -100 where a pixel is ignored).
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..config.expressions import split_expressions, tidy
from ..utils.errors import FedshiftError, Ref, UsageError, unknown_name
from ..utils.user_code import describe_error, describe_function
from .classification import find_log_odds
from .metrics import Metric
from .regression import Regression
from .task import Counts, Task

LIBRARIES = ("sklearn", "torchmetrics")
"""Libraries whose metrics have names: ``sklearn:recall_macro``, ``torchmetrics:MulticlassF1Score(num_classes=4)``."""
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

    @property
    def described(self) -> str:
        """Name and place of the function, for messages."""
        return self.text if isinstance(self.function, Updated) else describe_function(self.function)

    def call(self, task: Task, outputs: Tensor, targets: Tensor) -> Any:
        """Return what the function returns."""
        return self.function(outputs, targets)

    def evaluate(self, task: Task, predictions: Tensor, y: Tensor) -> Tensor | float | None:
        """Return the value of each sample, float64 ``[N]``, or one value of all; None if it is undefined.

        It is undefined if an output is not a number, and the function then not called.

        Raises :class:`UsageError` naming the function, its place and the cause if it fails or returns anything else.
        """
        if not bool(predictions.isfinite().all()):
            return None
        targets = task.decode(y.double()) if isinstance(task, Regression) else y
        shapes = f"outputs {list(predictions.shape)} and targets {list(targets.shape)}"
        called = f"metric {self.described}, called with {shapes},"
        try:
            made = self.call(task, task.decode(predictions), targets)
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


@dataclass(frozen=True)
class Given:
    """A function that an expression names, and whether a lower value is better; None: as the function declares."""

    function: Any
    lower: bool | None = None

    def to_metric(self, text: str) -> Metric:
        """Return the metric called ``text``; raise :class:`UsageError` if the function is none."""
        made = self.function
        if isinstance(made, OwnMetric) and self.lower is not None:
            return replace(made, lower=self.lower)
        if isinstance(made, Metric):
            return made
        function = Updated(made) if is_updated(made) else made
        if not callable(function):
            raise UsageError(f"metric {text!r} makes a {type(made).__name__}: {WANTED}")
        lower = getattr(made, "higher_is_better", None) is False if self.lower is None else self.lower
        return OwnMetric(function=function, text=text, lower=lower)


def spell(text: str) -> str:
    """Return an expression as the name of a metric: ``package.module:function``, without the mark of its direction."""
    from ..results.schema import LOWER

    path, _, rest = tidy(text).partition("(")
    path = path if ":" in path else ":".join(path.rpartition(".")[::2])
    parts = split_expressions("metric", rest[:-1]) if rest[:-1] else []
    kept = [part for part in parts if part.partition("=")[0].strip() != LOWER.partition("=")[0]]
    return f"{path}({', '.join(kept)})" if kept else path


def is_updated(metric: object) -> bool:
    """Return whether ``metric`` has the interface of torchmetrics."""
    return all(callable(getattr(metric, name, None)) for name in ("reset", "update", "compute"))


@dataclass(frozen=True)
class Updated:
    """A metric of torchmetrics, or alike, which is updated with the outputs of all samples and then computed."""

    metric: Any

    def __call__(self, outputs: Tensor, targets: Tensor) -> float | None:
        """Return the metric of all samples together; None where they do not define it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.metric.reset()
            self.metric.update(outputs, targets)
            return _read_number(self.metric.compute())


@dataclass(frozen=True, kw_only=True)
class Scorer(OwnMetric):
    """A scorer of scikit-learn, of predictions and probabilities of all samples; a higher score is better."""

    tasks: ClassVar[tuple[str, ...]] = ("classification", "multilabel", "regression")

    @property
    @override
    def described(self) -> str:
        return self.text

    @override
    def call(self, task: Task, outputs: Tensor, targets: Tensor) -> float | None:
        from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

        of_numbers = isinstance(task, Regression)
        chosen = task.predict(outputs).numpy().squeeze(axis=1 if of_numbers and outputs.shape[1] == 1 else ())
        share = outputs.double().sigmoid() if targets.ndim == 2 else outputs.double().softmax(dim=1)
        odds = outputs.double() if targets.ndim == 2 else find_log_odds(outputs)

        class Answers(RegressorMixin if of_numbers else ClassifierMixin, BaseEstimator):  # type: ignore[misc]
            """A fitted model whose answers are known."""

            classes_ = [np.arange(2)] * outputs.shape[1] if targets.ndim == 2 else np.arange(outputs.shape[1])

            def __sklearn_is_fitted__(self) -> bool:
                return True

            def predict(self, _: object) -> NDArray[Any]:
                return chosen

            def predict_proba(self, _: object) -> NDArray[Any]:
                return share.numpy()

            def decision_function(self, _: object) -> NDArray[Any]:  # ranks, where probabilities would tie
                return odds.numpy()[:, 1] if targets.ndim == 1 and odds.shape[1] == 2 else odds.numpy()

        truth = targets.numpy().squeeze(axis=1) if chosen.ndim < targets.ndim else targets.numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _read_number(self.function(Answers(), np.empty((len(outputs), 1)), truth))


def find_of_library(library: str, name: str) -> Callable[..., Any]:
    """Return what makes the metric ``name`` of one of :data:`LIBRARIES`.

    Raises :class:`UsageError` if there is none, or the package is absent.
    """
    if library == "sklearn":
        from sklearn.metrics import get_scorer, get_scorer_names

        if name not in get_scorer_names():
            raise unknown_name("scorer of scikit-learn", name, get_scorer_names())
        return partial(Scorer, function=get_scorer(name), text=f"sklearn:{name}")
    try:
        modules = [import_module("torchmetrics"), import_module("torchmetrics.classification")]
    except ModuleNotFoundError as error:
        raise UsageError(f"metric 'torchmetrics:{name}' needs the package: pip install torchmetrics") from error
    kind = next((found for module in modules if (found := getattr(module, name, None)) is not None), None)
    if kind is None:
        known = sorted({each for module in modules for each in dir(module) if isinstance(getattr(module, each), type)})
        raise unknown_name("metric of torchmetrics", name, known)
    return kind  # type: ignore[no-any-return]


def take_direction(function: Callable[..., Any], own: bool) -> Callable[..., Any]:
    """Return what makes a :class:`Given` of a user's function, or of an instance of a class, and its direction."""
    if not own:
        return function

    def make(*values: Any, lower_is_better: bool | None = None, **options: Any) -> Given:
        return Given(function(*values, **options), lower_is_better)

    def take(*, lower_is_better: bool | None = None) -> Given:
        return Given(function, lower_is_better)

    if not isinstance(function, type) and getattr(function, "func", None) is not Scorer:
        return take
    with suppress(ValueError):  # a class that is written in C shows no arguments
        arguments = list(inspect.signature(function).parameters.values()) if isinstance(function, type) else []
        last = len(arguments) - any(each.kind is each.VAR_KEYWORD for each in arguments)
        direction = inspect.signature(take).parameters.values()
        make.__signature__ = inspect.Signature([*arguments[:last], *direction, *arguments[last:]])  # type: ignore[attr-defined]
    return make


def _read_number(value: Any) -> float | None:
    """Return a number; None for NaN, which libraries return if the samples do not define a metric."""
    number = float(value)
    return None if math.isnan(number) else number
