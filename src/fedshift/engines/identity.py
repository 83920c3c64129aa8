"""The identity engine: if each client takes one plain gradient step, a round is one step on all clients' batches.

FedSMB (Nasirigerdeh et al., arXiv:2011.07006): averaging clients that start from the same model and take one step of
SGD equals one step on the weighted mean of their losses. Hence no client's model is computed; each "upload" is the
average model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from ..core.kernel import client_init, init_client, init_server
from ..core.loss import Loss
from ..core.means import StreamingMean
from ..core.network import compute_outputs, to_memory_format
from ..core.optimizer import SGD
from ..core.plan import Plan
from ..core.probe import find_difference
from ..core.rule import HOOKS
from ..core.server_round import sums_suffice
from ..core.states import ClientState, ServerState, Update
from ..core.step import client_step_, update_
from ..data.augmentation import Augmentation
from ..data.samples import are_alike, gather_rows
from ..utils.profiling import timed_section
from ..utils.state import State, clone, move_together, pick
from .engine import ClientResult, Data, Engine, find_broken, find_exchange, move_batches
from .sequential import Sequential

TRIED = 4
"""Number of samples with which the model is tried."""


class Identity(Engine):
    """Runs one averaged step of plain SGD per round, on models that process samples independently."""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        work = plan.work
        if not work.is_one_step(map(len, data.values()), plan.smallest_batch):
            return f"needs exactly one step per client and round, not {work}"
        if not isinstance(plan.optimizer, SGD) or plan.optimizer.keep:
            return f"needs SGD that is reset each round, not {plan.optimizer}"
        acts = any(plan.defines(hook) for hook in HOOKS if hook != "fold") or any(plan.own_trained)
        averages = sums_suffice(plan) and plan.clients_differ_only_in_entries and not acts
        if not averages or plan.personal or plan.initial.keys() != plan.sent:
            return f"needs a method that only averages complete models, which {plan.method.label} does not"
        return find_exchange(plan) or plan.verdict("identity", lambda: _try_union(plan, data))

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        plan = self.plan
        with timed_section("data"):
            batches = {name: self.draw_batches(name, client)[0] for name, client in clients.items()}  # one per client
            together, y = self._load(batches)
        labeled = zip(clients, y, strict=True)
        raw = [plan.method.weigh(samples=len(self.data[name]), used=len(labels)) for name, labels in labeled]
        shared, losses = _take_step(plan, server, together, y, torch.tensor(raw, dtype=torch.float64) / sum(raw))
        per_client = losses.double().cpu()
        if find_broken(per_client, pick(shared, shared.keys() - plan.whole)):
            yield from Sequential(plan, self.data, self.seed, augment=self.augment).train(server, clients)
            return  # unless a client has diverged, which is raised with its name
        summed = None
        if not self.separate_uploads:
            averaged, shared = pick(shared, shared.keys() - plan.whole), pick(shared, plan.whole)
            summed = StreamingMean()
            summed.add(averaged, sum(raw))
        sizes = [len(labels) for labels in y]
        sums = (per_client * torch.tensor(sizes)).tolist()
        for (name, client), size, loss_sum in zip(clients.items(), sizes, sums, strict=True):
            update = Update(shared=shared, memory=({},) * len(plan.rules), weight=float(size), steps=1)
            after = replace(client, steps=client.steps + 1)
            yield name, ClientResult(client=after, update=update, loss_sum=loss_sum, summed=summed)

    def _load(self, batches: Mapping[str, tuple[int, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        """Return the concatenated inputs of all clients' batches, and each client's labels."""
        parts = [self.data[name] for name in batches]
        if self.augment is not None or not are_alike(parts):
            moved = move_batches(list(batches.values()), parts[0].y.device)
            loaded = [self.load_batch(name, *batch) for name, batch in zip(batches, moved, strict=True)]
            return torch.cat([x for x, _ in loaded]), [y for _, y in loaded]
        indices = move_together([index for _, index in batches.values()], parts[0].y.device)
        labels = [part.targets(index) for part, index in zip(parts, indices, strict=True)]
        return parts[0].scale(gather_rows(parts, indices), self.plan.dtype), labels


def _client_losses(plan: Plan, logits: Tensor, y: list[Tensor]) -> Tensor:
    """Return each client's loss ``[clients]``, given the outputs for all samples and each client's labels."""
    sizes = [len(labels) for labels in y]
    if len(set(sizes)) == 1 and isinstance(plan.loss, Loss):  # supports torch.vmap
        losses: Tensor = torch.vmap(plan.loss)(logits.reshape(len(y), sizes[0], *logits.shape[1:]), torch.stack(y))
        return losses
    return torch.stack([plan.loss(*each) for each in zip(torch.split(logits, sizes), y, strict=True)])


def _take_step(plan: Plan, server: ServerState, x: Tensor, y: list[Tensor], weights: Tensor) -> tuple[State, Tensor]:
    """Return the model after a step along the mean, by ``weights``, of clients' losses on ``x [B, ...]``, and these."""
    job = client_init(plan, init_client(plan), server, planned_steps=1)
    with timed_section("forward and backward"):
        leaves, rest = {name: tensor.detach().requires_grad_() for name, tensor in job.params.items()}, clone(job.rest)
        outputs = compute_outputs(plan, {**leaves, **rest}, to_memory_format(x, plan.image_format), training=True)
        losses = _client_losses(plan, outputs, y)
        gradients = torch.autograd.grad(losses @ weights.to(losses), tuple(leaves.values()), allow_unused=True)
    grads = {name: grad.to_dense() for name, grad in zip(leaves, gradients, strict=True) if grad is not None}
    with timed_section("update"):
        return pick(update_(plan, job, grads, rest, len(x)).state, plan.initial), losses.detach()


def _try_union(plan: Plan, data: Data) -> str | None:
    """Return a refusal if one step of clients on their samples together is not the mean of their steps."""
    split = next(iter(data.values()))
    index = torch.arange(TRIED, device=split.y.device) % len(split)
    x, y = split.inputs(index, plan.dtype), split.targets(index)
    if x.is_floating_point():  # samples of both signs, for networks that branch by values of the batch
        x = x - x.mean(0)
        x = torch.cat([x[: TRIED // 2], -x[: TRIED // 2]])
    size = 2 if isinstance(plan.loss, Loss) and plan.loss.comparing else plan.smallest_batch
    clients, server = list(zip(torch.split(x, size), torch.split(y, size), strict=True)), init_server(plan)
    key, weights = torch.zeros((), dtype=torch.int64, device=y.device), torch.full((TRIED // size,), size / TRIED)
    jobs = [client_init(plan, init_client(plan), server, planned_steps=1) for _ in clients]
    why = f"needs a model that processes samples independently, but this one does not (trained by {plan.method.label})"
    try:
        states = [client_step_(plan, job, *batch, key)[0].state for job, batch in zip(jobs, clients, strict=True)]
        together, _ = _take_step(plan, server, x.clone(), [labels for _, labels in clients], weights)
    except (ValueError, RuntimeError):
        return why
    mean = {name: torch.stack([state[name].double() for state in states]).mean(0) for name in together}
    return why if find_difference(plan, plan.initial, together, mean) else None
