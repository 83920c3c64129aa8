"""The sequential engine, the reference for all others: trains one client after another, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import starmap

import torch
from torch import Tensor
from typing_extensions import override

from ..core.declarations import RulePhase
from ..core.kernel import broadcast, client_final, client_init, restart
from ..core.states import ClientState, LocalTrainingState, ServerState
from ..core.step import client_step_
from ..utils.profiling import timed_section
from ..utils.random_streams import kept_generators, seed_generators
from .engine import Batches, ClientResult, Engine, move_batches


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
        if plan.before:
            job = restart(plan, self._take_separate(name, client, job, plan.before))
            job = replace(job, params=plan.clone_for_training(job.params))
        for batch in self._iterate(name, batches):
            job, loss = client_step_(plan, job, *batch)
            losses.append(loss)
        done, update = client_final(plan, self._take_separate(name, client, job, plan.after))
        per_step = torch.stack(losses).double().cpu()
        self.refuse_divergence(per_step, {**done.personal, **update.shared}, name, client, server)
        sizes = torch.tensor([len(index) for _, index in batches], dtype=torch.float64)
        return ClientResult(client=done, update=update, loss_sum=float(per_step @ sizes))

    def _take_separate(
        self, name: str, client: ClientState, job: LocalTrainingState, phases: Sequence[RulePhase]
    ) -> LocalTrainingState:
        """Return the job after the separate ``phases``, each of which trains only one rule's own parameters."""
        for index, phase in phases:
            job = replace(job, separate_phase=(index, phase))
            for batch in self._iterate(name, self.draw_batches(name, client, phase)):
                job, _ = client_step_(self.plan, job, *batch)
        return replace(job, separate_phase=None)

    def _iterate(self, name: str, batches: Batches) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the inputs ``[B, ...]``, targets ``[B, ...]`` and key of each step."""
        keys = self.step_keys(name, [step for step, _ in batches])
        moved = move_batches(batches, keys.device)
        ahead = self.data[name].threaded and len(batches) > 1
        loaded = self._load_ahead(name, moved) if ahead else starmap(partial(self.load_batch, name), moved)
        for key in keys.unbind():
            with timed_section("data"):
                x, y = next(loaded)
            yield x, y, key

    def _load_ahead(self, name: str, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and targets of each batch, whose samples a thread reads while the batch before is used."""
        data, calls = self.data[name], iter([(index, (self.seed, name, step)) for step, index in batches])
        with ThreadPoolExecutor(1) as thread:
            pending = thread.submit(data.read, *next(calls))
            for batch in batches:
                stored = pending.result()
                if call := next(calls, None):
                    pending = thread.submit(data.read, *call)
                yield self.load_batch(name, *batch, stored)
