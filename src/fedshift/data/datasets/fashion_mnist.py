"""Fashion-MNIST: 70,000 images of clothing, 28 x 28 gray, in MNIST's format (Xiao, Rasul and Vollgraf 2017)."""

from __future__ import annotations

from pathlib import Path

from ..federation import Federation
from ._card import Card, Remote
from ._single_dataset import Reader, find_idx, find_packed, load_single

_SERVER = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def _find(folder: Path) -> Reader | None:
    return find_packed(folder, "fashion-mnist") or find_idx(folder, "fashion-mnist")


CARD = Card(
    title="Fashion-MNIST",
    clients=("fashion-mnist",),
    classes=10,
    samples="60,000 training and 10,000 test images, as FedMMB uses them",
    license="MIT",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    source="Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747",
    layout="the four files {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz, in a directory fashion-mnist "
    "(or FashionMNIST/raw), or fashion_mnist.npz with x_train, y_train, x_test, y_test",
    find=_find,
    remotes=(
        Remote(
            url=f"{_SERVER}train-images-idx3-ubyte.gz",
            name="train-images-idx3-ubyte.gz",
            md5="8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        Remote(
            url=f"{_SERVER}train-labels-idx1-ubyte.gz",
            name="train-labels-idx1-ubyte.gz",
            md5="25c81989df183df01b3e8a0aad5dffbe",
        ),
        Remote(
            url=f"{_SERVER}t10k-images-idx3-ubyte.gz",
            name="t10k-images-idx3-ubyte.gz",
            md5="bef4ecab320f06d8554ea6380940ec79",
        ),
        Remote(
            url=f"{_SERVER}t10k-labels-idx1-ubyte.gz",
            name="t10k-labels-idx1-ubyte.gz",
            md5="bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
)


def fashion_mnist(root: Path) -> Federation:
    """One client ``fashion-mnist``, uint8 ``[N, 1, 28, 28]``, ten classes, the publisher's training and test parts.

    Raises :class:`UsageError` where the files are not under ``root`` or cannot be read.
    """
    return load_single("fashion-mnist", root, CARD, class_names=_CLASSES)
