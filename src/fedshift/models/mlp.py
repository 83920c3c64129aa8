"""Fully connected networks of FedBN (Li et al. 2021, arXiv:2102.07623): ABIDE I, its synthetic experiment, its theory.

FedMMB's 2FNN comes from FedAvg (McMahan et al. 2017, arXiv:1602.05629, section 3), with PyTorch's initialization.

Samples of any shape are taken as vectors. The theory's networks are equation 1 and the toy example. With S the client's
second moments of inputs, v' S v is the mean square of v.x over the client's samples. So the norm of v in the theory is
the statistic of a BatchNorm that only scales, on a full batch: ``ScaleNorm``, which FedBN keeps local.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._common import Shape, _dense_layers, _vector_length


def linear(shape: Shape = (13,), classes: int = 2) -> nn.Module:
    """A linear layer: logistic regression, linear regression or Cox's model; FLamby's baseline (arXiv:2210.04620)."""
    layers = {"flatten": nn.Flatten(), "linear": nn.Linear(_vector_length("linear", shape), classes)}
    return nn.Sequential(OrderedDict(layers))


def abide_mlp(shape: Shape = (5995,), classes: int = 2) -> nn.Module:
    """MLP of FedBN for ABIDE I (arXiv:2102.07623, section 5.2): 5995-16-16-2, BatchNorm after the first two layers."""
    dense = _dense_layers((_vector_length("abide-mlp", shape), 16, 16, classes), 1, norm=True)
    return nn.Sequential(OrderedDict({"flatten": nn.Flatten()} | dense))


def synthetic_mlp(shape: Shape = (10,), classes: int = 2) -> nn.Module:
    """MLP of FedBN's synthetic experiment (arXiv:2102.07623, appendix F): 100 hidden neurons with BatchNorm, wide init.

    Weights and biases of both layers are drawn from N(0, 10^2). The paper states this for its neurons, perhaps for the
    hidden ones only; but with a narrow output layer FedBN and FedAvg hardly differ at its learning rate, 1e-5.
    """
    dense = _dense_layers((_vector_length("synthetic-mlp", shape), 100, classes), 1, norm=True)
    network = nn.Sequential(OrderedDict({"flatten": nn.Flatten()} | dense))
    for layer in network.children():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=10.0)
            nn.init.normal_(layer.bias, std=10.0)
    return network


def fnn2(shape: Shape = (1, 28, 28), classes: int = 10) -> nn.Module:
    """2FNN of FedSMB and FedMMB (arXiv:2011.07006): two hidden FC layers (200, 200); 199,210 parameters."""
    first = nn.Linear(_vector_length("fnn2", shape), 200)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, classes))


class ScaleNorm(_BatchNorm):
    """``weight * x / s`` for ``x [N, F]``: BatchNorm without centering and without shift.

    In training ``s`` is the batch's root mean square (``about_mean``: its standard deviation). In evaluation it comes
    from the last training batch, which for full batches, as in the paper, contains all samples; another ``momentum``
    averages over batches as in BatchNorm. ``running_var`` holds its square; ``running_mean`` stays zero.
    """

    def __init__(self, features: int, *, about_mean: bool = False) -> None:
        super().__init__(features, eps=1e-12, momentum=1.0)
        self.register_parameter("bias", None)
        self.about_mean = about_mean

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 2 or (self.training and len(input) < 2):
            raise ValueError(f"expected [N, F], in training more than 1 value per channel, not {tuple(input.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x [N, F]``; in training also record the scale. Raise ValueError for one sample, as BatchNorm does."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        square = x.var(dim=0, correction=0) if self.about_mean else x.square().mean(dim=0)
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.to(x.dtype) if self.momentum is None else self.momentum
        self.running_var.mul_(1 - share).add_(share * square.detach())
        return self.weight * x * torch.rsqrt(square + self.eps)


class _Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


def two_layer(shape: Shape = (10,), classes: int = 1, *, width: int = 100, alpha: float = 1.0) -> nn.Module:
    """Network of FedBN's theory (arXiv:2102.07623, equation 1): sum of c_k relu(gamma_k v_k.x / |v_k|_S) / sqrt(m).

    ``hidden.weight [m, d]`` is v, drawn from N(0, alpha^2); ``norm.weight [m]`` is gamma, at first ``|v_k| / alpha``;
    ``top.weight [classes, m]`` is c / sqrt(m), signs that are never trained. ``width`` is m. One class: a regression.
    """
    hidden = nn.Linear(_vector_length("two-layer", shape), width, bias=False)
    norm, top = ScaleNorm(width), nn.Linear(width, classes, bias=False).requires_grad_(False)
    nn.init.normal_(hidden.weight, std=alpha)
    with torch.no_grad():
        norm.weight.copy_(hidden.weight.norm(dim=1) / alpha)
        top.weight.bernoulli_(0.5).mul_(2).sub_(1).div_(width**0.5)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), hidden=hidden, norm=norm, relu=nn.ReLU(), top=top))


def cosine(shape: Shape = (1,), classes: int = 1) -> nn.Module:
    """Toy example of FedBN (arXiv:2102.07623, figures 1 and 2): cos(w gamma x / s), s the client's deviation."""
    length = _vector_length("cosine", shape)
    norm, linear = ScaleNorm(length, about_mean=True), nn.Linear(length, classes, bias=False)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), norm=norm, linear=linear, cos=_Cosine()))
