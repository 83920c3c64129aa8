"""Equal samples: within a split, across clients, between training and test data, and under different labels.

A copy of a test sample in training data is an error (Kaufman et al. 2012, "Leakage in data mining", ACM TKDD 6(4)).
Samples are equal where all their bytes are; blank images, which are equal without being copies, are left out, and a
test or validation set that several clients share as a whole counts once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from .findings import EXAMPLES, QualityFinding, SampleLocation, Severity, join_some, locate_sample
from .survey import SplitSurvey

MANY_NUMBERS = 32
"""Numbers in a sample from which on two equal ones are taken for one; below, two people can have the same."""

Member = tuple[int, int]
"""Number of a part, and row in it."""
Hit = tuple[Sequence[Member], Sequence[Member]]
"""Of one group of equal samples: those that count as a fault, and two that show it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Duplicates:
    """Groups of equal samples among ``parts``, members in order, groups in the order of their first.

    ``common``: test and validation sets that several clients share, as (split, clients); the first stands for all.
    """

    parts: tuple[SplitSurvey, ...]
    groups: tuple[tuple[Member, ...], ...]
    common: tuple[tuple[str, tuple[str, ...]], ...]

    def find_leaks(self, split: str, sources: Container[str]) -> Iterator[Hit]:
        """Samples of ``split`` that stand in ``sources``, splits of any client, too."""
        for group in self.groups:
            inside, source = self._of(group, (split,)), self._of(group, sources)
            if inside and source:
                yield inside, (inside[0], source[0])

    def find_conflicts(self) -> Iterator[Hit]:
        """Samples whose equals have other labels."""
        for group in self.groups:
            labels = [int(self.parts[part].labels[row]) for part, row in group]
            other = next((number for number, label in enumerate(labels) if label != labels[0]), None)
            if other is not None:
                yield group, (group[0], group[other])

    def find_repeats(self) -> Iterator[Hit]:
        """Samples that stand earlier in the same split."""
        for group in self.groups:
            for members in self._by_part(group):
                if len(members) > 1:
                    yield members[1:], members[:2]

    def find_shared(self) -> Iterator[Hit]:
        """Samples that another client has in its split of the same name."""
        for group in self.groups:
            held: defaultdict[str, list[list[Member]]] = defaultdict(list)
            for members in self._by_part(group):
                held[self.parts[members[0][0]].split].append(members)
            for several in held.values():
                if len(several) > 1:
                    yield [member for members in several for member in members], (several[0][0], several[1][0])

    def summarize(self, hits: Iterable[Hit], what: str, **fields: Any) -> Iterator[QualityFinding]:
        """The finding that sums up ``hits``, if there are any."""
        counts: Counter[int] = Counter()
        examples: list[tuple[SampleLocation, ...]] = []
        for counted, shown in hits:
            counts.update(part for part, _ in counted)
            if len(examples) < EXAMPLES:
                examples.append(tuple(locate_sample(self.parts[part], row) for part, row in shown))
        if counts:
            shares = {self.parts[number]: count for number, count in sorted(counts.items())}
            yield QualityFinding(
                text=f"{what}: {join_some(part.share(count) for part, count in shares.items())}.",
                clients=tuple(dict.fromkeys(part.client for part in shares)),
                samples=counts.total(),
                examples=tuple(examples),
                **fields,
            )

    def _of(self, group: Sequence[Member], splits: Container[str]) -> list[Member]:
        return [member for member in group if self.parts[member[0]].split in splits]

    def _by_part(self, group: Sequence[Member]) -> Iterator[list[Member]]:
        for _, members in groupby(group, key=lambda member: member[0]):
            yield list(members)


def find_duplicates(surveys: Sequence[SplitSurvey]) -> Duplicates:
    """The copies among ``surveys``."""
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


def judge_duplicates(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Equal samples where they mislead."""
    found = find_duplicates(surveys)
    proof = min(math.prod(part.shape) for part in surveys) >= MANY_NUMBERS
    grave: Severity = "error" if proof else "warning"
    doubt = "" if proof else " Samples of so few numbers can be equal by chance: look whether they are the same one."
    yield from found.summarize(
        found.find_leaks("test", ("train", "validation")),
        "Test samples are also in training or validation data",
        kind="leakage",
        severity=grave,
        fix="Take them out of the training data, or divide by what samples come from (person, device, document) before "
        f"making variants of them: as it is, test accuracy is too high.{doubt}",
    )
    yield from found.summarize(
        found.find_leaks("validation", ("train",)),
        "Validation samples are also in training data",
        kind="leakage-validation",
        severity="warning",
        fix=f"Take them out of the training data: validation would choose what was learned by heart.{doubt}",
    )
    yield from found.summarize(
        found.find_conflicts(),
        "Equal samples have different labels",
        kind="conflict",
        severity=grave,
        fix=f"Correct the labels, or take these samples out.{doubt}",
    )
    yield from found.summarize(
        found.find_repeats(),
        "Samples repeat an earlier one of the same split",
        kind="repeats",
        severity="warning",
        fix=f"Keep one of each, unless they are meant to weigh more.{doubt}",
    )
    yield from found.summarize(
        found.find_shared(),
        "Several clients hold the same samples",
        kind="shared",
        severity="warning",
        fix=f"Give each sample to one client, unless clients are meant to overlap.{doubt}",
    )
    if found.common:
        several = (f"{join_some(names)} share one {split} set" for split, names in found.common)
        yield QualityFinding(
            kind="common-set",
            severity="note",
            text=f"{join_some(several, '; ')}.",
            fix="Nothing need be done where one set is to measure several clients; it does not count as copies.",
            clients=tuple(dict.fromkeys(name for _, names in found.common for name in names)),
        )
