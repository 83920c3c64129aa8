"""The dry run: two rounds of a plan on generated samples, before anything trains.

Two clients, or as many as the aggregation needs, do all that a round asks of them with the plan's own rules: look,
personalize, step, end and upload; the server folds, and the next round starts. What a hook returns must have the names,
shapes, types and devices of its declaration or of what it was given, and only finite numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..tasks import Task
from ..utils.errors import UsageError
from ..utils.random_streams import torch_stream
from ..utils.state import clone, pick
from ..utils.user_code import describe_error
from .contexts import ClientContext, FoldContext
from .declarations import Bound, RulePhase
from .disclosure import check_upload, find_difference
from .kernel import (
    broadcast,
    client_final,
    client_init,
    client_prelude,
    init_client,
    init_server,
    personal_state,
    restart,
)
from .plan import Plan, compute_features, forward, to_inputs, to_memory_format
from .rule import HOOKS, Rule
from .server_round import ClientSizes, server_prelude, server_round
from .states import ClientState, LocalTrainingState, Seen, ServerState, Update
from .step import client_step_

CLIENTS, ROUNDS, SAMPLES = 2, 2, 2
"""Smallest number of clients, number of rounds, and smallest number of samples of a client."""
_PASSED: set[Hashable] = set()
"""What the plans differed in that passed in this process, so that seeds of a comparison are not tried again."""


def check_rounds(plan: Plan, sample: Tensor, task: Task | None = None, classes: int = 0) -> None:
    """Raise :class:`UsageError` unless the plan's components do what they declare, in two rounds.

    Args:
        plan: The plan.
        sample: Inputs ``[1, ...]``; generated samples have its shape, type and device, and are not larger in value.
        task: The data's task; None: the network's outputs are scores of classes.
        classes: The number of classes, labels or targets of ``task``.

    """
    method = plan.method
    if not (plan.rules or method.gradient or method.server or not method.aggregate.sums):
        return
    kind = _identify(plan, sample, task, classes)
    for bound in plan.rules:
        _check_own(plan, bound)
    _check_features(plan, sample)
    if kind in _PASSED:
        return
    with torch_stream(plan.seed, "dry run"):
        watched = replace(plan, rules=tuple(_watch(plan, bound) for bound in plan.rules))
        _run_rounds(watched, _make_samples(plan, sample, task, classes))
    if kind is not None:
        _PASSED.add(kind)


def _identify(plan: Plan, sample: Tensor, task: Task | None, classes: int) -> Hashable:
    """Return what the verdict depends on, with the code of layers: a function may make their class anew."""
    components = (*plan.method.rules, plan.method.aggregate, plan.method.gradient, plan.method.server)
    try:
        kind = (
            *((type(each), *vars(each).items()) for each in components if each), plan.work, plan.optimizer, plan.loss,
            plan.precision, task, classes, plan.loaded, plan.sent, plan.trained, plan.adopted,
            *(getattr(type(layer).forward, "__code__", type(layer)) for layer in plan.layers),
            *((name, x.shape, x.dtype, x.device) for name, x in {"": sample, **plan.initial}.items()),
        )  # fmt: skip
        hash(kind)
    except TypeError:
        return None
    return kind


@torch.no_grad()
def _check_features(plan: Plan, sample: Tensor) -> None:
    """Raise :class:`UsageError` if the model does not call a layer that a rule reads, or its input is no vector."""
    plan.set_mode(training=False)
    inputs = to_memory_format(to_inputs(plan, sample), plan.image_format)
    features = compute_features(plan, clone(plan.initial), inputs)[1] if plan.feature_layers else {}
    for bound, z in ((plan.rules[index], z) for index, z in features.items()):
        if bound.rule.requires.classes and z.ndim != 2:
            raise UsageError(
                f"method {plan.method.label!r}: {bound.rule.source_method} needs one feature vector per sample, but "
                f"the input of layer {bound.reads.features!r} has shape {tuple(z.shape[1:])}: choose a model whose "
                "classifier receives a vector"
            )


def _make_samples(plan: Plan, sample: Tensor, task: Task | None, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs ``[B, ...]`` and targets ``[B, ...]`` of clients, without end."""
    size, shape, inputs = max(SAMPLES, plan.smallest_batch), tuple(sample.shape[1:]), to_inputs(plan, sample)
    outputs = forward(plan, clone(plan.initial), inputs) if task is None else inputs
    while True:
        x = torch.cat([inputs.roll(number, -1) for number in range(size)])
        if x.is_floating_point():  # in the sample's range; whole numbers remain valid when they are rounded down
            x = inputs * torch.rand_like(x) + torch.rand_like(x) / 2
            x = x.clamp(inputs.min(), inputs.max()) if inputs.min() < inputs.max() else x
        if task is None:
            y = torch.zeros((size, *outputs.shape[2:]), dtype=torch.int64)
        else:
            y = task.encode(task.make_blank_targets(size, shape, classes))
        if not y.is_floating_point():
            row = torch.arange(size).reshape(-1, *[1] * (y.ndim - 1))
            y = (y.long() + row) % (classes or outputs.shape[min(1, outputs.ndim - 1)])
        yield x, y.to(x.device)


def _run_rounds(plan: Plan, samples: Iterator[tuple[Tensor, Tensor]]) -> None:
    method = plan.method
    names = [f"dry{number}" for number in range(1 if method.pooled else max(CLIENTS, method.aggregate.min_clients))]
    data = dict(zip(names, samples, strict=False))
    sizes = {name: len(y) for name, (_, y) in data.items()}
    server, clients = init_server(plan), {name: init_client(plan) for name in names}
    if plan.prelude:
        sent = {name: client_prelude(plan, sizes[name], _see(plan, *data[name])) for name in names}
        server = server_prelude(plan, server, sent, ClientSizes(plan, sizes))
    for _ in range(ROUNDS):
        updates = {}
        for name in names:
            clients[name], updates[name] = _train(plan, clients[name], broadcast(server, name), *data[name])
        with _named(plan, " and ".join(map(repr, filter(None, (method.aggregate, method.server))))):
            server = server_round(plan, server, updates, sizes)
            given = [pair for update in updates.values() for pair in update.shared.items()]
            why = _check_state(server.shared, pick(plan.initial, plan.sent))
            if why := why or _check_numbers(plan, server.shared.items(), given):
                raise UsageError(why)
        for name in names:
            personal_state(plan, clients[name], broadcast(server, name))


def _train(plan: Plan, client: ClientState, server: ServerState, x: Tensor, y: Tensor) -> tuple[ClientState, Update]:
    """Return a client's state and upload after one step, and one step of each separate phase."""

    def take(job: LocalTrainingState, *phases: RulePhase | None) -> LocalTrainingState:
        for phase in phases:
            job, _ = client_step_(plan, replace(job, separate_phase=phase), x, y, _make_key(x))
        return replace(job, separate_phase=None)

    job = client_init(plan, client, server, 1, _see(plan, x, y))
    with _named(plan, "a step" if plan.method.gradient is None else repr(plan.method.gradient)):
        if plan.before:
            job = restart(plan, take(job, *plan.before))
            job = replace(job, params=plan.clone_for_training(job.params))
        job = take(job, None, *plan.after)
    done, update = client_final(plan, job)
    check_upload(plan, update.shared, update.memory)
    return done, update


def _make_key(x: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.int64, device=x.device)


def _see(plan: Plan, x: Tensor, y: Tensor) -> Seen | None:
    first, targets = plan.reads.first, y if plan.reads.targets else y[:0]
    return Seen(targets, x[:first], y[:first], _make_key(x)) if plan.defines("look") else None


@contextmanager
def _named(plan: Plan, what: str) -> Iterator[None]:
    """Raise errors of the block as :class:`UsageError` about ``what``."""
    name = f"method {plan.method.label!r}"
    try:
        yield
    except UsageError as error:
        raise error if str(error).startswith(name) else UsageError(f"{name}: {what}: {{}}", error) from error
    except Exception as error:
        raise UsageError(
            f"{name}: {what} failed on generated samples: {describe_error(error)}. Correct it, or leave it out"
        ) from error


def _check_own(plan: Plan, bound: Bound) -> None:
    """Raise :class:`UsageError` if a tensor of a rule's initial state is on another device or of another type."""
    like = next(iter(plan.initial.values()))
    for kind, state in ((each.name, getattr(bound.own, each.name)) for each in fields(bound.own)):
        for name, tensor in state.items() if kind not in ("bounds", "growing") else ():
            trained = kind == "params" or (kind == "model" and name in plan.trained)
            where = f"method {plan.method.label!r}: {type(bound.rule).__name__}.bind() declares Own.{kind} {name!r}"
            if not isinstance(tensor, Tensor):
                raise UsageError(f"{where} as a {type(tensor).__name__}: give a tensor")
            why = f"on {tensor.device}, and the model is on {like.device}" if tensor.device != like.device else ""
            if trained and tensor.dtype != plan.dtype:
                why = why or f"as {tensor.dtype}, and the model is {plan.dtype}"
            if why:
                fix = "make it from an entry of the plan, for example next(iter(plan.params.values())).new_zeros(3)"
                raise UsageError(f"{where} {why}: {fix}")


def _watch(plan: Plan, bound: Bound) -> Bound:
    """Return ``bound`` with a copy of the rule whose hooks are checked."""
    rule, kind = copy(bound.rule), type(bound.rule)
    defined = [hook for hook in HOOKS if getattr(kind, hook) is not getattr(Rule, hook)]
    members = {name: getattr(kind, name) for name in ("__module__", "__qualname__")} | {"__slots__": ()}
    members |= {hook: _check_hook(plan, bound.rule, hook) for hook in defined}
    object.__setattr__(rule, "__class__", type(kind.__name__, (kind,), members))
    return replace(bound, rule=rule)


def _check_hook(plan: Plan, rule: Rule, hook: str) -> Callable[..., Any]:
    def run(_: Rule, *given: Any) -> Any:
        with _named(plan, f"{type(rule).__name__}.{hook}()"):
            result = getattr(rule, hook)(*given)
            why = _CHECKS[hook](result, *given)
            if why := why or _check_numbers(plan, _list_tensors(result), _list_tensors(given)):
                raise UsageError(why)
        return result

    return run


def _check_numbers(plan: Plan, returned: Iterable[tuple[str, Tensor]], given: Iterable[tuple[str, Tensor]]) -> str:
    """Return why the named tensors ``returned`` are wrong: on another device than the model, or no longer finite."""
    device, broken = next(iter(plan.initial.values())).device, ""
    for name, tensor in returned:
        if tensor.device != device:
            return f"returns {name} on {tensor.device}, and the model is on {device}: move it there"
        broken = broken or ("" if _is_finite(tensor) else name)
    if broken and all(_is_finite(tensor) for _, tensor in given):
        return (
            f"returns {broken} with numbers that are not finite, from finite ones: guard divisions, logarithms and "
            "roots, for example by clamp(min=1e-12)"
        )
    return ""


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _list_tensors(value: Any, name: str = "a tensor") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in ``value``, which may be states and contexts, with names."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, ClientContext | FoldContext):
        for each in fields(value):
            yield from _list_tensors(getattr(value, each.name), each.name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _list_tensors(each, repr(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _list_tensors(each, f"{name} {number}")


def _check_look(result: Any, client: Any) -> str:
    if not isinstance(result, Mapping):
        return _check_state(result, {})
    kept = client.bound.own.memory
    why = find_difference(kept, pick(result, kept), "return")
    return why and f"{why}: return all of Own.memory"


def _check_state(result: Any, given: Mapping[str, Tensor], *_: object) -> str:
    if not isinstance(result, Mapping):
        return f"returns a {type(result).__name__}: return a dict of tensors"
    why = find_difference(given, result, "return", declared=False)
    return why and f"{why}: return the same names, shapes and types"


def _check_batch(result: Any, x: Tensor, y: Tensor, *_: object) -> str:
    why = _check_pair(result, Tensor)
    if why or (result[0].shape, result[0].dtype, len(result[1])) == (x.shape, x.dtype, len(y)):
        return why
    return (
        f"returns inputs of shape {tuple(result[0].shape)} and type {result[0].dtype} and {len(result[1])} targets, "
        f"given {tuple(x.shape)}, {x.dtype} and {len(y)}: return batches as they are given"
    )


def _check_loss(result: Any, loss: Tensor, *_: object) -> str:
    if not isinstance(result, Tensor) or result.ndim or not result.is_floating_point():
        shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
        return f"returns a {type(result).__name__}{shape}: return one number, a floating-point tensor of shape ()"
    if not loss.requires_grad:
        return ""
    slope = torch.autograd.grad(result, loss, retain_graph=True, allow_unused=True)[0] if result.requires_grad else None
    if slope is None or not slope:
        return "returns an objective that does not depend on the loss that it is given: add to the loss, or scale it"
    return ""


def _check_pair(result: Any, kind: type) -> str:
    right = isinstance(result, tuple) and len(result) == 2 and all(isinstance(each, kind) for each in result)
    return "" if right else f"returns a {type(result).__name__}: return a pair of {kind.__name__}s"


_CHECKS: Mapping[str, Callable[..., str]] = {
    "look": _check_look,
    "personalize": _check_state,
    "batch": _check_batch,
    "loss": _check_loss,
    "gradients": _check_state,
    "end": lambda result, *_: _check_pair(result, Mapping),
    "fold": lambda result, *_: _check_pair(result, Mapping),
}
