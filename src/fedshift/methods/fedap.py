"""FedAP: each client keeps its BatchNorm and loads a mix of the other layers, weighted by similarity of clients.

Lu et al. 2022 ("Personalized Federated Learning with Adaptive Batchnorm for Healthcare"), arXiv:2112.00734, following
the authors' public code (microsoft/PersonalizedFL, ``alg/fedap.py``). The distance d_ij of two clients is the sum over
BatchNorm layers of the Wasserstein distance between normal distributions of independent channels, sqrt(|mean_i -
mean_j|^2 + |std_i - std_j|^2). Client i loads ``self_weight`` w_i + (1 - ``self_weight``) sum_j a_ij w_j, where a_ij is
1 / d_ij divided by the sum over the other clients j.

The authors measure means and variances once, in a network pretrained on data that all clients share. Here they are the
running statistics that clients send with every upload, the last ones of a client that sits a round out, whose mix then
excludes its own upload.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Folded, Network, Rule, Server, State
from ..core.selection import SELECTIONS, batch_norm, norm_statistics
from ..utils.state import group_entries, join_states, pick

Statistics = Mapping[str, State]
"""Running statistics by client."""
SMALLEST = 1e-14
"""Minimum distance: clients with equal statistics share nearly all of the weight."""


class StatisticsMix(Rule):
    """Mixes uploads by the distances of BatchNorm's statistics; keeps each client's last statistics."""

    self_weight: float
    aggregates = True
    weighs = False
    keeps = True
    mixes = True

    def fold(self, server: Server) -> Folded:
        layers, present = _find_layers(server.network), [each.client for each in server.received]
        names = frozenset(name for layer in layers for name in layer)
        kept = server.kept | join_states(present, (pick(each.entries, names) for each in server.received))
        mixes = self._weigh(group_entries(kept), layers, present)
        return Folded(entries=server.entries, kept=kept, mixes=mixes)  # entries are loaded before a client's first mix

    def _weigh(self, known: Statistics, layers: Sequence[tuple[str, str]], others: Sequence[str]) -> dict[str, State]:
        """Return the weights of the uploads of ``others`` for every client that has taken part."""
        clients = sorted(known)
        own_NK = torch.tensor([[client == other for other in others] for client in clients])
        distances_NK = torch.stack([_measure(known, layer, clients, others) for layer in layers]).sum(0).cpu()
        near_NK = torch.where(own_NK, 0.0, 1 / distances_NK.clamp(min=SMALLEST))
        total_N1 = near_NK.sum(dim=1, keepdim=True)
        shares_NK = near_NK / total_N1.clamp(min=torch.finfo(torch.float64).tiny)
        parts_NK = torch.where(total_N1 > 0, own_NK.double() * self.self_weight, own_NK.double())
        weights_NK = parts_NK + (1 - parts_NK.sum(dim=1, keepdim=True)) * shares_NK
        return {client: {"": weights.clone()} for client, weights in zip(clients, weights_NK, strict=True)}


def _find_layers(network: Network) -> list[tuple[str, str]]:
    """Return the names of the running mean and variance of each BatchNorm layer whose statistics clients send."""
    sent = [entry for entry in network.entries if norm_statistics(entry) and entry.name in network.sent]
    means, variances = ([entry.name for entry in sent if entry.kind == kind] for kind in ("mean", "variance"))
    return list(zip(means, variances, strict=True))


def _measure(known: Statistics, layer: tuple[str, str], clients: Sequence[str], others: Sequence[str]) -> Tensor:
    """Return the distances in one layer, float64 ``[clients, others]``."""

    def describe(names: Sequence[str]) -> Tensor:
        """Return the means and standard deviations, ``[clients, 2 channels]``."""
        mean, variance = (torch.stack([known[name][entry].double() for name in names]) for entry in layer)
        return torch.cat([mean, variance.sqrt()], dim=1)

    return torch.cdist(describe(clients), describe(others), compute_mode="donot_use_mm_for_euclid_dist")


@method
def fedap(base: Method, *, self_weight: float = 0.5) -> Method:
    """Keep BatchNorm on the clients of ``base``, and send each client a mix of the other layers.

    ``self_weight``: weight of a client's own upload in its mix, in [0, 1].
    """
    require(0 <= self_weight <= 1, f"self_weight={self_weight:g}: give a number in [0, 1]")
    affine = SELECTIONS["batch_norm_affine"]
    scope = replace(base.scope, load=base.scope.load & ~batch_norm, send=base.scope.send & ~affine)
    return replace(base.with_rule(StatisticsMix(self_weight)), scope=scope)
