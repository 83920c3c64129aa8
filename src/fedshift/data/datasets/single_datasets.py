"""Data sets with a single source: MNIST, Fashion-MNIST, SVHN, SynthDigits, USPS, MNIST-M and CIFAR-10.

Each has a card, which finds the files that its publisher distributes or one ``.npz`` file, and a loader.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ...utils.errors import UsageError
from ...utils.files import check_expansion
from ...utils.random_streams import stream
from ..augmentation import fedmmb_cifar
from ..federation import Federation
from ..formats import Bytes, explain_errors, load_pickle, read_digits_mat, read_libsvm, read_pickle
from ..samples import Samples
from ._single_dataset import (
    IDX_FILES,
    Arrays,
    TrainAndTest,
    load_single,
    make_single_card,
    make_splits,
    read_idx_files,
    read_pair,
)  # fmt: skip

_CLOTHING = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

MNIST = make_single_card("mnist", read_idx_files, IDX_FILES, named=True)

FASHION_MNIST = make_single_card("fashion-mnist", read_idx_files, IDX_FILES, named=True)


def mnist(root: Path) -> Federation:
    """Load MNIST: 70,000 handwritten digits, 28 x 28 gray (LeCun, Bottou, Bengio and Haffner 1998).

    Returns one client ``mnist``, uint8 ``[N, 1, 28, 28]``, ten classes, with the publisher's training and test parts.
    This loader and those below raise :class:`UsageError` if files are not under ``root`` or cannot be read.
    """
    return load_single("mnist", root, MNIST)


def fashion_mnist(root: Path) -> Federation:
    """Load Fashion-MNIST: 70,000 images of clothing, 28 x 28 gray, in MNIST's format (Xiao, Rasul and Vollgraf 2017).

    Returns one client, uint8 ``[N, 1, 28, 28]``, ten classes, with the publisher's training and test parts.
    """
    return load_single("fashion-mnist", root, FASHION_MNIST, _CLOTHING)


SVHN = make_single_card("svhn", read_pair(read_digits_mat), ("train_32x32.mat", "test_32x32.mat"))

SYNTHDIGITS = make_single_card(
    "synthdigits", read_pair(read_digits_mat), ("synth_train_32x32.mat", "synth_test_32x32.mat")
)


def svhn(root: Path) -> Federation:
    """Load SVHN: photographed house numbers, cropped digits, 32 x 32 in color, "format 2" (Netzer et al. 2011).

    Returns one client, uint8 ``[N, 3, 32, 32]``, ten classes (the file's label 10 is digit 0), with the official parts.
    """
    return load_single("svhn", root, SVHN)


def synthdigits(root: Path) -> Federation:
    """Load SynthDigits: font digits on clutter, 32 x 32 in color, in SVHN's format (Ganin and Lempitsky 2015).

    Returns one client, uint8 ``[N, 3, 32, 32]``, ten classes, with the official parts; 1.5 GB in memory.
    """
    return load_single("synthdigits", root, SYNTHDIGITS)


def _read_usps(file: Path) -> Arrays:
    x, y = read_libsvm(file, 256)
    if x.size and not (x.min() >= -1 and x.max() <= 1):
        raise UsageError(f"{file} holds pixels from {x.min():g} to {x.max():g}, expected were -1 to 1: get it again")
    return ((x.astype(np.float32) + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16), y - 1


USPS = make_single_card("usps", read_pair(_read_usps), ("usps", "usps.t"))


def usps(root: Path) -> Federation:
    """Load USPS: 9,298 handwritten digits from envelopes, 16 x 16 gray (Hull 1994), as LIBSVM distributes it.

    Pixels from -1 to 1 are truncated to gray levels, as FedBN's authors and torchvision do.

    Returns one client, uint8 ``[N, 1, 16, 16]``, ten classes, with the file's parts.
    """
    return load_single("usps", root, USPS)


def _read_mnistm(file: Path) -> TrainAndTest:
    content: dict[str, Any] = read_pickle(file)
    with explain_errors(file, "MNIST-M with arrays train and test"):
        x_train, x_test = content["train"], content["test"]
        held_out = content.get("valid", x_train[:0])
        x_train = np.concatenate([x_train, held_out])
        for folder in (file.parent, file.parent.parent):
            if MNIST.present("mnist", folder):
                train, test = MNIST.locate("mnist", folder)()
                # Held-out images are MNIST's first.
                return make_splits((x_train, train.y.roll(-len(held_out))), (x_test, test.y), file)
    raise UsageError(
        f"{file} holds no labels, they are MNIST's, which is not in {file.parent.parent}: put there {MNIST.layout}"
    )


MNISTM = make_single_card("mnistm", _read_mnistm, ["keras_mnistm.pkl"], remotes=MNIST.move_remotes("mnist"))


def mnistm(root: Path) -> Federation:
    """Load MNIST-M: MNIST's digits blended with patches of color photographs (Ganin et al. 2016, arXiv:1505.07818).

    The pickle ``keras_mnistm.pkl`` is a remake of all 70,000 digits in 28 x 28, as used by FedBN's authors. It has no
    labels, which are read from MNIST in a directory nearby.

    Returns one client, uint8 ``[N, 3, 28, 28]``, ten classes, with the file's two parts.
    """
    return load_single("mnistm", root, MNISTM)


_CIFAR_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_AUGMENTED_TOGETHER = 1000  # images


def _read_cifar(file: Path) -> TrainAndTest:
    """Read the archive of six batches, pickled dictionaries with ``data`` ``[N, 3 x 32 x 32]`` and ``labels``."""
    batches: dict[str, tuple[Bytes, list[int]]] = {}
    with explain_errors(file, "CIFAR-10's archive"), tarfile.open(file) as members:
        for member in members:  # in the archive's order, because going back would decompress it again
            content, name = members.extractfile(member), Path(member.name).name
            if content is not None and name in _CIFAR_BATCHES:
                check_expansion(file, member.size)
                batches[name] = _read_cifar_batch(content, file / name)
    missing = [name for name in _CIFAR_BATCHES if name not in batches]
    if missing:
        raise UsageError(f"{file} lacks {', '.join(missing)}: it is cut short or of another kind; get it again")
    *train, test = (batches[name] for name in _CIFAR_BATCHES)
    x_train, y_train = (np.concatenate(several) for several in zip(*train, strict=True))
    return make_splits((x_train, y_train), test, file)


def _read_cifar_batch(content: IO[bytes], where: Path) -> tuple[Bytes, list[int]]:
    with explain_errors(where, "a batch with data and labels"):
        batch = load_pickle(content, where)
        return batch["data"].reshape(-1, 3, 32, 32), batch["labels"]


CIFAR10 = make_single_card("cifar10", _read_cifar, ["cifar-10-python.tar.gz"])


def cifar10(root: Path, *, doubled: bool = False, seed: int = 0) -> Federation:
    """Load CIFAR-10: 60,000 photographs, 32 x 32 in color (Krizhevsky 2009), "python" version.

    Returns one client, uint8 ``[N, 3, 32, 32]``, ten classes, with the publisher's training and test parts.
    ``doubled``: the training images are followed by an augmented copy of each, drawn once
    from ``seed``, as in FedMMB (Nasirigerdeh et al., arXiv:2011.07006): flips, brightness, contrast, saturation and
    hue. The paper does not give the strengths; :func:`fedshift.data.augmentation.fedmmb_cifar` sets them.
    """
    train, test = CIFAR10.locate("cifar10", root)()
    if doubled:
        augment = fedmmb_cifar()
        copies = [
            augment(chunk.float() / 255, stream(seed, "cifar10/doubled", place)).mul(255).round().to(torch.uint8)
            for place, chunk in enumerate(torch.split(train.x, _AUGMENTED_TOGETHER))
        ]
        train = Samples(x=torch.cat([train.x, *copies]), y=train.y.repeat(2))
    return load_single("cifar10", root, CIFAR10, OBJECTS, (train, test))
