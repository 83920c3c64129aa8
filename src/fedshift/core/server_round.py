"""The server's part of a round: aggregate the clients' uploads into the server's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..utils.errors import UsageError
from ..utils.state import State, pick
from .aggregation import Aggregated, Received
from .buffers import fit_spectral_norms
from .means import StreamingMean, SummedUploads
from .mixes import Mixes
from .plan import Plan
from .rule import Server
from .shares import bound_shares
from .states import ServerState, Update


class ClientSizes:
    """Sizes of all clients that train, made once for all rounds of a trial, so that idle clients cost a round nothing.

    ``samples``: number of training samples by client. ``max_share``: maximum weight of a client among three or more.
    ``effective``: weight of each client by its size, within ``max_share``; ``total``: their sum.
    """

    def __init__(self, plan: Plan, samples: Mapping[str, int], max_share: float = 1.0) -> None:
        self.samples, self.max_share, self._method = samples, max_share, plan.method
        weighed = [self._method.weigh(samples=size, used=size) for size in samples.values()]
        bounded = bound_shares(weighed, max_share)
        self.effective, self.total = dict(zip(samples, bounded, strict=True)), sum(bounded)
        triples = zip(samples, bounded, weighed, strict=True)
        self._reductions = {name: after / before for name, after, before in triples if after != before}

    def weigh_alone(self, name: str, update: Update) -> float:
        """Return the weight of client ``name``, without regard to ``max_share``."""
        return self._method.weigh(samples=self.samples[name], used=update.weight)

    def weigh(self, updates: Sequence[tuple[str, Update]]) -> list[float]:
        """Return the weights of ``updates`` in a mean.

        A client whose size ``max_share`` reduces among all clients has the same reduction in rounds with few
        participants.
        """
        raw = [self.weigh_alone(name, update) * self._reductions.get(name, 1.0) for name, update in updates]
        return bound_shares(raw, self.max_share)


def sums_suffice(plan: Plan) -> bool:
    """Return whether the server needs only the weighted sum of the clients' entries."""
    return plan.method.aggregate.sums and bool(plan.sent) and not any(bound.entries for bound in plan.rules)


class StreamingAggregator:
    """Aggregates one round's uploads, which may arrive in any order.

    ``names``: the participants. Uploads are aggregated in the order of the clients' names, so that the result does not
    depend on the order of arrival. If the method averages entries, an upload is discarded once it and its predecessors
    are added, and sums of uploads may be added instead. If ``sizes.max_share`` is below 1, uploads are stored until all
    weights are known.
    """

    def __init__(self, plan: Plan, server: ServerState, names: Iterable[str], sizes: ClientSizes) -> None:
        self._plan, self._server, self._pending, self._sizes = plan, server, sorted(names, reverse=True), sizes
        self._arrived: dict[str, Update] = {}
        self._aggregated: list[tuple[str, Update]] = []
        self._mean = StreamingMean() if sums_suffice(plan) else None
        self._summed: SummedUploads | None = None
        self._whole = plan.whole & plan.sent
        self._taken, self._largest = pick(server.shared, self._whole), 0.0

    def add(self, name: str, update: Update, summed: SummedUploads | None = None) -> None:
        """Add the upload of one client; ``summed``: the sum with its averaged entries, if ``update`` lacks them."""
        self._arrived[name] = update
        if summed and summed is not self._summed:
            assert self._mean
            self._mean.merge(summed.mean)
            self._summed = summed
        while self._pending and self._pending[-1] in self._arrived:
            self._aggregate(self._pending.pop())

    def _aggregate(self, name: str) -> None:
        update = self._arrived.pop(name)
        if self._whole:
            update = self._take_whole(name, update)
        if self._mean and update.shared and self._sizes.max_share >= 1:
            self._mean.add(update.shared, self._sizes.weigh_alone(name, update))
            update = replace(update, shared={})
        self._aggregated.append((name, update))

    def _take_whole(self, name: str, update: Update) -> Update:
        """Return ``update`` without buffers that have no mean, which the server takes from the largest weight.

        Aggregations that protect from single clients, or protect these, keep the server's.
        """
        weight = self._sizes.weigh_alone(name, update)
        if weight > self._largest and not self._plan.method.aggregate.requires.entries_only:
            self._taken, self._largest = pick(update.shared, self._whole), weight
        return replace(update, shared=pick(update.shared, update.shared.keys() - self._whole))

    def finalize(self) -> ServerState:
        """Return the server's state after the round, from the uploads that arrived."""
        for name in sorted(self._arrived):  # uploads sorted after a missing one
            self._aggregate(name)
        plan, server = self._plan, self._server
        received = receive(plan, self._aggregated, self._sizes)
        shares = [each.share for each in received]
        memory, computed = fold_rules(plan, server, received)
        averaged = replace(server, shared=pick(server.shared, server.shared.keys() - self._whole))
        if self._mean:
            if self._sizes.max_share < 1:
                weights = self._sizes.weigh(self._aggregated)
                for (_, update), weight in zip(self._aggregated, weights, strict=True):
                    self._mean.add(update.shared, weight)
            aggregated = Aggregated(entries=self._mean.result())
        else:
            aggregated = _check_declared(plan, plan.method.aggregate(plan, averaged, received))
        shared, optimizer, mixes = aggregated.entries | computed, server.optimizer, None
        if aggregated.mixes:
            loaded = plan.loaded - computed.keys() - self._whole
            mixes = Mixes(uploads=tuple(pick(each.entries, loaded) for each in received), weights=aggregated.mixes)
            mixes.check(f"method {plan.method.label!r}: {plan.method.name_source(plan.method.aggregate)}")
        if plan.method.server:
            before = pick(server.shared, plan.trained & plan.loaded)
            delta = {name: shared[name] - tensor for name, tensor in before.items()}
            stepped, optimizer = plan.method.server.step(before, delta, optimizer, sum(shares))
            shared |= stepped
        if self._whole:
            complete = self._taken | shared
            shared = {name: complete[name] for name in server.shared if name in complete}
            if len(received) > 1 or plan.method.server or not plan.method.aggregate.sums:  # its weights are none's
                shared = fit_spectral_norms(plan, shared)
        return ServerState(
            round=server.round + 1, shared=shared, memory=memory, optimizer=optimizer, kept=aggregated.kept, mixes=mixes
        )


def receive(plan: Plan, updates: Sequence[tuple[str, Update]], sizes: ClientSizes) -> list[Received]:
    """Return the contributions of ``updates``, which are sorted by client name."""
    raw, kinds = sizes.weigh(updates), tuple(map(type, plan.method.rules))
    total = sum(raw)
    return [
        Received(
            client=name, update=update, weight=weight / total, size=sizes.effective[name],
            share=sizes.effective[name] / sizes.total, kinds=kinds,
        )
        for (name, update), weight in zip(updates, raw, strict=True)
    ]  # fmt: skip


def _check_declared(plan: Plan, result: Aggregated) -> Aggregated:
    """Return ``result``; raise :class:`UsageError` if it keeps state or mixes uploads without declaring so."""
    aggregate = plan.method.aggregate
    for field, flag, value in (("kept", "keeps", result.kept), ("mixes", "mixes", result.mixes)):
        if value and not getattr(aggregate, flag):
            raise UsageError(
                f"method {plan.method.label!r}: {plan.method.name_source(aggregate)} returns Aggregated({field}=...) "
                f"without informing sites: declare {flag} = True in an Aggregation"
            )
    return result


def fold_rules(plan: Plan, server: ServerState, received: Sequence[Received]) -> tuple[tuple[State, ...], State]:
    """Return the rules' memories on the server, and the entries that they compute."""
    memory, computed, withheld = [*server.memory], State(), [replace(each, withheld=True) for each in received]
    for index in plan.defines("fold"):
        uploads = [each.update.memory[index] for each in received]
        visible = received if plan.rules[index].entries else withheld
        context = Server(memory=memory[index], uploads=uploads, received=visible, network=plan, server=server)
        folded = plan.rules[index].rule.fold(context)
        memory[index] = folded.memory
        computed |= folded.entries
    return tuple(memory), computed


def server_round(
    plan: Plan, server: ServerState, updates: Mapping[str, Update], sizes: Mapping[str, int]
) -> ServerState:
    """Return the server's state after a round, given all uploads by client name.

    ``sizes``: number of training samples of every client that trains, including clients without an upload.
    """
    aggregator = StreamingAggregator(plan, server, updates, ClientSizes(plan, sizes))
    for name, update in updates.items():
        aggregator.add(name, update)
    return aggregator.finalize()
