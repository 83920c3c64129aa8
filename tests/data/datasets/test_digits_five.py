"""Digits-Five: the authors' partitions, and the same partitions drawn from the publishers' files."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.model_selection import StratifiedShuffleSplit

from fedshift.data.datasets.digits_five import CARD, digits_five
from fedshift.utils.errors import UsageError

DOMAINS = ("mnist", "svhn", "usps", "synthdigits", "mnistm")
FOLDERS = dict(zip(DOMAINS, ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST_M"), strict=True))
SHAPES = {"mnist": (28, 28), "svhn": (32, 32, 3), "usps": (16, 16), "synthdigits": (32, 32, 3), "mnistm": (28, 28, 3)}
TRAIN, TEST = 90, 31


def arrays(domain):
    random = np.random.default_rng(DOMAINS.index(domain))
    return {
        "x_train": random.integers(0, 256, (TRAIN, *SHAPES[domain]), dtype=np.uint8),
        "y_train": random.permutation(np.arange(TRAIN) % 10),
        "x_test": random.integers(0, 256, (TEST, *SHAPES[domain]), dtype=np.uint8),
        "y_test": random.permutation(np.arange(TEST) % 10),
    }


def write_files(root, domains=DOMAINS):
    root.mkdir(parents=True, exist_ok=True)
    for domain in domains:
        np.savez(root / f"{domain}.npz", **arrays(domain))


def write_partitions(root, domains=DOMAINS):
    """What the authors' script makes of all samples: pooled, split 80 to 20 by class, training cut in ten parts."""
    for domain in domains:
        data = arrays(domain)
        x, y = (np.concatenate([data[f"{name}_train"], data[f"{name}_test"]]) for name in "xy")
        (train, test), = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0).split(x, y)  # fmt: skip
        folder = root / FOLDERS[domain]
        (folder / "partitions").mkdir(parents=True)
        (folder / "test.pkl").write_bytes(pickle.dumps((x[test], y[test]), 4))
        length = len(train) / 10
        for part in range(10):
            chosen = train[int(length * part) : int(length * (part + 1))]
            content = pickle.dumps((x[chosen], y[chosen]), 4)
            (folder / "partitions" / f"train_part{part}.pkl").write_bytes(content)


def equal(left, right):
    return torch.equal(left.x, right.x) and torch.equal(left.y, right.y)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["", "digits-five", "digits_five"])
def test_the_draw_from_the_files_is_that_of_the_authors_partitions(tmp_path, place):
    write_files(tmp_path / "files" / place)
    write_partitions(tmp_path / "partitions" / place)
    for samples in (None, 40, 9):
        files = digits_five(tmp_path / "files", samples=samples)
        partitions = digits_five(tmp_path / "partitions", samples=samples)
        assert files.names == partitions.names == DOMAINS
        for one, other in zip(files.clients, partitions.clients, strict=True):
            assert equal(one.train, other.train)
            assert equal(one.test, other.test)
            assert (len(one.train), len(one.test)) == (samples or 96, 25)


def test_images_keep_their_own_sizes_until_they_are_fitted(tmp_path):
    write_files(tmp_path)
    data = digits_five(tmp_path, samples=20)
    assert {client.name: client.train.shape for client in data.clients} == {
        "mnist": (1, 28, 28), "svhn": (3, 32, 32), "usps": (1, 16, 16), "synthdigits": (3, 32, 32),
        "mnistm": (3, 28, 28),
    }  # fmt: skip
    assert data.fit_images().check().sample_shape == (3, 28, 28)


def test_authors_partitions_go_before_files(tmp_path):
    write_files(tmp_path)
    write_partitions(tmp_path, ["usps"])
    (tmp_path / "USPS" / "test.pkl").write_bytes(pickle.dumps((np.zeros((2, 16, 16), np.uint8), np.array([3, 4])), 4))
    assert digits_five(tmp_path, samples=10).client("usps").test.y.tolist() == [3, 4]


def test_domains_choose_and_order(tmp_path):
    write_files(tmp_path, ["svhn", "usps"])
    assert digits_five(tmp_path, domains=["usps", "svhn"], samples=10).names == ("usps", "svhn")
    with pytest.raises(UsageError, match="unknown value of domains 'mnist-m': did you mean 'mnistm'"):
        digits_five(tmp_path, domains=["mnist-m"])
    for domains in ([], ["usps", "usps"]):
        with pytest.raises(UsageError, match="give one or more of mnist, svhn, usps, synthdigits, mnistm, each once"):
            digits_five(tmp_path, domains=domains)


def test_missing_domains_are_named_with_their_files(tmp_path):
    write_files(tmp_path, ["svhn", "usps", "mnistm"])
    with pytest.raises(UsageError) as refused:
        digits_five(tmp_path)
    said = str(refused.value)
    assert said.startswith(f"digits-five lacks mnist, synthdigits under {tmp_path}: put there for mnist the four files")
    assert "for synthdigits synth_train_32x32.mat and synth_test_32x32.mat" in said
    assert "directories MNIST, SynthDigits" in said
    assert "svhn" not in said


@pytest.mark.parametrize("samples", [0, -1, 97, 7438])
def test_more_samples_than_there_are_are_refused(tmp_path, samples):
    write_files(tmp_path, ["usps"])
    with pytest.raises(UsageError, match=rf"samples={samples}: 'usps' has 96 training images; ask for 1 to 96"):
        digits_five(tmp_path, domains=["usps"], samples=samples)


def test_a_partition_that_is_no_pair_or_would_run_code_is_refused(tmp_path):
    write_partitions(tmp_path, ["usps"])
    file = tmp_path / "USPS" / "partitions" / "train_part4.pkl"
    file.write_bytes(pickle.dumps(np.zeros((3, 16, 16), np.uint8), 4))
    with pytest.raises(UsageError, match=r"train_part4.pkl does not hold images and labels"):
        digits_five(tmp_path, domains=["usps"])
    file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UsageError, match=r"train_part4.pkl calls for os.system"):
        digits_five(tmp_path, domains=["usps"])


def test_an_incomplete_set_of_partitions_is_not_one(tmp_path):
    write_partitions(tmp_path, ["usps"])
    (tmp_path / "USPS" / "partitions" / "train_part9.pkl").unlink()
    with pytest.raises(UsageError, match="digits-five lacks usps"):
        digits_five(tmp_path, domains=["usps"])


def test_it_is_present_when_every_domain_is_wherever_it_lies(tmp_path):
    write_files(tmp_path / "digits-five", DOMAINS[:2])
    write_partitions(tmp_path, DOMAINS[2:4])
    assert not CARD.present("digits-five", tmp_path)
    write_files(tmp_path / "mnistm", DOMAINS[4:])
    assert CARD.present("digits-five", tmp_path)
    assert digits_five(tmp_path, samples=10).names == DOMAINS


DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))

if all((DATA / f"{name}.npz").is_file() for name in ("mnist", "usps", "mnistm")):

    @pytest.mark.slow
    def test_real_usps_has_the_sizes_of_the_paper():
        usps, mnist = digits_five(DATA, domains=["usps", "mnist"]).clients
        assert (len(usps.train), len(usps.test)) == (7438, 1860)
        assert len(mnist.train) == 7438
        pooled = np.bincount(torch.cat([usps.train.y, usps.test.y]))
        assert pooled.tolist() == [1553, 1269, 929, 824, 852, 716, 834, 792, 708, 821]
        assert abs(np.bincount(usps.test.y) - pooled / 5).max() < 1
