"""Disclosure checks: a client uploads exactly the tensors that its plan declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..utils.errors import UsageError
from ..utils.state import State, join_states, pick
from .declarations import Send
from .plan import Plan


def check_sends(plan: Plan, index: int, sent: State) -> None:
    """Raise :class:`UsageError` unless ``sent`` equals the uploads that the rule at ``index`` declares."""
    if why := find_difference(plan.rules[index].sends, sent):
        raise UsageError(
            f"method {plan.method.label!r}: {plan.rules[index].rule.source_method} {why}: the sends of its bind() must "
            "be exactly what its end() uploads (fedshift.Send), since the consent of sites, policies and differential "
            "privacy rely on them"
        )


def check_upload(plan: Plan, shared: State, memory: Sequence[State]) -> None:
    """Raise :class:`UsageError` unless an upload consists of exactly the scope's entries and the declared sends.

    Names, shapes and dtypes must be equal, and hence sizes in bytes. ``shared``: entries of the model. ``memory``: the
    upload for each rule.
    """
    if why := find_difference(Send.like(pick(plan.initial, plan.sent), "update"), shared):
        raise UsageError(f"method {plan.method.label!r} {why}: send exactly the entries in its scope")
    for index, sent in enumerate(memory):
        check_sends(plan, index, sent)


def like_sends(plan: Plan) -> State:
    """Return zero tensors in the shapes that all rules declare to send, by their names in uploads."""
    first = next(iter(plan.initial.values()))
    declared = (bound.sends.items() for bound in plan.rules)
    zeros = [{name: first.new_zeros(send.shape, dtype=send.dtype) for name, send in sends} for sends in declared]
    return join_states(plan.rule_names, zeros)


def find_difference(
    expected: Mapping[str, Send | Tensor], actual: Mapping[str, Tensor], verb: str = "upload", *, declared: bool = True,
    where: str = "", growing: Mapping[str, tuple[int, ...]] | None = None,
) -> str:  # fmt: skip
    """Return how ``actual`` differs in names, shapes and types from ``expected``; empty if it does not.

    The text is a predicate with ``verb``. ``declared``: whether ``expected`` was declared (``where``) or received.
    ``growing``: axes by name whose lengths may differ.
    """
    fix = f": {where} must be exactly that" if where else ""
    for name, tensor in actual.items():
        what = f"{verb}s {name!r} of shape {tuple(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}"
        if name not in expected:
            return f"{what} without declaring it{fix}" if declared else f"{what}, which it did not receive"
        like, axes = expected[name], (growing or {}).get(name, ())
        shape = tuple(tensor.shape[axis] if axis in axes else size for axis, size in enumerate(like.shape))
        if tensor.ndim != len(shape) or (tuple(tensor.shape), tensor.dtype) != (shape, like.dtype):
            known = f"{'declared' if declared else 'received'} as {tuple(like.shape)}"
            return f"{what}, {known} and {str(like.dtype).removeprefix('torch.')}{fix}"
    missing = expected.keys() - actual.keys()
    return f"{'declares' if declared else 'receives'} {min(missing)!r} but does not {verb} it{fix}" if missing else ""
