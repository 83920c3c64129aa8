"""Helpers for data sets with a single source: find their files, and read them as a federation of one client."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from numpy.typing import ArrayLike

from ..assembly import assemble
from ..federation import ClientData, Federation
from ..formats import read_idx
from ..readers import arrays
from ..samples import Samples, to_samples
from ..source import ReadOptions
from ._card import Card, Remote, make_card

TrainAndTest = tuple[Samples, Samples]
Reader = Callable[[], TrainAndTest]
"""Function that reads the files found."""
Arrays = tuple[ArrayLike, ArrayLike]
"""Samples and labels."""

DIGITS = tuple("0123456789")
IDX_FILES = tuple(
    f"{end}-ubyte" for end in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)
"""MNIST's four files. Fashion-MNIST's and Morpho-MNIST's have the same names, which only a directory distinguishes."""


def make_single_card(
    name: str,
    read: Callable[..., TrainAndTest],
    files: Sequence[str],
    *,
    named: bool = False,
    remotes: Iterable[Remote] = (),
) -> Card:
    """Return the card of a data set whose ``files`` ``read`` takes, with further ``remotes``.

    Files are all in a folder, or in a directory of it with the data set's name; ``named``: only there. ``<name>.npz``
    with x_train, y_train, x_test and y_test, as Keras distributes MNIST, takes their place.
    """

    def find(folder: Path) -> Reader | None:
        for home in (*([] if named else [folder]), *find_directories(folder, name)):
            if paths := find_files(home, files):
                return partial(read, *paths)
        packed = (folder / f"{spelled}.npz" for spelled in (name, name.replace("-", "_")))
        return next((partial(_read_packed, file) for file in packed if file.is_file()), None)

    return make_card(name, find=find, remotes=remotes)


def find_files(home: Path, names: Sequence[str]) -> list[Path]:
    """Return the files ``names`` in ``home``, plain or packed; empty unless all exist."""
    spelled = ([home / f"{name}{suffix}" for suffix in ("", ".gz", ".bz2")] for name in names)
    files = [file for several in spelled for file in list(filter(Path.is_file, several))[:1]]
    return files if len(files) == len(names) else []


def find_directories(folder: Path, name: str) -> Iterator[Path]:
    """Yield the directories called ``name``, in any spelling, among ``folder`` and its subdirectories.

    Each is followed by its subdirectory ``raw``, where torchvision puts MNIST (``MNIST/raw``).
    """
    spelled = name.lower().replace("-", "")
    for place in (folder, *sorted(folder.iterdir())):
        if place.is_dir() and re.sub("[-_]", "", place.resolve().name.lower()) == spelled:
            yield from (place, place / "raw")


def load_single(
    name: str, root: Path, card: Card, class_names: tuple[str, ...] = DIGITS, splits: TrainAndTest | None = None
) -> Federation:
    """Return the data set as a federation of one client; raise :class:`UsageError` if its files are not found.

    ``splits``: its samples, if they are read already.
    """
    train, test = splits or card.locate(name, root)()
    client = ClientData(name=name, train=train, test=test)
    note = f"{card.title}: {len(train)} training and {len(test)} test images"
    return Federation(name=name, clients=(client,), classes=card.classes, note=note, class_names=class_names).check()


def make_splits(train: Arrays, test: Arrays, where: Path) -> TrainAndTest:
    """Convert arrays by :func:`fedshift.data.samples.to_samples`; errors begin with ``where``."""
    return to_samples(*train, f"{where}, train data"), to_samples(*test, f"{where}, test data")


def read_pair(read: Callable[[Path], Arrays]) -> Callable[[Path, Path], TrainAndTest]:
    """Return a reader for a training file and a test file, which reads each with ``read``."""
    return lambda train, test: make_splits(read(train), read(test), train)


def read_idx_files(x_train: Path, y_train: Path, x_test: Path, y_test: Path) -> TrainAndTest:
    """Read MNIST's four files, plain or compressed."""
    train, test = (read_idx(x_train, 3), read_idx(y_train, 1)), (read_idx(x_test, 3), read_idx(y_test, 1))
    return make_splits(train, test, x_train)


def _read_packed(file: Path) -> TrainAndTest:
    reading = ReadOptions(domains=(file.stem,))
    client = assemble(arrays.read(file.parent, reading), reading).clients[0]
    return client.train, client.test
