"""Deferred updates: weights of large linear layers with updates kept in factored form.

The gradient of a layer with B samples in a batch is the product of two matrices with B rows. For small B, writing it,
reading it and updating the weights takes longer than multiplying by them (FedWon: B = 4, Zhuang & Lyu 2024,
arXiv:2306.05879). Steps of plain SGD add up: after n steps the weights are W + S^T X, where rows of S are the gradients
of outputs times the negative learning rate, and rows of X are inputs. Lanes of clients that start from the same W defer
the updates of a whole round: they share W, which multiplies the batches of all lanes together, and each lane multiplies
by its two factors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 16
"""Maximum number of rows in a batch for which updates are deferred."""
SIZES = 4
"""Number of sizes of the factors of lanes; each size needs a recorded step."""
_INDIFFERENT = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cpu", "is_cuda")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.autograd.grad}  # fmt: skip
"""Functions that do not read the values of a weight."""


def _multiply(left_MN: Tensor, right_PN: Tensor) -> Tensor:
    """Return ``left right^T``; oneDNN takes half as long as torch's usual library for few outputs (float32, CPU)."""
    if not (left_MN.is_cpu and left_MN.dtype == torch.float32 and torch._C._has_mkldnn):
        return F.linear(left_MN, right_PN)
    product_MP: Tensor = torch.ops.mkldnn._linear_pointwise(left_MN, right_PN, None, "none", [], "")
    return product_MP


class _Product(torch.autograd.Function):
    """``x w^T`` for a constant ``w`` that all lanes share, called under ``torch.vmap``."""

    @staticmethod
    def forward(x_BI: Tensor, w_OI: Tensor) -> Tensor:
        return _multiply(x_BI, w_OI)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _multiply(grads[0], ctx.saved_tensors[0].t()), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, w_OI: Tensor) -> tuple[Tensor, int]:  # noqa: ARG004
        x_KBI = x.movedim(in_dims[0], 0)
        out_RO: Tensor = _Product.apply(x_KBI.flatten(0, 1), w_OI)  # type: ignore[no-untyped-call]
        return out_RO.reshape(*x_KBI.shape[:2], -1), 0


class LaneUpdates:
    """Deferred updates of ``lanes`` clients that start from ``w_OI``, as factors of at most ``rows`` rows per lane."""

    def __init__(self, w_OI: Tensor, lanes: int, rows: int) -> None:
        self.w_OI = w_OI
        self.s_KRO, self.x_KRI = (w_OI.new_zeros(1).expand(lanes, rows, size) for size in w_OI.shape)
        self.rows = 0

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the factors ``[K, R, O]`` and ``[K, R, I]``, padded with zeros to one of ``SIZES`` sizes."""
        block = -(-self.s_KRO.shape[1] // SIZES)
        rows = -(-self.rows // block) * block
        return self.s_KRO[:, :rows], self.x_KRI[:, :rows]

    def add_(self, grad_KBO: Tensor, x_KBI: Tensor, lr: float) -> None:
        """Defer the update of an SGD step, given the gradients of the layer's outputs, and its inputs."""
        span = slice(self.rows, self.rows + x_KBI.shape[1])
        if span == slice(0, self.x_KRI.shape[1]):  # the only step needs no copy
            self.s_KRO, self.x_KRI = grad_KBO * -lr, x_KBI
        else:
            self.s_KRO, self.x_KRI = self.s_KRO.contiguous(), self.x_KRI.contiguous()
            torch.mul(grad_KBO, -lr, out=self.s_KRO[:, span])
            self.x_KRI[:, span] = x_KBI
        self.rows = span.stop

    def mean(self) -> Tensor:
        """Return the mean of the lanes' weights."""
        lanes = len(self.s_KRO)
        return self.w_OI.add(_multiply(self.s_KRO.flatten(0, 1).t(), self.x_KRI.flatten(0, 1).t()), alpha=1 / lanes)


class LaneWeight(Tensor):
    """The weight ``w + s^T x`` of one lane under ``torch.vmap``, for a single call of a linear layer.

    ``slope [B, O]``: zeros that the layer adds to its outputs, so that their gradient is the gradient of the outputs.
    """

    base: Tensor
    factors: tuple[Tensor, Tensor]
    slope: Tensor
    _input: Tensor | None

    @classmethod
    def of(cls, w_OI: Tensor, s_RO: Tensor, x_RI: Tensor, slope_BO: Tensor) -> LaneWeight:
        """Return the weight ``w_OI + s_RO^T x_RI`` of a lane."""
        weight: LaneWeight = torch.Tensor._make_subclass(cls, w_OI)
        weight.base, weight.factors, weight.slope, weight._input = w_OI, (s_RO, x_RI), slope_BO, None
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
            s_RO, x_RI = weight.factors
            if weight._input is not None or x_BI.dim() != 2 or len(x_BI) != len(weight.slope):
                raise NotImplementedError("a weight with deferred updates supports one batch of vectors")
            weight._input = x_BI
            out_BO = _Product.apply(x_BI, weight.base) + weight.slope  # type: ignore[no-untyped-call]
            out_BO = out_BO + x_BI @ x_RI.t() @ s_RO if len(s_RO) else out_BO
            return out_BO if bias is None else out_BO + bias
