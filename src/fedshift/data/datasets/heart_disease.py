"""UCI Heart Disease: patients of four hospitals, whose data differ in measured and missing columns.

R. Detrano et al. 1989 (Am. J. Cardiol. 64); Janosi, Steinbrunn, Pfisterer and Detrano, UCI, doi:10.24432/C52P4X.
The data have thirteen columns and the degree of heart disease from 0 to 4. A cholesterol or blood pressure of 0 (all of
Switzerland's cholesterol values) means that it was not measured. FLamby's Fed-Heart-Disease (Ogier du Terrail et al.
2022, arXiv:2210.04620) drops the columns slope, ca and thal, then every row with a missing value, and keeps zeros
unchanged. It therefore has 303, 261, 46 and 130 patients, 34 % of them for testing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from ...tasks.multilabel import Multilabel
from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..assembly import assemble
from ..federation import ClientData, Federation
from ..formats import read_npz
from ..partition import split_stratified
from ..readers import frames
from ..samples import Samples
from ..source import ReadOptions
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
    clients = {}
    for client, table in _read_tables(CARD.locate("heart-disease", root)).items():
        frame = pd.DataFrame(table, columns=[*_NAMES, "label"])
        frame["label"] = frame["label"].clip(upper=1).astype(int)
        measured = list(_ZERO_IS_MISSING)
        frame[measured] = frame[measured].replace(0, np.nan)
        for name, codes in _CODES.items():
            frame[name] = pd.Categorical(frame[name].map("{:g}".format, na_action="ignore"), [*map(str, codes)])
        drawn = split_stratified(frame["label"].to_numpy(), test_fraction, stream(seed, "heart-disease", client))
        clients[client] = {part: frame.iloc[rows] for part, rows in zip(("train", "test"), drawn, strict=True)}
    reading = ReadOptions(target="label")
    return replace(
        assemble(frames.read(clients, reading), reading), name="heart-disease", class_names=("no disease", "disease"),
        note=f"UCI Heart Disease, {len(_NAMES)} columns, patients of four hospitals",
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
