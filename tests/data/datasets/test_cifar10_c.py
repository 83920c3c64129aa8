"""CIFAR-10-C from tiny arrays as published: five severities one after another, as a folder and as the archive."""

import tarfile

import numpy as np
import pytest
import torch

from fedshift.data.datasets.cifar10_c import cifar10_c
from fedshift.utils.errors import UsageError

COUNT = 40
NAMES = ("fog", "snow", "spatter")


@pytest.fixture
def published(tmp_path):
    """Forty images under three corruptions: red is the image, green the severity, blue the corruption."""
    folder = tmp_path / "cifar10-c" / "CIFAR-10-C"
    folder.mkdir(parents=True)
    labels = np.arange(COUNT) % 10
    np.save(folder / "labels.npy", np.tile(labels, 5).astype(np.uint8))
    for place, name in enumerate(NAMES):
        pixels = np.zeros((5 * COUNT, 32, 32, 3), np.uint8)
        pixels[..., 0] = np.tile(np.arange(COUNT), 5)[:, None, None]
        pixels[..., 1] = np.repeat(np.arange(1, 6), COUNT)[:, None, None]
        pixels[..., 2] = place
        np.save(folder / f"{name}.npy", pixels)
    return tmp_path


def test_no_image_is_at_two_clients_and_all_have_the_severity_that_is_asked_for(published):
    data = cifar10_c(published, domains=NAMES, severity=3)
    seen = []
    for place, client in enumerate(data.clients):
        for split in client.splits.values():
            red, green, blue = split.x.long()[:, :, 0, 0].T
            assert torch.equal(red % 10, split.y)
            assert set(green.tolist()) == {3}
            assert set(blue.tolist()) == {place}
            seen += red.tolist()
        assert len(client.test) >= 2
    assert sorted(seen) == list(range(COUNT))


def test_the_archive_as_fetched_gives_the_same_samples(published):
    folder = published / "cifar10-c" / "CIFAR-10-C"
    before = cifar10_c(published, domains=NAMES)
    with tarfile.open(published / "cifar10-c" / "CIFAR-10-C.tar", "w") as archive:
        archive.add(folder, "CIFAR-10-C")
    for file in folder.iterdir():
        file.unlink()
    assert cifar10_c(published, domains=NAMES).fingerprint == before.fingerprint


def test_unknown_corruptions_and_severities_and_other_arrays_are_refused(published):
    for given, said in (
        ({"domains": ("fogg",)}, "unknown value of domains 'fogg': did you mean 'fog'"),
        ({"domains": ("fog", "fog")}, "each once"),
        ({"domains": NAMES, "severity": 6}, "severity=6: give 1, 2, 3, 4 or 5"),
        ({"domains": ("frost",)}, "frost.npy cannot be read as an array of CIFAR-10-C"),
    ):
        with pytest.raises(UsageError, match=said):
            cifar10_c(published, **given)
    np.save(published / "cifar10-c" / "CIFAR-10-C" / "fog.npy", np.zeros((3, 32, 32, 3), np.uint8))
    with pytest.raises(UsageError, match=r"fog.npy holds uint8 of shape \(3, 32, 32, 3\)"):
        cifar10_c(published, domains=("fog",))
