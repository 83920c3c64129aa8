"""What samples are made of: shape and type, values that are no numbers, features that tell nothing, and their scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from .findings import QualityFinding, format_numbers, join_some, list_clients, summarize_rows
from .survey import SplitSurvey

LARGE, APART = 1e4, 100.0
"""A feature with values beyond the one, or with standard deviations this many times apart, is not scaled."""
FEW = 30
"""Samples below which a standard deviation is little known."""


def judge_form(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Samples of several shapes or types."""
    shapes: defaultdict[str, list[SplitSurvey]] = defaultdict(list)
    types: defaultdict[str, list[SplitSurvey]] = defaultdict(list)
    for part in surveys:
        shapes[" x ".join(map(str, part.shape))].append(part)
        types[part.dtype].append(part)
    if len(shapes) > 1:
        matched = all(len(part.shape) == 3 for part in surveys) and len({part.shape[0] for part in surveys} - {1}) < 2
        yield QualityFinding(
            kind="shapes",
            severity="note" if matched else "error",
            text=f"Samples differ in shape: {_describe_shapes(shapes)}.",
            fix="Nothing need be done: images are brought to one size (--image-size chooses it), gray ones to color."
            if matched
            else "Give all clients the same features, or images of the same number of channels.",
            clients=list_clients(surveys),
        )
    if len(types) > 1 and not all(_is_byte_scaled(part) for part in surveys):
        yield QualityFinding(
            kind="types",
            severity="warning",
            text=f"Samples differ in type, and bytes are scaled but floats are not: {_describe_shapes(types)}.",
            fix="Write all clients' samples in one type, or floats from -1 to 1.",
            clients=list_clients(surveys),
        )


def _is_byte_scaled(part: SplitSurvey) -> bool:
    """Whether a network is given values from -1 to 1: bytes are scaled to that, floats must lie there."""
    return part.dtype == "uint8" or bool((part.low >= -1).all() and (part.high <= 1).all())


def judge_values(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Samples with values that are no numbers, and images that show nothing."""
    broken = {part: part.broken for part in surveys if len(part.broken)}
    if broken:
        yield summarize_rows(
            broken,
            "Samples with NaN or infinite values",
            kind="not-finite",
            severity="error",
            fix="Fill them in from the client's own training data, or take them out.",
        )
    blank = {part: part.blank for part in surveys if len(part.blank)}
    if blank:
        yield summarize_rows(
            blank,
            "Images of a single color",
            kind="blank",
            severity="warning",
            fix="Look whether their files are broken, and take them out if so.",
        )


def judge_constant(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Features that have one value in training data."""
    parts = _comparable_splits(surveys, 2)
    if not parts:
        return
    low_KF, high_KF = np.stack([part.low for part in parts]), np.stack([part.high for part in parts])
    everywhere_F = low_KF.min(axis=0) == high_KF.max(axis=0)
    vectors = len(parts[0].shape) == 1
    noun = "columns" if vectors else "channels"
    if everywhere_F.any():
        yield QualityFinding(
            kind="constant",
            severity="warning",
            text=f"The same value in all training data: {format_numbers(everywhere_F, noun)}.",
            fix="Leave them out: they tell nothing.",
            clients=list_clients(parts),
        )
    flat = dict(zip(parts, (low_KF == high_KF) & ~everywhere_F, strict=True))
    flat = {part: flat_F for part, flat_F in flat.items() if flat_F.any()}
    if flat:
        yield QualityFinding(
            kind="constant-at-client",
            severity="note" if vectors else "warning",
            text="The same value in all training data of a client: "
            f"{join_some((f'{part.client} {format_numbers(flat_F, noun)}' for part, flat_F in flat.items()), '; ')}.",
            fix="Look whether this client measures them at all; if not, leave them out or treat them as missing.",
            clients=list_clients(flat),
        )


def judge_scale(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Floating-point features that are large, or that clients seem to measure in different units."""
    floats = [part for part in surveys if part.dtype.startswith("float") and len(part.labels) > len(part.broken)]
    extremes = {part: float(max(part.low.min(), part.high.max(), key=abs)) for part in floats}
    large = {part: value for part, value in extremes.items() if abs(value) > LARGE}
    if large:
        yield QualityFinding(
            kind="large",
            severity="warning",
            text=f"Values beyond ±{LARGE:,.0f}: "
            f"{join_some(f'{part.where} {value:,.6g}' for part, value in large.items())}.",
            fix="Scale each feature by the client's own training data, to mean 0 and standard deviation 1.",
            clients=list_clients(large),
        )
    parts = [part for part in _comparable_splits(surveys, FEW) if part.dtype.startswith("float")]
    if len(parts) < 2:
        return
    std_KF = np.stack([part.std for part in parts])
    least_KF = np.where(std_KF > 0, std_KF, np.inf)
    apart_F = std_KF.max(axis=0) / least_KF.min(axis=0)
    if apart_F.max() > APART:
        most = int(apart_F.argmax())
        wide, narrow = parts[int(std_KF[:, most].argmax())], parts[int(least_KF[:, most].argmin())]
        yield QualityFinding(
            kind="units",
            severity="warning",
            text=f"Standard deviations lie more than {APART:g} times apart in "
            f"{format_numbers(apart_F > APART, 'columns' if len(wide.shape) == 1 else 'channels')}: {wide.client} has "
            f"{wide.std[most]:.3g} where {narrow.client} has {narrow.std[most]:.3g} (number {most}).",
            fix="Look whether they measure in the same unit, and scale by the client's own training data.",
            clients=list_clients([wide, narrow]),
        )


def _comparable_splits(surveys: Sequence[SplitSurvey], samples: int) -> list[SplitSurvey]:
    """The training parts of at least so many samples without NaN; none where features differ in number."""
    parts = [part for part in surveys if part.split == "train" and len(part.labels) - len(part.broken) >= samples]
    return parts if len({len(part.low) for part in parts}) == 1 else []


def _describe_shapes(groups: dict[str, list[SplitSurvey]]) -> str:
    """``3 x 32 x 32 at a, b; 1 x 28 x 28 at c``."""
    return "; ".join(f"{form} at {join_some(list_clients(parts), shown=3)}" for form, parts in groups.items())
