"""Training losses by name, for each task: functions of a batch's outputs and targets, and users' own.

In come outputs and targets; out goes their loss, a scalar. Weights of classes belong to the task, not to a client:
named weights are computed from the label counts of the whole federation (:meth:`Loss.resolve`), the only information
that clients must share before they start.

For classes, logits are ``[B, K]`` or ``[B, K, H, W]`` and labels ``[B]`` or ``[B, H, W]`` (int64). Losses work under
``torch.func.grad`` and ``torch.vmap``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ..config.catalog import Catalog, bind_arguments
from ..tasks.segmentation import LEFT_OUT
from ..utils.errors import Ref, UsageError, require
from ..utils.user_code import describe_error, describe_function
from .architecture import architecture
from .schedule import describe_call, spell_call, split_partial

Counted = Literal["balanced", "inverse_frequency"]
"""Names of weights that :meth:`Loss.resolve` computes from label counts."""
Weights = tuple[float, ...] | Counted | None
"""One number per class, the name of weights computed from label counts, or None: all classes count equally."""
Ties = Literal["breslow", "efron", "order"]
"""Treatments of equal times in Cox's partial likelihood."""


def cross_entropy(logits: Tensor, y: Tensor, *, weights: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy; with weights, torch's mean over the batch, divided by the sum of the batch's weights.

    Hence ``balanced`` and ``inverse_frequency`` weights are equivalent here; a batch of zero weight has loss 0.
    ``smoothing`` in [0, 1): Szegedy et al. 2016, arXiv:1512.00567, section 7.
    """
    if weights is None and y.ndim == 1:
        return F.cross_entropy(logits, y, label_smoothing=smoothing)
    known = y != LEFT_OUT
    total = known.sum() if weights is None else torch.where(known, weights[y.clamp(min=0)], 0).sum()
    summed = F.cross_entropy(logits, y, weights, reduction="sum", label_smoothing=smoothing)
    return summed / torch.where(total > 0, total, 1)


def focal(logits: Tensor, y: Tensor, *, weights: Tensor | None = None, gamma: float = 2.0) -> Tensor:
    """Focal loss: mean over the batch of ``w_y (1 - p_y)^gamma (-log p_y)``, p being the softmax of the logits.

    Lin et al. 2017, arXiv:1708.02002, equation 5, over the softmax of all classes, and the plain mean, as in FLamby's
    baseline of Fed-ISIC2019 (Ogier du Terrail et al. 2022, arXiv:2210.04620), so that scaling the weights scales the
    learning rate: ``inverse_frequency`` weights are FLamby's, ``balanced`` ones have a mean of 1 over training samples.
    """
    known = y != LEFT_OUT
    y = y.clamp(min=0)
    log_p = logits.log_softmax(dim=1).gather(1, y[:, None])[:, 0]
    missing = (1 - log_p.exp()).clamp_min(torch.finfo(logits.dtype).tiny)  # the gradient of a root is infinite at 0
    terms = -(missing**gamma) * log_p
    terms = terms if weights is None else weights[y] * terms
    return terms.mean() if y.ndim == 1 else torch.where(known, terms, 0).sum() / known.sum().clamp(min=1)


def dice(logits: Tensor, y: Tensor, *, weights: Tensor | None = None, smooth: float = 1.0) -> Tensor:
    """One minus the soft Dice coefficient of a batch's pixels, averaged over the classes except the background.

    ``2 sum(p g) / (sum(p) + sum(g))``, p being the softmax of the logits and g 1 for pixels of the class: Milletari et
    al. 2016, arXiv:1606.04797, section 3, without squares, as in nnU-Net (Isensee et al. 2018, arXiv:1809.10486).
    ``smooth`` is added to numerator and denominator, so that a class that is neither present nor predicted has loss 0.
    With weights, the result is the weighted mean over all classes.
    """
    known = (y != LEFT_OUT).to(logits.dtype).unsqueeze(1)
    classes = torch.arange(logits.shape[1], device=y.device).reshape(1, -1, *(1 for _ in y.shape[1:]))
    target = (y.unsqueeze(1) == classes).to(logits.dtype)
    p, others = logits.softmax(dim=1) * known, [0, *range(2, logits.ndim)]
    both, either = (p * target).sum(dim=others), (p + target).sum(dim=others)
    score_K = (2 * both + smooth) / (either + smooth)
    if weights is None:
        return 1 - score_K[min(1, len(score_K) - 1) :].mean()
    return 1 - (weights * score_K).sum() / weights.sum()


def dice_cross_entropy(logits: Tensor, y: Tensor, *, weights: Tensor | None = None, smooth: float = 1.0) -> Tensor:
    """The sum of cross-entropy and :func:`dice`, as in nnU-Net (Isensee et al. 2018, arXiv:1809.10486)."""
    return cross_entropy(logits, y, weights=weights) + dice(logits, y, weights=weights, smooth=smooth)


def binary_cross_entropy(logits: Tensor, y: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of each label's sigmoid, ``[B, L]``; the weight of a label applies to its positives."""
    return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), pos_weight=weights)


def binary_focal(logits: Tensor, y: Tensor, *, weights: Tensor | None = None, gamma: float = 2.0) -> Tensor:
    """Focal loss of each label's sigmoid: Lin et al. 2017, arXiv:1708.02002, equation 4; the mean over labels."""
    y = y.to(logits.dtype)
    terms = F.binary_cross_entropy_with_logits(logits, y, pos_weight=weights, reduction="none")
    missed = (y - logits.sigmoid()).abs().clamp_min(torch.finfo(logits.dtype).tiny)  # a root's slope at 0 is infinite
    return (missed**gamma * terms).mean()


def mse(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of numbers ``[B, T]``."""
    return F.mse_loss(outputs, y.to(outputs.dtype))


def mae(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean absolute error of numbers ``[B, T]``."""
    return F.l1_loss(outputs, y.to(outputs.dtype))


def huber(outputs: Tensor, y: Tensor, *, delta: float = 1.0) -> Tensor:
    """Huber's loss (1964, doi:10.1214/aoms/1177703732): squared up to an error of ``delta``, linear beyond."""
    return F.huber_loss(outputs, y.to(outputs.dtype), delta=delta)


def cox(outputs: Tensor, y: Tensor, *, ties: Ties = "breslow") -> Tensor:
    """Negative log partial likelihood of Cox's proportional hazards model (1972), averaged over a batch's patients.

    Risks are ``[B, 1]``, targets ``[B, 2]``: time and event. Each patient with an event is compared with the patients
    in the batch who are still at risk at that time; a batch without events has loss 0. Hence FedAvg optimizes a
    likelihood stratified by client, which ranks patients only within clients.

    ``ties``: treatment of patients with equal times: ``breslow`` (1974) keeps all of them at risk, ``efron`` (1977,
    doi:10.1080/01621459.1977.10480613) removes them in equal parts, and ``order`` keeps the patients earlier in the
    batch, as in FLamby's baseline for Fed-TCGA-BRCA (Ogier du Terrail et al. 2022, arXiv:2210.04620).
    """
    risk, time, event = outputs[:, 0], y[:, 0], y[:, 1].to(outputs.dtype)
    later, same = time[None, :] > time[:, None], time[None, :] == time[:, None]
    earlier_in_batch = torch.ones_like(same).tril(-1)
    if ties == "order":
        same = same & (earlier_in_batch | torch.eye(len(time), dtype=torch.bool, device=time.device))
    top = risk.detach().max()
    hazard = (risk - top).exp()
    at_risk = ((later | same) * hazard).sum(dim=1)
    if ties == "efron":
        tied = same & (event > 0)[None, :]
        removed = (tied & earlier_in_batch).sum(dim=1).to(outputs.dtype) / tied.sum(dim=1).clamp(min=1)
        at_risk = at_risk - removed * (tied * hazard).sum(dim=1)
    terms = at_risk.clamp_min(torch.finfo(outputs.dtype).tiny).log() + top - risk
    return (event * terms).mean()


LOSS_TASKS: Mapping[Callable[..., Tensor], tuple[str, ...]] = {
    cross_entropy: ("classification", "segmentation"), focal: ("classification", "segmentation"),
    dice: ("segmentation",), dice_cross_entropy: ("segmentation",), binary_cross_entropy: ("multilabel",),
    binary_focal: ("multilabel",), mse: ("regression",), mae: ("regression",), huber: ("regression",),
    cox: ("survival",),
}  # fmt: skip
"""Names of the tasks of each loss."""
ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "gamma": (lambda value: 0 <= value < math.inf, "must be a number of 0 or more"),
    "smoothing": (lambda value: 0 <= value < 1, "must lie in [0, 1)"),
    "smooth": (lambda value: 0 < value < math.inf, "must be a number above 0"),
    "delta": (lambda value: 0 < value < math.inf, "must be a number above 0"),
    "ties": (lambda value: value in get_args(Ties), f"is unknown: give {', '.join(map(repr, get_args(Ties)))}"),
}
"""Allowed values of arguments by name, with the words of their refusal."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Loss:
    """A function of outputs and targets with its ``arguments`` by name; ``str`` names it alike in every process.

    ``tasks``: names of supported tasks; none for a user's function, which may be for any.
    """

    function: Callable[..., Tensor]
    weights: Weights = None
    arguments: tuple[tuple[str, Any], ...] = ()
    tasks: tuple[str, ...] = ()

    @property
    def uses_counts(self) -> bool:
        """Return whether the weights come from all clients' label counts."""
        return isinstance(self.weights, str)

    @property
    def comparing(self) -> bool:
        """Return whether it compares the samples of a batch, so that a single sample has no gradient."""
        return self.function is cox

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar."""
        if self.weights is None:
            return self.function(outputs, y, **dict(self.arguments))
        why = f"{self.weights} weights come from label counts: call resolve(counts) first"
        require(not self.uses_counts, f"{self}: {why}")
        weights = torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)
        return self.function(outputs, y, weights=weights, **dict(self.arguments))

    def resolve(self, counts: Tensor) -> Loss:
        """Return the loss with numeric weights; ``counts`` ``[K]``: all clients' training samples per class.

        ``inverse_frequency`` weights are N / n_k, as in FLamby for Fed-ISIC2019. ``balanced`` divides them by the
        number of classes that occur (King and Zeng 2001; as in scikit-learn), so that the mean weight of a training
        sample is 1. A class without samples has weight 0. Raises :class:`UsageError` unless each class has one weight.
        """
        if not isinstance(self.weights, str):
            if self.weights is not None and len(self.weights) != len(counts):
                what = f"{self.function.__name__}: {len(self.weights)} weights for {len(counts)} classes"
                raise UsageError(f"{what}: give a number for each class").about("loss")
            return self
        n_K = [int(count) for count in counts]
        parts = sum(count > 0 for count in n_K) if self.weights == "balanced" else 1
        return replace(self, weights=tuple(sum(n_K) / (parts * count) if count else 0.0 for count in n_K))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Loss:
        """Return the loss with a module's buffers on ``device``, floating-point ones in ``dtype``; copied if needed."""
        buffers = list(self.function.buffers()) if isinstance(self.function, nn.Module) else []
        if all(each.device == device and not dtype for each in buffers):
            return self
        return replace(self, function=deepcopy(self.function).to(device=device, dtype=dtype))  # type: ignore[attr-defined]

    def try_out(self, classes: int, device: torch.device) -> None:
        """Raise :class:`UsageError` unless two samples of each class have a differentiable scalar."""
        y = torch.arange(classes, device=device).repeat(2)
        logits = torch.linspace(-1, 1, len(y) * classes, device=device).reshape(len(y), -1).requires_grad_()
        shapes = f"logits {list(logits.shape)} and labels {list(y.shape)}"
        called = f"loss {describe_function(self.function)}, called with {shapes},"
        try:
            value: object = self(logits, y)
        except Exception as error:
            raise UsageError(
                f"{called} failed: {describe_error(error)}. Give a function of logits [B, K] and labels [B]"
            ).about("loss") from error
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
            raise UsageError(
                f"{called} returned a {type(value).__name__}{shape} instead of one number with a gradient: return the "
                "mean over the batch, computed from the logits"
            )

    @override
    def __str__(self) -> str:
        if isinstance(self.function, nn.Module):
            return architecture(self.function).replace("\n", "; ")
        if not self.tasks:
            return describe_call(self.function, dict(self.arguments))
        usual = inspect.signature(self.function).parameters
        pairs = (("weights", self.weights), *self.arguments)
        changed = [f"{name}={value!r}" for name, value in pairs if name in usual and value != usual[name].default]
        return f"{self.function.__name__}({', '.join(changed)})" if changed else self.function.__name__

    __repr__ = __str__


def _accept(loss: object, _text: str | None) -> Loss:
    """Convert a loss, a module, a function with or without arguments, or a class of one to a :class:`Loss`."""
    if isinstance(loss, Loss):
        return loss
    function, arguments = split_partial(loss)
    if isinstance(function, type) and issubclass(function, nn.Module):
        function, arguments = function(**arguments), {}
    if isinstance(function, nn.Module):
        _refuse_arguments(function)
    if isinstance(function, nn.CrossEntropyLoss):
        arguments = {"smoothing": function.label_smoothing}
        arguments |= {} if function.weight is None else {"weights": function.weight.tolist()}
    if function is F.cross_entropy or isinstance(function, nn.CrossEntropyLoss):
        function = cross_entropy
    if callable(function) and not isinstance(function, type):
        return make_loss(function, **arguments)
    raise UsageError(
        "{} is not a loss: give a text such as 'cross_entropy' or 'focal(gamma=2.0)', a loss of torch.nn, or a "
        "function of logits [B, K] and labels [B]",
        Ref(loss=loss),
    )


def make_loss(function: Callable[..., Tensor], /, **arguments: Any) -> Loss:
    """Return the loss of ``function`` with ``arguments``; raise :class:`UsageError` for values that are not allowed."""
    tasks = next((tasks for known, tasks in LOSS_TASKS.items() if known is function), ())
    if not tasks:
        return Loss(function=function, arguments=tuple(arguments.items()))
    name, takes = function.__name__, list(inspect.signature(function).parameters.values())[2:]
    values: dict[str, Any] = {each.name: each.default for each in takes} | arguments
    unknown = list(values)[len(takes) :]
    require(not unknown, f"{name} takes {', '.join(each.name for each in takes) or 'no arguments'}, not {unknown}")
    weights = values.pop("weights", None)
    for argument, value in values.items():
        holds, words = ALLOWED[argument]
        require(holds(value), f"{name}: {argument}={value!r} {words}")
    if isinstance(weights, str):
        counted = get_args(Counted) if "multilabel" not in tasks else ()
        known = ", ".join([*map(repr, counted), "a number for each class" if counted else "a number for each label"])
        require(weights in counted, f"{name}: weights={weights!r} is unknown: give {known}")
    elif weights is not None:
        weights = tuple(float(weight) for weight in weights)
        valid = all(0 <= weight < math.inf for weight in weights) and any(weights)
        require(valid, f"{name}: weights={weights}: they must be 0 or more, and one of them above 0")
    numbers = ((name, value if isinstance(value, str) else float(value)) for name, value in values.items())
    return Loss(function=function, weights=weights, arguments=tuple(numbers), tasks=tasks)


def _refuse_arguments(loss: nn.Module) -> None:
    name, reduction = f"loss={type(loss).__name__}", getattr(loss, "reduction", "mean")
    require(reduction == "mean", f"{name}(reduction={reduction!r}): a batch needs one number: use reduction='mean'")
    ignored, why = getattr(loss, "ignore_index", -100), "every sample counts here: remove those samples from the data"
    require(ignored == -100, f"{name}(ignore_index={ignored}): {why}, and leave ignore_index out")
    why = "which would never be trained: move them into the network, whose outputs the loss receives"
    require(not list(loss.parameters()), f"{name}(...) has parameters, {why}")


def _adapt(loss: Callable[..., Any], user_defined: bool) -> Callable[..., Any]:
    """Return a factory that binds the arguments of an expression to a loss."""
    if user_defined:
        return bind_arguments(loss, user_defined)
    make: Any = partial(make_loss, loss)
    make.__signature__ = inspect.signature(partial(loss, None, None))
    return make  # type: ignore[no-any-return]


LOSSES = Catalog[Loss]("loss", {loss.__name__: loss for loss in LOSS_TASKS}, _accept, adapt=_adapt, spell=spell_call)
"""Training losses; a user-defined function takes logits and labels, and the arguments in parentheses."""
