"""What the loaders of single data sets share: where their files may stand, and a federation of one client from them.

A module's ``CARD.find`` gives a :data:`Reader`, which reads training and test samples when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from numpy.typing import ArrayLike

from ..federation import ClientData, Federation
from ..files.folder import read_arrays
from ..files.read_options import ReadOptions
from ..formats import read_idx
from ..samples import Samples, to_samples
from ._card import Card

Parts = tuple[Samples, Samples]
"""Training and test samples."""

Reader = Callable[[], Parts]

Arrays = tuple[ArrayLike, ArrayLike]
"""Samples and labels."""

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
"""MNIST's files; other data sets took over format and names."""

DIGITS = tuple("0123456789")


def load_single(name: str, root: Path, card: Card, *, class_names: tuple[str, ...] = DIGITS) -> Federation:
    """The data set as a federation of one client of its name; :class:`UsageError` where its files are not there."""
    train, test = card.locate(name, root)()
    return make_one_client(name, train, test, card, class_names)


def make_one_client(name: str, train: Samples, test: Samples, card: Card, class_names: tuple[str, ...]) -> Federation:
    """The federation of these samples, checked."""
    client = ClientData(name=name, train=train, test=test)
    note = f"{card.title}: {len(train)} training and {len(test)} test images"
    return Federation(name=name, clients=(client,), classes=card.classes, note=note, class_names=class_names).check()


def make_splits(train: Arrays, test: Arrays, where: Path) -> Parts:
    """Arrays as :func:`fedshift.data.samples.to_samples` takes them; errors begin with ``where``."""
    return to_samples(*train, f"{where}, train data"), to_samples(*test, f"{where}, test data")


def find_first(folder: Path, *names: str) -> Path | None:
    """The first of these files that is in ``folder``."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def find_directories(folder: Path, name: str) -> list[Path]:
    """Directories that bear the data set's name, however it is spelled: ``folder`` and those in it.

    So do their directories ``raw``, where torchvision puts MNIST (``MNIST/raw``).
    """
    own = [
        place
        for place in (folder, *sorted(folder.iterdir()))
        if place.is_dir() and _normalize_name(place) == _normalize_name(name)
    ]
    return [home for place in own for home in (place, place / "raw")]


def _normalize_name(name: Path | str) -> str:
    text = name if isinstance(name, str) else name.resolve().name
    return text.lower().replace("-", "").replace("_", "")


def find_packed(folder: Path, name: str) -> Reader | None:
    """The compact form ``<name>.npz`` with x_train, y_train, x_test and y_test, as Keras distributes MNIST."""
    file = find_first(folder, f"{name}.npz", f"{name.replace('-', '_')}.npz")
    return partial(_read_packed, file) if file else None


def _read_packed(file: Path) -> Parts:
    client = read_arrays(file.parent, ReadOptions(domains=(file.stem,))).clients[0]
    return client.train, client.test


def find_idx(folder: Path, name: str) -> Reader | None:
    """The four IDX files, plain or compressed, in a directory that bears the data set's name.

    Elsewhere they are not looked for: Fashion-MNIST's files have the names of MNIST's.
    """
    for home in find_directories(folder, name):
        files = [file for name in IDX if (file := find_first(home, name, f"{name}.gz"))]
        if len(files) == len(IDX):
            return partial(_read_idx, *files)
    return None


def _read_idx(x_train: Path, y_train: Path, x_test: Path, y_test: Path) -> Parts:
    return make_splits(
        (read_idx(x_train, 3), read_idx(y_train, 1)), (read_idx(x_test, 3), read_idx(y_test, 1)), x_train
    )
