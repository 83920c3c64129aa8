"""Runs started by commands: one experiment, or several in one directory, shown, stopped and published."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ..config.settings_file import FILE, read_run_settings
from ..config.spec import DIRECTORY, CompareSpec, RunOptions, RunSpec
from ..console.printing import Console
from ..console.terminal import catch_interrupts, choose_directory, print_line, report_stop, show_loading, show_progress
from ..utils.errors import FedshiftError, UsageError
from ..utils.processors import available_processors
from ..utils.profiling import OPERATIONS, Seconds, record_seconds
from ..utils.words import format_time

if TYPE_CHECKING:
    from ..experiments.experiment import Experiment
    from ..experiments.run_queue import QueuedRun

Profile = Annotated[
    bool,
    Parameter(
        group=DIRECTORY,
        negative=(),
        help="Print at the end where the time went, and the fraction of this machine's measured peak that training "
        "reached.",
    ),
]
"""Argument of run and compare."""
RunMethods = Annotated[
    str | None,
    Parameter(
        help="Methods of the run, comma-separated, by name, as patterns such as fedbn*, or as given to the run; by "
        "default all."
    ),
]
RunSeeds = Annotated[int | None, Parameter(help="Number of the run's seeds, the first ones; by default all.")]
RunDevice = Annotated[
    str | None,
    Parameter(help="Torch device to compute on; by default the run's, or cpu where this machine has none such."),
]
RunData = Annotated[
    Path | None,
    Parameter(
        help="Data of the run, where they have moved: the directory, or for a benchmark the one that holds its files. "
        "By default where they were, also if they were moved together with the run."
    ),
]
RunCode = Annotated[
    list[str] | None,
    Parameter(
        negative=(),
        help="Function of your own, package.module:function, that the run's settings may name; may be given several "
        "times. Run directories may come from others, so no other is called.",
    ),
]
"""Arguments that commands on a finished run share."""


def run_experiment(spec: RunSpec | CompareSpec, command: str, place: RunOptions, *, profile: bool = False) -> int:
    """Run or continue the experiment that ``spec`` describes in ``place.out`` (or a new directory).

    Returns the exit code. Raises :class:`FedshiftError` if it fails, after publishing the results so far.
    """
    directory = choose_directory(place, command)
    console, shown = Console(), Console(quiet=place.quiet)
    with show_loading(shown) as progress:
        from ..diagnosis.checked_experiment import make_checked
        from ..diagnosis.overview import summarize_sizes
        from ..experiments.callbacks import CALLBACKS
        from ..experiments.loggers import parse_loggers, require_packages
        from ..report.publication import publish_safely

        require_packages(parse_loggers(spec.log))
        own = CALLBACKS.parse_all(place.callbacks)
        use_threads(spec.threads)
        experiment = make_checked(spec, progress)
    print_line(console, f"{directory}: {summarize_experiment(experiment)}")
    print_line(shown, summarize_sizes(experiment.data))
    began, finished = time.perf_counter(), False
    failure: FedshiftError | OSError | None = None
    with catch_interrupts(console) as stop, show_progress(shown, own) as callback, _profile(profile) as seconds:
        try:
            finished = experiment.run(
                directory, resume=place.resume is not None, callback=callback, stop=stop, jobs=place.jobs
            )
        except UsageError:
            raise
        except FedshiftError as error:
            failure = error
        except KeyboardInterrupt:
            return report_stop(console, command, directory)
    if seconds:
        _print_profile(console, seconds, time.perf_counter() - began, spec.device)
    unpublished = publish_safely(directory, console)
    if failure := failure or unpublished:
        raise failure
    return 0 if finished else report_stop(console, command, directory)


def run_several(
    parts: Mapping[str, QueuedRun],
    command: str,
    directory: Path,
    settings: Mapping[str, Any],
    console: Console,
    shown: Console,
    *,
    resume: bool,
    title: str,
    begin: Callable[[int, QueuedRun], None],
    publish: Callable[[], None],
    jobs: int | Literal["auto"] = "auto",
    callbacks: Sequence[str] = (),
    measure: Callable[[QueuedRun], None] = lambda _: None,
) -> int:
    """Run or continue the ``parts`` that have not ended, in one directory; return the exit code.

    Args:
        parts: runs by their names in errors.
        command: command that the user called.
        directory: directory of all runs.
        settings: settings to record.
        console: for all output except progress.
        shown: for progress; a quiet console shows nothing.
        resume: whether to continue the runs in ``directory``.
        title: line to print first.
        begin: called with the number of each part, from 1, before it runs.
        publish: called after the last part.
        jobs: maximum number of a run's trials that run side by side.
        callbacks: the user's callbacks, as expressions.
        measure: called with each part that was not stopped.

    Raises:
        FedshiftError: a part diverged; raised after the others have been run and published.

    """
    from ..experiments.callbacks import CALLBACKS
    from ..experiments.run_queue import read_outcome, run_pending
    from ..report.publication import publish_run
    from ..results.run_directory import RunDirectory

    own = CALLBACKS.parse_all(callbacks)
    pending = sum(read_outcome(part.folder, part.settings) is None for part in parts.values())
    started: list[float] = []

    def announce(number: int, part: QueuedRun) -> None:
        begin(number, part)
        started.append(time.monotonic())
        if done := len(started) - 1:
            left = (started[-1] - started[0]) / done * (pending - done)
            print_line(shown, f"about {format_time(left)} left for all {len(parts)}")

    def end(part: QueuedRun, finished: bool) -> None:
        kept.write_settings(settings)
        publish_run(part.folder, Console(quiet=True))
        if finished:
            measure(part)

    with closing(RunDirectory(directory, resume=resume)) as kept:
        if not resume:  # when resuming, only after a part was run, so that a failure keeps the earlier settings
            kept.write_settings(settings)
        print_line(console, f"{directory}: {title}")
        try:
            with catch_interrupts(console) as stop, show_progress(shown, own) as callback:
                finished = run_pending(parts.values(), callback=callback, stop=stop, jobs=jobs, begin=announce, end=end)
            kept.write_settings(settings)
        except KeyboardInterrupt:
            return report_stop(console, command, directory)
        publish()
    if not finished:
        return report_stop(console, command, directory)
    outcomes = {name: read_outcome(part.folder, part.settings) for name, part in parts.items()}
    if diverged := [f"{name}: {error}" for name, error in outcomes.items() if error]:
        raise FedshiftError("; ".join(diverged))
    return 0


def load_run(
    run: Path, console: Console, methods: str | None = None, seeds: int | None = None, device: str | None = None,
    run_data: Path | None = None, code: list[str] | None = None,
) -> tuple[RunSpec | CompareSpec, Experiment, list[str]]:  # fmt: skip
    """Return the settings and the experiment of a finished run, as its trials are restored, and notices.

    Torch has the run's number of threads from then on. The arguments are :data:`RunMethods` and those below it.
    """
    from ..experiments.restoration import load_experiment, load_spec, resolve_device, select_trials

    settings = load_spec(run, run_data, code=code or ())
    use_threads(settings.threads)
    device, notices = resolve_device(settings, device)
    with show_loading(console) as progress:
        spec, experiment = load_experiment(run, progress, device, run_data, code or ())
    return spec, select_trials(experiment, methods, seeds), notices


def find_kind(directory: Path) -> str | None:
    """Return the command that wrote ``directory``: run (or compare), sweep, advise, leave-out, reproduce; else None."""
    from ..results.summary import holds_run

    if holds_run(directory):
        return "run"
    if (directory / FILE).is_file():
        settings = read_run_settings(directory).values
        kinds = {"over": "sweep", "leave_out": "leave-out", "budget": "advise"}
        return next((kind for name, kind in kinds.items() if name in settings), None)
    found = directory.glob("results/*/*.json"), directory.glob(f"runs/{'[0-9a-f]' * 16}/config.toml")
    return "reproduce" if any(map(any, found)) else None


def summarize_experiment(experiment: Experiment) -> str:
    """Return an experiment in one line: methods, data, rounds and seeds."""
    data, names = experiment.data, ", ".join(method.label for method in experiment.methods)
    rounds, seeds = experiment.settings.rounds, len(experiment.seeds)
    return (
        f"{names} on {data.name} ({len(data.clients)} clients, {sum(len(c.train) for c in data.clients)} training "
        f"samples, {data.outputs}), {rounds} round{'s' * (rounds > 1)}, {seeds} seed{'s' * (seeds > 1)}"
    )


def use_threads(threads: int | None) -> None:
    """Set the number of torch's threads; None: torch's choice, limited to the number of processors."""
    import torch

    threads = threads or min(torch.get_num_threads(), available_processors())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


@contextmanager
def _profile(wanted: bool) -> Iterator[Seconds]:
    """Yield the seconds that the parts of the block take, if ``wanted``."""
    if not wanted:
        yield {}
        return
    with record_seconds() as seconds:
        yield seconds


def _print_profile(console: Console, seconds: Seconds, whole: float, device: str) -> None:
    """Print a table of the parts, and how close training came to the measured peak."""
    from rich.table import Table

    from ..engines.auto import measure_peak

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
        print_line(
            console,
            f"Forward and backward: {done / 1e9:.1f} GFLOP at {done / busy / 1e9:.1f} GFLOP/s, "
            f"{100 * done / busy / best:.0f} % of the {best / 1e9:.0f} GFLOP/s that one thread reaches here at best.",
        )
