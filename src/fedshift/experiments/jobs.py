"""Which trials of an experiment run side by side, each in a worker process, with the same bits as one after another.

A trial that computes on one thread leaves other processors idle, and a trial of the pool engine gives the same bits in
its own process. Such trials run side by side, with their usual engine and number of threads. Trials on GPUs are spread
over those that are alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from ..engines.auto import EngineChoice, count_steps, estimate_seconds
from ..engines.engine import measure_activations
from ..engines.stacked import count_lanes
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
CONTEXT = 1e9
"""Bytes of a GPU's memory, and at least as many of the host's, that a worker on it uses before its trial begins."""
SHARING = 4
"""Maximum number of trials on one GPU with ``auto``: they take turns there, so that more only wait."""


def choose_jobs(
    runs: Sequence[TrialRun], trials: Mapping[str, Trial], jobs: Jobs
) -> tuple[dict[int, EngineChoice], int]:
    """Return the unfinished trials to run side by side, by number with their engines, and how many at a time.

    There are none if it would not help. ``runs``: all trials. ``trials``: one of each method, by name, which
    determines engine and cost. ``jobs``: maximum number of trials at a time, as the user wrote it.
    """
    settings, threads = next(iter(trials.values())).settings, torch.get_num_threads()
    devices = list_devices(settings.device)
    most = max(available_processors(), len(devices)) if jobs == "auto" else jobs
    if most < 2 or os.name != "posix" or settings.engine == "ray":
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
        most = int(min(most, *(_count_fitting(trials[run.method], devices) for run, _ in pending)))
        pooled = {n: choice for n, choice in found.items() if choice.engine == "pool" and settings.engine == "auto"}
        alone = {n: choice for n, choice in found.items() if choice.engine != "pool"}
        alone = {n: choice for n, choice in alone.items() if devices or (choice.threads or threads) == 1}
        clients = max(trial.participants for trial in trials.values())
        found = alone | (pooled if len(alone) + len(pooled) >= min(available_processors(), clients) else {})
    most = min(most, len(found))
    return (found, most) if most > 1 else ({}, 1)


def _count_fitting(trial: Trial, devices: Mapping[str, float]) -> float:
    """Return how many trials like this one fit in half of the free memory, of the host and of ``devices``."""
    worker = WORKER + (CONTEXT if devices else 0)
    fitting = available_memory() / 2 / (worker + COPIES * nbytes(trial.plan.initial))
    if not devices:
        return fitting
    need = _measure_need(trial)
    return min(fitting, sum(max(1, min(SHARING, free / 2 // need)) for free in devices.values()))


def _measure_need(trial: Trial) -> float:
    """Return about how many bytes of its device's memory a trial needs."""
    plan, data = trial.plan, trial.train
    batch, samples = (
        count_steps(plan, data)[1],
        [part for each in trial.measured.clients for part in each.splits.values()],
    )
    lane = COPIES * nbytes(plan.initial) + measure_activations(plan, data) * batch
    return (
        CONTEXT
        + sum(len(part) * part.nbytes_each for part in samples)
        + lane * count_lanes(plan, data, trial.participants)
    )


def list_devices(device: str) -> dict[str, float]:
    """Return the devices on which trials of ``device`` may run, each with its bytes of free memory, most first.

    There are none for the CPU. ``cuda`` stands for all CUDA devices like the current one, since trials may round
    differently on others. Free memory that is unknown is 0.
    """
    place, cuda = torch.device(device), torch.cuda
    if place.type != "cuda":
        return {} if place.type == "cpu" else {device: 0.0}

    def describe(number: int) -> tuple[object, ...]:
        facts = cuda.get_device_properties(number)
        return facts.name, facts.total_memory, facts.multi_processor_count

    alike = describe(cuda.current_device())
    numbers = [number for number in range(cuda.device_count()) if describe(number) == alike]
    numbers = numbers if place.index is None else [place.index]
    free = {f"cuda:{number}": float(cuda.mem_get_info(number)[0]) for number in numbers}
    return dict(sorted(free.items(), key=lambda item: -item[1]))
