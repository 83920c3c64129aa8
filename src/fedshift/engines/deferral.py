"""Steps of plain SGD with deferred updates of large linear layers, for small batches, with or without lanes.

See :mod:`fedshift.nn.deferred` for the algorithm. Results differ from :func:`fedshift.core.step.client_step_` by
rounding, which depends only on the round, so that resumed runs and other processes produce the same bits.
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
"""Minimum number of weights of a layer whose updates are deferred; smaller layers stay in the processor's cache."""
LARGE = 2**15
"""Minimum number of weights of a layer whose updates are deferred in lanes."""
Step = Callable[[Plan, LocalTrainingState, Tensor, Tensor, Tensor], tuple[LocalTrainingState, Tensor]]


@contextmanager
def deferred_steps(plan: Plan, job: LocalTrainingState, usual: Step) -> Iterator[Step]:
    """Yield the function that takes the steps of ``job``: ``usual``, unless updates are deferred.

    At the end of the block, all updates are applied to the job's tensors.
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
    """Return the weights with deferred updates, by name; none if a rule might read them."""
    if (plan.work.batch_size or FEW + 1) > FEW or not _is_plain_sgd(plan):
        return {}
    return {
        name: HeldUpdates(job.params[name], fast=not chosen_products(layer).isdisjoint(ALONE))
        for name, layer in _linear_layers(plan)
        if name in job.params and job.params[name].is_cpu and job.params[name].numel() >= LEAST
    }


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
    unread = not (plan.defines("loss") or plan.defines("batch"))
    return unread and plan.subtracts and not plan.autocast


def _linear_layers(plan: Plan) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers with the names of their weights; a shared weight occurs once per layer."""
    layers = {id(layer._parameters): layer for layer in plan.layers if isinstance(layer, nn.Linear)}
    return [(name, layers[id(held)]) for held, key, name in plan.slots if key == "weight" and id(held) in layers]


def _step(
    plan: Plan, job: LocalTrainingState, held: dict[str, HeldUpdates], x: Tensor, y: Tensor, key: Tensor
) -> tuple[LocalTrainingState, Tensor]:
    """Take :func:`fedshift.core.step.client_step_`, deferring the updates of the weights ``held``."""
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
        gradients = torch.autograd.grad(total, tuple(leaves.values()), allow_unused=True)
        for each in held.values():
            each.listening = False
    with timed_section("update"):
        grads = dict(zip(leaves, gradients, strict=True))
        usual = {name for name, grad in grads.items() if grad is not None}
        params = {name: tensor for name, tensor in job.params.items() if name in usual}
        rest = {name: tensor.detach() for name, tensor in rest.items()}
        after = update_(plan, replace(job, params=params), grads, rest, len(y))
        for each in held.values():
            each.add_(job.lr)
    return replace(after, params=job.params), loss.detach()
