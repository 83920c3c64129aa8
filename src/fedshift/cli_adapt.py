"""The command ``fedshift adapt``: a run's models brought to clients that it never saw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from .base.errors import FedshiftError, UsageError
from .launch import loading, say, use_threads, wide

if TYPE_CHECKING:
    from .experiment import Experiment
    from .records import Row


def adapt(
    run: Path,
    *,
    data: str | None = None,
    clients: str | None = None,
    policies: str | None = None,
    rounds: int = 1,
    unlabeled: Path | None = None,
    broken: Literal["refuse", "skip"] | None = None,
    methods: str | None = None,
    seeds: int | None = None,
    device: str | None = None,
    save: Path | None = None,
) -> int:
    """Bring a run's models to clients that it never saw, by every policy, and measure each.

    Parameters
    ----------
    run
        Directory that `fedshift run` or `compare` wrote.
    data
        The new clients: a directory, a benchmark or digits, as --data of a run. They are read and scaled as the run's.
    clients
        Which of them, comma-separated; usps-* names all that fit. Without it all.
    policies
        Which policies, comma-separated: average, reestimate, nearest, finetune, finetune_bn. Without it all
        that make sense.
    rounds
        Rounds of the run's local work that finetune and finetune_bn do.
    unlabeled
        Folder of images, or .npz file with an array x, from which reestimate takes its statistics; no labels are
        needed. Without --data models are made and saved, and nothing is measured.
    broken
        What becomes of new images that cannot be read: refuse or skip; without it as in the run.
    methods
        Which of the run's methods, comma-separated, by name, as patterns such as fedbn*, or as it was given them;
        without it all.
    seeds
        Number of the run's seeds, the first ones; without it all.
    device
        Torch device to compute on; without it the run's, or cpu where this machine has none such.
    save
        New directory for the models of the first seed (safetensors) and the table.

    """
    from .adaptation.policies import LABELED, chosen, require_no_labels

    wanted = chosen(policies)
    if data is None and unlabeled is None:
        raise UsageError("there is nothing to adapt to: give --data, or --unlabeled with --save")
    if data is None and save is None:
        raise UsageError("--unlabeled alone measures nothing: say where its models go (--save), or give --data too")
    if data is None and clients:
        raise UsageError(f"--clients {clients} chooses among the clients of --data: give --data, or leave it out")
    if data is None and policies:
        require_no_labels(wanted)
    if rounds < 1:
        raise UsageError(f"rounds={rounds}: must be at least 1")
    if save and save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise UsageError(f"{save} holds other files: choose a directory that is new or empty (--save)")
    from torch import device as torch_device

    from .adaptation.every import adapted
    from .adaptation.known import met
    from .adaptation.site import name_of, site
    from .adaptation.site import unlabeled as unlabeled_in
    from .trained import device_here, experiment_in, narrowed, spec_in

    console = Console()
    use_threads(spec_in(run).threads)
    device, notices = device_here(spec_in(run), device)
    place = torch_device(device)
    with loading(console) as progress:
        spec, experiment = experiment_in(run, progress, device)
        experiment = narrowed(experiment, methods, seeds)
        spec = replace(spec, broken=broken or spec.broken)
        new = site(data, spec, experiment.data, clients, progress).to(place) if data else None
        inputs = unlabeled_in(unlabeled, spec, experiment.data, progress, notices).to(place) if unlabeled else None
    if new:
        training = {client.name: client.train for client in new.clients}
        notices += [*new.notices, *met(new, experiment)]
    else:
        assert unlabeled is not None
        assert inputs is not None
        training = {name_of(unlabeled): inputs}
        wanted = tuple(name for name in wanted if name not in LABELED)
    with loading(console) as progress:
        made = adapted(
            experiment, run, training, wanted, data=new, rounds=rounds, inputs=inputs, save=save, progress=progress
        )
    if made.rows:
        _show(console, made.rows, experiment, rounds, save)
    for notice in (*notices, *made.notices, *made.senseless):
        say(console, f"note: {notice}")
    if save and save.exists():
        say(console, f"Models: {save}, of seed {experiment.seeds[0]}, as METHOD/POLICY/CLIENT.safetensors")
    if made.failures:
        raise FedshiftError("; ".join(made.failures))
    return 0


def _show(console: Console, rows: list[Row], experiment: Experiment, rounds: int, save: Path | None) -> None:
    """Print what the models get right as one table, and write it into ``save``."""
    from .adaptation.tables import by_policy, legend, needs_of, over_seeds, seed_table, write_table
    from .records import METRICS
    from .report.text import terminal

    metric, count = experiment.settings.metric, len(experiment.seeds)
    needs = needs_of(rows)
    table = over_seeds(seed_table(rows, metric))
    cells = by_policy(table, metric, needs)
    over = f"mean (std) over {count} seeds" if count > 1 else "one seed"
    trained = [name for name in ("finetune", "finetune_bn") if any(row["policy"] == name for row in rows)]
    tuned = f"; {' and '.join(trained)}: {rounds} round{'s' * (rounds > 1)} of the run's local work" if trained else ""
    say(
        console,
        f"Test {METRICS[metric]} in percent of new clients, {over}, {experiment.settings.select} round{tuned}",
    )
    wide(60 + 17 * len(table)).print(terminal(cells))
    say(console, legend(needs.values()))
    if save:
        write_table(save, experiment.settings.metric, cells, table)
