"""Policies for unknown clients, side by side: which apply, what they need, and how well their models perform.

FedBN compares its policies in appendix G (arXiv:2102.07623), FedWon one global model with FedBN's average in table 12
(arXiv:2306.05879).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import device

from ..analysis.influence import Floats, find_influence
from ..core.plan import Plan
from ..data.federation import ClientData, Federation
from ..data.samples import Samples
from ..data.source import Progress
from ..engines.engine import Diverged
from ..evaluation.metrics import measure_singly
from ..evaluation.policy import POLICIES, Policy, check_policy, explain_inapplicable
from ..experiments.experiment import Experiment
from ..experiments.restoration import count_rounds_done, iterate_trials, restore_trial
from ..experiments.trial import Trial
from ..export.package import ExportReport, write_package
from ..export.source import find_licenses, list_versions, make_model
from ..results.run_directory import describe_environment, trial_folder
from ..results.schema import Row
from ..results.trial_records import read_stop
from ..tasks.task import Task
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.state import State

UNCHANGED = "global model"
"""Policy of a method with one global model: an unknown client gets that model."""
NEEDS = {
    "inputs": "the new client's training inputs, without labels",
    "labels": "its training inputs with labels",
    "entries": "the entries that the run's clients keep local: a simulation sees them, a deployment only by agreement",
}
"""Needs of the policies, described."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AdaptedModel:
    """A model for ``client`` by ``policy``, of ``method`` with ``seed``; ``needs``: keys of :data:`NEEDS`."""

    method: str
    seed: int
    policy: str
    client: str
    needs: tuple[str, ...]
    state: State

    @property
    def title(self) -> str:
        """Method and policy in the spelling of tables."""
        return f"{self.method}: {self.policy}"


def applicable_policies(plan: Plan, wanted: Iterable[str], task: Task) -> tuple[str, ...]:
    """Return the policies of ``wanted`` that apply to ``plan``.

    For a method with one global model, the unchanged model is always included.
    """
    possible = (name for name in wanted if name != UNCHANGED and not POLICIES.parse(name).excuse(plan, task))
    return (*(() if plan.personalizes else (UNCHANGED,)), *possible)


def find_policy(policy: str) -> Policy:
    """Return the policy ``policy``; a global model counts as its average."""
    return POLICIES.parse("average" if policy == UNCHANGED else policy)


def describe_needs(plan: Plan, policy: str) -> tuple[str, ...]:
    """Return the needs of ``policy`` beyond the server's entries: keys of :data:`NEEDS`."""
    asked = find_policy(policy)
    # entries that are averaged over the clients
    averaged = any(entry.name not in plan.sent and not asked.replaces(entry) for entry in plan.entries)
    return (*filter(None, (asked.data,)), *(["entries"] if averaged or asked.compares else []))


def make_models(
    trial: Trial, training: Mapping[str, Samples], wanted: Collection[str], *, rounds: int = 1,
    inputs: Samples | None = None, notices: list[str] | None = None,
) -> Iterator[AdaptedModel]:  # fmt: skip
    """Make a model of ``trial`` for each client with ``training`` data by each applicable policy of ``wanted``.

    ``rounds``: rounds of local work of policies that train. ``inputs``: samples that policies without
    labels use instead of the client's training data. ``notices``: receives a sentence for each model skipped because
    training diverges or a client has too few samples for a policy. The trial is not changed. Without ``notices``,
    raises :class:`UsageError` if a client has too few samples to fine-tune on.
    """
    plan, task, notes = trial.plan, trial.data.task, list[str]() if notices is None else notices
    policies = {name: find_policy(name) for name in applicable_policies(plan, wanted, task)}
    if trial.server.round == 0:
        raise FedshiftError(f"{plan.method.label}, seed {trial.seed}, has done no round: continue the run first")
    for policy in policies if notices is None else ():
        if policy != UNCHANGED:
            check_policy(plan, policy, training, task)
    for name, split in training.items():
        unlabeled = split if inputs is None else inputs
        data = {policy: unlabeled if asked.data == "inputs" else split for policy, asked in policies.items()}
        few = [policy for policy in data if policies[policy].estimates and len(data[policy]) < plan.smallest_batch]
        if few and notices is not None:
            note = f"client {name!r}: one sample has no variance to normalize by, so without {', '.join(few)}"
            notes += [note] if note not in notes else []
            data = {policy: data[policy] for policy in data if policy not in few}
        for policy in data:
            try:
                state = trial.make_unseen_state(policies[policy].text, name, data[policy], rounds)
            except Diverged as error:
                where = f"{plan.method.label}, seed {trial.seed}"
                notes.append(f"{where}: {error}. Adapted there by {policy}, it has no model.")
                continue
            assert state is not None  # a round was done
            yield AdaptedModel(
                method=plan.method.label, seed=trial.seed, policy=policy, client=name,
                needs=describe_needs(plan, policy), state=state,
            )  # fmt: skip


def remake_model(
    trial: Trial, title: str, client: str, train: Samples, *, rounds: int, inputs: Samples | None
) -> AdaptedModel:
    """Return the model of :func:`make_models` whose title is ``title``; raise :class:`UsageError` if there is none."""
    policy, notices = title.removeprefix(f"{trial.plan.method.label}: "), list[str]()
    for model in make_models(trial, {client: train}, [policy], rounds=rounds, inputs=inputs, notices=notices):
        if model.policy == policy:
            return model
    reasons = explain_inapplicable([trial.plan], [policy], trial.data.task) if policy != UNCHANGED else []
    told = "; ".join([*reasons, *notices]) or "the method has no global model"
    raise UsageError(f"{title} gives client {client!r} no model ({told}): choose another policy ({{}})", Ref("policy"))


def evaluate_model(trial: Trial, model: AdaptedModel, client: ClientData) -> Row:
    """Measure ``model`` on the test data of ``client``, as counts (see ``results.schema``)."""
    return _measure(trial, model, client)[0]


def _measure(trial: Trial, model: AdaptedModel, client: ClientData) -> tuple[Row, Floats | None]:
    """Return :func:`evaluate_model`, and the influence ``[G]`` of each test unit on the metric, if it is defined."""
    counts, records = measure_singly(trial.plan, model.state, client.test, trial.data.task, trial.data.classes)
    row = {
        "title": model.title, "method": model.method, "policy": model.policy, "needs": ", ".join(model.needs),
        "seed": model.seed, "client": model.client, **counts,
    }  # fmt: skip
    return row, find_influence(records, trial.settings.metric) if records else None


def export_model(
    trial: Trial, model: AdaptedModel, data: Federation, out: Path, *, evidence: str, measured: bool,
    notices: tuple[str, ...] = (),
) -> ExportReport:  # fmt: skip
    """Write ``model`` of ``trial`` to the new directory ``out`` as ``fedshift export`` writes one, for its client.

    ``data``: federation with the client's data, of the run's schema; ``evidence``: sentences on the choice of the
    policy; ``measured``: whether the client has test data; ``notices``: of the run.
    """
    client, rows, records = data.client(model.client), list[Row](), {}
    if measured:
        counts, found = measure_singly(trial.plan, model.state, client.test, trial.data.task, trial.data.classes)
        rows = [{"client": client.name, "split": "test", "model": "personal", "moment": "loaded", **counts}]
        records = {("test", client.name, "personal"): found} if found else {}
    (here,) = data.select_clients([client.name]).to(device("cpu")).clients
    package = make_model(
        trial.make_network(), model.state, trial.plan, replace(data, clients=(here,)), here, trial.settings,
        trial.model, tests={here.name: here.test} if measured else {}, client=here.name, seed=trial.seed,
        round=trial.server.round, choice=f"of {trial.settings.rounds}", measured=rows, records=records,
        origin=f"The client has not trained in the run: the policy `{model.policy}` provided its model. {evidence}",
        data_in_words=f"{trial.data.name} ({len(trial.data.clients)} clients), then {here.name}", notices=notices,
        licenses=find_licenses(trial.data.name, trial.data.name), versions=list_versions(describe_environment()),
    )  # fmt: skip
    return write_package(package, out)


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Results of the policies: ``rows`` of measurements, and sentences.

    ``influences``: of test units on the metric, ``[G]``, by method and policy, seed, and client, where they are known.
    ``notices``: about skipped models; ``inapplicable``: about policies that do not apply to some methods;
    ``failures``: about skipped trials. ``reached``: the last round of each other trial.
    """

    rows: list[Row] = field(default_factory=list)
    influences: dict[tuple[str, int, str], np.ndarray] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    inapplicable: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    reached: dict[tuple[str, int], int] = field(default_factory=dict)


def adapt_all(
    experiment: Experiment, directory: Path, training: Mapping[str, Samples], wanted: Collection[str], *,
    data: Federation, rounds: int = 1, inputs: Samples | None = None, progress: Progress | None = None,
) -> Adaptation:  # fmt: skip
    """Make and measure the models of :func:`make_models` for each trial that ``experiment`` left in ``directory``.

    ``training``, ``wanted``, ``rounds`` and ``inputs`` as there. ``data``: federation with the test data. A trial with
    damaged or missing files does not stop the others. Raises :class:`UsageError` if no policy gives any model, or the
    run was made with other settings.
    """
    adapted, plans = Adaptation(), dict[str, Plan]()
    trials, asked = [*iterate_trials(experiment)], experiment.settings.rounds
    for number, (method, seed) in enumerate(trials):
        if progress:
            progress(f"{method}, seed {seed}", number, len(trials))
        try:
            done = count_rounds_done(directory, method, seed)
            trial = restore_trial(experiment, directory, method, seed)
            plans[method] = trial.plan
            adapt_trial(adapted, trial, training, wanted, data=data, rounds=rounds, inputs=inputs)
            stopped = bool(read_stop(trial_folder(directory, method, seed), done))
            adapted.reached[method, seed] = asked if stopped else done
            if done < asked and not stopped:
                adapted.notices.append(f"{method}, seed {seed}: {done} of {asked} rounds are done")
        except UsageError:
            raise
        except FedshiftError as error:
            adapted.failures.append(f"{method}, seed {seed}, is left out: {error}")
    adapted.inapplicable.extend(explain_inapplicable(plans.values(), wanted, experiment.data.task))
    require_models(adapted)
    return adapted


def adapt_trial(
    adapted: Adaptation, trial: Trial, training: Mapping[str, Samples], wanted: Collection[str], *, data: Federation,
    rounds: int = 1, inputs: Samples | None = None,
) -> None:  # fmt: skip
    """Make the models of :func:`make_models` and measure them on ``data``; rows and notices go into ``adapted``."""
    for model in make_models(trial, training, wanted, rounds=rounds, inputs=inputs, notices=adapted.notices):
        row, influence_G = _measure(trial, model, data.client(model.client))
        adapted.rows.append(row)
        if influence_G is not None:
            adapted.influences[model.title, model.seed, model.client] = influence_G


def require_models(adapted: Adaptation) -> None:
    """Raise :class:`UsageError` if no policy gave a model, unless trials failed."""
    if not (adapted.rows or adapted.failures):
        raise UsageError(f"no policy gives a model: {'; '.join([*adapted.inapplicable, *adapted.notices])}")
