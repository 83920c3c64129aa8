"""Preparation: build a plan from a method and a model, once, before training starts.

Surgery turns the model into a stateless template; its entries are classified as loaded, sent and trained; the template
runs on one sample. Incompatible parts are refused here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.spectral_norm import SpectralNorm

from ..nn.attributes import describe_network, kept_attributes
from ..nn.convolution import use_fast_convolutions
from ..nn.dropout import key_dropouts
from ..nn.linear import use_fast_linear
from ..nn.recognition import FunctionCalls, placed_hooks, torch_kind
from ..nn.surgery import NORMALIZATION
from ..tasks.task import PLURALS, Task
from ..utils.errors import UsageError
from ..utils.state import clone
from ..utils.user_code import describe_error
from .buffers import list_kept, observe_entries
from .compatibility import check_compatibility, check_rules, select_entries
from .dry_run import check_rounds
from .method import Method, decides_normalization
from .network import Loss, Precision, Traits, forward, to_inputs
from .optimizer import SGD, Optimizer
from .plan import Plan
from .probe import make_batch, probe_network, weigh_outputs
from .rule import Declared
from .selection import Entry, Kind, entries, everything, norm_statistics
from .work import Work


def apply_surgery(method: Method, model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` after the method's surgery; errors name the method."""
    return change_layers(method, _copy(model))


def change_layers(method: Method, module: nn.Module) -> nn.Module:
    """Return ``module`` after the method's surgery, which changes it in place; errors name the method."""
    replacements = list(filter(decides_normalization, method.surgery))
    if len(replacements) > 1:
        both = method.norm_replacers or " and ".join(map(str, replacements))
        raise UsageError(f"method {method.label!r}: {both} both replace normalization layers: remove one of the two")
    for change in method.surgery:
        try:
            module = change(module)
        except UsageError as error:
            raise UsageError(f"method {method.label!r}: {{}}", error) from error
    return module


def prepare(
    method: Method,
    model: nn.Module,
    *,
    work: Work | None = None,
    optimizer: Optimizer | None = None,
    loss: Loss = nn.functional.cross_entropy,
    precision: Precision = "float32",
    sample: Tensor | None = None,
    task: Task | None = None,
    classes: int = 0,
    rounds: int = 1,
    clients: int = 1,
    seed: int = 0,
    again: Callable[[], nn.Module] | None = None,
) -> Plan:
    """Resolve ``method`` against ``model``.

    Surgery that draws weights uses torch's generator.

    Args:
        method: The method.
        model: The network, which is copied, unless ``again`` makes it another time.
        work: The experiment's local work; the method may override fields.
        optimizer: The experiment's local optimizer; the method may override fields.
        loss: Computes the mean loss of a batch from outputs and labels.
        precision: Precision in which layers compute.
        sample: Inputs ``[1, ...]`` of one sample, for a trial of the model and a dry run; None: skip both.
        task: Task of the data; None: outputs are scores of classes.
        classes: Number of classes, labels or targets of ``task``.
        rounds: Number of rounds in the trial.
        clients: Number of clients that train in the trial.
        seed: Keys the server's random draws.
        again: Makes the network another time, with the same initial weights.

    Raises:
        UsageError: The scope matches no entry or loads entries that no client sends, parts of the method are
            incompatible or fail the dry run, or the model has unsupported entries, keeps state outside of them, rejects
            the sample, or does not fit the task.

    """
    if optimizer is None:
        raise UsageError(f"method {method.label!r} has no optimizer: pass one, for example SGD(lr=0.01)")
    _refuse_unknown_settings(optimizer, method.optimizer, method)
    _refuse_unsupported(model)
    remake = again or partial(_copy, model)
    network = model if again else remake()
    template = _make_template(method, network)
    smallest, traits = 1, Traits()
    bare = _make_bare_plan(method, template, precision)
    no_training = f"method {method.label!r} trains no parameter of the model: set requires_grad=True on some"
    if sample is not None:
        if not bare.trained:
            raise UsageError(no_training)
        bare = _observe(bare, sample, remake)
        traits = bare.traits
        _check_surgery(bare, sample)
        smallest = _smallest_batch(bare, sample, remake)
    model_entries = tuple(e for e in bare.entries if e.kind != "hidden" or e.name in (traits.changing or ()))
    hidden = frozenset(entry.name for entry in model_entries if entry.kind == "hidden")
    initial = {entry.name: bare.initial[entry.name] for entry in model_entries}
    selections = method.scope.load, method.scope.send
    names = select_entries(method, lambda each: each.scope, lambda: [each.names(model_entries) for each in selections])
    loaded, sent = (each - hidden for each in names)
    adopted = frozenset(entry.name for entry in model_entries if method.scope.begin(entry)) & sent - loaded
    if loaded - sent:
        raise UsageError(
            f"method {method.label!r} loads {min(loaded - sent)!r}, which no client sends: "
            "the server would always broadcast the initial value; send it too, or do not load it"
        )
    if method.pooled and loaded | hidden != frozenset(initial):
        raise UsageError(
            f"method {method.label!r} pools all data but keeps entries on clients, and pooling leaves no clients: "
            f"use centralized without {method.name_sources(lambda each: each.scope, 'a personal method')}"
        )
    kept = frozenset[str]() if method.pooled else list_kept(model_entries, loaded)
    loaded, adopted = loaded - kept, adopted | kept
    trained = bare.trained
    if method.trains is not everything:
        left = partial(method.trains.names, model_entries, "left untrained")
        trained &= select_entries(method, lambda each: each.trains, left)
    if not trained:
        raise UsageError(no_training)
    work = resolve_work(method, work or Work(epochs=1), clients)
    method = method.resolve_weighting(work)
    plan = Plan(
        label=method.label, text=method.text, method=method, module=template, entries=model_entries,
        initial=initial, loaded=loaded, sent=sent, adopted=adopted, trained=trained, trainable=bare.trained,
        keepers=name_keepers(method, model_entries, loaded), norm_replacers=method.norm_replacers,
        work=work, optimizer=replace(optimizer, **method.optimizer),
        loss=loss, smallest_batch=smallest, precision=precision, seed=seed, traits=traits,
    )  # fmt: skip
    for name, parameter in plan.parameters.items():
        parameter.requires_grad_(name in trained)
    check_rules(plan)
    plan = bind_rules(plan)
    if method.freeze is not None:
        select_entries(method, lambda each: each.freeze, lambda: norm_statistics.names(model_entries))
        freeze = method.freeze
        plan = replace(plan, freeze_from=freeze if isinstance(freeze, int) else int(freeze * rounds + 0.5))
    check_compatibility(plan)
    plan.optimizer.check(plan.params, rounds)
    if sample is not None:
        _check_freezing(plan, sample)
    if plan.work.batch_size is not None and plan.work.batch_size < plan.smallest_batch:
        raise UsageError(
            "batch_size=1, but BatchNorm in this model cannot compute a variance over one sample: use a batch size of "
            "2 or more, or a model without BatchNorm"
        ).about("batch_size")
    if sample is not None:
        if task is not None:
            _check_outputs(plan, sample, task, classes)
        with kept_attributes(plan.module):
            check_rounds(plan, sample, task, classes)
    return plan


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a user's network may raise any type
        raise UsageError(
            f"the model {type(model).__name__} cannot be copied ({describe_error(error)}): give a function that makes "
            "it, (sample_shape, classes) -> nn.Module"
        ) from error


def _make_template(method: Method, network: nn.Module) -> nn.Module:
    return use_fast_convolutions(use_fast_linear(key_dropouts(change_layers(method, network))))


def name_keepers(method: Method, entries: tuple[Entry, ...], loaded: frozenset[str]) -> dict[str, str]:
    """Return the names of the method's components that keep entries on clients, by entry, for messages."""
    return {
        entry.name: method.name_sources(lambda each, entry=entry: (each.scope.load(entry), each.scope.send(entry)))  # type: ignore[misc]
        for entry in entries
        if entry.name not in loaded
    }


def _make_bare_plan(method: Method, template: nn.Module, precision: Precision) -> Plan:
    """Return a plan of FedAvg for trial runs of the network; all buffers are entries."""
    found = entries(template, hidden=True)
    tensors = dict(template.named_parameters()) | dict(template.named_buffers())
    names = frozenset(entry.name for entry in found)
    return Plan(
        label=method.label, method=Method(name=method.name, typed=method.typed, surgery=method.surgery),
        module=template, entries=found,
        initial={entry.name: tensors[entry.name].detach().clone() for entry in found}, loaded=names, sent=names,
        trained=frozenset(name for name in names if tensors[name].requires_grad),
        work=Work(epochs=1), optimizer=SGD(lr=0.1), loss=weigh_outputs, smallest_batch=1, precision=precision,
    )  # fmt: skip


_OBSERVED: dict[Hashable, tuple[Traits, tuple[tuple[Kind, bool, bool], ...]]] = {}
"""Results of probes in this process, so that the seeds and methods of a comparison do not repeat them."""


def _observe(plan: Plan, sample: Tensor, remake: Callable[[], nn.Module]) -> Plan:
    """Return the plan with the traits of its network, and the kinds of entries that passes show."""
    kind = describe_network(plan.module), sample.shape, sample.dtype, plan.precision
    if kind not in _OBSERVED:
        with kept_attributes(plan.module):
            seen = replace(plan, traits=_probe(plan, sample, remake))
            found = observe_entries(seen, make_batch(seen, sample))
        _OBSERVED[kind] = seen.traits, tuple((entry.kind, entry.in_batch_norm, entry.moves) for entry in found)
    traits, facts = _OBSERVED[kind]
    observed = (
        replace(entry, kind=kind, in_batch_norm=in_batch_norm, moves=moves)
        for entry, (kind, in_batch_norm, moves) in zip(plan.entries, facts, strict=True)
    )
    return replace(plan, traits=traits, entries=tuple(observed))


def _probe(plan: Plan, sample: Tensor, remake: Callable[[], nn.Module]) -> Traits:
    """Return :func:`probe_network`; errors of the network say that it rejects the sample."""
    try:
        return probe_network(plan, sample, lambda: _make_template(plan.method, remake().to(sample.device)))
    except UsageError:
        raise
    except Exception as error:  # a user's network may raise any type
        _check_surgery(plan, sample)
        _smallest_batch(plan, sample, remake)
        where = _find_failing(plan, to_inputs(plan, sample))
        raise UsageError(_unsupported_sample_error(sample, error, where)) from error


def resolve_work(method: Method, work: Work, clients: int) -> Work:
    """Return the local work of ``method``, given the experiment's ``work`` and number of ``clients``."""
    _refuse_unknown_settings(work, method.work, method)
    work = work.change(method.work)
    if method.pooled == "scaled" and work.batch_size is not None:
        return replace(work, batch_size=work.batch_size * clients)
    return work


def _refuse_unknown_settings(settings: Work | Optimizer, changes: Mapping[str, Any], method: Method) -> None:
    known = {each.name for each in fields(settings)}
    for name in changes:
        if name not in known:
            raise UsageError(
                f"method {method.label!r} sets {name}, which {type(settings).__name__} lacks: its fields are "
                f"{', '.join(sorted(known))}"
            )


def bind_rules(plan: Plan) -> Plan:
    """Return ``plan`` with its method's rules bound to it; call again after the plan's entries change.

    Raises :class:`UsageError` if a rule refuses the plan.
    """
    plan, rules = replace(plan, rules=()), []
    for rule in plan.method.rules:
        source = plan.method.name_source(rule)
        try:
            bound = rule.named(source).bind(plan)
        except UsageError as error:
            raise UsageError(f"method {plan.method.label!r}: {error}") from error
        if not isinstance(bound, Declared):
            raise UsageError(
                f"method {plan.method.label!r}: {type(rule).__name__}.bind() returned a {type(bound).__name__}: return "
                "fedshift.Declared(self, ...)"
            )
        rules.append(replace(bound, rule=bound.rule.named(source)))
    names = [type(bound.rule).__name__.lower() for bound in rules]
    return replace(
        plan,
        rules=tuple(
            replace(bound, name=name if names.count(name) == 1 else f"{number}.{name}")
            for number, (bound, name) in enumerate(zip(rules, names, strict=True))
        ),
    )


def _refuse_unsupported(module: nn.Module) -> None:
    """Raise :class:`UsageError` naming an entry or layer that cannot be averaged, copied or called functionally."""
    tensors = dict(nn.Module.named_parameters(module)) | dict(module.named_buffers())
    if {id(each) for each in module.parameters()} != {id(each) for _, each in nn.Module.named_parameters(module)}:
        raise UsageError(
            f"the model {type(module).__name__} overrides parameters(), so that it is not known what is trained: set "
            "requires_grad=False on parameters that are not, and do not override parameters()"
        )
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"entry {name!r} of the model has no shape yet (a lazy layer): run one batch through the model first"
            )
    for name, tensor in ((entry.name, tensors[entry.name]) for entry in entries(module)):
        if tensor.is_complex():
            raise UsageError(
                f"entry {name!r} of the model is complex ({tensor.dtype}), which optimizers and aggregations do not "
                "support: store its real and imaginary parts as real entries (torch.view_as_real)"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UsageError(
                f"entry {name!r} of the model is {tensor.layout} with {tensor.dtype}, which uploads and checkpoints "
                "cannot hold: store it dense, or, if it is constant, register it with persistent=False"
            )
    _refuse_overlap(dict(nn.Module.named_parameters(module)))
    registered = {id(each) for each in (*module.modules(), *module.parameters(), *module.buffers())}
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise UsageError(
                f"layer {name!r} of the model is compiled by torch.jit ({layer.original_name}), which hides the types "
                "of its layers: pass the original network"
            )
        for where, held in _list_held(vars(layer)):
            if id(held) not in registered:
                raise UsageError(
                    f"layer {name!r} of the model holds a {type(held).__name__} in {where}, where torch does not find "
                    "it: it would not be trained, sent or exported; register it (nn.ModuleList, nn.ModuleDict, "
                    "nn.ParameterList, self.register_buffer)"
                )
        if any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()):
            raise UsageError(
                f"layer {name!r} of the model uses the old spectral_norm of torch.nn.utils, whose vectors belong "
                "to no averaged weight: use torch.nn.utils.parametrizations.spectral_norm instead"
            )


def _refuse_overlap(parameters: Mapping[str, Tensor]) -> None:
    """Raise :class:`UsageError` naming two parameters that share memory, so that a step of one moves the other."""
    ranges = []
    for name, tensor in parameters.items():
        if tensor.numel() and not tensor.is_meta:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size(), name))
    for (_, end, one), (start, _, other) in pairwise(sorted(ranges)):
        if start <= end:
            raise UsageError(
                f"entries {one!r} and {other!r} of the model share memory, but would be trained separately: use "
                "one parameter in both places"
            )


def _list_held(attributes: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield modules with entries and trainable tensors in the attributes of a layer, searching nested containers."""
    pending: list[tuple[str, Any]] = [
        (f"its attribute {name!r}", value)
        for name, value in attributes.items()
        if name not in ("_parameters", "_buffers", "_modules")
    ]
    seen: set[int] = set()
    while pending:
        where, value = pending.pop()
        if isinstance(value, nn.Module):
            if any(True for _ in (*value.parameters(), *value.buffers())):
                yield where, value
        elif isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf:
                yield where, value
        elif isinstance(value, Mapping | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            pending += [(where, each) for each in (value.values() if isinstance(value, Mapping) else value)]


def _smallest_batch(plan: Plan, sample: Tensor, remake: Callable[[], nn.Module]) -> int:
    """Return 1, or 2 if the model cannot train on one sample, like BatchNorm on one value per channel."""
    inputs = to_inputs(plan, sample)

    def try_batch(size: int, *, training: bool) -> None:
        forward(plan, clone(plan.initial), inputs.expand(size, *sample.shape[1:]), training=training)

    try:
        try_batch(1, training=False)
        try:
            try_batch(1, training=True)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            try_batch(2, training=True)
            return 2
    except UsageError:
        raise
    except Exception as error:
        if plan.method.surgery and _accepts(remake(), inputs):
            raise UsageError(
                f"method {plan.method.label!r}: the model accepts a sample, but not after the method replaced some of "
                f"its layers ({describe_error(error)}): its forward may read attributes of replaced layers; only call "
                "layers there, or use a method that keeps them"
            ) from error
        raise UsageError(_unsupported_sample_error(sample, error, _find_failing(plan, inputs))) from error
    return 1


@torch.no_grad()
def _find_failing(plan: Plan, inputs: Tensor) -> str:
    """Return name, type and input shape of the layer in which two samples fail, evaluated and then trained."""
    entered: list[tuple[str, nn.Module, tuple[Any, ...]]] = []
    layers = {name: layer for name, layer in plan.module.named_modules() if name}
    enter = [
        each.register_forward_pre_hook(lambda *args, at=at: entered.append((at, *args))) for at, each in layers.items()
    ]
    leave = [each.register_forward_hook(lambda *_: entered.pop() and None) for each in layers.values()]
    try:
        with placed_hooks(enter + leave):
            for training in (False, True):
                forward(plan, clone(plan.initial), inputs.expand(2, *inputs.shape[1:]), training=training)
    except Exception:  # the one that is being reported
        for name, layer, args in reversed(entered):
            shapes = [tuple(each.shape[1:]) for each in args if isinstance(each, Tensor)]
            return f" in layer {name!r} ({type(layer).__name__}{f', input {shapes[0]}' if shapes else ''})"
    return ""


@torch.no_grad()
def _accepts(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether the original ``model`` evaluates ``inputs`` without an error."""
    try:
        model.eval()(inputs)
    except Exception:  # a user's network may raise any type
        return False
    return True


@torch.no_grad()
def _check_surgery(plan: Plan, sample: Tensor) -> None:
    """Raise :class:`UsageError` if surgery replaced normalization, and the result normalizes wrongly.

    The model also normalizes without a layer, or a new GroupNorm has one value per group, so that it is constant.
    """
    functions = {each for change in plan.method.surgery for each in getattr(change, "replaced", ())}
    if not (functions or any(map(decides_normalization, plan.method.surgery))):
        return
    layers = {name: layer for name, layer in plan.module.named_modules() if isinstance(layer, nn.GroupNorm)}
    problems: list[str] = []

    def check(name: str, layer: nn.GroupNorm, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0][0].numel() == layer.num_groups:
            problems.append(f"layer {name!r} has {layer.num_groups} groups for {tuple(inputs[0].shape[1:])} values")

    hooks = [layer.register_forward_pre_hook(partial(check, name)) for name, layer in layers.items()]
    # Errors are reported by _smallest_batch.
    with placed_hooks(hooks), suppress(Exception), FunctionCalls(plan.module, functions) as calls:
        forward(plan, clone(plan.initial), to_inputs(plan, sample), training=False)
    others = [call for call in calls.found if not isinstance(call.layer, (*NORMALIZATION, _ConvNd))]
    for name, layer, function, *_ in others[:1]:
        where = f"its layer {name!r}" if name else "it"
        raise UsageError(
            f"method {plan.method.label!r} replaces layers that normalize, but the model also normalizes without one: "
            f"{where} ({type(layer).__name__}) calls {function.__name__}: make a layer of it, or use a method that "
            "keeps normalization"
        )
    if problems:
        raise UsageError(
            f"method {plan.method.label!r}: {problems[0]}, and a group of one value is always normalized to 0: "
            "use fewer groups (ln, gn(groups=1)), larger inputs, or a model without normalization there"
        )


@torch.no_grad()
def _check_freezing(plan: Plan, sample: Tensor) -> None:
    """Raise :class:`UsageError` if a layer writes into its statistics although they are frozen."""
    if plan.method.freeze is None:
        return
    state, inputs = clone(plan.initial), to_inputs(plan, sample)
    moved = inputs + 0.5 if inputs.is_floating_point() else inputs
    forward(plan, state, moved.expand(plan.smallest_batch, *sample.shape[1:]), training=True, frozen=True)
    for entry in plan.entries:
        if norm_statistics(entry) and not isinstance(entry.owner, _BatchNorm) and any(entry.owner.children()):
            raise UsageError(
                f"method {plan.method.label!r} freezes statistics, but {entry.name!r} belongs to a {entry.layer}, with "
                "other layers that would be frozen, too: move the normalization to a separate layer"
            )
        if norm_statistics(entry) and not torch.equal(state[entry.name], plan.initial[entry.name]):
            raise UsageError(
                f"method {plan.method.label!r} freezes statistics, but layer {entry.name.rpartition('.')[0]!r} is a "
                f"{type(entry.owner).__name__}, which writes into {entry.name!r} in evaluation too: use torch's "
                f"{torch_kind(entry.owner).__name__}"
            )


def _check_outputs(plan: Plan, sample: Tensor, task: Task, classes: int) -> None:
    """Raise :class:`UsageError` unless the model has the outputs of ``task``."""
    scores = tuple(forward(plan, clone(plan.initial), to_inputs(plan, sample)).shape[1:])
    wanted = task.output_shape(tuple(sample.shape[1:]), classes)
    if scores != wanted:
        each = f"one score a {task.output}" + ("" if len(wanted) == 1 else " and pixel")
        raise UsageError(
            f"the model's outputs for a sample have shape {scores}, but the data have {classes} "
            f"{PLURALS[task.output]}: make it give {wanted}, {each}"
        )


def _unsupported_sample_error(sample: Tensor, error: Exception, where: str) -> str:
    advice = "Choose a model for this shape, or convert the data to the model's shape (for images: size, channels)"
    if not sample.is_floating_point():
        advice = "Integers are treated as tokens: give measurements as floats (x.astype('float32'))"
    if isinstance(error, ValueError) and "when training, got input size" in str(error):
        advice = (
            "Normalization of one value has no variance: give larger images, or leave normalization out where one "
            "pixel is left"
            if where
            else "A layer normalizes by the batch in evaluation: give it running statistics (track_running_stats=True)"
        )
    return f"the model rejects a sample of shape {tuple(sample.shape[1:])}{where}: {describe_error(error)}. {advice}"
