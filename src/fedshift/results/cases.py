"""Results of single test samples at a trial's reported round, which make differences between methods paired.

``cases.npz`` in a trial's folder holds arrays with an entry for each test sample, in the order of clients' test data:

| task | arrays |
|---|---|
| classification | ``truth``, ``chosen``, ``right`` (a bit), ``loss``, ``area``; up to 10 classes: ``odds`` of each |
| several labels | ``given`` and ``chosen`` (a bit for each label), ``loss``, ``area``, and ``odds`` likewise |
| masks | ``hits``, ``support``, ``predicted`` (by class), ``loss``, ``invalid``; also ``distances``, ``hausdorff`` |
| numbers | ``error``, ``target`` (for each target, in the unit of the data), ``loss`` |
| survival | ``time``, ``event``, ``risk``; ``concordant``, ``comparable`` (pairs with the patient) |
| any, with groups | ``group``: number of the patient, from 0 for each client |

``odds`` are log-odds, log(p / (1 - p)) of the predicted probability p, in float64: they rank samples as the network's
scores do, where probabilities near 1 would tie. ``area`` is the sample's part in the
deviation of the mean area under the ROC curve (:func:`fedshift.tasks.classification.mean_area_parts`). A sample whose
output is not a number has NaN for its loss, odds and errors; its chosen class is -1, its chosen labels are wrong ones.
The records stay where the samples are: a site neither makes nor sends them. ``cases-validation.npz`` holds the same of
validation samples, where there are some, on which thresholds of scores are chosen. ``worst-cases.npz`` in the folder of
a method's first seed holds pictures of the test samples with the worst results.

Both hold results with running BatchNorm statistics, and with re-estimated statistics if these may differ
(:mod:`fedshift.evaluation.statistics_lag`).
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..utils.checked_json import checksum
from ..utils.errors import FedshiftError, Ref
from ..utils.files import write_atomically

Records = Mapping[str, NDArray[Any]]
"""Arrays ``[N, ...]`` by name, with an entry for each sample."""
RUNNING, REESTIMATED = "running", "reestimated"
"""BatchNorm statistics of the models whose results are recorded."""
FILES = {"validation": "cases-validation.npz", "test": "cases.npz"}
"""File of each split's records."""
PICTURES = "worst-cases.npz"
_INDEX = "index"
_END, _COMMENT = b"PK\x05\x06", b"\x08\x00"
"""Beginning of an archive's last record, and its last two bytes, the comment's length: the length of a checksum."""
DAMAGE = (
    OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Errors of reading a damaged archive."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cases:
    """Records of each client's test samples under each model after ``round``; clients and models may share some."""

    round: int
    records: Mapping[tuple[str, str], Records]


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """A picture ``image`` of test sample number ``row`` (from 0) of ``client``, uint8 ``[H, W, C]``."""

    client: str
    row: int
    image: NDArray[np.uint8]


def compare_masks(records: Records) -> dict[str, NDArray[Any]]:
    """Return Dice, 2 |A and B| / (|A| + |B|), and IoU of each case by class, ``[N, K]``, 0 if it is in neither mask.

    ``cases``: the class is in the true or the predicted mask; ``present``: in the true mask. Without the background,
    class 0, unless it is the only class.
    """
    hits, support, both = records["hits"], records["support"], records["support"] + records["predicted"]
    counted = np.arange(hits.shape[1]) >= min(1, hits.shape[1] - 1)
    cases = (both > 0) & counted
    dice, iou = (
        np.divide(a, b, out=np.zeros(hits.shape), where=cases) for a, b in ((2 * hits, both), (hits, both - hits))
    )
    return {"case_dice": dice, "case_iou": iou, "cases": cases, "present": (support > 0) & counted}


def measure_cases(records: Records, metric: str) -> NDArray[np.float64]:
    """Return ``metric``, Dice, IoU or a distance of surfaces, of each mask ``[N]``, the mean over its classes.

    The classes except the background that are in either mask count; NaN: none is.
    """
    compared = {**records, **compare_masks(records)}
    above = compared[{"dice": "case_dice", "iou": "case_iou", "surface_distance": "distances"}.get(metric, "hausdorff")]
    count_N = compared["cases"].sum(axis=1)
    return np.where(count_N > 0, above.sum(axis=1) / np.maximum(count_N, 1), np.nan)


def rank_results(records: Records) -> NDArray[Any]:
    """Return a number ``[N]`` for each sample that is larger for worse results; NaN: nothing is wrong.

    For masks, 1 minus Dice, 2 |A and B| / (|A| + |B|), the mean over the classes except the background that are in
    either mask (NaN: none is). Otherwise the loss (NaN: the predicted class is right).
    """
    if "predicted" in records:
        return 1 - measure_cases(records, "dice")
    wrong = ~records["right"] if "right" in records else np.ones(len(records["loss"]), bool)
    return np.where(wrong, records["loss"].astype(float), np.nan)


def write_pictures(folder: Path, round: int, pictures: Mapping[str, Sequence[Picture]]) -> None:
    """Write ``pictures`` by statistics atomically, in order; equal ones yield equal bytes."""
    drawn = [picture for several in pictures.values() for picture in several]
    index = {
        "round": round, "of": [[picture.client, picture.row] for picture in drawn],
        "counts": {statistics: len(several) for statistics, several in pictures.items()},
    }  # fmt: skip
    packed = io.BytesIO()
    arrays = {str(number): picture.image for number, picture in enumerate(drawn)}
    np.savez_compressed(packed, **{_INDEX: np.frombuffer(json.dumps(index).encode(), np.uint8)}, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / PICTURES, _seal(packed.getvalue()))


def read_pictures(folder: Path, round: int, statistics: str = RUNNING) -> tuple[Picture, ...] | None:
    """Return the pictures of a trial's ``folder`` after ``round``, or None if none were drawn then.

    ``statistics``: as in :func:`read_cases`. Raises :class:`FedshiftError` if the file is damaged.
    """
    path = folder / PICTURES
    if not path.exists():
        return None
    try:
        with np.load(_unseal(path.read_bytes())) as packed:
            index = json.loads(packed[_INDEX].tobytes())
            known = [(client, row, packed[str(number)]) for number, (client, row) in enumerate(index["of"])]
            first = index["counts"][RUNNING]
            known = known[first:] if statistics != RUNNING and statistics in index["counts"] else known[:first]
    except DAMAGE as error:
        raise FedshiftError(
            f"{path} is damaged ({error}): remove it, and have it drawn again (fedshift run or compare, {{}})",
            Ref(resume=True),
        ) from error
    if index["round"] != round:
        return None
    return tuple(Picture(client=client, row=row, image=image) for client, row, image in known)


def has_pictures(folder: Path, round: int) -> bool:
    """Return whether ``folder`` has undamaged pictures after ``round``, of which there may be none."""
    try:
        return read_pictures(folder, round) is not None
    except FedshiftError:
        return False


def _seal(body: bytes) -> bytes:
    """Return an archive with its checksum as its comment."""
    return body[:-2] + _COMMENT + checksum(body).encode()


def _unseal(content: bytes) -> io.BytesIO:
    """Return an archive to read; raise :class:`ValueError` if it does not have its checksum."""
    body, length, digest = content[:-10], content[-10:-8], content[-8:]
    if content[-22:-18] != _END and (length, digest) != (_COMMENT, checksum(body + b"\0\0").encode()):
        raise ValueError("its checksum does not match")
    return io.BytesIO(content)


def write_cases(
    folder: Path, round: int, records: Mapping[str, Mapping[tuple[str, str], Records]], split: str = "test"
) -> None:
    """Write ``records`` of ``split`` by statistics, client and model atomically; equal records yield equal bytes.

    Shared ones are written once.
    """
    parts = [(*key, statistics, each) for statistics, several in records.items() for key, each in several.items()]
    distinct = {id(each): each for *_, each in parts}
    places = {key: place for place, key in enumerate(distinct)}
    sizes = [len(next(iter(each.values()))) for each in distinct.values()]
    arrays, bits = dict[str, NDArray[Any]](), dict[str, list[int]]()
    for name in [name for name in next(iter(distinct.values()), {}) if all(name in each for each in distinct.values())]:
        whole = np.concatenate([each[name] for each in distinct.values()])
        if whole.dtype == bool:
            bits[name] = list(whole.shape)
            whole = np.packbits(whole)
        arrays[name] = np.ascontiguousarray(whole)
    index = {
        "round": round, "sizes": sizes, "bits": bits,
        "parts": [[*key, places[id(each)]] for *key, each in parts],
        "checksums": {name: checksum(array.tobytes()) for name, array in arrays.items()},
    }  # fmt: skip
    packed = io.BytesIO()
    np.savez(packed, **{_INDEX: np.frombuffer(json.dumps(index).encode(), np.uint8)}, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / FILES[split], _seal(packed.getvalue()))


def read_cases(folder: Path, split: str = "test", statistics: str = RUNNING) -> Cases | None:
    """Return the records of ``split`` in a trial's ``folder``, or None if it has none.

    ``statistics``: BatchNorm statistics of the models, :data:`~fedshift.results.schema.REESTIMATED` where they may
    differ. Raises :class:`FedshiftError` if the file is damaged.
    """
    path = folder / FILES[split]
    if not path.exists():
        return None
    try:
        with np.load(_unseal(path.read_bytes())) as packed:
            arrays = {name: packed[name] for name in packed.files}
        index = json.loads(arrays.pop(_INDEX).tobytes())
        if index["checksums"] != {name: checksum(array.tobytes()) for name, array in arrays.items()}:
            raise ValueError("its checksum does not match")
        for name, shape in index["bits"].items():
            count = int(np.prod(shape))
            arrays[name] = np.unpackbits(arrays[name], count=count).astype(bool).reshape(shape)
        cuts = np.cumsum(index["sizes"])[:-1]
        cut = {name: np.split(array, cuts) for name, array in arrays.items()}
        distinct = [{name: parts[place] for name, parts in cut.items()} for place in range(len(index["sizes"]))]
        known = {kept for *_, kept, _ in index["parts"]}
        chosen = statistics if statistics in known else RUNNING
        records = {(client, model): distinct[place] for client, model, kept, place in index["parts"] if kept == chosen}
        return Cases(round=int(index["round"]), records=records)
    except DAMAGE as error:
        raise FedshiftError(
            f"{path} is damaged ({error}): remove it, and have it measured again (fedshift run or compare, {{}})",
            Ref(resume=True),
        ) from error


def measured_round(folder: Path, split: str = "test") -> int:
    """Return the round of the records of ``split`` in ``folder``; 0 if it has none, or they are damaged."""
    try:
        found = read_cases(folder, split)
    except FedshiftError:
        return 0
    return found.round if found else 0
