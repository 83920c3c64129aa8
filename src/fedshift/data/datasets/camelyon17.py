"""Camelyon17: patches of lymph nodes from slides of five hospitals, with or without tumor (Bandi et al. 2019).

Patches and their list are from WILDS (Koh et al. 2021, arXiv:2012.07421): ``metadata.csv`` with a row for each patch of
96 x 96 pixels, and ``patches/patient_<p>_node_<n>/patch_patient_<p>_node_<n>_x_<x>_y_<y>.png``
(``wilds/datasets/camelyon17_dataset.py`` in https://github.com/p-lambda/wilds).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..federation import Federation
from ..files.read_options import Progress
from ..formats import read_csv
from ..partition import draw_units
from ._card import make_card, require_choices
from ._file_lists import LISTED, limit_lists, read_listed

_HOSPITALS = tuple(f"hospital_{number}" for number in range(5))
_TABLE, _PATCHES = "metadata.csv", "patches"


def _find(folder: Path) -> Path | None:
    places = (folder, folder / "camelyon17_v1.0")
    return next((place for place in places if (place / _TABLE).is_file() and (place / _PATCHES).is_dir()), None)


CARD = make_card("camelyon17", find=_find)


def camelyon17(
    root: Path,
    *,
    domains: tuple[str, ...] = _HOSPITALS,
    samples: int | None = None,
    size: int = 96,
    test_fraction: float = 0.2,
    seed: int = 0,
    progress: Progress | None = None,
) -> Federation:
    """Load Camelyon17 as WILDS publishes it, one client for each hospital.

    WILDS trains on hospitals 0, 3 and 4, selects on 1 and tests on 2, which corresponds to ``--newcomers hospital_2``.
    Patches of a slide are similar, so whole slides of each hospital are used for testing.

    Args:
        root: Directory of the data.
        domains: Hospitals.
        samples: Number of training patches per hospital, drawn once; None: all.
        size: Side of the images in pixels.
        test_fraction: Fraction of a hospital's slides used for testing, at least one.
        seed: Seed of the drawn slides.
        progress: Called with ``(what is read, done, total)``.

    Returns:
        Clients with images uint8 ``[N, 3, size, size]``; label 1 means tumor in the center of the patch.

    Raises:
        UsageError: A hospital is unknown, or files are missing or cannot be read.

    """
    found: Path = CARD.locate("camelyon17", root)
    require_choices("domains", domains, _HOSPITALS)
    rows = read_csv(found / _TABLE, "WILDS' table of patches", _read_patch)
    table, lists = pd.DataFrame(rows, columns=["path", "label", "slide", "hospital"]), {}
    for name in domains:
        own = table[table["hospital"] == name]
        slides = np.unique(own["slide"])
        if len(slides) < 2:
            raise UsageError(f"{found / _TABLE} has {len(slides)} slide of {name}: two are needed, one for testing")
        tested = draw_units(len(slides), test_fraction, stream(seed, "camelyon17", name))
        lists[name] = own.assign(part=np.where(own["slide"].isin(slides[tested]), "test", "train"))[LISTED]
    if samples is not None:
        lists = limit_lists(lists, samples, None, shuffle=True)
    note = f"Camelyon17 (WILDS), {size} x {size} pixels, {test_fraction:g} of each hospital's slides for testing"
    return read_listed(
        found, lists, name="camelyon17", class_names=("normal", "tumor"), size=size, note=note, progress=progress
    )


def _read_patch(row: dict[str, str]) -> tuple[str, int, int, str]:
    node = f"patient_{row['patient']}_node_{row['node']}"
    path = f"{_PATCHES}/{node}/patch_{node}_x_{row['x_coord']}_y_{row['y_coord']}.png"
    label = int(row["tumor"])
    if label not in (0, 1):
        raise ValueError(f"a patch has tumor={label}")
    return path, label, int(row["slide"]), _HOSPITALS[int(row["center"])]
