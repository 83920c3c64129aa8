"""Summary of a run directory and its records, written as the run starts and read by reports.

Reading requires neither torch nor data, so that a report can be made without them.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..config.settings_file import FILE
from ..utils.checked_json import checksum, read_checked
from ..utils.errors import FedshiftError, Ref, Sentence, UsageError
from ..utils.version import __version__, find_series, is_own_series
from ..utils.words import Information
from .cases import Cases, Picture, read_cases, read_pictures
from .disclosure import Disclosure
from .run_directory import TRIALS, RunDirectory, describe_environment, trial_folder, was_served
from .schema import MOVES, REESTIMATED, RUNNING, MethodSummary, Row, RunSummary, choose_statistics, rows_to_frame
from .trial_records import (
    CHECKPOINT,
    load_facts,
    read_crossed,
    read_lag,
    read_rounds,
    read_stop,
    require_recorded,
    stream_measurements,
)

STUDY, ENVIRONMENT, NOTICES, SAMPLES = "study.json", "environment.json", "notices.json", "samples.npz"
SESSIONS, OUTCOME = "sessions", "trained"
"""Entries of the environment and of the summary: the calls that trained, and their training so far."""
_IMAGES = "samples_checksum"


def write_summary(
    directory: RunDirectory,
    facts: Mapping[str, Any],
    images: Mapping[str, np.ndarray],
    sessions: Sequence[Mapping[str, str]] | None,
) -> None:
    """Write the facts about a run that are known before training.

    Args:
        directory: run directory.
        facts: fields of :class:`RunSummary`.
        images: some images of each client, uint8 ``[n, H, W, C]``.
        sessions: when and with which commands the run was begun and resumed; None: leave the environment unchanged.

    """
    packed = io.BytesIO()
    np.savez_compressed(packed, **{str(i): image for i, image in enumerate(images.values())})  # type: ignore[arg-type]
    directory.write(SAMPLES, packed.getvalue())
    if sessions is not None:
        directory.write_json(ENVIRONMENT, {**describe_environment(), SESSIONS: sessions})
    directory.write_json(STUDY, {**facts, "samples": list(images), _IMAGES: checksum(packed.getvalue())})


def write_outcome(directory: RunDirectory) -> None:
    """Add to the summary what was trained so far: when, how long, on which engines, with which versions.

    It also has the BatchNorm statistics of the reported values.
    """
    path = directory.path
    facts, machine = read_facts(path), read_environment(path)
    trials = _list_trials(path, facts)
    done = [read_rounds(trial.folder) for trial in trials]
    rounds: dict[str, list[Row]] = {name: [] for name in facts["methods"]}
    for trial, several in zip(trials, done, strict=True):
        rounds[trial.method] += several
    rows = [row for several in done for row in several]
    trained = {
        "started": machine[SESSIONS][0]["started"],
        "ended": max((row["ended"] for row in rows), default=None),
        "seconds": round(sum(row["elapsed"] for row in rows), 3),
        "engines": {name: list(dict.fromkeys(row["engine"] for row in several)) for name, several in rounds.items()},
        "commands": [session["command"] for session in machine[SESSIONS]],
        "versions": machine["packages"],
        "statistics": _choose_statistics(trials, done, facts, "")["statistics"],
    }
    directory.write_json(STUDY, {**facts, OUTCOME: trained})


def read_chosen_statistics(path: Path) -> str:
    """Return the BatchNorm statistics of the reported values of the run in ``path``, as :func:`write_outcome` did."""
    return str(read_facts(path).get(OUTCOME, {}).get("statistics", RUNNING))


def holds_run(path: Path) -> bool:
    """Return whether directory ``path`` contains a run that has begun, complete or not."""
    return (path / STUDY).is_file() or ((path / FILE).is_file() and (path / TRIALS).is_dir())


def holds_summary(path: Path) -> bool:
    """Return whether directory ``path`` contains the complete output of :func:`write_summary`."""
    try:
        _read_files(path)
    except FedshiftError:
        return False
    return True


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts that :func:`write_summary` wrote; raise :class:`FedshiftError` if they cannot be read."""
    return read_checked(path / STUDY, _written_again(path))


def read_environment(path: Path) -> dict[str, Any]:
    """Return versions, machine and sessions of the run in ``path``; raise FedshiftError if they cannot be read."""
    return read_checked(path / ENVIRONMENT, _written_again(path))


def require_series(path: Path) -> None:
    """Raise :class:`UsageError` if the run in ``path`` was begun with a version that differs by more than its patch."""
    try:
        then = str(read_environment(path)["packages"]["fedshift"])
    except FedshiftError:  # the resumed run reports that the file is lost
        return
    if not is_own_series(then):
        raise UsageError(
            f"{path} was begun with fedshift {then}, and this is {__version__}, which may compute other numbers: "
            f"go on with that one (pip install 'fedshift=={find_series(then)}.*'), or begin a new run elsewhere"
        )


def read_notices(path: Path) -> tuple[str, ...]:
    """Return the notices of the run in directory ``path``; raise :class:`FedshiftError` if they cannot be read.

    Those of runs before there were kinds of notices are plain text.
    """
    found = read_checked(path / NOTICES, _written_again(path))
    information = set(found.get("information", ()))
    return tuple(Information(text) if text in information else text for text in found["notices"])


def read_summary(path: Path) -> RunSummary:
    """Return the results so far of the run in directory ``path``.

    Raises :class:`UsageError` if there is none, and :class:`FedshiftError` naming a file that is damaged or missing.
    """
    if not holds_run(path):
        raise UsageError(f"{path} holds no run: give a directory that `fedshift run` or `compare` wrote")
    facts, machine, samples = _read_files(path)
    trials = _list_trials(path, facts)
    rounds = [_read_trial(trial.folder, facts["rounds"]) for trial in trials]
    chosen = facts.pop(OUTCOME, {}).get("statistics", "")  # of other outcomes, the records are more recent
    facts |= _choose_statistics(trials, rounds, facts, chosen)
    moved = ("round", "down", "up", "seconds", "elapsed", "ended", "engine")
    traffic = [
        {"method": trial.method, "seed": trial.seed, **{name: row[name] for name in moved}}
        for trial, done in zip(trials, rounds, strict=True)
        for row in done
    ]
    methods = {name: _read_method(method, path) for name, method in facts["methods"].items()}
    names = tuple(facts.get("class_names", ()))

    def read(method: str, seed: int, split: str = "test") -> Cases | None:
        return read_cases(trial_folder(path, method, seed), split, facts["statistics"])

    def draw(method: str, number: int) -> tuple[Picture, ...] | None:
        return read_pictures(trial_folder(path, method, facts["seeds"][0]), number, facts["statistics"])

    return RunSummary(
        **{**facts, "seeds": tuple(facts["seeds"]), "methods": methods, "samples": samples, "class_names": names},
        rows=rows_to_frame(
            row for trial, done in zip(trials, rounds, strict=True) for row in stream_measurements(trial.folder, done)
        ),
        crossed=_collect_rows(trials, read_crossed, "owner"),
        lag=_collect_rows(trials, lambda folder: (read_lag(folder) or {"rows": []})["rows"]),
        traffic=pd.DataFrame(traffic, columns=["method", "seed", *moved]),
        environment=machine,
        stopped={
            (trial.method, trial.seed): reason
            for trial, done in zip(trials, rounds, strict=True)
            if (reason := read_stop(trial.folder, len(done)))
        },
        notices=read_notices(path),
        read_cases=read,
        read_validation=lambda method, seed: read(method, seed, "validation"),
        read_pictures=draw,
        served=was_served(path),
    )


def _read_method(method: Mapping[str, Any], path: Path) -> MethodSummary:
    if not {"name", "leaves"} <= method.keys():
        raise FedshiftError(f"{path / STUDY} was written by another version of fedshift: {{}}", _written_again(path))
    leaves = tuple(Disclosure(**{**each, "shape": tuple(each["shape"])}) for each in method["leaves"])
    return MethodSummary(**{**method, "entries": tuple(method["entries"]), "leaves": leaves})


@dataclass(frozen=True, kw_only=True)
class _Trial:
    method: str
    seed: int
    folder: Path


def _list_trials(path: Path, facts: Mapping[str, Any]) -> list[_Trial]:
    return [
        _Trial(method=method, seed=seed, folder=trial_folder(path, method, seed))
        for method in facts["methods"]
        for seed in facts["seeds"]
    ]


def _choose_statistics(
    trials: Sequence[_Trial], rounds: Sequence[Sequence[Row]], facts: Mapping[str, Any], chosen: str
) -> dict[str, Any]:
    """Return the fields of :class:`RunSummary` about the choice of BatchNorm statistics.

    ``rounds``: the recorded rounds of each trial; ``chosen``: the choice on record, if any.
    """
    moves, unmeasured = [], []
    for trial, done in zip(trials, rounds, strict=True):
        ended = len(done) == facts["rounds"] or read_stop(trial.folder, len(done))
        found = read_lag(trial.folder, required=bool(ended) and chosen == REESTIMATED)
        moves += [{"method": trial.method, "seed": trial.seed, **move} for move in (found or {}).get("moves", ())]
        current = found and found["complete"] and (facts["select"] == "best" or found["round"] == len(done))
        unmeasured += [] if ended and current else [trial.method]
    frame, missing = pd.DataFrame(moves, columns=[*MOVES]), tuple(dict.fromkeys(unmeasured))
    setting = facts.get("statistics", RUNNING)
    statistics = choose_statistics(setting, frame, missing, facts["metric"])
    return {"statistics": statistics, "moves": frame, "unmeasured": missing}


def _read_trial(folder: Path, planned: int) -> list[Row]:
    """Return the recorded rounds of a trial; if it has not ended, at least the rounds up to its checkpoint."""
    saved: int | FedshiftError = 0
    if (folder / CHECKPOINT).exists():  # read first: an active run records a round before it saves it
        try:
            saved = load_facts(folder / CHECKPOINT)["round"]
        except FedshiftError as error:
            saved = error
    rounds = read_rounds(folder)
    if len(rounds) < planned:
        if isinstance(saved, FedshiftError):
            raise saved
        require_recorded(folder, rounds, saved)
    return rounds


def _collect_rows(trials: Sequence[_Trial], read: Callable[[Path], Iterable[Row]], *others: str) -> pd.DataFrame:
    """Return the rows that ``read`` finds of all trials, with the columns ``others`` in addition to the usual ones."""
    found = [{"method": trial.method, "seed": trial.seed, **row} for trial in trials for row in read(trial.folder)]
    return rows_to_frame(found).assign(**{name: [row[name] for row in found] for name in others})


def _read_files(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """Return the facts, the environment and the images of each client in directory ``path``."""
    fix = _written_again(path)
    facts, machine = read_facts(path), read_environment(path)
    expected, names = facts.pop(_IMAGES), facts.pop("samples")
    try:
        content = (path / SAMPLES).read_bytes()
        if checksum(content) != expected:
            raise ValueError("its checksum does not match")
        with np.load(io.BytesIO(content)) as packed:
            images = {name: packed[str(i)] for i, name in enumerate(names)}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        raise FedshiftError(f"{path / SAMPLES} {what}: restore it from a copy, or {{}}", fix) from error
    return facts, machine, images


def _written_again(path: Path) -> Sentence:
    return Sentence("have it written again (fedshift run or compare, {})", Ref(resume=path))
