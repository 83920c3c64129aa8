"""An engine whose clients are sites behind Flower's grid; experiments and trials run as they do in one process.

The coordinator aggregates uploads, evaluates nothing itself and sees no samples. For each client it keeps only the
number of steps done, the round whose client state is current (the *base*, see
:class:`fedshift.flower.site.site.SiteState`) and the digest of its upload in that round.
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

    A round needs at least ``min_clients`` uploads and takes at most ``seconds``. Uploads are held until all have
    arrived, so that updates more than ``update_bound`` times as long as the others' can be excluded. No site has more
    than ``max_share`` of the weights of three or more.
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
        """Return the connected clients, once there are enough of them; say once who is away."""
        self.nodes.wait(min(self.min_clients, len(names)), self.seconds, frozenset(names))
        found = tuple(name for name in names if name in self.nodes.online)
        away = frozenset(names) - set(found)
        for name in sorted(away - self._away):
            self.nodes.say(f"{name} is away: rounds go on without it", "left_out")
        self._away = away
        return found

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
                f"before round 1: of {len(asked)} clients that were asked, {len(updates)} sent an upload that can be "
                f"used; {enough} must (--min-clients). Nothing is trained yet: continue with --resume"
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
                f"round {round}: {name} is left out: its update is {ratio:.3g} times as long as the others'; at "
                f"most {self._sizes.bound:g} times is used (--update-bound)",
                "left_out",
            )
            del results[name]
        if len(results) < enough:
            few = FedshiftError(
                f"round {round}: of {len(clients)} clients that were asked, {len(results)} sent an upload that can be "
                f"used; {enough} must (--min-clients). The model is that of round {round - 1}: continue with --resume"
            )
            cause = diverged[0] if diverged else few
            raise self._suspect(server.round, before, cause) if diverged or outliers else few
        yield from results.items()
        self.bases |= dict.fromkeys(results, round)
        self.uploads |= {name: uploads[name] for name in results}

    @override
    def evaluate(self, server: ServerState) -> list[Row]:
        """Return rows of every connected client; a client that is disconnected or does not answer has none."""
        plan, data = self.plan, self.federation
        all_have = plan.has_global or self.settings.unseen != "skip"
        wanted, online = [name for name in data.names if all_have or name in self.bases], self.nodes.online
        names = [name for name in wanted if name in online]
        for name in wanted:
            if name not in online:
                self.nodes.say(
                    f"round {server.round}: {name} is not measured: it is away, and has no row of this round"
                )
        return self._measure(server, names, "loaded")

    @override
    def evaluate_reestimated(self, server: ServerState) -> list[Row]:
        """Return rows of the connected clients that keep statistics, which they estimate on their own data.

        Shared statistics are not measured, since estimates would have to leave the sites.
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
                if (found := read_evaluated(facts).rows) or moment == "loaded":
                    rows[name] = self._read_rows(found, name, splits, moment)
            except FedshiftError as error:
                what = "measured" if moment == "loaded" else "measured with statistics estimated anew"
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
        """Return the error to raise if too few clients can continue after ``round``, whose updates had ``ratios``."""
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
            own = to_record(pick(broadcast(server, name).shared, entries)) if server.mixes else shared
            questions[name] = Exchange(
                kind=kind,
                facts={**facts, "base": self.bases.get(name, 0), UPLOAD: self.uploads.get(name, "")},
                arrays={"shared": own, "memory": memory},
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
        """Return the upload of client ``name``, and its digest as the client told it.

        Raises :class:`FedshiftError` with the reason if it cannot be used.
        """
        facts, arrays = _check_answer(name, answer, "trained", server.round + 1)
        said = read_trained(facts)
        samples = len(self.data[name])
        bounds, steps = self.steps_of_round(name, ClientState(personal={}, steps=steps_before))
        used = sum(stop - start for start, stop in (bounds[step % len(bounds)] for step in steps))
        if (said.weight, said.steps) != (used, len(steps)):
            raise RefusedMessage(
                f"it says {said.weight:g} samples in {said.steps} steps, where its {samples} make {used} in "
                f"{len(steps)}"
            )
        found = sum(len(array.data) for record in arrays.values() for array in record.values())
        if found > self._most_bytes:
            raise RefusedMessage(f"its upload has {found} bytes, and the method's takes at most {self._most_bytes}")
        with refusing("its upload cannot be read"):
            shared, memory = self._to_device(arrays["shared"]), self._to_device(arrays["memory"])
            update = check_update(self.plan, server, shared, memory, said.weight, said.steps, self._memory, used)
        result = ClientResult(
            client=ClientState(personal={}, steps=steps_before + said.steps), update=update, loss_sum=said.loss_sum,
            rows=self._read_rows(said.rows, name, splits, "trained") if splits else None,
        )  # fmt: skip
        return result, said.upload

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
    said = answer.kind, answer.facts.get("name"), answer.facts.get("round")
    if said != (kind, name, round):
        raise RefusedMessage(f"it answers {said[0]!r} as {said[1]!r} for round {said[2]}, where {kind!r} was asked")
    wanted = {"trained": {"shared", "memory"}, "introduced": {"memory"}}.get(kind, set[str]())
    if missing := wanted - answer.arrays.keys():
        raise RefusedMessage(f"it sent no {' and no '.join(sorted(missing))} entries")
    if extra := answer.arrays.keys() - wanted:
        raise RefusedMessage(f"it sent a record {min(extra)!r}, which nobody asked for")
    return answer.facts, answer.arrays
