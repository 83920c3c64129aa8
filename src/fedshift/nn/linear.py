"""Linear layers by oneDNN where that beats the library torch calls: float32 on AMD processors.

Torch multiplies float32 matrices by MKL, which leaves AMD's wide vector units idle; its convolutions go by oneDNN,
which does not. The operator that reaches oneDNN's product is private to torch: where it is missing or refuses a trial,
layers stay torch's own. The product sums in another order, so results differ from torch's by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST = 2**15
"""Weights below which torch's own product is as fast."""

WORTH = 2**20
"""Multiplications of one lane from which lanes one after another are faster than torch's batched product."""

_lanes: ContextVar[bool] = ContextVar("side_by_side", default=False)
_off: ContextVar[bool] = ContextVar("torch_linear", default=False)


def use_torch_linear() -> AbstractContextManager[None]:
    """Inside the block, layers multiply as torch does."""
    return _set(_off)


def vmapped_lanes() -> AbstractContextManager[None]:
    """Inside the block, layers run under one ``torch.vmap``, outside of which gradients are taken."""
    return _set(_lanes)


@contextmanager
def _set(switch: ContextVar[bool]) -> Iterator[None]:
    token = switch.set(True)
    try:
        yield
    finally:
        switch.reset(token)


@cache
def is_available() -> bool:
    """Return whether this machine is one where oneDNN's product is faster, and torch reaches it."""
    try:
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
        x_BI, w_OI = torch.ones(2, 3), torch.ones(4, 3)
        return amd and torch.equal(_product(x_BI, w_OI, None), torch.full((2, 4), 3.0))
    except (OSError, AttributeError, RuntimeError, TypeError):
        return False


def _product(x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x_BI, w_OI, b_O, "none", [], "")
    return made


class _Linear(torch.autograd.Function):
    """``x w^T + b``; its gradients are products of the same kind, so that it can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_BI, w_OI)
        return _product(x_BI, w_OI, b_O)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x_BI, w_OI), (grad_BO,) = ctx.saved_tensors, given
        x_wanted, w_wanted, b_wanted = ctx.needs_input_grad
        product = _linear if torch.is_grad_enabled() else _product  # whether it will be differentiated again
        return (
            product(grad_BO, w_OI.t(), None) if x_wanted else None,
            product(grad_BO.t(), x_BI.t(), None) if w_wanted else None,
            grad_BO.sum(dim=0) if b_wanted else None,
        )


def _linear(x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None) -> Tensor:
    made: Tensor = _Linear.apply(x_BI, w_OI, b_O)  # type: ignore[no-untyped-call]
    return made


class _Lanes(torch.autograd.Function):
    """:class:`_Linear` of lanes side by side, ``[K, B, I]`` by ``[K, O, I]``, one after another."""

    @staticmethod
    def forward(ctx: Any, x_KBI: Tensor, w_KOI: Tensor, b_KO: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_KBI, w_KOI)
        b_K = [None] * len(x_KBI) if b_KO is None else b_KO
        return torch.stack([_product(x, w, b) for x, w, b in zip(x_KBI, w_KOI, b_K, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x_KBI, w_KOI), (grad_KBO,) = ctx.saved_tensors, given
        x_wanted, w_wanted, b_wanted = ctx.needs_input_grad

        def products(left: Tensor, right: Tensor) -> Tensor:
            return torch.stack([_product(a, b.t(), None) for a, b in zip(left, right, strict=True)])

        return (
            products(grad_KBO, w_KOI) if x_wanted else None,
            products(grad_KBO.transpose(1, 2), x_KBI) if w_wanted else None,
            grad_KBO.sum(dim=1) if b_wanted else None,
        )


class _Lane(torch.autograd.Function):
    """One lane of :class:`_Lanes`, to be called under ``torch.vmap``."""

    @staticmethod
    def forward(x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None) -> Tensor:
        return F.linear(x_BI, w_OI, b_O)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: gradients are those of :class:`_Lanes`."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *given: Tensor | None) -> tuple[Tensor, int]:
        lanes = [
            None
            if value is None
            else value.expand(info.batch_size, *value.shape)
            if dim is None
            else value.movedim(dim, 0)
            for value, dim in zip(given, in_dims, strict=True)
        ]
        return _Lanes.apply(*lanes), 0  # type: ignore[no-untyped-call]


class FastLinear(nn.Linear):
    """A linear layer that multiplies by oneDNN outside :func:`use_torch_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., I]`` to ``[..., O]``."""
        usual = x.dtype == self.weight.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
        fits = x.shape[-1:] == self.weight.shape[1:]  # where it does not, torch says so in plain words
        if _off.get() or torch.is_autocast_enabled("cpu") or not (usual and fits):
            return F.linear(x, self.weight, self.bias)
        x_BI = x.reshape(-1, x.shape[-1])
        if not _lanes.get():
            made = _linear(x_BI, self.weight, self.bias)
        elif len(x_BI) * self.weight.numel() < WORTH:
            return F.linear(x, self.weight, self.bias)
        else:
            made = _Lane.apply(x_BI, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return made.reshape(*x.shape[:-1], -1)

    def _get_name(self) -> str:
        return "Linear"


def use_fast_linear(module: nn.Module) -> nn.Module:
    """``module`` with its large float32 linear layers multiplying by oneDNN, where that is available."""
    for layer in module.modules() if is_available() else ():
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and layer.weight.numel() >= LEAST:
            layer.__class__ = FastLinear
    return module
