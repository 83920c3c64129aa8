"""Callbacks: what happens at the events of an experiment, for displays, servers and users' own code.

All events arrive in the process that was started, including events of trials that run in other processes. An error in
a callback loses nothing: rounds that are not in files yet (``checkpoint_every``) are saved before it is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ..config.catalog import Catalog
from ..engines.auto import EngineChoice
from ..results.schema import Row
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.user_code import describe_error, describe_function
from ..utils.words import Information
from .trial import RoundResult


@dataclass(kw_only=True, eq=False)
class RunningTrial:
    """The trial, one method with one seed, of the current events.

    ``rounds``: number planned. ``say``: gives a notice, which is printed and kept with the run. ``place``: folder of
    the trial's files. ``asked``: why it is to end; empty if it is not.
    """

    method: str
    seed: int
    rounds: int
    place: Path
    say: Callable[[str], None]
    asked: str = ""

    @property
    def folder(self) -> Path:
        """Folder for files of callbacks, which is part of the run directory."""
        folder = self.place / "callbacks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self, text: str) -> None:
        """Print a note, and keep it with the run: in its notices and on its page."""
        self.say(Information(f"{self.method}, seed {self.seed}: {text}"))

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End this trial, but no other, after its next evaluated round (in :meth:`Callback.on_evaluation`: this one).

        The run records round and ``reason``.
        """
        self.asked = reason


class Callback:
    """Methods that are called at the events of an experiment; each does nothing unless a subclass overrides it.

    ``trial``: the trial that the event belongs to, with ``method``, ``seed``, ``rounds``, ``folder``, ``log(text)`` and
    ``stop(reason)``; not yet set in :meth:`on_run_begin`.
    """

    trial: RunningTrial

    def on_run_begin(
        self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str], metric: str
    ) -> None:
        """The experiment starts; its tables will report ``metric``."""

    def on_trial_begin(self, method: str, seed: int, done: int) -> None:
        """A trial starts, or continues after ``done`` rounds."""

    def on_turn(self, method: str, seed: int) -> None:
        """The next events belong to this trial, which started earlier and runs in parallel with others (``jobs``)."""

    def on_recorded(self, rows: Sequence[Row]) -> None:
        """The trial that starts has been evaluated before; ``rows``: measurements of its last evaluated round."""

    def on_engine(self, method: str, choice: EngineChoice) -> None:
        """An engine was chosen for the trials of ``method`` (``engine="auto"``)."""

    def on_round_begin(self, round: int) -> None:
        """Round number ``round``, counted from 1, starts."""

    def on_client_end(self, client: str, loss: float) -> None:
        """A client finished its work of the round with this mean training loss."""

    def on_evaluation(self, done: RoundResult) -> None:
        """An evaluated round ended; ``done.measure("accuracy")`` has each client's value."""

    def on_round_end(self, done: RoundResult) -> None:
        """A round ended."""

    def on_trial_end(self, stopped: str) -> None:
        """The trial has ended or diverged; ``stopped``: why before the last planned round, empty if it has done all."""

    def on_notice(self, text: str) -> None:
        """A notice for the user; each is given once."""


class FunctionCallback(Callback):
    """Calls ``function(trial, done)`` at the end of each round."""

    def __init__(self, function: Callable[[RunningTrial, RoundResult], object]) -> None:
        self.function = function

    @override
    def on_round_end(self, done: RoundResult) -> None:
        self.function(self.trial, done)


class Callbacks(Callback):
    """Several callbacks, which receive each event in turn.

    An error in one of ``own``, the user's callbacks, is reported with its file and line. During the work of a round
    it is raised once the round is saved.
    """

    def __init__(self, *callbacks: Callback, own: Sequence[Callback] = ()) -> None:
        self._all, self._own = (*callbacks, *own), frozenset(map(id, own))
        self._failed: FedshiftError | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for each in self._all if name == "trial" else ():
            each.trial = value

    def _call(self, event: str, *values: Any) -> None:
        if self._failed is not None and event != "on_client_end":
            raise self._failed
        for each in self._all:
            try:
                getattr(each, event)(*values)
            except FedshiftError:
                raise
            except Exception as error:
                if id(each) not in self._own:
                    raise
                self._failed = FedshiftError(
                    f"callback {describe_function(getattr(each, 'function', type(each)))}, {event}: "
                    f"{describe_error(error)}. All rounds so far are saved: correct it, and continue with {{}}",
                    Ref(resume=True),
                ).about("callbacks")
                self._failed.__cause__ = error
                if event != "on_client_end":
                    raise self._failed from error

    @override
    def on_run_begin(
        self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str], metric: str
    ) -> None:
        self._call("on_run_begin", methods, seeds, rounds, clients, metric)

    @override
    def on_trial_begin(self, method: str, seed: int, done: int) -> None:
        self._call("on_trial_begin", method, seed, done)

    @override
    def on_turn(self, method: str, seed: int) -> None:
        self._call("on_turn", method, seed)

    @override
    def on_recorded(self, rows: Sequence[Row]) -> None:
        self._call("on_recorded", rows)

    @override
    def on_engine(self, method: str, choice: EngineChoice) -> None:
        self._call("on_engine", method, choice)

    @override
    def on_round_begin(self, round: int) -> None:
        self._call("on_round_begin", round)

    @override
    def on_client_end(self, client: str, loss: float) -> None:
        self._call("on_client_end", client, loss)

    @override
    def on_evaluation(self, done: RoundResult) -> None:
        self._call("on_evaluation", done)

    @override
    def on_round_end(self, done: RoundResult) -> None:
        self._call("on_round_end", done)

    @override
    def on_trial_end(self, stopped: str) -> None:
        self._call("on_trial_end", stopped)

    @override
    def on_notice(self, text: str) -> None:
        self._call("on_notice", text)


def _accept(callback: object, _text: str | None) -> Callback:
    """Convert a function of a trial and its round, or a class of callbacks, to a :class:`Callback`."""
    if isinstance(callback, type) and issubclass(callback, Callback):
        return _accept(callback(), None)
    if isinstance(callback, Callback):
        return callback
    if not callable(callback) or isinstance(callback, type):
        raise UsageError(
            "{} is not a callback: give a fedshift.Callback, a subclass, or a function of a trial and its round, "
            "called at the end of each",
            Ref(callbacks=callback),
        )
    return FunctionCallback(callback)


CALLBACKS = Catalog[Callback](
    "callback",
    {},
    _accept,
    adapt=lambda function, _: function if isinstance(function, type) else lambda: function,
    setting="callbacks",
)
"""Users' callbacks, ``package.module:Class(name=value)`` or ``package.module:function``."""
