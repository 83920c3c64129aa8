"""Predict the duration of a run before its first round, from a timed step of each method, and suggest shorter runs.

A prediction counts training and evaluation. It is right to a factor of about two on a machine that does nothing else.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..config.settings_file import COMMAND
from ..core.selection import Scope
from ..engines.auto import count_passes, count_steps, estimate_seconds, time_rounds
from ..utils.errors import Ref, as_flag
from ..utils.words import format_time
from .settings import Settings
from .trial import Trial

TOLD, LONG = 60.0, 600.0
"""Minimum seconds of a run whose duration is announced, and of one for which shorter runs are suggested."""
ROUGH = 4
"""Steps are timed if the run's operations suggest at least :data:`TOLD` divided by this."""
OVERHEAD = 0.02
"""Seconds of a round in addition to steps and evaluations, for example for its checkpoint."""
PASSES = 3
"""Forward passes that cost as much as a step."""
PART = 4
"""Part of the rounds, or of the samples, that a shorter run has."""
NAMED = 3
"""Number of shorter runs that are named."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds that a method takes for a round, and for an evaluation."""

    round: float
    evaluation: float


def predict_cost(trial: Trial) -> Cost:
    """Predict the seconds of a round and of an evaluation of ``trial`` from a timed step (cached)."""
    used, settings, clients = trial.inputs, trial.settings, trial.participants
    plan, sizes = used.plan, [len(split) for split in used.train.values()]
    steps, batch = count_steps(plan, used.train)
    timed = time_rounds(plan, used.train, clients=clients, rounds=1, workers=settings.workers, augment=settings.augment)
    seconds = min(timed.values())
    each = seconds / (clients * steps * batch)  # for a sample
    seconds *= 1 + count_passes(plan) * sum(sizes) / len(sizes) / (steps * batch)
    parts = [client.splits[name] for client in trial.measured.clients for name in trial.splits]
    personal = plan.personalizes * sum(map(len, parts))
    shared = (plan.method.scope.send == Scope().send) * sum(len(part) for part in {id(p): p for p in parts}.values())
    tuning = plan.method.finetune * seconds / clients * len(sizes)
    return Cost(round=seconds + OVERHEAD, evaluation=each / PASSES * max(personal + shared, 1) + tuning)


def predict_seconds(trials: Mapping[str, Trial], left: Sequence[tuple[str, int]]) -> tuple[float, float]:
    """Return the seconds of all trials one after another, and how many of these are of evaluations.

    ``left``: method and remaining rounds of each; both are 0 if the run is far shorter than :data:`TOLD`.
    """
    rough = 0.0
    for name, rounds in left:
        trial = trials[name]
        rough += rounds * OVERHEAD
        rough += estimate_seconds(trial.plan, trial.train, clients=trial.participants, rounds=rounds)
    if rough < TOLD / ROUGH:
        return 0.0, 0.0
    costs = {name: predict_cost(trials[name]) for name in dict(left)}
    training = sum(rounds * costs[name].round for name, rounds in left)
    looks = sum(_count_evaluations(trials[name].settings, rounds) * costs[name].evaluation for name, rounds in left)
    return training + looks, looks


def _count_evaluations(settings: Settings, left: int) -> int:
    """Count the evaluations in the last ``left`` rounds."""
    return sum(map(settings.is_evaluated, range(settings.rounds - left + 1, settings.rounds + 1)))


def describe_duration(
    trials: Mapping[str, Trial], left: Sequence[tuple[str, int]], seeds: int, *, at_once: int = 1, runs: int = 1
) -> Iterator[str]:
    """Yield what to say about the time of a run, and of shorter ones if it is long; nothing about a short run.

    ``left``: method and remaining rounds of each trial, ``seeds``: their number. ``at_once``: how many of them run side
    by side. ``runs``: number of such runs.
    """
    seconds, looks = predict_seconds(trials, left)
    seconds, looks = runs * seconds / at_once, runs * looks / at_once
    if seconds < TOLD:
        return
    many = f"{runs} runs take" if runs > 1 else "the run takes"
    yield f"{many} about {format_time(seconds)}, as a timed step of each method predicts"
    if seconds < LONG:
        return
    for setting, part in islice(_list_shorter(trials, seeds, looks / seconds), NAMED):
        yield f"about {format_time(part * seconds)} instead: {_write_command(setting)}"


def _list_shorter(trials: Mapping[str, Trial], seeds: int, evaluation: float) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield settings of shorter runs, with the part of the time that they take; ``evaluation``: part of evaluations."""
    trial = next(iter(trials.values()))
    settings, sizes = trial.settings, [len(split) for split in trial.train.values()]
    if seeds > 1:
        yield {"seeds": 1}, 1 / seeds
    if settings.rounds >= 2 * PART:
        yield {"rounds": math.ceil(settings.rounds / PART)}, 1 / PART
    if evaluation > 1 / PART and _count_evaluations(settings, settings.rounds) > 1:
        yield {"evaluate_every": settings.rounds}, 1 - evaluation
    if settings.work.steps is None and settings.work.batches is None and max(sizes) >= 2 * PART:
        most = math.ceil(max(sizes) / PART)
        part = sum(min(size, most) for size in sizes) / sum(sizes)
        yield {"samples": most}, evaluation + (1 - evaluation) * part


def _write_command(setting: dict[str, Any]) -> str:
    """Return the command of this run with a ``setting`` changed, in a new directory; from Python, only the setting."""
    words = shlex.split(COMMAND.get())
    if not words or "--resume" in words:
        return str(Ref(**setting))
    kept: list[str] = []
    flags = [as_flag(name) for name in ("out", *setting)]
    while words:
        flag = words.pop(0)
        if flag in flags:
            words = words[1:]
        elif flag.partition("=")[0] not in flags:
            kept.append(flag)
    return " ".join([shlex.join(kept), *(as_flag(name, value) for name, value in setting.items())])
