"""Peak memory of training on a federation in files that is larger than the limit; more than the limit fails.

Four clients with images of 3 x 256 x 256 bytes in ``x.npy`` files are written, as sparse files in which one sample of a
hundred takes room on disk, and one round of FedBN, an epoch at each client, is run by ``fedshift.compare`` in a fresh
process. Measured is that process's peak resident memory (VmHWM of /proc/self/status, elsewhere getrusage): Python,
torch and pages of files are included. ``memory`` gives the same arrays as copies in memory, to compare.

Run ``python benchmarks/lazy.py [GIGABYTES] [LIMIT] [mapped|memory]``, by default 20 gigabytes and a limit of 2.

``python benchmarks/lazy.py ahead [PAIRS]`` compares reading the next batch while the present one trains with reading it
afterwards: the median, over pairs of runs one after the other, of the seconds with over those without, of images in
``x.npy`` files and, where nibabel is installed, of volumes in ``.nii.gz`` files, which have to be decompressed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
import torch
from loading import peak
from torch import nn

SHAPE = (3, 256, 256)
CLIENTS = ("north", "east", "south", "west")
DENSE = 100
"""One sample of so many is written."""


def write(folder: Path, gigabytes: float) -> int:
    """Write the files; return the bytes of all samples."""
    random, held = np.random.default_rng(0), 0
    samples = int(gigabytes * 1e9 / np.prod(SHAPE) / len(CLIENTS))
    for client in CLIENTS:
        for part, count in (("train", samples - samples // 20), ("test", samples // 20)):
            place = folder / client / part
            place.mkdir(parents=True)
            x = np.lib.format.open_memmap(place / "x.npy", "w+", np.uint8, (count, *SHAPE))
            for row in range(0, count, DENSE):
                x[row] = random.integers(0, 256, SHAPE, np.uint8)
            np.save(place / "y.npy", np.arange(count) % 10)
            held += x.nbytes
    return held


def patches(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network that costs little, so that reading counts."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 8, 16, stride=16), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, classes)
    )


def measure(folder: Path, kind: str) -> dict[str, float]:
    import fedshift

    data: object = folder
    if kind == "memory":
        parts = [("train", "x"), ("train", "y"), ("test", "x"), ("test", "y")]
        data = {
            name: tuple(np.load(folder / name / part / f"{which}.npy") for part, which in parts) for name in CLIENTS
        }
    before = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        made = fedshift.compare(
            data=data,
            methods="fedbn",
            model=patches,
            rounds=1,
            batch_size=32,
            engine="sequential",
            out=Path(out, "run"),
            progress=False,
        )
        samples = made.records.query("split == 'train'")["samples"].sum()
    return {"samples": int(samples), "seconds": time.perf_counter() - before, "peak": peak()}


def main(gigabytes: float = 20, limit: float = 2, kind: str = "mapped") -> int:
    with tempfile.TemporaryDirectory() as place:
        held = write(Path(place, "data"), gigabytes)
        command = [sys.executable, __file__, "measure", str(Path(place, "data")), kind]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    print(f"samples: {held / 1e9:.2f} GB, {kind}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"one round on {found['samples']:,} of them, its evaluation and report: {found['seconds']:.0f} s")
    print(f"peak memory: {found['peak'] / 1e9:.2f} GB; limit {limit:g} GB")
    return int(found["peak"] > limit * 1e9)


def write_volumes(folder: Path) -> None:
    import nibabel

    random = np.random.default_rng(0)
    for client in CLIENTS[:2]:
        for row in range(20):
            x = random.normal(size=(48, 48, 48)).astype(np.float32)
            for kind, values in (("images", x), ("masks", (x > 0).astype(np.uint8))):
                place = folder / client / kind
                place.mkdir(parents=True, exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), place / f"{row}.nii.gz")


def train(data: Path, model: object, *, ahead: bool) -> float:
    """Return the seconds of two rounds of FedBN."""
    import fedshift
    from fedshift.engines.sequential import Sequential

    if not ahead:
        Sequential._load_ahead = lambda engine, name, batches: (engine.load_batch(name, *batch) for batch in batches)
    before = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        fedshift.compare(
            data=data, methods="fedbn", model=model, rounds=2, evaluate_every=2, batch_size=8, engine="sequential",
            out=Path(out, "run"), progress=False,
        )  # fmt: skip
    return time.perf_counter() - before


def compare_ahead(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        cases: dict[str, tuple[Path, object]] = {"images in x.npy": (Path(place, "images"), patches)}
        write(cases["images in x.npy"][0], 0.4)
        if find_spec("nibabel"):
            cases["volumes in .nii.gz"] = (Path(place, "volumes"), "unet-small(width=2)")
            write_volumes(cases["volumes in .nii.gz"][0])
        for name, (folder, model) in cases.items():
            train(folder, model, ahead=True)
            seconds = [[train(folder, model, ahead=ahead) for ahead in (True, False)] for _ in range(pairs)]
            ratios = [one / other for one, other in seconds]
            print(
                f"{name}: read ahead takes {median(ratios):.2f} times as long (from {min(ratios):.2f} to "
                f"{max(ratios):.2f} in {pairs} pairs, {median(one for one, _ in seconds):.1f} s)"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["ahead"]:
        compare_ahead(int(sys.argv[2]) if len(sys.argv) > 2 else 5)
    elif sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(Path(sys.argv[2]), sys.argv[3])))
    else:
        numbers = [float(value) for value in sys.argv[1:3]]
        sys.exit(main(*numbers, *sys.argv[3:]))
