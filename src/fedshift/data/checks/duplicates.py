"""Equal samples, which distort results: in training and test data, repeated, shared, or with other labels.

A copy of a test sample in training data is an error (Kaufman et al. 2012, "Leakage in data mining", ACM TKDD 6(4)).
Samples are equal if all their bytes are. Blank images, which are equal without being copies, are ignored, and a test or
validation set that several clients share in full counts once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from ...tasks import Regression, Segmentation, Survival
from ...utils.words import join_some
from ..copies import MANY_NUMBERS
from ..federation import Federation
from ..files.grids import list_headers
from .findings import EXAMPLES, Finding, find_fix, list_places, make_finding
from .survey import SplitSurvey

SHOWN_PAIRS = 20
"""Number of pairs of files with equal samples that a finding shows."""
COPIED = "Keep one file of each: a case that counts twice makes results look surer than they are."
"""Correction of cases with masks that are in several files."""
_DOUBT = " Samples of so few numbers can be equal by chance: check whether they are copies."


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


def judge_duplicates(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[Finding]:
    """Find equal samples that distort results; numeric targets of equal samples may differ.

    Two patients of one age are not copies if their targets differ, unless samples have many numbers.
    """
    holders: defaultdict[tuple[str, int | bytes], list[SplitSurvey]] = defaultdict(list)
    for number, part in enumerate(surveys):
        separate = part.split == "train" or not len(part.labels)
        holders[part.split, number if separate else part.content].append(part)
    parts = [held[0] for held in holders.values()]
    proof = _count_numbers(data) >= MANY_NUMBERS
    numeric, masked = isinstance(data.task, Regression | Survival), isinstance(data.task, Segmentation)
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
        located = [tuple(parts[part_of[at]].locate(row_of[at]) for at in pair) for pair in pairs[:SHOWN_PAIRS]]
        files = tuple(pair for pair in located if len(set(pair)) > 1) if any(part.files for part in parts) else ()
        examples = files or tuple(located[:EXAMPLES])
        doubtful = {"severity": "warning", "fix": find_fix(kind)[1] + _DOUBT}
        copied = {"severity": "error", "fix": COPIED} if files and masked and kind in ("repeats", "shared") else {}
        yield from list_places(
            kind, what, shares, samples=int(counts.sum()), examples=examples, **(copied if proof else doubtful)
        )
    common = [held for held in holders.values() if len(held) > 1]
    if common:
        several = (f"{join_some(part.client for part in held)} share one {held[0].split} set" for held in common)
        holding = [part for held in common for part in held]
        yield make_finding("common-set", f"{join_some(several, '; ')}.", holding)
