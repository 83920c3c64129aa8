"""Every policy under every method and seed of a run: models made, measured and saved, trial by trial."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..core.plan import Plan
from ..data.federation import Federation
from ..data.files.read_options import Progress
from ..data.samples import Samples
from ..experiments.experiment import Experiment
from ..experiments.restoration import count_rounds_done, iterate_trials, restore_trial
from ..results.run_directory import to_file_name
from ..results.schema import Row
from ..utils.errors import FedshiftError, UsageError
from .policies import evaluate_model, inapplicable_policies, make_models
from .policy_tables import write_model


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """What came of it: ``rows`` of what is measured, and what a person should know, in sentences.

    ``notices``: of models that are left out; ``inapplicable``: of policies that mean nothing under some methods;
    ``failures``: of trials that are left out.
    """

    rows: list[Row] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    inapplicable: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


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
    """Make the models of ``policies.models`` for each trial that ``experiment`` left in ``directory``.

    ``training``, ``wanted``, ``rounds`` and ``inputs`` as there. ``data``: whose test data they are measured on;
    ``save``: where those of the first seed are written. A trial whose files are damaged or missing stops no other.
    Raises :class:`UsageError` where two clients' models would be one file, no policy gives any model, or the run was
    made with other settings.
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
            for model in make_models(trial, training, wanted, rounds=rounds, inputs=inputs, say=made.notices):
                count += 1
                if save and seed == experiment.seeds[0]:
                    write_model(save, model)
                if data:
                    made.rows.append(evaluate_model(trial, model, data.client(model.client)))
            if done < asked:
                made.notices.append(f"{method}, seed {seed}: {done} of {asked} rounds are done")
        except UsageError:
            raise
        except FedshiftError as error:
            made.failures.append(f"{method}, seed {seed}, is left out: {error}")
    made.inapplicable.extend(inapplicable_policies(plans.values(), wanted))
    if not (count or made.failures):
        raise UsageError(f"no policy gives a model: {'; '.join([*made.inapplicable, *made.notices])}")
    return made
