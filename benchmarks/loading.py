"""Peak memory of reading a directory, over the bytes of the arrays that come out; more than twice fails.

Temporary files of each kind are written, and each is read in a fresh process: images decoded, the same images from the
cache, .npz files of three clients and of one, and tables as CSV and as Parquet. Measured is the process's peak resident
memory (VmHWM of /proc/self/status, elsewhere getrusage) above that after the bare imports. Every array is summed after
reading, so that mapped pages count. Arrow takes 50 to 150 MB of its own, whatever the size of a table, so that a small
one would exceed twice its arrays; here tables are as large as the other arrays, some 200 MB.

Run ``python benchmarks/loading.py``: about two minutes, 1.5 GB of temporary disk.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from fedshift.data.files.read_options import ReadOptions
from PIL import Image

import fedshift.data.readers.folders
import fedshift.data.readers.tables  # noqa: F401 - every process has the same bare imports
from fedshift.data.assembly import read_source
from fedshift.data.federation import Federation

LIMIT = 2.0
CLIENTS = ("north", "south", "west")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is read: a name, the function that writes it, and the choices for reading it (see ``Reading``)."""

    name: str
    write: Callable[[Path], None]
    choices: dict[str, str]


def photos(folder: Path) -> None:
    """3 clients of 2 classes, 3,000 JPEG files of 160 x 160 pixels in color: 230 MB decoded."""
    blocks = np.random.default_rng(0).integers(0, 256, (3000, 10, 10, 3)).astype(np.uint8)
    for i, block in enumerate(blocks):
        file = folder / CLIENTS[i % 3] / f"class{i % 2}" / f"{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(block).resize((160, 160)).save(file)


def scans(folder: Path) -> None:
    """3 clients of 2 classes, 900 16-bit gray PNG files of 256 x 256 pixels: 236 MB decoded."""
    shades = np.random.default_rng(0).integers(0, 4096, (900, 1, 256)).astype(np.uint16)
    for i, shade in enumerate(shades):
        file = folder / CLIENTS[i % 3] / f"class{i % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.repeat(shade, 256, axis=0)).save(file, compress_level=1)


def arrays(folder: Path, clients: Sequence[str] = CLIENTS) -> None:
    """Together 240 MB of images, channels last, in one .npz file a client."""
    random = np.random.default_rng(0)
    for client in clients:
        x = random.integers(0, 256, (3900 // len(clients), 144, 144, 3), np.uint8)
        y, border = np.arange(len(x)) % 10, len(x) // 10
        folder.mkdir(exist_ok=True)
        np.savez(folder / f"{client}.npz", x_train=x[border:], y_train=y[border:], x_test=x[:border], y_test=y[:border])


def one_client(folder: Path) -> None:
    arrays(folder, CLIENTS[:1])


def table() -> pa.Table:
    """40 numbers in each of 1,200,000 rows: 192 MB as float32."""
    rows, random = 1_200_000, np.random.default_rng(0)
    features = {f"f{i}": random.standard_normal(rows).round(4) for i in range(40)}
    return pa.table({"site": random.choice(CLIENTS, rows), "outcome": random.integers(0, 2, rows), **features})


def csv(folder: Path) -> None:
    folder.mkdir()
    pa.csv.write_csv(table(), folder / "table.csv")


def parquet(folder: Path) -> None:
    folder.mkdir()
    pa.parquet.write_table(table(), folder / "table.parquet")


COLUMNS = {"client_column": "site", "target": "outcome"}
CASES = {
    case.name: case
    for case in (
        Case(name="images, decoded", write=photos, choices={}),
        Case(name="images, cached", write=photos, choices={}),
        Case(name="16-bit images, decoded", write=scans, choices={}),
        Case(name="16-bit images, cached", write=scans, choices={}),
        Case(name=".npz, three clients", write=arrays, choices={}),
        Case(name=".npz, one client", write=one_client, choices={}),
        Case(name="CSV table", write=csv, choices=COLUMNS),
        Case(name="Parquet table", write=parquet, choices=COLUMNS),
    )
}


def peak() -> int:
    """Peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what this process was before it became Python
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def held(federation: Federation) -> int:
    """Bytes of all samples and labels; each array is gone through once, and counted once where splits share it."""
    stores = {}
    for client in federation.clients:
        for split in client.splits.values():
            stores[split.store.data_ptr()] = split.store
            stores[split.y.data_ptr()] = split.y
    for store in stores.values():
        store.numpy().sum()
    return sum(store.nbytes for store in stores.values())


def measure(folder: Path, cache: Path, choices: dict[str, str]) -> dict[str, int]:
    before = peak()
    federation = read_source(folder, ReadOptions(cache=cache, **choices))  # type: ignore[arg-type]
    size = held(federation)
    return {"bytes": size, "peak": peak() - before}


def main() -> int:
    over = []
    with tempfile.TemporaryDirectory() as place:
        print(f"{'':24}{'arrays':>12}{'peak':>12}{'ratio':>8}")
        for case in CASES.values():
            folder = Path(place, case.write.__name__)
            if not folder.exists():
                case.write(folder)
            command = [sys.executable, __file__, case.name, str(folder), str(Path(place, "cache"))]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            ratio = found["peak"] / found["bytes"]
            over += [case.name] if ratio > LIMIT else []
            mega = (f"{found[name] / 1e6:9,.0f} MB" for name in ("bytes", "peak"))
            print(
                f"{case.name:24}{''.join(mega)}{ratio:8.2f}{'  MORE THAN TWICE' if ratio > LIMIT else ''}", flush=True
            )
    print(
        f"more than {LIMIT:g} times the arrays: {', '.join(over)}" if over else f"all within {LIMIT:g} times the arrays"
    )
    return 1 if over else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        name, folder, cache = sys.argv[1:]
        print(json.dumps(measure(Path(folder), Path(cache), CASES[name].choices)))
    else:
        sys.exit(main())
