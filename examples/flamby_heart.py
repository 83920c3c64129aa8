"""FLamby's Heart Disease: FedAvg, FedProx and SCAFFOLD with 100 local steps a round, beside the published accuracies.

Ogier du Terrail et al. 2022, arXiv:2210.04620; split, settings and results as in github.com/owkin/FLamby at edacf54
(``flamby/results``): a logistic regression of 13 features at four hospitals, 15 rounds of 100 steps of SGD on batches
of 4, clients weighted by their training samples, from torch's initial weights of seeds 42 to 46. The orders of samples
are fedshift's. Needs scikit-learn, which draws the split, and the files of ``heart-disease`` (``fedshift data list``)
in a directory::

    python examples/flamby_heart.py data
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import train_test_split
from torch import nn

import fedshift
from fedshift.data.datasets.heart_disease import CARD

SEEDS = range(42, 47)
METHODS = ("fedavg", "fedprox", "scaffold")
SETTINGS = {"rounds": 15, "steps": 100, "batch_size": 4, "lr": 0.001, "loss": "binary_cross_entropy"}
PUBLISHED = {
    "cleveland": (0.731, 0.731, 0.727),
    "hungarian": (0.719, 0.719, 0.719),
    "switzerland": (0.650, 0.650, 0.650),
    "va": (0.640, 0.640, 0.640),
}
"""Accuracy of each of ``METHODS`` on each hospital's test patients, mean over ``SEEDS``."""


def read_tables(root: Path) -> dict[str, np.ndarray]:
    """Return each hospital's rows ``[N, 14]``, the degree of disease last, NaN where a value is missing."""
    found = CARD.locate("heart-disease", root)
    if isinstance(found, Path):
        arrays = np.load(found)
        return {name: np.column_stack([arrays[f"x_{name}"], arrays[f"y_{name}"]]) for name in PUBLISHED}
    return {name: np.genfromtxt(file, delimiter=",", dtype=np.float32) for name, file in found.items()}


def read_clients(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Return ``x_train [N, 13], y_train [N, 1], x_test, y_test`` of each hospital."""
    tables = {name: pd.DataFrame(rows) for name, rows in read_tables(root).items()}
    whole = pd.concat(tables, names=["hospital"]).drop(columns=[10, 11, 12]).dropna()
    y = (whole.pop(13) > 0).astype(np.int64)
    x = pd.get_dummies(whole, columns=[2, 6], drop_first=True)
    clients = {}
    for name in tables:
        own, labels = x.loc[name].to_numpy(np.float32), y.loc[name].to_numpy()
        stratify = labels if np.bincount(labels, minlength=2).min() > 2 else None
        train, test = train_test_split(
            np.arange(len(own)), test_size=0.34, train_size=0.66, random_state=43, stratify=stratify
        )
        mean, std = own[train].mean(axis=0), own[train].std(axis=0, ddof=1)
        scaled = (own - mean) / np.where(std > 0, std, 1)
        clients[name] = scaled[train], labels[train, None], scaled[test], labels[test, None]
    return clients


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A linear layer, to which the loss adds the sigmoid."""
    return nn.Linear(shape[0], classes)


def initial_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return torch's initial weights of the model with ``seed``."""
    torch.manual_seed(seed)
    return logistic((13,), 1).state_dict()


def measure(root: Path, engine: str = "auto") -> pd.DataFrame:
    """Return the accuracy of each method (columns) with each seed at each hospital (rows)."""
    data, found = fedshift.federation(read_clients(root), task="multilabel"), {}
    for seed in SEEDS:
        with TemporaryDirectory() as folder:
            result = fedshift.compare(
                METHODS, data=data, model=logistic, weights=initial_weights(seed), seeds=[seed], engine=engine,
                metric="exact_match", evaluate_every=SETTINGS["rounds"], out=Path(folder) / "run", **SETTINGS,
            )  # fmt: skip
            table = result.table()
        found |= {(method, seed): table.loc[list(PUBLISHED), (method, "mean")] for method in METHODS}
    return pd.DataFrame(found)


def main() -> None:
    """Print the accuracies in percent, mean over seeds, ours and published."""
    ours = 100 * measure(Path(sys.argv[1])).T.groupby(level=0).mean().T
    both = pd.DataFrame({
        method: [f"{ours.loc[name, method]:.1f} ({100 * values[at]:.1f})" for name, values in PUBLISHED.items()]
        + [f"{ours[method].mean():.1f} ({100 * np.mean([values[at] for values in PUBLISHED.values()]):.1f})"]
        for at, method in enumerate(METHODS)
    }, index=[*PUBLISHED, "mean"])  # fmt: skip
    print(f"accuracy in percent, mean over seeds {SEEDS[0]} to {SEEDS[-1]}; in parentheses: published")
    print(both.to_string())


if __name__ == "__main__":
    main()
