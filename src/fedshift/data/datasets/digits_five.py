"""Digits-Five: the same ten digits from five sources, one client each, the benchmark of FedBN and FedWon.

The data are prepared as in the script of FedBN's authors (Li et al. 2021, arXiv:2102.07623, section 5.1 and appendix D;
https://github.com/med-air/FedBN, utils/data_preprocess.py). Each source's training and test images are pooled and split
again, 80 to 20 by class, by scikit-learn's ``StratifiedShuffleSplit(test_size=0.2, random_state=0)``. The first 7,438
images of the shuffled training part are kept, as many as USPS has. This gives 14,000, 19,858, 1,860, 97,791 and 14,000
test images, and the training sizes of the paper's table 16. The same draw reproduces the authors' partitions from the
publishers' files; MNIST-M must then be the remake of 70,000 digits that they used (:func:`.single_datasets.mnistm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import StratifiedShuffleSplit

from ...utils.errors import UsageError
from ..federation import ClientData, Federation
from ..formats import read_pickle
from ..samples import Samples, join_samples, to_samples
from ._card import get_card, make_card, require_choices
from ._single_dataset import DIGITS
from .single_datasets import mnist, mnistm, svhn, synthdigits, usps

_LOADERS = {loader.__name__: loader for loader in (mnist, svhn, usps, synthdigits, mnistm)}
"""The source's loader, by client."""
_CARDS = {domain: get_card(loader) for domain, loader in _LOADERS.items()}


_FOLDERS = dict(zip(_LOADERS, ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST_M"), strict=True))
"""The FedBN authors' directory, by client."""
_PARTITIONS = tuple(f"partitions/train_part{number}.pkl" for number in range(10))


def _holds_partitions(domain: str, home: Path) -> bool:
    """Return whether the authors' directory of a domain is in ``home`` and complete."""
    return all((home / _FOLDERS[domain] / name).is_file() for name in (*_PARTITIONS, "test.pkl"))


def _find_home(domain: str, folder: Path) -> Path | None:
    """Return the directory under ``folder`` with the files of a domain; ``digits-five`` is tried first."""
    homes = (folder / "digits-five", folder / "digits_five", folder)
    return next((h for h in homes if _holds_partitions(domain, h) or _CARDS[domain].present(domain, h)), None)


CARD = make_card(
    "digits-five",
    find=lambda folder: folder if all(_find_home(domain, folder) for domain in _LOADERS) else None,
    remotes=[
        remote
        for domain, card in _CARDS.items()
        for remote in card.move_remotes(domain)
        if remote.name.count("/") == 1  # the MNIST files that MNIST-M needs are already listed
    ],
)


def digits_five(
    root: Path,
    *,
    domains: Sequence[str] = tuple(_LOADERS),
    samples: int | None = 7438,
    seed: int = 0,
) -> Federation:
    """Load Digits-Five, one client for each of ``domains``.

    Args:
        root: Directory of the data.
        domains: Names of the clients.
        samples: Number of training images per client, the first in the paper's order (743 are the authors' part 0);
            None: all.
        seed: Seed of the draw from the pooled files, without the authors' partitions; 0: the authors' draw.

    Returns:
        Clients with uint8 images in the sources' sizes (gray 28 x 28, ...), which :meth:`Federation.fit_images`
        converts to 3 x 28 x 28; ten classes.

    Raises:
        UsageError: A domain or size is unknown, or files are missing; the message lists the required files.

    """
    require_choices("domains", domains, _LOADERS)
    homes = {domain: home for domain in domains if (home := _find_home(domain, root))}
    missing = [domain for domain in domains if domain not in homes]
    if missing:
        needed = "; ".join(f"for {domain} {_CARDS[domain].layout}" for domain in missing)
        raise UsageError(
            f"digits-five lacks {', '.join(missing)} under {root}: put there {needed}; or put there the FedBN authors' "
            f"directories {', '.join(_FOLDERS[domain] for domain in missing)}; or choose other domains"
        )
    clients = [_read_client(domain, home, samples, seed) for domain, home in homes.items()]
    note = f"Digits of {len(clients)} sources, {'all' if samples is None else samples} training images each"
    return Federation(name="digits-five", clients=tuple(clients), classes=10, note=note, class_names=DIGITS)


def _read_client(domain: str, home: Path, samples: int | None, seed: int) -> ClientData:
    """Return the authors' partitions, or else pool and split a source as they do, by scikit-learn and its generator."""
    if _holds_partitions(domain, home):
        train, test = (
            join_samples([_read_partition(home / _FOLDERS[domain] / name) for name in names])
            for names in (_PARTITIONS, ("test.pkl",))
        )
    else:
        (client,) = _LOADERS[domain](home).clients
        pooled = join_samples([client.train, client.test])
        draw = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=seed)
        rows = map(torch.from_numpy, next(draw.split(np.zeros(len(pooled)), pooled.y.numpy())))
        train, test = map(pooled.take, rows)
    if samples is not None and not 1 <= samples <= len(train):
        raise UsageError(
            f"samples={samples}: {domain!r} has {len(train)} training images; ask for 1 to {len(train)}, or for all "
            "(None)"
        )
    splits = {"train": train.take(torch.arange(len(train))[:samples]), "test": test}
    copies = {name: Samples(x=own.copy_rows(slice(None)), y=own.y) for name, own in splits.items()}
    return ClientData.from_splits(domain, copies)


def _read_partition(file: Path) -> Samples:
    content = read_pickle(file)
    if not (isinstance(content, tuple | list) and len(content) == 2):
        raise UsageError(f"{file} does not hold images and labels, as the FedBN authors' partitions do: get it again")
    return to_samples(content[0], content[1], str(file))
