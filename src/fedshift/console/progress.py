"""Progress of an experiment: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from ..engines.auto import EngineChoice
from ..experiments.callbacks import Callback
from ..experiments.trial import RoundResult
from ..results.schema import Row, compute_metric, is_lower_better, is_share, metric_unit, name_metric, rows_to_frame
from .printing import Console

SHOWN = 20
"""Maximum number of clients that are shown individually."""


@dataclass(kw_only=True)
class _TrialProgress:
    """A trial's last round, and its clients' training losses and metrics so far."""

    method: str
    seed: int
    number: int
    ended: bool = False
    loss: dict[str, float] = field(default_factory=dict)
    figure: dict[str, float] = field(default_factory=dict)


class _Progress(Callback):
    """Values that both displays show for each running trial; events belong to the trial ``now``."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rounds = 0
        self.metric, self.split = "accuracy", "test"
        self.now = _TrialProgress(method="", seed=0, number=0)
        self.running: dict[tuple[str, int], _TrialProgress] = {}
        self.engines: dict[tuple[str, str], None] = {}
        self.alone = True

    @override
    def on_run_begin(
        self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str], metric: str
    ) -> None:
        self.rounds, self.metric, self.alone = rounds, metric, len(methods) == 1
        self.running = {}

    @override
    def on_trial_begin(self, method: str, seed: int, done: int) -> None:
        self.now = _TrialProgress(method=method, seed=seed, number=done)
        left = [trial for trial in self.running.values() if not trial.ended]
        self.running = {(trial.method, trial.seed): trial for trial in (*left, self.now)}

    @override
    def on_turn(self, method: str, seed: int) -> None:
        self.now = self.running[method, seed]

    @override
    def on_client_end(self, client: str, loss: float) -> None:
        self.now.loss[client] = loss

    @override
    def on_round_end(self, done: RoundResult) -> None:
        self.now.number = done.round
        self.now.figure |= self._measure(done.rows)

    @override
    def on_trial_end(self, stopped: str) -> None:
        self.now.number, self.now.ended = self.rounds, True

    def _measure(self, rows: Iterable[Row]) -> dict[str, float]:
        """Return the metric on test data, or only on validation data, as printed, for the clients that define it."""
        rows = [row for row in rows if (row["model"], row["moment"]) == ("personal", "loaded")]
        if rows:
            self.split = "test" if any(row["split"] == "test" for row in rows) else "validation"
        tested = rows_to_frame(row for row in rows if row["split"] == self.split)
        defined = metric_unit(self.metric)[0] * compute_metric(tested.set_index("client"), self.metric).dropna()
        return {str(client): float(value) for client, value in defined.items()}

    def _write(self, value: float) -> str:
        """Return a value of the metric, as it is printed; a share with its unit."""
        from ..report.formatting import difference_unit, format_mean  # with it Matplotlib, which takes long to import

        return format_mean(value, number=difference_unit(self.metric).spec) + " %" * is_share(self.metric)

    @override
    def on_engine(self, method: str, choice: EngineChoice) -> None:
        usual = next(iter(self.engines), None)
        if usual is None or (choice.engine != usual[1] and (method, choice.engine) not in self.engines):
            who = f"{method} runs" if usual or self.alone else f"{method}, and each method not named below, runs"
            alone = " on one thread" if choice.threads == 1 else ""
            self.on_notice(f"{who} on the {choice.engine} engine{alone} ({choice.reason})")
            self.engines[method, choice.engine] = None

    @override
    def on_notice(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


class PlainLines(_Progress):
    """One line for each evaluated round, for log files and pipes."""

    @override
    def on_run_begin(
        self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str], metric: str
    ) -> None:
        super().on_run_begin(methods, seeds, rounds, clients, metric)
        self.left = len(methods) * len(seeds) * rounds
        self.began, self.run = time.monotonic(), 0

    @override
    def on_trial_begin(self, method: str, seed: int, done: int) -> None:
        super().on_trial_begin(method, seed, done)
        self.left -= done

    @override
    def on_round_end(self, done: RoundResult) -> None:
        super().on_round_end(done)
        self.run, self.left = self.run + 1, self.left - 1
        if all(row["split"] == "train" for row in done.rows):
            return
        now, reached = self.now, self.now.figure
        many = len(reached) > SHOWN
        worst = max if is_lower_better(self.metric) else min
        named = [worst(reached, key=reached.__getitem__)] if many else list(reached)
        shown = {
            client: f"{reached[client]:.1f}" if is_share(self.metric) else self._write(reached[client])
            for client in named
        }
        each = " ".join(f"{client} {text}" for client, text in shown.items())
        elapsed = time.monotonic() - self.began
        left = elapsed / self.run * self.left
        mean = self._write(_mean(reached))
        said = "" if self.split == "test" else f"{self.split} "
        figure = f"{said}{name_metric(self.metric)} {mean} ({'worst: ' if many else ''}{each})"
        self.console.print(
            f"{now.method} seed {now.seed} round {done.round}/{self.rounds}: "
            f"loss {_mean(now.loss):.4f}, {figure}, "
            f"elapsed {_format_duration(elapsed)}, left {_format_duration(left)}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip

    @override
    def on_trial_end(self, stopped: str) -> None:
        self.left -= self.rounds - self.now.number
        super().on_trial_end(stopped)


class LiveDisplay(_Progress):
    """A bar over all rounds with elapsed time and time left, above tables of methods and clients.

    If trials run side by side, the display shows the clients of the trial that began first. Use as a context manager.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds,"),
            TextColumn("elapsed"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console)
        self.task = self.bar.add_task("starting", total=None)
        self.clients: dict[str, None] = {}
        self.names: dict[str, None] = {}
        self.seeds = 0
        self.macros: dict[str, dict[int, tuple[int, float]]] = {}
        self.live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveDisplay:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    @override
    def on_run_begin(
        self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str], metric: str
    ) -> None:
        super().on_run_begin(methods, seeds, rounds, clients, metric)
        self.clients, self.seeds = dict.fromkeys(clients), len(seeds)
        self.macros = {method: {} for method in methods}
        self.bar.reset(self.task, total=len(methods) * len(seeds) * rounds)

    @override
    def on_trial_begin(self, method: str, seed: int, done: int) -> None:
        super().on_trial_begin(method, seed, done)
        self.names = dict(self.clients)
        self._advance(done)

    @override
    def on_client_end(self, client: str, loss: float) -> None:
        super().on_client_end(client, loss)
        self.names.setdefault(client)

    @override
    def on_recorded(self, rows: Sequence[Row]) -> None:
        self._keep_macro(rows[0]["round"], rows)

    @override
    def on_round_end(self, done: RoundResult) -> None:
        super().on_round_end(done)
        self._keep_macro(done.round, done.rows)
        self._advance(1)

    @override
    def on_trial_end(self, stopped: str) -> None:
        left = self.rounds - self.now.number
        super().on_trial_end(stopped)
        runs = self.macros[self.now.method]
        if stopped and self.now.seed in runs:
            runs[self.now.seed] = self.rounds, runs[self.now.seed][1]
        self._advance(left)

    def _keep_macro(self, number: int, rows: Sequence[Row]) -> None:
        if measured := self._measure(rows):
            self.macros[self.now.method][self.now.seed] = number, _mean(measured)

    def _advance(self, rounds: int) -> None:
        trials = [trial for trial in self.running.values() if trial.number < self.rounds] or [self.now]
        said = ", ".join(f"[bold]{trial.method}[/] seed {trial.seed} round {trial.number}" for trial in trials)
        self.bar.update(self.task, advance=rounds, description=said)

    def _render(self) -> Group:
        """Return the current bar and tables; the display calls this several times a second."""
        names, table = list(self.names), Table(box=None, padding=(0, 2))
        shown = next((trial for trial in list(self.running.values()) if trial.number < self.rounds), self.now)
        for title in ("client", "training loss", f"{self.split} {name_metric(self.metric)}"):
            table.add_column(title, justify="left" if title == "client" else "right")
        for name in names[:SHOWN]:
            table.add_row(name, *self._format_progress(shown.loss.get(name), shown.figure.get(name)))
        if len(names) > SHOWN:
            table.add_row(f"and {len(names) - SHOWN:,} more", "", "")
            means = (_mean(figures) if figures else None for figures in (shown.loss, shown.figure))
            table.add_row("mean of all", *self._format_progress(*means))
        return Group(self.bar, *[self._tabulate_methods()] * bool(self.macros), table)

    def _format_progress(self, loss: float | None, figure: float | None) -> tuple[str, str]:
        return "" if loss is None else f"{loss:.4f}", "" if figure is None else self._write(figure)

    def _tabulate_methods(self) -> Table:
        """Return each method's macro metric so far: the mean over its finished seeds, and an unfinished one."""
        table = Table(box=None, padding=(0, 2))
        for title in ("method", "finished seeds", f"macro {self.split} {name_metric(self.metric)}", "unfinished"):
            table.add_column(title, justify="left" if title == "method" else "right")
        for method, runs in self.macros.items():
            found = list(runs.values())
            finished = [macro for number, macro in found if number == self.rounds]
            others = [f"{self._write(macro)} in round {number}" for number, macro in found if number < self.rounds]
            mean = self._write(sum(finished) / len(finished)) if finished else ""
            table.add_row(Text(method), f"{len(finished)} of {self.seeds}", mean, *others[-1:])
        return table


def _mean(figures: Mapping[str, float]) -> float:
    values = list(figures.values())  # a copy: the display's thread reads while the trial continues
    return sum(values) / len(values) if values else float("nan")


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
