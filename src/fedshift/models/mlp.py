"""Fully connected networks of FedBN (Li et al. 2021, arXiv:2102.07623): for ABIDE I, and for its synthetic experiment.

Samples of any shape are taken as vectors.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from ._common import Shape, _vector_length


def abide_mlp(shape: Shape = (5995,), classes: int = 2) -> nn.Module:
    """MLP of FedBN for ABIDE I (arXiv:2102.07623, section 5.2): 5995-16-16-2, BatchNorm after the first two layers."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(_vector_length("abide-mlp", shape), 16),
            bn1=nn.BatchNorm1d(16),
            relu1=nn.ReLU(),
            fc2=nn.Linear(16, 16),
            bn2=nn.BatchNorm1d(16),
            relu2=nn.ReLU(),
            fc3=nn.Linear(16, classes),
        )
    )


def synthetic_mlp(shape: Shape = (10,), classes: int = 2) -> nn.Module:
    """MLP of FedBN's synthetic experiment (arXiv:2102.07623, appendix F): 100 hidden neurons with BatchNorm, wide init.

    Weights and biases of both layers are drawn from N(0, 10^2). The paper says so of its neurons, perhaps of the hidden
    ones only; but with a narrow output layer FedBN and FedAvg hardly differ at its learning rate, 1e-5.
    """
    network = nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(_vector_length("synthetic-mlp", shape), 100),
            bn1=nn.BatchNorm1d(100),
            relu1=nn.ReLU(),
            fc2=nn.Linear(100, classes),
        )
    )
    for layer in network.children():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=10.0)
            nn.init.normal_(layer.bias, std=10.0)
    return network
