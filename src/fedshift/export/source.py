"""A run's model with its facts: the model is restored from the run's checkpoint, its results from the records."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..analysis.privacy import find_mechanism
from ..analysis.statistics import mean_and_std
from ..config.expressions import list_catalog
from ..core.method import Method
from ..core.plan import Plan
from ..data.datasets._card import get_card
from ..data.far_values import measure_training
from ..data.federation import ClientData, Federation
from ..data.nuclei import nuclei
from ..data.samples import Samples
from ..data.schema import Schema
from ..evaluation.statistics_lag import may_lag
from ..experiments.description import describe_optimizer, describe_weighting, describe_work
from ..experiments.experiment import Experiment
from ..experiments.restoration import AT_SITE, restore_trial, select_trials
from ..experiments.settings import Settings
from ..experiments.trial import Trial
from ..models import ModelFactory, describe_factory
from ..nn.adapters import Lora, list_constants
from ..report.tables import seed_table
from ..results.cases import FILES, Records, read_cases
from ..results.run_directory import describe_environment, trial_folder
from ..results.schema import REESTIMATED, Row, RunSummary, name_metric, stream_rows
from ..results.summary import read_summary
from ..results.trial_records import METRICS, read_lag
from ..tasks import TASKS, Regression, describe_task, find_kind
from ..utils.errors import Ref, UsageError
from ..utils.state import State
from .intervals import add_intervals
from .model_card import ModelFacts, format_value
from .package import ExportReport, TrainedModel, require_new, write_package


def export_run(
    experiment: Experiment,
    directory: Path,
    out: Path,
    *,
    method: str | None = None,
    client: str | None = None,
    seed: int | None = None,
    onnx: bool = True,
) -> ExportReport:
    """Write a model that ``experiment`` left in ``directory`` to the new directory ``out``.

    Args:
        experiment: The experiment, on the CPU.
        directory: Its run directory.
        out: Directory to write, new or empty.
        method: Name or expression of the method; None: the only one.
        client: Client whose model to write; None: the server's model.
        seed: Seed; None: the first.
        onnx: Whether to also write an ONNX program.

    Raises:
        UsageError: There is no such method, client or seed, or no such model.
        FedshiftError: The run has not progressed far enough, its files are damaged, or files cannot be written.

    """
    require_new(out)
    chosen = select_trials(experiment, method, None if seed is None else (seed,))
    if len(chosen.methods) > 1:
        names = ", ".join(each.label for each in chosen.methods)
        raise UsageError(f"the run has {len(chosen.methods)} methods ({names}): choose one ({{}})", Ref("method"))
    name, seed = chosen.methods[0].name, chosen.seeds[0]
    trial = restore_trial(chosen, directory, name, seed)
    if trial.server.round == 0:
        raise UsageError(f"{name}, seed {seed}, has done no round: continue the run first")
    return write_package(collect_model(trial, experiment, directory, client), out, onnx=onnx)


def collect_model(trial: Trial, experiment: Experiment, directory: Path, client: str | None) -> TrainedModel:
    """Return the model of ``client`` (None: the server) in a restored ``trial``, with all known facts about it."""
    data, plan, names = trial.data, trial.plan, ", ".join(trial.data.names)
    here = experiment.make_engine is None  # otherwise samples and client state are at the sites
    state = trial.model_state(client) if here or client is None else None
    if state is None and not here:
        missing = "clients' models are" if client else f"{plan.method.label} has no global model, and clients' are"
        raise UsageError(f"{missing} not stored where the run was coordinated: {AT_SITE}")
    if state is None:
        raise UsageError(
            f"{plan.method.label} has no global model: name a client ({{}}), one of {names}", Ref("client")
        )
    scales = {(each.train.normalization, each.decoding.window) for each in data.clients}
    if client is None and len(scales) > 1:
        raise UsageError(
            "each client's samples are scaled by its own training samples, so that the global model needs a client's "
            f"scale: name a client ({{}}), one of {names}",
            Ref("client"),
        )
    owner = data.client(client) if client else data.clients[0]
    summary = read_summary(directory)
    return make_model(
        trial.make_network(), state, plan, data, owner, trial.settings, experiment.model,
        tests={each.name: each.test for each in ([owner] if client else data.clients) if here}, client=client,
        seed=trial.seed, round=trial.server.round, choice=_explain_choice(trial),
        origin=_explain_origin(trial, client), data_in_words=f"{data.name} ({len(data.clients)} clients)",
        licenses=find_licenses(experiment.config.get("data"), data.name), notices=summary.notices,
        measured=[*_find_rows(trial, directory, client, here)], records=_read_records(trial, directory),
        spread=_spread_over_seeds(summary, plan.method.label, client), versions=list_versions(summary.environment),
    )  # fmt: skip


def make_model(
    network: nn.Module, state: State, plan: Plan, data: Federation, owner: ClientData, settings: Settings,
    factory: ModelFactory, *, tests: Mapping[str, Samples], data_in_words: str, measured: Sequence[Row],
    records: Mapping[tuple[str, str, str], Records], **facts: Any,
) -> TrainedModel:  # fmt: skip
    """Return ``network`` with ``state`` as the model of ``owner``, with facts from plan, data and settings.

    ``records``: results of single samples by split, client and model, if known; ``facts``: the remaining fields of
    :class:`~fedshift.export.model_card.ModelFacts`.
    """
    schema, method = data.describe_client(owner), plan.method
    hidden = any(find_mechanism(method.rules, clients=clients) for clients in (True, False))
    if schema.preparation.usual is None and tests and not hidden:
        trained = replace(data, clients=(owner,)) if facts["client"] else data
        usual = measure_training(trained, settings.newcomers if len(trained.clients) > 1 else ())
        schema = replace(schema, preparation=replace(schema.preparation, measured=usual))
    all_facts = ModelFacts(
        **describe_answers(data), method=method.label, meaning=method.text, sources=tuple(find_sources(method)),
        network=describe_network(plan, factory), data=f"{data_in_words}. {data.note}".rstrip(". "),
        clients={each.name: {part: len(split) for part, split in each.splits.items()} for each in data.clients},
        settings=describe_settings(plan, settings, schema),
        measured=tuple(add_intervals(measured, data.task.measured, records)), **facts,
    )  # fmt: skip
    return TrainedModel(network=network, state=state, plan=plan, schema=schema, facts=all_facts, tests=tests)


def describe_answers(data: Federation) -> dict[str, Any]:
    """Return the fields of :class:`~fedshift.export.model_card.ModelFacts` about the predictions for ``data``."""
    task = data.task
    kind, name = find_kind(task), describe_task(task)["name"]
    inherited = type(task).predict is getattr(TASKS.entries.get(kind), "predict", None)  # else the task defines them
    return {"task": task.name, "kind": kind if inherited else name, "outputs": data.outputs, "metrics": task.measured}


def find_sources(method: Method) -> Iterator[str]:
    """Yield each part of ``method`` with its paper, from the fedshift modules that define it."""
    parts = set(re.findall(r"[a-z_]+", method.name))
    for name, function in list_catalog("methods").items():
        if name in parts:
            text = inspect.getdoc(inspect.getmodule(function)) or ""
            first = " ".join(text.split("\n\n")[0].split())
            papers = dict.fromkeys(re.findall(r"arXiv:\d{4}\.\d{5}", text))
            yield first + f" ({', '.join(papers)})" * bool(papers)


def describe_network(plan: Plan, model: ModelFactory) -> str:
    """Return the network's name and size in a sentence."""
    adapters = [str(each) for each in plan.method.surgery if isinstance(each, Lora)]
    changed = f", changed by {plan.method.label}" if len(plan.method.surgery) > len(adapters) else ""
    changed += "".join(f", trained by {each}" for each in adapters)
    parameters = sum(plan.initial[entry.name].numel() for entry in plan.entries if not entry.is_buffer)
    parameters += sum(tensor.numel() for _, tensor in list_constants(plan.module))
    return f"Network {describe_factory(model)}{changed}, {parameters:,} parameters"


def describe_settings(plan: Plan, settings: Settings, schema: Schema) -> dict[str, str]:
    """Return the resolved training settings by name."""
    share, prepare = settings.participation, schema.preparation
    scales = schema.task.scales if isinstance(schema.task, Regression) else ()
    pairs = zip(schema.names, scales, strict=bool(scales))
    scaled = ", ".join(f"({name} - {mean:g}) / {deviation:g}" for name, (mean, deviation) in pairs)
    targets = {"targets": f"learned as {scaled}; the program returns them in the unit of the data"} if scaled else {}
    return {
        "local work per round": describe_work(plan.work),
        "weight of a client": describe_weighting(plan.method),
        "optimizer": describe_optimizer(plan.optimizer),
        "loss": str(settings.loss),
        "augmentation": str(settings.augment or "none"),
        "initial weights": settings.weights.source if settings.weights else "random, by the seed",
        "clients per round": "all" if str(share) in ("None", "1.0") else str(share),
        "precision": plan.precision,
        "scaling": str(prepare.scaling) if prepare.scales else "none",
    } | targets


def list_versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's package versions, and the versions at export if they differ."""
    then, now = environment.get("packages", {}), describe_environment()["packages"]
    versions = {name: str(then[name]) for name in ("fedshift", "torch", "numpy") if name in then}
    return versions | {f"{name} (export)": str(now[name]) for name in versions if now[name] != versions[name]}


def find_licenses(data: str | None, name: str) -> str:
    """Return the licenses of ``data``, as stated on its card."""
    head = (data or "").partition("(")[0].strip().replace("_", "-").lower()
    if data == "digits":
        return (
            "Embedded digits: scikit-learn's copy of UCI's handwritten digits; photographs under CC BY 2.0 (china.jpg "
            "by danielbuechele, flower.jpg by vultilion); the free fonts DejaVu, STIX and Computer Modern."
        )
    known: dict[str, Callable[..., Federation]] = {**list_catalog("data.datasets"), "nuclei": nuclei}
    if data and not Path(data).exists() and head in known:
        card = get_card(known[head])
        return f"{card.title}: {card.license}. Source: {card.source}."
    return f"The licenses of `{name}` are not known to fedshift: add them here before you distribute the model."


def _explain_choice(trial: Trial) -> str:
    """Return how the model's round and BatchNorm statistics were chosen."""
    settings, statistics = trial.settings, "re-estimated" if trial.statistics == REESTIMATED else "running"
    kept = f", with {statistics} BatchNorm statistics" if may_lag(trial.plan, trial.server) else ""
    if settings.select == "best":
        return f"the best of {settings.rounds} on validation data{kept}"
    last = trial.server.round == settings.rounds
    return (f"the last of {settings.rounds}" if last else f"{settings.rounds} were planned") + kept


def _explain_origin(trial: Trial, client: str | None) -> str:
    """Return how ``client`` got its model, if it did not train it."""
    if client is None or not trial.plan.personalizes:
        return "All clients use this one model." if client else ""
    if trial.clients.has_trained(client):
        return ""
    return f"The client has not trained in the run: the policy `{trial.settings.unseen}` provided its model."


def _find_rows(trial: Trial, directory: Path, client: str | None, here: bool) -> Iterator[Row]:
    """Yield the model's records in the trial's round; if there are none, measure it if the data are ``here``."""
    name, seed, number = trial.plan.method.label, trial.seed, trial.server.round
    kept = (row for row in stream_rows(trial_folder(directory, name, seed) / METRICS) if row["round"] == number)
    rows = [row for row in kept if row["split"] != "train"] or (trial.evaluate() if here else [])
    moment = "loaded"
    if trial.statistics == REESTIMATED and (lag := read_lag(trial_folder(directory, name, seed))):
        rows, moment = lag["rows"], REESTIMATED
    for row in rows:
        wanted = row["client"] == client if client else True
        if wanted and row["model"] == ("personal" if client else "global") and row["moment"] == moment:
            yield row


def _read_records(trial: Trial, directory: Path) -> dict[tuple[str, str, str], Records]:
    """Return the records of single samples in the trial's round, by split, client and model."""
    folder = trial_folder(directory, trial.plan.method.label, trial.seed)
    found = {split: read_cases(folder, split, trial.statistics) for split in FILES}
    known = {split: cases.records for split, cases in found.items() if cases and cases.round == trial.server.round}
    return {(split, *key): records for split, by_model in known.items() for key, records in by_model.items()}


def _spread_over_seeds(summary: RunSummary, method: str, client: str | None) -> str:
    """Return a sentence on the task's main metric over the seeds: of the client, else the clients' mean; or ""."""
    metric = summary.metrics[0]
    if len(summary.seeds) < 2 or summary.rows.empty:
        return ""
    table = seed_table(summary, metric, "personal" if client else "global")
    known = method in table.columns.get_level_values(0)
    values = table.loc[[client or "macro"], method].stack().astype(float).tolist() if known else []
    if len(values) < 2:
        return ""
    mean, std = mean_and_std(values)
    what = "" if metric == "accuracy" else f"{name_metric(metric)} "
    spread = format_value(std, metric).replace(" %", " points")
    return (
        f"Over the run's {len(values)} seeds, {client or 'mean of the clients'}: {what}{format_value(mean, metric)} on "
        f"average, standard deviation {spread}."
    )
