"""Dermatoscopic images of pigmented skin lesions: HAM10000 and Fed-ISIC2019, which contains its four sources.

In addition to the published images, compact files of the four sources with images of 32 x 32 pixels can be read.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ...tasks import CLASSIFICATION
from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..federation import Federation
from ..formats import read_csv, read_npz
from ..partition import split_stratified
from ..preparation import IMAGENET
from ..source import Array, Decoded, Progress, Rows, Source
from ._card import make_card, require_choices
from ._file_lists import COLUMNS, assemble_listed, read_listed

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


_Found = tuple[Path, Path] | dict[str, Path]
"""A folder of published images and the table that lists them, or the compact file of each site."""


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
        return folder, table
    return _find_compact(folder)


def _find_isic(folder: Path) -> _Found | None:
    table = _find_file(folder, _FLAMBY_LISTS)
    images = next((folder / name for name in _ISIC_IMAGES if (folder / name).is_dir()), None)
    if table is not None and images is not None:
        return images, table
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
    images, pixels = (
        _read_compact(found, "dx") if isinstance(found, dict) else (_read_ham_table(*found), torch.empty(0))
    )
    if by == "site" and "" in set(images["site"]):
        raise UsageError("by='site': HAM10000_metadata has no column 'dataset', which names the site; use by='one'")
    tested = _draw_ham_test(images, by_lesion, test_fraction, seed)
    images["part"] = np.where(tested, "test", "train")
    images["client"] = images["site"] if by == "site" else "ham10000"
    if by_lesion:
        images["group"] = images["lesion"]
    images = images.sort_values("part", ascending=False, kind="stable")
    clients = {name: images[images["client"] == name] for name in sorted(set(images["client"]))}
    note = f"HAM10000, {'lesions' if by_lesion else 'images'} split at random, {test_fraction:g} for testing"
    facts = {"name": "ham10000", "class_names": _HAM_CLASSES, "note": note}
    return _read(found, pixels, clients, size, _HAM_SIZE, progress, **facts)


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
    images, pixels = _read_compact(found, "y") if isinstance(found, dict) else (_list_isic(found[1]), torch.empty(0))
    if clean and "lesion" not in images:
        raise UsageError(
            f"clean=True needs HAM10000_metadata and {_ISIC_METADATA} next to FLamby's list, which name the lesions: "
            "get them from https://doi.org/10.7910/DVN/DBW86T and https://challenge.isic-archive.com/data/#2019"
        )
    if "lesion" in images:
        images["group"] = images["lesion"]
    images = _drop_tested_lesions(images) if clean else images
    sites = found if isinstance(found, dict) else _CENTERS
    clients = {site: images[images["site"] == site] for site in sites}
    note = f"Fed-ISIC2019, FLamby's split{', without training images of lesions that are in test data' * clean}"
    facts = {"name": "fed-isic2019", "class_names": _ISIC_CLASSES, "note": note}
    data, told = _read(found, pixels, clients, size, 224, progress, **facts), ""
    if isinstance(found, dict):
        told = "these files have four centers of the six: bcn and msk are not in them"
    elif found[0].name == _ISIC_IMAGES[1]:
        told = f"{found[0]} holds the images as published, without FLamby's color constancy"
    return replace(data, notices=(*data.notices, *filter(None, [told]))).normalize(IMAGENET)


def _check_size(size: int | None) -> None:
    if size is not None and size < 1:
        raise UsageError(f"size={size} pixels: must be at least 1")


def _read(
    found: _Found, pixels: torch.Tensor, clients: dict[str, pd.DataFrame], size: int | None,
    usual: int | tuple[int, int], progress: Progress | None, **facts: Any,
) -> Federation:  # fmt: skip
    """Return the federation of clients whose images are files, or the rows of ``pixels`` that their tables number."""
    if isinstance(found, tuple):
        return read_listed(found[0], clients, size=size or usual, progress=progress, **facts)
    y = torch.tensor(pd.concat(clients.values())["label"].reindex(range(len(pixels)), fill_value=0).to_numpy())
    rows = [Rows.of(name, 0, len(own), split=own["part"].tolist(), place=own.index) for name, own in clients.items()]
    source = Source(
        rows=Rows.join(rows), arrays=(Array(where=facts["name"], y=y),),
        decode=lambda _: Decoded(stores=[pixels]), task=CLASSIFICATION, classes=len(facts["class_names"]),
        classes_checked=True, **facts,
    )  # fmt: skip
    data = assemble_listed(source, clients)
    return data if size is None else data.fit_images(size)


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


def _read_ham_table(folder: Path, table: Path) -> pd.DataFrame:
    """Return the images in the table, with paths relative to ``folder``."""
    there = {file.stem: file.relative_to(folder).as_posix() for file in sorted(folder.rglob("ISIC_*.jpg"))}
    rows = read_csv(
        table,
        "a table of images",
        lambda row: (row["image_id"], _HAM_CLASSES.index(row["dx"]), row["lesion_id"], row.get("dataset", "")),
    )
    missing = [name for name, *_ in rows if name not in there]
    if missing:
        raise UsageError(
            f"{len(missing)} of {len(rows)} images that {table} names are not below {folder}, first "
            f"{missing[0]}.jpg: unpack both archives of images there"
        )
    return pd.DataFrame([(there[name], *facts) for name, *facts in rows], columns=["path", "label", "lesion", "site"])


def _list_isic(table: Path) -> pd.DataFrame:
    """Return the images, with the lesion of those whose source names it if both tables of lesions exist."""
    images = pd.DataFrame(read_csv(table, "FLamby's list", _read_isic_row), columns=[*COLUMNS, "site"])
    ham, isic = _find_file(table.parent, _HAM_METADATA), table.parent / _ISIC_METADATA
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
