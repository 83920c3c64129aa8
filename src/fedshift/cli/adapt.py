"""The command ``fedshift adapt``: a run's models adapted to clients that it never saw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from ..console.terminal import make_console, print_line, show_loading
from ..utils.errors import FedshiftError, UsageError
from .run import RunData, RunDevice, RunMethods, RunSeeds, use_threads

if TYPE_CHECKING:
    from ..experiments.experiment import Experiment
    from ..new_clients.policies import Adaptation


def adapt(
    run: Path,
    *,
    data: str | None = None,
    clients: str | None = None,
    policies: str | None = None,
    rounds: int = 1,
    unlabeled: Path | None = None,
    on_data_error: Literal["refuse", "warn", "ignore"] | None = None,
    methods: RunMethods = None,
    seeds: RunSeeds = None,
    device: RunDevice = None,
    run_data: RunData = None,
    save: Path | None = None,
) -> int:
    """Adapt a run's models to clients that it never saw, by every policy, and measure each.

    Args:
        run: Directory that `fedshift run` or `compare` wrote.
        data: New clients: a directory, a benchmark or digits, as --data of a run. They are read and scaled as the
            run's.
        clients: Clients to use of these, comma-separated; usps-* matches all such names. By default all.
        policies: Policies, comma-separated: average, reestimate, nearest, finetune, finetune_bn. By default all that
            apply.
        rounds: Rounds of the run's local work under finetune and finetune_bn.
        unlabeled: Folder of images, or .npz file with an array x, from which reestimate takes its statistics; no labels
            are needed. Without --data models are made and saved, and nothing is measured.
        on_data_error: Treatment of new images that cannot be read: refuse, or warn and ignore, which leave them out; by
            default as in the run.
        save: New directory for the models of the first seed (safetensors) and the table.

    """
    from ..new_clients.policies import LABELED, parse_policies, require_no_labels

    wanted = parse_policies(policies)
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

    from ..experiments.restoration import load_experiment, load_spec, resolve_device, select_trials
    from ..new_clients.policies import adapt_all
    from ..new_clients.site_data import client_name, find_overlap, load_site
    from ..new_clients.site_data import load_unlabeled as unlabeled_in

    console = Console()
    settings = load_spec(run, run_data)
    use_threads(settings.threads)
    device, notices = resolve_device(settings, device)
    place = torch_device(device)
    with show_loading(console) as progress:
        spec, experiment = load_experiment(run, progress, device, run_data)
        experiment = select_trials(experiment, methods, seeds)
        spec = replace(spec, on_data_error=on_data_error or spec.on_data_error)
        new = load_site(data, spec, experiment.data, clients, progress).to(place) if data else None
        inputs = unlabeled_in(unlabeled, spec, experiment.data, progress, notices).to(place) if unlabeled else None
    if new:
        training = {client.name: client.train for client in new.clients}
        notices += [*new.notices, *new.faults, *find_overlap(new, experiment)]
    else:
        assert unlabeled is not None and inputs is not None  # noqa: PT018
        training = {client_name(unlabeled): inputs}
        wanted = tuple(name for name in wanted if name not in LABELED)
    with show_loading(console) as progress:
        made = adapt_all(
            experiment, run, training, wanted, data=new, rounds=rounds, inputs=inputs, save=save, progress=progress
        )
    if made.rows:
        _print_results(console, made, experiment, rounds, save)
    for notice in (*notices, *made.notices, *made.inapplicable):
        print_line(console, f"note: {notice}")
    if save and save.exists():
        print_line(console, f"Models: {save}, of seed {experiment.seeds[0]}, as METHOD/POLICY/CLIENT.safetensors")
    if made.failures:
        raise FedshiftError("; ".join(made.failures))
    return 0


def _print_results(console: Console, made: Adaptation, experiment: Experiment, rounds: int, save: Path | None) -> None:
    """Print the results of the models as one table, and write it into ``save``."""
    from ..new_clients import policy_tables as tables
    from ..report.formatting import to_terminal
    from ..report.progress import describe_reached, is_even
    from ..results.schema import METRICS

    rows, metric, count = made.rows, experiment.settings.metric, len(experiment.seeds)
    if partial := describe_reached(made.reached, experiment.settings.rounds):
        print_line(console, partial)
    needs = tables.collect_needs(rows)
    table = tables.mean_over_seeds(tables.seed_table(rows, metric))
    cells = tables.policy_table(table, metric, needs, partial=partial, even=is_even(made.reached))
    over = f"mean (std) over {count} seeds" if count > 1 else "one seed"
    trained = [name for name in ("finetune", "finetune_bn") if any(row["policy"] == name for row in rows)]
    tuned = f"; {' and '.join(trained)}: {rounds} round{'s' * (rounds > 1)} of the run's local work" if trained else ""
    print_line(
        console,
        f"Test {METRICS[metric]} in percent of new clients, {over}, {experiment.settings.select} round{tuned}",
    )
    make_console(60 + 17 * len(table)).print(to_terminal(cells))
    print_line(console, tables.explain_needs(needs.values()))
    if save:
        tables.write_table(save, experiment.settings.metric, cells, table)
