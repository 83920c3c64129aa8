"""Executors: where calls are run, in this process or in others. They know nothing of learning.

A lane runs one call at a time. Values that several calls take are put where lanes find them; each lane then has one
object, so that what a call does to it is seen by the next call on that lane. Whoever opens an executor closes it.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from typing_extensions import override

from ..errors import FedshiftError
from ..user_code import locate_error

Key = TypeVar("Key")
Chain = Generator[tuple[Any, ...], Any, Any]
"""Calls on one lane, one after another: yields each as function and arguments, and receives its result or its error.

The next call may depend on what the one before returned; what the generator returns is the result of the chain.
"""


class LaneLost(FedshiftError):
    """A lane ended before its call did. The message is the end of a sentence: how it ended."""


@dataclass(frozen=True, eq=False)
class Handle:
    """A value that was put into an executor; as an argument of a call it is replaced by the value."""

    held: Any


@dataclass(eq=False)
class Task:
    """A call on a lane, with its result, or the exception that it raised, once it has ended."""

    lane: int
    result: Any = None


class Executor(ABC):
    """Lanes that run calls. ``lanes``: default number of calls that run at once.

    ``lane_name``: what a lane is called in messages. ``shares_memory``: whether a value that is put is not copied for
    each lane that uses it.
    """

    lanes: int
    lane_name: ClassVar[str]
    shares_memory: ClassVar[bool] = True

    @abstractmethod
    def put(self, value: Any) -> Handle:
        """Make ``value`` known to lanes, which fetch it when a call first takes it.

        Raises the error of pickling where the value cannot be sent to another process.
        """

    @abstractmethod
    def drop(self, handle: Handle) -> None:
        """Forget the value of ``handle``, which no later call takes."""

    @abstractmethod
    def submit(self, function: Callable[..., Any], *args: Any, lane: int | None = None) -> Task:
        """Begin ``function(*args)`` on ``lane``, which is idle, or on any idle lane; values replace their handles."""

    @abstractmethod
    def wait(self, tasks: list[Task]) -> list[Task]:
        """Wait until at least one of ``tasks`` has ended; return those that have."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop all calls in progress; what their lanes knew is lost."""

    @abstractmethod
    def close(self) -> None:
        """End what the executor started."""


class InProcess(Executor):
    """Runs calls in this process, one after another, when their results are waited for."""

    lanes = 1
    lane_name = "process"

    def __init__(self) -> None:
        self._calls: dict[Task, tuple[Callable[..., Any], tuple[Any, ...]]] = {}

    @override
    def put(self, value: Any) -> Handle:
        return Handle(value)

    @override
    def drop(self, handle: Handle) -> None:
        pass

    @override
    def submit(self, function: Callable[..., Any], *args: Any, lane: int | None = None) -> Task:
        task = Task(lane or 0)
        self._calls[task] = function, args
        return task

    @override
    def wait(self, tasks: list[Task]) -> list[Task]:
        task = tasks[0]
        function, args = self._calls.pop(task)
        try:
            task.result = function(*(each.held if isinstance(each, Handle) else each for each in args))
        except Exception as error:
            task.result = error
        return [task]

    @override
    def cancel(self) -> None:
        self._calls.clear()

    @override
    def close(self) -> None:
        self.cancel()


def run_all(
    executor: Executor, chains: Iterable[tuple[Key, Chain]], at_once: int | None = None
) -> Iterator[tuple[Key, Any]]:
    """Run ``chains``, at most ``at_once`` at a time; yield each key with the chain's result or error as it ends.

    Each chain keeps its lane. The next one is taken when a lane is free, so the caller begins no more by ending
    ``chains``. If the caller stops half way, or is interrupted, the calls in progress are stopped.
    """
    coming, running = iter(chains), dict[Task, tuple[Key, Chain]]()

    def go_on(key: Key, chain: Chain, lane: int | None = None, result: Any = None) -> list[tuple[Key, Any]]:
        """Submit the chain's next call; return the key and what the chain came to if there is none."""
        try:
            step = chain.throw(result) if isinstance(result, BaseException) else chain.send(result)
            running[executor.submit(*step, lane=lane)] = key, chain
        except StopIteration as end:
            return [(key, end.value)]
        except Exception as error:
            return [(key, error)]
        return []

    try:
        while True:
            while len(running) < (at_once or executor.lanes) and (new := next(coming, None)):
                yield from go_on(*new)
            if not running:
                return
            for task in executor.wait(list(running)):
                yield from go_on(*running.pop(task), task.lane, task.result)
    finally:
        executor.cancel()  # none is in progress at the usual end
        for _, chain in running.values():
            chain.close()


def capture_error(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` in another process, or its error in a form that can be sent."""
    try:
        return work()
    except FedshiftError as error:
        return error
    except BaseException as error:  # its type may be unknown to the parent, or impossible to unpickle
        where = locate_error(error)
        told = RuntimeError(f"{type(error).__name__}: {error}{f'; in {where}' if where else ''}")
        told.add_note(f"In the worker process:\n{traceback.format_exc()}")
        return told
