"""Morpho-MNIST: MNIST's digits with their strokes changed (Castro et al. 2019, JMLR 20(178), arXiv:1809.10780).

As published, ``global`` mixes plain, thinned and thickened digits, and ``local`` mixes plain, swollen and fractured
digits; these are FedBN's two new clients (arXiv:2102.07623, appendix G). The published images are used if present.
Otherwise, images are made from MNIST (:mod:`._morphology`), which takes about two minutes for all of MNIST.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..samples import Samples
from ._card import make_card, require_choices
from ._morphology import perturb
from ._single_dataset import DIGITS, IDX_FILES, Reader, find_directories, find_files, read_idx_files
from .single_datasets import MNIST

_PUBLISHED = {
    "plain": "plain", "thin": "thin", "thick": "thic", "swollen": "swel", "fractured": "frac", "global": "global",
    "local": "local",
}  # fmt: skip
"""The name of the publisher's directory, by domain."""

_MIXTURES = {"global": ("plain", "thin", "thick"), "local": ("plain", "swollen", "fractured")}
_DOMAINS = ("plain", "thin", "thick", "swollen", "fractured")
_CHUNK = 500  # digits to change at a time


def _find(folder: Path) -> dict[str, Reader] | None:
    """Return readers for the published domains and for ``mnist``."""
    found: dict[str, Reader] = {}
    for domain, name in _PUBLISHED.items():
        for home in find_directories(folder, name):
            if files := find_files(home, IDX_FILES):
                found[domain] = partial(read_idx_files, *files)
                break
    if MNIST.present("mnist", folder):
        found["mnist"] = MNIST.locate("mnist", folder)
    return found if "mnist" in found or set(_DOMAINS) <= set(found) else None


CARD = make_card("morpho-mnist", find=_find, remotes=MNIST.move_remotes("mnist"))


def morpho_mnist(
    root: Path, *, domains: Sequence[str] = _DOMAINS, samples: int | None = None, seed: int = 0
) -> Federation:
    """Load Morpho-MNIST, one client for each of ``domains``, uint8 ``[N, 1, 28, 28]``; no two clients share a digit.

    Domains are plain, thin, thick, swollen, fractured, and the mixtures global and local. ``samples``: training digits
    per client; None: an equal share of all. Test digits are distributed as well. A digit's appearance depends only on
    its index in MNIST, its domain and ``seed``. Raises :class:`UsageError` for other domains and sizes, and if neither
    MNIST nor the published images are under ``root``.
    """
    require_choices("domains", domains, _PUBLISHED)
    found: dict[str, Reader] = CARD.locate("morpho-mnist", root)
    missing = [domain for domain in domains if domain not in found]
    if missing and "mnist" not in found:
        raise UsageError(f"{', '.join(missing)} not among the published images under {root}: put there {CARD.layout}")
    sources = dict.fromkeys(missing, found["mnist"]()) if missing else {}
    clients = []
    for place, domain in enumerate(domains):
        splits = {}
        for part, split in zip(("train", "test"), sources.get(domain) or found[domain](), strict=True):
            own = np.array_split(stream(seed, "morpho-mnist/share", part).permutation(len(split)), len(domains))[place]
            if part == "train" and samples is not None:
                if not 1 <= samples <= len(own):
                    raise UsageError(
                        f"samples={samples}: {domain!r} has {len(own)} training digits; ask for up to that"
                    )
                own = own[:samples]
            x, y = split.copy_rows(torch.from_numpy(own)), split.y[torch.from_numpy(own)]
            x = _perturb_digits(x, own, domain, part, seed) if domain in missing else x
            splits[part] = Samples(x=x, y=y)
        clients.append(ClientData.from_splits(domain, splits))
    note = f"MNIST with strokes changed: {', '.join(domains)}"
    return Federation(name="morpho-mnist", clients=tuple(clients), classes=10, note=note, class_names=DIGITS).check()


def _perturb_digits(x: torch.Tensor, numbers: NDArray[np.int64], domain: str, part: str, seed: int) -> torch.Tensor:
    """Perturb digits ``[N, 1, 28, 28]``, whose indices in MNIST are ``numbers``, as in ``domain``."""
    streams = [stream(seed, "morpho-mnist", domain, part, int(number)) for number in numbers]
    kinds = [str(rng.choice(_MIXTURES[domain])) if domain in _MIXTURES else domain for rng in streams]
    chunks = [
        perturb(x[at : at + _CHUNK, 0].numpy(), kinds[at : at + _CHUNK], streams[at : at + _CHUNK])
        for at in range(0, len(x), _CHUNK)
    ]
    return torch.from_numpy(np.concatenate(chunks))[:, None]
