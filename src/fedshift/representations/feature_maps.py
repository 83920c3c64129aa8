"""Feature maps: what leaves a convolution when a model looks at images.

A convolution is known by its type (scaled weight standardization is one too), never by its name. Its maps are its own
output, before any normalization, activation and pooling that may follow: the one place that networks with and without
BatchNorm have in common.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..analysis.similarity import Reals
from ..core.plan import Plan, forward
from ..data.federation import ClientData
from ..evaluation.metrics import BATCH
from ..utils.errors import UsageError, unknown_name
from ..utils.random_streams import stream
from ..utils.state import State


def list_convolutions(plan: Plan, x: Tensor) -> tuple[str, ...]:
    """Names of the convolutions that inputs ``x [N, ...]`` pass, in the order in which they do.

    Raises :class:`UsageError` where there are none.
    """
    names = [name for name, layer in plan.module.named_modules() if isinstance(layer, _ConvNd)]
    found = tuple(record_maps(plan, plan.initial, x, names))
    if not found:
        raise UsageError(
            f"the network of {plan.method.name} has no convolution, and so no feature maps: choose a run of one that "
            "has, for example small-cnn"
        )
    return found


def find_layer(plan: Plan, x: Tensor, wanted: str | None) -> str:
    """The convolution of the name ``wanted``, or the last one; raises :class:`UsageError` where there is none."""
    names = list_convolutions(plan, x)
    if wanted is not None and wanted not in names:
        raise unknown_name("convolution", wanted, names)
    return wanted or names[-1]


def record_maps(plan: Plan, state: State, x: Tensor, layers: Collection[str]) -> dict[str, Reals]:
    """Maps ``[N, C, *pixels]`` that leave ``layers`` of the model under ``state``, by layer in the order of their work.

    Of a layer that works several times, the last. They are copies: an activation may work in place.
    """
    parts = [_record_maps(plan, state, part, layers) for part in torch.split(x, BATCH)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _record_maps(plan: Plan, state: State, x: Tensor, layers: Collection[str]) -> dict[str, Reals]:
    found: dict[str, Reals] = {}

    def keep(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        found.pop(name, None)
        plain = torch.promote_types(output.dtype, torch.float32)  # NumPy has no bfloat16
        found[name] = output.detach().to("cpu", plain, copy=True).numpy()

    named = ((name, layer) for name, layer in plan.module.named_modules() if name in layers)
    hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in named]
    try:
        forward(plan, state, x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def choose_rows(client: ClientData, samples: int) -> Tensor:
    """Which test samples of ``client`` are looked at, int64 ``[N]``: ``samples`` at most, the same in every trial."""
    return torch.from_numpy(stream(0, "features", client.name).permutation(len(client.test))[:samples])


def select_inputs(plan: Plan, client: ClientData, samples: int) -> Tensor:
    """Those samples as the network of ``plan`` takes them, ``[N, ...]``."""
    return client.test.inputs(choose_rows(client, samples).to(client.test.y.device), plan.dtype)
