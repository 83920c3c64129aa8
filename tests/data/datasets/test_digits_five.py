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

SHAPES = {"mnist": (28, 28), "svhn": (32, 32, 3), "usps": (16, 16), "synthdigits": (32, 32, 3), "mnistm": (28, 28, 3)}
DOMAINS = tuple(SHAPES)
DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))


def arrays(domain):
    random = np.random.default_rng(DOMAINS.index(domain))
    return {
        f"{kind}_{part}": values
        for part, count in (("train", 90), ("test", 31))
        for kind, values in (
            ("x", random.integers(0, 256, (count, *SHAPES[domain]), dtype=np.uint8)),
            ("y", random.permutation(np.arange(count) % 10)),
        )
    }


def write_files(root, domains=DOMAINS):
    root.mkdir(parents=True, exist_ok=True)
    for domain in domains:
        np.savez(root / f"{domain}.npz", **arrays(domain))


@pytest.mark.parametrize("samples", [None, 9])
@pytest.mark.parametrize("place", ["", "digits_five"])
def test_the_draw_from_the_files_is_that_of_the_authors_script(tmp_path, place, samples):
    write_files(tmp_path / place)
    data = digits_five(tmp_path, samples=samples)
    assert data.names == DOMAINS
    for client in data.clients:
        known = arrays(client.name)
        x, y = (np.concatenate([known[f"{name}_train"], known[f"{name}_test"]]) for name in "xy")
        x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
        (train, test), = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0).split(x, y)  # fmt: skip
        for split, rows in ((client.train, train[:samples]), (client.test, test)):
            assert np.array_equal(split.x.numpy(), x[rows])
            assert np.array_equal(split.y.numpy(), y[rows])
    assert data.fit_images().check().sample_shape == (3, 28, 28)


def test_the_authors_partitions_are_read_in_their_order_and_run_no_code(tmp_path):
    data = arrays("usps")
    folder = tmp_path / "USPS" / "partitions"
    folder.mkdir(parents=True)
    (folder.parent / "test.pkl").write_bytes(pickle.dumps((data["x_test"], data["y_test"]), 4))
    for number in range(10):
        chosen = slice(9 * number, 9 * number + 9)
        parts = data["x_train"][chosen], data["y_train"][chosen]
        (folder / f"train_part{number}.pkl").write_bytes(pickle.dumps(parts, 4))
    (usps,) = digits_five(tmp_path, domains=["usps"], samples=20).clients
    assert np.array_equal(usps.train.x[:, 0].numpy(), data["x_train"][:20])
    assert np.array_equal(usps.train.y.numpy(), data["y_train"][:20])
    assert np.array_equal(usps.test.x[:, 0].numpy(), data["x_test"])
    (folder / "train_part4.pkl").write_bytes(pickle.dumps(data["x_train"], 4))
    with pytest.raises(UsageError, match=r"train_part4.pkl does not hold images and labels"):
        digits_five(tmp_path, domains=["usps"])
    (folder / "train_part4.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UsageError, match=r"train_part4.pkl calls for os.system"):
        digits_five(tmp_path, domains=["usps"])


def test_domains_choose_and_order(tmp_path):
    write_files(tmp_path, ["svhn", "usps"])
    assert digits_five(tmp_path, domains=["usps", "svhn"], samples=10).names == ("usps", "svhn")
    with pytest.raises(UsageError, match="unknown value of domains 'mnist-m': did you mean 'mnistm'"):
        digits_five(tmp_path, domains=["mnist-m"])
    for domains in ([], ["usps", "usps"]):
        with pytest.raises(UsageError, match="give one or more of mnist, svhn, usps, synthdigits, mnistm, each once"):
            digits_five(tmp_path, domains=domains)
    with pytest.raises(UsageError) as refused:
        digits_five(tmp_path, domains=["mnist", "synthdigits", "svhn"])
    said = str(refused.value)
    assert said.startswith(f"digits-five lacks mnist, synthdigits under {tmp_path}: put there for mnist the four files")
    assert "for synthdigits synth_train_32x32.mat and synth_test_32x32.mat" in said


@pytest.mark.parametrize("samples", [0, 97])
def test_more_samples_than_there_are_are_refused(tmp_path, samples):
    write_files(tmp_path, ["usps"])
    with pytest.raises(UsageError, match=rf"samples={samples}: 'usps' has 96 training images; ask for 1 to 96"):
        digits_five(tmp_path, domains=["usps"], samples=samples)


def test_it_is_present_when_every_domain_is_wherever_it_lies(tmp_path):
    write_files(tmp_path / "digits-five", DOMAINS[:4])
    assert not CARD.present("digits-five", tmp_path)
    write_files(tmp_path / "mnistm", DOMAINS[4:])
    assert CARD.present("digits-five", tmp_path)
    assert digits_five(tmp_path, samples=10).names == DOMAINS


if all((DATA / f"{name}.npz").is_file() for name in ("mnist", "usps", "mnistm")):

    @pytest.mark.slow
    def test_real_usps_has_the_sizes_of_the_paper():
        usps, mnist = digits_five(DATA, domains=["usps", "mnist"]).clients
        assert (len(usps.train), len(usps.test), len(mnist.train)) == (7438, 1860, 7438)
        pooled = np.bincount(torch.cat([usps.train.y, usps.test.y]))
        assert pooled.tolist() == [1553, 1269, 929, 824, 852, 716, 834, 792, 708, 821]
