"""Adaptive gradient clipping: bound the norm of each unit's gradient by ``clip`` times the norm of its weights.

Brock et al. 2021, arXiv:2102.06171, as used by FedWon (arXiv:2306.05879), equation 4 and table 19, with any method: the
gradient of an output unit i is scaled to clip * max(||W_i||, 1e-3) if it is larger. A bias or gain is one unit. In any
order of composition, this clips the gradient of the client's objective, with FedProx's and FedDyn's terms, to which
SCAFFOLD then adds its correction.
"""

from collections.abc import Iterator
from dataclasses import field, replace

import torch
from torch import Tensor

from ..core.method import Method, modifier, require
from ..core.rule import Declared, Network, Rule, State, Step
from ..core.selection import last_layers
from ..utils.words import join_some

EPS = 1e-3
"""Minimum norm of a unit's weights in equation 4."""
SMALL_BATCH = 4
"""Largest batch size without clipping in FedWon's experiments (appendix A.3)."""


class Clipping(Rule):
    """Clips each unit's gradient; ``classifier``: whether the last layer is clipped, too."""

    clip: float
    classifier: bool = True
    names: frozenset[str] = field(default=frozenset(), repr=False)
    on_copies = True

    def bind(self, network: Network) -> Declared:
        left_out = frozenset() if self.classifier else last_layers(1).names(network.entries)
        bound = replace(self, names=frozenset(entry.name for entry in network.entries) - left_out)
        return Declared(bound, notices=tuple(bound._warn(network.label, network.work.batch_size, network.params)))

    def _warn(self, method: str, batch_size: int | None, params: State) -> Iterator[str]:
        if batch_size is not None and batch_size <= SMALL_BATCH:
            yield (
                f"{method} clips gradients of batches of {batch_size}, but FedWon's authors do not clip batches of "
                f"{SMALL_BATCH} or fewer: use fedwon(agc=None), or a method without agc"
            )
        pinned = [name for name in sorted(params.keys() & self.names) if not params[name].any()]
        if pinned:
            yield (
                f"{method} clips the gradients of {join_some(pinned, shown=3)}, which start at zero, to a norm of "
                f"{self.clip * EPS:.3g} (clip * {EPS:g}) each until their norm exceeds {EPS:g}: they hardly change in "
                "a short run"
            )

    def gradients(self, grads: State, step: Step) -> State:
        return {
            name: _adaptive_clip_grad(grad, step.params[name], self.clip) if name in self.names else grad
            for name, grad in grads.items()
        }


def _unitwise_norm(x: Tensor) -> Tensor:
    """Return the norm of each output unit ``[O, 1, ...]``, or of all of ``x`` if at most one dimension exceeds 1."""
    over = None if x.squeeze().ndim < 2 else tuple(range(1, x.ndim))
    norm: Tensor = torch.linalg.vector_norm(x, dim=over, keepdim=True)
    return norm


def _adaptive_clip_grad(grad: Tensor, param: Tensor, clip: float) -> Tensor:
    allowed = clip * _unitwise_norm(param).clamp(min=EPS)
    size = _unitwise_norm(grad)
    return grad * torch.where(size > allowed, allowed / size.clamp(min=1e-30), torch.ones_like(size))


@modifier
def agc(base: Method, *, clip: float = 0.64, classifier: bool = True) -> Method:
    """Clip the gradients of ``base`` at ``clip`` times the weights, replacing any earlier clipping.

    FedWon uses 0.64 on Digits-Five and 1.28 on Office-Caltech-10 and DomainNet with batches of 32, and no clipping with
    batches of 4 or less. ``classifier``: whether the last layer is clipped, too.
    """
    require(clip > 0, f"clip={clip:g}: give a number above 0, say 0.64")
    others = tuple(rule for rule in base.rules if not isinstance(rule, Clipping))
    return replace(base, rules=(*others, Clipping(clip, classifier)))
