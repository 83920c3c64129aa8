"""A person's settings made into an experiment: the one place where names become data, models and methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from .base.errors import UsageError, unknown
from .config import CompareSpec, RunSpec, Spec
from .core.method import Method
from .core.optimizer import SGD, AdamW, Cosine, Exponential, Optimizer, Schedule, StepDecay
from .core.work import Work
from .data.federation import Federation
from .data.folder import read_folder
from .experiment import Experiment
from .methods.agc import agc
from .names import expressions, resolve
from .settings import Settings

EMBEDDED: Mapping[str, str] = {"digits": "fedshift.data.digits:digits"}
"""Federations that come with fedshift, and the functions that make them, imported when asked for."""


def methods(text: str) -> tuple[Method, ...]:
    """The methods of a comma-separated list of expressions."""
    made = expressions("method", text, partial(resolve, "methods"))
    for value in made:
        if not isinstance(value, Method):
            raise UsageError(f"method {text!r} made a {type(value).__name__}, not a Method: return fedshift.Method")
    return tuple(made)


def federation_of(spec: Spec) -> Federation:
    """The clients that ``spec`` asks for, checked."""
    domains = spec.domains.replace(" ", "").split(",") if spec.domains else None
    data: Federation
    if spec.data in EMBEDDED:
        data = resolve("data", EMBEDDED[spec.data])()
        data = replace(data, classes=spec.classes or data.classes)
        data = data.only(domains) if domains else data
    elif Path(spec.data).is_dir():
        data = read_folder(Path(spec.data), domains, spec.classes)
    else:
        raise UsageError(
            f"data {spec.data!r}: there is no directory {Path(spec.data).resolve()}, and embedded are only "
            f"{', '.join(EMBEDDED)}; give one of them, or the directory of your .npz files"
        )
    data = data.fitted(spec.image_size).check(allow_single_class=spec.allow_single_class)
    data = data.limit(spec.samples) if spec.samples else data
    data = data.hold_out(spec.validation) if spec.validation else data
    return data.check(allow_single_class=spec.allow_single_class)


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


def experiment_of(spec: RunSpec | CompareSpec) -> Experiment:
    """The experiment that ``spec`` describes; :class:`UsageError` naming the setting where something does not fit."""
    share = spec.participation
    if share is not None and share > 1 and share != int(share):
        raise UsageError(f"participation={share:g}: give a whole number of clients, or a fraction below 1")
    chosen = methods(spec.methods if isinstance(spec, CompareSpec) else spec.method)
    if spec.agc is not None:
        chosen = tuple(agc(method, clip=spec.agc, classifier=not spec.agc_skip_classifier) for method in chosen)
    if isinstance(spec, RunSpec) and len(chosen) != 1:
        raise UsageError(f"run takes one method, not {spec.method!r}: use `fedshift compare --methods` for several")
    settings = Settings(
        rounds=spec.rounds,
        work=Work(
            batch_size=spec.batch_size or None,
            epochs=1 if spec.epochs is None and spec.batches is None else spec.epochs,
            batches=spec.batches,
        ),
        optimizer=_optimizer(spec),
        participation=share if share is None or share < 1 else int(share),
        evaluate_every=spec.evaluate_every,
        select=spec.select,
        newcomers=tuple(spec.newcomers.replace(" ", "").split(",")) if spec.newcomers else (),
        unseen=spec.unseen,
        engine=spec.engine,
        device=spec.device,
    )
    return Experiment(
        methods=chosen,
        data=federation_of(spec),
        model=resolve("models", spec.model),
        settings=settings,
        seeds=tuple(range(spec.first_seed, spec.first_seed + spec.seeds)),
        config=asdict(spec),
    )
