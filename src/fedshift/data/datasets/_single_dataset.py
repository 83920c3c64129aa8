"""Helpers for data sets with a single source: find their files, and read them as a federation of one client."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from numpy.typing import ArrayLike

from ..assembly import assemble
from ..federation import ClientData, Federation
from ..files.read_options import ReadOptions
from ..formats import read_idx
from ..readers import arrays
from ..samples import Samples, to_samples
from ._card import Card, Remote, make_card

TrainAndTest = tuple[Samples, Samples]
Reader = Callable[[], TrainAndTest]
"""Function that reads the files found."""
Arrays = tuple[ArrayLike, ArrayLike]
"""Samples and labels."""

DIGITS = tuple("0123456789")


def make_single_card(
    name: str,
    read: Callable[..., TrainAndTest],
    *layouts: Sequence[tuple[str, ...]],
    named: bool = False,
    remotes: Iterable[Remote] = (),
) -> Card:
    """Return the card of a data set whose files ``read`` takes, with further ``remotes``.

    ``layouts``: possible names of each file. Files are all in a folder, or in a directory of it with the data set's
    name; ``named``: only there. ``<name>.npz`` with x_train, y_train, x_test and y_test, as Keras distributes MNIST,
    takes their place.
    """

    def find(folder: Path) -> Reader | None:
        for home in (*([] if named else [folder]), *find_directories(folder, name)):
            for names in layouts:
                if files := find_files(home, names):
                    return partial(read, *files)
        packed = find_files(folder, [(f"{name}.npz", f"{name.replace('-', '_')}.npz")])
        return partial(_read_packed, *packed) if packed else None

    return make_card(name, find=find, remotes=remotes)


def find_files(home: Path, names: Sequence[tuple[str, ...]]) -> list[Path]:
    """Return the first existing file of each of ``names`` in ``home``; empty unless all exist."""
    files = [file for several in names for file in [home / name for name in several if (home / name).is_file()][:1]]
    return files if len(files) == len(names) else []


def find_directories(folder: Path, name: str) -> Iterator[Path]:
    """Yield the directories called ``name``, in any spelling, among ``folder`` and its subdirectories.

    Each is followed by its subdirectory ``raw``, where torchvision puts MNIST (``MNIST/raw``).
    """
    spelled = name.lower().replace("-", "")
    for place in (folder, *sorted(folder.iterdir())):
        if place.is_dir() and re.sub("[-_]", "", place.resolve().name.lower()) == spelled:
            yield from (place, place / "raw")


def load_single(name: str, root: Path, card: Card, class_names: tuple[str, ...] = DIGITS) -> Federation:
    """Return the data set as a federation of one client; raise :class:`UsageError` if its files are not found."""
    train, test = card.locate(name, root)()
    return make_one_client(name, train, test, card, class_names)


def make_one_client(name: str, train: Samples, test: Samples, card: Card, class_names: tuple[str, ...]) -> Federation:
    """Return the checked federation of one client with these samples."""
    client = ClientData(name=name, train=train, test=test)
    note = f"{card.title}: {len(train)} training and {len(test)} test images"
    return Federation(name=name, clients=(client,), classes=card.classes, note=note, class_names=class_names).check()


def make_splits(train: Arrays, test: Arrays, where: Path) -> TrainAndTest:
    """Convert arrays by :func:`fedshift.data.samples.to_samples`; errors begin with ``where``."""
    return to_samples(*train, f"{where}, train data"), to_samples(*test, f"{where}, test data")


def read_pair(read: Callable[[Path], Arrays]) -> Callable[[Path, Path], TrainAndTest]:
    """Return a reader for a training file and a test file, which reads each with ``read``."""
    return lambda train, test: make_splits(read(train), read(test), train)


IDX_FILES = [
    (f"{end}-ubyte", f"{end}-ubyte.gz")
    for end in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
]
"""MNIST's four files. Fashion-MNIST's and Morpho-MNIST's have the same names, which only a directory distinguishes."""


def read_idx_files(x_train: Path, y_train: Path, x_test: Path, y_test: Path) -> TrainAndTest:
    """Read MNIST's four files, plain or compressed."""
    train, test = (read_idx(x_train, 3), read_idx(y_train, 1)), (read_idx(x_test, 3), read_idx(y_test, 1))
    return make_splits(train, test, x_train)


def _read_packed(file: Path) -> TrainAndTest:
    reading = ReadOptions(domains=(file.stem,))
    client = assemble(arrays, arrays.scan(file.parent, reading), reading).clients[0]
    return client.train, client.test
