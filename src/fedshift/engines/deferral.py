"""The choice of large linear layers whose updates lanes of plain SGD on small batches defer for a round.

See :mod:`fedshift.nn.deferred` for the algorithm. Results differ from :func:`fedshift.core.step.client_step_` by
rounding, which depends only on the round, so that resumed runs and other processes produce the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..core.plan import Plan
from ..nn.deferred import FEW, LaneUpdates
from ..nn.linear import chosen_products
from ..utils.state import State

LARGE = 2**15
"""Minimum number of weights of a layer whose updates are deferred."""


def choose_held(plan: Plan, names: frozenset[str], sizes: Sequence[int]) -> dict[str, frozenset[str]]:
    """Return the weights among ``names`` whose updates lanes with batches of ``sizes`` should defer for a round.

    These are weights larger than their factored updates; each has the products that its layer computes with oneDNN.
    """
    if max(sizes, default=FEW + 1) > FEW or not _is_plain_sgd(plan):
        return {}
    shapes = {name: plan.initial[name].shape for name in names}
    return {
        name: chosen_products(layer)
        for name, layer in _linear_layers(plan)
        if name in names and LARGE <= shapes[name].numel() >= sum(sizes) * sum(shapes[name])
    }


def hold(params: State, held: Mapping[str, frozenset[str]], rows: int) -> Mapping[str, LaneUpdates]:
    """Allocate ``rows`` rows for deferred updates of the parameters ``held``, which are equal in all lanes."""
    return {
        name: LaneUpdates(params[name][0].contiguous(), len(params[name]), rows, fast) for name, fast in held.items()
    }


def _is_plain_sgd(plan: Plan) -> bool:
    """Return whether steps are plain SGD in full precision (float32 or float64), and no rule reads weights."""
    unread = not any(map(plan.defines, ("batch", "outputs", "loss")))
    return unread and plan.subtracts and not plan.autocast


def _linear_layers(plan: Plan) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers with the names of their weights; a shared weight occurs once per layer."""
    layers = {id(layer._parameters): layer for layer in plan.layers if isinstance(layer, nn.Linear)}
    return [(name, layers[id(held)]) for held, key, name, _ in plan.slots if key == "weight" and id(held) in layers]
