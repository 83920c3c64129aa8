"""Experiments made from settings: the one place where names become data, models, methods and other objects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ..config.expressions import EMBEDDED
from ..config.seeds import parse_seeds
from ..config.spec import CompareSpec, RunSpec, SharedSpec, Spec, TrialSpec
from ..core.loss import LOSSES, Loss
from ..core.method import Method
from ..core.optimizer import OPTIMIZERS, SCHEDULES, Optimizer
from ..core.work import AMOUNTS, Work
from ..data.augmentation import AUGMENTATIONS, Augmentation
from ..data.federation import encode_targets
from ..data.files.read_options import Progress
from ..data.partition import match_names
from ..data.sources import data_root, load_source, prepare_clients, write_assignment
from ..methods import METHODS
from ..models import MODELS, ModelFactory
from ..tasks import CLASSIFICATION, Segmentation, Task
from ..utils.errors import UsageError
from .experiment import Experiment
from .initial_weights import InitialWeights, as_initial_weights
from .loggers import parse_loggers
from .settings import Settings

SAVED = re.compile(r"""(\bsaved\(\s*(?:path\s*=\s*)?)(['"])(.+?)\2""")
"""The path in a split such as ``saved(path='split.csv')``."""


@dataclass(frozen=True, kw_only=True)
class GivenObjects:
    """Objects that a program gives in place of settings of the same names; None: use the setting.

    Attributes:
        data: Any of :data:`fedshift.data.readers.FORMS`.
        newcomers: Exact names, not patterns.

    """

    methods: tuple[Method, ...] | None = None
    data: object = None
    model: ModelFactory | None = None
    loss: Loss | None = None
    optimizer: Optimizer | None = None
    augment: Augmentation | None = None
    newcomers: tuple[str, ...] | None = None
    weights: InitialWeights | None = None
    task: Task | None = None


def resolve_model(name: str, shape: tuple[int, ...], task: Task = CLASSIFICATION) -> ModelFactory:
    """Return the function that makes the network ``name``; ``auto`` depends on a sample's ``shape`` and the task."""
    return MODELS.parse(name_model(name, shape, task))


def name_model(name: str, shape: tuple[int, ...], task: Task = CLASSIFICATION) -> str:
    """Return the network's name, with ``auto`` resolved."""
    if name != "auto":
        return name
    if isinstance(task, Segmentation):
        return "unet-small"
    return "small-cnn" if len(shape) == 3 else "abide-mlp"


def make_optimizer(spec: Spec) -> Optimizer:
    """Return the local optimizer that ``spec`` names, with its learning rate and schedule."""
    schedule = SCHEDULES.parse(spec.schedule, rounds=spec.rounds)
    return OPTIMIZERS.parse(spec.optimizer, lr=spec.lr, schedule=schedule)


def make_methods(spec: RunSpec | CompareSpec, given: tuple[Method, ...] | None = None) -> tuple[Method, ...]:
    """Return the methods that ``spec`` names, or ``given``."""
    methods = given if given is not None else METHODS.parse_all(_method_text(spec))
    if isinstance(spec, RunSpec) and len(methods) != 1:
        raise UsageError(f"run takes one method, not {spec.method!r}: use `fedshift compare --methods` for several")
    return methods


def _method_text(spec: RunSpec | CompareSpec) -> str:
    return spec.methods if isinstance(spec, CompareSpec) else spec.method


def make_settings(spec: Spec, names: tuple[str, ...], given: GivenObjects | None = None) -> Settings:
    """Return the settings in ``spec``, or the objects ``given`` in their place.

    ``names``: all clients, to which patterns of newcomers are matched.
    """
    share, given = spec.participation, given or GivenObjects()
    return resolve_settings(
        spec,
        names,
        batch_size=spec.batch_size or None,
        optimizer=given.optimizer or make_optimizer(spec),
        loss=given.loss or spec.loss,
        weights=spec.weights if given.weights is None else given.weights,
        skip_classifier=spec.weights_skip_classifier,
        augment=given.augment or spec.augment,
        newcomers=spec.newcomers or () if given.newcomers is None else given.newcomers,
        moments=spec.moments,
        participation=int(share) if share and share > 1 and not share % 1 else share,
    )


def _match_newcomers(patterns: str, names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return match_names(patterns, names)
    except UsageError as error:
        error.about("newcomers")
        raise


def resolve_settings(
    spec: SharedSpec,
    names: tuple[str, ...],
    *,
    batch_size: int | None,
    optimizer: Optimizer,
    loss: str | Loss,
    augment: str | Augmentation | None,
    newcomers: str | Sequence[str],
    moments: str | Sequence[str],
    weights: str | Path | Mapping[str, Any] | InitialWeights | None = None,
    skip_classifier: bool = False,
    **changes: Any,
) -> Settings:
    """Return the settings in ``spec``, with the others converted to objects unless they already are.

    Args:
        spec: settings that need no resolving, and the amount of local work.
        names: all clients.
        batch_size: samples in a batch; None: all of a client's samples.
        optimizer: local optimizer.
        loss: training loss, or an expression; ``auto``: the task's.
        augment: augmentation of training images, or an expression.
        newcomers: names of the clients that never train, or comma-separated patterns.
        moments: moments at which models are measured, a sequence or a comma-separated string.
        weights: initial weights, a file or a state dictionary; None: random ones.
        skip_classifier: ignore the last layer of ``weights``.
        changes: values that replace those in ``spec``.

    """
    shared = {field.name: getattr(spec, field.name) for field in fields(TrialSpec)} | changes
    amounts = {name: getattr(spec, name) for name in AMOUNTS}
    if all(value is None for value in amounts.values()):
        amounts["epochs"] = 1
    moments = [name.strip() for name in moments.split(",")] if isinstance(moments, str) else moments
    return Settings(
        **shared,
        work=Work(batch_size=batch_size, **amounts),
        optimizer=optimizer,
        loss=None if loss == "auto" else LOSSES.parse(loss),
        weights=as_initial_weights(weights, skip_classifier=skip_classifier),
        augment=AUGMENTATIONS.parse(augment),
        newcomers=_match_newcomers(newcomers, names) if isinstance(newcomers, str) else tuple(newcomers),
        moments=tuple(dict.fromkeys(moments)),
    )


S = TypeVar("S", bound=Spec)


def anchor_paths(spec: S, began: Path | None = None) -> S:
    """Return ``spec`` with absolute paths, so that a run does not depend on the directory it is started in.

    ``began``: base directory of relative paths; None: the current one.
    """
    began, changes = began or Path.cwd(), dict[str, Any]()
    if spec.data not in EMBEDDED:
        if (began / spec.data).exists():
            changes["data"] = str(began / spec.data)
        elif (began / data_root(spec)).exists():
            changes["root"] = str(began / data_root(spec))
    if spec.weights:
        changes["weights"] = str(began / spec.weights)
    if spec.split:
        changes["split"] = SAVED.sub(lambda found: f"{found[1]}{found[2]}{began / found[3]}{found[2]}", spec.split)
    return replace(spec, **changes)


def make_experiment(
    spec: RunSpec | CompareSpec, progress: Progress | None = None, given: GivenObjects | None = None
) -> Experiment:
    """Return the experiment that ``spec`` describes, with the objects ``given`` in place of named ones.

    Raises :class:`UsageError` naming the setting that does not fit.
    """
    given, spec = given or GivenObjects(), anchor_paths(spec)
    methods, log = make_methods(spec, given.methods), parse_loggers(spec.log)
    source = load_source(spec.data if given.data is None else given.data, spec, progress, task=given.task)
    source = source.fit_images(spec.image_size)
    data = prepare_clients(source, spec)
    settings = make_settings(spec, data.names, given)
    return Experiment(
        methods=methods,
        data=encode_targets(data, settings.newcomers),
        model=given.model or resolve_model(spec.model, data.sample_shape, data.task),
        settings=settings,
        seeds=parse_seeds(spec.seeds),
        config=asdict(spec),
        files={"split.csv": write_assignment(source, spec)} if spec.split else {},
        log=log,
    )
