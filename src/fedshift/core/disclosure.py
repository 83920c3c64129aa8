"""Disclosure: the check that what leaves a client in a round is what its plan declares, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from ..utils.errors import UsageError
from ..utils.state import State, join_states, pick
from .declarations import Send
from .plan import Plan


def check_sends(plan: Plan, index: int, sent: State) -> None:
    """Raise :class:`UsageError` unless ``sent`` is what the rule at ``index`` declares that it uploads."""
    bound = plan.rules[index]
    if why := _find_difference(bound.sends, sent):
        raise UsageError(
            f"method {plan.method.name!r}: {bound.rule.source_method} {why}: the sends of its bind() must be exactly "
            "what its end() uploads (fedshift.Send), since consent of sites, policies and differential privacy rest on "
            "them"
        )


def check_end(plan: Plan, index: int, kept: State, sent: State) -> None:
    """Raise :class:`UsageError` unless a rule's memory and upload are what it declares."""
    check_sends(plan, index, sent)
    _check_names(plan, index, "end() returns memory", kept, plan.rules[index].own.memory, "Own.memory")


def check_fold(plan: Plan, index: int, memory: State, entries: Mapping[str, Tensor]) -> None:
    """Raise :class:`UsageError` unless what a rule computes at the server is what it declares."""
    _check_names(plan, index, "fold() returns memory", memory, plan.rules[index].own.server, "Own.server")
    _check_names(plan, index, "fold() returns entries", entries, plan.rules[index].sets, "Bound.sets")


def _check_names(
    plan: Plan, index: int, what: str, made: Collection[str], declared: Collection[str], where: str
) -> None:
    if set(made) != set(declared):
        both = (", ".join(sorted(names)) or "none" for names in (made, declared))
        found, named = both
        raise UsageError(
            f"method {plan.method.name!r}: {plan.rules[index].rule.source_method}: {what} ({found}), but {where} in "
            f"its bind() declares {named}: return exactly these"
        )


def check_upload(plan: Plan, shared: State, memory: Sequence[State]) -> None:
    """Raise :class:`UsageError` unless an upload is exactly the entries that the scope sends and the declared sends.

    Names, shapes and types must be equal, and with them bytes. ``shared``: entries of the model; ``memory``: what is
    sent for each rule.
    """
    entries = Send.like(pick(plan.initial, plan.sent), "update")
    if why := _find_difference(entries, shared):
        raise UsageError(f"method {plan.method.name!r} {why}: entries of the model are sent exactly as its scope says")
    for index, sent in enumerate(memory):
        check_sends(plan, index, sent)


def like_sends(plan: Plan) -> State:
    """Return tensors of zeros like what all rules declare that they send, by their names in messages."""
    first = next(iter(plan.initial.values()))
    zeros = [{n: first.new_zeros(s.shape, dtype=s.dtype) for n, s in bound.sends.items()} for bound in plan.rules]
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
