"""Copies: which training samples, at one client or at several, are one and the same.

Splits and joins keep a copy as another row of the same store (:mod:`fedshift.data.samples`), so that samples with the
same store and row are copies however they were made. Samples of many numbers are also copies where all these numbers
are equal; images of a single color are not, since equal blanks need not have one source.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from .samples import Samples, digest_each

MANY_NUMBERS = 32
"""Least numbers per sample for equal samples to count as copies; with fewer, two people can have the same values."""


def number_samples(parts: Mapping[str, Samples]) -> dict[str, NDArray[np.int64]]:
    """Number the samples of each part, int64 ``[N]``, so that copies have one number, also across parts.

    Every sample is read once, unless reading it draws at random; then only its store and row tell.
    """
    starts: dict[int, int] = {}
    end = 0
    for part in parts.values():
        if id(part.store) not in starts:
            starts[id(part.store)] = end
            end += len(part.store)
    numbers = {name: starts[id(part.store)] + part.all_rows.cpu().numpy() for name, part in parts.items()}
    known: dict[bytes, int] = {}
    same, read = np.arange(end), np.zeros(end, bool)
    for name, part in parts.items():
        transformed = part.draws and part.patches is None
        if transformed or prod(part.whole_shape) < MANY_NUMBERS:
            continue
        fresh, first = np.unique(numbers[name], return_index=True)
        first, whole = first[~read[fresh]], f"{part.whole_shape}{part.dtype}".encode()
        read[fresh] = True
        for piece in part.pieces(len(first)):
            x = np.ascontiguousarray(part.copy_rows(torch.from_numpy(first[piece])).cpu().numpy())
            for number, digest, each in zip(numbers[name][first[piece]].tolist(), digest_each(x), x, strict=True):
                if x.ndim < 3 or (each.reshape(len(each), -1) != each.reshape(len(each), -1)[:, :1]).any():
                    same[number] = known.setdefault(whole + digest.tobytes(), number)
    return {name: same[of] for name, of in numbers.items()}


def count_copies(parts: Mapping[str, Samples]) -> int:
    """Return how often the most frequent sample occurs in ``parts``; 0 for none."""
    counts = np.unique(np.concatenate([np.empty(0, np.int64), *number_samples(parts).values()]), return_counts=True)[1]
    return int(counts.max(initial=0))
