"""SVHN: photographed house numbers, cropped digits of 32 x 32 in color, "format 2" (Netzer et al. 2011)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..federation import Federation
from ..formats import read_digits_mat
from ._card import Card, Remote
from ._single_dataset import Parts, Reader, find_directories, find_first, find_packed, load_single, make_splits

_SERVER = "http://ufldl.stanford.edu/housenumbers/"


def _find(folder: Path) -> Reader | None:
    for home in (folder, *find_directories(folder, "svhn")):
        train, test = find_first(home, "train_32x32.mat"), find_first(home, "test_32x32.mat")
        if train and test:
            return partial(_read, train, test)
    return find_packed(folder, "svhn")


def _read(train: Path, test: Path) -> Parts:
    return make_splits(read_digits_mat(train), read_digits_mat(test), train)


CARD = Card(
    title="SVHN, cropped digits",
    clients=("svhn",),
    classes=10,
    samples="73,257 training and 26,032 test images; FedBN pools the 99,289, see digits-five",
    license="for non-commercial use only",
    homepage="http://ufldl.stanford.edu/housenumbers/",
    source="Netzer, Wang, Coates, Bissacco, Wu and Ng, Reading digits in natural images with unsupervised feature "
    "learning, NIPS workshop on deep learning and unsupervised feature learning, 2011",
    layout="train_32x32.mat and test_32x32.mat, or svhn.npz with x_train, y_train, x_test, y_test",
    find=_find,
    remotes=(
        Remote(
            url=f"{_SERVER}train_32x32.mat",
            name="train_32x32.mat",
            md5="e26dedcc434d2e4c54c9b2d4a06d8373",
            size=182_040_794,
        ),
        Remote(
            url=f"{_SERVER}test_32x32.mat",
            name="test_32x32.mat",
            md5="eb5a983be6a315427106f1b164d9cef3",
            size=64_275_384,
        ),
    ),
)


def svhn(root: Path) -> Federation:
    """One client ``svhn``, uint8 ``[N, 3, 32, 32]``, ten classes (the file's label 10 is digit 0), the official parts.

    Raises :class:`UsageError` where the files are not under ``root`` or cannot be read.
    """
    return load_single("svhn", root, CARD)
