"""Plans: a method resolved against a model (by :func:`fedshift.core.preparation.prepare`), and the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..nn.dropout import Keyed, dropout_key
from ..nn.recognition import placed_hooks
from ..utils.errors import UsageError
from ..utils.state import State, clone, pick
from .declarations import Declared, RulePhase
from .method import Method
from .optimizer import SGD, Optimizer
from .rule import HOOKS, Rule
from .selection import WHOLE, Entry, hybrid_factors, norm_statistics
from .work import Work

Loss = Callable[[Tensor, Tensor], Tensor]
Precision = Literal["float32", "bfloat16", "float16", "float64"]
LOW: Mapping[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number formats of ``torch.autocast``, which decides by layer what is computed in them."""
START: Mapping[str, bool] = {"training": True, "frozen": False, "first": True, "resident": False}
"""Mode of a template before its first pass."""


class Slot(NamedTuple):
    """A tensor of the template: the layer's dictionary that holds it, its key there, and its entry's name."""

    held: dict[str, Any]
    key: str
    name: str
    tensor: Tensor


class Traits(NamedTuple):
    """Facts about a network that its probe shows (:mod:`fedshift.core.probe`).

    Args:
        writes_inputs: Whether the network changes its inputs, so that it is given copies.
        writes_in_evaluation: Whether it writes entries in evaluation, so that it is given copies.
        contiguous: Whether channels-last images give other outputs or errors.
        changing: Buffers that steps of training change; None: not tried.
        draws: Whether it draws from a global generator, as far as known.
        exchange: Why passes with other tensors in place of the template's differ; empty: they do not.

    """

    writes_inputs: bool = False
    writes_in_evaluation: bool = False
    contiguous: bool = False
    changing: frozenset[str] | None = None
    draws: bool = True
    exchange: str = ""


class Updated(NamedTuple):
    """Parameters that the optimizer updates in a step, with the learning rate multiplied by ``lr_scale``.

    ``rule``: position of the rule that owns the parameters; None: they are the model's. ``decay``: whether weight decay
    applies.
    """

    names: frozenset[str]
    rule: int | None
    lr_scale: float
    decay: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A method resolved against one model: the role of each entry. Created by :func:`prepare`.

    Args:
        method: The method, its aggregation bound to the plan.
        module: A stateless template, after surgery.
        entries: The model's entries, in order.
        initial: Initial state of server and clients.
        loaded: Names of the entries that clients load.
        adopted: Names of the entries that a client keeps, but loads from the server in its first round.
        sent: Names of the entries that clients send.
        trained: Names of the parameters that the optimizer updates.
        trainable: Names of the parameters that the network lets an optimizer update.
        rules: The method's rules, resolved against the plan; empty while they are being bound.
        freeze_from: First round (from 0) with frozen statistics.
        work: Local work of a round.
        optimizer: The local optimizer.
        loss: Computes the mean loss of a batch from outputs and labels.
        smallest_batch: Minimum batch size: 2 if the model cannot train on one sample, else 1.
        precision: Precision in which layers compute; parameters, statistics, losses and updates keep their dtype, which
            is float32, or float64 with that precision.
        seed: Seed of the trial, which keys the server's random draws.
        traits: What a trial of the network showed.

    """

    method: Method
    module: nn.Module
    entries: tuple[Entry, ...]
    initial: State
    loaded: frozenset[str]
    adopted: frozenset[str] = frozenset()
    sent: frozenset[str]
    trained: frozenset[str]
    trainable: frozenset[str] = frozenset()
    rules: tuple[Declared, ...] = ()
    freeze_from: float
    work: Work
    optimizer: Optimizer
    loss: Loss
    smallest_batch: int
    precision: Precision = "float32"
    seed: int = 0
    traits: Traits = field(default_factory=Traits)
    _updates: dict[object, tuple[Updated, ...]] = field(default_factory=dict, init=False, repr=False)
    _verdicts: dict[str, str | None] = field(default_factory=dict, init=False, repr=False)
    _mode: dict[str, bool] = field(default_factory=lambda: {**START}, init=False, repr=False)

    @property
    def personal(self) -> frozenset[str]:
        """Entries that a client keeps from round to round instead of loading them."""
        return frozenset(self.initial) - self.loaded

    @property
    def received(self) -> frozenset[str]:
        """Entries that the server sends to clients: loaded in each round, or adopted in the first."""
        return self.loaded | self.adopted

    @property
    def has_global(self) -> bool:
        """Whether the server holds one complete model for all clients (with FedBN it does not)."""
        hidden = {entry.name for entry in self.entries if entry.kind == "hidden"}
        return self.sent | hidden == frozenset(self.initial) and not self.mixes

    @cached_property
    def whole(self) -> frozenset[str]:
        """Buffers without a mean (:mod:`fedshift.core.buffers`), and fixed parameters with values that have none."""
        return frozenset(
            entry.name
            for entry in self.entries
            if entry.kind in WHOLE
            or (not entry.is_buffer and entry.name not in self.trained and not _has_mean(self.initial[entry.name]))
        )

    @property
    def mixes(self) -> bool:
        """Whether clients load individual mixes of uploads."""
        return self.method.aggregate.mixes

    @property
    def personalizes(self) -> bool:
        """Whether each client has its own model, so that clients that never trained have none.

        HybridBatchNorm's factors affect only training and do not personalize the model, nor does state that the server
        has too (:mod:`fedshift.core.buffers`).
        """
        kept = (each for each in self.entries if each.name in self.personal and not hybrid_factors(each))
        keeps = any(each.kind != "hidden" and each.name not in self.adopted & self.whole for each in kept)
        adapts = self.method.finetune or any(bound.rule.personalizes for bound in self.rules)
        return keeps or self.mixes or bool(adapts)

    def name_keepers(self, name: str) -> str:
        """Return the names of the method's components that keep the entry ``name`` on clients, for messages."""
        entry = next(entry for entry in self.entries if entry.name == name)
        return self.method.name_sources(lambda method: (method.scope.load(entry), method.scope.send(entry)))

    def refuse_kept(self, use: str, names: Collection[str]) -> UsageError:
        """Return the error for a ``use`` of shared entries if clients keep some of ``names``."""
        kept = min({*names} - self.loaded or names)
        why = f"but {self.name_keepers(kept)} keeps {kept!r} on clients"
        return UsageError(f"{use}, {why}: use one of the two, or choose other layers")

    def entries_fixed_in(self, round: int) -> frozenset[str]:
        """Return the entries that local work does not change in ``round`` (from 0): untrained or frozen ones."""
        frozen = round >= self.freeze_from
        return frozenset(
            entry.name
            for entry in self.entries
            if (frozen and norm_statistics(entry) if entry.is_buffer else entry.name not in self.trained)
        )

    @cached_property
    def params(self) -> State:
        """Initial values of the model's trained entries."""
        return pick(self.initial, self.trained)

    @cached_property
    def buffers(self) -> State:
        """Initial values of the model's other entries."""
        return pick(self.initial, self.initial.keys() - self.trained)

    def defines(self, hook: str) -> tuple[int, ...]:
        """Return the positions of the rules that define ``hook``."""
        return self._defined[hook]

    @cached_property
    def _defined(self) -> dict[str, tuple[int, ...]]:
        kinds = [type(bound.rule) for bound in self.rules]
        return {
            hook: tuple(at for at, kind in enumerate(kinds) if getattr(kind, hook) is not getattr(Rule, hook))
            for hook in HOOKS
        }

    @cached_property
    def samples_before_work(self) -> int:
        """Largest number of samples that a rule sees before local work."""
        return max((bound.samples_before_work for bound in self.rules), default=0)

    @cached_property
    def draws(self) -> bool:
        """Whether a step makes random draws."""
        keyed = any(isinstance(each, Keyed) for each in self.layers)
        return keyed or any(bound.draws for bound in self.rules) or self.method.gradient is not None

    @cached_property
    def lanes_alike(self) -> bool:
        """Whether clients differ only in the model's entries when they start, not in the state of rules."""
        kept = any(bound.on_client or bound.server for bound in self.rules)
        acts = any(map(self.defines, ("start", "personalize", "end", "fold")))
        return not (kept or acts or self.mixes)

    @cached_property
    def subtracts(self) -> bool:
        """Whether a step only subtracts the learning rate times the objective's gradients."""
        plain = isinstance(self.optimizer, SGD) and not (self.optimizer.momentum or self.optimizer.weight_decay)
        rules_train = any(self.own_trained) or any(bound.phases for bound in self.rules)
        return plain and not self.defines("gradients") and self.method.gradient is None and not rules_train

    @cached_property
    def before(self) -> tuple[RulePhase, ...]:
        """Phases that train a rule's own parameters before the model's steps."""
        return self._list_phases("before")

    @cached_property
    def after(self) -> tuple[RulePhase, ...]:
        """Phases that train a rule's own parameters after the model's steps."""
        return self._list_phases("after")

    @cached_property
    def _during(self) -> tuple[RulePhase, ...]:
        """Phases within the model's steps."""
        return self._list_phases("during")

    def _list_phases(self, when: Literal["before", "during", "after"]) -> tuple[RulePhase, ...]:
        return tuple((index, phase) for index, bound in enumerate(self.rules) for phase in bound.list_phases(when))

    @cached_property
    def paced(self) -> bool:
        """Whether the parameters trained in a step depend on the number of steps in the round."""
        return any(phase.share != (0.0, 1.0) for _, phase in self._during)

    def updates_in(self, step: int, steps: int, separate_phase: RulePhase | None) -> tuple[Updated, ...]:
        """Return the parameters trained in ``step`` (from 0) of the model's ``steps``, or in a separate phase."""
        if separate_phase:
            active: tuple[RulePhase, ...] = (separate_phase,)
        else:
            active = tuple(each for each in self._during if each[1].covers(step, steps))
        kind = active, separate_phase is None
        if kind not in self._updates:
            updates = self._list_updates(active, model=separate_phase is None)
            self._updates[kind] = tuple(each for each in updates if each.names)
        return self._updates[kind]

    def _list_updates(self, active: tuple[RulePhase, ...], *, model: bool) -> Iterator[Updated]:
        """Yield the parameters trained in the phases ``active``; ``model``: whether the model is trained, too."""
        phased = frozenset[str]().union(*(phase.trains for _, phase in self._during if phase.trains != "own"))
        taken = self.trained - phased if model else frozenset[str]()
        yield Updated(taken, None, 1.0, decay=True)
        for index, phase in active:
            if phase.trains == "own":
                names, own = self.own_names[index], self.rules[index]
                network = frozenset(names[entry] for entry in own.model.keys() & self.trained)
                yield Updated(network, index, phase.lr_scale, decay=True)
                yield Updated(frozenset(names[entry] for entry in own.params), index, phase.lr_scale, decay=phase.decay)
            else:
                yield Updated((phase.trains & self.trained) - taken, None, phase.lr_scale, decay=True)
                taken |= phase.trains

    @property
    def autocast(self) -> torch.dtype | None:
        """Number format of ``torch.autocast`` for layers; None: the format of the parameters."""
        return LOW.get(self.precision)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Floating-point dtype of the model's parameters, and so of its inputs."""
        dtypes = (self.initial[entry.name].dtype for entry in sorted(self.entries, key=lambda each: each.is_buffer))
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)

    @cached_property
    def image_format(self) -> torch.memory_format:
        """Memory format of images and kernels: channels last if faster (float32 on the CPU)."""
        if (
            not self.traits.contiguous
            and self.dtype == torch.float32
            and all(tensor.device.type == "cpu" for tensor in self.initial.values())
        ):
            for kind, layout in ((nn.Conv2d, torch.channels_last), (nn.Conv3d, torch.channels_last_3d)):
                if any(isinstance(layer, kind) for layer in self.layers):
                    return layout
        return torch.contiguous_format

    @cached_property
    def layers(self) -> tuple[nn.Module, ...]:
        """All modules of the template, starting with the template itself."""
        return tuple(self.module.modules())

    @cached_property
    def normalizing(self) -> frozenset[nn.Module]:
        """Layers that own running statistics of BatchNorm."""
        return frozenset(entry.owner for entry in self.entries if norm_statistics(entry))

    @cached_property
    def feature_layers(self) -> dict[int, nn.Module]:
        """Layers whose inputs rules read, by position of the rule."""
        return {index: self._find_layer(bound) for index, bound in enumerate(self.rules) if bound.features}

    def _find_layer(self, bound: Declared) -> nn.Module:
        named: dict[str, nn.Module] = dict(self.module.named_modules())
        wanted = bound.features
        if wanted == "last":
            return next(entry.owner for entry in self.entries if entry.from_end == 0)
        if wanted not in named:
            near = get_close_matches(wanted, filter(None, named), cutoff=0.3)
            raise UsageError(
                f"method {self.method.label!r}: {bound.rule.source_method} reads the input of layer {wanted!r}, which "
                f"the model lacks{'; similar names: ' + ', '.join(near) if near else ''}: name a layer of the model, "
                "or 'last'"
            )
        return named[wanted]

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The template's tensors.

        A shared parameter has several slots and one entry; buffers outside of the entries have empty names.
        """
        names = {id(tensor): name for name, tensor in self.module.named_parameters()}
        names |= {id(tensor): name for name, tensor in self.module.named_buffers()}
        return tuple(
            Slot(held, key, names[id(tensor)] if names[id(tensor)] in self.initial else "", tensor)
            for layer in self.layers
            for held in (cast("dict[str, Any]", layer._parameters), cast("dict[str, Any]", layer._buffers))
            for key, tensor in held.items()
            if tensor is not None
        )

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The template's own parameters, by the names of their entries."""
        return {slot.name: slot.tensor for slot in self.slots if isinstance(slot.tensor, nn.Parameter)}

    @cached_property
    def overrides_mode(self) -> bool:
        """Return whether a layer overrides ``train`` or ``eval``, which may read and write entries (a merged LoRA)."""
        usual = nn.Module
        return any(type(layer).train is not usual.train or type(layer).eval is not usual.eval for layer in self.layers)

    def set_mode(self, *, training: bool, frozen: bool = False, first: bool = True) -> None:
        """Put the template in training or evaluation mode; ``frozen``: BatchNorm layers always in evaluation mode.

        Layers that override the switch are switched when entries are in place: to training in the ``first`` pass, as at
        the start of a round, and to evaluation and back in each pass in evaluation.
        """
        self._mode.update(training=training, frozen=frozen, first=first)
        if not self.overrides_mode:
            for layer in self.layers:
                layer.training = training
            self._freeze()

    def _freeze(self) -> None:
        for layer in self.normalizing if self._mode["frozen"] else ():
            layer.training = False  # without its children, such as a dropout

    @contextmanager
    def switched(self) -> Iterator[None]:
        """Switch layers that override the switch for a pass, with entries in place."""
        if not self._mode["training"]:
            self.module.eval()
        elif self._mode["first"]:
            self.module.train()
        self._freeze()
        try:
            yield
        finally:
            if not self._mode["training"]:
                self.module.train()

    @contextmanager
    def resident(self, params: State, active: Collection[str]) -> Iterator[State]:
        """Keep ``params`` in the template's own parameters, through the backward pass; yield the leaves ``active``.

        Leaves have no ``grad`` before. Parameters of rules are leaves, too. What the network assigns to
        ``weight.data`` is written into ``params`` at the end.
        """
        leaves = State()
        for name, tensor in params.items():
            own = self.parameters.get(name)
            if own is not None:
                if own.data_ptr() != tensor.data_ptr():
                    own.data = tensor
                if own.requires_grad is not (name in active):
                    own.requires_grad_(name in active)
            if name in active:
                leaves[name] = tensor.detach().requires_grad_() if own is None else own
                leaves[name].grad = None
        self._mode["resident"] = True
        try:
            yield leaves
        finally:
            self._mode["resident"] = False
            for name, leaf in leaves.items():
                leaf.grad = None
                if leaf.data_ptr() != params[name].data_ptr():
                    params[name].copy_(leaf.detach())

    def clone_for_training(self, state: State) -> State:
        """Return a copy of ``state`` in the memory format of local work, whatever the format of ``state``."""
        if self.image_format == torch.contiguous_format:
            return clone(state)
        return {name: to_memory_format(tensor.clone(), self.image_format) for name, tensor in state.items()}

    @cached_property
    def rule_names(self) -> tuple[str, ...]:
        """Names of the rules' types, numbered if equal, which prefix their states in checkpoints and uploads."""
        names = [type(bound.rule).__name__.lower() for bound in self.rules]
        return tuple(name if names.count(name) == 1 else f"{number}.{name}" for number, name in enumerate(names))

    @cached_property
    def own_names(self) -> tuple[dict[str, str], ...]:
        """Names of each rule's own entries in local training, by their names in the rule."""
        return tuple(
            {entry: f"{name}/{entry}" for entry in (*bound.model, *bound.params, *bound.buffers)}
            for name, bound in zip(self.rule_names, self.rules, strict=True)
        )

    @cached_property
    def own_trained(self) -> tuple[frozenset[str], ...]:
        """Names of each rule's own parameters in local training."""
        return tuple(
            frozenset(names[entry] for entry in (*(bound.model.keys() & self.trained), *bound.params))
            for names, bound in zip(self.own_names, self.rules, strict=True)
        )

    def verdict(self, engine: str, judge: Callable[[], str | None] | None = None) -> str | None:
        """Return why ``engine`` cannot run the plan, which ``judge`` finds once; None: it can, as far as known."""
        if judge and engine not in self._verdicts:
            self._verdicts[engine] = judge()
        return self._verdicts.get(engine)


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


def compute_outputs(plan: Plan, state: State, x: Tensor, *, in_place: bool | None = None) -> Tensor:
    """Return the template's outputs under ``state``, in the model's dtype, for inputs ``x [B, ...]``.

    Buffers that the network writes or assigns are written into ``state``.

    ``in_place``: whether the template's own tensors hold the entries, as in plain PyTorch; otherwise, as in
    ``torch.func.functional_call``, other tensors replace them, which passes by what holds the template's tensors
    elsewhere. None: in place, unless a transform of ``torch.func`` or autograd needs the tensors of ``state``, or a
    backward pass the entries that are in place now.
    """
    if in_place is None:
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in state.values())
        in_place = not (differentiated or plan._mode["resident"] or torch._C._functorch.peek_interpreter_stack())
    if plan.traits.exchange and not in_place:
        raise UsageError(
            f"another model's weights cannot take the place of this model's ({plan.traits.exchange}), because "
            "something else holds its parameters, such as a closure, a list, a hook or a checkpoint: call the layers "
            "themselves in forward, or use a method that runs no second model, and the sequential engine"
        )
    x = x.clone() if plan.traits.writes_inputs else x
    with (_in_place if in_place else _exchanged)(plan, state):
        outputs = _call(plan, x) if plan.autocast or plan.overrides_mode else plan.module(x)
    if not isinstance(outputs, Tensor):
        raise UsageError(_describe_wrong_outputs(plan.module, outputs))
    return outputs.to(plan.dtype) if plan.autocast else outputs


def _call(plan: Plan, x: Tensor) -> Any:
    autocast = torch.autocast(x.device.type, plan.autocast) if plan.autocast else nullcontext()
    with plan.switched() if plan.overrides_mode else nullcontext(), autocast:
        return plan.module(x)


@contextmanager
def _in_place(plan: Plan, state: State) -> Iterator[None]:
    for held, key, name, own in plan.slots:
        if not name:
            held[key] = own.clone()
        elif own is not (tensor := state[name]) and own.data_ptr() != tensor.data_ptr():
            own.data = tensor
    try:
        yield
    finally:
        for held, key, name, own in plan.slots:
            now = held.get(key, own)
            if now is not own:
                held[key] = own
            if name and now is not (tensor := state[name]) and now.data_ptr() != tensor.data_ptr():
                _write(state, name, now.detach())


def _write(state: State, name: str, value: Tensor) -> None:
    """Write an entry that a network assigned, which may have grown, into ``state``."""
    if (value.shape, value.dtype) == (state[name].shape, state[name].dtype):
        state[name].copy_(value)
    else:
        state[name] = value.clone()


@contextmanager
def _exchanged(plan: Plan, state: State) -> Iterator[None]:
    """Replace the template's tensors by ``state``, and its other buffers by copies."""
    try:
        for held, key, name, own in plan.slots:
            held[key] = state[name] if name else own.clone()
        yield
    finally:
        for held, key, _, own in plan.slots:
            held[key] = own


def compute_features(
    plan: Plan, state: State, x: Tensor, *, in_place: bool | None = None
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return :func:`compute_outputs`, and the inputs of ``plan.feature_layers`` in the same pass, by rule."""
    seen: dict[nn.Module, Tensor] = {}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[layer] = inputs[0]

    with placed_hooks(layer.register_forward_pre_hook(record) for layer in set(plan.feature_layers.values())):
        outputs = compute_outputs(plan, state, x, in_place=in_place)
    for index, layer in plan.feature_layers.items():
        if layer not in seen:
            raise UsageError(
                f"method {plan.method.label!r}: {plan.rules[index].rule.source_method} reads the input of a "
                f"{type(layer).__name__}, which the model does not call in its forward pass: name a layer that it calls"
            )
    return outputs, {index: seen[layer].to(plan.dtype) for index, layer in plan.feature_layers.items()}


def _describe_wrong_outputs(module: nn.Module, outputs: object) -> str:
    """Return the message for a network that does not return a tensor."""
    keys = f" with {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) else ""
    output = repr(next(iter(outputs), "logits") if isinstance(outputs, Mapping) else 0)
    return (
        f"the model {type(module).__name__} returned a {type(outputs).__name__}{keys}, not a tensor of class scores "
        f"[samples, classes]: return only the scores, or select them by fedshift.models.take_output(network, {output})"
        f'; on the command line, --model "take_output(package.module:function, output={output})"'
    )


@torch.no_grad()
def forward(
    plan: Plan, state: State, x: Tensor, *, training: bool = False, frozen: bool = False, key: Tensor | None = None
) -> Tensor:
    """Return the model's outputs under ``state`` for inputs ``x``; in training, buffers of ``state`` are updated.

    ``frozen``: whether statistics are frozen. ``key``: int64 scalar that keys dropout masks; default 0.
    """
    plan.set_mode(training=training, frozen=frozen)
    state = state if training or not plan.traits.writes_in_evaluation else clone(state)
    with dropout_key(torch.zeros((), dtype=torch.int64, device=x.device) if key is None else key):
        return compute_outputs(plan, state, to_memory_format(x, plan.image_format))


def to_inputs(plan: Plan, x: Tensor) -> Tensor:
    """Return samples in the model's dtype; keep integers, such as tokens."""
    return x.to(plan.dtype) if x.is_floating_point() else x


def to_memory_format(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """Return images ``[N, C, H, W]``, or volumes for ``channels_last_3d``, in ``layout``; others unchanged."""
    dimensions = 5 if layout == torch.channels_last_3d else 4
    return tensor.contiguous(memory_format=layout) if tensor.ndim == dimensions else tensor
