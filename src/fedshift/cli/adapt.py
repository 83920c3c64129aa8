"""The command ``fedshift adapt``: a run's models, or the user's network, adapted to clients that they never saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from ..config.spec import RunSpec
from ..console.printing import Console
from ..console.terminal import make_console, print_line, show_loading
from ..utils.errors import FedshiftError, UsageError, unknown_name
from ..utils.words import is_information
from .run import RunCode, RunData, RunDevice, RunMethods, RunSeeds, load_run, use_threads

if TYPE_CHECKING:
    from ..data.federation import Federation
    from ..data.samples import Samples
    from ..experiments.settings import Settings
    from ..experiments.trial import Trial
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

    groups: Annotated[str | None, Parameter(group=OWN)] = None
    """Patients of samples, as --groups of a run: a pattern of file names with one group, or a column of a table."""

    lr: Annotated[float, Parameter(group=OWN)] = RunSpec.lr
    """Learning rate for policies that train."""

    batch_size: Annotated[int, Parameter(group=OWN)] = RunSpec.batch_size
    """Samples in a batch for policies that train; 0 puts all of a client's samples into one batch."""


@dataclass(frozen=True, kw_only=True)
class NewClients:
    """New clients, with what makes their models: a run, or a network from a file of weights.

    ``data``: their samples; ``inputs``: unlabeled samples that replace training inputs; ``methods``: labels;
    ``restore``: returns the trial of a method with the first seed; ``rounds``: of local work; ``notices``: of the run.
    """

    data: Federation
    inputs: Samples | None = None
    methods: Sequence[str]
    settings: Settings
    seeds: int = 1
    restore: Callable[[str], Trial]
    rounds: int
    notices: tuple[str, ...] = ()

    @property
    def training(self) -> Mapping[str, Samples]:
        """Training samples of each client."""
        return {client.name: client.train for client in self.data.clients}


def adapt(
    run: Path | None = None,
    *,
    data: str | None = None,
    clients: str | None = None,
    policies: str | None = None,
    policy: str | None = None,
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

    Each result is measured on the clients' test data, and a policy is recommended for each client where the evidence
    suffices.

    Args:
        run: Directory that `fedshift run` or `compare` wrote; without it, --model and --weights give the network.
        data: New clients: a directory, a benchmark or digits, as for --data of a run, or the folder or file of one
            client. They are read and scaled like the run's.
        clients: Clients in --data to use, comma-separated; usps-* matches all such names. By default all.
        policies: Policies, comma-separated (see `fedshift list policies`), such as average,tent(steps=3), or your own
            functions, package.module:function. By default all that apply, with their default arguments.
        policy: Policy of the models to save, such as reestimate, or with its method, fedbn: reestimate; by default the
            recommended one.
        rounds: Rounds of the run's local work for policies that train.
        unlabeled: Folder of images, or .npz file with an array x, for policies that adapt to unlabeled inputs. Without
            --data, nothing is measured, and the model of --policy is saved.
        on_data_error: Treatment of errors in the new data, as in a run; by default as in the run.
        save: New directory for each client's model, as `fedshift export` writes it and `fedshift predict` reads it, and
            for the table.

    """
    from ..evaluation.policy import parse_policies
    from ..new_clients.policies import UNCHANGED

    wanted = parse_policies(policies)
    method, _, name = (policy or "").rpartition(": ")
    if policy and name != UNCHANGED:
        (name,) = parse_policies([name])
        wanted = tuple(dict.fromkeys((*wanted, name)))
    others = (unlabeled, methods, seeds, run_data, code)
    _check(own, run, data, clients, name, unlabeled, rounds, save, misplaced=run is None and others != (None,) * 5)
    console, asked = Console(), f"{method}: {name}" if method else name
    if run is None:
        return _adapt_own(console, own, data or "", clients, wanted, asked, rounds, save, device, on_data_error)
    from torch import arange
    from torch import device as torch_device

    from ..data.federation import ClientData
    from ..experiments.restoration import restore_trial
    from ..new_clients.policies import Adaptation, adapt_all
    from ..new_clients.site_data import client_name, describe_newcomers, load_site
    from ..new_clients.site_data import load_unlabeled as unlabeled_in
    from ..results.summary import read_summary

    spec, experiment, notices = load_run(run, console, methods, seeds, device, run_data, code)
    place, schema, inputs = torch_device(experiment.settings.device), experiment.data.schema, None
    spec = replace(spec, on_data_error=on_data_error or spec.on_data_error)
    with show_loading(console) as progress:
        if unlabeled:
            inputs = unlabeled_in(unlabeled, spec, schema, progress, notices).to(place)
        if data is not None:
            new = load_site(data, spec, schema, clients, progress).to(place)
        elif inputs is not None and unlabeled is not None:
            only = ClientData(name=client_name(unlabeled), train=inputs, test=inputs.take(arange(0)))
            new = replace(experiment.data, clients=(only,), notices=())
    joining = describe_newcomers(new, experiment)
    site = NewClients(
        data=new, inputs=inputs, methods=[each.label for each in experiment.methods], settings=experiment.settings,
        seeds=len(experiment.seeds), rounds=rounds, notices=read_summary(run).notices if save else (),
        restore=lambda method: restore_trial(experiment, run, method, experiment.seeds[0]),
    )  # fmt: skip
    title = _introduce(console, site, (notice for notice in joining if not is_information(notice)), save, asked)
    if data is None:
        unmeasured = "Nothing was measured, because the client's samples have no labels."
        return _finish(console, site, Adaptation(), {new.names[0]: (title, unmeasured)}, save, notices)
    with show_loading(console) as progress:
        adapted = adapt_all(
            experiment, run, site.training, wanted, data=new, rounds=rounds, inputs=inputs, progress=progress
        )
    notes = [*notices, *filter(is_information, joining), *adapted.notices, *adapted.inapplicable]
    return _finish(console, site, adapted, _recommend(console, site, adapted, title, save), save, notes)


def _check(
    own: OwnNetwork, run: Path | None, data: str | None, clients: str | None, policy: str, unlabeled: Path | None,
    rounds: int, save: Path | None, *, misplaced: bool,
) -> None:  # fmt: skip
    """Raise :class:`UsageError` if arguments of :func:`adapt` do not go together, before anything is read.

    ``misplaced``: a file of weights is given with arguments of a run.
    """
    from ..export.package import require_new
    from ..new_clients.policies import find_policy

    described = next((each.name for each in fields(own) if getattr(own, each.name) != each.default), "")
    alone = "--unlabeled alone measures nothing"
    for wrong, said in (
        (
            run is None and not (own.model and own.weights and data is not None),
            "give the directory of a run, or for a network of your own its --model, its --weights and the --data",
        ),
        (
            misplaced,
            "--unlabeled, --methods, --seeds, --run-data and --code belong to a run, not to a network of your own",
        ),
        (
            run is not None and described,
            f"--{described.replace('_', '-')} describes the network of a file of weights, but {run} is a run, whose "
            "settings name its network: leave it out, or give a file of weights",
        ),
        (rounds < 1, f"rounds={rounds}: must be at least 1"),
        (
            data is None and unlabeled is None,
            "there is nothing to adapt to: give --data, or --unlabeled with --save and --policy",
        ),
        (data is None and save is None, f"{alone}: say where its model goes (--save), or give --data too"),
        (
            data is None and clients,
            f"--clients {clients} chooses among the clients of --data: give --data, or leave it out",
        ),
        (data is None and not policy, f"{alone} to recommend a policy by: name it (--policy reestimate)"),
        (
            data is None and policy and find_policy(policy).data == "labels",
            f"policy {policy!r} needs labels, and --unlabeled has none: give --data, or another policy",
        ),
        (
            policy and save is None,
            f"--policy {policy} chooses the model to save: say where it goes (--save), or give --policies",
        ),
    ):
        if wrong:
            raise UsageError(said)
    if save is not None:
        require_new(save)


def _introduce(console: Console, site: NewClients, notes: Iterable[str], save: Path | None, asked: str) -> str:
    """Print what is known of the new clients before work starts; return method and policy ``asked``, if any.

    Raises :class:`UsageError` if ``asked`` fits several methods or gives no model, or two clients would share a
    directory.
    """
    from ..evaluation.policy import explain_inapplicable
    from ..new_clients.policies import UNCHANGED, applicable_policies
    from ..new_clients.site_data import describe_splits
    from ..results.run_directory import to_file_name

    files = [to_file_name(name).casefold() for name in site.data.names]  # file systems may ignore case
    for name, file in zip(site.data.names, files, strict=True):
        if save and files.count(file) > 1:
            raise UsageError(f"client {name!r} and another would share the directory {save / file}: rename one")
    for line in (*(f"note: {note}" for note in notes), *describe_splits(site.data)):
        print_line(console, line)
    if not asked:
        return ""
    method, _, policy = asked.rpartition(": ")
    if not method and len(site.methods) > 1:
        fix = f"name one, --policy '{site.methods[0]}: {policy}', or choose it (--methods)"
        raise UsageError(f"--policy {policy!r}: the run has the methods {', '.join(site.methods)}: {fix}")
    if method and method not in site.methods:
        raise unknown_name("method", method, site.methods)
    method = method or site.methods[0]
    trial = site.restore(method)
    if policy not in applicable_policies(trial.plan, [policy], trial.data.task):
        named = [policy] if policy != UNCHANGED else []
        told = "".join(f" ({reason})" for reason in explain_inapplicable([trial.plan], named, trial.data.task))
        raise UsageError(f"--policy {policy!r} gives no model of {method}{told}: choose another policy")
    return f"{method}: {policy}"


def _adapt_own(
    console: Console, own: OwnNetwork, data: str, clients: str | None, wanted: tuple[str, ...], asked: str,
    rounds: int, save: Path | None, device: str | None, on_data_error: Literal["refuse", "warn", "ignore"] | None,
) -> int:  # fmt: skip
    """Adapt the user's network."""
    from ..experiments.factory import fit_model, make_settings
    from ..new_clients.own_network import NAME, adapt_own, load_clients, make_trial

    use_threads(None)
    spec = RunSpec(
        data=data, model=own.model, weights=str(own.weights), normalize=own.normalize, image_size=own.image_size,
        target=own.target, groups=own.groups, lr=own.lr, batch_size=own.batch_size, device=device or RunSpec.device,
        on_data_error=on_data_error,
    )  # fmt: skip
    names = tuple(name.strip() for name in (own.class_names or "").split(",") if name.strip())
    with show_loading(console) as progress:
        new = load_clients(data, spec, names, clients, progress)
        model, new = fit_model(spec, new)
        trial = make_trial(model, new, make_settings(spec, new.names))
    site = NewClients(
        data=trial.measured, methods=[NAME], settings=trial.settings, restore=lambda _: trial, rounds=rounds
    )
    title = _introduce(console, site, (), save, asked)
    with show_loading(console):
        adapted = adapt_own(trial, wanted, rounds=rounds)
    notes = [*new.notices, *adapted.notices, *adapted.inapplicable]
    if new.class_names and not names:
        notes.append(f"the network's scores are taken to be of {', '.join(new.class_names)}, in this order")
    return _finish(console, site, adapted, _recommend(console, site, adapted, title, save), save, notes)


def _recommend(
    console: Console, site: NewClients, adapted: Adaptation, asked: str, save: Path | None
) -> dict[str, tuple[str, str]]:
    """Print results and recommendations; return each client's method and policy, with the evidence for its card."""
    from ..new_clients.policy_tables import recommend
    from ..new_clients.site_data import count_samples
    from ..results.schema import is_of_numbers

    chosen = {}
    if adapted.rows:
        _print_results(console, site, adapted, save)
    for client in site.data.clients:
        if rows := [row for row in adapted.rows if row["client"] == client.name]:
            tested, numbers = count_samples(client.test, "test"), is_of_numbers(rows[0])
            title, told = recommend(rows, adapted.influences, site.settings.metric, tested, numbers=numbers)
            print_line(console, f"{client.name}: {told}")
            chosen[client.name] = asked or title, f"{'Chosen by --policy. ' * bool(asked)}Evidence: {told}"
    return chosen


def _finish(
    console: Console, site: NewClients, adapted: Adaptation, chosen: Mapping[str, tuple[str, str]],
    save: Path | None, notes: Iterable[str],
) -> int:  # fmt: skip
    """Print ``notes`` and write the models ``chosen``; raise :class:`FedshiftError` if trials failed."""
    from ..new_clients.policies import export_model, remake_model
    from ..results.run_directory import to_file_name

    for note in notes:
        print_line(console, f"note: {note}")
    places = {client: save / to_file_name(client) for client in chosen} if save else {}
    for client, place in places.items():
        title, evidence = chosen[client]
        trial = site.restore(title.rpartition(": ")[0])
        model = remake_model(trial, title, client, site.training[client], rounds=site.rounds, inputs=site.inputs)
        with show_loading(console):
            report = export_model(
                trial, model, site.data, place, evidence=evidence, measured=bool(adapted.rows),
                notices=site.notices,
            )  # fmt: skip
        print_line(console, f"{report.directory}: {title}, seed {trial.seed}: {', '.join(report.files)}")
        for line in (*report.checks, *(f"note: {notice}" for notice in report.notices)):
            print_line(console, line)
    if adapted.failures:
        raise FedshiftError("; ".join(adapted.failures))
    return 0


def _print_results(console: Console, site: NewClients, adapted: Adaptation, save: Path | None) -> None:
    """Print the results of all models as one table, and write it into ``save``."""
    from ..new_clients import policy_tables as tables
    from ..new_clients.policies import find_policy
    from ..report.formatting import to_terminal, write_table
    from ..report.progress import describe_reached, is_even
    from ..results.schema import is_of_numbers, metric_unit, name_metric

    rows, metric, rounds = adapted.rows, site.settings.metric, site.rounds
    unit = metric_unit(metric, numbers=any(map(is_of_numbers, rows)))[2]
    if partial := describe_reached(adapted.reached, site.settings.rounds):
        print_line(console, partial)
    cells = tables.policy_table(rows, metric, partial=partial, even=is_even(adapted.reached))
    over = f"mean (std) over {site.seeds} seeds" if site.seeds > 1 else "one seed"
    trained = [name for name in dict.fromkeys(row["policy"] for row in rows) if find_policy(name).trains]
    tuned = f"; {' and '.join(trained)}: {rounds} round{'s' * (rounds > 1)} of the run's local work" if trained else ""
    where = f"Test {name_metric(metric)} in {unit} of new clients"
    print_line(console, f"{where}, {over}, {site.settings.select} round{tuned}")
    make_console(60 + 17 * len(site.data.names)).print(to_terminal(cells))
    print_line(console, tables.explain_needs(rows))
    if save:
        write_table(save, metric, cells, tables.mean_over_seeds(tables.seed_table(rows, metric)))
