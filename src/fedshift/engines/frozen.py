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
from functools import cached_property, partial
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
    def parts(self) -> list[nn.Module]:
        """The modules that run one after another; the first one's input are the features."""
        cut = self.get_submodule(self.name)
        return list(cut.children())[self.first :] if self.first else [cut]

    def forward(self, x: Tensor) -> Any:
        """Return the network's outputs for features ``x [B, ...]``."""
        for part in self.parts:
            x = part(x)
        return x


@dataclass(frozen=True, kw_only=True, eq=False)
class Backbone:
    """The fixed first part of a network; ``plan`` is the trial's, ``head`` the plan of steps on features.

    ``probe``: the features of a few samples, which tell networks that print alike from one another.
    """

    plan: Plan
    head: Plan
    probe: Tensor | None = None

    def is_unchanged(self, server: ServerState) -> bool:
        """Return whether the server's fixed entries have their initial values, so that features hold for all rounds."""
        fixed = self.plan.entries_fixed_in(0) & server.shared.keys()
        return all(torch.equal(server.shared[name], self.plan.initial[name]) for name in fixed)

    def extract(self, split: Samples) -> Samples:
        """Return ``split`` with features in place of samples, from memory if an earlier trial has extracted them."""
        key = self._values, split.address, split.normalization.stamp, torch.get_num_threads()
        if key not in _KEPT:
            starts = range(0, len(split), CHUNK)
            parts = [self._run(split.inputs(slice(start, start + CHUNK), self.plan.dtype)) for start in starts]
            x = torch.cat(parts) if parts else torch.empty(0)
            _KEPT[key] = split, x  # samples stay, so that no others get their address
        _KEPT.move_to_end(key)
        x = _KEPT[key][1]
        while count_bytes(held for held, _ in _KEPT.values()) + sum(each.nbytes for _, each in _KEPT.values()) > LIMIT:
            _KEPT.popitem(last=False)
        return Samples(x=x, y=split.y, group=split.group)

    @cached_property
    def _values(self) -> Hashable:
        """What features depend on except samples: the network, its fixed entries, and the place of the cut."""
        assert self.probe is not None
        fixed = {name: self.plan.initial[name] for name in sorted(self.plan.entries_fixed_in(0))}
        values = tuple((name, _to_bytes(tensor)) for name, tensor in fixed.items())
        return str(self.head.module), hash(values), _to_bytes(self.probe), self.plan.dtype

    def _run(self, x: Tensor) -> Tensor:
        return _reach(self.plan, self.head.module, self.plan.initial, x, training=False)[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What steps and evaluations run on: samples, or features of a ``backbone`` with the plan of its head."""

    plan: Plan
    train: Data
    measured: Federation
    backbone: Backbone | None = None

    def fit(self, server: ServerState) -> bool:
        """Return whether the features are valid for the entries of ``server``."""
        return self.backbone is None or self.backbone.is_unchanged(server)

    def extract(self, augment: Augmentation | None) -> Inputs:
        """Return the features of these samples where the plan has a backbone, the samples themselves otherwise."""
        measured = (split for client in self.measured.clients for split in client.splits.values())
        splits = {id(split): split for split in (*self.train.values(), *measured)}
        backbone = find_backbone(self.plan, splits.values(), augment)
        if backbone is None:
            return self
        train = {name: backbone.extract(split) for name, split in self.train.items()}
        measured_on = self.measured.map_splits(backbone.extract)
        return Inputs(plan=backbone.head, train=train, measured=measured_on, backbone=backbone)


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
    for name, first in _list_cuts(plan, changing):
        found = Backbone(plan=plan, head=replace(plan, module=Head(plan.module, name, first)))
        if _is_sound(found, x):
            probe = found._run(x)
            fits = max(map(len, splits)) * probe[0].nbytes <= SPLIT_LIMIT
            return replace(found, probe=probe) if fits else None
    return None


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def _list_cuts(plan: Plan, changing: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yield the places to cut, as :class:`Head` takes them, from the last one to the first.

    ``changing``: the entries that are not fixed; before a cut there are none, and no layers that draw or see a batch.
    """
    owners = {entry.owner for entry in plan.entries if entry.name in changing}
    modules = dict(plan.module.named_modules())
    sees_batch = {layer for layer in modules.values() if isinstance(layer, _BatchNorm) and layer.running_mean is None}
    draws = {layer for layer in modules.values() if isinstance(layer, Keyed)}
    after = [name for name, module in modules.items() if module in owners | sees_batch | draws]
    name = after[0]
    while name and not all(map(partial(_is_in, name), after)):
        name = name.rpartition(".")[0]
    while True:
        children = [f"{name}.{child}".lstrip(".") for child, _ in modules[name].named_children()]
        holding = [any(map(partial(_is_in, child), after)) for child in children]
        if type(modules[name]) is nn.Sequential and True in holding[1:] and not holding[0]:
            yield name, holding.index(True)
        if not name:
            return
        yield name, 0
        name = name.rpartition(".")[0]


def _is_in(module: str, name: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


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
    features, outputs = _reach(plan, head.module, state, x, training=False)
    before = peek_generators()
    same, trained = _reach(plan, head.module, state, x, training=True)
    draws = peek_generators() != before
    alone, _ = _reach(plan, head.module, state, x[:1], training=False)
    frozen = plan.freeze_from == 0
    shorter = [forward(head, clone(state), features, training=training, frozen=frozen) for training in (False, True)]
    equal = torch.equal(features, same) and torch.equal(outputs, shorter[0]) and torch.equal(trained, shorter[1])
    return equal and not draws and torch.allclose(alone, features[:1], rtol=1e-4, atol=1e-5)


def _reach(plan: Plan, head: nn.Module, state: State, x: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
    """Return what ``head`` is given in a pass of the whole network, and the outputs."""
    assert isinstance(head, Head)
    given: list[Tensor] = []

    def note(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if given or options or len(arguments) != 1 or not isinstance(arguments[0], Tensor):
            raise UsageError(f"{head.name!r} is called more than once, or with another input than one tensor")
        given.append(arguments[0].clone())

    with head.parts[0].register_forward_pre_hook(note, with_kwargs=True):
        outputs = forward(plan, clone(state), x, training=training, frozen=plan.freeze_from == 0)
    if not given:
        raise UsageError(f"{head.name!r} is not called")
    return given[0], outputs
