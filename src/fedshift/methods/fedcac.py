"""FedCAC: each client keeps the weights that matter most to it, or shares them with clients to which the same matter.

Wu, Liu, Niu, Zhu and Tang, ICCV 2023, arXiv:2309.11103; formulas from the authors' public code (FLAIR-Community/Fling).
In each tensor, the fraction ``tau`` of the weights w with the largest |w (w - w_loaded)| are critical for a client. Two
clients overlap by 1 - (number of weights that are critical for one of them alone) / (2 x the number that are critical
for the first). In round r, a client collaborates with those that it overlaps by at least a + r / beta (b - a), with the
mean a and the maximum b over all pairs. Its critical weights become the plain mean over itself and these clients, the
others the mean over all. After ``beta`` rounds it keeps its critical weights alone, unless all overlaps are equal, as
between two clients.

Only parameters are mixed. That code leaves BatchNorm's statistics on clients, which is ``silobn+fedcac`` here. A client
that sits a round out is known here by its last critical weights, and loads the mean if no client of the round overlaps
enough. Weights that did not move are not critical.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Folded, Rule, Server, State
from ..utils.state import add_prefix, group_entries

ROUNDING = 64
"""Changes below this multiple of a tensor's precision are rounding errors."""


class CriticalMix(Rule):
    """Mixes of critical weights, a fraction ``tau``, over ``beta`` rounds; it keeps which were critical last."""

    tau: float
    beta: int
    aggregates = True
    needs_shared = "FedCAC compares changes of shared weights"
    keeps = True
    mixes = True

    def fold(self, server: Server) -> Folded:
        kept, received, mixed = dict(server.kept), server.received, server.before.mixes
        for each in received:
            loaded = server.before.shared | (mixed.mix(each.client) if mixed else {})
            names = sorted(server.network.trained & server.network.loaded)
            critical = {name: self._select(loaded[name], each.entries[name]) for name in names}
            kept |= add_prefix(each.client, critical)
        present = [each.client for each in received]
        masks = dict(sorted(group_entries(kept).items()))
        weights_N = torch.tensor([each.weight for each in received], dtype=torch.float64)
        mixes = {}
        for client, partners in self._choose(masks, present, server.before.round + 1).items():
            chosen_N = torch.tensor([other in partners for other in present], dtype=torch.float64)
            if partners:
                mixes[client] = _weigh(masks[client], weights_N, chosen_N / len(partners))
        return Folded(entries=server.entries, kept=kept, mixes=mixes)

    def _select(self, before: Tensor, after: Tensor) -> Tensor:
        """Return which weights of a tensor are critical, bool in its shape."""
        change = (after - before).double()
        moved = change.abs() > ROUNDING * torch.finfo(after.dtype).eps * before.abs().max()
        matters = (change * after.double()).abs() * moved
        count = int(self.tau * matters.numel())
        if not count:
            return torch.zeros_like(moved)
        return (matters >= matters.flatten().topk(count).values[-1]) & (matters > 0)

    def _choose(self, masks: Mapping[str, State], present: Sequence[str], number: int) -> dict[str, set[str]]:
        """Return, for every client, those of the round ``number`` with which it shares critical weights."""
        flat = {client: torch.cat([mask.flatten() for mask in own.values()]) for client, own in masks.items()}
        pairs = [(one, other) for one in flat for other in present if one != other]
        counts = [*((flat[one] ^ flat[other]).sum() for one, other in pairs), *(own.sum() for own in flat.values())]
        numbers = torch.stack(counts).tolist()  # one copy from the device
        sizes = dict(zip(flat, numbers[len(pairs) :], strict=True))
        overlaps = {
            (one, other): 1 - differing / max(2 * sizes[one], 1)
            for (one, other), differing in zip(pairs, numbers, strict=False)
        }
        mean, largest = sum(overlaps.values()) / max(len(overlaps), 1), max(overlaps.values(), default=0.0)
        threshold = mean + number / self.beta * (largest - mean)
        return {one: {other for other in present if one == other or overlaps[one, other] >= threshold} for one in flat}


def _weigh(masks: State, mean_N: Tensor, chosen_N: Tensor) -> State:
    """Return the weights of the uploads, float64 ``[N, *shape]``: ``chosen_N`` where a weight is critical."""
    device = next(iter(masks.values())).device
    mean_N, chosen_N = mean_N.to(device), chosen_N.to(device)
    return {
        name: torch.where(mask, chosen_N.reshape(-1, *[1] * mask.ndim), mean_N.reshape(-1, *[1] * mask.ndim))
        for name, mask in masks.items()
    }


@method
def fedcac(base: Method, *, tau: float = 0.5, beta: int = 100) -> Method:
    """Send each client of ``base`` a mix in which its critical weights are shared with few clients.

    ``tau``: fraction of critical weights in each tensor, in (0, 1]. ``beta``: rounds after which a client shares its
    critical weights with nobody.
    """
    allowed = 0 < tau <= 1 and beta >= 1
    require(allowed, f"tau={tau:g} and beta={beta}: give a fraction in (0, 1], and rounds of 1 or more")
    return base.with_rule(CriticalMix(tau, beta))
