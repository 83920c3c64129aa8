"""Data sets with a single source: MNIST, Fashion-MNIST, SVHN, SynthDigits, USPS, MNIST-M and CIFAR-10.

Each has a card, a function that finds its files in one of the distributed layouts, and a loader.
"""

from __future__ import annotations

import importlib
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image

from ...utils.errors import UsageError
from ...utils.files import check_expansion, open_regular
from ...utils.random_streams import stream
from ..augmentation import fedmmb_cifar
from ..federation import Federation
from ..formats import Bytes, Numbers, explain_errors, read_digits_mat, read_libsvm, read_table, to_gray_levels
from ..pickles import load_pickle, read_pickle
from ..samples import Samples
from ._card import make_card
from ._single_dataset import (
    Arrays,
    Parts,
    find_idx,
    find_packed,
    load_single,
    make_one_client,
    make_single_card,
    make_splits,
    read_pair,
)

_CLOTHING = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

MNIST = make_card("mnist", find=lambda folder: find_packed(folder, "mnist") or find_idx(folder, "mnist"))

FASHION_MNIST = make_card(
    "fashion-mnist", find=lambda folder: find_packed(folder, "fashion-mnist") or find_idx(folder, "fashion-mnist")
)


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


SVHN = make_single_card("svhn", (read_pair(read_digits_mat), [("train_32x32.mat",), ("test_32x32.mat",)]))

SYNTHDIGITS = make_single_card(
    "synthdigits", (read_pair(read_digits_mat), [("synth_train_32x32.mat",), ("synth_test_32x32.mat",)])
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


def _read_usps_libsvm(file: Path) -> Arrays:
    x, y = read_libsvm(file, 256)
    return _cut_levels(x, file), y - 1


def _read_usps_text(file: Path) -> Arrays:
    table = read_table(file, 1 + 256)
    return _cut_levels(table[:, 1:], file), table[:, 0]


def _cut_levels(x: Numbers, file: Path) -> Bytes:
    if x.size and not (x.min() >= -1 and x.max() <= 1):
        raise UsageError(f"{file} holds pixels from {x.min():g} to {x.max():g}, expected were -1 to 1: get it again")
    return ((x.astype(np.float32) + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)


def _read_usps_h5(file: Path) -> Parts:
    try:
        h5py: Any = importlib.import_module("h5py")
    except ModuleNotFoundError as error:
        raise UsageError(f"reading {file} needs the package h5py: pip install h5py, or use usps.bz2") from error
    with explain_errors(file, "HDF5 with groups train and test"), h5py.File(file) as groups:
        x_train, y_train, x_test, y_test = (
            np.asarray(groups[part][array]) for part in ("train", "test") for array in ("data", "target")
        )
    return _round_levels(x_train, y_train, x_test, y_test, file, 16)


def _read_usps_pickle(file: Path) -> Parts:
    with explain_errors(file, "USPS of 28 x 28"):
        (x_train, y_train), (x_test, y_test) = read_pickle(file)
        return _round_levels(x_train, y_train, x_test, y_test, file, 28)


def _round_levels(x_train: Numbers, y_train: Numbers, x_test: Numbers, y_test: Numbers, file: Path, side: int) -> Parts:
    x_train, x_test = (to_gray_levels(x, file).reshape(-1, side, side) for x in (x_train, x_test))
    return make_splits((x_train, y_train), (x_test, y_test), file)


USPS = make_single_card(
    "usps",
    (read_pair(_read_usps_libsvm), [("usps.bz2", "usps"), ("usps.t.bz2", "usps.t")]),
    (read_pair(_read_usps_text), [("zip.train.gz", "zip.train"), ("zip.test.gz", "zip.test")]),
    (_read_usps_h5, [("usps.h5",)]),
    (_read_usps_pickle, [("usps_28x28.pkl",)]),
)


def usps(root: Path) -> Federation:
    """Load USPS: 9,298 handwritten digits from envelopes, 16 x 16 gray (Hull 1994), in its common formats.

    All formats contain the same pixels, from -1 to 1 (text of LIBSVM and of the ESL book) or from 0 to 1 (``usps.h5``).
    Values from -1 to 1 are truncated to gray levels, as FedBN's authors and torchvision do; values from 0 to 1 are
    rounded. ``usps_28x28.pkl`` has another split, 7,438 and 1,860, of images scaled to 28 x 28.

    Returns one client, uint8 ``[N, 1, 16, 16]`` (28 x 28 from ``usps_28x28.pkl``), ten classes, with the file's parts.
    """
    return load_single("usps", root, USPS)


def _read_listed_images(labels: Path) -> Arrays:
    """Return images ``[N, H, W, 3]`` and labels from a list with lines such as ``00000000.png 5``."""
    with explain_errors(labels, "a list of images and labels"):
        rows = [line.split() for line in labels.read_text().splitlines() if line.strip()]
        names, y = [name for name, _ in rows], [int(label) for _, label in rows]
    folder = labels.with_name(labels.name.removesuffix("_labels.txt"))
    images = []
    for name in names:
        place = folder / name
        with explain_errors(place, "an image"), open_regular(place) as content, Image.open(content) as image:
            images.append(np.asarray(image.convert("RGB")))
    with explain_errors(folder, "images of one size"):
        return np.stack(images), y


def _read_mnistm_pickle(file: Path) -> Parts:
    content: dict[str, Any] = read_pickle(file)
    with explain_errors(file, "MNIST-M with arrays train and test"):
        x_train, x_test = content["train"], content["test"]
        held_out = content.get("valid", x_train[:0])
        x_train = np.concatenate([x_train, held_out])
        if "train_label" in content:
            y_train = np.concatenate([content["train_label"], content.get("valid_label", [])])
            return make_splits((x_train, y_train), (x_test, content["test_label"]), file)
        for folder in (file.parent, file.parent.parent):
            if MNIST.present("mnist", folder):
                train, test = MNIST.locate("mnist", folder)()
                # Held-out images are MNIST's first.
                return make_splits((x_train, train.y.roll(-len(held_out))), (x_test, test.y), file)
    raise UsageError(
        f"{file} holds no labels, they are MNIST's, which is not in {file.parent.parent}: put there {MNIST.layout}"
    )


MNISTM = make_single_card(
    "mnistm",
    (read_pair(_read_listed_images), [("mnist_m_train_labels.txt",), ("mnist_m_test_labels.txt",)]),
    (_read_mnistm_pickle, [("mnistm_data.pkl", "keras_mnistm.pkl", "keras_mnistm.pkl.gz")]),
    remotes=(replace(remote, name=f"mnist/{remote.name}") for remote in MNIST.remotes),
)


def mnistm(root: Path) -> Federation:
    """Load MNIST-M: MNIST's digits blended with patches of color photographs (Ganin et al. 2016, arXiv:1505.07818).

    Three formats are supported. The authors' directory ``mnist_m`` has 59,001 and 9,001 images of 32 x 32. The two
    pickles, ``keras_mnistm.pkl`` and ``mnistm_data.pkl``, are remakes of all 70,000 digits in 28 x 28, as used by
    FedBN's authors; the first has no labels, which are read from MNIST in a directory nearby.

    Returns one client, uint8 ``[N, 3, 32, 32]`` (28 x 28 from a pickle), ten classes, with the file's two parts.
    """
    return load_single("mnistm", root, MNISTM)


_CIFAR_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR_BATCHES = (*_CIFAR_TRAIN, "test_batch")
_CIFAR_RECORD = 1 + 3 * 32 * 32
_CIFAR_LAYOUTS = [
    [(f"{home}{batch}{ending}",) for batch in _CIFAR_BATCHES]
    for version, ending in (("py", ""), ("bin", ".bin"))
    for home in (f"cifar-10-batches-{version}/", "")
]
_AUGMENTED_TOGETHER = 1000  # images

Batch = tuple[Bytes, list[int] | Bytes]


def _read_cifar_files(*files: Path) -> Parts:
    batches = {}
    for path in files:
        with path.open("rb") as file:
            batches[path.name.removesuffix(".bin")] = _read_cifar_batch(file, path)
    return _join_cifar_batches(batches, files[0].parent)


def _read_cifar_archive(archive: Path) -> Parts:
    batches = {}
    with explain_errors(archive, "CIFAR-10's archive"), tarfile.open(archive) as members:
        for member in members:  # in the archive's order, because going back would decompress it again
            file = members.extractfile(member)
            name = Path(member.name).name
            if file is not None and name.removesuffix(".bin") in _CIFAR_BATCHES:
                check_expansion(archive, member.size)
                batches[name.removesuffix(".bin")] = _read_cifar_batch(file, archive / name)
    return _join_cifar_batches(batches, archive)


def _read_cifar_batch(file: IO[bytes], where: Path) -> Batch:
    """Return images ``[N, 3, 32, 32]`` and labels ``[N]`` of one batch.

    In the binary version, a record is one label byte and 3 x 1,024 bytes of red, green and blue; in the python version,
    a batch is a pickled dictionary with the same rows as ``data``.
    """
    if where.suffix == ".bin":
        content = file.read()
        if len(content) % _CIFAR_RECORD:
            raise UsageError(f"{where} has {len(content)} bytes, no multiple of {_CIFAR_RECORD}: it is cut short")
        rows = np.frombuffer(content, np.uint8).reshape(-1, _CIFAR_RECORD)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    with explain_errors(where, "a batch with data and labels"):
        batch = load_pickle(file, where)
        return batch["data"].reshape(-1, 3, 32, 32), batch["labels"]


def _join_cifar_batches(batches: dict[str, Batch], where: Path) -> Parts:
    missing = [name for name in _CIFAR_BATCHES if name not in batches]
    if missing:
        raise UsageError(f"{where} lacks {', '.join(missing)}: it is cut short or of another kind; get it again")
    x_train, y_train = (
        np.concatenate(arrays) for arrays in zip(*(batches[name] for name in _CIFAR_TRAIN), strict=True)
    )
    return make_splits((x_train, y_train), batches["test_batch"], where)


CIFAR10 = make_single_card(
    "cifar10",
    *((_read_cifar_files, files) for files in _CIFAR_LAYOUTS),
    (_read_cifar_archive, [("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz")]),
)


def cifar10(root: Path, *, doubled: bool = False, seed: int = 0) -> Federation:
    """Load CIFAR-10: 60,000 photographs, 32 x 32 in color (Krizhevsky 2009), "python" or "binary" version.

    Returns one client, uint8 ``[N, 3, 32, 32]``, ten classes, with the publisher's training and test parts. Archives
    may be packed or unpacked. ``doubled``: the training images are followed by an augmented copy of each, drawn once
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
    return make_one_client("cifar10", train, test, CIFAR10, OBJECTS)
