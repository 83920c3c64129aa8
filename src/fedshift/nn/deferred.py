"""Deferred updates: weights of large linear layers with updates kept in factored form.

The gradient of a layer with B samples in a batch is the product of two matrices with B rows. For small B, writing it,
reading it and updating the weights takes longer than multiplying by them (FedWon: B = 4, Zhuang & Lyu 2024,
arXiv:2306.05879). Steps of plain SGD add up: after n steps the weights are W + S^T X, where rows of S are the gradients
of outputs times the negative learning rate, and rows of X are inputs. A layer multiplies by W and by the two factors;
their product is added to W after many steps, or before any other operation reads the weights.

Lanes of clients that start from the same W defer the updates of a whole round: they share W, which multiplies the
batches of all lanes together.
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
"""Maximum number of rows in the factors."""
FEW = 16
"""Maximum number of rows in a batch for which updates are deferred."""
SIZES = 4
"""Number of sizes of the factors of lanes; each size needs a recorded step."""
_INDIFFERENT = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cpu", "is_cuda")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.autograd.grad}  # fmt: skip
"""Functions that do not read the values of a weight."""


class HeldUpdates:
    """Deferred updates of ``w_OI``, as factors.

    ``fast``: whether oneDNN computes products. ``listening``: whether the current backward pass belongs to the step.
    """

    def __init__(self, w_OI: Tensor, *, fast: bool) -> None:
        self.w_OI, self.fast = w_OI, fast and may_multiply_by_onednn()
        self.s_RO, self.x_RI = (w_OI.new_empty(ROWS, size) for size in w_OI.shape)
        self.rows = 0
        self.listening = False
        self.gradients: list[tuple[Tensor, Tensor]] = []

    def expose(self) -> Tensor:
        """Return the weights as a leaf of a new graph, with the deferred updates attached."""
        exposed: _DeferredWeight = torch.Tensor._make_subclass(_DeferredWeight, self.w_OI, True)
        exposed.held = self
        return exposed

    def multiply(self, left_BN: Tensor, right_PN: Tensor) -> Tensor:
        """Return ``left right^T``."""
        return multiply_by_onednn(left_BN, right_PN, None) if self.fast else F.linear(left_BN, right_PN)

    def add_(self, lr: float) -> None:
        """Defer the update of an SGD step along the recorded gradients."""
        for grad_BO, x_BI in self.gradients:
            if self.rows + len(x_BI) > ROWS:
                self.settle()
            span = slice(self.rows, self.rows + len(x_BI))
            torch.mul(grad_BO, -lr, out=self.s_RO[span])
            self.x_RI[span] = x_BI
            self.rows += len(x_BI)
        self.gradients.clear()

    @torch.no_grad()
    def settle(self) -> None:
        """Add the deferred updates to the weights."""
        if self.rows:
            s_OR, x_RI = self.s_RO[: self.rows].t(), self.x_RI[: self.rows]
            self.rows = 0
            if self.fast:
                self.w_OI.add_(self.multiply(s_OR, x_RI.t()))
            else:
                self.w_OI.addmm_(s_OR, x_RI)


class _Product(torch.autograd.Function):
    """``x (W + S^T X)^T + b``; the backward pass of a step records the weights' gradient in factored form."""

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None, held: HeldUpdates) -> Tensor:
        ctx.save_for_backward(x_BI)
        ctx.w_OI, ctx.held = w_OI, held
        out_BO = held.multiply(x_BI, held.w_OI)
        if held.rows:
            out_BO.addmm_(F.linear(x_BI, held.x_RI[: held.rows]), held.s_RO[: held.rows])
        return out_BO if b_O is None else out_BO.add_(b_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        held: HeldUpdates = ctx.held
        (x_BI,), (grad_BO,) = ctx.saved_tensors, grads
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        grad_x = grad_w = None
        if torch.is_grad_enabled():  # differentiated again
            grad_x, grad_w = grad_BO @ ctx.w_OI, grad_BO.t() @ x_BI
        else:
            if needs_x:
                grad_x = held.multiply(grad_BO, held.w_OI.t())
                if held.rows:
                    grad_x.addmm_(F.linear(grad_BO, held.s_RO[: held.rows]), held.x_RI[: held.rows])
            if held.listening:
                held.gradients.append((grad_BO, x_BI))
            elif needs_w:
                grad_w = grad_BO.t() @ x_BI
        return grad_x, grad_w, grad_BO.sum(dim=0) if needs_b else None, None


class _DeferredWeight(Tensor):
    """A weight with deferred updates: linear layers apply them in factored form, other operations settle them first."""

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


def _apply(*arguments: Any) -> Tensor:
    output: Tensor = _Product.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


def _fits(x: Any, weight: Any, bias: Any = None) -> bool:
    """Return whether ``weight`` has deferred updates and ``x`` has few rows and the same dtype and device."""
    if not isinstance(weight, _DeferredWeight) or any(isinstance(each, _DeferredWeight) for each in (x, bias)):
        return False
    usual = x.dtype == weight.dtype and x.device == weight.device and x.shape[-1:] == weight.shape[1:]
    return usual and not torch.is_autocast_enabled("cpu") and 0 < x.numel() <= FEW * x.shape[-1]


class LaneUpdates:
    """Deferred updates of ``lanes`` clients that start from ``w_OI``, as factors of at most ``rows`` rows per lane.

    ``fast``: products that the layer computes with oneDNN.
    """

    def __init__(self, w_OI: Tensor, lanes: int, rows: int, fast: frozenset[str]) -> None:
        self.w_OI, self.fast = w_OI, fast
        self.s_KRO, self.x_KRI = (w_OI.new_zeros(lanes, rows, size) for size in w_OI.shape)
        self.rows = 0

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the factors ``[K, R, O]`` and ``[K, R, I]``, padded with zeros to one of ``SIZES`` sizes."""
        block = -(-self.s_KRO.shape[1] // SIZES)
        held = -(-self.rows // block) * block
        return self.s_KRO[:, :held], self.x_KRI[:, :held]

    def add_(self, grad_KBO: Tensor, x_KBI: Tensor, lr: float) -> None:
        """Defer the update of an SGD step, given the gradients of the layer's outputs, and its inputs."""
        span = slice(self.rows, self.rows + x_KBI.shape[1])
        torch.mul(grad_KBO, -lr, out=self.s_KRO[:, span])
        self.x_KRI[:, span] = x_KBI
        self.rows = span.stop

    def mean(self) -> Tensor:
        """Return the mean of the lanes' weights."""
        lanes = len(self.s_KRO)
        return self.w_OI.addmm(self.s_KRO.flatten(0, 1).t(), self.x_KRI.flatten(0, 1), alpha=1 / lanes)


class LaneWeight(Tensor):
    """The weight ``w + s^T x`` of one lane under ``torch.vmap``, for a single call of a linear layer.

    ``slope [B, O]``: zeros that the layer adds to its outputs, so that their gradient is the gradient of the outputs.
    """

    base: Tensor
    held: Sequence[Tensor]
    slope: Tensor
    fast: frozenset[str]
    _input: Tensor | None

    @classmethod
    def of(cls, w_OI: Tensor, held: Sequence[Tensor], slope_BO: Tensor, fast: frozenset[str]) -> LaneWeight:
        """Return the weight ``w_OI + s_RO^T x_RI`` of a lane; ``held``: ``s_RO`` and ``x_RI``."""
        weight: LaneWeight = torch.Tensor._make_subclass(cls, w_OI)
        weight.base, weight.held, weight.slope, weight.fast, weight._input = w_OI, held, slope_BO, fast, None
        return weight

    @property
    def input(self) -> Tensor:
        """The input of the layer, ``[B, I]``; raises :class:`NotImplementedError` if no layer used the weight."""
        if self._input is None:
            raise NotImplementedError("no linear layer uses the weight with deferred updates")
        return self._input

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _INDIFFERENT:
                return func(*args, **(kwargs or {}))
            if func is not F.linear or kwargs or not isinstance(args[1], cls):
                raise NotImplementedError(f"{func} of a weight with deferred updates")
            x_BI, weight, bias = (*args, None)[:3]
            s_RO, x_RI = weight.held
            if weight._input is not None or x_BI.dim() != 2 or len(x_BI) != len(weight.slope):
                raise NotImplementedError("a weight with deferred updates supports one batch of vectors")
            weight._input = x_BI
            out_BO = multiply_in_lane(x_BI, weight.base, weight.fast) + weight.slope
            out_BO = out_BO + x_BI @ x_RI.t() @ s_RO if len(s_RO) else out_BO
            return out_BO if bias is None else out_BO + bias
