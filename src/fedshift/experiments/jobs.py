"""Which trials of an experiment run side by side, each in a worker process, with the same bits as one after another.

A trial that computes on one thread leaves other processors idle, and a trial of the pool engine gives the same bits in
its own process. Such trials run side by side, with their usual engine and number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from ..engines.auto import EngineChoice, estimate_seconds
from ..results.trial_records import CHECKPOINT, load_facts
from ..utils.processors import available_memory, available_processors
from ..utils.state import nbytes
from .trial import BEGUN, Trial
from .trial_run import TrialRun, count_rounds_left

Jobs = int | Literal["auto"]
"""Maximum number of trials that run at a time; ``auto``: as many as leave no processor idle."""
WORTH = 10.0
"""Estimated seconds of all trials below which starting workers costs more time than it saves."""
WORKER = 5e8
"""Bytes of memory that a worker uses before its trial begins."""
COPIES = 10
"""Maximum copies of the network in a trial: initial, shared, trained, gradients, float64 sums, checkpoint."""


def choose_jobs(
    runs: Sequence[TrialRun], trials: Mapping[str, Trial], jobs: Jobs
) -> tuple[dict[int, EngineChoice], int]:
    """Return the unfinished trials to run side by side, by number with their engines, and how many at a time.

    There are none if it would not help. ``runs``: all trials. ``trials``: one of each method, by name, which
    determines engine and cost. ``jobs``: maximum number of trials at a time, as the user wrote it.
    """
    most = available_processors() if jobs == "auto" else jobs
    settings, threads = next(iter(trials.values())).settings, torch.get_num_threads()
    if most < 2 or os.name != "posix" or settings.engine == "ray" or (jobs == "auto" and settings.device != "cpu"):
        return {}, 1
    pending, seconds = list[tuple[TrialRun, EngineChoice | None]](), 0.0
    for run in runs:
        if left := count_rounds_left(run.folder, settings.rounds):
            checkpoint = run.folder / CHECKPOINT
            engine = load_facts(checkpoint)["engine"] if settings.engine == "auto" and checkpoint.exists() else None
            kept = EngineChoice(engine=engine[0], threads=engine[1], reason=BEGUN) if engine else None
            pending.append((run, kept))
            trial = trials[run.method]
            seconds += estimate_seconds(trial.plan, trial.train, clients=trial.participants, rounds=left)
    if len(pending) < 2 or (jobs == "auto" and seconds < WORTH):
        return {}, 1
    found = {run.number: kept or trials[run.method].engine_choice for run, kept in pending}
    if jobs == "auto":
        most = int(min(most, *(_count_fitting(trials[run.method]) for run, _ in pending)))
        pooled = {n: choice for n, choice in found.items() if choice.engine == "pool" and settings.engine == "auto"}
        alone = {n: choice for n, choice in found.items() if choice.engine != "pool"}
        alone = {n: choice for n, choice in alone.items() if (choice.threads or threads) == 1}
        clients = max(trial.participants for trial in trials.values())
        found = alone | (pooled if len(alone) + len(pooled) >= min(available_processors(), clients) else {})
    most = min(most, len(found))
    return (found, most) if most > 1 else ({}, 1)


def _count_fitting(trial: Trial) -> float:
    """Return how many trials like this one fit in half of the free memory."""
    return available_memory() / 2 / (WORKER + COPIES * nbytes(trial.plan.initial))
