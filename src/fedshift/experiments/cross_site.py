"""Cross-site validation: each client's model measured on the test data of every client, after training.

The meaning of the numbers depends on the ``moment``. ``loaded``: the model that a client would use (``personal`` in
records), if the method has one, and the server's complete model, if it has one. ``trained``: the model of a client just
after one more round of local work, before aggregation, at the learning rate of the last round; with a method that has
one global model, only local work makes clients' models differ. Models of other clients are read one at a time. Only a
simulation can do this: across machines, the models would have to leave their sites.

NVIDIA FLARE offers it across machines, for the models after local training and the global model ("cross site model
evaluation" in its programming guide, github.com/NVIDIA/NVFlare).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ..core.kernel import global_state, personal_state
from ..data.source import Progress
from ..engines.engine import Diverged
from ..evaluation.metrics import evaluate_together
from ..results.run_directory import RunDirectory, trial_folder
from ..results.schema import Row
from ..results.trial_records import CROSSED
from ..utils.state import State
from .experiment import Experiment
from .restoration import iterate_trials, restore_trial
from .trial import Trial

Moment = Literal["loaded", "trained"]


def cross_validate(
    experiment: Experiment, directory: Path, moment: Moment = "loaded", progress: Progress | None = None
) -> None:
    """Measure the models of each trial of ``experiment`` in ``directory``, and add the records to it.

    They replace earlier ones of the same trials and moment. Later reports have a table for each method.

    Raises:
        UsageError: A trial belongs to another experiment.
        FedshiftError: Files are damaged or missing, another program uses the directory, or the additional round
            diverges.

    """
    trials = [*iterate_trials(experiment)]
    with closing(RunDirectory(directory, resume=True)) as kept:
        for number, (method, seed) in enumerate(trials):
            if progress:
                progress(f"{method}, seed {seed}", number, len(trials))
            trial = restore_trial(experiment, directory, method, seed)
            file = trial_folder(directory, method, seed) / CROSSED[moment]
            content = {"round": trial.server.round, "rows": [*measure_models(trial, moment)]}
            kept.write_json(str(file.relative_to(directory)), content)


def measure_models(trial: Trial, moment: Moment) -> Iterator[Row]:
    """Yield a row for each model and client: ``owner`` (None: the server), ``client``, and counts on its test data."""
    clients = trial.measured.clients
    distinct = {id(client.test): client.test for client in clients}  # clients may share test data
    for owner, state in _iterate_models(trial, moment):
        measured = evaluate_together(trial.plan, state, distinct.values(), trial.data.task, trial.data.classes)
        known = dict(zip(distinct, measured, strict=True))
        yield from ({"owner": owner, "client": client.name, **known[id(client.test)]} for client in clients)


def _iterate_models(trial: Trial, moment: Moment) -> Iterator[tuple[str | None, State]]:
    """Yield models with their owners, the server's last; all have running BatchNorm statistics if ``trained``."""
    if moment == "trained":
        names = [client.name for client in trial.measured.clients if client.name in trial.clients.names]
        yield from train_further(trial, names)
    elif trial.plan.personalizes:
        for client in trial.measured.clients:
            own = trial.personal_state(client)
            if own is not None:
                yield client.name, own
    shared = global_state(trial.plan, trial.server) if moment == "trained" else trial.model_state()
    if shared is not None:
        yield None, shared


def train_further(trial: Trial, clients: Sequence[str]) -> Iterator[tuple[str, State]]:
    """Yield the models of ``clients`` after one more round of local work than the trial's last, before aggregation.

    A client's model is the one it would use if its upload became the server's state: with Ditto its personal model.
    The trial is not changed. If all data are pooled, there are no client models. Raises ``Diverged`` if a client
    diverges.
    """
    plan, last = trial.plan, replace(trial.server, round=trial.server.round - 1)
    kept = {} if plan.method.pooled else {name: trial.clients[name] for name in clients}
    try:
        for name, done in trial.engine.train(last, kept):
            yield name, personal_state(plan, done.client, replace(last, shared=done.update.shared))
    except Diverged as error:
        raise Diverged(
            f"{plan.method.label}, seed {trial.seed}, one round further than the run: {{}}", error
        ) from error
