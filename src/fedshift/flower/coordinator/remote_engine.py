"""An engine whose clients are sites behind Flower's grid; experiments and trials run as they do in one process.

The coordinator aggregates uploads, does not evaluate models itself and sees no samples. For each client it keeps only
the number of completed steps, the round of the current client state (the *base*, see
:class:`fedshift.flower.site.state.SiteState`) and the digest of the client's upload in that round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from ...utils.errors import FedshiftError, UsageError
from ...utils.state import State, join_states, pick, split_state
from ..messages import UPLOAD, Exchange, RefusedMessage, check_state, check_update, from_record, refusing, to_record
from .answers import EvaluatedAnswer, RowReader, TrainedAnswer, read_answer
from .nodes import Nodes
from .rounds import BOUND, UpdateLengths

HEADER = 1024
"""Maximum number of bytes that NumPy's format adds to an entry."""


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """Conditions of a round.

    ``clients``: minimum number of participants. ``seconds``: maximum duration. ``wait``: seconds to wait for the first
    clients to connect. ``update_bound``: maximum ratio of a client's update length to the others'; 0: no limit.
    ``max_share``: maximum weight of one client among three or more.
    """

    clients: int
    seconds: float = 3600.0
    wait: float = 86400.0
    update_bound: float = BOUND
    max_share: float = 1.0

    @property
    def flags(self) -> str:
        """The equivalent command-line flags."""
        names = {"seconds": "round-timeout", "wait": "wait", "update_bound": "update-bound", "max_share": "max-share"}
        changed = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(RoundOptions, name)}
        more = "".join(f" --{names[name]} {value:g}" for name, value in changed.items())
        return f"--min-clients {self.clients}{more}"

    def check(self) -> None:
        """Raise :class:`UsageError` naming a condition that cannot be met."""
        if self.clients < 1:
            raise UsageError(f"min_clients={self.clients}: must be at least 1")
        if not (self.update_bound == 0 or self.update_bound > 1):
            raise UsageError(
                f"update_bound={self.update_bound:g}: must be greater than 1 (maximum ratio to the length of the "
                "others' updates), or 0 for no limit"
            )
        if not 0 < self.max_share <= 1:
            raise UsageError(
                f"max_share={self.max_share:g}: must be greater than 0 and at most 1 (no limit): the maximum weight of "
                "one site among three or more"
            )


class RemoteEngine(Engine):
    """Asks the sites behind ``nodes`` to train and evaluate; ``trial`` identifies method and seed in questions.

    Uploads wait until all have arrived, so that updates much longer than the others' can be excluded.
    """

    def __init__(
        self, plan: Plan, data: Data, seed: int, *, federation: Federation, settings: Settings, nodes: Nodes,
        options: RoundOptions, trial: Mapping[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(plan, data, seed)
        self.federation, self.settings, self.nodes = federation, settings, nodes
        self.options, self.trial = options, trial
        self.bases: dict[str, int] = {}
        self.uploads: dict[str, str] = {}
        self._lengths, self._away = UpdateLengths(options.update_bound), frozenset[str]()
        least = min(options.clients, len(settings.draw_participants(seed, 1, tuple(data))))
        check_client_count(plan.method.aggregate, least)
        self._memory, self._prelude = like_sends(plan), like_sends(plan, prelude=True)
        self._most_bytes = sum(entry.bytes + HEADER for entry in list_disclosures(plan))
        self._rows = RowReader(federation.task, federation.classes)

    @property
    @override
    def max_share(self) -> float:
        return self.options.max_share

    @override
    def find_available(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Wait for enough clients and return those that are connected; report each absent client once."""
        self.nodes.wait(min(self.options.clients, len(names)), self.options.seconds, frozenset(names))
        available = tuple(name for name in names if name in self.nodes.online)
        away = frozenset(names) - set(available)
        for name in sorted(away - self._away):
            self.nodes.say(f"{name} is away: rounds continue without it")
        self._away = away
        return available

    @override
    def introduce(self, names: tuple[str, ...]) -> Iterator[tuple[str, Update]]:
        enough, updates = min(self.options.clients, len(names)), dict[str, Update]()
        question = Exchange(kind="introduce", facts={"trial": self.trial, "round": 0})
        for name, answer in self.nodes.ask(dict.fromkeys(names, question), enough, self.options.seconds):
            try:
                _, arrays = _check_answer(name, answer, "introduced", 0)
                with refusing("its upload cannot be read"):
                    memory = self._to_device(arrays["memory"])
                    check_state(memory, self._prelude, "the upload's rule memory")
                    parts = split_state(self.plan.rule_names, memory)
                updates[name] = Update(shared={}, memory=parts, weight=float(len(self.data[name])), steps=0)
            except FedshiftError as error:
                self.nodes.say(f"before round 1: {name} is left out: {error}", name)
        if len(updates) < enough:
            raise FedshiftError(
                f"before round 1: only {len(updates)} of {len(names)} clients sent a usable upload, and {enough} must "
                "(--min-clients). There is no trained model yet: continue with --resume"
            )
        yield from updates.items()

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        round, enough = server.round + 1, min(self.options.clients, len(clients))
        results: dict[str, ClientResult] = {}
        uploads: dict[str, str] = {}
        diverged: list[Diverged] = []
        measures = "trained" in self.settings.moments and self.settings.is_evaluated(round)
        splits = {name: self._list_splits(name) if measures else () for name in clients}
        for name, answer in self._ask("train", server, splits, self.plan.received, enough):
            try:
                results[name], uploads[name] = self._check_update(
                    server, name, clients[name].steps, answer, splits[name]
                )
            except FedshiftError as error:
                self.nodes.say(f"round {round}: {name} is left out: {error}", name)
                diverged += [error] if isinstance(error, Diverged) else []
        updates = {name: result.update for name, result in results.items()}
        for name, ratio in self._lengths.find_outliers(server, updates).items():
            self.nodes.say(
                f"round {round}: {name} is left out: its update is {ratio:.3g} times as long as the others', and the "
                f"limit is {self.options.update_bound:g} times (--update-bound)",
                name,
            )
            del results[name]
        if len(results) < enough:
            few = FedshiftError(
                f"round {round}: only {len(results)} of {len(clients)} clients sent a usable upload, and {enough} must "
                f"(--min-clients). The model of round {round - 1} is kept: continue with --resume"
            )
            raise diverged[0] if diverged else few
        yield from results.items()
        self.bases |= dict.fromkeys(results, round)
        self.uploads |= {name: uploads[name] for name in results}

    @override
    def evaluate(self, server: ServerState) -> list[Row]:
        """Return the rows of all connected clients; a client that is away or does not answer has none."""
        all_have = self.plan.has_global or self.settings.unseen != "skip"
        names = [name for name in self.federation.names if all_have or name in self.bases]
        for name in names:
            if name not in self.nodes.online:
                self.nodes.say(f"round {server.round}: {name} is not measured, because it is away")
        return self._measure(server, {name: self._list_splits(name) for name in names}, "loaded")

    @override
    def evaluate_reestimated(self, server: ServerState) -> list[Row]:
        """Return the rows of connected clients with their own statistics, re-estimated on their data.

        Shared statistics are not re-estimated, since the estimates would have to leave the sites.
        """
        names = [name for name in self.federation.names if name in self.bases] if self.plan.personalizes else []
        splits = {name: self._list_splits(name) for name in names}
        return self._measure(server, {name: some for name, some in splits.items() if some}, REESTIMATED)

    def _measure(self, server: ServerState, splits: Mapping[str, tuple[str, ...]], moment: str) -> list[Row]:
        entries = self.plan.sent if self.plan.has_global else self.plan.received
        asked = {name: some for name, some in splits.items() if name in self.nodes.online}
        rows: dict[str, list[Row]] = {}
        for name, answer in self._ask(
            "evaluate", server, asked, entries, min(self.options.clients, len(asked)), moment
        ):
            try:
                facts, _ = _check_answer(name, answer, "evaluated", server.round)
                if (answered := read_answer(EvaluatedAnswer, facts).rows) or moment == "loaded":
                    rows[name] = self._read_rows(answered, name, splits[name], moment)
            except FedshiftError as error:
                what = "measured" if moment == "loaded" else "measured with re-estimated statistics"
                self.nodes.say(f"round {server.round}: {name} is not {what}: {error}", name)
        return [row for name in self.federation.names for row in rows.get(name, [])]

    def _list_splits(self, name: str) -> tuple[str, ...]:
        """Return the splits on which client ``name`` lets a model be measured in this experiment."""
        return tuple(split for split in measured_splits(self.federation) if split in self.nodes.known[name].measures)

    @override
    def facts(self) -> dict[str, Any]:
        return {"bases": self.bases, "uploads": self.uploads, "lengths": self._lengths.facts()}

    @override
    def restore(self, facts: Mapping[str, Any]) -> None:
        self.bases, self.uploads = dict(facts["bases"]), dict(facts.get("uploads", {}))
        self._lengths.restore(facts.get("lengths", {}))

    def _ask(
        self, kind: str, server: ServerState, splits: Mapping[str, tuple[str, ...]], entries: frozenset[str],
        enough: int, moment: str = "loaded",
    ) -> Iterator[tuple[str, Exchange | FedshiftError]]:  # fmt: skip
        """Ask the clients in ``splits``, each to measure on its splits."""
        memory = to_record(join_states(self.plan.rule_names, server.memory))
        shared = to_record(pick(server.shared, entries))
        facts = {"trial": self.trial, "round": server.round, "moment": moment}
        questions = {}
        for name, some in splits.items():
            entry = to_record(pick(broadcast(server, name).shared, entries)) if server.mixes else shared
            base = {"base": self.bases.get(name, 0), UPLOAD: self.uploads.get(name, "")}
            questions[name] = Exchange(
                kind=kind, facts={**facts, **base, "splits": some}, arrays={"shared": entry, "memory": memory}
            )
        return self.nodes.ask(questions, enough, self.options.seconds)

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
        report = read_answer(TrainedAnswer, facts)
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
            rows=self._read_rows(report.rows, name, splits, "trained"),
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
