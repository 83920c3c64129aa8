"""Plans: a method resolved against one model (by :func:`fedshift.core.preparation.prepare`), and its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..nn.dropout import dropout_key
from ..utils.errors import UsageError
from ..utils.state import State, clone
from .declarations import Send
from .method import Method
from .optimizer import SGD, Optimizer
from .rule import Rule
from .selection import Entry, hybrid_factors, norm_statistics
from .work import Work

Loss = Callable[[Tensor, Tensor], Tensor]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A method resolved against one model: which entries do what. Made by :func:`prepare`.

    Args:
        method: The method, its rules and aggregation bound to the model.
        module: A stateless template, after surgery.
        entries: The model's entries, in order.
        initial: State that server and clients start from.
        loaded: Names of the entries that clients load.
        adopted: Names of the entries that a client keeps, but takes from the server as its first round starts.
        sent: Names of the entries that clients send.
        trained: Names of the parameters that the optimizer changes.
        extra_params: Parameters that each rule adds on clients, at their initial values.
        extra_rest: Other entries that each rule adds on clients.
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
    extra_params: tuple[State, ...]
    extra_rest: tuple[State, ...]
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
        return own or self.mixes or any(rule.personalizes for rule in self.method.rules)

    @cached_property
    def finetune_rounds(self) -> int:
        """Rounds of local work that make a client's model of the one that it loads, whenever that is measured."""
        return max((rule.finetune_rounds for rule in self.method.rules), default=0)

    @cached_property
    def own_epochs(self) -> int:
        """Passes of a round over a client's data that train the rules' own parameters apart from the model's."""
        return max((rule.epochs or 0 for rule in self.method.rules), default=0)

    @cached_property
    def leads(self) -> bool:
        """Return whether those passes come before the model's."""
        return any(rule.leads for rule in self.method.rules)

    def entries_fixed_in(self, round: int) -> frozenset[str]:
        """Return entries that no local work of ``round`` (from 0) changes: frozen parameters, and frozen statistics."""
        frozen = round >= self.freeze_from
        return frozenset(
            entry.name
            for entry in self.entries
            if (frozen and norm_statistics(entry) if entry.is_buffer else entry.name not in self.trained)
        )

    @cached_property
    def subtracts(self) -> bool:
        """Return whether a step subtracts the objective's gradients, times the learning rate, and does nothing else."""
        rules = [type(rule) for rule in self.method.rules]
        plain = isinstance(self.optimizer, SGD) and not (self.optimizer.momentum or self.optimizer.weight_decay)
        same = all(rule.transform_grads is Rule.transform_grads for rule in rules) and self.combining is None
        paced = any(rule.trainable_at_step is not Rule.trainable_at_step for rule in rules)
        return plain and same and not paced and not any(self.extra_trained)

    @cached_property
    def combining(self) -> int | None:
        """Position of the rule that combines the gradients of a batch's samples; None: they are never told apart."""
        rules = enumerate(self.method.rules)
        return next((at for at, rule in rules if type(rule).combine_samples is not Rule.combine_samples), None)

    @cached_property
    def sends(self) -> tuple[Mapping[str, Send], ...]:
        """Return what every client uploads for each rule in each round, beside entries of the model."""
        return tuple(dict(rule.sends(self)) for rule in self.method.rules)

    @cached_property
    def reads_targets(self) -> bool:
        """Return whether a rule reads the targets of all of a client's samples."""
        return any(type(rule).read_targets is not Rule.read_targets for rule in self.method.rules)

    @cached_property
    def observed(self) -> int:
        """Return the number of samples of a round on which rules see the model run before local work."""
        return max((rule.observes for rule in self.method.rules), default=0)

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
    def feature_layers(self) -> tuple[nn.Module | None, ...]:
        """The layer whose input each rule reads; None for a rule that reads none."""
        return tuple(self._find_layer(rule) if rule.features else None for rule in self.method.rules)

    def _find_layer(self, rule: Rule) -> nn.Module:
        named: dict[str, nn.Module] = dict(self.module.named_modules())
        if rule.features == "last":
            return next(entry.owner for entry in self.entries if entry.from_end == 0)
        if rule.features not in named:
            near = get_close_matches(rule.features, filter(None, named), cutoff=0.3)
            raise UsageError(
                f"method {self.method.name!r}: {rule.source_method} reads the input of layer {rule.features!r}, which "
                f"the model has not{'; near it are ' + ', '.join(near) if near else ''}: name a layer of the model, or "
                "'last'"
            )
        return named[rule.features]

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
        """Unique names of the rules, which tell their states apart in checkpoints and uploads."""
        return tuple(f"{index}.{type(rule).__name__.lower()}" for index, rule in enumerate(self.method.rules))

    @cached_property
    def extra_names(self) -> tuple[dict[str, str], ...]:
        """Names of each rule's extra entries in local training, beside the model's, by their names in the rule."""
        return tuple(
            {entry: f"{name}/{entry}" for entry in (*params, *rest)}
            for name, params, rest in zip(self.rule_names, self.extra_params, self.extra_rest, strict=True)
        )

    @cached_property
    def extra_trained(self) -> tuple[frozenset[str], ...]:
        """Names of each rule's extra parameters in local training."""
        return tuple(
            frozenset(names[entry] for entry in params)
            for names, params in zip(self.extra_names, self.extra_params, strict=True)
        )

    @cached_property
    def networks(self) -> tuple[dict[str, str], ...]:
        """Each rule's network: its parameters' names in local training, by the model's entries they stand for."""
        own = zip(self.method.rules, self.extra_names, self.extra_params, strict=True)
        return tuple({entry: names[name] for name, entry in rule.find_network(p).items()} for rule, names, p in own)

    @cached_property
    def decayed(self) -> frozenset[str]:
        """Names of the trained parameters in local training on which the optimizer's weight decay acts."""
        own = zip(self.method.rules, self.networks, self.extra_trained, strict=True)
        return self.trained.union(*(names if rule.decays else network.values() for rule, network, names in own))

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


def compute_features(plan: Plan, state: State, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return :func:`compute_outputs`, and the input of each of ``plan.feature_layers`` in the same pass."""
    seen: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen[layer] = given[0]

    hooks = [layer.register_forward_pre_hook(note) for layer in set(plan.feature_layers) if layer is not None]
    try:
        outputs = compute_outputs(plan, state, x)
    finally:
        for hook in hooks:
            hook.remove()
    for rule, layer in zip(plan.method.rules, plan.feature_layers, strict=True):
        if layer is not None and layer not in seen:
            raise UsageError(
                f"method {plan.method.name!r}: {rule.source_method} reads the input of a {type(layer).__name__}, which "
                "the model does not call in its forward pass: name a layer that it calls"
            )
    features = tuple(None if layer is None else seen[layer].to(plan.dtype) for layer in plan.feature_layers)
    return outputs, features


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
