"""Models for clients that never trained, under methods that keep state on clients.

``average``: what the server holds, with the seen clients' own entries averaged by samples (FedWon, arXiv:2306.05879,
table 12). ``reestimate``: the same, but BatchNorm statistics are estimated on the newcomer's own training inputs,
without labels (FedBN, arXiv:2102.07623, appendix G). ``nearest``: the model of the seen client that fits the newcomer's
training data best. Averaging and trying models needs sight of all clients' entries, which a simulation has.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .base.errors import UsageError
from .base.state import State, clone, pick
from .core.aggregate import Mean
from .core.kernel import Client, Server, global_state, personal_state
from .core.plan import Plan, outputs
from .core.select import norm_statistics
from .data.split import Split
from .evaluate import BATCH, evaluate


def check_policy(plan: Plan, policy: str) -> None:
    """Raise :class:`UsageError` where ``policy`` cannot work under ``plan``."""
    if policy == "reestimate" and not any(map(norm_statistics, plan.entries)):
        raise UsageError(
            f"unseen='reestimate' estimates BatchNorm statistics, of which the model has none under "
            f"{plan.method.name}: use 'average' or 'nearest'"
        )


class Newcomers:
    """Models for clients that never trained, from what ``server`` holds and the clients that have.

    ``samples``: training samples of each client that has trained, by its name in ``clients``, which are read one at a
    time and never held together.
    """

    def __init__(
        self, plan: Plan, server: Server, clients: Mapping[str, Client], samples: Mapping[str, int], policy: str
    ) -> None:
        self.plan, self.server, self.policy = plan, server, policy
        self._clients, self._samples = clients, samples

    def state(self, train: Split) -> State | None:
        """The model for a client with training data ``train``; None under ``skip``, or where no client has trained."""
        if self.policy == "skip" or not self._samples:
            return None
        if self.policy == "nearest":
            models = (personal_state(self.plan, self._clients[name], self.server) for name in sorted(self._samples))
            classes = int(train.y.max()) + 1
            return min(models, key=lambda state: evaluate(self.plan, state, train, classes)["loss_sum"])
        return _reestimated(self.plan, self._average, train) if self.policy == "reestimate" else self._average

    @cached_property
    def _average(self) -> State:
        state = global_state(self.plan, self.server)
        if state is not None:
            return state
        averaged = {**pick(self.server.shared, self.plan.loaded), **self._averaged_entries()}
        return {name: averaged[name] for name in self.plan.initial}

    def _averaged_entries(self) -> State:
        """The mean of the clients' own entries by samples, of which one client's are in memory at a time."""
        mean = Mean()
        for name in sorted(self._samples):
            mean.add(self._clients[name].personal, self._samples[name])
        return mean.result()


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
            outputs(plan, state, x)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return state
