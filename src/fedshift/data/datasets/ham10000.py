"""HAM10000: 10,015 dermatoscopic images of pigmented skin lesions (Tschandl et al. 2018, doi:10.1038/sdata.2018.161).

Many lesions were photographed more than once (7,470 lesions), so that a random split of images, as in FedMMB
(Nasirigerdeh et al., arXiv:2011.07006, section 4.3: 8,012 and 2,003), has the same lesions on both sides. Here lesions
are split. The images are 600 pixels wide and 450 high; FedMMB's, and these, 200 and 150.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..files.read_options import Progress
from ..formats import explain_errors
from ..samples import Samples
from ._card import Card
from ._dermoscopy import SITES, find_compact, find_metadata, read_compact, split_by_lesion
from ._file_lists import ListedImage, read_listed

HEIGHT, WIDTH = 150, 200
"""Pixels of FedMMB's images (section 4.3)."""
_CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")


@dataclass(frozen=True, kw_only=True)
class _Published:
    """The table of images, and the folder below which they are."""

    table: Path
    folder: Path


def _find(folder: Path) -> _Published | dict[str, Path] | None:
    table = find_metadata(folder)
    if table is not None and next(folder.rglob("ISIC_*.jpg"), None) is not None:
        return _Published(table=table, folder=folder)
    return find_compact(folder)


CARD = Card(
    title="HAM10000, seven kinds of pigmented skin lesions",
    clients=("ham10000",),
    classes=7,
    samples="10,015 images of 7,470 lesions: 6,705 nv, 1,113 mel, 1,099 bkl, 514 bcc, 327 akiec, 142 vasc, 115 df",
    license="CC BY-NC 4.0",
    homepage="https://doi.org/10.7910/DVN/DBW86T",
    source="Tschandl et al. 2018, doi:10.1038/sdata.2018.161; FedMMB, arXiv:2011.07006",
    layout=(
        "HAM10000_metadata (or .csv, .tab) and the unpacked images ISIC_<number>.jpg, in folders of any name; or "
        f"the files {', '.join(f'{site}.npz' for site in SITES)}"
    ),
    find=_find,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Images:
    """N images: files or pixels ``x``, labels, lesions, and sites (empty where unknown)."""

    x: NDArray[Any]
    y: NDArray[np.int64]
    lesion: NDArray[Any]
    site: NDArray[Any]


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
    """One client with all images, or one for each of the four sites; uint8 ``[N, 3, H, W]``, seven classes.

    ``size``: pixels of a side, to which images are squashed; without it the published ones are 150 high and 200 wide,
    and the compact ones as their files have them (32 x 32).
    ``test_fraction`` is for testing, of the lesions of each class and site with all of their images, or with
    ``by_lesion=False`` of the images at random. Raises :class:`UsageError` for other choices and files.
    """
    if by not in ("one", "site"):
        raise UsageError(f"by={by!r}: must be 'one' (a single client) or 'site'")
    if not 0 < test_fraction < 1:
        raise UsageError(f"test_fraction={test_fraction:g}: must lie between 0 and 1")
    if size is not None and size < 1:
        raise UsageError(f"size={size} pixels: must be at least 1")
    found = CARD.locate("ham10000", root)
    published = isinstance(found, _Published)
    images = _read_table(found) if published else _read_compact(found)
    if by == "site" and "" in images.site:
        raise UsageError(f"by='site': {found.table} has no column 'dataset', which names the site; use by='one'")
    of = images.site if by == "site" else np.full(len(images.y), "ham10000")
    sides = dict(zip(("train", "test"), _split_images(images, by_lesion, test_fraction, seed), strict=True))
    clients = {
        name: {part: rows[of[rows] == name] for part, rows in sides.items()} for name in sorted(set(of.tolist()))
    }
    note = f"HAM10000, {'lesions' if by_lesion else 'images'} split at random, {test_fraction:g} for testing"
    if published:
        listed = {
            name: [
                ListedImage(path=str(images.x[row]), label=int(images.y[row]), part=part)
                for part, rows in parts.items()
                for row in rows
            ]
            for name, parts in clients.items()
        }
        return read_listed(
            found.folder, listed, name="ham10000", class_names=_CLASSES, size=size or (HEIGHT, WIDTH),
            note=note, progress=progress,
        )  # fmt: skip
    store = torch.from_numpy(images.x)

    def split(rows: NDArray[np.int64]) -> Samples:
        return Samples(x=store, y=torch.from_numpy(images.y[rows]), rows=torch.from_numpy(rows))

    federation = Federation(
        name="ham10000",
        clients=tuple(
            ClientData(name=name, train=split(parts["train"]), test=split(parts["test"]))
            for name, parts in clients.items()
        ),
        classes=len(_CLASSES),
        note=note,
        class_names=_CLASSES,
    )
    return federation if size is None else federation.fit_images(size)


def _split_images(
    images: _Images, by_lesion: bool, fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if by_lesion:
        site = np.unique(images.site, return_inverse=True)[1]
        return split_by_lesion(images.lesion, site * len(_CLASSES) + images.y, fraction, seed)
    order = stream(seed, "ham10000").permutation(len(images.y))
    count = round(fraction * len(order))
    return np.sort(order[count:]), np.sort(order[:count])


def _read_table(found: _Published) -> _Images:
    """The images that the table names; ``x`` is where each is from ``found.folder``."""
    there = {file.stem: file.relative_to(found.folder).as_posix() for file in sorted(found.folder.rglob("ISIC_*.jpg"))}
    with explain_errors(found.table, "a table of images"), found.table.open(encoding="utf-8-sig", newline="") as table:
        rows = list(csv.DictReader(table, delimiter="\t" if found.table.suffix == ".tab" else ","))
        missing = [row["image_id"] for row in rows if row["image_id"] not in there]
        if missing:
            raise UsageError(
                f"{len(missing)} of {len(rows)} images that {found.table} names are not below {found.folder}, first "
                f"{missing[0]}.jpg: unpack both archives of images there"
            )
        return _Images(
            x=np.array([there[row["image_id"]] for row in rows]),
            y=np.array([_CLASSES.index(row["dx"]) for row in rows]),
            lesion=np.array([row["lesion_id"] for row in rows]),
            site=np.array([row.get("dataset", "") for row in rows]),
        )


def _read_compact(files: dict[str, Path]) -> _Images:
    """The images of all sites; ``x`` holds their pixels ``[N, 3, H, W]``."""
    parts = [(site, part) for site, file in files.items() for part in read_compact(file, "dx").values()]
    pixels = np.concatenate([part["x"] for _, part in parts]).transpose(0, 3, 1, 2)
    return _Images(
        x=np.ascontiguousarray(pixels),
        y=np.concatenate([part["y"] for _, part in parts]).astype(np.int64),
        lesion=np.concatenate([part["lesion"] for _, part in parts]),
        site=np.concatenate([np.full(len(part["y"]), site) for site, part in parts]),
    )
