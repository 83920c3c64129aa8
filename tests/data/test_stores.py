"""Samples that are read when a batch needs them train and measure as those in memory do, and are never read whole."""

import pickle
from dataclasses import replace
from math import prod
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation, read_folder
from fedshift.data.checks.quality import check_data, examine
from fedshift.data.decoding import Decoding
from fedshift.data.federation import Federation
from fedshift.data.partition import dirichlet
from fedshift.data.samples import Samples, join_samples, to_samples
from fedshift.data.stores import LazyStore, MappedStore
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.centralized import centralized
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.models.digits import small_cnn
from fedshift.utils.errors import FedshiftError, UsageError


class Counted(LazyStore):
    """A tensor that is read by rows; ``most`` is the largest number of rows read at a time."""

    def __init__(self, x: Tensor) -> None:
        super().__init__("counted", len(x), x[:1])
        self.x, self.most = x, 0

    def _load(self, rows, key):
        self.most = max(self.most, len(rows))
        return self.x[torch.from_numpy(rows)]


def lazily(data: Federation) -> Federation:
    """The same federation with samples that are read when they are needed."""
    return data.map_splits(lambda split: split.replace(x=Counted(split.store)))


def run(data: Federation, method, engine: str, **changes) -> tuple[list, dict[str, Tensor]]:
    settings = {"rounds": 2, "work": Work(batch_size=8, epochs=1), "optimizer": SGD(lr=0.05), "engine": engine}
    settings["workers"] = 1 if engine == "pool" else None
    model = changes.pop("model", small_cnn)
    trial = Trial(method, model, data, Settings(**settings | changes), 0)
    rows = [trial.advance().rows for _ in range(2)]
    tensors, _ = trial.to_tensors()
    trial.close()
    return rows, tensors


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def assert_same(one: tuple[list, dict[str, Tensor]], other: tuple[list, dict[str, Tensor]]) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


ONE_STEP = {"work": Work(batch_size=8, batches=1), "model": linear}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "engine", "changes"),
    [(fedbn, "sequential", {}), (fedavg, "sequential", {}), (fedavg, "identity", ONE_STEP), (centralized, "auto", {})],
)
def test_lazy_samples_train_bit_for_bit_as_those_in_memory(tiny, method, engine, changes):
    lazy = lazily(tiny).check()
    assert lazy.lazy
    assert not tiny.lazy
    assert_same(run(lazy, method(), engine, **changes), run(tiny, method(), engine, **changes))


def save(folder: Path, data: Federation) -> Path:
    """Write images as files that can be mapped, channels last."""
    for client in data.clients:
        for part, split in client.splits.items():
            (folder / client.name / part).mkdir(parents=True)
            np.save(folder / client.name / part / "x.npy", np.moveaxis(split.x.numpy(), 1, -1))
            np.save(folder / client.name / part / "y.npy", split.y.numpy())
    return folder


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("method", "engine"), [(fedbn, "stacked"), (fedbn, "sequential"), (fedavg, "pool")])
def test_mapped_files_train_bit_for_bit_as_arrays_in_memory(tiny, tmp_path, method, engine):
    mapped = read_folder(save(tmp_path / "tiny", tiny))
    assert all(split.lazy for client in mapped.clients for split in client.splits.values())
    assert_same(run(mapped, method(), engine), run(tiny, method(), engine))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x, id="whole"),
        pytest.param(lambda x: x[5:], id="cut"),
        pytest.param(lambda x: x[::-2, ::-1], id="reversed"),
        pytest.param(lambda x: x.transpose(0, 3, 1, 2)[3:20], id="transposed"),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.float32, np.float64])
def test_mapped_arrays_are_read_as_arrays_in_memory_and_so_they_are_elsewhere(tmp_path, change, dtype):
    x = np.random.default_rng(0).integers(0, 255, (26, 8, 8, 3)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    mapped = change(np.load(tmp_path / "x.npy", mmap_mode="r"))
    y = np.arange(len(mapped)) % 3
    split, whole = to_samples(mapped, y), to_samples(change(x), y)
    assert split.lazy
    for one in (split, pickle.loads(cloudpickle.dumps(split))):
        assert torch.equal(one.inputs(torch.tensor([7, 0, 7])), whole.inputs(torch.tensor([7, 0, 7])))
        assert torch.equal(one.copy_rows(slice(None)), whole.x)


def test_a_map_with_changes_in_memory_alone_is_copied(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 8, 8), np.uint8))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
    mapped[2] = 9
    split = to_samples(mapped, np.arange(4))
    assert not split.lazy
    assert split.x[2].min() == 9


def test_faults_of_mapped_files_are_refused_by_name(tiny, tmp_path):
    folder = save(tmp_path / "tiny", tiny)
    (folder / "bob" / "test" / "y.npy").unlink()
    with pytest.raises(UsageError, match=r"bob has no array 'y_test', or file test/y\.npy"):
        read_folder(folder)
    assert read_folder(folder, ["cid", "ann"]).names == ("cid", "ann")
    with pytest.raises(UsageError, match="unknown client 'an'"):
        read_folder(folder, ["an"])
    file = folder / "bob" / "train" / "x.npy"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(
        UsageError, match=r"bob/train/x\.npy cannot be read as arrays .*; write it again with numpy\.save"
    ):
        read_folder(folder)
    np.save(folder / "bob" / "test" / "y.npy", np.zeros(12, int))
    np.save(file, np.full((17, 8, 8), 300))
    with pytest.raises(UsageError, match=r"bob, train data: integer pixels from 300 to 300"):
        read_folder(folder)


needs_status = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory")


@pytest.mark.slow
@needs_status
def test_mapped_samples_train_in_less_memory_than_they_take(tmp_path):
    for part in ("train", "test"):
        folder = tmp_path / "big" / "a" / part
        folder.mkdir(parents=True)
        np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (16_000, 3, 64, 64))  # 188 MiB without blocks
        np.save(folder / "y.npy", np.arange(16_000) % 2)

    def thumbnail(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.MaxPool2d(16), nn.Flatten(), nn.Linear(48, classes))

    def status(name: str) -> int:
        return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) // 1024

    settings = Settings(rounds=1, work=Work(batch_size=32, epochs=1), optimizer=SGD(lr=0.05), engine="sequential")
    trial = Trial(fedavg(), thumbnail, read_folder(tmp_path / "big").check(), settings, 0)
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts
    before = status("VmRSS")
    assert 16_000 in {row["samples"] for row in trial.advance().rows}
    assert status("VmHWM") - before < 128


@pytest.mark.slow
def test_the_pool_engine_refuses_to_copy_more_samples_than_fit_into_memory(tiny, monkeypatch):
    monkeypatch.setattr("fedshift.engines.spread.available_memory", lambda: 10_000.0)
    with pytest.raises(UsageError, match=r"the pool engine copies the training samples \(0\.0 GB\) into memory"):
        run(tiny, fedavg(), "pool")
    assert run(lazily(tiny), fedavg(), "pool")


@pytest.mark.slow
def test_the_ray_engine_refuses_samples_that_stay_where_they_are(tiny):
    pytest.importorskip("ray")
    with pytest.raises(
        UsageError, match="the ray engine sends a client's samples to its hosts, but the samples of client 'ann'"
    ):
        run(lazily(tiny), fedavg(), "ray")


def test_lazy_samples_change_as_those_in_memory(tiny):
    def change(data: Federation) -> Federation:
        data = data.fit_images(6).hold_out(0.2).limit_samples(10)
        return dirichlet(clients=3, alpha=1.0)(data.pool())

    lazy, whole = change(lazily(tiny)), change(tiny)
    for one, other in zip(lazy.clients, whole.clients, strict=True):
        for name, split in one.splits.items():
            assert torch.equal(split.inputs(slice(None)), other.splits[name].inputs(slice(None)))
            assert torch.equal(split.copy_rows(slice(1, 5, 2)), other.splits[name].copy_rows(slice(1, 5, 2)))
    assert lazy.fingerprint == change(lazily(tiny)).fingerprint


def test_lazy_samples_are_not_read_whole_at_the_start_of_a_run(tiny, monkeypatch):
    monkeypatch.setattr("fedshift.data.stores.LazyStore.probed", 5)
    lazy = lazily(tiny).check()
    assert check_data(lazy, "refuse").notices == lazy.notices
    stores = [split.store for client in lazy.clients for split in client.splits.values()]
    assert {store.most for store in stores} == {1}


def test_lazy_samples_are_read_in_pieces_of_a_limited_size(tiny, monkeypatch):
    monkeypatch.setattr("fedshift.data.samples.CHUNK_BYTES", 7 * 3 * 8 * 8)
    lazy = lazily(tiny)
    scales = [data.normalize_clients().clients[0].train.normalization for data in (lazy, tiny)]
    assert scales[0].mean == pytest.approx(scales[1].mean, rel=1e-12)
    assert scales[0].std == pytest.approx(scales[1].std, rel=1e-12)
    assert lazy.clients[0].train.store.most == 7


def test_lazy_samples_are_neither_joined_with_those_of_another_type_nor_put_into_memory_whole(tiny):
    first = lazily(tiny).clients[0].train
    with pytest.raises(UsageError, match="lazy samples of different types or scalings"):
        join_samples([first, first.replace(x=Counted(torch.rand(26, 3, 8, 8)))])
    with pytest.raises(UsageError, match="counted: these samples are read in batches"):
        _ = first.x


def test_a_value_that_is_not_finite_is_refused_where_it_is_read():
    x = torch.rand(200, 4)
    x[150, 2] = float("nan")
    split = Samples(x=Counted(x), y=torch.arange(200) % 2)
    with pytest.raises(FedshiftError, match="counted: sample 150 has NaN"):
        split.inputs(torch.tensor([3, 150]))
    x[199] = float("inf")
    data = federation({"a": (np.ones((4, 4)), np.arange(4) % 2) * 2})
    bad = replace(data, clients=(replace(data.clients[0], train=split),))
    with pytest.raises(UsageError, match="counted: sample 199 has NaN"):
        bad.check()
    found = {finding.kind: finding.samples for finding in examine(bad).findings}
    assert found["not-finite"] == 2


def test_another_process_maps_the_same_files(tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 1, 40, 50)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
    for arrays, most in ((list(mapped), 3000), ([mapped[0], x[1]], 30000)):
        files = [tmp_path / "a"] * len(arrays)
        store = MappedStore(arrays, (40, 60), "here", files, Decoding(kind="volume"))
        sent = pickle.dumps(store)
        assert len(sent) < most
        rows = torch.arange(len(arrays))
        assert torch.equal(pickle.loads(sent).read(rows), store.read(rows))
        expected = np.pad(x[1, 0], ((0, 0), (0, 10)), constant_values=x[1].min())
        assert np.array_equal(store.read(rows)[1, 0], expected)
