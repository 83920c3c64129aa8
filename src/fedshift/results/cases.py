"""Results of single test samples at a trial's reported round, from which differences between methods are paired.

``cases.npz`` in a trial's folder holds arrays with an entry for each test sample, in the order of clients' test data:

| task | arrays |
|---|---|
| classification | ``truth``, ``right`` (a bit), ``loss``, ``area`` |
| several labels | ``given`` and ``chosen`` (a bit for each label), ``loss``, ``area`` |
| masks | ``hits``, ``support``, ``predicted`` (pixels by class), ``loss`` |
| numbers | ``error``, ``target`` (for each target, in the unit of the data), ``loss`` |

``area`` is the sample's part in the deviation of the mean area under the ROC curve (:mod:`fedshift.analysis.sampling`).
The records stay where the samples are: a site neither makes nor sends them.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..analysis.sampling import SampleValues, class_values, mean_values, ratio_values
from ..utils.checked_json import checksum
from ..utils.errors import FedshiftError
from ..utils.files import write_atomically
from .schema import CONSTANT

Records = Mapping[str, NDArray[Any]]
"""Arrays ``[N, ...]`` by name, with an entry for each sample."""
FILE = "cases.npz"
_INDEX = "index"


@dataclass(frozen=True, kw_only=True, eq=False)
class Cases:
    """Records of each client's test samples under each model after ``round``; clients and models may share some."""

    round: int
    records: Mapping[tuple[str, str], Records]


def write_cases(folder: Path, round: int, records: Mapping[tuple[str, str], Records]) -> None:
    """Write ``records`` by client and model atomically; equal records yield equal bytes, and shared ones are one."""
    distinct = {id(each): each for each in records.values()}
    places = {key: place for place, key in enumerate(distinct)}
    sizes = [len(next(iter(each.values()))) for each in distinct.values()]
    arrays, bits = dict[str, NDArray[Any]](), dict[str, list[int]]()
    for name in next(iter(distinct.values()), {}):
        whole = np.concatenate([each[name] for each in distinct.values()])
        if whole.dtype == bool:
            bits[name] = list(whole.shape)
            whole = np.packbits(whole)
        arrays[name] = np.ascontiguousarray(whole)
    index = {
        "round": round, "sizes": sizes, "bits": bits,
        "parts": [[client, model, places[id(each)]] for (client, model), each in records.items()],
        "checksums": {name: checksum(array.tobytes()) for name, array in arrays.items()},
    }  # fmt: skip
    packed = io.BytesIO()
    np.savez(packed, **{_INDEX: np.frombuffer(json.dumps(index).encode(), np.uint8)}, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / FILE, packed.getvalue())


def read_cases(folder: Path) -> Cases | None:
    """Return the records in a trial's ``folder``, or None if it has none.

    Raises :class:`FedshiftError` if the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with np.load(io.BytesIO(path.read_bytes())) as packed:
            arrays = {name: packed[name] for name in packed.files}
        index = json.loads(arrays.pop(_INDEX).tobytes())
        if index["checksums"] != {name: checksum(array.tobytes()) for name, array in arrays.items()}:
            raise ValueError("its checksum does not match")
        for name, shape in index["bits"].items():
            count = int(np.prod(shape))
            arrays[name] = np.unpackbits(arrays[name], count=count).astype(bool).reshape(shape)
        cuts = np.cumsum(index["sizes"])[:-1]
        split = {name: np.split(array, cuts) for name, array in arrays.items()}
        distinct = [{name: parts[place] for name, parts in split.items()} for place in range(len(index["sizes"]))]
        records = {(client, model): distinct[place] for client, model, place in index["parts"]}
        return Cases(round=int(index["round"]), records=records)
    except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise FedshiftError(
            f"{path} is damaged ({error}): remove it, and have it measured again (fedshift run or compare, --resume)"
        ) from error


def measured_round(folder: Path) -> int:
    """Return the round of the records in ``folder``; 0 if it has none, or they are damaged."""
    try:
        found = read_cases(folder)
    except FedshiftError:
        return 0
    return found.round if found else 0


def sample_values(records: Records, metric: str) -> SampleValues | None:
    """Return the values of ``metric`` on each sample, or None if the records do not define them."""
    names = records.keys()
    if metric == "loss" and "loss" in names:
        return mean_values(records["loss"])
    if metric == "auc" and "area" in names:
        return _area_values(records)
    if "right" in names and metric in ("accuracy", "balanced_accuracy"):
        right_N = records["right"]
        if metric == "accuracy":
            return mean_values(right_N, bounded=True)
        return class_values(right_N, records["truth"], mean=True)
    if "error" in names:
        return _error_values(records["error"].astype(float), records["target"].astype(float), metric)
    if "given" in names and metric == "exact_match":
        return mean_values((records["given"] == records["chosen"]).all(axis=1), bounded=True)
    if "given" in names and metric == "f1":
        given_NK, chosen_NK = records["given"].astype(float), records["chosen"].astype(float)
        return ratio_values(2 * given_NK * chosen_NK, given_NK + chosen_NK)
    if "support" in names:
        hits_NK, support_NK, predicted_NK = (records[name].astype(float) for name in ("hits", "support", "predicted"))
        return _pixel_values(hits_NK, support_NK, predicted_NK, metric)
    return None


def _area_values(records: Records) -> SampleValues | None:
    area_N = records["area"].astype(float)
    if np.isnan(area_N).any():
        return None
    if "truth" not in records:
        return mean_values(len(area_N) * area_N)
    classes, place_N, count_K = np.unique(records["truth"], return_inverse=True, return_counts=True)
    return class_values(count_K[place_N] * area_N, classes[place_N], mean=False)


def _error_values(error_NT: NDArray[np.float64], target_NT: NDArray[np.float64], metric: str) -> SampleValues | None:
    square_NT = np.square(error_NT)
    if metric == "mae":
        return mean_values(np.abs(error_NT).mean(axis=1))
    if metric == "rmse":  # d sqrt(m) = dm / (2 sqrt(m))
        mean_T = square_NT.mean(axis=0)
        root_T = np.sqrt(np.where(mean_T > 0, mean_T, 1))
        return mean_values(((square_NT - mean_T) / (2 * root_T)).mean(axis=1))
    if metric == "r2":
        spread_NT = np.square(target_NT - target_NT.mean(axis=0))
        varies_T = spread_NT.sum(axis=0) > CONSTANT * np.square(target_NT).sum(axis=0)
        return ratio_values(square_NT[:, varies_T], spread_NT[:, varies_T], -1.0)
    return None


def _pixel_values(
    hits_NK: NDArray[np.float64], support_NK: NDArray[np.float64], predicted_NK: NDArray[np.float64], metric: str
) -> SampleValues | None:
    if metric == "accuracy":
        return ratio_values(hits_NK.sum(axis=1, keepdims=True), support_NK.sum(axis=1, keepdims=True))
    if metric == "balanced_accuracy":
        return ratio_values(hits_NK, support_NK)
    first = 1 if hits_NK.shape[1] > 1 else 0  # the background
    both_NK, hits_NK = (support_NK + predicted_NK)[:, first:], hits_NK[:, first:]
    if metric == "dice":
        return ratio_values(2 * hits_NK, both_NK)
    return ratio_values(hits_NK, both_NK - hits_NK) if metric == "iou" else None
