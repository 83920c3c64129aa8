"""A run directory's experiment, made again from its settings, and its trials as they were left."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from .base.errors import UsageError, unknown
from .build import experiment_of
from .checkpoint import load_checkpoint
from .config import CompareSpec, RunSpec, read_settings
from .data.files.reading import Progress
from .experiment import BEST, CHECKPOINT, Experiment
from .rundir import trial_folder
from .trial import Trial


def spec_in(directory: Path) -> RunSpec | CompareSpec:
    """The settings of the run in ``directory``; :class:`UsageError` where there is none that can be made again."""
    if not (directory / "study.json").is_file():
        inner = next((path.parent for path in sorted(directory.glob("*/study.json"))), None)
        hint = f", such as {inner}" if inner else ""
        raise UsageError(f"{directory} holds no run: give a directory that `fedshift run` or `compare` wrote{hint}")
    known = [*(field.name for field in fields(RunSpec)), "methods"]
    values = read_settings(directory / "config.toml", known)
    if not values.get("data"):
        raise UsageError(
            f"{directory} does not say on which data it was run, as after `fedshift serve` and runs from Python: what "
            "clients keep is needed here; give a directory that `fedshift run` or `compare` wrote"
        )
    return CompareSpec(**values) if "methods" in values else RunSpec(**values)


def experiment_in(directory: Path, progress: Progress | None = None) -> tuple[RunSpec | CompareSpec, Experiment]:
    """The settings and the experiment of the run in ``directory``; its trials can be restored, and need no engine."""
    spec = spec_in(directory)
    experiment = experiment_of(spec, progress)
    return spec, replace(experiment, settings=replace(experiment.settings, engine="sequential"))


def restored(experiment: Experiment, directory: Path, name: str, seed: int) -> Trial:
    """The trial of method ``name`` as ``directory`` has it: after its last round, or the best with ``select="best"``.

    Raises :class:`UsageError` for an unknown method or other settings, and :class:`FedshiftError` where the run has not
    got that far or its files are damaged.
    """
    for method in experiment.methods:
        if method.name == name:
            trial = Trial(method, experiment.model, experiment.data, experiment.settings, seed)
            folder = trial_folder(directory, name, seed)
            kept = BEST if experiment.settings.select == "best" else CHECKPOINT
            trial.restore(*load_checkpoint(folder / kept), folder)
            return trial
    raise unknown("method", name, [method.name for method in experiment.methods])
