"""A federated method: a composition of orthogonal choices, each defaulting to FedAvg's.

A method in ``fedshift.methods`` says only what differs from the one it builds on, by ``dataclasses.replace``; so
methods compose: ``fedbn(fedprox(mu=0.01))``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from torch import nn

from ..utils.errors import UsageError
from .aggregation import Aggregation, average_uploads
from .rule import Rule
from .selection import Scope
from .server_optimizer import ServerOptimizer

Surgery = Callable[[nn.Module], nn.Module]
"""Changes a copy of the model before entries are named; the repr says what it does."""


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """From a round on, BatchNorm normalizes with its running statistics in training too, and they no longer move.

    ``after``: rounds before that, a number, or a fraction (float in (0, 1)) of all rounds.
    """

    after: int | float

    def __post_init__(self) -> None:
        if not (0 < self.after < 1 if isinstance(self.after, float) else self.after >= 0):
            raise UsageError(f"switch={self.after}: give a number of rounds (an integer) or a fraction in (0, 1)")

    def rounds(self, total: int) -> int:
        """How many rounds of ``total`` come before."""
        return self.after if isinstance(self.after, int) else int(self.after * total + 0.5)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Which network, what a client loads and sends, how it works, what rules apply, how the server folds the uploads.

    ``name``: as tables show it. ``surgery``: changes of the network, in order. ``scope``: entries loaded and sent.
    ``rules``: chained, applied in order. ``freeze``: when BatchNorm's statistics are frozen. ``aggregate``: folds the
    uploads. ``weighting``: clients weigh by the samples they used this round, or equally. ``server``: a step of the
    server's own along the aggregated change. ``pooled``: all data train together on one machine (the centralized upper
    baseline), ``"scaled"`` with batches as many times larger as there are clients. ``work``, ``optimizer``: fields of
    ``Work`` and of the local optimizer that differ from the experiment's.
    """

    name: str
    surgery: tuple[Surgery, ...] = ()
    scope: Scope = field(default_factory=Scope)
    rules: tuple[Rule, ...] = ()
    freeze: Freeze | None = None
    aggregate: Aggregation = average_uploads
    weighting: Literal["samples", "uniform"] = "samples"
    server: ServerOptimizer | None = None
    pooled: Literal[False, "same", "scaled"] = False
    work: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All choices in one line; two methods that differ in anything differ here."""
        parts = {
            "surgery": self.surgery, "rules": self.rules, "freeze": self.freeze, "server": self.server,
            "pooled": self.pooled, "work": dict(self.work), "optimizer": dict(self.optimizer),
        }  # fmt: skip
        aggregate = getattr(self.aggregate, "__qualname__", self.aggregate)
        return (
            f"{self.name}: load {self.scope.load}, send {self.scope.send}, aggregate {aggregate} by {self.weighting}"
            + "".join(f", {name} {value}" for name, value in parts.items() if value)
        )

    def weigh(self, samples: float) -> float:
        """Return the weight of a client that counts for ``samples`` samples, relative to those of others."""
        return float(samples) if self.weighting == "samples" else 1.0

    def compose_name(self, function: Callable[..., Method], **arguments: Any) -> str:
        """Name of the method ``function(self, **arguments)``: ``fedbn`` on FedAvg, else ``fedbn+fedprox(mu=0.1)``.

        Arguments that have their defaults are left out.
        """
        plain = f"{self.name}+".startswith("fedavg+")
        rest = self.name.removeprefix("fedavg").removeprefix("+") if plain else self.name
        return f"{_title(function, arguments)}+{rest}" if rest else _title(function, arguments)

    def extend_name(self, function: Callable[..., Method], **arguments: Any) -> str:
        """Name of what ``function`` adds to this method: ``fedavg+gn``."""
        return f"{self.name}+{_title(function, arguments)}"

    def with_aggregation(self, name: str, aggregate: Aggregation) -> Self:
        """The method with another aggregation; :class:`UsageError` where it has one already."""
        if self.aggregate is not average_uploads:
            raise UsageError(f"{name}: {self.name} folds uploads in a way of its own already; choose one of the two")
        return replace(self, name=name, aggregate=aggregate)

    def with_server_optimizer(self, name: str, server: ServerOptimizer) -> Self:
        """The method with a server optimizer; :class:`UsageError` where it has one already."""
        if self.server is not None:
            raise UsageError(f"{name}: {self.name} has a server optimizer already; choose one of the two")
        return replace(self, name=name, server=server)

    def with_work(self, name: str, **work: Any) -> Self:
        """The method with other local work; :class:`UsageError` where it sets its own already."""
        if self.work:
            raise UsageError(f"{name}: {self.name} sets the local work already; choose one of the two")
        return replace(self, name=name, work=work)


def _title(function: Callable[..., Method], arguments: Mapping[str, Any]) -> str:
    defaults = inspect.signature(function).parameters
    given = ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in arguments.items()
        if value != defaults[name].default
    )
    return f"{function.__name__}({given})" if given else function.__name__
