"""Every policy under every method and seed of a run: models made, measured and saved, trial by trial."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import FedshiftError, UsageError
from ..core.plan import Plan
from ..data.federation import Federation
from ..data.files.reading import Progress
from ..data.split import Split
from ..experiment import Experiment
from ..records import Row
from ..rundir import slug
from ..trained import in_turn, restored, rounds_done
from .policies import measured_on, models, senseless
from .tables import write_model


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """What came of it: ``rows`` of what is measured, and what a person should know, in sentences.

    ``notices``: of models that are left out; ``senseless``: of policies that mean nothing under some methods;
    ``failures``: of trials that are left out.
    """

    rows: list[Row] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    senseless: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def adapted(
    experiment: Experiment,
    directory: Path,
    training: Mapping[str, Split],
    wanted: Collection[str],
    *,
    data: Federation | None = None,
    rounds: int = 1,
    inputs: Split | None = None,
    save: Path | None = None,
    progress: Progress | None = None,
) -> Adapted:
    """Make the models of ``policies.models`` for each trial that ``experiment`` left in ``directory``.

    ``training``, ``wanted``, ``rounds`` and ``inputs`` as there. ``data``: whose test data they are measured on;
    ``save``: where those of the first seed are written. A trial whose files are damaged or missing stops no other.
    Raises :class:`UsageError` where two clients' models would be one file, no policy gives any model, or the run was
    made with other settings.
    """
    files = [slug(name) for name in training]
    for name, file in zip(training, files, strict=True):
        if save and files.count(file) > 1:
            raise UsageError(f"client {name!r} and another would share the file {file}.safetensors: rename one")
    made = Adapted()
    plans: dict[str, Plan] = {}
    count = 0
    trials, asked = [*in_turn(experiment)], experiment.settings.rounds
    for number, (method, seed) in enumerate(trials):
        if progress:
            progress(f"{method}, seed {seed}", number, len(trials))
        try:
            done = rounds_done(directory, method, seed)
            trial = restored(experiment, directory, method, seed)
            plans[method] = trial.plan
            for model in models(trial, training, wanted, rounds=rounds, inputs=inputs, say=made.notices):
                count += 1
                if save and seed == experiment.seeds[0]:
                    write_model(save, model)
                if data:
                    made.rows.append(measured_on(trial, model, data.client(model.client)))
            if done < asked:
                made.notices.append(f"{method}, seed {seed}: {done} of {asked} rounds are done")
        except UsageError:
            raise
        except FedshiftError as error:
            made.failures.append(f"{method}, seed {seed}, is left out: {error}")
    made.senseless.extend(senseless(plans.values(), wanted))
    if not (count or made.failures):
        raise UsageError(f"no policy gives a model: {'; '.join([*made.senseless, *made.notices])}")
    return made
