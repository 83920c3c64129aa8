"""Lazy batches that one thread reads ahead: which and when, with which errors, and the same results."""

from threading import Event, current_thread, main_thread

import numpy as np
import pytest
import torch
from torch import nn

import fedshift
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.data.samples import Samples
from fedshift.data.stores import DatasetStore, LazyStore
from fedshift.engines.sequential import Sequential
from fedshift.methods.fedavg import fedavg
from fedshift.utils.errors import FedshiftError

BATCHES = [(step, torch.tensor([2 * step, 2 * step + 1])) for step in range(4)]


class Watched(LazyStore):
    """Samples that are their own numbers; tells when they are read, and by which thread."""

    def __init__(self, broken=-1):
        super().__init__("client 'a'", 8, torch.zeros(1, 1))
        self.broken, self.reads, self.apart, self.second = broken, [], [], Event()

    def _load(self, rows, key):
        if self.broken in rows:
            raise FedshiftError("it is broken")
        self.reads.append(rows.tolist())
        self.apart.append(current_thread() is not main_thread())
        if len(self.reads) == 2:
            self.second.set()
        return torch.from_numpy(rows).float()[:, None]


def read(store):
    data = {"a": Samples(x=store, y=torch.zeros(8, dtype=torch.int64))}
    engine = Sequential(prepare(fedavg(), nn.Linear(1, 1), optimizer=SGD(lr=0.1)), data, 0)
    return (x.flatten().tolist() for x, _, _ in engine.iterate("a", BATCHES))


def test_the_next_batch_is_read_while_one_is_used_and_none_beyond_it():
    store = Watched()
    batches = read(store)
    first = next(batches)
    assert store.second.wait(60)
    assert store.reads == [[0, 1], [2, 3]]  # without a third
    assert [first, *batches] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert store.apart == [True] * 4


def test_a_batch_that_cannot_be_read_is_an_error_at_its_turn():
    batches = read(Watched(broken=3))
    next(batches)
    with pytest.raises(FedshiftError, match="it is broken"):
        next(batches)


def test_batches_are_not_read_ahead_in_memory_or_where_generators_are_set():
    store = Watched()
    store.threaded = False
    assert len(list(read(store))) == 4
    assert store.apart == [False] * 4
    items = [(np.float32([number]), 0) for number in range(8)]
    for workers, threaded in ((0, False), (1, False), (2, True)):
        dataset = fedshift.LazyDataset(items, targets=[0] * 8, workers=workers)
        assert DatasetStore(dataset, "a").threaded is threaded


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "pool"])
def test_results_are_those_without_reading_ahead_bit_for_bit(tmp_path, monkeypatch, engine):
    draw = np.random.default_rng(0)
    for client, count in {"north": 14, "south": 9}.items():
        for part, size in {"train": count, "test": 4}.items():
            place = tmp_path / "data" / client / part
            place.mkdir(parents=True)
            np.save(place / "x.npy", draw.integers(0, 256, (size, 1, 8, 8), np.uint8))
            np.save(place / "y.npy", np.arange(size) % 2)
    states = []
    for ahead in (True, False):
        monkeypatch.setattr(Samples, "threaded", property(lambda split, ahead=ahead: ahead and split.lazy))
        run = fedshift.compare(
            data=str(tmp_path / "data"), methods="fedbn", model="small-cnn", rounds=2, batch_size=4,
            engine="sequential" if not ahead else engine, augment="flip(), rotate(degrees=30)", workers=2,
        )  # fmt: skip
        states.append(run.model("fedbn", "north").state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
