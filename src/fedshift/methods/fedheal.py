"""FedHEAL: inconsistent changes of clients are excluded, and clients far from the mean gain weight.

Chen et al. 2024 (CVPR), arXiv:2405.16585, following the authors' public code. For every weight, a client counts its
earlier changes in each direction; if at most a fraction ``threshold`` of them had this round's direction, its change is
excluded and the other clients' changes gain weight. Client k's weight is the sum of steps s_k = (1 - beta) s_k + beta
d_k / sum_j d_j, starting from equal weights, where d_k is the sum over the model's parameters of the norms of k's
remaining changes. Clients store the directions and send which changes count, one byte per weight; the server stores the
weight and step of each client. Entries that clients do not train or do not load are averaged with the same weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..core.aggregation import Aggregated, Aggregation, Received
from ..core.declarations import Send
from ..core.means import cast_to, stack_entry, weighted_mean
from ..core.method import Method, method
from ..core.network import Network
from ..core.rule import Client, Declared, Rule
from ..core.states import ServerState
from ..utils.errors import UsageError
from ..utils.state import State, pick

ROUNDING = 64
"""Changes below this multiple of an entry's precision are rounding errors without a direction."""


@dataclass(frozen=True)
class Consistency(Rule):
    """The client's part: how often it decreased each weight, and which changes of this round count."""

    threshold: float
    needs_shared = "FedHEAL weighs changes of shared entries"

    @override
    def bind(self, network: Network) -> Declared:
        rounds = torch.zeros((), dtype=torch.int64, device=next(iter(network.params.values())).device)
        down = {f"down/{name}": torch.zeros_like(tensor) for name, tensor in network.params.items()}
        counts = {name: tensor.bool() for name, tensor in pick(network.params, network.loaded).items()}
        return Declared(self, memory={"rounds": rounds} | down, sends=Send.like(counts, "update"))

    @override
    def end(self, client: Client) -> tuple[State, State]:
        memory, rounds = dict(client.memory), int(client.memory["rounds"])
        counts = {}
        for name, tensor in client.params.items():
            if name in client.loaded:
                shared, before = client.loaded[name], memory[f"down/{name}"]
                rounding = ROUNDING * torch.finfo(shared.dtype).eps * shared.abs().max()
                down = shared - tensor >= -rounding
                agreeing = torch.where(down, before, rounds - before)
                counts[name] = agreeing > self.threshold * rounds if rounds else torch.ones_like(down)
                memory[f"down/{name}"] = before + down
        return memory | {"rounds": memory["rounds"] + 1}, counts


@dataclass(frozen=True)
class FairMean(Aggregation):
    """The server's part: weights that grow with the clients' distances; keeps each client's weight and last step."""

    beta: float
    weighs = False
    keeps = True

    @override
    def __call__(self, network: Network, server: ServerState, received: Sequence[Received]) -> Aggregated:
        weights, steps = self._weigh(network, server, received)
        total, states = sum(weights.values()), [each.entries for each in received]
        shares = [weights[each.client] / total for each in received]
        entries = weighted_mean(states, shares)
        shares_K = torch.tensor(shares, dtype=torch.float64, device=next(iter(entries.values())).device)
        for name in network.trained & network.loaded:
            before, counts_K = server.shared[name].double(), _stack_counts(received, name)
            weights_K = shares_K.reshape(-1, *[1] * before.ndim) * counts_K
            change = (weights_K * (stack_entry(states, name) - before)).sum(dim=0)
            entries[name] = cast_to(before + change / weights_K.sum(dim=0).clamp(min=1e-300), entries[name].dtype)
        values = {f"weight/{client}": weight for client, weight in weights.items()}
        values |= {f"step/{client}": step for client, step in steps.items()}
        kept = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        return Aggregated(entries=entries, kept=server.kept | kept)

    def _weigh(
        self, network: Network, server: ServerState, received: Sequence[Received]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the participants' weights, which do not sum to one, and their last steps."""
        clients, states = len(received), [each.entries for each in received]
        distances_K = torch.zeros(clients, dtype=torch.float64, device=next(iter(server.shared.values())).device)
        for name in sorted(network.trained & network.loaded):
            changes = stack_entry(states, name) - server.shared[name].double()
            distances_K += (changes * _stack_counts(received, name)).reshape(clients, -1).norm(dim=1)
        parts = (distances_K / distances_K.sum().clamp(min=1e-300)).tolist()
        weights, steps = {}, {}
        for each, part in zip(received, parts, strict=True):
            last = float(server.kept.get(f"step/{each.client}", 0.0))
            steps[each.client] = (1 - self.beta) * last + self.beta * part
            weights[each.client] = float(server.kept.get(f"weight/{each.client}", 1 / clients)) + steps[each.client]
        return weights, steps


def _stack_counts(received: Sequence[Received], name: str) -> Tensor:
    """Return which changes of an entry count, float64 ``[clients, ...]``."""
    return torch.stack([each.of(Consistency)[name] for each in received]).double()


@method
def fedheal(base: Method, *, threshold: float = 0.3, beta: float = 0.4) -> Method:
    """Exclude inconsistent changes from the mean of ``base``, and weigh clients by their distances.

    Args:
        threshold: Fraction of a client's earlier rounds that must have changed a weight in the same direction, in [0,
            1).
        beta: Fraction of this round's distances in the step of the clients' weights, in [0, 1].

    """
    if not 0 <= threshold < 1 or not 0 <= beta <= 1:
        raise UsageError(f"threshold={threshold:g} and beta={beta:g}: give numbers in [0, 1) and in [0, 1]")
    return base.with_aggregation(FairMean(float(beta))).with_rule(Consistency(float(threshold)))
