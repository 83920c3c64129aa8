"""The range of float16, from 6e-8 to 65504, and the values of a step that lie beyond it.

Larger values become infinite and smaller ones zero (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). A step is
taken in float16 and in float32, which differ in nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ..core.network import forward
from ..core.plan import Plan
from ..core.states import LocalTrainingState
from ..core.step import compute_gradients
from ..nn.recognition import placed_hooks
from ..utils.state import clone, pick

LARGEST = torch.finfo(torch.float16).max
Step = tuple[LocalTrainingState, Tensor, Tensor, Tensor]
"""The job before a step, and the step's inputs ``[B, ...]``, targets ``[B, ...]`` and key."""


def advise(plan: Plan, step: Step) -> str:
    """Return which values of ``step`` are beyond the range, if any are, and the fix."""
    beyond = _find_overflow(plan, step)
    fix = "scale the data" if beyond else "scale the data, lower the learning rate"
    beyond = beyond or "a value may lie"
    return f"With precision=float16, {beyond} beyond its range, {LARGEST:g}: {fix}, or compute in bfloat16 or float32"


def _find_overflow(plan: Plan, step: Step) -> str:
    """Return the first values of ``step`` beyond the range, as a clause; ``""``: there are none."""
    low, exact = (_measure_layers(each, *step) for each in (plan, replace(plan, precision="float32")))
    name = next((name for name, (_, output) in low.items() if output == inf), None)
    if name is None:
        return ""
    place = f"layer {name!r}" if name else "the network"
    reached = dict(zip(("inputs", "outputs"), exact[name], strict=True))
    beyond = [f"{what} of {place} reach {most:.2g}," for what, most in reached.items() if LARGEST < most < inf]
    return beyond[0] if beyond else ""


def list_underflows(plan: Plan, step: Step) -> list[str]:
    """Return the weights of which ``step`` loses most of the gradient, because its values are below the range.

    Biases are not considered: in front of BatchNorm, theirs are zero up to rounding.
    """
    low, exact = (compute_gradients(each, *step)[0] for each in (plan, replace(plan, precision="float32")))
    weights = [name for name in plan.params if plan.initial[name].ndim > 1 and name in low and name in exact]
    return [name for name in weights if low[name].double().norm() < exact[name].double().norm() / 2]


def _measure_layers(
    plan: Plan, job: LocalTrainingState, x: Tensor, _y: Tensor, key: Tensor
) -> dict[str, tuple[float, float]]:
    """Return the largest values that each layer reads and writes in the forward pass, in the order of their ends."""
    largest: dict[str, tuple[float, float]] = {}

    def measure(name: str, _layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        largest.setdefault(name, (max(map(_find_largest, inputs), default=0.0), _find_largest(output)))

    hooks = [layer.register_forward_hook(partial(measure, name)) for name, layer in plan.module.named_modules()]
    with placed_hooks(hooks):
        forward(plan, clone(pick(job.state, plan.initial)), x, training=True, key=key)
    return largest


def _find_largest(values: Any) -> float:
    """Return the largest absolute value of a tensor, infinite if one is not a number; 0 for anything else."""
    if not isinstance(values, Tensor) or not values.numel():
        return 0.0
    return float(values.detach().float().abs().nan_to_num(inf, inf).max())
