"""Training losses by name: cross-entropy and the focal loss, with weights of classes that all clients share.

Weights are part of the task, not of a client: those with a name come from the label counts of the whole federation
(:meth:`Loss.resolve`), the one fact that clients must share before they start.

Focal loss: Lin et al. 2017, arXiv:1708.02002, equation 5, over the softmax of all classes as in FLamby's baseline of
Fed-ISIC2019 (Ogier du Terrail et al. 2022, arXiv:2210.04620).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..config.expressions import expressions, resolve
from ..utils.errors import UsageError, unknown_name
from ..utils.user_code import describe_error, describe_function, identify_function
from .architecture import architecture

Counted = Literal["balanced", "inverse_frequency"]
"""Names of weights that :meth:`Loss.resolve` computes from label counts."""
Weights = tuple[float, ...] | Counted | None
"""One number a class, the name of weights from label counts, or None: every class counts the same."""

Own = TypeVar("Own", bound="Loss")


@dataclass(frozen=True, kw_only=True)
class Loss(ABC):
    """A training loss, called with logits ``[B, K]`` and labels ``[B]`` (int64); gives a number, in nats.

    It works under ``torch.func.grad`` and ``torch.vmap``. ``str`` gives the expression that :func:`parse_loss` reads.
    """

    name: ClassVar[str]
    weights: Weights = None

    def __post_init__(self) -> None:
        if self.weights is None or self.uses_counts:
            return
        if isinstance(self.weights, str):
            known = ", ".join(map(repr, get_args(Counted)))
            raise UsageError(
                f"{self.name}: weights={self.weights!r} is unknown: give {known} or a number for each class"
            )
        weights = tuple(float(weight) for weight in self.weights)
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise UsageError(f"{self.name}: weights={weights}: they must be 0 or more, and one of them above 0")
        object.__setattr__(self, "weights", weights)

    @property
    def uses_counts(self) -> bool:
        """Return whether the weights come from all clients' label counts."""
        return self.weights in get_args(Counted)

    @abstractmethod
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar."""

    def to(self: Own, device: torch.device) -> Own:
        """Return the loss with its tensors on ``device``."""
        return self

    def resolve(self: Own, counts: Tensor) -> Own:
        """Return the loss with its weights as numbers; ``counts`` ``[K]``: all clients' training samples by class.

        ``inverse_frequency`` weights are N / n_k, FLamby's for Fed-ISIC2019. ``balanced`` ones are these over the
        number of classes that occur (King and Zeng 2001; as scikit-learn's), so that the mean weight of a training
        sample is 1. A class without samples has weight 0. Raises :class:`UsageError` unless each class has one weight.
        """
        if self.weights is None:
            return self
        if not self.uses_counts:
            if len(self.weights) != len(counts):
                raise UsageError(
                    f"{self.name}: {len(self.weights)} weights for {len(counts)} classes: give a number for each class"
                )
            return self
        n_K = [int(count) for count in counts]
        parts = sum(count > 0 for count in n_K) if self.weights == "balanced" else 1
        return replace(self, weights=tuple(sum(n_K) / (parts * count) if count else 0.0 for count in n_K))

    def _weights(self, logits: Tensor) -> Tensor | None:
        """Return weights ``[K]`` in the type and on the device of ``logits``."""
        if self.uses_counts:
            raise UsageError(f"{self}: {self.weights} weights come from label counts: call resolved(counts) first")
        return None if self.weights is None else torch.tensor(self.weights, dtype=logits.dtype, device=logits.device)

    @override
    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """Cross-entropy; with weights, torch's mean over the batch, divided by the sum of the batch's weights.

    So ``balanced`` and ``inverse_frequency`` weights are the same here; a batch without weight counts 0. ``smoothing``
    in [0, 1): Szegedy et al. 2016, arXiv:1512.00567, section 7.
    """

    name = "cross_entropy"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.smoothing < 1:
            raise UsageError(f"{self.name}: smoothing={self.smoothing:g} must lie in [0, 1)")
        object.__setattr__(self, "smoothing", float(self.smoothing))

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        weight_K = self._weights(logits)
        if weight_K is None:
            return nn.functional.cross_entropy(logits, y, label_smoothing=self.smoothing)
        total = weight_K[y].sum()
        summed = nn.functional.cross_entropy(logits, y, weight_K, reduction="sum", label_smoothing=self.smoothing)
        return summed / torch.where(total > 0, total, 1)


@dataclass(frozen=True, kw_only=True)
class Focal(Loss):
    """Focal loss: mean over the batch of ``w_y (1 - p_y)^gamma (-log p_y)``, p being the softmax of the logits.

    It is the plain mean, as FLamby's, so that the scale of weights is one of the learning rate: ``inverse_frequency``
    weights are FLamby's, ``balanced`` ones have a mean of 1 over training samples.
    """

    name = "focal"
    gamma: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma < math.inf:
            raise UsageError(f"{self.name}: gamma={self.gamma:g} must be a number of 0 or more")
        object.__setattr__(self, "gamma", float(self.gamma))

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        log_p = logits.log_softmax(dim=1).gather(1, y[:, None])[:, 0]
        missing = (1 - log_p.exp()).clamp_min(torch.finfo(logits.dtype).tiny)  # roots have no slope at 0
        terms = -(missing**self.gamma) * log_p
        weight_K = self._weights(logits)
        return terms.mean() if weight_K is None else (weight_K[y] * terms).mean()


@dataclass(frozen=True, kw_only=True, repr=False)
class CustomLoss(Loss):
    """A function of yours, called as ``function(logits, y)``; ``text`` names it, the same in every process."""

    name = "custom"
    function: Callable[[Tensor, Tensor], Tensor]
    text: str

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.function(logits, y)

    @override
    def to(self, device: torch.device) -> CustomLoss:
        """Return the loss with its buffers on ``device``, a copy where they are elsewhere."""
        module = self.function
        if not isinstance(module, nn.Module) or all(buffer.device == device for buffer in module.buffers()):
            return self
        return replace(self, function=deepcopy(module).to(device))

    @override
    def resolve(self, counts: Tensor) -> CustomLoss:
        """Return the loss, tried once on two samples of each class, on the device of ``counts``.

        Raises :class:`UsageError` where it gives none.
        """
        y = torch.arange(len(counts), device=counts.device).repeat(2)
        logits = torch.linspace(-1, 1, len(y) * len(counts), device=y.device).reshape(len(y), -1).requires_grad_()
        shapes = f"logits {list(logits.shape)} and labels {list(y.shape)}"
        called = f"loss {describe_function(self.function)}, called with {shapes},"
        try:
            value = self(logits, y)
        except Exception as error:
            raise UsageError(
                f"{called} failed: {describe_error(error)}. Give a function of logits [B, K] and labels [B]"
            ) from error
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            shape = f"of shape {list(value.shape)} " if isinstance(value, Tensor) and value.ndim else ""
            lacks = "without a gradient " if isinstance(value, Tensor) and not value.ndim else ""
            raise UsageError(
                f"{called} gave a {type(value).__name__} {shape}{lacks}in place of one number: give the mean over the "
                "batch, computed from the logits"
            )
        return self

    @override
    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


CATALOG: dict[str, Callable[..., Loss]] = {kind.name: kind for kind in (CrossEntropy, Focal)}
"""Losses that :func:`parse_loss` knows, by name."""


def parse_loss(text: str) -> Loss:
    """Return the loss that ``text`` names, for example ``focal(gamma=2, weights='balanced')``.

    ``my_package.module:function`` is a function of yours, called with logits and labels and the arguments in brackets.
    Raises :class:`UsageError` that lists the losses.
    """
    losses = expressions("loss", text, partial(_lookup, text))
    if len(losses) != 1:
        raise UsageError(f"loss {text!r} is {len(losses)} losses: choose one")
    return losses[0]  # type: ignore[no-any-return]


def as_loss(loss: object, text: str | None = None) -> Loss:
    """Return ``loss`` as a :class:`Loss`.

    Args:
        loss: a loss or its text; ``torch.nn.CrossEntropyLoss``, another loss of ``torch.nn`` or a module of yours; a
            function of logits ``[B, K]`` and labels ``[B]``; or a class that makes one of these without arguments.
        text: name of a function or module; None: its own.

    Raises:
        UsageError: ``loss`` is none of these, or a loss of torch has arguments that have no meaning here.

    """
    if isinstance(loss, type) and issubclass(loss, Loss | nn.Module):
        return as_loss(loss(), text)
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        return parse_loss(loss)
    if loss is nn.functional.cross_entropy:
        return CrossEntropy()
    if isinstance(loss, nn.Module):
        _refuse_arguments(loss)
    if isinstance(loss, nn.CrossEntropyLoss):
        weights = None if loss.weight is None else tuple(loss.weight.tolist())
        return CrossEntropy(weights=weights, smoothing=loss.label_smoothing)
    if callable(loss):
        named = architecture(loss).replace("\n", "; ") if isinstance(loss, nn.Module) else identify_function(loss)
        return CustomLoss(function=loss, text=text or named)
    raise UsageError(
        f"loss={loss!r} is not a loss: give a text such as 'cross_entropy' or 'focal(gamma=2.0)', a loss of torch.nn, "
        "a function of logits [B, K] and labels [B], or a fedshift.core.loss.Loss"
    )


def _refuse_arguments(loss: nn.Module) -> None:
    """Raise :class:`UsageError` naming an argument of a loss module that has no meaning here."""
    name = type(loss).__name__
    if getattr(loss, "reduction", "mean") != "mean":
        raise UsageError(f"loss={name}(reduction={loss.reduction!r}): a batch needs one number: use reduction='mean'")
    if getattr(loss, "ignore_index", -100) != -100:
        raise UsageError(
            f"loss={name}(ignore_index={loss.ignore_index}): every sample counts here: remove those samples from the "
            "data, and leave ignore_index out"
        )
    if any(True for _ in loss.parameters()):
        raise UsageError(
            f"loss={name}(...) has parameters, which nobody would train: make them part of the network, whose "
            "outputs the loss takes"
        )


def _lookup(text: str, name: str) -> Callable[..., Loss]:
    if "." in name:
        found = resolve("losses", name)
        if isinstance(found, type):
            return lambda **given: as_loss(found(**given), text)
        return lambda **given: as_loss(partial(found, **given) if given else found, text)
    if name not in CATALOG:
        raise unknown_name("loss", name, CATALOG)
    return CATALOG[name]
