"""An engine whose clients are sites behind Flower's grid; experiments and trials run as they do in one process.

The coordinator aggregates uploads, does not evaluate models itself and sees no samples. For each client it keeps only
the number of completed steps, the round of the current client state (the *base*, see
:class:`fedshift.flower.site.site_state.SiteState`) and the digest of the client's upload in that round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from flwr.app import Array
from typing_extensions import override

from ...core.compatibility import check_client_count
from ...core.disclosure import like_sends
from ...core.kernel import broadcast
from ...core.plan import Plan
from ...core.states import ClientState, ServerState, Update
from ...data.federation import Federation
from ...engines.engine import ClientResult, Data, Diverged, Engine
from ...evaluation.communication import list_disclosures
from ...evaluation.metrics import measured_splits
from ...experiments.settings import Settings
from ...results.schema import REESTIMATED, Row
from ...utils.errors import FedshiftError
from ...utils.state import State, join_states, pick, split_state
from ..transport.arrays import RefusedMessage, check_state, check_update, from_record, to_record
from ..transport.exchange import UPLOAD, Exchange
from .answers import RowReader, read_evaluated, read_trained, refusing
from .history import SUSPICIOUS, SpoiledModel, TrialHistory
from .nodes import Nodes
from .outliers import UpdateSizes

HEADER = 1024
"""Maximum number of bytes that NumPy's format adds to an entry."""


class RemoteEngine(Engine):
    """Asks the sites behind ``nodes`` to train and evaluate; ``description`` identifies the trial.

    A round needs at least ``min_clients`` uploads and takes at most ``seconds``. Uploads wait until all have arrived,
    so that updates more than ``update_bound`` times as long as the others' can be excluded. Among three or more sites,
    none has more than ``max_share`` of the total weight.
    """

    def __init__(
        self, plan: Plan, data: Data, seed: int, *, federation: Federation, settings: Settings, nodes: Nodes,
        min_clients: int, seconds: float, update_bound: float, max_share: float, history: TrialHistory,
        description: Mapping[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(plan, data, seed)
        self.federation, self.settings, self.nodes = federation, settings, nodes
        self.min_clients, self.seconds, self.history = min_clients, seconds, history
        self.description = {**description, "clients": len(data)}
        self.bases: dict[str, int] = {}
        self.uploads: dict[str, str] = {}
        self._sizes, self._max_share, self._away = UpdateSizes(update_bound), max_share, frozenset[str]()
        least = min(min_clients, len(settings.draw_participants(seed, 1, tuple(data))))
        check_client_count(plan.method.aggregate, least)
        self._memory, self._prelude = like_sends(plan), like_sends(plan, prelude=True)
        self._most_bytes = sum(each.bytes + HEADER for each in list_disclosures(plan))
        self._rows = RowReader(federation.task, federation.classes)

    @property
    @override
    def max_share(self) -> float:
        return self._max_share

    @override
    def find_available(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Wait for enough clients and return those that are connected; report each absent client once."""
        self.nodes.wait(min(self.min_clients, len(names)), self.seconds, frozenset(names))
        available = tuple(name for name in names if name in self.nodes.online)
        away = frozenset(names) - set(available)
        for name in sorted(away - self._away):
            self.nodes.say(f"{name} is away: rounds continue without it", "left_out")
        self._away = away
        return available

    @override
    def introduce(self, names: tuple[str, ...]) -> Iterator[tuple[str, Update]]:
        left_out = self.history.read_left_out().get(1)
        asked = [name for name in names if name != left_out]
        enough, updates = min(self.min_clients, len(asked)), dict[str, Update]()
        question = Exchange(kind="introduce", facts={"trial": self.description, "round": 0})
        self.nodes.allow(self._most_bytes)
        for name, answer in self.nodes.ask(dict.fromkeys(asked, question), enough, self.seconds):
            try:
                _, arrays = _check_answer(name, answer, "introduced", 0)
                with refusing("its upload cannot be read"):
                    memory = self._to_device(arrays["memory"])
                    check_state(memory, self._prelude, "the upload's rule memory")
                    parts = split_state(self.plan.rule_names, memory)
                updates[name] = Update(shared={}, memory=parts, weight=float(len(self.data[name])), steps=0)
            except FedshiftError as error:
                self.nodes.say(f"before round 1: {name} is left out: {error}", "left_out")
        if len(updates) < enough:
            raise FedshiftError(
                f"before round 1: only {len(updates)} of {len(asked)} clients sent a usable upload, and {enough} must "
                "(--min-clients). There is no trained model yet: continue with --resume"
            )
        yield from updates.items()

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        round, left_out = server.round + 1, self.history.read_left_out()
        asked = [name for name in clients if name != left_out.get(server.round + 1)]
        enough = min(self.min_clients, len(asked))
        results: dict[str, ClientResult] = {}
        uploads: dict[str, str] = {}
        diverged: list[Diverged] = []
        measures = "trained" in self.settings.moments and self.settings.is_evaluated(round)
        splits = measured_splits(self.federation) if measures else ()
        for name, answer in self._ask("train", server, asked, self.plan.received, enough, splits):
            try:
                results[name], uploads[name] = self._check_update(server, name, clients[name].steps, answer, splits)
            except FedshiftError as error:
                event = "diverged" if isinstance(error, Diverged) else "left_out"
                self.nodes.say(f"round {round}: {name} is left out: {error}", event)
                diverged += [error] if isinstance(error, Diverged) else []
        before = self._sizes.ratios
        updates = {name: result.update for name, result in results.items()}
        outliers = self._sizes.find_outliers(server, updates, enough)
        for name, ratio in outliers.items():
            self.nodes.say(
                f"round {round}: {name} is left out: its update is {ratio:.3g} times as long as the others', and the "
                f"limit is {self._sizes.bound:g} times (--update-bound)",
                "left_out",
            )
            del results[name]
        if len(results) < enough:
            few = FedshiftError(
                f"round {round}: only {len(results)} of {len(clients)} clients sent a usable upload, and {enough} must "
                f"(--min-clients). The model of round {round - 1} is kept: continue with --resume"
            )
            cause = diverged[0] if diverged else few
            raise self._suspect(server.round, before, cause) if diverged or outliers else few
        yield from results.items()
        self.bases |= dict.fromkeys(results, round)
        self.uploads |= {name: uploads[name] for name in results}

    @override
    def evaluate(self, server: ServerState) -> list[Row]:
        """Return the rows of all connected clients; a client that is away or does not answer has none."""
        plan, data = self.plan, self.federation
        all_have = plan.has_global or self.settings.unseen != "skip"
        wanted, online = [name for name in data.names if all_have or name in self.bases], self.nodes.online
        names = [name for name in wanted if name in online]
        for name in wanted:
            if name not in online:
                self.nodes.say(f"round {server.round}: {name} is not measured, because it is away")
        return self._measure(server, names, "loaded")

    @override
    def evaluate_reestimated(self, server: ServerState) -> list[Row]:
        """Return the rows of connected clients with their own statistics, re-estimated on their data.

        Shared statistics are not re-estimated, since the estimates would have to leave the sites.
        """
        keeps = self.plan.personalizes
        online = self.nodes.online if keeps else ()
        return self._measure(server, [n for n in self.federation.names if n in self.bases and n in online], REESTIMATED)

    def _measure(self, server: ServerState, names: list[str], moment: str) -> list[Row]:
        plan, data = self.plan, self.federation
        entries = plan.sent if plan.has_global else plan.received
        enough, splits = min(self.min_clients, len(names)), measured_splits(data)
        rows: dict[str, list[Row]] = {}
        for name, answer in self._ask("evaluate", server, names, entries, enough, splits, moment):
            try:
                facts, _ = _check_answer(name, answer, "evaluated", server.round)
                if (answered := read_evaluated(facts).rows) or moment == "loaded":
                    rows[name] = self._read_rows(answered, name, splits, moment)
            except FedshiftError as error:
                what = "measured" if moment == "loaded" else "measured with re-estimated statistics"
                self.nodes.say(f"round {server.round}: {name} is not {what}: {error}")
        return [row for name in data.names for row in rows.get(name, [])]

    @override
    def facts(self) -> dict[str, Any]:
        return {"bases": self.bases, "uploads": self.uploads, "sizes": self._sizes.facts()}

    @override
    def restore(self, facts: Mapping[str, Any]) -> None:
        self.bases, self.uploads = dict(facts["bases"]), dict(facts.get("uploads", {}))
        self._sizes.restore(facts.get("sizes", {}))

    def _suspect(self, round: int, ratios: Mapping[str, float], cause: FedshiftError) -> FedshiftError:
        """Return the error for too few usable updates after ``round``: ``cause``, or a spoiled model.

        ``ratios``: of the lengths of the updates of ``round`` to the others'.
        """
        suspect = max(ratios, key=ratios.__getitem__, default="")
        if not suspect or ratios[suspect] < SUSPICIOUS:
            return cause
        return SpoiledModel(str(cause), self.history.folder, round, suspect, ratios[suspect])

    def _ask(
        self, kind: str, server: ServerState, names: Iterable[str], entries: frozenset[str], enough: int,
        splits: tuple[str, ...], moment: str = "loaded",
    ) -> Iterator[tuple[str, Exchange | FedshiftError]]:  # fmt: skip
        memory = to_record(join_states(self.plan.rule_names, server.memory))
        shared = to_record(pick(server.shared, entries))
        facts = {"trial": self.description, "round": server.round, "splits": splits, "moment": moment}
        questions = {}
        for name in names:
            entry = to_record(pick(broadcast(server, name).shared, entries)) if server.mixes else shared
            questions[name] = Exchange(
                kind=kind,
                facts={**facts, "base": self.bases.get(name, 0), UPLOAD: self.uploads.get(name, "")},
                arrays={"shared": entry, "memory": memory},
            )
        self.nodes.allow(self._most_bytes if kind == "train" else 0)
        return self.nodes.ask(questions, enough, self.seconds)

    def _check_update(
        self,
        server: ServerState,
        name: str,
        steps_before: int,
        answer: Exchange | FedshiftError,
        splits: tuple[str, ...],
    ) -> tuple[ClientResult, str]:
        """Return the upload of client ``name``, and the digest that the client reported for it.

        Raises :class:`FedshiftError` with the reason if the upload cannot be used.
        """
        facts, arrays = _check_answer(name, answer, "trained", server.round + 1)
        report = read_trained(facts)
        samples = len(self.data[name])
        bounds, steps = self.steps_of_round(name, ClientState(personal={}, steps=steps_before))
        used = sum(stop - start for start, stop in (bounds[step % len(bounds)] for step in steps))
        if (report.weight, report.steps) != (used, len(steps)):
            raise RefusedMessage(
                f"it reports {report.weight:g} samples in {report.steps} steps, but a round over its {samples} has "
                f"{used} in {len(steps)}"
            )
        size = sum(len(array.data) for record in arrays.values() for array in record.values())
        if size > self._most_bytes:
            raise RefusedMessage(f"its upload has {size} bytes, and the method sends at most {self._most_bytes}")
        with refusing("its upload cannot be read"):
            shared, memory = self._to_device(arrays["shared"]), self._to_device(arrays["memory"])
            update = check_update(self.plan, server, shared, memory, report.weight, report.steps, self._memory, used)
        result = ClientResult(
            client=ClientState(personal={}, steps=steps_before + report.steps), update=update, loss_sum=report.loss_sum,
            rows=self._read_rows(report.rows, name, splits, "trained") if splits else None,
        )  # fmt: skip
        return result, report.upload

    def _read_rows(self, rows: list[dict[str, Any]], name: str, splits: tuple[str, ...], moment: str) -> list[Row]:
        parts = self.federation.client(name).splits
        sizes = {split: len(parts[split]) for split in splits if split in parts}
        return self._rows.read(rows, name, sizes, moment)

    def _to_device(self, record: Mapping[str, Array]) -> State:
        device = torch.device(self.settings.device)
        return {name: tensor.to(device) for name, tensor in from_record(record).items()}


def _check_answer(
    name: str, answer: Exchange | FedshiftError, kind: str, round: int
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the facts and arrays of an answer; raise :class:`FedshiftError` if it does not match the question."""
    if isinstance(answer, FedshiftError):
        raise answer
    identity = answer.kind, answer.facts.get("name"), answer.facts.get("round")
    if identity != (kind, name, round):
        raise RefusedMessage(
            f"it answered {identity[0]!r} as {identity[1]!r} for round {identity[2]} instead of {kind!r} as {name!r} "
            f"for round {round}"
        )
    wanted = {"trained": {"shared", "memory"}, "introduced": {"memory"}}.get(kind, set[str]())
    if missing := wanted - answer.arrays.keys():
        raise RefusedMessage(f"it sent no {' and no '.join(sorted(missing))} entries")
    if extra := answer.arrays.keys() - wanted:
        raise RefusedMessage(f"it sent an unexpected record {min(extra)!r}")
    return answer.facts, answer.arrays
