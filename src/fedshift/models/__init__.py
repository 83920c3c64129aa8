"""Networks of the papers. A model is made by a factory ``make(sample_shape, classes) -> nn.Module``.

Names resolve without a registry: ``digit-cnn-bn`` is ``fedshift.models.digits.digit_cnn_bn``; a factory of yours is
``my_package.module:function``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..utils.errors import UsageError
from ..utils.user_code import describe_error, describe_function

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]
"""Function that makes a network for the shape of a sample and a number of classes."""


def make_network(model: ModelFactory, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Make the network of ``model`` for a sample's shape and the classes; raise UsageError if the result is none."""
    try:
        network = model(shape, classes)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the model cannot be made for samples of shape {shape} and {classes} classes ({describe_error(error)}): "
            "give a function (sample_shape, classes) -> nn.Module that takes them"
        ) from error
    if not isinstance(network, nn.Module):
        raise UsageError(
            f"the model's function made a {type(network).__name__}, not a torch.nn.Module: return the network in "
            f"{describe_function(model)}"
        )
    if any(nn.parameter.is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        with torch.no_grad():  # gives lazy layers their shapes, without moving statistics
            network.eval()(torch.zeros(1, *shape))
    return network
