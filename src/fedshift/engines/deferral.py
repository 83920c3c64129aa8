"""Steps of plain SGD that hold back the updates of large linear layers while batches are small.

How it is done, and why, says :mod:`fedshift.nn.deferred`. The steps of a round differ from
:func:`fedshift.core.kernel.client_step_` by rounding, and depend on that round alone, so that a resumed run and another
process round alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.kernel import LocalTrainingState, compute_objective, update_
from ..core.plan import Plan, to_memory_format
from ..core.rule import Rule
from ..nn.deferred import FEW, HeldUpdates
from ..nn.linear import ALONE, FastLinear
from ..utils.profiling import timed_section

LEAST = 2**20
"""Weights below which a layer is updated at every step: they stay in the processor's cache."""
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
    if any(type(rule).transform_loss is not Rule.transform_loss for rule in plan.method.rules):
        return {}
    if not plan.subtracts or plan.precision != "float32" or (plan.work.batch_size or FEW + 1) > FEW:
        return {}
    layers = {id(layer._parameters): layer for layer in plan.layers if isinstance(layer, nn.Linear)}
    return {
        name: HeldUpdates(job.params[name], fast=not _chosen(layers[id(held)]).isdisjoint(ALONE))
        for held, key, name in plan.slots
        if key == "weight" and id(held) in layers and name in job.params
        if job.params[name].is_cpu and job.params[name].numel() >= LEAST
    }


def _chosen(layer: nn.Linear) -> frozenset[str]:
    return layer._chosen if isinstance(layer, FastLinear) else frozenset()


def _step(
    plan: Plan, job: LocalTrainingState, held: dict[str, HeldUpdates], x: Tensor, y: Tensor, key: Tensor
) -> tuple[LocalTrainingState, Tensor]:
    """Take a step as :func:`fedshift.core.kernel.client_step_` does, but for the updates of the weights ``held``."""
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
