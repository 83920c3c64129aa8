"""A frozen backbone runs once per sample, so that training a head costs only the head.

If all trained layers are at the end of a network, and the layers before them map a sample to the same features in every
step, features can replace samples. This requires that the entries of the first part are fixed in all rounds
(``requires_grad=False``, and BatchNorm's statistics frozen from round 0 on: FixBN with ``switch=0``), that the first
part makes no random draws and processes samples independently, and that neither augmentation nor a rule changes inputs.
Steps on features equal steps on samples up to rounding, since products may round differently in another batch size.

The first part is removed from the forward pass, not from the state: entries, names and uploads are unchanged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.network import forward
from ..core.plan import Plan
from ..core.states import ServerState
from ..data.augmentation import Augmentation
from ..data.federation import Federation
from ..data.samples import Samples, count_bytes
from ..nn.dropout import Keyed
from ..utils.errors import UsageError
from ..utils.random_streams import peek_generators
from ..utils.state import State, clone
from .engine import Data

LIMIT = 2**30
"""Most bytes of features and their samples that are kept for later trials."""
SPLIT_LIMIT = 2**28
"""Most bytes of the features of one client's split.

A limit on all clients together would let a site, which knows only its own samples, decide otherwise than a simulation.
"""
CHUNK = 100
"""Samples in a forward pass of the backbone."""
FAR = 30
"""Factor of the trained entries in a second comparison of features with samples."""
FITTING = ("skip", "average")
"""Policies for clients that never trained which run no backbone; others may change its statistics."""


class Head(nn.Module):
    """The last part of ``whole``, with all its entries: the module ``name``, or its children from ``first`` on."""

    def __init__(self, whole: nn.Module, name: str, first: int) -> None:
        super().__init__()
        for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[held] = whole.__dict__[held]
        self.name, self.first = name, first

    @property
    def modules_in_order(self) -> list[nn.Module]:
        """The modules that run one after another; the first one's input are the features."""
        cut = self.get_submodule(self.name)
        return list(cut.children())[self.first :] if self.first else [cut]

    def forward(self, x: Tensor) -> Any:
        """Return the network's outputs for features ``x [B, ...]``."""
        for module in self.modules_in_order:
            x = module(x)
        return x


@dataclass(frozen=True, kw_only=True, eq=False)
class Backbone:
    """The fixed first part of a network; ``plan`` is the trial's, ``head`` the plan of steps on features.

    ``key``: a value that all networks with these features share, and no others.
    """

    plan: Plan
    head: Plan
    key: Hashable = None

    def extract(self, split: Samples) -> Samples:
        """Return ``split`` with features in place of samples, from memory if an earlier trial has extracted them."""
        key = self.key, split.address, split.normalization.stamp, torch.get_num_threads()
        if key not in _KEPT:
            pieces = (slice(start, start + CHUNK) for start in range(0, max(1, len(split)), CHUNK))
            features = [self.run(split.inputs(piece, self.plan.dtype)) for piece in pieces if len(split)]
            _KEPT[key] = split, torch.cat(features) if features else torch.empty(0)  # no others get the address
        _KEPT.move_to_end(key)
        x = _KEPT[key][1]
        while count_bytes(samples for samples, _ in _KEPT.values()) + sum(x.nbytes for _, x in _KEPT.values()) > LIMIT:
            _KEPT.popitem(last=False)
        return Samples(x=x, y=split.y, group=split.group)

    def run(self, x: Tensor) -> Tensor:
        """Return the features of inputs ``x [B, ...]``."""
        return _reach(self, self.plan.initial, x, training=False)[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What steps and evaluations run on: samples, or features of a ``backbone`` with the plan of its head."""

    plan: Plan
    train: Data
    measured: Federation
    backbone: Backbone | None = None

    def fit(self, server: ServerState) -> bool:
        """Return whether ``server``'s fixed entries have their initial values, so that features hold for all rounds."""
        plan = self.plan
        fixed = plan.entries_fixed_in(0) & server.shared.keys() if self.backbone else ()
        return all(torch.equal(server.shared[name], plan.initial[name]) for name in fixed)

    def extract(self, augment: Augmentation | None) -> Inputs:
        """Return the features of these samples where the plan has a backbone, the samples themselves otherwise."""
        measured = [split for client in self.measured.clients for split in client.splits.values()]
        backbone = find_backbone(self.plan, [*self.train.values(), *measured], augment)
        if backbone is None:
            return self
        train = {name: backbone.extract(split) for name, split in self.train.items()}
        features = self.measured.map_splits(backbone.extract)
        return Inputs(plan=backbone.head, train=train, measured=features, backbone=backbone)


_KEPT: OrderedDict[Hashable, tuple[Samples, Tensor]] = OrderedDict()


def find_backbone(plan: Plan, splits: Iterable[Samples], augment: Augmentation | None = None) -> Backbone | None:
    """Return the backbone of ``plan`` if it can run once for each sample of ``splits``; None if there is none.

    The network is cut before the smallest module that holds all that trains, or inside of an ``nn.Sequential`` before
    the first of its modules that trains, where what follows the cut gives the outputs.
    """
    splits = [split for split in splits if len(split)]
    changing = frozenset(plan.initial) - plan.entries_fixed_in(0)
    inputs_change = augment is not None or any(split.draws or not split.repeats for split in splits)
    rules_read = plan.feature_layers or any(map(plan.defines, ("batch", "start", "loss")))
    acts = plan.overrides_mode or plan.autocast or changing == frozenset(plan.initial)
    if not splits or inputs_change or rules_read or acts:
        return None
    x = splits[0].inputs(slice(0, 3), plan.dtype)
    x = x if len(x) > 1 else torch.cat([x, x])  # one sample has no variance
    cuts = (replace(plan, module=Head(plan.module, *cut)) for cut in _list_cuts(plan, changing))
    backbone = next((cut for cut in (Backbone(plan=plan, head=head) for head in cuts) if _is_sound(cut, x)), None)
    if backbone is None or max(map(len, splits)) * (features := backbone.run(x))[0].nbytes > SPLIT_LIMIT:
        return None
    fixed = [(name, _to_bytes(plan.initial[name])) for name in sorted(plan.entries_fixed_in(0))]
    key = str(backbone.head.module), hash(tuple(fixed)), _to_bytes(features), plan.dtype
    return replace(backbone, key=key)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def _list_cuts(plan: Plan, changing: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yield the places to cut, as :class:`Head` takes them, from the last one to the first.

    ``changing``: the entries that are not fixed; before a cut there are none, and no layers that draw or see a batch.
    """
    owners = {entry.owner for entry in plan.entries if entry.name in changing}
    after = [
        tuple(name.split(".")) if name else ()
        for name, module in plan.module.named_modules()
        if module in owners
        or isinstance(module, Keyed)
        or (isinstance(module, _BatchNorm) and module.running_mean is None)
    ]
    levels = enumerate(zip(*after, strict=False))
    most = next((depth for depth, names in levels if len(set(names)) > 1), min(map(len, after)))
    for path in (after[0][:depth] for depth in range(most, -1, -1)):
        name = ".".join(path)
        module = plan.module.get_submodule(name)
        children = [(*path, child) for child, _ in module.named_children()]
        first = next((at for at, child in enumerate(children) if child in {other[: len(child)] for other in after}), 0)
        if type(module) is nn.Sequential and first:
            yield name, first
        if name:
            yield name, 0


def _is_sound(backbone: Backbone, x: Tensor) -> bool:
    """Return whether features of ``x [B, ...]`` agree in training and for single samples, and yield the outputs.

    They must yield the outputs of far weights, too, which a network or its hooks may limit.
    """
    plan = backbone.plan
    far = {name: FAR * tensor if name in plan.trained else tensor for name, tensor in plan.initial.items()}
    try:
        return _agrees(backbone, plan.initial, x) and _agrees(backbone, far, x)
    except UsageError:  # what is cut has another input or output than one tensor
        return False


def _agrees(backbone: Backbone, state: State, x: Tensor) -> bool:
    plan, head = backbone.plan, backbone.head
    features, outputs = _reach(backbone, state, x, training=False)
    before = peek_generators()
    same, trained = _reach(backbone, state, x, training=True)
    draws = peek_generators() != before
    alone, _ = _reach(backbone, state, x[:1], training=False)
    frozen = plan.freeze_from == 0
    shorter = [forward(head, clone(state), features, training=training, frozen=frozen) for training in (False, True)]
    equal = torch.equal(features, same) and torch.equal(outputs, shorter[0]) and torch.equal(trained, shorter[1])
    return equal and not draws and torch.allclose(alone, features[:1], rtol=1e-4, atol=1e-5)


def _reach(backbone: Backbone, state: State, x: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
    """Return what the head is given in a pass of the whole network, and the outputs."""
    plan, head, inputs = backbone.plan, backbone.head.module, list[Tensor]()
    assert isinstance(head, Head)

    def note(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if inputs or options or len(arguments) != 1 or not isinstance(arguments[0], Tensor):
            raise UsageError(f"{head.name!r} is called more than once, or with another input than one tensor")
        inputs.append(arguments[0].clone())

    with head.modules_in_order[0].register_forward_pre_hook(note, with_kwargs=True):
        outputs = forward(plan, clone(state), x, training=training, frozen=plan.freeze_from == 0)
    if not inputs:
        raise UsageError(f"{head.name!r} is not called")
    return inputs[0], outputs
