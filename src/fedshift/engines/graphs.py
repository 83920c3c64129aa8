"""Steps of stacked clients on tensors that stay in place, so that a GPU can replay each kind of step as one CUDA graph.

Launching the kernels of a step one by one can take longer than running them. A graph launches all of them at once, on
the memory of the step that was captured: the stack is copied there once a round, and each step's batch and keys before
it is replayed. On first use, a graph's step is compared with the same step without it; if they differ, or if capturing
fails, steps run without graphs. Elsewhere than on CUDA, replaying is calling the step again, with the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..core.states import LocalTrainingState
from ..core.step import list_updates
from ..utils.profiling import is_recording
from .stepper import Stack, Stepper

KINDS = 16
"""Maximum number of kinds of steps that a stack has graphs of."""
STACKS = 4
"""Maximum number of shapes of stacks; a copy of a stack of each shape stays in memory."""


class Replay:
    """A step that is run again by calling it; subclasses capture it first."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def capture(self) -> None:
        """Prepare :meth:`replay`; may run the step."""

    def replay(self) -> None:
        """Run the step."""
        self._run()


class CudaReplay(Replay):
    """A step that is captured as a CUDA graph on the current device."""

    def capture(self) -> None:
        """Run the step on another stream, which fills torch's caches, and capture it."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._run()
            self._run()
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._run()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


REPLAYS: dict[str, type[Replay]] = {"cuda": CudaReplay}
"""Ways to replay steps, by type of device. Steps on other devices are not replayed."""


class StaticSteps:
    """Steps of a stack like ``stack``, which is copied to tensors that stay in place.

    ``stack`` and the state common to all lanes, ``job``, give shapes and strides. ``stack``, the attribute: those
    tensors. ``notices`` receives why a graph is not used.
    """

    def __init__(self, stepper: Stepper, job: LocalTrainingState, stack: Stack, notices: list[str]) -> None:
        self._stepper, self._notices = stepper, notices
        params, rest, *others = stack
        contiguous = {name: torch.empty_like(t, memory_format=torch.contiguous_format) for name, t in rest.items()}
        made = tree_map(torch.empty_like, [params, *others])
        self.stack: Stack = (made[0], contiguous, *made[1:])
        self._read = tree_map(torch.empty_like, _list_read(stepper, job))
        self._leaves: list[Tensor] = tree_leaves((self.stack, self._read))
        device = self._leaves[0].device
        self._counter = torch.zeros((), dtype=torch.int64, device=device)
        self._kind = REPLAYS[device.type]
        self._at = 0
        self._steps: dict[object, tuple[tuple[Tensor, ...], Tensor, Replay]] = {}

    def load(self, job: LocalTrainingState, stack: Stack) -> None:
        """Copy the tensors of ``stack`` and what rules read of ``job`` that are not in place already."""
        _copy_(self._leaves, tree_leaves((stack, _list_read(self._stepper, job))))

    def take(self) -> Stack:
        """Return a copy of the lanes' parameters, other entries and optimizer states."""
        copies: Stack = tuple(tree_map(torch.empty_like, list(self.stack[:3])))
        _copy_(tree_leaves(copies), tree_leaves(self.stack[:3]))
        return copies

    def step(self, job: LocalTrainingState, x: Tensor, y: Tensor, keys: Tensor) -> Tensor:
        """Take a step of all lanes; return their losses ``[lanes]``, which the next step overwrites.

        For arguments, see :meth:`Stepper.step`.
        """
        at, kind = job.done - job.start, (x.shape, y.shape, job.frozen, job.lr, list_updates(self._stepper.plan, job))
        if at != self._at:
            self._counter.fill_(at)
        self._at = at + 1
        if kind not in self._steps:
            if len(self._steps) == KINDS:
                del self._steps[next(iter(self._steps))]
            self._steps[kind] = self._prepare(job, x, y, keys)
        batch, loss, replay = self._steps[kind]
        _copy_(batch, (x, y, keys))
        replay.replay()
        return loss

    def _prepare(
        self, job: LocalTrainingState, x: Tensor, y: Tensor, keys: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor, Replay]:
        """Return the buffers of a step's batch and losses, and what replays it: a compared graph or the step."""
        batch = (x.clone(), y.clone(), keys.clone())
        loaded, server = self._read or (job.global_params, job.server_memory)
        job = replace(job, global_params=loaded, server_memory=server, counter=self._counter)
        loss = self._counter.new_zeros(len(x), dtype=torch.float64)

        def run() -> None:
            changed, now = self._stepper.step(job, self.stack, *batch, recorded=True)
            _copy_(self._leaves[: len(before) - 1], tree_leaves(changed[:3]))
            loss.copy_(now)
            self._counter.add_(1)

        before = [tensor.clone() for tensor in (*tree_leaves(self.stack[:3]), self._counter)]
        written = [*self._leaves[: len(before) - 1], self._counter]

        def try_out(step: Callable[[], None]) -> list[Tensor]:
            """Return what ``step`` writes; then restore the buffers."""
            step()
            found = [tensor.clone() for tensor in (*written, loss)]
            _copy_(written, before)
            return found

        graph, problem = self._kind(run), ""
        if self._kind is not Replay:
            try:
                with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
                    try_out(graph.capture)
                    if not _agree(try_out(graph.replay), try_out(run)):
                        problem = "its steps gave other values"
            except Exception as error:  # of any library that the step calls
                problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if problem:
            _copy_(written, before)
            self._kind, graph = Replay, Replay(run)
            text = f"CUDA graphs are not used for some steps, which run without them: {problem}"
            self._notices += [] if text in self._notices else [text]
        return batch, loss, graph


def find_static(
    statics: dict[object, StaticSteps],
    stepper: Stepper,
    job: LocalTrainingState,
    stack: Stack,
    separate: Callable[[], Stack],
    notices: list[str],
) -> StaticSteps | None:
    """Return the steps of ``stack``, kept in ``statics`` by its shapes, with the stack loaded; None: not here.

    ``separate`` returns the stack as it must be in memory, for the strides. Graphs contain learning rate and round, so
    there are none if these vary.
    """
    device = next(iter(stack[0].values())).device
    lasts = stepper.plan.optimizer.lr_in_round(job.round + 1) == job.lr and not stepper.plan.reads.round
    off = os.environ.get("FEDSHIFT_CUDA_GRAPHS") == "0" or is_recording()  # a clock waits for the device
    if off or device.type not in REPLAYS or job.separate_phase or not lasts:
        return None
    leaves, spec = tree_flatten((stack, _list_read(stepper, job)))
    shapes = str(spec), *((tensor.shape, tensor.dtype) for tensor in leaves)
    if shapes not in statics:
        if len(statics) == STACKS:
            del statics[next(iter(statics))]
        statics[shapes] = StaticSteps(stepper, job, separate(), notices)
    statics[shapes].load(job, stack)
    return statics[shapes]


def _list_read(stepper: Stepper, job: LocalTrainingState) -> tuple[Any, ...]:
    """Return the state common to all lanes that rules may read in a step."""
    acts = any(map(stepper.plan.defines, ("batch", "loss", "gradients")))
    return (job.global_params, job.server_memory) if acts else ()


def _copy_(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, except into themselves, in one operation for each dtype."""
    pairs = [(one, other) for one, other in zip(into, values, strict=True) if one is not other]
    for dtype in {one.dtype for one, _ in pairs}:
        ones, others = zip(*((one, other) for one, other in pairs if one.dtype == dtype), strict=True)
        torch._foreach_copy_(list(ones), list(others))


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether values are equal up to rounding."""
    for one, other in zip(found, expected, strict=True):
        if not other.is_floating_point():
            if not torch.equal(one, other):
                return False
            continue
        bound = torch.finfo(other.dtype).eps ** 0.5
        largest = float(other.abs().max()) if other.numel() else 0.0
        if not torch.allclose(one, other, rtol=bound, atol=bound * largest, equal_nan=True):
            return False
    return True
