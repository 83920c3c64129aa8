"""Survey of a federation: statistics and digests of every sample, from one pass in chunks.

A sample is identified by the BLAKE2b digest of its bytes (RFC 7693), 128 bits: the probability that two of a million
different samples share a digest is below 1e-26. A row of a table is identified by its values before they are filled and
scaled, which each client does by its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import FedshiftError
from ..federation import Federation
from ..preparation import FeatureScaling
from ..samples import Samples, digest_each
from ..stores import LazyStore
from ..usual_values import UsualValues

NUMBERS_AT_ONCE = 2**21
"""Numbers read at a time."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitSurvey:
    """Contents of one split of one client; a feature is a column of vectors or a channel of images.

    Attributes:
        labels: labels of the samples, ``[N]``; for targets other than classes, numbers that are equal for equal
            targets.
        labeled: whether targets are classes of samples.
        digests: digests of the samples, uint64 ``[N, 2]``.
        broken: rows with NaN or infinite values, which the statistics exclude.
        broken_features: features with NaN or infinite values, ``[F]``.
        blank: rows of images in which each channel is constant.
        low, high, mean, std: of each feature, ``[F]``; infinite or NaN if all rows are broken; ``std`` divides by N.
        content: digest that is equal for two splits with the same samples and labels in the same order.
        files: files of the samples; empty if they have none.
        unread: why rows cannot be read, which equal no other and do not count in statistics.

    """

    client: str
    split: str
    shape: tuple[int, ...]
    dtype: str
    labels: Ints
    labeled: bool
    digests: NDArray[np.uint64]
    broken: Ints
    broken_features: NDArray[np.bool_]
    blank: Ints
    low: Floats
    high: Floats
    mean: Floats
    std: Floats
    content: bytes
    files: tuple[str, ...] = ()
    unread: Mapping[int, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Name of the split in messages."""
        return f"{self.client} ({self.split})"

    @property
    def whole(self) -> int:
        """Number of samples that are read and finite."""
        return len(self.labels) - len(self.broken) - len(self.unread)

    def share(self, samples: int) -> str:
        """Format a number of ``samples`` as a share of this split."""
        return f"{self.where} {samples:,} of {len(self.labels):,}"

    def locate(self, row: int) -> str:
        """Return the place of a sample: its file, or client, split, row (counted from 0) and label."""
        if self.files:
            return f"{self.files[row]} ({self.split})"
        labeled = f" (label {self.labels[row]})" if self.labeled else ""
        return f"{self.client} {self.split} row {row}{labeled}"

    def counts(self, classes: int) -> Ints:
        """Count the samples of each class, ``[classes]``, ignoring labels out of range."""
        return np.bincount(self.labels[(self.labels >= 0) & (self.labels < classes)], minlength=classes)


def survey_splits(data: Federation, *, statistics: bool = True) -> tuple[SplitSurvey, ...]:
    """Survey every split of every client, in order; samples that splits share in memory are read once.

    Without ``statistics``, means and standard deviations are NaN.
    """
    read: dict[Hashable, SplitSurvey] = {}
    surveys = []
    for client in data.clients:
        for name, split in client.splits.items():
            address = split.address
            if address not in read:
                read[address] = _survey_split(split, statistics)
            rows = split.rows.tolist() if client.files else ()
            files = tuple(client.files[row] for row in rows)
            surveys.append(replace(read[address], client=client.name, split=name, files=files))
    return tuple(surveys)


def _read_pieces(
    split: Samples, unread: dict[int, str]
) -> Iterator[tuple[int, NDArray[Any] | None, NDArray[np.uint64]]]:
    """Yield the first row of each piece, its stored samples ``[n, ...]``, and their digests ``[n, 2]``.

    A row that cannot be read comes alone, without samples, and ``unread`` then has the reason.
    """
    step = 1 if split.patches else max(1, NUMBERS_AT_ONCE // max(1, math.prod(split.shape)))
    for start in range(0, len(split), step):
        try:
            yield start, *_read_piece(split, start, step)
        except FedshiftError:
            for row in range(start, min(start + step, len(split))):
                try:
                    yield row, *_read_piece(split, row, 1)
                except FedshiftError as error:
                    unread[row] = str(error)
                    yield row, None, digest_each(np.array([[id(split), row]]))


def _read_piece(split: Samples, start: int, count: int) -> tuple[NDArray[Any], NDArray[np.uint64]]:
    stored = split.read_case(start)[0] if split.patches else split.copy_rows(slice(start, start + count))
    x = np.ascontiguousarray(stored.cpu().numpy())
    rows, scaling = split.rows[start : start + len(x)].tolist(), split.normalization
    if isinstance(scaling, FeatureScaling) and len(scaling.digests) == len(split.store):
        return x, scaling.digests[rows]
    known = [split.store.identify(row) for row in rows] if isinstance(split.store, LazyStore) else [b""]
    return x, np.frombuffer(b"".join(known), np.uint64).reshape(-1, 2) if all(known) else digest_each(x)


def _survey_split(split: Samples, statistics: bool) -> SplitSurvey:
    """Survey ``split``, leaving the names empty; ``statistics`` as in :func:`survey_splits`."""
    features, unread = split.shape[0], dict[int, str]()
    none = np.full(features, np.nan)
    digests, broken, blank = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    lows, highs, usual, counts = [np.full(features, np.inf)], [np.full(features, -np.inf)], list[UsualValues](), [0]
    broken_features = np.zeros(features, bool)
    for start, x, named in _read_pieces(split, unread):
        digests.append(named)
        if x is None:
            continue
        x_nFP = x.reshape(len(x), features, -1)
        finite_nF = np.isfinite(x_nFP).all(axis=2) if x.dtype.kind == "f" else np.ones((len(x), features), bool)
        whole, broken_features = finite_nF.all(axis=1), broken_features | ~finite_nF.all(axis=0)
        broken.append(start + np.flatnonzero(~whole))
        if not whole.any():
            continue
        x_nFP = x_nFP if whole.all() else x_nFP[whole]
        low_nF, high_nF = x_nFP.min(axis=2), x_nFP.max(axis=2)
        if x.ndim > 2:
            blank.append(start + np.flatnonzero(whole)[(low_nF == high_nF).all(axis=1)])
        lows, highs = [*lows, low_nF.min(axis=0)], [*highs, high_nF.max(axis=0)]
        if statistics:
            usual, counts = [*usual, UsualValues.measure(x_nFP)], [*counts, len(x_nFP)]
    known, labels = np.concatenate(digests), _number_targets(split)
    whole_split = UsualValues.pool(usual, counts[1:]) if usual else UsualValues(mean=none, std=none)
    return SplitSurvey(
        client="", split="", shape=split.shape, dtype=str(split.dtype).removeprefix("torch."), labels=labels,
        labeled=split.y.ndim == 1, digests=known, broken=np.concatenate(broken), unread=unread,
        broken_features=broken_features, blank=np.concatenate(blank), low=np.min(lows, axis=0),
        high=np.max(highs, axis=0), mean=whole_split.mean, std=whole_split.std,
        content=blake2b(known.tobytes() + labels.tobytes(), digest_size=16).digest(),
    )  # fmt: skip


def _number_targets(split: Samples) -> Ints:
    """Return the classes of samples, or the first bytes of a digest of each mask or of its numbers, ``[N]``."""
    if split.y.ndim == 1:
        return split.y.cpu().numpy().astype(np.int64)
    cases = [split.y.cpu().numpy()]
    if split.patches:  # without the padding, which differs between clients
        places = enumerate(split.rows.tolist())
        cases = [split.patches.crop(split.y[number], row)[None].cpu().numpy() for number, row in places]
    return np.concatenate([digest_each(np.ascontiguousarray(case)) for case in cases])[:, 0].view(np.int64)
