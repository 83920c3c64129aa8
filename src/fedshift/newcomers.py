"""Models for clients that never trained, under methods that keep state on clients.

``average``: what the server holds, with the seen clients' own entries averaged by samples (FedWon, arXiv:2306.05879,
table 12). ``reestimate``: the same, but BatchNorm statistics are estimated on the newcomer's own training inputs,
without labels (FedBN, arXiv:2102.07623, appendix G). ``nearest``: the model of the seen client that fits the newcomer's
training data best. Averaging and trying models needs sight of all clients' entries, which a simulation has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from .base.errors import UsageError
from .base.state import State, clone, pick
from .core.aggregate import weighted_mean
from .core.kernel import Client, Server, global_state, personal_state
from .core.plan import Plan, scratch
from .core.select import norm_statistics
from .data.split import Split
from .evaluate import BATCH, evaluate

Seen = Mapping[str, tuple[Client, int]]
"""Clients that have trained, with their numbers of training samples."""


def check_policy(plan: Plan, policy: str) -> None:
    """Raise :class:`UsageError` where ``policy`` cannot work under ``plan``."""
    if policy == "reestimate" and not any(map(norm_statistics, plan.entries)):
        raise UsageError(
            f"unseen='reestimate' estimates BatchNorm statistics, of which the model has none under "
            f"{plan.method.name}: use 'average' or 'nearest'"
        )


def newcomer_state(plan: Plan, server: Server, seen: Seen, train: Split, policy: str) -> State | None:
    """The model for a client with training data ``train`` that never trained; None under ``skip`` or where none has."""
    if policy == "skip" or not seen:
        return None
    if policy == "nearest":
        models = [personal_state(plan, client, server) for _, (client, _) in sorted(seen.items())]
        return min(models, key=lambda state: evaluate(plan, state, train, int(train.y.max()) + 1)["loss_sum"])
    state = global_state(plan, server)
    if state is None:
        samples = sum(count for _, count in seen.values())
        kept = [(client.personal, count / samples) for _, (client, count) in sorted(seen.items())]
        averaged = weighted_mean([personal for personal, _ in kept], [share for _, share in kept])
        state = {name: {**pick(server.shared, plan.loaded), **averaged}[name] for name in plan.initial}
    return _reestimated(plan, state, train) if policy == "reestimate" else state


@torch.no_grad()
def _reestimated(plan: Plan, state: State, train: Split) -> State:
    """``state`` with BatchNorm statistics that are the mean over the batches of ``train``, by their samples."""
    state, layers = clone(state), [layer for layer in plan.module.modules() if isinstance(layer, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    plan.module.eval()
    for layer in layers:
        layer.train()
    try:
        for start in range(0, len(train), BATCH):
            x = train.inputs(slice(start, start + BATCH), plan.dtype)
            if len(x) < plan.smallest_batch:
                continue
            for layer in layers:
                layer.momentum = len(x) / (start + len(x))  # a mean of the batches, whatever the statistics were
            functional_call(plan.module, {**state, **scratch(plan.module)}, (x,))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return state
