"""Common properties of all models: a described source, defaults, other samples and classes, and a helpful refusal."""

import inspect
import re

import pytest
import torch

from fedshift.config.expressions import list_catalog
from fedshift.utils.errors import UsageError

MODELS = list_catalog("models")
SMALLEST = {
    "alexnet-bn": 63, "alexnet-dropout": 63, "cfnn3": 4, "cfnn4": 8, "digit-cnn-bn": 4, "digit-cnn-dropout": 4,
    "mobilenet-v2": 1, "resnet18": 1, "resnet20": 1, "small-cnn": 4,
    "vgg16-fedmmb": 32,
}  # fmt: skip
"""Pixels each way that an image model needs; the others take samples of any shape."""
SIGNALS = ("resnet-1d",)
"""Models of signals [C, L] of any length."""
DENSE = ("unet", "unet-small")
"""Models that score every pixel of an image, or voxel of a volume, of any size."""


@pytest.fixture(autouse=True)
def shapes_alone():
    """Make networks without values, so that large ones take no memory."""
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_the_first_line_says_what_it_is_and_where_it_is_from(name):
    first = MODELS[name].__doc__.splitlines()[0]
    assert name == "small-cnn" or re.search(r"arXiv:\d{4}\.\d{5}|table \d", first)


@pytest.mark.parametrize("name", MODELS)
def test_defaults_make_a_network_that_uses_every_parameter(name):
    shape, classes = (inspect.signature(MODELS[name]).parameters[key].default for key in ("shape", "classes"))
    model = MODELS[name]()
    outputs = model(torch.zeros(2, *shape))
    assert outputs.shape == (2, classes, *(shape[1:] if name in DENSE else ()))
    outputs.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_samples_other_channels_and_any_number_of_classes(name):
    for channels, classes in ((1, 1), (4, 7)):
        shape = (channels, SMALLEST.get(name, 1), SMALLEST.get(name, 1) + 5)
        shape = shape[1:] if name in SIGNALS else shape
        scores = (classes, *shape[1:]) if name in DENSE else (classes,)
        assert MODELS[name](shape, classes).eval()(torch.zeros(2, *shape)).shape == (2, *scores)


@pytest.mark.parametrize("name", SMALLEST)
def test_what_is_no_image_or_too_small_is_refused_with_what_is_allowed(name):
    size = SMALLEST[name]
    for shape in ((100,), (28, 28), (3, size - 1, size), (3, size, size - 1)):
        with pytest.raises(UsageError, match=f"{name} takes images .*{size} x {size}.*{re.escape(str(shape))}.*choose"):
            MODELS[name](shape, 4)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*SMALLEST, *DENSE, *SIGNALS)])
def test_vectors_may_have_any_shape_but_not_none(name):
    assert MODELS[name]((3, 4), 2).eval()(torch.zeros(5, 3, 4)).shape == (5, 2)
    for shape in ((), (0,)):
        with pytest.raises(UsageError, match=f"{name} takes samples of 1 or more numbers.*choose"):
            MODELS[name](shape, 2)
