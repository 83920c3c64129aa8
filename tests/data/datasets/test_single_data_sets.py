"""Data sets of one source: each form in which its files go around gives the same samples, written here byte by byte."""

import bz2
import gzip
import pickle
import re
import struct
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fedshift.config.expressions import list_catalog
from fedshift.data.datasets._card import get_card
from fedshift.data.datasets.single_datasets import cifar10, fashion_mnist, mnist, mnistm, svhn, synthdigits, usps
from fedshift.utils.errors import UsageError

LOADERS = {
    "mnist": mnist, "fashion-mnist": fashion_mnist, "cifar10": cifar10, "svhn": svhn, "usps": usps, "mnistm": mnistm,
    "synthdigits": synthdigits,
}  # fmt: skip
TRAIN, TEST = 20, 10


def pixels(*shape, key=0):
    return np.random.default_rng(key).integers(0, 256, shape, dtype=np.uint8)


def labels(count, key=0):
    return np.random.default_rng(key).permutation(np.arange(count) % 10).astype(np.uint8)


def same(federation, *arrays):
    """Whether the one client has these images [N, C, H, W] and labels, all of them and in this order."""
    (client,) = federation.clients
    assert (client.train.x.dtype, federation.classes) == (torch.uint8, 10)
    read = client.train.x, client.train.y, client.test.x, client.test.y
    return all(np.array_equal(one.numpy(), other) for one, other in zip(read, arrays, strict=True))


# MNIST and Fashion-MNIST

GRAY = pixels(TRAIN, 28, 28), labels(TRAIN), pixels(TEST, 28, 28, key=1), labels(TEST, key=1)
GRAY_NCHW = GRAY[0][:, None], GRAY[1], GRAY[2][:, None], GRAY[3]


def write_idx(folder: Path, arrays=GRAY, pack=bytes, ending=""):
    folder.mkdir(parents=True, exist_ok=True)
    names = "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
    for name, array in zip(names, arrays, strict=True):
        head = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (folder / f"{name}{ending}").write_bytes(pack(head + array.tobytes()))


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "data/mnist"])
@pytest.mark.parametrize(("pack", "ending"), [(bytes, ""), (gzip.compress, ".gz")])
def test_mnist_is_read_from_the_publishers_files(tmp_path, place, pack, ending):
    write_idx(tmp_path / place, pack=pack, ending=ending)
    read = mnist(tmp_path / "data" if place.startswith("data") else tmp_path)
    assert same(read, *GRAY_NCHW)
    assert (read.name, read.names, read.note) == ("mnist", ("mnist",), "MNIST: 20 training and 10 test images")


@pytest.mark.parametrize("place", ["fashion-mnist", "fashion_mnist", "FashionMNIST/raw"])
def test_fashion_mnist_has_the_same_files_in_a_folder_of_its_own_name(tmp_path, place):
    write_idx(tmp_path / place)
    read = fashion_mnist(tmp_path)
    assert same(read, *GRAY_NCHW)
    assert read.class_names[9] == "Ankle boot"
    with pytest.raises(UsageError, match="benchmark 'mnist' is not in"):
        mnist(tmp_path)


def test_files_in_no_folder_of_their_own_could_be_either_and_are_not_read(tmp_path):
    write_idx(tmp_path)
    for loader in (mnist, fashion_mnist):
        with pytest.raises(UsageError, match="in a directory"):
            loader(tmp_path)


def test_a_file_of_the_publisher_that_is_missing_or_wrong_is_named(tmp_path):
    write_idx(tmp_path / "mnist", (GRAY[0], GRAY[1] + np.uint8(1), *GRAY[2:]))
    with pytest.raises(UsageError, match="label 10 is out of range"):
        mnist(tmp_path)
    images = tmp_path / "mnist" / "t10k-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(UsageError, match="t10k-images-idx3-ubyte should hold 10 x 28 x 28 bytes"):
        mnist(tmp_path)
    images.unlink()
    with pytest.raises(UsageError, match=r"`fedshift data fetch mnist` fetches it, or put there the four files"):
        mnist(tmp_path)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["{dash}.npz", "{under}.npz", "{dash}/{under}.npz", "{under}/{dash}.npz"])
def test_each_is_read_from_one_npz(tmp_path, name, place):
    with pytest.raises(UsageError, match=rf"benchmark '{name}' is not in .*x_train, y_train, x_test, y_test"):
        LOADERS[name](tmp_path)
    file = tmp_path / place.format(dash=name, under=name.replace("-", "_"))
    file.parent.mkdir(exist_ok=True)
    np.savez(file, **dict(zip(("x_train", "y_train", "x_test", "y_test"), GRAY, strict=True)))
    read = LOADERS[name](tmp_path)
    assert same(read, *GRAY_NCHW)
    assert read.names == (name,)


def test_every_public_function_of_the_data_sets_is_a_benchmark():
    known = list_catalog("data.datasets")
    assert set(known) == {
        *LOADERS, "digits-five", "morpho-mnist", "abide", "cosines", "domainnet", "fed-heart-disease", "fed-isic2019",
        "gaussians", "ham10000", "heart-disease", "office-caltech10", "tcga-brca",
    }  # fmt: skip
    assert len({get_card(loader).title for loader in known.values()}) == len(known)


@pytest.mark.parametrize("name", [*LOADERS, "digits-five", "morpho-mnist"])
def test_what_is_fetched_is_where_it_is_looked_for(tmp_path, name):
    """Files of the names that a card's remotes have, in the benchmark's folder, make the benchmark present."""
    card = get_card(list_catalog("data.datasets")[name])
    assert not card.present(name, tmp_path)
    assert len({remote.name for remote in card.remotes}) == len(card.remotes)
    for remote in card.remotes:
        assert re.fullmatch(rf"https?://.*/{remote.name.rpartition('/')[2]}", remote.url)
        assert re.fullmatch("|md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", remote.checksum)
        (tmp_path / name / remote.name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / remote.name).touch()
    assert card.present(name, tmp_path)


# SVHN and SynthDigits

COLOR = pixels(TRAIN, 3, 32, 32), labels(TRAIN), pixels(TEST, 3, 32, 32, key=1), labels(TEST, key=1)


def write_mat(file: Path, x_NCHW, y, zero=10):
    file.parent.mkdir(parents=True, exist_ok=True)
    savemat(file, {"X": x_NCHW.transpose(2, 3, 1, 0), "y": np.where(y == 0, zero, y).astype(np.uint8)[:, None]})


@pytest.mark.parametrize(("name", "prefix", "zero"), [("svhn", "", 10), ("synthdigits", "synth_", 0)])
@pytest.mark.parametrize("place", ["", "{name}", "deeper/{name}"])
def test_mat_files_of_cropped_digits_are_read(tmp_path, name, prefix, zero, place):
    folder = tmp_path / place.format(name=name)
    write_mat(folder / f"{prefix}train_32x32.mat", *COLOR[:2], zero)
    write_mat(folder / f"{prefix}test_32x32.mat", *COLOR[2:], zero)
    root = tmp_path / "deeper" if place.startswith("deeper") else tmp_path
    assert same(LOADERS[name](root), *COLOR)


# USPS


def test_levels_from_minus_one_to_one_are_cut_off_as_by_fedbns_authors(tmp_path):
    values = np.linspace(-1, 1, 256 * 4).reshape(4, 256).round(3)
    theirs = ((np.asarray(values, dtype=np.float32).reshape((-1, 16, 16)) + 1) / 2 * 255).astype(dtype=np.uint8)
    text = "".join(f"{n} {' '.join(f'{i + 1}:{v:g}' for i, v in enumerate(row))}\n" for n, row in enumerate(values, 1))
    for name in ("usps.bz2", "usps.t.bz2"):
        (tmp_path / name).write_bytes(bz2.compress(text.encode()))
    assert same(usps(tmp_path), theirs[:, None], range(4), theirs[:, None], range(4))


def test_pixels_of_another_range_are_refused_by_the_name_of_the_file(tmp_path):
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(b"1 1:255\n2 1:0\n"))
    (tmp_path / "usps.t.bz2").write_bytes(bz2.compress(b"1 1:1\n"))
    with pytest.raises(UsageError, match=r"usps.bz2 holds pixels from 0 to 255, expected were -1 to 1"):
        usps(tmp_path)


# MNIST-M


SMALL = pixels(TRAIN, 28, 28, 3), pixels(TEST, 28, 28, 3, key=1)
SMALL_NCHW = SMALL[0].transpose(0, 3, 1, 2), GRAY[1], SMALL[1].transpose(0, 3, 1, 2), GRAY[3]


@pytest.mark.parametrize("held_out", [0, 6])
def test_keras_mnistm_has_the_labels_of_mnist(tmp_path, held_out):
    content = {b"train": SMALL[0][held_out:], b"test": SMALL[1], b"valid": SMALL[0][:held_out]}
    (tmp_path / "mnistm").mkdir()
    (tmp_path / "mnistm" / "keras_mnistm.pkl.gz").write_bytes(gzip.compress(pickle.dumps(content, 2)))
    with pytest.raises(UsageError, match=r"keras_mnistm.pkl.gz holds no labels, they are MNIST's, which is not in"):
        mnistm(tmp_path)
    write_idx(tmp_path / "mnist")
    order = np.roll(np.arange(TRAIN), -held_out)
    assert same(mnistm(tmp_path), SMALL_NCHW[0][order], GRAY[1][order], *SMALL_NCHW[2:])


def test_another_pickle_is_refused(tmp_path):
    (tmp_path / "keras_mnistm.pkl").write_bytes(pickle.dumps([SMALL[0]], 4))
    with pytest.raises(UsageError, match=r"keras_mnistm.pkl cannot be read as MNIST-M with arrays train and test"):
        mnistm(tmp_path)


# CIFAR-10

BATCHES = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
PHOTOS = {name: (pixels(10, 3, 32, 32, key=key), labels(10, key)) for key, name in enumerate(BATCHES)}
EXPECTED = (
    np.concatenate([PHOTOS[name][0] for name in BATCHES[:5]]),
    np.concatenate([PHOTOS[name][1] for name in BATCHES[:5]]),
    *PHOTOS["test_batch"],
)


def write_archive(folder, names, **changed):
    """The archive with the batches ``names``, dictionaries with keys of bytes, as Python 3 reads Python 2's."""
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name in names:
            x, y = PHOTOS.get(name, (SMALL[0], GRAY[1]))
            batch = {b"batch_label": b"x", b"labels": y.tolist(), b"data": x.reshape(len(x), -1)}
            content = changed.get(name, pickle.dumps(batch, 2))
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    return folder / "cifar-10-python.tar.gz"


def test_cifar10_is_read_from_its_archive_in_any_order_of_its_members(tmp_path):
    write_archive(tmp_path, ["readme.html", *reversed(BATCHES)])
    read = cifar10(tmp_path)
    assert same(read, *EXPECTED)
    assert read.class_names[0] == "airplane"
    assert [file.name for file in tmp_path.iterdir()] == ["cifar-10-python.tar.gz"]


def test_an_archive_of_cifar10_that_is_cut_short_or_would_run_code_is_refused(tmp_path):
    file = write_archive(tmp_path, BATCHES[:4])
    with pytest.raises(UsageError, match=r"cifar-10-python.tar.gz lacks data_batch_5, test_batch"):
        cifar10(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UsageError, match=r"cifar-10-python.tar.gz.* cannot be read as .*cut short"):
        cifar10(tmp_path)
    write_archive(tmp_path, BATCHES, data_batch_2=b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UsageError, match=r"data_batch_2 calls for os.system"):
        cifar10(tmp_path)


def test_doubled_cifar10_has_every_image_once_as_it_is_and_once_augmented(tmp_path):
    np.savez(tmp_path / "cifar10.npz", **dict(zip(("x_train", "y_train", "x_test", "y_test"), EXPECTED, strict=True)))
    plain, doubled = cifar10(tmp_path).clients[0], cifar10(tmp_path, doubled=True).clients[0]
    count = len(plain.train)
    assert torch.equal(doubled.train.x[:count], plain.train.x)
    assert torch.equal(doubled.train.y, plain.train.y.repeat(2))
    assert torch.equal(doubled.test.x, plain.test.x)
    copies = doubled.train.x[count:]
    assert all(not torch.equal(copy, image) for copy, image in zip(copies, plain.train.x, strict=True))
    # What is changed little is still the same image, mirrored or not: nearer to it than to the next one.
    for copy, image, following in zip(copies, plain.train.x, plain.train.x.roll(-1, 0), strict=True):
        near, far = (
            min(float((copy.float() - x.float()).abs().mean()) for x in (one, one.flip(2)))
            for one in (image, following)
        )
        assert near < far
    again, other = (cifar10(tmp_path, doubled=True, seed=seed).clients[0].train.x[count:] for seed in (0, 1))
    assert torch.equal(again, copies)
    assert not torch.equal(other, copies)
