"""What HAM10000 and Fed-ISIC2019 share: the compact files of four sites, and lesions that stay on one side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..stratification import split_stratified
from ._npz_arrays import read_arrays

SITES = ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")
"""HAM10000's four sources as its metadata call them, in the order of their numbers in Fed-ISIC2019 (1, 2, 3, 5)."""


def find_compact(folder: Path) -> dict[str, Path] | None:
    """One file for each site, with images of 32 x 32 pixels, in ``folder`` or in ``fed_isic2019_ham`` there."""
    for place in (folder, folder / "fed_isic2019_ham"):
        files = {site: place / f"{site}.npz" for site in SITES}
        if all(file.is_file() for file in files.values()):
            return files
    return None


def read_compact(file: Path, label: str) -> dict[str, dict[str, NDArray[Any]]]:
    """``{part: {x, y, lesion}}`` of a site: images ``[N, H, W, 3]``, and the labels called ``label``."""
    kinds = {"x": "x", "y": label, "lesion": "lesion"}
    arrays = read_arrays(file, [f"{kind}_{part}" for kind in kinds.values() for part in ("train", "test")])
    return {part: {name: arrays[f"{kind}_{part}"] for name, kind in kinds.items()} for part in ("train", "test")}


def find_metadata(folder: Path) -> Path | None:
    """HAM10000's table of images as published or as commonly renamed."""
    names = ("HAM10000_metadata", "HAM10000_metadata.csv", "HAM10000_metadata.tab")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def split_by_lesion(
    lesions: NDArray[Any], labels: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of the images for training and testing, all images of a lesion on one side.

    ``fraction`` of the lesions of every label is for testing. Raises :class:`UsageError` for a fraction outside 0..1.
    """
    _, first, which = np.unique(lesions, return_index=True, return_inverse=True)
    drawn = split_stratified(labels[first], fraction, stream(seed, "lesions"))[1]
    test = np.isin(which, drawn)
    if test.all() or not test.any():
        raise UsageError(f"test_fraction={fraction:g} leaves no image on one side: choose another")
    return np.flatnonzero(~test), np.flatnonzero(test)
