"""The networks in which FedBN (Li et al. 2021, arXiv:2102.07623) is analyzed: equation 1, and its toy example.

With S the client's second moments of inputs, v' S v is the mean square of v.x over the client's samples. So the norm of
v in the theory is what a BatchNorm that only scales measures on a full batch: ``ScaleNorm``, which FedBN keeps local.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._common import Shape, _vector_length


class ScaleNorm(_BatchNorm):
    """``weight * x / s`` for ``x [N, F]``: BatchNorm without centering and without shift.

    In training ``s`` is the batch's root mean square (``about_mean``: its standard deviation). In evaluation it is that
    of the last training batch, which under full batches, as in the paper, is that of all samples; ``momentum`` below 1
    averages over batches as in BatchNorm. ``running_var`` holds its square; ``running_mean`` stays zero.
    """

    def __init__(self, features: int, *, about_mean: bool = False, momentum: float | None = 1.0) -> None:
        super().__init__(features, eps=1e-12, momentum=momentum)
        self.register_parameter("bias", None)
        self.about_mean = about_mean

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 2 or (self.training and len(input) < 2):
            raise ValueError(f"expected [N, F], in training more than 1 value per channel, not {tuple(input.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x [N, F]``; in training also note the scale. One sample has none: ValueError, as in BatchNorm."""
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
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            norm=ScaleNorm(length, about_mean=True),
            linear=nn.Linear(length, classes, bias=False),
            cos=_Cosine(),
        )
    )
