"""Steps of plain SGD that hold back the updates of large linear layers while batches are small, alone and in lanes.

How it is done, and why, says :mod:`fedshift.nn.deferred`. The steps of a round differ from
:func:`fedshift.core.step.client_step_` by rounding, and depend on that round alone, so that a resumed run and another
process round alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.plan import Plan, to_memory_format
from ..core.states import LocalTrainingState
from ..core.step import compute_objective, update_
from ..nn.deferred import FEW, HeldUpdates, LaneUpdates
from ..nn.linear import ALONE, chosen_products
from ..utils.profiling import timed_section
from ..utils.state import State

LEAST = 2**20
"""Weights below which a layer is updated at every step: they stay in the processor's cache."""
LARGE = 2**15
"""Weights below which a layer of lanes is updated at every step."""
Step = Callable[[Plan, LocalTrainingState, Tensor, Tensor, Tensor], tuple[LocalTrainingState, Tensor]]


@contextmanager
def deferred_steps(plan: Plan, job: LocalTrainingState, usual: Step) -> Iterator[Step]:
    """Yield the function that takes the steps of ``job``, ``usual`` where no updates are held back.

    At the end of the block all updates are in the job's memory.
    """
    held = _hold(plan, job)
    if not held:
        yield usual
        return

    def step(
        plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
    ) -> tuple[LocalTrainingState, Tensor]:
        return _step(plan, job, held, x, y, key)

    yield step
    with timed_section("update"):
        for each in held.values():
            each.settle()


def _hold(plan: Plan, job: LocalTrainingState) -> dict[str, HeldUpdates]:
    """Return the weights whose updates are to be held back, by name; none where a rule might look at them."""
    if (plan.work.batch_size or FEW + 1) > FEW or not _looks_at_no_weights(plan):
        return {}
    return {
        name: HeldUpdates(job.params[name], fast=not chosen_products(layer).isdisjoint(ALONE))
        for name, layer in _linear_layers(plan)
        if name in job.params and job.params[name].is_cpu and job.params[name].numel() >= LEAST
    }


def choose_held(plan: Plan, names: frozenset[str], sizes: Sequence[int]) -> dict[str, frozenset[str]]:
    """Return what lanes with batches of ``sizes`` hold back for a round: weights that cost more than their updates.

    Among ``names``; each with the products that its layer forms by oneDNN.
    """
    if max(sizes, default=FEW + 1) > FEW or not _looks_at_no_weights(plan):
        return {}
    shapes = {name: plan.initial[name].shape for name in names}
    return {
        name: chosen_products(layer)
        for name, layer in _linear_layers(plan)
        if name in names and LARGE <= shapes[name].numel() >= sum(sizes) * sum(shapes[name])
    }


def hold(params: State, held: Mapping[str, frozenset[str]], rows: int) -> Mapping[str, LaneUpdates]:
    """Return what is to hold ``rows`` rows of the updates of the parameters ``held``, in which lanes are equal."""
    return {
        name: LaneUpdates(params[name][0].contiguous(), len(params[name]), rows, fast) for name, fast in held.items()
    }


def _looks_at_no_weights(plan: Plan) -> bool:
    """Return whether steps are plain SGD, in float32 or more, whose rules act on no weights."""
    same = not (plan.defines("loss") or plan.defines("batch"))
    return same and plan.subtracts and plan.precision == "float32"


def _linear_layers(plan: Plan) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers by the names of their weights; a weight of several, several times."""
    layers = {id(layer._parameters): layer for layer in plan.layers if isinstance(layer, nn.Linear)}
    return [(name, layers[id(held)]) for held, key, name in plan.slots if key == "weight" and id(held) in layers]


def _step(
    plan: Plan, job: LocalTrainingState, held: dict[str, HeldUpdates], x: Tensor, y: Tensor, key: Tensor
) -> tuple[LocalTrainingState, Tensor]:
    """Take a step as :func:`fedshift.core.step.client_step_` does, but for the updates of the weights ``held``."""
    with timed_section("forward and backward"):
        x = to_memory_format(x, plan.image_format)
        leaves = {
            name: held[name].expose() if name in held else tensor.detach().requires_grad_()
            for name, tensor in job.params.items()
        }
        with torch.enable_grad():
            total, loss, rest = compute_objective(plan, job, leaves, x, y, key)
        for each in held.values():
            each.listening = True
        found = torch.autograd.grad(total, tuple(leaves.values()), allow_unused=True)
        for each in held.values():
            each.listening = False
    with timed_section("update"):
        grads = dict(zip(leaves, found, strict=True))
        usual = {name for name, grad in grads.items() if grad is not None}
        params = {name: tensor for name, tensor in job.params.items() if name in usual}
        rest = {name: tensor.detach() for name, tensor in rest.items()}
        after = update_(plan, replace(job, params=params), grads, rest, len(y))
        for each in held.values():
            each.add_(job.lr)
    return replace(after, params=job.params), loss.detach()
