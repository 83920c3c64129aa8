"""Whether a new client is new: which of its samples a run's clients have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

from ..data.federation import ClientData, Federation
from ..data.samples import CHUNK
from ..experiments.experiment import Experiment


def find_overlap(data: Federation, experiment: Experiment) -> list[str]:
    """Sentences on the clients of ``data`` that have samples of a client that took part in training, whatever labels.

    Both are compared as they are kept, value by value, training, validation and test data alike.
    """
    trained = [client for client in experiment.data.clients if client.name not in experiment.settings.newcomers]
    owner = {key: client.name for client in trained for key in _sample_keys(client)}
    said = []
    for client in data.clients:
        keys = set(_sample_keys(client))
        if found := Counter(owner[key] for key in keys if key in owner):
            whose, count = found.most_common(1)[0][0], found.total()
            part = "its samples" if count == len(keys) else f"{count:,} of its {len(keys):,} samples"
            said.append(f"client {client.name!r} is not unknown: the run has {part}, as client {whose!r}")
    return said


def _sample_keys(client: ClientData) -> Iterator[bytes]:
    """128 bits for each sample."""
    for split in client.splits.values():
        for start in range(0, len(split), CHUNK):
            for sample in split.copy_rows(slice(start, start + CHUNK)).cpu().contiguous().numpy():
                yield blake2b(sample, digest_size=16).digest()
