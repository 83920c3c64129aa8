"""The command ``fedshift sweep``: a comparison under each combination of settings' values, and one table of all."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from ..config.spec import RunLocation, SweepSpec
from ..console.session import (
    catch_interrupts,
    directory_kind,
    new_directory,
    print_line,
    rebuild_run,
    report_stop,
    show_loading,
    show_progress,
)
from ..utils.errors import FedshiftError, UsageError

if TYPE_CHECKING:
    from ..experiments.run_queue import QueuedRun
    from ..experiments.sweep import Combination


def sweep(
    spec: Annotated[SweepSpec, Parameter(name="*")] = SweepSpec(),
    output: Annotated[RunLocation, Parameter(name="*")] = RunLocation(),
) -> int:
    """Compare methods under each combination of some settings' values, and put all of them into one table."""
    from ..experiments.sweep import check_combination, make_combinations, split_settings

    if output.out and output.resume:
        raise UsageError(
            f"--out {output.out} and --resume {output.resume}: a resumed sweep stays in its directory; give one of them"
        )
    if output.resume and directory_kind(output.resume) != "sweep":
        raise UsageError(f"{output.resume} holds no sweep: give the directory of one, or start anew (--out)")
    console = Console()
    spec = replace(spec, over=split_settings(spec.over))
    wanted = make_combinations(spec)
    directory = output.resume or output.out or new_directory("sweep")
    left = [combination for combination in wanted if combination.read_outcome(directory) is None]
    with show_loading(console) as progress:
        for number, combination in enumerate(left):
            progress("checking combinations", number, len(left))
            check_combination(combination, directory)
    print_line(console, f"{directory}: {len(wanted)} combinations of {', '.join(wanted[0].values)}, {len(left)} to run")
    return _run(spec, wanted, directory, resume=output.resume is not None, console=console)


def rebuild_sweep(directory: Path, console: Console) -> None:
    """Show and write again what the sweep in ``directory``, and each of its comparisons, has left so far."""
    from ..experiments.sweep import make_combinations

    spec = SweepSpec(**tomllib.loads((directory / "config.toml").read_text(encoding="utf-8")))
    wanted = make_combinations(spec)
    for combination in wanted:
        rebuild_run(directory / combination.folder, Console(quiet=True))
    _publish(spec, wanted, directory, console)


def _run(spec: SweepSpec, wanted: Sequence[Combination], directory: Path, *, resume: bool, console: Console) -> int:
    from ..experiments.run_queue import run_pending
    from ..results.run_directory import RunDirectory, to_toml

    def begin(number: int, part: QueuedRun) -> None:
        print_line(console, f"[{number}/{len(wanted)}] {part.folder.name}")

    def end(part: QueuedRun, _: bool) -> None:
        rebuild_run(part.folder, Console(quiet=True))

    parts = [combination.to_queued_run(directory) for combination in wanted]
    with closing(RunDirectory(directory, resume=resume)) as kept:
        kept.write("config.toml", to_toml(asdict(spec)))
        with catch_interrupts(console) as stop, show_progress(console) as observer:
            try:
                finished = run_pending(parts, observer=observer, stop=stop, begin=begin, end=end)
            except KeyboardInterrupt:
                return report_stop(console, "sweep", directory)
        _publish(spec, wanted, directory, console)
    if not finished:
        return report_stop(console, "sweep", directory)
    if diverged := [said for combination in wanted if (said := combination.read_outcome(directory))]:
        raise FedshiftError("; ".join(diverged))
    return 0


def _publish(spec: SweepSpec, wanted: Sequence[Combination], directory: Path, console: Console) -> None:
    """Show and write what the combinations have left so far, if anything."""
    from ..experiments.sweep import collect_points
    from ..report.sweep_report import SweepResults, publish_sweep

    measured = [
        (combination.folder, point)
        for combination, point in collect_points(wanted, directory)
        if (point.summary.rows["moment"] == "loaded").any()
    ]
    if not measured:
        print_line(console, "No round was evaluated yet, so there is nothing to report.")
        return
    folders, found = zip(*measured, strict=True)
    publish_sweep(SweepResults(points=found, folders=folders), directory, console, asdict(spec))
