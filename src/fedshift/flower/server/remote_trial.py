"""Experiments across machines: the coordinator's part of what ``fedshift run`` does in one process.

The coordinator folds uploads, evaluates nothing itself and sees no sample. It keeps, for each client, only how many
steps it has done and after which round its state is current (``fedshift.flower.site.state``). Everything else, from the
streams to the run directory, is that of ``Trial`` and ``Experiment``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from ...core.compatibility import check_client_count
from ...core.kernel import ClientState, client_final, client_init, init_client
from ...core.method import Method
from ...data.federation import Federation
from ...engines.engine import ClientResult, Diverged
from ...experiments.experiment import Experiment
from ...experiments.settings import Settings
from ...experiments.trial import Trial
from ...models._factory import ModelFactory
from ...results.schema import Row
from ...utils.errors import FedshiftError, UsageError
from ...utils.state import State, join_states, pick
from ..transport.arrays import RefusedMessage, check_update, from_record, to_record
from ..transport.exchange import Exchange
from .nodes import Nodes

ROWS = ("samples", "loss_sum", "hits", "support", "auc")


@dataclass(frozen=True, kw_only=True)
class QuorumPolicy:
    """On what a round goes ahead: with at least ``clients`` uploads, after at most ``seconds``."""

    clients: int
    seconds: float


class RemoteTrial(Trial):
    """A trial whose clients are behind ``nodes``; ``facts`` tell a site which trial it is."""

    def __init__(
        self, method: Method, model: ModelFactory, data: Federation, settings: Settings, seed: int, *, nodes: Nodes,
        terms: QuorumPolicy, facts: Mapping[str, Any],
    ) -> None:  # fmt: skip
        if method.pooled:
            raise UsageError(f"{method.name} needs all data in one place: leave it out across machines")
        super().__init__(method, model, data, settings, seed)
        self.nodes, self.terms, self.facts = nodes, terms, {**facts, "clients": len(self.clients)}
        self.bases: dict[str, int] = {}
        least = min(terms.clients, len(settings.draw_participants(seed, 1, self.clients.names)))
        check_client_count(method.aggregate, least)
        _, update = client_final(self.plan, client_init(self.plan, init_client(self.plan), self.server))
        self._memory = join_states(self.plan.rule_names, update.memory)
        self._after_work: dict[str, list[Row]] = {}

    @override
    def _draw_participants(self, number: int) -> tuple[str, ...]:
        """As in one process, but among the clients that are connected."""
        members = frozenset(self.clients.names)
        self.nodes.wait(min(self.terms.clients, len(members)), self.terms.seconds, members)
        there = tuple(name for name in self.clients.names if name in self.nodes.online)
        return self.settings.draw_participants(self.seed, number, there)

    @override
    def _train(self, names: tuple[str, ...]) -> Iterator[tuple[str, ClientResult]]:
        round, enough = self.server.round + 1, min(self.terms.clients, len(names))
        done: list[str] = []
        diverged: FedshiftError | None = None
        measures = self._measures_trained(round)
        for name, answer in self._ask("train", names, self.plan.loaded, enough, self._splits if measures else ()):
            try:
                trained = self._check_update(name, answer)
                if measures:
                    facts, _ = self._check_answer(name, answer, "trained", round)
                    self._after_work[name] = self._check_rows(name, facts, "trained")
            except FedshiftError as error:
                self.nodes.say(f"round {round}: {name} is left out: {error}")
                diverged = error if isinstance(error, Diverged) else diverged
                continue
            done.append(name)
            yield name, trained
        if len(done) < enough and diverged:
            raise diverged
        if len(done) < enough:
            raise FedshiftError(
                f"round {round}: of {len(names)} clients that were asked, {len(done)} sent an upload that can be used; "
                f"{enough} must (--min-clients). The model is that of round {round - 1}: go on with --resume"
            )
        self.bases |= dict.fromkeys(done, round)

    @override
    def evaluate(self) -> list[Row]:
        """Rows of every client that is connected; a client that does not answer has none."""
        plan = self.plan
        asked = plan.sent if plan.has_global else plan.loaded
        names = tuple(
            name for name in self.data.names if name in self.nodes.online and (plan.has_global or name in self.bases)
        )
        rows: dict[str, list[Row]] = {}
        for name, answer in self._ask("evaluate", names, asked, min(self.terms.clients, len(names)), self._splits):
            try:
                facts, _ = self._check_answer(name, answer, "evaluated", self.server.round)
                rows[name] = self._check_rows(name, facts, "loaded")
            except FedshiftError as error:
                self.nodes.say(f"round {self.server.round}: {name} is not measured: {error}")
        return [row for name in self.data.names for row in rows.get(name, [])]

    @override
    def _evaluate_trained(self, name: str, trained: ClientResult) -> list[Row]:
        """What the site measured and sent with its upload."""
        return self._after_work.pop(name)

    def _ask(
        self, kind: str, names: tuple[str, ...], entries: frozenset[str], enough: int, splits: tuple[str, ...]
    ) -> Iterator[tuple[str, Exchange | FedshiftError]]:
        memory = join_states(self.plan.rule_names, self.server.memory)
        arrays = {"shared": to_record(pick(self.server.shared, entries)), "memory": to_record(memory)}
        facts = {"trial": self.facts, "round": self.server.round, "splits": splits}
        asked = {
            name: Exchange(kind=kind, facts={**facts, "base": self.bases.get(name, 0)}, arrays=arrays) for name in names
        }
        return self.nodes.ask(asked, enough, self.terms.seconds)

    def _check_update(self, name: str, answer: Exchange | FedshiftError) -> ClientResult:
        """The upload of client ``name``; raises :class:`FedshiftError` saying why it cannot be used."""
        facts, arrays = self._check_answer(name, answer, "trained", self.server.round + 1)
        client = self.clients[name]
        samples = len(self.train[name])
        bounds = self.plan.work.batch_bounds(samples, self.plan.smallest_batch)
        steps = self.plan.work.steps_of_round(client.steps, len(bounds))
        used = sum(stop - start for start, stop in (bounds[step % len(bounds)] for step in steps))
        try:
            weight, count, loss = float(facts["weight"]), int(facts["steps"]), float(facts["loss_sum"])
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedMessage(f"it does not say what it did ({error!r})") from error
        if (weight, count) != (used, len(steps)):
            raise RefusedMessage(
                f"it says {weight:g} samples in {count} steps, where its {samples} make {used} in {len(steps)}"
            )
        if not math.isfinite(loss):
            raise RefusedMessage(f"its training loss is {loss}")
        shared, memory = self._to_device(arrays["shared"]), self._to_device(arrays["memory"])
        update = check_update(self.plan, self.server, shared, memory, weight, count, self._memory, used)
        return ClientResult(client=ClientState(personal={}, steps=client.steps + count), update=update, loss_sum=loss)

    def _check_rows(self, name: str, facts: Mapping[str, Any], moment: str) -> list[Row]:
        splits, models = self.data.client(name).splits, ("global", "personal") if moment == "loaded" else ("personal",)
        try:
            rows = [
                {
                    "client": name, "split": row["split"], "model": row["model"], "moment": moment,
                    **{key: row[key] for key in ROWS},
                }
                for row in facts["rows"]
            ]  # fmt: skip
            for row in rows:
                counts = len(row["hits"]), len(row["support"]), sum(row["support"]), row["samples"]
                size = len(splits[row["split"]])
                sound = counts == (self.data.classes, self.data.classes, size, size)
                if not sound or not math.isfinite(row["loss_sum"]) or row["model"] not in models:
                    raise RefusedMessage(f"its counts do not fit its {size} samples: {row}")
        except (KeyError, TypeError) as error:
            raise RefusedMessage(f"it does not say what it measured ({error!r})") from error
        return rows

    def _check_answer(
        self, name: str, answer: Exchange | FedshiftError, kind: str, round: int
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        if isinstance(answer, FedshiftError):
            raise answer
        said = answer.kind, answer.facts.get("name"), answer.facts.get("round")
        if said != (kind, name, round):
            raise RefusedMessage(f"it answers {said[0]!r} as {said[1]!r} for round {said[2]}, where {kind!r} was asked")
        missing = {"shared", "memory"} - answer.arrays.keys() if kind == "trained" else set()
        if missing:
            raise RefusedMessage(f"it sent no {' and no '.join(sorted(missing))} entries")
        return answer.facts, answer.arrays

    def _to_device(self, record: Any) -> State:
        device = torch.device(self.settings.device)
        return {name: tensor.to(device) for name, tensor in from_record(record).items()}

    @override
    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "bases": self.bases}

    @override
    def restore(self, tensors: State, facts: Mapping[str, Any], folder: Path | None = None) -> None:
        """As of ``Trial``; clients that were admitted since have done nothing yet."""
        steps = tensors["clients/steps"]
        late = torch.zeros(len(self.clients) - len(steps), dtype=steps.dtype)
        super().restore({**tensors, "clients/steps": torch.cat([steps, late])}, facts, folder)
        self.bases = dict(facts["bases"])


@dataclass(frozen=True, kw_only=True, eq=False)
class RemoteExperiment(Experiment):
    """An experiment whose clients are behind ``nodes``; ``facts`` tell a site which experiment it is."""

    nodes: Nodes
    terms: QuorumPolicy
    facts: Mapping[str, Any] = field(default_factory=dict)

    @override
    def _make_trial(self, method: Method, seed: int) -> Trial:
        facts = {**self.facts, "method": self.methods.index(method), "seed": seed}
        return RemoteTrial(
            method, self.model, self.data, self.settings, seed, nodes=self.nodes, terms=self.terms, facts=facts
        )

    @override
    def _sample_images(self) -> dict[str, np.ndarray]:
        """None: samples stay where they are."""
        return {}
