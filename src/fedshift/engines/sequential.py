"""The sequential engine: one client after another, batch by batch; the reference that other engines must equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from ..core.declarations import Apart
from ..core.kernel import broadcast, client_final, client_init, restart
from ..core.states import ClientState, LocalTrainingState, ServerState
from ..core.step import client_step_
from ..utils.profiling import timed_section
from ..utils.random_streams import torch_stream
from .deferral import deferred_steps
from .engine import ClientResult, Engine, refuse_divergence, total_loss


class Sequential(Engine):
    """Runs anything."""

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        for name, client in clients.items():
            yield name, self.train_client(server, name, client)

    def train_client(self, server: ServerState, name: str, client: ClientState) -> ClientResult:
        """Return the result of one client's work in one round."""
        plan, server = self.plan, broadcast(server, name)
        batches = self.draw_batches(name, client)
        losses: list[Tensor] = []
        with torch_stream(self.seed, "torch", name, client.steps):
            job = client_init(plan, client, server, len(batches), self.see(name, batches))
            if plan.before:
                job = restart(plan, self._take_apart(name, client, job, plan.before))
                job = replace(job, params=plan.clone_for_training(job.params))
            with deferred_steps(plan, job, client_step_) as take_step:
                for batch in self.read_ahead(name, batches):
                    job, loss = take_step(plan, job, *self._batch(name, *batch))
                    losses.append(loss)
            done, update = client_final(plan, self._take_apart(name, client, job, plan.after))
        per_step = torch.stack(losses).double().cpu()
        refuse_divergence(per_step, {**done.personal, **update.shared}, name, server)
        return ClientResult(client=done, update=update, loss_sum=total_loss(per_step, batches))

    def _take_apart(
        self, name: str, client: ClientState, job: LocalTrainingState, phases: Sequence[Apart]
    ) -> LocalTrainingState:
        """Return the job after the steps of ``phases``, each of which trains one rule's own parameters alone."""
        for index, phase in phases:
            job = replace(job, apart=(index, phase))
            for batch in self.read_ahead(name, self.draw_apart(name, client, phase)):
                job, _ = client_step_(self.plan, job, *self._batch(name, *batch))
        return replace(job, apart=None)

    def _batch(self, name: str, step: int, index: Tensor, stored: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs ``[B, ...]``, labels ``[B]`` and dropout key of one step."""
        with timed_section("data"):
            return *self.load_batch(name, step, index, stored), self.step_key(name, step)
