"""Ditto: beside the global model, each client trains a personal one that is held near it.

Li et al. 2021, arXiv:2012.04221, Algorithm 1: v = v - lr (grad F(v) + lam (v - w_t)), on the same batches on which the
client trains w for the server, or in ``epochs`` passes apart from it (the algorithm's s steps). The client uses v,
normalization statistics included; w is trained and averaged as without it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from ..core.method import Method, method
from ..core.requirements import Requirements
from ..core.rule import Rule, RuleContext
from ..utils.errors import UsageError
from ..utils.state import State


@dataclass(frozen=True)
class PersonalModel(Rule):
    """A personal model, with a proximal term of strength ``lam`` to the loaded one."""

    lam: float
    epochs: int | None = None
    personalizes = True
    requires = Requirements(shared_entries="Ditto holds each client's model near the one that clients share")

    @override
    def extra_entries(self, params: State, rest: State) -> tuple[State, State]:
        return params, rest

    @override
    def find_network(self, params: Iterable[str]) -> Mapping[str, str]:
        return {name: name for name in params}

    @override
    def transform_loss(self, loss: Tensor, params: State, context: RuleContext) -> Tensor:
        assert context.data_loss is not None
        distance = sum(
            (context.extra_entries[name] - context.global_params[name]).square().sum()
            for name in params
            if name in context.global_params
        )
        return loss + context.data_loss(context.extra_entries) + self.lam / 2 * distance

    @override
    def personal_model(self, state: State, context: RuleContext) -> State:
        return {name: context.extra_entries[name] for name in state}


@method
def ditto(base: Method, *, lam: float = 1.0, epochs: int | None = None) -> Method:
    """Train a personal model beside that of ``base``; ``lam``: how strongly it is held near the global one.

    ``epochs``: passes of a round over the client's data for the personal model; None: it is trained on the batches of
    the global one.
    """
    if epochs is not None and epochs < 1:
        raise UsageError(f"epochs={epochs}: give 1 or more, or leave it out for the batches of the global model")
    if lam < 0:
        raise UsageError(f"lam={lam:g} is negative; it must be 0 (training alone) or more")
    return base.with_rule(PersonalModel(lam, epochs))
