# mypy: disable-error-code="assignment"
# Arguments accept Python values besides the text of the inherited settings, which mypy rejects in a subclass.
"""The arguments of :func:`fedshift.compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ..config.spec import CompareSpec, Spec
from ..core.loss import Loss
from ..core.method import Method
from ..core.optimizer import Optimizer, Schedule
from ..data.augmentation import Augmentation
from ..models import ModelFactory
from ..tasks import Task
from .observer import Observer

MethodLike: TypeAlias = str | Method | Callable[[], Method]
"""An expression such as ``"fedbn+fedprox(mu=0.1)"``, a method, or a function that makes one."""


@dataclass(frozen=True, kw_only=True)
class CompareArguments(CompareSpec):
    """Arguments of :func:`compare`: the command-line settings, some also as Python values, and the ones below."""

    methods: MethodLike | Sequence[MethodLike] = field(kw_only=False)
    """Methods to compare, as expressions (``"fedavg, fedbn+fedprox(mu=0.1)"``), values (``fedshift.fedbn()``) or
    functions that make one, several in a list; with the same seed, they share initial weights and the sample order."""

    data: Any = field()
    """Clients: the name of a benchmark, your own directory or table (string or path), a
    :class:`~fedshift.Federation`, a dictionary of clients as for :func:`fedshift.federation`, pandas frames or
    HuggingFace datasets by client, or a single one with ``client_column``."""

    model: str | ModelFactory = Spec.model
    """Name of a network (``auto`` depends on the samples' shape), or a function ``(sample_shape, classes)`` that makes
    an ``nn.Module``."""

    seeds: int | str | Sequence[int] = Spec.seeds
    """Number of seeds (0, 1, ...), or the seeds themselves: ``[3, 4, 5]``, or the text ``"3..5"``."""

    batch_size: int | None = Spec.batch_size
    """Samples in a batch; None or 0: all of a client's samples."""

    optimizer: str | Optimizer | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] = Spec.optimizer
    """Local optimizer: ``"sgd"`` or ``"adamw"``; its value, for example ``SGD(lr=0.01, momentum=0.9)``; or
    ``torch.optim.SGD``, ``Adam`` or ``AdamW``, as a class, a ``functools.partial`` with arguments, or an instance."""

    schedule: str | Schedule = Spec.schedule
    """Schedule of the learning rate over rounds, an expression such as ``"cosine(floor=0.1)"`` or its value."""

    loss: str | Loss | type[nn.Module] | Callable[[Tensor, Tensor], Tensor] = Spec.loss
    """Training loss: an expression such as ``"focal(gamma=2.0, weights='balanced')"``, its value, a loss of
    ``torch.nn`` with its arguments, or a function of logits ``[B, K]`` and labels ``[B]``."""

    weights: str | Path | Mapping[str, Tensor] | None = Spec.weights
    """Initial weights of every network, in place of random ones: a state dictionary, or a file of one,
    ``.safetensors`` or as ``torch.save`` writes it."""

    augment: str | Augmentation | None = Spec.augment
    """Augmentation of training images: an expression such as ``"flip(), rotate(degrees=30)"``, its value, or a function
    of images ``[B, C, H, W]`` in [0, 1] and a NumPy generator."""

    task: str | Task | type[Task] | None = Spec.task
    """Prediction task: an expression such as ``"regression(standardize=False)"``, its value, or your own subclass of
    :class:`fedshift.tasks.Task`; None: the data's, or inferred from the labels."""

    newcomers: str | Sequence[str] | None = Spec.newcomers
    """Clients that never take part in training, a list of names or a pattern such as ``"usps-*"``."""

    domains: str | Sequence[str] | None = Spec.domains
    """Clients to use, in the order of the tables; None: all."""

    moments: str | Sequence[str] = Spec.moments
    """Moments of an evaluated round at which clients' models are measured: ``"loaded"``, just after aggregation, or
    ``"loaded,trained"``, just after local work as well."""

    root: str | Path | None = Spec.root
    """Directory with the files of benchmarks; None: the directory in FEDSHIFT_DATA, or ``data``."""

    device: str | torch.device = Spec.device
    """Torch device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``."""

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

    observer: Observer | None = None
    """Callbacks for progress. If trials run side by side (``jobs``), ``turn`` tells which trial the next events are
    from."""

    stop: Event | None = None
    """Event that ends the run after the round in progress once it is set."""
