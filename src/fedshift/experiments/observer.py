"""Observers of an experiment: callbacks for its events."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from ..engines.auto import EngineChoice
from ..results.schema import Row
from .trial import RoundResult


class Observer:
    """Callbacks for the events of an experiment; every method is a no-op to override."""

    def begin(
        self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str], metric: str
    ) -> None:
        """The experiment starts; its tables will report ``metric``."""

    def trial(self, method: str, seed: int, done: int) -> None:
        """A trial starts, or continues after ``done`` rounds."""

    def turn(self, method: str, seed: int) -> None:
        """The next events belong to this trial, which started earlier and runs beside others (``jobs``)."""

    def recorded(self, rows: Sequence[Row]) -> None:
        """The trial that starts has been evaluated before; ``rows``: measurements of its last evaluated round."""

    def engine(self, method: str, choice: EngineChoice) -> None:
        """An engine was chosen for the trials of ``method`` (``engine="auto"``)."""

    def client(self, client: str, loss: float) -> None:
        """A client finished its work of the round with this mean training loss."""

    def round(self, done: RoundResult) -> None:
        """A round ended and is saved."""

    def notice(self, text: str) -> None:
        """A notice for the user; each is given once."""


class Observers(Observer):
    """Several observers, which receive each event in turn."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    @override
    def begin(
        self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str], metric: str
    ) -> None:
        for each in self.observers:
            each.begin(methods, seeds, rounds, clients, metric)

    @override
    def trial(self, method: str, seed: int, done: int) -> None:
        for each in self.observers:
            each.trial(method, seed, done)

    @override
    def turn(self, method: str, seed: int) -> None:
        for each in self.observers:
            each.turn(method, seed)

    @override
    def recorded(self, rows: Sequence[Row]) -> None:
        for each in self.observers:
            each.recorded(rows)

    @override
    def engine(self, method: str, choice: EngineChoice) -> None:
        for each in self.observers:
            each.engine(method, choice)

    @override
    def client(self, client: str, loss: float) -> None:
        for each in self.observers:
            each.client(client, loss)

    @override
    def round(self, done: RoundResult) -> None:
        for each in self.observers:
            each.round(done)

    @override
    def notice(self, text: str) -> None:
        for each in self.observers:
            each.notice(text)
