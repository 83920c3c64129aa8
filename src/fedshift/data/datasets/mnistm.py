"""MNIST-M: MNIST's digits blended with patches of color photographs (Ganin et al. 2016, arXiv:1505.07818).

Three forms are read. The authors' own directory ``mnist_m`` has 59,001 and 9,001 images of 32 x 32. The two pickles,
``keras_mnistm.pkl`` and ``mnistm_data.pkl``, are remakes of all 70,000 digits in 28 x 28, as FedBN's authors used them;
the first holds no labels, for they are MNIST's, which is then looked for nearby.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...utils.errors import UsageError
from ..federation import Federation
from ..formats import Bytes, explain_errors
from ..pickles import read_pickle
from ._card import Card, Remote
from ._single_dataset import Parts, Reader, find_directories, find_first, find_packed, load_single, make_splits
from .mnist import CARD as MNIST

_PICKLES = ("mnistm_data.pkl", "keras_mnistm.pkl", "keras_mnistm.pkl.gz")


def _find(folder: Path) -> Reader | None:
    for home in (folder, *find_directories(folder, "mnistm")):
        train, test = (find_first(home, f"mnist_m_{part}_labels.txt") for part in ("train", "test"))
        if train and test:
            return partial(_read_directories, train, test)
        if file := find_first(home, *_PICKLES):
            return partial(_read_pickle, file)
    return find_packed(folder, "mnistm")


def _read_directories(train: Path, test: Path) -> Parts:
    return make_splits(_read_images(train), _read_images(test), train)


def _read_images(labels: Path) -> tuple[Bytes, list[int]]:
    """Images ``[N, H, W, 3]`` and labels of a list with lines such as ``00000000.png 5``."""
    with explain_errors(labels, "a list of images and labels"):
        rows = [line.split() for line in labels.read_text().splitlines() if line.strip()]
        names, y = [name for name, _ in rows], [int(label) for _, label in rows]
    folder = labels.with_name(labels.name.removesuffix("_labels.txt"))
    images = []
    for name in names:
        with explain_errors(folder / name, "an image"), Image.open(folder / name) as image:
            images.append(np.asarray(image.convert("RGB")))
    with explain_errors(folder, "images of one size"):
        return np.stack(images), y


def _read_pickle(file: Path) -> Parts:
    content: dict[str, Any] = read_pickle(file)
    with explain_errors(file, "MNIST-M with arrays train and test"):
        x_train, x_test = content["train"], content["test"]
        held_out = content.get("valid", x_train[:0])
        x_train = np.concatenate([x_train, held_out])
        if "train_label" in content:
            y_train = np.concatenate([content["train_label"], content.get("valid_label", [])])
            return make_splits((x_train, y_train), (x_test, content["test_label"]), file)
        of_train, of_test = _mnist_labels(file)
        # Where some are held out, they are MNIST's first.
        return make_splits((x_train, of_train.roll(-len(held_out))), (x_test, of_test), file)


def _mnist_labels(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    for folder in (file.parent, file.parent.parent):
        if MNIST.present("mnist", folder):
            train, test = MNIST.locate("mnist", folder)()
            return train.y, test.y
    raise UsageError(
        f"{file} holds no labels, they are MNIST's, which is not in {file.parent.parent}: put there {MNIST.layout}"
    )


CARD = Card(
    title="MNIST-M",
    clients=("mnistm",),
    classes=10,
    samples="59,001 training and 9,001 test images; the remake used by FedBN 60,000 and 10,000, see digits-five",
    license="none stated; its backgrounds are BSDS500's, for non-commercial research and education",
    homepage="http://yaroslav.ganin.net/",
    source="Ganin et al., Domain-adversarial training of neural networks, JMLR 17, 2016, arXiv:1505.07818",
    layout="the directory mnist_m (mnist_m_train, mnist_m_test and their lists of labels), or mnistm_data.pkl, or "
    "keras_mnistm.pkl with MNIST beside it, or mnistm.npz with x_train, y_train, x_test, y_test",
    find=_find,
    remotes=(
        Remote(
            url="https://github.com/VanushVaswani/keras_mnistm/releases/download/1.0/keras_mnistm.pkl.gz",
            name="keras_mnistm.pkl.gz",
        ),
        *(replace(remote, name=f"mnist/{remote.name}") for remote in MNIST.remotes),
    ),
)


def mnistm(root: Path) -> Federation:
    """One client ``mnistm``, uint8 ``[N, 3, 32, 32]`` (28 x 28 from a pickle), ten classes, the file's two parts.

    Raises :class:`UsageError` where the files are not under ``root`` or cannot be read.
    """
    return load_single("mnistm", root, CARD)
