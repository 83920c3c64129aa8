"""The stacked engine: clients side by side in one tensor program, one lane each, by ``torch.vmap``.

A small network spends its time on calls, not on arithmetic; side by side, clients share the calls. Lanes are stepped in
chunks whose tensors fit the processor's cache. Each step groups the lanes whose batches have the same size; a client
that has done its steps leaves, so that no batch is padded and nothing is masked. Tensors that all lanes still share
(the broadcast model, before the first step) are read once, not copied for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from ..core.kernel import (
    ClientState,
    LocalTrainingState,
    ServerState,
    client_final,
    client_init,
    compute_objective,
    init_client,
    init_server,
    load_state,
    transform_gradients,
    update_,
)
from ..core.optimizer import SGD
from ..core.plan import Plan
from ..core.rule import Rule
from ..data.augmentation import Augmentation
from ..nn.linear import vmapped_lanes
from ..utils.profiling import timed_section
from ..utils.state import State, nbytes, pick
from .cost_model import measure_activations
from .engine import Batches, ClientResult, Data, Engine, refuse_divergence, total_loss

CACHE = 2**25
"""Bytes of trained parameters that are stepped together."""
ACTIVATIONS = 2**27
"""Bytes of layers' outputs that are held at a time."""
Stack = tuple[State, ...]
"""The lanes' parameters, other entries, optimizer states and memories of each rule, each entry ``[lanes, ...]``."""


class _Lane(NamedTuple):
    """A client's steps of the round: ``batches``, then those that train the rules' own parameters ``apart``."""

    name: str
    client: ClientState
    batches: Batches
    apart: Batches

    @property
    def sizes(self) -> list[int]:
        """Samples of each batch."""
        return [len(index) for _, index in self.batches]


class Stacked(Engine):
    """Runs what ``torch.vmap`` can run; ``width``: the most lanes that are stepped together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.width = count_lanes(self.plan, self.data, len(self.data))

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        split = next(iter(data.values()))
        count = plan.smallest_batch
        job = client_init(plan, init_client(plan), init_server(plan), planned_steps=1)
        index = torch.arange(count, device=split.y.device) % len(split)
        x, y = split.inputs(index, plan.dtype), split.y[index]
        try:
            run_stacked_step(plan, job, 2, x, y)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return f"cannot run {plan.method.name} on this model, for which torch.vmap says: {reason}"
        return None

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        lanes = [_Lane(name, client, *self.draw_batches(name, client)) for name, client in clients.items()]
        lanes.sort(key=lambda lane: (len(lane.batches), lane.sizes), reverse=True)
        width = min(self.width, len(lanes))
        for start in range(0, len(lanes), width):
            yield from self._chunk(server, lanes[start : start + width])

    def _chunk(self, server: ServerState, lanes: Sequence[_Lane]) -> Iterator[tuple[str, ClientResult]]:
        plan = self.plan
        jobs = [load_state(plan, lane.client, server, planned_steps=len(lane.batches)) for lane in lanes]
        stack, losses = self._steps(lanes, [lane.batches for lane in lanes], jobs, _stack_jobs(jobs))
        if plan.own_epochs:
            jobs = [replace(job, done=job.start + len(lane.batches)) for job, lane in zip(jobs, lanes, strict=True)]
            turns = [lane.apart for lane in lanes]
            stack, _ = self._steps(lanes, turns, [replace(job, apart=True) for job in jobs], stack)
        per_lane = [torch.stack(each).double().cpu() for each in losses]
        broken = not _is_finite(stack)
        for number, (lane, job) in enumerate(zip(lanes, jobs, strict=True)):
            own = tuple({entry: tensor[number] for entry, tensor in state.items()} for state in stack)
            done = replace(_replace_parts(job, own), done=job.start + len(lane.batches), samples=sum(lane.sizes))
            client, update = client_final(plan, done)
            doubtful = {**client.personal, **update.shared} if broken else {}
            refuse_divergence(per_lane[number], doubtful, lane.name, server)
            loss_sum = total_loss(per_lane[number], lane.batches)
            yield lane.name, ClientResult(client=client, update=update, loss_sum=loss_sum)

    def _steps(
        self, lanes: Sequence[_Lane], turns: Sequence[Batches], jobs: Sequence[LocalTrainingState], stack: Stack
    ) -> tuple[Stack, list[list[Tensor]]]:
        """Return the stack after each lane's steps in ``turns``, begun from ``jobs``, and each lane's losses."""
        plan = self.plan
        paced = any(rule.requires.step_budget for rule in plan.method.rules)
        losses: list[list[Tensor]] = [[] for _ in lanes]
        for at in range(max(map(len, turns))):
            together: dict[tuple[int, int], list[int]] = {}
            for number, turn in enumerate(turns):
                if at < len(turn):
                    kind = len(turn[at][1]), jobs[number].planned_steps if paced else 0
                    together.setdefault(kind, []).append(number)
            for members in together.values():
                with timed_section("data"):
                    taken = [(lanes[number].name, *turns[number][at]) for number in members]
                    x, y = map(torch.stack, zip(*(self.load_batch(*each) for each in taken), strict=True))
                    keys = torch.stack([self.step_key(name, step) for name, step, _ in taken])
                first = jobs[members[0]]
                template = first if first.apart else replace(first, done=first.start + at)
                if len(members) == len(lanes):
                    stack, loss = _step(plan, template, stack, x, y, keys)
                else:
                    index = torch.tensor(members, device=y.device)
                    rows = tuple({entry: tensor[index] for entry, tensor in state.items()} for state in stack)
                    changed, loss = _step(plan, template, rows, x, y, keys)
                    stack = _write_rows(stack, changed, index)
                for number, value in zip(members, loss.unbind(), strict=True):
                    losses[number].append(value)
        return stack, losses


def count_lanes(plan: Plan, data: Data, clients: int) -> int:
    """Return how many of ``clients`` are stepped together: parameters fit the cache, activations the memory."""
    held = nbytes(pick(plan.initial, plan.trained))
    largest = max(map(len, data.values()))
    made = measure_activations(plan, data) * min(plan.work.batch_size or largest, largest)
    return min(clients, max(1, CACHE // max(1, held)), max(1, ACTIVATIONS // max(1, made)))


def run_stacked_step(plan: Plan, job: LocalTrainingState, lanes: int, x: Tensor, y: Tensor) -> object:
    """Run one step of ``lanes`` clients that share the batch ``x [B, ...]``, ``y [B]``, to time it or to try it."""
    keys = torch.zeros(lanes, dtype=torch.int64, device=y.device)
    return _step(plan, job, _stack_jobs([job] * lanes), x.expand(lanes, *x.shape), y.expand(lanes, -1), keys)


def _stack_jobs(jobs: Sequence[LocalTrainingState]) -> Stack:
    parts = [(job.params, job.rest, job.optimizer, *job.memory) for job in jobs]
    return tuple(map(_stack_states, zip(*parts, strict=True)))


def _replace_parts(job: LocalTrainingState, parts: Stack) -> LocalTrainingState:
    params, rest, optimizer, *memory = parts
    return replace(job, params=params, rest=rest, optimizer=optimizer, memory=tuple(memory))


def _stack_states(states: Sequence[State]) -> State:
    """Return each entry as ``[lanes, ...]``; expanded, not copied, where the lanes share one tensor."""
    stacked = {}
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        shared = len(tensors) > 1 and all(tensor is first for tensor in tensors)
        stacked[name] = first.expand(len(tensors), *first.shape) if shared else torch.stack(tensors)
    return stacked


def _step(
    plan: Plan, job: LocalTrainingState, stack: Stack, x: Tensor, y: Tensor, keys: Tensor
) -> tuple[Stack, Tensor]:
    """Step all lanes of ``stack``, in its memory unless that is shared; ``job`` holds all that lanes have in common.

    ``x [lanes, B, ...]``, ``y [lanes, B]``, ``keys [lanes]``. Returns the new stack and the losses ``[lanes]``.
    """

    def descend(
        params: State, rest: State, memory: Stack, x: Tensor, y: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, State]:
        return compute_objective(plan, replace(job, rest=rest, memory=memory), params, x, y, key)

    def update_lane(grads: State, rest: State, own: Stack, key: Tensor) -> Stack:
        lane = _replace_parts(job, own)
        after = update_(plan, lane, transform_gradients(plan, lane, grads, key), rest, 0)
        return after.params, after.optimizer, after.rest

    params, rest, optimizer, *memory = stack
    with timed_section("forward and backward"), vmapped_lanes():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        total, loss, rest = torch.vmap(descend)(leaves, rest, tuple(memory), x, y, keys)
        found = torch.autograd.grad(total.sum(), tuple(leaves.values()), materialize_grads=True)
        grads = dict(zip(leaves, found, strict=True))
        rest = {name: tensor.detach() for name, tensor in rest.items()}
    with timed_section("update"):
        params, optimizer = _make_writable(params), _make_writable(optimizer)
        own = params, stack[1], optimizer, *memory
        if _is_elementwise(plan):
            update_(plan, _replace_parts(job, own), grads, rest, 0)
        else:
            torch.vmap(update_lane)(grads, rest, own, keys)
    return (params, rest, optimizer, *memory), loss.detach()


def _is_elementwise(plan: Plan) -> bool:
    """Return whether an update treats all numbers alike, so that it needs no ``torch.vmap`` over lanes."""
    return isinstance(plan.optimizer, SGD) and all(
        type(rule).transform_grads is Rule.transform_grads for rule in plan.method.rules
    )


def _make_writable(state: State) -> State:
    """Return ``state`` in memory that can be written to."""
    return {name: tensor.contiguous() for name, tensor in state.items()}


def _write_rows(stack: Stack, changed: Stack, index: Tensor) -> Stack:
    """Return ``stack`` with the rows at ``index`` replaced by those of ``changed``."""
    return tuple(
        {entry: tensor.contiguous().index_copy_(0, index, rows[entry]) for entry, tensor in state.items()}
        for state, rows in zip(stack, changed, strict=True)
    )


def _is_finite(stack: Stack) -> bool:
    """Return whether the sums of all trained parameters and statistics are finite, hence these themselves."""
    sums = [tensor.sum() for state in stack[:2] for tensor in state.values() if tensor.is_floating_point()]
    return bool(torch.stack([value.double() for value in sums]).isfinite().all())
