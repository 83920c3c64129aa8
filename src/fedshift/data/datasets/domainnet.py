"""DomainNet: everyday things under six looks (Peng et al. 2019, arXiv:1812.01754; "M3SDA").

The publisher lists the images for training and testing of each domain, ``<domain>_train.txt`` and ``<domain>_test.txt``
with lines ``<domain>/<class>/<file> <label>``. FedBN takes ten of the 345 classes and publishes a split of those (Li et
al. 2021, arXiv:2102.07623, appendix D.3; https://github.com/med-air/FedBN), which is used where it is there. As in
their loaders (federated/fed_domainnet.py) pixels lie in [0, 1].
"""

from __future__ import annotations

from pathlib import Path

from ...utils.errors import UsageError, unknown_name
from ..federation import Federation
from ..files.image_tree import list_categories
from ..files.read_options import Progress
from ..samples import UNIT
from ._card import Card
from ._fedbn_lists import find_fedbn_lists, read_fedbn_list
from ._file_lists import (
    DomainFolders,
    ends,
    find_domains,
    list_from_folders,
    list_from_lists,
    mixed,
    read_listed,
    read_text_lists,
)

_CLIENTS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")


def _find(folder: Path) -> DomainFolders | None:
    return find_domains(folder, _CLIENTS, ("DomainNet",))


CARD = Card(
    title="DomainNet, everyday things as clip art, infographics, paintings, quick drawings, photos and sketches",
    clients=_CLIENTS,
    classes=10,
    samples=(
        "48,129, 51,605, 72,266, 172,500, 172,947 and 69,128 images of 345 classes in the cleaned version; FedBN uses "
        "ten classes, trains on 105 images of each client and selects on 105 others"
    ),
    license=(
        "fair use notice: made available without profit for non-commercial research and education; it holds "
        "copyrighted material whose use its owners have not authorized"
    ),
    homepage="https://ai.bu.edu/M3SDA/",
    source="Peng et al. 2019, arXiv:1812.01754; FedBN, arXiv:2102.07623",
    layout=(
        "the six unpacked archives as folders clipart, infograph, painting, quickdraw, real and sketch, and beside "
        "them the lists clipart_train.txt, clipart_test.txt and so on, or FedBN's clipart_train.pkl and so on"
    ),
    find=_find,
)


def domainnet(
    root: Path,
    *,
    classes: tuple[str, ...] = _TEN,
    size: int = 256,
    samples: int | None = None,
    validation: int | None = None,
    test_fraction: float = 0.2,
    progress: Progress | None = None,
) -> Federation:
    """Six clients with images uint8 ``[N, 3, size, size]``, squashed to squares as in FedBN, of the named ``classes``.

    Labels are places in ``classes``, by default the ten of FedBN. FedBN's split comes first, then the publisher's
    lists; without either, ``test_fraction`` of every class is for testing. ``samples`` and ``validation``: a client's
    first training images to train on and its last to select on, in the order of FedBN's lists (105 and 105 are what its
    authors' loaders take of all); of other lists in one drawn at random. Raises :class:`UsageError` for an unknown
    class, where files are missing or cannot be read, and for larger numbers.
    """
    domains: DomainFolders = CARD.locate("domainnet", root)
    there = list_categories(domains.folders.values())
    for name in classes:
        if name not in there:
            raise unknown_name("class", name, there)
    if len(set(classes)) < max(2, len(classes)):
        raise UsageError(f"classes={classes}: name at least two, each once")
    labels = {name: label for label, name in enumerate(classes)}
    fedbn = find_fedbn_lists(domains.root, _CLIENTS) if set(classes) <= set(_TEN) else None
    if fedbn is not None:
        lists = {client: {part: read_fedbn_list(file) for part, file in own.items()} for client, own in fedbn.items()}
        clients, split = list_from_lists(domains, lists, labels), "FedBN's split"
    elif own := read_text_lists(domains, {"train": "{}_train.txt", "test": "{}_test.txt"}):
        clients, split = list_from_lists(domains, own, labels), "the publisher's split"
    else:
        clients, split = (
            list_from_folders(domains, labels, test_fraction),
            f"{test_fraction:g} of every class for testing",
        )
    if samples is not None or validation is not None:
        clients = ends(clients if fedbn is not None else mixed(clients), samples, validation)
    note = f"DomainNet, {len(classes)} classes, {size} x {size} pixels, {split}"
    return read_listed(
        domains.root, clients, name="domainnet", class_names=classes, size=size, note=note, progress=progress
    ).normalize(UNIT)
