"""Descriptions of what an experiment trains, with every ``auto`` and default resolved, for its summary and its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch

from ..core.method import Method
from ..core.optimizer import Optimizer, TorchOptimizer
from ..core.plan import Plan
from ..core.schedule import CustomSchedule, Schedule
from ..core.work import Work
from ..data.federation import Federation
from ..data.preparation import Normalization
from ..models import ModelFactory, describe_factory
from .settings import Settings

LISTED = 12
"""Maximum number of evaluated rounds to list one by one."""


def describe_training(
    plans: Mapping[str, Plan], data: Federation, model: ModelFactory, settings: Settings, *, remote: bool
) -> dict[str, str]:
    """Return descriptions of what is trained, by name.

    ``plans``: by method. ``remote``: whether the samples are elsewhere.
    """
    members = len([name for name in data.names if name not in settings.newcomers])
    drawn = len(settings.draw_participants(0, 1, tuple(map(str, range(members)))))
    samples = sum(len(client.train) for client in data.clients)
    chosen = "in turn" if isinstance(settings.participation, str) else "drawn at random"
    threads = torch.get_num_threads()
    return {
        "data": f"{data.name}: {_count(len(data.clients), 'client')}, {_count(samples, 'training sample')}, "
        f"{data.outputs}, {_describe_samples(data)}",
        "network": describe_factory(model),
        "trained parameters": _by_method(plans, lambda plan: f"{count_parameters(plan):,}"),
        "scaling of inputs": "at the sites" if remote else describe_scaling(data),
        "training loss": _by_method(plans, lambda plan: str(plan.loss)),
        "optimizer": _by_method(plans, lambda plan: describe_optimizer(plan.optimizer)),
        "local work in a round": _by_method(plans, lambda plan: describe_work(plan.work)),
        "weight of a client": _by_method(plans, lambda plan: describe_weighting(plan.method)),
        "clients in a round": f"all {members}" if drawn == members else f"{drawn} of {members}, {chosen}",
        "evaluated after rounds": describe_rounds(settings),
        "computed on": f"{settings.device}, {settings.precision}, {_count(threads, 'thread')} of torch",
    }


def _describe_samples(data: Federation) -> str:
    if data.inputs:
        return f"samples of the inputs {', '.join(map(str, data.inputs))}"
    return f"samples of shape {' x '.join(map(str, data.sample_shape))}"


def count_parameters(plan: Plan) -> int:
    """Return the number of trained parameters of the network."""
    return sum(plan.initial[name].numel() for name in plan.trained)


def describe_scaling(data: Federation) -> str:
    """Return a description of how the values of samples become a network's inputs."""
    scalings = [client.train.normalization for client in data.clients if client.train.dtype == torch.uint8]
    pixels = [scaling for scaling in scalings if isinstance(scaling, Normalization)]
    found = list(dict.fromkeys(map(str, pixels)))
    if not found:
        by_columns = any(not isinstance(client.train.normalization, Normalization) for client in data.clients)
        return "by columns, see the settings missing and scaling" if by_columns else "as given"
    return found[0] if len(found) == 1 else f"of each client: {pixels[0].source}"


def describe_optimizer(optimizer: Optimizer) -> str:
    """Return an optimizer's name, its learning rate, and its settings other than the defaults."""
    if isinstance(optimizer, TorchOptimizer):
        followed = [] if optimizer.schedule == Schedule() else [f"schedule {optimizer.schedule}"]
        return ", ".join([optimizer.text, f"learning rate {optimizer.lr:g}", *followed])
    changed = []
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name == "schedule" and value != default:
            changed.append(f"schedule {_describe_fields(value)}")
        elif field.name != "lr" and value != default:
            changed.append(f"{field.name.replace('_', ' ')} {value}")
    return ", ".join([type(optimizer).__name__, f"learning rate {optimizer.lr:g}", *changed])


def describe_work(work: Work) -> str:
    """Return the local work of a client between two exchanges."""
    samples = f"{work.batch_size} samples" if work.batch_size else "all samples"
    if work.epochs is not None:
        return f"{_count(work.epochs, 'epoch')}, batches of {samples}"
    if work.steps is not None:
        return f"{_count(work.steps, 'step')}, batches of {samples}"
    count = _count(work.batches or 0, "batch", "batches")
    return f"{count} of {samples}" if work.batches == 1 else f"up to {count} of {samples}, ending with the pass"


def describe_weighting(method: Method) -> str:
    """Return how much a client counts in the average of uploads; ``method``: the plan's method."""
    if method.pooled:
        return "none, since all data are in one place"
    said = {"samples": "its training samples", "used": "the samples that it used in the round", "uniform": "1"}
    aggregator = method.aggregator
    return said[method.weighting] + (f", where {type(aggregator).__name__} weighs clients" if aggregator else "")


def describe_rounds(settings: Settings) -> str:
    """Return the rounds after which models are measured."""
    rounds = [number for number in range(1, settings.rounds + 1) if settings.is_evaluated(number)]
    if len(rounds) <= LISTED:
        return f"{', '.join(map(str, rounds))} of {settings.rounds}"
    return f"every {rounds[0]} of {settings.rounds} and the last" if rounds[0] > 1 else f"each of {settings.rounds}"


def _describe_fields(value: Any) -> str:
    if isinstance(value, CustomSchedule):
        return str(value)
    pairs = (f"{field.name} {getattr(value, field.name)}" for field in fields(value))
    return f"{type(value).__name__.lower()} ({', '.join(pairs)})"


def _by_method(plans: Mapping[str, Plan], describe: Callable[[Plan], str]) -> str:
    """Return the description of all plans by ``describe``, by method where they differ."""
    found = {name: describe(plan) for name, plan in plans.items()}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "; ".join(f"{name}: {text}" for name, text in found.items())


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"
