"""Steps of stacked clients (lanes), recorded once per shape.

A step that all lanes take with batches of one size is a flat list of tensor operations (:mod:`fedshift.engines.tape`).
Under plain SGD, factored gradients are multiplied directly into the parameters, and updates of large layers may be
deferred for the round (:class:`LaneUpdates`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.optimizer import SGD, may_join
from ..core.plan import Plan
from ..core.states import LocalTrainingState
from ..core.step import combine_samples, compute_objective, list_active, transform_gradients, update_
from ..nn.deferred import LaneUpdates, LaneWeight
from ..nn.lanes import MergedLanes
from ..utils.profiling import timed_section
from ..utils.state import State
from .tape import Factors, Tape, Untraceable

TAPES = 64
"""Maximum number of kinds of recorded steps, if recording does not affect results."""
Stack = tuple[State, ...]
"""The lanes' parameters, other entries, optimizer states, loaded entries, memories of each rule, and entries kept.

Each entry is ``[lanes, ...]``. Loaded entries are omitted if all lanes load the same.
"""
Deferred = Mapping[str, LaneUpdates]
"""Deferred updates by parameter."""
Slopes = Mapping[str, tuple[Tensor, Tensor]]
"""By parameter with deferred updates, the gradients of its layer's outputs, ``[lanes, B, O]``, and its inputs."""


class Stepper:
    """Steps lanes with batches of one size; thread-safe."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.template = Lock()  # running the plan's module replaces its tensors
        self._tapes: dict[object, Tape | None] = {}
        self._rules_act = any(map(plan.defines, ("batch", "outputs", "loss")))
        self._factors = plan.is_plain_sgd and not self._rules_act
        self._elementwise = isinstance(plan.optimizer, SGD) and not plan.defines("gradients")

    def step(
        self, job: LocalTrainingState, stack: Stack, x: Tensor, y: Tensor, keys: Tensor, *, recorded: bool = False,
        deferred: Deferred | None = None,
    ) -> tuple[Stack, Tensor]:  # fmt: skip
        """Step all lanes of ``stack`` in place; ``job`` holds the state common to all lanes.

        ``x [lanes, B, ...]``, ``y [lanes, B]``, ``keys [lanes]``; ``recorded``: whether to use a tape, if possible.
        ``deferred``: storage for the updates of parameters that stay unchanged. Returns the new stack and the losses
        ``[lanes]``.
        """
        params, rest, *others = stack
        deferred = deferred or {}
        with timed_section("forward and backward"):
            factors = {name: updates.factors() for name, updates in deferred.items()}
            weights = {**params, **{name: updates.w_OI for name, updates in deferred.items()}}
            before = {name: tensor.contiguous() for name, tensor in rest.items()}
            inputs = weights, before, x, y, keys, factors, self._list_read(job, stack)
            run = (self._find_tape(job, stack, inputs) if recorded else None) or partial(self._compute, job, stack)
            grads, after, loss, slopes = run(*inputs)
        with timed_section("update"):
            if self.plan.is_plain_sgd and not job.separate_phase:
                _subtract_(params, grads, job.lr)
                for name, (slope_KBO, x_KBI) in slopes.items():
                    deferred[name].add_(slope_KBO, x_KBI, job.lr)
            elif self._elementwise:
                update_(self.plan, replace_parts(job, stack), grads, after, 0)
            else:
                torch.vmap(partial(self._update_lane, job))(grads, after, stack, keys)
        return (params, after, *others), loss

    def _list_read(self, job: LocalTrainingState, stack: Stack) -> tuple[Any, ...]:
        """Return the inputs of rules that vary between steps and must not be constants of a tape."""
        if not self._rules_act:
            return ()
        return stack[3:], job.global_params, job.server_memory, job.steps, torch.tensor(job.lr, dtype=self.plan.dtype)

    def _update_lane(self, job: LocalTrainingState, grads: State, rest: State, parts: Stack, key: Tensor) -> Stack:
        lane = replace_parts(job, parts)
        after = update_(self.plan, lane, transform_gradients(self.plan, lane, grads, key), rest, 0)
        return after.params, after.optimizer, after.rest

    def _find_tape(self, job: LocalTrainingState, stack: Stack, inputs: tuple[Any, ...]) -> Tape | None:
        """Return the tape of steps of this kind, recorded if it is the first; None: they are not recorded."""
        if job.separate_phase:
            return None
        shapes = tuple(tensor.shape for tensor in tree_leaves(inputs[2:]))
        kind = shapes, job.frozen, self.plan.list_updates(job)
        if kind not in self._tapes and (self._factors or len(self._tapes) < TAPES):
            try:
                self._tapes[kind] = Tape(partial(self._compute, job, stack), inputs, factored=self._factors)
            except Untraceable:
                self._tapes[kind] = None
        return self._tapes.get(kind)

    def _compute(
        self, job: LocalTrainingState, stack: Stack, params: State, rest: State, x: Tensor, y: Tensor, keys: Tensor,
        factors: Mapping[str, tuple[Tensor, Tensor]], read: tuple[Any, ...],
    ) -> tuple[State, State, Tensor, Slopes]:  # fmt: skip
        """Return the lanes' gradients, their ``rest`` after the batch, their data losses and their slopes."""
        loaded, memory = stack[3], stack[4:]
        if self._rules_act:
            (loaded, *memory), common, server, steps, lr = read
            job = replace(job, global_params=common, server_memory=server, counter=steps, lr=lr)
        with self.template:
            if self.plan.estimator is None:
                return _differentiate(self.plan, job, (params, rest, loaded, *memory), x, y, keys, factors)
            combine = torch.vmap(lambda parts, *batch: combine_samples(self.plan, replace_parts(job, parts), *batch))
            return *combine((params, rest, {}, loaded, *memory), x, y, keys), {}


def _differentiate(
    plan: Plan, job: LocalTrainingState, parts: Stack, x: Tensor, y: Tensor, keys: Tensor,
    factors: Mapping[str, tuple[Tensor, Tensor]],
) -> tuple[State, State, Tensor, Slopes]:  # fmt: skip
    """Return the gradients of the lanes' objectives, their ``rest`` after the batch, their data losses and slopes.

    Parameters that the objective does not depend on have no gradient. ``parts``: parameters, rest, loaded entries and
    memories; parameters with ``factors`` of deferred updates have no lanes, and slopes instead of a gradient.
    """

    def descend(
        params: State, rest: State, loaded: State, memory: Stack, x: Tensor, y: Tensor, key: Tensor, lane: State
    ) -> tuple[Tensor, Tensor, State, State]:
        weights = {name: LaneWeight.of(params[name], *tensors) for name, tensors in lane.items()}
        params = {**params, **weights}
        job_of_lane = replace_parts(job, (params, rest, {}, loaded, *memory))
        total, loss, after = compute_objective(plan, job_of_lane, params, x, y, key)
        return total, loss, after, {name: weight.input for name, weight in weights.items()}

    params, rest, loaded, *memory = parts
    active = frozenset(list_active(plan, job)) - factors.keys()
    free = {name: tensor.detach().requires_grad_() for name, tensor in params.items() if name in active}
    zeros = {
        name: s_KRO.new_zeros(*x.shape[:2], s_KRO.shape[2], requires_grad=True) for name, (s_KRO, _) in factors.items()
    }
    lanes = {name: (*pair, zeros[name]) for name, pair in factors.items()}
    with torch.enable_grad(), MergedLanes():
        dims = {name: None if name in factors else 0 for name in params}
        arguments: Any = {**params, **free}, rest, loaded, tuple(memory), x, y, keys, lanes
        total, loss, after, inputs = torch.vmap(descend, (dims, *[0] * 7))(*arguments)
        gradients = torch.autograd.grad(total.sum(), (*free.values(), *zeros.values()), allow_unused=True)
    named = dict(zip((*free, *zeros), gradients, strict=True))
    grads = {name: named[name] for name in free if named[name] is not None}
    slopes = {
        name: (zeros[name].detach() if named[name] is None else named[name], x_KBI.detach())
        for name, x_KBI in inputs.items()
    }
    return grads, {name: tensor.detach() for name, tensor in after.items()}, loss.detach(), slopes


def _subtract_(params: State, grads: Mapping[str, Tensor | Factors], lr: float) -> None:
    """Take a step of plain SGD in place of ``params``."""
    plain = {name: grad for name, grad in grads.items() if not isinstance(grad, Factors)}
    if joined := may_join(plain.values()):
        torch._foreach_sub_([params[name] for name in plain], [*plain.values()], alpha=lr)
    for name, grad in grads.items():
        if isinstance(grad, Factors):
            params[name].baddbmm_(*grad, alpha=-lr)
        elif not joined:
            params[name].sub_(grad, alpha=lr)


def replace_parts(job: LocalTrainingState, parts: Stack) -> LocalTrainingState:
    """Return the job with the ``parts`` of a stack, or of one of its lanes."""
    params, rest, optimizer, loaded, *others = parts
    memory, personal = others[: len(job.memory)], others[len(job.memory) :]
    return replace(
        job, params=params, rest=rest, optimizer=optimizer, global_params=loaded or job.global_params,
        memory=tuple(memory), personal=personal[0] if personal else {},
    )  # fmt: skip
