"""What engines share that spread clients over processes: who begins when, and errors that come back as values."""

from __future__ import annotations

import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from typing_extensions import override

from ..core.kernel import ClientState, ServerState
from ..core.plan import Plan
from ..data.image_transforms import Augmentation
from ..utils.errors import FedshiftError
from .engine import ClientResult, Data, Engine
from .shared_memory import pickle_without_tensors

HOW_TO_CONTINUE = (
    "What was saved before is intact: go on with --resume, with fewer --workers, or with --engine sequential"
)
"""What to do when a worker is lost."""


class ProcessEngine(Engine):
    """Runs what can be sent to another process, on the CPU: several clients at once, who has most samples first."""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        device = next(iter(data.values())).y.device.type
        if device != "cpu":
            return f"uses processors, but the device is {device}"
        try:
            pickle_without_tensors((plan, augment))
        except Exception as error:
            return f"cannot send {plan.method.name} or the model to another process ({error})"
        return None

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        at_once = self._broadcast(server, len(clients))
        waiting = sorted(clients, key=lambda name: self._samples_before(name, clients[name]), reverse=True)
        busy, failed = dict[Any, str](), None
        try:
            while busy or (waiting and not failed):
                while waiting and len(busy) < at_once and not failed:
                    name = waiting.pop(0)
                    busy[self._submit(name, clients[name])] = name
                for task in self._wait(list(busy)):
                    name = busy[task]
                    found = self._collect(task, name, server.round + 1)
                    del busy[task]
                    if isinstance(found, BaseException):
                        failed = failed or found
                    else:
                        yield name, found
        finally:
            self._cancel(list(busy))  # of which there are some where it was stopped on the way
        if failed:
            raise failed

    def _samples_before(self, name: str, client: ClientState) -> int:
        return len(self.steps_of_round(name, client)[1]) * len(self.data[name])

    @abstractmethod
    def _broadcast(self, server: ServerState, clients: int) -> int:
        """Let workers know what ``server`` broadcasts to this many clients; how many can be at work at once."""

    @abstractmethod
    def _submit(self, name: str, client: ClientState) -> Any:
        """Begin the client's work, and return what it is known by here."""

    @abstractmethod
    def _wait(self, tasks: list[Any]) -> Iterable[Any]:
        """Those of ``tasks`` that have ended, once there is one."""

    @abstractmethod
    def _collect(self, task: Any, client: str, round: int) -> ClientResult | BaseException:
        """What came of a task that has ended, or the error that there was instead."""

    @abstractmethod
    def _cancel(self, tasks: list[Any]) -> None:
        """Stop ``tasks``, and whatever else is at work: nobody waits for it."""


def capture_error(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, in a worker, or the error that there was instead, as it can be sent."""
    try:
        return work()
    except FedshiftError as error:
        return error
    except BaseException as error:  # of a type that may be unknown over there, or refuse to be made again
        told = RuntimeError(f"{type(error).__name__}: {error}")
        told.add_note(f"In the worker process:\n{traceback.format_exc()}")
        return told
