# mypy: disable-error-code="assignment"
# Arguments accept more than the inherited settings store, which mypy rejects in a subclass.
"""The arguments of :func:`fedshift.compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..config.spec import CompareSpec, Spec
from ..core.loss import Loss
from ..core.method import Method
from ..core.optimizer import Optimizer
from ..core.schedule import Schedule
from ..data.augmentation import Augmentation
from ..models import ModelFactory
from ..tasks import Metric, Task
from .callbacks import Callback

MethodLike: TypeAlias = str | Method | Callable[[], Method]
"""An expression such as ``"fedbn+fedprox(mu=0.1)"``, a method, or a function that makes one."""

MetricLike: TypeAlias = str | Metric | Callable[[Tensor, Tensor], Any]
"""A name, a metric on request, or a function of outputs and targets."""


@dataclass(frozen=True, kw_only=True)
class CompareArguments(CompareSpec):
    """Arguments of :func:`compare`: the settings of the command line, some with wider types in Python, and a few more.

    The types are for editors and type checkers; ``config/spec.py`` documents what is allowed and what it
    means.
    """

    methods: MethodLike | Sequence[MethodLike] = field(kw_only=False)
    data: Any = field()
    model: str | ModelFactory = Spec.model
    seeds: int | str | Sequence[int] = Spec.seeds
    batch_size: int | None = Spec.batch_size
    optimizer: str | Optimizer | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] = Spec.optimizer
    schedule: str | Schedule | Callable[[int], float] | Callable[..., LRScheduler] = Spec.schedule
    loss: str | Loss | type[nn.Module] | Callable[[Tensor, Tensor], Tensor] = Spec.loss
    weights: str | Path | Mapping[str, Tensor] | None = Spec.weights
    augment: str | Augmentation | None = Spec.augment
    metric: MetricLike = Spec.metric
    metrics: MetricLike | Sequence[MetricLike] | None = Spec.metrics
    compare_with: MethodLike | None = None
    margin: float | None = None
    task: str | Task | type[Task] | None = Spec.task
    newcomers: str | Sequence[str] | None = Spec.newcomers
    domains: str | Sequence[str] | None = Spec.domains
    moments: str | Sequence[str] = Spec.moments
    root: str | Path | None = Spec.root
    device: str | torch.device = Spec.device

    out: str | Path | None = None
    """Run directory to keep; None: a temporary one, deleted with the result."""

    resume: bool | str | Path = False
    """Continue the run in ``out``, or in this directory."""

    jobs: int | Literal["auto"] = "auto"
    """Maximum number of trials (one method with one seed each) that run side by side, in processes; results are the
    same bit for bit. ``auto``: one per processor, for trials that leave processors idle, if that saves time."""

    progress: bool = False
    """Show the progress like the command line: a bar and a table in a terminal and in a notebook (with ipywidgets),
    elsewhere a line for each evaluated round."""

    callbacks: Callback | Callable[..., object] | Sequence[Callback | Callable[..., object]] = ()
    """Your own callbacks, one or several: a :class:`fedshift.Callback`, a subclass, or a function of the trial and its
    round, called at the end of each. They can log, save files in ``trial.folder``, and stop a trial."""

    stop: Event | None = None
    """Event that ends the run after the round in progress once it is set."""
