"""Local optimizers over plain states: SGD and AdamW, step for step as ``torch.optim``, and torch's own classes.

In come the learning rate of a round and, by name, parameters, their gradients and the optimizer's state; parameters and
state are changed in place.
"""

from __future__ import annotations

import inspect
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd as take_sgd_step
from typing_extensions import override

from ..config.catalog import Catalog
from ..utils.errors import Ref, UsageError, require
from ..utils.state import State, clone
from ..utils.user_code import describe_error
from .schedule import CONSTANT, Schedule, describe_call, spell_call, split_partial


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """A local optimizer.

    ``lr``: learning rate, multiplied by ``schedule``. ``keep``: whether the client keeps the optimizer's state between
    rounds; by default it is reset each round, as in the papers.
    """

    lr: float
    weight_decay: float = 0.0
    schedule: Schedule = CONSTANT
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

    def init(self, params: State) -> State:
        """Return the state before the first step."""
        return {}

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
        take_sgd_step(
            [*params.values()], [grads[name] for name in params], [state.get(f"momentum/{name}") for name in params],
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
        for name, param in params.items():  # torch's own step reads counts as numbers, which lanes of torch.vmap lack
            grad, count = grads[name], state[f"count/{name}"].add_(1)
            mean = state[f"mean/{name}"].mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
            square = state[f"square/{name}"].mul_(self.beta2).add_(grad * grad, alpha=1 - self.beta2)
            param.mul_(1 - lr * self.weight_decay)
            root = (square / (1 - self.beta2**count)).sqrt() + self.eps
            param.sub_(mean / root * (lr / (1 - self.beta1**count)))


def may_join(tensors: Iterable[Tensor]) -> bool:
    """Return whether one operation may change all ``tensors``: on a device where each call costs more than its memory.

    On a CPU, joined operations take as long. ``torch.vmap`` has no rule for them.
    """
    joined = list(tensors)
    return any(not one.is_cpu for one in joined) and not any(map(torch._C._functorch.is_batchedtensor, joined))


@dataclass(frozen=True, kw_only=True, repr=False)
class TorchOptimizer(Optimizer):
    """An optimizer of torch, or a subclass, whose state consists of tensors and numbers for each parameter.

    Each step runs torch's own code on an optimizer that is made anew of class ``function`` with ``arguments``, so that
    all that lasts from step to step is in the state: ``{"square_avg/conv.weight": tensor}``. Numbers and None are kept
    as tensors, ``"step:number/conv.weight"``.
    """

    function: Any
    arguments: Mapping[str, Any]

    @override
    def update_(self, params: State, grads: State, state: State, lr: float) -> None:
        if params:
            self._step(params, grads, state, lr)

    @override
    def check(self, params: State, rounds: int) -> None:
        super().check(params, rounds)
        params, state = clone(params), State()
        try:
            for _ in range(2):
                self._step(params, {name: torch.ones_like(p) for name, p in params.items()}, state, self.lr, check=True)
        except UsageError as error:
            raise error.about("optimizer") from None
        except Exception as error:
            raise UsageError(
                f"optimizer={self} cannot update this model's parameters: {describe_error(error)}. Choose another "
                "optimizer, for example sgd"
            ).about("optimizer") from error

    def _step(self, params: State, grads: State, state: State, lr: float, *, check: bool = False) -> None:
        made = self.function([*params.values()], lr=lr, **self._list_arguments())
        before = _list_settings(made) if check else {}
        for entry in list(state):
            key, _, name = entry.partition("/")
            if name in params:
                made.state[params[name]] |= _read(key, state.pop(entry), made.param_groups[0])
        for name, param in params.items():
            param.grad = grads[name]
        made.step()
        if check and (changed := _find_change(before, made)):
            raise UsageError(f"optimizer={self} changes {changed!r} as it steps, which clients would share: {KEEP}")
        for name, param in params.items():
            param.grad = None
            for key, value in made.state.pop(param, {}).items():
                state |= self._write(name, key, value)
        require(not made.state, f"optimizer={self} keeps state that belongs to no parameter: {KEEP}")

    def _write(self, name: str, key: Any, value: Any) -> State:
        """Return an entry of torch's state of the parameter ``name`` as one of a :data:`State`."""
        require(str(key).isidentifier(), f"optimizer={self} has a state named {key!r}: name it by letters")
        if isinstance(value, Tensor):
            return {f"{key}/{name}": value.detach()}
        kind = type(value)
        known = value is None or kind in (bool, int, float)
        require(known, f"optimizer={self} keeps a {kind.__name__} in its state {key!r}: {KEEP}")
        dtype = torch.float64 if kind is float else None
        return {f"{key}:number/{name}": torch.tensor([] if value is None else value, dtype=dtype)}

    def _list_arguments(self) -> dict[str, Any]:
        """Return the arguments other than the defaults, without learning rate and schedule."""
        usual = list_defaults(self.function).get("weight_decay", 0.0)
        return {**self.arguments, **({} if self.weight_decay == usual else {"weight_decay": self.weight_decay})}

    @property
    def text(self) -> str:
        """The expression of the optimizer, without its learning rate and schedule."""
        return describe_call(self.function, self._list_arguments() | ({"keep": True} if self.keep else {}))

    def __repr__(self) -> str:
        others = {"keep": (self.keep, False), "schedule": (self.schedule, CONSTANT)}
        changed = {name: value for name, (value, usual) in others.items() if value != usual}
        return describe_call(self.function, {"lr": self.lr} | self._list_arguments() | changed)


KEEP = "keep tensors and numbers in self.state[parameter], which checkpoints store"


def _read(key: str, value: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of torch's state from its form in a :data:`State`; ``group``: the optimizer's settings."""
    key, _, number = key.partition(":")
    if number:
        return {key: value.item() if value.numel() else None}
    on_device = group.get("capturable") or group.get("fused")
    return {key: value.cpu() if key == "step" and not on_device else value}  # as load_state_dict of torch


def _list_settings(made: torch.optim.Optimizer) -> dict[str, object]:
    """Return bytes of all that a torch optimizer holds other than parameters and their state, by name."""
    values = {**made.param_groups[0], **vars(made), "param_groups": len(made.param_groups)}
    return {name: _dump(value) for name, value in values.items() if name not in ("params", "state", "defaults")}


def _find_change(before: Mapping[str, object], made: torch.optim.Optimizer) -> str | None:
    return next((name for name, value in _list_settings(made).items() if before.get(name) != value), None)


def _dump(value: object) -> object:
    try:
        return pickle.dumps(value)
    except Exception:  # any type may refuse in its own way, such as a function of a notebook
        return value


@cache
def list_defaults(kind: Any) -> Mapping[str, Any]:
    """Return the defaults of the arguments of ``kind`` after its first, by name."""
    return {each.name: each.default for each in list(inspect.signature(kind).parameters.values())[1:]}


def as_optimizer(optimizer: object, lr: float, schedule: Schedule = CONSTANT) -> Optimizer:
    """Convert a torch optimizer to an :class:`Optimizer` that takes identical steps.

    Args:
        optimizer: An :class:`Optimizer`, which is returned unchanged; or an optimizer of torch or a subclass: the
            class, a ``functools.partial`` of it with arguments (also ``keep``), or an instance over any parameters.
            ``torch.optim.SGD``, ``Adam`` and ``AdamW`` become :class:`SGD` or :class:`AdamW` where these have all their
            arguments, so that every engine runs them; others become a :class:`TorchOptimizer`.
        lr: Learning rate of a class, or of a partial without one; other arguments keep their defaults.
        schedule: Schedule of the learning rate.

    Raises:
        UsageError: It is no optimizer, it evaluates the loss again in a step (``LBFGS``), or arguments do not fit.

    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    kind: Any
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, known = type(optimizer), {**vars(optimizer), **optimizer.param_groups[0]}
        arguments = {name: known[name] for name in list_defaults(kind) if name in known}
    else:
        kind, arguments = split_partial(optimizer)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        return _accept(optimizer, None)
    usual, arguments = list_defaults(kind), {"lr": lr, **arguments}  # type: ignore[arg-type]
    keep = "keep" not in usual and bool(arguments.pop("keep", False))
    _check_arguments(kind, arguments, optimizer)
    arguments = {name: value for name, value in arguments.items() if usual.get(name) != value or name == "lr"}
    return _translate(kind, arguments, schedule=schedule, keep=keep)


def _check_arguments(kind: Any, arguments: Mapping[str, Any], optimizer: object) -> None:
    """Raise :class:`UsageError` unless ``kind`` with ``arguments`` steps by one gradient, as ``optimizer`` would."""
    name, closure = kind.__name__, inspect.signature(kind.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise UsageError(
            f"optimizer={name} evaluates the loss several times in a step (its closure), but here a step follows one "
            "gradient, which a method may have changed: choose an optimizer whose step takes no closure"
        )
    try:
        settings = _list_settings(kind([torch.zeros(1, 1)], **arguments))
    except Exception as error:
        raise UsageError(f"optimizer={name}: {describe_error(error)}") from error
    if isinstance(optimizer, torch.optim.Optimizer) and (changed := _find_change(settings, optimizer)):
        raise UsageError(
            f"optimizer={name} differs in {changed!r} from a new one with its arguments: give the class with arguments "
            f"for all parameters, functools.partial({name}, lr=0.01), and a scheduler's class as schedule"
        )


def _translate(kind: Any, arguments: dict[str, Any], **common: Any) -> Optimizer:
    """Return the :class:`SGD` or :class:`AdamW` that equals torch's ``kind`` with ``arguments``, or torch's own."""
    usual = list_defaults(kind).get("weight_decay", 0.0)
    common |= {"lr": float(arguments.pop("lr")), "weight_decay": float(arguments.pop("weight_decay", usual))}
    if kind is torch.optim.SGD and arguments.keys() <= {"momentum", "nesterov"}:
        return SGD(**arguments, **common)
    decoupled = kind is torch.optim.AdamW or (kind is torch.optim.Adam and not common["weight_decay"])
    if decoupled and arguments.keys() <= {"betas", "eps"}:
        beta1, beta2 = map(float, arguments.pop("betas", (AdamW.beta1, AdamW.beta2)))
        return AdamW(beta1=beta1, beta2=beta2, **arguments, **common)
    return TorchOptimizer(function=kind, arguments=arguments, **common)


def _accept(optimizer: object, _text: str | None) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "{} is unknown: allowed are sgd and adamw, fedshift.SGD(...) and fedshift.AdamW(...), and an optimizer of "
            "torch.optim or a subclass: package.module:Class(name=value), and in Python also the class, a "
            "functools.partial of it with arguments by name, or an instance",
            Ref(optimizer=optimizer),
        )
    return optimizer


def _adapt(entry: Callable[..., Any], _user_defined: bool) -> Callable[..., Any]:
    """Return a factory of optimizers from an expression's arguments."""
    if not (isinstance(entry, type) and issubclass(entry, torch.optim.Optimizer)):
        return entry

    def make(*, lr: float, schedule: Schedule, **arguments: Any) -> Optimizer:
        return as_optimizer(partial(entry, **arguments), lr, schedule)

    return make


OPTIMIZERS = Catalog[Optimizer](
    "optimizer", {"sgd": SGD, "adamw": AdamW}, _accept, adapt=_adapt, spell=spell_call, settings=("lr", "schedule")
)
"""Local optimizers; the learning rate ``lr`` and its ``schedule`` are added by the caller."""
