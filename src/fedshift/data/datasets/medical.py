"""Medical images with masks from several hospitals: FedDG's fundus and prostate, FeTS 2022, and Fed-IXI.

File layouts follow the publishers' own loaders and other code that reads the files; each function cites its source. As
in those loaders, arrays are used as stored, without reorienting them to the patient's axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ...tasks.segmentation import Segmentation
from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..decoding.resizing import resize_mask, resize_volume
from ..decoding.volumes import decode_mask, decode_volume, find_stem
from ..federation import LAZY, ClientData, Federation
from ..files.image_store import read_all
from ..files.read_options import Progress
from ..files.volumes import VolumeStore
from ..formats import read_csv
from ..partition import draw_units
from ..stores import RecentArrays
from ._card import make_card
from ._file_lists import LISTED, DomainFolders, decode_listed, find_domains, read_listed

_FUNDUS = {"Domain1": "drishti-gs", "Domain2": "rim-one-r3", "Domain3": "refuge", "Domain4": "refuge-validation"}
_SITES = ("BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL")
_MODALITIES = ("t1", "t1ce", "t2", "flair")
_CENTERS = ("Guys", "HH", "IOP")
_TUMOR = {4: 3}
"""Class of the enhancing tumor in BraTS masks, which have no class 3."""
_IXI_SHAPE = (48, 60, 48)
_HALF = (80, 120, 120)
"""About half of the 155, 240 and 240 voxels of BraTS volumes."""
_KEPT = 2**29
"""Bytes of decoded volumes to keep, enough for all of Fed-IXI."""

FEDDG_FUNDUS = make_card(
    "feddg-fundus", find=lambda folder: find_domains(folder, _FUNDUS, ("Fundus", "fundus", "Fundus-doFE"))
)

FEDDG_PROSTATE = make_card(
    "feddg-prostate", find=lambda folder: find_domains(folder, _SITES, ("Prostate", "prostate", "Processed_data_nii"))
)


def _find_fets(folder: Path) -> Path | None:
    places = (folder / "MICCAI_FeTS2022_TrainingData", folder)
    return next((place for place in places if (place / "partitioning_1.csv").is_file()), None)


FETS2022 = make_card("fets2022", find=_find_fets)


def _find_ixi(folder: Path) -> Path | None:
    for place in (*sorted(folder.glob("*/IXI_sample")), folder / "IXI_sample", folder):
        if next(place.glob("IXI*-*/label/*.nii.gz"), None) is not None:
            return place
    return None


FED_IXI = make_card("fed-ixi", find=_find_ixi)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A patient's files: one or several channels, and the mask."""

    name: str
    images: tuple[Path, ...]
    mask: Path
    part: str = ""


def feddg_fundus(root: Path, *, size: int = 384, progress: Progress | None = None) -> Federation:
    """Load FedDG's fundus images: optic disc and cup in four data sets of retinal photographs (Liu et al. 2021).

    arXiv:2103.06030. The data were compiled by DoFE (Wang et al. 2020, https://github.com/emma-sjwang/Dofe):
    ``Domain1/train/ROIs/image/*.png`` with masks of the same names in ``mask``, and ``test`` next to ``train``, as
    listed in https://github.com/zzzqzhou/RAM-DSIR (dataset/fundus). Its loader (code/dataset/fundus.py) also defines
    the gray values: above 200 is background, 51 to 200 disc, and below cup.

    Args:
        root: Directory of the data.
        size: Side in pixels of the resized square images; FedDG uses 384.
        progress: Called with ``(what is read, done, total)``.

    Returns:
        Four clients with images uint8 ``[N, 3, size, size]``; the classes background, disc (its rim) and cup.

    Raises:
        UsageError: Files are missing or cannot be read.

    """
    found: DomainFolders = FEDDG_FUNDUS.locate("feddg-fundus", root)
    lists = {}
    for domain, client in _FUNDUS.items():
        rows = []
        for part in ("train", "test"):
            place = found.folders[domain] / part
            place = place / "ROIs" if (place / "ROIs").is_dir() else place
            rows += [(file.relative_to(found.root).as_posix(), 0, part) for file in sorted(place.glob("image/*.png"))]
        lists[client] = pd.DataFrame(rows, columns=LISTED)
    names = ("background", "disc", "cup")
    note = "FedDG's fundus images, DoFE's split"
    data = read_listed(
        found.root, lists, name="feddg-fundus", class_names=names, size=size, note=note, progress=progress
    )
    gray = np.arange(256)
    classes = np.where(gray > 200, 0, np.where(gray > 50, 1, 2)).astype(np.uint8)
    clients = []
    for owner in data.clients:
        listed = lists[owner.name]
        masks = listed.assign(path=listed["path"].str.replace("/image/", "/mask/", regex=False))
        y = torch.from_numpy(classes[decode_listed(found.root, owner.name, masks, size, progress, "mask")[:, 0]])
        clients.append(owner.with_splits({k: s.with_targets(y[s.rows]) for k, s in owner.splits.items()}))
    return replace(data, clients=tuple(clients), task=Segmentation())


def feddg_prostate(
    root: Path, *, size: int = 384, slices: bool = True, test_fraction: float = 0.2, progress: Progress | None = None
) -> Federation:
    """Load FedDG's prostate images: T2-weighted MRI of six sites, from three data sets (Liu et al. 2020, 2021).

    arXiv:2007.02035 and 2103.06030; compiled in https://github.com/liuquande/SAML with slices of 384 x 384 pixels:
    ``BIDMC/Case00.nii.gz`` with ``BIDMC/Case00_segmentation.nii.gz``, in BMC and RUNMC also ``_Segmentation``. The
    zones of the prostate are one class. The files have no split of patients: ``test_fraction`` of each site's patients
    are used for testing. As in public code for these files (https://github.com/zzzqzhou/RAM-DSIR,
    code/test_prostate_volume.py), slices without prostate are excluded.

    Args:
        root: Directory of the data.
        size: Side of the slices in pixels.
        slices: Return slices as images; False: volumes, resized to the number of slices of the first volume.
        test_fraction: Fraction of patients used for testing.
        progress: Called with ``(what is read, done, total)``.

    Returns:
        Six clients with images uint8 ``[N, 1, size, size]``, or volumes float32; the classes background and prostate.

    Raises:
        UsageError: Files are missing, cannot be read, or differ in size.

    """
    found: DomainFolders = FEDDG_PROSTATE.locate("feddg-prostate", root)
    cases = {site: _list_prostate(found.folders[site]) for site in _SITES}
    made = _split(cases, test_fraction)
    note = f"FedDG's prostate images, {test_fraction:g} of each site's patients for testing"
    if not slices:
        depth = len(decode_mask(made["BIDMC"][0].mask, turn=False))
        data = _read_volumes(made, (depth, size, size), {}, progress, gland=True)
    else:
        data = tuple(_read_slices(site, made[site], size, progress) for site in _SITES)
    names = ("background", "prostate")
    return Federation(
        name="feddg-prostate", clients=data, classes=2, note=note, class_names=names, task=Segmentation(),
        notices=() if slices else (LAZY,),
    )  # fmt: skip


def fets2022(
    root: Path, *, partitioning: Literal[1, 2] = 1, size: int | tuple[int, int, int] | None = _HALF,
    test_fraction: float = 0.2, progress: Progress | None = None,
) -> Federation:  # fmt: skip
    """Load FeTS 2022: brain tumors in four kinds of MRI of 23 institutions (Pati et al. 2021, arXiv:2105.05874).

    The challenge's training data have 1,251 patients: ``partitioning_1.csv`` with columns ``Partition_ID`` and
    ``Subject_ID`` (https://github.com/FeTS-AI/Challenge, Task_1/fets_challenge/gandlf_csv_adapter.py), and BraTS
    folders ``FeTS2022_00000/FeTS2022_00000_t1.nii.gz`` with t1ce, t2, flair and seg. The published validation data have
    no masks, so ``test_fraction`` of each institution's patients, at least one, are used for testing.

    Args:
        root: Directory of the data.
        partitioning: 1 for ``partitioning_1.csv``, by institution, or 2 for ``partitioning_2.csv``.
        size: Voxels of the resized volumes, (slices, rows, columns) or one number; None: 155 x 240 x 240.
        test_fraction: Fraction of patients used for testing.
        progress: Called with ``(what is read, done, total)``.

    Returns:
        A client for each institution, with volumes of four channels that are decoded on demand; the classes background,
        necrosis, edema and enhancing tumor (4 in the files).

    Raises:
        UsageError: Files are missing or cannot be read, or an institution has only one patient.

    """
    if partitioning not in (1, 2):
        raise UsageError(f"partitioning={partitioning!r}: must be 1 or 2")
    place: Path = FETS2022.locate("fets2022", root)
    table = place / f"partitioning_{partitioning}.csv"
    cases: dict[str, list[_Case]] = {}
    rows = read_csv(table, "a table of institutions", lambda row: (int(row["Partition_ID"]), row["Subject_ID"]))
    for number, name in sorted(rows):
        files = [place / name / f"{name}_{kind}.nii.gz" for kind in (*_MODALITIES, "seg")]
        case = _Case(name=name, images=tuple(files[:-1]), mask=files[-1])
        cases.setdefault(f"institution-{number}", []).append(case)
    clients = _read_volumes(_split(cases, test_fraction), size, _TUMOR, progress)
    names = ("background", "necrosis", "edema", "enhancing tumor")
    note = f"FeTS 2022, partitioning {partitioning}, {test_fraction:g} of each institution's patients for testing"
    return Federation(
        name="fets2022", clients=clients, classes=4, note=note, class_names=names, task=Segmentation(), notices=(LAZY,)
    )


def fed_ixi(
    root: Path, *, size: int | tuple[int, int, int] = _IXI_SHAPE, test_fraction: float = 0.2,
    progress: Progress | None = None,
) -> Federation:  # fmt: skip
    """Load Fed-IXI: brains in T1-weighted MRI of three hospitals in London (Ogier du Terrail et al. 2022).

    arXiv:2210.04620; TorchIO's IXI Tiny (arXiv:2003.04696), 566 volumes, in FLamby's layout
    (https://github.com/owkin/FLamby, flamby/datasets/fed_ixi): ``IXI_sample/IXI002-Guys-0828/T1/*.nii.gz`` and
    ``label/*.nii.gz``. FLamby's split is in its ``metadata_tiny.csv`` (Patient ID, Split), which is used if it is next
    to the patients' folders or above; without it, ``test_fraction`` of each hospital's patients are used for testing.

    Args:
        root: Directory of the data.
        size: Voxels of the resized volumes, one number or three; FLamby uses 48 x 60 x 48.
        test_fraction: Fraction of patients used for testing if FLamby's table is missing.
        progress: Called with ``(what is read, done, total)``.

    Returns:
        The clients Guys, HH and IOP, with volumes that are decoded on demand; the classes background and brain.

    Raises:
        UsageError: Files are missing or cannot be read.

    """
    place: Path = FED_IXI.locate("fed-ixi", root)
    folders = (place, place.parent, place.parent / "metadata", place.parent.parent)
    table = next((folder / "metadata_tiny.csv" for folder in folders if (folder / "metadata_tiny.csv").is_file()), None)
    parts: dict[int, str] = {}
    if table is not None:
        parts = dict(read_csv(table, "FLamby's table", lambda row: (int(row["Patient ID"]), row["Split"])))
    cases: dict[str, list[_Case]] = {center: [] for center in _CENTERS}
    for folder in sorted(place.glob("IXI*-*")):
        number, center, *_ = folder.name.split("-")
        files = [sorted((folder / kind).glob("*.nii.gz")) for kind in ("T1", "label")]
        if center not in cases or not number[3:].isdecimal() or not all(files):
            raise UsageError(f"{folder} is not a patient of IXI, with T1 and label: get it again")
        part = parts.get(int(number[3:]), "") if parts else ""
        if parts and part not in ("train", "test"):
            raise UsageError(f"{table} does not say whether {folder.name} is for training or testing: get it again")
        cases[center].append(_Case(name=folder.name, images=(files[0][0],), mask=files[1][0], part=part))
    clients = _read_volumes(cases if parts else _split(cases, test_fraction), size, {}, progress)
    split = "FLamby's split" if parts else f"{test_fraction:g} of each hospital's patients for testing"
    return Federation(
        name="fed-ixi", clients=clients, classes=2, note=f"Fed-IXI, {split}", class_names=("background", "brain"),
        task=Segmentation(), notices=(LAZY,),
    )  # fmt: skip


def _list_prostate(folder: Path) -> list[_Case]:
    """Return the patients in a site's folder."""
    files = {find_stem(file.name).lower(): file for file in sorted(folder.iterdir()) if ".nii" in file.name.lower()}
    masks = {name: file for name, file in files.items() if name.endswith("_segmentation")}
    cases = []
    for name, file in files.items():
        if name not in masks:
            mask = masks.get(f"{name}_segmentation")
            if mask is None:
                raise UsageError(
                    f"{file} has no mask {find_stem(file.name)}_segmentation.nii.gz next to it: get it again"
                )
            cases.append(_Case(name=name, images=(file,), mask=mask))
    if not cases:
        raise UsageError(f"{folder} holds no NIfTI file: unpack the archive again")
    return cases


def _split(cases: Mapping[str, Sequence[_Case]], fraction: float) -> dict[str, list[_Case]]:
    """Return the patients, with ``fraction`` of each client's patients, at least one, drawn once for testing."""
    made = {}
    for client, own in cases.items():
        if len(own) < 2:
            raise UsageError(f"client {client!r} has {len(own)} patients, too few to train and to test: get its files")
        tested = draw_units(len(own), fraction, stream(0, "test", client))
        made[client] = [replace(case, part="test" if k in tested else "train") for k, case in enumerate(own)]
    return made


def _refuse(broken: Mapping[Path, str]) -> None:
    for file, why in broken.items():
        raise UsageError(f"{len(broken)} files cannot be read, first {file}: {why}; get them again")


def _require(cases: Sequence[_Case]) -> None:
    """Raise :class:`UsageError` if files of patients are missing."""
    lacking = [file for case in cases for file in (*case.images, case.mask) if not file.is_file()]
    if lacking:
        raise UsageError(f"{len(lacking)} files are not there, first {lacking[0]}: unpack the archive again")


def _rows(cases: Sequence[_Case]) -> dict[str, NDArray[np.int64]]:
    return {
        part: np.array([k for k, case in enumerate(cases) if case.part == part], np.int64) for part in ("train", "test")
    }


def _read_volumes(
    cases: Mapping[str, Sequence[_Case]],
    size: int | tuple[int, int, int] | None,
    renamed: Mapping[int, int],
    progress: Progress | None,
    *,
    gland: bool = False,
) -> tuple[ClientData, ...]:
    """Return clients with volumes that are decoded on demand, and masks whose classes are ``renamed``.

    ``gland``: merge all classes except the background into one.
    """
    flat = [case for own in cases.values() for case in own]
    _require(flat)
    if isinstance(size, int):
        size = (size, size, size)
    places = size or decode_mask(flat[0].mask, turn=False).shape
    table = np.arange(256, dtype=np.uint8)
    for before, after in renamed.items():
        table[before] = after
    table = np.minimum(table, 1) if gland else table

    def fit(file: Path) -> NDArray[np.uint8]:
        return resize_mask(torch.from_numpy(table[decode_mask(file, turn=False)]), places).numpy()

    masks, broken = read_all({case.mask: case.mask for case in flat}, fit, "masks", progress)
    _refuse(broken)
    recent, clients = RecentArrays(_KEPT), []
    for client, own in cases.items():
        rows = _rows(own)
        lacking = [part for part, index in rows.items() if not len(index)]
        if lacking:
            raise UsageError(f"client {client!r} has no patient for {lacking[0]}: get its files again")
        shape = (len(own[0].images), *places)
        store = VolumeStore([case.images for case in own], shape, f"client {client!r}", recent, turn=False)
        y = torch.from_numpy(np.stack([masks[case.mask] for case in own]))
        clients.append(ClientData.from_rows(client, store, y, rows, tuple(case.name for case in own)))
    return tuple(clients)


def _read_slices(site: str, cases: Sequence[_Case], size: int, progress: Progress | None) -> ClientData:
    """Return a client with the slices that show the prostate, uint8 ``[N, 1, size, size]``."""
    _require(cases)

    def fit(image: Path) -> Any:
        case = by_image[image]
        volume, mask = decode_volume(image, turn=False)[0], decode_mask(case.mask, turn=False)
        if volume.shape != mask.shape:
            sizes = (" x ".join(map(str, each.shape)) for each in (mask, volume))
            raise UsageError(f"mask {case.mask} has {next(sizes)} voxels, but its image {next(sizes)}: get both again")
        kept = mask.reshape(len(mask), -1).any(axis=1)
        x = resize_volume(torch.from_numpy(volume[kept]), (size, size))
        y = [resize_mask(torch.from_numpy((each > 0).astype(np.uint8)), (size, size)) for each in mask[kept]]
        return x.add(1).mul(127.5).round().to(torch.uint8), torch.stack(y) if y else torch.zeros(0, size, size).byte()

    by_image = {case.images[0]: case for case in cases}
    found, broken = read_all({image: image for image in by_image}, fit, f"volumes of {site}", progress)
    _refuse(broken)
    parts = [found[case.images[0]] for case in cases]
    of = np.repeat(np.arange(len(cases)), [len(x) for x, _ in parts])
    tested = np.isin(of, _rows(cases)["test"])
    rows = {"train": np.flatnonzero(~tested), "test": np.flatnonzero(tested)}
    if not (len(rows["train"]) and len(rows["test"])):
        raise UsageError(f"client {site!r} has no slice with prostate to train or to test on: get its files again")
    x, y = (torch.cat([part[k] for part in parts]) for k in range(2))
    return ClientData.from_rows(site, x[:, None], y, rows)
