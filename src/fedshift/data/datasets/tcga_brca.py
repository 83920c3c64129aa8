"""TCGA-BRCA as in FLamby: survival of patients with breast cancer from 39 clinical features, one client a region.

The Cancer Genome Atlas Network 2012 (Nature 490), preprocessed and divided as Fed-TCGA-BRCA of FLamby (Ogier du Terrail
et al. 2022, arXiv:2210.04620): features are not scaled, patients belong to the region of the hospital that sent their
tissue, and folds are FLamby's, drawn within regions. Times are in days.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ...tasks.survival import Survival
from ...utils.errors import UsageError
from ..federation import ClientData, Federation
from ..formats import explain_errors
from ..samples import Samples
from ._card import make_card

_CLIENTS = ("northeast", "south", "west", "midwest", "europe", "canada")
_FOLDS = "train_test_split.csv"
_FEATURES = 39


def _find(folder: Path) -> Path | None:
    places = (folder, folder / "fed_tcga_brca")
    return next((place for place in places if (place / "brca.csv").is_file() and _find_folds(place)), None)


def _find_folds(folder: Path) -> Path | None:
    files = (folder / _FOLDS, folder / "dataset_creation_scripts" / _FOLDS)
    return next((file for file in files if file.is_file()), None)


CARD = make_card("tcga-brca", find=_find)


def tcga_brca(root: Path) -> Federation:
    """Load Fed-TCGA-BRCA, one client for each of six regions.

    Args:
        root: Directory of the data.

    Returns:
        Clients with samples float32 ``[N, 39]`` and targets float64 ``[N, 2]``: time in days, and 1 for a death.

    Raises:
        UsageError: Files are missing or cannot be read.

    """
    folder = CARD.locate("tcga-brca", root)
    file, folds = folder / "brca.csv", _find_folds(folder)
    assert folds is not None
    with explain_errors(file, "table of patients"):
        table = pd.read_csv(file).set_index("pid")
        x = table.drop(columns=["E", "T"]).to_numpy(np.float32)
        y = table[["T", "E"]].to_numpy(np.float64)
    if x.shape[1] != _FEATURES:
        raise UsageError(f"{file} has {x.shape[1]} features, expected were {_FEATURES}: get it again")
    with explain_errors(folds, "table of folds"):
        fold = pd.read_csv(folds).set_index("pid")["fold2"].reindex(table.index).fillna("")
    whole, clients = Samples(x=torch.from_numpy(x), y=torch.from_numpy(y)), []
    for number, name in enumerate(_CLIENTS):
        train, test = (torch.from_numpy(np.flatnonzero(fold == f"{part}_{number}")) for part in ("train", "test"))
        clients.append(ClientData(name=name, train=whole.take(train), test=whole.take(test)))
    return Federation(
        name="tcga-brca", clients=tuple(clients), classes=1, class_names=("death",),
        note="TCGA-BRCA, 39 clinical features, patients of six regions, FLamby's folds", task=Survival(),
    )  # fmt: skip
