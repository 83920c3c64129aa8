"""Local optimizers over plain states, which match ``torch.optim`` step for step, and torch's own over such states.

``update_`` works in place; the kernel's pure step calls it on copies.
"""

from __future__ import annotations

import inspect
import pickle
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd as take_sgd_step
from typing_extensions import override

from ..config.catalog import Catalog
from ..utils.errors import Ref, UsageError, require
from ..utils.state import State, clone, entries_under
from ..utils.user_code import describe_error
from .schedule import Schedule, by_name, write_call


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
        require(0 <= self.lr < 1e30, f"learning rate lr={self.lr:g}: it must be a number of 0 or more, say 0.01")
        require(self.weight_decay >= 0, f"weight_decay={self.weight_decay:g} is negative: it must be 0 or more")

    def lr_in_round(self, round: int) -> float:
        """Return the learning rate in round ``round``, counted from 0."""
        return self.schedule.rate(self.lr, round)

    def check(self, params: State, rounds: int) -> None:
        """Raise :class:`UsageError` if the optimizer cannot update parameters like ``params`` for ``rounds`` rounds."""
        self.schedule.check(self.lr, rounds)

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
        require(0 <= self.momentum < 1, f"momentum={self.momentum:g}: it must lie in [0, 1)")
        require(not self.nesterov or self.momentum > 0, "nesterov needs a momentum above 0: set momentum, say 0.9")

    @override
    def init(self, params: State) -> State:
        return {f"momentum/{name}": torch.zeros_like(p) for name, p in params.items()} if self.momentum else {}

    @override
    def update_(self, params: State, grads: State, state: State, lr: float) -> None:
        if not (self.momentum or self.weight_decay or may_join(params.values())):
            for name, param in params.items():
                param.sub_(grads[name], alpha=lr)
            return
        velocities = [state.get(f"momentum/{name}") for name in params]
        take_sgd_step(
            [*params.values()], [grads[name] for name in params], velocities,
            foreach=may_join(params.values()), fused=False, weight_decay=self.weight_decay, momentum=self.momentum,
            lr=lr, dampening=0.0, nesterov=self.nesterov, maximize=False,
        )  # fmt: skip


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
            require(0 <= beta < 1, f"{name}={beta:g}: it must lie in [0, 1)")
        require(self.eps > 0, f"eps={self.eps:g}: it must be above 0")

    @override
    def init(self, params: State) -> State:
        zeros = {f"{kind}/{name}": torch.zeros_like(p) for kind in ("mean", "square") for name, p in params.items()}
        counts = {f"count/{name}": torch.zeros((), dtype=torch.float64, device=p.device) for name, p in params.items()}
        return {**counts, **zeros}

    @override
    def update_(self, params: State, grads: State, state: State, lr: float) -> None:
        if may_join(params.values()):
            self._join_(params, grads, state, lr)
            return
        means, squares = entries_under("mean", state), entries_under("square", state)
        for name, param in params.items():
            grad, count = grads[name], state[f"count/{name}"].add_(1)
            correction1, correction2 = 1 - self.beta1**count, 1 - self.beta2**count
            mean = means[name].mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
            square = squares[name].mul_(self.beta2).add_(grad * grad, alpha=1 - self.beta2)
            param.mul_(1 - lr * self.weight_decay)
            param.sub_(mean / ((square / correction2).sqrt() + self.eps) * (lr / correction1))

    def _join_(self, params: State, grads: State, state: State, lr: float) -> None:
        """Take the step of :meth:`update_` in one operation for all parameters each, with the same bits."""
        now, slopes = [*params.values()], [grads[name] for name in params]
        means, squares, counts = ([state[f"{kind}/{name}"] for name in params] for kind in ("mean", "square", "count"))
        torch._foreach_add_(counts, 1)
        powers = (torch._foreach_pow(beta, counts) for beta in (self.beta1, self.beta2))
        corrections = [torch._foreach_add(torch._foreach_neg(power), 1) for power in powers]
        moments = (means, self.beta1, slopes), (squares, self.beta2, torch._foreach_mul(slopes, slopes))
        for averages, beta, terms in moments:
            torch._foreach_mul_(averages, beta)
            torch._foreach_add_(averages, terms, alpha=1 - beta)
        torch._foreach_mul_(now, 1 - lr * self.weight_decay)
        roots = torch._foreach_sqrt(torch._foreach_div(squares, corrections[1]))
        torch._foreach_add_(roots, self.eps)
        rates = torch._foreach_mul(torch._foreach_reciprocal(corrections[0]), lr)
        torch._foreach_sub_(now, torch._foreach_mul(torch._foreach_div(means, roots), rates))


def may_join(tensors: Iterable[Tensor]) -> bool:
    """Return whether one operation may change all ``tensors``: on a device where each call costs more than its memory.

    On a CPU, joined operations take as long. ``torch.vmap`` has no rule for them.
    """
    each = list(tensors)
    return any(not one.is_cpu for one in each) and not any(map(torch._C._functorch.is_batchedtensor, each))


NUMBERS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Types of numbers in the state of torch's optimizers, and the tensors in which they are kept."""


@cache
def _list_common_attributes() -> frozenset[str]:
    """Return the attributes that every optimizer of torch has; making one loads torch's compiler, which takes time."""
    return frozenset(vars(torch.optim.Optimizer([torch.zeros(1)], {})))


@dataclass(frozen=True, kw_only=True, repr=False)
class TorchOptimizer(Optimizer):
    """An optimizer of torch, or a subclass, whose state consists of tensors and numbers for each parameter.

    Each step runs torch's own code on an optimizer that is made anew from its settings and the state, so that all that
    lasts from step to step is in the state: ``{"square_avg/conv.weight": tensor}``. Numbers are kept as tensors with
    their type in the name, ``"step:int/conv.weight"``.

    ``settings``: its parameter group's, without ``lr`` and ``weight_decay``. ``attributes``: attributes that
    a subclass sets, which no step may change. ``decays``: whether it has ``weight_decay``.
    """

    kind: type[torch.optim.Optimizer]
    settings: Mapping[str, Any]
    attributes: Mapping[str, Any]
    decays: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.decays or not self.weight_decay,
            f"optimizer={self} has no weight_decay: leave weight_decay={self.weight_decay:g} out",
        )

    @override
    def init(self, params: State) -> State:
        return {}

    @override
    def update_(self, params: State, grads: State, state: State, lr: float) -> None:
        self._step(params, grads, state, lr)

    @override
    def check(self, params: State, rounds: int) -> None:
        super().check(params, rounds)
        trial, state = clone(params), State()
        before = {name: _dump(value) for name, value in {**self._group(self.lr), **self.attributes}.items()}
        try:
            for _ in range(2):
                made = self._step(trial, {name: torch.ones_like(p) for name, p in trial.items()}, state, self.lr)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"optimizer={self} cannot update this model's parameters: {describe_error(error)}. Choose another "
                "optimizer, for example sgd"
            ).about("optimizer") from error
        common = _list_common_attributes()
        after = {**made.param_groups[0], **{name: value for name, value in vars(made).items() if name not in common}}
        changed = [name for name, value in after.items() if name != "params" and _dump(value) != before.get(name)]
        if changed:
            raise UsageError(
                f"optimizer={self} changes {changed[0]!r} as it steps, outside of its state of each parameter, where "
                "clients would share it: keep it in self.state[parameter]"
            ).about("optimizer")

    def _group(self, lr: float) -> dict[str, Any]:
        return {**self.settings, "lr": lr, **({"weight_decay": self.weight_decay} if self.decays else {})}

    def _step(self, params: State, grads: State, state: State, lr: float) -> torch.optim.Optimizer:
        """Take the step of :meth:`update_`, and return the optimizer of torch that took it."""
        group = self._group(lr)
        made = self.kind.__new__(self.kind)
        groups = [{**group, "params": list(params.values())}]
        restored = {**self.attributes, "defaults": dict(group), "state": defaultdict(dict), "param_groups": groups}
        torch.optim.Optimizer.__setstate__(made, restored)
        for entry in list(state):
            key, _, name = entry.partition("/")
            if name in params:
                key, value = self._read(key, state.pop(entry))
                made.state[params[name]][key] = value
        for name, param in params.items():
            param.grad = grads[name]
        made.step()
        for name, param in params.items():
            param.grad = None
            for key, value in made.state.pop(param, {}).items():
                key, state_value = self._write(key, value)
                state[f"{key}/{name}"] = state_value
        if made.state:
            raise UsageError(
                f"optimizer={self} keeps state that belongs to no parameter: keep it in self.state[parameter]"
            ).about("optimizer")
        return made

    def _read(self, key: str, value: Tensor) -> tuple[str, Any]:
        """Return an entry of torch's state from its form in a :data:`State`."""
        key, _, kind = key.partition(":")
        if kind:
            return key, None if kind == "none" else value.item()
        on_device = self.settings.get("capturable") or self.settings.get("fused")
        return key, value.cpu() if key == "step" and not on_device else value  # as load_state_dict of torch

    def _write(self, key: object, value: Any) -> tuple[str, Tensor]:
        """Return an entry of a :data:`State` from its form in torch's state."""
        if not isinstance(key, str) or {"/", ":"} & set(key):
            raise UsageError(f"optimizer={self} has a state named {key!r}: name it by letters").about("optimizer")
        if isinstance(value, Tensor):
            return key, value.detach()
        if value is None:
            return f"{key}:none", torch.zeros(0)
        if type(value) not in NUMBERS:
            raise UsageError(
                f"optimizer={self} keeps a {type(value).__name__} in its state {key!r}: keep tensors and numbers, "
                "which checkpoints store"
            ).about("optimizer")
        return f"{key}:{type(value).__name__}", torch.tensor(value, dtype=NUMBERS[type(value)])

    @property
    def text(self) -> str:
        """The expression of the optimizer, without its learning rate and schedule."""
        return write_call(self.kind, self._list_changed())

    def _list_changed(self) -> dict[str, Any]:
        """Return the arguments other than the defaults."""
        usual = inspect.signature(self.kind).parameters
        arguments = {**self.settings, **({"weight_decay": self.weight_decay} if self.decays else {})}
        arguments |= {name: value for name, value in self.attributes.items() if name in usual}
        return {
            name: value
            for name, value in arguments.items()
            if name not in usual or isinstance(value, Tensor) or usual[name].default != value
        } | ({"keep": True} if self.keep else {})

    def __repr__(self) -> str:
        schedule = {} if self.schedule == Schedule() else {"schedule": self.schedule}
        return write_call(self.kind, {"lr": self.lr} | self._list_changed() | schedule)


def _dump(value: object) -> object:
    """Return bytes that are equal for equal values, or ``value`` if it has none, such as a function of a notebook."""
    try:
        return pickle.dumps(value)
    except Exception:  # any type may refuse in its own way
        return value


NEUTRAL: Mapping[Any, Mapping[str, Any]] = {
    torch.optim.SGD: {"dampening": 0},
    torch.optim.Adam: {"amsgrad": False, "weight_decay": 0, "decoupled_weight_decay": False},
    torch.optim.AdamW: {"amsgrad": False, "decoupled_weight_decay": True},
}
"""Arguments that :class:`SGD` and :class:`AdamW` lack, and the values at which they equal torch's."""
IMPLEMENTATION = {"maximize": False, "foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Such arguments that all of torch's optimizers have."""


def as_optimizer(optimizer: object, lr: float, schedule: Schedule | None = None) -> Optimizer:
    """Convert a torch optimizer to an :class:`Optimizer` that takes identical steps.

    Args:
        optimizer: An :class:`Optimizer`, which is returned unchanged; or an optimizer of torch or a subclass: the
            class, a ``functools.partial`` of it with arguments (also ``keep``), or an instance over any parameters.
            ``torch.optim.SGD``, ``Adam`` and ``AdamW`` become :class:`SGD` or :class:`AdamW` where these have all their
            arguments, so that every engine runs them; others become a :class:`TorchOptimizer`.
        lr: Learning rate of a class, or of a partial without one; other arguments keep their defaults.
        schedule: Schedule of the learning rate; None: constant.

    Raises:
        UsageError: It is no optimizer, it evaluates the loss again in a step (``LBFGS``), or arguments do not fit.

    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    kind: Any = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    kind, arguments = (kind.func, dict(kind.keywords)) if isinstance(kind, partial) else (kind, {})
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise UsageError(
            "{} is unknown: allowed are sgd and adamw, fedshift.SGD(...) and fedshift.AdamW(...), and an optimizer of "
            "torch.optim or a subclass: the class, a functools.partial of it, or an instance",
            Ref(optimizer=optimizer),
        )
    name = kind.__name__
    if isinstance(optimizer, partial) and optimizer.args:
        raise UsageError(f"optimizer={name}: give arguments by name: functools.partial({name}, lr=0.01)")
    keep = "keep" not in inspect.signature(kind).parameters and bool(arguments.pop("keep", False))
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"optimizer={name} evaluates the loss several times in a step (its closure), but here a step follows one "
            "gradient, which a method may have changed: choose an optimizer whose step takes no closure"
        )
    try:
        instance: Any = (
            optimizer if isinstance(optimizer, kind) else kind([torch.zeros(1, 1)], **{"lr": lr, **arguments})
        )
        groups = instance.param_groups
    except Exception as error:
        raise UsageError(f"optimizer={name}: {describe_error(error)}") from error
    if len(groups) > 1:
        raise UsageError(
            f"optimizer={name} has {len(groups)} parameter groups: give it one group, since all parameters are trained "
            "with the same settings"
        )
    if "initial_lr" in groups[0]:
        raise UsageError(
            f"optimizer={name} has a scheduler of torch, which is not called here: give a new optimizer, and the "
            "scheduler's class with its arguments as schedule"
        )
    if "lr" not in groups[0]:
        raise UsageError(f"optimizer={name} has no setting lr, which schedules change: name its learning rate lr")
    made = _translate(kind, groups[0], schedule or Schedule()) or _adopt(instance, schedule or Schedule())
    return replace(made, keep=keep)


def _translate(kind: Any, settings: Mapping[str, Any], schedule: Schedule) -> Optimizer | None:
    """Return the :class:`SGD` or :class:`AdamW` that equals torch's ``kind`` with ``settings``; None if none does."""
    if kind not in NEUTRAL:
        return None
    neutral = {**IMPLEMENTATION, **NEUTRAL[kind]}
    if any(settings.get(argument, value) != value for argument, value in neutral.items()):
        return None
    common: dict[str, Any] = {
        "lr": float(settings["lr"]), "weight_decay": float(settings["weight_decay"]), "schedule": schedule,
    }  # fmt: skip
    if "betas" not in settings:
        return SGD(momentum=float(settings["momentum"]), nesterov=settings["nesterov"], **common)
    beta1, beta2 = map(float, settings["betas"])
    return AdamW(beta1=beta1, beta2=beta2, eps=float(settings["eps"]), **common)


def _adopt(instance: torch.optim.Optimizer, schedule: Schedule) -> TorchOptimizer:
    """Return the :class:`TorchOptimizer` with the settings of ``instance``."""
    name, group = type(instance).__name__, dict(instance.param_groups[0])
    attributes = {key: value for key, value in vars(instance).items() if key not in _list_common_attributes()}
    for key, value in attributes.items():
        if isinstance(value, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer={name} keeps another optimizer in {key!r}, which updates parameters that it was made with: "
                "write one whose step updates the parameters in self.param_groups"
            )
    if instance._optimizer_step_pre_hooks or instance._optimizer_step_post_hooks:
        raise UsageError(f"optimizer={name} has step hooks, which are not called here: put their work into its step")
    decays = "weight_decay" in group
    own = {key: value for key, value in group.items() if key not in ("params", "lr", "weight_decay")}
    return TorchOptimizer(
        lr=float(group["lr"]), weight_decay=float(group["weight_decay"]) if decays else 0.0, schedule=schedule,
        kind=type(instance), settings=own, attributes=attributes, decays=decays,
    )  # fmt: skip


def _accept(optimizer: object, _text: str | None) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "{} is unknown: allowed are sgd and adamw, fedshift.SGD(...) and fedshift.AdamW(...), and an optimizer of "
            "torch.optim or a subclass, package.module:Class(name=value)",
            Ref(optimizer=optimizer),
        )
    return optimizer


def _adapt(optimizer: Callable[..., Any], _own: bool) -> Callable[..., Any]:
    """Return a factory of optimizers from an expression's arguments, for a class of torch's all but the parameters."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        return optimizer
    kind: Any = optimizer

    def make(*, lr: float, schedule: Schedule, keep: bool = False, **arguments: Any) -> Optimizer:
        return as_optimizer(partial(kind, lr=lr, keep=keep, **arguments), lr, schedule)

    given = inspect.signature(make).parameters
    added = [given[name] for name in ("lr", "schedule", "keep")]
    own = [each for each in by_name(optimizer).parameters.values() if each.name not in given]
    make.__signature__ = inspect.Signature([*added, *own])  # type: ignore[attr-defined]
    return make


def _spell(optimizer: Optimizer) -> str | None:
    return optimizer.text if isinstance(optimizer, TorchOptimizer) else ""


OPTIMIZERS = Catalog[Optimizer](
    "optimizer", {"sgd": SGD, "adamw": AdamW}, _accept, adapt=_adapt, spell=_spell, settings=("lr", "schedule")
)
"""Local optimizers; the learning rate ``lr`` and its ``schedule`` are added by the caller."""
