"""The command ``fedshift sweep``: a comparison under each combination of settings' values, and one table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from .base.errors import FedshiftError, UsageError
from .config import Folder, SweepSpec
from .launch import display, interruptible, loading, new_directory, say, stopped

if TYPE_CHECKING:
    from .sweep import Combination


def sweep(
    spec: Annotated[SweepSpec, Parameter(name="*")] = SweepSpec(),
    place: Annotated[Folder, Parameter(name="*")] = Folder(),
) -> int:
    """Compare methods under each combination of some settings' values, and put all of them into one table."""
    from .sweep import check, combinations

    if place.out and place.resume:
        raise UsageError(
            f"--out {place.out} and --resume {place.resume}: a resumed sweep stays in its directory; give one of them"
        )
    console = Console()
    wanted = combinations(spec)
    directory = place.resume or place.out or new_directory("sweep")
    left = [combination for combination in wanted if not combination.done(directory)]
    with loading(console) as progress:
        for number, combination in enumerate(left):
            progress("checking combinations", number, len(left))
            check(combination, directory)
    say(console, f"{directory}: {len(wanted)} combinations of {', '.join(wanted[0].values)}, {len(left)} to run")
    return _run(spec, wanted, directory, resume=place.resume is not None, console=console)


def _run(spec: SweepSpec, wanted: Sequence[Combination], directory: Path, *, resume: bool, console: Console) -> int:
    from .report.publish import publish
    from .rundir import RunDirectory, toml
    from .study import read_study
    from .sweep import run

    def begin(number: int, combination: Combination) -> None:
        say(console, f"[{number}/{len(wanted)}] {combination.folder}")

    def end(combination: Combination) -> None:
        folder = directory / combination.folder
        publish(read_study(folder), folder, Console(quiet=True))

    kept = RunDirectory(directory, resume=resume)
    try:
        kept.write("config.toml", toml(asdict(spec)))
        with interruptible(console) as stop, display(console) as observer:
            try:
                finished, diverged = run(wanted, directory, observer=observer, stop=stop, begin=begin, end=end)
            except KeyboardInterrupt:
                return stopped(console, "sweep", directory)
        _publish(spec, wanted, directory, console)
    finally:
        kept.close()
    if not finished:
        return stopped(console, "sweep", directory)
    if diverged:
        raise FedshiftError("; ".join(diverged))
    return 0


def _publish(spec: SweepSpec, wanted: Sequence[Combination], directory: Path, console: Console) -> None:
    """Show and write what the combinations have left so far, if anything."""
    from .report.grid import Grid, publish_grid
    from .sweep import points

    measured = [
        (combination.folder, point)
        for combination, point in points(wanted, directory)
        if (point.study.rows["moment"] == "loaded").any()
    ]
    if not measured:
        say(console, "No round was evaluated yet, so there is nothing to report.")
        return
    folders, found = zip(*measured, strict=True)
    publish_grid(Grid(points=found, folders=folders), directory, console, asdict(spec))
