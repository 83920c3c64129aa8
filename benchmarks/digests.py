"""Digests of what methods, engines and readers compute, in float32, of this commit or beside those of another.

    python benchmarks/digests.py > mine.txt             # lines "key  digest", about two minutes on one core
    python benchmarks/digests.py --against HEAD~1       # the lines that differ from those of a commit; status 1 if any
    python benchmarks/digests.py --only 'fedbn*'        # the keys that match a pattern

A line's digest covers the records of a comparison (all rows, but no times) and all tensors of its last checkpoint: the
server, every client, memories of rules and optimizers, without their names, so that a renamed entry changes nothing.
Both commits run on this machine, each with its own copy of this file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from safetensors.torch import load
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedshift
from fedshift.config.expressions import list_catalog
from fedshift.methods import METHODS
from fedshift.results.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
BASES = {"dp_sgd": "gn+dp_sgd"}
"""Methods that refuse BatchNorm, with what comes before them."""
ENGINES = ("sequential", "stacked", "identity")
ELSEWHERE = ("pool", "ray")
PARTNERS = ("ditto(epochs=2)", "scaffold", "fedbn", "fedprox(mu=0.1)", "harmofl", "fedala", "agc(clip=0.05)")
RESUMED = ("fedbn", "scaffold", "feddyn", "partialfed_adaptive", "fedproto", "fedadam", "feddg_elcfs")
EXCHANGED = ("fedbn", "scaffold", "fedala", "centralized")
POLICIES = ("average", "finetune", "finetune_bn", "mixed", "nearest", "reestimate", "skip", "tent")


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network with normalization of both kinds, dropout and a frozen parameter."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first = nn.Conv2d(shape[0], 4, 3, padding=1), nn.BatchNorm2d(4)
            self.hidden, self.second = nn.Linear(4 * shape[1] * shape[2], 6), nn.BatchNorm1d(6)
            self.dropout, self.head = nn.Dropout(0.2), nn.Linear(6, classes)
            self.scale = nn.Parameter(torch.full((1,), 0.7), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(self.stem(x))).flatten(1)
            return self.head(self.dropout(torch.relu(self.second(self.hidden(x))))) * self.scale

    return Net()


def draw_clients() -> dict[str, tuple[np.ndarray, ...]]:
    """Return clients of unequal sizes, whose images differ in brightness and contrast."""
    rng, clients = np.random.default_rng(0), {}
    for shift, (name, size) in enumerate({"a": 21, "b": 16, "c": 9}.items()):
        y = np.arange(2 * size) % 3
        x = (rng.normal(shift, 1 + shift, (2 * size, 1, 5, 5)) + y[:, None, None, None]).astype(np.float32)
        clients[name] = (x[:size], y[:size], x[size:], y[size:])
    return clients


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """Return a digest of the tensors' types, shapes and bits, whatever their names and order."""
    each = [
        hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode() + t.contiguous().numpy().tobytes()).hexdigest()
        for t in tensors.values()
    ]
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest()[:16]


def hash_run(directory: Path) -> str:
    """Return the digest of the one trial in the directory of a run, or of a trial."""
    (checkpoint,) = directory.rglob("checkpoint.safetensors")
    rows = [json.loads(line) for line in (checkpoint.parent / "metrics.jsonl").read_text().splitlines()]
    text = json.dumps([{key: row[key] for key in sorted(row) if key not in ("seconds", "method")} for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16] + " " + hash_tensors(load_states(checkpoint))


def load_states(checkpoint: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, those of clients in place of where these lie."""
    tensors = load_checkpoint(checkpoint)[0]
    places = tensors.pop("clients/place", torch.zeros(0, 4, dtype=torch.int64)).tolist()
    for client, (segment, start, size, _) in enumerate(places):
        if size:
            content = (checkpoint.parent / f"clients-{segment}.states").read_bytes()[start : start + size]
            tensors |= {f"client/{client}/{name}": tensor for name, tensor in load(content).items()}
    return tensors


def name_canonically(method: str) -> fedshift.Method:
    """Return ``method`` without the text typed for it: checksums of records cover what they call a method."""
    return replace(METHODS.parse(method), typed=None)


def compare(method: str, **settings: Any) -> str:
    """Return the digest of three rounds of ``method``."""
    given = {"rounds": 3, "batch_size": 8, "lr": 0.05, "moments": "loaded,trained"} | settings
    given = {"optimizer": "sgd(momentum=0.5)"} | given
    if given.get("engine") == "identity":
        given |= {"moments": "loaded", "batches": 1, "epochs": None}
    with tempfile.TemporaryDirectory() as out:
        chosen = name_canonically(BASES.get(method, method))
        fedshift.compare(chosen, data=draw_clients(), model=network, seeds=[3], jobs=1, out=out, **given)
        return hash_run(Path(out))


def compare_several(jobs: int) -> str:
    """Return the digest of two methods with two seeds, ``jobs`` trials at a time; it does not depend on ``jobs``."""
    given = {"rounds": 3, "batch_size": 8, "lr": 0.05, "model": "fnn2", "seeds": [3, 4], "engine": "sequential"}
    with tempfile.TemporaryDirectory() as out:
        fedshift.compare("fedavg, scaffold", data=draw_clients(), jobs=jobs, out=out, **given)
        return " ".join(hash_run(folder) for folder in sorted((Path(out) / "trials").iterdir()))


def resume(method: str) -> str:
    """Return the digest of three rounds of ``method`` that were stopped after the first and continued."""

    class Stop(fedshift.Callback):
        def round(self, outcome: Any) -> None:
            raise KeyboardInterrupt

    given = {"rounds": 3, "batch_size": 8, "lr": 0.05, "model": network, "seeds": [3], "jobs": 1}
    with tempfile.TemporaryDirectory() as out:
        try:
            fedshift.compare(method, data=draw_clients(), out=out, callbacks=Stop(), **given)
        except KeyboardInterrupt:
            fedshift.compare(method, data=draw_clients(), out=out, resume=True, **given)
        return hash_run(Path(out))


def read(source: Any, **settings: Any) -> str:
    """Return the digest of the samples that a reader makes of ``source``."""
    data = fedshift.load_data(source, **settings)
    tensors = {}
    for client in data.clients:
        for name in ("train", "validation", "test"):
            part = getattr(client, name)
            if part is not None and len(part):
                tensors |= {
                    f"{client.name}/{name}/x": part.inputs(torch.arange(len(part))),
                    f"{client.name}/{name}/y": part.y,
                }
    names = [client.name for client in data.clients]
    return f"{'|'.join(names)} {data.classes} {data.class_names} {hash_tensors(tensors)}".replace("  ", " ")


def list_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each key with what computes its digest."""
    names = sorted(list_catalog("methods"))
    for engine in ENGINES:
        for name in names:
            yield f"{name}/{engine}", partial(compare, name, engine=engine)
    for engine in ELSEWHERE:
        for name in EXCHANGED:
            yield f"{name}/{engine}", partial(compare, name, engine=engine, workers=2)
    for partner in PARTNERS:
        for name in names:
            yield f"{name}+{partner}", partial(compare, f"{BASES.get(name, name)}+{partner}", engine="sequential")
    for jobs in (1, 2):
        yield f"trials/{jobs}", partial(compare_several, jobs)
    for name in RESUMED:
        yield f"{name}/resumed", partial(resume, name)
    yield "fedbn/adamw", partial(compare, "fedbn", optimizer="adamw(weight_decay=0)", lr=0.01)
    yield "ditto/decay", partial(compare, "ditto", optimizer="sgd(momentum=0.5, weight_decay=0.01)")
    yield "fedala/decay", partial(compare, "fedala", optimizer="sgd(momentum=0.5, weight_decay=0.01)")
    yield "fedbn/part", partial(compare, "fedbn", participation=0.7, unseen="average")
    for policy in POLICIES:
        yield f"fedbn/{policy}", partial(compare, "fedbn", newcomers="c", unseen=policy)
    yield from list_readers()


def list_readers() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield a case for each kind of data."""
    yield "read/arrays", partial(read, draw_clients())
    yield "read/arrays-validation", partial(read, draw_clients(), validation=0.2)
    yield "read/digits", partial(read, "digits")
    yield "read/digits-split", partial(read, "digits", split="dirichlet(clients=4, alpha=0.3)")
    yield "read/nuclei", partial(read, "nuclei")
    yield "read/images", partial(read_files, write_images, image_size=16)
    yield "read/images-validation", partial(read_files, write_images, image_size=16, validation=0.25)
    yield "read/masks", partial(read_files, write_masks, image_size=16)
    yield "read/table", partial(read_files, write_table, target="sick", client_column="site")
    yield "read/npz", partial(read_files, write_arrays)
    yield "read/npy", partial(read_files, write_mapped_arrays)
    yield "read/images-parts", partial(read_files, write_image_parts)
    yield "read/masks-parts", partial(read_files, partial(write_masks, parts=True))
    yield "read/volumes", partial(read_files, write_volumes)
    yield "read/volumes-size", partial(read_files, write_volumes, image_size=5, domains="south")
    yield "read/parquet", partial(read_files, write_parquet, target="sick", client_column="site", scaling="none")
    yield "read/table-groups", partial(read_files, write_table, target="sick", client_column="site", groups="age")
    yield (
        "read/table-split",
        partial(read_files, write_split_table, target="sick", split_column="part", domains="south"),
    )
    yield (
        "read/table-numbers",
        partial(read_files, write_table, target="age", client_column="site", task="regression", test_fraction=0.3),
    )
    yield "read/frame", lambda: read(draw_frame(), target="sick", client_column="site", domains="south,north")
    yield "read/frames", lambda: read(draw_frames(), target="sick")
    yield "read/frame-parts", lambda: read(part_frame(draw_frame()), target="sick", client_column="site")
    yield "read/datasets", lambda: read(draw_datasets())
    yield "read/datasets-lazy", lambda: read({"a": tuple(map(fedshift.LazyDataset, draw_datasets()["a"]))})
    yield "read/hub", lambda: read(HubDataset(), client_column="camera", test_fraction=0.3)
    yield "read/hub-parts", lambda: read({"train": HubDataset(), "test": HubDataset()}, client_column="camera")
    yield "read/hub-clients", lambda: read({"a": (HubDataset(), HubDataset())})
    if os.environ.get("FEDSHIFT_DATA"):
        yield "read/heart", partial(read, "heart_disease")
        yield "read/office", partial(read, "office_caltech10", image_size=24, samples=6)


def read_files(write: Callable[[Path], Path], **settings: Any) -> str:
    """Return the digest of what is read from the files that ``write`` makes in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        return read(write(Path(folder)), **settings)


def draw_picture(seed: int, *shape: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8))


def write_images(folder: Path) -> Path:
    """Write two clients with folders of two classes, in color and gray, of several sizes."""
    for number in range(24):
        place = folder / ("north", "south")[number % 2] / ("cat", "dog")[number % 3 % 2]
        place.mkdir(parents=True, exist_ok=True)
        draw_picture(number, 18 + number, 20, *((3,) if number % 4 else ())).save(place / f"{number:02}.png")
    return folder


def write_image_parts(folder: Path) -> Path:
    """Write a client with folders train, val and test, and one with train alone."""
    for number in range(36):
        site, part = (("north", ("train", "val", "test")[number % 3]), ("south", "train"))[number % 2]
        place = folder / site / part / ("0", "1")[number % 4 // 2]
        place.mkdir(parents=True, exist_ok=True)
        draw_picture(number, 12, 10).save(place / f"{number:02}.png")
    return folder


def write_masks(folder: Path, *, parts: bool = False) -> Path:
    """Write two clients with images and masks of three classes, in ``parts`` train and test if asked."""
    for number in range(16):
        for kind, picture in (("images", draw_picture(number, 20, 24, 3)), ("masks", None)):
            part = ("train", "test")[number % 3 == 2] if parts else ""
            place = folder / ("north", "south")[number % 2] / part / kind
            place.mkdir(parents=True, exist_ok=True)
            mask = Image.fromarray(np.random.default_rng(number).integers(0, 3, (20, 24), dtype=np.uint8))
            (picture or mask).save(place / f"{number:02}.png")
    return folder


def write_table(folder: Path) -> Path:
    """Write a table with numbers, words, missing values and a column that names the client."""
    rng, rows = np.random.default_rng(0), ["site,age,sex,pulse,sick"]
    for number in range(60):
        pulse = "" if number % 7 == 0 else f"{rng.normal(70, 9):.1f}"
        rows.append(
            f"{'north' if number % 3 else 'south'},{rng.integers(20, 90)},{'fm'[number % 2]},{pulse},{number % 4 // 2}"
        )
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return folder / "table.csv"


def write_arrays(folder: Path) -> Path:
    """Write one file of arrays a client."""
    for name, (x, y, _, _) in draw_clients().items():
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    return folder


def write_mapped_arrays(folder: Path) -> Path:
    """Write a folder of mapped arrays a client, with validation data at one."""
    for name, (x, y, _, _) in draw_clients().items():
        for part in ("train", "val", "test") if name == "a" else ("train", "test"):
            place = folder / name / part
            place.mkdir(parents=True)
            np.save(place / "x.npy", x[: -len(part)])
            np.save(place / "y.npy", y[: -len(part)])
    return folder


def write_volumes(folder: Path) -> Path:
    """Write two clients with volumes of one size and masks of two values."""
    nibabel: Any = importlib.import_module("nibabel")
    for number in range(12):
        rng = np.random.default_rng(number)
        for kind, values in (("images", rng.integers(0, 900, (6, 5, 4))), ("masks", rng.integers(0, 2, (6, 5, 4)))):
            place = folder / ("north", "south")[number % 2] / kind
            place.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(values.astype(np.int16), np.eye(4)), place / f"{number:02}.nii.gz")
    return folder


def write_parquet(folder: Path) -> Path:
    """Write the table in Parquet."""
    draw_frame().to_parquet(folder / "table.parquet", index=False)
    return folder / "table.parquet"


def write_split_table(folder: Path) -> Path:
    """Write a table a client, whose rows say what they are for."""
    for name, frame in draw_frames().items():
        part = np.array(["train", "test", "valid", "train", "train"])[np.arange(len(frame)) % 5]
        frame.assign(part=part).to_csv(folder / f"{name}.csv", index=False)
    return folder


def draw_frame() -> pd.DataFrame:
    """Return the table of :func:`write_table`."""
    with tempfile.TemporaryDirectory() as folder:
        return pd.read_csv(write_table(Path(folder)))


def draw_frames() -> dict[str, pd.DataFrame]:
    """Return the table of each client, with labels that are words."""
    frame = draw_frame().assign(sick=lambda rows: rows["sick"].map({0: "well", 1: "ill"}))
    return {str(name): rows.drop(columns="site") for name, rows in frame.groupby("site")}


def part_frame(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return every third row of ``frame`` for testing, the others for training."""
    tested = np.arange(len(frame)) % 5 < 2
    return {"train": frame[~tested], "test": frame[tested]}


class Pairs(Dataset[Any]):
    """A map-style dataset that says what its labels mean."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y, self.classes = x, y, ["cat", "dog", "emu"]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self.x[number], int(self.y[number])


def draw_datasets() -> dict[str, tuple[Pairs, Pairs]]:
    """Return the clients of :func:`draw_clients` as datasets."""
    return {name: (Pairs(x, y), Pairs(z, w)) for name, (x, y, z, w) in draw_clients().items()}


class ClassLabel:
    """The feature of a label column."""

    names = ("cat", "dog")


class HubDataset:
    """What is used of a dataset of HuggingFace, whose library need not be here: pictures, labels and cameras."""

    def __init__(self) -> None:
        self.columns = {
            "image": [draw_picture(number, 8, 8, 3) for number in range(20)],
            "label": [number % 2 for number in range(20)],
            "camera": [("left", "right")[number % 5 > 2] for number in range(20)],
        }
        self.column_names = list(self.columns)
        self.features = {"image": self, "label": ClassLabel(), "camera": type("Value", (), {})()}

    def __len__(self) -> int:
        return 20

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}


def run_case(key: str) -> str:
    """Return the line of ``key``; a refusal is a result, too."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return f"{key}\t{dict(list_cases())[key]()}"
    except fedshift.FedshiftError as error:
        return f"{key}\trefused: {type(error).__name__}"


def compute(only: str) -> dict[str, str]:
    """Return the digests of all keys that match ``only``."""
    keys = [key for key, _ in list_cases() if fnmatch(key, only)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return dict(line.split("\t", 1) for line in pool.map(run_case, keys))


def compute_at(commit: str, only: str) -> dict[str, str]:
    """Return the digests of another commit, by its own copy of this file."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)
        try:
            environment = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
            command = [sys.executable, f"{folder}/benchmarks/digests.py", "--only", only]
            lines = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)
    return dict(line.split("\t", 1) for line in lines.stdout.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="compare with the digests of a commit")
    parser.add_argument("--file", type=Path, help="compare with digests that were written to a file")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="keys to compute")
    given = parser.parse_args()
    mine = compute(given.only)
    if not (given.against or given.file):
        print("\n".join(f"{key}\t{digest}" for key, digest in mine.items()))
        return 0
    if given.file:
        theirs = dict(line.split("\t", 1) for line in given.file.read_text().splitlines())
    else:
        theirs = compute_at(given.against, given.only)
    differ = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key) and fnmatch(key, given.only)]
    for key in differ:
        print(f"{key}\n  - {theirs.get(key)}\n  + {mine.get(key)}")
    print(f"{len(mine)} digests, {len(differ)} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
