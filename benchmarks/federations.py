"""Small federations on which the benchmarks of methods and of advice run.

The embedded digits as they are, with few samples, with fewer looks, and dealt out anew (by a Dirichlet distribution, by
labels, by size, at random, mixed over clients); each client with another look (turned, inverted, dark); and, of the
data under FEDSHIFT_DATA, MNIST, USPS, MNIST-M, SVHN and printed digits as five clients, Fashion-MNIST and CIFAR-10
dealt out, skin lesions by center, heart disease and autism by hospital, Office-Caltech10 in few and in more pixels and
with a pretrained network, and nuclei by microscope (segmentation). Where classes or looks are dealt out
unequally, a client's test samples are dealt out like those that it trains on: what a client holds out for validation
says nothing about data of others. Those that are not there are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedshift
from fedshift.data.decoding.resizing import resize
from fedshift.data.federation import Federation
from fedshift.data.partition import dirichlet, domain_mix, iid, labels, quantity
from fedshift.data.samples import Samples
from fedshift.utils.errors import FedshiftError

SAMPLES, TESTED, SIZE, BATCH = 150, 150, 16, 16
"""Training and test samples of each client, pixels of a side, samples in a batch."""
TURNS = [lambda x, k=k: torch.rot90(x, k, (2, 3)) for k in range(4)]
TONES = [lambda x: x, lambda x: 255 - x, lambda x: x // 4, lambda x: 128 + x // 2]


def smaller(data: Federation, samples: int = SAMPLES, tested: int = TESTED) -> Federation:
    """At most so many training and test samples of each client."""
    rng = np.random.default_rng(0)

    def cut(split: Samples, count: int) -> Samples:
        return split.take(torch.from_numpy(np.sort(rng.permutation(len(split))[:count])))

    clients = (
        client.with_splits({"train": cut(client.train, samples), "test": cut(client.test, tested)})
        for client in data.clients
    )
    return Federation(name=data.name, clients=tuple(clients), classes=data.classes, task=data.task)


def changed(split: Samples, x: torch.Tensor) -> Samples:
    """The samples of ``split`` with other pixels."""
    return Samples(x=x.contiguous(), y=split.y, normalization=split.normalization)


def look(change: Sequence[Callable[[torch.Tensor], torch.Tensor]], data: Federation) -> Federation:
    """Each client's images changed by the function at its place."""
    clients = (
        client.with_splits({name: changed(split, made(split.x)) for name, split in client.splits.items()})
        for client, made in zip(data.clients, change, strict=True)
    )
    return Federation(name=data.name, clients=tuple(clients), classes=data.classes)


def read(*names: str, samples: int, tested: int = TESTED) -> Federation:
    """Data sets of one source as clients of one federation, in color and few pixels."""
    clients = tuple(fedshift.load_data(name).clients[0] for name in names)
    return shrink(smaller(Federation(name="-".join(names), clients=clients, classes=10), samples, tested))


def read_sets(*names: str) -> Federation:
    """Data sets as clients of one federation, from their files in FEDSHIFT_DATA."""
    if not (root := os.environ.get("FEDSHIFT_DATA")):
        raise FedshiftError("FEDSHIFT_DATA is not set: it names the directory of the data")
    return shrink(smaller(fedshift.load_data(root, domains=",".join(names), image_size=SIZE)))


def shrink(data: Federation) -> Federation:
    """The images of ``data`` in color and few pixels."""
    return data.map_splits(lambda split: changed(split, resize(split.x.expand(-1, 3, -1, -1), (SIZE, SIZE))))


def digits(*names: str) -> Federation:
    data = fedshift.digits(size=SIZE)
    return data.select_clients(names or data.names)


DEALT = dirichlet(clients=5, alpha=0.3, minimum=40, test="same")

MAKERS: dict[str, Callable[[], Federation]] = {
    "digits": lambda: smaller(digits()),
    "digits-40": lambda: smaller(digits(), 40),
    "digits-200": lambda: smaller(digits(), 200),
    "digits-three": lambda: smaller(digits("pen", "photo", "print")),
    "digits-two": lambda: smaller(digits("pen", "worn")),
    "digits-dirichlet-0.1": lambda: smaller(dirichlet(clients=6, alpha=0.1, minimum=40, test="same")(digits())),
    "digits-dirichlet-1": lambda: smaller(dirichlet(clients=6, alpha=1.0, minimum=40, test="same")(digits())),
    "digits-labels-2": lambda: smaller(labels(clients=10, per_client=2, test="same")(digits())),
    "digits-quantity": lambda: smaller(quantity(clients=6, alpha=0.5, minimum=20)(digits()), 400),
    "digits-iid": lambda: smaller(iid(clients=6)(digits())),
    "digits-mix-0": lambda: smaller(domain_mix(clients=10, mixing=0.0, test="same")(digits())),
    "digits-mix-0.3": lambda: smaller(domain_mix(clients=10, mixing=0.3, test="same")(digits())),
    "pen-turned": lambda: look(TURNS, smaller(iid(clients=4)(digits("pen")))),
    "pen-tones": lambda: look(TONES, smaller(iid(clients=4)(digits("pen")))),
    "digits-turned": lambda: look(TURNS, smaller(digits("pen", "photo", "print", "worn"))),
    "five-sets": lambda: read_sets("mnist", "usps", "mnistm", "svhn_subset", "chars74k_fnt"),
    "fashion-dirichlet": lambda: smaller(DEALT(read("fashion-mnist", samples=1600, tested=1000))),
    "fashion-tones": lambda: look(TONES, smaller(iid(clients=4)(read("fashion-mnist", samples=1600)))),
    "cifar10-dirichlet": lambda: smaller(DEALT(read("cifar10", samples=1600, tested=1000))),
    "heart-disease": lambda: fedshift.load_data("heart-disease"),
    "skin-lesions": lambda: shrink(smaller(fedshift.load_data("fed-isic2019"), 2 * SAMPLES)),
    "abide": lambda: fedshift.load_data("abide"),
    "office-caltech10": lambda: smaller(fedshift.load_data(f"office-caltech10(size={SIZE})")),
    "office-caltech10-64": lambda: smaller(fedshift.load_data("office-caltech10(size=64)")),
    "office-caltech10-pretrained": lambda: smaller(fedshift.load_data("office-caltech10(size=64)")),
    "nuclei": lambda: fedshift.load_data("nuclei"),
}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "office-caltech10-pretrained": {
        "model": "mobilenet-v2", "normalize": "imagenet", "weights_skip_classifier": True, "engine": "sequential",
    },
    "nuclei": {"model": "unet-small", "engine": "sequential"},
}  # fmt: skip
"""Settings of federations whose network is not the default of their data."""

SHARED = {"digits": "digits", "pen": "digits", "fashion": "fashion-mnist", "office": "office-caltech10"}
SOURCES = {name: SHARED.get(name.partition("-")[0], name) for name in MAKERS}
"""Where the samples of each federation come from: those with the same source are not independent of each other."""

HELD_APART = ("office-caltech10",)
"""Federations on which no method was run before the rules of the benchmark were fixed."""


SKEWED = tuple(name for name in MAKERS if "dirichlet" in name or "labels" in name)
"""Federations whose clients differ in their classes."""
ALIKE = ("digits-quantity", "digits-iid")
"""Federations whose clients do not differ, but for their sizes."""


def make_federations(
    names: Collection[str] = tuple(MAKERS), weights: Path | None = None
) -> Iterator[tuple[str, Federation, dict[str, Any]]]:
    """Yield each federation of ``names`` whose data are there, with its name and own settings; print the others.

    ``weights``: torchvision's MobileNetV2 from ImageNet, without which no network is pretrained.
    """
    for name in names:
        settings = dict(OWN_SETTINGS.get(name, {}))
        if "weights_skip_classifier" in settings:
            if weights is None:
                print(f"{name} is left out: it needs --weights", flush=True)
                continue
            settings["weights"] = str(weights)
        try:
            yield name, MAKERS[name](), settings
        except FedshiftError as error:
            print(f"{name} is left out: {str(error).partition(':')[0]}", flush=True)
