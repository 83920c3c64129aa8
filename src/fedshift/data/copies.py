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

from .samples import Samples, digest_each, number_rows

MANY_NUMBERS = 32
"""Least numbers per sample for equal samples to count as copies; with fewer, two people can have the same values."""


def number_samples(parts: Mapping[str, Samples]) -> dict[str, NDArray[np.int64]]:
    """Number the samples of each part, int64 ``[N]``, so that copies have one number, also across parts.

    Every sample is read once, unless reading it draws at random; then only its store and row tell.
    """
    rows = torch.split(number_rows(list(parts.values())), list(map(len, parts.values())))
    numbers = {name: own.cpu().numpy() for name, own in zip(parts, rows, strict=True)}
    end = 1 + max((int(own.max(initial=-1)) for own in numbers.values()), default=-1)
    known: dict[bytes, int] = {}
    same, read = np.arange(end), np.zeros(end, bool)
    for name, part in parts.items():
        if (part.draws and part.patches is None) or prod(part.whole_shape) < MANY_NUMBERS:
            continue
        unread = np.flatnonzero(~read[numbers[name]])
        fresh, first = np.unique(numbers[name][unread], return_index=True)
        read[fresh] = True
        form = f"{part.whole_shape}{part.dtype}".encode()
        for piece in part.pieces(len(first)):
            x = part.copy_rows(torch.from_numpy(unread[first[piece]])).cpu().numpy()
            flat = x.reshape(*x.shape[:2], -1)
            blank = (flat == flat[:, :, :1]).all(axis=(1, 2)) & (x.ndim > 2)
            digests = digest_each(np.ascontiguousarray(x))
            for number, digest in zip(fresh[piece][~blank].tolist(), digests[~blank], strict=True):
                same[number] = known.setdefault(form + digest.tobytes(), number)
    return {name: same[own] for name, own in numbers.items()}


def count_copies(parts: Mapping[str, Samples]) -> int:
    """Return how often the most frequent sample occurs in ``parts``; 0 for none."""
    numbers = [np.empty(0, np.int64), *number_samples(parts).values()]
    return int(np.bincount(np.concatenate(numbers)).max(initial=0))
