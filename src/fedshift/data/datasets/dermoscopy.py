"""Dermatoscopic images of pigmented skin lesions: HAM10000 and Fed-ISIC2019, which contains its four sources.

In addition to the published images, compact files of the four sources with images of 32 x 32 pixels can be read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..files.read_options import Progress
from ..formats import read_csv, read_npz
from ..groups import number_groups
from ..partition import split_stratified
from ..preparation import IMAGENET
from ..samples import Samples
from ._card import make_card, require_choices
from ._file_lists import COLUMNS, read_listed

_SITES = ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")
"""HAM10000's four sources by their names in its metadata, ordered by their numbers in Fed-ISIC2019 (1, 2, 3, 5)."""
_CENTERS = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk", "vienna_dias")
_HAM_CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
_ISIC_CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
_HAM_SIZE = (150, 200)
"""Height and width in pixels of FedMMB's images (section 4.3)."""
_HAM_METADATA = ("HAM10000_metadata", "HAM10000_metadata.csv", "HAM10000_metadata.tab")
_ISIC_METADATA = "ISIC_2019_Training_Metadata.csv"
_FLAMBY_LISTS = ("train_test_split", "train_test_split.csv", "train_test_folds.csv")
_ISIC_IMAGES = ("ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Input")


@dataclass(frozen=True, kw_only=True)
class _Published:
    """A folder of images, and the table that lists them."""

    images: Path
    table: Path


_Found = _Published | dict[str, Path]
"""What is published, or the compact file of each site."""


def _find_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _find_compact(folder: Path) -> dict[str, Path] | None:
    """Return one file per site, in ``folder`` or its subfolder ``fed_isic2019_ham``, or None unless all exist."""
    for place in (folder, folder / "fed_isic2019_ham"):
        files = {site: place / f"{site}.npz" for site in _SITES}
        if all(file.is_file() for file in files.values()):
            return files
    return None


def _find_ham(folder: Path) -> _Found | None:
    table = _find_file(folder, _HAM_METADATA)
    if table is not None and next(folder.rglob("ISIC_*.jpg"), None) is not None:
        return _Published(table=table, images=folder)
    return _find_compact(folder)


def _find_isic(folder: Path) -> _Found | None:
    table = _find_file(folder, _FLAMBY_LISTS)
    images = next((folder / name for name in _ISIC_IMAGES if (folder / name).is_dir()), None)
    if table is not None and images is not None:
        return _Published(table=table, images=images)
    return _find_compact(folder)


HAM10000 = make_card("ham10000", find=_find_ham)

FED_ISIC2019 = make_card("fed-isic2019", find=_find_isic)


def ham10000(
    root: Path,
    *,
    by: Literal["one", "site"] = "one",
    size: int | None = None,
    by_lesion: bool = True,
    test_fraction: float = 0.2,
    seed: int = 0,
    progress: Progress | None = None,
) -> Federation:
    """Load HAM10000: 10,015 dermatoscopic images of pigmented skin lesions (Tschandl et al. 2018).

    Many of the 7,470 lesions (doi:10.1038/sdata.2018.161) were photographed more than once, so a random split of
    images, as in FedMMB (Nasirigerdeh et al., arXiv:2011.07006, section 4.3: 8,012 and 2,003), puts the same lesions on
    both sides. By default, this function splits lesions.

    Args:
        root: Directory of the data.
        by: ``one`` client with all images, or one client for each ``site`` (four).
        size: Side in pixels of the resized square images; None: 150 high and 200 wide as in FedMMB (the
            published images are 450 x 600), or the size of the compact files (32 x 32).
        by_lesion: Split lesions with all their images; False: split images at random.
        test_fraction: Fraction used for testing, of the lesions of each class and site, or of the images.
        seed: Seed of the split.
        progress: Called with ``(what is read, done, total)``.

    Returns:
        Clients with images uint8 ``[N, 3, H, W]``; seven classes.

    Raises:
        UsageError: An option is invalid, or files are missing or cannot be read.

    """
    require_choices("by", [by], ("one", "site"))
    if not 0 < test_fraction < 1:
        raise UsageError(f"test_fraction={test_fraction:g}: must lie between 0 and 1")
    _check_size(size)
    found: _Found = HAM10000.locate("ham10000", root)
    images, pixels = _read_compact(found, "dx") if isinstance(found, dict) else (_read_ham_table(found), torch.empty(0))
    if by == "site" and "" in set(images["site"]):
        raise UsageError("by='site': HAM10000_metadata has no column 'dataset', which names the site; use by='one'")
    tested = _draw_ham_test(images, by_lesion, test_fraction, seed)
    images["part"] = np.where(tested, "test", "train")
    images["client"] = images["site"] if by == "site" else "ham10000"
    if by_lesion:
        images["group"] = number_groups(images["lesion"].fillna("").tolist()).numpy()
    images = images.sort_values("part", ascending=False, kind="stable")
    clients = {name: images[images["client"] == name] for name in sorted(set(images["client"]))}
    note = f"HAM10000, {'lesions' if by_lesion else 'images'} split at random, {test_fraction:g} for testing"
    if isinstance(found, dict):
        return _join_compact("ham10000", pixels, clients, _HAM_CLASSES, note, size)
    return read_listed(
        found.images, clients, name="ham10000", class_names=_HAM_CLASSES, size=size or _HAM_SIZE, note=note,
        progress=progress,
    )  # fmt: skip


def fed_isic2019(
    root: Path, *, clean: bool = False, size: int | None = None, progress: Progress | None = None
) -> Federation:
    """Load Fed-ISIC2019: skin images of six centers, as FLamby splits ISIC 2019 (Ogier du Terrail et al. 2022).

    arXiv:2210.04620; 23,247 images of eight classes. FLamby's list gives each image's center, and whether it is for
    training or testing. Both sides share lesions that were photographed more than once: in HAM10000's four sources,
    434, 213 and 46 lesions are on both sides of vidir_modern, rosendahl and vienna_dias, and 9 lesions are in two
    sources. Where lesions are known, they are groups of images, and ``fedshift data check`` finds groups on both sides.

    FLamby's images have 224 pixels on the shorter side after its resizing and color constancy; here they are resized to
    squares. Pixels are normalized with ImageNet's mean and standard deviation, as in FLamby.

    Args:
        root: Directory of the data.
        clean: Exclude training images whose lesion is in any center's test data; this needs HAM10000_metadata and
            ISIC_2019_Training_Metadata.csv, which name the lesions, in addition to FLamby's list.
        size: Side in pixels; None: 224, or the size of the compact files (32), which have four of the centers.
        progress: Called with ``(what is read, done, total)``.

    Returns:
        A client for each center, with images uint8 ``[N, 3, size, size]``; eight classes.

    Raises:
        UsageError: Files are missing or cannot be read.

    """
    _check_size(size)
    found: _Found = FED_ISIC2019.locate("fed-isic2019", root)
    images, pixels = _read_compact(found, "y") if isinstance(found, dict) else (_list_isic(found), torch.empty(0))
    if clean and "lesion" not in images:
        raise UsageError(
            f"clean=True needs HAM10000_metadata and {_ISIC_METADATA} next to FLamby's list, which name the lesions: "
            "get them from https://doi.org/10.7910/DVN/DBW86T and https://challenge.isic-archive.com/data/#2019"
        )
    if "lesion" in images:
        images["group"] = number_groups(images["lesion"].fillna("").tolist()).numpy()
    images = _drop_tested_lesions(images) if clean else images
    clients = {site: images[images["site"] == site] for site in (found if isinstance(found, dict) else _CENTERS)}
    cleaned = ", without training images of lesions that are in test data" if clean else ""
    note, notices = f"Fed-ISIC2019, FLamby's split{cleaned}", list[str]()
    if isinstance(found, dict):
        data = _join_compact("fed-isic2019", pixels, clients, _ISIC_CLASSES, note, size)
        notices.append("these files have four centers of the six: bcn and msk are not in them")
    else:
        data = read_listed(
            found.images, clients, name="fed-isic2019", class_names=_ISIC_CLASSES, size=size or 224, note=note,
            progress=progress,
        )  # fmt: skip
        if found.images.name == _ISIC_IMAGES[1]:
            notices.append(f"{found.images} holds the images as published, without FLamby's color constancy")
    return replace(data, notices=tuple(notices)).normalize(IMAGENET)


def _check_size(size: int | None) -> None:
    if size is not None and size < 1:
        raise UsageError(f"size={size} pixels: must be at least 1")


def _join_compact(
    name: str, x: torch.Tensor, clients: dict[str, pd.DataFrame], classes: tuple[str, ...], note: str, size: int | None
) -> Federation:
    """Return the federation of clients whose images are the rows of ``x`` given by the index of their tables."""
    data = []
    for client, own in clients.items():
        splits = {}
        for part in ("train", "test"):
            listed = own[own["part"] == part]
            group = torch.tensor(listed["group"].to_numpy()) if "group" in listed else None
            y, rows = torch.tensor(listed["label"].to_numpy()), torch.tensor(listed.index.to_numpy())
            splits[part] = Samples(x=x, y=y, rows=rows, group=group)
        data.append(ClientData.from_splits(client, splits))
    joined = Federation(name=name, clients=tuple(data), classes=len(classes), note=note, class_names=classes)
    return joined if size is None else joined.fit_images(size)


def _draw_ham_test(images: pd.DataFrame, by_lesion: bool, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return a mask of the test images."""
    if not by_lesion:
        order = stream(seed, "ham10000").permutation(len(images))
        return np.isin(np.arange(len(images)), order[: round(fraction * len(images))])
    strata = np.unique(images["site"], return_inverse=True)[1] * len(_HAM_CLASSES) + images["label"].to_numpy()
    _, first, which = np.unique(images["lesion"], return_index=True, return_inverse=True)
    test = np.isin(which, split_stratified(strata[first], fraction, stream(seed, "lesions"))[1])
    if test.all() or not test.any():
        raise UsageError(f"test_fraction={fraction:g} leaves no image on one side: choose another")
    return test


def _drop_tested_lesions(images: pd.DataFrame) -> pd.DataFrame:
    """Remove training images whose lesion is known and also has test images."""
    test = images["part"] == "test"
    return images[test | ~images["lesion"].isin(images["lesion"][test].dropna())]


def _read_ham_table(found: _Published) -> pd.DataFrame:
    """Return the images in the table, with paths relative to ``found.images``."""
    there = {file.stem: file.relative_to(found.images).as_posix() for file in sorted(found.images.rglob("ISIC_*.jpg"))}
    rows = read_csv(
        found.table,
        "a table of images",
        lambda row: (row["image_id"], _HAM_CLASSES.index(row["dx"]), row["lesion_id"], row.get("dataset", "")),
    )
    missing = [name for name, *_ in rows if name not in there]
    if missing:
        raise UsageError(
            f"{len(missing)} of {len(rows)} images that {found.table} names are not below {found.images}, first "
            f"{missing[0]}.jpg: unpack both archives of images there"
        )
    return pd.DataFrame([(there[name], *facts) for name, *facts in rows], columns=["path", "label", "lesion", "site"])


def _list_isic(found: _Published) -> pd.DataFrame:
    """Return the images, with the lesion of those whose source names it if both tables of lesions exist."""
    images = pd.DataFrame(read_csv(found.table, "FLamby's list", _read_isic_row), columns=[*COLUMNS, "site"])
    folder = found.table.parent
    ham, isic = _find_file(folder, _HAM_METADATA), folder / _ISIC_METADATA
    if ham is not None and isic.is_file():
        lesions: dict[str, str] = {}
        for file, image in ((isic, "image"), (ham, "image_id")):
            rows = read_csv(file, "a table of images", itemgetter(image, "lesion_id"))
            lesions |= {f"{name}.jpg": lesion for name, lesion in rows if lesion}
        images["lesion"] = images["path"].map(lesions)
    return images


def _read_isic_row(row: dict[str, str]) -> tuple[str, int, str, str]:
    label, part = int(row["target"]), row["fold"]
    if part not in ("train", "test") or not 0 <= label < len(_ISIC_CLASSES):
        raise ValueError(f"{row['image']} has target {label} and fold {part!r}")
    return f"{row['image']}.jpg", label, part, _CENTERS[int(row["center"])]


def _read_compact(files: dict[str, Path], label: str) -> tuple[pd.DataFrame, torch.Tensor]:
    """Return a table of all sites' images, with labels in column ``label``, and their pixels ``[N, 3, H, W]``."""
    tables, x = [], []
    for site, file in files.items():
        arrays = read_npz(file, [f"{kind}_{part}" for kind in ("x", label, "lesion") for part in ("train", "test")])
        for part in ("train", "test"):
            x.append(arrays[f"x_{part}"])
            facts = {"label": arrays[f"{label}_{part}"].astype(np.int64), "lesion": arrays[f"lesion_{part}"]}
            tables.append(pd.DataFrame({**facts, "site": site, "part": part}))
    pixels = np.ascontiguousarray(np.concatenate(x).transpose(0, 3, 1, 2))
    return pd.concat(tables, ignore_index=True), torch.from_numpy(pixels)
