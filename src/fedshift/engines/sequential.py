"""The sequential engine, the reference for all others: trains one client after another, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from ..core.declarations import RulePhase
from ..core.kernel import broadcast, client_final, client_init, restart
from ..core.states import ClientState, LocalTrainingState, ServerState
from ..core.step import client_step_
from ..utils.random_streams import kept_generators, seed_generators
from .engine import ClientResult, Engine


class Sequential(Engine):
    """Trains one client after another; supports every plan."""

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        with kept_generators():  # once a round: restoring takes longer than seeding
            for name, client in clients.items():
                yield name, self._train(server, name, client)

    def train_client(self, server: ServerState, name: str, client: ClientState) -> ClientResult:
        """Train one client for one round."""
        with kept_generators():
            return self._train(server, name, client)

    def _train(self, server: ServerState, name: str, client: ClientState) -> ClientResult:
        plan, server = self.plan, broadcast(server, name)
        batches = self.draw_batches(name, client)
        losses: list[Tensor] = []
        seed_generators(self.seed, "torch", name, client.steps)
        job = client_init(plan, client, server, len(batches), self.see(name, batches))
        if plan.phases["before"]:
            job = restart(plan, self._take_separate(name, client, job, plan.phases["before"]))
            job = replace(job, params=plan.clone_for_training(job.params))
        for batch in self.iterate(name, batches):
            job, loss = client_step_(plan, job, *batch)
            losses.append(loss)
        done, update = client_final(plan, self._take_separate(name, client, job, plan.phases["after"]))
        per_step = torch.stack(losses).double().cpu()
        self.refuse_divergence(per_step, {**done.personal, **update.shared}, name, client, server)
        sizes = torch.tensor([len(index) for _, index in batches], dtype=torch.float64)
        return ClientResult(client=done, update=update, loss_sum=float(per_step @ sizes))

    def _take_separate(
        self, name: str, client: ClientState, job: LocalTrainingState, phases: Sequence[RulePhase]
    ) -> LocalTrainingState:
        """Return the job after the separate ``phases``, each of which trains only one rule's parameters."""
        for index, phase in phases:
            job = replace(job, separate_phase=(index, phase))
            for batch in self.iterate(name, self.draw_batches(name, client, phase)):
                job, _ = client_step_(self.plan, job, *batch)
        return replace(job, separate_phase=None)
