"""Methods: compositions of orthogonal choices, each of which defaults to FedAvg's.

A module in ``fedshift.methods`` defines one function that changes only what differs from its base method; the decorator
:func:`method` adds a default base and a name. Methods therefore compose: ``fedbn(fedprox(mu=0.01))``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Self, cast, get_args

from torch import nn

from ..utils.errors import UsageError, unknown_name
from .aggregation import Aggregation, AggregationFunction, FunctionAggregation, Mean
from .gradient import GradientEstimator
from .rule import Rule
from .selection import Scope, Select, everything, nothing
from .server_optimizer import ServerOptimizer
from .work import Work

Surgery = Callable[[nn.Module], nn.Module]
"""A transformation of a copy of the model, before entries are named; its repr describes it."""


Weighting = Literal["auto", "samples", "used", "uniform"]
"""Weight by training samples (FedAvg's n_k), by the samples used in the round, or equally.

The first two differ if a round is not a whole number of epochs. ``auto``: ``used`` if the local work is a number of
batches (FedMMB's Algorithm 1), otherwise ``samples``.
"""
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """Freezes BatchNorm's running statistics after some rounds, and normalizes with them in training from then on.

    ``after``: the number of rounds before that, or a fraction (float in (0, 1)) of all rounds.
    """

    after: int | float

    def __post_init__(self) -> None:
        if not (0 < self.after < 1 if isinstance(self.after, float) else self.after >= 0):
            raise UsageError(f"switch={self.after}: give a number of rounds (an integer) or a fraction in (0, 1)")

    def rounds(self, total: int) -> int:
        """Return the number of rounds before freezing, of ``total`` rounds."""
        return self.after if isinstance(self.after, int) else int(self.after * total + 0.5)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method; with all defaults, FedAvg.

    Args:
        name: The expression that composed the method.
        typed: The expression as the user typed it, which :attr:`label` prefers over ``name``; None: not typed.
        surgery: Transformations of the network, in order.
        scope: Entries that clients load and send.
        trains: Parameters that the federation trains, among the network's trainable parameters.
        finetune: Number of rounds of local work on all parameters by which a client fine-tunes the loaded model before
            the model is evaluated or exported; federated training is unaffected.
        gradient: Combines the gradients of samples into a batch's, before any rule sees it; None: their mean.
        rules: Changes of local training and of persistent state, applied in order.
        freeze: When BatchNorm's statistics are frozen.
        aggregate: Combines the uploads.
        weighting: Weights of clients in an average, a :data:`Weighting`.
        server: Optimizer that steps along the aggregated change on the server.
        pooled: Whether all data are trained on together on one machine (the centralized upper baseline); with
            ``"scaled"``, the batch size is multiplied by the number of clients.
        work: Fields of ``Work`` that override the experiment's.
        optimizer: Fields of the local optimizer that override the experiment's.

    """

    name: str = "fedavg"
    typed: str | None = field(default=None, compare=False, repr=False)
    surgery: tuple[Surgery, ...] = ()
    scope: Scope = field(default_factory=Scope)
    trains: Select = everything
    finetune: int = 0
    gradient: GradientEstimator | None = None
    rules: tuple[Rule, ...] = ()
    freeze: Freeze | None = None
    aggregate: Aggregation = field(default_factory=Mean)
    weighting: Weighting = "auto"
    server: ServerOptimizer | None = None
    pooled: Literal[False, "same", "scaled"] = False
    work: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name in tables, folder names and messages; no computation depends on it."""
        return self.typed or self.name

    @property
    def text(self) -> str:
        """All choices in one line, which identifies the method."""
        parts: dict[str, Any] = {
            "begin with": None if self.scope.begin is nothing else self.scope.begin,
            "train": None if self.trains is everything else self.trains, "fine-tune": self.finetune,
            "gradient": self.gradient, "surgery": self.surgery, "rules": self.rules, "freeze": self.freeze,
            "server": self.server, "pooled": self.pooled, "work": dict(self.work), "optimizer": dict(self.optimizer),
        }  # fmt: skip
        return (
            f"{self.name}: load {self.scope.load}, send {self.scope.send}, "
            f"aggregate {self.aggregate} by {self.weighting}"
            + "".join(f", {name} {value}" for name, value in parts.items() if value)
        )

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise unknown_name("weighting", str(self.weighting), WEIGHTINGS)
        if not isinstance(self.aggregate, Aggregation):
            raise UsageError(
                f"aggregate={self.aggregate!r} is not an Aggregation: pass a function to with_aggregation instead"
            )

    def resolve_weighting(self, work: Work) -> Self:
        """Return the method with the weighting ``auto`` resolved under ``work``."""
        resolved: Weighting = "used" if work.batches is not None else "samples"
        return replace(self, weighting=resolved) if self.weighting == "auto" else self

    def weigh(self, *, samples: float, used: float) -> float:
        """Return the unnormalized weight of a client with ``samples`` training samples, ``used`` of them in the round.

        ``weighting`` must be resolved.
        """
        assert self.weighting != "auto", "resolve_weighting first"
        return {"samples": float(samples), "used": float(used), "uniform": 1.0}[self.weighting]

    def keep_on_client(self, selection: Select) -> Self:
        """Return the method with ``selection`` neither loaded nor sent."""
        return replace(self, scope=self.scope.keep_on_client(selection))

    def leave_untrained(self, selection: Select) -> Self:
        """Return the method with ``selection`` excluded from federated training."""
        return replace(self, trains=self.trains & ~selection)

    def with_finetuning(self, rounds: int) -> Self:
        """Return the method with models fine-tuned for use; raise :class:`UsageError` if it already fine-tunes."""
        if self.finetune:
            raise UsageError(f"{self.name} already fine-tunes models for use; choose one of the two")
        return replace(self, finetune=rounds)

    def with_gradient(self, gradient: GradientEstimator) -> Self:
        """Return the method with a gradient estimator; raise :class:`UsageError` if it already has one."""
        if self.gradient is not None:
            raise UsageError(f"{self.name} already combines the gradients of samples; choose one of the two")
        return replace(self, gradient=gradient)

    def with_rule(self, rule: Rule) -> Self:
        """Return the method with ``rule`` appended to its rules."""
        return replace(self, rules=(*self.rules, rule))

    def with_surgery(self, *surgery: Surgery) -> Self:
        """Return the method with ``surgery`` appended to its surgery, before any whose attribute ``last`` is true."""
        return replace(self, surgery=tuple(sorted((*self.surgery, *surgery), key=lambda s: getattr(s, "last", False))))

    def with_aggregation(self, aggregate: Aggregation | AggregationFunction) -> Self:
        """Return the method with another aggregation; raise :class:`UsageError` if it already replaces the mean.

        ``aggregate``: an :class:`~fedshift.core.aggregation.Aggregation`, or a function of the plan, the server and the
        sequence of :class:`~fedshift.core.aggregation.Received` that returns the server's entries.
        """
        if not self.aggregate.sums:
            raise UsageError(f"{self.name} already replaces the aggregation; choose one of the two")
        wrapped = aggregate if isinstance(aggregate, Aggregation) else FunctionAggregation(aggregate)
        return replace(self, aggregate=wrapped)

    def with_server(self, server: ServerOptimizer) -> Self:
        """Return the method with a server optimizer; raise :class:`UsageError` if it already has one."""
        if self.server is not None:
            raise UsageError(f"{self.name} already has a server optimizer; choose one of the two")
        return replace(self, server=server)

    def with_work(self, **work: Any) -> Self:
        """Return the method with other local work; raise :class:`UsageError` if it already overrides it."""
        if self.work:
            raise UsageError(f"{self.name} already sets the local work; choose one of the two")
        return replace(self, work=work)


Options = ParamSpec("Options")


class MethodFunction(Protocol[Options]):
    """A function of options that returns a method on top of ``base`` (None: FedAvg)."""

    __name__: str

    def __call__(self, base: Method | None = None, /, *args: Options.args, **options: Options.kwargs) -> Method:
        """Return the method."""


def method(function: Callable[Concatenate[Method, Options], Method]) -> MethodFunction[Options]:
    """Turn ``function(base, *, ...)`` into a named method: ``fedbn`` on FedAvg, ``fedbn+fedprox(mu=0.1)`` on another.

    The name lists the options that differ from their defaults; ``base`` becomes optional, and error messages start with
    the name. If the function returns its base unchanged, the name stays unchanged.
    """
    return _compose(function, _prefix)


def modifier(function: Callable[Concatenate[Method, Options], Method]) -> MethodFunction[Options]:
    """:func:`method` for modifiers that are not methods by themselves; appends the name: ``fedavg+gn``."""
    return _compose(function, lambda title, base: f"{base}+{title}")


def _prefix(title: str, base: str) -> str:
    rest = base.removeprefix("fedavg").removeprefix("+") if f"{base}+".startswith("fedavg+") else base
    return f"{title}+{rest}" if rest else title


def _compose(
    function: Callable[Concatenate[Method, Options], Method], join: Callable[[str, str], str]
) -> MethodFunction[Options]:
    signature = inspect.signature(function)
    first, *options = signature.parameters.values()
    reals = {each.name for each in options if each.annotation in (float, float | None, "float", "float | None")}

    @wraps(function)
    def compose(base: Method | None = None, *args: Options.args, **kwargs: Options.kwargs) -> Method:
        start = base or Method()
        real = {name: float(value) if name in reals and type(value) is int else value for name, value in kwargs.items()}
        kwargs = cast("Any", real)  # 1 and 1.0 must yield the same name, which keys random streams
        try:
            composed = function(start, *args, **kwargs)
        except UsageError as error:
            raise UsageError(f"{join(function.__name__, start.name)}: {{}}", error) from error
        values = signature.bind(start, *args, **kwargs).arguments
        changed = {
            each.name: values[each.name] for each in options if values.get(each.name, each.default) != each.default
        }
        if composed is start:
            return composed
        title = _title(function.__name__, changed)
        return replace(composed, name=join(title, start.name), typed=join(title, start.typed) if start.typed else None)

    optional = first.replace(default=None, annotation="Method | None")
    compose.__signature__ = signature.replace(parameters=[optional, *options], return_annotation="Method")  # type: ignore[attr-defined]
    return cast("MethodFunction[Options]", compose)


def _title(name: str, changed: Mapping[str, Any]) -> str:
    """Return ``name`` with the changed options, as tables show it."""
    options = ", ".join(
        f"{option}={value:g}" if isinstance(value, float) and float(f"{value:g}") == value else f"{option}={value!r}"
        for option, value in changed.items()
    )
    return f"{name}({options})" if options else name
