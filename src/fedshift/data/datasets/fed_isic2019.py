"""Fed-ISIC2019: dermatoscopic images of six centers, as FLamby splits ISIC 2019 (Ogier du Terrail et al. 2022).

arXiv:2210.04620; 23,247 images of eight classes. FLamby's list gives each image's center and side; its folds share
lesions, photographed more than once: of HAM10000's four sources 434, 213 and 46 lesions are on both sides of
vidir_modern, rosendahl and vienna_dias, and 9 lesions are in two sources. ``clean`` leaves them out of training.

FLamby's images have 224 pixels at the shorter side after its resizing and color constancy; here they are squashed to
squares. Pixels are normalized with ImageNet's mean and standard deviation, as there.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ..federation import ClientData, Federation
from ..files.read_options import Progress
from ..formats import explain_errors
from ..samples import IMAGENET, Samples
from ._card import Card
from ._dermoscopy import SITES, find_compact, find_metadata, read_compact
from ._file_lists import DomainFolders, ListedImage, find_domains, list_from_folders, read_listed

_CENTERS = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk", "vienna_dias")
_CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
_LISTS = ("train_test_split", "train_test_split.csv", "train_test_folds.csv")
_IMAGES = ("ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Input")
_ISIC = "ISIC_2019_Training_Metadata.csv"


@dataclass(frozen=True, kw_only=True)
class _Published:
    """FLamby's list, and the folder of images."""

    table: Path
    images: Path


def _find(folder: Path) -> _Published | DomainFolders | dict[str, Path] | None:
    table = next((folder / name for name in _LISTS if (folder / name).is_file()), None)
    images = next((folder / name for name in _IMAGES if (folder / name).is_dir()), None)
    if table is not None and images is not None:
        return _Published(table=table, images=images)
    return find_domains(folder / "hub", map(str, range(len(_CENTERS)))) or find_compact(folder)


CARD = Card(
    title="Fed-ISIC2019, eight kinds of skin lesions from six centers",
    clients=_CENTERS,
    classes=8,
    samples="FLamby's train/test: 9930/2483, 3163/791, 2691/672, 1807/452, 655/164 and 351/88 images",
    license="CC BY-NC 4.0",
    homepage="https://challenge.isic-archive.com/data/#2019",
    source="FLamby, arXiv:2210.04620; https://github.com/owkin/FLamby",
    layout=(
        f"FLamby's list train_test_split (or .csv) and the images in {_IMAGES[0]} (after FLamby's resize_images.py) or "
        f"{_IMAGES[1]}; or the files {', '.join(f'{site}.npz' for site in SITES)}"
    ),
    find=_find,
    hub="flwrlabs/fed-isic2019",
)


def fed_isic2019(
    root: Path, *, clean: bool = False, size: int | None = None, progress: Progress | None = None
) -> Federation:
    """A client for each center, uint8 ``[N, 3, size, size]``, FLamby's split, ImageNet's normalization; eight classes.

    ``size`` in pixels is by default 224, and what they hold (32) for the compact files, which have four of the centers.
    ``clean`` leaves images out of training whose lesion is in any center's test data; it needs HAM10000_metadata and
    ISIC_2019_Training_Metadata.csv, which name the lesions, beside FLamby's list. Raises :class:`UsageError` where
    these are missing, and for files that are missing or cannot be read.
    """
    if size is not None and size < 1:
        raise UsageError(f"size={size} pixels: must be at least 1")
    found = CARD.locate("fed-isic2019", root)
    note = (
        f"Fed-ISIC2019, FLamby's split{', without training images of lesions that are in test data' if clean else ''}"
    )
    if isinstance(found, dict):
        federation = _read_compact(found, clean, note)
        return (federation if size is None else federation.fit_images(size)).normalize(IMAGENET)
    notices: tuple[str, ...] = ()
    if isinstance(found, DomainFolders):
        if clean:
            raise UsageError(f"clean=True: {found.root} does not say which lesion an image shows; {CARD.layout}")
        labels = {name: label for label, known in enumerate(_CLASSES) for name in (known, str(label))}
        by_number = list_from_folders(found, labels, 0.2)
        clients = {_CENTERS[int(number)]: listed for number, listed in by_number.items()}
        folder = found.root
    else:
        clients, folder = _list_images(found, clean), found.images
        if folder.name == _IMAGES[1]:
            notices = (f"{folder} holds the images as published, without FLamby's color constancy",)
    federation = read_listed(
        folder, clients, name="fed-isic2019", class_names=_CLASSES, size=224 if size is None else size,
        note=note, progress=progress,
    )  # fmt: skip
    return replace(federation, notices=notices).normalize(IMAGENET)


def _list_images(found: _Published, clean: bool) -> dict[str, list[ListedImage]]:
    clients: dict[str, list[ListedImage]] = {center: [] for center in _CENTERS}
    with explain_errors(found.table, "FLamby's list"), found.table.open(encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            image = ListedImage(path=f"{row['image']}.jpg", label=int(row["target"]), part=row["fold"])
            if image.part not in ("train", "test") or not 0 <= image.label < len(_CLASSES):
                raise ValueError(f"{row['image']} has target {image.label} and fold {image.part!r}")
            clients[_CENTERS[int(row["center"])]].append(image)
    if not clean:
        return clients
    lesions = _read_lesions(found.table.parent)
    tested = {lesions.get(image.path) for listed in clients.values() for image in listed if image.part == "test"} - {
        None
    }
    return {
        center: [image for image in listed if image.part == "test" or lesions.get(image.path) not in tested]
        for center, listed in clients.items()
    }


def _read_lesions(folder: Path) -> dict[str, str]:
    """The lesion that an image file shows, where its source says so."""
    ham, isic = find_metadata(folder), folder / _ISIC
    if ham is None or not isic.is_file():
        raise UsageError(
            f"clean=True needs HAM10000_metadata and {_ISIC} in {folder}, which name the lesions: get them from "
            "https://doi.org/10.7910/DVN/DBW86T and https://challenge.isic-archive.com/data/#2019"
        )
    lesions = {}
    for file, image in ((isic, "image"), (ham, "image_id")):
        with explain_errors(file, "a table of images"), file.open(encoding="utf-8-sig", newline="") as table:
            separator = "\t" if file.suffix == ".tab" else ","
            for row in csv.DictReader(table, delimiter=separator):
                if row["lesion_id"]:
                    lesions[f"{row[image]}.jpg"] = row["lesion_id"]
    return lesions


def _read_compact(files: dict[str, Path], clean: bool, note: str) -> Federation:
    centers = {site: read_compact(file, "y") for site, file in files.items()}
    tested = np.concatenate([parts["test"]["lesion"] for parts in centers.values()])
    if clean:
        for parts in centers.values():
            keep = ~np.isin(parts["train"]["lesion"], tested)
            parts["train"] = {name: array[keep] for name, array in parts["train"].items()}
    return Federation(
        name="fed-isic2019",
        clients=tuple(
            ClientData(name=site, train=_make_split(parts["train"]), test=_make_split(parts["test"]))
            for site, parts in centers.items()
        ),
        classes=len(_CLASSES),
        note=note,
        class_names=_CLASSES,
        notices=("these files have four centers of the six: bcn and msk are not in them",),
    )


def _make_split(part: dict[str, NDArray[Any]]) -> Samples:
    pixels = np.ascontiguousarray(part["x"].transpose(0, 3, 1, 2))
    return Samples(x=torch.from_numpy(pixels), y=torch.from_numpy(part["y"].astype(np.int64)))
