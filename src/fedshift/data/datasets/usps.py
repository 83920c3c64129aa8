"""USPS: 9,298 handwritten digits of envelopes, 16 x 16 gray (Hull 1994), in the forms in which they go around.

The pixels of all forms are the same, from -1 to 1 (LIBSVM's and the ESL book's text) or from 0 to 1 (``usps.h5``). From
-1..1 gray levels are cut off, as FedBN's authors and torchvision do; from 0..1 they are rounded. ``usps_28x28.pkl`` is
another split, 7,438 and 1,860, of images scaled to 28 x 28.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.errors import UsageError
from ..federation import Federation
from ..formats import Bytes, Numbers, explain_errors, read_libsvm, read_table, to_gray_levels
from ..pickles import read_pickle
from ._card import Card, Remote
from ._single_dataset import Parts, Reader, find_directories, find_first, find_packed, load_single, make_splits

_SERVER = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_SIDE = 16


def _find(folder: Path) -> Reader | None:
    for home in (folder, *find_directories(folder, "usps")):
        if (train := find_first(home, "usps.bz2", "usps")) and (test := find_first(home, "usps.t.bz2", "usps.t")):
            return partial(_read_libsvm, train, test)
        if (train := find_first(home, "zip.train.gz", "zip.train")) and (
            test := find_first(home, "zip.test.gz", "zip.test")
        ):
            return partial(_read_text, train, test)
        if file := find_first(home, "usps.h5"):
            return partial(_read_h5, file)
        if file := find_first(home, "usps_28x28.pkl"):
            return partial(_read_pickle, file)
    return find_packed(folder, "usps")


def _read_libsvm(train: Path, test: Path) -> Parts:
    (x_train, y_train), (x_test, y_test) = (read_libsvm(file, _SIDE**2) for file in (train, test))
    return make_splits((_split_rows(x_train, train), y_train - 1), (_split_rows(x_test, test), y_test - 1), train)


def _read_text(train: Path, test: Path) -> Parts:
    tables = ((file, read_table(file, 1 + _SIDE**2)) for file in (train, test))
    of_train, of_test = ((_split_rows(table[:, 1:], file), table[:, 0]) for file, table in tables)
    return make_splits(of_train, of_test, train)


def _split_rows(x: Numbers, file: Path) -> Bytes:
    if x.size and not (x.min() >= -1 and x.max() <= 1):
        raise UsageError(f"{file} holds pixels from {x.min():g} to {x.max():g}, expected were -1 to 1: get it again")
    return ((x.astype(np.float32) + 1) / 2 * 255).astype(np.uint8).reshape(-1, _SIDE, _SIDE)


def _read_h5(file: Path) -> Parts:
    try:
        h5py: Any = importlib.import_module("h5py")
    except ModuleNotFoundError as error:
        raise UsageError(f"reading {file} needs the package h5py: pip install h5py, or use usps.bz2") from error
    with explain_errors(file, "HDF5 with groups train and test"), h5py.File(file) as groups:
        x_train, y_train, x_test, y_test = (
            np.asarray(groups[part][array]) for part in ("train", "test") for array in ("data", "target")
        )
    return make_splits((_to_square(x_train, file, _SIDE), y_train), (_to_square(x_test, file, _SIDE), y_test), file)


def _read_pickle(file: Path) -> Parts:
    with explain_errors(file, "USPS of 28 x 28"):
        (x_train, y_train), (x_test, y_test) = read_pickle(file)
        return make_splits((_to_square(x_train, file, 28), y_train), (_to_square(x_test, file, 28), y_test), file)


def _to_square(x: Numbers, file: Path, side: int) -> Bytes:
    return to_gray_levels(x, file).reshape(-1, side, side)


CARD = Card(
    title="USPS",
    clients=("usps",),
    classes=10,
    samples="7,291 training and 2,007 test images; FedBN pools the 9,298, see digits-five",
    license="none stated",
    homepage="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
    source="Hull, A database for handwritten text recognition research, IEEE TPAMI 16(5), 1994",
    layout="usps.bz2 and usps.t.bz2, or zip.train.gz and zip.test.gz, or usps.h5, or usps_28x28.pkl, or usps.npz with "
    "x_train, y_train, x_test, y_test",
    find=_find,
    remotes=(
        Remote(url=f"{_SERVER}usps.bz2", name="usps.bz2", md5="ec16c51db3855ca6c91edd34d0e9b197"),
        Remote(url=f"{_SERVER}usps.t.bz2", name="usps.t.bz2", md5="8ea070ee2aca1ac39742fdd1ef5ed118"),
    ),
)


def usps(root: Path) -> Federation:
    """One client ``usps``, uint8 ``[N, 1, 16, 16]`` (28 x 28 from ``usps_28x28.pkl``), ten classes, the file's parts.

    Raises :class:`UsageError` where the files are not under ``root`` or cannot be read.
    """
    return load_single("usps", root, CARD)
