"""Files in folders: pictures, medical images (NIfTI, DICOM) and recordings (WFDB, EDF), with classes or with masks.

``DIR/<client>/[<part>/]<class>/<file>``, or the folders ``images``, ``masks`` and perhaps ``fov`` in place of classes.
A part is train, validation or test; a client without a test folder has test samples drawn from the others.

Headers are read first, then masks; images are decoded once the training images are known, which decide how gray is
scaled. What is decoded is mapped from the cache (:mod:`fedshift.data.files.cache`): the pictures of a client, or its
masks, as one array, uint8 or float32 ``[N, C, H, W]``; a medical image or a recording as an array each. Labels number
the class folders of all clients, selected or not. A mask has the class of each pixel, or 255 for ignored pixels.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...tasks import CLASSIFICATION, Classification
from ...tasks.segmentation import Segmentation
from ...utils.errors import Ref, UsageError
from ...utils.words import Information, join_some
from ..agreement import refuse_other_labels
from ..decoding import Decoding, decode, list_members
from ..decoding.images import SUFFIXES, Unreadable, decode_image, read_header
from ..decoding.ranges import NO_LEVELS, Levels, choose_gray, parse_window
from ..decoding.resizing import describe_stretch, resample_mask, resize_masks
from ..decoding.signals import SIGNALS, VALUES, SignalHeader, read_signal_header
from ..decoding.volumes import READABLE, decode_mask, describe_spacing, parse_spacing, read_volume_header
from ..files import grids, listing, pairing
from ..files.cache import keep, make_room, read_all, stamp
from ..files.listing import CLASSES, MASKS, RECORDINGS, VOLUMES, ImageFile
from ..groups import find_groups
from ..identity import find_identity
from ..patches import extend
from ..schema import Schema
from ..source import DRAWN, SPLITS, Array, Decoded, Divide, ReadOptions, Rows, Source, choose_clients, divide_rows
from ..stores import LazyStore, MappedStore

holds = "images or recordings in folders"
options = frozenset({"test_fraction", "image_size", "groups", "window", "spacing"})

_CHUNK = 100  # images to scale at a time
_NOUNS = {CLASSES: "images", MASKS: "images with masks", VOLUMES: "medical images with masks", RECORDINGS: "recordings"}

Size = tuple[int, ...]
Read = Callable[[Path, Size], tuple[NDArray[Any], Levels]]


class Pixels(NamedTuple):
    """Files as one array ``[N, C, *axes]``, or as an array each, with zeros for broken ones.

    ``broken``: why a file cannot be used; ``levels``: levels of gray of each file; ``constant``: files whose pixels all
    have one value.
    """

    values: Any
    broken: dict[str, str]
    levels: list[Levels]
    constant: list[str]


@dataclass(frozen=True, kw_only=True)
class Client:
    """Files of a client: images, each with its mask and field of view if there are any."""

    images: tuple[ImageFile, ...]
    masks: tuple[ImageFile, ...] = ()
    fields: tuple[ImageFile, ...] = ()

    @property
    def files(self) -> tuple[ImageFile, ...]:
        """All files, images first."""
        return self.images + self.masks + self.fields

    def list_lost(self, broken: Collection[str]) -> set[str]:
        """Return the images that are ``broken``, or whose mask or field of view is."""
        beside = filter(None, (self.masks, self.fields))
        rows = zip(self.images, *beside, strict=True)
        return {row[0].path for row in rows if any(file.path in broken for file in row)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Folders:
    """Headers and masks of all clients' files below ``path``, and what follows from them.

    Attributes:
        content: What the directory holds (:func:`~fedshift.data.files.listing.find_content`).
        headers: What each readable file's header says.
        broken: Why each other file cannot be used; masks too, once they are decoded.
        how: How each client's images are decoded, but for the range of gray.
        sizes: Size of each image when it is decoded.
        used: Bytes of the masks.

    """

    path: Path
    content: str
    clients: dict[str, Client]
    headers: Mapping[str, Any]
    broken: dict[str, str]
    how: Mapping[str, Decoding] = field(default_factory=dict)
    sizes: Mapping[str, Size] = field(default_factory=dict)
    used: int = 0

    @property
    def shown(self) -> dict[str, Any]:
        """Headers of readable images, without masks."""
        paths = (file.path for client in self.clients.values() for file in client.images)
        return {path: self.headers[path] for path in paths if path in self.headers}

    def list_sizes(self, client: Client) -> list[Size]:
        """Return the size of each of a client's images; that of a broken one is 1 along each axis."""
        blank = (1,) * len(next(iter(self.sizes.values()), (1, 1)))
        return [self.sizes.get(file.path, blank) for file in client.images]

    def refuse_broken(self, broken: Mapping[str, str], reading: ReadOptions) -> None:
        """Raise :class:`UsageError` if some files are ``broken``, unless they are to be left out."""
        if broken and reading.on_unreadable == "refuse":
            count = sum(len(client.files) for client in self.clients.values())
            raise UsageError(
                f"{len(broken)} of {count} files cannot be read: "
                f"{join_some(f'{self.path / file}: {why}' for file, why in broken.items())}; "
                "repair or remove them, or leave them out ({})",
                Ref(on_data_error="warn"),
            )

    def count_channels(self, client: Client) -> int:
        """Return the number of channels of a client's images, or of all medical images."""
        if self.content == RECORDINGS:
            return len(next(iter(self.how.values())).leads)
        if self.content == VOLUMES:
            return next((header.channels for header in self.shown.values()), 1)
        return max((self.headers[f.path].channels for f in client.images if f.path in self.headers), default=1)


# Scan


def can_read(source: object) -> bool:
    """Return whether ``source`` is a directory of pictures, medical images or recordings in folders."""
    return bool(listing.find_content(source))


def read(source: Path, reading: ReadOptions) -> Source:
    """Return the clients in directory ``source``, which is one itself if it joins others.

    Raises :class:`UsageError` if the directory has another layout, files differ where they may not, an image has no
    mask or one of another grid, a mask has a value that is no class, or the library for a format is missing.
    """
    content = listing.find_content(source) or CLASSES
    _refuse_options(source, content, reading)
    places = listing.choose_folders(source, reading)
    clients, notices, faults = _list_clients(source, places, content, reading)
    files, told = inspect(Folders(path=source, content=content, clients=clients, headers={}, broken={}), reading)
    if content in (MASKS, VOLUMES):
        files, y, facts = _read_masks(files, reading)
    else:
        labels = _number_labels(source, places, reading)
        y = {name: torch.tensor([labels[file.category] for file in own.images]) for name, own in clients.items()}
        facts = {
            "task": reading.task or CLASSIFICATION, "classes": reading.classes or len(labels),
            "class_names": tuple(labels), "notices": (),
        }  # fmt: skip
    facts |= {"notices": (*notices, *told, *facts["notices"])}
    return make_source(files, y, reading, faults=tuple(faults), **facts)


def _refuse_options(source: Path, content: str, reading: ReadOptions) -> None:
    """Raise :class:`UsageError` for a task or options that do not fit what ``source`` holds."""
    wanted: type[Any] = Segmentation if content in (MASKS, VOLUMES) else Classification
    if reading.task and not isinstance(reading.task, wanted):
        raise UsageError(f"{source} holds images for {wanted.name}, not for {reading.task}: leave the task out")
    parse_window(reading.window), parse_spacing(reading.spacing)
    unused = {"spacing"} if content in (CLASSES, MASKS) else {"spacing", "window", "image_size"}
    for name in sorted(unused & reading.changed if content != VOLUMES and reading.schema is None else ()):
        raise UsageError(f"{{}} is for {_NOUNS[VOLUMES]}, not for {source}, {_NOUNS[content]}: leave it out", Ref(name))


def _list_clients(
    source: Path, places: Mapping[str, Path], content: str, reading: ReadOptions
) -> tuple[dict[str, Client], list[str], list[str]]:
    """Return the files of each requested client, paired with their masks, and notices and faults of other files."""
    suffixes: Collection[str] = {VOLUMES: READABLE, RECORDINGS: SIGNALS}.get(content, SUFFIXES)
    clients, notices, faults = dict[str, Client](), listing.list_strays(source), list[str]()
    for name in choose_clients(places, reading):
        files, said, lost = listing.list_files(source, places[name], suffixes, VALUES if content == RECORDINGS else ())
        paired = pairing.pair_files(source, name, files) if content in (MASKS, VOLUMES) else (files, (), ())
        clients[name] = Client(images=paired[0], masks=paired[1], fields=paired[2])
        notices, faults = notices + said, faults + lost
    return clients, notices, faults


def inspect(files: Folders, reading: ReadOptions) -> tuple[Folders, list[str]]:
    """Return ``files`` with what their headers say and how they are to be decoded, and notices."""
    headers, broken = dict[str, Any](), dict[str, str]()
    for name, client in files.clients.items():
        mine, lost = _read_headers(files, name, client, reading)
        headers, broken = headers | mine, broken | lost
    files = replace(files, headers=headers, broken=broken)
    choose = {VOLUMES: _choose_grids, RECORDINGS: _choose_leads}.get(files.content, _choose_sizes)
    return choose(files, reading)


def _read_headers(
    files: Folders, name: str, client: Client, reading: ReadOptions
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the headers of a client's files; only those of pictures, which name no patient, are kept in the cache."""
    read: Callable[[Path], Any] = {VOLUMES: read_volume_header, RECORDINGS: read_signal_header}.get(
        files.content, read_header
    )

    def work() -> tuple[dict[str, Any], dict[str, str]]:
        every = {file.path: files.path / file.path for file in client.files}
        return read_all(every, read, f"headers of {name}", reading.progress)

    if read is not read_header:
        return work()
    facts = "headers", str(files.path.resolve()), client.files
    pickled, _ = keep(reading.cache_directory, facts, lambda: pickle.dumps(work()))  # ten times as fast as joblib's
    return pickle.loads(pickled)  # type: ignore[no-any-return]


def _number_labels(source: Path, places: Mapping[str, Path], reading: ReadOptions) -> dict[str, int]:
    """Return the label of each class folder of the clients in ``places``, selected or not.

    Raises :class:`UsageError` for fewer ``classes`` than folders, and names of one kind at some clients alone.
    """
    refuse_other_labels({name: listing.list_categories([folder]) for name, folder in places.items()})
    labels = {name: label for label, name in enumerate(listing.list_categories(places.values()))}
    if reading.classes is not None and reading.classes < len(set(map(find_identity, labels))):
        raise UsageError(
            f"classes={reading.classes}: {source} has {len(labels)} class folders ({join_some(labels)}); ask for as "
            "many"
        )
    return labels


def make_source(files: Folders, y: Mapping[str, Tensor], reading: ReadOptions, **facts: Any) -> Source:
    """Return the source of files with the targets ``y`` of each client."""
    rows = _list_images(files, reading)
    return Source(
        name=files.path.resolve().name, rows=rows, decode=partial(_decode, files, rows, reading),
        arrays=tuple(Array(where=f"client {name!r}", y=own) for name, own in y.items()),
        note=f"{{samples}} {_NOUNS[files.content]} of {{clients}} clients", **facts,
    )  # fmt: skip


def _list_images(files: Folders, reading: ReadOptions) -> Rows:
    """Return the rows of all images; without a test folder, training images of a client are to be divided."""
    tables = []
    for array, (name, client) in enumerate(files.clients.items()):
        paths = [file.path for file in client.images]
        train = "train" if any(file.part == "test" for file in client.images) else DRAWN
        splits = {"": train, "train": train, **dict(zip(SPLITS[1:], SPLITS[1:], strict=True))}
        patients = [getattr(files.headers[p], "patient", "") if p in files.headers else p for p in paths]
        group = find_groups(reading.groups, paths)
        if not len(group) and all(patients) and files.content == VOLUMES:
            group = np.array(patients, np.str_)
        if reading.groups is None and len(set(group.tolist())) < 2:  # names that distinguish nothing
            group = group[:0]
        split = [splits[file.part] for file in client.images]
        tables.append(Rows.of(name, array, len(paths), split=split, group=group, file=paths))
    return Rows.join(tables)


# Sizes and leads


def _choose_sizes(files: Folders, reading: ReadOptions) -> tuple[Folders, list[str]]:
    """Return pictures with their kinds and sizes; raise :class:`UsageError` if these differ and may not."""
    how = {name: Decoding(kind=_find_depth(files, name)) for name in files.clients}
    notices = [said for name in files.clients for said in _compare_masks(files, name)]
    own = {path: (header.height, header.width) for path, header in files.shown.items()}
    sizes: dict[str, Size] = dict(own)
    cases = files.content == MASKS
    if reading.image_size is not None:
        sizes = dict.fromkeys(sizes, (reading.image_size,) * 2)
    elif len(set(sizes.values())) > 1 and not (reading.patch and cases):
        if not reading.size_if_mixed:
            raise _refuse_sizes(files.path, sizes, cases=cases)
        sizes, (height, width) = dict.fromkeys(sizes, reading.size_if_mixed), reading.size_if_mixed
        notices.append(Information(f"images of several sizes are resized to {width} x {height} pixels"))
    for name, client in files.clients.items():
        mine = [file.path for file in client.images if file.path in own]
        told = describe_stretch([own[path] for path in mine], sizes[mine[0]]) if mine and sizes != own else ""
        notices += [f"client {name!r}: {told}"] if told else []
    return replace(files, how=how, sizes=sizes), notices


def _find_depth(files: Folders, name: str) -> Any:
    """Return the kind of pixels of a client's images; raise :class:`UsageError` if some have 8 bits, others more."""
    images = [file.path for file in files.clients[name].images if file.path in files.headers]
    example = {files.headers[path].kind: path for path in reversed(images)}  # the first of each kind
    if len(example) > 1:
        first, second = sorted(example)[:2]
        raise UsageError(
            f"client {name!r} has images of different depth, {files.path / example[first]} ({first}) and "
            f"{files.path / example[second]} ({second}): convert all of a client's images to one"
        )
    return next(iter(example), "byte")


def _compare_masks(files: Folders, name: str) -> list[str]:
    """Return a notice about masks that are not turned as their images are; refuse masks of other sizes."""
    client, turned = files.clients[name], []
    for images, beside in ((client.images, client.masks), (client.images, client.fields)):
        for image, mask in zip(images, beside, strict=False):
            ours, theirs = files.headers.get(image.path), files.headers.get(mask.path)
            if ours is None or theirs is None:
                continue
            if (ours.width, ours.height) != (theirs.width, theirs.height):
                tag = ", upright by its rotation tag (EXIF)" if ours.turned != theirs.turned else ""
                raise UsageError(
                    f"mask {files.path / mask.path} has {theirs.width} x {theirs.height} pixels, but its image "
                    f"{files.path / image.path} has {ours.width} x {ours.height}{tag}: give both the same size"
                )
            if ours.turned != theirs.turned:
                turned.append(image.path)
    if not turned:
        return []
    return [
        f"client {name!r}: {len(turned)} of {len(client.images)} images have a rotation tag (EXIF) that their masks do "
        f"not have, or the other way round ({join_some(turned)}): images are turned upright, their masks are not; if "
        "masks were drawn on the pixels as stored, turn the masks too, or take the tags away"
    ]


def _refuse_sizes(path: Path, sizes: Mapping[str, Size], *, cases: bool) -> UsageError:
    first: dict[Size, str] = {}
    for file, size in sizes.items():
        first.setdefault(size, file)
    small, large = (pick(first, key=lambda size: (size[0] * size[1], size[::-1])) for pick in (min, max))
    downs, acrosses = zip(*first, strict=True)
    return UsageError(
        f"images differ in size: {path / first[small]} has {small[1]} x {small[0]} pixels, {path / first[large]} has "
        f"{large[1]} x {large[0]} (widths {min(acrosses)} to {max(acrosses)}, heights {min(downs)} to {max(downs)}): "
        "give one size for all ({})" + (", or train on patches ({})" if cases else ""),
        *[Ref(image_size=64), Ref(patch=64)][: 1 + cases],
    )


def _choose_grids(files: Folders, reading: ReadOptions) -> tuple[Folders, list[str]]:
    """Return medical images with their spacing, window and sizes; raise :class:`UsageError` if grids do not fit."""
    path, shown = files.path, files.shown
    pairs = [pair for client in files.clients.values() for pair in zip(client.images, client.masks, strict=False)]
    grids.refuse_other_grids(path, pairs, files.headers)
    grids.refuse_other_kinds(path, shown)
    rows = _list_images(files, reading)
    lost = set[str]().union(*(client.list_lost(files.broken) for client in files.clients.values()))
    trained = set(rows.file[divide_rows(rows, lambda _: None, reading, lost) == "train"].tolist()) or set(shown)
    spacing = grids.find_spacing(path, shown, trained, reading)
    window, ranges = grids.find_window(path, shown, trained, reading)
    by_client = {
        name: [shown[file.path] for file in client.images if file.path in shown]
        for name, client in files.clients.items()
    }
    notices = grids.compare_grids(by_client, resampled=bool(spacing))
    if spacing:
        shown = {file: header.resample(spacing) for file, header in shown.items()}
        notices.append(Information(f"images are resampled to {describe_spacing(spacing)}"))
    sizes = grids.find_sizes(path, shown, reading)
    if reading.image_size is not None and sizes:
        told = describe_stretch([header.shape for header in shown.values()], next(iter(sizes.values())))
        notices += [told] if told else []
    how = Decoding(kind="volume", window=window, spacing=spacing)
    return replace(files, how=dict.fromkeys(files.clients, how), sizes=sizes), [*notices, *ranges]


def _choose_leads(files: Folders, reading: ReadOptions) -> tuple[Folders, list[str]]:
    """Return recordings with their leads and rate; raise :class:`UsageError` naming two that differ, or no readable."""
    files.refuse_broken(files.broken, reading)
    if not files.headers:
        file, reason = next(iter(files.broken.items()))
        raise UsageError(
            f"none of the {len(files.broken)} recordings in {files.path} can be read: give others ({file} {reason})"
        )
    first: SignalHeader = next(iter(files.headers.values()))
    for file, header in files.headers.items():
        if header.length != first.length:
            raise UsageError(
                f"{files.path / next(iter(files.headers))} has {first.length} samples, {files.path / file} has "
                f"{header.length}: cut all to one length"
            )
    described = {str(files.path / file): _describe_leads(header) for file, header in files.headers.items()}
    joined = {reading.schema.name: reading.schema.preparation.decoding} if isinstance(reading.schema, Schema) else {}
    _refuse_other_leads(joined | described)
    how = _describe_leads(first)
    units = ["mV"] if set(how.units) == {"mv"} else [unit or "no unit" for unit in how.units]
    told = Information(
        f"leads in this order: {join_some(how.leads, shown=16)}; {first.rate:g} Hz, {first.length} samples, in "
        f"{join_some(units, shown=16)}"
    )
    sizes = dict.fromkeys(files.headers, (first.length,))
    return replace(files, how=dict.fromkeys(files.clients, how), sizes=sizes), [told]


def _describe_leads(header: SignalHeader) -> Decoding:
    leads = tuple(sorted(header.leads))
    return Decoding(kind="signal", leads=leads, units=tuple(header.by_lead[lead] for lead in leads), rate=header.rate)


def _refuse_other_leads(described: Mapping[str, Decoding]) -> None:
    """Raise :class:`UsageError` naming the first file, or the run that files join, and one that differs from it."""
    (one, first), *others = described.items()
    for other, how in others:
        if how.leads != first.leads or how.rate != first.rate:
            lacking = set(how.leads) ^ set(first.leads)
            raise UsageError(
                f"{other} has the leads {join_some(how.leads)} at {how.rate:g} Hz, and {one} "
                f"{join_some(first.leads) or 'none with names'} at {first.rate:g} Hz"
                + (f" (only one has {join_some(sorted(lacking))})" if lacking else "")
                + ": give the same leads, by the same names, at one rate"
            )
        for lead, ours, theirs in zip(how.leads, how.units, first.units, strict=False):  # older runs know no units
            if ours != theirs:
                raise UsageError(
                    f"{other} has the lead {lead!r} in {ours or 'no unit'}, and {one} in {theirs or 'no unit'}: "
                    "convert both to one unit"
                )


# Masks


def _read_masks(files: Folders, reading: ReadOptions) -> tuple[Folders, dict[str, Tensor], dict[str, Any]]:
    """Return ``files``, each client's masks, and facts of the source.

    Raises :class:`UsageError` for values that are no class.
    """
    masks = {name: _decode_masks(files, name, own.masks, reading) for name, own in files.clients.items()}
    fields = {
        name: _decode_masks(files, name, own.fields, reading) for name, own in files.clients.items() if own.fields
    }
    decoded = [*masks.values(), *fields.values()]
    broken = files.broken | {path: why for each in decoded for path, why in each.broken.items()}
    files = replace(files, broken=broken, used=sum(mask.values.nbytes for mask in decoded))
    if files.content == VOLUMES:
        files.refuse_broken(broken, reading)
    present = {
        name: np.stack([np.bincount(mask.ravel(), minlength=256) > 0 for mask in own.values])
        for name, own in masks.items()
    }
    pairs = {name: tuple(zip(own.images, own.masks, strict=True)) for name, own in files.clients.items()}
    classes, white = pairing.number_classes(files.path, pairs, present, reading)
    targets, notices = dict[str, Tensor](), list[str]()
    for name, client in files.clients.items():
        views = fields[name].values[:, 0] if name in fields else None
        y = pairing.to_classes(
            masks[name].values[:, 0], white=name in white, fields=views, sizes=files.list_sizes(client)
        )
        targets[name] = torch.from_numpy(y)
        notices += pairing.describe_partners(name, (*pairs[name], *zip(client.images, client.fields, strict=False)))
        lost = client.list_lost(broken)
        notices += pairing.list_empty(name, pairs[name], present[name], lost, white=name in white)
    notices += pairing.describe_values(white, pairs)
    if fields:
        shares = ", ".join(f"{float((view.values == 0).mean()):.0%} at {name!r}" for name, view in fields.items())
        notices.append(Information(f"pixels outside of the fields of view are ignored: {shares}"))
    task = reading.task if isinstance(reading.task, Segmentation) else Segmentation()
    if files.content == VOLUMES:
        spacing = next(iter(files.how.values())).spacing
        shown = {path: header.resample(spacing) if spacing else header for path, header in files.shown.items()}
        task, said = grids.choose_spacing(task, list(shown.values()), [files.sizes[path] for path in shown])
        notices += said
    return files, targets, {"task": task, "classes": classes, "classes_checked": True, "notices": tuple(notices)}


def _decode_masks(files: Folders, name: str, masks: Sequence[ImageFile], reading: ReadOptions) -> Pixels:
    """Return masks, or fields of view, at the size of their images, uint8 ``[N, 1, *axes]``."""
    client, spacing = files.clients[name], files.how[name].spacing
    before = {
        files.path / mask.path: files.headers[image.path].spacing
        for image, mask in zip(client.images, masks, strict=True)
        if spacing and image.path in files.headers
    }

    def read_mask(file: Path, size: Size) -> tuple[NDArray[Any], Levels]:
        if files.content == MASKS:
            return decode_image(file, kind="mask", size=size)
        mask = decode_mask(file)
        mask = resample_mask(mask, before[file], spacing) if file in before else mask
        return resize_masks(torch.from_numpy(mask)[None], size).numpy(), NO_LEVELS

    facts = "masks", spacing, [*before.values()]
    return _decode_together(files, name, masks, read_mask, facts, reading, masks=True)[0]


# Load


def _decode(files: Folders, rows: Rows, reading: ReadOptions, divide: Divide) -> Decoded:
    """Return each client's images; raise :class:`UsageError` for broken files, unless they are to be left out."""
    decoded = {name: decode_images(files, name, reading) for name in files.clients}
    broken = files.broken | {path: why for images, _ in decoded.values() for path, why in images.broken.items()}
    files.refuse_broken(broken, reading)
    lost = set[str]().union(*(client.list_lost(broken) for client in files.clients.values()))
    trained = rows.take(divide(lost) == "train")
    levels = {
        name: [decoded[name][0].levels[row] for row in trained.place[trained.client == name]]
        for name in files.clients
        if files.how[name].kind == "integer"
    }
    how, notices = choose_ranges(files, levels, reading)
    faults = list[str]()
    for name, client in files.clients.items():
        images, unkept = decoded[name]
        notices += _list_notices(files, name, images, reading)
        mine = {file.path: broken[file.path] for file in client.files if file.path in broken}
        faults += [listing.describe_broken(name, mine, len(client.files))] if mine else []
        if unkept:
            text = f"{reading.cache_directory} cannot be written ({unkept}): images are kept in memory"
            notices.append(Information(text))
    stores = [make_store(files, name, decoded[name][0], how[name], reading) for name in files.clients]
    used = sum(x.nbytes for images, _ in decoded.values() for x in images.values)
    make_room(reading.cache_directory, files.used + 2 * used)  # as decoded, and as scaled
    return Decoded(
        stores=stores, decodings=list(how.values()), lost=lost,
        true_sizes=[np.array(files.list_sizes(client), np.int64) for client in files.clients.values()],
        notices=tuple(dict.fromkeys(notices)), faults=tuple(faults),
    )  # fmt: skip


def choose_ranges(
    files: Folders, levels: Mapping[str, Sequence[Levels]], reading: ReadOptions
) -> tuple[dict[str, Decoding], list[str]]:
    """Return how each client's files are decoded, with one range for the gray of all clients, and a notice of it.

    ``levels``: of each client's training images of more than 8 bits. Raises :class:`UsageError` if a window is asked
    for images that have none, of 8 bits or floats.
    """
    window, how = parse_window(reading.window), dict(files.how)
    deep = [name for name, each in how.items() if each.kind == "integer"]
    if window and files.content in (CLASSES, MASKS) and len(deep) < len(how):
        other = next(name for name in how if name not in deep)
        raise UsageError(
            f"{{}} is for gray of more than 8 bits, which the images of client {other!r} are not: leave it out",
            Ref(window=reading.window),
        )
    notices = list[str]()
    joined = reading.schema.preparation.decoding if isinstance(reading.schema, Schema) else None
    if joined and joined.kind == "integer":
        window = joined.window
    elif deep and not window:
        window, told = choose_gray(levels)
        notices.append(told)
    return how | {name: replace(how[name], window=window) for name in deep}, notices


def decode_images(files: Folders, name: str, reading: ReadOptions) -> tuple[Pixels, str]:
    """Return a client's images, and the reason why they are not in the cache; empty: they are."""
    client, how = files.clients[name], files.how[name]
    channels = files.count_channels(client)

    def read(file: Path, size: Size) -> tuple[NDArray[Any], Levels]:
        return decode(file, how, channels, size)

    if files.content == VOLUMES:
        return _decode_each(files, name, read, (how, channels), reading)
    return _decode_together(files, name, client.images, read, (how, channels), reading)


def _decode_together(
    files: Folders, name: str, some: Sequence[ImageFile], read: Read, facts: Sequence[object], reading: ReadOptions,
    *, masks: bool = False,
) -> tuple[Pixels, str]:  # fmt: skip
    """Return ``some`` files of a client as one array, padded at their ends to the largest.

    ``read`` returns a file at a size, ``[C, *size]``, and depends only on the file and ``facts``.
    """
    sizes, what = files.list_sizes(files.clients[name]), f"{'masks' if masks else 'images'} of {name}"
    shape = (len(some), 1 if masks else files.count_channels(files.clients[name]), *np.max(sizes, axis=0).tolist())
    floats = not masks and files.how[name].kind != "byte"

    def work() -> Pixels:
        values = np.zeros(shape, np.float32 if floats else np.uint8)
        row_of = {files.path / file.path: row for row, file in enumerate(some)}

        def read_one(file: Path) -> tuple[Levels, bool]:
            pixels, levels = read(file, sizes[row_of[file]])
            if pixels.shape[1:] != shape[2:]:
                pixels = extend(torch.from_numpy(np.array(pixels)), shape[2:], 0 if masks else None).numpy()
            values[row_of[file]] = pixels
            return levels, bool(pixels.min() == pixels.max())

        readable = {file.path: files.path / file.path for file in some if file.path not in files.broken}
        results, broken = read_all(readable, read_one, what, reading.progress)
        levels = [results[file.path][0] if file.path in results else NO_LEVELS for file in some]
        return Pixels(values, broken, levels, [path for path, (_, same) in results.items() if same])

    members = (
        [stamp(list_members(files.path / file.path)) for file in some] if files.content in (VOLUMES, RECORDINGS) else []
    )
    key = str(files.path.resolve()), some, members, sizes, shape, floats, facts
    return keep(reading.cache_directory, key, work)


def _decode_each(
    files: Folders, name: str, read: Read, facts: Sequence[object], reading: ReadOptions
) -> tuple[Pixels, str]:
    """Return a client's images as an array each, which has its own place in the cache."""
    client, unkept = files.clients[name], set[str]()
    sizes = dict(zip((files.path / file.path for file in client.images), files.list_sizes(client), strict=True))
    channels = files.count_channels(client)

    def read_one(file: Path) -> tuple[NDArray[Any], bool]:
        def work() -> tuple[NDArray[Any], bool]:
            values, _ = read(file, sizes[file])
            return values, bool(values.min() == values.max())

        result, reason = keep(reading.cache_directory, (stamp(list_members(file)), sizes[file], facts), work)
        if result[0].shape != (channels, *sizes[file]):
            raise Unreadable(f"has shape {result[0].shape}, and {(channels, *sizes[file])} by its header")
        unkept.update(filter(None, [reason]))
        return result

    readable = {file.path: files.path / file.path for file in client.images if file.path not in files.broken}
    results, broken = read_all(readable, read_one, f"images of {name}", reading.progress)
    blank = np.zeros((channels, *(1,) * len(next(iter(sizes.values())))), np.float32)
    values = [results[file.path][0] if file.path in results else blank for file in client.images]
    constant = [path for path, (_, same) in results.items() if same]
    return Pixels(values, broken, [NO_LEVELS] * len(values), constant), next(iter(unkept), "")


def make_store(files: Folders, name: str, images: Pixels, how: Decoding, reading: ReadOptions) -> Tensor | LazyStore:
    """Return a client's samples: pictures as a tensor, mapped from the cache; others as mapped arrays."""
    client = files.clients[name]
    if files.content in (VOLUMES, RECORDINGS):
        members = [files.path / file.path for file in client.images]
        headers = [files.headers.get(file.path) for file in client.images] if files.content == VOLUMES else []
        size = tuple(np.max(files.list_sizes(client), axis=0).tolist())
        return MappedStore(list(images.values), size, f"client {name!r}", members, how, headers)
    if how.kind == "byte":
        return torch.from_numpy(images.values)

    def work() -> NDArray[Any]:
        scaled: NDArray[Any] = np.empty_like(images.values)
        for start in range(0, len(scaled), _CHUNK):
            scaled[start : start + _CHUNK] = how.rescale(images.values[start : start + _CHUNK])
        return scaled

    key = "scaled", str(files.path.resolve()), client.images, how, images.values.shape, files.list_sizes(client)
    return torch.from_numpy(keep(reading.cache_directory, key, work)[0])


def _list_notices(files: Folders, name: str, images: Pixels, reading: ReadOptions) -> list[str]:
    """Return remarks on how a client's files were read."""
    client, notices = files.clients[name], list[str]()
    frames = {f.path: getattr(files.headers.get(f.path), "frames", 1) for f in client.images}
    if several := {path: count for path, count in frames.items() if count > 1}:
        told = join_some(f"{path}: {count}" for path, count in several.items())
        notices.append(f"client {name!r}: {len(several)} files hold several frames, the first is read ({told})")
    changes = Counter(getattr(files.headers.get(f.path), "changed", "") for f in client.images)
    counts = [f"{count} of {len(client.images)} images {change}" for change, count in changes.items() if change]
    notices += [Information(f"client {name!r}: {text}") for text in counts]
    if images.constant:
        notices.append(
            f"client {name!r}: {len(images.constant)} of {len(client.images)} images are constant, all of their pixels "
            f"have one value ({join_some(images.constant)})"
        )
    if any(file.part for file in client.images) and not any(file.part == "test" for file in client.images):
        text = f"client {name!r}: no test folder, so {reading.test_fraction:g} of its train folder is for testing"
        notices.append(Information(text))
    return notices


def read_unlabeled(
    path: Path, found: Mapping[str, Path], reading: ReadOptions, *, volumes: bool, size: Size = ()
) -> tuple[Tensor | LazyStore, NDArray[np.int64], dict[str, str]]:
    """Return images ``found`` below ``path`` by name as one client's, their sizes ``[N, axes]``, and broken ones.

    Gray of more than 8 bits has the range of ``reading.schema``. ``size``: of medical images that are resized; empty:
    they keep their sizes. Raises :class:`UsageError` as :func:`read` does, and if no file can be read.
    """
    images = tuple(ImageFile(name, "", "", *stamp([file])[0][1:]) for name, file in found.items())
    content = VOLUMES if volumes else MASKS if reading.patch else CLASSES
    name = path.resolve().name
    files = Folders(path=path, content=content, clients={name: Client(images=images)}, headers={}, broken={})
    files, _ = inspect(files, reading)
    files = replace(files, sizes=dict.fromkeys(files.sizes, size)) if size else files
    decoded, _ = decode_images(files, name, reading)
    how, _ = choose_ranges(files, {name: decoded.levels}, reading)
    store = make_store(files, name, decoded, how[name], reading)
    broken = files.broken | decoded.broken
    files.refuse_broken(broken, reading if len(broken) < len(found) else replace(reading, on_data_error="refuse"))
    return store, np.array(files.list_sizes(files.clients[name]), np.int64), broken
