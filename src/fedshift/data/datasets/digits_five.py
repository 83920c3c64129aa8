"""Digits-Five: the same ten digits from five sources, one client each, the benchmark of FedBN and FedWon.

The data are prepared as in the script of FedBN's authors (Li et al. 2021, arXiv:2102.07623, section 5.1 and appendix D;
https://github.com/med-air/FedBN, utils/data_preprocess.py). Each source's training and test images are pooled and split
again, 80 to 20 by class, by scikit-learn's ``StratifiedShuffleSplit(test_size=0.2, random_state=0)``. The first 7,438
images of the shuffled training part are kept, as many as USPS has. This gives 14,000, 19,858, 1,860, 97,791 and 14,000
test images, and the training sizes of the paper's table 16. The same draw reproduces the authors' partitions from the
publishers' files; MNIST-M must then be the remake of 70,000 digits that they used (:func:`.single_datasets.mnistm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import StratifiedShuffleSplit

from ...utils.errors import UsageError
from ..federation import ClientData, Federation
from ..formats import read_pickle
from ..samples import Samples, join_samples, to_samples
from . import single_datasets as single
from ._card import Card, make_card, require_choices
from ._single_dataset import DIGITS, TrainAndTest

_SOURCES: dict[str, tuple[str, Card, Callable[[Path], Federation]]] = {
    "mnist": ("MNIST", single.MNIST, single.mnist),
    "svhn": ("SVHN", single.SVHN, single.svhn),
    "usps": ("USPS", single.USPS, single.usps),
    "synthdigits": ("SynthDigits", single.SYNTHDIGITS, single.synthdigits),
    "mnistm": ("MNIST_M", single.MNISTM, single.mnistm),
}
"""The authors' directory, and the source's card and loader, by client."""

_PARTITIONS = tuple(f"partitions/train_part{number}.pkl" for number in range(10))


def _find_partitions(domain: str, folder: Path) -> Path | None:
    """Return the authors' directory of a domain, or None unless it is in ``folder`` and complete."""
    home = folder / _SOURCES[domain][0]
    return home if all((home / name).is_file() for name in (*_PARTITIONS, "test.pkl")) else None


def _find_home(domain: str, folder: Path) -> Path | None:
    """Return the directory under ``folder`` with the files of a domain; ``digits-five`` is tried first."""
    for home in (folder / "digits-five", folder / "digits_five", folder):
        if _find_partitions(domain, home) or _SOURCES[domain][1].present(domain, home):
            return home
    return None


CARD = make_card(
    "digits-five",
    find=lambda folder: folder if all(_find_home(domain, folder) for domain in _SOURCES) else None,
    remotes=[
        remote
        for domain, (_, card, _) in _SOURCES.items()
        for remote in card.move_remotes(domain)
        if remote.name.count("/") == 1  # the MNIST files that MNIST-M needs are already listed
    ],
)


def digits_five(
    root: Path,
    *,
    domains: Sequence[str] = tuple(_SOURCES),
    samples: int | None = 7438,
    seed: int = 0,
) -> Federation:
    """Load Digits-Five, one client for each of ``domains``.

    Args:
        root: Directory of the data.
        domains: Names of the clients.
        samples: Number of training images per client, the first in the paper's order (743 are the authors' part 0);
            None: all.
        seed: Seed of the draw from the pooled files, if the authors' partitions are not present; 0: the authors' draw.

    Returns:
        Clients with uint8 images in the sources' sizes (gray 28 x 28, ...), which :meth:`Federation.fit_images`
        converts to 3 x 28 x 28; ten classes.

    Raises:
        UsageError: A domain or size is unknown, or files are missing; the message lists the required files.

    """
    require_choices("domains", domains, _SOURCES)
    homes = {domain: home for domain in domains if (home := _find_home(domain, root))}
    missing = [domain for domain in domains if domain not in homes]
    if missing:
        needed = "; ".join(f"for {domain} {_SOURCES[domain][1].layout}" for domain in missing)
        raise UsageError(
            f"digits-five lacks {', '.join(missing)} under {root}: put there {needed}; or put there the FedBN authors' "
            f"directories {', '.join(_SOURCES[domain][0] for domain in missing)}; or choose other domains"
        )
    clients = []
    for domain, home in homes.items():
        if own := _find_partitions(domain, home):
            train = join_samples([_read_partition(own / name) for name in _PARTITIONS])
            test = _read_partition(own / "test.pkl")
        else:
            (client,) = _SOURCES[domain][2](home).clients
            train, test = _split_as_paper(client.train, client.test, seed)
        clients.append(ClientData(name=domain, train=_take_first(train, samples, domain), test=test))
    note = f"Digits of {len(clients)} sources, {'all' if samples is None else samples} training images each"
    return Federation(name="digits-five", clients=tuple(clients), classes=10, note=note, class_names=DIGITS)


def _read_partition(file: Path) -> Samples:
    content = read_pickle(file)
    if not (isinstance(content, tuple | list) and len(content) == 2):
        raise UsageError(f"{file} does not hold images and labels, as the FedBN authors' partitions do: get it again")
    return to_samples(content[0], content[1], str(file))


def _split_as_paper(train: Samples, test: Samples, seed: int) -> TrainAndTest:
    """Split the pooled samples as the authors do, with scikit-learn and its generator."""
    y = torch.cat([train.y, test.y])
    draw = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=seed)
    chosen = (torch.from_numpy(index) for index in next(draw.split(np.zeros(len(y)), y.numpy())))
    to_train, to_test = (Samples(x=_pool(train, test, index), y=y[index]) for index in chosen)
    return to_train, to_test


def _pool(first: Samples, second: Samples, index: torch.Tensor) -> torch.Tensor:
    """Return samples of two splits by their index in the concatenation, without building the concatenation."""
    x = torch.empty((len(index), *first.shape), dtype=first.dtype)
    of_first = index < len(first)
    x[of_first] = first.copy_rows(index[of_first])
    x[~of_first] = second.copy_rows(index[~of_first] - len(first))
    return x


def _take_first(train: Samples, samples: int | None, domain: str) -> Samples:
    if samples is None:
        return train
    if not 1 <= samples <= len(train):
        raise UsageError(
            f"samples={samples}: {domain!r} has {len(train)} training images; ask for 1 to {len(train)}, or for all "
            "(None)"
        )
    return Samples(x=train.copy_rows(slice(0, samples)), y=train.y[:samples])
