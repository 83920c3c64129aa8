"""A federated method: a composition of orthogonal choices, each defaulting to FedAvg's.

A method in ``fedshift.methods`` says only what differs from the one it builds on, by ``dataclasses.replace``; so
methods compose: ``fedbn(fedprox(mu=0.01))``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .aggregate import Aggregate, weighted_mean
from .optimizer import Optimizer
from .rule import Rule
from .select import Scope
from .work import Work


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a client loads and sends, how it works, what rules apply, and how the server folds the uploads.

    ``name``: as tables show it. ``scope``: entries loaded and sent. ``rules``: chained, applied in order.
    ``aggregate``: folds the uploads. ``weighting``: clients weigh by the samples they used this round, or equally.
    ``pooled``: all data train together on one machine (the centralized upper baseline). ``work`` and ``optimizer``:
    None takes those of the experiment.
    """

    name: str
    scope: Scope = field(default_factory=Scope)
    rules: tuple[Rule, ...] = ()
    aggregate: Aggregate = weighted_mean
    weighting: Literal["samples", "uniform"] = "samples"
    pooled: bool = False
    work: Work | None = None
    optimizer: Optimizer | None = None

    @property
    def text(self) -> str:
        """All choices in one line; two methods that differ in anything differ here."""
        rules = " ".join(map(repr, self.rules)) or "none"
        return (
            f"{self.name}: load {self.scope.load}, send {self.scope.send}, rules {rules}, "
            f"aggregate {getattr(self.aggregate, '__qualname__', self.aggregate)} by {self.weighting}, "
            f"pooled {self.pooled}, work {self.work}, optimizer {self.optimizer}"
        )

    def titled(self, title: str) -> str:
        """Name of a method called ``title`` that builds on this one: ``fedbn`` on FedAvg, else ``fedbn+fedprox``."""
        return title if self.name == "fedavg" else f"{title}+{self.name}"
