"""Federations: named clients, each with training, validation and test samples.

Every method returns a new federation and leaves the original unchanged. Draws are keyed, so that a subset or a held-out
part is the same in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..nn.several_inputs import Inputs, name_inputs
from ..tasks.classification import CLASSIFICATION, MOST_CLASSES
from ..tasks.segmentation import Segmentation
from ..tasks.task import PLURALS as PLURALS
from ..tasks.task import Task
from ..utils.errors import Ref, UsageError, unknown_name
from ..utils.random_streams import stream
from ..utils.words import Information, join_some
from .agreement import check_scales, name_scales
from .columns import Column
from .decoding import ARRAY, Decoding
from .decoding.resizing import describe_stretch, resize, resize_masks
from .identity import refuse_hidden
from .patches import Patches, Size
from .preparation import FeatureScaling, Normalization, Preparation
from .samples import (
    Samples,
    describe_shape,
    digest_samples,
    is_whole,
    join_samples,
    map_store,
)
from .schema import Schema
from .stores import LazyStore

SHOWN = 20
"""Maximum number of clients to print one by one."""
LAZY = Information(
    "samples that are not in memory are read when a batch needs them, and not compared with each other before a run: "
    "`fedshift data check` finds copies"
)
"""Notice for a federation with lazy samples."""
UNREPEATABLE = (
    "a transform draws from a generator that cannot be set, so a resumed run differs from one that never stopped"
)
"""Notice for lazy samples that differ on each read; it follows the split's name."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ClientData:
    """One client's samples; ``validation`` is None if none was held out.

    ``files``: the file of each row of the array that the splits share; empty if samples are not files.
    ``decoding``: how these files were decoded.
    """

    name: str
    train: Samples
    test: Samples
    validation: Samples | None = None
    files: tuple[str, ...] = ()
    decoding: Decoding = ARRAY

    @classmethod
    def from_splits(cls, name: str, splits: Mapping[str, Any], files: tuple[str, ...] = ()) -> ClientData:
        """Return a client with ``splits``: samples by split name."""
        return cls(name=name, files=files, **splits)

    def with_splits(self, splits: Mapping[str, Any]) -> ClientData:
        """Return the client with these splits replaced."""
        return replace(self, **splits)

    def __repr__(self) -> str:
        return f"Client {self.name!r}: " + ", ".join(f"{name} {split!r}" for name, split in self.splits.items())

    @property
    def splits(self) -> dict[str, Samples]:
        """The existing splits by name: train, test and optionally validation."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Federation:
    """Named clients that share one task.

    Attributes:
        classes: Number of classes; for a task without classes, the number of labels or targets.
        task: The prediction task.
        note: Description of the data in one sentence.
        class_names: Meaning of the labels 0, 1, ...; empty if unknown.
        notices: Remarks on how the data were read; those about one client begin with ``client 'name':``.
        faults: Remarks, in the same form, on files or folders that could be data but were skipped.
        columns: Encodings of a table's columns, in the order of the inputs; empty if unknown.
        inputs: Layout of a sample's row if a network is given several inputs; empty: a sample is one array.

    """

    name: str
    clients: tuple[ClientData, ...]
    classes: int
    note: str = ""
    class_names: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    task: Task = CLASSIFICATION
    inputs: Inputs = ()

    def __post_init__(self) -> None:
        if self.classes > MOST_CLASSES:
            raise UsageError(
                f"{{}}: at most {MOST_CLASSES} are possible; correct the number", Ref(classes=self.classes)
            )

    def __repr__(self) -> str:
        """List the clients with the size of each split and the number of classes in their training data."""
        named = [f"inputs {', '.join(map(str, self.inputs))}"] if self.inputs else []
        shapes = dict.fromkeys(
            named or [describe_shape(split) for client in self.clients for split in client.splits.values()]
        )
        title = f"Federation {self.name!r}: {len(self.clients)} clients, {self.outputs}"
        parts = [name for name in ("train", "validation", "test") if any(name in c.splits for c in self.clients)]
        rows = [("client", *parts, PLURALS[self.task.output])]
        for client in self.clients[:SHOWN]:
            sizes = [str(len(client.splits[name])) if name in client.splits else "-" for name in parts]
            occurring = self.task.count_classes(client.train.y, self.classes).count_nonzero()
            rows.append((client.name, *sizes, str(int(occurring) or self.classes)))
        longest = max(len(name) for name, *_ in rows)
        lines = [name.ljust(longest) + "".join(cell.rjust(12) for cell in cells) for name, *cells in rows]
        more = [f"and {len(self.clients) - SHOWN} more"] if len(self.clients) > SHOWN else []
        return "\n".join([", samples of ".join([title, *([" and ".join(shapes)] if shapes else [])]), *lines, *more])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the clients, in the order used in result tables."""
        return tuple(client.name for client in self.clients)

    @property
    def lazy(self) -> bool:
        """Return whether any client's samples are read on demand instead of kept in memory."""
        return any(split.lazy for client in self.clients for split in client.splits.values())

    @property
    def outputs(self) -> str:
        """Number of classes, labels or targets in words: ``10 classes``."""
        return f"{self.classes} {self.task.output if self.classes == 1 else PLURALS[self.task.output]}"

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample, ``(C, H, W)`` for images."""
        return self.clients[0].train.shape

    @property
    def meanings(self) -> tuple[str, ...]:
        """Meaning of the labels 0, 1, ...; for a table without class names, the numbers themselves."""
        return self.class_names or (tuple(map(str, range(self.classes))) if self.columns else ())

    @cached_property
    def schema(self) -> Schema:
        """Return the meaning of samples and targets, for data that join these.

        The scaling is common to all clients or, if clients differ, the first client's, fitted to that client's samples.
        """
        made, scalings = self.describe_client(self.clients[0]), {client.train.normalization for client in self.clients}
        scaling = made.preparation.scaling
        if len(scalings) == 1 or isinstance(scaling, FeatureScaling):
            return made
        return replace(made, preparation=replace(made.preparation, scaling=replace(scaling, fitted=True)))

    def describe_client(self, client: ClientData) -> Schema:
        """Return what samples and targets mean, with the scaling of ``client``."""
        splits = {where: split for where, split in self.named_splits().items() if len(split)}
        scaling = client.train.normalization
        rows = isinstance(scaling, FeatureScaling)  # of a table, raw
        preparation = Preparation(
            shape=client.train.shape,
            dtype=str(torch.float64 if rows else client.train.dtype).removeprefix("torch."),
            decoding=client.decoding,
            scaling=scaling,
            columns=self.columns if rows else (),
            values=() if self.inputs else tuple(sorted(set(name_scales(splits).values()))),
            inputs=self.inputs,
            patched=client.train.patches is not None,
            resized=client.train.patches.resized if client.train.patches else (),
        )
        return Schema(
            name=self.name, task=self.task, classes=self.classes, class_names=self.class_names, columns=self.columns,
            preparation=preparation,
        )  # fmt: skip

    def client(self, name: str) -> ClientData:
        """Return the client with this name; raise :class:`UsageError`, which lists the names, if there is none."""
        for client in self.clients:
            if client.name == name:
                return client
        raise unknown_name("client", name, self.names)

    def select_clients(self, names: Iterable[str]) -> Federation:
        """Select the named clients, in the given order; drop the notices of others."""
        clients = tuple(self.client(name) for name in names)
        left_out = set(self.names).difference(client.name for client in clients)
        theirs = tuple(f"client {name!r}:" for name in left_out)
        notices, faults = (
            tuple(line for line in lines if not line.startswith(theirs)) for lines in (self.notices, self.faults)
        )
        return replace(self, clients=clients, notices=notices, faults=faults)

    def limit_samples(self, samples: int | Mapping[str, int]) -> Federation:
        """Keep ``samples`` training samples of each client, drawn once without replacement (the same in every run).

        With groups, whole groups are drawn as long as they fit.
        """
        clients = []
        for client in self.clients:
            count = samples if isinstance(samples, int) else samples[client.name]
            if count < 1:
                raise UsageError("{}: must be at least 1", Ref(samples=count))
            if len(client.train) < count:
                raise UsageError(
                    f"client {client.name!r} has {len(client.train)} training samples, fewer than samples={count}: "
                    f"ask for at most {min(len(c.train) for c in self.clients)}"
                ).about("samples")
            rng = stream(0, "subset", client.name)
            if client.train.group is None:
                index = rng.permutation(len(client.train))[:count]
            else:
                index = _draw_groups(client.train.units.numpy(), count, rng)
            clients.append(replace(client, train=client.train.take(torch.from_numpy(index))))
        return replace(self, clients=tuple(clients))

    def hold_out(self, fraction: float | None = None, *, size: int | None = None) -> Federation:
        """Move ``size`` training samples of each client, or a ``fraction``, to validation (the same in every run).

        With groups, these are numbers of groups, which move whole.
        """
        if (fraction is None) == (size is None):
            raise UsageError(f"validation={fraction}, size={size}: give exactly one of the two")
        if fraction is not None and not 0 < fraction < 1:
            raise UsageError("{}: must lie between 0 and 1", Ref(validation=fraction))
        asked = f"validation={fraction:g}" if fraction is not None else f"validation(size={size})"
        clients = []
        for client in self.clients:
            if client.validation is not None:
                raise UsageError(
                    f"client {client.name!r} has {len(client.validation)} validation samples already: leave {asked} out"
                )
            units = client.train.units
            order = torch.from_numpy(stream(0, "validation", client.name).permutation(int(units.max()) + 1))
            count = max(1, round(fraction * len(order))) if fraction is not None else size or 0
            if count >= len(order):
                raise UsageError(
                    f"{asked} leaves client {client.name!r} no training sample of {len(order)}: "
                    f"ask for {'a smaller fraction' if fraction is not None else 'fewer'}"
                ).about("validation")
            place = order.argsort()[units]
            index, held = place.argsort(stable=True), int((place < count).sum())  # copies, or a group, are on one side
            clients.append(
                replace(client, train=client.train.take(index[held:]), validation=client.train.take(index[:held]))
            )
        return replace(self, clients=tuple(clients))

    def map_splits(self, change: Callable[[Samples], Samples]) -> Federation:
        """Apply ``change`` once to every split, so that clients that share a split continue to share it."""
        change_once = cache(change)
        clients = (
            client.with_splits({name: change_once(split) for name, split in client.splits.items()})
            for client in self.clients
        )
        return replace(self, clients=tuple(clients))

    def fit_images(self, size: int | None = None) -> Federation:
        """Convert images to one shape: repeat gray channels if others have color, and resize to ``size`` pixels.

        Without ``size``, images of different sizes become 28 x 28, the size of the papers' digits. Resizing is bilinear
        with antialiasing for images and nearest-pixel for masks. Samples that are not images are unchanged, except that
        integers become floats if other samples are floats. Cases with patches keep their sizes, unless
        there is a ``size``. Raises :class:`UsageError` if channels cannot be matched.
        """
        shapes = {where: split.whole_shape for where, split in self.named_splits().items()}
        if all(len(shape) != 3 for shape in shapes.values()):
            volumes = [shape for shape in shapes.values() if len(shape) > 3 and set(shape[1:]) != {size}]
            if size and volumes:
                raise UsageError(
                    f"image_size={size} resizes images (C, H, W), not samples of shape {volumes[0]}: leave it out, and "
                    "resize volumes to one shape beforehand (volumes in NIfTI files are resized by the reader)"
                )
            if size and self.inputs:
                raise UsageError(
                    f"{{}} resizes samples of one image, and those of {self.name!r} have the inputs "
                    f"{name_inputs(self.inputs)}: leave it out, and resize images beforehand",
                    Ref(image_size=size),
                )
            if size and any(len(shape) < 3 for shape in shapes.values()):
                raise UsageError(f"{{}} resizes images, and {self.name!r} has none: leave it out", Ref(image_size=size))
            return self._match_types()
        flat = [where for where, shape in shapes.items() if len(shape) != 3]
        if flat:
            raise UsageError(f"{flat[0]}: samples of shape {shapes[flat[0]]} where others are images (C, H, W)")
        colors = Counter(shape[0] for shape in shapes.values() if shape[0] != 1)
        channels = colors.most_common(1)[0][0] if colors else 1
        odd = [where for where, shape in shapes.items() if shape[0] not in (1, channels)]
        if odd:
            raise UsageError(
                f"{odd[0]}: {shapes[odd[0]][0]} channels where others have {channels}: "
                f"bring every client to {channels} channels (gray, 1, is repeated by itself)"
            )
        sizes: set[tuple[int, ...]] = {shape[1:] for shape in shapes.values()}
        target = (size, size) if size else (28, 28) if len(sizes) > 1 else next(iter(sizes))
        cases = size is None and any(split.patches for split in self.named_splits().values())
        fit = cache(lambda store: _fit_store(store, channels, tuple(store.shape[2:]) if cases else target))  # once each

        def fit_split(split: Samples) -> Samples:
            made = split.replace(x=fit(split.store))
            if cases or split.y.ndim != 3:
                return made
            if split.patches and split.whole_shape[1:] != target:
                made = made.replace(patches=Patches.whole(split.patches.size, target, len(split.store), resized=target))
            return made.replace(y=resize_masks(split.y, target))

        told = [] if cases else [describe_stretch(sizes, target)]
        if len(sizes) > 1 and not size and not cases:
            some = join_some([f"{height} x {width}" for height, width in sorted(sizes)])
            told.append(f"images of {some} pixels become 28 x 28: image_size chooses another size")
        return replace(self.map_splits(fit_split), notices=(*self.notices, *filter(None, told)))

    def cut_patches(
        self, size: Size, *, true_sizes: Mapping[Any, NDArray[np.int64]] | None = None, resized: bool = False
    ) -> Federation:
        """Return the federation whose training takes patches of its samples; splits that have patches are unchanged.

        Args:
            size: Size of a patch; one number: along all axes.
            true_sizes: Size of each row without padding, ``[rows, axes]``, by store; other stores have no padding.
            resized: Files are resized to the size of the samples.

        Raises:
            UsageError: Samples have no masks, or ``size`` does not have a number for each of their axes.

        """
        asked, axes = Ref(patch=",".join(map(str, size[::-1]))), len(self.sample_shape) - 1
        if not isinstance(self.task, Segmentation) or self.inputs:
            other = "has samples of several inputs" if self.inputs else f"is for {self.task}"
            raise UsageError(f"{{}} is for images with masks, and {self.name} {other}: leave it out", asked)
        size = size * axes if len(size) == 1 else size
        if len(size) != axes:
            raise UsageError(
                f"{{}} has {len(size)} numbers, and samples have {axes} axes: give one number for each, or one for all",
                asked,
            )

        def cut(split: Samples) -> Samples:
            if split.patches is not None:
                return split
            whole = split.whole_shape[1:]
            made = Patches.whole(size, whole, len(split.store), resized=whole if resized else ())
            sizes = (true_sizes or {}).get(split.store)
            return split.replace(patches=made if sizes is None else replace(made, true_sizes=sizes))

        return self.map_splits(cut)

    def _match_types(self) -> Federation:
        """Return the federation with integers converted to floats, unless all samples are integers."""
        stores = [split.store for client in self.clients for split in client.splits.values()]
        if len(set(map(is_whole, stores))) < 2:
            return self
        convert = cache(lambda store: map_store(store, Tensor.float) if is_whole(store) else store)  # once for each
        return self.map_splits(lambda split: split.replace(x=convert(split.store)))

    def to(self, device: torch.device) -> Federation:
        """Return the clients with their samples on ``device``."""
        move = cache(lambda store: store.to(device))  # once for each shared array
        return self.map_splits(lambda split: split.replace(x=move(split.store)).to(device))

    def normalize(self, normalization: Normalization) -> Federation:
        """Return the federation whose images are scaled by ``normalization`` when a batch is taken."""
        wrong = max(len(normalization.mean), len(normalization.std))
        if self.clients and len(self.sample_shape) >= 3 and wrong not in (1, self.sample_shape[0]):
            raise UsageError(
                f"normalization of {wrong} channels for images of {self.sample_shape[0]}: give one of each"
            )
        return self.map_splits(lambda split: split.replace(normalization=normalization))

    def normalize_clients(self) -> Federation:
        """Return the federation with images scaled by the mean and deviation per channel of their client's training."""

        def normalize(client: ClientData) -> ClientData:
            fitted = Normalization.fit(client.train.read_all())
            return client.with_splits({k: split.replace(normalization=fitted) for k, split in client.splits.items()})

        return replace(self, clients=tuple(map(normalize, self.clients)))

    def pool(self) -> Federation:
        """Merge all clients into one named ``pooled`` (centralized training); shared splits count once."""
        parts: dict[str, list[Samples]] = {}
        for client in self.clients:
            for name, split in client.splits.items():
                parts.setdefault(name, []).append(split)
        joined = {name: join_samples(splits) for name, splits in parts.items()}
        return replace(self, clients=(ClientData.from_splits("pooled", joined),))

    @cached_property
    def digests(self) -> dict[str, str]:
        """Number and digest of the samples, and of the targets, of every split of every client, for a resumed run.

        They cover values in memory, items of lazy datasets, and what files hold that batches decode; if a split has
        more than 256 MB of such files, the name, size and time of change of each: copy these with their times
        (``cp -a``).
        """
        known = cache(digest_samples)
        return {
            f"client {client.name!r}, {name} {what}": f"{len(split)} ({digest})"
            for client in self.clients
            for name, split in client.splits.items()
            for what, digest in zip(("samples", "targets"), known(split), strict=True)
        }

    @property
    def fingerprint(self) -> str:
        """Digest of every sample and target of every split of every client."""
        return blake2b(f"{self.inputs}{self.digests}".encode(), digest_size=16).hexdigest()

    def check(self, *, allow_single_class: bool = False) -> Federation:
        """Return the federation if it can be trained on; otherwise raise :class:`UsageError` naming client and value.

        Errors are: no clients, duplicate names, an empty split, labels outside ``0..classes-1``, non-finite samples,
        samples of different shapes or scales, and (unless allowed) a client whose training data contain a single class.
        """
        if not self.clients:
            raise UsageError(f"federation {self.name!r} has no client: give it at least one")
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise UsageError(f"client name {twice[0]!r} occurs twice: names must differ")
        refuse_hidden((*self.names, *self.class_names))
        distinct: dict[Samples, str] = {}
        for client in self.clients:
            for name, split in client.splits.items():
                if distinct.setdefault(split, where := _locate(client.name, name)) == where:
                    split.check(where, self.task, self.classes)
            strata = self.task.strata(client.train.y)
            labels = torch.unique(strata) if strata is not None else torch.arange(0)
            if len(labels) == 1 and self.classes > 1 and not allow_single_class:
                raise UsageError(
                    f"client {client.name!r} has only class {int(labels[0])} in its {len(client.train)} training "
                    "samples: leave the client out, or allow it ({})",
                    Ref(allow_single_class=True),
                )
        shapes = {where: split.shape for where, split in self.named_splits().items()}
        common = Counter(shapes.values()).most_common(1)[0][0]
        for where, shape in shapes.items():
            if shape != common:
                raise UsageError(
                    f"{where}: samples of shape {shape} where others have {common}: bring all to one shape"
                )
        check_scales(self.named_splits(), common, self.inputs)
        return self

    def tell_shared_tests(self) -> Federation:
        """Return the federation with a notice about test samples that several clients share."""
        users: dict[Samples, list[str]] = {}
        for client in self.clients:
            users.setdefault(client.test, []).append(client.name)
        told = [
            f"{join_some(names)} share {len(test)} test samples: their results are of the same samples"
            for test, names in users.items()
            if len(names) > 1
        ]
        return replace(self, notices=tuple(dict.fromkeys((*self.notices, *told))))

    def named_splits(self) -> dict[str, Samples]:
        """Return every split by its name in messages."""
        return {_locate(c.name, name): split for c in self.clients for name, split in c.splits.items()}


def _draw_groups(unit: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the samples of whole groups, at most ``count`` of them, or of the smallest group.

    Groups are numbers 0, 1, ..., one for each sample; in random order, each that fits is drawn.
    """
    sizes, total = np.bincount(unit), 0
    kept: list[int] = []
    for group in rng.permutation(len(sizes)):
        if total + sizes[group] <= count:
            kept, total = [*kept, group], total + sizes[group]
    return np.flatnonzero(np.isin(unit, kept or [sizes.argmin()]))


def _fit_store(store: Tensor | LazyStore, channels: int, size: tuple[int, ...]) -> Tensor | LazyStore:
    """Return images with ``channels`` and ``size``; see :meth:`Federation.fit_images`."""
    if isinstance(store, LazyStore) and store.shape[1:] == (channels, *size):
        return store
    return map_store(store, partial(_fit_images, channels=channels, size=size))


def _fit_images(x: Tensor, channels: int, size: tuple[int, ...]) -> Tensor:
    return resize(x, size).expand(-1, channels, -1, -1)


def _locate(client: str, split: str) -> str:
    return f"client {client!r}, {split} data"


def count_labels(data: Federation) -> Tensor:
    """Count the training samples (for masks: pixels) of each class over all clients, int64 ``[classes]``."""
    return sum(
        (data.task.count_classes(client.train.y, data.classes) for client in data.clients),
        torch.zeros(data.classes, dtype=torch.int64),
    )


def encode_targets(data: Federation, newcomers: Collection[str] = ()) -> Federation:
    """Return ``data`` with targets in the form that its task's networks learn (:meth:`fedshift.tasks.Task.prepare`).

    ``newcomers``: clients that never train and do not influence the others' targets.
    """
    trained = [client for client in data.clients if client.name not in newcomers] or data.clients
    task = data.task.prepare([client.train.y for client in trained])
    if task == data.task:
        return data
    return replace(data.map_splits(lambda split: split.replace(y=task.encode(split.y))), task=task)
