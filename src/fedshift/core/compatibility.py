"""Compatibility checks of the parts of a method, before training starts.

Checks read declarations: the needs of a part (:class:`~fedshift.core.requirements.Requirements`) and the effects of a
rule (:class:`~fedshift.core.declarations.Declared`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.nn.modules.batchnorm import _BatchNorm

from ..nn.hybrid_batch_norm import HybridBatchNorm
from ..nn.several_inputs import find_inputs, name_inputs
from ..tasks import Classification, Task
from ..utils.errors import UsageError, require
from .loss import CrossEntropy, Loss
from .method import Method
from .optimizer import SGD
from .plan import Plan
from .requirements import Requirements
from .rule import Declared
from .selection import norm_statistics

NAMED = 5
"""Maximum number of names listed in a message."""
Names = TypeVar("Names")


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


def check_rules(plan: Plan) -> None:
    """Raise :class:`UsageError` if rules conflict with each other or with the plan; called before they are bound."""
    method, name = plan.method, f"method {plan.method.label!r}"
    for rule in method.rules:
        _check_shared(plan, rule.requires, method.name_source(rule))
    kinds = [type(rule) for rule in method.rules]
    for kind in {kind for kind in kinds if kinds.count(kind) > 1}:
        sources = method.list_choosers(kind) or (kind.__name__,)
        both = f": {' and '.join(sources)} both add the rule {kind.__name__}"
        raise UsageError(f"{name}{both if len({*sources}) > 1 else f' has {sources[0]} twice'}: remove one of the two")
    tuning = method.name_sources(lambda each: each.finetune, "fine-tuning for use")
    if method.finetune:
        _check_shared(plan, Requirements(shared_entries="fine-tuning for use starts from what clients share"), tuning)
    personalizing = [method.name_source(rule) for rule in method.rules if rule.personalizes]
    personalizing += [tuning] if method.finetune else []
    if len(personalizing) > 1:
        raise UsageError(f"{name}: {' and '.join(personalizing)} both define the client's model: choose one of the two")
    if method.pooled and personalizing:
        pooling = method.name_sources(lambda each: each.pooled, "it")
        raise UsageError(
            f"{name}: {pooling} pools all data but personalizes models ({personalizing[0]}), and pooling leaves no "
            f"clients: use {pooling} without {personalizing[0]}"
        )


def _check_kept(plan: Plan) -> None:
    """Raise :class:`UsageError` if a component keeps entries on clients that nothing changes or nothing reads there."""
    method = plan.method
    for component in method.components:
        before, after = component.before.scope.load, component.after.scope.load
        kept = [entry for entry in plan.entries if before(entry) and not after(entry)]
        if kept and not any(entry.is_buffer or entry.name in plan.trained for entry in kept):
            fixing = method.name_sources(lambda each: each.trains, "the model, by requires_grad=False,")
            raise UsageError(
                f"method {method.label!r}: {component.name} keeps {kept[0].name!r} on clients, but {fixing} leaves it "
                "untrained, so that it is equal everywhere: remove one of the two"
            )


def check_compatibility(plan: Plan) -> None:
    """Raise :class:`UsageError` if parts of the method conflict with each other or do not fit the plan."""
    method, name = plan.method, f"method {plan.method.label!r}"
    for index, bound in enumerate(plan.rules):
        _check_needs(plan, bound.rule.requires, bound.rule.source_method)
        _check_declarations(plan, index)
        _check_unread_statistics(plan, bound)
    if plan.work.batch_size == 1 and isinstance(plan.loss, Loss) and plan.loss.comparing:
        raise UsageError(
            f"batch_size=1, but {plan.loss} compares the samples of a batch, and a single sample has no gradient: use "
            "a batch size of 2 or more, say 32"
        ).about("batch_size")
    if plan.estimator:
        _check_separate_samples(plan, plan.estimator.source_method)
    if inputs := find_inputs(plan.module):
        _check_several_inputs(plan, name_inputs(inputs))
    changing = [method.name_source(rule) for rule in (method.aggregator, method.stepper) if rule]
    if changing and (method.pooled or not plan.sent & plan.trained):
        why, other = _explain_unshared(plan)
        why = why if method.pooled else "clients send nothing that they train"
        raise UsageError(
            f"{name}: {changing[0]} replaces the aggregation, but there is nothing to aggregate: {why}: remove "
            f"{changing[0]}{other and f' or {other}'}"
        )
    if plan.mixes and method.stepper:
        raise UsageError(
            f"{name}: {changing[0]} sends each client its own mix of uploads, but a server optimizer updates one "
            f"global model ({changing[-1]}): remove one of the two"
        )
    _check_kept(plan)


def _check_unread_statistics(plan: Plan, bound: Declared) -> None:
    """Raise :class:`UsageError` if clients keep only statistics, and a rule's network has its own for evaluation."""
    reads_model = bound.rule.personalizes != "use" or plan.samples_before_work or plan.freeze_from < float("inf")
    kept = [entry for entry in plan.entries if entry.name in plan.personal - plan.adopted]
    if kept and not reads_model and all(norm_statistics(entry) and entry.name in bound.model for entry in kept):
        raise UsageError(
            f"method {plan.method.label!r}: {plan.keepers[kept[0].name]} keeps {kept[0].name!r} on clients, which "
            f"only evaluation reads, but {bound.rule.source_method} evaluates another network with other statistics: "
            "remove one of the two"
        )


def check_task(method: Method, task: Task) -> None:
    """Raise :class:`UsageError` if a rule needs exactly one class per sample and the data's task differs."""
    for rule in method.rules:
        if rule.requires.classes and not isinstance(task, Classification):
            raise UsageError(
                f"method {method.label!r}: {rule.requires.classes}, so each sample must have one class, "
                f"but the data's task is {task}: remove {method.name_source(rule)}"
            )


def check_client_count(method: Method, clients: int) -> None:
    """Raise :class:`UsageError` if ``clients`` participants per round are too few for a rule."""
    for rule in method.rules:
        if clients < rule.min_clients:
            raise UsageError(
                f"{rule!r} needs at least {rule.min_clients} clients in a round, but {clients} take part: let more "
                "take part, or tolerate fewer faulty clients"
            )


def _explain_unshared(plan: Plan) -> tuple[str, str]:
    """Return why clients share no trained entries, and the components that are the reason; empty: none is."""
    method = plan.method
    if method.pooled:
        return "all data are in one place", method.name_sources(lambda each: each.pooled, "")
    return "clients share no trained entries", method.name_sources(lambda each: (each.scope, each.trains), "")


def _check_shared(plan: Plan, needs: Requirements, source: str) -> None:
    if needs.shared_entries and (plan.method.pooled or not plan.trained & plan.loaded):
        why, other = _explain_unshared(plan)
        raise UsageError(
            f"method {plan.method.label!r}: {needs.shared_entries}, but {why}: remove {source}"
            f"{other and other != source and f' or {other}'}"
        )


def _check_declarations(plan: Plan, index: int) -> None:
    """Raise :class:`UsageError` if a rule's declarations are inconsistent or do not fit the plan."""
    bound, name = plan.rules[index], f"method {plan.method.label!r}"
    source, own = bound.rule.source_method, bound
    entries = [entry for part in (own.model, own.params, own.buffers, own.memory) for entry in part]
    if len(own.on_client) < len(entries):
        twice = min(entry for entry in entries if entries.count(entry) > 1)
        raise UsageError(f"{name}: {source} declares the entry {twice!r} twice: rename one")
    if taken := plan.initial.keys() & set(bound.names.values()):
        raise UsageError(f"{name}: {source} trains its own entry under {min(taken)!r}, a name of the model: rename it")
    for what, names, known, allowed in (
        ("limits", own.limits.keys(), own.params.keys(), "Declared.params"),
        ("another network's entry", own.model.keys(), plan.initial.keys(), "the model's entries"),
        ("growing axes of", own.growing.keys(), own.server.keys(), "Declared.server"),
    ):
        if wrong := names - known:
            raise UsageError(
                f"{name}: {source} declares {what} {min(wrong)!r}, which is not among {allowed} "
                f"({', '.join(sorted(known)[:NAMED]) or 'none'}): correct its bind()"
            )
    if bound.has_separate_passes and any(phase.trains == "own" and phase.when == "during" for phase in bound.phases):
        raise UsageError(
            f"{name}: {source} trains its own parameters both in the model's steps and in separate passes: choose one"
        )
    for phase in bound.phases:
        if phase.trains == "own":
            trains = bool(own.model.keys() & plan.trained or own.params)
            require(trains, f"{name}: {source} has a phase for its own parameters but declares none: remove the phase")
        elif not phase.trains & plan.trained:
            raise UsageError(
                f"{name}: {source} has a phase that trains {min(phase.trains, default='nothing')!r}, which "
                f"{plan.method.name_sources(lambda each: each.trains)} leaves untrained: remove one of the two, or "
                "choose other layers"
            )
    if bound.sets:
        _check_sets(plan, bound)


def _check_needs(plan: Plan, needs: Requirements, source: str) -> None:
    name = f"method {plan.method.label!r}"
    if needs.plain_steps:
        _check_plain_steps(plan, needs.plain_steps, momentum=needs.momentum)
    if needs.mean and plan.method.aggregator:
        other = plan.method.name_source(plan.method.aggregator)
        raise UsageError(f"{name}: {needs.mean}, but {other} does not average: remove one of the two")
    state = [entry for entry in plan.entries if entry.kind == "state" and entry.name in plan.sent]
    if needs.entries_only and state:
        raise UsageError(
            f"{name}: training changes the buffer {state[0].name!r} of a {state[0].layer}, and the server would "
            "take its values from one client: register it with persistent=False, or keep it on clients"
        )
    for bound in plan.rules if needs.entries_only else ():
        rule, sent = bound.rule.source_method, ", ".join(sorted(bound.sends))
        more = f"sends more than the entries that {needs.entries_only} ({sent})"
        beside = f"computes from the entries of single clients, beside those that {needs.entries_only}"
        if rule != source and (sent or bound.entries):
            raise UsageError(f"{name}: {rule} {more if sent else beside}: remove one of {rule} and {source}")


def _check_several_inputs(plan: Plan, names: str) -> None:
    """Raise :class:`UsageError` if a rule works on the samples themselves, which are rows of several inputs."""
    for index, bound in enumerate(plan.rules):
        if bound.rule.requires.one_input or index in plan.defines("batch"):
            why = bound.rule.requires.one_input or f"{bound.rule.source_method} changes the samples of a batch"
            raise UsageError(
                f"method {plan.method.label!r}: {why}, and here each sample has the inputs {names}: remove "
                f"{bound.rule.source_method}, or give one input"
            )


def _check_sets(plan: Plan, bound: Declared) -> None:
    """Raise :class:`UsageError` unless clients load the entries that the server computes, and no rule copies them."""
    name = f"method {plan.method.label!r}"
    if kept := bound.sets - plan.loaded:
        keeping = f"{plan.keepers[min(kept)]} keeps it there"
        where = "pooling leaves no client to measure" if plan.method.pooled else keeping
        raise UsageError(
            f"{name}: the server computes {min(kept)!r} from what clients measure for {bound.rule.source_method}, but "
            f"{where}: remove one of the two"
        )
    for other in plan.rules:
        if bound.sets & other.model.keys():
            raise UsageError(
                f"{name}: {other.rule.source_method} keeps another model on each client, but the server computes "
                f"{min(bound.sets)!r} of {bound.rule.source_method} only for the shared model: remove one of the two"
            )


def _check_plain_steps(plan: Plan, what: str, *, momentum: bool) -> None:
    """Raise :class:`UsageError` unless each local step moves every parameter along its gradient.

    ``momentum``: whether momentum within the round is allowed.
    """
    optimizer = plan.optimizer
    if not isinstance(optimizer, SGD) or (optimizer.momentum and (optimizer.keep or not momentum)):
        which = "SGD whose momentum is reset each round" if momentum else "SGD without momentum"
        fix = "sgd, with keep=False" if momentum else "sgd with momentum=0"
        raise UsageError(f"{what} holds for {which}, not for {optimizer}: use {fix}, or another method")
    for bound in plan.rules:
        starts_elsewhere = bound.rule.personalizes == "start" and not bound.rule.buffers_alone
        if starts_elsewhere or any(phase.trains != "own" for phase in bound.phases):
            raise UsageError(
                f"method {plan.method.label!r}: {what} holds only if every step updates every parameter, starting from "
                f"the loaded model, which {bound.rule.source_method} changes: remove one of the two"
            )


def _check_separate_samples(plan: Plan, source: str) -> None:
    """Raise :class:`UsageError` unless a sample affects only the gradient of its own loss.

    Uploads of rules that declare ``reveals="update"`` then follow from the combined gradients.
    """
    name, what = f"method {plan.method.label!r}", f"{source} combines the gradients of single samples"
    for layer, module in plan.module.named_modules():
        if isinstance(module, _BatchNorm | HybridBatchNorm):
            raise UsageError(
                f"{name}: {what}, but through BatchNorm (layer {layer!r}) a sample changes the gradients of its whole "
                "batch, and the statistics: add gn, ln, nonorm or fedwon"
            )
    for index, bound in enumerate(plan.rules):
        beyond = [f"{send.reveals}: {entry!r}" for entry, send in bound.sends.items() if send.reveals != "update"]
        reads = {
            "changes the loss": index in plan.defines("loss"),
            "changes the batch": index in plan.defines("batch"),
            "changes the outputs": index in plan.defines("outputs"),
            "reads the targets of all samples": bound.targets,
            "runs the model on samples before local work": bound.samples_before_work,
            f"sends information that does not follow from gradients ({'; '.join(beyond)})": beyond,
        }
        if why := next((text for text, true in reads.items() if true), ""):
            raise UsageError(f"{name}: {what}, and {bound.rule.source_method} {why}: remove one of the two")
    if plan.traits.changing:
        raise UsageError(
            f"{name}: the model writes into {min(plan.traits.changing)!r} during training, which "
            f"{source} cannot clip sample by sample: use a model without running statistics"
        )
    if isinstance(plan.loss, Loss) and plan.loss.comparing:
        raise UsageError(
            f"{name}: {what}, but {plan.loss} compares the samples of a batch, and a single sample has no gradient: "
            "choose another loss"
        )
    if isinstance(plan.loss, CrossEntropy) and plan.loss.weights is not None:
        raise UsageError(
            f"{name}: {what}, but {plan.loss} divides by the sum of a batch's weights, so that the weight of a single "
            f"sample cancels: use focal(gamma=0, weights={plan.loss.weights!r})"
        )
