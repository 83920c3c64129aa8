"""FedRoD: a generic head learns as if classes were equally frequent, a personal one adds what the client's own are.

Chen and Chao 2022, arXiv:2107.00778. Body and generic head descend the loss of the balanced softmax: to the score of
each class the logarithm of the client's number of training samples of it is added. The personal head, a copy of the
generic one at first, descends the usual loss of the sum of both heads' scores, in which features and generic scores are
constants. Body and generic head are averaged; the client uses the sum of the heads, which for linear heads is one head
with the sum of their weights. The authors' repository holds no code; the formulas are those of two independent
implementations (TsingZ0/PFLlib and fluke). A class that a client lacks counts 1e-12 samples, so that no score is
infinite.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from ..core.method import Method, method
from ..core.requirements import Requirements
from ..core.rule import Rule, RuleContext
from ..core.selection import Entry, find_classifier
from ..utils.state import State

FEWEST = 1e-12
"""Samples that a class without any counts as."""


@dataclass(frozen=True)
class PersonalHead(Rule):
    """Balanced softmax for the model, and a personal head on its features; ``head``: the names of its entries."""

    head: tuple[str, ...] = field(default=(), repr=False)
    classes: int = field(default=0, repr=False)
    personalizes = True

    @property
    @override
    def requires(self) -> Requirements:  # type: ignore[override]
        return Requirements(
            unique=True,
            shared_entries="FedRoD adds a personal head to the one that clients share",
            some_loaded=frozenset(self.head),
            classes="FedRoD balances classes",
        )

    @override
    def bind(self, entries: tuple[Entry, ...]) -> Self:
        classifier = find_classifier(entries, self.source_method)
        names = tuple(entry.name for entry in entries if entry.owner is classifier)
        return replace(self, head=names, classes=classifier.out_features)

    @override
    def client_memory(self, params: State, rest: State) -> State:
        first = next(iter(params.values()))
        return {"class_counts": first.new_zeros(self.classes)}

    @override
    def read_targets(self, memory: State, targets: Tensor) -> State:
        counts_K = torch.bincount(targets, minlength=self.classes)
        return {"class_counts": counts_K.to(memory["class_counts"].dtype)}

    @override
    def extra_entries(self, params: State, rest: State) -> tuple[State, State]:
        return {name: params[name] for name in self.head if name in params}, {}

    @override
    def find_network(self, params: Iterable[str]) -> Mapping[str, str]:
        return {name: name for name in params}

    @override
    def transform_loss(self, loss: Tensor, params: State, context: RuleContext) -> Tensor:
        assert context.forward_pass is not None
        assert context.run_model is not None
        assert context.criterion is not None
        outputs_BK, y_B = context.forward_pass.outputs, context.forward_pass.y
        prior_K = context.memory["class_counts"].clamp(min=FEWEST).log()
        constant = {name: tensor.detach().clone() for name, tensor in {**params, **context.rest}.items()}
        together = context.run_model(self._add_heads(constant, context.extra_entries))
        balanced = context.criterion(outputs_BK + prior_K, y_B) - context.criterion(outputs_BK, y_B)
        return loss + balanced + context.criterion(together.outputs, y_B)

    def _add_heads(self, state: State, personal: State) -> State:
        return state | {name: state[name] + tensor for name, tensor in personal.items()}

    @override
    def personal_model(self, state: State, context: RuleContext) -> State:
        return self._add_heads(state, context.extra_entries)


@method
def fedrod(base: Method) -> Method:
    """Balance the classes of ``base`` and give each client a personal head beside the shared one."""
    return base.with_rule(PersonalHead())
