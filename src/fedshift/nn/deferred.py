"""Weights of large linear layers whose updates are held back as the factors of which they are products.

The gradient of a layer with B samples in a batch is the product of two matrices of B rows. To write it, read it again
and update the weights takes longer than to multiply by them where B is small (FedWon: 4, Zhuang & Lyu 2024,
arXiv:2306.05879). Plain SGD's steps add up: after n of them the weights are W + S^T X, where the rows of S are the
outputs' gradients times the negative learning rate and those of X the inputs. A layer multiplies by W and by the two
factors; the product is added to W after many steps, or as soon as anything but a linear layer looks at the weights.

Clients side by side that start from the same W hold back the updates of a whole round: then W is there only once, and
is multiplied by the batches of all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .linear import may_multiply_by_onednn, multiply_by_onednn, multiply_in_lane

ROWS = 128
"""Rows of factors that are held at most."""
FEW = 16
"""Rows of a batch up to which updates are held back."""
SIZES = 4
"""Sizes of the factors of lanes, each of which needs a recorded step."""
_INDIFFERENT = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cpu", "is_cuda")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.autograd.grad}  # fmt: skip
"""Functions that do not read the values of a weight."""


class HeldUpdates:
    """The factors that are to be added to ``w_OI``.

    ``fast``: products by oneDNN. ``listening``: whether gradients that are computed now are those of the step.
    """

    def __init__(self, w_OI: Tensor, *, fast: bool) -> None:
        self.w_OI, self.fast = w_OI, fast and may_multiply_by_onednn()
        self.s_RO, self.x_RI = (w_OI.new_empty(ROWS, size) for size in w_OI.shape)
        self.rows = 0
        self.listening = False
        self.found: list[tuple[Tensor, Tensor]] = []

    def expose(self) -> Tensor:
        """Return the weights as a leaf of a new graph that knows of the held updates."""
        exposed: _DeferredWeight = torch.Tensor._make_subclass(_DeferredWeight, self.w_OI, True)
        exposed.held = self
        return exposed

    def multiply(self, left_BN: Tensor, right_PN: Tensor) -> Tensor:
        """Return ``left right^T``."""
        return multiply_by_onednn(left_BN, right_PN, None) if self.fast else F.linear(left_BN, right_PN)

    def add_(self, lr: float) -> None:
        """Hold the update of a step of SGD along the gradients that were found."""
        for grad_BO, x_BI in self.found:
            if self.rows + len(x_BI) > ROWS:
                self.settle()
            span = slice(self.rows, self.rows + len(x_BI))
            torch.mul(grad_BO, -lr, out=self.s_RO[span])
            self.x_RI[span] = x_BI
            self.rows += len(x_BI)
        self.found.clear()

    @torch.no_grad()
    def settle(self) -> None:
        """Add the held updates to the weights."""
        if self.rows:
            s_OR, x_RI = self.s_RO[: self.rows].t(), self.x_RI[: self.rows]
            self.rows = 0
            if self.fast:
                self.w_OI.add_(self.multiply(s_OR, x_RI.t()))
            else:
                self.w_OI.addmm_(s_OR, x_RI)


class _Product(torch.autograd.Function):
    """``x (W + S^T X)^T + b``; in a step's own backward pass the weights' gradient is left with them as its factors."""

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None, held: HeldUpdates) -> Tensor:
        ctx.save_for_backward(x_BI)
        ctx.w_OI, ctx.held = w_OI, held
        made = held.multiply(x_BI, held.w_OI)
        if held.rows:
            made.addmm_(F.linear(x_BI, held.x_RI[: held.rows]), held.s_RO[: held.rows])
        return made if b_O is None else made.add_(b_O)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        held: HeldUpdates = ctx.held
        (x_BI,), (grad_BO,) = ctx.saved_tensors, given
        x_wanted, w_wanted, b_wanted, _ = ctx.needs_input_grad
        of_inputs = of_weights = None
        if torch.is_grad_enabled():  # it will be differentiated again
            of_inputs, of_weights = grad_BO @ ctx.w_OI, grad_BO.t() @ x_BI
        else:
            if x_wanted:
                of_inputs = held.multiply(grad_BO, held.w_OI.t())
                if held.rows:
                    of_inputs.addmm_(F.linear(grad_BO, held.s_RO[: held.rows]), held.x_RI[: held.rows])
            if held.listening:
                held.found.append((grad_BO, x_BI))
            elif w_wanted:
                of_weights = grad_BO.t() @ x_BI
        return of_inputs, of_weights, grad_BO.sum(dim=0) if b_wanted else None, None


class _DeferredWeight(Tensor):
    """A weight with held updates: linear layers multiply by both; before any other use they are added."""

    held: HeldUpdates

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _INDIFFERENT:
                return func(*args, **kwargs)
            if func is F.linear and not kwargs and _fits(*args):
                x, weight, bias = (*args, None)[:3]
                x_BI = x.reshape(-1, x.shape[-1])
                return _apply(x_BI, weight, bias, weight.held).reshape(*x.shape[:-1], -1)
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, cls):
                    each.held.settle()
            return func(*args, **kwargs)


def _apply(*given: Any) -> Tensor:
    made: Tensor = _Product.apply(*given)  # type: ignore[no-untyped-call]
    return made


def _fits(x: Any, weight: Any, bias: Any = None) -> bool:
    """Return whether the product of ``x`` and ``weight`` is one of few rows and a weight whose updates are held."""
    if not isinstance(weight, _DeferredWeight) or any(isinstance(each, _DeferredWeight) for each in (x, bias)):
        return False
    usual = x.dtype == weight.dtype and x.device == weight.device and x.shape[-1:] == weight.shape[1:]
    return usual and not torch.is_autocast_enabled("cpu") and 0 < x.numel() <= FEW * x.shape[-1]


class LaneUpdates:
    """The updates of ``lanes`` clients that start from ``w_OI``, as factors of at most ``rows`` rows for each.

    ``fast``: products of the layer by oneDNN.
    """

    def __init__(self, w_OI: Tensor, lanes: int, rows: int, fast: frozenset[str]) -> None:
        self.w_OI, self.fast = w_OI, fast
        self.s_KRO, self.x_KRI = (w_OI.new_zeros(lanes, rows, size) for size in w_OI.shape)
        self.rows = 0

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the factors that are held, ``[K, R, O]`` and ``[K, R, I]``, and zeros up to one of ``SIZES`` sizes."""
        block = -(-self.s_KRO.shape[1] // SIZES)
        held = -(-self.rows // block) * block
        return self.s_KRO[:, :held], self.x_KRI[:, :held]

    def add_(self, grad_KBO: Tensor, x_KBI: Tensor, lr: float) -> None:
        """Hold the update of a step of SGD, given the gradients of the layer's outputs, and its inputs."""
        span = slice(self.rows, self.rows + x_KBI.shape[1])
        torch.mul(grad_KBO, -lr, out=self.s_KRO[:, span])
        self.x_KRI[:, span] = x_KBI
        self.rows = span.stop

    def mean(self) -> Tensor:
        """Return the mean of the lanes' weights."""
        lanes = len(self.s_KRO)
        return self.w_OI.addmm(self.s_KRO.flatten(0, 1).t(), self.x_KRI.flatten(0, 1), alpha=1 / lanes)


class LaneWeight(Tensor):
    """The weight of one lane under ``torch.vmap``, ``w + s^T x``, which one linear layer may multiply by once.

    ``slope [B, O]``: zeros that the layer adds to its outputs, whose gradients are then theirs.
    """

    base: Tensor
    held: Sequence[Tensor]
    slope: Tensor
    fast: frozenset[str]
    _input: Tensor | None

    @classmethod
    def of(cls, w_OI: Tensor, held: Sequence[Tensor], slope_BO: Tensor, fast: frozenset[str]) -> LaneWeight:
        """Return the weight ``w_OI + s_RO^T x_RI`` of a lane, ``held`` being ``s_RO`` and ``x_RI``."""
        made: LaneWeight = torch.Tensor._make_subclass(cls, w_OI)
        made.base, made.held, made.slope, made.fast, made._input = w_OI, held, slope_BO, fast, None
        return made

    @property
    def input(self) -> Tensor:
        """The input of the layer, ``[B, I]``; raises :class:`NotImplementedError` where none was multiplied."""
        if self._input is None:
            raise NotImplementedError("a weight whose updates are held back is not multiplied by")
        return self._input

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _INDIFFERENT:
                return func(*args, **(kwargs or {}))
            if func is not F.linear or kwargs or not isinstance(args[1], cls):
                raise NotImplementedError(f"{func} of a weight whose updates are held back")
            x_BI, weight, bias = (*args, None)[:3]
            s_RO, x_RI = weight.held
            if weight._input is not None or x_BI.dim() != 2 or len(x_BI) != len(weight.slope):
                raise NotImplementedError("a weight whose updates are held back multiplies one batch of vectors")
            weight._input = x_BI
            made = multiply_in_lane(x_BI, weight.base, weight.fast) + weight.slope
            made = made + x_BI @ x_RI.t() @ s_RO if len(s_RO) else made
            return made if bias is None else made + bias
