"""Engines that distribute clients over lanes: ``pool`` over processes, ``ray`` over a cluster.

For networks too large to gain from stacking, several processors are used best if each trains a different client,
because no step waits for another thread. A client's work is a pure function of its arguments on one thread. Hence
results equal the sequential engine's on one thread, bit for bit, for any number of lanes on equal processors.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from typing_extensions import override

from ..core.kernel import client_init, init_client, init_server
from ..core.plan import Plan
from ..core.probe import find_difference
from ..core.states import ClientState, ServerState
from ..core.step import client_step_
from ..data.augmentation import Augmentation
from ..data.samples import count_memory
from ..utils.errors import FedshiftError, Ref
from ..utils.execution.executor import Chain, Executor, Handle, InProcess, LaneLost, run_all
from ..utils.execution.ray_cluster import RayCluster
from ..utils.execution.shared_memory import pickle_without_tensors, unpickle_with_tensors
from ..utils.execution.workers import Workers
from ..utils.processors import available_memory
from ..utils.profiling import timed_section
from ..utils.random_streams import torch_stream
from ..utils.state import pick
from ..utils.threads import limit_threads
from .engine import ClientResult, Data, Engine
from .sequential import Sequential


def train_client(
    plan: Plan, server: ServerState, data: Data, seed: int, name: str, client: ClientState, augment: Augmentation | None
) -> ClientResult:
    """Train a client for one round on one thread; ``data`` includes the client's samples."""
    with limit_threads(1):
        return Sequential(plan, data, seed, augment=augment).train_client(server, name, client)


def _try_copy(plan: Plan, data: Data) -> str | None:
    """Return why two steps of the plan's copy in another process would differ, as a predicate; None: they would not."""
    split, key = next(iter(data.values())), torch.zeros((), dtype=torch.int64)
    index = torch.arange(2 * plan.smallest_batch) % len(split)
    x, y = split.inputs(index, plan.dtype), split.targets(index)
    tensors, packed = pickle_without_tensors(plan)
    copy = unpickle_with_tensors(packed, lambda number, *_: tensors[number].clone())
    states = []
    for tried in (copy, plan):
        job = client_init(tried, init_client(tried), init_server(tried), planned_steps=2)
        with torch_stream(0, "spread"):
            for _ in range(2):
                job, _loss = client_step_(tried, job, x.clone(), y, key)
        states.append(pick(job.state, plan.initial))
    if wrong := find_difference(plan, plan.initial, *states):
        return f"trains {wrong!r} of this model otherwise: its copy in another process lacks a hook or something else"
    return None


@dataclass(eq=False, repr=False)
class Spread(Engine):
    """Trains clients concurrently on the lanes of ``executor``, starting with the largest amounts of work.

    An ``executor`` that is passed stays open; None: the engine opens one in the first round, and closes it.
    """

    executor: Executor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.executor, InProcess):  # nothing is sent, so that every plan is supported
            super().__post_init__()
        self._opened: Executor | None = None
        self._handles: dict[str, Handle] = {}

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        device = next(iter(data.values())).y.device.type
        if device != "cpu":
            return f"uses processors, but the device is {device}"
        lazy = {f"the dataset of client {name!r}": split for name, split in data.items() if split.lazy}
        for what, value in {f"{plan.method.label} or the model": (plan, augment), **lazy}.items():
            try:
                pickle_without_tensors(value)
            except Exception as error:
                return f"cannot send {what} to another process ({error})"
        return plan.verdict("spread", lambda: _try_copy(plan, data))

    @abstractmethod
    def _open(self) -> Executor:
        """Open an executor for the engine."""

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        if not (executor := self.executor or self._opened):
            with timed_section("start"):
                executor = self._opened = self._open()
        plan, failed = self._put(executor, "plan", lambda: self.plan), list[BaseException]()
        with timed_section("transfer"):
            broadcast = executor.put(server)

        def work(name: str) -> Chain:
            samples = self._put_samples(executor, name)
            try:
                return (yield train_client, plan, broadcast, samples, self.seed, name, clients[name], self.augment)
            except LaneLost as error:
                raise FedshiftError(
                    f"the {executor.lane_name} that trained client {name!r} in round {server.round + 1} {error}. What "
                    "was saved before is intact: continue with {}, with fewer {}, or with {}",
                    Ref(resume=True),
                    Ref("workers"),
                    Ref(engine="sequential"),
                ) from error

        steps = {name: len(self.steps_of_round(name, client)[1]) for name, client in clients.items()}
        order = sorted(clients, key=lambda name: steps[name] * len(self.data[name]), reverse=True)
        chains = ((name, work(name)) for name in order if not failed)
        try:
            for name, result in run_all(executor, chains, min(self.workers or executor.lanes, len(clients)) or 1):
                if isinstance(result, BaseException):
                    failed.append(result)
                else:
                    yield name, result
        finally:
            executor.drop(broadcast)
        if failed:
            raise failed[0]

    def _put_samples(self, executor: Executor, name: str) -> Handle:
        """Return a handle to all clients' samples if lanes share memory, else to the samples of client ``name``."""
        if executor.shares_memory:
            return self._put(executor, "data", lambda: self.data)
        # x copies the client's rows, since the array may contain all clients
        return self._put(executor, f"data of {name}", lambda: {name: self.data[name].copy_alone()})

    def _put(self, executor: Executor, key: str, make: Callable[[], object]) -> Handle:
        if key not in self._handles:
            with timed_section("transfer"):
                self._handles[key] = executor.put(make())
        return self._handles[key]

    @override
    def close(self) -> None:
        if executor := self.executor or self._opened:
            for handle in self._handles.values():
                executor.drop(handle)
        if self._opened:
            self._opened.close()
        self._handles, self._opened = {}, None


class Pool(Spread):
    """Trains clients in worker processes on the CPU; the plan must be picklable."""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        if os.name != "posix":
            return "needs POSIX shared memory, which this operating system lacks"
        size, free = count_memory(data.values()), available_memory()
        if size > free:
            return (
                f"copies the training samples ({size / 1e9:.1f} GB) into memory, but only {free / 1e9:.1f} GB are free"
            )
        return super().refusal(plan, data, augment)

    @override
    def _open(self) -> Executor:
        return Workers()


class Ray(Spread):
    """Trains clients on a Ray cluster of CPUs; needs the package ``ray`` and a picklable plan."""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        if find_spec("ray") is None:
            return "needs the package ray (pip install 'fedshift[ray]')"
        for name, split in data.items():
            if split.lazy:
                return f"sends a client's samples to its hosts, but the samples of client {name!r} are read lazily"
        return super().refusal(plan, data, augment)

    @override
    def _open(self) -> Executor:
        return RayCluster(self.workers)
