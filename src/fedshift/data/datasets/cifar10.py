"""CIFAR-10: 60,000 photographs of ten kinds, 32 x 32 in color (Krizhevsky 2009), "python" or "binary" version.

The archives are read as they are, or unpacked. In the binary version a record is one byte of label and 3 x 1,024 bytes
of red, green and blue; in the python version a batch is a pickled dictionary with the same rows as ``data``.
"""

from __future__ import annotations

import tarfile
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..augmentation import fedmmb_cifar
from ..federation import Federation
from ..formats import Bytes, explain_errors
from ..pickles import load_pickle
from ..samples import Samples
from ._card import Card, Remote
from ._single_dataset import Parts, Reader, find_first, find_packed, make_one_client, make_splits

_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_BATCHES = (*_TRAIN, "test_batch")
_PIXELS = 3 * 32 * 32
_CHUNK = 1000  # images augmented at a time

Batch = tuple[Bytes, list[int] | Bytes]


def _find(folder: Path) -> Reader | None:
    for version, ending in (("py", ""), ("bin", ".bin")):
        for home in (folder / f"cifar-10-batches-{version}", folder):
            if all((home / f"{batch}{ending}").is_file() for batch in _BATCHES):
                return partial(_read_files, [home / f"{batch}{ending}" for batch in _BATCHES])
    if archive := find_first(folder, "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"):
        return partial(_read_archive, archive)
    return find_packed(folder, "cifar10")


def _read_files(files: list[Path]) -> Parts:
    batches = {}
    for path in files:
        with path.open("rb") as file:
            batches[path.name.removesuffix(".bin")] = _read_batch(file, path)
    return _join_batches(batches, files[0].parent)


def _read_archive(archive: Path) -> Parts:
    batches = {}
    with explain_errors(archive, "CIFAR-10's archive"), tarfile.open(archive) as members:
        for member in members:  # in the archive's order: to go back is to decompress anew
            file = members.extractfile(member)
            name = Path(member.name).name
            if file is not None and name.removesuffix(".bin") in _BATCHES:
                batches[name.removesuffix(".bin")] = _read_batch(file, archive / name)
    return _join_batches(batches, archive)


def _read_batch(file: IO[bytes], where: Path) -> Batch:
    """Images ``[N, 3, 32, 32]`` and labels ``[N]`` of one batch."""
    if where.suffix == ".bin":
        content = file.read()
        if len(content) % (1 + _PIXELS):
            raise UsageError(f"{where} has {len(content)} bytes, no multiple of {1 + _PIXELS}: it is cut short")
        rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    with explain_errors(where, "a batch with data and labels"):
        batch = load_pickle(file, where)
        return batch["data"].reshape(-1, 3, 32, 32), batch["labels"]


def _join_batches(batches: dict[str, Batch], where: Path) -> Parts:
    missing = [name for name in _BATCHES if name not in batches]
    if missing:
        raise UsageError(f"{where} lacks {', '.join(missing)}: it is cut short or of another kind; get it again")
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*(batches[name] for name in _TRAIN), strict=True))
    return make_splits((x_train, y_train), batches["test_batch"], where)


CARD = Card(
    title="CIFAR-10",
    clients=("cifar10",),
    classes=10,
    samples="50,000 training and 10,000 test images; FedMMB doubles the training set by augmentation (doubled=True)",
    license="none stated; its citation is asked for",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    source="Krizhevsky, Learning multiple layers of features from tiny images, technical report, Toronto, 2009",
    layout="cifar-10-python.tar.gz or cifar-10-binary.tar.gz, as they are or unpacked (cifar-10-batches-py, "
    "cifar-10-batches-bin), or cifar10.npz with x_train, y_train, x_test, y_test",
    find=_find,
    remotes=(
        Remote(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            name="cifar-10-python.tar.gz",
            md5="c58f30108f718f92721af3b95e74349a",
            size=170_498_071,
        ),
    ),
)


def cifar10(root: Path, *, doubled: bool = False, seed: int = 0) -> Federation:
    """One client ``cifar10``, uint8 ``[N, 3, 32, 32]``, ten classes, the publisher's training and test parts.

    ``doubled``: the training images are followed by an augmented copy of each, drawn once from ``seed``, as in FedMMB
    (Nasirigerdeh et al., arXiv:2011.07006): flips, brightness, contrast, saturation and hue, of strengths that are ours
    (:func:`fedshift.data.augmentation.fedmmb_cifar`), for the paper gives none. Raises :class:`UsageError` where the files
    are not under ``root`` or cannot be read.
    """
    train, test = CARD.locate("cifar10", root)()
    return make_one_client("cifar10", _double(train, seed) if doubled else train, test, CARD, _CLASSES)


def _double(train: Samples, seed: int) -> Samples:
    augment = fedmmb_cifar()
    copies = [
        augment(chunk.float() / 255, stream(seed, "cifar10/doubled", place)).mul(255).round().to(torch.uint8)
        for place, chunk in enumerate(torch.split(train.x, _CHUNK))
    ]
    return Samples(x=torch.cat([train.x, *copies]), y=train.y.repeat(2))
