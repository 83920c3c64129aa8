"""The command ``fedshift adapt``: a run's models, or the user's network, adapted to clients that they never saw."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from ..config.spec import RunSpec
from ..console.printing import Console
from ..console.terminal import make_console, print_line, show_loading
from ..utils.errors import FedshiftError, UsageError
from ..utils.files import require_writable
from ..utils.words import is_information
from .run import RunCode, RunData, RunDevice, RunMethods, RunSeeds, load_run, use_threads

if TYPE_CHECKING:
    from ..experiments.settings import Settings
    from ..new_clients.policies import Adaptation


OWN = Group("Network of your own", sort_key=2)


@dataclass(frozen=True, kw_only=True)
class OwnNetwork:
    """A network that fedshift never trained, in place of a run, with its settings for scaling and training."""

    model: Annotated[str | None, Parameter(group=OWN)] = None
    """Network by name (see `fedshift list models`), or your own function, package.module:function."""

    weights: Annotated[Path | None, Parameter(group=OWN)] = None
    """File of its weights: a state dictionary, .safetensors or as torch.save writes it."""

    class_names: Annotated[str | None, Parameter(group=OWN)] = None
    """Its classes, comma-separated, in the order of its scores; needed if the clients lack some."""

    normalize: Annotated[Literal["half", "imagenet", "unit", "client"] | None, Parameter(group=OWN)] = None
    """Scaling of images that it expects; by default half, to [-1, 1]."""

    image_size: Annotated[int | None, Parameter(group=OWN)] = None
    """Height and width in pixels that it expects; by default the images' own."""

    target: Annotated[str | None, Parameter(group=OWN)] = None
    """Column of a table with the label."""

    lr: Annotated[float, Parameter(group=OWN)] = RunSpec.lr
    """Learning rate for policies that train."""

    batch_size: Annotated[int, Parameter(group=OWN)] = RunSpec.batch_size
    """Samples in a batch for policies that train; 0 puts all of a client's samples into one batch."""


def adapt(
    run: Path | None = None,
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
    code: RunCode = None,
    save: Path | None = None,
    own: Annotated[OwnNetwork, Parameter(name="*")] = OwnNetwork(),
) -> int:
    """Adapt a run's models, or your own network, to new clients, with every policy.

    Each result is measured on the clients' test data.

    Args:
        run: Directory that `fedshift run` or `compare` wrote; without it, --model and --weights give the network.
        data: New clients: a directory, a benchmark or digits, as for --data of a run, or the folder or file of one
            client. They are read and scaled like the run's.
        clients: Clients in --data to use, comma-separated; usps-* matches all such names. By default all.
        policies: Policies, comma-separated (see `fedshift list policies`), such as average,tent(steps=3), or your own
            functions, package.module:function. By default all that apply, with their default arguments.
        rounds: Rounds of the run's local work for policies that train.
        unlabeled: Folder of images, or .npz file with an array x, for policies that adapt to unlabeled inputs. Without
            --data, the adapted models are saved, and nothing is measured.
        on_data_error: Treatment of errors in the new data, as in a run; by default as in the run.
        save: New directory for the models of the first seed (safetensors) and the table.

    """
    from ..evaluation.policy import POLICIES, parse_policies
    from ..new_clients.policies import require_no_labels

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
    if save:
        require_writable(save)
    if run is None:
        return _adapt_own(
            own,
            data,
            clients,
            wanted,
            rounds,
            save,
            device,
            on_data_error,
            [unlabeled, methods, seeds, run_data, code],
        )
    if own != OwnNetwork():
        given = next(each.name for each in fields(own) if getattr(own, each.name) != each.default)
        raise UsageError(
            f"--{given.replace('_', '-')} describes the network of a file of weights, but {run} is a run, whose "
            "settings name its network: leave it out, or give a file of weights"
        )
    from torch import device as torch_device

    from ..data.federation import ClientData
    from ..new_clients.policies import adapt_all
    from ..new_clients.site_data import client_name, describe_newcomers, load_site
    from ..new_clients.site_data import load_unlabeled as unlabeled_in

    console = Console()
    spec, experiment, notices = load_run(run, console, methods, seeds, device, run_data, code)
    place = torch_device(experiment.settings.device)
    with show_loading(console) as progress:
        spec = replace(spec, on_data_error=on_data_error or spec.on_data_error)
        new = load_site(data, spec, experiment.data.schema, clients, progress).to(place) if data else None
        inputs = (
            unlabeled_in(unlabeled, spec, experiment.data.schema, progress, notices).to(place) if unlabeled else None
        )
    if new:
        training = {client.name: client.train for client in new.clients}
        joining = describe_newcomers(new, experiment)
    else:
        assert unlabeled is not None and inputs is not None  # noqa: PT018
        name = client_name(unlabeled)
        training, only = {name: inputs}, ClientData(name=name, train=inputs, test=inputs)
        joining = describe_newcomers(replace(experiment.data, clients=(only,), notices=()), experiment)
        wanted = tuple(name for name in wanted if POLICIES.parse(name).data != "labels")
    for notice in joining:
        if not is_information(notice):
            print_line(console, f"note: {notice}")
    with show_loading(console) as progress:
        made = adapt_all(
            experiment, run, training, wanted, data=new, rounds=rounds, inputs=inputs, save=save, progress=progress
        )
    if made.rows:
        _print_results(console, made, experiment.settings, len(experiment.seeds), rounds, save)
    for notice in (*notices, *filter(is_information, joining), *made.notices, *made.inapplicable):
        print_line(console, f"note: {notice}")
    if save and save.exists():
        print_line(console, f"Models: {save}, of seed {experiment.seeds[0]}, as METHOD/POLICY/CLIENT.safetensors")
    if made.failures:
        raise FedshiftError("; ".join(made.failures))
    return 0


def _adapt_own(
    own: OwnNetwork, data: str | None, clients: str | None, wanted: tuple[str, ...], rounds: int, save: Path | None,
    device: str | None, on_data_error: Literal["refuse", "warn", "ignore"] | None, others: list[object],
) -> int:  # fmt: skip
    """Adapt the user's network; ``others``: arguments that only a run has."""
    if not own.model or not own.weights or data is None:
        raise UsageError(
            "give the directory of a run, or for a network of your own its --model, its --weights and the --data"
        )
    if any(each is not None for each in others):
        raise UsageError(
            "--unlabeled, --methods, --seeds, --run-data and --code belong to a run, not to a network of your own"
        )
    from ..experiments.factory import fit_model, make_settings
    from ..new_clients.own_network import NAME, adapt_own, load_clients, make_trial
    from ..results.run_directory import to_file_name

    console = Console()
    use_threads(None)
    spec = RunSpec(
        data=data, model=own.model, weights=str(own.weights), normalize=own.normalize, image_size=own.image_size,
        target=own.target, lr=own.lr, batch_size=own.batch_size, device=device or RunSpec.device,
        on_data_error=on_data_error,
    )  # fmt: skip
    names = tuple(name.strip() for name in (own.class_names or "").split(",") if name.strip())
    with show_loading(console) as progress:
        new = load_clients(data, spec, names, clients, progress)
        model, new = fit_model(spec, new)
        trial = make_trial(model, new, make_settings(spec, new.names))
        made = adapt_own(trial, wanted, rounds=rounds, save=save)
    _print_results(console, made, trial.settings, 1, rounds, save)
    for notice in (*new.notices, *made.notices, *made.inapplicable):
        print_line(console, f"note: {notice}")
    if new.class_names and not names:
        print_line(
            console, f"note: the network's scores are taken to be of {', '.join(new.class_names)}, in this order"
        )
    if save:
        print_line(console, f"Models: {save}, as {to_file_name(NAME)}/POLICY/CLIENT.safetensors")
    return 0


def _print_results(
    console: Console, made: Adaptation, settings: Settings, count: int, rounds: int, save: Path | None
) -> None:
    """Print the results of the models of ``count`` seeds as one table, and write it into ``save``."""
    from ..new_clients import policy_tables as tables
    from ..new_clients.policies import find_policy
    from ..report.formatting import to_terminal
    from ..report.progress import describe_reached, is_even
    from ..results.schema import is_of_numbers, metric_unit, name_metric

    rows, metric = made.rows, settings.metric
    unit = metric_unit(metric, numbers=any(map(is_of_numbers, rows)))[2]
    if partial := describe_reached(made.reached, settings.rounds):
        print_line(console, partial)
    needs = tables.collect_needs(rows)
    table = tables.mean_over_seeds(tables.seed_table(rows, metric))
    missing = tables.explain_missing(rows, metric)
    cells = tables.policy_table(table, metric, needs, missing=missing, partial=partial, even=is_even(made.reached))
    over = f"mean (std) over {count} seeds" if count > 1 else "one seed"
    trained = [name for name in dict.fromkeys(row["policy"] for row in rows) if find_policy(name).trains]
    tuned = f"; {' and '.join(trained)}: {rounds} round{'s' * (rounds > 1)} of the run's local work" if trained else ""
    print_line(
        console,
        f"Test {name_metric(metric)} in {unit} of new clients, {over}, {settings.select} round{tuned}",
    )
    make_console(60 + 17 * len(table)).print(to_terminal(cells))
    print_line(console, tables.explain_needs(needs.values()))
    if save:
        tables.write_table(save, metric, cells, table)
