"""Disclosure: the check that what leaves a client in a round is what its plan declares, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from ..utils.errors import UsageError
from ..utils.state import State, is_equal, join_states, pick
from .declarations import Send
from .plan import Plan


def check_sends(plan: Plan, index: int, sent: State, *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless ``sent`` is what the rule at ``index`` declares that it uploads.

    ``prelude``: in the exchange before round 1, here and below.
    """
    bound = plan.rules[index]
    where, when = ("prelude", "uploads before round 1") if prelude else ("sends", "uploads")
    if why := _find_difference(_list_declared(plan, index, prelude=prelude), sent):
        raise UsageError(
            f"method {plan.method.label!r}: {bound.rule.source_method} {why}: the {where} of its bind() must be "
            f"exactly what its end() {when} (fedshift.Send), since consent of sites, policies and differential "
            "privacy rest on them"
        )


def _list_declared(plan: Plan, index: int, *, prelude: bool) -> Mapping[str, Send]:
    return plan.rules[index].prelude if prelude else plan.rules[index].sends


def check_end(plan: Plan, index: int, kept: State, sent: State, *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless a rule's memory and upload are what it declares."""
    check_sends(plan, index, sent, prelude=prelude)
    memory = plan.rules[index].own.memory
    _check_names(plan, index, "end() returns memory", kept, memory, "Own.memory")
    if prelude and not is_equal(kept, memory):
        raise UsageError(
            f"method {plan.method.label!r}: {plan.rules[index].rule.source_method}: end() returns other memory before "
            "round 1 than Own.memory in its bind(), but clients keep nothing of that exchange: return the first values "
            "where client.prelude is true; look() of round 1 may find what is to be kept"
        )


def check_fold(plan: Plan, index: int, memory: State, entries: Mapping[str, Tensor], *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless what a rule computes at the server is what it declares."""
    _check_names(plan, index, "fold() returns memory", memory, plan.rules[index].own.server, "Own.server")
    where = "before round 1 fold() returns entries" if prelude else "fold() returns entries"
    sets = frozenset[str]() if prelude else plan.rules[index].sets
    _check_names(plan, index, where, entries, sets, "Bound.sets")


def _check_names(
    plan: Plan, index: int, what: str, made: Collection[str], declared: Collection[str], where: str
) -> None:
    if set(made) != set(declared):
        both = (", ".join(sorted(names)) or "none" for names in (made, declared))
        found, named = both
        raise UsageError(
            f"method {plan.method.label!r}: {plan.rules[index].rule.source_method}: {what} ({found}), but {where} in "
            f"its bind() declares {named}: return exactly these"
        )


def check_upload(plan: Plan, shared: State, memory: Sequence[State], *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless an upload is exactly the entries that the scope sends and the declared sends.

    Names, shapes and types must be equal, and with them bytes. ``shared``: entries of the model; ``memory``: what is
    sent for each rule.
    """
    entries = {} if prelude else Send.like(pick(plan.initial, plan.sent), "update")
    if why := _find_difference(entries, shared):
        raise UsageError(f"method {plan.method.label!r} {why}: entries of the model are sent exactly as its scope says")
    for index, sent in enumerate(memory):
        check_sends(plan, index, sent, prelude=prelude)


def like_sends(plan: Plan, *, prelude: bool = False) -> State:
    """Return tensors of zeros like what all rules declare that they send, by their names in messages."""
    first = next(iter(plan.initial.values()))
    declared = (_list_declared(plan, index, prelude=prelude) for index in range(len(plan.rules)))
    zeros = [{name: first.new_zeros(s.shape, dtype=s.dtype) for name, s in sends.items()} for sends in declared]
    return join_states(plan.rule_names, zeros)


def _find_difference(declared: Mapping[str, Send], sent: State) -> str:
    """Return how ``sent`` differs from what is declared, as a predicate; empty where it does not."""
    for name, tensor in sent.items():
        what = f"{name!r} of shape {tuple(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}"
        if name not in declared:
            return f"uploads {what}, which it does not declare"
        send = declared[name]
        if (tuple(tensor.shape), tensor.dtype) != (send.shape, send.dtype):
            return f"uploads {what}, declared as {send.shape} and {str(send.dtype).removeprefix('torch.')}"
    missing = declared.keys() - sent.keys()
    return f"declares {min(missing)!r}, which it does not upload" if missing else ""
