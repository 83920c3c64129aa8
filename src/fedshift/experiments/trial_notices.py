"""Notices for the user about a trial: what its settings amount to before it starts, and what it came to at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from ..analysis.privacy import describe_delta, describe_guarantee, describe_sample_guarantee, find_mechanism
from ..core.buffers import describe_buffers
from ..core.optimizer import SGD, Optimizer
from ..engines.half_precision import list_underflows
from ..engines.sequential import Sequential
from ..evaluation.policy import list_policies
from ..nn.adapters import list_constants
from ..tasks.segmentation import Segmentation
from ..utils.state import nbytes, pick
from ..utils.words import Information, join_choices, join_some
from .private_training import list_uncovered
from .trial import Trial

if TYPE_CHECKING:
    from .experiment import Experiment

LOW_RATE, MASK_RATES = 0.03, (0.03, 0.1, 0.3)
"""Rate of SGD without momentum below which a notice is given for segmentation, and rates to try (docs/tasks.md)."""
MAX_NAMED = 5
"""Maximum number of clients that a notice lists."""


def list_notices_before(experiment: Experiment, trial: Trial) -> Iterator[str]:
    """Yield the notices about a trial of ``experiment`` that starts."""
    plan = trial.plan
    if isinstance(trial.data.task, Segmentation):
        yield from _list_low_rates(plan.optimizer)
    if trial.settings.adapter:
        yield Information(f"{plan.method.label}: {describe_adapter(trial)}")
    yield from describe_buffers(plan)
    for bound in plan.rules:
        yield from bound.notices
    if mechanism := find_mechanism(trial.plan.method.rules, clients=False):
        sizes = {name: len(split) for name, split in trial.train.items()}
        yield from (f"{trial.plan.method.label}: {text}" for text in describe_delta(mechanism, sizes))
    elsewhere = any(rule.personalizes == "start" and not rule.buffers_alone for rule in plan.method.rules)
    if not elsewhere and plan.work.is_one_step(map(len, trial.train.values()), plan.smallest_batch):
        needs = filter(None, (rule.needs_several_steps for rule in plan.method.rules))
        yield from (f"{plan.method.label}: {why}; a round is one step here" for why in needs)
    if plan.autocast is torch.float16 and experiment.make_engine is None:
        yield from _list_underflows(trial)
    merged = trial.find_merged_batches()
    for who in [f"client {name!r}" for name in merged] if len(merged) <= MAX_NAMED else [f"{len(merged)} clients"]:
        yield Information(
            f"{who}: the last batch would hold one sample, over which batch normalization has no variance; it "
            "joins the batch before it"
        )
    asked = trial.plan.work.batches or 0
    short = {name: count for name, count in trial.count_batches().items() if count < asked}
    if short:
        yield (
            f"{trial.plan.method.label}: a pass has fewer than batches={asked} at {_list_batches(short)}, where a "
            "round ends with the pass and takes fewer steps. --steps takes the same number at each client, over as "
            "many passes as that needs"
        )
    if trial.plan.personalizes and trial.settings.unseen == "skip" and _may_lack_models(experiment):
        yield (
            f"{trial.plan.method.label} keeps models on its clients, and not all take part in every round: one that "
            f"never did has none and is not measured. --unseen {join_choices(list_policies())} gives it one"
        )


def _list_low_rates(optimizer: Optimizer) -> Iterator[str]:
    """Yield a notice if the learning rate of SGD is low for masks; momentum multiplies it by 1 / (1 - momentum)."""
    if isinstance(optimizer, SGD) and optimizer.lr < LOW_RATE * (1 - optimizer.momentum):
        low, usual, high = (f"{rate * (1 - optimizer.momentum):g}" for rate in MASK_RATES)
        yield (
            f"a learning rate of {optimizer.lr:g} is low for segmentation, whose masks may stay empty for many rounds: "
            f"set lr={usual}, or choose a rate on validation data (fedshift sweep --over lr={low},{usual},{high} "
            "--validation 0.2)"
        )


def _list_underflows(trial: Trial) -> Iterator[str]:
    """Yield a notice for each of the first clients of which float16 loses most of a gradient in the first step."""
    engine = Sequential(trial.plan, trial.train, trial.seed, augment=trial.settings.augment)
    for name in islice(trial.train, MAX_NAMED):
        if lost := list_underflows(trial.plan, engine.begin_step(name, trial.clients[name], trial.server)):
            yield (
                f"{trial.plan.method.label}: client {name!r}: float16 loses most of the gradient of {join_some(lost)} "
                "(values below 6e-8 are 0): scale the data, or compute in bfloat16 or float32"
            )


def describe_adapter(trial: Trial) -> str:
    """Return what adapters train, and a client's bytes in a round compared with the whole network's."""
    from ..report.formatting import format_bytes  # with it Matplotlib, for which each worker process would wait

    plan = trial.plan
    fixed = [tensor for _, tensor in list_constants(plan.module)]
    trained = sum(plan.initial[name].numel() for name in plan.trained)
    total, up = trained + sum(each.numel() for each in fixed), nbytes(pick(plan.initial, plan.sent))
    whole = up + sum(each.nbytes for each in fixed)
    return (
        f"{trial.settings.adapter} trains {trained:,} of {total:,} parameters; a client sends {format_bytes(up)} a "
        f"round, {format_bytes(whole)} without adapters"
    )


def list_notices_after(experiment: Experiment, trial: Trial, stopped: str) -> Iterator[str]:
    """Yield the notices about a trial of ``experiment`` that has ended; ``stopped``: why it ended early."""
    method, settings = trial.plan.method, trial.settings
    if stopped:
        round = f"round {trial.server.round} of {settings.rounds}"
        yield f"{method.label}, seed {trial.seed}: stopped after {round}: {stopped}"
    untrained = [name for name in _needing(experiment, trial.data.names) if not trial.clients.has_trained(name)]
    if untrained and trial.plan.personalizes:
        which = join_some(untrained, shown=MAX_NAMED)
        fate = (
            f"are not counted (--unseen {join_choices(list_policies())} gives them a model)"
            if settings.unseen == "skip"
            else f"are measured by the policy unseen={settings.unseen}"
            + (" where their sites can follow it" if experiment.make_engine else "")
        )
        yield f"{method.label}, seed {trial.seed}: clients that never took part {fate}: {which}"
    uncovered = list_uncovered(trial.plan, settings, trial.data, len(experiment.methods) * len(experiment.seeds))
    if mechanism := find_mechanism(method.rules, clients=True):
        drawn = trial.participants
        share = 1.0 if isinstance(settings.participation, str) else drawn / len(trial.clients)  # turns are known
        yield f"{method.label}: {describe_guarantee(mechanism, share, trial.server.round, uncovered)}"
    if mechanism := find_mechanism(method.rules, clients=False):
        yield f"{method.label}: {describe_sample_guarantee(mechanism, trial.count_uses(), uncovered)}"


def _needing(experiment: Experiment, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the ``names`` that the caller does not measure later."""
    return tuple(name for name in names if name not in experiment.measured_later)


def _may_lack_models(experiment: Experiment) -> bool:
    """Return whether a client that would need a notice may have no model."""
    settings = replace(experiment.settings, newcomers=_needing(experiment, experiment.settings.newcomers))
    return settings.skips_clients(_needing(experiment, experiment.data.names))


def _list_batches(batches: Mapping[str, int]) -> str:
    """Return the clients in ``batches`` with their numbers of batches, all clients only if there are few."""
    named = (f"{name!r} ({count})" for name, count in batches.items())
    return join_some(named, shown=MAX_NAMED, rest="more clients")
