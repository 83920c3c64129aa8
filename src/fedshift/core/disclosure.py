"""Disclosure checks: a client uploads exactly the tensors that its plan declares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from ..utils.errors import UsageError
from ..utils.state import State, is_equal, join_states, pick
from .declarations import Send
from .plan import Plan


def check_sends(plan: Plan, index: int, sent: State, *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless ``sent`` equals the uploads that the rule at ``index`` declares.

    ``prelude``: whether this is the exchange before round 1, here and below.
    """
    bound = plan.rules[index]
    where, when = ("prelude", "uploads before round 1") if prelude else ("sends", "uploads")
    if why := _find_difference(_list_declared(plan, index, prelude=prelude), sent):
        raise UsageError(
            f"method {plan.method.label!r}: {bound.rule.source_method} {why}: the {where} of its bind() must be "
            f"exactly what its end() {when} (fedshift.Send), since the consent of sites, policies and differential "
            "privacy rely on them"
        )


def _list_declared(plan: Plan, index: int, *, prelude: bool) -> Mapping[str, Send]:
    return plan.rules[index].prelude if prelude else plan.rules[index].sends


def check_end(plan: Plan, index: int, kept: State, sent: State, *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless a rule's memory and upload match its declarations."""
    check_sends(plan, index, sent, prelude=prelude)
    memory = plan.rules[index].own.memory
    _check_names(plan, index, "end() returns memory", kept, memory, "Own.memory")
    if prelude and not is_equal(kept, memory):
        raise UsageError(
            f"method {plan.method.label!r}: {plan.rules[index].rule.source_method}: before round 1, end() returns "
            "memory that differs from Own.memory in its bind(), but clients keep no memory of that exchange: return "
            "the initial values if client.prelude is true, and compute what to keep in look() of round 1"
        )


def check_fold(plan: Plan, index: int, memory: State, entries: Mapping[str, Tensor], *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless the rule's results on the server match its declarations."""
    _check_names(plan, index, "fold() returns memory", memory, plan.rules[index].own.server, "Own.server")
    where = "before round 1 fold() returns entries" if prelude else "fold() returns entries"
    sets = frozenset[str]() if prelude else plan.rules[index].sets
    _check_names(plan, index, where, entries, sets, "Bound.sets")


def _check_names(
    plan: Plan, index: int, what: str, returned: Collection[str], declared: Collection[str], where: str
) -> None:
    if set(returned) != set(declared):
        actual, expected = (", ".join(sorted(names)) or "none" for names in (returned, declared))
        raise UsageError(
            f"method {plan.method.label!r}: {plan.rules[index].rule.source_method}: {what} ({actual}), but {where} in "
            f"its bind() declares {expected}: return exactly these"
        )


def check_upload(plan: Plan, shared: State, memory: Sequence[State], *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless an upload consists of exactly the scope's entries and the declared sends.

    Names, shapes and dtypes must be equal, and hence sizes in bytes. ``shared``: entries of the model. ``memory``: the
    upload for each rule.
    """
    entries = {} if prelude else Send.like(pick(plan.initial, plan.sent), "update")
    if why := _find_difference(entries, shared):
        raise UsageError(f"method {plan.method.label!r} {why}: send exactly the entries in its scope")
    for index, sent in enumerate(memory):
        check_sends(plan, index, sent, prelude=prelude)


def like_sends(plan: Plan, *, prelude: bool = False) -> State:
    """Return zero tensors in the shapes that all rules declare to send, by their names in uploads."""
    first = next(iter(plan.initial.values()))
    declared = (_list_declared(plan, index, prelude=prelude) for index in range(len(plan.rules)))
    zeros = [{name: first.new_zeros(s.shape, dtype=s.dtype) for name, s in sends.items()} for sends in declared]
    return join_states(plan.rule_names, zeros)


def _find_difference(declared: Mapping[str, Send], sent: State) -> str:
    """Return how ``sent`` differs from ``declared``, as a predicate of a sentence; empty if they agree."""
    for name, tensor in sent.items():
        what = f"{name!r} of shape {tuple(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}"
        if name not in declared:
            return f"uploads {what} without declaring it"
        send = declared[name]
        if (tuple(tensor.shape), tensor.dtype) != (send.shape, send.dtype):
            return f"uploads {what}, declared as {send.shape} and {str(send.dtype).removeprefix('torch.')}"
    missing = declared.keys() - sent.keys()
    return f"declares {min(missing)!r} but does not upload it" if missing else ""
