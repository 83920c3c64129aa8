"""A method as a strategy for a Flower ServerApp: entries in its scope are sent, and the kernel aggregates the replies.

A reply that is an error, does not fit, or answers another round is skipped and logged; a round with too few replies
changes nothing. Integer entries stay integers, and sums are computed in float64, in an order independent of arrival.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords, validate_message_reply_consistency
from torch import nn
from typing_extensions import override

from ...core.compatibility import check_client_count
from ...core.kernel import broadcast, init_server
from ...core.method import Method
from ...core.server_round import server_round as aggregate
from ...core.states import ServerState, Update
from ...experiments.settings import Settings
from ...utils.errors import FedshiftError, UsageError
from ...utils.state import State, nbytes, pick
from ..transport.arrays import RefusedMessage, check_state, check_update, check_weight, from_record, to_record
from .dropin import DONE, LAST, resolve_plan

LOG = logging.getLogger("flwr")
WEIGHT = "num-examples"
T = TypeVar("T")


class LeakedEntries(RefusedMessage):
    """A reply contains entries that the method keeps on clients."""


class MethodStrategy(Strategy):
    """``method`` for apps that use ``model`` (from :func:`fedshift.flower.prepare_model` if the method has surgery).

    Messages are the same as in Flower's FedAvg: ``arrays`` and ``config``. A reply contains one array record, and one
    metric record with ``num-examples``, its weight. ``start`` reads the entries that the method sends from
    ``initial_arrays``, and the ``arrays`` of its result contain only these; if called again, it continues from there.

    Args:
        method: for example ``fedbn()`` or ``silobn(fedadam())``.
        model: the app's network.
        seed: key of all random draws.
        participation: nodes per round: a number, or a fraction (float in (0, 1]) of the connected nodes; None: all.
        min_clients: minimum number of nodes to ask in a round, and of valid replies for the round to change the server.
        wait: seconds to wait for that many nodes.
        evaluate: ask clients to evaluate; clients that keep entries are asked only after they have trained.
        most_examples: the largest accepted ``num-examples``.
        server: the ``server`` of an earlier strategy to continue from; ``initial_arrays`` are then not read.

    Raises:
        UsageError: if the method needs its own training loop, or does not fit the model or the numbers.
        RefusedMessage: if ``server`` is from another model.

    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        *,
        seed: int = 0,
        participation: int | float | None = None,
        min_clients: int = 1,
        wait: float = 60.0,
        evaluate: bool = True,
        most_examples: float | None = None,
        server: ServerState | None = None,
    ) -> None:
        if min_clients < 1:
            raise UsageError(f"min_clients={min_clients}: a round needs 1 client or more")
        self.plan = resolve_plan(method, model, seed)
        check_client_count(method.aggregate, min_clients)
        self.server = init_server(self.plan)
        if server is not None:
            check_state(server.shared, self.server.shared, "the server to go on from")
            self.server = server
        self.seed, self.min_clients, self.wait, self.evaluate = seed, min_clients, wait, evaluate
        self.most_examples = most_examples
        self._sharing, self._at_least = Settings(participation=participation), Settings(participation=min_clients)
        self._begun, self._tried = server is not None, self.server.round
        self._asked: list[Message] = []
        self._finished: dict[int, int] = {}

    @override
    def summary(self) -> None:
        """Log the method and the entries that are sent."""
        plan = self.plan
        down, up = (nbytes(pick(plan.initial, names)) for names in (plan.loaded, plan.sent))
        LOG.info("\t├──> Method: %s", plan.method.label)
        LOG.info("\t├──> To a client: %d entries, %d bytes", len(plan.loaded), down)
        LOG.info("\t├──> From a client: %d entries, %d bytes", len(plan.sent), up)
        LOG.info("\t├──> Kept on clients: %d entries", len(plan.personal))
        if plan.method.rules:
            LOG.info("\t├──> Each client's loop calls fedshift.flower.transform_gradients_ before optimizer.step()")
        LOG.info("\t└──> Clients in a round: %d at least", self.min_clients)

    @override
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask this round's nodes to train, starting from the entries that clients load.

        Raises :class:`FedshiftError` if fewer than ``min_clients`` nodes are connected after ``wait`` seconds, or the
        initial arrays do not belong to the model.
        """
        if not self._begun:
            self._begin(arrays)
        self._tried += 1
        connected = tuple(map(str, self._wait_for_nodes(grid)))
        chosen = self._sharing.draw_participants(self.seed, self._tried, connected)
        if len(chosen) < self.min_clients:
            chosen = self._at_least.draw_participants(self.seed, self._tried, connected)
        LOG.info("configure_train: %d of %d nodes", len(chosen), len(connected))
        return self._ask(server_round, map(int, chosen), MessageType.TRAIN, config)

    @override
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies; if there are too few, leave the server unchanged.

        Raises :class:`FedshiftError` if all replies contain entries that the method keeps on clients.
        """
        taken, leaks = self._answers(server_round, replies, lambda content: (self._update(content), content))
        if len(taken) < self.min_clients:
            if leaks and not taken:
                raise FedshiftError(str(leaks[0]))
            LOG.warning(
                "round %d: %d replies can be used, of %d needed (min_clients): it changes nothing%s",
                server_round, len(taken), self.min_clients,
                "; does every ClientApp have the mod keep_local?" if self.plan.personal and not taken else "",
            )  # fmt: skip
            return to_record(self.server.shared), None
        updates = {str(node): update for node, (update, _) in taken.items()}
        after = aggregate(
            self.plan, self.server, updates, {node: int(update.weight) for node, update in updates.items()}
        )
        try:
            check_state(after.shared, self.server.shared, "the server's model")
        except RefusedMessage as error:
            raise FedshiftError(f"after round {server_round}, {error}: lower the server's learning rate") from error
        self.server = after
        self._finished |= dict.fromkeys(taken, after.round)
        return to_record(after.shared), _mean_metrics([content for _, content in taken.values()])

    @override
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the nodes that have a model to evaluate: all, or if clients keep entries, those that have trained."""
        if not self.evaluate:
            return []
        nodes = [node for node in sorted(grid.get_node_ids()) if not self.plan.personal or node in self._finished]
        return self._ask(server_round, nodes, MessageType.EVALUATE, config)

    @override
    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the mean of the clients' metrics, weighted by ``num-examples``."""
        taken, _ = self._answers(server_round, replies, lambda content: (self._weight(content), content))
        return _mean_metrics([content for _, content in taken.values()]) if taken else None

    def _begin(self, arrays: ArrayRecord) -> None:
        try:
            shared = from_record({name: array for name, array in arrays.items() if name in self.plan.sent})
            check_state(shared, self.server.shared, "initial_arrays")
        except RefusedMessage as error:
            raise FedshiftError(f"{error}: give ArrayRecord(model.state_dict()) of the strategy's model") from error
        if others := sorted(arrays.keys() - self.plan.sent):
            LOG.info(
                "%d entries of initial_arrays are not sent, since clients keep local ones: %s", len(others), others
            )
        server = init_server(self.plan)
        self.server = replace(server, shared={name: shared[name] for name in server.shared})
        self._begun = True

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        end = time.monotonic() + self.wait
        while len(nodes := sorted(grid.get_node_ids())) < self.min_clients:
            left = end - time.monotonic()
            if left <= 0:
                raise FedshiftError(
                    f"after {self.wait:g} seconds {len(nodes)} nodes are connected, of {self.min_clients} needed: "
                    "start the others, wait longer (wait=...), or be content with fewer (min_clients=...)"
                )
            time.sleep(min(1.0, left))
        return nodes

    def _ask(self, server_round: int, nodes: Iterable[int], kind: str, config: ConfigRecord) -> list[Message]:
        common = {**config, "server-round": server_round, DONE: self.server.round}
        shared = to_record(pick(self.server.shared, self.plan.loaded))

        def fill(node: int) -> RecordDict:
            own = broadcast(self.server, str(node))
            arrays = shared if own is self.server else to_record(pick(own.shared, self.plan.loaded))
            return RecordDict({"arrays": arrays, "config": ConfigRecord({**common, LAST: self._finished.get(node, 0)})})

        self._asked = [Message(fill(node), node, kind, group_id=str(server_round)) for node in nodes]
        return self._asked

    def _answers(
        self, server_round: int, replies: Iterable[Message], take: Callable[[RecordDict], T]
    ) -> tuple[dict[int, T], list[LeakedEntries]]:
        """Return the result of ``take`` for each node's reply, by node, and the leaks; log every refused reply."""
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in self._asked}
        taken: dict[int, T] = {}
        leaks: list[LeakedEntries] = []
        for reply in replies:
            # An error reply has the server as its source, so only the question identifies the node.
            node = asked.pop(reply.metadata.reply_to_message_id, None)
            try:
                if node is None:
                    raise RefusedMessage("it answers nothing that was asked in this round, or for the second time")
                if reply.has_error():
                    raise RefusedMessage(f"it failed: {reply.error.reason}")
                if reply.metadata.group_id != str(server_round):
                    raise RefusedMessage(f"it answers round {reply.metadata.group_id}")
                taken[node] = take(reply.content)
            except RefusedMessage as why:
                source = reply.metadata.src_node_id if node is None else node
                LOG.warning("round %d: the reply of node %d is left out: %s", server_round, source, why)
                leaks += [why] if isinstance(why, LeakedEntries) else []
        for node in asked.values():
            LOG.warning("round %d: node %d did not answer", server_round, node)
        return taken, leaks

    def _update(self, content: RecordDict) -> Update:
        records = list(content.array_records.values())
        if len(records) != 1:
            raise RefusedMessage(f"it holds {len(records)} array records in place of one")
        if leaked := sorted(name for name in records[0] if name in self.plan.initial.keys() - self.plan.sent):
            raise LeakedEntries(
                f"it holds {leaked[0]!r} and {len(leaked) - 1} more entries that {self.plan.method.label} keeps on "
                "clients: give the ClientApp the mod, ClientApp(mods=[fedshift.flower.keep_local(model, method)])"
            )
        weight = self._weight(content)
        state: State = from_record(records[0])
        return check_update(self.plan, self.server, state, {}, weight, 1, most=self.most_examples)

    def _weight(self, content: RecordDict) -> float:
        records = list(content.metric_records.values())
        weight = records[0].get(WEIGHT) if len(records) == 1 else None
        if not isinstance(weight, int | float):
            raise RefusedMessage(f"it has {len(records)} metric records: it must be one with the number {WEIGHT!r}")
        return check_weight(weight, self.most_examples)


def _mean_metrics(contents: list[RecordDict]) -> MetricRecord | None:
    """Return Flower's weighted mean of metrics; log a line and return None if clients report different metrics."""
    try:
        metrics = [RecordDict({"metrics": next(iter(content.metric_records.values()))}) for content in contents]
        validate_message_reply_consistency(metrics, WEIGHT, check_arrayrecord=False)
        return aggregate_metricrecords(metrics, WEIGHT)
    except (InconsistentMessageReplies, TypeError, ValueError) as error:
        LOG.warning("metrics are not averaged, since clients report different ones: %s", error)
        return None
