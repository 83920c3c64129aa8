"""An experiment run for a person who watches: where it writes, what it shows, how it stops and what it leaves.

Heavy modules are imported when it starts, so that the command line answers at once.
"""

from __future__ import annotations

import math
import shlex
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from ..config.spec import CompareSpec, OutputOptions, RunSpec
from ..utils.errors import FedshiftError, UsageError
from ..utils.processors import available_processors
from ..utils.profiling import OPERATIONS, Seconds, record_seconds

if TYPE_CHECKING:
    from threading import Event

    from ..experiments.experiment import Experiment, Observer


def run_experiment(spec: RunSpec | CompareSpec, command: str, place: OutputOptions) -> int:
    """Run what ``spec`` describes in ``place.out`` (or a new directory), or go on there; return the exit code.

    Raises :class:`FedshiftError` where it fails, after what was done has been published.
    """
    out, resume = place.out, place.resume
    if out and resume:
        raise UsageError(f"--out {out} and --resume {resume}: a resumed run stays in its directory; give one of them")
    console = Console()
    with show_loading(console) as progress:
        from ..experiments.factory import make_experiment

        use_threads(spec.threads)
        experiment = make_experiment(spec, progress)
    directory = resume or out or new_directory(command)
    console.print(f"{directory}: {summarize_experiment(experiment)}", markup=False, highlight=False, soft_wrap=True)
    began = time.perf_counter()
    with catch_interrupts(console) as stop, show_progress(console) as observer, _profile(place.profile) as seconds:
        try:
            finished = experiment.run(directory, resume=resume is not None, observer=observer, stop=stop)
        except UsageError:
            raise
        except FedshiftError as error:
            failure: FedshiftError | OSError | None = error
            finished = False
        except KeyboardInterrupt:
            return report_stop(console, command, directory)
        else:
            failure = None
    if seconds:
        _say_profile(console, seconds, time.perf_counter() - began, spec.device)
    unpublished = publish_safely(directory, console)
    failure = failure or unpublished
    if failure:
        raise failure
    return 0 if finished else report_stop(console, command, directory)


def rebuild_run(directory: Path, console: Console) -> None:
    """Show and write what the run in ``directory`` has left so far, if it has begun."""
    from ..report.publication import publish_summary
    from ..results.summary import read_summary

    if (directory / "study.json").exists():
        publish_summary(read_summary(directory), directory, console)


def publish_safely(directory: Path, console: Console) -> FedshiftError | OSError | None:
    """:func:`rebuild_run` of a run that may have failed already; what kept it from being done."""
    try:
        rebuild_run(directory, console)
    except (FedshiftError, OSError) as error:
        return error
    return None


def directory_kind(directory: Path) -> str | None:
    """What wrote ``directory``: ``run`` (or ``compare``), ``sweep``, ``leave-out`` or ``reproduce``; None: nothing."""
    if (directory / "study.json").is_file():
        return "run"
    written = directory / "config.toml"
    if written.is_file():
        try:
            settings = tomllib.loads(written.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{written} is damaged ({error}): give the directory of another run") from error
        return "sweep" if "over" in settings else "leave-out" if "leave_out" in settings else None
    found = directory.glob("results/*/*.json"), directory.glob(f"runs/{'[0-9a-f]' * 16}/config.toml")
    return "reproduce" if any(map(any, found)) else None


@contextmanager
def show_loading(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """On a terminal, a line that says what is loaded and how far it is; then what the cache of images has grown by."""
    with announced_cache(console), _shown_progress(console) as progress:
        yield progress


@contextmanager
def announced_cache(console: Console) -> Iterator[None]:
    """Say after the block how many bytes of decoded images it added to the cache, where, and how to be rid of them."""
    from ..data.files.image_store import BEGUN, entries, images_in, limit
    from ..utils.files import cache_directory

    images = images_in(cache_directory())
    before = {entry.place for entry in entries(images)}
    limit()  # refused before anything is read where it is no number
    try:
        yield
    finally:
        new = [entry for entry in entries(images) if entry.place not in before and entry.place.suffix != BEGUN]
        if new:
            from ..report.formatting import format_bytes

            added = format_bytes(sum(entry.size for entry in new))
            print_line(
                console,
                f"Decoded images are kept for the next time: {added} in {images}, in all {cache_use(images)}; "
                "`fedshift data cache --clear` removes them.",
            )


def cache_use(images: Path) -> str:
    """Bytes in the directory of decoded images, and how many there may be."""
    from ..data.files.image_store import VARIABLE, limit, taken
    from ..report.formatting import format_bytes

    most = f"of at most {format_bytes(limit())}" if math.isfinite(limit()) else "without a limit"
    return f"{format_bytes(taken(images))} {most} ({VARIABLE})"


@contextmanager
def _shown_progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def make_console(width: int = 120) -> Console:
    """A console for tables: as wide as the terminal, and ``width`` where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_line(console: Console, text: str) -> None:
    """Print ``text`` as it is, in one line however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def report_stop(console: Console, command: str, directory: Path) -> int:
    """Say how to go on, and return the exit code of a run stopped by Ctrl-C."""
    go_on = f"fedshift {command} --resume {shlex.quote(str(directory))}"
    if not (directory / "config.toml").exists():
        go_on = "the same command"
    console.print(f"Stopped. What was done is kept; go on with: {go_on}", markup=False, highlight=False, soft_wrap=True)
    return 130


def use_threads(asked: int | None) -> None:
    """Let torch use as many threads as were ``asked`` for; None: its own choice, but no more than processors."""
    import torch

    if (threads := asked or min(torch.get_num_threads(), available_processors())) != torch.get_num_threads():
        torch.set_num_threads(threads)


def summarize_experiment(experiment: Experiment) -> str:
    """An experiment in a line: methods, data, rounds and seeds."""
    data, names = experiment.data, ", ".join(method.name for method in experiment.methods)
    rounds, seeds = experiment.settings.rounds, len(experiment.seeds)
    return (
        f"{names} on {data.name} ({len(data.clients)} clients, {sum(len(c.train) for c in data.clients)} training "
        f"samples, {data.classes} classes), {rounds} round{'s' * (rounds > 1)}, {seeds} seed{'s' * (seeds > 1)}"
    )


def new_directory(command: str) -> Path:
    """A directory under ``runs`` that does not exist yet."""
    from datetime import datetime
    from itertools import count

    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    names = (Path("runs") / f"{command}-{stamp}{'' if n == 0 else f'-{n}'}" for n in count())
    return next(name for name in names if not name.exists())


@contextmanager
def _profile(wanted: bool) -> Iterator[Seconds]:
    """What the parts of the block took, where that is ``wanted``."""
    if not wanted:
        yield {}
        return
    with record_seconds() as seconds:
        yield seconds


def _say_profile(console: Console, seconds: Seconds, whole: float, device: str) -> None:
    """A table of the parts, and how near to the measured peak training came."""
    from rich.table import Table

    from ..engines.cost_model import measure_peak

    done, total = seconds.pop(OPERATIONS, 0.0), sum(seconds.values())
    table = Table(box=None)
    for title in ("part", "seconds", "share"):
        table.add_column(title, justify="left" if title == "part" else "right")
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{value:.2f}", f"{100 * value / total:.1f} %")
    console.print(f"Where {whole:.1f} s went, in seconds of all processes:", highlight=False)
    console.print(table)
    busy = seconds.get("forward and backward")
    if busy and device == "cpu":
        best = max(measure_peak(1).values())
        console.print(
            f"Forward and backward: {done / 1e9:.1f} GFLOP at {done / busy / 1e9:.1f} GFLOP/s, "
            f"{100 * done / busy / best:.0f} % of the {best / 1e9:.0f} GFLOP/s that one thread reaches here at best.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


@contextmanager
def show_progress(console: Console) -> Iterator[Observer]:
    """An observer that shows what happens: a live display on a terminal, plain lines elsewhere."""
    from .progress import LiveDisplay, PlainLines

    if not console.is_terminal:
        yield PlainLines(console)
        return
    with LiveDisplay(console) as display:
        yield display


@contextmanager
def catch_interrupts(console: Console, then: str = "Stopping after this round") -> Iterator[Event]:
    """An event that the first Ctrl-C sets; the second stops at once. ``then``: what the first does."""
    import signal
    from threading import Event

    stop = Event()

    def on_interrupt(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        console.print(f"{then}; press Ctrl-C again to stop at once.")

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
