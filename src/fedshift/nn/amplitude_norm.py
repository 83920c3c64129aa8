"""Amplitude normalization: the low frequencies of every image get the amplitudes that the federation's have on average.

HarmoFL (Jiang et al. 2022, arXiv:2112.10775), by the authors' public code (med-air/HarmoFL). Phases, which carry
shapes, stay as they are. The zero frequency is a channel's sum and counts with its sign: the same as its amplitude for
pixels of 0 and more, which that code has, and right for inputs that are shifted to have negative values, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..utils.errors import UsageError


class AmplitudeNorm(nn.Module):
    """Gives images ``[B, C, H, W]`` the ``amplitude [C, 2 F + 1, 2 F + 1]`` at frequencies -F to F in each direction.

    F is ``frequencies``; with 0 it is each channel's sum alone, which is its brightness and may be negative. While
    ``amplitude`` is zero everywhere, images pass unchanged.
    """

    amplitude: Tensor

    def __init__(self, channels: int, frequencies: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        size = 2 * frequencies + 1
        self.register_buffer("amplitude", torch.zeros(channels, size, size))

    @property
    def is_measured(self) -> Tensor:
        """Whether there are amplitudes to give, a bool scalar."""
        return (self.amplitude != 0).any()

    def measure(self, x: Tensor) -> Tensor:
        """Return the amplitudes of ``x``, as :attr:`amplitude` holds them, of each image."""
        return amplitudes(low_frequencies(x.to(self.amplitude.dtype), self.frequencies))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with these amplitudes."""
        parts = low_frequencies(x.to(self.amplitude.dtype), self.frequencies)
        added = sum_waves(move_amplitudes(parts, self.amplitude - amplitudes(parts)), x)
        return torch.where(self.is_measured, (x + added).to(x.dtype), x)

    def extra_repr(self) -> str:
        """Frequencies, as the module prints itself."""
        return f"{self.amplitude.shape[0]}, frequencies={self.frequencies}"


def low_frequencies(x: Tensor, frequencies: int) -> tuple[Tensor, Tensor]:
    """Return real and imaginary part of the spectra of images ``[B, C, H, W]`` at frequencies -F to F each way.

    Each is ``[B, C, 2 F + 1, 2 F + 1]``; F is ``frequencies``. Raises :class:`UsageError` where images are too small.
    """
    cos, sin = _make_waves(x, frequencies)
    return torch.einsum("bchw,uvhw->bcuv", x, cos), -torch.einsum("bchw,uvhw->bcuv", x, sin)


def sum_waves(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the images with the spectra whose real and imaginary ``parts`` are given, of the size of ``like``.

    It is the inverse of :func:`low_frequencies` where all other frequencies are zero.
    """
    real, imaginary = parts
    cos, sin = _make_waves(like.to(real.dtype), real.shape[-1] // 2)
    summed = torch.einsum("bcuv,uvhw->bchw", real, cos) - torch.einsum("bcuv,uvhw->bchw", imaginary, sin)
    return summed / (like.shape[2] * like.shape[3])


def _make_waves(x: Tensor, frequencies: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the low frequencies over the pixels of ``x``, ``[2 F + 1, 2 F + 1, H, W]``."""
    height, width = x.shape[2:]
    if min(height, width) < 2 * frequencies + 1:
        raise UsageError(
            f"frequencies={frequencies}: images of {height} x {width} pixels have no more than "
            f"{(min(height, width) - 1) // 2} in each direction"
        )
    low = torch.arange(-frequencies, frequencies + 1, device=x.device).to(x.dtype)
    down, across = (
        low[:, None] * torch.arange(size, device=x.device) * (2 * torch.pi / size) for size in (height, width)
    )
    angle = down[:, None, :, None] + across[None, :, None, :]
    return angle.cos(), angle.sin()


def amplitudes(parts: Sequence[Tensor]) -> Tensor:
    """Return the amplitudes of real and imaginary ``parts [..., 2 F + 1, 2 F + 1]``; the zero frequency has a sign."""
    real, imaginary = parts
    zero = torch.zeros(real.shape[-2:], dtype=torch.bool, device=real.device)
    zero[real.shape[-2] // 2, real.shape[-1] // 2] = True
    return torch.where(zero, real, (real.square() + imaginary.square()).sqrt())  # ONNX knows no hypot


def move_amplitudes(parts: Sequence[Tensor], by: Tensor) -> list[Tensor]:
    """Return what real and imaginary ``parts`` gain where amplitudes move ``by`` so much and phases stay.

    Where there is no amplitude, the phase is 0.
    """
    before = amplitudes(parts)
    return [by * torch.where(before != 0, part / before, whole) for part, whole in zip(parts, (1.0, 0.0), strict=True)]
