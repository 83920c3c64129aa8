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

from .base.errors import FedshiftError, UsageError
from .config import Folder, SweepSpec
from .launch import contents, display, interruptible, loading, new_directory, remake_run, say, stopped

if TYPE_CHECKING:
    from .series import Part
    from .sweep import Combination


def sweep(
    spec: Annotated[SweepSpec, Parameter(name="*")] = SweepSpec(),
    place: Annotated[Folder, Parameter(name="*")] = Folder(),
) -> int:
    """Compare methods under each combination of some settings' values, and put all of them into one table."""
    from .sweep import apart, check, combinations

    if place.out and place.resume:
        raise UsageError(
            f"--out {place.out} and --resume {place.resume}: a resumed sweep stays in its directory; give one of them"
        )
    if place.resume and contents(place.resume) != "sweep":
        raise UsageError(f"{place.resume} holds no sweep: give the directory of one, or start anew (--out)")
    console = Console()
    spec = replace(spec, over=apart(spec.over))
    wanted = combinations(spec)
    directory = place.resume or place.out or new_directory("sweep")
    left = [combination for combination in wanted if combination.ending(directory) is None]
    with loading(console) as progress:
        for number, combination in enumerate(left):
            progress("checking combinations", number, len(left))
            check(combination, directory)
    say(console, f"{directory}: {len(wanted)} combinations of {', '.join(wanted[0].values)}, {len(left)} to run")
    return _run(spec, wanted, directory, resume=place.resume is not None, console=console)


def remake_sweep(directory: Path, console: Console) -> None:
    """Show and write again what the sweep in ``directory``, and each of its comparisons, has left so far."""
    from .sweep import combinations

    spec = SweepSpec(**tomllib.loads((directory / "config.toml").read_text(encoding="utf-8")))
    wanted = combinations(spec)
    for combination in wanted:
        remake_run(directory / combination.folder, Console(quiet=True))
    _publish(spec, wanted, directory, console)


def _run(spec: SweepSpec, wanted: Sequence[Combination], directory: Path, *, resume: bool, console: Console) -> int:
    from .rundir import RunDirectory, toml
    from .series import go_through

    def begin(number: int, part: Part) -> None:
        say(console, f"[{number}/{len(wanted)}] {part.folder.name}")

    def end(part: Part, _: bool) -> None:
        remake_run(part.folder, Console(quiet=True))

    parts = [combination.part(directory) for combination in wanted]
    with closing(RunDirectory(directory, resume=resume)) as kept:
        kept.write("config.toml", toml(asdict(spec)))
        with interruptible(console) as stop, display(console) as observer:
            try:
                finished = go_through(parts, observer=observer, stop=stop, begin=begin, end=end)
            except KeyboardInterrupt:
                return stopped(console, "sweep", directory)
        _publish(spec, wanted, directory, console)
    if not finished:
        return stopped(console, "sweep", directory)
    if diverged := [said for combination in wanted if (said := combination.ending(directory))]:
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
