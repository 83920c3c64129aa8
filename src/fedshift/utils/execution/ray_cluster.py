"""The processors of a Ray cluster, on one host or many, as lanes: each call is a Ray task on one processor.

Values lie in Ray's object store and are copied to the hosts that work on them; tensors are kept there as arrays of
bytes, which Ray does not copy again. The cluster is at ``RAY_ADDRESS``, or one started by this process on this
host's loopback, which ends with it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..allocator import keep_freed_memory
from ..errors import UsageError
from ..processors import available_processors
from ..profiling import Seconds, add_seconds, record_seconds
from .executor import Executor, Handle, LaneLost, Task, capture_error
from .shared_memory import pickle_without_tensors, unpickle_with_tensors

OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # off, every port is of the loopback, on any operating system
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` workers would otherwise be started by uv, which may download
}
"""Environment of a cluster that this process starts."""
PATIENCE = 10.0
"""Seconds for the host of ``RAY_ADDRESS`` to answer; Ray itself tries for minutes."""
KEPT = 4
"""Values that a worker of Ray keeps for its next call."""
SerializedTensors = tuple[bytes, list[NDArray[np.uint8]]]
"""A value without its tensors, pickled, and the bytes of each tensor."""


class RayCluster(Executor):
    """Connects to a cluster, or starts one with ``processors`` (None: as many as are free); a lane for each processor.

    Raises :class:`UsageError` where the cluster does not answer, or has no processors. The connection stays when the
    executor is closed: it is that of the process, for whatever else uses Ray.
    """

    lane_name = "Ray worker"
    shares_memory = False

    def __init__(self, processors: int | None = None) -> None:
        self._ray = connect(processors)
        self._references: dict[Task, Any] = {}
        self.lanes = int(self._ray.cluster_resources().get("CPU", 0))
        if not self.lanes:
            raise UsageError("the Ray cluster has no processors: add a host to it by `ray start --address`")

    @override
    def put(self, value: Any) -> Handle:
        return Handle(self._ray.put(serialize(value)))

    @override
    def drop(self, handle: Handle) -> None:
        """Do nothing: Ray drops a value when its handle is deleted."""

    @override
    def submit(self, function: Callable[..., Any], *args: Any, lane: int | None = None) -> Task:
        known = [each.held for each in args if isinstance(each, Handle)]  # a list: workers fetch only what they lack
        places = [Handle(number) for number in range(len(known))]
        given = [places.pop(0) if isinstance(each, Handle) else each for each in args]
        task = Task(lane or 0)
        self._references[task] = _remote_task().remote(serialize((function, given)), known)
        return task

    @override
    def wait(self, tasks: list[Task]) -> list[Task]:
        (first, *_), _ = self._ray.wait([self._references[task] for task in tasks])
        (task,) = (task for task in tasks if self._references[task] == first)
        del self._references[task]
        try:
            found, seconds = self._ray.get(first)
        except self._ray.exceptions.RayError as error:
            *_, last = str(error).strip().splitlines() or [""]
            task.result = LaneLost(f"was lost ({type(error).__name__}: {last})")
            task.result.__cause__ = error
        else:
            add_seconds(seconds)
            task.result = deserialize(found)
        return [task]

    @override
    def cancel(self) -> None:
        while self._references:
            self._ray.cancel(self._references.popitem()[1], force=True)

    @override
    def close(self) -> None:
        self.cancel()


def run_call(call: SerializedTensors, known: list[Any]) -> tuple[SerializedTensors, Seconds]:
    """Return a call's result or error, and the seconds that its sections took; run by a worker of Ray.

    ``known``: references to the values that handles in the call number.
    """
    torch.set_num_threads(1)

    def work() -> Any:
        function, args = deserialize(call)
        return function(*(_fetch(known[each.held]) if isinstance(each, Handle) else each for each in args))

    with keep_freed_memory(), record_seconds() as seconds:
        done = capture_error(work)
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


@lru_cache(maxsize=KEPT)
def _fetch(reference: Any) -> Any:
    """Return the value behind ``reference``, kept for the worker's next call."""
    import ray

    return deserialize(ray.get(reference))


@cache
def _remote_task() -> Any:
    """Return :func:`run_call` as a Ray task without retries: a call that kills a worker often kills the next."""
    import ray

    return ray.remote(num_cpus=1, max_retries=0)(run_call)


def connect(workers: int | None) -> Any:
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
