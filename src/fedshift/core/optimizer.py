"""Local optimizers over plain states, which match ``torch.optim`` step for step, and learning-rate schedules by round.

``update_`` works in place; the kernel's pure step calls it on copies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from ..config.catalog import Catalog
from ..utils.errors import Ref, UsageError
from ..utils.state import State, entries_under


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor on the learning rate by round; the base class is constant."""

    def factor(self, round: int) -> float:
        """Return the factor in round ``round``, counted from 0."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class StepDecay(Schedule):
    """Multiplication by ``gamma`` every ``every`` rounds (``torch.optim.lr_scheduler.StepLR``)."""

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _require(self.every >= 1, f"schedule step: every={self.every} must be at least 1")

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
        _require(self.rounds >= 1, f"schedule cosine: rounds={self.rounds} must be at least 1")
        _require(0 <= self.floor <= 1, f"schedule cosine: floor={self.floor} must lie between 0 and 1")

    @override
    def factor(self, round: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(round, self.rounds) / self.rounds)) / 2


def _accept_schedule(schedule: object, _text: str | None) -> Schedule:
    if not isinstance(schedule, Schedule):
        raise UsageError(
            "{} is not a schedule: give a text such as 'cosine(floor=0.1)', or fedshift.Cosine, StepDecay or "
            "Exponential",
            Ref(schedule=schedule),
        )
    return schedule


SCHEDULES = Catalog[Schedule](
    "schedule",
    {"constant": Schedule, "cosine": Cosine, "step": StepDecay, "exponential": Exponential},
    _accept_schedule,
)
"""Schedules of the learning rate; the number of ``rounds`` is added by the caller."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """A local optimizer.

    ``lr``: learning rate, multiplied by ``schedule``. ``keep``: whether the client keeps the optimizer's state between
    rounds; by default it is reset each round, as in the papers.
    """

    lr: float
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    keep: bool = False

    def __post_init__(self) -> None:
        _require(0 <= self.lr < 1e30, f"learning rate lr={self.lr:g}: it must be a number of 0 or more, say 0.01")
        _require(self.weight_decay >= 0, f"weight_decay={self.weight_decay:g} is negative: it must be 0 or more")

    def lr_in_round(self, round: int) -> float:
        """Return the learning rate in round ``round``, counted from 0."""
        return self.lr * self.schedule.factor(round)

    @abstractmethod
    def init(self, params: State) -> State:
        """Return the state before the first step."""

    @abstractmethod
    def update_(self, params: State, grads: State, state: State, lr: float) -> None:
        """Take one step, updating ``params`` and ``state`` in place."""


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's variant and L2 weight decay, as ``torch.optim.SGD``."""

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.momentum < 1, f"momentum={self.momentum:g}: it must lie in [0, 1)")
        _require(not self.nesterov or self.momentum > 0, "nesterov needs a momentum above 0: set momentum, say 0.9")

    @override
    def init(self, params: State) -> State:
        return {f"momentum/{name}": torch.zeros_like(p) for name, p in params.items()} if self.momentum else {}

    @override
    def update_(self, params: State, grads: State, state: State, lr: float) -> None:
        for name, param in params.items():
            grad = grads[name]
            if self.weight_decay:
                grad = grad.add(param, alpha=self.weight_decay)
            if self.momentum:
                velocity = state[f"momentum/{name}"].mul_(self.momentum).add_(grad)
                grad = grad.add(velocity, alpha=self.momentum) if self.nesterov else velocity
            param.sub_(grad, alpha=lr)


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101), as ``torch.optim.AdamW``."""

    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            _require(0 <= beta < 1, f"{name}={beta:g}: it must lie in [0, 1)")
        _require(self.eps > 0, f"eps={self.eps:g}: it must be above 0")

    @override
    def init(self, params: State) -> State:
        zeros = {f"{kind}/{name}": torch.zeros_like(p) for kind in ("mean", "square") for name, p in params.items()}
        counts = {f"count/{name}": torch.zeros((), dtype=torch.float64, device=p.device) for name, p in params.items()}
        return {**counts, **zeros}

    @override
    def update_(self, params: State, grads: State, state: State, lr: float) -> None:
        means, squares = entries_under("mean", state), entries_under("square", state)
        for name, param in params.items():
            grad, count = grads[name], state[f"count/{name}"].add_(1)
            correction1, correction2 = 1 - self.beta1**count, 1 - self.beta2**count
            mean = means[name].mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
            square = squares[name].mul_(self.beta2).add_(grad * grad, alpha=1 - self.beta2)
            param.mul_(1 - lr * self.weight_decay)
            param.sub_(mean / ((square / correction2).sqrt() + self.eps) * (lr / correction1))


def _accept_optimizer(optimizer: object, _text: str | None) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "{} is unknown: allowed are sgd and adamw, fedshift.SGD(...) and fedshift.AdamW(...)",
            Ref(optimizer=optimizer),
        )
    return optimizer


OPTIMIZERS = Catalog[Optimizer](
    "optimizer",
    {"sgd": SGD, "adamw": AdamW},
    _accept_optimizer,
    settings=("lr", "schedule"),
)
"""Local optimizers; the learning rate ``lr`` and its ``schedule`` are added by the caller."""


NEUTRAL: Mapping[Any, Mapping[str, Any]] = {
    torch.optim.SGD: {"dampening": 0},
    torch.optim.Adam: {"amsgrad": False, "weight_decay": 0, "decoupled_weight_decay": False},
    torch.optim.AdamW: {"amsgrad": False, "decoupled_weight_decay": True},
}
"""Arguments of torch's optimizers without a counterpart here, with their only supported value."""
IMPLEMENTATION: Mapping[str, Any] = {
    "maximize": False,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}
"""Unsupported arguments common to all of torch's optimizers, with their only supported value."""


def as_optimizer(optimizer: object, lr: float, schedule: Schedule | None = None) -> Optimizer:
    """Convert a torch optimizer to an :class:`Optimizer` that takes identical steps.

    Args:
        optimizer: An :class:`Optimizer`, which is returned unchanged; or ``torch.optim.SGD``, ``Adam`` or ``AdamW``:
            the class, a ``functools.partial`` of it with arguments, or an instance over any parameters.
        lr: Learning rate of a class, or of a partial without one; other arguments keep torch's defaults.
        schedule: Schedule of the learning rate; None: constant.

    Raises:
        UsageError: The optimizer is not supported, or an argument has no counterpart here.

    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    kind: Any = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    kind, arguments = (kind.func, kind.keywords) if isinstance(kind, partial) else (kind, {})
    if not isinstance(kind, type) or kind not in NEUTRAL:
        raise UsageError(
            f"optimizer={getattr(kind, '__name__', repr(kind))} is unknown: allowed are sgd and adamw, "
            "fedshift.SGD(...) and fedshift.AdamW(...), and torch.optim's SGD, Adam (without weight decay) and AdamW: "
            "the class, a functools.partial of it, or an instance"
        )
    name = f"torch.optim.{kind.__name__}"
    if isinstance(optimizer, partial) and optimizer.args:
        raise UsageError(f"optimizer={name}: give arguments by name: functools.partial({name}, lr=0.01)")
    try:
        instance: Any = optimizer if isinstance(optimizer, kind) else kind([torch.zeros(1)], **{"lr": lr, **arguments})
        groups = instance.param_groups
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer={name}: {error}") from error
    if len(groups) > 1:
        raise UsageError(
            f"optimizer={name} has {len(groups)} parameter groups: give it one group, since all parameters are trained "
            "with the same settings"
        )
    return _translate(name, groups[0], schedule or Schedule())


def _translate(name: str, settings: Mapping[str, Any], schedule: Schedule) -> Optimizer:
    """Convert torch's optimizer ``name``; raise :class:`UsageError` for an argument without a counterpart."""
    for argument, neutral in {**IMPLEMENTATION, **NEUTRAL[getattr(torch.optim, name.rpartition(".")[2])]}.items():
        value = settings.get(argument, neutral)
        if value != neutral:
            instead = "use torch.optim.AdamW, or leave it out" if argument == "weight_decay" else "leave it out"
            raise UsageError(f"optimizer={name}({argument}={value!r}): {argument} has no counterpart here: {instead}")
    common: dict[str, Any] = {
        "lr": float(settings["lr"]), "weight_decay": float(settings["weight_decay"]), "schedule": schedule,
    }  # fmt: skip
    if "betas" not in settings:
        return SGD(momentum=float(settings["momentum"]), nesterov=settings["nesterov"], **common)
    beta1, beta2 = map(float, settings["betas"])
    return AdamW(beta1=beta1, beta2=beta2, eps=float(settings["eps"]), **common)
