"""Federations from sources: which samples are for testing, which files are left out, how many classes there are.

If a source has no split, test samples are drawn within each client, the same in every run: ``test_fraction`` of
each class or, with groups (for example, all samples of one patient), whole groups, so that no group is on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
from .identity import clean_name, group_alike, merge_names, refuse_hidden, show_alike
from .inputs import require_layout
from .preparation import HALF
from .readers import arrays, find_reader, refuse_unused
from .samples import Samples
from .source import DRAWN, LOST, SPLITS, Decoded, ReadOptions, Rows, Source, divide_rows

GROUPED = "files of one subject (sub-XX in names, or DICOM's PatientID) stay together, {} groups; --groups names others"
"""Notice of groups that nobody asked for."""


def read_source(source: object, reading: ReadOptions) -> Federation:
    """Return the federation in ``source``, a path or an object, read by the reader of its kind."""
    reader = find_reader(source)
    refuse_unused(reading, reader.options, f"{source if isinstance(source, Path) else 'data'}, {reader.holds}")
    return assemble(reader.read(source, reading), reading)


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
        choices: Further settings of :class:`~fedshift.data.source.ReadOptions`, as on the command line.

    Raises:
        UsageError: A file cannot be read, or the directory contains none or several of these layouts.

    """
    facts = {name: choices.pop(name) for name in ("schema", "cache", "progress", "size_if_mixed") if name in choices}
    spec = make_settings({"domains": domains, "classes": classes, **choices}, DataSpec, "setting of data")
    return read_source(Path(path), ReadOptions.from_spec(spec, **facts))


def assemble(source: Source, reading: ReadOptions) -> Federation:
    """Return the federation of a ``source``.

    Raises :class:`UsageError` if files cannot be read (unless they are to be left out), a client has no samples for
    training or testing, a group is on two sides, or samples cannot be loaded.
    """
    masks = bool(source.arrays) and source.arrays[0].y.dtype == torch.uint8
    task = source.task or (Segmentation() if masks else CLASSIFICATION)
    source = _merge_classes(_merge_groups(_name_clients(source)), task, reading)
    _refuse_fraction(source, reading)
    for array in source.arrays[1:]:
        require_layout(array.inputs, source.arrays[0].inputs, array.where, source.arrays[0].where)
    divide = partial(divide_rows, source.rows, lambda index: task.strata(source.take_targets(index)), reading)
    decoded = source.decode(divide)
    rows = replace(source.rows, split=divide(decoded.lost))
    if reading.groups is not None:
        _refuse_cut_groups(rows)
    _require_both(source, rows, (*source.faults, *decoded.faults))
    groups = _number_groups(rows)
    clients = _make_clients(source, decoded, rows, groups)
    used = int((rows.split != LOST).sum())
    odd: tuple[str, ...] = ()
    if reading.classes is None and not source.classes_checked:
        odd = task.check_outputs(_name_training(source, rows), used)
    classes = source.classes or reading.classes or task.count_outputs(client.train.y for client in clients)
    grouped = int(groups.max()) + 1 if len(groups) else 0
    told = Information(GROUPED.format(grouped))
    whole = Federation(
        name=source.name,
        clients=clients,
        classes=classes,
        note=source.note.format(samples=used, clients=len(clients)),
        class_names=source.class_names,
        notices=(
            *_describe_stores(clients),
            *source.notices,
            *decoded.notices,
            *(odd if reading.schema is None else ()),
            *([told] if grouped and reading.groups is None else []),
        ),
        faults=(*source.faults, *decoded.faults),
        columns=decoded.columns,
        task=task,
        inputs=source.arrays[0].inputs if source.arrays else (),
    )
    if not reading.patch:
        return whole
    sizes = dict(zip(decoded.stores, decoded.true_sizes, strict=False))
    return whole.cut_patches(reading.patch_size, true_sizes=sizes, resized=reading.image_size is not None)


def _name_clients(source: Source) -> Source:
    """Return ``source`` with notices of clients with alike names; raise :class:`UsageError` if they look the same."""
    names = list(dict.fromkeys(source.rows.client.tolist()))
    refuse_hidden(names)
    for same in group_alike(names, clean_name):
        raise UsageError(f"clients {show_alike(same)} have names that look the same: join them, or rename one")
    _, notices = merge_names({"": names}, "clients")
    return replace(source, notices=(*source.notices, *notices))


def _merge_groups(source: Source) -> Source:
    """Return ``source`` with one name for all spellings of a client's group."""
    group, told = source.rows.group.copy(), list[str]()
    for client, own in source.rows.find("client", among=group != None).items():  # noqa: E711 - of each element
        names = group[own].tolist()
        stands, notices = merge_names({"": list(dict.fromkeys(names))}, "groups", together=True)
        group[own] = [stands[name] for name in names]
        told += [f"client {client!r}: {notice}" for notice in notices]
    return replace(source, rows=replace(source.rows, group=group), notices=(*source.notices, *told))


def _merge_classes(source: Source, task: Task, reading: ReadOptions) -> Source:
    """Return ``source`` with one label for all spellings of a class."""
    names = source.class_names
    outside = any(((array.y < 0) | (array.y >= len(names))).any() for array in source.arrays)  # which a check refuses
    if not isinstance(task, Classification) or not group_alike(names) or outside:
        return source
    held: dict[str, set[str]] = {name: {name} for name in names}  # also of clients that are not read
    for number, own in enumerate(source.rows.find("client").values()):
        held[f"client {number}"] = {names[label] for label in source.take_targets(own).tolist()}
    stands, notices = merge_names(held, "classes")
    kept = tuple(name for name in names if stands[name] == name)
    label = torch.tensor([kept.index(stands[name]) for name in names])
    return replace(
        source,
        arrays=tuple(replace(array, y=label[array.y]) for array in source.arrays),
        classes=reading.classes or (source.classes and source.classes - len(names) + len(kept)),
        class_names=kept,
        notices=(*source.notices, *notices),
    )


def _refuse_fraction(source: Source, reading: ReadOptions) -> None:
    """Raise :class:`UsageError` for a ``test_fraction`` of data that all say what is for testing."""
    drawn = (source.rows.split == DRAWN).any()
    if "test_fraction" in reading.changed and reading.schema is None and not drawn:
        raise UsageError(
            f"{{}} draws test samples where the data name none, and {source.name} "
            "names some for every client: leave it out",
            Ref(test_fraction=reading.test_fraction),
        )


def _refuse_cut_groups(rows: Rows) -> None:
    """Raise :class:`UsageError` naming a group of a client whose samples have several splits."""
    for (client, group), own in rows.find("client", "group", among=rows.split != LOST).items():
        splits = sorted(set(rows.split[own].tolist()), key=SPLITS.index)
        if group is not None and len(splits) > 1:
            raise UsageError(
                f"group {group!r} of client {client!r} is on two sides, {splits[0]} and {splits[1]}: a group must be "
                "on one side; correct the split, or name no groups"
            )


def _number_groups(rows: Rows) -> NDArray[np.int64]:
    """Return the number of each row's group, which different clients never share; -1: it has none."""
    known: dict[tuple[str, str], int] = {}
    number = np.full(len(rows), -1)
    for (client, _), own in rows.find("client", "array", among=rows.group != None).items():  # noqa: E711
        names = rows.group[own].tolist()
        for name in sorted(set(names)):
            known.setdefault((client, name), len(known))
        number[own] = [known[client, name] for name in names]
    return number


def _make_clients(source: Source, decoded: Decoded, rows: Rows, groups: NDArray[np.int64]) -> tuple[ClientData, ...]:
    """Return the clients, whose samples are rows of the decoded arrays; ``groups``: number of each row's group."""
    scalings = decoded.scalings or [HALF] * len(source.arrays)
    splits: dict[str, dict[str, Samples]] = {}
    for (client, split), own in rows.find("client", "split", among=rows.split != LOST).items():
        array, place, group = int(rows.array[own[0]]), rows.place[own], groups[own]
        assert (rows.array[own] == array).all(), f"{split} samples of {client!r} are in several arrays"
        whole = len(own) == len(decoded.stores[array]) and bool((place == np.arange(len(own))).all())
        splits.setdefault(client, {})[split] = Samples(
            x=decoded.stores[array], y=source.take_targets(own), rows=None if whole else torch.from_numpy(place),
            normalization=scalings[array], group=None if (group < 0).all() else torch.from_numpy(group),
        )  # fmt: skip
    clients = []
    for client, own in rows.find("client").items():
        files = tuple(rows.file[own]) if rows.file[own[0]] else ()
        how = decoded.decodings[rows.array[own[0]]] if decoded.decodings else ARRAY
        clients.append(replace(ClientData.from_splits(client, splits[client], files), decoding=how))
    return tuple(clients)


def _name_training(source: Source, rows: Rows) -> dict[str, Tensor]:
    """Return each client's training targets by their name in messages."""
    owners = Counter(array for _, array in rows.find("client", "array"))
    return {
        f"client {client!r}" if owners[array] > 1 else source.arrays[array].where: source.take_targets(own)
        for (client, array), own in rows.find("client", "array", among=rows.split == "train").items()
    }


def _require_both(source: Source, rows: Rows, faults: Sequence[str]) -> None:
    """Raise :class:`UsageError` naming clients without training or test samples, and the reasons, as ``faults``."""
    found = dict[str, str]()
    for name, own in rows.find("client").items():
        held = set(rows.split[own].tolist())
        for split in sorted({"train", "test"} - held, reverse=True):
            if held == {LOST}:
                fix = "none of them can be read"
            elif DRAWN not in source.rows.split[own].tolist():
                fix = "its parts must give it some"
            elif any(group is not None for group in rows.group[own].tolist()):
                fix = "its samples are all of one group"
            else:
                fix = "it has one sample of each class"
            found.setdefault(name, f"client {name!r} has no sample for {split} among its {len(own)}: {fix}")
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
    made = assemble(arrays.read(clients, reading), reading)
    return replace(made, name=name, note=note)
