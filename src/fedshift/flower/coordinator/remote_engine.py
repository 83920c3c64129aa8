"""An engine whose clients are sites behind Flower's grid; experiments and trials run as they do in one process.

The coordinator aggregates uploads, does not evaluate models itself and sees no samples. For each client it keeps only
the number of completed steps, the round of the current client state (the *base*, see
:class:`fedshift.flower.site.state.SiteState`) and the digest of the client's upload in that round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import override

from ...core.checks import check_client_count, like_sends
from ...core.kernel import broadcast
from ...core.plan import Plan
from ...core.states import ClientState, ServerState
from ...data.federation import Federation
from ...engines.engine import ClientResult, Data, Diverged, Engine
from ...evaluation.communication import list_disclosures
from ...evaluation.metrics import measured_splits
from ...experiments.settings import Settings
from ...results.schema import REESTIMATED, Row
from ...utils.errors import FedshiftError, UsageError
from ...utils.state import State, join_states, pick
from ..messages import UPLOAD, Exchange, RefusedMessage, check_update, from_record, refusing, to_record
from .answers import EvaluatedAnswer, RowReader, TrainedAnswer
from .nodes import Nodes
from .rounds import BOUND, UpdateLengths

Result = TypeVar("Result")
HEADER = 1024
"""Maximum number of bytes that NumPy's format adds to an entry."""


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """Conditions of a round.

    ``clients``: minimum number of participants. ``seconds``: maximum duration. ``wait``: seconds to wait for the first
    clients. ``update_bound``: maximum ratio of a client's update length to the others'; 0: no limit. ``max_share``:
    maximum weight of one client among three or more; 1: no limit.
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
        return " ".join([f"--min-clients {self.clients}", *(f"--{names[key]} {changed[key]:g}" for key in changed)])

    def check(self) -> None:
        """Raise :class:`UsageError` naming a condition that cannot be met."""
        rules = (
            ("min_clients", self.clients, self.clients >= 1, "at least 1"),
            ("update_bound", self.update_bound, self.update_bound == 0 or self.update_bound > 1,
             "greater than 1 (maximum ratio to the length of the others' updates), or 0 for no limit"),
            ("max_share", self.max_share, 0 < self.max_share <= 1,
             "greater than 0 and at most 1 (no limit): the maximum weight of one site among three or more"),
        )  # fmt: skip
        for name, value, holds, allowed in rules:
            if not holds:
                raise UsageError(f"{name}={value:g}: must be {allowed}")


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
        check_client_count(plan.method, least)
        self._memory = like_sends(plan)
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
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        round, reports = server.round + 1, dict[str, TrainedAnswer]()
        measures = "trained" in self.settings.moments and self.settings.is_evaluated(round)
        splits = {name: self._list_splits(name) if measures else () for name in clients}

        def read(name: str, answer: Exchange) -> ClientResult:
            reports[name] = TrainedAnswer.of(answer, name, round)
            return self._read_upload(server, clients[name].steps, answer, reports[name], splits[name])

        questions = self._make_questions("train", server, splits, self.plan.downloaded)
        results, errors = self._collect(questions, f"round {round}", "left out", read)
        updates = {name: result.update for name, result in results.items()}
        for name, ratio in self._lengths.find_outliers(server, updates).items():
            self.nodes.say(
                f"round {round}: {name} is left out: its update is {ratio:.3g} times as long as the others', and the "
                f"limit is {self.options.update_bound:g} times (--update-bound)",
                name,
            )
            del results[name]
        self._require(results, clients, f"round {round}", f"The model of round {round - 1} is kept", errors)
        yield from results.items()
        self.bases |= dict.fromkeys(results, round)
        self.uploads |= {name: reports[name].upload for name in results}

    def _collect(
        self, questions: Mapping[str, Exchange], when: str, lacks: str,
        read: Callable[[str, Exchange], Result],
    ) -> tuple[dict[str, Result], list[FedshiftError]]:  # fmt: skip
        """Ask clients; return what ``read`` makes of their answers, and the errors of those that it refuses."""
        results, errors = dict[str, Result](), list[FedshiftError]()
        for name, answer in self.nodes.ask(questions, self._count_enough(questions), self.options.seconds):
            try:
                if isinstance(answer, FedshiftError):
                    raise answer
                results[name] = read(name, answer)
            except FedshiftError as error:
                errors.append(error)
                self.nodes.say(f"{when}: {name} is {lacks}: {error}", name)
        return results, errors

    def _count_enough(self, names: Collection[str]) -> int:
        return min(self.options.clients, len(names))

    def _require(
        self, usable: Collection[str], asked: Collection[str], when: str, kept: str, errors: Iterable[Exception] = ()
    ) -> None:
        """Raise :class:`FedshiftError` if too few uploads are usable: that a client diverged, if one did."""
        if len(usable) < (enough := self._count_enough(asked)):
            few = FedshiftError(
                f"{when}: only {len(usable)} of {len(asked)} clients sent a usable upload, and {enough} must "
                f"(--min-clients). {kept}: continue with --resume"
            )
            raise next((error for error in errors if isinstance(error, Diverged)), few)

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
        def read(name: str, answer: Exchange) -> list[Row]:
            rows = EvaluatedAnswer.of(answer, name, server.round).rows
            return self._read_rows(rows, name, splits[name], moment) if rows or moment == "loaded" else []

        asked = {name: some for name, some in splits.items() if name in self.nodes.online}
        entries = self.plan.sent if self.plan.has_global else self.plan.downloaded
        lacks = f"not measured{' with re-estimated statistics' if moment == REESTIMATED else ''}"
        questions = self._make_questions("evaluate", server, asked, entries, moment)
        rows, _ = self._collect(questions, f"round {server.round}", lacks, read)
        return [row for name in self.federation.names for row in rows.get(name, [])]

    def _list_splits(self, name: str) -> tuple[str, ...]:
        """Return the splits on which client ``name`` lets a model be measured in this experiment."""
        return tuple(split for split in measured_splits(self.federation) if split in self.nodes.known[name].measures)

    @override
    def facts(self) -> dict[str, Any]:
        return {"bases": self.bases, "uploads": self.uploads, "lengths": self._lengths.longest}

    @override
    def restore(self, facts: Mapping[str, Any]) -> None:
        self.bases, self.uploads = dict(facts["bases"]), dict(facts["uploads"])
        self._lengths.longest = dict(facts["lengths"])

    def _make_questions(
        self, kind: str, server: ServerState, splits: Mapping[str, tuple[str, ...]], entries: frozenset[str],
        moment: str = "loaded",
    ) -> dict[str, Exchange]:  # fmt: skip
        """Return a question for each client in ``splits``, to measure on its splits."""
        memory = to_record(join_states(self.plan.rule_names, server.memory))
        shared = to_record(pick(server.shared, entries))
        facts = {"trial": self.trial, "round": server.round, "moment": moment}
        questions = {}
        for name, some in splits.items():
            entry = to_record(pick(broadcast(server, name).shared, entries)) if server.mixes else shared
            base = {"base": self.bases.get(name, 0), UPLOAD: self.uploads.get(name, ""), "splits": some}
            questions[name] = Exchange(kind=kind, facts=facts | base, arrays={"shared": entry, "memory": memory})
        return questions

    def _read_upload(
        self, server: ServerState, done: int, answer: Exchange, report: TrainedAnswer, splits: tuple[str, ...]
    ) -> ClientResult:
        """Return a client's upload after ``done`` steps; raise :class:`FedshiftError` if it cannot be used."""
        name, samples = report.name, len(self.data[report.name])
        bounds, steps = self.steps_of_round(name, ClientState(personal={}, steps=done))
        used = sum(stop - start for start, stop in (bounds[step % len(bounds)] for step in steps))
        if (report.weight, report.steps) != (used, len(steps)):
            raise RefusedMessage(
                f"it reports {report.weight:g} samples in {report.steps} steps, but a round over its {samples} has "
                f"{used} in {len(steps)}"
            )
        arrays = self._read_arrays(answer)
        shared, memory = arrays["shared"], arrays["memory"]
        update = check_update(self.plan, server, shared, memory, used, len(steps), self._memory)
        return ClientResult(
            client=ClientState(personal={}, steps=steps.stop), update=update, loss_sum=report.loss_sum,
            rows=self._read_rows(report.rows, name, splits, "trained"),
        )  # fmt: skip

    def _read_rows(self, rows: list[dict[str, Any]], name: str, splits: tuple[str, ...], moment: str) -> list[Row]:
        parts = self.federation.client(name).splits
        sizes = {split: len(parts[split]) for split in splits if split in parts}
        return self._rows.read(rows, name, sizes, moment)

    def _read_arrays(self, answer: Exchange) -> dict[str, State]:
        """Return the entries in an answer, on the device."""
        if answer.size > self._most_bytes:
            raise RefusedMessage(f"its upload has {answer.size} bytes, and the method sends at most {self._most_bytes}")
        with refusing("its upload cannot be read"):
            states = {kind: from_record(record) for kind, record in answer.arrays.items()}
            return {kind: {name: x.to(self.settings.device) for name, x in states[kind].items()} for kind in states}
