"""FEMNIST: handwritten digits and letters, one client for each writer (LEAF; Caldas et al. 2018, arXiv:1812.01097).

LEAF's script (``./preprocess.sh -s niid --sf 0.05 -k 0 -t sample``) writes ``data/train/*.json`` and
``data/test/*.json``. Each contains an object with ``users`` and ``user_data``; the latter has, for each user, ``x``
(images of 784 numbers from 0 to 1) and ``y`` (``data/femnist/preprocess/data_to_json.py`` in
https://github.com/TalwalkarLab/leaf).
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...utils.errors import UsageError
from ...utils.files import open_regular
from ..federation import ClientData, Federation
from ..formats import explain_errors
from ..samples import Samples
from ._card import make_card

_CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)


class _Files(NamedTuple):
    train: tuple[Path, ...]
    test: tuple[Path, ...]


def _find(folder: Path) -> _Files | None:
    for place in (folder, folder / "data"):
        found = _Files(*(tuple(sorted((place / part).glob("*.json"))) for part in ("train", "test")))
        if all(found):
            return found
    return None


CARD = make_card("femnist", find=_find)


def femnist(root: Path, *, writers: int | None = None, least: int = 10) -> Federation:
    """Load FEMNIST as LEAF writes it, one client for each writer.

    Args:
        root: Directory of the data.
        writers: Number of writers, the first by name; None: all.
        least: Minimum number of training images; writers with fewer are excluded.

    Returns:
        Clients with images uint8 ``[N, 1, 28, 28]``; 62 classes: digits, uppercase and lowercase letters.

    Raises:
        UsageError: Files are missing or cannot be read, no writer has both training and test data, or there are fewer
            than ``writers``.

    """
    for name, value in (("writers", writers), ("least", least)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}: must be at least 1")
    found: _Files = CARD.locate("femnist", root)
    train, test = (_read(files) for files in found)
    names = sorted(name for name in train if name in test and len(train[name]) >= least)
    if not names:
        raise UsageError(
            f"{found.train[0].parent} and {found.test[0].parent} share no writer with {least} training images: let "
            "LEAF's preprocess.sh split each writer's images (-t sample)"
        )
    if writers is not None and writers > len(names):
        raise UsageError(f"writers={writers}: {len(names)} have {least} training images; ask for at most as many")
    names = names[:writers]
    clients = tuple(ClientData.from_splits(name, {"train": train[name], "test": test[name]}) for name in names)
    note = f"FEMNIST by writer, {len(names)} of the writers with {least} training images or more"
    made = Federation(name="femnist", clients=clients, classes=len(_CLASSES), note=note, class_names=_CLASSES)
    return made.check(allow_single_class=True)


def _read(files: tuple[Path, ...]) -> dict[str, Samples]:
    """Return the images of each writer."""
    found: dict[str, Samples] = {}
    for file in files:
        with explain_errors(file, "LEAF's FEMNIST"), open_regular(file) as content:
            written: dict[str, Any] = json.load(content)
            for name in written["users"]:
                own = written["user_data"][name]
                x, y = np.asarray(own["x"], dtype=np.float32), np.asarray(own["y"], dtype=np.int64)
                if x.shape != (len(y), 784) or not (x >= 0).all() or not (x <= 1).all():
                    raise ValueError(f"images of {name} are not 784 numbers from 0 to 1")
                pixels = np.rint(255 * x).astype(np.uint8).reshape(-1, 1, 28, 28)
                found[name] = Samples(x=torch.from_numpy(pixels), y=torch.from_numpy(y))
    return found
