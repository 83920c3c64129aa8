"""Inputs of the shift tests: principal components, simple statistics of images, and BatchNorm's inputs in a network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.samples import Samples
from ..models.digits import small_cnn
from ..models.mlp import abide_mlp
from ..utils.random_streams import key_bits, stream, torch_stream
from .shift_tests import Floats, Ints, Moments

PIXELS, COMPONENTS = 32, 50
"""Maximum height and width of images, larger ones are reduced; number of principal components."""

STEPS, BATCH = 60, 64
"""Training of the small network: number of batches, and samples in each."""


def gather_samples(splits: Sequence[Samples], rows: Sequence[Ints]) -> Tensor:
    """Gather the samples at ``rows`` of each split as float32 ``[N, C, H, W]``, pixels from 0 to 1, or ``[N, D]``."""
    parts = []
    pieces = (
        (split, some[piece]) for split, some in zip(splits, rows, strict=True) for piece in split.pieces(len(some))
    )
    for split, some in pieces:
        x = split.read(torch.from_numpy(some))
        x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
        if x.ndim == 4 and max(x.shape[2:]) > PIXELS:
            height, width = (min(size, PIXELS) for size in x.shape[2:])
            x = F.interpolate(x, size=(height, width), mode="area")
        parts.append(x if x.ndim == 4 else x.flatten(1))
    return torch.cat(parts)


def to_vectors(x: Tensor) -> Floats:
    """Return samples as centered vectors ``[N, D]``; pixels keep their scale, columns of a table get unit variance."""
    vectors = x.flatten(1).double().numpy()
    return vectors - vectors.mean(axis=0) if x.ndim == 4 else _standardize(vectors)


def appearance_features(x: Tensor) -> Floats:
    """Return each channel's mean, contrast and mean difference of neighboring pixels; no columns for vectors."""
    if x.ndim != 4:
        return np.empty((len(x), 0))
    steps = [x.diff(dim=dim).abs().mean(dim=(2, 3)) for dim in (2, 3) if x.shape[dim] > 1]
    return torch.cat([x.mean(dim=(2, 3)), x.std(dim=(2, 3), correction=0), *steps], dim=1).double().numpy()


def principal_components(vectors: NDArray[np.floating], seed: int) -> Floats:
    """Return the scores of the first :data:`COMPONENTS` principal components, ``[N, at most 50]``."""
    from sklearn.utils.extmath import randomized_svd  # half a second, for which each run would wait

    centered = vectors - vectors.mean(axis=0)
    kept = min(COMPONENTS, *centered.shape)
    state = key_bits(seed, "diagnose/components") % 2**32
    left, scale, _ = randomized_svd(centered, kept, random_state=state)
    scores: Floats = left * scale
    return scores


def classifier_features(scores: Floats, extra: Floats | None = None) -> Floats:
    """Return the classifier's inputs: components, their squares (which reflect contrast and noise), and ``extra``."""
    return _standardize(np.concatenate([scores, scores**2, *([] if extra is None else [extra])], axis=1))


def warm_up(x: Tensor, y: Tensor, classes: int, seed: int) -> list[Moments]:
    """Record the inputs of each BatchNorm layer of a small network after :data:`STEPS` steps on the pooled samples.

    The network is ``small-cnn`` for images and ``abide-mlp`` for vectors. Training ignores clients, so that permuting
    them needs no new training.
    """
    images = x.ndim == 4 and min(x.shape[2:]) >= 4
    x = (x - x.mean()) / x.std().clamp_min(1e-6) if images else torch.from_numpy(_standardize(to_vectors(x))).float()
    with torch_stream(seed, "diagnose/network"):
        network = (small_cnn if images else abide_mlp)(tuple(x.shape[1:]), classes)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    batches = stream(seed, "diagnose/batches")
    for _ in range(STEPS):
        rows = torch.from_numpy(batches.choice(len(x), min(BATCH, len(x)), replace=False))
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(network(x[rows]), y[rows]))
        optimizer.step()
    return _record_moments(network.eval(), x)


@torch.no_grad()
def _record_moments(network: nn.Module, x: Tensor) -> list[Moments]:
    recorded: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def record(name: str, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].reshape(*inputs[0].shape[:2], -1)
        recorded.setdefault(name, []).append((values.mean(dim=2), values.square().mean(dim=2)))

    for name, layer in network.named_modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.register_forward_pre_hook(partial(record, name))
    for start in range(0, len(x), 256):
        network(x[start : start + 256])
    joined = {name: [torch.cat(each).numpy() for each in zip(*parts, strict=True)] for name, parts in recorded.items()}
    return [Moments(layer=name, mean=mean, square=square) for name, (mean, square) in joined.items()]


def _standardize(vectors: Floats) -> Floats:
    centered = vectors - vectors.mean(axis=0)
    scale = centered.std(axis=0)
    scaled: Floats = centered / np.where(scale > 1e-9, scale, 1)
    return scaled
