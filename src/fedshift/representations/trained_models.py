"""The models that are compared: each client's own after local work, and the server's that it set out from.

Under a method with one global model, clients hold the same after aggregation; what tells them apart is what local work
makes of it. So under every method each client is trained one round further than the checkpoint, with the learning rate
of the last round (a schedule may end at 0), and its model is taken before aggregation. This is a function of the run
alone, by the sequential engine, and nothing of it is written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.kernel import personal_state
from ..data.partition import match_names
from ..engines.engine import Diverged
from ..experiments.experiment import Experiment
from ..experiments.restoration import count_rounds_done, iterate_trials
from ..experiments.trial import Trial
from ..results.schema import PICTURED
from ..utils.errors import UsageError
from ..utils.state import State


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedModels:
    """The ``server``'s model and each client's ``local`` one, of one method under one seed; ``trial`` has the plan.

    ``local`` is empty where all data are in one place.
    """

    trial: Trial
    server: State
    local: Mapping[str, State]


def require_finished(experiment: Experiment, directory: Path, go_on: str) -> None:
    """Raise :class:`UsageError` unless ``directory`` has all rounds of every trial; ``go_on``: how to get the others.

    :class:`FedshiftError` where one left no checkpoint.
    """
    for name, seed in iterate_trials(experiment):
        done = count_rounds_done(directory, name, seed)
        if done < experiment.settings.rounds:
            raise UsageError(
                f"{directory} is not finished: {name} with seed {seed} has done {done} of "
                f"{experiment.settings.rounds} rounds; leave it out (methods, seeds), or go on with it: {go_on}"
            )


def select_clients(experiment: Experiment, clients: str | Sequence[str] | None) -> tuple[str, ...]:
    """Those that are looked at: names, or a pattern such as ``"usps-*"``; None: the first :data:`PICTURED` that train.

    Raises :class:`UsageError` where a client is unknown or never trained.
    """
    names = experiment.data.names
    training = tuple(name for name in names if name not in experiment.settings.newcomers)
    if clients is None:
        return training[:PICTURED]
    asked = match_names(clients, names) if isinstance(clients, str) else tuple(dict.fromkeys(clients))
    if not asked:
        raise UsageError("clients: name at least one, or leave it out for all")
    for name in asked:
        if experiment.data.client(name).name not in training:
            raise UsageError(f"client {name!r} is a newcomer, which never trains: choose from {', '.join(training)}")
    return asked


def train_models(trial: Trial, clients: Sequence[str]) -> TrainedModels:
    """The models of ``trial`` as it stands and of ``clients``; raises ``Diverged`` where a client's further round does.

    A client's is what it would use if the server held its upload alone: under Ditto its personal model.
    """
    plan, last = trial.plan, replace(trial.server, round=trial.server.round - 1)
    kept = {} if plan.method.pooled else {name: trial.clients[name] for name in clients}
    try:
        local = {
            name: personal_state(plan, done.client, replace(last, shared=done.update.shared))
            for name, done in trial.engine.train(last, kept)
        }
    except Diverged as error:
        raise Diverged(f"{plan.method.name}, seed {trial.seed}, one round further than the run: {error}") from error
    return TrainedModels(trial=trial, server=_make_server_model(trial), local=local)


def _make_server_model(trial: Trial) -> State:
    """What the server of ``trial`` holds, made a whole model as ``unseen="average"`` does.

    Where it holds a part only (FedBN), the clients' own entries are averaged by the method's weighting, of which a
    real server has no sight.
    """
    client = trial.data.clients[0]  # whose data are not looked at
    made = trial.unseen_clients.make_state("average", client.name, client.train)
    assert made is not None  # of a run that is finished, some client has trained
    return made
