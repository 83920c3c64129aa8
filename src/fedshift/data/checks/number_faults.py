"""Faults in the numbers of samples: constant and large features, other units, and values far from all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...tasks import Regression, Survival
from ...utils.words import join_some
from ..columns import feature_slices
from ..far_values import OWN_SCALE, judge_clients
from ..federation import ClientData, Federation
from ..preparation import FeatureScaling
from ..usual_values import LEAST, find_outlying
from .findings import Finding, list_places, make_finding
from .survey import SplitSurvey

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
LARGE, RATIO = 1e4, 100.0
"""A feature counts as unscaled with values beyond the first, or with standard deviations that differ by the second."""
FEWEST_ROWS, MOST_GAPS = 20, 1.5
"""Minimum rows of a client, and range of whole numbers for each row, of a column that numbers rows."""
TARGET_RATIO = 10.0
"""Numeric targets may have other units where their interquartile ranges differ by more than this factor."""


def list_features(data: Federation) -> list[str]:
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


def format_features(chosen_F: Bools, part: SplitSurvey, names: Sequence[str]) -> str:
    """Format as ``columns 3, 7 (2 of 60)``, with the ``names`` of a table's features in place of numbers."""
    noun = "columns" if len(part.shape) == 1 else "channels"
    which = (names[number] if names else str(number) for number in np.flatnonzero(chosen_F).tolist())
    return f"{noun} {join_some(which)} ({int(chosen_F.sum()):,} of {len(chosen_F):,})"


def _comparable_splits(surveys: Sequence[SplitSurvey], samples: int) -> list[SplitSurvey]:
    """Return the training splits with at least ``samples`` finite samples; none if they differ in their features."""
    parts = [part for part in surveys if part.split == "train" and part.whole >= samples]
    return parts if len({len(part.low) for part in parts}) == 1 else []


def judge_features(data: Federation, surveys: Sequence[SplitSurvey], names: Sequence[str]) -> Iterator[Finding]:
    """Find features that are constant, large, or measured in different units."""
    scales = list(judge_scale(surveys, names))
    yield from (*judge_constant(surveys, names), *scales)
    if not any(each.kind == "units" for each in scales):
        yield from judge_units(data, surveys)


def judge_constant(surveys: Sequence[SplitSurvey], names: Sequence[str]) -> Iterator[Finding]:
    """Find features that are constant in the training data."""
    parts = _comparable_splits(surveys, 2)
    if not parts:
        return
    low_KF, high_KF = np.stack([part.low for part in parts]), np.stack([part.high for part in parts])
    everywhere_F = low_KF.min(axis=0) == high_KF.max(axis=0)
    if everywhere_F.any():
        which = format_features(everywhere_F, parts[0], names)
        yield make_finding("constant", f"The same value in all training data: {which}.", parts)
    flat_KF = (low_KF == high_KF) & ~everywhere_F
    places = {
        part: f"{part.client} {format_features(flat_F, part, names)}"
        for part, flat_F in zip(parts, flat_KF, strict=True) if flat_F.any()
    }  # fmt: skip
    severity = "note" if len(parts[0].shape) == 1 else "warning"
    what = "The same value in all training data of a client"
    yield from list_places("constant-at-client", what, places, "; ", severity=severity)


def judge_scale(surveys: Sequence[SplitSurvey], names: Sequence[str]) -> Iterator[Finding]:
    """Find floating-point features that are large, or that clients seem to measure in different units."""
    floats = [part for part in surveys if part.dtype.startswith("float") and part.whole]
    large = {}
    for part in floats:
        extreme_F = np.where(-part.low > part.high, part.low, part.high)
        most = int(np.abs(extreme_F).argmax())
        if abs(extreme_F[most]) > LARGE:
            column = f" in {names[most]}" if names else ""
            large[part] = f"{part.where} {extreme_F[most]:,.6g}{column}"
    yield from list_places("large", f"Values beyond ±{LARGE:,.0f}", large)
    parts = [part for part in _comparable_splits(surveys, LEAST) if part.dtype.startswith("float")]
    if len(parts) < 2:
        return
    std_KF = np.stack([part.std for part in parts])
    least_KF = np.where(std_KF > 0, std_KF, np.inf)
    ratio_F = std_KF.max(axis=0) / least_KF.min(axis=0)
    if ratio_F.max() > RATIO:
        most = int(ratio_F.argmax())
        wide, narrow = parts[int(std_KF[:, most].argmax())], parts[int(least_KF[:, most].argmin())]
        which, where = format_features(ratio_F > RATIO, wide, names), names[most] if names else f"number {most}"
        stds = f"{wide.client} has {wide.std[most]:.3g} and {narrow.client} has {narrow.std[most]:.3g} ({where})"
        text = f"Standard deviations differ by more than a factor of {RATIO:g} in {which}: {stds}."
        yield make_finding("units", text, [wide, narrow])


def judge_units(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[Finding]:
    """Find clients whose values are far from all others', as in another unit or on another scale."""
    found = judge_clients(data, {part.client: (part.mean, part.std) for part in _comparable_splits(surveys, LEAST)})
    scaled = [client for client in data.clients if client.train.normalization.find_usual(data.columns)]
    places = {name: f"{name} {join_some(texts, '; ')}" for name, texts in found.items()}
    fix = {"severity": "note", "fix": f"{OWN_SCALE[:1].upper()}{OWN_SCALE[1:]}."} if scaled else {}
    yield from list_places("apart", "Values far from all other clients'", places, "; ", **fix)


def judge_row_numbers(data: Federation) -> Iterator[Finding]:
    """Find columns of a table that number its rows: whole numbers without repeats and with few gaps."""
    if not data.columns or data.inputs:
        return
    clients = [x for x in map(_read_rows, data.clients) if len(x) >= FEWEST_ROWS]
    named = [
        repr(column.name)
        for column, features in feature_slices(data.columns)
        if clients and column.categories is None and _numbers_rows([x[:, features.start] for x in clients])
    ]
    if named:
        yield make_finding("row-number", f"Columns that seem to number the rows are features: {join_some(named)}.")


def _read_rows(client: ClientData) -> Floats:
    """Return the rows of all splits before scaling, up to the rounding of float32."""
    x = np.concatenate([split.copy_rows(slice(None)).cpu().numpy() for split in client.splits.values()])
    scaling = client.train.normalization
    if not isinstance(scaling, FeatureScaling):
        return x.astype(np.float64)
    return x * np.where(np.isinf(scaling.std), 0, scaling.std) + scaling.mean


def _numbers_rows(clients: Sequence[Floats]) -> bool:
    """Return whether the values of one column number the rows of each client, or of all clients together."""
    rounded = [np.round(x) for x in clients]
    whole = all(
        bool((np.abs(x - whole) < 0.01).all()) and len(np.unique(whole)) == len(x)
        for x, whole in zip(clients, rounded, strict=True)
    )
    clients, together = rounded, np.concatenate(rounded)
    return whole and (
        all(np.ptp(x) < MOST_GAPS * len(x) for x in clients)
        or (len(np.unique(together)) == len(together) and bool(np.ptp(together) < MOST_GAPS * len(together)))
    )


def judge_numbers(data: Federation) -> Iterator[Finding]:
    """Find numbers of tables and numeric targets that are far from all others at their client, and targets' units."""
    targets = {client.name: dict(list_targets(data, client)) for client in data.clients}
    far: dict[str, str] = {}
    for client in data.clients:
        scaling = client.train.normalization
        found = list(scaling.far) if isinstance(scaling, FeatureScaling) else []
        named = targets[client.name].items()
        found += [f"{name!r} {text}" for name, values in named for text, _ in find_outlying(values)]
        far |= {client.name: f"{client.name} {join_some(found)}"} if found else {}
    yield from list_places("far", "Values far from all others of their column", far, "; ")
    for name in targets[data.names[0]] if isinstance(data.task, Regression) else ():
        held = {client: values[name] for client, values in targets.items() if len(values[name]) >= LEAST}
        ranges = {client: float(np.subtract(*np.quantile(values, (0.75, 0.25)))) for client, values in held.items()}
        known = sorted((size, client) for client, size in ranges.items() if size > 0)
        if known and known[-1][0] > TARGET_RATIO * known[0][0]:
            (narrow, one), (wide, other) = known[0], known[-1]
            text = f"{name!r} has interquartile ranges of {wide:.3g} at {other} and {narrow:.3g} at {one}"
            yield make_finding("target-units", f"Targets differ in scale: {text}.", [other, one])
        same = {client: f"{client} {name!r} = {v[0]:g}" for client, v in held.items() if (v == v[0]).all()}
        yield from list_places("constant-target", "The same target in all samples of a client", same)


def list_targets(data: Federation, client: ClientData) -> Iterator[tuple[str, Floats]]:
    """Yield the name and values of each numeric target of a client; of survival, the time."""
    if isinstance(data.task, Regression | Survival):
        y = np.concatenate(
            [data.task.decode(split.y.cpu()).numpy().reshape(len(split), -1) for split in client.splits.values()]
        )
        names = data.class_names or [f"target {number}" for number in range(y.shape[1])]
        yield from zip(["time"] if isinstance(data.task, Survival) else names, y.astype(np.float64).T, strict=False)
