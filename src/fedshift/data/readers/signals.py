"""Recordings (WFDB, EDF, BDF) in folders of classes, ``DIR/<client>/<class>/``, or with train and test between.

Folders are those of images (:mod:`fedshift.data.readers.images`); single files are read by
:mod:`fedshift.data.decoding.signals`. All recordings have the same leads, in any order, of one rate and length. Samples
are float32 ``[N, C, L]`` with the leads in the order of their names, decoded when a batch needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ...tasks import CLASSIFICATION, Classification
from ...utils.errors import UsageError
from ...utils.words import Information, join_some
from ..decoding import Decoding
from ..decoding.signals import KEPT, SIGNALS, VALUES, SignalHeader, SignalStore, read_signal_header
from ..files import images as folders
from ..files.image_store import read_all
from ..files.read_options import ReadOptions
from ..scan import Assign, Loaded, Scan
from ..schema import Schema
from ..stores import RecentArrays
from .images import list_clients, make_part, number_labels, require_task

holds = "recordings of signals in class folders"
options = frozenset({"test_fraction", "groups"})
_DEEPEST = 3  # folders of a client, of a part and of a class


def can_read(source: object) -> bool:
    """Return whether ``source`` is a directory of recordings, and not of images."""
    if not isinstance(source, Path) or not source.is_dir() or folders.holds_images(source):
        return False
    return any(_holds_signals(Path(folder), _DEEPEST) for folder in folders.list_content(source)[1])


def scan(source: Path, reading: ReadOptions) -> Scan:
    """Return the clients in directory ``source``, which is one itself if it joins others.

    Raises :class:`UsageError` if the directory has another layout, or recordings differ in leads, units, rate or length
    from each other, or from those of the run that they join.
    """
    require_task(source, reading, Classification)
    alone = reading.schema is not None and folders.holds_one_client(source, SIGNALS)
    places = {source.resolve().name: source} if alone else folders.find_clients(source)
    labels = number_labels(source, places, reading)
    files, notices = list_clients(source, places, reading, SIGNALS, VALUES)
    every = {file.path: source / file.path for own in files.values() for file in own}
    headers, broken = read_all(every, read_signal_header, "headers of recordings", reading.progress)
    folders.refuse_broken(source, broken, len(every), reading)
    if not headers:
        name, reason = next(iter(broken.items()))
        raise UsageError(f"none of the {len(every)} recordings in {source} can be read: give others ({name} {reason})")
    _refuse_others(source, headers)
    first = next(iter(headers.values()))
    leads = tuple(sorted(first.leads))
    how = Decoding(kind="signal", leads=leads, units=tuple(first.by_lead[lead] for lead in leads), rate=first.rate)
    if isinstance(reading.schema, Schema):
        _refuse_other_run(source, how, reading.schema)
    parts = [
        make_part(name, own, torch.tensor([labels[file.category] for file in own]), places[name], reading)
        for name, own in files.items()
    ]
    faults = [
        folders.describe_broken(name, lost, len(own))
        for name, own in files.items()
        if (lost := {file.path: broken[file.path] for file in own if file.path in broken})
    ]
    units = ["mV"] if set(how.units) == {"mv"} else [unit or "no unit" for unit in how.units]
    told = Information(
        f"leads in this order: {join_some(how.leads, shown=16)}; {first.rate:g} Hz, {first.length} samples, in "
        f"{join_some(units, shown=16)}"
    )
    return Scan(
        name=source.resolve().name,
        parts=tuple(parts),
        task=reading.task or CLASSIFICATION,
        classes=reading.classes or len(labels),
        class_names=tuple(labels),
        note="{samples} recordings of {clients} clients",
        notices=(*notices, told),
        faults=tuple(faults),
        source=(source, how, first.length, frozenset(broken)),
    )


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return stores that decode each client's recordings when a batch needs them."""
    path, how, length, broken = scan.source
    recent = RecentArrays(KEPT)
    return Loaded(
        stores=[
            SignalStore([path / file for file in part.files], how.leads, length, part.where, recent)
            for part in scan.parts
        ],
        decodings=[how] * len(scan.parts),
        left_out=broken,
    )


def _refuse_others(source: Path, headers: Mapping[str, SignalHeader]) -> None:
    """Raise :class:`UsageError` naming two recordings that differ."""
    (one, first), *others = headers.items()
    for other, header in others:
        lacking = set(first.leads) ^ set(header.leads)
        if lacking:
            lead = min(lacking)
            has, lacks = (one, other) if lead in first.leads else (other, one)
            raise UsageError(
                f"{source / has} has the lead {lead!r}, and {source / lacks} does not (it has "
                f"{join_some(headers[lacks].leads)}): give all recordings the same leads, by the same names"
            )
        for lead, unit in first.by_lead.items():
            if header.by_lead[lead] != unit:
                raise UsageError(
                    f"the lead {lead!r} is in {unit or 'no unit'} in {source / one} and in "
                    f"{header.by_lead[lead] or 'no unit'} in {source / other}: write both in one unit"
                )
        for what, ours, theirs, fix in (
            ("Hz", first.rate, header.rate, "resample all to one rate"),
            ("samples", first.length, header.length, "cut all to one length"),
        ):
            if ours != theirs:
                raise UsageError(f"{source / one} has {ours:g} {what} and {source / other} {theirs:g}: {fix}")


def _refuse_other_run(source: Path, how: Decoding, schema: Schema) -> None:
    theirs = schema.preparation.decoding
    for lead, unit in zip(theirs.leads, theirs.units, strict=False):  # none in older runs
        ours = dict(zip(how.leads, how.units, strict=True)).get(lead, unit)
        if ours != unit:
            raise UsageError(
                f"{source} has the lead {lead!r} in {ours or 'no unit'}, and {schema.name} in {unit or 'no unit'}: "
                "convert it to the same unit"
            )
    if (how.leads, how.rate) != (theirs.leads, theirs.rate):
        raise UsageError(
            f"{source} has the leads {join_some(how.leads)} at {how.rate:g} Hz, and {schema.name} "
            f"{join_some(theirs.leads) or 'none with names'} at {theirs.rate:g} Hz: give the same leads at one rate"
        )


def _holds_signals(folder: Path, levels: int) -> bool:
    files, deeper = folders.list_content(folder)
    found = any(file.name.lower().endswith(SIGNALS) for file in files)
    return found or (levels > 1 and any(_holds_signals(Path(each), levels - 1) for each in deeper))
