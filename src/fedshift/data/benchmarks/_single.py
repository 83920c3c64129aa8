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
from ..files.reading import Reading
from ..formats import read_idx
from ..split import Split, as_split
from ._card import Card

Parts = tuple[Split, Split]
"""Training and test samples."""

Reader = Callable[[], Parts]

Arrays = tuple[ArrayLike, ArrayLike]
"""Samples and labels."""

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
"""MNIST's files; other data sets took over format and names."""

DIGITS = tuple("0123456789")


def single(name: str, root: Path, card: Card, *, class_names: tuple[str, ...] = DIGITS) -> Federation:
    """The data set as a federation of one client of its name; :class:`UsageError` where its files are not there."""
    train, test = card.locate(name, root)()
    return of_one_client(name, train, test, card, class_names)


def of_one_client(name: str, train: Split, test: Split, card: Card, class_names: tuple[str, ...]) -> Federation:
    """The federation of these samples, checked."""
    client = ClientData(name=name, train=train, test=test)
    note = f"{card.title}: {len(train)} training and {len(test)} test images"
    return Federation(name=name, clients=(client,), classes=card.classes, note=note, class_names=class_names).check()


def parts(train: Arrays, test: Arrays, where: Path) -> Parts:
    """Arrays as :func:`fedshift.data.split.as_split` takes them; errors begin with ``where``."""
    return as_split(*train, f"{where}, train data"), as_split(*test, f"{where}, test data")


def there(folder: Path, *names: str) -> Path | None:
    """The first of these files that is in ``folder``."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def homes(folder: Path, name: str) -> list[Path]:
    """Directories that bear the data set's name, however it is spelled: ``folder`` and those in it.

    So do their directories ``raw``, where torchvision puts MNIST (``MNIST/raw``).
    """
    own = [place for place in (folder, *sorted(folder.iterdir())) if place.is_dir() and _bare(place) == _bare(name)]
    return [home for place in own for home in (place, place / "raw")]


def _bare(name: Path | str) -> str:
    text = name if isinstance(name, str) else name.resolve().name
    return text.lower().replace("-", "").replace("_", "")


def packed(folder: Path, name: str) -> Reader | None:
    """The compact form ``<name>.npz`` with x_train, y_train, x_test and y_test, as Keras distributes MNIST."""
    file = there(folder, f"{name}.npz", f"{name.replace('-', '_')}.npz")
    return partial(_read_packed, file) if file else None


def _read_packed(file: Path) -> Parts:
    client = read_arrays(file.parent, Reading(domains=(file.stem,))).clients[0]
    return client.train, client.test


def idx(folder: Path, name: str) -> Reader | None:
    """The four IDX files, plain or compressed, in a directory that bears the data set's name.

    Elsewhere they are not looked for: Fashion-MNIST's files have the names of MNIST's.
    """
    for home in homes(folder, name):
        files = [file for name in IDX if (file := there(home, name, f"{name}.gz"))]
        if len(files) == len(IDX):
            return partial(_read_idx, *files)
    return None


def _read_idx(x_train: Path, y_train: Path, x_test: Path, y_test: Path) -> Parts:
    return parts((read_idx(x_train, 3), read_idx(y_train, 1)), (read_idx(x_test, 3), read_idx(y_test, 1)), x_train)
