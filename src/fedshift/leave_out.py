"""``fedshift compare --leave-out``: for each client in turn a comparison in which it never trains, then one table.

The directory holds a run for each, ``without-<client>/``, which is that of ``--newcomers <client>`` with the same
settings, and in it ``policies.json``: what every policy for unknown clients gets right there. ``tables/`` has all of
them. Leave-one-out over domains is how FedWon measures unseen domains (arXiv:2306.05879, table 12).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .base.errors import FedshiftError, UsageError
from .base.files import write_atomically
from .config import CompareSpec, Place
from .launch import (
    contents,
    display,
    interruptible,
    loading,
    new_directory,
    remake_run,
    say,
    stopped,
    summary,
    use_threads,
    wide,
)

if TYPE_CHECKING:
    from .experiment import Experiment
    from .series import Part

ALL = "all"
MEASURED = "policies.json"
"""What each policy got right on the client that a run left out, in the run's directory."""


def execute_without(spec: CompareSpec, leave_out: str, place: Place) -> int:
    """Run a comparison without each of the clients that ``leave_out`` names, or go on with them; the exit code.

    ``leave_out``: names or patterns with commas, or ``all``. Raises :class:`FedshiftError` where one diverges, after
    the others are done and what there is has been published.
    """
    _check(spec, place)
    console = Console()
    with loading(console) as progress:
        from .build import experiment_of
        from .rundir import RunDirectory, toml
        from .series import ending, go_through

        use_threads(spec.threads)
        experiment = experiment_of(spec, progress)
    directory = place.resume or place.out or new_directory("compare")
    without = _without(experiment, leave_out, directory)
    parts = {client: _part(spec, client, directory, each) for client, each in without.items()}
    _refuse(without, parts)

    def begin(number: int, part: Part) -> None:
        (part.folder / MEASURED).unlink(missing_ok=True)
        say(console, f"Without {list(parts)[number - 1]} ({number} of {len(parts)}): {part.folder}")

    def end(part: Part, finished: bool) -> None:
        remake_run(part.folder, Console(quiet=True))
        if finished:
            _measure(part.experiment(), part.folder)

    with closing(RunDirectory(directory, resume=place.resume is not None)) as kept:
        kept.write("config.toml", toml({**asdict(spec), "leave_out": leave_out}))
        say(console, f"{directory}: {summary(experiment)}, without each of {', '.join(parts)}, which is then measured")
        try:
            with interruptible(console) as stop, display(console) as observer:
                finished = go_through(parts.values(), observer=observer, stop=stop, begin=begin, end=end)
        except KeyboardInterrupt:
            return stopped(console, "compare", directory)
        _publish(spec, directory, console)
    if not finished:
        return stopped(console, "compare", directory)
    endings = {client: ending(part.folder, part.settings) for client, part in parts.items()}
    if diverged := [f"without {client}: {error}" for client, error in endings.items() if error]:
        raise FedshiftError("; ".join(diverged))
    return 0


def remake_without(directory: Path, console: Console) -> None:
    """Show and write again what the comparisons without each client in ``directory`` have left so far."""
    settings = tomllib.loads((directory / "config.toml").read_text(encoding="utf-8"))
    del settings["leave_out"]
    for folder in sorted(directory.glob("without-*")):
        remake_run(folder, Console(quiet=True))
    _publish(CompareSpec(**settings), directory, console)


def _check(spec: CompareSpec, place: Place) -> None:
    if spec.newcomers:
        raise UsageError(
            f"--leave-out makes newcomers of one client after the other: leave out --newcomers {spec.newcomers}"
        )
    if place.profile:
        raise UsageError("--profile times one comparison, and --leave-out makes several: give one of the two")
    if place.out and place.resume:
        raise UsageError(f"--out {place.out} and --resume {place.resume}: a resumed run stays in its directory")
    if place.resume and contents(place.resume) == "run":
        raise UsageError(f"{place.resume} holds one comparison and none without clients: start anew (--out)")


def _without(experiment: Experiment, leave_out: str, directory: Path) -> Mapping[str, Experiment]:
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
            measured_later=(name,),
        )
        for name in names
    }


def _part(spec: CompareSpec, client: str, directory: Path, experiment: Experiment) -> Part:
    from .series import Part

    settings = {**asdict(spec), "newcomers": client}
    return Part(folder=_folder(directory, client), settings=settings, experiment=lambda: experiment)


def _refuse(without: Mapping[str, Experiment], parts: Mapping[str, Part]) -> None:
    """Raise :class:`UsageError`, before anything is written, where a method, the model and the data do not fit.

    And where a policy cannot work for a client, or what is there already is of other settings.
    """
    from .adaptation.policies import POLICIES, policies_of
    from .newcomers import check_policy
    from .trial import Trial

    some = next(iter(without.values()))
    training = {client: some.data.client(client).train for client in without}
    for method in some.methods:
        with closing(Trial(method, some.model, some.data, some.settings, some.seeds[0])) as trial:
            for policy in policies_of(trial.plan, POLICIES):
                check_policy(trial.plan, policy, training)
    for client, part in parts.items():
        try:
            without[client].accept(part.folder)
        except UsageError as error:
            raise UsageError(f"{part.folder.name}: {error}") from error


def _folder(directory: Path, client: str) -> Path:
    from .rundir import slug

    return directory / f"without-{slug(client)}"


def _measure(part: Experiment, folder: Path) -> None:
    """Write down what every policy gets right on the client that ``part`` left out, from checkpoints in ``folder``."""
    import torch

    from .adaptation.every import adapted
    from .adaptation.policies import POLICIES
    from .trained import narrowed

    (client,) = part.settings.newcomers
    data = part.data.only([client]).to(torch.device(part.settings.device))
    made = adapted(narrowed(part), folder, {client: data.client(client).train}, POLICIES, data=data)
    notices = [*made.notices, *(f"without {client}: {failure}" for failure in made.failures)]
    content = {"client": client, "place": part.data.names.index(client), "rows": made.rows, "notices": notices}
    write_atomically(folder / MEASURED, (json.dumps(content) + "\n").encode())


def _measured(spec: CompareSpec, directory: Path) -> list[dict[str, Any]]:
    """What :func:`_measure` wrote of those comparisons that ended under ``spec``, in the order of the clients."""
    from .series import ending

    found = [json.loads(file.read_text(encoding="utf-8")) for file in directory.glob(f"without-*/{MEASURED}")]
    settings = asdict(spec)
    ended = [
        each
        for each in found
        if ending(_folder(directory, each["client"]), {**settings, "newcomers": each["client"]}) is not None
    ]
    return sorted(ended, key=lambda each: int(each["place"]))


def _publish(spec: CompareSpec, directory: Path, console: Console) -> None:
    """Print and write one table of what every policy gets right on each client that was left out so far."""
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

    measured = _measured(spec, directory)
    rows = [row for each in measured for row in each["rows"]]
    if not rows:
        say(console, "No client that was left out is measured yet, so there is nothing to report.")
        return
    text, metric = wide(60 + 17 * len(measured)), spec.metric
    seeds = seed_table(rows, metric)
    table = over_seeds(seeds)
    needs = needs_of(rows)
    over = f"{spec.seeds} seeds" if spec.seeds > 1 else "one seed"
    say(
        console,
        f"Test {METRICS[metric]} in percent of the client that was left out, mean (std) over {over}, "
        f"{spec.select} round",
    )
    text.print(terminal(by_policy(table, metric, needs)))
    say(console, legend(needs.values()))
    write_table(directory / "tables", metric, metric_cells(table, metric), table)
    gaps = differences(seeds)
    if len(gaps):
        pairs = "clients" if len(seeds) > 1 else "seeds"
        shown = difference_text(gaps, metric, len(seeds))
        say(console, f"Minus {gaps['baseline'].iloc[0]}, in points, paired over {pairs}")
        text.print(terminal(shown))
        write_table(directory / "tables", "differences", shown, gaps)
    counted = {_folder(directory, each["client"]) for each in measured}
    for folder in sorted(set(directory.glob("without-*")) - counted):
        say(console, f"note: {folder.name} has not ended under these settings: it is not in the table")
    for each in measured:
        for notice in each["notices"]:
            say(console, f"note: {notice}")
    say(console, f"Tables: {directory / 'tables'}; pages: {directory}/without-*/report.html")
