"""A person's settings made into an experiment: the one place where names become data, models and methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ..config.expressions import expressions, resolve
from ..config.spec import CompareSpec, RunSpec, Spec
from ..core.loss import parse_loss
from ..core.method import Method
from ..core.optimizer import SGD, AdamW, Cosine, Exponential, Optimizer, Schedule, StepDecay
from ..core.work import Work
from ..data.augmentation import parse_augmentation
from ..data.files.read_options import Progress
from ..data.partition import match_names
from ..data.sources import load_source, prepare_clients, write_assignment
from ..methods.agc import agc
from ..models import ModelFactory
from ..utils.errors import UsageError, unknown_name
from .experiment import Experiment
from .settings import Settings


def parse_methods(text: str) -> tuple[Method, ...]:
    """The methods of a comma-separated list of expressions."""
    made = expressions("method", text, partial(resolve, "methods"))
    for value in made:
        if not isinstance(value, Method):
            raise UsageError(f"method {text!r} made a {type(value).__name__}, not a Method: return fedshift.Method")
    return tuple(made)


def resolve_model(name: str, shape: tuple[int, ...]) -> ModelFactory:
    """The function that makes networks by this name; ``auto`` goes by the ``shape`` of a sample."""
    if name == "auto":
        name = "small-cnn" if len(shape) == 3 else "abide-mlp"
    return resolve("models", name)


def _make_schedule(spec: Spec) -> Schedule:
    known: dict[str, Callable[..., Schedule]] = {
        "constant": Schedule,
        "cosine": partial(Cosine, rounds=spec.rounds),
        "step": StepDecay,
        "exponential": Exponential,
    }

    def lookup(name: str) -> Callable[..., Schedule]:
        if name not in known:
            raise unknown_name("schedule", name, known)
        return known[name]

    schedules = expressions("schedule", spec.schedule, lookup)
    if len(schedules) != 1:
        raise UsageError(f"schedule {spec.schedule!r}: give one, not {len(schedules)}")
    return schedules[0]  # type: ignore[no-any-return]


def _make_optimizer(spec: Spec) -> Optimizer:
    common: dict[str, Any] = {
        "lr": spec.lr, "weight_decay": spec.weight_decay, "schedule": _make_schedule(spec), "keep": spec.keep_optimizer,
    }  # fmt: skip
    if spec.optimizer == "sgd":
        return SGD(momentum=spec.momentum, nesterov=spec.nesterov, **common)
    if spec.momentum or spec.nesterov:
        raise UsageError("momentum and nesterov belong to SGD: leave them out with --optimizer adamw")
    return AdamW(**common)


def make_methods(spec: RunSpec | CompareSpec) -> tuple[Method, ...]:
    """The methods that ``spec`` names, with adaptive gradient clipping where it asks for that."""
    chosen = parse_methods(spec.methods if isinstance(spec, CompareSpec) else spec.method)
    if spec.agc is not None:
        chosen = tuple(agc(method, clip=spec.agc, classifier=not spec.agc_skip_classifier) for method in chosen)
    if isinstance(spec, RunSpec) and len(chosen) != 1:
        raise UsageError(f"run takes one method, not {spec.method!r}: use `fedshift compare --methods` for several")
    return chosen


def make_settings(spec: Spec, names: tuple[str, ...]) -> Settings:
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
        optimizer=_make_optimizer(spec),
        participation=share if share is None or share < 1 else int(share),
        evaluate_every=spec.evaluate_every,
        moments=moments_of(spec.moments),
        select=spec.select,
        newcomers=match_names(spec.newcomers, names) if spec.newcomers else (),
        unseen=spec.unseen,
        engine=spec.engine,
        workers=spec.workers,
        precision=spec.precision,
        device=spec.device,
        loss=parse_loss(spec.loss),
        augment=parse_augmentation(spec.augment) if spec.augment else None,
        metric=spec.metric,
        target_metric=spec.target_metric,
    )


def moments_of(asked: str | Sequence[str]) -> tuple[str, ...]:
    """The moments of a round that ``asked`` names, a text with commas or a sequence, each once."""
    return tuple(dict.fromkeys(name.strip() for name in (asked.split(",") if isinstance(asked, str) else asked)))


def list_seeds(spec: Spec) -> tuple[int, ...]:
    """The seeds that ``spec`` asks for."""
    return tuple(range(spec.first_seed, spec.first_seed + spec.seeds))


def make_experiment(spec: RunSpec | CompareSpec, progress: Progress | None = None) -> Experiment:
    """The experiment that ``spec`` describes; :class:`UsageError` naming the setting where something does not fit."""
    chosen = make_methods(spec)
    source = load_source(spec.data, spec, progress).fit_images(spec.image_size)
    data = prepare_clients(source, spec)
    return Experiment(
        methods=chosen,
        data=data,
        model=resolve_model(spec.model, data.sample_shape),
        settings=make_settings(spec, data.names),
        seeds=list_seeds(spec),
        config=asdict(spec),
        files={"split.csv": write_assignment(source, spec)} if spec.split else {},
    )
