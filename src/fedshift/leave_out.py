"""``fedshift compare --leave-out``: for each client in turn a comparison in which it never trains, then one table.

The directory holds a run for each, ``without-<client>/``, which is that of ``--newcomers <client>`` with the same
settings, and ``tables/``, in which every policy for unknown clients is measured from their checkpoints. Leave-one-out
over domains is how FedWon measures unseen domains (arXiv:2306.05879, table 12).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from .base.errors import FedshiftError, UsageError
from .config import CompareSpec, Place
from .launch import (
    display,
    interruptible,
    loading,
    new_directory,
    published,
    say,
    stopped,
    summary,
    use_threads,
    wide,
)

if TYPE_CHECKING:
    from .experiment import Experiment
    from .records import Row

ALL = "all"


def execute_without(spec: CompareSpec, leave_out: str, place: Place) -> int:
    """Run a comparison without each of the clients that ``leave_out`` names, or go on with them; the exit code.

    ``leave_out``: names or patterns with commas, or ``all``. Raises :class:`FedshiftError` where one fails, after the
    others are done and what there is has been published.
    """
    _check(spec, place)
    console = Console()
    with loading(console) as progress:
        from .build import experiment_of
        from .rundir import RunDirectory, toml

        use_threads(spec.threads)
        experiment = experiment_of(spec, progress)
    directory = place.resume or place.out or new_directory("compare")
    parts = _parts(experiment, leave_out, directory)
    _refuse(next(iter(parts.values())))
    with closing(RunDirectory(directory, resume=place.resume is not None)) as kept:
        kept.write("config.toml", toml({**asdict(spec), "leave_out": leave_out}))
        say(console, f"{directory}: {summary(experiment)}, without each of {', '.join(parts)}")
        failures: list[FedshiftError | OSError] = []
        done: list[str] = []
        try:
            for number, (client, part) in enumerate(parts.items(), start=1):
                say(console, f"Without {client} ({number} of {len(parts)}): {_folder(directory, client)}")
                if not _run(part, _folder(directory, client), console, failures):
                    return stopped(console, "compare", directory)
                done.append(client)
        except KeyboardInterrupt:
            return stopped(console, "compare", directory)
        _publish({client: parts[client] for client in done}, directory, console)
    if failures:
        raise failures[0]
    return 0


def _check(spec: CompareSpec, place: Place) -> None:
    if spec.newcomers:
        raise UsageError(
            f"--leave-out makes newcomers of one client after the other: leave out --newcomers {spec.newcomers}"
        )
    if place.profile:
        raise UsageError("--profile times one comparison, and --leave-out makes several: give one of the two")
    if place.out and place.resume:
        raise UsageError(f"--out {place.out} and --resume {place.resume}: a resumed run stays in its directory")
    if place.resume and (place.resume / "study.json").exists():
        raise UsageError(f"{place.resume} holds one comparison and none without clients: start anew (--out)")


def _parts(experiment: Experiment, leave_out: str, directory: Path) -> Mapping[str, Experiment]:
    """The comparison without each client, by its name; refused before any starts where one makes no sense."""
    from .data.partition import matching

    names = experiment.data.names if leave_out == ALL else matching(leave_out, experiment.data.names)
    folders = [_folder(directory, name) for name in names]
    for name, folder in zip(names, folders, strict=True):
        if folders.count(folder) > 1:
            raise UsageError(f"client {name!r} and another would share {folder}: rename one")
    if len(experiment.data.names) < 2:
        raise UsageError(f"{experiment.data.name} has one client: without it none is left to train")
    return {
        name: replace(
            experiment,
            settings=replace(experiment.settings, newcomers=(name,)),
            config={**experiment.config, "newcomers": name},
        )
        for name in names
    }


def _refuse(part: Experiment) -> None:
    """Raise :class:`UsageError`, before anything is written, where a method, the model and the data do not fit."""
    from .trial import Trial

    for method in part.methods:
        Trial(method, part.model, part.data, part.settings, part.seeds[0]).close()


def _folder(directory: Path, client: str) -> Path:
    from .rundir import slug

    return directory / f"without-{slug(client)}"


def _run(part: Experiment, folder: Path, console: Console, failures: list[FedshiftError | OSError]) -> bool:
    """Run one comparison or go on with it, and make its page; whether it was not stopped."""
    with interruptible(console) as stop, display(console) as observer:
        try:
            finished = part.run(folder, resume=(folder / "config.toml").exists(), observer=observer, stop=stop)
        except UsageError:
            raise
        except FedshiftError as error:
            failures.append(error)
            finished = True
    if finished and (unpublished := published(folder, Console(quiet=True))):
        failures.append(unpublished)
    return finished


def _publish(parts: Mapping[str, Experiment], directory: Path, console: Console) -> None:
    """Measure every policy on each client that was left out, print one table and write it."""
    from .adaptation.tables import (
        by_policy,
        difference_text,
        differences,
        legend,
        needs_of,
        over_seeds,
        seed_table,
        write_table,
    )
    from .records import METRICS
    from .report.text import metric_cells, terminal

    text = wide(60 + 17 * len(parts))
    rows: list[Row] = []
    notices: list[str] = []
    with console.status("measuring the policies"):
        for client, part in parts.items():
            rows += _measured(part, client, _folder(directory, client), notices)
    if not rows:
        say(console, "No model could be measured.")
        return
    some = next(iter(parts.values()))
    metric, count = some.settings.metric, len(some.seeds)
    seeds = seed_table(rows, metric)
    table = over_seeds(seeds)
    needs = needs_of(rows)
    over = f"{count} seeds" if count > 1 else "one seed"
    say(
        console,
        f"Test {METRICS[metric]} in percent of the client that was left out, mean (std) over {over}, "
        f"{some.settings.select} round",
    )
    text.print(terminal(by_policy(table, metric, needs)))
    say(console, legend(needs.values()))
    write_table(directory / "tables", metric, metric_cells(table, metric), table)
    gaps = differences(seeds)
    if len(gaps):
        pairs = "clients" if len(seeds) > 1 else "seeds"
        shown = difference_text(gaps, metric)
        say(console, f"Minus {gaps['baseline'].iloc[0]}, in points, paired over {pairs}")
        text.print(terminal(shown))
        write_table(directory / "tables", "differences", shown, gaps)
    for notice in notices:
        say(console, f"note: {notice}")
    say(console, f"Tables: {directory / 'tables'}; pages: {directory}/without-*/report.html")


def _measured(part: Experiment, client: str, folder: Path, notices: list[str]) -> list[Row]:
    """What every policy gets right on the client that ``part`` left out, from its checkpoints in ``folder``."""
    from .adaptation.policies import POLICIES, measured_on, models
    from .trained import restored

    settled = replace(part, settings=replace(part.settings, engine="sequential"))
    rows = []
    for seed in part.seeds:
        for method in part.methods:
            try:
                trial = restored(settled, folder, method.name, seed)
                found = trial.measured.client(client)
                for model in models(trial, {client: found.train}, POLICIES, say=notices):
                    rows.append(measured_on(trial, model, found))
            except UsageError:
                raise
            except FedshiftError as error:
                notices.append(f"without {client}: {error}")
    return rows
