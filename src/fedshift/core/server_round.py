"""The server's part of a round: it aggregates the clients' uploads into its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..utils.errors import UsageError
from ..utils.state import State, pick
from .aggregation import Aggregated, Received
from .contexts import FoldContext
from .disclosure import check_fold
from .means import StreamingMean, SummedUploads
from .mixes import Mixes
from .plan import Plan
from .shares import bound_shares
from .states import ServerState, Update


def sums_suffice(plan: Plan) -> bool:
    """Return whether the server needs of the clients' entries only their weighted sum."""
    return plan.method.aggregate.sums and bool(plan.sent) and not plan.reads.entries


class StreamingAggregator:
    """Aggregator of one round's uploads, which may arrive in any order.

    ``names``: the clients that are to upload. ``sizes``: training samples of every client that trains, also of those
    that sit the round out. Uploads are taken in the order of the clients' names, so that the result does not depend on
    that of arrival. Where the method averages entries, an upload is let go as soon as those before it have come, and
    sums of uploads may arrive in their place, one after another. With ``max_share`` below 1, the greatest weight of one
    among three clients or more, uploads are kept until all weights are known.
    """

    def __init__(
        self, plan: Plan, server: ServerState, names: Iterable[str], sizes: Mapping[str, int], max_share: float = 1.0
    ) -> None:
        self._plan, self._server, self._coming = plan, server, sorted(names, reverse=True)
        self._sizes, self._max_share = sizes, max_share
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
        if self._mean and update.shared and self._max_share >= 1:
            weight = self._plan.method.weigh(samples=self._sizes[name], used=update.weight)
            self._mean.add(update.shared, weight)
            update = replace(update, shared={})
        self._folded.append((name, update))

    def finalize(self) -> ServerState:
        """Return the server after the round, from the uploads that arrived."""
        for name in sorted(self._arrived):  # those behind one that did not come
            self._aggregate(name)
        plan, server = self._plan, self._server
        received = receive(plan, self._folded, self._sizes, self._max_share)
        shares = [each.share for each in received]
        memory, made = fold_rules(plan, server, received)
        if self._mean:
            if self._max_share < 1:
                weights, _ = weigh(plan, self._folded, self._sizes, self._max_share)
                for (_, update), weight in zip(self._folded, weights, strict=True):
                    self._mean.add(update.shared, weight)
            aggregated = Aggregated(entries=self._mean.result())
        else:
            aggregated = _check_declared(plan, plan.method.aggregate(plan, server, received))
        shared, optimizer, mixes = aggregated.entries | made, server.optimizer, None
        if aggregated.mixes:
            loaded = plan.loaded - made.keys()
            mixes = Mixes(uploads=tuple(pick(each.entries, loaded) for each in received), weights=aggregated.mixes)
            mixes.check(f"method {plan.method.label!r}: {plan.method.aggregate.source_method}")
        if plan.method.server:
            before = pick(server.shared, plan.trained & plan.loaded)
            delta = {name: shared[name] - tensor for name, tensor in before.items()}
            stepped, optimizer = plan.method.server.step(before, delta, optimizer, sum(shares))
            shared |= stepped
        return ServerState(
            round=server.round + 1, shared=shared, memory=memory, optimizer=optimizer, kept=aggregated.kept, mixes=mixes
        )


def weigh(
    plan: Plan, updates: Sequence[tuple[str, Update]], sizes: Mapping[str, int], max_share: float
) -> tuple[list[float], dict[str, float]]:
    """Return the weights of ``updates`` in a mean, and the sizes by which every client counts.

    ``sizes``: training samples of every client that trains. What counts less than it says among all clients does so in
    a round, too, in which few of them take part.
    """
    method = plan.method
    raw = [method.weigh(samples=sizes[name], used=update.weight) for name, update in updates]
    weighed = {name: method.weigh(samples=size, used=size) for name, size in sizes.items()}
    counted = dict(zip(weighed, bound_shares(list(weighed.values()), max_share), strict=True))
    lowered = {name: counted[name] / size for name, size in weighed.items() if counted[name] != size}
    raw = [weight * lowered.get(name, 1.0) for (name, _), weight in zip(updates, raw, strict=True)]
    return bound_shares(raw, max_share), counted


def receive(
    plan: Plan, updates: Sequence[tuple[str, Update]], sizes: Mapping[str, int], max_share: float = 1.0
) -> list[Received]:
    """Return ``updates``, in the order of the clients' names, as the server has received them; see :func:`weigh`."""
    raw, weighed = weigh(plan, updates, sizes, max_share)
    total, everyone, kinds = sum(raw), sum(weighed.values()), tuple(map(type, plan.method.rules))
    return [
        Received(
            client=name, update=update, weight=weight / total, size=weighed[name], share=weighed[name] / everyone,
            kinds=kinds,
        )
        for (name, update), weight in zip(updates, raw, strict=True)
    ]  # fmt: skip


def _check_declared(plan: Plan, made: Aggregated) -> Aggregated:
    """Return ``made``; :class:`UsageError` unless the aggregation declares what it keeps, and whether it mixes."""
    aggregate = plan.method.aggregate
    for field, what, held in (("kept", "keeps", made.kept), ("mixes", "mixes", made.mixes)):
        declared = getattr(aggregate, what)
        if held and not declared:
            raise UsageError(
                f"method {plan.method.label!r}: {aggregate.source_method} returns Aggregated({field}=...), of which "
                f"sites are not told: declare {what} = True in an Aggregation"
            )
    return made


def fold_rules(
    plan: Plan, server: ServerState, received: Sequence[Received], *, prelude: bool = False
) -> tuple[tuple[State, ...], State]:
    """Return the rules' memories on the server, and the entries that they compute.

    Raises :class:`UsageError` where a rule returns anything but what it declares.
    """
    memory, made, withheld = [*server.memory], State(), [replace(each, withheld=True) for each in received]
    for index in plan.defines("fold"):
        if prelude and not plan.rules[index].prelude:
            continue
        uploads = [each.update.memory[index] for each in received]
        seen = received if plan.rules[index].reads.entries else withheld
        context = FoldContext(
            memory=memory[index], uploads=uploads, received=seen, plan=plan, server=server, prelude=prelude
        )
        folded = plan.rules[index].rule.fold(context)
        check_fold(plan, index, *folded, prelude=prelude)
        memory[index] = folded.memory
        made |= folded.entries
    return tuple(memory), made


def server_round(
    plan: Plan, server: ServerState, updates: Mapping[str, Update], sizes: Mapping[str, int]
) -> ServerState:
    """Return the server after a round, given all its uploads by client name."""
    folding = StreamingAggregator(plan, server, updates, sizes)
    for name, update in updates.items():
        folding.add(name, update)
    return folding.finalize()


def server_prelude(
    plan: Plan, server: ServerState, updates: Mapping[str, Update], sizes: Mapping[str, int], max_share: float = 1.0
) -> ServerState:
    """Return the server after the exchange before round 1, given all its uploads by client name; no round is done."""
    received = receive(plan, sorted(updates.items()), sizes, max_share)
    return replace(server, memory=fold_rules(plan, server, received, prelude=True)[0])
