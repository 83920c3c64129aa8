"""A session: one call that runs an experiment, and the files that it writes next to the trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from threading import Event

from ..config.settings_file import COMMAND
from ..engines.engine import Diverged
from ..results.run_directory import TRIALS, RunDirectory
from ..results.summary import (
    ENVIRONMENT,
    NOTICES,
    SESSIONS,
    holds_summary,
    read_environment,
    read_notices,
    write_outcome,
)
from ..utils.errors import FedshiftError
from ..utils.version import __version__
from ..utils.words import is_information
from .callbacks import Callback


class Session:
    """One call of :meth:`Experiment.run`: its directory, callback and stop event, and its files next to the trials.

    The description of a resumed run is rewritten only after its first new round, and its earlier notices are kept until
    it ends, so that a run that fails earlier stays unchanged. ``describe`` takes the sessions that trained, None for
    those before. ``number``: index of the current trial; notices are kept in this order, also of trials side by side.
    """

    def __init__(
        self,
        directory: RunDirectory,
        callback: Callback,
        stop: Event,
        describe: Callable[[Sequence[Mapping[str, str]] | None], None],
        *,
        resume: bool,
    ) -> None:
        self.directory, self.callback, self.stop, self._describe = directory, callback, stop, describe
        self.path, self.number = directory.path, -1
        self.described = self.recorded = False
        self.said: dict[str, int] = {}
        self.before: tuple[str, ...] = ()
        self.sessions: list[Mapping[str, str]] = []
        self.own = {"started": format_now(), "command": COMMAND.get(), "version": __version__}
        lost = False
        if resume:
            with suppress(FedshiftError):  # notices that still apply are repeated
                self.before = read_notices(directory.path)
            try:
                self.sessions = read_environment(directory.path)[SESSIONS]
            except FedshiftError:
                lost = (directory.path / TRIALS).is_dir()
        if not (resume and holds_summary(directory.path)):
            self.describe(trains=False)
        self._write()
        if lost:
            self.say(f"{ENVIRONMENT} was damaged or removed: the time and the command that began this run are lost")

    def describe(self, *, trains: bool) -> None:
        """Write the run's description, on the first call; ``trains``: a round was added, so record this session too."""
        if (trains or not self.sessions) and not self.recorded:
            self._describe([*self.sessions, self.own])
            self.described = self.recorded = True
        elif not self.described:
            self._describe(None)
            self.described = True

    def say(self, text: str) -> None:
        """Give a notice and keep it, unless it was given before."""
        known = text in self.said
        if known and self.said[text] <= self.number:
            return
        self.said.pop(text, None)
        self.said[text] = self.number
        self._write()
        if not known:
            self.callback.on_notice(text)

    def say_diverged(self, method: str, seed: int, error: Diverged) -> None:
        """Give the notice about a trial that diverged."""
        self.say(f"{method}, seed {seed}: {error}. Its numbers are from the previous round.")

    def end(self, *, finished: bool = False) -> None:
        """Write the final files of the session; ``finished``: every trial has reached its end."""
        if finished:
            self.describe(trains=False)
            self.before = ()
            self._write()
        write_outcome(self.directory)

    def _write(self) -> None:
        notices = list(dict.fromkeys([*self.before, *sorted(self.said, key=lambda text: self.said[text])]))
        information = [text for text in notices if is_information(text)]
        self.directory.write_json(NOTICES, {"notices": notices, "information": information})


def format_now() -> str:
    """Return the current time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
