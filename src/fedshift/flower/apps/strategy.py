"""A method as a strategy for a Flower ServerApp: Flower's FedAvg with the method's scope and the kernel's aggregation.

The ``arrays`` that Flower passes in are the model, whatever wraps or extends this strategy. A reply that is an error or
does not fit is left out and logged; a round with too few replies changes nothing. Integer entries stay integers, and
sums are computed in float64, in an order independent of arrival.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from safetensors.torch import save
from torch import nn
from typing_extensions import override

from ...analysis.privacy import describe_guarantee
from ...core.checks import check_client_count
from ...core.kernel import init_server
from ...core.means import cast_to
from ...core.method import Method
from ...core.server_round import server_round as aggregate
from ...core.states import Update
from ...methods.dp import PrivateMean
from ...methods.fedprox import Proximal
from ...results.checkpoint import load_checkpoint, refuse_other, save_checkpoint
from ...utils.errors import FedshiftError, UsageError
from ...utils.state import State, join_states, pick, split_state
from ..messages import RefusedMessage, check_state, check_update, check_weight, from_record, to_record
from .plans import EXPERIMENT, FIRST, ROUNDS, resolve_plan, take_single

LOG = logging.getLogger("flwr")
STATES = ("shared", "kept", "first")
"""Prefixes of the states in a checkpoint."""


class MethodStrategy(FedAvg):
    """``method`` for apps that use ``model`` (from :func:`fedshift.flower.prepare_model` if the method has surgery).

    Local entries in ``initial_arrays`` are the first values of clients that have none. The ``arrays`` of the result
    contain only entries that are sent. If ``start`` is called again, training continues from there.

    Args:
        method: for example ``fedbn()`` or ``silobn(fedadam())``.
        model: the app's network.
        seed: key of the method's random draws (not of the nodes that Flower draws).
        most_examples: the largest accepted weight of a reply.
        checkpoint: file to which the server's state is saved after each round. If it exists, training continues from
            it, for ``num_rounds`` more rounds, and ``initial_arrays`` are not read.
        options: arguments of Flower's FedAvg, by name. ``min_train_nodes`` is also the number of valid replies that a
            round needs; ``weighted_by_key`` names a whole number.

    Raises:
        UsageError: if the method needs its own training loop, or does not fit the model, the numbers or the checkpoint.
        FedshiftError: if the checkpoint is damaged, or belongs to another model.

    """

    def __init__(
        self, method: Method, model: nn.Module, *, seed: int = 0, most_examples: float | None = None,
        checkpoint: str | Path | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        for name, value in (("fraction_train", self.fraction_train), ("fraction_evaluate", self.fraction_evaluate)):
            if not 0 <= value <= 1:
                raise UsageError(f"{name}={value}: give a fraction of the nodes, from 0 to 1")
        self.plan = resolve_plan(method, model, seed)
        check_client_count(method, max(self.min_train_nodes, 1))
        self.most_examples, self.checkpoint = most_examples, Path(checkpoint) if checkpoint else None
        self.server, self._first, self.experiment = init_server(self.plan), State(), token_hex(4)
        self._finished: dict[int, int] = {}  # the last round of each node
        if self.checkpoint and self.checkpoint.exists():
            self._restore(self.checkpoint)
        self._begun_at = self.server.round
        self._asked: list[Message] = []
        self._open: ArrayRecord | None = None  # the model of a round in training, until something comes of it
        self._updates: dict[str, Update] = {}
        self._why, self._warned = "the log names the reasons", set[str]()

    @override
    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, **options: Any) -> Result:
        """Train as Flower's ``Strategy.start``, with the same arguments; ``initial_arrays`` are not changed.

        Raises :class:`UsageError` if ``evaluate_fn`` is given and the server has no complete model, and
        :class:`FedshiftError` if the first round changes nothing, arrays do not fit the model, or the result holds NaN.
        """
        return super().start(grid, ArrayRecord(dict(initial_arrays)), *args, **options)

    @override
    def summary(self) -> None:
        """Log the method, the entries that are sent, and the settings of FedAvg."""
        plan, private = self.plan, self.plan.method.aggregator
        counts = [len(names) for names in (plan.loaded, plan.sent, plan.personal)]
        calls = ", and its loop calls fedshift.flower.transform_gradients_" if plan.defines("gradients") else ""
        text = "\t├──> Method: %s; a client loads %d entries, sends %d, keeps %d in a folder %s%s"
        LOG.info(text, plan.method.label, *counts, self.experiment, calls)
        if isinstance(private, PrivateMean) and not private.secret:
            LOG.warning("who knows seed and method can subtract the noise, so privacy needs dp(secret=True)")
        super().summary()

    @override
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nodes to train, from the entries of ``arrays`` that clients load; raise errors as :meth:`start` does."""
        # Flower's start calls this method, and a wrapper passes no evaluate_fn on.
        callers = (call.frame.f_locals for call in inspect.stack(0) if call.function == "start")
        if not self.plan.has_global and any(arguments.get("evaluate_fn") for arguments in callers):
            raise UsageError(
                f"evaluate_fn needs a complete model on the server, and with {self.plan.method.label!r} there is none: "
                "leave it out, and evaluate on clients (@app.evaluate)"
            )
        if server_round == 1:
            self._open = None
            if self.server.round:  # the run continues
                arrays.update(to_record(self.server.shared))
        self._adopt(server_round, arrays)
        for rule in self.plan.method.rules:
            if isinstance(rule, Proximal):
                config.setdefault("proximal-mu", rule.mu)
        self._open, self._asked = arrays if self.fraction_train else None, []
        return super().configure_train(server_round, arrays, config, grid)

    @override
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate valid replies; return None twice if there are too few; raise errors as :meth:`start` does."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        needed = max(1, self.min_train_nodes)
        if len(valid) < needed:
            self._why = f"{len(valid)} replies can be used, of {needed} needed (min_train_nodes){self._why}"
            if self.fraction_train:
                LOG.warning("round %d changes nothing: %s", server_round, self._why)
            return None, None
        sizes = {node: int(update.weight) for node, update in self._updates.items()}
        after = aggregate(self.plan, self.server, self._updates, sizes)
        result = f"the server's model after round {server_round} (to prevent it, lower the server's learning rate)"
        check_state(after.shared, self.server.shared, result)
        self.server, self._open = after, None
        self._finished |= {int(node): after.round for node in self._updates}
        if isinstance(private := self.plan.method.aggregator, PrivateMean):
            guarantee = describe_guarantee(replace(private, secret=True), 1.0, after.round)
            LOG.info("With noise that nobody can reproduce: %s", guarantee)
        metrics = self.train_metrics_aggr_fn([reply.content for reply in valid], self.weighted_by_key)
        return to_record(after.shared), metrics

    @override
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nodes to evaluate (those that trained, if clients keep entries); raise errors as :meth:`start` does."""
        self._adopt(server_round, arrays)
        if self.checkpoint:
            self._save(self.checkpoint)
        able = [node for node in grid.get_node_ids() if not self.plan.personal or node in self._finished]
        count = min(max(int(len(able) * self.fraction_evaluate), self.min_evaluate_nodes), len(able))
        config["server-round"] = server_round
        record = RecordDict({self.configrecord_key: config})
        return self._construct_messages(record, random.sample(able, count), MessageType.EVALUATE)

    def _adopt(self, server_round: int, arrays: ArrayRecord) -> None:
        """Take ``arrays`` as the model: what wraps or extends this strategy may have changed it."""
        if self._open is arrays and self.server.round == self._begun_at:
            raise FedshiftError(f"the first round changed nothing: {self._why}")
        what, like = f"arrays of round {server_round} (ArrayRecord(model.state_dict()) fits)", self.server.shared
        came = from_record({name: array for name, array in arrays.items() if name in self.plan.initial})
        check_state(came, came, what)  # holds no NaN, of which a cast makes a number
        for name in like.keys() & came.keys():
            if came[name].dtype != like[name].dtype:
                came[name] = cast_to(came[name].double(), like[name].dtype)
        shared = {name: came[name] for name in like if name in came}
        check_state(shared, like, what)
        if not self.server.round and (first := pick(came, self.plan.personal)):
            check_state(first, pick(self.plan.initial, first), what)
            LOG.info("%d entries of initial_arrays become the clients' own: %s", len(first), sorted(first))
            self._first = first
        if self._open is not None and self._open is not arrays:  # made by another aggregate_train than this one's
            self.server = replace(self.server, round=self.server.round + 1)
            self._finished = {message.metadata.dst_node_id: 0 for message in self._asked} | self._finished
        self._open = None
        self.server = replace(self.server, shared=shared)
        arrays.clear()  # in place: strategies that wrap this one compare replies with it
        arrays.update(to_record(shared))

    @override
    def _construct_messages(self, record: RecordDict, node_ids: list[int], message_type: str) -> list[Message]:
        """Return a message for each node, with what the method lets it load and what its mod needs to know."""
        config = {**record.config_records[self.configrecord_key], EXPERIMENT: self.experiment}
        shared = to_record(pick(self.server.shared, self.plan.loaded))
        first = {FIRST: save(self._first)} if self._first and message_type == MessageType.TRAIN else {}
        self._asked = []
        for node in node_ids:
            last = self._finished.get(node, 0)
            settings = ConfigRecord({**config, ROUNDS: [self.server.round, last], **({} if last else first)})
            content = RecordDict({self.arrayrecord_key: shared, self.configrecord_key: settings})
            self._asked.append(Message(content, node, message_type))
        return self._asked

    @override
    def _check_and_log_replies(
        self, replies: Iterable[Message], is_train: bool, validate: bool = True
    ) -> tuple[list[Message], list[Message]]:
        """Return the replies that fit what was asked in this round, in the nodes' order, and the others; log why."""
        # An error reply has the server as its source, so only the question identifies the node.
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in self._asked}
        valid: dict[int, Message] = {}
        others: list[Message] = []
        self._updates, self._why = {}, ""
        for reply in replies:
            node = asked.pop(reply.metadata.reply_to_message_id, None)
            try:
                if node is None:
                    raise RefusedMessage("it answers nothing that was asked in this round, or for the second time")
                self._read_reply(node, reply, is_train)
                valid[node] = reply
            except RefusedMessage as error:
                others.append(reply)
                self._leave_out(f"the reply of node {node or reply.metadata.src_node_id}", str(error))
        for node in asked.values():
            self._leave_out(f"the reply of node {node}", "it did not answer")
        self._drop_uneven_metrics(
            [next(iter(reply.content.metric_records.values())) for reply in valid.values()],
            self.train_metrics_aggr_fn if is_train else self.evaluate_metrics_aggr_fn,
        )
        return [valid[node] for node in sorted(valid)], others

    def _leave_out(self, what: str, why: str) -> None:
        """Log that ``what`` is left out, as a warning if it is the first for this reason."""
        LOG.log(logging.INFO if why in self._warned else logging.WARNING, "%s is left out: %s", what, why)
        self._warned.add(why)
        self._why += f"; {what} is left out: {why}"

    def _read_reply(self, node: int, reply: Message, is_train: bool) -> None:
        """Check a reply's weight and, if it is of training, keep its update; raise :class:`RefusedMessage`."""
        if reply.has_error():
            legacy = "; NumPyClient is not supported: use @app.train()" if "'fitins." in str(reply.error.reason) else ""
            raise RefusedMessage(f"it failed: {reply.error.reason}{legacy}")
        metrics = take_single(reply.content.metric_records, "its content of metrics")[1]
        weight = metrics.get(self.weighted_by_key)
        if not isinstance(weight, int | float):
            raise RefusedMessage(f"its metrics {sorted(metrics)} lack the number {self.weighted_by_key!r}")
        check_weight(weight, self.most_examples)
        if not is_train:
            return
        plan, sent = self.plan, take_single(reply.content.array_records, "its content of arrays")[1]
        if leaked := sent.keys() & (plan.initial.keys() - plan.sent):
            raise RefusedMessage(
                f"it holds {min(leaked)!r} and {len(leaked) - 1} more entries that {plan.method.label} keeps on "
                "clients: give the ClientApp the mod, ClientApp(mods=[fedshift.flower.keep_local(model, method)])"
            )
        update = check_update(plan, self.server, from_record(sent), {}, weight, 1, most=self.most_examples)
        self._updates[str(node)] = update

    def _drop_uneven_metrics(self, records: Sequence[MetricRecord], combine: object) -> None:
        """Remove the metrics that some nodes lack; a mean is not taken of lists of several lengths either."""
        alike = combine is not aggregate_metricrecords
        counts = Counter((name, alike or np.shape(record[name])) for record in records for name in record)
        for name in sorted({name for (name, _), count in counts.items() if count < len(records)}):
            self._leave_out(f"metric {name!r}", f"not all nodes report {name!r}, or in several lengths")
            for record in records:
                record.pop(name, None)

    def _save(self, path: Path) -> None:
        server = self.server
        states = (server.shared, join_states(self.plan.rule_names, server.kept), self._first)
        facts = {"method": self.plan.method.text, "round": server.round, "experiment": self.experiment}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(path, join_states(STATES, states), {**facts, "finished": sorted(self._finished.items())})

    def _restore(self, path: Path) -> None:
        tensors, facts = load_checkpoint(path)
        refuse_other({"method": facts["method"]}, {"method": self.plan.method.text})
        shared, kept, self._first = split_state(STATES, tensors)
        check_state(shared, self.server.shared, f"{path} (of this model, or name another file)")
        ordered = {name: shared[name] for name in self.server.shared}
        parts = split_state(self.plan.rule_names, kept)
        self.server = replace(self.server, round=facts["round"], shared=ordered, kept=parts)
        self._finished, self.experiment = dict(facts["finished"]), facts["experiment"]
