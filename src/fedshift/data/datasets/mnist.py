"""MNIST: 70,000 handwritten digits, 28 x 28 gray (LeCun, Bottou, Bengio and Haffner 1998)."""

from __future__ import annotations

from pathlib import Path

from ..federation import Federation
from ._card import Card, Remote
from ._single_dataset import Reader, find_idx, find_packed, load_single

_SERVER = "https://ossci-datasets.s3.amazonaws.com/mnist/"


def _find(folder: Path) -> Reader | None:
    return find_packed(folder, "mnist") or find_idx(folder, "mnist")


CARD = Card(
    title="MNIST",
    clients=("mnist",),
    classes=10,
    samples="60,000 training and 10,000 test images; FedBN pools the 70,000, see digits-five",
    license="none stated",
    homepage="http://yann.lecun.com/exdb/mnist/",
    source="LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition, "
    "Proceedings of the IEEE 86(11), 1998",
    layout="the four files {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz, in a directory mnist (or "
    "MNIST/raw), or mnist.npz with x_train, y_train, x_test, y_test",
    find=_find,
    remotes=(
        Remote(
            url=f"{_SERVER}train-images-idx3-ubyte.gz",
            name="train-images-idx3-ubyte.gz",
            md5="f68b3c2dcbeaaa9fbdd348bbdeb94873",
        ),
        Remote(
            url=f"{_SERVER}train-labels-idx1-ubyte.gz",
            name="train-labels-idx1-ubyte.gz",
            md5="d53e105ee54ea40749a09fcbcd1e9432",
        ),
        Remote(
            url=f"{_SERVER}t10k-images-idx3-ubyte.gz",
            name="t10k-images-idx3-ubyte.gz",
            md5="9fb629c4189551a2d022fa330f9573f3",
        ),
        Remote(
            url=f"{_SERVER}t10k-labels-idx1-ubyte.gz",
            name="t10k-labels-idx1-ubyte.gz",
            md5="ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
)


def mnist(root: Path) -> Federation:
    """One client ``mnist``, uint8 ``[N, 1, 28, 28]``, ten classes, the publisher's training and test parts.

    Raises :class:`UsageError` where the files are not under ``root`` or cannot be read.
    """
    return load_single("mnist", root, CARD)
