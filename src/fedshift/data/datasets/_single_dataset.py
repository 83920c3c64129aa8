"""Helpers for data sets with a single source: find their files, and read them as a federation of one client."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from ..assembly import assemble
from ..federation import ClientData, Federation
from ..files.read_options import ReadOptions
from ..formats import read_idx
from ..readers import arrays
from ..samples import Samples, to_samples
from ._card import Card, make_card

Parts = tuple[Samples, Samples]
"""Training and test samples."""

Reader = Callable[[], Parts]
"""Function that reads the files found."""

Layout = tuple[Callable[..., Parts], Sequence[tuple[str, ...]]]
"""Function that reads a set of files, and the possible names of each file, in the order of its arguments."""

Arrays = tuple[ArrayLike, ArrayLike]
"""Samples and labels."""

DIGITS = tuple("0123456789")


def make_single_card(name: str, *layouts: Layout, **facts: Any) -> Card:
    """Return the card of a data set, with further ``facts``, that :attr:`Card.find` reads in the first layout found.

    Its files are all in a folder or in a directory ``name`` of it. The compact format is tried last, see
    :func:`find_packed`.
    """

    def find(folder: Path) -> Reader | None:
        return _find_in((folder, *_find_directories(folder, name)), layouts) or find_packed(folder, name)

    return make_card(name, find=find, **facts)


def load_single(name: str, root: Path, card: Card, class_names: tuple[str, ...] = DIGITS) -> Federation:
    """Return the data set as a federation of one client; raise :class:`UsageError` if its files are not found."""
    train, test = card.locate(name, root)()
    return make_one_client(name, train, test, card, class_names)


def make_one_client(name: str, train: Samples, test: Samples, card: Card, class_names: tuple[str, ...]) -> Federation:
    """Return the checked federation of one client with these samples."""
    client = ClientData(name=name, train=train, test=test)
    note = f"{card.title}: {len(train)} training and {len(test)} test images"
    return Federation(name=name, clients=(client,), classes=card.classes, note=note, class_names=class_names).check()


def make_splits(train: Arrays, test: Arrays, where: Path) -> Parts:
    """Convert arrays by :func:`fedshift.data.samples.to_samples`; errors begin with ``where``."""
    return to_samples(*train, f"{where}, train data"), to_samples(*test, f"{where}, test data")


def read_pair(read: Callable[[Path], Arrays]) -> Callable[[Path, Path], Parts]:
    """Return a reader for a training file and a test file, which reads each with ``read``."""
    return lambda train, test: make_splits(read(train), read(test), train)


def find_packed(folder: Path, name: str) -> Reader | None:
    """Return a reader for ``<name>.npz`` with x_train, y_train, x_test and y_test, as Keras distributes MNIST."""
    return _find_in((folder,), [(_read_packed, [(f"{name}.npz", f"{name.replace('-', '_')}.npz")])])


def find_idx(folder: Path, name: str) -> Reader | None:
    """Return a reader for MNIST's four IDX files, plain or compressed, in a directory with the data set's name.

    Other directories are not searched, because Fashion-MNIST's files have the same names as MNIST's.
    """
    ends = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    files = [(f"{end}-ubyte", f"{end}-ubyte.gz") for end in ends]
    return _find_in(_find_directories(folder, name), [(_read_idx, files)])


def _find_in(homes: Sequence[Path], layouts: Sequence[Layout]) -> Reader | None:
    for home in homes:
        for read, files in layouts:
            found = [next((home / name for name in names if (home / name).is_file()), None) for names in files]
            if all(found):
                return partial(read, *found)
    return None


def _find_directories(folder: Path, name: str) -> list[Path]:
    """Return the directories called ``name``, in any spelling, among ``folder`` and its subdirectories.

    Each is followed by its subdirectory ``raw``, where torchvision puts MNIST (``MNIST/raw``).
    """
    spelled = name.lower().replace("-", "")
    places = (place for place in (folder, *sorted(folder.iterdir())) if place.is_dir())
    named = (place for place in places if re.sub("[-_]", "", place.resolve().name.lower()) == spelled)
    return [home for place in named for home in (place, place / "raw")]


def _read_packed(file: Path) -> Parts:
    reading = ReadOptions(domains=(file.stem,))
    client = assemble(arrays, arrays.scan(file.parent, reading), reading).clients[0]
    return client.train, client.test


def _read_idx(x_train: Path, y_train: Path, x_test: Path, y_test: Path) -> Parts:
    train, test = (read_idx(x_train, 3), read_idx(y_train, 1)), (read_idx(x_test, 3), read_idx(y_test, 1))
    return make_splits(train, test, x_train)
