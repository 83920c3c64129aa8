"""Linear layers that compute products with torch's default library or with oneDNN, whichever is faster.

Torch multiplies float32 matrices with MKL, which does not use the widest vector units of AMD's processors. oneDNN,
which torch uses for convolutions, does, but has a larger overhead per call. The faster one is measured
(:func:`fedshift.engines.cost_model.choose_products`) and stored in the layer, so that it is fixed during a trial.
Torch's operator for oneDNN's product is private: if it is missing or fails a test, layers are not replaced. oneDNN sums
in another order, so that results differ from torch's by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST = 2**15
"""Minimum number of weights for which oneDNN can be faster."""

ALONE = ("outputs", "inputs' gradients", "weights' gradients")
"""Products of a layer."""

LANES = tuple(f"{kind} of lanes" for kind in ALONE)
"""The same products of stacked clients: one by one with oneDNN, batched with torch."""

_lanes: ContextVar[bool] = ContextVar("side_by_side", default=False)
_off: ContextVar[bool] = ContextVar("torch_linear", default=False)


def use_torch_linear() -> AbstractContextManager[None]:
    """Disable the fast products and convolutions inside the block."""
    return _set(_off)


def vmapped_lanes() -> AbstractContextManager[None]:
    """Declare that layers inside the block run under one ``torch.vmap``, with gradients computed outside of it."""
    return _set(_lanes)


@contextmanager
def use_torch_func() -> Iterator[None]:
    """Make layers inside the block support ``torch.func``, which differentiates while the network runs."""
    with use_torch_linear(), vmapped_lanes():
        yield


@contextmanager
def _set(switch: ContextVar[bool]) -> Iterator[None]:
    token = switch.set(True)
    try:
        yield
    finally:
        switch.reset(token)


@cache
def is_available() -> bool:
    """Return whether torch's operator for oneDNN's product works on this machine."""
    try:
        return torch.equal(multiply_by_onednn(torch.ones(2, 3), torch.ones(4, 3), None), torch.full((2, 4), 3.0))
    except (AttributeError, RuntimeError, TypeError):
        return False


def runs_in_lanes() -> bool:
    """Return whether layers run inside :func:`vmapped_lanes`."""
    return _lanes.get()


def may_merge_lanes() -> bool:
    """Return whether layers may merge lanes: inside :func:`vmapped_lanes`, but not :func:`use_torch_linear`."""
    return _lanes.get() and not _off.get()


def may_multiply_by_onednn() -> bool:
    """Return whether layers of one client may call :func:`multiply_by_onednn` here."""
    return is_available() and not (_lanes.get() or _off.get())


def multiply_by_onednn(x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None) -> Tensor:
    """Return ``x w^T + b``."""
    out_BO: Tensor = torch.ops.mkldnn._linear_pointwise(x_BI, w_OI, b_O, "none", [], "")
    return out_BO


def _multiply(left_MN: Tensor, right_PN: Tensor, b_P: Tensor | None = None, *, fast: bool) -> Tensor:
    """Return ``left right^T + b``, computed by oneDNN if ``fast``."""
    return (multiply_by_onednn if fast else F.linear)(left_MN, right_PN, b_P)


def _multiply_lanes(left_KMN: Tensor, right_KPN: Tensor, b_KP: Tensor | None = None, *, fast: bool) -> Tensor:
    """Return :func:`_multiply` of each lane."""
    if fast:
        b_K = [None] * len(left_KMN) if b_KP is None else b_KP
        return torch.stack([multiply_by_onednn(*lane) for lane in zip(left_KMN, right_KPN, b_K, strict=True)])
    right_KNP = right_KPN.transpose(1, 2)
    return left_KMN.bmm(right_KNP) if b_KP is None else torch.baddbmm(b_KP[:, None], left_KMN, right_KNP)


class _Linear(torch.autograd.Function):
    """``x w^T + b`` with the products ``fast`` by oneDNN; differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None, fast: frozenset[str]) -> Tensor:
        ctx.save_for_backward(x_BI, w_OI)
        ctx.fast = fast
        return _multiply(x_BI, w_OI, b_O, fast=ALONE[0] in fast)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_BI, w_OI), (grad_BO,) = ctx.saved_tensors, grads
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        _, fast_x, fast_w = (kind in ctx.fast for kind in ALONE)

        def multiply(left: Tensor, right: Tensor, fast: bool) -> Tensor:
            if fast and torch.is_grad_enabled():  # differentiated again
                return _linear(left, right, None, ctx.fast)
            return _multiply(left, right, fast=fast)

        return (
            multiply(grad_BO, w_OI.t(), fast_x) if needs_x else None,
            multiply(grad_BO.t(), x_BI.t(), fast_w) if needs_w else None,
            grad_BO.sum(dim=0) if needs_b else None,
            None,
        )


def _linear(x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None, fast: frozenset[str]) -> Tensor:
    out_BO: Tensor = _Linear.apply(x_BI, w_OI, b_O, fast)  # type: ignore[no-untyped-call]
    return out_BO


class _Lanes(torch.autograd.Function):
    """:class:`_Linear` of each lane, ``[K, B, I]`` by ``[K, O, I]``."""

    @staticmethod
    def forward(ctx: Any, x_KBI: Tensor, w_KOI: Tensor, b_KO: Tensor | None, fast: frozenset[str]) -> Tensor:
        ctx.save_for_backward(x_KBI, w_KOI)
        ctx.fast = fast
        return _multiply_lanes(x_KBI, w_KOI, b_KO, fast=LANES[0] in fast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_KBI, w_KOI), (grad_KBO,) = ctx.saved_tensors, grads
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        _, fast_x, fast_w = (kind in ctx.fast for kind in LANES)
        return (
            _multiply_lanes(grad_KBO, w_KOI.mT, fast=fast_x) if needs_x else None,
            _multiply_lanes(grad_KBO.mT, x_KBI.mT, fast=fast_w) if needs_w else None,
            grad_KBO.sum(dim=1) if needs_b else None,
            None,
        )


class _Lane(torch.autograd.Function):
    """One lane of :class:`_Lanes`, to be called under ``torch.vmap``."""

    @staticmethod
    def forward(x_BI: Tensor, w_OI: Tensor, b_O: Tensor | None, fast: frozenset[str]) -> Tensor:  # noqa: ARG004
        return F.linear(x_BI, w_OI, b_O)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: :class:`_Lanes` provides gradients."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Tensor, int]:
        *tensors, fast = arguments
        if in_dims[0] is not None and in_dims[1] is None and in_dims[2] is None:  # lanes share the weights
            x_KBI, w_OI, b_O = tensors[0].movedim(in_dims[0], 0), *tensors[1:]
            return _linear(x_KBI.flatten(0, 1), w_OI, b_O, fast).reshape(*x_KBI.shape[:2], -1), 0
        lanes = [
            None
            if value is None
            else value.expand(info.batch_size, *value.shape)
            if dim is None
            else value.movedim(dim, 0)
            for value, dim in zip(tensors, in_dims[:-1], strict=True)
        ]
        return _Lanes.apply(*lanes, fast), 0  # type: ignore[no-untyped-call]


def multiply_in_lane(x_BI: Tensor, w_OI: Tensor, fast: frozenset[str]) -> Tensor:
    """Return ``x w^T`` under ``torch.vmap`` with lanes that share ``w``; products ``fast`` by oneDNN."""
    out_BO: Tensor = _Lane.apply(x_BI, w_OI, None, fast)  # type: ignore[no-untyped-call]
    return out_BO


def make_products(rows: int, inputs: int, outputs: int) -> dict[str, tuple[Callable[[], Tensor], ...]]:
    """Return functions that compute each product of a layer, or of two lanes, with torch's library and with oneDNN."""
    x, w, grad = (torch.full((2, *size), 0.5) for size in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    factors = (x, w), (grad, w.mT), (grad.mT, x.mT)
    products: dict[str, tuple[Callable[[], Tensor], ...]] = {}
    for single, stacked, (left, right) in zip(ALONE, LANES, factors, strict=True):
        products[single] = tuple(partial(_multiply, left[0], right[0], fast=fast) for fast in (False, True))
        products[stacked] = tuple(partial(_multiply_lanes, left, right, fast=fast) for fast in (False, True))
    return products


class FastLinear(nn.Linear):
    """A linear layer that computes selected products with oneDNN, except inside :func:`use_torch_linear`."""

    _chosen: frozenset[str] = frozenset()
    """Products computed by oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``input [..., I]`` to ``[..., O]``."""
        x = input  # the argument's name is torch's, for networks that pass it by keyword
        if type(self.weight) not in (Tensor, nn.Parameter):  # subclasses define the product, like deferred updates
            return F.linear(x, self.weight, self.bias)
        lanes = _lanes.get()
        plain = x.dtype == self.weight.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
        fits = x.shape[-1:] == self.weight.shape[1:]  # otherwise torch raises a clear error
        fast = plain and fits and not self._chosen.isdisjoint(LANES if lanes else ALONE)
        if _off.get() or torch.is_autocast_enabled("cpu") or not fast:
            return F.linear(x, self.weight, self.bias)
        x_BI = x.reshape(-1, x.shape[-1])
        out_BO = (_Lane.apply if lanes else _linear)(x_BI, self.weight, self.bias, self._chosen)
        return out_BO.reshape(*x.shape[:-1], -1)

    def _get_name(self) -> str:
        return "Linear"


def use_fast_linear(module: nn.Module) -> nn.Module:
    """Replace large float32 linear layers in ``module`` by :class:`FastLinear`, in place; return ``module``."""
    for layer in module.modules() if is_available() else ():
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and layer.weight.numel() >= LEAST:
            layer.__class__ = FastLinear
    return module


def chosen_products(layer: nn.Linear) -> frozenset[str]:
    """Return the products that a layer computes with oneDNN."""
    return layer._chosen if isinstance(layer, FastLinear) else frozenset()


def list_products(module: nn.Module) -> dict[str, list[str]]:
    """Return the products that each layer computes with oneDNN, in order."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, FastLinear)}
    return {name: [kind for kind in ALONE + LANES if kind in layer._chosen] for name, layer in layers.items()}


def set_products(module: nn.Module, chosen: Mapping[str, Sequence[str]]) -> None:
    """Make layers compute exactly the products ``chosen`` with oneDNN; layers that are not named stay unchanged."""
    for name, layer in module.named_modules():
        if isinstance(layer, FastLinear) and name in chosen:
            layer._chosen = frozenset(chosen[name])
