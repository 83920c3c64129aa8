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
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
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
from ..data.samples import Samples, count_memory
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
    """The end of the network ``whole``, with all its entries: the modules ``last``, which run one after another."""

    def __init__(self, whole: nn.Module, last: Sequence[nn.Module]) -> None:
        super().__init__()
        for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[held] = whole.__dict__[held]
        self.last = list(last)

    def forward(self, x: Tensor) -> Any:
        """Return the network's outputs for features ``x [B, ...]``."""
        for module in self.last:
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
            chunks = [slice(start, start + CHUNK) for start in range(0, len(split), CHUNK)]
            features = [self.run(split.inputs(chunk, self.plan.dtype)) for chunk in chunks]
            _KEPT[key] = split, torch.cat(features) if features else torch.empty(0)  # no others get the address
        _KEPT.move_to_end(key)
        x = _KEPT[key][1]
        while count_memory(samples for samples, _ in _KEPT.values()) + sum(x.nbytes for _, x in _KEPT.values()) > LIMIT:
            _KEPT.popitem(last=False)
        return Samples(x=x, y=split.y, group=split.group)

    def run(self, x: Tensor) -> Tensor:
        """Return the features of inputs ``x [B, ...]``."""
        return self.compare(self.plan.initial, x)[0]

    def compare(self, state: State, x: Tensor, *, training: bool = False) -> tuple[Tensor, Tensor]:
        """Return the features of ``x [B, ...]``, and the outputs, in a pass of the whole network under ``state``.

        Raises :class:`UsageError` if the head is not called once with one tensor.
        """
        assert isinstance(self.head.module, Head)
        inputs = list[Tensor | None]()

        def note(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            single = len(arguments) == 1 and not options and isinstance(arguments[0], Tensor)
            inputs.append(arguments[0].clone() if single else None)

        with self.head.module.last[0].register_forward_pre_hook(note, with_kwargs=True):
            outputs = forward(self.plan, clone(state), x, training=training, frozen=self.plan.freeze_from == 0)
        if len(inputs) != 1 or inputs[0] is None:
            raise UsageError("the head of the network is not called once, with one tensor")
        return inputs[0], outputs


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
    fixed = plan.entries_fixed_in(0)
    inputs_change = augment is not None or any(split.draws or not split.repeats for split in splits)
    rules_read = plan.feature_layers or any(map(plan.defines, ("batch", "start", "loss")))
    if not splits or not fixed or inputs_change or rules_read or plan.overrides_mode or plan.autocast:
        return None
    owners = {entry.owner for entry in plan.entries if entry.name not in fixed}
    x = splits[0].inputs(slice(0, 3), plan.dtype)
    x = x if len(x) > 1 else torch.cat([x, x])  # one sample has no variance
    heads = (replace(plan, module=Head(plan.module, last)) for last in _list_ends(plan.module, owners))
    backbone = next((cut for cut in (Backbone(plan=plan, head=head) for head in heads) if _is_sound(cut, x)), None)
    if backbone is None or max(map(len, splits)) * (features := backbone.run(x))[0].nbytes > SPLIT_LIMIT:
        return None
    entries = tuple((name, _to_bytes(plan.initial[name])) for name in sorted(fixed))
    return replace(backbone, key=(str(backbone.head.module), hash(entries), _to_bytes(features), plan.dtype))


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def _list_ends(module: nn.Module, owners: Collection[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yield the modules after a cut, from the last cut to the first.

    Before a cut there are no ``owners`` of entries that change, and no layers that draw or see a batch.
    """

    def changes(layer: nn.Module) -> bool:
        sees_batch = isinstance(layer, _BatchNorm) and layer.running_mean is None
        return layer in owners or isinstance(layer, Keyed) or sees_batch

    children = list(module.children())
    changing = [place for place, child in enumerate(children) if any(map(changes, child.modules()))]
    if len(changing) == 1 and not changes(module):
        child = children[changing[0]]
        yield from _list_ends(child, owners)
        yield [child]
    if type(module) is nn.Sequential and changing and changing[0]:
        yield children[changing[0] :]


def _is_sound(backbone: Backbone, x: Tensor) -> bool:
    """Return whether features of ``x [B, ...]`` agree in training and for single samples, and yield the outputs.

    They must yield the outputs of far weights, too, which a network or its hooks may limit.
    """
    plan = backbone.plan
    far = {name: FAR * tensor if name in plan.trained else tensor for name, tensor in plan.initial.items()}
    try:
        return all(_agrees(backbone, state, x) for state in (plan.initial, far))
    except UsageError:  # what is cut has another input or output than one tensor
        return False


def _agrees(backbone: Backbone, state: State, x: Tensor) -> bool:
    features, outputs = backbone.compare(state, x)
    before = peek_generators()
    same, trained = backbone.compare(state, x, training=True)
    draws = peek_generators() != before
    alone, _ = backbone.compare(state, x[:1])
    frozen = backbone.plan.freeze_from == 0
    shorter, shorter_trained = (
        forward(backbone.head, clone(state), features, training=training, frozen=frozen) for training in (False, True)
    )
    equal = torch.equal(features, same) and torch.equal(outputs, shorter) and torch.equal(trained, shorter_trained)
    return equal and not draws and torch.allclose(alone, features[:1], rtol=1e-4, atol=1e-5)
