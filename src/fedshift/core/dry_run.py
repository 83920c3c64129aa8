"""The dry run: a network on one sample, and two rounds of a plan on generated samples, before anything trains.

In: a plan and the inputs of one sample. Out: the smallest batch, or a refusal that names what is wrong, layer or hook.
Two clients, or as many as the aggregation needs, do all that a round asks of them with the plan's own rules: start,
personalize, step, end and upload; the server folds, and the next round starts. A hook must return the names, shapes,
types and devices of its declaration or of its argument, and only finite numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..nn.attributes import kept_attributes
from ..nn.recognition import placed_hooks, recorded_calls, torch_kind
from ..nn.surgery import NORMALIZATION
from ..tasks import Task
from ..tasks.task import PLURALS
from ..utils.errors import UsageError
from ..utils.random_streams import torch_stream
from ..utils.state import State, clone, pick
from ..utils.user_code import describe_error
from .checks import find_difference
from .declarations import RulePhase
from .kernel import broadcast, client_final, client_init, init_client, init_server, personal_state, restart
from .method import find_replaced
from .network import forward, to_inputs
from .plan import Plan
from .probe import make_batch
from .rule import HOOKS, Declared, Folded, Rule, Server, View
from .schedule import CONSTANT
from .selection import norm_statistics
from .server_round import server_round
from .states import ClientState, LocalTrainingState, SamplesBeforeWork, ServerState, Update
from .step import client_step_

CLIENTS, ROUNDS = 2, 2
"""Smallest number of clients, and number of rounds."""
_PASSED: set[Hashable] = set()
"""Plans that passed in this process (:func:`_identify`), so that the seeds of a comparison are not tried again."""


@contextmanager
def explained_errors(plan: Plan, sample: Tensor, original: Callable[[], nn.Module]) -> Iterator[None]:
    """Raise errors of the network in the block as :class:`UsageError`, with the layer that rejects ``sample [1, ...]``.

    ``original``: makes the network without the method's surgery.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # a user's network may raise any type
        check_normalization(plan, sample)
        why = describe_error(error)
        if plan.method.surgery and _accepts(original(), to_inputs(plan, sample)):
            raise UsageError(
                f"method {plan.label!r}: the model accepts a sample, but not after the method replaced some of its "
                f"layers ({why}): its forward may read attributes of replaced layers; only call layers there, or use a "
                "method that keeps them"
            ) from error
        advice = "Choose a model for this shape, or convert the data to the model's shape (for images: size, channels)"
        if not sample.is_floating_point():
            advice = "Integers are treated as tokens: give measurements as floats (x.astype('float32'))"
        elif "when training, got input size" in why:
            advice = "Normalization of one value has no variance: give larger images, or a layer running statistics"
        shape = tuple(sample.shape[1:])
        raise UsageError(f"the model rejects a sample of shape {shape}{_find_layer(error)}: {why}. {advice}") from error


@torch.no_grad()
def _accepts(model: nn.Module, inputs: Tensor) -> bool:
    with suppress(Exception):  # a user's network may raise any type
        model.eval()(inputs)
        return True
    return False


def _find_layer(error: Exception) -> str:
    """Return name, type and input shape of the innermost layer of the network in which ``error`` was raised."""
    calls = [frame.f_locals for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "_call_impl"]
    names = {layer: name for name, layer in calls[0]["self"].named_modules()} if calls else {}
    for layer, args in ((call["self"], call["args"]) for call in reversed(calls) if names.get(call["self"])):
        shapes = [f", input {tuple(x.shape[1:])}" for x in args if isinstance(x, Tensor)]
        return f" in layer {names[layer]!r} ({type(layer).__name__}{''.join(shapes[:1])})"
    return ""


def find_smallest_batch(plan: Plan, sample: Tensor) -> int:
    """Return 1, or 2 if the model cannot train on one sample, like BatchNorm on one value per channel."""
    inputs = to_inputs(plan, sample)
    forward(plan, clone(plan.initial), inputs, training=False)
    try:
        forward(plan, clone(plan.initial), inputs, training=True)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        forward(plan, clone(plan.initial), inputs.expand(2, *sample.shape[1:]), training=True)
        return 2
    return 1


@torch.no_grad()
def check_normalization(plan: Plan, sample: Tensor) -> None:
    """Raise :class:`UsageError` if surgery replaced normalization, and the result normalizes wrongly.

    The model also normalizes without a layer, or a new GroupNorm has one value per group, so that it is constant.
    """
    functions = {function for change in plan.method.surgery for function in find_replaced(change)}
    if not functions:
        return
    constant: list[str] = []

    def check(name: str, layer: nn.GroupNorm, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0][0].numel() == layer.num_groups:
            constant.append(f"layer {name!r} has {layer.num_groups} groups for {tuple(inputs[0].shape[1:])} values")

    layers = ((name, layer) for name, layer in plan.module.named_modules() if isinstance(layer, nn.GroupNorm))
    hooks = [layer.register_forward_pre_hook(partial(check, name)) for name, layer in layers]
    # Errors are reported by explained_errors.
    with placed_hooks(hooks), suppress(Exception), recorded_calls(plan.module, functions) as calls:
        forward(plan, clone(plan.initial), to_inputs(plan, sample), training=False)
    for call in (call for call in calls if not isinstance(call.layer, (*NORMALIZATION, _ConvNd))):
        where = f"its layer {call.name!r}" if call.name else "it"
        raise UsageError(
            f"method {plan.label!r} replaces layers that normalize, but the model also normalizes without one: {where} "
            f"({type(call.layer).__name__}) calls {call.function.__name__}: make a layer of it, or keep normalization"
        )
    for why in constant:
        fix = "use fewer groups (ln, gn(groups=1)), larger inputs, or a model without normalization there"
        raise UsageError(f"method {plan.label!r}: {why}, and a group of one value is always normalized to 0: {fix}")


@torch.no_grad()
def _check_freezing(plan: Plan, sample: Tensor) -> None:
    """Raise :class:`UsageError` if a layer writes into its statistics although they are frozen."""
    state, inputs = clone(plan.initial), to_inputs(plan, sample)
    moved = inputs + 0.5 if inputs.is_floating_point() else inputs
    forward(plan, state, moved.expand(plan.smallest_batch, *sample.shape[1:]), training=True, frozen=True)
    for entry in filter(norm_statistics, plan.entries):
        composite = not isinstance(entry.owner, _BatchNorm) and any(entry.owner.children())
        if composite or not torch.equal(state[entry.name], plan.initial[entry.name]):
            why = "contains layers that would be frozen, too" if composite else "writes into it in evaluation, too"
            fix = f"{why}: use torch's {torch_kind(entry.owner).__name__}, as a separate layer"
            what = f"{entry.name!r} belongs to a {entry.layer}, which {fix}"
            raise UsageError(f"method {plan.label!r} freezes statistics, but {what}")


def _check_outputs(plan: Plan, sample: Tensor, task: Task, classes: int) -> None:
    """Raise :class:`UsageError` unless the model has the outputs of ``task``."""
    scores = tuple(forward(plan, clone(plan.initial), to_inputs(plan, sample)).shape[1:])
    wanted = task.output_shape(tuple(sample.shape[1:]), classes)
    if scores != wanted:
        unit = f"one score a {task.output}" + ("" if len(wanted) == 1 else " and pixel")
        raise UsageError(
            f"the model's outputs for a sample have shape {scores}, but the data have {classes} "
            f"{PLURALS[task.output]}: make it give {wanted}, {unit}"
        )


def check_run(plan: Plan, sample: Tensor, task: Task | None, classes: int) -> None:
    """Raise :class:`UsageError` unless the network fits frozen statistics and ``task``, and rules do what they declare.

    Args:
        plan: The plan.
        sample: Inputs ``[1, ...]``, whose shape, type and device generated samples have.
        task: The data's task; None: the network's outputs are scores of classes.
        classes: The number of classes, labels or targets of ``task``.

    """
    if plan.method.freeze is not None:
        _check_freezing(plan, sample)
    if task is not None:
        _check_outputs(plan, sample, task, classes)
    kind = _identify(plan, sample, task, classes)
    if kind in _PASSED or not plan.rules:
        return
    with kept_attributes(plan.module), torch_stream(plan.seed, "dry run"):
        x = make_batch(plan, sample)
        y = _make_targets(plan, x, task, classes)
        watched = tuple(_watch(plan, bound) for bound in plan.rules)
        steady = replace(plan.optimizer, schedule=CONSTANT)  # others may have a rate for one round only
        _run_rounds(replace(plan, rules=watched, optimizer=steady), x, y)
    if kind is not None:
        _PASSED.add(kind)


def _identify(plan: Plan, sample: Tensor, task: Task | None, classes: int) -> Hashable | None:
    """Return all that the verdict depends on; None: unknown. Layers count by code: functions may define classes."""
    kind = (
        *((type(rule), *vars(rule).items()) for rule in plan.method.rules), plan.work, plan.optimizer,
        plan.loss, plan.precision, task, classes, plan.loaded, plan.sent, plan.trained, plan.adopted,
        *(getattr(type(layer).forward, "__code__", type(layer)) for layer in plan.layers),
        *((name, x.shape, x.dtype, x.device) for name, x in {"": sample, **plan.initial}.items()),
    )  # fmt: skip
    with suppress(TypeError):
        hash(kind)
        return kind
    return None


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
            _require(find_difference(pick(plan.initial, plan.sent), server.shared, "return"))
            _require(_find_wrong_number(plan, server.shared.items(), uploaded))
        for name in data:
            personal_state(plan, clients[name], broadcast(server, name))


def _train(plan: Plan, client: ClientState, server: ServerState, x: Tensor, y: Tensor) -> tuple[ClientState, Update]:
    """Return a client's state and upload after one step, and one step of each separate phase."""
    count, key = plan.samples_before_work, x.new_ones((), dtype=torch.int64)
    targets = y if any(bound.targets for bound in plan.rules) else y[:0]

    def take(job: LocalTrainingState, *phases: RulePhase | None) -> LocalTrainingState:
        for phase in phases:
            job, _ = client_step_(plan, replace(job, separate_phase=phase), x, y, key)
        return replace(job, separate_phase=None)

    job = client_init(plan, client, server, 1, SamplesBeforeWork(targets, x[:count], y[:count], key))
    with _named(plan, "a step"):
        if plan.phases["before"]:
            job = restart(plan, take(job, *plan.phases["before"]))
            job = replace(job, params=plan.clone_for_training(job.params))
        job = take(job, None, *plan.phases["after"])
    return client_final(plan, job)


@contextmanager
def _named(plan: Plan, what: str, failed: str = "failed on generated samples") -> Iterator[None]:
    """Raise errors of the block as :class:`UsageError` about ``what``."""
    name = f"method {plan.label!r}"
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
    rule = copy(bound.rule)
    for hook in HOOKS:
        if getattr(type(rule), hook) is not getattr(Rule, hook):
            vars(rule)[hook] = partial(_run_hook, plan, bound, hook)
    return replace(bound, rule=rule)


def _run_hook(plan: Plan, bound: Declared, hook: str, *arguments: Any) -> Any:
    """Return what the hook of a rule returns; raise :class:`UsageError` if that is wrong."""
    kind: type = {"batch": Tensor, "outputs": Tensor, "loss": Tensor, "fold": Folded}.get(hook, Mapping)
    count = 1 + (hook in ("batch", "end"))
    failed = "failed on generated samples"
    if hook == "combine_samples":
        failed += f", whose gradients torch.func computes one by one (in {plan.precision})"
    with _named(plan, f"{type(bound.rule).__name__}.{hook}()", failed):
        if hook == "loss" and bound.features and bound.rule.needs_classes and arguments[1].features.ndim != 2:
            shape = tuple(arguments[1].features.shape[1:])
            why = f"but the input of layer {bound.features!r} has shape {shape}: choose a model with a vector there"
            raise UsageError(f"{bound.rule.source_method} needs one feature vector per sample, {why}")
        result = getattr(bound.rule, hook)(*arguments)
        returned = result if count > 1 and isinstance(result, tuple) else (result,)
        if len(returned) != count or not all(isinstance(value, kind) for value in returned):
            what = {Tensor: "tensor", Folded: "fedshift.Folded"}.get(kind, "state") + "s" * (count - 1)
            raise UsageError(f"returns a {type(result).__name__}: return {count} {what}")
        _require(_find_lost_loss(result, arguments[0]) if hook == "loss" else "")
        for expected, actual, verb, where in _list_compared(plan, bound, hook, returned, arguments[0]):
            _require(find_difference(expected, actual, verb, where, bound.growing if hook == "fold" else {}))
        if hook != "combine_samples":  # whose samples are gone
            _require(_find_wrong_number(plan, _list_tensors(result), _list_tensors(arguments)))
    return result


def _list_compared(
    plan: Plan, bound: Declared, hook: str, returned: tuple[Any, ...], argument: Any
) -> list[tuple[State, State, str, str]]:
    """Return what a hook must return, what it ``returned``, a verb, and the declaration; empty: its ``argument``."""
    match hook:
        case "start":
            return [(bound.memory, pick(returned[0], bound.memory), "return", "Declared.memory")]
        case "end":
            return [(bound.memory, returned[0], "keep", "Declared.memory")]
        case "fold":
            made, where = bound.sets, "Declared.sets"
            if bound.rule.aggregates:
                made, where = made | (plan.sent - plan.whole), "what clients send"
            elif bound.rule.moves:
                made, where = made | (plan.trained & plan.loaded), "what clients load and train"
            memory = bound.server, returned[0].memory, "keep", "Declared.server"
            return [memory, (pick(plan.initial, made), returned[0].entries, "compute", where)]
        case "batch" | "outputs":
            name = "x" if hook == "batch" else hook
            return [({name: argument}, {name: returned[0]}, "return", "")]
        case "personalize" | "gradients":
            return [(argument, returned[0], "return", "")]
    return []


def _find_lost_loss(result: Tensor, loss: Tensor) -> str:
    if result.ndim or not result.is_floating_point():
        return f"returns a tensor of shape {tuple(result.shape)} and type {result.dtype}: return one number of shape ()"
    if not loss.requires_grad:  # in phases without the model
        return ""
    slope = torch.autograd.grad(result, loss, retain_graph=True, allow_unused=True)[0] if result.requires_grad else None
    if slope is None or not slope:
        return "returns an objective that does not depend on the loss: add to it or scale it, and use outputs() besides"
    return ""


def _find_wrong_number(
    plan: Plan, returned: Iterable[tuple[str, Tensor]], received: Iterable[tuple[str, Tensor]]
) -> str:
    """Return why the named tensors ``returned`` are wrong: on another device than the model, or no longer finite."""
    device, broken = next(iter(plan.initial.values())).device, ""
    for name, tensor in returned:
        if tensor.device != device:
            return f"returns {name} on {tensor.device}, and the model is on {device}: move it there"
        broken = broken or ("" if _is_finite(tensor) else name)
    if not broken or not all(_is_finite(tensor) for _, tensor in received):
        return ""
    return f"returns {broken} with numbers that are not finite: guard divisions, logarithms and roots (clamp)"


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _list_tensors(value: Any, name: str = "a tensor") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in ``value``, which may be states and views, with names."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, View | Server | Folded):
        states = ("loaded", "memory", "server", "own", "uploads", "entries", "kept")
        yield from _list_tensors([getattr(value, state, ()) for state in states])
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _list_tensors(item, repr(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _list_tensors(item, name)
