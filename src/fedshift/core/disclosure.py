"""Disclosure checks: a client uploads exactly the tensors that its plan declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..utils.errors import UsageError
from ..utils.state import State, is_equal, join_states, pick
from .declarations import Send
from .plan import Plan


def check_sends(plan: Plan, index: int, sent: State, *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless ``sent`` equals the uploads that the rule at ``index`` declares.

    ``prelude``: whether this is the exchange before round 1, here and below.
    """
    where, when = ("prelude", "uploads before round 1") if prelude else ("sends", "uploads")
    if why := find_difference(_list_declared(plan, index, prelude=prelude), sent):
        raise UsageError(
            f"{_name(plan, index)} {why}: the {where} of its bind() must be exactly what its end() {when} "
            "(fedshift.Send), since the consent of sites, policies and differential privacy rely on them"
        )


def _name(plan: Plan, index: int) -> str:
    return f"method {plan.method.label!r}: {plan.rules[index].rule.source_method}"


def _list_declared(plan: Plan, index: int, *, prelude: bool) -> Mapping[str, Send]:
    return plan.rules[index].prelude if prelude else plan.rules[index].sends


def check_end(plan: Plan, index: int, kept: State, sent: State, *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless a rule's memory and upload match its declarations."""
    check_sends(plan, index, sent, prelude=prelude)
    memory = plan.rules[index].own.memory
    _check_state(plan, index, kept, memory, "keep", "Own.memory of its bind() must be exactly what its end() keeps")
    if prelude and not is_equal(kept, memory):
        raise UsageError(
            f"{_name(plan, index)}: before round 1, end() returns memory that differs from Own.memory in its bind(), "
            "but clients keep no memory of that exchange: return the initial values if client.prelude is true, and "
            "compute what to keep in look() of round 1"
        )


def check_fold(plan: Plan, index: int, memory: State, entries: Mapping[str, Tensor], *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless the rule's results on the server match its declarations."""
    bound = plan.rules[index]
    fix = "Own.server of its bind() must be exactly what its fold() keeps, but for growing axes"
    _check_state(plan, index, memory, bound.own.server, "keep", fix, bound.own.growing)
    sets = {} if prelude else pick(plan.initial, bound.sets)
    fix = f"Bound.sets of its bind() must be exactly what its fold() computes{', and nothing before round 1' * prelude}"
    _check_state(plan, index, entries, sets, "compute", fix)


def _check_state(
    plan: Plan, index: int, actual: Mapping[str, Tensor], declared: State, verb: str, fix: str,
    growing: Mapping[str, tuple[int, ...]] | None = None,
) -> None:  # fmt: skip
    if why := find_difference(declared, actual, verb, growing=growing or {}):
        raise UsageError(f"{_name(plan, index)} {why}: {fix}")


def check_upload(plan: Plan, shared: State, memory: Sequence[State], *, prelude: bool = False) -> None:
    """Raise :class:`UsageError` unless an upload consists of exactly the scope's entries and the declared sends.

    Names, shapes and dtypes must be equal, and hence sizes in bytes. ``shared``: entries of the model. ``memory``: the
    upload for each rule.
    """
    entries = {} if prelude else Send.like(pick(plan.initial, plan.sent), "update")
    if why := find_difference(entries, shared):
        raise UsageError(f"method {plan.method.label!r} {why}: send exactly the entries in its scope")
    for index, sent in enumerate(memory):
        check_sends(plan, index, sent, prelude=prelude)


def like_sends(plan: Plan, *, prelude: bool = False) -> State:
    """Return zero tensors in the shapes that all rules declare to send, by their names in uploads."""
    first = next(iter(plan.initial.values()))
    declared = (_list_declared(plan, index, prelude=prelude) for index in range(len(plan.rules)))
    zeros = [{name: first.new_zeros(s.shape, dtype=s.dtype) for name, s in sends.items()} for sends in declared]
    return join_states(plan.rule_names, zeros)


def find_difference(
    expected: Mapping[str, Send | Tensor],
    actual: Mapping[str, Tensor],
    verb: str = "upload",
    *,
    declared: bool = True,
    growing: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """Return how ``actual`` differs in names, shapes and types from ``expected``; empty if it does not.

    The text is a predicate with ``verb``. ``declared``: whether ``expected`` was declared, or else given. ``growing``:
    axes by name whose lengths may differ.
    """
    known, says = ("declared", "declares") if declared else ("given", "is given")
    for name, tensor in actual.items():
        what = f"{verb}s {name!r} of shape {tuple(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}"
        if name not in expected:
            return f"{what} without declaring it" if declared else f"{what}, which it was not given"
        like, axes = expected[name], (growing or {}).get(name, ())
        shape = tuple(tensor.shape[axis] if axis in axes else size for axis, size in enumerate(like.shape))
        if tensor.ndim != len(shape) or (tuple(tensor.shape), tensor.dtype) != (shape, like.dtype):
            return f"{what}, {known} as {tuple(like.shape)} and {str(like.dtype).removeprefix('torch.')}"
    missing = expected.keys() - actual.keys()
    return f"{says} {min(missing)!r} but does not {verb} it" if missing else ""
