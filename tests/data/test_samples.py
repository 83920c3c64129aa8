"""Samples: how arrays become them, and how a network gets them."""

import re

import numpy as np
import pytest
import torch

from fedshift.data.federation import ClientData, Federation
from fedshift.data.samples import Samples, to_samples
from fedshift.utils.errors import UsageError


def test_bytes_are_scaled_to_minus_one_to_one_and_floats_left_alone(tiny):
    part = tiny.clients[0].train
    scaled = part.inputs(torch.tensor([3, 1]))
    assert scaled.dtype == torch.float32
    assert torch.allclose(scaled, part.x[[3, 1]].double().div(127.5).sub(1).float(), atol=1e-6)
    ends = Samples(x=torch.tensor([[0, 255]], dtype=torch.uint8), y=torch.zeros(1, dtype=torch.int64))
    assert ends.inputs(slice(0, 1)).tolist() == [[-1.0, 1.0]]
    floats = Samples(x=torch.tensor([[0.3, 7.0]]), y=torch.zeros(1, dtype=torch.int64))
    assert torch.equal(floats.inputs(slice(0, 1)), floats.x)
    assert floats.inputs(slice(0, 1), torch.float64).dtype == torch.float64


def test_tokens_stay_whole_numbers_and_are_copies():
    part = to_samples(np.array([[5, 300], [7, 2**40]]), np.zeros(2))
    taken = part.inputs(torch.tensor([1]), torch.float64)
    assert (taken.dtype, taken.tolist()) == (torch.int64, [[7, 2**40]])
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
    ("shape", "given", "stored", "dtype"),
    [
        ((8, 8), "u1", (1, 8, 8), "uint8"), ((8, 9, 3), "i8", (3, 8, 9), "uint8"),
        ((8, 8, 1), "i8", (1, 8, 8), "uint8"),
        ((3, 8, 8), "f2", (3, 8, 8), "float32"), ((8, 8, 3), "f8", (3, 8, 8), "float64"),
        ((12, 8, 8), "u1", (12, 8, 8), "uint8"), ((2, 8, 9), "f4", (2, 8, 9), "float32"),
        ((1, 5, 8, 8), "i8", (1, 5, 8, 8), "uint8"), ((2, 3, 8, 8), "f4", (2, 3, 8, 8), "float32"),
        ((5,), "i4", (5,), "float64"), ((5,), "u1", (5,), "float32"), ((5,), "i8", (5,), "int64"),
        ((5,), "f8", (5,), "float64"),
    ],
)  # fmt: skip
def test_arrays_become_samples_of_their_own(shape, given, stored, dtype):
    x, y = np.random.default_rng(0).integers(0, 99, (4, *shape)).astype(given), np.array([[0], [1], [2], [0]], "f4")
    kept, channels_last = x.copy(), len(shape) == 3 and stored[0] != shape[0]
    x.flags.writeable = False
    part = to_samples(x, y)
    x.flags.writeable = True
    x[:], y[:] = 7, 1
    expected = kept.transpose(0, 3, 1, 2) if channels_last else kept.reshape(4, *stored)
    assert np.array_equal(part.x.numpy(), expected)
    assert part.x.dtype == getattr(torch, dtype)
    assert (part.y.dtype, part.y.tolist()) == (torch.int64, [0, 1, 2, 0])


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (np.zeros((4, 8, 8)), np.zeros(3), "samples of shape (4, 8, 8) and labels of shape (3,)"),
        (np.zeros((4, 8, 8)), np.zeros((4, 2)), "labels one number per sample"),
        (np.zeros((4, 8, 8)), np.array(1), "labels one number per sample"),
        (np.zeros(4), np.zeros(4), "samples need two or more dimensions"),
        (np.zeros((4, 8, 8)), np.array([0, 1, 0.5, 1]), "labels are not whole numbers"),
        (np.zeros((4, 8, 8, 4), np.uint8), np.zeros(4), "bring channels to the second place (numpy.moveaxis)"),
        (np.zeros((4, 2, 8, 8, 3), np.uint8), np.zeros(4), "volumes [N, C, D, H, W]"),
        (np.zeros((4, 8, 8, 8, 4), np.uint8), np.zeros(4), "bring channels to the second place"),
        (np.zeros((4, 1, 2, 3, 8, 8)), np.zeros(4), "samples of shape (4, 1, 2, 3, 8, 8)"),
        (np.full((4, 8, 8), -1), np.zeros(4), "integer pixels from -1 to -1"),
    ],
)  # fmt: skip
def test_other_arrays_are_refused_and_said_where(x, y, said):
    with pytest.raises(UsageError, match=f"^client 'a', test data: .*{re.escape(said)}"):
        to_samples(x, y, "client 'a', test data")
