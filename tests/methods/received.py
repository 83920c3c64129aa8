"""Folds of a rule by itself, without rounds."""

from types import SimpleNamespace

from fedshift.core.rule import Received, Server
from fedshift.core.selection import KINDS
from fedshift.core.states import ServerState, Update


def fold(
    rule, states, before, *, weights=None, steps=None, uploads=None, names=None, kept=None, round=0, seed=0, text="",
    fixed=frozenset(), network=None,
):  # fmt: skip
    """What ``rule`` makes of ``states`` and ``uploads`` of clients a, b, ...; ``names``: what they train and load."""
    count, names = len(states), frozenset(before if names is None else names)
    weights = weights or [1 / count] * count
    network = network or SimpleNamespace(
        trained=names, loaded=names, sent=frozenset(before), seed=seed, text=text,
        entries=[SimpleNamespace(name=name, kind=KINDS.get(name.rpartition(".")[2])) for name in before],
        entries_fixed_in=lambda _: fixed,
        optimizer=SimpleNamespace(lr=0.1, momentum=0.0, nesterov=False), find_lr=lambda _: 0.1,
    )  # fmt: skip
    received = [
        Received(
            client=client, update=Update(shared=state, weight=1.0, steps=taken), weight=weight, size=weight,
            share=weight / sum(weights),
        )
        for client, state, weight, taken in zip("abcdefghijklmnop", states, weights, steps or [1] * count, strict=False)
    ]  # fmt: skip
    return rule.fold(
        Server(
            memory={}, kept=kept or {}, uploads=uploads or [{}] * count, received=received,
            before=ServerState(round=round, shared=before), network=network, rules=(),
        )
    )  # fmt: skip
