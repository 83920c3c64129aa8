"""Linear layers by oneDNN where that beats the library torch calls: float32 on AMD processors.

Torch multiplies float32 matrices by MKL, which leaves AMD's wide vector units idle; its convolutions go by oneDNN,
which does not. The operator that reaches oneDNN's product is private to torch: where it is missing or refuses a trial,
layers stay torch's own. The product sums in another order, so results differ from torch's by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST = 2**15
"""Weights below which torch's own product is as fast."""

_off: ContextVar[bool] = ContextVar("torch_linear", default=False)


@contextmanager
def torch_linear() -> Iterator[None]:
    """Inside the block, layers multiply as torch does (the operator does not run under ``torch.vmap``)."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


@cache
def available() -> bool:
    """Whether this machine is one where oneDNN's product is faster, and torch reaches it."""
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
        return (
            _linear(grad_BO, w_OI.t()) if x_wanted else None,
            _linear(grad_BO.t(), x_BI.t()) if w_wanted else None,
            grad_BO.sum(dim=0) if b_wanted else None,
        )


def _linear(x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None = None) -> Tensor:
    made: Tensor = _Linear.apply(x_BI, w_OI, b_O)  # type: ignore[no-untyped-call]
    return made


class QuickLinear(nn.Linear):
    """A linear layer that multiplies by oneDNN outside :func:`torch_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., I]`` to ``[..., O]``."""
        if _off.get() or torch.is_autocast_enabled("cpu") or x.dtype != torch.float32 or x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        return _linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias).reshape(*x.shape[:-1], -1)

    def _get_name(self) -> str:
        return "Linear"


def quicken(module: nn.Module) -> nn.Module:
    """``module`` with its large float32 linear layers multiplying by oneDNN, where that is available."""
    for layer in module.modules() if available() else ():
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and layer.weight.numel() >= LEAST:
            layer.__class__ = QuickLinear
    return module
