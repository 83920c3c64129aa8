"""Faults in data that training would hide, each with its numbers and its fix; each function finds one kind.

The interval of an accuracy is Wilson's (E. B. Wilson 1927, "Probable inference, the law of succession, and statistical
inference", JASA 22(158)): around 50 % of n samples it extends z / (2 sqrt(n + z^2)) to each side, z = 1.96 for 95 %.

A copy of a test sample in training data is an error (Kaufman et al. 2012, "Leakage in data mining", ACM TKDD 6(4)).
Samples are equal if all their bytes are. Blank images, which are equal without being copies, are ignored, and a test or
validation set that several clients share in full counts once.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..data.agreement import FRACTIONS, SIGNED, check_scales, name_scales
from ..data.copies import MANY_NUMBERS
from ..data.federation import ClientData, Federation
from ..data.files.table_schema import feature_slices
from ..data.files.volumes import compare_spacings, is_resampled, list_headers
from ..data.preparation import FeatureScaling
from ..tasks import Classification, Regression, Segmentation, Survival
from ..tasks.segmentation import find_empty_masks
from ..utils.errors import UsageError
from ..utils.words import join_some
from .survey import SplitSurvey

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

EXAMPLES = 3
"""Number of examples that a finding shows."""
NAMED = 20
"""Number of pairs of files with equal samples that a finding shows."""
FEW = 30
"""Minimum number of samples for an accuracy to be certain enough."""
LARGE, RATIO = 1e4, 100.0
"""A feature counts as unscaled with values beyond the first, or with standard deviations that differ by the second.

A value is far from all others if its distance to the next one is the second times their range.
"""
TARGET_RATIO = 10.0
"""Numeric targets may have other units where their interquartile ranges differ by more than this factor."""
LEAST = 10
"""Minimum number of values at a client to compare units and to find outlying values."""
NINES = re.compile(r"-?9{2,}(\.9+)?")
"""Usual codes for missing values, such as 999 and -99, which are far from the others beyond these' range."""

GROUP_COLUMN = re.compile(
    r"(patient|subject|person|case|lesion|participant)([ _-]?(id|number|name))?|(.*[ _-])?(id|mrn)", re.IGNORECASE
)
"""Names of columns that seem to identify groups."""

COPIED = "Keep one file of each: a case that counts twice makes results look surer than they are."
"""Correction of cases with masks that are in several files."""

_Z = 1.959964
_DOUBT = " Samples of so few numbers can be equal by chance: check whether they are copies."

FAULTS: Mapping[str, tuple[Severity, str]] = {
    "left-out": ("error", "Repair, convert or remove them: no result includes files that are skipped."),
    "empty": ("error", "Give every client samples in each split, or leave the client out."),
    "label-range": ("error", "Correct them, or give the number of classes (--classes)."),
    "not-finite": ("error", "Fill them in from the client's own training data, or remove them."),
    "unread": ("error", "A run would end when it reads this file."),
    "grids": (
        "warning",
        "Resample all, as --spacing median does, or train on the voxels as they are if sites are meant to differ so.",
    ),
    "blank": ("warning", "Check whether their files are broken, and remove them if so."),
    "shapes": ("error", "Give all clients the same features, or images with the same number of channels."),
    "types": ("error", "Give all splits of all clients in one type and one scale."),
    "ranges": ("warning", "Check whether all use the same scale: black may be 0 in some and -1 in others."),
    "leakage": (
        "error",
        "Remove them from the training data, or split by the source of samples (person, device, document) before "
        "making variants of them: otherwise test accuracy is too high.",
    ),
    "leakage-validation": (
        "warning",
        "Remove them from the training data: otherwise validation rewards memorizing.",
    ),
    "groups": (
        "error",
        "Move all samples of a group (patient, lesion, series) to one side, or remove its training samples: results on "
        "test data are too good if the model was trained on the same patients.",
    ),
    "groups-validation": (
        "warning",
        "Move all samples of a group to one side: otherwise validation favors known groups.",
    ),
    "group-column": (
        "warning",
        "Name it (--groups COLUMN), so that each group stays on one side and the column is not a feature, or leave it "
        "out (--ignore-columns COLUMN).",
    ),
    "conflict": ("error", "Correct the labels, or remove these samples."),
    "repeats": ("warning", "Keep one of each, unless they are meant to have more weight."),
    "shared": ("warning", "Give each sample to one client, unless clients are meant to overlap."),
    "common-set": (
        "note",
        "No action is needed if several clients are meant to be measured on one set; it does not count as a copy.",
    ),
    "constant": ("warning", "Remove them: they carry no information."),
    "constant-at-client": (
        "warning",
        "Check whether this client measures them; if not, remove them or treat them as missing.",
    ),
    "large": (
        "warning",
        "Scale each feature to mean 0 and standard deviation 1 on the client's own training data.",
    ),
    "units": ("warning", "Check whether they use the same unit, and scale by the client's own training data."),
    "far": (
        "warning",
        "Leave the cell empty if it is a slip or a code for a missing value: it moves the mean and the scale of all "
        "others.",
    ),
    "target-units": ("warning", "Check whether all clients use one unit: clients share one scale of targets."),
    "constant-target": ("warning", "Check whether this client measures it; nothing can be learned from it there."),
    "numbering": ("warning", "Check whether all clients number classes from the same one."),
    "targets": ("error", "Correct the targets, or remove the samples."),
    "empty-mask": ("note", "No action is needed if there is nothing to segment; otherwise correct the masks."),
    "class-names": ("error", "Spell labels the same way everywhere: different spellings are different classes."),
    "category-names": (
        "warning",
        "Spell categories the same way everywhere: different spellings are different features.",
    ),
    "absent-class": ("note", "Give the number of classes if there are fewer (--classes)."),
    "unlearned-class": ("warning", "Add samples of these classes to training data, or remove them from the test data."),
    "untrained-class": ("warning", "Split each client's samples within each class, unless this is how they arise."),
    "single-class": (
        "warning",
        "Training refuses such clients: leave them out, or allow them (--allow-single-class).",
    ),
    "missing-class": (
        "note",
        "No action is needed: clients may have different classes. A personal model learns little about missing ones.",
    ),
    "small-test": (
        "warning",
        "Reserve more samples for testing, or read these clients' accuracies together, not one by one.",
    ),
}
"""Kinds of fault with their usual severity and their fix.

An ``error`` makes training fail or its results misleading, a ``warning`` distorts the results, and a ``note`` is only a
difference between clients.
"""


@dataclass(frozen=True, kw_only=True)
class SampleLocation:
    """Client, split and ``row`` (counted from 0) of a sample, with its label and its file where it has them."""

    client: str
    split: str
    row: int
    label: int | None
    file: str = ""

    def __str__(self) -> str:
        if self.file:
            return f"{self.file} ({self.split})"
        labeled = "" if self.label is None else f" (label {self.label})"
        return f"{self.client} {self.split} row {self.row}{labeled}"


@dataclass(frozen=True, kw_only=True)
class QualityFinding:
    """One fault: ``text`` is a sentence on what is wrong and where, and ``fix`` on what to do about it.

    ``kind`` is a key of :data:`FAULTS`; ``clients`` are all affected clients; ``samples`` is the number of affected
    samples (0 if the fault does not concern samples); ``examples`` are the locations of a few samples, with equal
    samples in one tuple.
    """

    kind: str
    severity: Severity
    text: str
    fix: str
    clients: tuple[str, ...]
    samples: int = 0
    examples: tuple[tuple[SampleLocation, ...], ...] = ()


def _make_finding(
    kind: str, text: str, clients: Iterable[SplitSurvey | str] = (), *, severity: Severity | None = None, **more: Any
) -> QualityFinding:
    """Return a finding with the severity and the fix of its kind; ``clients`` may be splits and contain duplicates."""
    usual, fix = FAULTS[kind]
    names = (each if isinstance(each, str) else each.client for each in clients)
    fields = {"fix": fix, "severity": severity or usual, "clients": tuple(dict.fromkeys(names)), **more}
    return QualityFinding(kind=kind, text=text, **fields)


def _list_places(
    kind: str, what: str, places: Mapping[Any, str], separator: str = ", ", **more: Any
) -> Iterator[QualityFinding]:
    """Yield a finding that lists these splits or clients with their texts; nothing if there are none."""
    if places:
        yield _make_finding(kind, f"{what}: {join_some(places.values(), separator)}.", places, **more)


def _list_rows(
    kind: str, what: str, rows: Mapping[SplitSurvey, Sequence[int] | NDArray[np.int64]]
) -> Iterator[QualityFinding]:
    """Yield a finding that counts these rows of each split, the first row as an example; nothing without rows."""
    rows = {part: some for part, some in rows.items() if len(some)}
    examples = tuple((_locate_sample(part, int(some[0])),) for part, some in rows.items())
    shares = {part: part.share(len(some)) for part, some in rows.items()}
    yield from _list_places(kind, what, shares, samples=sum(map(len, rows.values())), examples=examples[:EXAMPLES])


def _locate_sample(part: SplitSurvey, row: int) -> SampleLocation:
    file = part.files[row] if part.files else ""
    label = int(part.labels[row]) if part.labeled else None
    return SampleLocation(client=part.client, split=part.split, row=row, label=label, file=file)


def _format_features(chosen_F: Bools, part: SplitSurvey, names: Sequence[str]) -> str:
    """Format as ``columns 3, 7 (2 of 60)``, with the ``names`` of a table's features in place of numbers."""
    noun = "columns" if len(part.shape) == 1 else "channels"
    which = (names[number] if names else str(number) for number in np.flatnonzero(chosen_F).tolist())
    return f"{noun} {join_some(which)} ({int(chosen_F.sum()):,} of {len(chosen_F):,})"


def name_features(data: Federation) -> list[str]:
    """Return the column of each feature of a table, and for a column of text the category; empty for other data.

    For several inputs, the name and the place of each value.
    """
    if data.inputs:
        return [f"{each.name}[{number}]" for each in data.inputs for number in range(each.size)]
    return [
        repr(column.name) if column.categories is None else f"{column.name!r} = {category!r}"
        for column in data.columns
        for category in column.categories or ("",)
    ]


def judge_reading(data: Federation) -> Iterator[QualityFinding]:
    """Find files that look like data and were skipped when reading."""
    for fault in data.faults:
        yield _make_finding("left-out", f"{fault[:1].upper()}{fault[1:]}.")


def judge_grids(data: Federation) -> Iterator[QualityFinding]:
    """Find clients whose medical images have other voxels than those of others."""
    headers = list_headers(data)
    for text in compare_spacings(headers):
        if not is_resampled(data):
            yield _make_finding("grids", f"{text[:1].upper()}{text[1:]}.", headers)


def judge_labels(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find splits without samples, and labels that are not classes."""
    yield from _list_places("empty", "No sample", {part: part.where for part in surveys if not len(part.labels)})
    if not isinstance(data.task, Classification):
        return
    outside = {part: np.flatnonzero((part.labels < 0) | (part.labels >= data.classes)) for part in surveys}
    yield from _list_rows("label-range", f"Labels outside 0..{data.classes - 1}", outside)


def judge_values(surveys: Sequence[SplitSurvey], names: Sequence[str]) -> Iterator[QualityFinding]:
    """Find samples with NaN or infinite values, and images of a single color."""
    for part in surveys:
        for row, why in part.unread.items():
            yield _make_finding("unread", f"{why}.", [part], samples=1, examples=((_locate_sample(part, row),),))
    broken = {part: part.broken for part in surveys}
    faulty = [part for part in surveys if len(part.shape) == 1 and part.broken_features.any()]
    where = ""
    if len({part.shape for part in faulty}) == 1:
        where = f" in {_format_features(np.any([part.broken_features for part in faulty], axis=0), faulty[0], names)}"
    yield from _list_rows("not-finite", f"Samples with NaN or infinite values{where}", broken)
    yield from _list_rows("blank", "Images of a single color", {part: part.blank for part in surveys})


def judge_form(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find differences in the shape of samples."""
    shapes: defaultdict[str, list[str]] = defaultdict(list)
    for part in surveys:
        shapes[" x ".join(map(str, part.shape))].append(part.client)
    if len(shapes) > 1:
        text = f"Samples differ in shape: {_describe_groups(shapes)}."
        if all(len(part.shape) == 3 for part in surveys) and len({part.shape[0] for part in surveys} - {1}) < 2:
            fix = (
                "No action is needed: images are resized (--image-size sets the size), and gray images become color "
                "images."
            )
            yield _make_finding("shapes", text, surveys, severity="note", fix=fix)
        else:
            yield _make_finding("shapes", text, surveys)


def judge_scales(data: Federation) -> Iterator[QualityFinding]:
    """Find samples whose values reach the network at different scales, or seem to."""
    splits = {where: split for where, split in data.named_splits().items() if len(split)}
    try:
        check_scales(splits, data.sample_shape, data.inputs)
    except UsageError as error:
        text = str(error)
        yield _make_finding("types", f"Samples have different scales: {text[:1].upper()}{text[1:]}.", data.names)
        return
    kinds = {} if data.inputs else name_scales(splits)
    if {FRACTIONS, SIGNED} <= set(kinds.values()):
        places = defaultdict[str, list[str]](list)
        for where, kind in kinds.items():
            places[kind].append(where)
        yield _make_finding("ranges", f"Values differ in range: {_describe_groups(places)}.", data.names)


def _describe_groups(groups: Mapping[str, Sequence[str]]) -> str:
    """Format as ``3 x 32 x 32 at a, b; 1 x 28 x 28 at c``."""
    return "; ".join(f"{form} at {join_some(dict.fromkeys(names), shown=3)}" for form, names in groups.items())


def _comparable_splits(surveys: Sequence[SplitSurvey], samples: int) -> list[SplitSurvey]:
    """Return the training splits with at least ``samples`` finite samples; none if they differ in their features."""
    parts = [part for part in surveys if part.split == "train" and part.whole >= samples]
    return parts if len({len(part.low) for part in parts}) == 1 else []


def judge_constant(surveys: Sequence[SplitSurvey], names: Sequence[str]) -> Iterator[QualityFinding]:
    """Find features that are constant in the training data."""
    parts = _comparable_splits(surveys, 2)
    if not parts:
        return
    low_KF, high_KF = np.stack([part.low for part in parts]), np.stack([part.high for part in parts])
    everywhere_F = low_KF.min(axis=0) == high_KF.max(axis=0)
    if everywhere_F.any():
        which = _format_features(everywhere_F, parts[0], names)
        yield _make_finding("constant", f"The same value in all training data: {which}.", parts)
    flat_KF = (low_KF == high_KF) & ~everywhere_F
    places = {
        part: f"{part.client} {_format_features(flat_F, part, names)}"
        for part, flat_F in zip(parts, flat_KF, strict=True) if flat_F.any()
    }  # fmt: skip
    severity = "note" if len(parts[0].shape) == 1 else "warning"
    what = "The same value in all training data of a client"
    yield from _list_places("constant-at-client", what, places, "; ", severity=severity)


def judge_scale(surveys: Sequence[SplitSurvey], names: Sequence[str]) -> Iterator[QualityFinding]:
    """Find floating-point features that are large, or that clients seem to measure in different units."""
    floats = [part for part in surveys if part.dtype.startswith("float") and part.whole]
    large = {}
    for part in floats:
        extreme_F = np.where(-part.low > part.high, part.low, part.high)
        most = int(np.abs(extreme_F).argmax())
        if abs(extreme_F[most]) > LARGE:
            column = f" in {names[most]}" if names else ""
            large[part] = f"{part.where} {extreme_F[most]:,.6g}{column}"
    yield from _list_places("large", f"Values beyond ±{LARGE:,.0f}", large)
    parts = [part for part in _comparable_splits(surveys, LEAST) if part.dtype.startswith("float")]
    if len(parts) < 2:
        return
    std_KF = np.stack([part.std for part in parts])
    least_KF = np.where(std_KF > 0, std_KF, np.inf)
    ratio_F = std_KF.max(axis=0) / least_KF.min(axis=0)
    if ratio_F.max() > RATIO:
        most = int(ratio_F.argmax())
        wide, narrow = parts[int(std_KF[:, most].argmax())], parts[int(least_KF[:, most].argmin())]
        yield _make_finding(
            "units",
            f"Standard deviations differ by more than a factor of {RATIO:g} in "
            f"{_format_features(ratio_F > RATIO, wide, names)}: "
            f"{wide.client} has {wide.std[most]:.3g} and {narrow.client} has {narrow.std[most]:.3g} "
            f"({names[most] if names else f'number {most}'}).",
            [wide, narrow],
        )


def judge_names(data: Federation) -> Iterator[QualityFinding]:
    """Find classes, and a column's categories, whose names differ only in white space, case and accents' codes."""
    differ = "that differ only in spaces, case or codes of accents"
    if twice := _find_alike(data.class_names):
        yield _make_finding("class-names", f"Classes have names {differ}: {join_some(twice, '; ')}.")
    alike = {column.name: pairs for column in data.columns if (pairs := _find_alike(column.categories or ()))}
    if alike:
        listed = (f"{join_some(pairs, '; ')} in {name!r}" for name, pairs in alike.items())
        yield _make_finding("category-names", f"Categories have names {differ}: {join_some(listed, '; ')}.")


def _find_alike(names: Sequence[str]) -> list[str]:
    """Format the ``names`` that differ only in white space, case and accents' codes as ``'cat' and 'Cat'``."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault("".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(name)
    twice = []
    for several in alike.values():
        shown = repr if len({unicodedata.normalize("NFC", name) for name in several}) == len(several) else ascii
        twice += [" and ".join(map(shown, several))] if len(several) > 1 else []
    return twice


def judge_groups(data: Federation) -> Iterator[QualityFinding]:
    """Find groups with samples in two splits, of one client or several, and columns that seem to identify groups."""
    held = {
        (client.name, split): samples.group.cpu().numpy()
        for client in data.clients
        for split, samples in client.splits.items()
        if samples.group is not None
    }
    splits = {split for _, split in held}
    for side, sides in (("test", ("train", "validation")), ("validation", ("train",))):
        earlier = [split for split in sides if split in splits]
        known = np.unique(np.concatenate([np.empty(0, np.int64), *(g for (_, of), g in held.items() if of in earlier)]))
        shares, samples = {}, 0
        for client, group_N in ((client, group_N) for (client, of), group_N in held.items() if of == side):
            cut_N = np.isin(group_N, known) & (group_N >= 0)
            if cut_N.any():
                cut, groups = len(np.unique(group_N[cut_N])), len(np.unique(group_N))
                shares[client], samples = f"{cut:,} of {groups:,} of {client}", samples + int(cut_N.sum())
        what = f"Groups with {side} samples also have {' or '.join(earlier)} samples, at any client"
        yield from _list_places("groups" if side == "test" else "groups-validation", what, shares, samples=samples)
    named = [repr(column.name) for column in data.columns if GROUP_COLUMN.fullmatch(column.name.strip())]
    if named and not held:
        yield _make_finding("group-column", f"Columns that seem to identify groups are features: {join_some(named)}.")


def judge_classes(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find classes that all clients lack, or some."""
    held = {part: part.counts(data.classes) > 0 for part in surveys if len(part.labels)}
    trained = {part.client: has_C for part, has_C in held.items() if part.split == "train"}
    tested = {part: has_C for part, has_C in held.items() if part.split == "test"}
    sets = Counter(part.content for part in tested)
    none_C = np.zeros(data.classes, bool)
    trained_C = np.any([none_C, *trained.values()], axis=0)
    absent_C = ~np.any([none_C, *held.values()], axis=0)
    if absent_C.any():
        text = f"No client has a sample of these classes: {_name_classes(data, absent_C)}."
        yield _make_finding("absent-class", text)
    unshared = {part: has_C for part, has_C in tested.items() if sets[part.content] == 1}
    for kind, what, classes in (
        (
            "unlearned-class",
            "Test data contain classes on which no client trains",
            {part.client: has_C & ~trained_C for part, has_C in tested.items()},
        ),
        (
            "untrained-class",
            "A client's own test data contain classes that its training data lack",
            {part.client: has_C & trained_C & ~trained.get(part.client, none_C) for part, has_C in unshared.items()},
        ),
        (
            "single-class",
            "Training data contain a single class",
            {client: has_C for client, has_C in trained.items() if has_C.sum() == 1 < data.classes},
        ),
        (
            "missing-class",
            "Training data lack classes that other clients have",
            {client: trained_C & ~has_C for client, has_C in trained.items()},
        ),
    ):
        named = {place: f"{place} {_name_classes(data, has_C)}" for place, has_C in classes.items() if has_C.any()}
        yield from _list_places(kind, what, named, "; ")


def _name_classes(data: Federation, chosen_C: Bools) -> str:
    """Format as ``cat, dog``, or as a count if there are many classes."""
    which = np.flatnonzero(chosen_C)
    if len(which) > 4:
        return f"{len(which)} of {data.classes} classes"
    return ", ".join(data.class_names[number] if data.class_names else str(number) for number in which)


def judge_targets(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find targets that the task refuses, in the first such split of each client, and empty masks."""
    for client in data.clients:
        for name, split in client.splits.items():
            try:
                where = f"client {client.name!r}, {name} data"
                data.task.check_targets(split.y, split.whole_shape, data.classes, where)
            except UsageError as error:
                yield _make_finding("targets", f"{error}.", [client.name])
                break
    if isinstance(data.task, Segmentation):
        targets = (split.y for client in data.clients for split in client.splits.values())
        empty = {part: find_empty_masks(y).numpy() for part, y in zip(surveys, targets, strict=True)}
        yield from _list_rows("empty-mask", "Masks of background only", empty)


def judge_numbers(data: Federation) -> Iterator[QualityFinding]:
    """Find numbers of tables and numeric targets that are far from all others at their client, and targets' units."""
    targets = {client.name: dict(_list_targets(data, client)) for client in data.clients}
    far: dict[str, str] = {}
    for client in data.clients:
        named = [*_list_numbers(data, client), *targets[client.name].items()]
        found = [f"{name!r} {text}" for name, values in named for text in _find_far(values)]
        far |= {client.name: f"{client.name} {join_some(found)}"} if found else {}
    yield from _list_places("far", "Values far from all others of their column", far, "; ")
    for name in targets[data.names[0]] if isinstance(data.task, Regression) else ():
        held = {client: values[name] for client, values in targets.items() if len(values[name]) >= LEAST}
        ranges = {client: float(np.subtract(*np.quantile(values, (0.75, 0.25)))) for client, values in held.items()}
        known = sorted((size, client) for client, size in ranges.items() if size > 0)
        if known and known[-1][0] > TARGET_RATIO * known[0][0]:
            (narrow, one), (wide, other) = known[0], known[-1]
            text = f"{name!r} has interquartile ranges of {wide:.3g} at {other} and {narrow:.3g} at {one}"
            yield _make_finding("target-units", f"Targets differ in scale: {text}.", [other, one])
        same = {client: f"{client} {name!r} = {v[0]:g}" for client, v in held.items() if (v == v[0]).all()}
        yield from _list_places("constant-target", "The same target in all samples of a client", same)


def _list_numbers(data: Federation, client: ClientData) -> Iterator[tuple[str, Floats]]:
    """Yield the name and values of each column of numbers of a client's table, before they were scaled."""
    scaling = client.train.normalization
    if isinstance(scaling, FeatureScaling):
        x = np.concatenate([split.copy_rows(slice(None)).cpu().numpy() for split in client.splits.values()])
        for column, features in feature_slices(data.columns):
            at = features.start
            if column.categories is None and np.isfinite(scaling.std[at]):
                yield column.name, x[:, at].astype(np.float64) * scaling.std[at] + scaling.mean[at]


def _list_targets(data: Federation, client: ClientData) -> Iterator[tuple[str, Floats]]:
    """Yield the name and values of each numeric target of a client; of survival, the time."""
    if isinstance(data.task, Regression | Survival):
        y = np.concatenate([split.y.cpu().numpy().reshape(len(split), -1) for split in client.splits.values()])
        names = data.class_names or [f"target {number}" for number in range(y.shape[1])]
        yield from zip(["time"] if isinstance(data.task, Survival) else names, y.astype(np.float64).T, strict=False)


def _find_far(values: Floats) -> Iterator[str]:
    """Format as ``-999 (1 of 60)`` the lowest and the highest of ``values [N]`` if it is far from all others."""
    levels, counts = np.unique(values[np.isfinite(values)].round(6), return_counts=True)
    for at, near, others in ((0, 1, levels[1:]), (-1, -2, levels[:-1])):
        if len(others) >= LEAST:
            text = f"{levels[at]:.6g}"
            gap, spread = abs(levels[at] - levels[near]), others[-1] - others[0]
            if gap > (1 if NINES.fullmatch(text) else RATIO) * spread:
                yield f"{text} ({counts[at]:,} of {len(values):,})"


def judge_numbering(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find clients that number the same number of classes from 1 where others number from 0."""
    held: dict[str, set[int]] = defaultdict(set)
    for part in surveys:
        held[part.client] |= set(part.labels.tolist())
    low, high = set(range(data.classes - 1)), set(range(1, data.classes))
    first, second = ([name for name, own in held.items() if own == each] for each in (low, high))
    if not data.class_names and data.classes > 2 and first and second and len(first) + len(second) == len(held):
        names = [f"{join_some(several)} from {start}" for start, several in enumerate((first, second))]
        yield _make_finding("numbering", f"Classes seem to be numbered in two ways: {' and '.join(names)}.", second)


def judge_test_sizes(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find test sets that are too small for a reliable accuracy."""
    small = {
        part: f"{part.client} {count} (50 % ± {100 * _Z / (2 * math.sqrt(count + _Z**2)):.0f})"
        for part in surveys if part.split == "test" and 0 < (count := len(part.labels)) < FEW
    }  # fmt: skip
    what = f"Fewer than {FEW} test samples, with the 95 % interval of an accuracy of 50 %"
    yield from _list_places("small-test", what, small)


def find_duplicates(parts: Sequence[SplitSurvey], *, targets: bool = False) -> pd.DataFrame:
    """Return the samples that occur more than once in ``parts``, without blank images.

    ``targets``: samples are equal only if their targets are, too.

    Columns: ``part``, the number of the split; ``split``, its name; ``row``; ``label``; and ``group``, the number of
    the group of equal samples. Groups are ordered by their first member, members by split and row.
    """
    samples = pd.concat(
        pd.DataFrame(
            {"part": number, "split": part.split, "row": np.arange(len(part.labels)), "label": part.labels}
            | {f"digest {half}": part.digests[:, half] for half in (0, 1)}
        ).drop(part.blank)
        for number, part in enumerate(parts)
    )
    digest = ["digest 0", "digest 1", *["label"] * targets]
    copies = samples[samples.duplicated(digest, keep=False)]
    copies = copies.assign(group=copies.groupby(digest, sort=False).ngroup()).drop(columns=digest[:2])
    return copies.sort_values("group", kind="stable", ignore_index=True)


def _count_numbers(data: Federation) -> int:
    """Count the numbers of a sample, without the categories and the columns of 0 and 1 of a table."""
    if data.columns:
        return sum(column.categories is None and column.holds == "numbers" for column in data.columns)
    return min(math.prod(split.whole_shape) for split in data.named_splits().values())


def judge_duplicates(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find equal samples that distort results; numeric targets of equal samples may differ.

    Two patients of one age are not copies if their targets differ, unless samples have many numbers.
    """
    holders: defaultdict[tuple[str, int | bytes], list[SplitSurvey]] = defaultdict(list)
    for number, part in enumerate(surveys):
        separate = part.split == "train" or not len(part.labels)
        holders[part.split, number if separate else part.content].append(part)
    parts = [held[0] for held in holders.values()]
    proof = _count_numbers(data) >= MANY_NUMBERS
    numeric = isinstance(data.task, Regression | Survival)
    copies = find_duplicates(parts, targets=numeric and not proof).reset_index()
    part_of, row_of = copies["part"].to_numpy(), copies["row"].to_numpy()

    def differ(column: str, keys: list[str]) -> pd.DataFrame:
        """Return the samples that differ in ``column`` from the first one with the same ``keys``."""
        return copies[copies[column] != copies.groupby(keys)[column].transform("first")]

    trained, validating, tested = (copies[copies["split"] == split] for split in ("train", "validation", "test"))
    learned = copies[copies["split"] != "test"]
    alike, in_part, in_split = ["group"], ["group", "part"], ["group", "split"]
    for kind, what, keys, suspects, others in (
        ("leakage", "Test samples are also in training or validation data", alike, tested, learned),
        ("leakage-validation", "Validation samples are also in training data", alike, validating, trained),
        ("conflict", "Equal samples have different labels", alike, copies, differ("label", alike)),
        ("repeats", "Samples repeat an earlier one of the same split", in_part, copies, differ("row", in_part)),
        ("shared", "Several clients have the same samples", in_split, copies, differ("part", in_split)),
    ):
        if kind == "conflict" and (numeric or list_headers(data)):
            continue  # masks of equal voxels differ where headers turn or resample them otherwise
        second = others.drop_duplicates(keys)
        found = suspects.merge(second[keys], on=keys)
        pairs = found.drop_duplicates(keys).merge(second, on=keys)[["index_x", "index_y"]].to_numpy()
        counts = np.bincount((others if kind == "repeats" else found)["part"], minlength=len(parts))
        shares = {part: part.share(count) for part, count in zip(parts, counts, strict=True) if count}
        located = [tuple(_locate_sample(parts[part_of[at]], int(row_of[at])) for at in pair) for pair in pairs[:NAMED]]
        files = tuple(pair for pair in located if len({place.file for place in pair}) > 1)
        examples = files or tuple(located[:EXAMPLES])
        severity, fix = FAULTS[kind]
        if files and kind in ("repeats", "shared") and isinstance(data.task, Segmentation):
            severity, fix = "error", COPIED
        if not proof:
            severity, fix = "warning", fix + _DOUBT
        yield from _list_places(
            kind, what, shares, severity=severity, fix=fix, samples=int(counts.sum()), examples=examples
        )
    common = [held for held in holders.values() if len(held) > 1]
    if common:
        several = (f"{join_some(part.client for part in held)} share one {held[0].split} set" for held in common)
        holding = [part for held in common for part in held]
        yield _make_finding("common-set", f"{join_some(several, '; ')}.", holding)
