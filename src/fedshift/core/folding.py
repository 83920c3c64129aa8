"""The server's part of a round: the clients' uploads folded into what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..base.state import State, pick, prefixed, under
from .aggregate import Mean, Uploads, average
from .kernel import Server, Update
from .plan import Plan


class Folding:
    """The uploads of one round, folded into ``server`` as they arrive, in whatever order; ``names``: whose they are.

    They are taken in the order of the clients' names, so that the result does not depend on that of arrival. Where the
    method averages entries, an upload is let go as soon as those before it have come.
    """

    def __init__(self, plan: Plan, server: Server, names: Iterable[str]) -> None:
        self._plan, self._server, self._coming = plan, server, sorted(names, reverse=True)
        self._arrived: dict[str, Update] = {}
        self._folded: list[Update] = []
        self._mean = Mean() if plan.method.aggregate is average and plan.sent else None

    def add(self, name: str, update: Update) -> None:
        """Take the upload of one client."""
        self._arrived[name] = update
        while self._coming and self._coming[-1] in self._arrived:
            self._fold(self._arrived.pop(self._coming.pop()))

    def _fold(self, update: Update) -> None:
        if self._mean:
            self._mean.add(update.shared, self._weight(update))
            update = replace(update, shared={})
        self._folded.append(update)

    def close(self, population: int) -> Server:
        """The server after the round, of the uploads that came; ``population``: how many clients train in all."""
        for name in sorted(self._arrived):  # those behind one that did not come
            self._fold(self._arrived.pop(name))
        plan, server, ordered = self._plan, self._server, self._folded
        raw = [self._weight(update) for update in ordered]
        weights = [weight / sum(raw) for weight in raw]
        memory: State = {}
        for index, rule in enumerate(plan.method.rules):
            prefix = plan.rule_memory(index)
            uploads = [under(prefix, update.memory) for update in ordered]
            memory |= prefixed(prefix, rule.fold(under(prefix, server.memory), uploads, weights, population))
        trained = plan.trained & plan.sent
        if self._mean:
            shared = self._mean.result()
        else:
            uploaded = Uploads(
                states=[update.shared for update in ordered],
                weights=weights,
                steps=[update.steps for update in ordered],
                previous=server.shared,
                trained=trained,
                loaded=plan.loaded,
                fixed=plan.fixed(server.round),
                seed=plan.seed,
                round=server.round,
            )
            shared = plan.method.aggregate(uploaded)
        optimizer = server.optimizer
        if plan.method.server:
            before = pick(server.shared, trained)
            delta = {name: shared[name] - tensor for name, tensor in before.items()}
            stepped, optimizer = plan.method.server.step(before, delta, optimizer)
            shared |= stepped
        return Server(round=server.round + 1, shared=shared, memory=memory, optimizer=optimizer)

    def _weight(self, update: Update) -> float:
        return update.weight if self._plan.method.weighting == "samples" else 1.0


def server_round(plan: Plan, server: Server, updates: Mapping[str, Update], population: int) -> Server:
    """:class:`Folding` of uploads that have all come, by client name."""
    folding = Folding(plan, server, updates)
    for name, update in updates.items():
        folding.add(name, update)
    return folding.close(population)
