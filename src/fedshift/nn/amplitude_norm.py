"""Amplitude normalization: replace the low-frequency amplitudes of every image by the federation's average.

HarmoFL (Jiang et al. 2022, arXiv:2112.10775), following the authors' public code (med-air/HarmoFL). Phases, which carry
shapes, are unchanged. The zero frequency, a channel's sum, keeps its sign: this equals the amplitude for non-negative
pixels, as in that code, and is also correct for inputs with negative values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..utils.errors import UsageError


def find_first_convolution(module: nn.Module, use: str) -> nn.Conv2d:
    """Return the first convolution of a network, which must be a Conv2d; the error begins with ``use`` of it."""
    first = next((layer for layer in module.modules() if isinstance(layer, _ConvNd)), None)
    if not isinstance(first, nn.Conv2d):
        raise UsageError(
            f"{use} at the model's first convolution, which must be a Conv2d, but it has none: use another method"
        )
    return first


class AmplitudeNorm(nn.Module):
    """Sets the amplitudes of images ``[B, C, H, W]`` at frequencies -F to F in each direction.

    ``amplitude``: ``[C, 2 F + 1, 2 F + 1]``; while it is zero everywhere, images pass unchanged. F is ``frequencies``;
    with 0, only each channel's sum is set, which is its brightness and may be negative.
    """

    amplitude: Tensor

    def __init__(self, channels: int, frequencies: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        size = 2 * frequencies + 1
        self.register_buffer("amplitude", torch.zeros(channels, size, size))

    @property
    def is_measured(self) -> Tensor:
        """Whether amplitudes are set, a bool scalar."""
        return (self.amplitude != 0).any()

    def measure(self, x: Tensor) -> Tensor:
        """Return the amplitudes of each image in ``x``, in the layout of :attr:`amplitude`."""
        return amplitudes(low_frequencies(x.to(self.amplitude.dtype), self.frequencies))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with the amplitudes replaced."""
        parts = low_frequencies(x.to(self.amplitude.dtype), self.frequencies)
        added = sum_waves(move_amplitudes(parts, self.amplitude - amplitudes(parts)), x)
        return torch.where(self.is_measured, (x + added).to(x.dtype), x)


def low_frequencies(x: Tensor, frequencies: int) -> tuple[Tensor, Tensor]:
    """Return the real and imaginary parts of the spectra of images ``[B, C, H, W]`` at frequencies -F to F.

    Each is ``[B, C, 2 F + 1, 2 F + 1]``; F is ``frequencies``. Raises :class:`UsageError` if images are too small.
    """
    cos, sin = _make_waves(x, frequencies)
    return torch.einsum("bchw,uvhw->bcuv", x, cos), -torch.einsum("bchw,uvhw->bcuv", x, sin)


def sum_waves(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return images of the size of ``like`` with the spectra of real and imaginary ``parts``.

    The inverse of :func:`low_frequencies` for images without other frequencies.
    """
    real, imaginary = parts
    cos, sin = _make_waves(like.to(real.dtype), real.shape[-1] // 2)
    summed = torch.einsum("bcuv,uvhw->bchw", real, cos) - torch.einsum("bcuv,uvhw->bchw", imaginary, sin)
    return summed / (like.shape[2] * like.shape[3])


def _make_waves(x: Tensor, frequencies: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the low frequencies over the pixels of ``x``, ``[2 F + 1, 2 F + 1, H, W]``."""
    height, width = x.shape[2:]
    if min(height, width) < 2 * frequencies + 1:
        raise UsageError(
            f"frequencies={frequencies}: images of {height} x {width} pixels allow at most "
            f"{(min(height, width) - 1) // 2} in each direction"
        )
    low = torch.arange(-frequencies, frequencies + 1, device=x.device).to(x.dtype)
    down, across = (
        low[:, None] * torch.arange(size, device=x.device) * (2 * torch.pi / size) for size in (height, width)
    )
    angle = down[:, None, :, None] + across[None, :, None, :]
    return angle.cos(), angle.sin()


def amplitudes(parts: Sequence[Tensor]) -> Tensor:
    """Return the amplitudes of real and imaginary ``parts [..., 2 F + 1, 2 F + 1]``, signed at the zero frequency."""
    real, imaginary = parts
    zero = torch.zeros(real.shape[-2:], dtype=torch.bool, device=real.device)
    zero[real.shape[-2] // 2, real.shape[-1] // 2] = True
    return torch.where(zero, real, (real.square() + imaginary.square()).sqrt())  # ONNX lacks hypot


def move_amplitudes(parts: Sequence[Tensor], by: Tensor) -> list[Tensor]:
    """Return the changes of real and imaginary ``parts`` if amplitudes change ``by`` and phases stay.

    The phase of a zero amplitude is 0.
    """
    before = amplitudes(parts)
    return [by * torch.where(before != 0, part / before, whole) for part, whole in zip(parts, (1.0, 0.0), strict=True)]
