"""Preparation: build a plan from a method and a model, once, before training starts.

In: a method, a network, the experiment's settings, and one sample. Out: a :class:`~fedshift.core.plan.Plan`, or a
refusal. Surgery turns the network into a stateless template, which is observed on the sample; entries are classified as
loaded, sent and trained; rules declare themselves; checks read the result (:mod:`fedshift.core.checks`), and a dry run
tries it (:mod:`fedshift.core.dry_run`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..nn.attributes import describe_network, kept_attributes
from ..nn.convolution import use_fast_convolutions
from ..nn.dropout import key_dropouts
from ..tasks.task import Task
from ..utils.errors import UsageError
from ..utils.random_streams import torch_stream
from ..utils.user_code import describe_error
from .buffers import list_kept, observe_entries
from .checks import REMOVE, check_batch_size, check_composition, check_network, check_plan, select_entries
from .dry_run import check_normalization, check_run, explained_errors, find_smallest_batch
from .method import Method, find_replaced
from .network import Loss, Precision, Traits
from .optimizer import SGD, Optimizer
from .plan import Plan
from .probe import make_batch, probe_network, weigh_outputs
from .rule import Declared
from .selection import Entry, entries, everything, norm_statistics
from .work import Work

Remake = Callable[[], nn.Module]
"""Makes a network another time, with the same initial weights."""
_OBSERVED: dict[Hashable, tuple[Traits, int, list[Entry]]] = {}
"""Traits, smallest batch and entries by network, so that a comparison's seeds and methods do not repeat the probe."""


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
    again: Remake | None = None,
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
    check_network(model)
    remake = again or partial(_copy, model)
    plan = _make_bare_plan(method, _make_template(method, model if again else remake()), precision)
    if sample is not None:
        plan = _observe(plan, sample, remake)
    plan = _assign_roles(method, plan)
    _refuse_unknown_settings(optimizer, method.optimizer, method)
    optimizer, work = replace(optimizer, **method.optimizer), resolve_work(method, work or Work(epochs=1), clients)
    method = method.resolve_weighting(work)
    plan = replace(plan, method=method, text=method.text, work=work, optimizer=optimizer, loss=loss, seed=seed)
    plan = _freeze(bind_rules(plan), rounds)
    check_plan(plan)
    check_batch_size(plan)
    optimizer.check(plan.params, rounds)
    if sample is not None:
        check_run(plan, sample, task, classes)
    return plan


def apply_surgery(method: Method, model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` after the method's surgery; errors name the method."""
    return change_layers(method, _copy(model))


def change_layers(method: Method, module: nn.Module) -> nn.Module:
    """Return ``module`` after the method's surgery, which changes it in place; errors name the method."""
    replacements = list(filter(find_replaced, method.surgery))
    if len(replacements) > 1:
        both = method.norm_replacers or " and ".join(map(str, replacements))
        raise UsageError(f"method {method.label!r}: {both} both replace normalization layers{REMOVE}")
    for change in method.surgery:
        try:
            module = change(module)
        except UsageError as error:
            raise UsageError(f"method {method.label!r}: {{}}", error) from error
    return module


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a user's network may raise any type
        fix = "give a function that makes it, (sample_shape, classes) -> nn.Module"
        what = f"the model {type(model).__name__} cannot be copied ({describe_error(error)})"
        raise UsageError(f"{what}: {fix}") from error


def _make_template(method: Method, network: nn.Module) -> nn.Module:
    return use_fast_convolutions(key_dropouts(change_layers(method, network)))


def _make_bare_plan(method: Method, template: nn.Module, precision: Precision) -> Plan:
    """Return a plan of FedAvg for trial runs of the network; all buffers are entries."""
    members = entries(template, hidden=True)
    tensors = dict(template.named_parameters()) | dict(template.named_buffers())
    names = [entry.name for entry in members]
    trained = _require_trained(method, {name for name in names if tensors[name].requires_grad})
    return Plan(
        label=method.label, method=Method(name=method.name, typed=method.typed, surgery=method.surgery),
        module=template, entries=members, initial={name: tensors[name].detach().clone() for name in names},
        loaded=frozenset(names), sent=frozenset(names), trained=trained, trainable=trained,
        work=Work(epochs=1), optimizer=SGD(lr=0.1), loss=weigh_outputs, smallest_batch=1, precision=precision,
    )  # fmt: skip


def _require_trained(method: Method, names: set[str] | frozenset[str]) -> frozenset[str]:
    if not names:
        raise UsageError(f"method {method.label!r} trains no parameter of the model: set requires_grad=True on some")
    return frozenset(names)


def _observe(plan: Plan, sample: Tensor, remake: Remake) -> Plan:
    """Return the plan with traits of its network, the smallest batch, and the kinds of entries that passes show."""

    def remake_template() -> nn.Module:
        return _make_template(plan.method, remake().to(sample.device))

    network = describe_network(plan.module), sample.shape, sample.dtype, plan.precision
    if network not in _OBSERVED:
        stream = torch_stream(0, "observation")
        with kept_attributes(plan.module), stream, explained_errors(plan, sample, remake):
            tried = replace(plan, traits=probe_network(plan, sample, remake_template))
            observed = observe_entries(tried, make_batch(tried, sample))
            smallest, nobody = find_smallest_batch(tried, sample), nn.Module()  # the network need not stay in memory
            _OBSERVED[network] = tried.traits, smallest, [replace(entry, owner=nobody) for entry in observed]
    traits, smallest, found = _OBSERVED[network]
    members = tuple(replace(new, owner=entry.owner) for new, entry in zip(found, plan.entries, strict=True))
    plan = replace(plan, traits=traits, smallest_batch=smallest, entries=members)
    check_normalization(plan, sample)
    return plan


def _assign_roles(method: Method, plan: Plan) -> Plan:
    """Return the plan with the roles of its entries: which clients load, adopt, send and train.

    Buffers that are not persistent are entries, on clients, if training changes them.
    """
    changing = plan.traits.changing or ()
    members = tuple(entry for entry in plan.entries if entry.kind != "hidden" or entry.name in changing)
    hidden = frozenset(entry.name for entry in members if entry.kind == "hidden")
    scope, choose = method.scope, lambda: (method.scope.load.names(members), method.scope.send.names(members))
    loaded, sent = (names - hidden for names in select_entries(method, lambda method: method.scope, choose))
    _check_scope(method, loaded, sent, {entry.name for entry in members} - hidden)
    adopted = frozenset(entry.name for entry in members if scope.begin(entry)) & sent - loaded
    kept = frozenset[str]() if method.pooled else list_kept(members, loaded)
    trained = plan.trained
    if method.trains is not everything:
        left = partial(method.trains.names, members, "left untrained")
        trained = _require_trained(method, trained & select_entries(method, lambda method: method.trains, left))
    plan = replace(
        plan, entries=members, initial={entry.name: plan.initial[entry.name] for entry in members}, sent=sent,
        loaded=loaded - kept, adopted=adopted | kept, trained=trained, norm_replacers=method.norm_replacers,
        keepers=_name_keepers(method, members, loaded - kept),
    )  # fmt: skip
    for name, parameter in plan.parameters.items():
        parameter.requires_grad_(name in trained)
    return plan


def _check_scope(method: Method, loaded: frozenset[str], sent: frozenset[str], every: set[str]) -> None:
    """Raise :class:`UsageError` if a client loads what none sends, or pooled data leave no client to keep entries."""
    if loaded - sent:
        why = "which no client sends, so that it keeps its initial value: send it too, or do not load it"
        raise UsageError(f"method {method.label!r} loads {min(loaded - sent)!r}, {why}")
    if method.pooled and loaded != every:
        keeping = method.name_sources(lambda method: method.scope, "a personal method")
        why = f"pools all data but keeps entries on clients, and pooling leaves none: use centralized without {keeping}"
        raise UsageError(f"method {method.label!r} {why}")


def _name_keepers(method: Method, members: tuple[Entry, ...], loaded: frozenset[str]) -> dict[str, str]:
    """Return the names of the method's components that keep entries on clients, by entry, for messages."""

    def name(entry: Entry) -> str:
        return method.name_sources(lambda method: (method.scope.load(entry), method.scope.send(entry)))

    return {entry.name: name(entry) for entry in members if entry.name not in loaded}


def resolve_work(method: Method, work: Work, clients: int) -> Work:
    """Return the local work of ``method``, given the experiment's ``work`` and number of ``clients``."""
    _refuse_unknown_settings(work, method.work, method)
    work = work.change(method.work)
    scaled = work.batch_size is not None and method.pooled == "scaled"
    return replace(work, batch_size=(work.batch_size or 0) * clients) if scaled else work


def _refuse_unknown_settings(settings: Work | Optimizer, changes: Mapping[str, Any], method: Method) -> None:
    known = [field.name for field in fields(settings)]
    for name in changes.keys() - known:
        why = f"which {type(settings).__name__} lacks: its fields are {', '.join(sorted(known))}"
        raise UsageError(f"method {method.label!r} sets {name}, {why}")


def bind_rules(plan: Plan) -> Plan:
    """Return ``plan`` with its method's rules bound to it; call again after the plan's entries change.

    Raises :class:`UsageError` if a rule refuses the plan.
    """
    plan, rules = replace(plan, rules=()), []
    check_composition(plan)
    for rule in plan.method.rules:
        source = plan.method.name_source(rule)
        try:
            bound = rule.named(source).bind(plan)
        except UsageError as error:
            raise UsageError(f"method {plan.label!r}: {error}") from error
        if not isinstance(bound, Declared):
            what = f"{type(rule).__name__}.bind() returned a {type(bound).__name__}"
            raise UsageError(f"method {plan.label!r}: {what}: return fedshift.Declared(self, ...)")
        rules.append(replace(bound, rule=bound.rule.named(source)))
    names = [type(bound.rule).__name__.lower() for bound in rules]
    unique = [name if names.count(name) == 1 else f"{number}.{name}" for number, name in enumerate(names)]
    return replace(plan, rules=tuple(replace(bound, name=name) for bound, name in zip(rules, unique, strict=True)))


def _freeze(plan: Plan, rounds: int) -> Plan:
    """Return the plan with the first round of frozen statistics, of ``rounds``."""
    freeze = plan.method.freeze
    if freeze is None:
        return plan
    select_entries(plan.method, lambda method: method.freeze, lambda: norm_statistics.names(plan.entries))
    return replace(plan, freeze_from=freeze if isinstance(freeze, int) else int(freeze * rounds + 0.5))
