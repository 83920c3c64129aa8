"""DP-SGD: differential privacy for samples; the client clips each sample's gradient and adds noise.

Abadi et al. 2016, arXiv:1607.00133, Algorithm 1. A local step on a batch of B samples with gradients g_i, each over all
trained parameters together, follows (1/B) (sum_i g_i min(1, C / |g_i|) + N(0, (z C)^2)). The paper's accounting relies
on random batches; here an epoch visits every sample once, so that each epoch is one Gaussian mechanism for every
sample, and epsilon is accounted without amplification.

All further use of the gradients, and of models trained with them, is postprocessing. Noise that is not ``secret`` is a
function of the seed, the client and the step: reproducible, but without privacy.
"""

from collections.abc import Iterable
from math import inf

import torch
from torch import Tensor

from ..core.method import Method, method, require
from ..nn.dropout import draw_uniform
from ..utils.random_streams import draw_secret_normal
from ..utils.state import State
from .dp import GaussianNoise


class PrivateGradients(GaussianNoise):
    """The mean of gradients of samples."""

    def combine_samples(self, samples: Iterable[State], key: Tensor) -> State:
        total: State = {}
        count = 0
        for grads in samples:
            squares = [grad.reshape(len(grad), -1).square().sum(dim=1) for grad in grads.values()]
            norms_B = torch.stack(squares).sum(dim=0).sqrt()
            factors_B = self.clipping_norm / norms_B.clamp(min=self.clipping_norm)
            clipped = {name: torch.tensordot(factors_B, grad, dims=1) for name, grad in grads.items()}
            total = {name: total[name] + grad for name, grad in clipped.items()} if total else clipped
            count += len(norms_B)
        if self.noise_multiplier:
            sizes = [grad.numel() for grad in total.values()]
            scale = self.noise_multiplier * self.clipping_norm
            noise = dict(zip(total, torch.split(self._draw_noise(sum(sizes), key), sizes), strict=True))
            total = {name: grad + scale * noise[name].reshape(grad.shape).to(grad) for name, grad in total.items()}
        return {name: grad / count for name, grad in total.items()}

    def _draw_noise(self, count: int, key: Tensor) -> Tensor:
        """Return ``count`` standard normal draws, float64."""
        if self.secret:
            return draw_secret_normal(count)
        noise: Tensor = torch.special.ndtri(draw_uniform(key, 0, count))
        return noise


@method
def dp_sgd(
    base: Method, *, clipping_norm: float = 1.0, noise_multiplier: float = 1.0, delta: float = 1e-5,
    secret: bool = False,
) -> Method:  # fmt: skip
    """Clip the gradient of every sample in the local steps of ``base``, and add noise to their sum.

    Args:
        base: A method on a network without BatchNorm: ``gn``, ``ln``, ``nonorm`` or ``fedwon``, or composed with these.
        clipping_norm: Maximum norm of a sample's gradient, over all trained parameters.
        noise_multiplier: Standard deviation of the noise on the sum of gradients, relative to ``clipping_norm``.
        delta: The delta for which epsilon is printed.
        secret: Whether the operating system of the machine that holds the samples draws the noise, which nobody can
            reproduce. Epsilon holds only in this case; otherwise anyone who knows the seed can subtract the noise.

    """
    require(clipping_norm < inf, f"clipping_norm={clipping_norm:g}: give a finite clip")
    return base.with_rule(PrivateGradients(clipping_norm, noise_multiplier, delta, secret))
