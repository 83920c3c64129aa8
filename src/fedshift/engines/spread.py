"""Engines that spread clients over lanes, as these become free: ``pool`` over processes, ``ray`` over a cluster.

Networks too large to gain from running side by side make the best use of several processors when each trains another
client: no step waits for another thread. A client's work is a pure function of its arguments on one thread: results are
those of the sequential engine on one thread, bit for bit, whatever the number of lanes, on equal processors.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from typing_extensions import override

from ..core.plan import Plan
from ..core.states import ClientState, ServerState
from ..data.augmentation import Augmentation
from ..data.samples import Samples, count_bytes
from ..utils.errors import FedshiftError, Ref, Sentence
from ..utils.execution.executor import Chain, Executor, Handle, InProcess, LaneLost, run_all
from ..utils.execution.ray_cluster import RayCluster
from ..utils.execution.shared_memory import pickle_without_tensors
from ..utils.execution.workers import Workers
from ..utils.processors import available_memory
from ..utils.profiling import timed_section
from ..utils.threads import limit_threads
from .engine import ClientResult, Data, Engine
from .sequential import Sequential

HOW_TO_CONTINUE = Sentence(
    "What was saved before is intact: continue with {}, with fewer {}, or with {}",
    Ref(resume=True),
    Ref("workers"),
    Ref(engine="sequential"),
)
"""Advice for when a lane is lost."""


def train_client(
    plan: Plan,
    server: ServerState,
    data: Data,
    seed: int,
    name: str,
    client: ClientState,
    augment: Augmentation | None = None,
) -> ClientResult:
    """Return the result of a client's work in one round, on one thread; ``data`` has its samples at least."""
    with limit_threads(1):
        return Sequential(plan, data, seed, augment=augment).train_client(server, name, client)


@dataclass(eq=False, repr=False)
class Spread(Engine):
    """Trains clients on the lanes of ``executor``, several at once, those with most work first.

    An executor that is given stays open; without one, the engine opens its own at the first round, and closes it.
    """

    executor: Executor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.executor, InProcess):  # where nothing has to be sent, anything runs
            super().__post_init__()
        self._opened: Executor | None = None
        self._plan: Handle | None = None
        self._data: dict[str, Handle] = {}

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        device = next(iter(data.values())).y.device.type
        if device != "cpu":
            return f"uses processors, but the device is {device}"
        try:
            pickle_without_tensors((plan, augment))
        except Exception as error:
            return f"cannot send {plan.method.label} or the model to another process ({error})"
        for name, split in data.items():
            try:
                pickle_without_tensors(split if split.lazy else None)
            except Exception as error:
                return f"cannot send the dataset of client {name!r} to another process ({error})"
        return None

    @abstractmethod
    def _open(self) -> Executor:
        """Open the engine's own executor."""

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        if self.executor is None and self._opened is None:
            with timed_section("start"):
                self._opened = self._open()
        executor = self.executor or self._opened
        assert executor
        steps = {name: self.steps_of_round(name, client)[1] for name, client in clients.items()}
        order = sorted(clients, key=lambda name: len(steps[name]) * len(self.data[name]), reverse=True)
        with timed_section("hand over"):
            self._plan = self._plan or executor.put(self.plan)
            broadcast = executor.put(server)
        failed: list[BaseException] = []

        def work(name: str) -> Chain:
            given = self._plan, broadcast, self._find_data(executor, name), self.seed, name, clients[name], self.augment
            try:
                return (yield train_client, *given)
            except LaneLost as error:
                raise FedshiftError(
                    f"the {executor.lane_name} that trained client {name!r} in round {server.round + 1} {error}. {{}}",
                    HOW_TO_CONTINUE,
                ) from error

        chains = ((name, work(name)) for name in order if not failed)
        at_once = min(self.workers or executor.lanes, len(clients)) or 1
        try:
            for name, found in run_all(executor, chains, at_once):
                if isinstance(found, BaseException):
                    failed.append(found)
                else:
                    yield name, found
        finally:
            executor.drop(broadcast)
        if failed:
            raise failed[0]

    def _find_data(self, executor: Executor, name: str) -> Handle:
        """Return all clients' samples where they lie in memory that lanes share, else those of client ``name``."""
        key = "" if executor.shares_memory else name
        if key not in self._data:
            split, data = self.data[name], self.data
            if key:  # x is a copy of the client's rows of what may be one array of all clients
                data = {name: Samples(x=split.x, y=split.y, normalization=split.normalization)}
            with timed_section("hand over"):
                self._data[key] = executor.put(data)
        return self._data[key]

    @override
    def close(self) -> None:
        if executor := self.executor or self._opened:
            for handle in (self._plan, *self._data.values()):
                if handle:
                    executor.drop(handle)
        if self._opened:
            self._opened.close()
        self._plan, self._data, self._opened = None, {}, None


class Pool(Spread):
    """Runs what can be sent to another process, on the CPU, in worker processes."""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        if os.name != "posix":
            return "shares memory in a way that this operating system does not have"
        size, free = count_bytes(data.values()), available_memory()
        if size > free:
            return (
                f"copies the training samples, {size / 1e9:.1f} GB, into memory, of which {free / 1e9:.1f} GB are free"
            )
        return super().refusal(plan, data, augment)

    @override
    def _open(self) -> Executor:
        return Workers()


class Ray(Spread):
    """Runs what can be sent to another process, on CPUs, where the package ``ray`` is installed."""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        if find_spec("ray") is None:
            return "needs the package ray (pip install 'fedshift[ray]')"
        for name, split in data.items():
            if split.lazy:
                return f"hands all samples of a client to its hosts, and those of client {name!r} stay where they are"
        return super().refusal(plan, data, augment)

    @override
    def _open(self) -> Executor:
        return RayCluster(self.workers)
