"""SynthDigits: digits rendered from fonts on clutter, 32 x 32 in color, in SVHN's format (Ganin and Lempitsky 2015)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..federation import Federation
from ..formats import read_digits_mat
from ._card import Card, Remote
from ._single_dataset import Parts, Reader, find_directories, find_first, find_packed, load_single, make_splits

_SERVER = "https://media.githubusercontent.com/media/domainadaptation/datasets/91ff02225a73db330883843bc41ee3aca59a19d9/synth/"


def _find(folder: Path) -> Reader | None:
    for home in (folder, *find_directories(folder, "synthdigits")):
        train, test = find_first(home, "synth_train_32x32.mat"), find_first(home, "synth_test_32x32.mat")
        if train and test:
            return partial(_read, train, test)
    return find_packed(folder, "synthdigits")


def _read(train: Path, test: Path) -> Parts:
    return make_splits(read_digits_mat(train), read_digits_mat(test), train)


CARD = Card(
    title="SynthDigits (Syn Numbers)",
    clients=("synthdigits",),
    classes=10,
    samples="479,400 training and 9,553 test images; FedBN pools the 488,953, see digits-five",
    license="none stated by its authors; CC BY 4.0 by the README of the mirror that is fetched",
    homepage="http://yaroslav.ganin.net/",
    source="Ganin and Lempitsky 2015, arXiv:1409.7495",
    layout="synth_train_32x32.mat and synth_test_32x32.mat, or synthdigits.npz with x_train, y_train, x_test, y_test",
    find=_find,
    remotes=(
        Remote(
            url=f"{_SERVER}synth_train_32x32.mat",
            name="synth_train_32x32.mat",
            sha256="e0e0924ecd0c0b5a55ed6485aaa7d39937af982397717b89a3d91777aca9433c",
            size=895_578_032,
        ),
        Remote(
            url=f"{_SERVER}synth_test_32x32.mat",
            name="synth_test_32x32.mat",
            sha256="6285fe9a1c6f27b379a47263907a37899b59ce86948fd343a5b904435cde5bcc",
            size=17_851_156,
        ),
    ),
)


def synthdigits(root: Path) -> Federation:
    """One client ``synthdigits``, uint8 ``[N, 3, 32, 32]``, ten classes, the official parts; 1.5 GB in memory.

    Raises :class:`UsageError` where the files are not under ``root`` or cannot be read.
    """
    return load_single("synthdigits", root, CARD)
