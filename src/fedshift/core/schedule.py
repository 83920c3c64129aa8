"""Schedules of the learning rate by round: by name, as a function of the round, or by ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from ..config.catalog import Catalog
from ..utils.errors import Ref, UsageError
from ..utils.user_code import describe_error, find_import_path, identify_function


def require(holds: bool, message: str) -> None:
    """Raise :class:`UsageError` with ``message`` unless it ``holds``."""
    if not holds:
        raise UsageError(message)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor on the learning rate by round; the base class is constant."""

    def factor(self, round: int) -> float:
        """Return the factor in round ``round``, counted from 0."""
        return 1.0

    def rate(self, lr: float, round: int) -> float:
        """Return the learning rate in round ``round``, counted from 0, of an optimizer with learning rate ``lr``."""
        return lr * self.factor(round)

    def check(self, lr: float, rounds: int) -> None:
        """Raise :class:`UsageError` unless each of ``rounds`` rounds has a learning rate."""
        for round in range(rounds):
            rate = self.rate(lr, round)
            if not 0 <= rate < math.inf:
                raise UsageError(
                    f"schedule {self} gives the learning rate {rate} in round {round + 1}: it must be a number of 0 or "
                    "more"
                ).about("schedule")


@dataclass(frozen=True, kw_only=True)
class StepDecay(Schedule):
    """Multiplication by ``gamma`` every ``every`` rounds (``torch.optim.lr_scheduler.StepLR``)."""

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        require(self.every >= 1, f"schedule step: every={self.every} must be at least 1")

    @override
    def factor(self, round: int) -> float:
        return self.gamma ** (round // self.every)


@dataclass(frozen=True, kw_only=True)
class Exponential(Schedule):
    """Multiplication by ``gamma`` each round (``ExponentialLR``)."""

    gamma: float

    @override
    def factor(self, round: int) -> float:
        return self.gamma**round


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from 1 to ``floor`` over ``rounds`` rounds (``CosineAnnealingLR``), constant afterwards."""

    rounds: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        require(self.rounds >= 1, f"schedule cosine: rounds={self.rounds} must be at least 1")
        require(0 <= self.floor <= 1, f"schedule cosine: floor={self.floor} must lie between 0 and 1")

    @override
    def factor(self, round: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(round, self.rounds) / self.rounds)) / 2


@dataclass(frozen=True, kw_only=True, repr=False)
class FunctionSchedule(Schedule):
    """A function of the round, counted from 0, that returns the factor (``LambdaLR``)."""

    function: Callable[[int], float]

    @override
    def factor(self, round: int) -> float:
        try:
            return float(self.function(round))
        except Exception as error:
            raise UsageError(
                f"schedule {self} failed in round {round + 1}: {describe_error(error)}. Give a function of the round, "
                "counted from 0, that returns a factor on the learning rate"
            ).about("schedule") from error

    def __repr__(self) -> str:
        return identify_function(self.function)


@dataclass(frozen=True, kw_only=True, repr=False)
class TorchSchedule(Schedule):
    """A class of ``torch.optim.lr_scheduler``, or a subclass, with ``arguments``, stepped once after each round."""

    kind: type[LRScheduler]
    arguments: Mapping[str, Any]
    _rates: dict[float, list[float]] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        takes = inspect.signature(self.kind.step).parameters
        if "metrics" in takes and takes["metrics"].default is inspect.Parameter.empty:
            raise UsageError(
                f"schedule {self}: {self.kind.__name__} follows a measured value, but here the learning rate depends "
                "only on the round: choose another schedule"
            )

    @override
    def factor(self, round: int) -> float:
        return self.rate(1.0, round)

    @override
    def rate(self, lr: float, round: int) -> float:
        rates = self._rates.get(lr, [])
        if len(rates) <= round:
            rates = self._rates[lr] = self._list_rates(lr, 2 * round + 1)
        return rates[min(round, len(rates) - 1)]

    @override
    def check(self, lr: float, rounds: int) -> None:
        super().check(lr, rounds)
        if len(self._rates[lr]) < rounds:
            raise UsageError(
                f"schedule {self} ends after {len(self._rates[lr])} rounds, fewer than rounds={rounds}: give it as many"
            ).about("schedule", "rounds")

    def _list_rates(self, lr: float, rounds: int) -> list[float]:
        """Return the learning rates of at most ``rounds`` rounds, fewer if the schedule ends before."""
        optimizer = torch.optim.Optimizer([torch.zeros(1)], {"lr": lr})  # without momentum, which stays constant here
        try:
            scheduler = self.kind(optimizer, **self.arguments)
        except Exception as error:
            raise UsageError(f"schedule {self}: {describe_error(error)}").about("schedule") from error
        optimizer._opt_called = True  # type: ignore[attr-defined]  # no warning: the steps are taken elsewhere
        rates = [float(optimizer.param_groups[0]["lr"])]
        try:
            while len(rates) < rounds:
                scheduler.step()
                rates.append(float(optimizer.param_groups[0]["lr"]))
        except ValueError:  # it was made for fewer steps
            pass
        except Exception as error:
            raise UsageError(f"schedule {self} failed in round {len(rates) + 1}: {describe_error(error)}").about(
                "schedule"
            ) from error
        return rates

    def __repr__(self) -> str:
        return write_call(self.kind, self.arguments)


def by_name(kind: type) -> inspect.Signature:
    """Return the arguments of ``kind`` after its first, all given by name."""
    takes = list(inspect.signature(kind).parameters.values())[1:]
    return inspect.Signature(
        [each.replace(kind=each.KEYWORD_ONLY) if each.kind is each.POSITIONAL_OR_KEYWORD else each for each in takes]
    )


def write_call(kind: type, arguments: Mapping[str, Any]) -> str:
    """Return ``package.module:Class(name=value, ...)``, the same text in every process."""
    shown = {name: identify_function(value) if callable(value) else repr(value) for name, value in arguments.items()}
    given = ", ".join(f"{name}={value}" for name, value in shown.items())
    place = "torch.optim" if getattr(torch.optim, kind.__name__, None) is kind else kind.__module__
    return f"{place}:{kind.__qualname__}({given})" if given else f"{place}:{kind.__qualname__}"


def _accept(schedule: object, _text: str | None) -> Schedule:
    """Convert a function of the round, or a class of torch's schedulers or a partial of one, to a :class:`Schedule`."""
    kind, arguments = (schedule.func, schedule.keywords) if isinstance(schedule, partial) else (schedule, {})
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(kind, type) and issubclass(kind, LRScheduler):
        if isinstance(schedule, partial) and schedule.args:
            name = kind.__name__
            raise UsageError(f"schedule={name}: give arguments by name: functools.partial({name}, gamma=0.9)")
        return TorchSchedule(kind=kind, arguments=arguments)
    if callable(schedule) and not isinstance(kind, type):
        return FunctionSchedule(function=schedule)
    raise UsageError(
        "{} is not a schedule: give a text such as 'cosine(floor=0.1)', fedshift.Cosine, StepDecay or Exponential, a "
        "function of the round that returns a factor, or a class of torch.optim.lr_scheduler with its arguments in a "
        "functools.partial, without an optimizer",
        Ref(schedule=schedule),
    )


def _adapt(schedule: Callable[..., Any], user_defined: bool) -> Callable[..., Any]:
    """Return a factory of schedules from an expression's arguments, which are bound to a user's function."""
    if isinstance(schedule, type) and issubclass(schedule, LRScheduler):

        def make(**arguments: Any) -> TorchSchedule:
            return TorchSchedule(kind=schedule, arguments=arguments)

        make.__signature__ = by_name(schedule)  # type: ignore[attr-defined]
        return make
    if not user_defined or isinstance(schedule, type):
        return schedule
    return lambda **arguments: partial(schedule, **arguments) if arguments else schedule


def _spell(schedule: Schedule) -> str | None:
    if isinstance(schedule, FunctionSchedule):
        function: Any = schedule.function
        arguments = {}
        if isinstance(function, partial) and not function.args:
            function, arguments = function.func, function.keywords
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        path = find_import_path(function)
        return f"{path}({given})" if path and given else path
    return str(schedule) if isinstance(schedule, TorchSchedule) else ""


SCHEDULES = Catalog[Schedule](
    "schedule",
    {"constant": Schedule, "cosine": Cosine, "step": StepDecay, "exponential": Exponential},
    _accept,
    adapt=_adapt,
    spell=_spell,
)
"""Schedules of the learning rate; the number of ``rounds`` is added by the caller."""
