"""Schedules of the learning rate by round: by name, as a function of the round, or by ``torch.optim.lr_scheduler``.

In come an optimizer's learning rate and a round, counted from 0; out goes the learning rate of that round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from ..config.catalog import Catalog, bind_arguments
from ..utils.errors import Ref, UsageError, require
from ..utils.user_code import describe_error, find_import_path, identify_function


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate by round; the base class is constant."""

    def rate(self, lr: float, round: int) -> float:
        """Return the learning rate in round ``round``, counted from 0, of an optimizer with learning rate ``lr``."""
        return lr

    def check(self, lr: float, rounds: int) -> None:
        """Raise :class:`UsageError` unless each of ``rounds`` rounds has a learning rate."""
        for round in range(rounds):
            try:
                rate = self.rate(lr, round)
            except UsageError as error:
                raise error.about("schedule") from None
            except Exception as error:
                raise UsageError(
                    f"schedule {self} failed in round {round + 1}: {describe_error(error)}. Give a function of the "
                    "round, counted from 0, that returns a factor, or a scheduler of torch with its arguments"
                ).about("schedule") from error
            if not 0 <= rate < math.inf:
                what = f"schedule {self} gives the learning rate {rate} in round {round + 1}"
                raise UsageError(f"{what}: it must be a number of 0 or more").about("schedule")


CONSTANT = Schedule()


@dataclass(frozen=True, kw_only=True)
class StepDecay(Schedule):
    """Multiplication by ``gamma`` every ``every`` rounds (``torch.optim.lr_scheduler.StepLR``)."""

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        require(self.every >= 1, f"schedule step: every={self.every} must be at least 1")

    @override
    def rate(self, lr: float, round: int) -> float:
        return lr * self.gamma ** (round // self.every)


@dataclass(frozen=True, kw_only=True)
class Exponential(Schedule):
    """Multiplication by ``gamma`` each round (``ExponentialLR``)."""

    gamma: float

    @override
    def rate(self, lr: float, round: int) -> float:
        return lr * self.gamma**round


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from 1 to ``floor`` over ``rounds`` rounds (``CosineAnnealingLR``), constant afterwards."""

    rounds: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        require(self.rounds >= 1, f"schedule cosine: rounds={self.rounds} must be at least 1")
        require(0 <= self.floor <= 1, f"schedule cosine: floor={self.floor} must lie between 0 and 1")

    @override
    def rate(self, lr: float, round: int) -> float:
        angle = math.pi * min(round, self.rounds) / self.rounds
        return lr * (self.floor + (1 - self.floor) * (1 + math.cos(angle)) / 2)


@dataclass(frozen=True, kw_only=True, repr=False)
class CustomSchedule(Schedule):
    """A function of the round that returns the factor, or a scheduler's class of torch, stepped after each round.

    ``arguments``: further arguments of the function or the class, by name.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    _rates: dict[float, list[float]] = field(default_factory=dict, init=False, compare=False)

    @override
    def rate(self, lr: float, round: int) -> float:
        if not isinstance(self.function, type):
            return lr * float(self.function(round, **self.arguments))
        if len(self._rates.get(lr, ())) <= round:
            self._rates[lr] = self._list_rates(lr, 2 * round + 1)
        if len(rates := self._rates[lr]) <= round:
            raise UsageError(f"schedule {self} ends after {len(rates)} rounds: give it as many as rounds")
        return rates[round]

    def _list_rates(self, lr: float, rounds: int) -> list[float]:
        """Return the learning rates of at most ``rounds`` rounds, fewer if the schedule ends before."""
        optimizer = torch.optim.Optimizer([torch.zeros(1)], {"lr": lr})  # without momentum, which stays constant here
        scheduler = self.function(optimizer, **self.arguments)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # no warning: the steps are taken elsewhere
        rates = [float(optimizer.param_groups[0]["lr"])]
        try:
            while len(rates) < rounds:
                scheduler.step()
                rates.append(float(optimizer.param_groups[0]["lr"]))
        except ValueError:  # it was made for fewer steps
            pass
        return rates

    def __repr__(self) -> str:
        return describe_call(self.function, self.arguments)


def split_partial(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return function and arguments of a ``functools.partial`` with arguments by name; other values have none."""
    return (value.func, value.keywords) if isinstance(value, partial) and not value.args else (value, {})


def describe_call(function: Any, arguments: Mapping[str, Any]) -> str:
    """Return ``package.module:name(argument=value, ...)``, the same text in every process."""
    texts = {name: identify_function(value) if callable(value) else repr(value) for name, value in arguments.items()}
    listed = ", ".join(f"{name}={text}" for name, text in texts.items())
    known = getattr(torch.optim, getattr(function, "__name__", ""), None) is function
    path = f"torch.optim:{function.__name__}" if known else identify_function(function)
    return f"{path}({listed})" if listed else path


def spell_call(value: Any) -> str | None:
    """Return the expression of a value with a ``function`` that another process can import; "" without a function."""
    function = getattr(value, "function", None)
    if function is None:
        return ""
    return getattr(value, "text", str(value)) if find_import_path(function) else None


def _accept(schedule: object, _text: str | None) -> Schedule:
    """Convert a function of the round, or a class of torch's schedulers or a partial of one, to a :class:`Schedule`."""
    if isinstance(schedule, Schedule):
        return schedule
    function, arguments = split_partial(schedule)
    if not callable(function) or (isinstance(function, type) and not issubclass(function, LRScheduler)):
        raise UsageError(
            "{} is not a schedule: give a text such as 'cosine(floor=0.1)', fedshift.Cosine, StepDecay or Exponential, "
            "a function of the round that returns a factor, or a class of torch.optim.lr_scheduler with its arguments "
            "in a functools.partial, without an optimizer",
            Ref(schedule=schedule),
        )
    if isinstance(function, type) and issubclass(function, ReduceLROnPlateau):
        why = "follows a measured value, but here the learning rate depends only on the round"
        raise UsageError(f"schedule ReduceLROnPlateau {why}: choose another schedule")
    return CustomSchedule(function=function, arguments=arguments)


def _adapt(schedule: Callable[..., Any], user_defined: bool) -> Callable[..., Any]:
    """Return a factory of schedules from an expression's arguments, which are bound to a user's function or class."""
    of_torch = isinstance(schedule, type) and issubclass(schedule, LRScheduler)
    return partial(partial, schedule) if of_torch else bind_arguments(schedule, user_defined)


KINDS = {"constant": Schedule, "cosine": Cosine, "step": StepDecay, "exponential": Exponential}
SCHEDULES = Catalog[Schedule]("schedule", KINDS, _accept, adapt=_adapt, spell=spell_call)
"""Schedules of the learning rate; the number of ``rounds`` is added by the caller."""
