"""The server's part of a round: it aggregates the clients' uploads into its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..utils.state import State, add_prefix, entries_under, pick
from .aggregation import StreamingMean, SummedUploads, Uploads, average_uploads
from .kernel import Mixes, ServerState, Update
from .plan import Plan

KEPT = "aggregation"
"""Prefix of what an aggregation keeps beside the server optimizer's state."""


def sums_suffice(plan: Plan) -> bool:
    """Return whether the server needs of the clients' entries only their weighted sum."""
    return plan.method.aggregate is average_uploads and bool(plan.sent)


class StreamingAggregator:
    """Aggregator of one round's uploads, which may arrive in any order.

    ``names``: the clients that are to upload. ``sizes``: training samples of every client that trains, also of those
    that sit the round out. Uploads are taken in the order of the clients' names, so that the result does not depend on
    that of arrival. Where the method averages entries, an upload is let go as soon as those before it have come, and
    sums of uploads may arrive in their place, one after another.
    """

    def __init__(self, plan: Plan, server: ServerState, names: Iterable[str], sizes: Mapping[str, int]) -> None:
        self._plan, self._server, self._coming = plan, server, sorted(names, reverse=True)
        self._sizes = sizes
        self._arrived: dict[str, Update] = {}
        self._folded: list[tuple[str, Update]] = []
        self._mean = StreamingMean() if sums_suffice(plan) else None
        self._summed: SummedUploads | None = None

    def add(self, name: str, update: Update, summed: SummedUploads | None = None) -> None:
        """Add the upload of one client; ``summed``: the sum that holds its entries, if ``update`` does not."""
        self._arrived[name] = update
        if summed and summed is not self._summed:
            assert self._mean
            self._mean.merge(summed.mean)
            self._summed = summed
        while self._coming and self._coming[-1] in self._arrived:
            self._aggregate(self._coming.pop())

    def _aggregate(self, name: str) -> None:
        update = self._arrived.pop(name)
        if self._mean and update.shared:
            self._mean.add(update.shared, self._weigh(name, update))
            update = replace(update, shared={})
        self._folded.append((name, update))

    def _weigh(self, name: str, update: Update) -> float:
        return self._plan.method.weigh(samples=self._sizes[name], used=update.weight)

    def finalize(self) -> ServerState:
        """Return the server after the round, from the uploads that arrived."""
        for name in sorted(self._arrived):  # those behind one that did not come
            self._aggregate(name)
        plan, server, ordered = self._plan, self._server, [update for _, update in self._folded]
        raw = [self._weigh(name, update) for name, update in self._folded]
        by_size = {name: plan.method.weigh(samples=size, used=size) for name, size in self._sizes.items()}
        sizes = [by_size[name] for name, _ in self._folded]
        everyone = sum(by_size.values())
        shares = [size / everyone for size in sizes]
        memory = tuple(
            rule.aggregate_memory(server.memory[index], [update.memory[index] for update in ordered], shares)
            for index, rule in enumerate(plan.method.rules)
        )
        made: State = {}
        for index, rule in enumerate(plan.method.rules):
            made |= rule.aggregate_entries(server.shared, [update.memory[index] for update in ordered])
        optimizer, kept, mixes = server.optimizer, State(), None
        if self._mean:
            shared = self._mean.result()
        else:
            uploaded = Uploads(
                states=[update.shared for update in ordered],
                weights=[weight / sum(raw) for weight in raw],
                sizes=sizes,
                steps=[update.steps for update in ordered],
                previous=server.shared,
                trained=plan.trained & plan.sent,
                loaded=plan.loaded,
                fixed=plan.entries_fixed_in(server.round),
                memory=[update.memory for update in ordered],
                clients=[name for name, _ in self._folded],
                kept=entries_under(KEPT, server.optimizer),
                seed=plan.seed,
                method=plan.method.text,
                round=server.round,
            )
            shared = plan.method.aggregate(uploaded)
            if remember := getattr(plan.method.aggregate, "remember", None):
                kept = add_prefix(KEPT, remember(uploaded))
            if mix := getattr(plan.method.aggregate, "mix", None):
                states = tuple(pick(state, plan.loaded - made.keys()) for state in uploaded.states)
                mixes = Mixes(uploads=states, weights=mix(uploaded))
        shared |= made
        if plan.method.server:
            before = pick(server.shared, plan.trained & plan.loaded)
            delta = {name: shared[name] - tensor for name, tensor in before.items()}
            stepped, optimizer = plan.method.server.step(before, delta, optimizer, sum(shares))
            shared |= stepped
        optimizer = optimizer | kept
        return ServerState(round=server.round + 1, shared=shared, memory=memory, optimizer=optimizer, mixes=mixes)


def server_round(
    plan: Plan, server: ServerState, updates: Mapping[str, Update], sizes: Mapping[str, int]
) -> ServerState:
    """Return the server after a round, given all its uploads by client name."""
    folding = StreamingAggregator(plan, server, updates, sizes)
    for name, update in updates.items():
        folding.add(name, update)
    return folding.finalize()
