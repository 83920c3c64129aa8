"""Faults in samples, labels, masks and groups that training would hide; each function finds one kind.

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
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..data.agreement import FRACTIONS, SIGNED, check_scales, name_scales
from ..data.copies import MANY_NUMBERS
from ..data.federation import Federation
from ..data.files.grids import compare_spacings, is_resampled, list_headers
from ..report.differences import FEWEST_UNITS
from ..tasks import Classification, Regression, Segmentation, Survival
from ..tasks.segmentation import find_empty_masks
from ..utils.errors import UsageError
from ..utils.words import join_some
from .findings import EXAMPLES, FAULTS, QualityFinding, list_places, list_rows, locate_sample, make_finding
from .number_faults import format_features
from .survey import SplitSurvey

Bools = NDArray[np.bool_]
NAMED = 20
"""Number of pairs of files with equal samples that a finding shows."""
OPPOSITE = 4.0
"""Ratio of the sizes of two classes of masks that is opposite if they are swapped; 2 if one is the background."""
FEW = 30
"""Minimum number of samples for an accuracy to be certain enough."""
GROUP_COLUMN = re.compile(
    r"(patient|subject|person|case|lesion|participant)([ _-]?(id|number|name))?|(.*[ _-])?(id|mrn)", re.IGNORECASE
)
"""Names of columns that seem to identify groups."""
COPIED = "Keep one file of each: a case that counts twice makes results look surer than they are."
"""Correction of cases with masks that are in several files."""
_Z = 1.959964
_DOUBT = " Samples of so few numbers can be equal by chance: check whether they are copies."


def judge_reading(data: Federation) -> Iterator[QualityFinding]:
    """Find files that could be data and were skipped when reading."""
    for fault in data.faults:
        yield make_finding("left-out", f"{fault[:1].upper()}{fault[1:]}.")


def judge_grids(data: Federation) -> Iterator[QualityFinding]:
    """Find clients whose medical images have other voxels."""
    headers = list_headers(data)
    for text in compare_spacings(headers):
        if not is_resampled(data):
            yield make_finding("grids", f"{text[:1].upper()}{text[1:]}.", headers)


def judge_labels(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find splits without samples, and labels that are not classes."""
    yield from list_places("empty", "No sample", {part: part.where for part in surveys if not len(part.labels)})
    if not isinstance(data.task, Classification):
        return
    outside = {part: np.flatnonzero((part.labels < 0) | (part.labels >= data.classes)) for part in surveys}
    yield from list_rows("label-range", f"Labels outside 0..{data.classes - 1}", outside)


def judge_values(surveys: Sequence[SplitSurvey], names: Sequence[str]) -> Iterator[QualityFinding]:
    """Find samples with NaN or infinite values, and images of a single color."""
    for part in surveys:
        for row, why in part.unread.items():
            yield make_finding("unread", f"{why}.", [part], samples=1, examples=((locate_sample(part, row),),))
    broken = {part: part.broken for part in surveys}
    faulty = [part for part in surveys if len(part.shape) == 1 and part.broken_features.any()]
    where = ""
    if len({part.shape for part in faulty}) == 1:
        where = f" in {format_features(np.any([part.broken_features for part in faulty], axis=0), faulty[0], names)}"
    yield from list_rows("not-finite", f"Samples with NaN or infinite values{where}", broken)
    yield from list_rows("blank", "Images of a single color", {part: part.blank for part in surveys})


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
            yield make_finding("shapes", text, surveys, severity="note", fix=fix)
        else:
            yield make_finding("shapes", text, surveys)


def judge_scales(data: Federation) -> Iterator[QualityFinding]:
    """Find samples whose values reach the network at different scales, or seem to."""
    splits = {where: split for where, split in data.named_splits().items() if len(split)}
    try:
        check_scales(splits, data.sample_shape, data.inputs)
    except UsageError as error:
        text = str(error)
        yield make_finding("types", f"Samples have different scales: {text[:1].upper()}{text[1:]}.", data.names)
        return
    kinds = {} if data.inputs else name_scales(splits)
    if {FRACTIONS, SIGNED} <= set(kinds.values()):
        places = defaultdict[str, list[str]](list)
        for where, kind in kinds.items():
            places[kind].append(where)
        yield make_finding("ranges", f"Values differ in range: {_describe_groups(places)}.", data.names)


def _describe_groups(groups: Mapping[str, Sequence[str]]) -> str:
    """Format as ``3 x 32 x 32 at a, b; 1 x 28 x 28 at c``."""
    return "; ".join(f"{form} at {join_some(dict.fromkeys(names), shown=3)}" for form, names in groups.items())


def judge_names(data: Federation) -> Iterator[QualityFinding]:
    """Find classes, and a column's categories, whose names differ only in white space, case and accents' codes."""
    differ = "that differ only in spaces, case or codes of accents"
    if twice := _find_alike(data.class_names):
        yield make_finding("class-names", f"Classes have names {differ}: {join_some(twice, '; ')}.")
    alike = {column.name: pairs for column in data.columns if (pairs := _find_alike(column.categories or ()))}
    if alike:
        listed = (f"{join_some(pairs, '; ')} in {name!r}" for name, pairs in alike.items())
        yield make_finding("category-names", f"Categories have names {differ}: {join_some(listed, '; ')}.")


def _group_alike(names: Sequence[str]) -> list[list[str]]:
    """Return the ``names`` that differ only in white space, case and accents' codes, together."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault("".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(name)
    return [several for several in alike.values() if len(several) > 1]


def _find_alike(names: Sequence[str]) -> list[str]:
    """Format the groups of :func:`_group_alike` as ``'cat' and 'Cat'``."""
    twice = []
    for several in _group_alike(names):
        shown = repr if len({unicodedata.normalize("NFC", name) for name in several}) == len(several) else ascii
        twice.append(" and ".join(map(shown, several)))
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
        yield from list_places("groups" if side == "test" else "groups-validation", what, shares, samples=samples)
    named = [repr(column.name) for column in data.columns if GROUP_COLUMN.fullmatch(column.name.strip())]
    if named and not held:
        yield make_finding("group-column", f"Columns that seem to identify groups are features: {join_some(named)}.")


def judge_classes(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find classes that all clients lack, or some.

    Clients that lack a class because they spell it otherwise, or number classes otherwise, lack none.
    """
    twice = {name for several in _group_alike(data.class_names) for name in several}
    once_C = np.array([name not in twice for name in data.class_names] or [True] * data.classes)
    numbered = any(True for _ in judge_numbering(data, surveys))
    held = {part: part.counts(data.classes) > 0 for part in surveys if len(part.labels)}
    trained = {part.client: has_C for part, has_C in held.items() if part.split == "train"}
    tested = {part: has_C for part, has_C in held.items() if part.split == "test"}
    sets = Counter(part.content for part in tested)
    none_C = np.zeros(data.classes, bool)
    trained_C = np.any([none_C, *trained.values()], axis=0)
    absent_C = ~np.any([none_C, *held.values()], axis=0)
    if absent_C.any():
        text = f"No client has a sample of these classes: {_name_classes(data, absent_C)}."
        yield make_finding("absent-class", text)
    unshared = {part: has_C for part, has_C in tested.items() if sets[part.content] == 1}
    for kind, what, classes in (
        (
            "unlearned-class",
            "Test data contain classes on which no client trains",
            {part.client: has_C & ~trained_C & once_C for part, has_C in tested.items()},
        ),
        (
            "untrained-class",
            "A client's own test data contain classes that its training data lack",
            {
                part.client: has_C & trained_C & ~trained.get(part.client, none_C) & once_C
                for part, has_C in unshared.items()
            },
        ),
        (
            "single-class",
            "Training data contain a single class",
            {client: has_C for client, has_C in trained.items() if has_C.sum() == 1 < data.classes},
        ),
        (
            "missing-class",
            "Training data lack classes that other clients have",
            {client: trained_C & ~has_C & once_C & (not numbered) for client, has_C in trained.items()},
        ),
    ):
        named = {place: f"{place} {_name_classes(data, has_C)}" for place, has_C in classes.items() if has_C.any()}
        yield from list_places(kind, what, named, "; ")


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
                yield make_finding("targets", f"{error}.", [client.name])
                break
    if isinstance(data.task, Segmentation):
        targets = (split.y for client in data.clients for split in client.splits.values())
        empty = {part: find_empty_masks(y).numpy() for part, y in zip(surveys, targets, strict=True)}
        yield from list_rows("empty-mask", "Masks of background only", empty)


def judge_masks(data: Federation) -> Iterator[QualityFinding]:
    """Find clients whose masks have the sizes of two classes in the opposite order of all others."""
    if not isinstance(data.task, Segmentation) or len(data.clients) < 2:
        return
    counts = {each.name: data.task.count_classes(each.train.y, data.classes).numpy() for each in data.clients}
    for one, other in combinations(range(data.classes), 2):
        least = 2.0 if one == 0 else OPPOSITE
        ratio = {name: own[one] / own[other] for name, own in counts.items() if own[one] and own[other]}
        larger, smaller = ([n for n, each in ratio.items() if each**way > least] for way in (1, -1))
        usual, odd = (smaller, larger) if len(larger) < len(smaller) else (larger, smaller)
        if not odd or len(usual) + len(odd) < len(ratio):
            continue
        sizes = {name: abs(math.log(each)) for name, each in ratio.items()}
        if min(sizes[name] for name in odd) > min(sizes[name] for name in usual) - math.log(OPPOSITE):
            shown = {name: f"{counts[name][other] / counts[name].sum():.1%} at {name}" for name in ratio}
            names = [_name_classes(data, np.arange(data.classes) == each) for each in (one, other)]
            text = f"Masks seem to swap the classes {' and '.join(names)}: class {names[1]} covers "
            text += f"{join_some(shown[name] for name in odd)}, but {join_some(shown[name] for name in usual)}."
            yield make_finding("swapped-masks", text, odd)


def judge_numbering(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Find clients that number the same number of classes from 1 where others number from 0."""
    held: dict[str, set[int]] = defaultdict(set)
    for part in surveys:
        held[part.client] |= set(part.labels.tolist())
    low, high = set(range(data.classes - 1)), set(range(1, data.classes))
    first, second = ([name for name, own in held.items() if own == each] for each in (low, high))
    if not data.class_names and data.classes > 2 and first and second and len(first) + len(second) == len(held):
        names = [f"{join_some(several)} from {start}" for start, several in enumerate((first, second))]
        yield make_finding("numbering", f"Classes seem to be numbered in two ways: {' and '.join(names)}.", second)


def judge_test_sizes(data: Federation) -> Iterator[QualityFinding]:
    """Find sites whose test data are too few for a reliable accuracy, or to decide between methods."""
    sizes = {client.name: client.test.count_units() for client in data.clients if len(client.test)}
    known = {client.name: " patients" * (client.test.group is not None) for client in data.clients}
    half = {name: 100 * _Z / (2 * math.sqrt(units + _Z**2)) for name, units in sizes.items() if units < FEW}
    small = {name: f"{name} {sizes[name]}{known[name]} (50 % ± {points:.0f})" for name, points in half.items()}
    if isinstance(data.task, Classification):
        what = f"Fewer than {FEW} test samples or patients, with the 95 % interval of an accuracy of 50 %"
        yield from list_places("small-test", what, small)
    few = {name: f"{name} {n}{known[name] or ' samples'}" for name, n in sizes.items() if n < FEWEST_UNITS}
    what = f"No verdict is possible at sites with fewer than {FEWEST_UNITS} test samples, or patients where known"
    yield from list_places("no-verdict", what, few)


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
        located = [tuple(locate_sample(parts[part_of[at]], int(row_of[at])) for at in pair) for pair in pairs[:NAMED]]
        files = tuple(pair for pair in located if len({place.file for place in pair}) > 1)
        examples = files or tuple(located[:EXAMPLES])
        severity, fix = FAULTS[kind]
        if files and kind in ("repeats", "shared") and isinstance(data.task, Segmentation):
            severity, fix = "error", COPIED
        if not proof:
            severity, fix = "warning", fix + _DOUBT
        yield from list_places(
            kind, what, shares, severity=severity, fix=fix, samples=int(counts.sum()), examples=examples
        )
    common = [held for held in holders.values() if len(held) > 1]
    if common:
        several = (f"{join_some(part.client for part in held)} share one {held[0].split} set" for held in common)
        holding = [part for held in common for part in held]
        yield make_finding("common-set", f"{join_some(several, '; ')}.", holding)
