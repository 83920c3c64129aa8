"""Uploads as the server has them, for tests of an aggregation by itself."""

from types import SimpleNamespace

from fedshift.core.aggregation import Received

from fedshift.core.selection import KINDS
from fedshift.core.states import ServerState, Update


def receive(states, weights=None, sizes=None, steps=None, memory=None, kinds=(), clients="abcdefghijklmnop"):
    equal = [1 / len(states)] * len(states)
    weights = weights or equal
    sizes, steps, memory = sizes or weights, steps or [1] * len(states), memory or [()] * len(states)
    return [
        Received(
            client=name, update=Update(shared=state, memory=sent, weight=1.0, steps=count), weight=weight, size=size,
            share=size / sum(sizes), kinds=kinds,
        )
        for name, state, weight, size, count, sent in zip(clients, states, weights, sizes, steps, memory, strict=False)
    ]  # fmt: skip


def aggregate(aggregation, received, before, names=None, kept=None, round=0, seed=0, text="", fixed=frozenset()):
    """What ``aggregation`` makes of what was ``received``; ``names``: the entries that clients train and load."""
    names = frozenset(before if names is None else names)
    plan = SimpleNamespace(
        trained=names, loaded=names, sent=frozenset(before), seed=seed, method=SimpleNamespace(text=text, rules=()),
        entries=[SimpleNamespace(name=name, kind=KINDS.get(name.rpartition(".")[2])) for name in before],
        entries_fixed_in=lambda _: fixed, optimizer=SimpleNamespace(
            momentum=0.0, nesterov=False, lr_in_round=lambda _: 0.1),
    )  # fmt: skip
    return aggregation(plan, ServerState(round=round, shared=before, kept=kept or {}), received)
