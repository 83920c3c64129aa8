"""ResNet for signals: time series of one or more channels, such as the leads of an electrocardiogram.

Wang, Yan & Oates 2016 (arXiv:1611.06455), section II.C: three residual blocks of 64, 128 and 128 channels, each with
convolutions of 8, 5 and 3 samples, then the average over time and the output layer. As in the authors' network,
outputs have the length of inputs (for 8 samples, 3 zeros come before and 4 after), and the sum precedes the last ReLU
of a block.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from ..utils.errors import UsageError
from ._common import Shape


def _norm(channels: int) -> nn.BatchNorm1d:
    """Return BatchNorm over samples and time; as for images, GroupNorm in its place has 32 groups, or 8 if narrow."""
    norm = nn.BatchNorm1d(channels)
    norm.groups = 32 if channels >= 32 else 8  # type: ignore[assignment]
    return norm


class _SignalBlock(nn.Module):
    """Three convolutions whose result is added to BatchNorm of the input, or of a 1-sample convolution of it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(before, after, 8), _norm(after)
        self.conv2, self.bn2 = nn.Conv1d(after, after, 5, padding=2), _norm(after)
        self.conv3, self.bn3 = nn.Conv1d(after, after, 3, padding=1), _norm(after)
        wider = [nn.Conv1d(before, after, 1)] if before != after else []
        self.shortcut = nn.Sequential(*wider, _norm(after))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [N, before, L]`` to ``[N, after, L]``."""
        y = relu(self.bn1(self.conv1(pad(x, (3, 4)))))
        y = relu(self.bn2(self.conv2(y)))
        return relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet_1d(shape: Shape = (1, 128), classes: int = 2, *, width: int = 64) -> nn.Module:
    """ResNet for signals [C, L] of any length (Wang et al. 2016, arXiv:1611.06455, figure 1c); 504,258 parameters.

    ``width``: channels of the first block; the others have twice as many.
    """
    if len(shape) != 2 or min(shape) < 1:
        raise UsageError(
            f"model resnet-1d takes signals (C, L) of 1 or more channels and samples, not samples of shape {shape}: "
            "choose another model, or give such signals (x[:, None] adds the axis of one channel)"
        )
    if width < 1:
        raise UsageError(f"width={width}: give the number of channels of the first block, 64 as in the paper")
    widths = (shape[0], width, 2 * width, 2 * width)
    blocks = {f"block{i}": _SignalBlock(*ends) for i, ends in enumerate(pairwise(widths), start=1)}
    top = {"avgpool": nn.AdaptiveAvgPool1d(1), "flatten": nn.Flatten(), "fc": nn.Linear(2 * width, classes)}
    return nn.Sequential(OrderedDict({**blocks, **top}))
