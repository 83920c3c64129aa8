"""A method, a model and settings made into the plan of one trial: the same on every machine that makes it."""

from __future__ import annotations

from torch import Tensor

from ..core.method import Method
from ..core.plan import Plan, forward
from ..core.preparation import prepare
from ..models._factory import ModelFactory, make_network
from ..utils.errors import UsageError
from ..utils.random_streams import torch_stream
from .settings import Settings


def make_plan(
    method: Method,
    model: ModelFactory,
    settings: Settings,
    seed: int,
    *,
    sample: Tensor,
    classes: int,
    labels: Tensor,
    clients: int,
) -> Plan:
    """The plan of ``method`` under ``seed``.

    ``sample``: inputs ``[1, ...]`` of one sample, on the device that trains; only its shape matters. ``labels``: how
    many training samples of each class there are in all, int64 ``[classes]``. ``clients``: how many train. Raises
    :class:`UsageError` where method, model, settings and samples do not fit.
    """
    with torch_stream(seed, "init"):
        network = make_network(model, tuple(sample.shape[1:]), classes).to(sample.device)
    with torch_stream(seed, "surgery"):
        plan = prepare(
            method,
            network,
            work=settings.work,
            optimizer=settings.optimizer,
            loss=settings.loss.resolve(labels),
            precision=settings.precision,
            sample=sample,
            rounds=settings.rounds,
            clients=clients,
            seed=seed,
        )
    gives = tuple(forward(plan, plan.initial, sample.to(plan.dtype)).shape[1:])
    if gives != (classes,):
        raise UsageError(
            f"the model's outputs for a sample have shape {gives}, but the data have {classes} classes: make "
            f"it give ({classes},), one score a class"
        )
    return plan
