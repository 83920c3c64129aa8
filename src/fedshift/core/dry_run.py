"""The dry run: two rounds of a plan on generated samples, before anything trains.

Two clients, or as many as the aggregation needs, do all that a round asks of them with the plan's own rules: look,
personalize, step, end and upload; the server folds, and the next round starts. A hook must return the names, shapes,
types and devices of its declaration or of its argument, and only finite numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..tasks import Task
from ..utils.errors import UsageError
from ..utils.random_streams import torch_stream
from ..utils.state import clone, pick
from ..utils.user_code import describe_error
from .declarations import RulePhase
from .disclosure import find_difference
from .kernel import (
    broadcast,
    client_final,
    client_init,
    init_client,
    init_server,
    personal_state,
    restart,
)
from .network import compute_features, forward, to_inputs, to_memory_format
from .plan import Plan
from .probe import make_batch
from .rule import HOOKS, Declared, Folded, Rule, Server, View
from .server_round import server_round
from .states import ClientState, LocalTrainingState, Seen, ServerState, Update
from .step import client_step_

FACTS = ("loaded", "memory", "server", "own", "uploads", "entries", "kept")
"""States that views give to hooks."""
CLIENTS, ROUNDS = 2, 2
"""Smallest number of clients, and number of rounds."""
_PASSED: set[Hashable] = set()
"""Plans that passed in this process (:func:`_identify`), so that the seeds of a comparison are not tried again."""


def check_rounds(plan: Plan, sample: Tensor, task: Task | None = None, classes: int = 0) -> None:
    """Raise :class:`UsageError` unless the plan's components do what they declare, in two rounds.

    Args:
        plan: The plan.
        sample: Inputs ``[1, ...]``, whose shape, type and device generated samples have.
        task: The data's task; None: the network's outputs are scores of classes.
        classes: The number of classes, labels or targets of ``task``.

    """
    if not plan.rules:
        return
    for bound in plan.rules:
        _check_own(plan, bound)
    _check_features(plan, sample)
    kind = _identify(plan, sample, task, classes)
    if kind in _PASSED:
        return
    with torch_stream(plan.seed, "dry run"):
        x = make_batch(plan, sample)
        y = _make_targets(plan, x, task, classes)
        _run_rounds(replace(plan, rules=tuple(_watch(plan, bound) for bound in plan.rules)), x, y)
    if kind is not None:
        _PASSED.add(kind)


def _identify(plan: Plan, sample: Tensor, task: Task | None, classes: int) -> Hashable:
    """Return all that the verdict depends on; None: unknown. Layers count by code: functions may define classes."""
    try:
        kind = (
            *((type(each), *vars(each).items()) for each in plan.method.rules), plan.work, plan.optimizer, plan.loss,
            plan.precision, task, classes, plan.loaded, plan.sent, plan.trained, plan.adopted,
            *(getattr(type(layer).forward, "__code__", type(layer)) for layer in plan.layers),
            *((name, x.shape, x.dtype, x.device) for name, x in {"": sample, **plan.initial}.items()),
        )  # fmt: skip
        hash(kind)
    except TypeError:
        return None
    return kind


def _check_own(plan: Plan, bound: Declared) -> None:
    """Raise :class:`UsageError` if a tensor of a rule's initial state is on another device or of another type."""
    like, own = next(iter(plan.initial.values())), bound
    trained = {**own.params, **pick(own.model, plan.params)}
    for name, tensor in (*trained.items(), *own.on_client.items(), *own.server.items()):
        wrong = not isinstance(tensor, Tensor) or tensor.device != like.device
        if wrong or (trained.get(name) is tensor and tensor.dtype != plan.dtype):
            what = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UsageError(
                f"method {plan.method.label!r}: {type(bound.rule).__name__}.bind() declares {name!r} as {what}, "
                f"and the model is {plan.dtype} on {like.device}: make it from an entry of the plan, for example "
                "next(iter(plan.params.values())).new_zeros(3)"
            )


@torch.no_grad()
def _check_features(plan: Plan, sample: Tensor) -> None:
    """Raise :class:`UsageError` if the model does not call a layer that a rule reads, or vectors are missing there."""
    plan.set_mode(training=False)
    inputs = to_memory_format(to_inputs(plan, sample), plan.image_format)
    layers = plan.feature_layers
    features = compute_features(plan, clone(plan.initial), inputs, layers)[1] if layers else {}
    for bound, z in ((bound, features[bound.name]) for bound in plan.rules if bound.features):
        if bound.rule.requires.classes and z.ndim != 2:
            raise UsageError(
                f"method {plan.method.label!r}: {bound.rule.source_method} needs one feature vector per sample, but "
                f"the input of layer {bound.features!r} has shape {tuple(z.shape[1:])}: choose a model whose "
                "classifier receives a vector"
            )


def _make_targets(plan: Plan, x: Tensor, task: Task | None, classes: int) -> Tensor:
    """Return targets ``[B, ...]`` for inputs ``x [B, ...]``; classes take turns."""
    if task is None:
        outputs = forward(plan, clone(plan.initial), x)
        y = outputs.new_zeros((len(x), *outputs.shape[2:]), dtype=torch.int64)
        classes = outputs.shape[1] if outputs.ndim > 1 else 1
    else:
        y = task.encode(task.make_blank_targets(len(x), tuple(x.shape[1:]), classes)).to(x.device)
    turn = torch.arange(len(x), device=x.device).reshape(-1, *[1] * (y.ndim - 1))
    return y if y.is_floating_point() else (y.long() + turn) % classes


def _run_rounds(plan: Plan, x: Tensor, y: Tensor) -> None:
    method, halves = plan.method, list(zip(x.chunk(CLIENTS), y.chunk(CLIENTS), strict=True))
    count = 1 if method.pooled else max(CLIENTS, *(rule.min_clients for rule in method.rules))
    data = {str(number): halves[number % CLIENTS] for number in range(count)}
    sizes = {name: len(y) for name, (_, y) in data.items()}
    server, clients = init_server(plan), dict.fromkeys(data, init_client(plan))
    for _ in range(ROUNDS):
        updates = {}
        for name, samples in data.items():
            clients[name], updates[name] = _train(plan, clients[name], broadcast(server, name), *samples)
        with _named(plan, " and ".join(repr(plan.rules[index].rule) for index in plan.folds)):
            server = server_round(plan, server, updates, sizes)
            uploaded = [pair for update in updates.values() for pair in update.shared.items()]
            _require(find_difference(pick(plan.initial, plan.sent), server.shared, "return", declared=False))
            _require(_check_numbers(plan, server.shared.items(), uploaded))
        for name in data:
            personal_state(plan, clients[name], broadcast(server, name))


def _train(plan: Plan, client: ClientState, server: ServerState, x: Tensor, y: Tensor) -> tuple[ClientState, Update]:
    """Return a client's state and upload after one step, and one step of each separate phase."""

    def take(job: LocalTrainingState, *phases: RulePhase | None) -> LocalTrainingState:
        for phase in phases:
            job, _ = client_step_(plan, replace(job, separate_phase=phase), x, y, x.new_ones((), dtype=torch.int64))
        return replace(job, separate_phase=None)

    job = client_init(plan, client, server, 1, _see(plan, x, y))
    runs = f"computes the gradient of each sample with torch.func, which cannot run this model (in {plan.precision})"
    gradient = plan.estimator
    with _named(plan, plan.method.name_source(gradient), runs) if gradient else _named(plan, "a step"):
        if plan.before:
            job = restart(plan, take(job, *plan.before))
            job = replace(job, params=plan.clone_for_training(job.params))
        job = take(job, None, *plan.after)
    return client_final(plan, job)


def _see(plan: Plan, x: Tensor, y: Tensor) -> Seen | None:
    first, targets = plan.samples_before_work, y if any(each.targets for each in plan.rules) else y[:0]
    return Seen(targets, x[:first], y[:first], x.new_ones((), dtype=torch.int64)) if plan.defines("start") else None


@contextmanager
def _named(plan: Plan, what: str, failed: str = "failed on generated samples") -> Iterator[None]:
    """Raise errors of the block as :class:`UsageError` about ``what``."""
    name = f"method {plan.method.label!r}"
    try:
        yield
    except UsageError as error:
        raise error if str(error).startswith(name) else UsageError(f"{name}: {what}: {{}}", error) from error
    except Exception as error:
        raise UsageError(f"{name}: {what} {failed}: {describe_error(error)}. Correct it, or leave it out") from error


def _require(why: str) -> None:
    if why:
        raise UsageError(why)


def _watch(plan: Plan, bound: Declared) -> Declared:
    """Return ``bound`` with a copy of the rule whose hooks are checked."""
    rule, kind = copy(bound.rule), type(bound.rule)
    members = {name: getattr(kind, name) for name in ("__module__", "__qualname__")} | {"__slots__": ()}
    for hook in HOOKS:
        if getattr(kind, hook) is not getattr(Rule, hook):
            members[hook] = _check_hook(plan, bound, hook)
    object.__setattr__(rule, "__class__", type(kind.__name__, (kind,), members))
    return replace(bound, rule=rule)


def _check_hook(plan: Plan, bound: Declared, hook: str) -> Callable[..., Any]:
    kind: type = Tensor if hook in ("batch", "outputs", "loss") else Folded if hook == "fold" else Mapping
    count = 1 + (hook in ("batch", "end"))

    def run(_: Rule, *given: Any) -> Any:
        with _named(plan, f"{type(bound.rule).__name__}.{hook}()"):
            result = getattr(bound.rule, hook)(*given)
            returned = result if count > 1 and isinstance(result, tuple) else (result,)
            if len(returned) != count or not all(isinstance(each, kind) for each in returned):
                what = {Tensor: "tensor", Folded: "fedshift.Folded"}.get(kind, "state") + "s" * (count - 1)
                raise UsageError(f"returns a {type(result).__name__}: return {count} {what}")
            _require(_find_fault(bound, hook, result, given[0]))
            _require(_check_numbers(plan, _list_tensors(result), _list_tensors(given)))
        return result

    return run


def _find_fault(bound: Declared, hook: str, result: Any, given: Any) -> str:
    """Return how the ``result`` of a hook differs from declarations, or from its argument ``given``."""
    own, expected, returned = bound, given, result
    match hook:
        case "loss":
            return _check_loss(result, given)
        case "end":
            return find_difference(own.memory, result[0], "keep", where="Declared.memory")
        case "fold":
            return _check_fold(bound, result, given)
        case "start":
            return find_difference(own.memory, pick(result, own.memory), "return", where="Declared.memory")
        case "batch":
            expected, returned = {"x": given}, {"x": result[0]}
        case "outputs":
            expected, returned = {"outputs": given}, {"outputs": result}
    return find_difference(expected, returned, "return", declared=False)


def _check_loss(result: Tensor, loss: Tensor) -> str:
    if result.ndim or not result.is_floating_point():
        return f"returns a tensor of shape {tuple(result.shape)} and type {result.dtype}: return one number of shape ()"
    if not loss.requires_grad:  # in phases without the model
        return ""
    slope = torch.autograd.grad(result, loss, retain_graph=True, allow_unused=True)[0] if result.requires_grad else None
    if slope is None or not slope:
        return (
            "returns an objective that does not depend on the loss: add to the loss or scale it, and "
            "change what it is computed from in outputs()"
        )
    return ""


def _check_fold(bound: Declared, folded: Folded, server: Server) -> str:
    network, made = server.network, bound.sets
    if bound.rule.aggregates or bound.rule.moves:
        made |= network.sent - network.whole if bound.rule.aggregates else network.trained & network.loaded
    why = find_difference(bound.server, folded.memory, "keep", where="Declared.server", growing=bound.growing)
    return why or find_difference(pick(network.initial, made), folded.entries, "compute", where="Declared.sets")


def _check_numbers(plan: Plan, returned: Iterable[tuple[str, Tensor]], given: Iterable[tuple[str, Tensor]]) -> str:
    """Return why the named tensors ``returned`` are wrong: on another device than the model, or no longer finite."""
    device, broken = next(iter(plan.initial.values())).device, ""
    for name, tensor in returned:
        if tensor.device != device:
            return f"returns {name} on {tensor.device}, and the model is on {device}: move it there"
        broken = broken or ("" if _is_finite(tensor) else name)
    if not broken or not all(_is_finite(tensor) for _, tensor in given):
        return ""
    return f"returns {broken} with numbers that are not finite: guard divisions, logarithms and roots (clamp)"


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _list_tensors(value: Any, name: str = "a tensor") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in ``value``, which may be states and contexts, with names."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, View | Server | Folded):
        facts = {fact: getattr(value, fact, None) for fact in FACTS}
        yield from _list_tensors({fact: fact_value for fact, fact_value in facts.items() if fact_value})
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _list_tensors(each, repr(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _list_tensors(each, name)
