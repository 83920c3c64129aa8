"""The attack of a curious server on one upload: what it sees, and the images that it reconstructs.

The server follows the protocol but computes on what it receives. It knows the plan (network, method, loss, learning
rate), its own broadcast, and the client's :class:`~fedshift.core.states.Update`. It does not know entries that stay on
the client. It runs the kernel's own objective on a client that has only public values, so that everything a method does
to a gradient (AGC's clipping, GroupNorm in place of BatchNorm) is part of the attack.

The attack follows Geiping et al. 2020 (arXiv:2003.14053) and their public code (JonasGeiping/invertinggradients): Adam
on the sign of the objective's gradient, with the rate divided by ten after 3/8, 5/8 and 7/8 of the iterations, and
pixels kept in their range. If running statistics are sent, they give the batch's own mean and variance in every
BatchNorm layer, which are used as a prior. Yin et al. 2021 (arXiv:2104.07586) do this with running statistics, and
Huang et al. 2021 (arXiv:2112.00059) find that an attacker who knows the batch's statistics is much stronger.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from ...analysis.inversion import (
    gradient_distance,
    infer_labels,
    invert_running,
    statistics_distance,
    total_variation,
)
from ...core.kernel import client_final, client_init, init_client, load_state
from ...core.plan import Plan
from ...core.selection import normalizes_as_torch
from ...core.states import ClientState, LocalTrainingState, ServerState, Update
from ...core.step import client_step_, compute_objective, transform_gradients
from ...utils.state import State, pick

Source = Literal["everything", "statistics"]
"""Parts of an upload that an attack uses: gradients together with the statistics that are sent, or only statistics."""
HIDDEN_RATE = 0.01
"""Adam's learning rate for parameters that the attacker estimates together with the images."""


def upload(
    plan: Plan, client: ClientState, server: ServerState, x: Tensor, y: Tensor, *, steps: int = 1
) -> tuple[ClientState, Update]:
    """Return the client's state and upload after ``steps`` local steps on one batch ``x [B, ...]``, ``y``."""
    job = client_init(plan, client, server, planned_steps=steps)
    for _ in range(steps):
        job, _ = client_step_(plan, job, x, y, torch.zeros((), dtype=torch.int64, device=x.device))
    return client_final(plan, job)


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """Everything that the server has after one client's work: the plan, its broadcast, and the upload."""

    plan: Plan
    server: ServerState
    update: Update

    @cached_property
    def gradients(self) -> State:
        """The mean gradient over the round's steps, from the change of each trained entry that is loaded and sent."""
        plan, after = self.plan, self.update.shared
        taken = plan.optimizer.lr_in_round(self.server.round) * self.update.steps
        before = pick(self.server.shared, plan.trained & plan.loaded & after.keys())
        return {name: (tensor - after[name]) / taken for name, tensor in before.items()}

    @cached_property
    def statistics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The batch's mean and unbiased variance ``[C]`` in each BatchNorm layer whose running statistics are sent.

        Layers with frozen statistics reveal nothing about the batch; layers with a cumulative average are skipped.
        """
        plan, after = self.plan, self.update.shared
        known = plan.loaded & after.keys()
        found = {}
        for name, layer in plan.module.named_modules() if self.server.round < plan.freeze_from else ():
            if not isinstance(layer, _BatchNorm) or not layer.momentum or not normalizes_as_torch(layer):
                continue
            entries = [f"{name}.running_mean", f"{name}.running_var"]
            if known.issuperset(entries):
                mean, variance = (
                    invert_running(self.server.shared[entry], after[entry], layer.momentum, self.update.steps)
                    for entry in entries
                )
                found[name] = mean, variance
        return found

    @property
    def sources(self) -> tuple[Source, ...]:
        """The attacks that are possible with the upload."""
        return ("everything", "statistics") if self.statistics else ("everything",)

    def infer_labels(self) -> Tensor | None:
        """Return the batch's labels, ascending, or None if the gradient of the last layer's bias is not sent."""
        last = [entry.name for entry in self.plan.entries if entry.from_end == 0 and entry.name.endswith("bias")]
        if not last or last[0] not in self.gradients:
            return None
        return infer_labels(self.gradients[last[0]], round(self.update.weight / self.update.steps))


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """Settings of the attack: Adam's ``iterations`` and ``rate``, and the weights of total variation and prior."""

    iterations: int = 150
    rate: float = 0.1
    variation: float = 0.01
    prior: float = 1.0


def invert(
    seen: Observation,
    source: Source,
    labels_B: Tensor,
    start_BCHW: Tensor,
    bounds: tuple[Tensor, Tensor],
    settings: AttackSettings,
) -> Tensor:
    """Return the images ``[B, C, H, W]``, as network inputs, that best explain what the server saw.

    From the second round on, trained parameters that stay on the client are estimated together with the images; before
    that, everyone knows their initial values.

    Args:
        seen: What the server has.
        source: The part of the upload to match.
        labels_B: Labels that the attacker assumes, in any order.
        start_BCHW: Initial images of the attack.
        bounds: Smallest and largest value of a pixel, ``[C, 1, 1]`` each.
        settings: Settings of the attack.

    """
    plan, observed = seen.plan, seen.gradients
    job = load_state(plan, init_client(plan), seen.server, planned_steps=1)
    images = start_BCHW.clamp(*bounds).requires_grad_()
    hidden = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in (pick(job.params, plan.trained - plan.loaded) if seen.server.round else {}).items()
    }
    groups = [{"params": [images], "lr": settings.rate}, {"params": [*hidden.values()], "lr": HIDDEN_RATE}]
    adam = torch.optim.Adam([group for group in groups if group["params"]])
    milestones = [settings.iterations * eighths // 8 for eighths in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(adam, milestones, gamma=0.1)
    for _ in range(settings.iterations):
        with torch.enable_grad(), _record_inputs(plan) as inputs:
            params = {name: hidden.get(name, tensor) for name, tensor in job.params.items()}
            found = _simulate(plan, job, params, images, labels_B, differentiate=source == "everything")
            objective = settings.variation * total_variation(images)
            if source == "everything":
                objective = objective + gradient_distance([found[name] for name in observed], [*observed.values()])
            if seen.statistics:
                each = [statistics_distance(inputs[name], *batch) for name, batch in seen.statistics.items()]
                objective = objective + settings.prior * torch.stack(each).mean()
        leaves = [images, *hidden.values()]
        for leaf, grad in zip(leaves, torch.autograd.grad(objective, leaves, materialize_grads=True), strict=True):
            leaf.grad = grad.sign() if leaf is images else grad
        adam.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(*bounds)
    return images.detach()


def _simulate(
    plan: Plan, job: LocalTrainingState, params: State, x: Tensor, y: Tensor, *, differentiate: bool
) -> State:
    """Return the gradients that a client would apply for ``x``, differentiable in it; none unless ``differentiate``."""
    key = torch.zeros((), dtype=torch.int64, device=x.device)
    leaves = {name: own if own.requires_grad else own.detach().requires_grad_() for name, own in params.items()}
    total, _, _ = compute_objective(plan, job, leaves, x, y, key)
    if not differentiate:
        return {}
    grads = torch.autograd.grad(total, tuple(leaves.values()), create_graph=True, materialize_grads=True)
    return transform_gradients(plan, replace(job, params=leaves), dict(zip(leaves, grads, strict=True)), key)


@contextmanager
def _record_inputs(plan: Plan) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of every BatchNorm layer, by name, in the network's first pass."""
    found: dict[str, Tensor] = {}

    def record(name: str, _layer: Module, given: tuple[Tensor, ...]) -> None:
        found.setdefault(name, given[0])

    handles = [
        layer.register_forward_pre_hook(partial(record, name))
        for name, layer in plan.module.named_modules()
        if isinstance(layer, _BatchNorm)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
