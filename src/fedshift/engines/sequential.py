"""The sequential engine: clients one after another, batch after batch; the reference that other engines must equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
            with part("data"):
                index = index.to(data.y.device)
                key = self.dropout_key(name, step, data.y.device)
                x, y = plan.training_inputs(data, index, self.seed, name, step), data.y[index]
            job, loss = step_(plan, job, x, y, key)
            losses.append(loss)
            sizes.append(len(index))
        done, update = finish(plan, job)
        per_step = torch.stack(losses).double().cpu()
        refuse_divergence(per_step, {**done.personal, **update.shared}, name, server)
        return Trained(client=done, update=update, loss_sum=weighed(per_step, sizes))
