"""Make the embedded nuclei: `python benchmarks/make_nuclei.py DIR`, where DIR holds one .npz file for each source.

A file has ``x_train, x_test`` (uint8 ``[N, 128, 128, 3]``) and ``m_train, m_test`` (uint8 ``[N, 128, 128]``, 1 =
nucleus), made as LICENSE.md beside the pictures says. Of each split at most 48 and 16 pictures are taken, at even
distances in the file; sides are halved (mean of four pixels; of masks: nucleus where two or more of four are).
The pictures of a split become one PNG, eight in a row, and so do their masks, of one bit. Gray stays gray.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from fedshift.data.nuclei import CLIENTS, PICTURES, SIDE

MOST = {"train": 48, "test": 16}
ACROSS = 8


def halve(x):
    """Return the mean of each 2 x 2 pixels of ``[N, 128, 128, ...]``."""
    return x.reshape(len(x), SIDE, 2, SIDE, 2, *x.shape[3:]).mean(axis=(2, 4))


def tile(x):
    """Return ``[N, S, S, ...]`` as one picture, ACROSS in a row, black where the last row ends early."""
    rows = -(-len(x) // ACROSS)
    x = np.concatenate([x, np.zeros_like(x[: rows * ACROSS - len(x)])])
    x = x.reshape(rows, ACROSS, SIDE, SIDE, *x.shape[3:]).swapaxes(1, 2)
    return x.reshape(rows * SIDE, ACROSS * SIDE, *x.shape[4:])


def main(directory):
    for name in CLIENTS:
        arrays = np.load(Path(directory, f"{name}.npz"))
        for split, most in MOST.items():
            x, masks = arrays[f"x_{split}"], arrays[f"m_{split}"]
            taken = np.linspace(0, len(x) - 1, min(most, len(x))).round().astype(int)
            x = halve(x[taken]).round().astype(np.uint8)
            x = x[..., 0] if (x == x[..., :1]).all() else x
            masks = halve(masks[taken]) >= 0.5
            Image.fromarray(tile(x)).save(PICTURES / f"{name}-{split}.png", optimize=True)
            Image.fromarray(tile(masks)).save(PICTURES / f"{name}-{split}-masks.png", optimize=True)
            print(name, split, len(x))


if __name__ == "__main__":
    main(*sys.argv[1:])
