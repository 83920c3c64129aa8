"""Steps of stacked clients (lanes): recorded once per shape, and merged into one pass if only averages are needed.

A step that all lanes take with batches of one size is a flat list of tensor operations (:mod:`fedshift.engines.tape`).
Under plain SGD, factored gradients are multiplied directly into the parameters. If lanes take one step from the same
parameters and only their sum is needed, lanes share parameters: one product computes all lanes, and its gradient is the
sum of their gradients (FedSMB's identity, Nasirigerdeh et al., arXiv:2011.07006, for a part of the network). If they
take more steps, updates of large layers may be deferred for the round (:class:`LaneUpdates`).
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
from ..nn.linear import vmapped_lanes
from ..utils.profiling import timed_section
from ..utils.state import State
from .tape import Factors, Tape, Untraceable

TAPES = 64
"""Maximum number of kinds of recorded steps, if recording does not affect results."""
Stack = tuple[State, ...]
"""The lanes' parameters, other entries, optimizer states, loaded entries, memories of each rule, and entries kept.

Each entry is ``[lanes, ...]``. Loaded entries are omitted if all lanes load the same.
"""
Gradients = Mapping[str, Tensor | Factors]
Held = Mapping[str, LaneUpdates]
"""Deferred updates by parameter."""


class Stepper:
    """Steps lanes with batches of one size; thread-safe.

    ``shared``: parameters that are equal in all lanes before the only step, and of which only the mean is needed after
    it (:func:`find_shared`).
    """

    def __init__(self, plan: Plan, shared: frozenset[str] = frozenset()) -> None:
        self.plan, self._shared = plan, shared
        self.template = Lock()  # running the plan's module replaces its tensors
        self._tapes: dict[object, Tape | None] = {}
        self._rules_act = any(map(plan.defines, ("batch", "outputs", "loss")))
        self._elementwise = isinstance(plan.optimizer, SGD) and not plan.defines("gradients")

    def step(
        self, job: LocalTrainingState, stack: Stack, x: Tensor, y: Tensor, keys: Tensor, *, recorded: bool = False,
        held: Held | None = None,
    ) -> tuple[Stack, Tensor]:  # fmt: skip
        """Step all lanes of ``stack`` in place; ``job`` holds the state common to all lanes.

        ``x [lanes, B, ...]``, ``y [lanes, B]``, ``keys [lanes]``; ``recorded``: whether to use a tape, if possible.
        ``held``: storage for the updates of parameters that stay unchanged. Returns the new stack and the losses
        ``[lanes]``.
        """
        if self._shared:
            return self._step_together(job, stack, x, y, keys)
        held = held or {}
        params, rest, optimizer, *memory = stack
        weights = {**params, **{name: each.w_OI for name, each in held.items()}}
        with timed_section("forward and backward"):
            lanes = weights, rest, optimizer, *memory
            grads, rest, loss = self._differentiate(job, lanes, x, y, keys, recorded=recorded, held=held)
        with timed_section("update"):
            if self.plan.is_plain_sgd and not job.separate_phase:
                _subtract_(params, grads, job.lr, held)
            elif self._elementwise:
                parts = params, stack[1], optimizer, *memory
                update_(self.plan, replace_parts(job, parts), dict(grads), rest, 0)  # type: ignore[arg-type]
            else:
                update_lane = partial(self._update_lane, job)
                torch.vmap(update_lane)(grads, rest, (params, stack[1], optimizer, *memory), keys)
        return (params, rest, optimizer, *memory), loss

    def _step_together(
        self, job: LocalTrainingState, stack: Stack, x: Tensor, y: Tensor, keys: Tensor
    ) -> tuple[Stack, Tensor]:
        """Take :meth:`step` with the mean of the lanes' gradients for the shared parameters."""
        shared = self._shared
        params, before = (
            {n: tensor[0].contiguous() if n in shared else tensor for n, tensor in state.items()} for state in stack[:2]
        )
        with timed_section("forward and backward"):
            sums, rest, loss = self._differentiate(job, (params, before, *stack[2:]), x, y, keys, recorded=True)
        with timed_section("update"):
            if self.plan.is_plain_sgd:
                rates = {n: job.lr / len(x) if n in shared else job.lr for n in params}
                params = {n: t.sub(sums[n], alpha=rates[n]) if n in sums else t for n, t in params.items()}  # type: ignore[arg-type]
            else:
                grads: State = {n: grad / len(x) if n in shared else grad for n, grad in sums.items()}  # type: ignore[operator,misc]
                params = {n: tensor.clone() if n in shared else tensor for n, tensor in params.items()}
                parts = params, stack[1], self.plan.optimizer.init(params), *stack[3:]
                update_(self.plan, replace_parts(job, parts), grads, rest, 0)
        params = {n: tensor.expand(len(x), *tensor.shape) if n in shared else tensor for n, tensor in params.items()}
        return (params, rest, *stack[2:]), loss

    def _list_read(self, job: LocalTrainingState, stack: Stack) -> tuple[Any, ...]:
        """Return the inputs of rules that vary between steps and must not be constants of a tape."""
        if not self._rules_act:
            return ()
        return stack[3:], job.global_params, job.server_memory, job.steps, torch.tensor(job.lr, dtype=self.plan.dtype)

    def _update_lane(self, job: LocalTrainingState, grads: State, rest: State, parts: Stack, key: Tensor) -> Stack:
        lane = replace_parts(job, parts)
        after = update_(self.plan, lane, transform_gradients(self.plan, lane, grads, key), rest, 0)
        return after.params, after.optimizer, after.rest

    def _differentiate(
        self, job: LocalTrainingState, stack: Stack, x: Tensor, y: Tensor, keys: Tensor, *, recorded: bool,
        held: Held | None = None,
    ) -> tuple[Gradients, State, Tensor]:  # fmt: skip
        """Return the gradients, ``rest`` after the batch and the data losses ``[lanes]``.

        For ``held`` parameters, the gradient is a pair: the gradients of the layer's outputs, and its inputs.
        """
        params, rest, *_ = stack
        held = held or {}
        factors = {name: updates.factors() for name, updates in held.items()}
        rest = {name: tensor.contiguous() for name, tensor in rest.items()}
        read = self._list_read(job, stack)
        inputs = params, rest, x, y, keys, factors, read

        def run(
            params: State, rest: State, x: Tensor, y: Tensor, keys: Tensor, factors: Any, read: tuple[Any, ...]
        ) -> tuple[State, State, Tensor, dict[str, Any]]:
            now, around = job, stack[3:]
            if self._rules_act:
                around, loaded, server, steps, lr = read
                now = replace(job, global_params=loaded, server_memory=server, counter=steps, lr=lr)
            lanes = {name: (*pair, held[name].fast) for name, pair in factors.items()}
            with self.template:
                parts = params, rest, *around
                grads, after, loss = _compute_lanes(self.plan, now, parts, x, y, keys, shared=self._shared, held=lanes)
            return grads, after, loss, {name: grads.pop(name) for name in held}

        tape = None
        # A tape fixes the round, and one a round costs more than it saves.
        if recorded and not job.separate_phase:
            shapes = tuple(tensor.shape for tensor in tree_leaves((x, y, factors, read)))
            kind = shapes, job.frozen, self.plan.list_updates(job)
            factored = self.plan.is_plain_sgd and not (self._shared or self._rules_act)
            if kind not in self._tapes and (factored or len(self._tapes) < TAPES):
                try:
                    self._tapes[kind] = Tape(run, inputs, factored=factored)
                except Untraceable:
                    self._tapes[kind] = None
            tape = self._tapes.get(kind)
        grads, after, loss, pairs = (tape or run)(*inputs)
        return grads | pairs, after, loss


def _compute_lanes(
    plan: Plan, job: LocalTrainingState, parts: Stack, x: Tensor, y: Tensor, keys: Tensor, *, shared: frozenset[str],
    held: Mapping[str, tuple[Tensor, Tensor, frozenset[str]]],
) -> tuple[dict[str, Any], State, Tensor]:  # fmt: skip
    """Return the gradients of the lanes' objectives, their ``rest`` after the batch, and their data losses.

    Parameters that the objective does not depend on have none.
    ``shared`` parameters have no lanes; their gradients are summed over lanes. ``held`` parameters have no lanes
    either; each is mapped to the two factors of its deferred updates and its oneDNN products, and its gradient is a
    pair: the gradients of the layer's outputs, ``[lanes, B, O]``, and the inputs, ``[lanes, B, I]``.
    """

    def descend(
        params: State, rest: State, loaded: State, memory: Stack, x: Tensor, y: Tensor, key: Tensor, lane: State
    ) -> tuple[Tensor, Tensor, State, State]:
        weights = {
            name: LaneWeight.of(params[name], factors, slopes, held[name][2])
            for name, (*factors, slopes) in lane.items()
        }
        params = {**params, **weights}
        job_of_lane = replace_parts(job, (params, rest, {}, loaded, *memory))
        total, loss, after = compute_objective(plan, job_of_lane, params, x, y, key)
        return total, loss, after, {name: weight.input for name, weight in weights.items()}

    params, rest, loaded, *memory = parts
    if plan.estimator:

        def combine(
            params: State, rest: State, loaded: State, memory: Stack, *batch: Tensor
        ) -> tuple[State, State, Tensor]:
            return combine_samples(plan, replace_parts(job, (params, rest, {}, loaded, *memory)), *batch)

        combined: tuple[State, State, Tensor] = torch.vmap(combine)(params, rest, loaded, tuple(memory), x, y, keys)
        return combined
    active = frozenset(list_active(plan, job))
    leaves = {
        name: tensor.detach().requires_grad_() if name in active and name not in held else tensor
        for name, tensor in params.items()
    }
    slopes = {
        name: s_KRO.new_zeros(*x.shape[:2], s_KRO.shape[2], requires_grad=True) for name, (s_KRO, *_) in held.items()
    }
    lanes = {name: (s_KRO, x_KRI, slopes[name]) for name, (s_KRO, x_KRI, _) in held.items()}
    with torch.enable_grad(), vmapped_lanes(), MergedLanes():
        dims = ({name: None if name in shared or name in held else 0 for name in state} for state in (leaves, rest))
        arguments: Any = leaves, rest, loaded, tuple(memory), x, y, keys, lanes
        total, loss, after, inputs = torch.vmap(descend, (*dims, *[0] * 6))(*arguments)
        free = {name: tensor for name, tensor in leaves.items() if name in active and name not in held}
        gradients = torch.autograd.grad(total.sum(), (*free.values(), *slopes.values()), allow_unused=True)
    named = zip((*free, *slopes), gradients, strict=True)
    grads: dict[str, Any] = {name: grad for name, grad in named if grad is not None}
    grads |= {name: (grads.get(name, slopes[name].detach()), x_KBI.detach()) for name, x_KBI in inputs.items()}
    return grads, {n: t.detach() for n, t in after.items()}, loss.detach()


def _subtract_(params: State, grads: Gradients, lr: float, held: Held) -> None:
    """Take a step of plain SGD in place of ``params``, or add it to the deferred updates ``held``."""
    plain = {n: grad for n, grad in grads.items() if n not in held and not isinstance(grad, Factors)}
    if joined := may_join(plain.values()):
        torch._foreach_sub_([params[name] for name in plain], [*plain.values()], alpha=lr)
    for name, grad in grads.items():
        if name in held:
            slope_KBO, x_KBI = grad
            held[name].add_(slope_KBO, x_KBI, lr)
        elif isinstance(grad, Factors):
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
