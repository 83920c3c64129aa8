"""Peak memory of training on a federation in files that is larger than the limit; more than the limit fails.

Four clients with images of 3 x 256 x 256 bytes in ``x.npy`` files are written, as sparse files in which one sample of a
hundred takes room on disk, and one round of FedBN, an epoch at each client, is run by ``fedshift.compare`` in a fresh
process. Measured is that process's peak resident memory (VmHWM of /proc/self/status, elsewhere getrusage): Python,
torch and pages of files are included. ``memory`` gives the same arrays as copies in memory, to compare.

Run ``python benchmarks/lazy.py [GIGABYTES] [LIMIT] [mapped|memory]``, by default 20 gigabytes and a limit of 2.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(Path(sys.argv[2]), sys.argv[3])))
    else:
        numbers = [float(value) for value in sys.argv[1:3]]
        sys.exit(main(*numbers, *sys.argv[3:]))
