"""Datasets whose items are decoded when needed: equal to those read once, drawn by keys, cached within bounds."""

import pickle
import random
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from fedshift import LazyDataset
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.federation import Federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.models.digits import small_cnn
from fedshift.utils.errors import FedshiftError, UsageError


class Pictures(Dataset):
    """Pictures of one client, decoded one by one; ``decoded`` lists which, and ``change`` is applied to each."""

    def __init__(self, x: np.ndarray, y: np.ndarray, change=None) -> None:
        self.x, self.y, self.transform, self.decoded = x, y, change, []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int):
        self.decoded.append(row)
        x = Image.fromarray(self.x[row])
        return x if self.transform is None else self.transform(np.asarray(x)), int(self.y[row])


class Labeled(Pictures):
    """Pictures whose labels are known without decoding them, as torchvision's are."""

    targets = property(lambda self: self.y.tolist())


def noise(x: np.ndarray) -> np.ndarray:
    """Draw from each of the three global generators."""
    drawn = np.random.rand(*x.shape) + torch.rand(x.shape).numpy()  # noqa: NPY002
    return (x / 255 + drawn * random.random()).astype(np.float32)


class Keeping:
    """A transform that draws from a generator that it keeps; subclasses say how that is set."""

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.own.random(x.shape).astype(np.float32)


class AsMonai(Keeping):
    def set_random_state(self, seed=None, random_generator=None):
        self.own = np.random.default_rng(seed)


class AsAlbumentations(AsMonai):
    def set_random_seed(self, seed):
        self.own = np.random.default_rng(seed)

    def set_random_state(self, random_generator, py_random):
        self.own = random_generator


def pictures(data: Federation, kind: type[Pictures] = Labeled, change=None) -> dict[str, tuple[Pictures, Pictures]]:
    """Datasets of each client's training and test images."""
    return {
        client.name: tuple(
            kind(np.moveaxis(split.x.numpy(), 1, -1), split.y.numpy(), change) for split in client.splits.values()
        )
        for client in data.clients
    }


def lazily(parts: dict[str, tuple[Pictures, Pictures]], **options) -> Federation:
    return federation({name: tuple(LazyDataset(part, **options) for part in both) for name, both in parts.items()})


def begin(data: Federation, method=fedavg, engine: str = "sequential") -> Trial:
    work = Work(batch_size=8, epochs=1)
    settings = Settings(
        rounds=2, work=work, optimizer=SGD(lr=0.05), engine=engine, workers=1 if engine == "pool" else None
    )
    return Trial(method(), small_cnn, data, settings, 0)


def run(trial: Trial, rounds: int = 2) -> tuple[list, dict[str, torch.Tensor]]:
    rows = [trial.advance().rows for _ in range(rounds)]
    trial.close()
    return rows[-1], trial.to_tensors()[0]


def assert_same(one, other) -> None:
    assert one[0] == other[0]
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("method", "engine"), [(fedavg, "sequential"), (fedbn, "stacked"), (fedbn, "pool")])
def test_a_lazy_dataset_trains_bit_for_bit_as_one_that_is_read_once(tiny, method, engine):
    lazy, once = lazily(pictures(tiny)), federation(pictures(tiny))
    assert all(split.lazy and split.repeats for client in lazy.clients for split in client.splits.values())
    assert_same(run(begin(lazy, method, engine)), run(begin(once, method, engine)))


def test_targets_are_taken_from_the_dataset_or_given_or_found_by_decoding_each_item_once(tiny):
    once = federation(pictures(tiny))
    parts = pictures(tiny, Pictures)
    found = lazily(parts)
    assert sorted(parts["ann"][0].decoded) == [0] * 4 + list(range(26))
    found.client("ann").train.inputs(torch.tensor([3, 9, 3]))
    assert parts["ann"][0].decoded[-2:] == [3, 9]
    given = LazyDataset(pictures(tiny, Pictures)["ann"][0], targets=once.client("ann").train.y)
    part = LazyDataset(Subset(pictures(tiny)["ann"][0], range(4, 20)))
    other = federation({"a": (given, part)}).clients[0]
    assert found.client("ann").train.y.tolist() == other.train.y.tolist() == once.client("ann").train.y.tolist()
    assert torch.equal(other.test.y, once.client("ann").train.y[4:20])
    assert torch.equal(other.test.copy_rows(slice(None)), once.client("ann").train.x[4:20])


@pytest.mark.parametrize("change", [noise, AsMonai(), AsAlbumentations()], ids=["global", "monai", "albumentations"])
def test_random_transforms_draw_by_seed_client_step_and_item(tiny, change):
    data = lazily(pictures(tiny, change=change))
    assert len(data.notices) == 1
    split, rows = data.client("ann").train, torch.tensor([3, 9])
    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    first = split.inputs(rows, key=(0, "ann", 1))
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    split.inputs(torch.arange(26), key=(0, "ann", 2))
    assert torch.equal(split.inputs(rows.flip(0), key=(0, "ann", 1)), first.flip(0))
    for other in ((0, "ann", 2), (0, "bob", 1), (1, "ann", 1), ()):
        assert not torch.isclose(split.inputs(rows, key=other), first).any()


@pytest.mark.slow
def test_with_random_transforms_a_resumed_run_and_another_engine_draw_alike(tiny):
    data = lazily(pictures(tiny, change=noise))
    whole = begin(data)
    first = whole.advance()
    tensors, facts = whole.to_tensors()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    second = run(whole, 1)
    again = begin(lazily(pictures(tiny, change=noise)))
    again.restore(tensors, facts)
    assert_same(run(again, 1), second)
    assert_same(run(begin(data, engine="pool")), second)
    assert first.rows != second[0]


def test_a_transform_whose_generator_cannot_be_set_is_noticed_and_its_runs_can_still_go_on(tiny):
    data, again = (lazily(pictures(tiny, change=Keeping())) for _ in range(2))
    assert [note for note in data.notices if "client 'ann', train data and 5 more: a transform draws" in note]
    assert data.fingerprint == again.fingerprint
    assert data.fingerprint != lazily(pictures(tiny.select_clients(["bob"]), change=Keeping())).fingerprint


def test_a_cache_holds_the_first_items_up_to_its_bytes(tiny):
    parts = pictures(tiny, change=noise)
    split = lazily(parts, cache_bytes=4 * 8 * 8 * 3 * 4).client("ann").train
    decoded = parts["ann"][0].decoded
    first = split.inputs(torch.tensor([1, 2, 3, 4]), key=(0, "ann", 1))
    decoded.clear()
    assert torch.equal(split.inputs(torch.tensor([4, 1]), key=(0, "ann", 2)), first[[3, 0]])  # drawn once
    assert decoded == []
    split.inputs(torch.tensor([5, 6]))
    split.inputs(torch.tensor([1, 4, 2, 5]))
    assert decoded == [5, 6, 5]
    assert sum(x.nbytes for x in split.store._cache.values()) == 4 * 8 * 8 * 3 * 4


def test_a_store_that_is_sent_elsewhere_takes_no_cache_and_no_workers_along(tiny):
    split = lazily(pictures(tiny), cache_bytes=2**20, workers=2).client("ann").train
    split.store._cache[1] = np.zeros((8, 8, 3), np.uint8)
    sent = pickle.loads(cloudpickle.dumps(split))
    assert not sent.store._cache
    assert sent.store._given.workers == 0
    assert torch.equal(sent.inputs(torch.tensor([1])), tiny.client("ann").train.inputs(torch.tensor([1])))
    parts = pictures(tiny)
    parts["bob"][0].file = Path(__file__).open("rb")  # noqa: SIM115
    with (
        parts["bob"][0].file,
        pytest.raises(UsageError, match="cannot send the dataset of client 'bob' to another process"),
    ):
        begin(lazily(parts), engine="pool")


class Broken(Labeled):
    def __getitem__(self, row: int):
        if row == 5:
            raise OSError("cut short")
        x, y = super().__getitem__(row)
        return np.asarray(x)[: 8 - (row == 6)], y + (row == 7)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (5, "client 'ann', train data: sample 5 of Broken cannot be read: OSError: cut short"),
        (6, r"client 'ann', train data: sample 6 has shape \(7, 8, 3\) of uint8 and the first \(8, 8, 3\) of"),
        (7, "client 'ann', train data: sample 7 came with another target than before"),
    ],
)
def test_items_that_cannot_be_used_are_named_when_they_are_needed(tiny, row, said):
    split = lazily(pictures(tiny, Broken)).client("ann").train
    with pytest.raises(FedshiftError, match=said):
        split.inputs(torch.tensor([row]))
    with pytest.raises(UsageError, match="client 'ann', train data: sample 5"):
        lazily(pictures(tiny, Broken)).check()


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ([], {"workers": -1}, "LazyDataset: workers=-1: give a whole number of 0 or more"),
        ([], {"cache_bytes": 1.5}, "LazyDataset: cache_bytes=1.5"), ([], {}, "client 'a', train data: empty"),
        (iter([]), {}, "list_iterator has no length"),
        (TensorDataset(torch.ones(4, 3), torch.ones(4)), {"targets": [1, 0]}, r"targets of shape \(2,\) for 4 items"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_by_name(given, options, said):
    with pytest.raises(UsageError, match=said):
        federation({"a": (LazyDataset(given, **options),) * 2})


@pytest.mark.slow
def test_worker_processes_decode_as_this_process_does(tiny):
    here = lazily(pictures(tiny, change=noise)).client("ann").train
    there = lazily(pictures(tiny, change=noise), workers=2).client("ann").train
    rows = torch.randperm(26)
    assert torch.equal(here.inputs(rows, key=(0, "ann", 1)), there.inputs(rows, key=(0, "ann", 1)))
