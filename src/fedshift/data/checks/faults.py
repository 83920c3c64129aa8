"""Faults in samples, classes, masks and groups that training would hide; each function finds one kind.

The interval of an accuracy is Wilson's (E. B. Wilson 1927, "Probable inference, the law of succession, and statistical
inference", JASA 22(158)): around 50 % of n samples it extends z / (2 sqrt(n + z^2)) to each side, z = 1.96 for 95 %.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ...analysis.statistics import FEWEST_UNITS
from ...tasks import Classification, Segmentation
from ...tasks.segmentation import find_empty_masks
from ...utils.words import join_some
from ..agreement import FRACTIONS, SIGNED, name_scales
from ..federation import Federation
from ..identity import describe_alike, group_alike
from .findings import Finding, list_places, list_rows, make_finding
from .number_faults import format_features
from .survey import SplitSurvey

Bools = NDArray[np.bool_]
OPPOSITE = 4.0
"""Ratio of the sizes of two classes of masks that is opposite if they are swapped; 2 if one is the background."""
FEW = 30
"""Minimum number of samples for an accuracy to be certain enough."""
GROUP_COLUMN = re.compile(
    r"(patient|subject|person|case|lesion|participant)([ _-]?(id|number|name))?|(.*[ _-])?(id|mrn)", re.IGNORECASE
)
"""Names of columns that seem to identify groups."""
LACKING = {
    "unlearned-class": "Test data contain classes on which no client trains",
    "untrained-class": "A client's own test data contain classes that its training data lack",
    "missing-class": "Training data lack classes that other clients have",
}
_Z = 1.959964


def judge_reading(data: Federation) -> Iterator[Finding]:
    """Find files that could be data and were skipped when reading."""
    for fault in data.faults:
        yield make_finding("left-out", f"{fault[:1].upper()}{fault[1:]}.")


def judge_values(surveys: Sequence[SplitSurvey], names: Sequence[str]) -> Iterator[Finding]:
    """Find samples with NaN or infinite values, and images of a single color."""
    for part in surveys:
        for row, why in part.unread.items():
            yield make_finding("unread", f"{why}.", [part], samples=1, examples=((part.locate(row),),))
    broken = {part: part.broken for part in surveys}
    faulty = [part for part in surveys if len(part.shape) == 1 and part.broken_features.any()]
    where = ""
    if len({part.shape for part in faulty}) == 1:
        where = f" in {format_features(np.any([part.broken_features for part in faulty], axis=0), faulty[0], names)}"
    yield from list_rows("not-finite", f"Samples with NaN or infinite values{where}", broken)
    yield from list_rows("blank", "Images of a single color", {part: part.blank for part in surveys})


def judge_ranges(data: Federation) -> Iterator[Finding]:
    """Find samples that seem to be on different scales, although their types are equal."""
    splits = {where: split for where, split in data.named_splits().items() if len(split)}
    places = defaultdict[str, list[str]](list)
    for where, kind in ({} if data.inputs else name_scales(splits)).items():
        places[kind].append(where)
    if {FRACTIONS, SIGNED} <= places.keys():
        listed = (f"{kind} at {join_some(names, shown=3)}" for kind, names in places.items())
        yield make_finding("ranges", f"Values differ in range: {'; '.join(listed)}.", data.names)


def judge_names(data: Federation) -> Iterator[Finding]:
    """Find classes, and a column's categories, with alike names."""
    if group_alike(data.class_names):
        yield make_finding("class-names", f"{describe_alike('Classes', data.class_names)}.")
    for column in data.columns:
        if group_alike(column.categories or ()):
            what = f"Categories of {column.name!r}"
            yield make_finding("category-names", f"{describe_alike(what, column.categories or ())}.")


def judge_groups(data: Federation) -> Iterator[Finding]:
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


def judge_classes(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[Finding]:
    """Find classes that all clients lack, or some; clients that number classes otherwise lack none."""
    if not isinstance(data.task, Classification):
        return
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
    own = {part.client: has_C for part, has_C in tested.items() if sets[part.content] == 1}
    lacking = {
        "unlearned-class": {part.client: has_C & ~trained_C for part, has_C in tested.items()},
        "untrained-class": {name: has_C & trained_C & ~trained.get(name, none_C) for name, has_C in own.items()},
        "missing-class": {name: trained_C & ~has_C & (not numbered) for name, has_C in trained.items()},
    }
    for kind, classes in lacking.items():
        named = {place: f"{place} {_name_classes(data, has_C)}" for place, has_C in classes.items() if has_C.any()}
        yield from list_places(kind, LACKING[kind], named, "; ")


def _name_classes(data: Federation, chosen_C: Bools) -> str:
    """Format as ``cat, dog``, or as a count if there are many classes."""
    which = np.flatnonzero(chosen_C)
    if len(which) > 4:
        return f"{len(which)} of {data.classes} classes"
    return ", ".join(data.class_names[number] if data.class_names else str(number) for number in which)


def judge_empty_masks(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[Finding]:
    """Find masks without foreground."""
    if isinstance(data.task, Segmentation):
        targets = (split.y for client in data.clients for split in client.splits.values())
        empty = {part: find_empty_masks(y).numpy() for part, y in zip(surveys, targets, strict=True)}
        yield from list_rows("empty-mask", "Masks of background only", empty)


def judge_masks(data: Federation) -> Iterator[Finding]:
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


def judge_numbering(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[Finding]:
    """Find clients that number the same number of classes from 1 where others number from 0."""
    if not isinstance(data.task, Classification) or data.class_names or data.classes < 3:
        return
    held: dict[str, set[int]] = defaultdict(set)
    for part in surveys:
        held[part.client] |= set(part.labels.tolist())
    ranges = (set(range(data.classes - 1)), set(range(1, data.classes)))
    first, second = ([name for name, labels in held.items() if labels == each] for each in ranges)
    if first and second and len(first) + len(second) == len(held):
        names = [f"{join_some(several)} from {start}" for start, several in enumerate((first, second))]
        yield make_finding("numbering", f"Classes seem to be numbered in two ways: {' and '.join(names)}.", second)


def judge_test_sizes(data: Federation) -> Iterator[Finding]:
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
