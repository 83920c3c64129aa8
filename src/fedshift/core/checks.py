"""Checks of a method on a model, from what it declares and how it is built, before anything runs.

In: a method, a model, a plan or an upload. Out: nothing, or a refusal that names the components in each other's way and
the fix. What only a run can show is found by :mod:`fedshift.core.dry_run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..nn.hybrid_batch_norm import HybridBatchNorm
from ..nn.several_inputs import find_inputs, name_inputs
from ..tasks import Classification, Task
from ..utils.errors import UsageError
from ..utils.state import State, join_states, pick
from .declarations import Send
from .loss import Loss, cross_entropy
from .method import Method
from .optimizer import SGD
from .plan import Plan
from .rule import Rule
from .selection import entries, norm_statistics

Names = TypeVar("Names")
REMOVE = ": remove one of the two"


def check_network(module: nn.Module) -> None:
    """Raise :class:`UsageError` naming an entry or layer that cannot be averaged, copied or called functionally."""
    for why in chain(_list_unsupported_entries(module), _list_unsupported_layers(module)):
        raise UsageError(why)


def _list_unsupported_entries(module: nn.Module) -> Iterator[str]:
    parameters = dict(nn.Module.named_parameters(module))
    tensors = parameters | dict(module.named_buffers())
    if {*map(id, module.parameters())} != {*map(id, parameters.values())}:
        why = "overrides parameters(), so that it is not known what is trained: set requires_grad=False instead"
        yield f"the model {type(module).__name__} {why}"
    for name in (name for name, tensor in tensors.items() if nn.parameter.is_lazy(tensor)):
        yield f"entry {name!r} of the model has no shape yet (a lazy layer): run one batch through the model first"
    for name, tensor in ((entry.name, tensors[entry.name]) for entry in entries(module)):
        if tensor.is_complex():
            why = "which optimizers and aggregations do not support: store real entries (torch.view_as_real)"
            yield f"entry {name!r} of the model is complex ({tensor.dtype}), {why}"
        if tensor.layout != torch.strided or tensor.is_quantized:
            why = "which uploads cannot hold: store it dense, or, if it is constant, with persistent=False"
            yield f"entry {name!r} of the model is {tensor.layout} with {tensor.dtype}, {why}"
    ranges = sorted((*_find_memory(t), name) for name, t in parameters.items() if t.numel() and not t.is_meta)
    for (_, end, one), (start, _, other) in pairwise(ranges):
        if start <= end:
            why = "but would be trained separately: use one parameter in both places"
            yield f"entries {one!r} and {other!r} of the model share memory, {why}"


def _find_memory(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first and last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()


def _list_unsupported_layers(module: nn.Module) -> Iterator[str]:
    registered = {id(item) for item in (*module.modules(), *module.parameters(), *module.buffers())}
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            yield f"layer {name!r} of the model is compiled by torch.jit, which hides its layers: pass the original"
        if any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()):
            use = "torch.nn.utils.parametrizations.spectral_norm"
            yield f"layer {name!r} of the model uses torch's old spectral_norm, whose vectors have no mean: use {use}"
        for attribute in sorted(vars(layer).keys() - {"_parameters", "_buffers", "_modules"}):
            for hidden in _list_trainable(vars(layer)[attribute]):
                if id(hidden) not in registered:
                    yield (
                        f"layer {name!r} of the model holds a {type(hidden).__name__} in its attribute {attribute!r}, "
                        "where torch does not find it to train, send or export it: register it (nn.ModuleList, "
                        "nn.ModuleDict, nn.ParameterList, self.register_buffer)"
                    )


def _list_trainable(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[nn.Module | Tensor]:
    """Yield modules with entries and trainable tensors in an attribute, searching nested containers."""
    if isinstance(value, nn.Module):
        if any(True for _ in (*value.parameters(), *value.buffers())):
            yield value
    elif isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield value
    elif isinstance(value, Mapping | list | tuple | set) and id(value) not in seen:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _list_trainable(item, seen | {id(value)})


def select_entries(method: Method, choose: Callable[[Method], object], select: Callable[[], Names]) -> Names:
    """Return ``select()``; a :class:`UsageError` names the components of a composition that made the choice.

    ``choose``: a function of a method that returns that choice.
    """
    try:
        return select()
    except UsageError as error:
        sources, replacing = method.name_sources(choose, ""), method.norm_replacers
        if replacing and "matches no entry" in str(error) and str(error).startswith(("batch_norm", "norm_statistics")):
            why = f"{sources} needs BatchNorm, which {replacing} replaces: remove one of the two"
            raise UsageError(f"method {method.label!r}: {why}") from error
        if sources and len(method.components) > 1:
            raise UsageError(f"method {method.label!r}: {sources}: {{}}", error) from error
        raise


def check_task(method: Method, task: Task) -> None:
    """Raise :class:`UsageError` if a rule needs exactly one class per sample and the data's task differs."""
    for rule in method.rules if not isinstance(task, Classification) else ():
        if rule.needs_classes:
            why = (
                f"so each sample must have one class, but the data's task is {task}: remove {method.name_source(rule)}"
            )
            raise UsageError(f"method {method.label!r}: {rule.needs_classes}, {why}")


def check_client_count(method: Method, clients: int) -> None:
    """Raise :class:`UsageError` if ``clients`` participants per round are too few for a rule."""
    for rule in method.rules:
        if clients < rule.min_clients:
            why = f"needs at least {rule.min_clients} clients in a round, but {clients} take part"
            raise UsageError(f"{rule!r} {why}: let more take part, or tolerate fewer faulty clients")


def check_batch_size(plan: Plan) -> None:
    """Raise :class:`UsageError` if batches have one sample, from which the plan cannot train."""
    why = ""
    if isinstance(plan.loss, Loss) and plan.loss.comparing:
        why = f"{plan.loss} compares the samples of a batch, and a single sample has no gradient"
    elif plan.smallest_batch > 1:
        why = "BatchNorm in this model cannot compute a variance over one sample"
    if why and plan.work.batch_size == 1:
        raise UsageError(f"batch_size=1, but {why}: use a batch size of 2 or more, say 32").about("batch_size")


def check_composition(plan: Plan) -> None:
    """Raise :class:`UsageError` if components of the method conflict; called before rules are bound."""
    _refuse(plan, _list_repeated(plan), _list_second_models(plan), _list_unshared(plan), _list_conflicting_folds(plan))


def check_plan(plan: Plan) -> None:
    """Raise :class:`UsageError` if declarations of rules are wrong, or conflict with each other or with the plan."""
    for index in range(len(plan.rules)):
        _refuse(plan, _list_wrong_declarations(plan, index), _list_wrong_sets(plan, index))
    checks = _list_changed_steps, _list_uploads_beside, _list_unread, _list_changed_rows, _list_mixed_samples
    _refuse(plan, *(check(plan) for check in checks))


def _refuse(plan: Plan, *refusals: Iterator[str]) -> None:
    for why in chain(*refusals):
        raise UsageError(f"method {plan.label!r}: {why}")


def _list_repeated(plan: Plan) -> Iterator[str]:
    kinds = [type(rule) for rule in plan.method.rules]
    for kind in {kind for kind in kinds if kinds.count(kind) > 1}:
        sources = plan.method.list_choosers(kind) or (kind.__name__,)
        twice = f"has {sources[0]} twice"
        yield (f"{' and '.join(sources)} both add the rule {kind.__name__}" if len({*sources}) > 1 else twice) + REMOVE


def _list_second_models(plan: Plan) -> Iterator[str]:
    method = plan.method
    personal = [method.name_source(rule) for rule in method.rules if rule.personalizes]
    personal += [_name_tuning(method)] if method.finetune else []
    if len(personal) > 1:
        yield f"{' and '.join(personal)} both define the client's model{REMOVE}"
    if method.pooled and personal:
        pooling = method.name_sources(lambda method: method.pooled, "it")
        yield f"{pooling} pools all data, which leaves no clients whose models {personal[0]} personalizes{REMOVE}"


def _name_tuning(method: Method) -> str:
    return method.name_sources(lambda method: method.finetune, "fine-tuning for use")


def _list_unshared(plan: Plan) -> Iterator[str]:
    """Yield the components that use shared entries, or replace their aggregation, where clients share none."""
    method = plan.method
    uses = [(rule.needs_shared, method.name_source(rule)) for rule in method.rules if rule.needs_shared]
    if method.finetune:
        uses.append(("fine-tuning for use starts from what clients share", _name_tuning(method)))
    if method.pooled:
        why, other = "all data are in one place", method.name_sources(lambda method: method.pooled, "")
    else:
        why = "clients share no trained entries"
        other = method.name_sources(lambda method: (method.scope, method.trains), "")
    for use, source in uses if method.pooled or not plan.trained & plan.loaded else ():
        yield f"{use}, but {why}: remove {' or '.join(dict.fromkeys(filter(None, (source, other))))}"
    for rule in filter(None, (method.aggregator, method.stepper)):
        if method.pooled or not plan.sent & plan.trained:
            parts = " or ".join(filter(None, (source := method.name_source(rule), other)))
            yield f"{source} replaces the aggregation, but there is nothing to aggregate: {why}: remove {parts}"


def _list_conflicting_folds(plan: Plan) -> Iterator[str]:
    method = plan.method
    combining = [rule for rule in method.rules if type(rule).combine_samples is not Rule.combine_samples]
    for rules, what in ((combining, "combine the gradients of samples"), ([r for r in method.rules if r.mixes], "mix")):
        if len(rules) > 1:
            yield f"{' and '.join(map(method.name_source, rules))} both {what}{REMOVE}"
    for rule in method.rules:
        source = method.name_source(rule)
        if rule.mixes and method.stepper:
            why = f"but {method.name_source(method.stepper)} updates one global model"
            yield f"{source} sends each client its own mix of uploads, {why}{REMOVE}"
        if rule.needs_mean and method.aggregator:
            yield f"{rule.needs_mean}, but {method.name_source(method.aggregator)} does not average{REMOVE}"


def _list_wrong_declarations(plan: Plan, index: int) -> Iterator[str]:
    """Yield what is wrong in the declarations of a rule, or does not fit the plan."""
    bound, source = plan.rules[index], plan.rules[index].rule.source_method
    device = next(iter(plan.initial.values())).device
    names = Counter(chain(bound.model, bound.params, bound.buffers, bound.memory))
    kept = chain(bound.on_client.items(), bound.server.items(), bound.kept.items())
    misplaced = {name for name, tensor in kept if getattr(tensor, "device", None) != device}
    trained = {**pick(bound.model, plan.trained), **bound.params}
    converted = {name for name, tensor in trained.items() if getattr(tensor, "dtype", None) != plan.dtype}
    for wrong, why in (
        ({name for name, count in names.items() if count > 1}, "{!r} twice: rename one"),
        (plan.initial.keys() & {*bound.names.values()}, "its own entry {!r}, a name of the model: rename it"),
        (bound.limits.keys() - bound.params.keys(), "limits of {!r}, which is not in params: correct its bind()"),
        (bound.model.keys() - plan.initial.keys(), "a network with {!r}, which the model lacks: correct its bind()"),
        (bound.growing.keys() - bound.server.keys(), "{!r} as growing, which is not in server: correct its bind()"),
        (misplaced, f"{{!r}}, which is no tensor on {device}, as the model's: make it from one (new_zeros)"),
        (converted, f"{{!r}}, which is not {plan.dtype}, as the model: make it from an entry (new_zeros)"),
    ):
        if wrong:
            yield f"{source} declares {why.format(min(wrong))}"
    if len({phase.when == "during" for phase in bound.phases if phase.trains == "own"}) > 1:
        yield f"{source} trains its own parameters both in the model's steps and in separate passes: choose one"
    for phase in bound.phases:
        if phase.trains == "own" and not plan.own_trained[index]:
            yield f"{source} has a phase for its own parameters but declares none: remove the phase"
        if phase.trains != "own" and not phase.trains & plan.trained:
            name, fixing = min(phase.trains, default="nothing"), plan.method.name_sources(lambda method: method.trains)
            yield f"{source} has a phase that trains {name!r}, which {fixing} leaves untrained{REMOVE}, or other layers"


def _list_wrong_sets(plan: Plan, index: int) -> Iterator[str]:
    """Yield entries that the server computes, and clients do not load or a rule copies."""
    source, sets = plan.rules[index].rule.source_method, plan.rules[index].sets
    for name in sorted(sets - plan.loaded):
        where = "pooling leaves no client" if plan.method.pooled else f"{plan.keepers[name]} keeps it there"
        yield f"the server computes {name!r} from what clients measure for {source}, but {where}{REMOVE}"
    for other in plan.rules:
        if sets & other.model.keys():
            why = f"but the server computes {min(sets)!r} of {source} only for the shared model"
            yield f"{other.rule.source_method} keeps another model on each client, {why}{REMOVE}"


def _list_changed_steps(plan: Plan) -> Iterator[str]:
    """Yield what keeps a step from moving every parameter along its gradient, for claims about such steps."""
    optimizer = plan.optimizer
    for part in (rule for rule in plan.method.rules if rule.needs_plain_steps):
        allowed = "SGD whose momentum is reset each round" if part.allows_momentum else "SGD without momentum"
        fix = "with keep=False" if part.allows_momentum else "with momentum=0"
        if not isinstance(optimizer, SGD) or (optimizer.momentum and (optimizer.keep or not part.allows_momentum)):
            yield f"{part.needs_plain_steps} holds for {allowed}, not for {optimizer}: use sgd {fix}, or another method"
        for bound in plan.rules:
            starts_elsewhere = bound.rule.personalizes == "start" and not bound.rule.buffers_alone
            if starts_elsewhere or any(phase.trains != "own" for phase in bound.phases):
                which = "only if every step updates every parameter, starting from the loaded model"
                yield f"{part.needs_plain_steps} holds {which}, which {bound.rule.source_method} changes{REMOVE}"


def _list_uploads_beside(plan: Plan) -> Iterator[str]:
    """Yield what the server reads of single clients beside the entries that an aggregation protects."""
    state = [entry for entry in plan.entries if entry.kind == "state" and entry.name in plan.sent]
    for bound in plan.rules:
        why, source = bound.rule.needs_entries_only, bound.rule.source_method
        for entry in state if why else ():
            fix = "register it with persistent=False, or keep it on clients"
            yield f"the server would take {entry.name!r}, a buffer of a {entry.layer}, from one client: {fix}"
        for other in plan.rules if why else ():
            rule, sent = other.rule.source_method, ", ".join(sorted(other.sends))
            if sent:
                yield f"{rule} sends more than the entries that {why} ({sent}): remove one of {rule} and {source}"
            if other.entries:
                beside = f"computes from the entries of single clients, beside those that {why}"
                yield f"{rule} {beside}: remove one of {rule} and {source}"


def _list_unread(plan: Plan) -> Iterator[str]:
    """Yield components that keep entries on clients that nothing changes, or that no model in use reads."""
    for component in plan.method.components:
        before, after = component.before.scope.load, component.after.scope.load
        kept = [entry for entry in plan.entries if before(entry) and not after(entry)]
        if kept and not any(entry.is_buffer or entry.name in plan.trained for entry in kept):
            fixing = plan.method.name_sources(lambda method: method.trains, "the model, by requires_grad=False,")
            why = f"but {fixing} leaves it untrained, so that it is equal everywhere"
            yield f"{component.name} keeps {kept[0].name!r} on clients, {why}{REMOVE}"
    kept = [entry for entry in plan.entries if entry.name in plan.personal - plan.adopted]
    for bound in plan.rules:
        reads_model = bound.rule.personalizes != "use" or plan.samples_before_work or plan.freeze_from < float("inf")
        copied = all(norm_statistics(entry) and entry.name in bound.model for entry in kept)
        if kept and not reads_model and copied:
            keeping = f"{plan.keepers[kept[0].name]} keeps {kept[0].name!r} on clients, which only evaluation reads"
            yield f"{keeping}, but {bound.rule.source_method} evaluates another network with other statistics{REMOVE}"


def _list_changed_rows(plan: Plan) -> Iterator[str]:
    """Yield rules that work on the samples themselves, where they are rows of several inputs."""
    inputs = find_inputs(plan.module)
    for index, bound in enumerate(plan.rules if inputs else ()):
        source = bound.rule.source_method
        changes = f"{source} changes the samples of a batch" if index in plan.defines("batch") else ""
        if why := bound.rule.needs_one_input or changes:
            names = name_inputs(inputs)
            yield f"{why}, and here each sample has the inputs {names}: remove {source}, or give one input"


def _list_mixed_samples(plan: Plan) -> Iterator[str]:
    """Yield reasons why a sample affects more than the gradient of its loss, if gradients of samples are combined."""
    if plan.estimator is None:
        return
    source = plan.estimator.source_method
    what, loss = f"{source} combines the gradients of single samples", plan.loss
    for layer, module in plan.module.named_modules():
        if isinstance(module, _BatchNorm | HybridBatchNorm):
            why = "a sample changes the gradients of its whole batch, and the statistics: add gn, ln, nonorm or fedwon"
            yield f"{what}, but through BatchNorm (layer {layer!r}) {why}"
    for index, bound in enumerate(plan.rules):
        for why in _list_reads_of_samples(plan, index):
            yield f"{what}, and {bound.rule.source_method} {why}{REMOVE}"
    for name in sorted(plan.traits.changing or ()):
        why = f"which {source} cannot clip sample by sample: use a model without running statistics"
        yield f"the model writes into {name!r} during training, {why}"
    if isinstance(loss, Loss) and loss.comparing:
        yield f"{what}, but {loss} compares the samples of a batch, so that one has no gradient: choose another loss"
    if isinstance(loss, Loss) and loss.function is cross_entropy and loss.weights is not None:
        why = "divides by the sum of a batch's weights, so that the weight of a single sample cancels"
        yield f"{what}, but {loss} {why}: use focal(gamma=0, weights={loss.weights!r})"


def _list_reads_of_samples(plan: Plan, index: int) -> Iterator[str]:
    """Yield what a rule computes from samples; uploads that ``reveals="update"`` follow from their gradients."""
    bound = plan.rules[index]
    yield from (f"changes the {hook}" for hook in ("loss", "batch", "outputs") if index in plan.defines(hook))
    if bound.targets:
        yield "reads the targets of all samples"
    if bound.samples_before_work:
        yield "runs the model on samples before local work"
    if beyond := [f"{send.reveals}: {name!r}" for name, send in bound.sends.items() if send.reveals != "update"]:
        yield f"sends information that does not follow from gradients ({'; '.join(beyond)})"


def check_sends(plan: Plan, index: int, sent: State) -> None:
    """Raise :class:`UsageError` unless ``sent`` equals the uploads that the rule at ``index`` declares."""
    if why := find_difference(plan.rules[index].sends, sent, "upload", "the sends of its bind()"):
        name = f"method {plan.label!r}: {plan.rules[index].rule.source_method}"
        raise UsageError(f"{name} {why}, since consent of sites, policies and differential privacy rely on them")


def check_upload(plan: Plan, shared: State, memory: Sequence[State]) -> None:
    """Raise :class:`UsageError` unless an upload consists of exactly the scope's entries and the declared sends.

    Names, shapes and dtypes must be equal, and hence sizes in bytes. ``shared``: entries of the model. ``memory``: the
    upload for each rule.
    """
    if why := find_difference(pick(plan.initial, plan.sent), shared, "upload", "the entries in its scope"):
        raise UsageError(f"method {plan.label!r} {why}")
    for index, sent in enumerate(memory):
        check_sends(plan, index, sent)


def like_sends(plan: Plan) -> State:
    """Return zero tensors in the shapes that all rules declare to send, by their names in uploads."""
    first = next(iter(plan.initial.values()))
    declared = (bound.sends.items() for bound in plan.rules)
    zeros = [{name: first.new_zeros(send.shape, dtype=send.dtype) for name, send in sends} for sends in declared]
    return join_states(plan.rule_names, zeros)


def find_difference(
    expected: Mapping[str, Send | Tensor],
    actual: Mapping[str, Tensor],
    verb: str,
    where: str = "",
    growing: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """Return how ``actual`` differs in names, shapes and types from ``expected``; empty if it does not.

    The text is a predicate with ``verb``. ``where``: the declaration of ``expected``; empty: it was received.
    ``growing``: axes by name whose lengths may differ.
    """
    fix = f": {where} must be exactly that" if where else ""
    known = "declared" if where else "received"
    for name, tensor in actual.items():
        what = f"{verb}s {name!r} of shape {tuple(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}"
        if name not in expected:
            return f"{what}{' without declaring it' if where else ', which it did not receive'}{fix}"
        like, axes = expected[name], (growing or {}).get(name, ())
        shape = tuple(tensor.shape[axis] if axis in axes else size for axis, size in enumerate(like.shape))
        if tensor.ndim != len(shape) or (tuple(tensor.shape), tensor.dtype) != (shape, like.dtype):
            return f"{what}, {known} as {tuple(like.shape)} and {str(like.dtype).removeprefix('torch.')}{fix}"
    missing = expected.keys() - actual.keys()
    return f"{known.removesuffix('d')}s {min(missing)!r} but does not {verb} it{fix}" if missing else ""
