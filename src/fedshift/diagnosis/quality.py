"""Quality check of a federation's data: faults that training would hide, each with its numbers and its fix.

The interval of an accuracy is E. B. Wilson's (1927), "Probable inference, the law of succession, and statistical
inference", JASA 22(158): around 50 % of n samples it extends z / (2 sqrt(n + z^2)) to each side, z = 1.96 for 95 %.

A copy of a test sample in training data is an error (Kaufman et al. 2012, "Leakage in data mining", ACM TKDD 6(4)).
Samples are equal where all their bytes are. Blank images, which are equal without being copies, are left out, and a
test or validation set that several clients share as a whole counts once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..data.federation import Federation
from .survey import SplitSurvey, survey_splits

Bools = NDArray[np.bool_]
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

EXAMPLES = 3
"""Examples that a finding shows."""
FEW = 30
"""Samples below which an accuracy or a standard deviation is too uncertain."""
LARGE, APART = 1e4, 100.0
"""A feature counts as not scaled with values beyond the first, or standard deviations this many times apart."""
MANY_NUMBERS = 32
"""Numbers per sample from which equal samples count as copies; with fewer, two people can have the same values."""

_Z = 1.959964
_DOUBT = " Samples of so few numbers can be equal by chance: check whether they are the same one."

FAULTS: Mapping[str, tuple[Severity, str]] = {
    "empty": ("error", "Give every client samples in each split, or leave the client out."),
    "label-range": ("error", "Correct them, or give the number of classes (--classes)."),
    "not-finite": ("error", "Fill them in from the client's own training data, or remove them."),
    "blank": ("warning", "Check whether their files are broken, and remove them if so."),
    "shapes": ("error", "Give all clients the same features, or images with the same number of channels."),
    "types": ("warning", "Store all clients' samples in one type, or as floats from -1 to 1."),
    "leakage": (
        "error",
        "Remove them from the training data, or split by the source of samples (person, device, document) before "
        "making variants of them: without that, test accuracy is too high.",
    ),
    "leakage-validation": (
        "warning",
        "Remove them from the training data: otherwise validation favors what was memorized.",
    ),
    "conflict": ("error", "Correct the labels, or remove these samples."),
    "repeats": ("warning", "Keep one of each, unless they are meant to weigh more."),
    "shared": ("warning", "Give each sample to one client, unless clients are meant to overlap."),
    "common-set": ("note", "No action is needed if one set is meant to measure several clients; it is not a copy."),
    "constant": ("warning", "Leave them out: they carry no information."),
    "constant-at-client": (
        "warning",
        "Check whether this client measures them at all; if not, leave them out or treat them as missing.",
    ),
    "large": (
        "warning",
        "Scale each feature by the client's own training data, to mean 0 and standard deviation 1.",
    ),
    "units": ("warning", "Check whether they use the same unit, and scale by the client's own training data."),
    "class-names": ("error", "Spell labels the same way everywhere: different spellings are different classes."),
    "absent-class": ("note", "Give the number of classes if there are fewer (--classes)."),
    "unlearned-class": ("warning", "Add samples of these classes to training data, or remove them from the test data."),
    "untrained-class": ("warning", "Split each client's samples class by class, unless this is how they arise."),
    "single-class": (
        "warning",
        "Training refuses such clients: leave them out, or allow them (--allow-single-class).",
    ),
    "missing-class": (
        "note",
        "No action is needed: classes differ by client. A personal model learns little of the classes it lacks.",
    ),
    "small-test": (
        "warning",
        "Hold back more samples for testing, or read these clients' accuracies together, not one by one.",
    ),
}
"""Kinds of fault with their usual severity and their fix.

With an ``error``, training fails or its numbers mislead; a ``warning`` skews them; a ``note`` is a difference between
clients.
"""


@dataclass(frozen=True, kw_only=True)
class SampleLocation:
    """Client, split and ``row`` (counted from 0) of a sample, and its label."""

    client: str
    split: str
    row: int
    label: int


@dataclass(frozen=True, kw_only=True)
class QualityFinding:
    """One fault: ``text`` says in a sentence what is wrong and where, ``fix`` what to do.

    ``kind`` is a key of :data:`FAULTS`; ``clients`` are all affected; ``samples`` is the number of affected samples (0
    if the fault is not about samples); ``examples`` are a few locations, those of equal samples together.
    """

    kind: str
    severity: Severity
    text: str
    fix: str
    clients: tuple[str, ...]
    samples: int = 0
    examples: tuple[tuple[SampleLocation, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """Contents of one split of one client; ``per_class`` counts the samples of labels 0, 1, ..."""

    client: str
    split: str
    samples: int
    per_class: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Findings of :func:`examine`, errors first."""

    name: str
    classes: int
    splits: tuple[SplitSummary, ...]
    findings: tuple[QualityFinding, ...]

    def of(self, severity: Severity) -> tuple[QualityFinding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as values that JSON can hold."""
        return asdict(self)


def examine(data: Federation) -> Quality:
    """Read every sample of ``data`` once and report all faults.

    The faults that :meth:`Federation.check` refuses one at a time are found too, so that they are reported together.
    """
    surveys = survey_splits(data)
    findings = [
        *_judge_labels(data, surveys),
        *_judge_values(surveys),
        *_judge_form(surveys),
        *_judge_duplicates(surveys),
        *_judge_constant(surveys),
        *_judge_scale(surveys),
        *_judge_names(data),
        *_judge_classes(data, surveys),
        *_judge_test_sizes(surveys),
    ]
    return Quality(
        name=data.name,
        classes=data.classes,
        splits=tuple(
            SplitSummary(
                client=part.client,
                split=part.split,
                samples=len(part.labels),
                per_class=tuple(part.counts(data.classes).tolist()),
                shape=part.shape,
                dtype=part.dtype,
            )
            for part in surveys
        ),
        findings=tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
    )


def _make_finding(
    kind: str, text: str, clients: Iterable[SplitSurvey | str] = (), *, severity: Severity | None = None, **more: Any
) -> QualityFinding:
    """Return a finding with the severity and the fix of its kind; ``clients`` may be splits, and repeat."""
    usual, fix = FAULTS[kind]
    names = (each if isinstance(each, str) else each.client for each in clients)
    fields = {"fix": fix, "severity": severity or usual, "clients": tuple(dict.fromkeys(names)), **more}
    return QualityFinding(kind=kind, text=text, **fields)


def _summarize_rows(
    kind: str, what: str, rows: Mapping[SplitSurvey, Sequence[int] | NDArray[np.int64]]
) -> Iterator[QualityFinding]:
    """Yield the finding for these rows of these splits, if any; the first row of each is an example."""
    rows = {part: some for part, some in rows.items() if len(some)}
    if rows:
        yield _make_finding(
            kind,
            f"{what}: {join_some(part.share(len(some)) for part, some in rows.items())}.",
            rows,
            samples=sum(map(len, rows.values())),
            examples=tuple((_locate_sample(part, int(some[0])),) for part, some in rows.items())[:EXAMPLES],
        )


def _locate_sample(part: SplitSurvey, row: int) -> SampleLocation:
    return SampleLocation(client=part.client, split=part.split, row=row, label=int(part.labels[row]))


def join_some(items: Iterable[str], separator: str = ", ", shown: int = 5) -> str:
    """Join the first items, as in ``a, b, c and 2 more``."""
    items = list(items)
    return separator.join(items[:shown]) + (f" and {len(items) - shown:,} more" if len(items) > shown else "")


def _format_features(chosen_F: Bools, part: SplitSurvey) -> str:
    """Format as ``columns 3, 7 (2 of 60)``."""
    noun = "columns" if len(part.shape) == 1 else "channels"
    return f"{noun} {join_some(map(str, np.flatnonzero(chosen_F)))} ({int(chosen_F.sum()):,} of {len(chosen_F):,})"


def _judge_labels(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find splits without samples, and labels that are no class."""
    empty = [part for part in surveys if not len(part.labels)]
    if empty:
        yield _make_finding("empty", f"No sample: {join_some(part.where for part in empty)}.", empty)
    outside = {part: np.flatnonzero((part.labels < 0) | (part.labels >= data.classes)) for part in surveys}
    yield from _summarize_rows("label-range", f"Labels outside 0..{data.classes - 1}", outside)


def _judge_values(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find samples with values that are not numbers, and images that show nothing."""
    broken = {part: part.broken for part in surveys}
    yield from _summarize_rows("not-finite", "Samples with NaN or infinite values", broken)
    yield from _summarize_rows("blank", "Images of a single color", {part: part.blank for part in surveys})


def _judge_form(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find samples of several shapes or types."""
    shapes: defaultdict[str, list[str]] = defaultdict(list)
    types: defaultdict[str, list[str]] = defaultdict(list)
    for part in surveys:
        shapes[" x ".join(map(str, part.shape))].append(part.client)
        types[part.dtype].append(part.client)
    if len(shapes) > 1:
        text = f"Samples differ in shape: {_describe_groups(shapes)}."
        if all(len(part.shape) == 3 for part in surveys) and len({part.shape[0] for part in surveys} - {1}) < 2:
            fix = "No action is needed: images are resized (--image-size sets the size), gray ones become color images."
            yield _make_finding("shapes", text, surveys, severity="note", fix=fix)
        else:
            yield _make_finding("shapes", text, surveys)
    if len(types) > 1 and not all(_is_byte_scaled(part) for part in surveys):
        text = f"Samples differ in type, and bytes are scaled but floats are not: {_describe_groups(types)}."
        yield _make_finding("types", text, surveys)


def _is_byte_scaled(part: SplitSurvey) -> bool:
    """Return whether a network receives values from -1 to 1: bytes are scaled to that range, floats must be in it."""
    return part.dtype == "uint8" or bool((part.low >= -1).all() and (part.high <= 1).all())


def _describe_groups(groups: Mapping[str, Sequence[str]]) -> str:
    """Format as ``3 x 32 x 32 at a, b; 1 x 28 x 28 at c``."""
    return "; ".join(f"{form} at {join_some(dict.fromkeys(names), shown=3)}" for form, names in groups.items())


def _comparable_splits(surveys: Sequence[SplitSurvey], samples: int) -> list[SplitSurvey]:
    """Return training splits of at least so many samples without NaN; none where features differ in number."""
    parts = [part for part in surveys if part.split == "train" and len(part.labels) - len(part.broken) >= samples]
    return parts if len({len(part.low) for part in parts}) == 1 else []


def _judge_constant(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find features that have one value in training data."""
    parts = _comparable_splits(surveys, 2)
    if not parts:
        return
    low_KF, high_KF = np.stack([part.low for part in parts]), np.stack([part.high for part in parts])
    everywhere_F = low_KF.min(axis=0) == high_KF.max(axis=0)
    if everywhere_F.any():
        which = _format_features(everywhere_F, parts[0])
        yield _make_finding("constant", f"The same value in all training data: {which}.", parts)
    flat = dict(zip(parts, (low_KF == high_KF) & ~everywhere_F, strict=True))
    flat = {part: flat_F for part, flat_F in flat.items() if flat_F.any()}
    if flat:
        several = (f"{part.client} {_format_features(flat_F, part)}" for part, flat_F in flat.items())
        text = f"The same value in all training data of a client: {join_some(several, '; ')}."
        severity: Severity = "note" if len(parts[0].shape) == 1 else "warning"
        yield _make_finding("constant-at-client", text, flat, severity=severity)


def _judge_scale(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find floating-point features that are large, or that clients seem to measure in different units."""
    floats = [part for part in surveys if part.dtype.startswith("float") and len(part.labels) > len(part.broken)]
    extremes = {part: float(max(part.low.min(), part.high.max(), key=abs)) for part in floats}
    large = {part: value for part, value in extremes.items() if abs(value) > LARGE}
    if large:
        several = join_some(f"{part.where} {value:,.6g}" for part, value in large.items())
        yield _make_finding("large", f"Values beyond ±{LARGE:,.0f}: {several}.", large)
    parts = [part for part in _comparable_splits(surveys, FEW) if part.dtype.startswith("float")]
    if len(parts) < 2:
        return
    std_KF = np.stack([part.std for part in parts])
    least_KF = np.where(std_KF > 0, std_KF, np.inf)
    apart_F = std_KF.max(axis=0) / least_KF.min(axis=0)
    if apart_F.max() > APART:
        most = int(apart_F.argmax())
        wide, narrow = parts[int(std_KF[:, most].argmax())], parts[int(least_KF[:, most].argmin())]
        yield _make_finding(
            "units",
            f"Standard deviations are more than {APART:g} times apart in {_format_features(apart_F > APART, wide)}: "
            f"{wide.client} has {wide.std[most]:.3g} where {narrow.client} has {narrow.std[most]:.3g} (number {most}).",
            [wide, narrow],
        )


def _judge_names(data: Federation) -> Iterator[QualityFinding]:
    """Find classes whose names differ only in blanks and capitals."""
    alike: dict[str, list[str]] = {}
    for name in data.class_names:
        alike.setdefault(name.strip().casefold(), []).append(name)
    twice = [" and ".join(map(repr, names)) for names in alike.values() if len(names) > 1]
    if twice:
        text = f"Classes whose names differ only in blanks and capitals: {join_some(twice, '; ')}."
        yield _make_finding("class-names", text)


def _judge_classes(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find classes that are missing everywhere, or at a client."""
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
    own = {part: has_C for part, has_C in tested.items() if sets[part.content] == 1}
    for kind, what, classes in (
        (
            "unlearned-class",
            "Test data hold classes on which no client trains",
            {part.client: has_C & ~trained_C for part, has_C in tested.items()},
        ),
        (
            "untrained-class",
            "A client's own test data hold classes that its training data lack",
            {part.client: has_C & trained_C & ~trained.get(part.client, none_C) for part, has_C in own.items()},
        ),
        (
            "single-class",
            "Training data hold a single class",
            {client: has_C for client, has_C in trained.items() if has_C.sum() == 1 < data.classes},
        ),
        (
            "missing-class",
            "Training data lack classes that other clients have",
            {client: trained_C & ~has_C for client, has_C in trained.items()},
        ),
    ):
        named = {client: _name_classes(data, chosen_C) for client, chosen_C in classes.items() if chosen_C.any()}
        if named:
            several = join_some((f"{client} {which}" for client, which in named.items()), "; ")
            yield _make_finding(kind, f"{what}: {several}.", named)


def _name_classes(data: Federation, chosen_C: Bools) -> str:
    """Format as ``cat, dog``, or as a number for many classes."""
    which = np.flatnonzero(chosen_C)
    if len(which) > 4:
        return f"{len(which)} of {data.classes} classes"
    return ", ".join(data.class_names[number] if data.class_names else str(number) for number in which)


def _judge_test_sizes(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find test data so small that an accuracy is too uncertain."""
    small = {part: len(part.labels) for part in surveys if part.split == "test" and 0 < len(part.labels) < FEW}
    if small:
        widths = {part: 100 * _Z / (2 * math.sqrt(count + _Z**2)) for part, count in small.items()}
        several = join_some(f"{part.client} {count} (50 % ± {widths[part]:.0f})" for part, count in small.items())
        text = f"Fewer than {FEW} test samples, with the 95 % interval of an accuracy of 50 %: {several}."
        yield _make_finding("small-test", text, small)


Member = tuple[int, int]
"""Index of a split, and row in it."""
Hit = tuple[Sequence[Member], Sequence[Member]]
"""Members of one group of equal samples that count as a fault, and two that show it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Duplicates:
    """Groups of equal samples among ``parts``, members in order, groups in the order of their first member.

    ``common``: test and validation sets that several clients share, as (split, clients); ``parts`` holds the first.
    """

    parts: tuple[SplitSurvey, ...]
    groups: tuple[tuple[Member, ...], ...]
    common: tuple[tuple[str, tuple[str, ...]], ...]

    def find_leaks(self, split: str, sources: Container[str]) -> Iterator[Hit]:
        """Yield samples of ``split`` that are also in ``sources``, splits of any client."""
        for group in self.groups:
            inside = [member for member in group if self.parts[member[0]].split == split]
            source = [member for member in group if self.parts[member[0]].split in sources]
            if inside and source:
                yield inside, (inside[0], source[0])

    def find_conflicts(self) -> Iterator[Hit]:
        """Yield equal samples with different labels."""
        for group in self.groups:
            labels = [int(self.parts[part].labels[row]) for part, row in group]
            other = next((number for number, label in enumerate(labels) if label != labels[0]), None)
            if other is not None:
                yield group, (group[0], group[other])

    def find_repeats(self) -> Iterator[Hit]:
        """Yield samples that occur earlier in the same split."""
        for group in self.groups:
            for members in _group_by_part(group):
                if len(members) > 1:
                    yield members[1:], members[:2]

    def find_shared(self) -> Iterator[Hit]:
        """Yield samples that another client has in its split of the same name."""
        for group in self.groups:
            held: defaultdict[str, list[list[Member]]] = defaultdict(list)
            for members in _group_by_part(group):
                held[self.parts[members[0][0]].split].append(members)
            for several in held.values():
                if len(several) > 1:
                    yield [member for members in several for member in members], (several[0][0], several[1][0])


def _group_by_part(group: Sequence[Member]) -> Iterator[list[Member]]:
    for _, members in groupby(group, key=lambda member: member[0]):
        yield list(members)


def find_duplicates(surveys: Sequence[SplitSurvey]) -> Duplicates:
    """Find the groups of equal samples among ``surveys``."""
    holders: defaultdict[tuple[str, int | bytes], list[SplitSurvey]] = defaultdict(list)
    for number, part in enumerate(surveys):
        own = part.split == "train" or not len(part.labels)
        holders[part.split, number if own else part.content].append(part)
    parts = tuple(held[0] for held in holders.values())
    kept = [np.setdiff1d(np.arange(len(part.labels)), part.blank) for part in parts]
    digests = np.concatenate([part.digests[rows] for part, rows in zip(parts, kept, strict=True)])
    members = np.column_stack([np.repeat(np.arange(len(parts)), [len(rows) for rows in kept]), np.concatenate(kept)])
    _, which, count = np.unique(digests, axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    several = np.flatnonzero(count[which] > 1)
    order = several[np.argsort(which[several], kind="stable")]
    ends = np.flatnonzero(np.diff(which[order], append=-1)) + 1
    groups = np.split(members[order], ends[:-1]) if len(order) else []
    return Duplicates(
        parts=parts,
        groups=tuple(sorted(tuple((part, row) for part, row in group.tolist()) for group in groups)),
        common=tuple(
            (held[0].split, tuple(part.client for part in held)) for held in holders.values() if len(held) > 1
        ),
    )


def _judge_duplicates(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find equal samples where they mislead."""
    found = find_duplicates(surveys)
    proof = min(math.prod(part.shape) for part in surveys) >= MANY_NUMBERS
    for kind, what, hits in (
        (
            "leakage",
            "Test samples are also in training or validation data",
            found.find_leaks("test", ("train", "validation")),
        ),
        (
            "leakage-validation",
            "Validation samples are also in training data",
            found.find_leaks("validation", ("train",)),
        ),
        ("conflict", "Equal samples have different labels", found.find_conflicts()),
        ("repeats", "Samples repeat an earlier one of the same split", found.find_repeats()),
        ("shared", "Several clients hold the same samples", found.find_shared()),
    ):
        counts: Counter[int] = Counter()
        examples: list[tuple[SampleLocation, ...]] = []
        for counted, shown in hits:
            counts.update(part for part, _ in counted)
            if len(examples) < EXAMPLES:
                examples.append(tuple(_locate_sample(found.parts[part], row) for part, row in shown))
        if counts:
            shares = {found.parts[number]: count for number, count in sorted(counts.items())}
            severity, fix = FAULTS[kind]
            yield _make_finding(
                kind,
                f"{what}: {join_some(part.share(count) for part, count in shares.items())}.",
                shares,
                severity=severity if proof else "warning",
                fix=fix if proof else fix + _DOUBT,
                samples=counts.total(),
                examples=tuple(examples),
            )
    if found.common:
        several = (f"{join_some(names)} share one {split} set" for split, names in found.common)
        holders = [name for _, names in found.common for name in names]
        yield _make_finding("common-set", f"{join_some(several, '; ')}.", holders)
