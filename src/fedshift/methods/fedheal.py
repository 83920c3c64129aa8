"""FedHEAL: inconsistent changes of clients are excluded, and clients far from the mean gain weight.

Chen et al. 2024 (CVPR), arXiv:2405.16585, following the authors' public code. For every weight, a client counts its
earlier changes in each direction; if at most a fraction ``threshold`` of them had this round's direction, its change is
excluded and the other clients' changes gain weight. Client k's weight is the sum of steps s_k = (1 - beta) s_k + beta
d_k / sum_j d_j, starting from equal weights, where d_k is the sum over the model's parameters of the norms of k's
remaining changes. Clients store the directions and send which changes count, one byte per weight; the server stores the
weight and step of each client. Entries that clients do not train or do not load are averaged with the same weights.
"""

import torch
from torch import Tensor

from ..core.means import cast_to, stack_entry, weighted_mean
from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Folded, Network, Rule, Send, Server, State
from ..utils.state import pick

ROUNDING = 64
"""Changes below this multiple of an entry's precision are rounding errors without a direction."""


class Consistency(Rule):
    """On clients how often each weight fell, and so which changes count; on the server weights by distance."""

    threshold: float
    beta: float
    aggregates = True
    weighs = False
    keeps = True
    needs_shared = "FedHEAL weighs changes of shared entries"

    def bind(self, network: Network) -> Declared:
        rounds = torch.zeros((), dtype=torch.int64, device=next(iter(network.params.values())).device)
        down = {f"down/{name}": torch.zeros_like(tensor) for name, tensor in network.params.items()}
        counts = {name: tensor.bool() for name, tensor in pick(network.params, network.loaded).items()}
        return Declared(self, memory={"rounds": rounds} | down, sends=Send.like(counts, "update"))

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

    def fold(self, server: Server) -> Folded:
        kept, states = server.kept | self._weigh(server), [each.entries for each in server.received]
        weights = [float(kept[f"weight/{each.client}"]) for each in server.received]
        shares = [weight / sum(weights) for weight in weights]
        entries = weighted_mean(states, shares)
        shares_K = torch.tensor(shares, dtype=torch.float64, device=next(iter(entries.values())).device)
        for name in server.uploads[0]:
            changes, counts = _count_changes(server, name)
            shape = (-1, *[1] * (changes.ndim - 1))
            change = (shares_K.reshape(shape) * changes).sum(dim=0)
            total = (shares_K.reshape(shape) * counts).sum(dim=0).clamp(min=1e-300)
            entries[name] = cast_to(server.before.shared[name].double() + change / total, entries[name].dtype)
        return Folded(entries=entries, kept=kept)

    def _weigh(self, server: Server) -> State:
        """Return the participants' weights, which do not sum to one, and their last steps."""
        clients = [each.client for each in server.received]
        norms = [
            _count_changes(server, name)[0].reshape(len(clients), -1).norm(dim=1) for name in sorted(server.uploads[0])
        ]
        distances_K = sum(norms, torch.zeros_like(norms[0]))
        parts = (distances_K / distances_K.sum().clamp(min=1e-300)).tolist()
        kept = State()
        for client, part in zip(clients, parts, strict=True):
            step = (1 - self.beta) * float(server.kept.get(f"step/{client}", 0.0)) + self.beta * part
            weight = float(server.kept.get(f"weight/{client}", 1 / len(clients))) + step
            kept[f"step/{client}"], kept[f"weight/{client}"] = torch.tensor([step, weight], dtype=torch.float64).clone()
        return kept


def _count_changes(server: Server, name: str) -> tuple[Tensor, Tensor]:
    """Return the changes of an entry, 0 where they do not count, and which count, float64 ``[clients, ...]``."""
    counts, after = stack_entry(server.uploads, name), stack_entry([each.entries for each in server.received], name)
    return (after - server.before.shared[name].double()) * counts, counts


@method
def fedheal(base: Method, *, threshold: float = 0.3, beta: float = 0.4) -> Method:
    """Exclude inconsistent changes from the mean of ``base``, and weigh clients by their distances.

    ``threshold``: fraction of a client's earlier rounds that must have changed a weight in the same direction, in [0,
    1). ``beta``: fraction of this round's distances in the step of the clients' weights, in [0, 1].
    """
    allowed = 0 <= threshold < 1 and 0 <= beta <= 1
    require(allowed, f"threshold={threshold:g} and beta={beta:g}: give numbers in [0, 1) and in [0, 1]")
    return base.with_rule(Consistency(threshold, beta))
