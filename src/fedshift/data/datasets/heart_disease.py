"""UCI Heart Disease: patients of four hospitals, whose data differ in measured and missing columns.

R. Detrano et al. 1989 (Am. J. Cardiol. 64); Janosi, Steinbrunn, Pfisterer and Detrano, UCI, doi:10.24432/C52P4X.
The data have thirteen columns and the degree of heart disease from 0 to 4. A cholesterol or blood pressure of 0 (all of
Switzerland's cholesterol values) means that it was not measured. FLamby's Fed-Heart-Disease (Ogier du Terrail et al.
2022, arXiv:2210.04620) drops the columns slope, ca and thal, then every row with a missing value, and keeps zeros
unchanged. It therefore has 303, 261, 46 and 130 patients, 34 % of them for testing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from ...tasks.multilabel import Multilabel
from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..columns import Column
from ..federation import ClientData, Federation
from ..formats import read_npz
from ..partition import split_stratified
from ..readers.tables import prepare_rows
from ..samples import Samples
from ._card import make_card

_CLIENTS = ("cleveland", "hungarian", "switzerland", "va")
_CODES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
_NAMES = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal",
)  # fmt: skip
_ZERO_IS_MISSING = ("trestbps", "chol")
_FLAMBY_LEAVES_OUT = ("slope", "ca", "thal")

Floats = NDArray[np.float32]


def _find(folder: Path) -> Path | dict[str, Path] | None:
    files = {client: folder / f"processed.{client}.data" for client in _CLIENTS}
    if all(file.is_file() for file in files.values()):
        return files
    packed = folder / "heart_disease.npz"
    return packed if packed.is_file() else None


CARD = make_card("heart-disease", find=_find)
FED_HEART_DISEASE = make_card("fed-heart-disease", find=_find, remotes=CARD.remotes)


def heart_disease(root: Path, *, test_fraction: float = 0.34, seed: int = 0) -> Federation:
    """Load UCI Heart Disease, one client for each of four hospitals; label 1 is heart disease of any degree.

    The categorical columns cp, restecg, slope and thal become one feature per value; all other columns are numbers,
    standardized with the client's training rows. Missing values are replaced with the median (categorical: the most
    frequent value) of the client's training rows, and with 0 in a column without values.

    Args:
        root: Directory of the data.
        test_fraction: Fraction of the patients with each label at each client that is drawn for testing.
        seed: Seed of the split.

    Returns:
        Clients with samples float32 ``[N, 22]``.

    Raises:
        UsageError: An option is invalid, or files are missing or cannot be read.

    """
    codes = [_CODES.get(name) for name in _NAMES]
    columns = tuple(
        Column(name=name, categories=None if own is None else tuple(map(str, own)))
        for name, own in zip(_NAMES, codes, strict=True)
    )
    clients, notices = [], []
    for client, table in _read_tables(CARD.locate("heart-disease", root)).items():
        label = np.minimum(table[:, -1].astype(np.int64), 1)
        train, test = split_stratified(label, test_fraction, stream(seed, "heart-disease", client))
        order = np.concatenate([train, test])
        raw = np.where((table[:, :-1] == 0) & np.isin(_NAMES, _ZERO_IS_MISSING), np.nan, table[:, :-1])[order]
        x = np.concatenate(list(map(_encode, raw.T, codes)), axis=1, dtype=np.float32)
        rows = prepare_rows(x, slice(len(train)), columns)
        if rows.filled:
            notices.append(f"client {client!r}: {rows.filled} missing values filled from its own training rows")
        if rows.empty:
            notices.append(f"client {client!r}: no value of {', '.join(rows.empty)}, 0 instead")
        parts = {
            part: Samples(
                x=torch.from_numpy(rows.x[own]), y=torch.from_numpy(label[order[own]]), normalization=rows.scaling
            )
            for part, own in (("train", slice(len(train))), ("test", slice(len(train), None)))
        }
        clients.append(ClientData.from_splits(client, parts))
    return Federation(
        name="heart-disease", clients=tuple(clients), classes=2,
        note=f"UCI Heart Disease, {len(_NAMES)} columns, patients of four hospitals",
        class_names=("no disease", "disease"), notices=tuple(notices), columns=columns,
    )  # fmt: skip


def fed_heart_disease(root: Path) -> Federation:
    """Load Fed-Heart-Disease as FLamby defines it (Ogier du Terrail et al. 2022, arXiv:2210.04620).

    Without the columns slope, ca and thal, and rows in which a value is missing; zeros stay. The first values of cp and
    restecg have no feature, both numbers and codes are standardized by the client's training rows (with n - 1), and the
    split is FLamby's.

    Args:
        root: Directory of the data.

    Returns:
        Clients with samples float32 ``[N, 13]`` and one label, float32 ``[N, 1]``: 1 is heart disease.

    Raises:
        UsageError: Files are missing or cannot be read.

    """
    table, clients = _read_flambys_rows(root), []
    for client in _CLIENTS:
        x = table.drop(columns="degree").loc[client].to_numpy(np.float32)
        y = (table.loc[client]["degree"].to_numpy(np.float32) > 0).astype(np.int64)
        train, test = train_test_split(
            np.arange(len(y)), test_size=0.34, train_size=0.66, random_state=43,
            stratify=y if np.bincount(y, minlength=2).min() > 2 else None,
        )  # fmt: skip
        deviation = x[train].std(axis=0, ddof=1)
        x = (x - x[train].mean(axis=0)) / np.where(deviation > 0, deviation, 1)
        whole = Samples(x=torch.from_numpy(x), y=torch.from_numpy(y[:, None]).float())
        train, test = whole.take(torch.tensor(train)), whole.take(torch.tensor(test))
        clients.append(ClientData(name=client, train=train, test=test))
    return Federation(
        name="fed-heart-disease", clients=tuple(clients), classes=1,
        note="UCI Heart Disease, 13 features, patients of four hospitals, FLamby's split", class_names=("disease",),
        task=Multilabel(),
    )  # fmt: skip


def _read_flambys_rows(root: Path) -> pd.DataFrame:
    """Return FLamby's 13 features, not scaled, and the degree of disease, with the client as the first index."""
    tables = {
        client: pd.DataFrame(table, columns=[*_NAMES, "degree"]).drop(columns=list(_FLAMBY_LEAVES_OUT)).dropna()
        for client, table in _read_tables(FED_HEART_DISEASE.locate("fed-heart-disease", root)).items()
    }
    return pd.get_dummies(pd.concat(tables), columns=["cp", "restecg"], drop_first=True)


def _read_tables(found: Path | dict[str, Path]) -> dict[str, Floats]:
    """Return each client's rows ``[N, 14]``, with the degree of disease last and NaN for missing values."""
    if isinstance(found, Path):
        arrays = read_npz(found, [f"{part}_{client}" for client in _CLIENTS for part in "xy"])
        return {client: np.column_stack([arrays[f"x_{client}"], arrays[f"y_{client}"]]) for client in _CLIENTS}
    return {client: _read_table(file) for client, file in found.items()}


def _read_table(file: Path) -> Floats:
    rows = [line.split(",") for line in file.read_text("ascii").split()]
    odd = [row for row in rows if len(row) != len(_NAMES) + 1]
    if odd or not rows:
        raise UsageError(f"{file} has rows of {len(odd[0]) if odd else 0} cells, expected were 14: get it again")
    try:
        return np.array([[np.nan if cell == "?" else float(cell) for cell in row] for row in rows], np.float32)
    except ValueError as error:
        raise UsageError(f"{file} holds a value that is not a number ({error}): get it again") from error


def _encode(values: Floats, codes: tuple[int, ...] | None) -> NDArray[np.floating]:
    """Return numbers as ``[N, 1]``, and codes as one feature per value; all features of a missing value are NaN."""
    block = values[:, None]
    return block if codes is None else np.where(np.isnan(block), np.nan, block == np.array(codes))
