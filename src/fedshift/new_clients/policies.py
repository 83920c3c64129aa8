"""Policies for unknown clients, side by side: which apply, what they need, and how well their models perform.

FedBN compares its policies in appendix G (arXiv:2102.07623), FedWon one global model with FedBN's average in table 12
(arXiv:2306.05879).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors

from ..core.plan import Plan
from ..data.federation import ClientData, Federation
from ..data.files.read_options import Progress
from ..data.samples import Samples
from ..engines.engine import Diverged
from ..evaluation.metrics import evaluate
from ..evaluation.policy import POLICIES, Policy, check_policy, explain_inapplicable
from ..experiments.experiment import Experiment
from ..experiments.restoration import count_rounds_done, iterate_trials, restore_trial
from ..experiments.trial import Trial
from ..results.run_directory import to_file_name, trial_folder
from ..results.schema import Row
from ..results.trial_records import read_stop
from ..tasks.task import Task
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.files import write_atomically
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
    possible = (name for name in wanted if not POLICIES.parse(name).excuse(plan, task))
    return (*(() if plan.personalizes else (UNCHANGED,)), *possible)


def find_policy(policy: str) -> Policy:
    """Return the policy ``policy``; a global model counts as its average."""
    return POLICIES.parse("average" if policy == UNCHANGED else policy)


def describe_needs(plan: Plan, policy: str) -> tuple[str, ...]:
    """Return the needs of ``policy`` beyond the server's entries: keys of :data:`NEEDS`."""
    made = find_policy(policy)
    # entries that are averaged over the clients
    lacking = [entry for entry in plan.entries if entry.name not in plan.sent and not made.replaces(entry)]
    return (*filter(None, (made.data,)), *(["entries"] if lacking or made.compares else []))


def make_models(
    trial: Trial,
    training: Mapping[str, Samples],
    wanted: Collection[str],
    *,
    rounds: int = 1,
    inputs: Samples | None = None,
    notices: list[str] | None = None,
) -> Iterator[AdaptedModel]:
    """Make a model of ``trial`` for each client with ``training`` data by each applicable policy of ``wanted``.

    ``rounds``: rounds of local work of policies that train. ``inputs``: samples that policies without
    labels use instead of the client's training data. ``notices``: receives a sentence for each model skipped because
    training diverges or a client has too few samples for a policy. The trial is not changed. Without ``notices``,
    raises :class:`UsageError` if a client has too few samples to fine-tune on.
    """
    plan, task = trial.plan, trial.data.task
    policies = {name: find_policy(name) for name in applicable_policies(plan, wanted, task)}
    if trial.server.round == 0:
        raise FedshiftError(f"{plan.method.label}, seed {trial.seed}, has done no round: continue the run first")
    for policy in policies if notices is None else ():
        if policy != UNCHANGED:
            check_policy(plan, policy, training, task)
    for name, split in training.items():
        unlabeled = split if inputs is None else inputs
        data = {policy: unlabeled if made.data == "inputs" else split for policy, made in policies.items()}
        few = [policy for policy in data if policies[policy].estimates and len(data[policy]) < plan.smallest_batch]
        if few and notices is not None:
            _add_once(
                notices, f"client {name!r}: one sample has no variance to normalize by, so without {', '.join(few)}"
            )
            data = {policy: data[policy] for policy in data if policy not in few}
        for policy in data:
            try:
                state = trial.make_unseen_state(policies[policy].text, name, data[policy], rounds)
            except Diverged as error:
                if notices is not None:
                    where = f"{plan.method.label}, seed {trial.seed}"
                    _add_once(notices, f"{where}: {error}. Adapted there by {policy}, it has no model.")
                continue
            assert state is not None  # a round was done
            yield AdaptedModel(
                method=plan.method.label, seed=trial.seed, policy=policy, client=name,
                needs=describe_needs(plan, policy), state=state,
            )  # fmt: skip


def _add_once(notices: list[str], text: str) -> None:
    if text not in notices:
        notices.append(text)


def evaluate_model(trial: Trial, model: AdaptedModel, client: ClientData) -> Row:
    """Measure ``model`` on the test data of ``client``, as counts (see ``results.schema``)."""
    counted = evaluate(trial.plan, model.state, client.test, trial.data.task, trial.data.classes)
    return {
        "title": model.title, "method": model.method, "policy": model.policy, "needs": ", ".join(model.needs),
        "seed": model.seed, "client": model.client, **counted,
    }  # fmt: skip


def require_no_labels(wanted: Collection[str]) -> None:
    """Raise :class:`UsageError` if a policy needs labels, because there are none."""
    for name in wanted:
        if POLICIES.parse(name).data == "labels":
            raise UsageError(
                f"policy {name!r} needs labels, and {{}} has none: give {{}}, or leave it out",
                Ref("unlabeled"),
                Ref("data"),
            )


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Results of the policies: ``rows`` of measurements, and sentences.

    ``notices``: about skipped models; ``inapplicable``: about policies that do not apply to some methods;
    ``failures``: about skipped trials. ``reached``: the last round of each other trial.
    """

    rows: list[Row] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    inapplicable: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    reached: dict[tuple[str, int], int] = field(default_factory=dict)


def adapt_all(
    experiment: Experiment,
    directory: Path,
    training: Mapping[str, Samples],
    wanted: Collection[str],
    *,
    data: Federation | None = None,
    rounds: int = 1,
    inputs: Samples | None = None,
    save: Path | None = None,
    progress: Progress | None = None,
) -> Adaptation:
    """Make and measure the models of :func:`make_models` for each trial that ``experiment`` left in ``directory``.

    ``training``, ``wanted``, ``rounds`` and ``inputs`` as there. ``data``: federation with the test data; ``save``:
    directory for the models of the first seed. A trial with damaged or missing files does not stop the others.
    Raises :class:`UsageError` if two clients' models would be one file, no policy gives any model, or the run was made
    with other settings.
    """
    files = [to_file_name(name) for name in training]
    for name, file in zip(training, files, strict=True):
        if save and files.count(file) > 1:
            raise UsageError(f"client {name!r} and another would share the file {file}.safetensors: rename one")
    made = Adaptation()
    plans: dict[str, Plan] = {}
    count = 0
    trials, asked = [*iterate_trials(experiment)], experiment.settings.rounds
    for number, (method, seed) in enumerate(trials):
        if progress:
            progress(f"{method}, seed {seed}", number, len(trials))
        try:
            done = count_rounds_done(directory, method, seed)
            trial = restore_trial(experiment, directory, method, seed)
            plans[method] = trial.plan
            folder = save if seed == experiment.seeds[0] else None
            count += adapt_trial(made, trial, training, wanted, data=data, rounds=rounds, inputs=inputs, save=folder)
            stopped = bool(read_stop(trial_folder(directory, method, seed), done))
            made.reached[method, seed] = asked if stopped else done
            if done < asked and not stopped:
                made.notices.append(f"{method}, seed {seed}: {done} of {asked} rounds are done")
        except UsageError:
            raise
        except FedshiftError as error:
            made.failures.append(f"{method}, seed {seed}, is left out: {error}")
    made.inapplicable.extend(explain_inapplicable(plans.values(), wanted, experiment.data.task))
    if not (count or made.failures):
        raise UsageError(f"no policy gives a model: {'; '.join([*made.inapplicable, *made.notices])}")
    return made


def adapt_trial(
    made: Adaptation,
    trial: Trial,
    training: Mapping[str, Samples],
    wanted: Collection[str],
    *,
    data: Federation | None = None,
    rounds: int = 1,
    inputs: Samples | None = None,
    save: Path | None = None,
) -> int:
    """Make the models of :func:`make_models`, measure those of ``data``, write them to ``save``; return their number.

    Rows and notices go into ``made``.
    """
    count = 0
    for model in make_models(trial, training, wanted, rounds=rounds, inputs=inputs, notices=made.notices):
        count += 1
        if save:
            write_model(save, model)
        if data:
            made.rows.append(evaluate_model(trial, model, data.client(model.client)))
    return count


def write_model(folder: Path, model: AdaptedModel) -> Path:
    """Write the state of ``model`` as ``<method>/<policy>/<client>.safetensors`` in ``folder``; return the path.

    Tensors have torch's names in the network after the method's surgery; the header identifies the model.
    """
    owned = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in model.state.items()
    }
    header = {"method": model.method, "policy": model.policy, "client": model.client, "seed": str(model.seed)}
    file = (
        folder / to_file_name(model.method) / to_file_name(model.policy) / f"{to_file_name(model.client)}.safetensors"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, to_safetensors(owned, metadata=header))
    return file
