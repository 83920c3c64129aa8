"""The sequential engine: clients one after another, batch after batch; the reference that other engines must equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from ..base.profiling import part
from ..base.streams import torch_stream
from ..core.kernel import Client, Server, begin, finish, step_
from ..core.work import batches
from .engine import Engine, Trained, refuse_divergence, weighed


class Sequential(Engine):
    """Runs anything."""

    @override
    def train(self, server: Server, clients: Mapping[str, Client]) -> Iterator[tuple[str, Trained]]:
        for name, client in clients.items():
            yield name, self.work(server, name, client)

    def work(self, server: Server, name: str, client: Client) -> Trained:
        """The work of one client in one round."""
        with torch_stream(self.seed, "torch", name, client.steps):
            return self._work(server, name, client)

    def _work(self, server: Server, name: str, client: Client) -> Trained:
        plan, data = self.plan, self.data[name]
        bounds, coming = self.coming(name, client)
        job = begin(plan, client, server, planned=len(coming))
        losses: list[Tensor] = []
        sizes: list[int] = []
        for step, index in batches(self.seed, name, len(data), bounds, coming):
            job, loss = step_(plan, job, *self._batch(name, step, index))
            losses.append(loss)
            sizes.append(len(index))
        job = replace(job, apart=True)
        for step, index in batches(self.seed, name, len(data), bounds, self.apart(client, len(bounds))):
            job, _ = step_(plan, job, *self._batch(name, step, index))
        done, update = finish(plan, job)
        per_step = torch.stack(losses).double().cpu()
        refuse_divergence(per_step, {**done.personal, **update.shared}, name, server)
        return Trained(client=done, update=update, loss_sum=weighed(per_step, sizes))

    def _batch(self, name: str, step: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, labels and dropout key of one step."""
        data = self.data[name]
        with part("data"):
            index = index.to(data.y.device)
            key = self.dropout_key(name, step, data.y.device)
            return self.plan.training_inputs(data, index, self.seed, name, step), data.y[index], key
