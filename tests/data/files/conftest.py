"""Directories of tiny images, read with a cache of the test's own."""

from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.assembly import assemble
from fedshift.data.federation import Federation
from fedshift.data.readers import folders as reader
from fedshift.data.source import ReadOptions
from fedshift.utils.errors import UsageError

SUFFIXES = ("png", "bmp", "tif", "TIFF", "PNG")


def noise(*shape: int, key: int = 0, top: int = 256, dtype=np.uint8) -> np.ndarray:
    return np.random.default_rng([key, *shape]).integers(0, top, shape).astype(dtype)


def write(path: Path, image: Image.Image | np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(path, **options)
    return path


def samples(split) -> Counter[bytes]:
    return Counter(x.numpy().tobytes() + bytes([int(y)]) for x, y in zip(split.x, split.y, strict=True))


def refused(read, *arguments, **choices) -> str:
    with pytest.raises(UsageError) as error:
        read(*arguments, **choices)
    return str(error.value)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch) -> None:
    """Decode into a cache of the test's own, which is as small as the test."""
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two clients of two classes, 5 + 5 gray and 6 + 6 color images of 6 x 4 pixels, each with pixels of its own."""
    folder = tmp_path / "looks"
    for client, images, depth in (("gray", 5, ()), ("color", 6, (3,))):
        for place, category in enumerate(("cat", "dog")):
            for i in range(images):
                image = noise(4, 6, *depth, key=100 * place + i)
                write(folder / client / category / f"{i}.{SUFFIXES[i % 5]}", image)
    return folder


@pytest.fixture
def read(root: Path):
    """Read the directory."""

    def through(path: Path = root, **choices) -> Federation:
        reading = ReadOptions(**choices)
        return assemble(reader.read(path, reading), reading)

    return through


@pytest.fixture
def one(tmp_path: Path, read):
    """The array [C, H, W] that comes out of a file, written by a function that is given the path."""
    numbers = count()

    def through(suffix: str, save, **choices) -> np.ndarray:
        folder = tmp_path / f"one-{next(numbers)}"
        for name in ("first", "second"):
            file = folder / "client" / "only" / f"{name}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            save(file)
        (client,) = read(folder, **choices).clients
        assert len(client.train) == len(client.test) == 1
        assert torch.equal(client.train.x, client.test.x)
        return client.train.x[0].numpy()

    return through


@pytest.fixture
def content(root: Path):
    """Every sample of a client as Pillow reads it, with its class, classes counted by name."""

    def of(client: str) -> Counter[bytes]:
        names = sorted({folder.name for folder in root.glob("*/*")})
        found: Counter[bytes] = Counter()
        for file in (root / client).rglob("*.*"):
            with Image.open(file) as image:
                pixels = np.array(image).reshape(4, 6, -1).transpose(2, 0, 1)
            found[pixels.tobytes() + bytes([names.index(file.parent.name)])] += 1
        return found

    return of
