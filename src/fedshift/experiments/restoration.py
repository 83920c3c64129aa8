"""A run directory's experiment, made again from its settings, and its trials as they were left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ..config.expressions import split_expressions
from ..config.spec import CompareSpec, RunSpec, read_settings
from ..data.files.read_options import Progress
from ..results.checkpoint import load_checkpoint, load_facts
from ..results.run_directory import trial_folder
from ..utils.errors import UsageError, unknown_name
from .experiment import BEST, CHECKPOINT, Experiment
from .factory import make_experiment
from .factory import parse_methods as parsed
from .settings import Settings
from .trial import Trial


def load_spec(directory: Path) -> RunSpec | CompareSpec:
    """The settings of the run in ``directory``; :class:`UsageError` where there is none that can be made again."""
    if not (directory / "study.json").is_file():
        inner = next((path.parent for path in sorted(directory.glob("*/study.json"))), None)
        hint = f", such as {inner}" if inner else ""
        raise UsageError(f"{directory} holds no run: give a directory that `fedshift run` or `compare` wrote{hint}")
    settings = directory / "config.toml"
    if not settings.is_file():
        raise UsageError(f"{settings} is missing, which says what was run: restore the file from a copy")
    values = read_settings(settings, [*(field.name for field in fields(RunSpec)), "methods"])
    if not values.get("data"):
        raise UsageError(
            f"{directory} does not say on which data it was run, as after `fedshift serve` and runs from Python: what "
            "clients keep is needed here; give a directory that `fedshift run` or `compare` wrote, or in Python use "
            "adapt() and features() of the Comparison"
        )
    return CompareSpec(**values) if "methods" in values else RunSpec(**values)


def resolve_device(spec: RunSpec | CompareSpec, asked: str | None = None) -> tuple[str, list[str]]:
    """The device that is ``asked`` for, else the run's, or cpu with a sentence on that where it is not to be had.

    Raises :class:`UsageError` where the device that is asked for cannot be used here.
    """
    try:
        return Settings(device=asked or spec.device).device, []
    except UsageError:
        if asked:
            raise
        return "cpu", [f"the run was made on {spec.device}, which cannot be used here: computed on cpu (--device)"]


def load_experiment(
    directory: Path, progress: Progress | None = None, device: str | None = None
) -> tuple[RunSpec | CompareSpec, Experiment]:
    """The settings and the experiment of the run in ``directory``; its trials can be restored, and need no engine.

    ``device``: where they compute; see :func:`resolve_device`.
    """
    spec = load_spec(directory)
    return spec, select_trials(make_experiment(replace(spec, device=resolve_device(spec, device)[0]), progress))


def select_trials(
    experiment: Experiment, methods: str | Sequence[str] | None = None, seeds: int | Sequence[int] | None = None
) -> Experiment:
    """``experiment`` with some of its ``methods`` and ``seeds`` alone, for trials that are restored and need no engine.

    ``methods``: names, patterns such as ``"fed*"``, or expressions as the run was given, a text with commas; None: all.
    ``seeds``: how many, the first ones, or which; None: all. Raises :class:`UsageError` for one that it has not.
    """
    names = [method.name for method in experiment.methods]
    asked = names if methods is None else [methods] if isinstance(methods, str) and methods in names else methods
    texts = split_expressions("methods", asked) if isinstance(asked, str) else asked
    found = {name for text in texts for name in _match_methods(text.strip(), names)}
    if not found:
        raise unknown_name("method", "", names)
    chosen = experiment.seeds[:seeds] if isinstance(seeds, int) else experiment.seeds if seeds is None else tuple(seeds)
    if not chosen or (isinstance(seeds, int) and not 1 <= seeds <= len(experiment.seeds)):
        raise UsageError(f"seeds={seeds}: the run has {len(experiment.seeds)}; give a number from 1 to that")
    for seed in chosen:
        if seed not in experiment.seeds:
            raise UsageError(f"no seed {seed} here: there are {', '.join(map(str, experiment.seeds))}")
    return replace(
        experiment,
        methods=tuple(method for method in experiment.methods if method.name in found),
        seeds=chosen,
        settings=replace(experiment.settings, engine="sequential"),
    )


def _match_methods(text: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that ``text`` says or fits, or that the method has which it makes."""
    if found := [name for name in names if name == text or fnmatchcase(name, text)]:
        return found
    try:
        (made,) = parsed(text)
    except ValueError:  # it makes none, or several
        made = None
    if made is None or made.name not in names:
        raise unknown_name("method", text, names)
    return [made.name]


def count_rounds_done(directory: Path, name: str, seed: int) -> int:
    """How many rounds a trial in ``directory`` has done; :class:`FedshiftError` where it left no checkpoint."""
    return int(load_facts(trial_folder(directory, name, seed) / CHECKPOINT)["round"])


def restore_trial(experiment: Experiment, directory: Path, name: str, seed: int) -> Trial:
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
    raise unknown_name("method", name, [method.name for method in experiment.methods])


def iterate_trials(experiment: Experiment) -> Iterator[tuple[str, int]]:
    """Method and seed of every trial, method by method."""
    return ((method.name, seed) for method in experiment.methods for seed in experiment.seeds)
