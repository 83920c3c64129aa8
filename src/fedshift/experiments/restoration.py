"""Experiments rebuilt from the settings in a run directory, and their trials restored from checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..config.expressions import split_expressions, tidy, trust_only
from ..config.given_settings import select_settings
from ..config.settings_file import FILE, read_run_settings
from ..config.spec import CompareSpec, RunSpec
from ..core.method import Method
from ..data.files.read_options import Progress
from ..methods import METHODS
from ..results.checkpoint import load_checkpoint
from ..results.run_directory import trial_folder, was_served
from ..results.schema import MethodSummary, RunSummary
from ..results.summary import holds_run, read_chosen_statistics, read_facts
from ..results.trial_records import BEST, CHECKPOINT, load_facts
from ..utils.errors import Ref, UsageError, unknown_name
from .experiment import Experiment
from .factory import make_experiment
from .settings import Settings
from .trial import Trial
from .written_settings import OF_OPTIMIZER

AT_SITE = "`fedshift join ... --export DIRECTORY` writes each site's model there"
"""Advice for models that a coordinator does not have."""


def load_spec(
    directory: Path, run_data: Path | None = None, *, needs_data: bool = True, code: Collection[str] = ()
) -> RunSpec | CompareSpec:
    """Return the settings of the run in ``directory``.

    Args:
        directory: run directory.
        run_data: current place of its data; None: unchanged, or moved together with the directory.
        needs_data: refuse a run that does not record its data, or was across machines.
        code: the user's functions that may be called; if any, they are also searched for where the run was begun.

    Raises:
        UsageError: the run cannot be rebuilt.
        FedshiftError: its settings are damaged.

    """
    if needs_data and was_served(directory):
        raise UsageError(
            f"{directory} is a run across machines, and what is needed here is at its sites: data, or what clients "
            "keep. Export its model (`fedshift export`), or give a directory that `fedshift run` or `compare` wrote"
        )
    if not holds_run(directory):
        inner = next((path.parent for path in sorted(directory.glob("*/study.json"))), None)
        hint = f", such as {inner}" if inner else ""
        raise UsageError(f"{directory} holds no run: give a directory that `fedshift run` or `compare` wrote{hint}")
    settings = read_run_settings(directory)
    if code:
        settings.add_code()
    allowed = [*(field.name for field in fields(RunSpec)), "methods"]
    values = select_settings(settings.find_paths({} if run_data else RUN_DATA), directory / FILE, allowed)
    if run_data:
        values[settings.data_setting] = str(run_data)
    if needs_data and not values.get("data"):
        raise UsageError(
            f"{directory} does not say on which data it was run: give one that `fedshift run` or `compare` wrote"
        )
    return CompareSpec(**values) if "methods" in values else RunSpec(**values)


def read_python_settings(directory: Path, given: Mapping[str, Any], code: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of the run in ``directory`` for Python, replaced by those ``given``.

    ``code``: the user's functions that may be called (see :func:`load_spec`).

    Raises :class:`UsageError` if a setting is neither recorded in the directory nor given, and :class:`FedshiftError`
    if its settings are damaged.
    """
    settings = read_run_settings(directory)
    if code:
        settings.add_code()
    found = settings.find_paths({} if "data" in given or "root" in given else {"data": "data", "root": "root"})
    allowed = [field.name for kind in (RunSpec, CompareSpec) for field in fields(kind)]
    kept = {name: value for name, value in found.items() if value is not None}
    values = select_settings(kept, directory / FILE, allowed, given)
    values["methods"] = values.pop("method", None) or values.get("methods")
    values["device"] = resolve_device(RunSpec(device=values.get("device", RunSpec.device)))[0]
    replaced = set(OF_OPTIMIZER if "optimizer" in given else ())
    values = {name: value for name, value in values.items() if name not in replaced} | dict(given)
    for name in ("methods", "data"):
        if values.get(name) is None:
            raise UsageError(f"{directory} does not say which {name} it was run with: give {name}=...")
    return values


RUN_DATA = dict.fromkeys(("data", "root"), "run_data")
"""Setting for the current place of a run's data, by the setting that it replaces."""


def resolve_device(spec: RunSpec | CompareSpec, asked: str | None = None) -> tuple[str, list[str]]:
    """Return the ``asked`` device, else the run's, or cpu and a notice if the run's is unavailable.

    Raises :class:`UsageError` if the requested device cannot be used here.
    """
    try:
        return Settings(device=asked or spec.device).device, []
    except UsageError:
        if asked:
            raise
        return "cpu", [f"the run was made on {spec.device}, which cannot be used here: computed on cpu (--device)"]


def load_experiment(
    directory: Path, progress: Progress | None = None, device: str | None = None, run_data: Path | None = None,
    code: Collection[str] = (),
) -> tuple[RunSpec | CompareSpec, Experiment]:  # fmt: skip
    """Return the settings and the experiment of the run in ``directory``, whose trials can be restored.

    Args:
        directory: run directory.
        progress: callback for progress.
        device: device to compute on; see :func:`resolve_device`.
        run_data: current place of the run's data; see :func:`load_spec`.
        code: the user's functions, ``package.module:function``, that the settings may call; no others are called.

    Raises:
        UsageError: the run cannot be rebuilt, or the data are not the run's data.
        FedshiftError: files of the run are damaged.

    """
    spec = load_spec(directory, run_data, code=code)
    with trust_only(code, directory / FILE):
        experiment = make_experiment(replace(spec, device=resolve_device(spec, device)[0]), progress)
    kept, now = read_facts(directory)["digests"], experiment.data.digests
    changed = [what for what in {**kept, **now} if kept.get(what) != now.get(what)]
    if changed:
        where = spec.data if Path(spec.data).exists() else f"{spec.data}, under {spec.root}"
        times = ", copied with the times of their files (cp -a)" if experiment.data.lazy else ""
        raise UsageError(
            f"{where} does not hold the samples on which {directory} was run: {changed[0]} were "
            f"{kept.get(changed[0], 'none')}, and are {now.get(changed[0], 'none')}: give those ({{}}){times}",
            Ref(run_data="PATH"),
        )
    return spec, select_trials(experiment.keep_labels(directory))


def select_trials(
    experiment: Experiment, methods: str | Sequence[str] | None = None, seeds: int | Sequence[int] | None = None
) -> Experiment:
    """Return ``experiment`` with a subset of its methods and seeds, for restored trials that need no engine.

    Args:
        experiment: experiment to select from.
        methods: labels or names, or patterns of these such as ``"fed*"``; None: all.
        seeds: how many of the first seeds, or a list of seeds; None: all.

    Raises:
        UsageError: the experiment has no such method or seed.

    """
    known = {method.label: method for method in experiment.methods}
    whole = [methods] if isinstance(methods, str) and _match_exactly(methods, known) else methods
    texts = known if whole is None else split_expressions("methods", whole) if isinstance(whole, str) else whole
    found = {label for text in texts for label in match_methods(text, known)}
    if not found:
        raise unknown_name("method", "", known)
    chosen = experiment.seeds[:seeds] if isinstance(seeds, int) else experiment.seeds if seeds is None else tuple(seeds)
    if not chosen or (isinstance(seeds, int) and not 1 <= seeds <= len(experiment.seeds)):
        raise UsageError(f"{{}}: the run has {len(experiment.seeds)}; give a number from 1 to that", Ref(seeds=seeds))
    for seed in chosen:
        if seed not in experiment.seeds:
            raise UsageError(f"no seed {seed} here: there are {', '.join(map(str, experiment.seeds))}")
    return replace(
        experiment,
        methods=tuple(method for method in experiment.methods if method.label in found),
        seeds=chosen,
        settings=replace(experiment.settings, engine="sequential"),
    )


def match_methods(text: str, known: Mapping[str, Method | MethodSummary]) -> list[str]:
    """Return the labels of the methods that are called ``text``, or match it as a pattern or an expression.

    ``known``: methods by label. Raises :class:`UsageError` if there is none.
    """
    if found := _match_exactly(text, known):
        return found
    names = {label: (label, method.name) for label, method in known.items()}
    matching = [label for label, several in names.items() if any(fnmatchcase(name, text.strip()) for name in several)]
    if not matching:
        try:
            made = METHODS.parse(text)
        except ValueError:  # no method, or several
            made = None
        matching = [label for label, method in known.items() if made is not None and method.name == made.name]
    if not matching:
        raise unknown_name("method", text.strip(), sorted({name for several in names.values() for name in several}))
    return matching


def _match_exactly(text: str, known: Mapping[str, Method | MethodSummary]) -> list[str]:
    """Return a list of the label equal to ``text``, else of the method with this name or with all these choices."""
    written = text.strip(), tidy(text)
    found = [each for each in dict.fromkeys(written) if each in known]
    return found or [label for label, each in known.items() if {each.name, each.text} & set(written)]


def find_method(text: str, run: Experiment | RunSummary) -> str:
    """Return the label of the one method of ``run`` that ``text`` names, as typed or canonically.

    Raises :class:`UsageError` if there is none, or several.
    """
    known = run.methods if isinstance(run, RunSummary) else {each.label: each for each in run.methods}
    found = match_methods(text, known)
    if len(found) > 1:
        raise UsageError(f"method {text!r} matches {', '.join(found)}: name one")
    return found[0]


def count_rounds_done(directory: Path, name: str, seed: int) -> int:
    """Return the number of completed rounds of a trial in ``directory``.

    Raises :class:`FedshiftError` without a checkpoint.
    """
    return int(load_facts(trial_folder(directory, name, seed) / CHECKPOINT)["round"])


def restore_trial(experiment: Experiment, directory: Path, name: str, seed: int) -> Trial:
    """Return the trial of a method in ``directory`` after its last round, or the best with ``select="best"``.

    Its models have the BatchNorm statistics of the reported values. ``name``: the method's label or name. Raises
    :class:`UsageError` for an unknown method or different settings, and :class:`FedshiftError` if the run has not
    reached that round or its files are damaged.
    """
    experiment = experiment.keep_labels(directory)
    label = find_method(name, experiment)
    (method,) = (each for each in experiment.methods if each.label == label)
    trial = Trial(method, experiment.model, experiment.data, experiment.settings, seed)
    folder = trial_folder(directory, label, seed)
    kept = BEST if experiment.settings.select == "best" else CHECKPOINT
    trial.restore(*load_checkpoint(folder / kept), folder)
    trial.statistics = read_chosen_statistics(directory)
    return trial


def iterate_trials(experiment: Experiment) -> Iterator[tuple[str, int]]:
    """Return an iterator over method and seed of every trial, method by method."""
    return ((method.label, seed) for method in experiment.methods for seed in experiment.seeds)
