"""PartialFed-Adaptive: each client learns for each layer whether to load the global parameters or keep its own.

Sun et al. 2021 (NeurIPS 34, "PartialFed"), compared in table 17 of FedWon (arXiv:2306.05879). Each layer has two logits
on the client. After each step on the weights, the logits take a step on the same batch: on the loss of a network whose
layers are, by a straight-through Gumbel-softmax sample, either global or from the end of the client's previous round. A
round starts from the more probable choice; a tie loads. Running statistics are never loaded, because that loss
normalizes by the batch and does not depend on them. All entries are sent, so that the server holds a complete model.
"""

from dataclasses import field, replace

import torch
from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Network, Phase, Rule, State, Step
from ..core.selection import norm_statistics
from ..nn.dropout import draw_uniform
from ..utils.state import add_prefix, entries_under, pick


class Gates(Rule):
    """Two logits per layer, ``[load, keep]``; ``tau``: temperature, ``lr_scale``: relative learning rate."""

    tau: float
    lr_scale: float
    layers: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    statistics: tuple[str, ...] = field(default=(), repr=False)
    personalizes = "start"

    def bind(self, network: Network) -> Declared:
        kept = network.personal - network.whole
        if kept or not network.loaded:
            raise network.refuse_kept("partialfed_adaptive chooses which layers to load", kept or network.personal)
        layers: dict[int, list[str]] = {}
        statistics = tuple(entry.name for entry in network.entries if norm_statistics(entry))
        for entry in network.entries:
            if entry.name not in statistics:
                layers.setdefault(id(entry.owner), []).append(entry.name)
        logits = next(iter(network.params.values())).new_zeros(len(layers), 2)
        return Declared(
            replace(self, layers=tuple(map(tuple, layers.values())), statistics=statistics),
            params={"logits": logits},
            memory=add_prefix("last", network.initial),
            phases=(Phase(lr_scale=self.lr_scale),),
            draws=True,
        )

    def personalize(self, state: State, client: Client) -> State:
        kept, logits = entries_under("last", client.memory), client.own.params["logits"]
        state = state | pick(kept, self.statistics)
        for number, names in enumerate(self.layers):
            keep = logits[number, 1] > logits[number, 0]
            state |= {name: torch.where(keep, kept[name], state[name]) for name in names}
        return state

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        logits = step.own.params["logits"]
        uniform = draw_uniform(step.key, 0, logits.numel(), logits.dtype)
        noise = -torch.log(-torch.log(uniform)).reshape(logits.shape)
        soft = ((logits + noise) / self.tau).softmax(dim=1)
        hard = (soft == soft.max(dim=1, keepdim=True).values).to(soft.dtype)
        load = (hard + soft - soft.detach())[:, 0]
        kept = entries_under("last", step.memory)
        mixed = {
            name: load[number] * step.loaded[name] + (1 - load[number]) * kept[name]
            for number, names in enumerate(self.layers)
            for name in names
            if name in step.params
        }
        return loss + step.loss_at(mixed)

    def end(self, client: Client) -> tuple[State, State]:
        return add_prefix("last", client.params | client.buffers), {}


@method
def partialfed_adaptive(base: Method, *, tau: float = 1.0, rate: float = 10.0) -> Method:
    """Learn what clients of ``base`` load; ``tau``: temperature, ``rate``: relative learning rate of the logits."""
    require(tau > 0 and rate > 0, f"tau={tau:g}, rate={rate:g}: give numbers above 0")
    return base.with_rule(Gates(tau, rate))
