"""PartialFed-Adaptive: each client learns, layer by layer, whether to load the global parameters or its own.

Sun et al. 2021 (NeurIPS 34, "PartialFed"), compared in table 17 of FedWon (arXiv:2306.05879). Each layer has two logits
on the client. After each step on the weights, the logits take one on the same batch: the loss of a network whose layers
are, by a straight-through Gumbel-softmax sample, the global ones or those that the client ended its last round with. A
round starts from the more probable choice; a tie loads. Running statistics are never loaded, since that loss, which
normalizes by the batch, cannot see what they do. All entries are sent, so the server holds a whole model.
"""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from ..core.method import Method, method
from ..core.requirements import Requirements
from ..core.rule import Rule, RuleContext
from ..core.selection import Entry, norm_statistics
from ..nn.dropout import draw_uniform
from ..utils.errors import UsageError
from ..utils.state import State, add_prefix, clone, entries_under, pick

DRAW = 2**20
"""Number of the draws of this rule under a step's key, beyond any that dropout layers make."""


@dataclass(frozen=True)
class Gates(Rule):
    """Two logits a layer, ``[load, keep]``, trained ``lr_scale`` times as fast as the weights; ``tau``: temperature."""

    tau: float
    lr_scale: float
    layers: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    statistics: tuple[str, ...] = field(default=(), repr=False)
    personalizes = True
    requires = Requirements(loads_everything="partialfed_adaptive chooses which layers to load")

    @override
    def bind(self, entries: tuple[Entry, ...]) -> Self:
        layers: dict[int, list[str]] = {}
        statistics = tuple(entry.name for entry in entries if norm_statistics(entry))
        for entry in entries:
            if entry.name not in statistics:
                layers.setdefault(id(entry.owner), []).append(entry.name)
        return replace(self, layers=tuple(map(tuple, layers.values())), statistics=statistics)

    @override
    def extra_entries(self, params: State, rest: State) -> tuple[State, State]:
        first = next(iter(params.values()))
        return {"logits": torch.zeros(len(self.layers), 2, dtype=first.dtype, device=first.device)}, {}

    @override
    def client_memory(self, params: State, rest: State) -> State:
        return add_prefix("last", {**params, **rest})

    @override
    def init_local(self, state: State, context: RuleContext) -> State:
        kept, logits = entries_under("last", context.memory), context.extra_entries["logits"]
        state = state | pick(kept, self.statistics)
        for number, names in enumerate(self.layers):
            keep = logits[number, 1] > logits[number, 0]
            state |= {name: torch.where(keep, kept[name], state[name]) for name in names}
        return state

    @override
    def transform_loss(self, loss: Tensor, params: State, context: RuleContext) -> Tensor:
        assert context.data_loss is not None
        assert context.key is not None
        logits = context.extra_entries["logits"]
        uniform = draw_uniform(context.key, DRAW, logits.numel(), logits.dtype)
        noise = -torch.log(-torch.log(uniform)).reshape(logits.shape)
        soft = ((logits + noise) / self.tau).softmax(dim=1)
        hard = (soft == soft.max(dim=1, keepdim=True).values).to(soft.dtype)
        load = (hard + soft - soft.detach())[:, 0]
        kept, mixed = entries_under("last", context.memory), clone(context.rest)
        for number, names in enumerate(self.layers):
            for name in names:
                if name in params:
                    mixed[name] = load[number] * context.global_params[name] + (1 - load[number]) * kept[name]
        return loss + context.data_loss(pick(mixed, kept))

    @override
    def finalize(self, params: State, context: RuleContext) -> tuple[State, State]:
        together = {**params, **context.rest}
        return {name: together[name.removeprefix("last/")] for name in context.memory}, {}


@method
def partialfed_adaptive(base: Method, *, tau: float = 1.0, rate: float = 10.0) -> Method:
    """Let clients of ``base`` learn what to load; ``tau``: temperature, ``rate``: how much faster the logits learn."""
    if not (tau > 0 and rate > 0):
        raise UsageError(f"tau={tau:g}, rate={rate:g}: give numbers above 0")
    return base.with_rule(Gates(tau, rate))
