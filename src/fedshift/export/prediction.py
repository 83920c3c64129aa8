"""Predictions of an exported model for files: ``cases.csv``, and for segmentation a mask for each file.

A file is read as in the run (:meth:`fedshift.data.preparation.Preparation.store`). Where the model resizes images, its
scores are resized linearly to the file's own grid before the class with the highest score is chosen; otherwise a mask
has the classes that the run counted. A file that cannot be read has a row with the reason; the others are predicted.

With true masks, each row has for each class except the background: Dice (Dice 1945, doi:10.2307/1932409), the 95 %
Hausdorff distance and the average symmetric surface distance as :mod:`fedshift.tasks.surfaces` defines them, in
millimeters if the spacing of the file is known, else in pixels, in separate columns. A class in neither mask has
empty cells; in only one of them, Dice is 0.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.decoding.dicom import DICOM, holds_slices, is_dicom, is_stack
from ..data.decoding.images import Unreadable
from ..data.decoding.masks import write_mask
from ..data.decoding.signals import SIGNALS
from ..data.decoding.volumes import (
    READABLE,
    VolumeHeader,
    decode_mask,
    find_difference,
    find_stem,
    read_volume_header,
)
from ..data.far_values import FarValues
from ..data.files.listing import UNREAD_IMAGES
from ..data.files.pairing import FIELDS, MASKS, match_names, to_classes
from ..data.readers.tables import SUFFIXES as TABLES
from ..data.readers.tables import read_rows
from ..tasks.segmentation import IGNORED
from ..tasks.surfaces import compare_surfaces
from ..utils.csv_cells import escape_table
from ..utils.errors import UsageError
from ..utils.files import write_atomically
from .loading import NO_NUMBERS, ExportedModel
from .package import require_new

TABLE = "cases.csv"
EVERY = 10.0
"""Seconds between two writings of the table, so that a killed program leaves most rows."""
FAR = "warning"
"""Column of rows whose file has values far from the training data's, with the numbers."""
WRITTEN = "predicted"
"""Status of a file that was predicted; another status is the reason why a file was not."""
Row = dict[str, Any]
Progress = Callable[[str, int, int], None]


class Predictions(NamedTuple):
    """Rows that :func:`predict_files` wrote to ``table``; ``failed``: files without prediction, with the reasons.

    ``far``: by file, how its values are far from the training data's.
    """

    table: Path
    rows: list[Row]
    failed: list[str]
    far: dict[Path, str]


def predict_files(
    model: ExportedModel, files: Sequence[Path], out: Path, *, masks: Path | None = None,
    progress: Progress = lambda *_: None,
) -> Predictions:  # fmt: skip
    """Write the predictions for ``files`` to ``out``: ``cases.csv``, and for segmentation a mask for each file.

    Args:
        model: The model.
        files: Images, directories of images, or for a model of tables, CSV files with its columns. For a model of
            volumes, a folder of DICOM slices is one image.
        out: Directory to write, new or empty.
        masks: Directory of true masks with the names of the images, or names that differ in the same way
            (:func:`~fedshift.data.files.pairing.match_names`), for segmentation.
        progress: Function of a word, the number of files done, and the number of all files.

    Raises:
        UsageError: There are no such files, the model cannot take files, two files have one name, or a mask is missing.

    """
    require_new(out)
    if masks is not None and model.task != "segmentation":
        raise UsageError(f"masks={masks}: {model.directory} is a model for {model.task}: leave the masks out")
    if not (model.inputs.takes_files or model.inputs.columns):
        raise UsageError(f"{model.directory} takes {model.inputs}, and no files: use fedshift.load in Python")
    stacks = model.inputs.decoding.kind == "volume" and len(model.inputs.shape) == 4
    signals = SIGNALS if model.inputs.decoding.kind == "signal" else READABLE
    found = list_files(files, TABLES if model.inputs.columns else signals, stacks=stacks)
    truths = _find_truths(masks, found, len(model.classes), stacks=stacks) if masks is not None else None
    if model.task == "segmentation":
        _name_files(found)
    if signals is READABLE and not model.inputs.columns:  # images in other formats get a row that says so
        inside = (file for path in files if path.is_dir() for file in sorted(path.iterdir()))
        found += [file for file in inside if file.suffix.lower() in UNREAD_IMAGES.difference(READABLE)]
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    far: dict[Path, str] = {}
    kept = time.monotonic()
    try:
        for done, file in enumerate(found):
            progress("predictions", done, len(found))
            try:
                with warnings.catch_warnings(record=True, category=FarValues) as warned:
                    warnings.simplefilter("always", FarValues)
                    made = list(_predict_file(model, file, out, truths))
                if warned:
                    far[file] = str(warned[0].message)
                    made = [row | {FAR: far[file]} for row in made]
                rows += made
            except (Unreadable, UsageError) as error:
                rows.append({"file": str(file), "status": str(error).removeprefix(str(file)).lstrip(", ")})
            if time.monotonic() - kept > EVERY:
                _write_table(rows, out)
                kept = time.monotonic()
    finally:
        _write_table(rows, out)
    failed = [f"{row['file']} {row['status']}" for row in rows if row["status"] != WRITTEN]
    return Predictions(out / TABLE, rows, failed, far)


def _write_table(rows: Sequence[Row], out: Path) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    table = pd.DataFrame(rows, columns=list(columns))
    write_atomically(out / TABLE, escape_table(table).to_csv(index=False).encode())


def list_files(given: Sequence[Path], suffixes: Sequence[str], *, stacks: bool = False) -> list[Path]:
    """Return ``given`` with each directory replaced by its files with one of ``suffixes``, in the order of their names.

    With ``stacks``, a folder of DICOM slices, given or in a given directory, is one file. Raises :class:`UsageError`
    for a path that does not exist, and a directory without such files.
    """
    found: list[Path] = []
    for path in given:
        if not path.exists():
            raise UsageError(f"{path} does not exist: give files, or directories of them")
        whole = not path.is_dir() or (stacks and is_stack(path))
        found += [path if path.name else path.resolve()] if whole else _list_directory(path, suffixes, stacks)
    if not found:
        raise UsageError("no files: give files, or directories of them")
    return found


def _list_directory(path: Path, suffixes: Sequence[str], stacks: bool) -> list[Path]:
    """Return the files in a directory as :func:`list_files` does; raise :class:`UsageError` if there are none."""
    known, dicom = tuple(suffixes), set(DICOM) <= set(suffixes)

    def is_read(file: Path) -> bool:
        if file.is_dir():
            return stacks and holds_slices(file)
        return file.name.lower().endswith(known) or (dicom and is_dicom(file))

    own = sorted(filter(is_read, path.iterdir()))
    if not own:
        raise UsageError(f"{path} has no files of {', '.join(suffixes)}: give files that the model takes")
    return own


def _name_files(files: Iterable[Path]) -> dict[str, Path]:
    """Return ``files`` by their names without suffix; raise :class:`UsageError` if two would have one mask."""
    named: dict[str, Path] = {}
    for file in files:
        stem = find_stem(file.name)
        if stem in named:
            raise UsageError(
                f"{named[stem]} and {file} have the same name without folder and suffix, and so would their masks: "
                "rename one"
            )
        named[stem] = file
    return named


class _Truths(NamedTuple):
    """True masks and fields of view by image; ``white``: masks hold 0 and 255, which are the classes 0 and 1."""

    masks: dict[Path, Path]
    fields: dict[Path, Path]
    classes: int
    white: bool


def _find_truths(directory: Path, images: Sequence[Path], classes: int, *, stacks: bool) -> _Truths:
    """Return the true masks in ``directory`` of a model of ``classes``, one for each of ``images``.

    A directory ``fov`` next to ``masks`` has the images' fields of view. ``stacks``: folders of slices are masks, too.
    """
    if not directory.is_dir():
        raise UsageError(f"masks={directory} is not a directory: give the directory of the true masks")
    masks, beside = _match_masks(directory, images, stacks), directory.parent / FIELDS
    fields = _match_masks(beside, images, stacks) if directory.name.lower() == MASKS and beside.is_dir() else {}
    values = set[int]()
    for file in masks.values() if classes == 2 else ():
        with suppress(Unreadable):  # which is said in the row of its image
            values |= set(np.unique(decode_mask(file)).tolist())
    return _Truths(masks, fields, classes, white=values == {0, IGNORED})


def _match_masks(directory: Path, images: Sequence[Path], stacks: bool) -> dict[Path, Path]:
    """Return the mask in ``directory`` of each of ``images`` by their names; raise :class:`UsageError` without."""
    masks = _name_files(_list_directory(directory, READABLE, stacks))
    alike = match_names([("", find_stem(image.name)) for image in images], [("", stem) for stem in masks])
    if alike is None:
        lacking = [image for image in images if find_stem(image.name) not in masks]
        raise UsageError(
            f"{len(lacking)} of {len(images)} images have no mask of the same name in {directory}, the first is "
            f"{lacking[0]}: add it, or take the image away"
        )
    return {image: masks[alike["", find_stem(image.name)][1]] for image in images}


def _read_truth(truths: _Truths, image: Path, header: VolumeHeader) -> NDArray[np.uint8]:
    """Return the true mask of ``image``, whose header is ``header``; raise :class:`UsageError` if it is unfit."""
    mask = truths.masks[image]
    classes = _decode_beside(mask, image, header)
    wrong = classes[(classes >= truths.classes) & (classes != IGNORED)]
    if wrong.size:
        raise UsageError(
            f"has mask {mask}, which has the value {wrong[0]}: give classes 0..{truths.classes - 1}, or {IGNORED} "
            "where a pixel is ignored"
        )
    fields = _decode_beside(truths.fields[image], image, header)[None] if image in truths.fields else None
    truth: NDArray[np.uint8] = to_classes(classes[None], white=truths.white, fields=fields, sizes=())[0]
    return truth


def _decode_beside(file: Path, image: Path, header: VolumeHeader) -> NDArray[np.uint8]:
    """Return a mask on the grid of ``image``; raise :class:`UsageError` for another grid."""
    try:
        differs, classes = find_difference(header, read_volume_header(file)), decode_mask(file)
    except Unreadable as error:
        raise UsageError(f"has mask {file}, which {error}: give a mask that can be read") from error
    if differs:
        raise UsageError(
            f"has mask {file}, which {differs.replace('{image}', str(image))}: bring it to its image's grid"
        )
    return classes


def _predict_file(model: ExportedModel, file: Path, out: Path, truths: _Truths | None) -> Iterator[Row]:
    """Yield the rows of one file, after writing its mask; raise :class:`Unreadable` or :class:`UsageError`."""
    if model.inputs.columns:
        for number, answer in enumerate(model.predict(read_rows(file, model.inputs.columns, model.directory.name))):
            yield {"file": str(file), "row": number, **_name_answer(model, answer)}
        return
    if model.task != "segmentation":
        yield {"file": str(file), **_name_answer(model, model.predict(file))}
        return
    header, predicted = read_volume_header(file), model.segment(file)
    truth = _read_truth(truths, file, header) if truths else None
    mask = write_mask(out, find_stem(file.name), predicted.numpy(), file)
    row: Row = {"file": str(file), "status": WRITTEN, "mask": mask.name}
    row |= {f"milliliters {name}": volume for name, volume in _measure_volumes(model, predicted, header)}
    if truths and truth is not None:
        row["true mask"] = truths.masks[file].name
        row |= dict(_compare(model, predicted, torch.from_numpy(truth).long(), header.spacing))
    yield row


def _name_answer(model: ExportedModel, answer: Any) -> Row:
    """Return the status and the cells of a prediction: a class, labels, or a number for each target."""
    if answer is None:
        return {"status": NO_NUMBERS}
    if model.task == "multilabel":
        return {"status": WRITTEN} | {name: int(name in answer) for name in model.classes}
    if isinstance(answer, list):
        return {"status": WRITTEN} | dict(zip(model.classes, answer, strict=True))
    return {"status": WRITTEN, "prediction": answer.tolist() if isinstance(answer, Tensor) else answer}


def _measure_volumes(model: ExportedModel, predicted: Tensor, header: VolumeHeader) -> Iterator[tuple[str, float]]:
    """Yield the milliliters of each class except the background in a volume whose spacing is known."""
    if predicted.ndim == 3 and len(header.spacing) == 3:
        counts = torch.bincount(predicted.flatten(), minlength=len(model.classes)).tolist()
        sheared = header.affine is not None  # the product of the edges would be too large
        cubic = abs(np.linalg.det(np.array(header.affine)[:3, :3])) if sheared else np.prod(header.spacing)
        voxel = float(cubic) / 1000  # mm³ to ml
        yield from ((name, count * voxel) for name, count in list(zip(model.classes, counts, strict=True))[1:])


def _compare(
    model: ExportedModel, predicted: Tensor, truth: Tensor, spacing: Sequence[float]
) -> Iterator[tuple[str, float | None]]:
    """Yield the Dice and the surface distances of each class except the background, by the name of their column."""
    known, predicted = truth != IGNORED, predicted.long()
    surfaces = compare_surfaces(predicted[None], truth[None], known[None], len(model.classes), spacing)
    unit = "mm" if spacing else "pixels"
    for number, name in list(enumerate(model.classes))[1:]:
        masks = (predicted == number) & known, truth == number
        total = sum(int(mask.sum()) for mask in masks)
        yield f"dice {name}", 2 * int((masks[0] & masks[1]).sum()) / total if total else None
        yield f"hd95 {unit} {name}", float(surfaces["hausdorff"][0, number]) if total else None
        yield f"assd {unit} {name}", float(surfaces["distances"][0, number]) if total else None


def summarize(predictions: Predictions) -> str:
    """Return a sentence on what was written."""
    counts = Counter(row["status"] == WRITTEN for row in predictions.rows)
    return f"{predictions.table}: {counts[True]} predicted, {counts[False]} refused"
