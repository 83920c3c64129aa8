"""Differential privacy for clients: each client's change is clipped, and noise hides any one of them in the mean.

McMahan et al. 2018 (DP-FedAvg), arXiv:1710.06963, Algorithm 1 with flat clipping; Geyer et al. 2017, arXiv:1712.07557.
Of the changes d_k that a round's m clients send, over all entries together, the server takes over
(1/m) (sum_k d_k min(1, C / |d_k|) + N(0, (z C)^2)). Clients count equally and counters, which are integers, stay what
they are on the server, since both would tell how many samples a client has. A running variance that the noise makes
negative stays as it was before the round.

The promise holds for noise that nobody can draw again (``secret=True``). Otherwise noise is a function of seed, method,
round and entry, all of which a run directory holds: that is for experiments that can be repeated, and hides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from ..core.aggregation import Aggregated, Aggregation, Received
from ..core.means import StreamingMean, cast_to
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.requirements import Requirements
from ..core.selection import norm_layers
from ..core.states import ServerState
from ..utils.errors import UsageError
from ..utils.random_streams import draw_secret_normal, stream
from ..utils.state import State, clone


@dataclass(frozen=True)
class PrivateMean(Aggregation):
    """The mean of changes clipped to ``clipping_norm``, with noise of ``noise_multiplier`` norms on their sum.

    ``delta``: the delta for which epsilon is accounted. ``secret``: noise by the operating system in place of noise
    that follows from the trial's seed and method.
    """

    clipping_norm: float
    noise_multiplier: float
    delta: float
    secret: bool
    requires = Requirements(entries_only="dp clips, which noise does not hide")
    passes_on = False

    def __post_init__(self) -> None:
        if not (self.clipping_norm > 0 and 0 <= self.noise_multiplier < inf and 0 < self.delta < 1):
            raise UsageError(
                f"clipping_norm={self.clipping_norm:g}, noise_multiplier={self.noise_multiplier:g}, "
                f"delta={self.delta:g}: give a clip above 0, noise of 0 or more, and a delta in (0, 1)"
            )
        if self.clipping_norm == inf and self.noise_multiplier:
            raise UsageError(
                "clipping_norm=inf bounds nothing, so that no noise hides it: give a clip, or noise_multiplier=0"
            )

    @override
    def bind(self, plan: Plan) -> Self:
        for entry in plan.entries:
            sent = entry.name in plan.sent and plan.initial[entry.name].is_floating_point()
            if sent and entry.is_buffer and not norm_layers(entry):
                raise UsageError(
                    f"method {plan.method.label!r}: entry {entry.name!r} is a buffer of a {entry.layer}, to which dp "
                    "would add noise even if it is a constant: register it with persistent=False, or keep it on clients"
                )
        return self

    @override
    def __call__(self, plan: Plan, server: ServerState, received: Sequence[Received]) -> Aggregated:
        before, fixed = server.shared, plan.entries_fixed_in(server.round)
        taken = sorted(name for name, at in before.items() if at.is_floating_point() and name not in fixed)
        mean = StreamingMean()
        for each in received:
            change = {name: each.entries[name].double() - before[name].double() for name in taken}
            mean.add(_clip_change(change, self.clipping_norm), 1.0)
        after_round = clone(before)
        scale = self.noise_multiplier * self.clipping_norm / len(received) if self.noise_multiplier else 0.0
        for name, moved in mean.result().items():
            after = before[name].double() + moved
            if scale:
                after += scale * self._draw_noise(plan, server, name).to(after.device)
            if name.endswith("running_var"):  # as torch calls it wherever statistics are kept
                after = torch.where(after < 0, before[name].double(), after)
            after_round[name] = cast_to(after, before[name].dtype)
        return Aggregated(entries=after_round)

    def _draw_noise(self, plan: Plan, server: ServerState, name: str) -> Tensor:
        """Return standard normal draws for entry ``name``, float64."""
        shape = server.shared[name].shape
        if self.secret:
            return draw_secret_normal(shape.numel()).reshape(shape)
        draws = stream(plan.seed, "dp", plan.method.text, server.round, name)
        return torch.from_numpy(draws.standard_normal(shape.numel())).reshape(shape)


def _clip_change(change: State, clip: float) -> State:
    """Return ``change`` scaled to norm ``clip`` where it is longer; the norm is that of all its entries together."""
    norm = sum(float(entry.square().sum()) for entry in change.values()) ** 0.5
    return change if norm <= clip else {name: entry * (clip / norm) for name, entry in change.items()}


@method
def dp(
    base: Method,
    *,
    clipping_norm: float = 1.0,
    noise_multiplier: float = 1.0,
    delta: float = 1e-5,
    secret: bool = False,
) -> Method:
    """Clip the changes that clients of ``base`` send, and add noise to their mean.

    Args:
        base: FedAvg unless given.
        clipping_norm: Largest norm of a client's change.
        noise_multiplier: Standard deviation of the noise on the sum of changes, over ``clipping_norm``.
        delta: The delta for which epsilon is printed.
        secret: Noise by the operating system, which nobody can draw again. Only then does epsilon hold; without it,
            whoever has the run directory can subtract the noise.

    """
    private = base.with_aggregation(PrivateMean(clipping_norm, noise_multiplier, delta, secret))
    return replace(private, weighting="uniform")
