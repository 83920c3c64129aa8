"""FedBN's synthetic data: means, covariances and shares, estimated from many samples."""

import pytest
import torch

from fedshift.base.errors import UsageError
from fedshift.data.benchmarks.gaussians import CARD, gaussians


def covariance(x: torch.Tensor) -> torch.Tensor:
    return torch.cov(x.double().T)


def test_two_clients_of_ten_dimensions_have_as_many_samples_of_either_class():
    data = gaussians(samples=80, test_samples=40).check()
    assert (data.names, data.classes, data.sample_shape) == (("diagonal", "mixed"), 2, (10,))
    for client in data.clients:
        assert torch.bincount(client.train.y).tolist() == [40, 40]
        assert torch.bincount(client.test.y).tolist() == [20, 20]
        assert client.train.x.dtype == torch.float32


def test_classes_lie_around_minus_one_and_one():
    for client in gaussians(samples=40_000).clients:
        for label in (0, 1):
            mean = client.train.x[client.train.y == label].double().mean(0)
            assert torch.allclose(mean, torch.full((10,), 2.0 * label - 1, dtype=torch.float64), atol=0.04)


def test_one_client_has_the_identity_the_other_also_off_diagonal_entries_in_equal_parts():
    diagonal, mixed = gaussians(samples=80_000, correlation=-0.5).clients
    steps = (torch.arange(10)[:, None] - torch.arange(10)).abs()
    full = (-0.5) ** steps.double()
    identity = torch.eye(10, dtype=torch.float64)
    for label in (0, 1):
        assert torch.allclose(covariance(diagonal.train.x[diagonal.train.y == label]), identity, atol=0.03)
        half = (identity + full) / 2  # the means of both parts are equal
        assert torch.allclose(covariance(mixed.train.x[mixed.train.y == label]), half, atol=0.03)


def test_no_correlation_leaves_clients_alike():
    for client in gaussians(samples=40_000, correlation=0).clients:
        own = covariance(client.train.x[client.train.y == 1])
        assert torch.allclose(own, torch.eye(10, dtype=torch.float64), atol=0.05)


def test_the_classes_can_be_told_apart_nearly_without_error():
    for client in gaussians().clients:
        right = (client.test.x.sum(1) > 0).long() == client.test.y
        assert float(right.double().mean()) > 0.995


def test_samples_are_shuffled_keyed_and_of_their_own_in_every_part():
    first, again, other = gaussians(), gaussians(), gaussians(seed=1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    client = first.client("mixed")
    assert client.train.y.diff().abs().sum() > 50
    assert not torch.equal(client.train.x, client.test.x[: len(client.train)])
    assert not torch.equal(client.train.x, first.client("diagonal").train.x)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"samples": 10}, "samples=10: give a multiple of 4"),
        ({"test_samples": 0}, "test_samples=0: give a multiple of 4"),
        ({"correlation": 1}, "correlation=1: must lie between -1 and 1"),
    ],
)
def test_other_choices_are_refused(choice, said):
    with pytest.raises(UsageError, match=said):
        gaussians(**choice)


def test_no_file_is_needed():
    assert CARD.present("gaussians", None)
