"""The stacked engine: trains clients side by side in one tensor program by ``torch.vmap``, one lane per client.

Small networks spend their time on calls rather than arithmetic, and stacked clients share calls. Lanes are stepped in
chunks whose parameters fit the processor's cache, one thread per chunk. If all lanes of a chunk have batches of the
same size, the step is recorded once (:mod:`fedshift.engines.tape`) and run many times; under plain SGD, factored
gradients are multiplied directly into the parameters. The recorded steps depend only on the round's clients, so that a
resumed run produces the same bits. A client leaves the stack after its last step; batches are never padded or masked.
If only the sum of uploads is needed, a chunk computes only the sum, and lanes that take one step, or few samples, defer
the updates of linear layers for the round, so that all lanes multiply by the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from math import ceil
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..core.kernel import (
    broadcast,
    client_final,
    client_init,
    init_client,
    init_server,
    load_state,
    personal_entries,
    restart,
)
from ..core.means import StreamingMean
from ..core.optimizer import SGD, TorchOptimizer
from ..core.plan import Plan
from ..core.probe import find_difference
from ..core.server_round import sums_suffice
from ..core.states import ClientState, LocalTrainingState, ServerState, Update
from ..core.step import client_step_
from ..data.augmentation import Augmentation
from ..data.samples import Samples, are_alike, gather_rows
from ..nn.deferred import FEW, LaneUpdates
from ..utils.profiling import timed_section
from ..utils.random_streams import torch_stream
from ..utils.state import State, clone, drop_equal, move_together, nbytes, pick
from ..utils.threads import map_in_threads
from .engine import Batches, ClientResult, Data, Engine, find_exchange, measure_activations, move_batches
from .sequential import Sequential
from .stepper import Deferred, Stack, Stepper, replace_parts

CACHE = 2**24
"""Maximum size, in bytes, of the trained parameters of a chunk on a CPU."""
ACTIVATIONS = 2**27
"""Maximum size, in bytes, of a chunk's layer outputs on a CPU."""
LANES_PART, ACTIVATIONS_PART = 16, 4
"""On another device, trained parameters and layer outputs take at most these parts of its memory: beside parameters
there are gradients, the optimizer's state, and the uploads of a chunk, in float64 where they are summed."""
MEMORY = 2**33
"""Bytes of memory of a device that does not tell."""
GATHERED = 2**25
"""Maximum size, in bytes, of the samples gathered for a chunk's next steps."""
MIN_DEFERRED_WEIGHTS = 2**15
"""Minimum number of weights of a layer whose updates are deferred for several steps."""
TRIED = 4
"""Number of samples in a batch with which an engine is tried on a plan."""
LASTING = 4
"""Minimum number of steps in a round for which starting threads is worthwhile."""


class _Lane(NamedTuple):
    """A client's ``batches`` in the round, and the batches of each phase ``before`` and ``after`` them."""

    name: str
    client: ClientState
    batches: Batches
    before: list[Batches]
    after: list[Batches]
    sizes: list[int]
    """Number of samples in each of ``batches``."""

    @classmethod
    def of(cls, engine: Engine, name: str, client: ClientState) -> _Lane:
        batches, plan = engine.draw_batches(name, client), engine.plan
        before, after = (
            [engine.draw_batches(name, client, phase) for _, phase in plan.phases[when]] for when in ("before", "after")
        )
        return cls(name, client, batches, before, after, [index.shape[0] for _, index in batches])


class Stacked(Engine):
    """Trains clients in lanes; supports plans that ``torch.vmap`` can run. ``width``: maximum number of lanes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        alike = self.plan.clients_differ_only_in_entries and sums_suffice(self.plan)
        self._is_summed = alike and not self.separate_uploads
        self._deferrable = self._find_deferrable() if self._is_summed else frozenset[str]()
        self._count_lanes = cache(partial(count_lanes, self.plan, self.data))
        self.width = self._count_lanes(len(self.data))
        self._stepper = Stepper(self.plan)
        self._whole = _WholeBatches()

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        if plan.estimator and plan.estimator.secret:
            source = plan.estimator.source_method
            return f"cannot run {plan.method.label}: its lanes would share the secret draws of {source}"
        if isinstance(plan.optimizer, TorchOptimizer):
            return f"cannot run {plan.optimizer}: torch's own optimizers step one client at a time"
        return find_exchange(plan) or plan.verdict("stacked", lambda: _try_lanes(plan, data))

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        with timed_section("data"):
            lanes = [_Lane.of(self, name, client) for name, client in clients.items()]
        lanes.sort(key=lambda lane: (len(lane.batches), lane.sizes, self._weigh(lane)), reverse=True)
        on_cpu, steps = next(iter(self.data.values())).y.device.type == "cpu", len(lanes[0].batches)
        threads = torch.get_num_threads() if on_cpu and steps >= LASTING else 1
        deferred, width, sizes = frozenset[str](), self.width, lanes[0].sizes
        kinds = [(lane.sizes, self._weigh(lane)) for lane in lanes]  # lanes that defer are averaged unweighted
        if kinds[0] == kinds[-1] and (deferred := choose_deferred(self.plan, self._deferrable, sizes)):
            width = self._count_lanes(len(lanes), deferred, sum(sizes))
        width = ceil(len(lanes) / (ceil(len(lanes) / width / threads) * threads))  # chunks of even size for threads
        chunks = [lanes[start : start + width] for start in range(0, len(lanes), width)]
        for results in map_in_threads(partial(self._train_chunk, server, deferred), chunks, threads):
            yield from results

    def _train_chunk(
        self, server: ServerState, deferred: frozenset[str], lanes: Sequence[_Lane]
    ) -> list[tuple[str, ClientResult]]:
        job, stack = self._load(server, lanes)
        updates = defer(stack[0], deferred, sum(lanes[0].sizes))
        for number, phase in enumerate(self.plan.phases["before"]):
            stack, _ = self._take_steps(
                lanes, [lane.before[number] for lane in lanes], replace(job, separate_phase=phase), stack
            )
        if self.plan.phases["before"]:
            stack = self._restart(job, stack)
        stack, losses_KS = self._take_steps(lanes, [lane.batches for lane in lanes], job, stack, updates)
        means = {name: each.mean().expand(len(lanes), *each.w_OI.shape) for name, each in updates.items()}
        stack = {**stack[0], **means}, *stack[1:]
        for number, phase in enumerate(self.plan.phases["after"]):
            turns = [lane.after[number] for lane in lanes]
            stack, _ = self._take_steps(lanes, turns, replace(job, separate_phase=phase), stack)
        losses_KS = losses_KS.cpu()
        most = losses_KS.shape[1]
        sizes_KS = torch.tensor([lane.sizes + [0] * (most - len(lane.sizes)) for lane in lanes], dtype=torch.float64)
        if not (losses_KS.isfinite().all() and _is_finite(self.plan, stack)):
            if updates:  # lanes have no individual parameters to check
                sequential = Sequential(self.plan, self.data, self.seed, augment=self.augment)
                return [(lane.name, sequential.train_client(server, lane.name, lane.client)) for lane in lanes]
            self._refuse_divergence(server, lanes, job, stack, losses_KS)
        sums = (losses_KS * sizes_KS).sum(dim=1).tolist()
        finish = self._finish_together if self._is_summed else self._finish_separately
        return list(zip((lane.name for lane in lanes), finish(lanes, job, stack, sums), strict=True))

    def _find_deferrable(self) -> frozenset[str]:
        """Return the weights whose updates lanes can defer if only the sum of uploads is needed.

        These are weights of linear layers that all lanes load and call once, on vectors, which is tested by one step.
        """
        smallest = min(self.data, key=lambda name: len(self.data[name]))
        sizes = _Lane.of(self, smallest, init_client(self.plan)).sizes
        chosen = choose_deferred(self.plan, self.plan.loaded & self.plan.trained, sizes)
        return frozenset(name for name in chosen if _can_defer(self.plan, self.data, name))

    def _weigh(self, lane: _Lane) -> float:
        return self.plan.method.weigh(samples=len(self.data[lane.name]), used=sum(lane.sizes))

    def _load(self, server: ServerState, lanes: Sequence[_Lane]) -> tuple[LocalTrainingState, Stack]:
        """Return the first lane's job, for the state common to all lanes, and the stack of all lanes."""
        if not self.plan.clients_differ_only_in_entries:
            seen = [self.see(lane.name, lane.batches) for lane in lanes]
            with self._stepper.template:  # Rule.start may run the model
                jobs = [
                    load_state(self.plan, lane.client, broadcast(server, lane.name), 0, samples)
                    for lane, samples in zip(lanes, seen, strict=True)
                ]
            return jobs[0], _stack_jobs(self.plan, jobs)
        first = load_state(self.plan, lanes[0].client, server)
        kept = [personal_entries(self.plan, lane.client, server) for lane in lanes]
        personal = {name: torch.stack([state[name] for state in kept]) for name in self.plan.personal}
        start = clone(personal) if self.plan.rules else {}
        fresh = self.plan.optimizer.init(first.params)
        optimizer = _stack_states([lane.client.optimizer or fresh for lane in lanes])
        params, rest = (
            {name: personal[name] if name in personal else tensor.expand(len(lanes), *tensor.shape)
             for name, tensor in state.items()}
            for state in (first.params, first.rest)
        )  # fmt: skip
        return first, (params, rest, optimizer, {}, *({} for _ in first.memory), start)

    def _restart(self, job: LocalTrainingState, stack: Stack) -> Stack:
        """Return the stack after :func:`restart` of each lane's model."""

        def restart_lane(parts: Stack) -> tuple[State, State]:
            lane = restart(self.plan, replace_parts(job, parts))
            return clone(lane.params), clone(lane.rest)  # loaded entries may be among them, and steps write

        return *torch.vmap(restart_lane)(stack), *stack[2:]

    def _take_steps(
        self, lanes: Sequence[_Lane], turns: Sequence[Batches], job: LocalTrainingState, stack: Stack,
        deferred: Deferred | None = None,
    ) -> tuple[Stack, Tensor]:  # fmt: skip
        """Return the stack after each lane's steps in ``turns``, and their losses, float64 ``[lanes, steps]``.

        ``job``: the state common to all lanes. Losses of steps that a lane does not take are 0. ``deferred``: storage
        for updates of some parameters, if lanes have batches of the same sizes.
        """
        samples = _Samples(self, [lane.name for lane in lanes], turns, self._whole)
        most = max(map(len, turns))
        losses_KS = torch.zeros(len(lanes), most, dtype=torch.float64, device=samples.device)
        stack = _make_writable(stack[0], frozenset(deferred or {})), stack[1], *map(_make_writable, stack[2:])
        steps = list(self._group_steps(lanes, turns))
        fewer = [torch.tensor(members) for *_, members in steps if len(members) < len(lanes)]
        indices = iter(move_together(fewer, samples.device))
        for at, planned, members in steps:
            index = next(indices) if len(members) < len(lanes) else None
            with timed_section("data"):
                x, y, keys = samples.take(members, at, index)
            now = replace(job, planned_steps=planned)
            now = now if job.separate_phase else replace(now, done=job.start + at)
            if index is None:
                stack, losses_KS[:, at] = self._stepper.step(now, stack, x, y, keys, recorded=True, deferred=deferred)
                continue
            rows = tuple({entry: tensor[index] for entry, tensor in state.items()} for state in stack)
            changed, loss = self._stepper.step(now, rows, x, y, keys)
            stack = _write_rows(stack, changed, index)
            losses_KS[index, at] = loss.double()
        return stack, losses_KS

    def _group_steps(self, lanes: Sequence[_Lane], turns: Sequence[Batches]) -> Iterator[tuple[int, int, list[int]]]:
        """Yield each step, the number of planned steps if a rule reads it, and the lanes with batches of one size."""
        for at in range(max(map(len, turns))):
            together: dict[tuple[int, int], list[int]] = {}
            for number, turn in enumerate(turns):
                if at < len(turn):
                    kind = turn[at][1].shape[0], len(lanes[number].batches) if self.plan.phases_need_step_count else 0
                    together.setdefault(kind, []).append(number)
            for (_, planned), members in together.items():
                yield at, planned, members

    def _finish_together(
        self, lanes: Sequence[_Lane], job: LocalTrainingState, stack: Stack, loss_sums: Sequence[float]
    ) -> Iterator[ClientResult]:
        """Yield the clients' results, with one sum of their uploads."""
        plan, (params, rest, optimizer, *_) = self.plan, stack
        entries = {**params, **rest}
        sent = {name: entries[name] for name in plan.initial if name in plan.sent}
        summed = StreamingMean()
        with timed_section("aggregation"):
            summed.add_stacked(pick(sent, sent.keys() - plan.whole), list(map(self._weigh, lanes)))
        memory: tuple[State, ...] = ({},) * len(job.memory)
        states = pick(entries, plan.personal), pick(sent, plan.whole), optimizer if plan.optimizer.keep else {}
        rows = (_list_lanes(state, len(lanes)) for state in states)
        for lane, loss_sum, personal, shared, kept in zip(lanes, loss_sums, *rows, strict=True):
            steps, weight = len(lane.batches), float(sum(lane.sizes))
            client = ClientState(personal=personal, optimizer=kept, memory=memory, steps=lane.client.steps + steps)
            update = Update(shared=shared, memory=memory, weight=weight, steps=steps)
            yield ClientResult(client=client, update=update, loss_sum=loss_sum, summed=summed)

    def _finish_separately(
        self, lanes: Sequence[_Lane], job: LocalTrainingState, stack: Stack, loss_sums: Sequence[float]
    ) -> Iterator[ClientResult]:
        for done, loss_sum in zip(self._split_lanes(lanes, job, stack), loss_sums, strict=True):
            client, update = client_final(self.plan, done)
            yield ClientResult(client=client, update=update, loss_sum=loss_sum)

    def _split_lanes(
        self, lanes: Sequence[_Lane], job: LocalTrainingState, stack: Stack
    ) -> Iterator[LocalTrainingState]:
        """Yield each lane's job after its steps."""
        columns = [_list_lanes(state, len(lanes)) for state in stack]
        for lane, parts in zip(lanes, zip(*columns, strict=True), strict=True):
            steps, start = len(lane.batches), lane.client.steps
            own = replace(job, start=start, done=start + steps, planned_steps=steps, samples=sum(lane.sizes))
            yield replace_parts(own, parts)

    def _refuse_divergence(
        self, server: ServerState, lanes: Sequence[_Lane], job: LocalTrainingState, stack: Stack, losses_KS: Tensor
    ) -> None:
        for number, (lane, done) in enumerate(zip(lanes, self._split_lanes(lanes, job, stack), strict=True)):
            client, update = client_final(self.plan, done)
            after = {**client.personal, **update.shared}
            with self._stepper.template:  # it may run the model
                self.refuse_divergence(losses_KS[number, : len(lane.batches)], after, lane.name, lane.client, server)


def _try_lanes(plan: Plan, data: Data) -> str | None:
    """Return why two steps of two lanes fail or differ from the reference's, as a predicate; None if they do not."""
    if not isinstance(plan.optimizer, SGD):  # others divide by the sizes of gradients, rounding included
        plan = replace(plan, optimizer=SGD(lr=plan.optimizer.lr))
    split, key = next(iter(data.values())), torch.zeros((), dtype=torch.int64)
    order = torch.arange(2 * max(TRIED, plan.smallest_batch), device=split.y.device) % len(split)
    batches = [(split.inputs(index, plan.dtype), split.targets(index)) for index in order.chunk(2)]
    jobs = [client_init(plan, init_client(plan), init_server(plan), planned_steps=2) for _ in batches]
    jobs[1] = replace(jobs[1], params={name: tensor * 1.1 + 0.01 for name, tensor in jobs[1].params.items()})
    key, expected = key.to(split.y.device), []
    for lane, (job, batch) in enumerate(zip(jobs, batches, strict=True)):
        job = replace(job, params=clone(job.params), optimizer=clone(job.optimizer))
        with torch_stream(lane, "lanes"):
            for _ in range(2):
                job, _loss = client_step_(plan, job, batch[0].clone(), batch[1], key)
        expected.append(job.state)
    stack = tuple(map(_make_writable, _stack_jobs(plan, jobs)))
    x, y = (torch.stack(tensors) for tensors in zip(*batches, strict=True))
    stepper = Stepper(plan)
    try:
        with torch_stream(0, "lanes"):
            for done in range(2):
                job = replace(jobs[0], done=jobs[0].start + done)
                stack, _ = stepper.step(job, stack, x.clone(), y, key.expand(2), recorded=True)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "randomness error mode" in reason:
            reason = "the model draws random numbers in training outside of torch's dropout layers"
        return f"cannot run {plan.method.label} on this model (torch.vmap: {reason})"
    lanes = _list_lanes({**stack[0], **stack[1]}, 2)
    for job, entries, reference in zip(jobs, lanes, expected, strict=True):
        if wrong := find_difference(plan, job.state, entries, reference):
            return (
                f"trains {wrong!r} of this model otherwise than plain PyTorch: torch.vmap does not follow what the "
                "layer does there"
            )
    return None


class _Samples:
    """The batches of a chunk's lanes, gathered for several steps at once."""

    def __init__(self, engine: Engine, names: Sequence[str], turns: Sequence[Batches], whole: _WholeBatches) -> None:
        self._engine, self._names, self._whole = engine, names, whole
        self._data = [engine.data[name] for name in names]
        self.device = self._data[0].y.device
        sizes = [[index.shape[0] for _, index in turn] for turn in turns]
        together = engine.augment is None and all(size == sizes[0] for size in sizes) and are_alike(self._data)
        self._sizes = sizes[0] if together else None
        moved = iter(() if together else move_batches([batch for turn in turns for batch in turn], self.device))
        self._turns = turns if together else [list(islice(moved, len(turn))) for turn in turns]
        steps = {name: [step for step, _ in turn] for name, turn in zip(names, turns, strict=True)}
        self._keys_SK = engine.draw_keys(steps, self.device).T.contiguous()
        self._held = range(0)

    def take(self, members: Sequence[int], at: int, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs ``[K, B, ...]``, labels ``[K, B]`` and keys ``[K]`` of step ``at`` of the lanes ``members``.

        ``index``: the same lanes, on the device; None: all.
        """
        engine, dtype, keys = self._engine, self._engine.plan.dtype, self._keys_SK[at]
        if self._sizes is None:
            taken = [engine.load_batch(self._names[number], *self._turns[number][at]) for number in members]
            x, y = map(torch.stack, zip(*taken, strict=True))
            return x, y, keys if index is None else keys[index]
        if all(self._sizes[at] == len(part) and not part.lazy for part in self._data):
            return *self._whole.take(self._names, self._data, dtype), keys
        if at not in self._held:
            self._gather(at)
        start = sum(self._sizes[self._held.start : at])
        rows = slice(start, start + self._sizes[at])
        x = self._data[0].scale(self._x_KR[:, rows], dtype)
        return x.contiguous(), self._y_KR[:, rows].contiguous(), keys

    def _gather(self, at: int) -> None:
        """Gather the samples of steps ``at`` and following."""
        assert self._sizes is not None
        row = len(self._names) * self._data[0].nbytes_each
        end, held = at, 0
        while end < len(self._sizes) and (end == at or (held + self._sizes[end]) * row <= GATHERED):
            held += self._sizes[end]
            end += 1
        self._held = range(at, end)
        indices = move_together([torch.cat([index for _, index in turn[at:end]]) for turn in self._turns], self.device)
        self._x_KR, self._y_KR = _gather_lanes(self._data, indices)


class _WholeBatches:
    """Cache, of ``GATHERED`` bytes, of batches with all samples of several clients, which are equal in each round."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], tuple[Tensor, Tensor, object]] = {}
        self._lock = Lock()

    def take(self, names: Sequence[str], data: Sequence[Samples], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the inputs ``[K, N, ...]`` and labels ``[K, N]`` of clients of equal size."""
        stored = [tensor._version for part in data for tensor in (part.store, part.y) if isinstance(tensor, Tensor)]
        with self._lock:
            x, y, before = self._kept.pop(tuple(names), (None, None, None))
            if x is None or y is None or before != (stored, x._version, y._version):  # missing or modified
                x, y = _gather_lanes(data, [torch.arange(len(part), device=part.y.device) for part in data])
                x = data[0].scale(x, dtype)
            self._kept[tuple(names)] = x, y, (stored, x._version, y._version)
            while sum(x.nbytes + y.nbytes for x, y, _ in self._kept.values()) > GATHERED:
                del self._kept[next(iter(self._kept))]
        return x, y


def _gather_lanes(data: Sequence[Samples], indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the stored samples ``[K, R, ...]`` and targets ``[K, R]`` at ``indices``, R for each client."""
    y_KR = torch.stack([part.targets(index) for part, index in zip(data, indices, strict=True)])
    return gather_rows(data, indices).reshape(*y_KR.shape[:2], *data[0].shape), y_KR


def _can_defer(plan: Plan, data: Data, name: str) -> bool:
    """Return whether two lanes can take a step with deferred updates of the parameter ``name``."""
    split = next(iter(data.values()))
    index = torch.arange(plan.smallest_batch, device=split.y.device) % len(split)
    x, y = (tensor.expand(2, *tensor.shape) for tensor in (split.inputs(index, plan.dtype), split.targets(index)))
    job = client_init(plan, init_client(plan), init_server(plan), planned_steps=1)
    params, *others = _stack_jobs(plan, [job] * 2)
    deferred = defer(params, frozenset([name]), FEW)
    deferred[name].rows = FEW // 2
    stack = _make_writable(params, frozenset(deferred)), *map(_make_writable, others)
    keys = torch.zeros(2, dtype=torch.int64, device=y.device)
    try:
        Stepper(plan).step(job, stack, x, y, keys, recorded=True, deferred=deferred)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


def choose_deferred(plan: Plan, names: frozenset[str], sizes: Sequence[int]) -> frozenset[str]:
    """Return the weights among ``names`` whose updates lanes with batches of ``sizes`` should defer for a round.

    These are weights of linear layers (:mod:`fedshift.nn.deferred`), if steps are plain SGD in full precision and no
    rule reads weights. In rounds of several steps, which read the updates, batches must be small, and layers large and
    larger than their factored updates.
    """
    reads = any(map(plan.defines, ("batch", "outputs", "loss")))
    rows = sum(sizes) if len(sizes) > 1 else 0
    if not sizes or (rows and max(sizes) > FEW) or reads or plan.autocast or not plan.is_plain_sgd:
        return frozenset()
    linear = {id(layer._parameters) for layer in plan.layers if isinstance(layer, nn.Linear)}
    weights = {slot.name for slot in plan.slots if slot.key == "weight" and id(slot.held) in linear}
    shapes = {name: plan.initial[name].shape for name in weights & names}
    return frozenset(
        name
        for name, shape in shapes.items()
        if not rows or shape.numel() >= max(MIN_DEFERRED_WEIGHTS, rows * sum(shape))
    )


def defer(params: State, names: frozenset[str], rows: int) -> Deferred:
    """Allocate ``rows`` rows for deferred updates of the parameters ``names``, which are equal in all lanes."""
    return {name: LaneUpdates(params[name][0].contiguous(), len(params[name]), rows) for name in sorted(names)}


def count_lanes(plan: Plan, data: Data, clients: int, deferred: frozenset[str] = frozenset(), rows: int = 0) -> int:
    """Return how many of ``clients`` to step together, so that parameters fit the cache and activations the memory.

    ``deferred``: parameters that lanes share, with ``rows`` rows of deferred updates per client.
    """
    separate = nbytes(pick(plan.initial, plan.trained - deferred))
    factors = rows * sum(sum(plan.initial[name].shape) * plan.initial[name].element_size() for name in deferred)
    largest = max(map(len, data.values()))
    activations = measure_activations(plan, data) * min(plan.work.batch_size or largest, largest)
    most_parameters, most_activations = _find_limits(next(iter(data.values())).y.device)
    fitting = most_parameters // max(1, separate), most_activations // max(1, activations + factors)
    return min(clients, *(max(1, count) for count in fitting))


def _find_limits(device: torch.device) -> tuple[int, int]:
    """Return how many bytes the trained parameters and the layer outputs of a chunk may take on ``device``.

    They depend on the memory of the device, not on how much is free, so that a resumed run has the same chunks.
    """
    if device.type == "cpu":
        return CACHE, ACTIVATIONS
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else MEMORY
    return memory // LANES_PART, memory // ACTIVATIONS_PART


def _stack_jobs(plan: Plan, jobs: Sequence[LocalTrainingState]) -> Stack:
    parts = [
        (job.params, job.rest, job.optimizer, job.global_params if plan.mixes else {}, *job.memory, job.personal)
        for job in jobs
    ]
    return tuple(map(_stack_states, zip(*parts, strict=True)))


def _stack_states(states: Sequence[State]) -> State:
    """Return each entry as ``[lanes, ...]``; expand instead of copying if lanes share one tensor."""
    stacked = {}
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        shared = len(tensors) > 1 and all(tensor is first for tensor in tensors)
        stacked[name] = first.expand(len(tensors), *first.shape) if shared else torch.stack(tensors)
    return stacked


def _make_writable(state: State, exclude: frozenset[str] = frozenset()) -> State:
    """Copy entries of ``state``, except ``exclude``, whose lanes share memory with each other or the server."""
    return {name: tensor if name in exclude else _separate(tensor) for name, tensor in state.items()}


def _separate(tensor: Tensor) -> Tensor:
    """Return a tensor ``[lanes, ...]`` without memory shared between lanes; kernels are channels last on the CPU."""
    lanes = tensor if len(tensor) > 1 else tensor.clone()
    if lanes.ndim != 5 or not lanes.is_cpu:
        return lanes.contiguous()
    return lanes.flatten(0, 1).contiguous(memory_format=torch.channels_last).view(lanes.shape)


def _list_lanes(state: State, lanes: int) -> list[State]:
    """Return the states of all lanes, whose entries are rows of those of ``state``, ``[lanes, ...]``."""
    columns = [tensor.unbind() for tensor in state.values()]
    return [dict(zip(state, (rows[number] for rows in columns), strict=True)) for number in range(lanes)]


def _write_rows(stack: Stack, changed: Stack, index: Tensor) -> Stack:
    """Return ``stack`` with the rows at ``index`` of what a step changes replaced by the rows of ``changed``."""
    written = (
        {entry: tensor.contiguous().index_copy_(0, index, rows[entry]) for entry, tensor in state.items()}
        for state, rows in zip(stack[:3], changed, strict=False)
    )
    return *written, *stack[3:]


def _is_finite(plan: Plan, stack: Stack) -> bool:
    """Return whether all trained parameters and statistics are finite, by their sums."""
    names = plan.whole.union(*({bound.names[each] for each in bound.model.keys() & plan.whole} for bound in plan.rules))
    tensors = [drop_equal(tensor) for state in stack[:2] for name, tensor in state.items() if name not in names]
    sums = [tensor.sum() for tensor in tensors if tensor.is_floating_point()]
    return bool(torch.stack([value.double() for value in sums]).isfinite().all())
