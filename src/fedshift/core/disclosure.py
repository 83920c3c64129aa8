"""Disclosure: the check that what leaves a client in a round is what its plan declares, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..utils.errors import UsageError
from ..utils.state import State, join_states, pick
from .declarations import Send
from .plan import Plan


def check_sends(plan: Plan, index: int, sent: State) -> None:
    """Raise :class:`UsageError` unless ``sent`` is what the rule at ``index`` declares that it uploads."""
    rule = plan.method.rules[index]
    if why := _find_difference(plan.sends[index], sent):
        raise UsageError(
            f"method {plan.method.name!r}: {rule.source_method} {why}: its sends() must declare exactly what its "
            "finalize() uploads (fedshift.Send), since consent of sites, policies and differential privacy rest on it"
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
    zeros = [{name: first.new_zeros(s.shape, dtype=s.dtype) for name, s in sends.items()} for sends in plan.sends]
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
