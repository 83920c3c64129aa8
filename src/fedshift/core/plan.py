"""Plans: a method resolved against one model, once and before anything starts.

``prepare`` makes a stateless template of the model, names its entries, decides which are loaded, sent and trained, and
tries the template on one sample; whatever does not fit is refused here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..base.errors import UsageError
from ..base.state import State, clone, pick, prefixed
from ..nn.dropout import dropout_key, key_dropouts
from .aggregate import average
from .method import Method
from .optimizer import SGD, Optimizer
from .rule import Rule
from .select import Entry, entries, norm_statistics
from .work import Work

Loss = Callable[[Tensor, Tensor], Tensor]
Settings = TypeVar("Settings", Work, Optimizer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A method resolved against one model: which entries do what. Made by :func:`prepare`.

    ``module`` is a stateless template, after surgery; ``initial`` the state that server and clients start from;
    ``loaded``, ``sent`` and ``trained`` are sets of entry names; ``own`` and ``own_trained`` what the rules add on each
    client, by prefixed name; ``freeze_from`` the round (from 0) from which statistics are frozen; ``smallest_batch`` is
    2 where the model cannot train on one sample.
    """

    method: Method
    module: nn.Module
    entries: tuple[Entry, ...]
    initial: State
    loaded: frozenset[str]
    sent: frozenset[str]
    trained: frozenset[str]
    own: State
    own_trained: frozenset[str]
    freeze_from: float
    work: Work
    optimizer: Optimizer
    loss: Loss
    smallest_batch: int

    @property
    def personal(self) -> frozenset[str]:
        """Entries that a client keeps from round to round instead of loading them."""
        return frozenset(self.initial) - self.loaded

    @property
    def has_global(self) -> bool:
        """Whether the server holds a whole model (FedBN's does not)."""
        return self.sent == frozenset(self.initial)

    @property
    def personalizes(self) -> bool:
        """Whether clients use models of their own, so that one that never trained has none."""
        return bool(self.personal) or any(rule.personalizes for rule in self.method.rules)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the model, in which it wants its inputs."""
        return next((t.dtype for t in self.initial.values() if t.is_floating_point()), torch.float32)

    def require_shared(self, purpose: str) -> None:
        """Raise :class:`UsageError` where clients load no parameter that is trained."""
        if self.method.pooled or not self.trained & self.loaded:
            where = "with all data in one place" if self.method.pooled else "here"
            raise UsageError(f"method {self.method.name!r}: {purpose}, of which there is none {where}: leave it out")

    def require_once(self, rule: Rule) -> None:
        """Raise :class:`UsageError` where the method has another rule of the same kind."""
        if sum(type(other) is type(rule) for other in self.method.rules) > 1:
            raise UsageError(f"method {self.method.name!r} has {type(rule).__name__} twice: leave one of the two out")

    def require_plain_path(self, what: str) -> None:
        """Raise :class:`UsageError` unless each local step moves every parameter along its gradient."""
        if not isinstance(self.optimizer, SGD) or self.optimizer.momentum:
            raise UsageError(
                f"{what} holds for SGD without momentum, not for {self.optimizer}: use sgd with "
                "momentum=0, or another method"
            )
        for rule in self.method.rules:
            if type(rule).start is not Rule.start or type(rule).active is not Rule.active:
                raise UsageError(
                    f"method {self.method.name!r}: {what} holds where every step moves every parameter from what was "
                    f"loaded, which {type(rule).__name__} changes: leave one of the two out"
                )

    def rule_memory(self, index: int) -> str:
        """Prefix under which the rule at ``index`` keeps its memories, so that chained rules never meet."""
        return f"{index}.{type(self.method.rules[index]).__name__.lower()}"


def operate(method: Method, model: nn.Module) -> nn.Module:
    """A copy of ``model`` after the method's surgery."""
    module = copy.deepcopy(model)
    fates = [change for change in method.surgery if getattr(change, "decides_normalization", False)]
    if len(fates) > 1:
        both = " and ".join(map(repr, fates))
        raise UsageError(
            f"method {method.name!r}: {both} both decide what becomes of normalization: leave one of the two out"
        )
    for change in method.surgery:
        module = change(module)
    return module


def prepare(
    method: Method,
    model: nn.Module,
    *,
    work: Work | None = None,
    optimizer: Optimizer | None = None,
    loss: Loss = nn.functional.cross_entropy,
    sample: Tensor | None = None,
    rounds: int = 1,
    clients: int = 1,
) -> Plan:
    """Resolve ``method`` against ``model``.

    ``loss(outputs, labels)`` is the mean over a batch. ``sample``: inputs ``[1, ...]`` of one sample, with which the
    model is tried once. ``work`` and ``optimizer`` are the experiment's, of which a method may change fields;
    ``rounds``: how many there will be; ``clients``: how many train in all. Surgery that draws weights uses torch's
    generator. Raises :class:`UsageError` where the scope matches nothing, loads what nobody sends, parts of the method
    do not go together, or the model holds what cannot travel or refuses the sample.
    """
    if optimizer is None:
        raise UsageError(f"method {method.name!r} has no optimizer: pass one, for example SGD(lr=0.01)")
    _refuse_unsupported(model)
    template = key_dropouts(operate(method, model))
    found = entries(template)
    tensors = dict(template.named_parameters()) | dict(template.named_buffers())
    initial = {entry.name: tensors[entry.name].detach().clone() for entry in found}
    loaded, sent = method.scope.load.names(found), method.scope.send.names(found)
    if loaded - sent:
        raise UsageError(
            f"method {method.name!r} loads {min(loaded - sent)!r}, which no client sends: "
            "the server would hand out its first value for ever; send it too, or do not load it"
        )
    if method.pooled and loaded != frozenset(initial):
        raise UsageError(
            f"method {method.name!r} pools all data but keeps entries on clients, of which pooling leaves none: "
            "use centralized without a personal method"
        )
    rules = tuple(rule.bind(found) for rule in method.rules)
    trained = frozenset(name for name in initial if tensors[name].requires_grad)
    for rule in rules:
        trained = rule.trainable(trained)
    if not trained:
        raise UsageError(f"method {method.name!r} trains no parameter of the model: leave some requires_grad=True")
    plan = Plan(
        method=replace(method, rules=rules), module=template, entries=found, initial=initial, loaded=loaded, sent=sent,
        trained=trained, own={}, own_trained=frozenset(), freeze_from=float("inf"),
        work=_work(method, work or Work(epochs=1), clients),
        optimizer=_changed(optimizer, method.optimizer, method),
        loss=loss, smallest_batch=1,
    )  # fmt: skip
    plan = _with_own(plan)
    if method.freeze:
        norm_statistics.names(found)
        plan = replace(plan, freeze_from=method.freeze.rounds(rounds))
    _check(plan)
    plan = replace(plan, smallest_batch=_smallest_batch(plan, sample)) if sample is not None else plan
    if plan.work.batch_size is not None and plan.work.batch_size < plan.smallest_batch:
        raise UsageError(
            "batch_size=1, but batch normalization in this model has no variance over one sample: use a batch size of "
            "2 or more, or a model without BatchNorm"
        )
    return plan


def _work(method: Method, work: Work, clients: int) -> Work:
    work = _changed(work, method.work, method)
    if method.pooled == "scaled" and work.batch_size is not None:
        return replace(work, batch_size=work.batch_size * clients)
    return work


def _changed(settings: Settings, changes: Mapping[str, Any], method: Method) -> Settings:
    known = {each.name for each in fields(settings)}
    for name in changes:
        if name not in known:
            raise UsageError(
                f"method {method.name!r} sets {name}, which {type(settings).__name__} has not: it has "
                f"{', '.join(sorted(known))}"
            )
    return replace(settings, **changes)


def _with_own(plan: Plan) -> Plan:
    params, rest = pick(plan.initial, plan.trained), pick(plan.initial, frozenset(plan.initial) - plan.trained)
    own: State = {}
    trained: frozenset[str] = frozenset()
    for index, rule in enumerate(plan.method.rules):
        first, other = (prefixed(plan.rule_memory(index), part) for part in rule.own(params, rest))
        own, trained = {**own, **first, **other}, trained | first.keys()
    return replace(plan, own=own, own_trained=trained)


def _check(plan: Plan) -> None:
    """Refuse parts of a method that do not go together."""
    method = plan.method
    for rule in method.rules:
        rule.check(plan)
    personalizing = [type(rule).__name__ for rule in method.rules if rule.personalizes]
    if len(personalizing) > 1:
        raise UsageError(
            f"method {method.name!r}: {' and '.join(personalizing)} both make the client's model: choose one of the two"
        )
    if method.pooled and personalizing:
        raise UsageError(
            f"method {method.name!r} pools all data but makes models of clients, of which pooling leaves none: "
            "use centralized without a personal method"
        )
    nothing_to_fold = not plan.sent & plan.trained or method.pooled
    if nothing_to_fold and (method.server is not None or method.aggregate is not average):
        raise UsageError(
            f"method {method.name!r} folds uploads in a way of its own, but there is nothing to fold: "
            f"{'all data are in one place' if method.pooled else 'clients send nothing that they train'}; "
            "use it without that part"
        )


def _refuse_unsupported(module: nn.Module) -> None:
    """Refuse by name what cannot be averaged, copied or called as a function."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"entry {name!r} of the model has no shape yet (a lazy layer): run one batch through the model first"
            )
    for entry, tensor in module.state_dict().items():
        if tensor.is_complex():
            raise UsageError(
                f"entry {entry!r} of the model is complex ({tensor.dtype}), which optimizers and aggregation here do "
                "not treat: hold its real and imaginary part as two entries (torch.view_as_real)"
            )
    for name, layer in module.named_modules():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                raise UsageError(
                    f"layer {name!r} of the model uses the old {type(hook).__name__} hook of torch.nn.utils, which "
                    "writes into the layer at each call: use torch.nn.utils.parametrizations instead"
                )


def _smallest_batch(plan: Plan, sample: Tensor) -> int:
    """1, or 2 where the model refuses to train on one sample, as BatchNorm does on one value a channel."""
    inputs = sample.to(plan.dtype)

    def tried(size: int, *, training: bool) -> None:
        forward(plan, clone(plan.initial), inputs.expand(size, *sample.shape[1:]), training=training)

    try:
        tried(1, training=False)
        try:
            tried(1, training=True)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            tried(2, training=True)
            return 2
    except (ValueError, RuntimeError, TypeError) as error:
        raise UsageError(_refused(sample, error)) from error
    return 1


def _refused(sample: Tensor, error: Exception) -> str:
    return (
        f"the model refuses a sample of shape {tuple(sample.shape[1:])}: {error}. "
        "Choose a model for this shape, or bring the data to the model's (for images: size, channels)"
    )


@torch.no_grad()
def forward(plan: Plan, state: State, x: Tensor, *, training: bool = False) -> Tensor:
    """Outputs of the model under ``state`` for inputs ``x``; in training mode BatchNorm updates ``state`` in place."""
    plan.module.train(training)
    with dropout_key(torch.zeros((), dtype=torch.int64, device=x.device)):
        outputs: Tensor = functional_call(plan.module, {**state, **scratch(plan.module)}, (x,))
    return outputs


def scratch(module: nn.Module) -> State:
    """Copies of the non-persistent buffers, so that no client's forward pass can write into the template."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer.clone()
        for prefix, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
        if (buffer := owner._buffers.get(name)) is not None
    }
