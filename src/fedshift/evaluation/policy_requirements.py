"""Requirements of policies: each function returns why a plan and a task do not meet one; empty if they do."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm

from ..core.plan import Plan
from ..core.selection import norm_statistics, normalizes_as_torch
from ..tasks.task import Task
from .batch_norm import list_batch_norm_parameters, list_norm_parameters


def require_personal_models(plan: Plan, _: Task) -> str:
    """Clients have personal models."""
    return "" if plan.personalizes else "the one global model, shown unchanged,"


def require_statistics(plan: Plan, _: Task) -> str:
    """The model has BatchNorm statistics."""
    return "" if any(map(norm_statistics, plan.entries)) else "there are no BatchNorm statistics"


def require_torch_statistics(plan: Plan, _: Task) -> str:
    """All layers with BatchNorm statistics use them as torch's BatchNorm does."""
    for name, layer in plan.module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and not normalizes_as_torch(layer):
            return (
                f"layer {name!r} is a {type(layer).__name__}, which uses its statistics otherwise than torch's"
                " BatchNorm"
            )
    return ""


def require_kept_statistics(plan: Plan, _: Task) -> str:
    """Clients keep personal BatchNorm statistics."""
    kept = any(norm_statistics(entry) and entry.name in plan.personal for entry in plan.entries)
    return "" if kept else "clients keep no BatchNorm statistics to compare"


def require_batch_norm(plan: Plan, _: Task) -> str:
    """BatchNorm has trained parameters."""
    return "" if list_batch_norm_parameters(plan) else "there is no BatchNorm to train"


def require_normalization(plan: Plan, _: Task) -> str:
    """Normalization layers have trained parameters."""
    return "" if list_norm_parameters(plan) else "there is no normalization with weight and bias"


def require_entropy(_: Plan, task: Task) -> str:
    """Predictions of the task have an entropy."""
    return f"predictions of {task} have no entropy" if type(task).entropy is Task.entropy else ""
