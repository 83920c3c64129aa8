"""What a person sees while an experiment runs: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from typing_extensions import override

from .experiment import Observer
from .trial import RoundDone


class _Watch(Observer):
    """Keeps the figures that both displays show."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.method, self.seed, self.rounds, self.number = "", 0, 0, 0
        self.loss: dict[str, float] = {}
        self.accuracy: dict[str, float] = {}

    @override
    def trial(self, method: str, seed: int, done: int) -> None:
        self.method, self.seed, self.number = method, seed, done
        self.loss, self.accuracy = {}, {}

    @override
    def client(self, client: str, loss: float) -> None:
        self.loss[client] = loss

    @override
    def round(self, done: RoundDone) -> None:
        self.number = done.round
        for row in done.rows:
            if (row["split"], row["model"]) == ("test", "personal"):
                self.accuracy[row["client"]] = 100 * sum(row["hits"]) / row["samples"]

    @override
    def notice(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


class PlainLines(_Watch):
    """One line for each evaluated round; what a log file or a pipe gets."""

    @override
    def begin(self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str]) -> None:
        self.rounds, self.left = rounds, len(methods) * len(seeds) * rounds
        self.began, self.run = time.monotonic(), 0

    @override
    def trial(self, method: str, seed: int, done: int) -> None:
        super().trial(method, seed, done)
        self.left -= done

    @override
    def round(self, done: RoundDone) -> None:
        super().round(done)
        self.run, self.left = self.run + 1, self.left - 1
        if all(row["split"] == "train" for row in done.rows):
            return
        mean_loss = sum(self.loss.values()) / len(self.loss)
        accuracy = sum(self.accuracy.values()) / len(self.accuracy) if self.accuracy else float("nan")
        each = " ".join(f"{client} {value:.1f}" for client, value in self.accuracy.items())
        left = (time.monotonic() - self.began) / self.run * self.left
        self.console.print(
            f"{self.method} seed {self.seed} round {done.round}/{self.rounds}: loss {mean_loss:.4f}, "
            f"accuracy {accuracy:.2f} % ({each}), {_clock(left)} left",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


class LiveDisplay(_Watch):
    """A bar over all rounds with time left, above a table of the clients; use as a context manager."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console)
        self.task = self.bar.add_task("starting", total=None)
        self.live = Live(self.bar, console=console, refresh_per_second=8, transient=True)
        self.names: Sequence[str] = ()

    def __enter__(self) -> LiveDisplay:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    @override
    def begin(self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str]) -> None:
        self.rounds, self.names = rounds, clients
        self.bar.reset(self.task, total=len(methods) * len(seeds) * rounds)

    @override
    def trial(self, method: str, seed: int, done: int) -> None:
        super().trial(method, seed, done)
        self.bar.advance(self.task, done)
        self._draw()

    @override
    def client(self, client: str, loss: float) -> None:
        super().client(client, loss)
        self._draw()

    @override
    def round(self, done: RoundDone) -> None:
        super().round(done)
        self.bar.advance(self.task)
        self._draw()

    def _draw(self) -> None:
        self.bar.update(self.task, description=f"[bold]{self.method}[/] seed {self.seed} round {self.number}")
        names = [*self.names, *(name for name in self.loss if name not in self.names)]
        table = Table(box=None, padding=(0, 2))
        for title in ("client", "training loss", "test accuracy"):
            table.add_column(title, justify="left" if title == "client" else "right")
        for name in names[:20]:
            loss, accuracy = self.loss.get(name), self.accuracy.get(name)
            table.add_row(name, "" if loss is None else f"{loss:.4f}", "" if accuracy is None else f"{accuracy:.2f} %")
        if len(names) > 20:
            table.add_row(f"and {len(names) - 20} more", "", "")
        self.live.update(Group(self.bar, table))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
