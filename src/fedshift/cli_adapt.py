"""The command ``fedshift adapt``: a run's models brought to clients that it never saw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from .base.errors import UsageError
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
    save: Path | None = None,
) -> int:
    """Bring a run's models to clients that it never saw, by every policy, and measure each.

    Parameters
    ----------
    run
        Directory that `fedshift run` or `compare` wrote; all its methods and seeds take part.
    data
        The new clients: a directory, a benchmark or digits, as --data of a run. They are read and scaled as the run's.
    clients
        Which of them, comma-separated; usps-* names all that fit. Without it all.
    policies
        Which policies, comma-separated: average, reestimate, nearest, finetune. Without it all that make sense.
    rounds
        Rounds of the run's local work that finetune does.
    unlabeled
        Folder of images, or .npz file with an array x, from which reestimate takes its statistics; no labels are
        needed. Without --data models are made and saved, and nothing is measured.
    save
        New directory for the models of the first seed (safetensors) and the table.

    """
    from .adaptation.policies import LABELED, chosen, measured_on, models, require_no_labels
    from .adaptation.site import met, site
    from .adaptation.site import unlabeled as unlabeled_in
    from .adaptation.tables import write_model
    from .trained import experiment_in, restored, spec_in

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
    if save and save.exists() and any(save.iterdir()):
        raise UsageError(f"{save} holds other files: choose a directory that is new or empty (--save)")
    console = Console()
    use_threads(spec_in(run).threads)
    with loading(console) as progress:
        spec, experiment = experiment_in(run, progress)
        federation = site(data, spec, experiment.data, clients, progress) if data else None
        inputs = unlabeled_in(unlabeled, spec, experiment.data, progress) if unlabeled else None
    if federation is None:
        assert unlabeled is not None
        assert inputs is not None
        training = {unlabeled.stem: inputs}
        wanted = tuple(name for name in wanted if name not in LABELED)
    else:
        import torch

        federation = federation.to(torch.device(spec.device))
        inputs = inputs and inputs.to(torch.device(spec.device))
        training = {client.name: client.train for client in federation.clients}
    rows: list[Row] = []
    notices = met(federation, experiment) if federation else []
    with console.status("adapting"):
        for seed in experiment.seeds:
            for method in experiment.methods:
                trial = restored(experiment, run, method.name, seed)
                for model in models(trial, training, wanted, rounds=rounds, inputs=inputs, say=notices):
                    if save and seed == experiment.seeds[0]:
                        write_model(save, model)
                    if federation:
                        rows.append(measured_on(trial, model, federation.client(model.client)))
    if rows:
        _show(console, rows, experiment, rounds, save)
    for notice in notices:
        say(console, f"note: {notice}")
    if save:
        say(console, f"Models: {save}, of seed {experiment.seeds[0]}, as METHOD/POLICY/CLIENT.safetensors")
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
    over = f"{count} seeds" if count > 1 else "one seed"
    tuned = f"; finetune: {rounds} round{'s' * (rounds > 1)} of the run's local work"
    say(
        console,
        f"Test {METRICS[metric]} in percent of new clients, mean (std) over {over}, {experiment.settings.select} round"
        f"{tuned if any(row['policy'] == 'finetune' for row in rows) else ''}",
    )
    wide(60 + 17 * len(table)).print(terminal(cells))
    say(console, legend(needs.values()))
    if save:
        write_table(save, experiment.settings.metric, cells, table)
