"""FedALA: each client learns elementwise weights for adopting the shared model's top layers.

Zhang et al. 2023 (AAAI), arXiv:2212.01197, following public code based on the authors' (FL-bench). At the start of a
round, the client's top layers become v + (w_t - v) * W, where v are its top layers after its previous round and W in
[0, 1] has the same shape; the layers below are the shared ones. W starts at one and is first trained for ``epochs``
epochs on the loss of that model with all other parameters fixed; then the model is trained from there. The authors
learn W on a part of the data, in its first round until the loss converges; here each round uses the same number of
epochs over all data. A client that has never trained adopts all shared layers.
"""

import torch
from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Network, Phase, Rule, State, Step, View
from ..core.selection import parse_selection
from ..utils.state import add_prefix, entries_under, pick


class LocalAggregation(Rule):
    """Weights of the shared model's last ``layers`` layers, trained with ``lr_scale`` times the learning rate."""

    layers: int | str
    lr_scale: float
    epochs: int
    personalizes = "start"
    needs_shared = "FedALA learns weights for adopting the shared model"

    def bind(self, network: Network) -> Declared:
        names = parse_selection(self.layers).names(network.entries)
        if not names & network.loaded:
            raise network.refuse_kept(self.needs_shared, names)
        top = pick(network.params, names)
        ones = {name: torch.ones_like(tensor) for name, tensor in top.items()}
        begun = next(iter(network.params.values())).new_zeros((), dtype=torch.bool)
        memory = {"begun": begun} | add_prefix("last", top)
        before = Phase(when="before", epochs=self.epochs, lr_scale=self.lr_scale)
        limits = dict.fromkeys(ones, (0.0, 1.0))
        return Declared(self, params=ones, limits=limits, memory=memory, phases=(before,))

    def personalize(self, state: State, client: Client) -> State:
        return state | self._mix(client)

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        fixed = {name: tensor.detach() for name, tensor in step.params.items()}
        return loss + step.loss_at(fixed | self._mix(step))

    def end(self, client: Client) -> tuple[State, State]:
        last = pick(client.params, client.own.params)
        return {"begun": torch.ones_like(client.memory["begun"])} | add_prefix("last", last), {}

    def _mix(self, client: View) -> State:
        """Return the client's top layers, interpolated between its previous ones and the shared ones."""
        mixed, last = {}, entries_under("last", client.memory)
        for name, weight in client.own.params.items():
            if name in client.loaded:
                shared = client.loaded[name]
                local = torch.where(client.memory["begun"], last[name], shared)
                mixed[name] = local + (shared - local) * weight
        return mixed


@method
def fedala(base: Method, *, layers: int | str = 1, rate: float = 10.0, epochs: int = 1) -> Method:
    """Learn weights for adopting the shared model's top layers in ``base``.

    ``layers``: number of these last layers, or a pattern such as ``"head.*"``. ``rate``: learning rate of the weights
    relative to the model's. ``epochs``: number of epochs that train them at the start of a round.
    """
    allowed = rate > 0 and epochs >= 1
    require(allowed, f"rate={rate:g} and epochs={epochs}: give a rate above 0, and epochs of 1 or more")
    return base.with_rule(LocalAggregation(layers, rate, epochs))
