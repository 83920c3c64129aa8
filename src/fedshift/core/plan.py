"""Plans: a method resolved against one model (by :func:`fedshift.core.preparation.prepare`), and its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..nn.dropout import Keyed, dropout_key
from ..utils.errors import UsageError
from ..utils.state import State, clone, pick
from .declarations import Apart, Bound, Reads
from .method import Method
from .optimizer import SGD, Optimizer
from .rule import HOOKS, Rule
from .selection import Entry, hybrid_factors, norm_statistics
from .work import Work

Loss = Callable[[Tensor, Tensor], Tensor]
Precision = Literal["float32", "bfloat16"]


class Updated(NamedTuple):
    """Parameters that the optimizer changes in a step, ``lr_scale`` times as fast as it says.

    ``rule``: the position of the rule that they are of; None: they are the model's. ``decay``: whether they decay.
    """

    names: frozenset[str]
    rule: int | None
    lr_scale: float
    decay: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A method resolved against one model: which entries do what. Made by :func:`prepare`.

    Args:
        method: The method, its aggregation bound to the plan.
        module: A stateless template, after surgery.
        entries: The model's entries, in order.
        initial: State that server and clients start from.
        loaded: Names of the entries that clients load.
        adopted: Names of the entries that a client keeps, but takes from the server as its first round starts.
        sent: Names of the entries that clients send.
        trained: Names of the parameters that the optimizer changes.
        rules: The method's rules, each resolved against the plan; empty while they are.
        freeze_from: Round (from 0) from which statistics are frozen.
        work: Local work of a round.
        optimizer: The local optimizer.
        loss: Mean loss of a batch, given outputs and labels.
        smallest_batch: 2 where the model cannot train on one sample, else 1.
        precision: Type in which layers compute; parameters, statistics, losses and updates keep theirs.
        seed: Seed of the trial, which keys the server's draws.

    """

    method: Method
    module: nn.Module
    entries: tuple[Entry, ...]
    initial: State
    loaded: frozenset[str]
    adopted: frozenset[str] = frozenset()
    sent: frozenset[str]
    trained: frozenset[str]
    rules: tuple[Bound, ...] = ()
    freeze_from: float
    work: Work
    optimizer: Optimizer
    loss: Loss
    smallest_batch: int
    precision: Precision = "float32"
    seed: int = 0

    @property
    def personal(self) -> frozenset[str]:
        """Entries that a client keeps from round to round instead of loading them."""
        return frozenset(self.initial) - self.loaded

    @property
    def received(self) -> frozenset[str]:
        """Entries that clients receive in each round: what they load, and what they adopt in their first."""
        return self.loaded | self.adopted

    @property
    def has_global(self) -> bool:
        """Return whether the server holds a whole model (FedBN's does not), and the same for all clients."""
        return self.sent == frozenset(self.initial) and not self.mixes

    @property
    def mixes(self) -> bool:
        """Return whether the aggregation makes for each client a mix of uploads, which it loads."""
        return self.method.aggregate.mixes

    @property
    def personalizes(self) -> bool:
        """Return whether each client has its own model, so that one that never trained has none.

        Factors of HybridBatchNorm act in training alone, and make no model another one.
        """
        own = any(entry.name in self.personal and not hybrid_factors(entry) for entry in self.entries)
        makes = self.method.finetune or any(bound.rule.personalizes for bound in self.rules)
        return own or self.mixes or bool(makes)

    def entries_fixed_in(self, round: int) -> frozenset[str]:
        """Return entries that no local work of ``round`` (from 0) changes: frozen parameters, and frozen statistics."""
        frozen = round >= self.freeze_from
        return frozenset(
            entry.name
            for entry in self.entries
            if (frozen and norm_statistics(entry) if entry.is_buffer else entry.name not in self.trained)
        )

    @cached_property
    def params(self) -> State:
        """The model's trained entries, at their first values."""
        return pick(self.initial, self.trained)

    @cached_property
    def buffers(self) -> State:
        """The model's other entries, at their first values."""
        return pick(self.initial, self.initial.keys() - self.trained)

    @cached_property
    def prelude(self) -> bool:
        """Return whether rules have an exchange before round 1."""
        return any(bound.prelude for bound in self.rules)

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
    def reads(self) -> Reads:
        """Return the union of what rules read: the largest ``first``; features are those of :attr:`feature_layers`."""
        each = [bound.reads for bound in self.rules]
        return Reads(
            targets=any(reads.targets for reads in each),
            first=max((reads.first for reads in each), default=0),
            draws=any(reads.draws for reads in each),
            round=any(reads.round for reads in each),
            entries=any(reads.entries for reads in each),
        )

    @cached_property
    def draws(self) -> bool:
        """Return whether a step draws from its key."""
        keyed = any(isinstance(each, Keyed) for each in self.layers)
        return keyed or self.reads.draws or self.method.gradient is not None

    @cached_property
    def lanes_alike(self) -> bool:
        """Return whether what clients start with and keep differs in the model's entries alone, not by rules."""
        kept = any(bound.own.kept or bound.own.server for bound in self.rules)
        acts = any(map(self.defines, ("look", "personalize", "end", "fold")))
        return not (kept or acts or self.mixes)

    @cached_property
    def subtracts(self) -> bool:
        """Return whether a step subtracts the objective's gradients, times the learning rate, and does nothing else."""
        plain = isinstance(self.optimizer, SGD) and not (self.optimizer.momentum or self.optimizer.weight_decay)
        own = any(self.own_trained) or any(bound.phases for bound in self.rules)
        return plain and not self.defines("gradients") and self.method.gradient is None and not own

    @cached_property
    def before(self) -> tuple[Apart, ...]:
        """The passes of a round that train a rule's own parameters before the model: the rule's position, the phase."""
        return self._list_apart("before")

    @cached_property
    def after(self) -> tuple[Apart, ...]:
        """Return the phases that follow the model's steps."""
        return self._list_apart("after")

    def _list_apart(self, when: Literal["before", "after"]) -> tuple[Apart, ...]:
        return tuple((index, phase) for index, bound in enumerate(self.rules) for phase in bound.list_phases(when))

    @cached_property
    def _during(self) -> tuple[Apart, ...]:
        """The phases in the model's steps."""
        each = enumerate(self.rules)
        return tuple((index, phase) for index, bound in each for phase in bound.list_phases("during"))

    @cached_property
    def paced(self) -> bool:
        """Return whether what a step trains depends on how many steps the round has."""
        return any(phase.share != (0.0, 1.0) for _, phase in self._during)

    def updates_in(self, step: int, steps: int, apart: Apart | None) -> tuple[Updated, ...]:
        """Return what a step trains: ``step`` (from 0) of the model's ``steps`` in a round, or one ``apart``."""
        active = (apart,) if apart else tuple(each for each in self._during if each[1].covers(step, steps))
        kind = active, apart is None
        if kind not in self._updates:
            made = tuple(self._list_updates(active, model=apart is None))
            self._updates[kind] = tuple(each for each in made if each.names)
        return self._updates[kind]

    @cached_property
    def _updates(self) -> dict[object, tuple[Updated, ...]]:
        return {}

    def _list_updates(self, active: tuple[Apart, ...], *, model: bool) -> Iterator[Updated]:
        """Yield what steps train in which the phases ``active`` are; ``model``: the model, too."""
        phased = frozenset[str]().union(*(phase.trains for _, phase in self._during if phase.trains != "own"))
        taken = self.trained - phased if model else frozenset[str]()
        yield Updated(taken, None, 1.0, decay=True)
        for index, phase in active:
            if phase.trains == "own":
                names, own = self.own_names[index], self.rules[index].own
                network = frozenset(names[entry] for entry in own.model.keys() & self.trained)
                yield Updated(network, index, phase.lr_scale, decay=True)
                yield Updated(frozenset(names[entry] for entry in own.params), index, phase.lr_scale, decay=phase.decay)
            else:
                yield Updated((phase.trains & self.trained) - taken, None, phase.lr_scale, decay=True)
                taken |= phase.trains

    @cached_property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the model and its inputs."""
        return next((t.dtype for t in self.initial.values() if t.is_floating_point()), torch.float32)

    @cached_property
    def image_format(self) -> torch.memory_format:
        """Memory format of images and kernels: channels last where that is faster, for float32 on the CPU."""
        if self.dtype == torch.float32 and all(tensor.device.type == "cpu" for tensor in self.initial.values()):
            for kind, layout in ((nn.Conv2d, torch.channels_last), (nn.Conv3d, torch.channels_last_3d)):
                if any(isinstance(layer, kind) for layer in self.layers):
                    return layout
        return torch.contiguous_format

    @cached_property
    def layers(self) -> tuple[nn.Module, ...]:
        """Every module of the template, itself first."""
        return tuple(self.module.modules())

    @cached_property
    def feature_layers(self) -> dict[int, nn.Module]:
        """The layers whose inputs rules read, by the rules' positions."""
        return {index: self._find_layer(bound) for index, bound in enumerate(self.rules) if bound.reads.features}

    def _find_layer(self, bound: Bound) -> nn.Module:
        named: dict[str, nn.Module] = dict(self.module.named_modules())
        wanted = bound.reads.features
        if wanted == "last":
            return next(entry.owner for entry in self.entries if entry.from_end == 0)
        if wanted not in named:
            near = get_close_matches(wanted, filter(None, named), cutoff=0.3)
            raise UsageError(
                f"method {self.method.label!r}: {bound.rule.source_method} reads the input of layer {wanted!r}, which "
                f"the model has not{'; near it are ' + ', '.join(near) if near else ''}: name a layer of the model, or "
                "'last'"
            )
        return named[wanted]

    @cached_property
    def slots(self) -> tuple[tuple[dict[str, Any], str, str], ...]:
        """Places of the template's tensors: the layer's dictionary, the key there, and the entry's name.

        A parameter that occurs in several places has one entry. Buffers that are no entries have empty names.
        """
        names = {id(tensor): name for name, tensor in self.module.named_parameters()}
        names |= {id(tensor): name for name, tensor in self.module.named_buffers()}
        return tuple(
            (held, key, "" if key in layer._non_persistent_buffers_set else names[id(tensor)])
            for layer in self.layers
            for held in (cast("dict[str, Any]", layer._parameters), cast("dict[str, Any]", layer._buffers))
            for key, tensor in held.items()
            if tensor is not None
        )

    def set_mode(self, *, training: bool, frozen: bool = False) -> None:
        """Put the template in training or evaluation mode; ``frozen``: its BatchNorm layers in the latter."""
        if any(type(layer).train is not nn.Module.train for layer in self.layers):  # the network overrides train()
            self.module.train(training)
        else:
            for layer in self.layers:
                layer.training = training
        for layer in self.layers if frozen else ():
            if isinstance(layer, _BatchNorm):
                layer.training = False  # not that of a dropout or an activation which the layer may hold

    def clone_for_training(self, state: State) -> State:
        """Return a copy of ``state`` in the memory format of local work; its bits depend on the values only."""
        if self.image_format == torch.contiguous_format:
            return clone(state)
        return {name: to_memory_format(tensor.clone(), self.image_format) for name, tensor in state.items()}

    @cached_property
    def rule_names(self) -> tuple[str, ...]:
        """Names of the rules, which tell their states apart in checkpoints and uploads: their types'."""
        kinds = [type(bound.rule) for bound in self.rules]
        names = [kind.__name__.lower() for kind in kinds]
        return tuple(
            name if names.count(name) == 1 else f"{kind.__module__}.{name}"
            for kind, name in zip(kinds, names, strict=True)
        )

    @cached_property
    def own_names(self) -> tuple[dict[str, str], ...]:
        """Names of each rule's own entries in local training, beside the model's, by their names in the rule."""
        return tuple(
            {entry: f"{name}/{entry}" for entry in (*bound.own.model, *bound.own.params, *bound.own.buffers)}
            for name, bound in zip(self.rule_names, self.rules, strict=True)
        )

    @cached_property
    def own_trained(self) -> tuple[frozenset[str], ...]:
        """Names of each rule's own parameters in local training."""
        return tuple(
            frozenset(names[entry] for entry in (*(bound.own.model.keys() & self.trained), *bound.own.params))
            for names, bound in zip(self.own_names, self.rules, strict=True)
        )

    @cached_property
    def undecayed_optimizer(self) -> Optimizer:
        """The optimizer without weight decay, for all other parameters."""
        return replace(self.optimizer, weight_decay=0.0)


def compute_outputs(plan: Plan, state: State, x: Tensor) -> Tensor:
    """Return the template's outputs under ``state``, in the model's type, for inputs ``x [B, ...]``.

    The template's tensors are exchanged for those of ``state`` and put back, as ``torch.func.functional_call`` does
    with more care and time; buffers that are no entries for copies, so that nothing is written into the template.
    """
    low = plan.precision == "bfloat16"
    template = [held[key] for held, key, _ in plan.slots]
    try:
        for (held, key, name), own in zip(plan.slots, template, strict=True):
            held[key] = state[name] if name else own.clone()
        with torch.autocast(x.device.type, torch.bfloat16) if low else nullcontext():
            made = plan.module(x)
    finally:
        for (held, key, _), own in zip(plan.slots, template, strict=True):
            held[key] = own
    if not isinstance(made, Tensor):
        raise UsageError(_not_scores(plan.module, made))
    return made.to(plan.dtype) if low else made


def compute_features(plan: Plan, state: State, x: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Return :func:`compute_outputs`, and the input of each of ``plan.feature_layers`` in the same pass."""
    seen: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen[layer] = given[0]

    hooks = [layer.register_forward_pre_hook(note) for layer in set(plan.feature_layers.values())]
    try:
        outputs = compute_outputs(plan, state, x)
    finally:
        for hook in hooks:
            hook.remove()
    for index, layer in plan.feature_layers.items():
        if layer not in seen:
            raise UsageError(
                f"method {plan.method.label!r}: {plan.rules[index].rule.source_method} reads the input of a "
                f"{type(layer).__name__}, which the model does not call in its forward pass: name a layer that it calls"
            )
    return outputs, {index: seen[layer].to(plan.dtype) for index, layer in plan.feature_layers.items()}


def _not_scores(module: nn.Module, made: object) -> str:
    """Return the message for a network whose outputs are no tensor."""
    keys = f" with {', '.join(map(repr, made))}" if isinstance(made, Mapping) else ""
    output = repr(next(iter(made), "logits") if isinstance(made, Mapping) else 0)
    return (
        f"the model {type(module).__name__} returned a {type(made).__name__}{keys}, not a tensor of one score a class, "
        f"[samples, classes]: return the scores alone, or choose them by fedshift.models.take_output(network, {output})"
        f'; on the command line, --model "take_output(package.module:function, output={output})"'
    )


@torch.no_grad()
def forward(plan: Plan, state: State, x: Tensor, *, training: bool = False, key: Tensor | None = None) -> Tensor:
    """Return the model's outputs under ``state`` for inputs ``x``; training BatchNorm updates ``state`` in place.

    ``key``: int64 scalar that keys dropout masks; 0 unless given.
    """
    plan.set_mode(training=training)
    with dropout_key(torch.zeros((), dtype=torch.int64, device=x.device) if key is None else key):
        return compute_outputs(plan, state, to_memory_format(x, plan.image_format))


def to_inputs(plan: Plan, x: Tensor) -> Tensor:
    """Return samples in the model's type; whole numbers, such as tokens, stay."""
    return x.to(plan.dtype) if x.is_floating_point() else x


def to_memory_format(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """Return images ``[N, C, H, W]``, or volumes where it is a layout of these, in ``layout``; others unchanged."""
    dimensions = 5 if layout == torch.channels_last_3d else 4
    return tensor.contiguous(memory_format=layout) if tensor.ndim == dimensions else tensor
