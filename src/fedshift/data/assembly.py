"""Federations from scans: which samples are for testing, which files are left out, how many classes there are.

If a source has no split, test samples are drawn within each client, the same in every run: ``test_fraction`` of
each class or, with groups (for example, all samples of one patient), whole groups, so that no group is on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.given_settings import make_settings
from ..config.spec import DataSpec
from ..tasks.classification import CLASSIFICATION, Classification
from ..tasks.segmentation import Segmentation
from ..tasks.task import Task
from ..utils.errors import Ref, UsageError
from ..utils.words import Information, join_some
from .decoding import ARRAY
from .federation import LAZY, UNREPEATABLE, ClientData, Federation
from .files.read_options import ReadOptions
from .identity import clean_name, group_alike, merge_names, show_alike
from .inputs import require_layout
from .preparation import HALF, Scaling
from .readers import arrays, find_reader, refuse_unused
from .samples import Samples
from .scan import LEFT_OUT, SPLITS, UNSAID, Part, Reader, Scan, Sides, assign_splits
from .stores import LazyStore

GROUPED = "files of one subject (sub-XX in names, or DICOM's PatientID) stay together, {} groups; --groups names others"
"""Notice of groups that nobody asked for."""


def read_source(source: object, reading: ReadOptions) -> Federation:
    """Return the federation in ``source``, a path or an object, read by the reader of its kind."""
    reader = find_reader(source)
    refuse_unused(reading, reader.options, f"{source if isinstance(source, Path) else 'data'}, {reader.holds}")
    return assemble(reader, reader.scan(source, reading), reading)


def read_folder(
    path: str | Path, domains: Iterable[str] | None = None, classes: int | None = None, **choices: Any
) -> Federation:
    """Read a federation from a directory or a table.

    Args:
        path: A directory with one of these layouts: ``client/class/*.png`` (jpg, tif, bmp), or
            ``client/train/class/*.png`` with test and val next to train; images with masks in ``client/images/*`` and
            ``client/masks/*`` (also NIfTI and DICOM), or with these folders in train, test and val; one ``.npz`` file
            per client; ``client/train/x.npy`` and ``y.npy`` with test and optionally val next to train, whose inputs
            stay on disk; one CSV or Parquet file per client. Or one table, with ``client_column``.
        domains: Names of the clients to read, in this order; None: all.
        classes: Number of classes; None: as found.
        choices: Further settings of :class:`~fedshift.data.files.read_options.ReadOptions`, as on the command line.

    Raises:
        UsageError: A file cannot be read, or the directory contains none or several of these layouts.

    """
    facts = {name: choices.pop(name) for name in ("schema", "cache", "progress", "differing") if name in choices}
    spec = make_settings({"domains": domains, "classes": classes, **choices}, DataSpec, "setting of data")
    return read_source(Path(path), ReadOptions.from_spec(spec, **facts))


def assemble(reader: Reader, scan: Scan, reading: ReadOptions) -> Federation:
    """Return the federation of what ``reader`` scanned.

    Raises :class:`UsageError` if files cannot be read (unless they are to be left out), a client has no samples for
    training or testing, a group is on two sides, or samples cannot be loaded.
    """
    task = scan.task or (Segmentation() if scan.parts and scan.parts[0].y.dtype == torch.uint8 else CLASSIFICATION)
    scan = _merge_classes(_merge_groups(_name_clients(scan)), task, reading)
    _refuse_fraction(scan, reading)
    for part in scan.parts[1:]:
        require_layout(part.inputs, scan.parts[0].inputs, part.where, scan.parts[0].where)
    assign = partial(assign_splits, task=task, reading=reading)
    sides = [assign(part, ()) for part in scan.parts]
    loaded = reader.load(scan, reading, assign)
    if loaded.left_out:
        sides = [assign(part, loaded.left_out) for part in scan.parts]
    if reading.groups is not None:
        _refuse_cut_groups(scan, sides)
    numbers, grouped = _number_groups(scan.parts)
    clients: dict[str, dict[str, Samples]] = {}
    scalings, decodings = loaded.normalizations or repeat(HALF), loaded.decodings or repeat(ARRAY)
    for part, side, store, scaling, group in zip(scan.parts, sides, loaded.stores, scalings, numbers, strict=False):
        clients[part.client] = clients.get(part.client, {}) | _take_splits(part, side, store, scaling, group)
    _require_both(scan, sides, clients, (*scan.faults, *loaded.faults))
    decoded = {part.client: (part.files, how) for part, how in zip(scan.parts, decodings, strict=False)}
    made = tuple(
        replace(ClientData.from_splits(name, splits, decoded[name][0]), decoding=decoded[name][1])
        for name, splits in clients.items()
    )
    samples = sum(len(split) for splits in clients.values() for split in splits.values())
    odd: tuple[str, ...] = ()
    if reading.classes is None and not scan.checked:
        trained = (part for part, side in zip(scan.parts, sides, strict=True) if (side == SPLITS.index("train")).any())
        odd = task.check_outputs({part.where: clients[part.client]["train"].y for part in trained}, samples)
    classes = scan.classes or reading.classes
    classes = classes or task.count_outputs(splits["train"].y for splits in clients.values())
    whole = Federation(
        name=scan.name,
        clients=made,
        classes=classes,
        note=scan.note.format(samples=samples, clients=len(made)),
        class_names=scan.class_names,
        notices=(
            *_describe_stores(made),
            *scan.notices,
            *loaded.notices,
            *(odd if reading.schema is None else ()),
            *([Information(GROUPED.format(grouped))] if grouped and reading.groups is None else []),
        ),
        faults=(*scan.faults, *loaded.faults),
        columns=loaded.columns,
        task=task,
        inputs=scan.parts[0].inputs if scan.parts else (),
    )
    if not reading.patch:
        return whole
    true_sizes = dict(zip(loaded.stores, loaded.extents, strict=False))
    return whole.cut_patches(reading.patch_size, true_sizes=true_sizes, resized=reading.image_size is not None)


def _name_clients(scan: Scan) -> Scan:
    """Return ``scan`` with notices of clients with alike names; raise :class:`UsageError` if they look the same."""
    names = dict.fromkeys(part.client for part in scan.parts)
    for same in group_alike(names, clean_name):
        raise UsageError(f"clients {show_alike(same)} have names that look the same: join them, or rename one")
    _, notices = merge_names({"": names}, "clients")
    return replace(scan, notices=(*scan.notices, *notices))


def _merge_groups(scan: Scan) -> Scan:
    """Return ``scan`` with one name for all spellings of a client's group."""
    held: dict[str, list[str]] = {}
    for part in scan.parts:
        held.setdefault(part.client, []).extend(set(part.group.tolist()))
    merged = {client: merge_names({"": names}, "groups", together=True) for client, names in held.items()}
    parts, told = [], [f"client {client!r}: {notice}" for client, (_, notices) in merged.items() for notice in notices]
    for part in scan.parts:
        names, place_N = np.unique(part.group, return_inverse=True)
        stands = np.array([merged[part.client][0][name] for name in names.tolist()], np.str_)
        parts.append(replace(part, group=stands[place_N]))
    return replace(scan, parts=tuple(parts), notices=(*scan.notices, *told))


def _merge_classes(scan: Scan, task: Task, reading: ReadOptions) -> Scan:
    """Return ``scan`` with one label for all spellings of a class."""
    names = scan.class_names
    outside = any(((part.y < 0) | (part.y >= len(names))).any() for part in scan.parts)  # which a check refuses
    if not isinstance(task, Classification) or not group_alike(names) or outside:
        return scan
    held: dict[str, set[str]] = {name: {name} for name in names}  # also of clients that are not read
    for number, client in enumerate({part.client: None for part in scan.parts}):
        labels = set(torch.cat([part.y for part in scan.parts if part.client == client]).tolist())
        held[f"client {number}"] = {names[label] for label in labels}
    stands, notices = merge_names(held, "classes")
    kept = tuple(name for name in names if stands[name] == name)
    label = torch.tensor([kept.index(stands[name]) for name in names])
    return replace(
        scan,
        parts=tuple(replace(part, y=label[part.y]) for part in scan.parts),
        classes=reading.classes or (scan.classes and scan.classes - len(names) + len(kept)),
        class_names=kept,
        notices=(*scan.notices, *notices),
    )


def _refuse_fraction(scan: Scan, reading: ReadOptions) -> None:
    """Raise :class:`UsageError` for a ``test_fraction`` of data that all say what is for testing."""
    if (
        "test_fraction" in reading.changed
        and reading.schema is None
        and not any((p.side == UNSAID).any() for p in scan.parts)
    ):
        raise UsageError(
            f"{{}} draws test samples where the data name none, and {scan.name} "
            "names some for every client: leave it out",
            Ref(test_fraction=reading.test_fraction),
        )


def _refuse_cut_groups(scan: Scan, sides: list[Sides]) -> None:
    """Raise :class:`UsageError` naming a group of a client whose samples have several splits."""
    held: dict[tuple[str, str], int] = {}
    for part, side in zip(scan.parts, sides, strict=True):
        for group, one in sorted(set(zip(part.group.tolist(), side.tolist(), strict=False))):
            other = held.setdefault((part.client, group), one) if one >= 0 else one
            if other != one:
                raise UsageError(
                    f"group {group!r} of client {part.client!r} is on two sides, {SPLITS[other]} and {SPLITS[one]}: a "
                    "group must be on one side; correct the split, or name no groups"
                )


def _number_groups(parts: Sequence[Part]) -> tuple[list[Tensor | None], int]:
    """Return the number of each sample's group by part, which different clients never share, and how many there are."""
    known: dict[tuple[str, str], int] = {}
    numbers: list[Tensor | None] = []
    for part in parts:
        names, place_N = np.unique(part.group, return_inverse=True)
        number_G = np.array([known.setdefault((part.client, name), len(known)) for name in names.tolist()], np.int64)
        numbers.append(torch.from_numpy(number_G[place_N]) if len(part.group) else None)
    return numbers, len(known)


def _take_splits(
    part: Part, side: Sides, store: Tensor | LazyStore, scaling: Scaling, groups: Tensor | None
) -> dict[str, Samples]:
    """Return the samples of each split of ``part``, as rows of its store, with their ``groups`` ``[N]``."""
    made = {}
    for place, split in enumerate(SPLITS):
        at = np.flatnonzero(side == place)
        if len(at) == len(part.rows) == len(store) and (part.rows == np.arange(len(store))).all():
            rows, y = None, part.y
        else:
            rows, y = torch.from_numpy(part.rows[at]), part.y[torch.from_numpy(at)]
        if len(at):
            made[split] = Samples(
                x=store, y=y, rows=rows, normalization=scaling,
                group=None if groups is None else groups[torch.from_numpy(at)],
            )  # fmt: skip
    return made


def _require_both(
    scan: Scan, sides: list[Sides], clients: Mapping[str, Mapping[str, Any]], faults: Sequence[str]
) -> None:
    """Raise :class:`UsageError` naming clients without training or test samples, and the reasons, as ``faults``."""
    found = dict[str, str]()
    for name, splits in clients.items():
        for split in ("train", "test"):
            if split not in splits:
                own = [(part, side) for part, side in zip(scan.parts, sides, strict=True) if part.client == name]
                count = sum(len(side) for _, side in own)
                if all((side == LEFT_OUT).all() for _, side in own):
                    fix = "none of them can be read"
                elif not any((part.side == UNSAID).any() for part, _ in own):
                    fix = "its parts must give it some"
                elif any(len(part.group) for part, _ in own):
                    fix = "its samples are all of one group"
                else:
                    fix = "it has one sample of each class"
                found.setdefault(name, f"client {name!r} has no sample for {split} among its {count}: {fix}")
    if found:
        why = "".join(f"; {said}" for name in found for said in faults if said.startswith(f"client {name!r}"))
        raise UsageError(
            f"{'; '.join(found.values())}, or leave {'it' if len(found) == 1 else 'them'} out ({{}}){why}",
            Ref(domains=",".join(f"!{name}" for name in found)),
        )


def _describe_stores(clients: tuple[ClientData, ...]) -> list[str]:
    """Return notices about samples that are read on demand."""
    splits = {f"client {c.name!r}, {split} data": part for c in clients for split, part in c.splits.items()}
    where = [name for name, split in splits.items() if not split.repeats]
    lazy = any(split.lazy for split in splits.values())
    return [
        *([LAZY] if lazy else []),
        *([f"{join_some(where, shown=1)}: {UNREPEATABLE}"] if where else []),
    ]


def federation(
    clients: Mapping[str, Any],
    *,
    name: str = "own data",
    classes: int | None = None,
    note: str = "",
    target: str | None = None,
    task: Task | str | None = None,
) -> Federation:
    """Build a federation from arrays or datasets.

    Args:
        clients: each client's data by name: arrays ``(x_train, y_train, x_test, y_test)``, see
            :func:`fedshift.data.samples.to_samples`; a pair ``(train, test)`` of map-style torch datasets of pairs
            (input, label), of HuggingFace datasets, or of pairs of arrays; or a dictionary of either, with the keys
            ``x_train``, ... (optionally ``x_val`` and ``y_val``), or ``train``, ``test`` and ``validation``; or one
            dataset or pair of arrays, of which a fifth is for testing. Several inputs of a sample are a dictionary, by
            the names of the network's parameters, and so in a dataset's samples. Datasets are read once: a random
            transform is drawn once for each sample (``augment`` draws for each batch). Inputs that are memory-mapped
            from a file (``numpy.load(file, mmap_mode="r")``) stay there and are read when a batch needs them, like the
            items of a dataset in a :class:`~fedshift.data.arrays.LazyDataset`.
        name: Name of the data.
        classes: Number of classes; None: the largest training label of any client plus one.
        note: Description of the data in one sentence.
        target: Label column of HuggingFace datasets; None: the column of classes, or one with a usual name.
        task: The prediction task, a :class:`~fedshift.tasks.Task` or its name: classification, segmentation, multilabel
            (labels of 0 and 1, ``[N, L]``) or regression (numbers, ``[N]`` or ``[N, T]``); None: classification or
            segmentation, inferred from the labels.

    Raises:
        UsageError: An array has an invalid shape, type or range, or a dataset cannot be read.

    """
    reading = ReadOptions(classes=classes, target=target, task=task)
    made = assemble(arrays, arrays.scan(clients, reading), reading)
    return replace(made, name=name, note=note)
