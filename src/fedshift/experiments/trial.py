"""A trial: one method with one seed, round after round, that can be stopped and resumed bit for bit.

All state of a trial besides its settings is in the server and in each client that has taken part. Random draws come
from keyed streams, so a trial restored from a checkpoint continues as if it had never stopped. The cost of a round
depends on its participants, not on the total number of clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..analysis.privacy import SampleUses
from ..core.architecture import architecture
from ..core.checks import check_client_count
from ..core.kernel import broadcast, global_state, init_client, init_server, trained_state
from ..core.method import Method
from ..core.mixes import Mixes
from ..core.preparation import change_layers
from ..core.server_round import ClientSizes, StreamingAggregator
from ..core.states import ClientState, ServerState
from ..core.work import square_uses
from ..data.augmentation import check_augmentable
from ..data.copies import number_samples
from ..data.federation import ClientData, Federation, count_labels
from ..data.samples import Samples, join_samples
from ..engines import find_engine
from ..engines.auto import EngineChoice, choose_engine, count_operations
from ..engines.engine import ClientResult, Engine, EngineFactory
from ..engines.frozen import FITTING, Inputs
from ..engines.spread import Pool
from ..evaluation.communication import downlink_bytes, uplink_bytes
from ..evaluation.metrics import evaluate, evaluate_clients, evaluate_trained, measured_splits
from ..evaluation.policy import check_policy, make_state
from ..evaluation.statistics_lag import draw_seen, find_moves, may_lag, reestimate_models
from ..evaluation.unseen_clients import PolicyContext, make_personal_state
from ..models import ModelFactory
from ..results.checkpoint import refuse_other, save_checkpoint
from ..results.schema import REESTIMATED, RUNNING, Row, compute_metric, rows_to_frame
from ..results.trial_records import load_facts
from ..tasks import describe_task
from ..utils.errors import FedshiftError, UsageError
from ..utils.execution.executor import Executor
from ..utils.profiling import OPERATIONS, add_seconds, is_recording, timed_section
from ..utils.state import State, add_prefix, entries_under, join_states, split_state
from ..utils.threads import limit_threads
from ..utils.words import join_some
from .client_store import MEMORY, ClientStore, remove_unused_segments
from .private_training import refuse_uncovered
from .settings import Settings, check_sizes, make_plan, start_network

SERVER_PARTS = ("shared", "memory", "kept", "mixes")
Models = tuple[ServerState, Callable[[ClientData], State | None]]
"""The server, and a function that returns the model that a client would use, None if it has none."""
BEGUN = "as the run was begun"
"""Reason given for the engine of a trial that continues."""


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """Outcome of a round: participants, bytes moved by all clients, seconds of training, and rows of measurements.

    ``stopped``: why the trial ends with this round although more were planned.
    """

    round: int
    participants: tuple[str, ...]
    down: int
    up: int
    seconds: float
    rows: list[Row]
    stopped: str = ""

    def measure(self, metric: str, split: str = "test") -> dict[str, float]:
        """Return ``metric`` by client, of the models that clients would use, on ``test`` or ``validation`` data."""
        wanted = split, "personal", "loaded"
        found = rows_to_frame(row for row in self.rows if (row["split"], row["model"], row["moment"]) == wanted)
        values = compute_metric(found.set_index("client"), metric).dropna()
        return {str(client): float(value) for client, value in values.items()}


class Trial:
    """One method with one seed on one federation; see the module's docstring.

    ``statistics``: BatchNorm statistics of the models that :meth:`personal_state` and :meth:`model_state` return.
    ``client_memory``: maximum bytes of clients' states in memory; the others are only in files (``client_store``).
    ``make_engine``: makes the engine in place of the one in the settings. ``executor``: where the pool engine
    trains; None: in its own processes.
    """

    def __init__(
        self,
        method: Method,
        model: ModelFactory,
        data: Federation,
        settings: Settings,
        seed: int,
        *,
        client_memory: int = MEMORY,
        make_engine: EngineFactory | None = None,
        executor: Executor | None = None,
    ) -> None:
        data = settings.request_metrics(data)
        settings = settings.for_task(data.task)
        self.data, self.settings, self.seed = data, settings, seed
        device = torch.device(settings.device)
        newcomers = frozenset(settings.newcomers)
        for name in sorted(newcomers.difference(data.names)):
            data.client(name)  # raises
        members = tuple(client for client in data.clients if client.name not in newcomers)
        if not members:
            raise UsageError("newcomers names every client: leave some to train").about("newcomers")
        share = settings.participation
        if isinstance(share, int) and share > len(members) and not method.pooled:
            raise UsageError(
                f"participation={share}: only {len(members)} clients train; give at most as many, or leave it out"
            ).about("participation")
        training = replace(data, clients=members)
        trained_on = training
        if method.pooled:
            joined = join_samples([client.train for client in members])
            trained_on = replace(training, clients=(ClientData(name="pooled", train=joined, test=members[0].test),))
        self.model = model
        if settings.augment:
            check_augmentable(training, settings.augment)
        self.plan = make_plan(
            method,
            model,
            settings,
            seed,
            sample=members[0].train.inputs(slice(0, 1)).to(device),
            classes=data.classes,
            labels=count_labels(training),
            clients=len(members),
            task=data.task,
        )
        refuse_uncovered(self.plan, settings, training)
        self._architecture = architecture(self.plan.module)  # now, before a layer that counts its calls is called
        check_sizes(self.plan, {client.name: len(client.train) for client in trained_on.clients})
        check_client_count(method, len(settings.draw_participants(seed, 1, trained_on.names)))
        if self.plan.personalizes:
            known = {client.name: client.train for client in data.clients if len(client.train)}
            check_policy(self.plan, settings.unseen, known, data.task)
        self.measured = data.to(device)
        measured = (client for client in self.measured.clients if client.name not in newcomers)
        self.train = {
            client.name: client.train for client in (trained_on.to(device).clients if method.pooled else measured)
        }
        self.choice = None if settings.engine == "auto" else EngineChoice(engine=settings.engine, reason="as asked for")
        self._remote, self._executor = make_engine is not None, executor
        self._used: Inputs | None = None
        if make_engine:
            self._engine: Engine | None = make_engine(self.plan, self.train, seed)
        else:
            self._engine = self._make_engine(self.choice) if self.choice else None
        self.server = init_server(self.plan)
        self.clients = ClientStore(
            self.train, lambda: init_client(self.plan), device, client_memory, self.plan.rule_names
        )
        self._known: PolicyContext | None = None
        self.statistics = RUNNING
        self._renewed: tuple[ServerState, Models | None] | None = None

    @property
    def engine_choice(self) -> EngineChoice:
        """Engine that runs the trial, and the reason; with ``auto`` it is chosen at the first access."""
        if self.choice is None:
            settings = self.settings
            self.choice = choose_engine(
                self.inputs.plan, self.inputs.train, clients=self.participants, rounds=settings.rounds,
                workers=settings.workers, augment=settings.augment, separate_uploads="trained" in settings.moments,
            )  # fmt: skip
        return self.choice

    @property
    def participants(self) -> int:
        """Number of clients that take part in a round."""
        return len(self.settings.draw_participants(self.seed, 1, self.clients.names))

    @property
    def inputs(self) -> Inputs:
        """What steps and evaluations run on now; features of a frozen backbone are extracted at the first access."""
        samples = Inputs(plan=self.plan, train=self.train, measured=self.measured)
        if self._used is None:
            with timed_section("backbone"):
                extracts = not self._remote and self.settings.unseen in FITTING
                self._used = samples.extract(self.settings.augment) if extracts else samples
        if not self._used.fit(self.server):
            self._used = samples
        return self._used

    @property
    def engine(self) -> Engine:
        """Engine that carries out the clients' work."""
        if self._engine is None:
            self._engine = self._make_engine(self.engine_choice)
        return self._engine

    def _renew_engine(self) -> None:
        """Make the engine again if steps run on other inputs than it was made for."""
        if self._engine and self.choice and not self._remote and self._engine.plan is not self.inputs.plan:
            self._engine.close()
            self._engine = self._make_engine(self.choice)

    def _make_engine(self, choice: EngineChoice) -> Engine:
        if choice.engine == "identity" and "trained" in self.settings.moments:
            raise UsageError(
                "moments='trained' measures clients' models after local work, which the identity engine never "
                "computes: use the sequential engine, or auto"
            )
        kind, settings, used = find_engine(choice.engine), self.settings, self._used or self
        given = used.plan, used.train, self.seed, settings.workers, settings.augment, "trained" in settings.moments
        return Pool(*given, self._executor) if kind is Pool else kind(*given)

    def _draw_participants(self, number: int) -> tuple[str, ...]:
        """Return the clients selected to take part in round ``number``."""
        names = self.clients.names
        return self.settings.draw_participants(
            self.seed, number, self._engine.find_available(names) if self._engine else names
        )

    def _train(self, names: tuple[str, ...]) -> Iterator[tuple[str, ClientResult]]:
        """Yield the results of clients ``names`` in the coming round as they finish; a failed client may be skipped."""
        working = {name: self.clients[name] for name in sorted(names)}
        self._renew_engine()
        with limit_threads(self.engine_choice.threads):
            yield from self.engine.train(self.server, working)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {name: len(split) for name, split in self.train.items()}

    @cached_property
    def _client_sizes(self) -> ClientSizes:
        return ClientSizes(self.plan, self._sizes, self.engine.max_share)

    @cached_property
    def _place(self) -> dict[str, int]:
        """Position of each client in tables."""
        return {name: place for place, name in enumerate(dict.fromkeys((*self.data.names, *self.clients.names)))}

    @cached_property
    def _operations(self) -> int:
        return count_operations(self.plan, self.train)

    def close(self) -> None:
        """Release the engine's resources."""
        if self._engine:
            self._engine.close()

    def find_merged_batches(self) -> tuple[str, ...]:
        """Return the clients whose last batch would hold a single sample, which joins the batch before it."""
        work, smallest = self.plan.work, self.plan.smallest_batch
        sizes = {name: len(split) for name, split in self.train.items()}
        return tuple(
            name for name, size in sizes.items() if work.batch_bounds(size, smallest) != work.batch_bounds(size)
        )

    def count_batches(self) -> dict[str, int]:
        """Return the number of batches in a pass over each client's data."""
        work, smallest = self.plan.work, self.plan.smallest_batch
        return {name: len(work.batch_bounds(size, smallest)) for name, size in self._sizes.items()}

    def count_passes(self) -> dict[str, int]:
        """Return the passes over its data that each client has begun; in a pass, each sample is in one batch."""
        steps, batches = self.clients.count_steps(), self.count_batches()
        return {name: -(-count // batches[name]) for name, count in steps.items()}

    def count_uses(self) -> SampleUses:
        """Return how often the steps so far used the samples of all clients, each copy of a sample included."""
        passes, train = self.count_passes(), {name: split for name, split in self.train.items() if len(split)}
        if self._remote:
            return SampleUses(passes=passes, assumes="no sample occurs twice, at one site or at several")
        numbers = number_samples(train)
        every, uses, rows = [], [], []
        for name, own in numbers.items():
            bounds = self.plan.work.batch_bounds(len(own), self.plan.smallest_batch)
            different, squares = square_uses(self.seed, name, own, bounds, passes.get(name, 0))
            every.append(different)
            uses.append(squares)
            rows.append(np.unique(own, return_counts=True)[1])
        _, place = np.unique(np.concatenate(every), return_inverse=True)
        most, copies = (np.bincount(place, np.concatenate(values)) for values in (uses, rows))
        alike = "no items of the data sets, which draw at random when read, are copies of one sample"
        assumes = alike if any(split.draws and not split.patches for split in train.values()) else ""
        return SampleUses(passes=passes, copies=int(copies.max()), squares=int(most.max()), assumes=assumes)

    @property
    def identity(self) -> dict[str, str]:
        """Settings, by name, that must be unchanged to continue from a checkpoint."""
        digests = {f"version of the data of {what}": digest for what, digest in self.data.digests.items()}
        return {
            "method": self.plan.method.text,
            "seed": str(self.seed),
            "model": self._architecture,
            "weights": str(self.settings.weights),
            **(digests or {"data": self.data.fingerprint}),
            "inputs": str(self.data.inputs),
            "work": str(self.plan.work),
            "freeze": str(self.plan.freeze_from),
            "optimizer": str(self.plan.optimizer),
            "participation": str(self.settings.participation),
            # sites that only validate have no training samples and may join at any time
            "newcomers": str(tuple(name for name in self.settings.newcomers if len(self.data.client(name).train))),
            "unseen": self.settings.unseen,
            "select": self.settings.select,
            "patience": str(self.settings.patience and (self.settings.patience, self.settings.min_delta)),
            "metric": ", ".join(dict.fromkeys((self.settings.metric, *(m.name for m in self.data.task.requested)))),
            "loss": str(self.settings.loss),
            "task": str(describe_task(self.data.task)),
            "augment": str(self.settings.augment),
            "precision": self.settings.precision,
        }

    def advance(self, progress: Callable[[str, float], None] | None = None) -> RoundResult:
        """Run the next round, and evaluate if due; call ``progress(client, loss)`` as each client finishes.

        Raises ``Diverged`` if a loss becomes NaN; the trial is then in its state before the round.
        """
        began = time.perf_counter()
        self.clients.spill(self.server.round)
        number = self.server.round + 1
        names = self._draw_participants(number)
        folding = StreamingAggregator(self.plan, self.server, names, self._client_sizes)
        after: dict[str, ClientState] = {}
        rows: list[Row] = []
        after_work: list[Row] = []
        measures, measuring = "trained" in self.settings.moments and self.settings.is_evaluated(number), 0.0
        common: Row = {"method": self.plan.method.label, "seed": self.seed, "round": number}
        down = 0 if self.plan.method.pooled else len(names) * downlink_bytes(self.plan, self.server)
        up = 0
        for name, trained in self._train(names):
            with timed_section("aggregation"):
                folding.add(name, trained.update, trained.summed)
            if not self.plan.method.pooled:
                up += uplink_bytes(trained.update) + (trained.summed.nbytes if trained.summed else 0)
            after[name] = trained.client
            used = int(trained.update.weight)
            rows.append(
                {
                    **common, "client": name, "split": "train", "model": "personal", "moment": "trained",
                    "samples": used, "loss_sum": trained.loss_sum, "hits": None, "support": None, "auc": None,
                }
            )  # fmt: skip
            if measures:
                paused = time.perf_counter()
                with timed_section("evaluation"):
                    after_work += self._evaluate_trained(name, trained) if trained.rows is None else trained.rows
                measuring += time.perf_counter() - paused
            if progress:
                progress(name, trained.loss_sum / used)
        if (lost := [name for name in names if name not in after]) and not self._remote:
            raise FedshiftError(
                f"the engine {self.engine_choice.engine} gave no result of {join_some(map(repr, lost))} in round "
                f"{number}: its train must yield every client that it receives"
            )
        with timed_section("aggregation"):
            self.server = folding.finalize()
        self.clients.put(after)
        if is_recording():
            add_seconds({OPERATIONS: sum(row["samples"] for row in rows) * self._operations})
        seconds = time.perf_counter() - began - measuring
        rows.sort(key=lambda row: self._place[row["client"]])
        measured = sorted(after_work, key=lambda row: self._place[row["client"]])
        if self.settings.is_evaluated(number):
            with timed_section("evaluation"):
                measured += self.evaluate()
        rows += [{**common, **row} for row in measured]
        took_part = tuple(name for name in names if name in after)
        return RoundResult(round=number, participants=took_part, down=down, up=up, seconds=seconds, rows=rows)

    def evaluate(self) -> list[Row]:
        """Return rows for every client's test data, and validation data if all have some.

        Newcomers' validation data are not measured, so that they do not influence the choice of the best round.
        """
        rows = self._engine.evaluate(self.server) if self._engine else None
        if rows is None:
            used = self.inputs
            personal = lambda client: self.personal_state(self.measured.client(client.name))  # noqa: E731
            rows = evaluate_clients(used.plan, self.server, used.measured, self.splits, personal)
        return self._without_newcomers(rows)

    def _without_newcomers(self, rows: list[Row]) -> list[Row]:
        return [row for row in rows if row["split"] == "test" or row["client"] not in self.settings.newcomers]

    def reestimate(self) -> Models | None:
        """Return the models with re-estimated BatchNorm statistics (:mod:`fedshift.evaluation.statistics_lag`).

        None: the running ones cannot lag.
        """
        if not may_lag(self.plan, self.server):
            return None

        def find(name: str) -> State | None:
            return self._running_state(self.measured.client(name)) if self.clients.has_trained(name) else None

        names = self._draw_participants(self.server.round) if self.server.mixes else ()
        found = reestimate_models(self.plan, self.server, self.train, find, names)
        server = replace(self.server, shared=self.server.shared | found.get(None, {}))

        def personal(client: ClientData) -> State | None:
            state, owner = self._running_state(client, server), client.name if self.plan.personalizes else None
            return None if state is None else {**state, **found.get(owner, {})}

        return server, personal

    def measure_lag(self, evaluated: Sequence[Row], renewed: Models | None = None) -> dict[str, Any]:
        """Return measurements of the models with re-estimated BatchNorm statistics (``rows``), after ``round``.

        Also: ``moves``, the metric with both statistics on validation or, without them, training data
        (:attr:`fedshift.results.schema.RunSummary.moves`), and ``complete``, whether all models are measured.

        Args:
            evaluated: the usual measurements of the round, which hold where statistics cannot lag.
            renewed: the result of :meth:`reestimate`; None: statistics cannot lag, or sites have the data.

        """
        rows, moves = [row for row in evaluated if row["moment"] == "loaded"], list[dict[str, Any]]()
        own = [row for row in rows if row["model"] == "personal"]
        metric, complete = self.settings.metric, True
        if renewed:
            server, model = renewed
            moves = find_moves(metric, self._measure_seen(self._running_state), self._measure_seen(model))
            rows = evaluate_clients(self.plan, server, self.measured, self.splits, model)
        elif may_lag(self.plan, self.server):
            rows = self.engine.evaluate_reestimated(self.server) or []
            complete = len(rows) == len(own)
            moves = find_moves(metric, *([row for row in each if row["split"] == "validation"] for each in (own, rows)))
        rows = [{**row, "moment": REESTIMATED} for row in self._without_newcomers(rows)]
        return {"round": self.server.round, "complete": complete, "moves": moves, "rows": rows}

    def _measure_seen(self, model: Callable[[ClientData], State | None]) -> list[Row]:
        """Return rows of each client's ``model`` on the data by which reported statistics are chosen."""
        pooled, task, rows = self.plan.method.pooled, self.data.task, list[Row]()
        known = frozenset(self.clients.seen if not pooled else self.data.names) - frozenset(self.settings.newcomers)
        for client in self.measured.clients:
            state = model(client) if client.name in known and len(client.train) else None
            if state is None:
                continue
            split = "validation" if client.validation else "training"
            samples = client.validation or draw_seen(self.seed, client.train, len(client.test))
            counts = evaluate(self.plan, state, samples, task, self.data.classes)
            rows.append({"client": client.name, "split": split, **counts})
        return rows

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that are measured."""
        return tuple(split for split in measured_splits(self.data) if split in self.settings.splits)

    def _evaluate_trained(self, name: str, trained: ClientResult) -> list[Row]:
        """Return rows of the model of client ``name`` after its work; on all clients' data if they are pooled."""
        plan = self.inputs.plan
        state = trained_state(plan, trained.client, trained.update, self.server)
        names = [n for n in self.data.names if n not in self.settings.newcomers] if plan.method.pooled else [name]
        owners = map(self.inputs.measured.client, names)
        return evaluate_trained(plan, state, owners, self.splits, self.data.task, self.data.classes)

    def model_state(self, client: str | None = None) -> State | None:
        """Return the model that ``client`` would use, or with ``client=None`` the server's (None if it has none)."""
        if client is None:
            return global_state(self.plan, self._reported[0])
        state = self.personal_state(self.measured.client(client))
        if state is None:
            raise UsageError(
                f"client {client!r} has never trained, and {self.plan.method.label} keeps its models on clients: use a "
                "policy for unseen clients (unseen='average'), or a method with a global model"
            )
        return state

    @property
    def _reported(self) -> Models:
        """The models with the BatchNorm statistics that are reported."""
        if self.statistics == REESTIMATED and (self._renewed is None or self._renewed[0] is not self.server):
            self._renewed = self.server, self.reestimate()
        return (self._renewed[1] if self._renewed else None) or (self.server, self._running_state)

    def personal_state(self, client: ClientData) -> State | None:
        """Return the model that ``client`` would use; None if it has none and the policy makes none."""
        return self._reported[1](client)

    def _running_state(self, client: ClientData, known: ServerState | None = None) -> State | None:
        """Return a client's model; the policy for unseen ones starts from ``known`` in place of the server."""
        if not self.plan.personalizes:
            return global_state(self.plan, self.server)
        if self.clients.has_trained(client.name):
            state = self.clients[client.name]
            augment = self.settings.augment
            server = broadcast(self.server, client.name)
            return make_personal_state(self.plan, state, server, client.name, client.train, augment)
        return self.make_unseen_state(
            self.settings.unseen, client.name, client.train, server=self.server if known is None else known
        )

    def make_unseen_state(
        self, policy: str, name: str, train: Samples, rounds: int = 1, *, server: ServerState | None = None
    ) -> State | None:
        """Return the model by ``policy`` of client ``name``, which never trained (``evaluation.policy.make_state``).

        ``rounds``: rounds of local work of policies that train. ``server``: where they start; None: from the global
        model that is reported.
        """
        server = self._reported[0] if server is None else server
        if self._known is None or self._known.server is not server:
            self._known = PolicyContext(
                plan=self.plan,
                server=server,
                clients=self.clients,
                samples={name: len(self.train[name]) for name in self.clients.seen},
                task=self.data.task,
                classes=self.data.classes,
                augment=self.settings.augment,
            )
        return make_state(replace(self._known, client=name, rounds=rounds), policy, train)

    def make_network(self) -> nn.Module:
        """Return a network with the trial's architecture, after the method's surgery; only its constants count."""
        shape, classes = self.data.sample_shape, self.data.classes
        network, _ = start_network(self.model, self.settings, self.seed, shape, classes)
        return change_layers(self.plan.method, network)

    def to_tensors(self) -> tuple[State, dict[str, Any]]:
        """Return all state as flat tensors and JSON facts, without clients that never took part."""
        facts = {"round": self.server.round, "identity": self.identity}
        return self._server_tensors() | self.clients.tensors(), facts

    def save(self, folder: Path, *names: str) -> None:
        """Write changed clients, then the checkpoints ``names``, to ``folder``, which must not be another trial's.

        After a crash at any moment, each checkpoint in the folder is either old or new, with its clients' states;
        states that belong to no checkpoint are removed last.
        """
        index, segments = self.clients.save(folder, self.server.round)
        for name in names:
            save_checkpoint(folder / name, self._server_tensors() | index, {**self._facts(), "segments": segments})
        remove_unused_segments(
            folder, {int(n) for path in folder.glob("*.safetensors") for n in load_facts(path)["segments"]}
        )

    def _facts(self) -> dict[str, Any]:
        engine = (self.choice.engine, self.choice.threads) if self.choice and self.server.round else None
        facts = {"round": self.server.round, "identity": self.identity, "engine": engine}
        return facts | (self._engine.facts() if self._engine else {})

    def _server_tensors(self) -> State:
        server = self.server
        mixes = server.mixes.flatten() if server.mixes else {}
        memory, kept = (join_states(self.plan.rule_names, states) for states in (server.memory, server.kept))
        parts = server.shared, memory, kept, mixes
        return add_prefix("server", join_states(SERVER_PARTS, parts))

    def check_compatible(self, facts: Mapping[str, Any], seed: int) -> None:
        """Raise :class:`UsageError` unless a checkpoint with ``facts`` belongs to this trial with seed ``seed``."""
        refuse_other(facts["identity"], {**self.identity, "seed": str(seed)})
        if facts["round"] > self.settings.rounds:
            raise UsageError(
                f"this run has done {facts['round']} rounds, more than rounds={self.settings.rounds}: ask for at least "
                "as many, or start a new run in another directory"
            )

    def restore(self, tensors: State, facts: Mapping[str, Any], folder: Path | None = None) -> None:
        """Restore the result of :meth:`to_tensors`, or a checkpoint that :meth:`save` left in ``folder``.

        Clients' states are read from there when needed. Raises :class:`UsageError` if the checkpoint belongs to another
        trial, and :class:`FedshiftError` if a file of clients' states is missing or truncated.
        """
        self.check_compatible(facts, self.seed)
        self.clients.restore(tensors, facts.get("segments", {}), folder)
        if self.settings.engine == "auto" and facts.get("engine"):  # another engine would round differently
            name, threads = facts["engine"]
            self.choice = EngineChoice(engine=name, threads=threads, reason=BEGUN)
        if self._engine:
            self._engine.restore(facts)
        device = torch.device(self.settings.device)
        server = {name: tensor.to(device) for name, tensor in entries_under("server", tensors).items()}
        shared, memory, kept, mixes = split_state(SERVER_PARTS, server)
        self.server = ServerState(
            round=facts["round"],
            shared=shared,
            memory=split_state(self.plan.rule_names, memory),
            kept=split_state(self.plan.rule_names, kept),
            mixes=Mixes.unflatten(mixes),
        )
