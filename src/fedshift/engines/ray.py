"""The Ray engine: clients distributed over the processors of a Ray cluster, on one host or many, by Ray's scheduler.

A client's work is a Ray task on one processor and one thread, a pure function of its arguments: results are those of
the sequential engine on one thread, bit for bit, whatever the number of workers, on hosts with the same processors and
versions. Plan, broadcast and each client's samples lie in Ray's object store and are copied to the hosts that work on
them; tensors are kept there as arrays of bytes, which Ray does not copy again. The cluster is that of ``RAY_ADDRESS``,
or one started by this process on this host's loopback, which ends with it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..core.kernel import ClientState, ServerState
from ..core.plan import Plan
from ..data.augmentation import Augmentation
from ..data.samples import Samples
from ..utils.allocator import keep_freed_memory
from ..utils.errors import FedshiftError, UsageError
from ..utils.processors import available_processors
from ..utils.profiling import Seconds, add_seconds, record_seconds, timed_section
from .engine import ClientResult, Data
from .process_pool import HOW_TO_CONTINUE, ProcessEngine, capture_error
from .sequential import Sequential
from .shared_memory import pickle_without_tensors, unpickle_with_tensors

OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # off, every port is of the loopback, on any operating system
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` workers would otherwise be started by uv, which may download
}
"""Environment of a cluster that this process starts."""
PATIENCE = 10.0
"""Seconds for the host of ``RAY_ADDRESS`` to answer; Ray itself tries for minutes."""
SerializedTensors = tuple[bytes, list[NDArray[np.uint8]]]
"""A value without its tensors, pickled, and the bytes of each tensor."""


class Ray(ProcessEngine):
    """Runs what can be sent to another process, on CPUs, where the package ``ray`` is installed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ray: Any = None
        self._plan: Any = None
        self._known: list[Any] = []
        self._samples: dict[str, Any] = {}

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
    def close(self) -> None:
        self._plan, self._known, self._samples = None, [], {}

    @override
    def _broadcast(self, server: ServerState, clients: int) -> int:
        with timed_section("start"):
            self._ray = _connect(self.workers)
        with timed_section("hand over"):
            self._plan = self._plan or self._ray.put(serialize((self.plan, self.augment)))
            self._known = [self._plan, self._ray.put(serialize(server))]  # a list: workers fetch only what they lack
        processors = int(self._ray.cluster_resources().get("CPU", 0))
        if not processors:
            raise UsageError("the Ray cluster has no processors: add a host to it by `ray start --address`")
        return self.workers or processors

    @override
    def _submit(self, name: str, client: ClientState) -> Any:
        with timed_section("hand over"):
            if name not in self._samples:
                data = self.data[name]  # x is a copy of the client's rows of what may be one array of all clients
                rows = Samples(x=data.x, y=data.y, normalization=data.normalization)
                self._samples[name] = self._ray.put(serialize(rows))
            return _remote_task().remote(self._known, self._samples[name], self.seed, name, serialize(client))

    @override
    def _wait(self, tasks: list[Any]) -> list[Any]:
        ended, _ = self._ray.wait(tasks)
        return list(ended)

    @override
    def _collect(self, task: Any, client: str, round: int) -> ClientResult | BaseException:
        try:
            found, seconds = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            *_, last = str(error).strip().splitlines() or [""]
            lost = FedshiftError(
                f"the Ray worker that trained client {client!r} in round {round} was lost "
                f"({type(error).__name__}: {last}). {{}}",
                HOW_TO_CONTINUE,
            )
            lost.__cause__ = error
            return lost
        add_seconds(seconds)
        return deserialize(found)  # type: ignore[no-any-return]

    @override
    def _cancel(self, tasks: list[Any]) -> None:
        for task in tasks:
            self._ray.cancel(task, force=True)


def train_client(
    known: list[Any], samples: SerializedTensors, seed: int, name: str, client: SerializedTensors
) -> tuple[SerializedTensors, Seconds]:
    """Return a client's result or error, and the seconds that its sections took; run by a worker.

    ``known``: references to the plan with its augmentation, and to the broadcast.
    """
    torch.set_num_threads(1)

    def train() -> ClientResult:
        (plan, augment), server = map(_fetch, known)
        engine = Sequential(plan, {name: deserialize(samples)}, seed, augment=augment)
        return engine.train_client(server, name, deserialize(client))

    with keep_freed_memory(), record_seconds() as seconds:
        done = capture_error(train)
    return serialize(done), seconds


def serialize(value: Any) -> SerializedTensors:
    """Return ``value`` in the form in which Ray carries it; raise the error of pickling where that is impossible."""
    tensors, packed = pickle_without_tensors(value)
    return packed, [_view_bytes(tensor.contiguous()) for tensor in tensors]


def deserialize(serialized: SerializedTensors) -> Any:
    """Return the value that was serialized, in memory of this process.

    Tensors lie where torch allocates them, since an address decides how some kernels round.
    """
    packed, raw = serialized

    def load(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        _view_bytes(tensor)[:] = raw[number]
        return tensor

    return unpickle_with_tensors(packed, load)


def _view_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of ``tensor``, which is contiguous, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


@lru_cache(maxsize=2)
def _fetch(reference: Any) -> Any:
    """Return the value behind ``reference``, the plan or the round's broadcast, kept for the worker's next client."""
    import ray

    return deserialize(ray.get(reference))


@cache
def _remote_task() -> Any:
    """Return :func:`train_client` as a Ray task without retries: a client that kills a worker often kills the next."""
    import ray

    return ray.remote(num_cpus=1, max_retries=0)(train_client)


def _connect(workers: int | None) -> Any:
    """Return the module ``ray``, connected: as it already is, to the cluster of ``RAY_ADDRESS``, or to a new one here.

    Raises :class:`UsageError` where the address does not answer, or Ray refuses it.
    """
    known: Any = sys.modules.get("ray")
    if known and known.is_initialized():
        return known
    address = os.environ.get("RAY_ADDRESS") or "local"
    started: dict[str, Any] = {}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address == "local":
        os.environ.update(OWN, RAY_AUTH_TOKEN=secrets.token_hex(32))
        started = {"num_cpus": workers or available_processors(), "include_dashboard": False}
    import ray

    before = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition("//")[2].rpartition(":")
        if host:
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **started)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UsageError(
            f"Ray cannot be used at {address} ({error}): set RAY_ADDRESS to a cluster that runs, or unset it for one "
            "on this host"
        ) from error
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():  # Ray replaced the handler
            signal.signal(signal.SIGTERM, before)
    return ray
