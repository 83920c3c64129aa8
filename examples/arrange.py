"""Arrange published data so that fedshift reads them: ``python examples/arrange.py fed-ixi IXI_sample arranged``.

docs/published-data.md has the commands. Files that need no change become links; each function says what is changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nibabel  # noqa: TID253 - a script
import numpy as np
import pandas as pd
from PIL import Image

CORRUPTIONS = ("gaussian_noise", "defocus_blur", "snow", "contrast", "pixelate")
SEVERITY = 5


def link(file: Path, place: Path) -> None:
    """Make ``place`` a link to ``file``."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(file.resolve())


def save_volume(values: np.ndarray, like: Path, place: Path) -> None:
    """Write a volume that lies as the one of the file ``like``."""
    place.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, nibabel.load(like).affine), place)


def camelyon17(root: Path, out: Path) -> None:
    """Hospitals as clients; names begin with the slide, of which neighboring patches are similar."""
    for row in pd.read_csv(root / "metadata.csv", dtype={"patient": str}).itertuples():
        node = f"patient_{row.patient}_node_{row.node}"
        patch = f"patch_{node}_x_{row.x_coord}_y_{row.y_coord}.png"
        kind = ("normal", "tumor")[int(row.tumor)]
        link(root / "patches" / node / patch, out / f"hospital_{row.center}" / kind / f"slide{row.slide}_{patch}")


def cifar10_c(root: Path, out: Path) -> None:
    """Corruptions as clients that share no image; a fifth of the images is for testing."""
    labels = np.load(root / "labels.npy")
    count = len(labels) // 5
    for number, name in enumerate(CORRUPTIONS):
        rows = np.arange((SEVERITY - 1) * count + number, SEVERITY * count, len(CORRUPTIONS))
        x, y, end = np.load(root / f"{name}.npy", mmap_mode="r")[rows], labels[rows], len(rows) * 4 // 5
        np.savez(out / f"{name}.npz", x_train=x[:end], y_train=y[:end], x_test=x[end:], y_test=y[end:])


def femnist(root: Path, out: Path) -> None:
    """Writers as clients, from the folders train and test of LEAF's script."""
    writers: dict[str, dict[str, np.ndarray]] = {}
    for part in ("train", "test"):
        for file in sorted((root / part).glob("*.json")):
            for writer, own in json.loads(file.read_text())["user_data"].items():
                pixels = np.rint(255 * np.reshape(own["x"], (-1, 28, 28))).astype(np.uint8)
                writers.setdefault(writer, {}).update({f"x_{part}": pixels, f"y_{part}": np.array(own["y"])})
    for writer, arrays in writers.items():
        if len(arrays) == 4:
            np.savez(out / f"{writer}.npz", **arrays)


def feddg_fundus(root: Path, out: Path) -> None:
    """Domains as clients; gray above 200 is background, above 50 the disc, below the cup."""
    for mask in sorted(root.glob("Domain*/*/ROIs/mask/*.png")):
        place = out / mask.parts[-5] / mask.parts[-4]
        gray = np.asarray(Image.open(mask).convert("L"))
        (place / "masks").mkdir(parents=True, exist_ok=True)
        classes = np.select([gray > 200, gray > 50], [0, 1], 2)
        Image.fromarray(classes.astype(np.uint8)).save(place / "masks" / mask.name)
        link(mask.parents[1] / "image" / mask.name, place / "images" / mask.name)


def feddg_prostate(root: Path, out: Path) -> None:
    """Sites as clients; the zones of the prostate become one class."""
    for mask in sorted(root.glob("*/Case*_[sS]egmentation.nii.gz")):
        name = mask.name.rpartition("_")[0] + ".nii.gz"
        values = np.asarray(nibabel.load(mask).dataobj) > 0
        save_volume(values.astype(np.uint8), mask, out / mask.parent.name / "masks" / name)
        link(mask.parent / name, out / mask.parent.name / "images" / name)


def fets2022(root: Path, out: Path) -> None:
    """Institutions of partitioning_1.csv as clients; four kinds of MRI as channels; class 4 becomes 3."""
    for row in pd.read_csv(root / "partitioning_1.csv").itertuples():
        place, start = out / f"institution-{row.Partition_ID}", root / row.Subject_ID / row.Subject_ID
        kinds = [Path(f"{start}_{kind}.nii.gz") for kind in ("t1", "t1ce", "t2", "flair")]
        channels = np.stack([np.asarray(nibabel.load(file).dataobj) for file in kinds], axis=-1)
        save_volume(channels, kinds[0], place / "images" / f"{row.Subject_ID}.nii.gz")
        mask = np.asarray(nibabel.load(f"{start}_seg.nii.gz").dataobj)
        save_volume(
            np.where(mask == 4, 3, mask).astype(np.uint8), kinds[0], place / "masks" / f"{row.Subject_ID}.nii.gz"
        )


def fed_ixi(root: Path, out: Path) -> None:
    """Hospitals as clients; FLamby's split, if its metadata_tiny.csv is beside the patients' folders."""
    table, parts = root / "metadata_tiny.csv", {}
    if table.is_file():
        parts = {int(row["Patient ID"]): row["Split"] for _, row in pd.read_csv(table).iterrows()}
    for patient in sorted(root.glob("IXI*-*")):
        number, hospital, *_ = patient.name.split("-")
        place = out / hospital / (parts[int(number[3:])] if parts else "")
        for kind, folder in (("T1", "images"), ("label", "masks")):
            link(next((patient / kind).glob("*.nii.gz")), place / folder / f"{patient.name}.nii.gz")


ARRANGE = {
    "camelyon17": camelyon17, "cifar10-c": cifar10_c, "femnist": femnist, "feddg-fundus": feddg_fundus,
    "feddg-prostate": feddg_prostate, "fets2022": fets2022, "fed-ixi": fed_ixi,
}  # fmt: skip

if __name__ == "__main__":
    _, name, root, out = sys.argv
    Path(out).mkdir(parents=True, exist_ok=True)
    ARRANGE[name](Path(root), Path(out))
