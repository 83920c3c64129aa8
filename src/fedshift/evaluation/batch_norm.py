"""BatchNorm layers and the statistics of their inputs on a client's data, without labels.

Only BatchNorm layers are in training mode, so that dropout stays off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.network import compute_outputs, to_memory_format
from ..core.plan import Plan
from ..core.rule import Hook
from ..core.selection import batch_norm, norm_layers
from ..core.work import Work
from ..data.patches import list_starts
from ..data.samples import Samples
from ..utils.random_streams import stream
from ..utils.state import State, clone
from .metrics import BATCH, LARGE

WINDOWS = 2**24
"""Most bytes of windows in a batch, as float32: as many as a network can learn from within a few gigabytes."""


class Moments:
    """Mean and variance of each channel over all batches ``[B, C, ...]`` together (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), torch.zeros(())

    def __call__(self, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Accumulate a layer's inputs."""
        x = given[0].detach().double()
        count, together = x.numel() // x.shape[1], self.count + x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x, dim=[0, *range(2, x.ndim)], correction=0)
        gap = mean - self.mean
        self.squares = self.squares + variance * count + gap.square() * (self.count * count / together)
        self.mean, self.count = self.mean + gap * (count / together), together

    @property
    def variance(self) -> Tensor:
        """Unbiased variance; 0 of a single value."""
        return self.squares / max(1, self.count - 1)


def list_batch_norms(plan: Plan) -> dict[str, _BatchNorm]:
    """Return torch's BatchNorm layers, by name, that have statistics which are not frozen."""
    moving = [entry for entry in plan.entries if entry.kind == "variance" and entry.moves]
    owners = {entry.name.rpartition(".")[0]: entry.owner for entry in moving}
    return {name: layer for name, layer in owners.items() if isinstance(layer, _BatchNorm)}


def name_statistics(layer: str) -> tuple[str, str]:
    """Return the entries of mean and variance of the BatchNorm layer called ``layer``."""
    return f"{layer}.running_mean".lstrip("."), f"{layer}.running_var".lstrip(".")


def list_batch_norm_parameters(plan: Plan) -> frozenset[str]:
    """Return the trained parameters of BatchNorm layers in ``plan``."""
    return frozenset(entry.name for entry in plan.entries if batch_norm(entry)) & plan.trained


def list_norm_parameters(plan: Plan) -> frozenset[str]:
    """Return the trained parameters of all normalization layers in ``plan``."""
    return frozenset(entry.name for entry in plan.entries if norm_layers(entry)) & plan.trained


@contextmanager
def observe_inputs(plan: Plan, hooks: dict[str, list[Hook]], *, training: bool) -> Iterator[None]:
    """Call ``hooks`` with the inputs of each BatchNorm layer in this block; ``training``: these layers' mode."""
    plan.module.eval()
    layers = list_batch_norms(plan)
    for layer in layers.values():
        layer.training = training  # not of a dropout or an activation inside of the layer
    handles = [layers[name].register_forward_pre_hook(hook) for name, each in hooks.items() for hook in each]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def iterate_inputs(
    plan: Plan, data: Samples, batch_size: int, purpose: str, batches: int | None = None
) -> Iterator[Tensor]:
    """Yield all inputs in batches, in a random order keyed by ``purpose``; at most ``batches``.

    Of cases of which patches are cut, the inputs are the windows that cover them (:mod:`fedshift.data.patches`), as in
    evaluation; with ``batches``, a draw of as many windows from each case. A batch has no more of them than are
    :data:`WINDOWS` bytes.
    """
    rng = stream(plan.seed, purpose)
    order = rng.permutation(len(data))
    if data.patches is None:
        bounds = Work(batch_size=batch_size, epochs=1).batch_bounds(len(data), plan.smallest_batch)
        places = torch.from_numpy(order).to(data.y.device)
        yield from (data.inputs(places[start:stop], plan.dtype) for start, stop in bounds[:batches])
        return
    batch_size = max(plan.smallest_batch, min(batch_size, WINDOWS // (4 * prod(data.shape))))
    each = None if batches is None else -(-batches * batch_size // max(1, len(data)))
    at_once = max(1, LARGE // (4 * prod(data.whole_shape)))
    made, waiting = 0, list[tuple[Tensor, NDArray[np.int64]]]()
    for first in range(0, len(order), at_once):
        waiting += _draw_windows(data, order[first : first + at_once].tolist(), each, rng)
        while len(waiting) >= batch_size + plan.smallest_batch and made != batches:
            yield _cut_windows(plan, data, waiting[:batch_size])
            made, waiting = made + 1, waiting[batch_size:]
    if waiting and made != batches:  # the last batch has those that are too few for another
        yield _cut_windows(plan, data, waiting)


def _draw_windows(
    data: Samples, numbers: list[int], each: int | None, rng: np.random.Generator
) -> list[tuple[Tensor, NDArray[np.int64]]]:
    """Return stored cases ``[C, *axes]`` with the first voxel of a window, in a random order; ``each``: most of a case.

    ``numbers``: numbers of the cases among ``data``.
    """
    assert data.patches is not None
    found = []
    for number in numbers:
        case = data.read_case(number)[0][0]
        starts = list_starts(case.shape[1:], data.patches.size)
        found += [(case, np.array(starts[place])) for place in rng.permutation(len(starts))[:each]]
    return [found[place] for place in rng.permutation(len(found))]


def _cut_windows(plan: Plan, data: Samples, windows: list[tuple[Tensor, NDArray[np.int64]]]) -> Tensor:
    assert data.patches is not None
    return data.scale(torch.stack([data.patches.cut(*window) for window in windows]), plan.dtype)


@torch.no_grad()
def reestimate_statistics(plan: Plan, state: State, data: Samples, batches: int | None = None) -> State:
    """Return ``state`` with BatchNorm statistics replaced by mean and variance of each layer's inputs over ``data``.

    Labels are not used. Layers normalize by batches of 250 samples in a keyed order: if there are more samples, the
    inputs of a second BatchNorm layer depend on the batches. Frozen layers, and those that evaluation does not call,
    remain unchanged; with too few samples to train the model, all of ``state``. ``batches``: most batches to use; None:
    all.
    """
    state, scratch = dict(state), clone(state)  # layers in training mode update their buffers
    found = {name: Moments() for name in list_batch_norms(plan)}
    if len(data) < plan.smallest_batch or not found:
        return state
    with observe_inputs(plan, {name: [moments] for name, moments in found.items()}, training=True):
        for x in iterate_inputs(plan, data, BATCH, "reestimate", batches):
            compute_outputs(plan, scratch, to_memory_format(x, plan.image_format))
    for layer, moments in found.items():
        mean, variance = name_statistics(layer)
        if not moments.count:  # evaluation does not call it
            continue
        state[mean], state[variance] = moments.mean.to(state[mean]), moments.variance.to(state[variance])
    return state
