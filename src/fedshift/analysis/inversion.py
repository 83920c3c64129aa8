"""Inversion of uploads: terms of the attacker's objective, closed forms, and the quality of reconstructions.

Gradient matching after Geiping et al. 2020 (arXiv:2003.14053), equation 4: one minus the cosine similarity of all
gradients together, plus total variation. The prior on BatchNorm's statistics follows Yin et al. 2021
(arXiv:2104.07586), section 3.3; here deviations are divided by the layer's standard deviation, so that layers
count equally. Labels: for one sample the class of the only negative entry of the last bias's gradient (Zhao et al.
2020, arXiv:2001.02610); for several, classes are counted one after another, which is our approximation.

PSNR is 10 log10(1 / MSE) for pixels in [0, 1]. SSIM: Wang et al. 2004, "Image Quality Assessment: From Error Visibility
to Structural Similarity", IEEE Transactions on Image Processing 13(4), equation 13 with a Gaussian window of 11 pixels
and standard deviation 1.5, K1 = 0.01, K2 = 0.03, over the windows within the image.

Suffixes: B images, C channels, H W pixels, K classes, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

EPSILON = 1e-5
"""Constant added to variances, as in BatchNorm."""
WINDOW, DEVIATION = 11, 1.5
"""Side of SSIM's window in pixels, and its standard deviation."""


def gradient_distance(candidate: Sequence[Tensor], observed: Sequence[Tensor]) -> Tensor:
    """Return one minus the cosine similarity of two lists of gradients, each taken as one vector."""
    dot = sum((one * other).sum() for one, other in zip(candidate, observed, strict=True))
    lengths = [torch.stack([each.square().sum() for each in side]).sum().sqrt() for side in (candidate, observed)]
    return 1 - dot / (lengths[0] * lengths[1]).clamp(min=1e-30)


def total_variation(x_BCHW: Tensor) -> Tensor:
    """Return the mean absolute difference of neighboring pixels, across plus down (anisotropic)."""
    across = (x_BCHW[..., :, 1:] - x_BCHW[..., :, :-1]).abs().mean()
    return across + (x_BCHW[..., 1:, :] - x_BCHW[..., :-1, :]).abs().mean()


def invert_running(before: Tensor, after: Tensor, momentum: float, steps: int = 1) -> Tensor:
    """Return the batch's statistic from running statistics before and after ``steps`` steps of BatchNorm.

    A step sets r to (1 - m) r + m b. After one step the result is exactly b; after more, it is the mean of the steps' b
    with weights that grow by 1 / (1 - m) per step.
    """
    kept = (1 - momentum) ** steps
    return (after - kept * before) / (1 - kept)


def statistics_distance(inputs: Tensor, mean_C: Tensor, variance_C: Tensor) -> Tensor:
    """Return the distance of a BatchNorm layer's inputs ``[B, C, ...]`` from a batch mean and unbiased variance.

    The mean over channels of the squared deviations of mean and standard deviation, in units of the standard deviation.
    """
    over = (0, *range(2, inputs.ndim))
    variance, mean = torch.var_mean(inputs, dim=over)
    scale = variance_C + EPSILON
    spread = (variance + EPSILON).sqrt() - scale.sqrt()
    return (((mean - mean_C).square() + spread.square()) / scale).mean()


def infer_labels(bias_grad_K: Tensor, count: int) -> Tensor:
    """Return the labels of a batch of ``count`` samples, ascending, from the gradient of the last layer's bias.

    Under the mean cross-entropy, this gradient is the mean predicted probability of each class minus the class's share
    of the batch, so that only classes of the batch can be negative, and a single sample's label is exact. Labels are
    added greedily: each maximizes the cosine similarity of the gradient to uniform probabilities minus the shares,
    which is independent of the gradient's norm, since clipping may have changed it.
    """
    classes = len(bias_grad_K)
    counts_K = bias_grad_K.new_zeros(classes)
    for drawn in range(1, count + 1):
        expected_KK = 1 / classes - (counts_K + torch.eye(classes).to(bias_grad_K)) / drawn
        counts_K[F.cosine_similarity(expected_KK, bias_grad_K[None], dim=1).argmax()] += 1
    return torch.repeat_interleave(torch.arange(classes), counts_K.long().cpu())


def match_images(images_BCHW: Tensor, originals_BCHW: Tensor) -> Tensor:
    """Return ``images`` reordered to match ``originals`` with the smallest sum of squared errors."""
    errors_BB = torch.cdist(originals_BCHW.flatten(1).double(), images_BCHW.flatten(1).double()).square()
    return images_BCHW[torch.from_numpy(linear_sum_assignment(errors_BB.cpu().numpy())[1])]


def compute_psnr(images_BCHW: Tensor, originals_BCHW: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in decibels, ``[B]``; infinite for equal images."""
    return -10 * (images_BCHW.double() - originals_BCHW.double()).square().flatten(1).mean(dim=1).log10()


def compute_ssim(images_BCHW: Tensor, originals_BCHW: Tensor) -> Tensor:
    """Return the structural similarity of each image, ``[B]``, the mean over windows and channels.

    Images smaller than the window use a smaller window.
    """
    one, other = images_BCHW.double(), originals_BCHW.double()
    side = min(WINDOW, *(size - (size + 1) % 2 for size in one.shape[2:]))
    place = torch.arange(side, dtype=torch.float64, device=one.device) - side // 2
    line = torch.exp(-place.square() / (2 * DEVIATION**2))
    window = torch.outer(line, line)[None, None] / line.sum().square()

    def blur(x_BCHW: Tensor) -> Tensor:
        blurred = F.conv2d(x_BCHW.flatten(0, 1)[:, None], window)
        return blurred.reshape(*x_BCHW.shape[:2], *blurred.shape[2:])

    mean_one, mean_other = blur(one), blur(other)
    variances = blur(one.square()) - mean_one.square() + blur(other.square()) - mean_other.square()
    covariance = blur(one * other) - mean_one * mean_other
    c1, c2 = 0.01**2, 0.03**2
    likeness: Tensor = (2 * mean_one * mean_other + c1) / (mean_one.square() + mean_other.square() + c1)
    return (likeness * (2 * covariance + c2) / (variances + c2)).flatten(1).mean(dim=1)


def correlate_images(images_BCHW: Tensor, candidates_NCHW: Tensor) -> Tensor:
    """Return the correlation of each image with each candidate, ``[B, N]``, with centered channels.

    It compares shapes independently of the brightness of a channel and the contrast of the image.
    """
    one, other = (
        F.normalize((images.double() - images.double().mean(dim=(2, 3), keepdim=True)).flatten(1))
        for images in (images_BCHW, candidates_NCHW)
    )
    correlation: Tensor = one @ other.T
    return correlation
