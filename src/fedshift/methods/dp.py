"""Differential privacy for clients: clip each client's change and add noise to the mean.

McMahan et al. 2018 (DP-FedAvg), arXiv:1710.06963, Algorithm 1 with flat clipping; Geyer et al. 2017, arXiv:1712.07557.
From the changes d_k of a round's m clients, over all entries together, the server computes
(1/m) (sum_k d_k min(1, C / |d_k|) + N(0, (z C)^2)). Clients count equally, and integer counters are not updated on the
server, because both would reveal how many samples a client has. A running variance that the noise makes negative keeps
its value. Noise that is not ``secret`` follows from seed, method, round and entry: reproducible, without privacy.
"""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from ..core.means import StreamingMean, cast_to
from ..core.method import Method, method, require
from ..core.rule import Folded, Rule, Server, State
from ..utils.random_streams import draw_secret_normal, stream
from ..utils.state import clone, move_together, pick


class GaussianNoise(Rule):
    """Values clipped to ``clipping_norm``, with noise of ``noise_multiplier`` norms on their sum.

    ``delta``: the delta for which epsilon is accounted. ``secret``: whether the operating system draws the noise, and
    not the trial's seed and method.
    """

    clipping_norm: float
    noise_multiplier: float
    delta: float
    secret: bool = False

    def __post_init__(self) -> None:
        require(
            self.clipping_norm > 0 and 0 <= self.noise_multiplier < inf and 0 < self.delta < 1,
            f"clipping_norm={self.clipping_norm:g}, noise_multiplier={self.noise_multiplier:g}, "
            f"delta={self.delta:g}: give a clip above 0, noise of 0 or more, and a delta in (0, 1)",
        )


class PrivateMean(GaussianNoise):
    """The mean of changes of clients."""

    aggregates = True
    needs_entries_only = "dp clips, which noise does not hide"
    passes_on = False

    def fold(self, server: Server) -> Folded:
        network, received = server.network, server.received
        before, fixed = pick(server.before.shared, received[0].entries), network.entries_fixed_in(server.before.round)
        names = sorted(name for name, tensor in before.items() if tensor.is_floating_point() and name not in fixed)
        variances = {entry.name for entry in network.entries if entry.kind == "variance"}
        mean = StreamingMean()
        for each in received:
            change = {name: each.entries[name].double() - before[name].double() for name in names}
            mean.add(_clip_change(change, self.clipping_norm), 1.0)
        after_round = clone(before)
        scale = self.noise_multiplier * self.clipping_norm / len(received) if self.noise_multiplier else 0.0
        noise = self._draw_noise(server, before, names) if scale else {}
        for name, moved in mean.result().items():
            after = before[name].double() + moved
            if scale:
                after += scale * noise[name]
            if name in variances:
                after = torch.where(after < 0, before[name].double(), after)
            after_round[name] = cast_to(after, before[name].dtype)
        return Folded(entries=after_round)

    def _draw_noise(self, server: Server, before: State, names: Sequence[str]) -> State:
        """Return standard normal draws for the entries ``names``, float64."""

        def draw(name: str) -> Tensor:
            count = before[name].numel()
            if self.secret:
                return draw_secret_normal(count)
            draws = stream(server.network.seed, "dp", server.network.text, server.before.round, name)
            return torch.from_numpy(draws.standard_normal(count))

        moved = move_together(list(map(draw, names)), next(iter(before.values())).device)
        return {name: each.reshape(before[name].shape) for name, each in zip(names, moved, strict=True)}


def _clip_change(change: State, clip: float) -> State:
    """Scale ``change`` to norm ``clip`` if it is larger; the norm is over all entries together."""
    norm = sum(torch.stack([entry.square().sum() for entry in change.values()]).tolist()) ** 0.5
    return change if norm <= clip else {name: entry * (clip / norm) for name, entry in change.items()}


@method
def dp(
    base: Method, *, clipping_norm: float = 1.0, noise_multiplier: float = 1.0, delta: float = 1e-5,
    secret: bool = False,
) -> Method:  # fmt: skip
    """Clip the changes that clients of ``base`` send, and add noise to their mean.

    Args:
        clipping_norm: Maximum norm of a client's change.
        noise_multiplier: Standard deviation of the noise on the sum of changes, relative to ``clipping_norm``.
        delta: The delta for which epsilon is printed.
        secret: Whether the operating system draws the noise, which nobody can reproduce. Epsilon holds only in this
            case; otherwise anyone with the run directory can subtract the noise.

    """
    hidden = clipping_norm != inf or not noise_multiplier
    require(hidden, "clipping_norm=inf bounds nothing, so that no noise can hide it: give a finite clip, or no noise")
    private = base.with_rule(PrivateMean(clipping_norm, noise_multiplier, delta, secret))
    return private.with_weighting("uniform")
