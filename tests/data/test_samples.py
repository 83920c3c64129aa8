"""Samples: how arrays become them, and how a network gets them."""

import numpy as np
import pytest
import torch

from fedshift.data.federation import ClientData, Federation
from fedshift.data.samples import Samples, to_samples
from fedshift.utils.errors import UsageError


def test_bytes_are_scaled_to_minus_one_to_one_and_floats_left_alone(tiny, unchanged):
    part = tiny.clients[0].train
    scaled = part.inputs(torch.tensor([3, 1]))
    assert scaled.dtype == torch.float32
    assert torch.allclose(scaled, part.x[[3, 1]].double().div(127.5).sub(1).float(), atol=1e-6)
    assert -1 <= scaled.min() < scaled.max() <= 1
    ends = Samples(x=torch.tensor([[0, 255]], dtype=torch.uint8), y=torch.zeros(1, dtype=torch.int64))
    assert ends.inputs(slice(0, 1)).tolist() == [[-1.0, 1.0]]
    floats = Samples(x=torch.tensor([[0.3, 7.0]]), y=torch.zeros(1, dtype=torch.int64))
    assert torch.equal(floats.inputs(slice(0, 1)), floats.x)
    assert floats.inputs(slice(0, 1), torch.float64).dtype == torch.float64


def test_tokens_stay_whole_numbers_and_are_copies():
    part = to_samples(np.array([[5, 300], [7, 2**40]]), np.zeros(2))
    taken = part.inputs(torch.tensor([1]), torch.float64)
    assert taken.dtype == torch.int64
    assert taken.tolist() == [[7, 2**40]]
    taken.zero_()
    assert part.x.tolist() == [[5, 300], [7, 2**40]]


def test_volumes_are_scaled_by_channel_as_images_are():
    x = np.random.default_rng(0).integers(0, 256, (3, 2, 4, 5, 6))
    part = to_samples(x, np.zeros(3))
    assert np.abs(part.inputs(slice(None), torch.float64).numpy() - (x / 127.5 - 1)).max() <= 1e-12
    data = Federation(name="a", clients=(ClientData(name="a", train=part, test=part),), classes=1)
    (client,) = data.normalize_clients().clients
    mean, std = (each(x / 255, axis=(0, 2, 3, 4), keepdims=True) for each in (np.mean, np.std))
    found = client.train.inputs(slice(None), torch.float64).numpy()
    assert np.abs(found - (x / 255 - mean[0]) / std[0]).max() <= 1e-5  # mean and deviation are kept in float32


@pytest.mark.parametrize(
    ("x", "shape", "dtype"),
    [
        (np.zeros((4, 8, 8), np.uint8), (1, 8, 8), torch.uint8),
        (np.zeros((4, 8, 8, 3), np.int64), (3, 8, 8), torch.uint8),
        (np.zeros((4, 8, 8, 1), np.int64), (1, 8, 8), torch.uint8),
        (np.zeros((4, 3, 8, 8), bool), (3, 8, 8), torch.uint8),
        (np.zeros((4, 3, 8, 8), np.float16), (3, 8, 8), torch.float32),
        (np.zeros((4, 8, 8, 3), np.float64), (3, 8, 8), torch.float64),
        (np.zeros((4, 12, 8, 8), np.uint8), (12, 8, 8), torch.uint8),
        (np.zeros((4, 2, 8, 9), np.float32), (2, 8, 9), torch.float32),
        (np.zeros((4, 1, 5, 8, 8), np.int64), (1, 5, 8, 8), torch.uint8),
        (np.zeros((4, 2, 3, 8, 8), np.float32), (2, 3, 8, 8), torch.float32),
        (np.zeros((4, 5), np.int32), (5,), torch.float64),
        (np.zeros((4, 5), np.uint8), (5,), torch.float32),
        (np.zeros((4, 5), np.int64), (5,), torch.int64),
        (np.zeros((4, 5), np.float64), (5,), torch.float64),
    ],
)
def test_arrays_become_samples(x, shape, dtype):
    part = to_samples(x, np.array([[0], [1], [2], [0]], np.float32))
    assert part.x.shape == (4, *shape)
    assert part.x.dtype == dtype
    assert part.y.tolist() == [0, 1, 2, 0]
    assert part.y.dtype == torch.int64


def test_channels_last_images_are_turned_not_reshaped():
    x = np.random.default_rng(0).integers(0, 256, (4, 8, 9, 3))
    assert np.array_equal(to_samples(x, np.zeros(4)).x.numpy(), x.transpose(0, 3, 1, 2))


def test_a_split_does_not_share_memory_with_arrays():
    for shape, kind, labels in (((4, 8, 8), np.uint8, np.int64), ((4, 5), float, float), ((4, 5), np.int64, np.int64)):
        x, y = np.zeros(shape, kind), np.zeros(4, labels)
        part = to_samples(x, y)
        x[:], y[:] = 7, 1
        assert part.x.max() == 0
        assert part.y.max() == 0


def test_arrays_that_cannot_be_written_are_fine():
    x, y = np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.int64)
    x.flags.writeable = y.flags.writeable = False
    assert len(to_samples(x, y)) == 4


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (np.zeros((4, 8, 8)), np.zeros(3), "samples of shape (4, 8, 8) and labels of shape (3,)"),
        (np.zeros((4, 8, 8)), np.zeros((4, 2)), "labels one number per sample"),
        (np.zeros((4, 8, 8)), np.array(1), "labels one number per sample"),
        (np.array(1), np.zeros(1), "samples need two or more dimensions"),
        (np.zeros(4), np.zeros(4), "samples need two or more dimensions"),
        (np.zeros((4, 8, 8)), np.array([0, 1, 0.5, 1]), "labels are not whole numbers"),
        (np.zeros((4, 8, 8)), np.array([0, 1, np.nan, 1]), "labels are not whole numbers"),
        (np.zeros((4, 8, 8)), np.array(["a", "b", "c", "d"]), "where numbers are expected"),
        (np.zeros((4, 8, 8), complex), np.zeros(4), "where numbers are expected"),
        (np.zeros((4, 8, 8, 4), np.uint8), np.zeros(4), "bring channels to the second place (numpy.moveaxis)"),
        (np.zeros((4, 2, 8, 8, 3), np.uint8), np.zeros(4), "volumes [N, C, D, H, W]"),
        (np.zeros((4, 8, 8, 8, 4), np.uint8), np.zeros(4), "bring channels to the second place"),
        (np.zeros((4, 1, 2, 3, 8, 8)), np.zeros(4), "samples of shape (4, 1, 2, 3, 8, 8)"),
        (
            np.full((4, 8, 8), 256),
            np.zeros(4),
            "from 256 to 256; they must lie in 0..255: scale them, or give floats",
        ),
        (np.full((4, 8, 8), -1), np.zeros(4), "integer pixels from -1 to -1"),
    ],
)
def test_other_arrays_are_refused_and_said_where(x, y, said):
    with pytest.raises(UsageError) as refused:
        to_samples(x, y, "client 'a', test data")
    assert str(refused.value).startswith("client 'a', test data")
    assert said in str(refused.value)
