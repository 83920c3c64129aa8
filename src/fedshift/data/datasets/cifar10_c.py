"""CIFAR-10-C: CIFAR-10's test images with 19 corruptions at five severities (Hendrycks and Dietterich 2019).

arXiv:1903.12261. ``<corruption>.npy`` contains uint8 ``[50000, 32, 32, 3]``: the 10,000 test images at severity 1, then
at 2 to 5; ``labels.npy`` contains their labels.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..formats import explain_errors
from ..partition import split_stratified
from ._card import make_card, require_choices
from .single_datasets import OBJECTS

_CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression", "speckle_noise",
    "gaussian_blur", "spatter", "saturate",
)  # fmt: skip
"""The benchmark's fifteen corruptions, then the four that its authors publish for validation."""
_FIVE = ("gaussian_noise", "defocus_blur", "snow", "contrast", "pixelate")
_ARCHIVE, _FOLDER, _LABELS = "CIFAR-10-C.tar", "CIFAR-10-C", "labels.npy"
_SEVERITIES = 5


def _find(folder: Path) -> Path | None:
    for place in (folder, folder / _FOLDER):
        if (place / _LABELS).is_file():
            return place
    return folder / _ARCHIVE if (folder / _ARCHIVE).is_file() else None


CARD = make_card("cifar10-c", find=_find)


def cifar10_c(
    root: Path, *, domains: Sequence[str] = _FIVE, severity: int = 5, test_fraction: float = 0.2, seed: int = 0
) -> Federation:
    """Load CIFAR-10-C, one client for each corruption in ``domains``; no two clients share an image.

    Args:
        root: Directory of the data.
        domains: Corruptions; by default one noise, one blur, one weather and two digital corruptions.
        severity: Strength from 1 to 5.
        test_fraction: Fraction of a client's images of every class used for testing; there is no published split,
            because all images are variants of test images.
        seed: Seed of the shares and of the split.

    Returns:
        Clients with images uint8 ``[N, 3, 32, 32]``, ten classes.

    Raises:
        UsageError: A corruption or the severity is unknown, or files are missing or cannot be read.

    """
    require_choices("domains", domains, _CORRUPTIONS)
    if severity not in range(1, _SEVERITIES + 1):
        raise UsageError(f"severity={severity!r}: give 1, 2, 3, 4 or 5")
    found: Path = CARD.locate("cifar10-c", root)
    labels = _load(found, _LABELS)
    count = len(labels) // _SEVERITIES
    y: NDArray[np.int64] = labels[(severity - 1) * count : severity * count].astype(np.int64)
    order, clients = stream(seed, "cifar10-c/share").permutation(count), []
    for name, own in zip(domains, np.array_split(order, len(domains)), strict=True):
        pixels = _load(found, f"{name}.npy")
        if pixels.shape != (_SEVERITIES * count, 32, 32, 3) or pixels.dtype != np.uint8:
            raise UsageError(f"{found}: {name}.npy holds {pixels.dtype} of shape {pixels.shape}: get it again")
        rows = np.sort(own)
        x = np.ascontiguousarray(pixels[(severity - 1) * count + rows].transpose(0, 3, 1, 2))
        train, test = split_stratified(y[rows], test_fraction, stream(seed, "cifar10-c", name))
        parts = {"train": train, "test": test}
        clients.append(ClientData.from_rows(name, torch.from_numpy(x), torch.from_numpy(y[rows]), parts))
    note = f"CIFAR-10-C, severity {severity}: {', '.join(domains)}"
    return Federation(name="cifar10-c", clients=tuple(clients), classes=10, note=note, class_names=OBJECTS).check()


def _load(found: Path, name: str) -> NDArray[np.uint8]:
    """Return an array of the folder or archive, memory-mapped if it is a file."""
    with explain_errors(found / name, "an array of CIFAR-10-C"):
        if found.is_dir():
            array: NDArray[np.uint8] = np.load(found / name, mmap_mode="r", allow_pickle=False)
            return array
        with tarfile.open(found) as archive:
            member = archive.extractfile(f"{_FOLDER}/{name}")
            if member is None:
                raise ValueError("it is not a file")
            return np.asarray(np.load(io.BytesIO(member.read()), allow_pickle=False))
