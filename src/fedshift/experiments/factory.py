"""Experiments made from settings: the one place where names become data, models, methods and other objects."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config.expressions import EMBEDDED
from ..config.seeds import parse_seeds
from ..config.spec import AUTO, CompareSpec, RunSpec, Spec, TrialSpec
from ..core.loss import LOSSES
from ..core.method import Method
from ..core.optimizer import OPTIMIZERS, Optimizer, as_optimizer
from ..core.schedule import SCHEDULES
from ..core.work import AMOUNTS, Work
from ..data.augmentation import AUGMENTATIONS
from ..data.federation import Federation, encode_targets
from ..data.partition import match_names
from ..data.preparation import Normalization
from ..data.source import Progress
from ..data.sources import data_root, load_source, prepare_clients, write_assignment
from ..methods import METHODS
from ..models import MODELS, LibraryModel, ModelFactory, NetworksOfInputs
from ..nn.adapters import ADAPTERS
from ..nn.several_inputs import Inputs, name_inputs
from ..tasks import CLASSIFICATION, Segmentation, Task
from ..utils.errors import Ref, UsageError
from ..utils.words import Information
from .experiment import Experiment
from .initial_weights import as_initial_weights
from .loggers import parse_loggers
from .settings import Settings
from .written_settings import write_settings

SAVED = re.compile(r"""(\bsaved\(\s*(?:path\s*=\s*)?)(['"])(.+?)\2""")
"""The path in a split such as ``saved(path='split.csv')``."""


def resolve_model(name: Any, shape: tuple[int, ...], task: Task = CLASSIFICATION, inputs: Inputs = ()) -> ModelFactory:
    """Return the function of the network ``name``, or ``name``; ``auto`` depends on a sample's shape and the task.

    With several ``inputs``, its networks divide rows into them.
    """
    if inputs and isinstance(name, str) and name == AUTO:
        raise UsageError(
            f"{{}}: no network of fedshift takes the inputs {name_inputs(inputs)}: give a function "
            "(sample_shape, classes) -> nn.Module whose network has parameters of these names (docs/data.md)",
            Ref(model=AUTO),
        )
    made = MODELS.parse(name_model(name, shape, task))
    return NetworksOfInputs(made, inputs) if inputs else made


def name_model(name: Any, shape: tuple[int, ...], task: Task = CLASSIFICATION) -> Any:
    """Return the network's name, with ``auto`` resolved."""
    if not isinstance(name, str) or name != AUTO:
        return name
    if isinstance(task, Segmentation):
        return "unet-small"
    return {2: "resnet-1d", 3: "small-cnn"}.get(len(shape), "abide-mlp")


def fit_model(spec: Spec, data: Federation) -> tuple[ModelFactory, Federation]:
    """Return the function of the network in ``spec`` for ``data``, and these scaled as its pretrained weights need.

    Only images have a scale that depends on the network, with a notice, and only where the settings name none.
    """
    model = resolve_model(spec.model, data.sample_shape, data.task, data.inputs)
    return model, data if spec.normalize else _scale_for(model, data)


def _scale_for(model: ModelFactory, data: Federation) -> Federation:
    pixels = all(each.dtype == torch.uint8 for client in data.clients for each in client.splits.values())
    if not isinstance(model, LibraryModel) or not pixels or len(data.sample_shape) != 3:
        return data
    if (scale := model.find_scale(data.sample_shape[0])) is None:
        return data
    scaling = Normalization(mean=scale[0], std=scale[1], source=f"what {model} was trained with")
    return replace(data.normalize(scaling), notices=(*data.notices, Information(f"scaling of inputs: {scaling}")))


def make_optimizer(spec: Spec, given: Collection[str] = ()) -> Optimizer:
    """Return the local optimizer of ``spec``, an expression with learning rate and schedule, or an object.

    Raises :class:`UsageError` if it has another learning rate or schedule than ``spec``; an object may have others than
    those that are not ``given``.
    """
    schedule, text = SCHEDULES.parse(spec.schedule, rounds=spec.rounds), isinstance(spec.optimizer, str)
    parse = OPTIMIZERS.parse if text else as_optimizer
    made = parse(spec.optimizer, lr=spec.lr, schedule=schedule)
    for name, value in (("lr", spec.lr), ("schedule", schedule)):
        if (text or name in given) and getattr(made, name) != value:
            raise UsageError(
                f"{name} and optimizer={made}: {name}={value} differs from the optimizer's: set {name} only in the "
                f"optimizer, or let what makes it take {name}"
            ).about(name, "optimizer")
    return made


def make_methods(spec: RunSpec | CompareSpec) -> tuple[Method, ...]:
    """Return the methods that ``spec`` gives."""
    methods = METHODS.parse_all(spec.methods if isinstance(spec, CompareSpec) else spec.method)
    if isinstance(spec, RunSpec) and len(methods) != 1:
        raise UsageError(f"run takes one method, not {spec.method!r}: use `fedshift compare --methods` for several")
    return methods


def name_reference(spec: RunSpec | CompareSpec, methods: Sequence[Method]) -> str:
    """Return the name of the one of ``methods`` with which alone ``spec`` compares the others; empty: all pairs.

    Raises :class:`UsageError` if it is none of several methods.
    """
    if not isinstance(spec, CompareSpec) or spec.compare_with is None:
        return ""
    try:
        name = METHODS.parse(spec.compare_with).name
    except UsageError as error:
        raise error.about("compare_with") from None
    if len(methods) == 1 or name not in [method.name for method in methods]:
        known = ", ".join(method.label for method in methods)
        raise UsageError("{}: give one of several methods; here are {}", Ref(compare_with=spec.compare_with), known)
    return name


def make_settings(spec: Spec, names: tuple[str, ...]) -> Settings:
    """Return the settings in ``spec``; ``names``: all clients, which patterns of newcomers are matched against."""
    shared = {field.name: getattr(spec, field.name) for field in fields(TrialSpec)}
    share, amounts = spec.participation, {name: getattr(spec, name) for name in AMOUNTS}
    if isinstance(share, float) and share > 1 and not share % 1:
        shared["participation"] = int(share)
    if all(value is None for value in amounts.values()):
        amounts["epochs"] = 1
    return Settings(
        **shared,
        work=Work(batch_size=spec.batch_size or None, **amounts),
        optimizer=make_optimizer(spec),
        loss=None if spec.loss == "auto" else LOSSES.parse(spec.loss),
        weights=as_initial_weights(spec.weights, skip_classifier=spec.weights_skip_classifier),
        adapter=ADAPTERS.parse(spec.adapter),
        augment=AUGMENTATIONS.parse(spec.augment),
        newcomers=_match_newcomers(spec.newcomers, names),
        moments=tuple(dict.fromkeys(name.strip() for name in spec.moments.split(","))),
    )


def _match_newcomers(given: str | tuple[str, ...] | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the clients that ``given`` names, a text with patterns or exact names."""
    try:
        return match_names(given, names) if isinstance(given, str) else given or ()
    except UsageError as error:
        error.about("newcomers")
        raise


S = TypeVar("S", bound=Spec)


def anchor_paths(spec: S, began: Path | None = None) -> S:
    """Return ``spec`` with absolute paths, so that a run does not depend on the directory it is started in.

    ``began``: base directory of relative paths; None: the current one.
    """
    began, changes = began or Path.cwd(), dict[str, Any]()
    if isinstance(spec.data, str) and spec.data not in EMBEDDED:
        if (began / spec.data).exists():
            changes["data"] = str(began / spec.data)
        elif (began / data_root(spec)).exists():
            changes["root"] = str(began / data_root(spec))
    if isinstance(spec.weights, str):
        changes["weights"] = str(began / spec.weights)
    if spec.split:
        changes["split"] = SAVED.sub(lambda found: f"{found[1]}{found[2]}{began / found[3]}{found[2]}", spec.split)
    return replace(spec, **changes)


def make_experiment(spec: RunSpec | CompareSpec, progress: Progress | None = None) -> Experiment:
    """Return the experiment that ``spec`` describes.

    Raises :class:`UsageError` naming the setting that does not fit.
    """
    spec = anchor_paths(spec)
    methods, log = make_methods(spec), parse_loggers(spec.log)
    if not (isinstance(spec.model, str) and spec.model == AUTO):
        MODELS.parse(spec.model)  # refused before data are read
    ADAPTERS.parse(spec.adapter)
    source = load_source(spec.data, spec, progress)
    model, data = fit_model(spec, prepare_clients(source, spec))
    settings = make_settings(spec, data.names)
    return Experiment(
        methods=methods,
        data=encode_targets(data, settings.newcomers),
        model=model,
        settings=settings,
        seeds=parse_seeds(spec.seeds),
        config=write_settings(spec, settings.optimizer),
        files={"split.csv": write_assignment(source, spec)} if spec.split else {},
        log=log,
        compare_with=name_reference(spec, methods),
        margin=getattr(spec, "margin", None),
    )
