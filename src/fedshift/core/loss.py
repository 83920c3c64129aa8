"""Training losses by name, for each task. Losses over classes accept class weights, which all clients share.

Weights belong to the task, not to a client: named weights are computed from the label counts of the whole federation
(:meth:`Loss.resolve`), the only information that clients must share before they start.

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
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..config.catalog import Catalog
from ..tasks.segmentation import LEFT_OUT
from ..utils.errors import Ref, UsageError
from ..utils.user_code import describe_error, describe_function, find_import_path, identify_function
from .architecture import architecture
from .schedule import require

Counted = Literal["balanced", "inverse_frequency"]
"""Names of weights that :meth:`Loss.resolve` computes from label counts."""
Weights = tuple[float, ...] | Counted | None
"""One number per class, the name of weights computed from label counts, or None: all classes count equally."""

LossT = TypeVar("LossT", bound="Loss")


@dataclass(frozen=True, kw_only=True)
class Loss(ABC):
    """A training loss, called with the outputs and targets of a batch; returns a scalar.

    For classes: logits ``[B, K]`` or ``[B, K, H, W]`` and labels ``[B]`` or ``[B, H, W]`` (int64). It works under
    ``torch.func.grad`` and ``torch.vmap``. ``str`` returns the expression that :data:`LOSSES` parses. ``tasks``: names
    of supported tasks. ``comparing``: whether it compares the samples of a batch, so that a single sample has no
    gradient.
    """

    name: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]] = ("classification", "segmentation")
    comparing: ClassVar[bool] = False
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

    def to(self: LossT, device: torch.device, dtype: torch.dtype | None = None) -> LossT:
        """Return the loss with its tensors on ``device``, floating-point ones in ``dtype``, if given."""
        return self

    def resolve(self: LossT, counts: Tensor) -> LossT:
        """Return the loss with numeric weights; ``counts`` ``[K]``: all clients' training samples per class.

        ``inverse_frequency`` weights are N / n_k, as in FLamby for Fed-ISIC2019. ``balanced`` divides them by the
        number of classes that occur (King and Zeng 2001; as in scikit-learn), so that the mean weight of a training
        sample is 1. A class without samples has weight 0. Raises :class:`UsageError` unless each class has one weight.
        """
        if self.weights is None:
            return self
        if not self.uses_counts:
            if len(self.weights) != len(counts):
                raise UsageError(
                    f"{self.name}: {len(self.weights)} weights for {len(counts)} classes: give a number for each class"
                ).about("loss")
            return self
        n_K = [int(count) for count in counts]
        parts = sum(count > 0 for count in n_K) if self.weights == "balanced" else 1
        return replace(self, weights=tuple(sum(n_K) / (parts * count) if count else 0.0 for count in n_K))

    def _weights(self, logits: Tensor) -> Tensor | None:
        """Return the weights ``[K]`` in the dtype and on the device of ``logits``."""
        if self.uses_counts:
            raise UsageError(f"{self}: {self.weights} weights come from label counts: call resolve(counts) first")
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

    Hence ``balanced`` and ``inverse_frequency`` weights are equivalent here; a batch of zero weight has loss 0.
    ``smoothing`` in [0, 1): Szegedy et al. 2016, arXiv:1512.00567, section 7.
    """

    name = "cross_entropy"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.smoothing < 1, f"{self.name}: smoothing={self.smoothing:g} must lie in [0, 1)")
        object.__setattr__(self, "smoothing", float(self.smoothing))

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        weight_K = self._weights(logits)
        if weight_K is None and y.ndim == 1:
            return nn.functional.cross_entropy(logits, y, label_smoothing=self.smoothing)
        known = y != LEFT_OUT
        total = known.sum() if weight_K is None else torch.where(known, weight_K[y.clamp(min=0)], 0).sum()
        summed = nn.functional.cross_entropy(logits, y, weight_K, reduction="sum", label_smoothing=self.smoothing)
        return summed / torch.where(total > 0, total, 1)


@dataclass(frozen=True, kw_only=True)
class Focal(Loss):
    """Focal loss: mean over the batch of ``w_y (1 - p_y)^gamma (-log p_y)``, p being the softmax of the logits.

    It is the plain mean, as in FLamby, so that scaling the weights scales the learning rate: ``inverse_frequency``
    weights are FLamby's, ``balanced`` weights have a mean of 1 over training samples.
    """

    name = "focal"
    gamma: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.gamma < math.inf, f"{self.name}: gamma={self.gamma:g} must be a number of 0 or more")
        object.__setattr__(self, "gamma", float(self.gamma))

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        known = y != LEFT_OUT
        y = y.clamp(min=0)
        log_p = logits.log_softmax(dim=1).gather(1, y[:, None])[:, 0]
        missing = (1 - log_p.exp()).clamp_min(torch.finfo(logits.dtype).tiny)  # the gradient of a root is infinite at 0
        terms = -(missing**self.gamma) * log_p
        weight_K = self._weights(logits)
        terms = terms if weight_K is None else weight_K[y] * terms
        if y.ndim == 1:
            return terms.mean()
        return torch.where(known, terms, 0).sum() / known.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class Dice(Loss):
    """One minus the soft Dice coefficient of a batch's pixels, averaged over the classes except the background.

    ``2 sum(p g) / (sum(p) + sum(g))``, p being the softmax of the logits and g 1 for pixels of the class: Milletari et
    al. 2016, arXiv:1606.04797, section 3, without squares, as in nnU-Net (Isensee et al. 2018, arXiv:1809.10486).
    ``smooth`` is added to numerator and denominator, so that a class that is neither present nor predicted has loss 0.
    With weights, the result is the weighted mean over all classes.
    """

    name = "dice"
    tasks = ("segmentation",)
    smooth: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.smooth < math.inf, f"{self.name}: smooth={self.smooth:g} must be a number above 0")

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        known = (y != LEFT_OUT).to(logits.dtype).unsqueeze(1)
        classes = torch.arange(logits.shape[1], device=y.device).reshape(1, -1, *(1 for _ in y.shape[1:]))
        target = (y.unsqueeze(1) == classes).to(logits.dtype)
        p, others = logits.softmax(dim=1) * known, [0, *range(2, logits.ndim)]
        both, either = (p * target).sum(dim=others), (p + target).sum(dim=others)
        score_K = (2 * both + self.smooth) / (either + self.smooth)
        weight_K = self._weights(logits)
        if weight_K is None:
            return 1 - score_K[min(1, len(score_K) - 1) :].mean()
        return 1 - (weight_K * score_K).sum() / weight_K.sum()


@dataclass(frozen=True, kw_only=True)
class DiceCrossEntropy(Dice):
    """The sum of cross-entropy and :class:`Dice`, as in nnU-Net (Isensee et al. 2018, arXiv:1809.10486)."""

    name = "dice_cross_entropy"

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return CrossEntropy(weights=self.weights)(logits, y) + super().__call__(logits, y)


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(Loss):
    """Mean cross-entropy of each label's sigmoid, ``[B, L]``; the weight of a label applies to its positives."""

    name = "binary_cross_entropy"
    tasks = ("multilabel",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.uses_counts, f"{self.name}: weights={self.weights!r}: give a number for each label")

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        weight_L = self._weights(logits)
        return nn.functional.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), pos_weight=weight_L)


@dataclass(frozen=True, kw_only=True)
class BinaryFocal(BinaryCrossEntropy):
    """Focal loss of each label's sigmoid: Lin et al. 2017, arXiv:1708.02002, equation 4; the mean over labels."""

    name = "binary_focal"
    gamma: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.gamma < math.inf, f"{self.name}: gamma={self.gamma:g} must be a number of 0 or more")

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        weight_L, y = self._weights(logits), y.to(logits.dtype)
        terms = nn.functional.binary_cross_entropy_with_logits(logits, y, pos_weight=weight_L, reduction="none")
        missed = (y - logits.sigmoid()).abs().clamp_min(torch.finfo(logits.dtype).tiny)  # a root's slope at 0: infinite
        return (missed**self.gamma * terms).mean()


@dataclass(frozen=True, kw_only=True)
class Unweighted(Loss):
    """A loss of numeric targets ``[B, T]``, without class weights; ``measure``: torch's function."""

    tasks = ("regression",)
    measure: ClassVar[Callable[..., Tensor]]

    def __post_init__(self) -> None:
        if self.weights is not None:
            raise UsageError(f"{self.name}: weights={self.weights!r}: this loss has no weights; leave them out")

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.measure(logits, y.to(logits.dtype))


@dataclass(frozen=True, kw_only=True)
class SquaredError(Unweighted):
    """Mean squared error."""

    name, measure = "mse", staticmethod(nn.functional.mse_loss)


@dataclass(frozen=True, kw_only=True)
class AbsoluteError(Unweighted):
    """Mean absolute error."""

    name, measure = "mae", staticmethod(nn.functional.l1_loss)


@dataclass(frozen=True, kw_only=True)
class Huber(Unweighted):
    """Huber's loss (1964, doi:10.1214/aoms/1177703732): squared up to an error of ``delta``, linear beyond."""

    name, measure = "huber", staticmethod(nn.functional.huber_loss)
    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.delta < math.inf, f"{self.name}: delta={self.delta:g} must be a number above 0")

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.measure(logits, y.to(logits.dtype), delta=self.delta)


Ties = Literal["breslow", "efron", "order"]
"""Treatments of equal times in Cox's partial likelihood."""


@dataclass(frozen=True, kw_only=True)
class Cox(Unweighted):
    """Negative log partial likelihood of Cox's proportional hazards model (1972), averaged over a batch's patients.

    Risks are ``[B, 1]``, targets ``[B, 2]``: time and event. Each patient with an event is compared with the patients
    in the batch who are still at risk at that time; a batch without events has loss 0. Hence FedAvg optimizes a
    likelihood stratified by client, which ranks patients only within clients.

    ``ties``: treatment of patients with equal times: ``breslow`` (1974) keeps all of them at risk, ``efron`` (1977,
    doi:10.1080/01621459.1977.10480613) removes them in equal parts, and ``order`` keeps the patients earlier in the
    batch, as in FLamby's baseline for Fed-TCGA-BRCA (Ogier du Terrail et al. 2022, arXiv:2210.04620).
    """

    name = "cox"
    tasks = ("survival",)
    comparing = True
    ties: Ties = "breslow"

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ", ".join(map(repr, get_args(Ties)))
        require(self.ties in get_args(Ties), f"{self.name}: ties={self.ties!r} is unknown: give {known}")

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        risk, time, event = logits[:, 0], y[:, 0], y[:, 1].to(logits.dtype)
        later, same = time[None, :] > time[:, None], time[None, :] == time[:, None]
        earlier_in_batch = torch.ones_like(same).tril(-1)
        if self.ties == "order":
            same = same & (earlier_in_batch | torch.eye(len(time), dtype=torch.bool, device=time.device))
        top = risk.detach().max()
        hazard = (risk - top).exp()
        at_risk = ((later | same) * hazard).sum(dim=1)
        if self.ties == "efron":
            tied = same & (event > 0)[None, :]
            part = (tied & earlier_in_batch).sum(dim=1).to(logits.dtype) / tied.sum(dim=1).clamp(min=1)
            at_risk = at_risk - part * (tied * hazard).sum(dim=1)
        terms = at_risk.clamp_min(torch.finfo(logits.dtype).tiny).log() + top - risk
        return (event * terms).mean()


@dataclass(frozen=True, kw_only=True, repr=False)
class CustomLoss(Loss):
    """A user-defined function, called as ``function(logits, y)``; ``text`` names it identically in every process."""

    name = "custom"
    function: Callable[[Tensor, Tensor], Tensor]
    text: str
    tried: bool = True

    @override
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.function(logits, y)

    @override
    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> CustomLoss:
        """Return the loss with its buffers as in :meth:`Loss.to`; copy it only if these differ."""
        module = self.function
        buffers = list(module.buffers()) if isinstance(module, nn.Module) else []
        if not isinstance(module, nn.Module) or all(each.device == device and not dtype for each in buffers):
            return self
        return replace(self, function=deepcopy(module).to(device=device, dtype=dtype))

    @override
    def resolve(self, counts: Tensor) -> CustomLoss:
        """Return the loss after a trial call with two samples of each class, on the device of ``counts``.

        The call is skipped if ``tried`` is false (targets are not classes). Raises :class:`UsageError` if it does not
        return a differentiable scalar.
        """
        if not self.tried:
            return self
        y = torch.arange(len(counts), device=counts.device).repeat(2)
        logits = torch.linspace(-1, 1, len(y) * len(counts), device=y.device).reshape(len(y), -1).requires_grad_()
        shapes = f"logits {list(logits.shape)} and labels {list(y.shape)}"
        called = f"loss {describe_function(self.function)}, called with {shapes},"
        try:
            value = self(logits, y)
        except Exception as error:
            raise UsageError(
                f"{called} failed: {describe_error(error)}. Give a function of logits [B, K] and labels [B]"
            ).about("loss") from error
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            shape = f"of shape {list(value.shape)} " if isinstance(value, Tensor) and value.ndim else ""
            lacks = "without a gradient " if isinstance(value, Tensor) and not value.ndim else ""
            raise UsageError(
                f"{called} returned a {type(value).__name__} {shape}{lacks}instead of one number: return the mean over "
                "the batch, computed from the logits"
            )
        return self

    @override
    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def _accept(loss: object, text: str | None) -> Loss:
    """Convert a loss, a module, a function, or a class of one of these to a :class:`Loss`."""
    if isinstance(loss, type) and issubclass(loss, Loss | nn.Module):
        return _accept(loss(), text)
    if isinstance(loss, Loss):
        return loss
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
        "{} is not a loss: give a text such as 'cross_entropy' or 'focal(gamma=2.0)', a loss of torch.nn, a function "
        "of logits [B, K] and labels [B], or a fedshift.core.loss.Loss",
        Ref(loss=loss),
    )


def _adapt(loss: Callable[..., Any], user_defined: bool) -> Callable[..., Any]:
    """Return a factory for ``loss`` that binds further arguments of a user-defined function."""
    if not user_defined or isinstance(loss, type):
        return loss
    return lambda **arguments: partial(loss, **arguments) if arguments else loss


def _spell(loss: Loss) -> str | None:
    return str(loss) if not isinstance(loss, CustomLoss) or find_import_path(loss.function) else None


LOSSES = Catalog[Loss](
    "loss",
    {
        kind.name: kind
        for kind in (
            CrossEntropy, Focal, Dice, DiceCrossEntropy, BinaryCrossEntropy, BinaryFocal, SquaredError, AbsoluteError,
            Huber, Cox,
        )
    },
    _accept,
    adapt=_adapt,
    spell=_spell,
)  # fmt: skip
"""Training losses; a user-defined function takes logits and labels, and the arguments in parentheses."""


def _refuse_arguments(loss: nn.Module) -> None:
    """Raise :class:`UsageError` naming an unsupported argument of a loss module."""
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
            f"loss={name}(...) has parameters, which would never be trained: move them into the network, whose "
            "outputs the loss receives"
        )
