"""The server's part of a round: the mean of the uploads, then what the rules' folds make of it.

In: a plan, the server's state, and uploads in any order. Out: the server's state after the round. One rule may make the
entries from single uploads, in place of the mean; then rules compute entries of their own, and one may move the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..utils.errors import UsageError
from ..utils.state import State, pick
from .buffers import fit_spectral_norms
from .means import StreamingMean, bound_shares
from .mixes import Mixes
from .plan import Plan
from .rule import Declared, Folded, Received, Server, average
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
    return bool(plan.sent) and not any(b.entries or b.rule.aggregates or b.rule.mixes for b in plan.rules)


class StreamingAggregator:
    """Aggregates one round's uploads, which may arrive in any order.

    ``names``: the participants. Uploads are aggregated in the order of the clients' names, so that the result does not
    depend on the order of arrival. If no rule reads single uploads, one is discarded once it and its predecessors are
    added, and sums of uploads may be added instead, unless ``sizes.max_share`` is below 1, and weights depend on all.
    """

    def __init__(self, plan: Plan, server: ServerState, names: Iterable[str], sizes: ClientSizes) -> None:
        self._plan, self._server, self._pending, self._sizes = plan, server, sorted(names, reverse=True), sizes
        self._arrived: dict[str, Update] = {}
        self._aggregated: list[tuple[str, Update]] = []
        self._mean = StreamingMean() if sums_suffice(plan) and sizes.max_share >= 1 else None
        self._summed: StreamingMean | None = None
        self._whole = plan.whole & plan.sent
        self._taken, self._largest = pick(server.shared, self._whole), 0.0

    def add(self, name: str, update: Update, summed: StreamingMean | None = None) -> None:
        """Add the upload of one client; ``summed``: the sum with its averaged entries, if ``update`` lacks them."""
        self._arrived[name] = update
        if summed and summed is not self._summed:
            assert self._mean
            self._mean.merge(summed)
            self._summed = summed
        while self._pending and self._pending[-1] in self._arrived:
            self._aggregate(self._pending.pop())

    def _aggregate(self, name: str) -> None:
        update = self._arrived.pop(name)
        if self._whole:
            update = self._take_whole(name, update)
        if self._mean and update.shared:
            self._mean.add(update.shared, self._sizes.weigh_alone(name, update))
            update = replace(update, shared={})
        self._aggregated.append((name, update))

    def _take_whole(self, name: str, update: Update) -> Update:
        """Return ``update`` without buffers that have no mean, which the server takes from the largest weight.

        Rules that protect from single clients, or protect these, keep the server's.
        """
        weight, rule = self._sizes.weigh_alone(name, update), self._plan.method.aggregator
        if weight > self._largest and not (rule and rule.needs_entries_only):
            self._taken, self._largest = pick(update.shared, self._whole), weight
        return replace(update, shared=pick(update.shared, update.shared.keys() - self._whole))

    def finalize(self) -> ServerState:
        """Return the server's state after the round, from the uploads that arrived."""
        for name in sorted(self._arrived):  # uploads sorted after a missing one
            self._aggregate(name)
        method, received = self._plan.method, receive(self._aggregated, self._sizes)
        after = fold(self._plan, self._server, received, self._mean.result() if self._mean else None)
        if self._whole:
            complete = self._taken | after.shared
            shared = {name: complete[name] for name in self._server.shared if name in complete}
            if len(received) > 1 or method.aggregator or method.stepper:  # its weights are no client's
                shared = fit_spectral_norms(self._plan, shared)
            after = replace(after, shared=shared)
        return after


def receive(updates: Sequence[tuple[str, Update]], sizes: ClientSizes) -> list[Received]:
    """Return the contributions of ``updates``, which are sorted by client name."""
    raw = sizes.weigh(updates)
    total = sum(raw)
    return [
        Received(
            client=name, update=update, weight=weight / total, size=sizes.effective[name],
            share=sizes.effective[name] / sizes.total,
        )
        for (name, update), weight in zip(updates, raw, strict=True)
    ]  # fmt: skip


def fold(plan: Plan, server: ServerState, received: Sequence[Received], mean: State | None) -> ServerState:
    """Return the server's state after each rule's :meth:`Rule.fold`; ``mean``: of the uploads, if it is known.

    Raises :class:`UsageError` if a rule keeps state or mixes uploads without declaring it.
    """
    memory, kept, mixes = [*server.memory], [*server.kept], None
    entries = average(received) if mean is None and not plan.method.aggregator else mean
    withheld = [replace(each, withheld=True) for each in received]
    for index in plan.folds:
        bound = plan.rules[index]
        view = Server(
            memory=memory[index], kept=kept[index], uploads=[each.update.memory[index] for each in received],
            received=received if bound.entries or bound.rule.aggregates else withheld, before=server, network=plan,
            rules=plan.rules, _entries=entries,
        )  # fmt: skip
        folded = bound.rule.fold(view)
        _check_declared(plan, bound, folded)
        memory[index], kept[index], entries = folded.memory, folded.kept, {**(entries or {}), **folded.entries}
        mixes = _mix(plan, bound, received, folded.mixes) if folded.mixes else mixes
    return ServerState(
        round=server.round + 1, shared=entries or {}, memory=tuple(memory), kept=tuple(kept), mixes=mixes
    )


def _check_declared(plan: Plan, bound: Declared, folded: Folded) -> None:
    if lost := bound.kept.keys() - folded.kept.keys():
        what = f"{bound.rule.source_method} declares {min(lost)!r} as kept, but its fold() drops it"
        raise UsageError(f"method {plan.method.label!r}: {what}: return Folded(..., kept=...)")
    for flag, names in (("keeps", folded.kept.keys() - bound.kept.keys()), ("mixes", folded.mixes.keys())):
        if names and not getattr(bound.rule, flag):
            raise UsageError(
                f"method {plan.method.label!r}: {bound.rule.source_method} {flag} {min(names)!r} without informing "
                f"sites: declare {flag} = True in {type(bound.rule).__name__}"
            )


def _mix(plan: Plan, bound: Declared, received: Sequence[Received], weights: Mapping[str, State]) -> Mixes:
    """Return mixes of the entries that clients load, except those that rules make; raise :class:`UsageError`."""
    loaded = plan.loaded - plan.made - plan.whole
    mixes = Mixes(uploads=tuple(pick(each.entries, loaded) for each in received), weights=weights)
    mixes.check(f"method {plan.method.label!r}: {bound.rule.source_method}")
    return mixes


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
