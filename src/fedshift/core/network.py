"""Networks: the entries of a model, their roles under a method, and the passes of the template that computes with them.

In: a module after surgery, and the names of the entries that are loaded, sent, trained and kept. Out: outputs and
features for a batch, under the values of any client. Nothing here knows rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..nn.dropout import Keyed, dropout_key
from ..utils.errors import UsageError
from ..utils.state import State, clone, pick
from .optimizer import Optimizer
from .selection import WHOLE, Entry, norm_statistics
from .work import Work

Loss = Callable[[Tensor, Tensor], Tensor]
Precision = Literal["float32", "bfloat16", "float16", "float64"]
LOW: Mapping[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number formats of ``torch.autocast``, which decides by layer what is computed in them."""


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A model resolved for a method: the role of each entry, and the local work that trains it.

    Args:
        label: The method's name, for messages.
        module: A stateless template, after surgery.
        entries: The model's entries, in order.
        initial: Initial state of server and clients.
        loaded: Names of the entries that clients load.
        adopted: Names of the entries that a client keeps, but loads from the server in its first round.
        sent: Names of the entries that clients send.
        trained: Names of the parameters that the optimizer updates.
        trainable: Names of the parameters that the network lets an optimizer update.
        keepers: Names of the method's components that keep an entry on clients, by entry.
        norm_replacers: Names of the components that replace normalization layers; empty: none does.
        work: Local work of a round.
        optimizer: The local optimizer.
        loss: Computes the mean loss of a batch from outputs and labels.
        freeze_from: First round (from 0) with frozen statistics.
        seed: Seed of the trial, which keys the server's random draws.
        text: All choices of the method in one line, which keys them, too.
        precision: Precision in which layers compute; parameters, statistics, losses and updates keep their dtype, which
            is float32, or float64 with that precision.
        traits: What a trial of the network showed.

    """

    label: str
    module: nn.Module
    entries: tuple[Entry, ...]
    initial: State
    loaded: frozenset[str]
    adopted: frozenset[str] = frozenset()
    sent: frozenset[str]
    trained: frozenset[str]
    trainable: frozenset[str] = frozenset()
    keepers: Mapping[str, str] = field(default_factory=dict)
    norm_replacers: str = ""
    work: Work
    optimizer: Optimizer
    loss: Loss
    freeze_from: float = float("inf")
    seed: int = 0
    text: str = ""
    precision: Precision = "float32"
    traits: Traits = field(default_factory=Traits)
    _held: set[str] = field(default_factory=set, init=False, repr=False)

    @property
    def personal(self) -> frozenset[str]:
        """Entries that a client keeps from round to round instead of loading them."""
        return frozenset(self.initial) - self.loaded

    @cached_property
    def whole(self) -> frozenset[str]:
        """Buffers without a mean (:mod:`fedshift.core.buffers`), and fixed parameters with values that have none."""
        fixed = {entry.name for entry in self.entries if not entry.is_buffer} - self.trained
        buffers = frozenset(entry.name for entry in self.entries if entry.kind in WHOLE)
        return buffers | {name for name in fixed if not _has_mean(self.initial[name])}

    def entries_fixed_in(self, round: int) -> frozenset[str]:
        """Return the entries that local work does not change in ``round`` (from 0): untrained or frozen ones."""
        frozen = round >= self.freeze_from
        return frozenset(
            entry.name
            for entry in self.entries
            if (frozen and norm_statistics(entry) if entry.is_buffer else entry.name not in self.trained)
        )

    def refuse_kept(self, use: str, names: Collection[str]) -> UsageError:
        """Return the error for a ``use`` of shared entries if clients keep some of ``names``."""
        kept = min({*names} - self.loaded or names)
        why = f"but {self.keepers.get(kept, 'another part')} keeps {kept!r} on clients"
        return UsageError(f"{use}, {why}: use one of the two, or choose other layers")

    def find_lr(self, round: int) -> float:
        """Return the learning rate of local work in ``round`` (from 0)."""
        return self.optimizer.lr_in_round(round)

    @cached_property
    def params(self) -> State:
        """Initial values of the model's trained entries."""
        return pick(self.initial, self.trained)

    @cached_property
    def buffers(self) -> State:
        """Initial values of the model's other entries."""
        return pick(self.initial, self.initial.keys() - self.trained)

    @cached_property
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
        on_cpu = all(tensor.device.type == "cpu" for tensor in self.initial.values())
        if on_cpu and self.dtype == torch.float32 and not self.traits.contiguous:
            for kind, layout in ((nn.Conv2d, torch.channels_last), (nn.Conv3d, torch.channels_last_3d)):
                if any(isinstance(layer, kind) for layer in self.layers):
                    return layout
        return torch.contiguous_format

    @cached_property
    def layers(self) -> tuple[nn.Module, ...]:
        """All modules of the template, starting with the template itself."""
        return tuple(self.module.modules())

    @cached_property
    def keyed(self) -> bool:
        """Return whether layers draw under a key."""
        return any(isinstance(layer, Keyed) for layer in self.layers)

    @cached_property
    def normalizing(self) -> frozenset[nn.Module]:
        """Layers that own running statistics of BatchNorm."""
        return frozenset(entry.owner for entry in self.entries if norm_statistics(entry))

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
        self._held.update(leaves)
        try:
            yield leaves
        finally:
            self._held.clear()
            for name, leaf in leaves.items():
                leaf.grad = None
                if leaf.data_ptr() != params[name].data_ptr():
                    params[name].copy_(leaf.detach())

    def clone_for_training(self, state: State) -> State:
        """Return a copy of ``state`` in the memory format of local work, whatever the format of ``state``."""
        if self.image_format == torch.contiguous_format:
            return clone(state)
        return {name: to_memory_format(tensor.clone(), self.image_format) for name, tensor in state.items()}

    def find_layer(self, wanted: str, reader: str) -> nn.Module:
        """Return the layer named ``wanted`` (``"last"``: the last with entries), whose input ``reader`` reads."""
        named: dict[str, nn.Module] = dict(self.module.named_modules())
        if wanted == "last":
            return next(entry.owner for entry in self.entries if entry.from_end == 0)
        if wanted not in named:
            near = get_close_matches(wanted, filter(None, named), cutoff=0.3)
            raise UsageError(
                f"method {self.label!r}: {reader} reads the input of layer {wanted!r}, which the model lacks"
                f"{'; similar names: ' + ', '.join(near) if near else ''}: name a layer of the model, or 'last'"
            )
        return named[wanted]


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


def compute_outputs(network: Network, state: State, x: Tensor, *, training: bool | None = None) -> Tensor:
    """Return the outputs of :func:`compute_features`."""
    return compute_features(network, state, x, {}, training=training)[0]


def compute_features(
    network: Network, state: State, x: Tensor, layers: Mapping[str, nn.Module], *, training: bool | None,
    frozen: bool = False, first: bool = True, in_place: bool | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the template's outputs under ``state`` for inputs ``x [B, ...]``, and the inputs of ``layers``, by reader.

    Both are in the model's dtype. Buffers that the network writes or assigns are written into ``state``.

    Args:
        network: The network.
        state: Values of its entries.
        x: Inputs.
        layers: Layers whose inputs are returned.
        training: Whether layers are in training mode; None: they remain in theirs.
        frozen: Whether BatchNorm layers are in evaluation mode always.
        first: Whether layers that override ``train()`` are switched to training, as at the start of a round.
        in_place: Whether the template's own tensors hold the entries, as in plain PyTorch; otherwise, as in
            ``torch.func.functional_call``, other tensors replace them, which passes by what holds the template's
            tensors elsewhere. None: in place, unless a transform of ``torch.func`` or autograd needs the tensors of
            ``state``, or a backward pass the entries that are in place now.

    """
    if in_place is None:
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in state.values())
        in_place = not (differentiated or network._held or torch._C._functorch.peek_interpreter_stack())
    if network.traits.exchange and not in_place:
        raise UsageError(
            f"another model's weights cannot take the place of this model's ({network.traits.exchange}), because "
            "something else holds its parameters, such as a closure, a list, a hook or a checkpoint: call the layers "
            "themselves in forward, or use a method that runs no second model, and the sequential engine"
        )
    seen: dict[nn.Module, Tensor] = {}
    with ExitStack() as stack:
        for layer in set(layers.values()):
            stack.enter_context(layer.register_forward_pre_hook(lambda layer, x: seen.update({layer: x[0]})))
        stack.enter_context(_placed(network, state, in_place=in_place))
        if network.autocast:
            stack.enter_context(torch.autocast(x.device.type, network.autocast))
        if training is not None:
            stack.enter_context(_switched(network, training=training, frozen=frozen, first=first))
        outputs = network.module(x.clone() if network.traits.writes_inputs else x)
    if not isinstance(outputs, Tensor):
        raise UsageError(_describe_wrong_outputs(network.module, outputs))
    for reader, layer in layers.items():
        if layer not in seen:
            raise UsageError(
                f"method {network.label!r}: {reader} reads the input of a {type(layer).__name__}, which the model does "
                "not call in its forward pass: name a layer that it calls"
            )
    return outputs.to(network.dtype), {reader: seen[layer].to(network.dtype) for reader, layer in layers.items()}


@contextmanager
def _switched(network: Network, *, training: bool, frozen: bool, first: bool) -> Iterator[None]:
    """Switch layers to training or evaluation; if some override the switch, call it, and back after evaluation."""
    if not network.overrides_mode:
        for layer in network.layers:
            layer.training = training
    elif first or not training:
        (network.module.train if training else network.module.eval)()
    for layer in network.normalizing if frozen else ():
        layer.training = False  # without its children, such as a dropout
    try:
        yield
    finally:
        if network.overrides_mode and not training:
            network.module.train()


@contextmanager
def _placed(network: Network, state: State, *, in_place: bool) -> Iterator[None]:
    """Put ``state`` in place of the template's values (``in_place``) or tensors, and copies of other buffers."""
    try:
        for held, key, name, own in network.slots:
            if not name or not in_place:
                held[key] = state[name] if name else own.clone()
            elif own is not (tensor := state[name]) and own.data_ptr() != tensor.data_ptr():
                own.data = tensor
        yield
    finally:
        for held, key, name, own in network.slots:
            now = held.get(key, own)
            if now is not own:
                held[key] = own
            if in_place and name and now is not (tensor := state[name]) and now.data_ptr() != tensor.data_ptr():
                _write(state, name, now.detach())


def _write(state: State, name: str, value: Tensor) -> None:
    """Write an entry that a network assigned, which may have grown, into ``state``."""
    if (value.shape, value.dtype) == (state[name].shape, state[name].dtype):
        state[name].copy_(value)
    else:
        state[name] = value.clone()


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
    network: Network, state: State, x: Tensor, *, training: bool = False, frozen: bool = False,
    key: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the model's outputs under ``state`` for inputs ``x``; in training, buffers of ``state`` are updated.

    ``frozen``: whether statistics are frozen. ``key``: int64 scalar that keys dropout masks; default 0.
    """
    state = state if training or not network.traits.writes_in_evaluation else clone(state)
    x = to_memory_format(x, network.image_format)
    with dropout_key(torch.zeros((), dtype=torch.int64, device=x.device) if key is None else key):
        return compute_features(network, state, x, {}, training=training, frozen=frozen)[0]


def to_inputs(network: Network, x: Tensor) -> Tensor:
    """Return samples in the model's dtype; keep integers, such as tokens."""
    return x.to(network.dtype) if x.is_floating_point() else x


def to_memory_format(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """Return images ``[N, C, H, W]``, or volumes for ``channels_last_3d``, in ``layout``; others unchanged."""
    dimensions = 5 if layout == torch.channels_last_3d else 4
    return tensor.contiguous(memory_format=layout) if tensor.ndim == dimensions else tensor
