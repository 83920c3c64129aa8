"""FedNova: each client's change is divided by the length of its path, so that more local work has no more weight.

Wang et al. 2020, arXiv:2007.07481. Client i's change after tau_i steps is -lr G_i a_i: the columns of G_i are its
gradients, and a_i their weights in the optimizer's update. The server moves by tau_eff sum_i p_i (w_i - w) / |a_i|_1
(equation 6), tau_eff = sum_i p_i |a_i|_1, where p_i is the client's share of the training samples. |a_i|_1 is tau_i for
plain SGD, (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho) with momentum rho, and (1 - (1 - lr mu)^tau_i) / (lr
mu) with a proximal term mu (section 4). Entries that clients do not train or do not load are averaged.
"""

from functools import lru_cache
from typing import cast

from ..core.means import cast_to, stack_entry
from ..core.method import Method, method
from ..core.optimizer import SGD
from ..core.rule import Folded, Rule, Server
from ..utils.errors import UsageError
from .fedprox import Proximal


class NormalizedAveraging(Rule):
    """The aggregation of FedNova, for steps of SGD, with or without FedProx's proximal term."""

    needs_plain_steps = "FedNova's normalization by the number of steps"
    allows_momentum = True
    needs_several_steps = "FedNova corrects for different numbers of local steps, but every client takes one"
    aggregates = True
    passes_on = False

    def fold(self, server: Server) -> Folded:
        received, sgd = server.received, cast("SGD", server.network.optimizer)
        entries, states = server.entries, [each.entries for each in received]
        total = sum(each.size for each in received)
        shares = [each.size / total for each in received]
        pull = server.network.find_lr(server.before.round) * _find_strength(server)
        lengths = [path_length(each.update.steps, sgd.momentum, sgd.nesterov, pull) for each in received]
        effective = sum(share * length for share, length in zip(shares, lengths, strict=True))
        for name in sorted(server.network.trained & server.network.loaded):
            before = server.before.shared[name].double()
            parts = zip(shares, lengths, stack_entry(states, name), strict=True)
            change = sum(share / length * (after - before) for share, length, after in parts)
            entries[name] = cast_to(before + effective * change, entries[name].dtype)
        return Folded(entries=entries)


def _find_strength(server: Server) -> float:
    """Return the strength of FedProx's proximal term, 0 without it; raise :class:`UsageError` if it is too large."""
    mu, lr = sum(each.rule.mu for each in server.rules if isinstance(each.rule, Proximal)), server.network.optimizer.lr
    if lr * mu >= 1:
        raise UsageError(
            "FedNova's normalization requires lr * mu < 1, so that no step overshoots the proximal term, but "
            f"lr={lr:g} and mu={mu:g}: lower one of the two"
        )
    return mu


@lru_cache(maxsize=4096)
def path_length(steps: int, momentum: float, nesterov: bool, pull: float) -> float:
    """Return the distance of ``steps`` SGD steps along a constant gradient of 1, divided by the learning rate.

    ``pull``: learning rate times the strength of the proximal term.
    """
    distance = velocity = 0.0
    for _ in range(steps):
        gradient = 1.0 - pull * distance
        velocity = momentum * velocity + gradient
        distance += gradient + momentum * velocity if nesterov else velocity
    return distance


@method
def fednova(base: Method) -> Method:
    """Aggregate the uploads of ``base`` by normalized averaging; needs SGD, with momentum reset each round."""
    return base.with_rule(NormalizedAveraging())
