"""A person's settings made into an experiment: the one place where names become data, models and methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from .base.errors import UsageError, unknown
from .config import CompareSpec, RunSpec, Spec
from .core.loss import parse_loss
from .core.method import Method
from .core.optimizer import SGD, AdamW, Cosine, Exponential, Optimizer, Schedule, StepDecay
from .core.work import Work
from .data.augment import parse
from .data.files.reading import Progress
from .data.partition import matching
from .experiment import Experiment
from .methods.agc import agc
from .models._making import ModelFactory
from .names import expressions, resolve
from .settings import Settings
from .sources import assigned, source_of, split_of


def methods(text: str) -> tuple[Method, ...]:
    """The methods of a comma-separated list of expressions."""
    made = expressions("method", text, partial(resolve, "methods"))
    for value in made:
        if not isinstance(value, Method):
            raise UsageError(f"method {text!r} made a {type(value).__name__}, not a Method: return fedshift.Method")
    return tuple(made)


def model_of(name: str, shape: tuple[int, ...]) -> ModelFactory:
    """The function that makes networks by this name; ``auto`` goes by the ``shape`` of a sample."""
    if name == "auto":
        name = "small-cnn" if len(shape) == 3 else "abide-mlp"
    return resolve("models", name)


def _schedule(spec: Spec) -> Schedule:
    known: dict[str, Callable[..., Schedule]] = {
        "constant": Schedule,
        "cosine": partial(Cosine, rounds=spec.rounds),
        "step": StepDecay,
        "exponential": Exponential,
    }

    def lookup(name: str) -> Callable[..., Schedule]:
        if name not in known:
            raise unknown("schedule", name, known)
        return known[name]

    schedules = expressions("schedule", spec.schedule, lookup)
    if len(schedules) != 1:
        raise UsageError(f"schedule {spec.schedule!r}: give one, not {len(schedules)}")
    return schedules[0]  # type: ignore[no-any-return]


def _optimizer(spec: Spec) -> Optimizer:
    common: dict[str, Any] = {
        "lr": spec.lr, "weight_decay": spec.weight_decay, "schedule": _schedule(spec), "keep": spec.keep_optimizer,
    }  # fmt: skip
    if spec.optimizer == "sgd":
        return SGD(momentum=spec.momentum, nesterov=spec.nesterov, **common)
    if spec.momentum or spec.nesterov:
        raise UsageError("momentum and nesterov belong to SGD: leave them out with --optimizer adamw")
    return AdamW(**common)


def methods_of(spec: RunSpec | CompareSpec) -> tuple[Method, ...]:
    """The methods that ``spec`` names, with adaptive gradient clipping where it asks for that."""
    chosen = methods(spec.methods if isinstance(spec, CompareSpec) else spec.method)
    if spec.agc is not None:
        chosen = tuple(agc(method, clip=spec.agc, classifier=not spec.agc_skip_classifier) for method in chosen)
    if isinstance(spec, RunSpec) and len(chosen) != 1:
        raise UsageError(f"run takes one method, not {spec.method!r}: use `fedshift compare --methods` for several")
    return chosen


def settings_of(spec: Spec, names: tuple[str, ...]) -> Settings:
    """The settings in ``spec``; ``names``: all clients, among which newcomers are looked for."""
    share = spec.participation
    if share is not None and share > 1 and share != int(share):
        raise UsageError(f"participation={share:g}: give a whole number of clients, or a fraction below 1")
    return Settings(
        rounds=spec.rounds,
        work=Work(
            batch_size=spec.batch_size or None,
            epochs=1 if spec.epochs is None and spec.batches is None else spec.epochs,
            batches=spec.batches,
        ),
        optimizer=_optimizer(spec),
        participation=share if share is None or share < 1 else int(share),
        evaluate_every=spec.evaluate_every,
        moments=moments_of(spec.moments),
        select=spec.select,
        newcomers=matching(spec.newcomers, names) if spec.newcomers else (),
        unseen=spec.unseen,
        engine=spec.engine,
        workers=spec.workers,
        precision=spec.precision,
        device=spec.device,
        loss=parse_loss(spec.loss),
        augment=parse(spec.augment) if spec.augment else None,
        metric=spec.metric,
        reach=spec.reach,
    )


def moments_of(asked: str | Sequence[str]) -> tuple[str, ...]:
    """The moments of a round that ``asked`` names, a text with commas or a sequence, each once."""
    return tuple(dict.fromkeys(name.strip() for name in (asked.split(",") if isinstance(asked, str) else asked)))


def seeds_of(spec: Spec) -> tuple[int, ...]:
    """The seeds that ``spec`` asks for."""
    return tuple(range(spec.first_seed, spec.first_seed + spec.seeds))


def experiment_of(spec: RunSpec | CompareSpec, progress: Progress | None = None) -> Experiment:
    """The experiment that ``spec`` describes; :class:`UsageError` naming the setting where something does not fit."""
    chosen = methods_of(spec)
    source = source_of(spec.data, spec, progress).fitted(spec.image_size)
    data = split_of(source, spec)
    return Experiment(
        methods=chosen,
        data=data,
        model=model_of(spec.model, data.sample_shape),
        settings=settings_of(spec, data.names),
        seeds=seeds_of(spec),
        config=asdict(spec),
        files={"split.csv": assigned(source, spec)} if spec.split else {},
    )
