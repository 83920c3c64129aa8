"""``fedshift compare --leave-out``: for each client in turn a comparison in which it never trains, then one table.

The directory contains a run for each client, ``without-<client>/``, equal to the run with ``--newcomers <client>`` and
the same settings. Its ``policies.json`` has the results of every policy for unknown clients. ``tables/`` covers all
clients. FedWon measures unseen domains by leaving one out in this way (arXiv:2306.05879, table 12).

With ``--selection`` each method is trained at several learning rates, and ``tables/selection.*`` shows the rate that
each of DomainBed's rules chooses (:mod:`fedshift.new_clients.model_selection`); leave-one-out also needs a run without
each pair of clients, ``pair-<client>-and-<client>/``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.seeds import parse_seeds
from ..config.settings_file import read_run_settings
from ..config.spec import CompareSpec, RunOptions
from ..console.printing import Console
from ..console.terminal import choose_directory, make_console, print_line, show_loading
from ..utils.checked_json import read_checked, write_checked
from ..utils.errors import UsageError
from .run import find_kind, run_several, summarize_experiment, use_threads

if TYPE_CHECKING:
    from ..experiments.experiment import Experiment
    from ..experiments.run_queue import QueuedRun

ALL = "all"
MEASURED = "policies.json"
"""File in a run's directory with the results of each policy on the client that the run left out."""


Group = tuple[str, ...]
"""Clients that are left out together."""


def run_without(
    spec: CompareSpec, leave_out: str, place: RunOptions, rates: str | None = None, selection: str | None = None
) -> int:
    """Run or continue a comparison without each of the clients in ``leave_out``; return the exit code.

    ``leave_out``: comma-separated names or patterns, or ``all``. ``rates`` and ``selection``: as on the command line.
    Raises :class:`FedshiftError` if one diverges, after the others are done and published.
    """
    from ..new_clients.model_selection import parse_rules

    directory = _check(spec, place)
    rules = parse_rules(selection) if selection else ()
    if rates and not rules:
        raise UsageError(
            "--rates needs --selection, the rule that chooses one of the rates: give both, or see `fedshift sweep`"
        )
    console, shown = Console(), Console(quiet=place.quiet)
    with show_loading(shown) as progress:
        from ..diagnosis.checked_experiment import make_checked
        from ..experiments.factory import anchor_paths
        from ..experiments.loggers import parse_loggers, require_packages

        require_packages(parse_loggers(spec.log))
        use_threads(spec.threads)
        spec = anchor_paths(spec if rates is None else _tune(spec, rates))
        experiment = make_checked(spec, progress)
    if rules and any(client.validation is None for client in experiment.data.clients):
        raise UsageError("--selection chooses on validation data, which clients lack: hold some out (--validation 0.2)")
    without = _make_experiments(spec, experiment, leave_out, directory, pairs="leave-one-out" in rules)
    parts = {group: _queue_run(spec, group, directory, each, bool(rules)) for group, each in without.items()}
    _require_valid(without, parts)
    left_out = [group[0] for group in parts if len(group) == 1]

    def begin(number: int, part: QueuedRun) -> None:
        (part.folder / MEASURED).unlink(missing_ok=True)
        names = " and ".join(list(parts)[number - 1])
        print_line(shown, f"Without {names} ({number} of {len(parts)}): {part.folder}")

    settings = {**asdict(spec), "leave_out": leave_out}
    return run_several(
        {f"without {' and '.join(group)}": part for group, part in parts.items()},
        "compare",
        directory,
        settings | ({"rates": rates, "selection": selection} if rules else {}),
        console,
        shown,
        resume=place.resume is not None,
        jobs=place.jobs,
        callbacks=place.callbacks,
        title=f"{summarize_experiment(experiment)}, without each of {', '.join(left_out)}, which is then measured",
        begin=begin,
        measure=lambda part: _measure(part.experiment(), part.folder, selecting=bool(rules)),
        publish=lambda: _publish(spec, directory, console, rules),
    )


def _tune(spec: CompareSpec, rates: str) -> CompareSpec:
    """Return ``spec`` with each method at each learning rate, except methods that already have one."""
    from ..diagnosis.search import parse_rates, tune
    from ..experiments.factory import make_optimizer
    from ..methods import METHODS

    found = parse_rates(rates, make_optimizer(spec))
    methods = [each.name for method in METHODS.parse_all(spec.methods) for each in tune(method, found)]
    return replace(spec, methods=",".join(methods))


def rebuild_without(directory: Path, console: Console) -> None:
    """Publish the results so far of the comparisons without each client in ``directory`` again."""
    from ..new_clients.model_selection import parse_rules
    from ..report.publication import publish_run

    settings = dict(read_run_settings(directory).values)
    del settings["leave_out"]
    settings.pop("rates", None)
    rules = parse_rules(selection) if (selection := settings.pop("selection", None)) else ()
    for folder in sorted(directory.glob("without-*")):
        publish_run(folder, Console(quiet=True))
    _publish(CompareSpec(**settings), directory, console, rules)


def _check(spec: CompareSpec, place: RunOptions) -> Path:
    if spec.newcomers:
        raise UsageError(
            f"--leave-out makes newcomers of one client after the other: leave out --newcomers {spec.newcomers}"
        )
    if place.resume and find_kind(place.resume) == "run":
        raise UsageError(
            f"{place.resume} holds one comparison of all clients, without runs that leave clients out: start a new "
            "run (--out)"
        )
    return choose_directory(place, "compare")


def _make_experiments(
    spec: CompareSpec, experiment: Experiment, leave_out: str, directory: Path, *, pairs: bool
) -> Mapping[Group, Experiment]:
    """Return the comparison without each client; raise :class:`UsageError` if one cannot be run.

    ``pairs``: clients to leave out also together with each other client. If targets are scaled by the clients that
    train, the data are read again for each comparison.
    """
    from ..data.partition import match_names
    from ..diagnosis.checked_experiment import make_checked

    names = experiment.data.names if leave_out == ALL else match_names(leave_out, experiment.data.names)
    everyone = experiment.data.names
    groups: list[Group] = [(name,) for name in names]
    if pairs:
        groups += [pair for pair in combinations(everyone, 2) if set(pair) & set(names)]
    folders = [_folder_name(directory, *group) for group in groups]
    written = [str(folder).casefold() for folder in folders]  # file systems may ignore case
    for group, folder in zip(groups, folders, strict=True):
        if written.count(str(folder).casefold()) > 1:
            raise UsageError(f"client {group[0]!r} and another would share {folder}: rename one")
    if len(everyone) < 2:
        raise UsageError(f"{experiment.data.name} has one client: without it none is left to train")
    if pairs and len(everyone) < 3:
        raise UsageError(
            "--selection leave-one-out leaves out two clients at a time: three are needed, so that one can train"
        )
    rescaled = experiment.data.task != experiment.data.task.unfitted()
    return {
        group: replace(
            experiment,
            data=make_checked(replace(spec, newcomers=",".join(group))).data if rescaled else experiment.data,
            settings=replace(experiment.settings, newcomers=group),
            config={**experiment.config, "newcomers": ",".join(group)},
            measured_later=group,
        )
        for group in groups
    }


def _queue_run(spec: CompareSpec, group: Group, directory: Path, experiment: Experiment, selecting: bool) -> QueuedRun:
    from ..experiments.run_queue import QueuedRun

    settings = _ended_settings(spec, group, selecting)
    return QueuedRun(folder=_folder_name(directory, *group), settings=settings, experiment=lambda: experiment)


def _ended_settings(spec: CompareSpec, group: Group, selecting: bool) -> dict[str, Any]:
    """Return the settings with which the run without ``group`` counts as ended."""
    return {**asdict(spec), "newcomers": ",".join(group)} | ({"selection": True} if selecting else {})


def _require_valid(without: Mapping[Group, Experiment], parts: Mapping[Group, QueuedRun]) -> None:
    """Raise :class:`UsageError`, before anything is written, if a run cannot be made or continued.

    This checks methods, model and data, policies for each client, and the settings of existing runs.
    """
    from ..evaluation.policy import check_policy, parse_policies
    from ..experiments.trial import Trial
    from ..new_clients.policies import UNCHANGED, applicable_policies

    some = next(iter(without.values()))
    training = {client: some.data.client(client).train for group in without for client in group}
    for method in some.methods:
        with closing(Trial(method, some.model, some.data, some.settings, some.seeds[0])) as trial:
            for policy in applicable_policies(trial.plan, parse_policies(None), some.data.task):
                if policy != UNCHANGED:
                    check_policy(trial.plan, policy, training, some.data.task)
    for group, part in parts.items():
        try:
            without[group].check_compatible(part.folder)
        except UsageError as error:
            raise UsageError(f"{part.folder.name}: {{}}", error) from error


def _folder_name(directory: Path, *group: str) -> Path:
    from ..results.run_directory import to_file_name

    kind = "without" if len(group) == 1 else "pair"
    return directory / f"{kind}-{'-and-'.join(map(to_file_name, group))}"


def _measure(part: Experiment, folder: Path, *, selecting: bool) -> None:
    """Write the results of every policy on the clients that ``part`` left out, from checkpoints in ``folder``.

    ``selecting``: measure their validation data too; for two left-out clients, only the validation data.
    """
    import torch

    from ..evaluation.policy import parse_policies
    from ..experiments.restoration import select_trials
    from ..new_clients.policies import adapt_all

    group = part.settings.newcomers
    data = part.data.select_clients(group).to(torch.device(part.settings.device))
    training, validation = {client.name: client.train for client in data.clients}, list[Any]()
    trials, wanted = select_trials(part), parse_policies(None)
    if selecting:
        held = (each.with_splits({"test": each.validation}) for each in data.clients)
        validation = adapt_all(trials, folder, training, wanted, data=replace(data, clients=tuple(held))).rows
    if len(group) > 1:
        write_checked(folder / MEASURED, {"clients": group, "validation": validation})
        return
    (client,) = group
    made = adapt_all(trials, folder, training, wanted, data=data)
    notices = [*made.notices, *(f"without {client}: {failure}" for failure in made.failures)]
    content = {"client": client, "place": part.data.names.index(client), "rows": made.rows, "notices": notices}
    content |= {"metric": part.settings.metric, "validation": validation}
    write_checked(folder / MEASURED, content)


def _read_measured(spec: CompareSpec, directory: Path, selecting: bool) -> list[dict[str, Any]]:
    """Return the results of :func:`_measure` for comparisons that ended with ``spec``, in client order."""
    from ..experiments.run_queue import DONE, read_outcome

    found = [
        read_checked(file, f"have it measured again: remove it and {file.with_name(DONE)}, and go on (--resume)")
        for file in directory.glob(f"without-*/{MEASURED}")
    ]
    ended = [
        each
        for each in found
        if read_outcome(_folder_name(directory, each["client"]), _ended_settings(spec, (each["client"],), selecting))
        is not None
    ]
    return sorted(ended, key=lambda each: int(each["place"]))


def _list_lacking(directory: Path, measured: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a sentence about each comparison of ``directory`` that is not in ``measured``."""
    counted = {_folder_name(directory, each["client"]) for each in measured}
    return [
        f"{folder.name} has not ended under these settings: it is not in the table (--resume goes on)."
        for folder in sorted(set(directory.glob("without-*")) - counted)
    ]


def _list_diverged(
    spec: CompareSpec, directory: Path, measured: Iterable[Mapping[str, Any]], selecting: bool
) -> list[str]:
    """Return a sentence about each comparison in ``measured`` in which a method diverged."""
    from ..experiments.run_queue import read_outcome

    folders = {each["client"]: _folder_name(directory, each["client"]) for each in measured}
    outcomes = {
        folder.name: read_outcome(folder, _ended_settings(spec, (client,), selecting))
        for client, folder in folders.items()
    }
    return [f"{name}: {outcome}." for name, outcome in outcomes.items() if outcome]


def _publish(spec: CompareSpec, directory: Path, console: Console, rules: tuple[str, ...] = ()) -> None:
    """Print and write one table of the results of every policy on each client that was left out so far.

    ``rules``: rules of model selection, for an additional table.
    """
    import pandas as pd

    from ..new_clients import policy_tables as tables
    from ..report.formatting import difference_unit, format_metric_table, to_terminal, write_table
    from ..report.tables import describe_missing
    from ..results.schema import is_of_numbers, metric_unit, name_metric

    measured = _read_measured(spec, directory, bool(rules))
    rows = [row for each in measured for row in each["rows"]]
    if not rows:
        print_line(console, "No client that was left out is measured yet, so there is nothing to report.")
        return
    text = make_console(60 + 17 * len(measured))
    metric = next((each["metric"] for each in measured if "metric" in each), spec.metric)
    diverged, lacking = _list_diverged(spec, directory, measured, bool(rules)), _list_lacking(directory, measured)
    partial = f"PARTIAL: {' '.join([*lacking, *diverged])}" if lacking or diverged else ""
    if partial:
        print_line(console, partial)
    seeds = tables.seed_table(rows, metric)
    table, number, numbers = tables.mean_over_seeds(seeds), len(parse_seeds(spec.seeds)), is_of_numbers(rows[0])
    over = f"mean (std) over {number} seeds" if number > 1 else "one seed"
    measure = f"{name_metric(metric)} in {metric_unit(metric, numbers=numbers)[2]}"
    print_line(console, f"Test {measure} of the client that was left out, {over}, {spec.select} round")
    text.print(to_terminal(tables.policy_table(rows, metric, even=not diverged)))
    print_line(console, tables.explain_needs(rows))
    cells = format_metric_table(table, metric, even=not diverged)
    note = f"{cells.note} {describe_missing(pd.DataFrame(rows), metric)}".strip()
    write_table(directory / "tables", metric, replace(cells, partial=partial, note=note), table)
    gaps = tables.policy_differences(seeds, metric)
    if len(gaps) and not diverged:
        pairs = "clients" if len(seeds) > 1 else "seeds"
        shown = replace(tables.format_differences(gaps, metric, len(seeds)), partial=partial)
        unit = difference_unit(metric, numbers=numbers).name
        print_line(console, f"Minus {gaps['baseline'].iloc[0]}, in {unit}, paired over {pairs}")
        text.print(to_terminal(shown))
        write_table(directory / "tables", "differences", shown, gaps)
    if rules:
        _publish_selection(directory, console, measured, metric, rules, partial)
    for each in measured:
        for notice in each["notices"]:
            print_line(console, f"note: {notice}")
    print_line(console, f"Tables: {directory / 'tables'}; pages: {directory}/without-*/report.html")


def _publish_selection(
    directory: Path, console: Console, measured: list[dict[str, Any]], metric: str, rules: tuple[str, ...], partial: str
) -> None:
    """Print and write a table of the choice of each of ``rules`` for each left-out client."""
    import pandas as pd

    from ..new_clients.model_selection import format_selection, select_models, tabulate_values
    from ..report.formatting import to_terminal, write_table
    from ..report.tables import seed_table
    from ..results.summary import read_summary

    tested, validated = (
        tabulate_values((row for each in measured for row in each[part]), metric) for part in ("rows", "validation")
    )
    names = [each["client"] for each in measured]
    summaries = {name: read_summary(_folder_name(directory, name)) for name in names}
    trained: dict[str, Any] = {
        name: seed_table(summary, metric, split="validation").loc["macro"]
        .groupby(level=0).mean().to_dict()
        for name, summary in summaries.items()
    }  # fmt: skip
    clients = max(len(summary.clients) for summary in summaries.values())
    found = (
        read_checked(file, f"remove {file.parent} and go on (--resume)")
        for file in directory.glob(f"pair-*/{MEASURED}")
    )
    pairs = {frozenset(each["clients"]): tabulate_values(each["validation"], metric) for each in found}
    chosen = {rule: select_models(rule, tested, validated, trained, pairs, metric, clients) for rule in rules}
    cells = replace(format_selection(chosen, names, metric), partial=partial)
    print_line(console, "Model selection as DomainBed defines it, by client that was left out")
    make_console(70 + 17 * len(names)).print(to_terminal(cells))
    frame = pd.concat(chosen, names=["rule"]).reset_index(level=0).set_index(["rule", "client", "method", "policy"])
    write_table(directory / "tables", "selection", cells, frame)
