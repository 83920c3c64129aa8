"""Office-Caltech10: ten kinds of objects under four looks (Gong et al. 2012, "Geodesic Flow Kernel", CVPR).

Three domains of Office-31 (Saenko et al. 2010) and the same ten classes of Caltech-256 (Griffin et al. 2007). FedBN's
authors publish the images together with a split, which is used where it is there (Li et al. 2021, arXiv:2102.07623,
appendix D.3; https://github.com/med-air/FedBN). As in their loaders (federated/fed_office.py) pixels lie in [0, 1].
"""

from __future__ import annotations

from pathlib import Path

from ...utils.errors import UsageError
from ..federation import Federation
from ..files.image_tree import list_categories
from ..files.read_options import Progress
from ..samples import UNIT
from ._card import Card
from ._fedbn_lists import find_fedbn_lists, read_fedbn_list
from ._file_lists import DomainFolders, ends, find_domains, list_from_folders, list_from_lists, mixed, read_listed

_CLIENTS = ("amazon", "caltech", "dslr", "webcam")


def _find(folder: Path) -> DomainFolders | None:
    for caltech in ("caltech", "caltech10"):
        found = find_domains(folder, (*_CLIENTS[:1], caltech, *_CLIENTS[2:]), ("office_caltech_10",))
        if found is not None:
            folders = dict(zip(_CLIENTS, found.folders.values(), strict=True))
            return DomainFolders(root=found.root, folders=folders)
    return None


CARD = Card(
    title="Office-Caltech10, ten kinds of objects from a shop, the web, a camera and a webcam",
    clients=_CLIENTS,
    classes=10,
    samples="958, 1123, 157 and 295 images; FedBN trains on 62 of each client and selects on 50 others",
    license="none stated by the publishers",
    homepage="https://github.com/med-air/FedBN",
    source="Gong et al. 2012, CVPR; Saenko et al. 2010, ECCV; Griffin et al. 2007; FedBN, arXiv:2102.07623",
    layout=(
        "the folders amazon, caltech (or caltech10), dslr and webcam with a folder for each of the ten classes "
        "(FedBN's office_caltech_10_dataset.zip, unpacked, with its lists amazon_train.pkl and so on)"
    ),
    find=_find,
)


def office_caltech10(
    root: Path,
    *,
    size: int = 256,
    samples: int | None = None,
    validation: int | None = None,
    test_fraction: float = 0.2,
    progress: Progress | None = None,
) -> Federation:
    """Four clients with images uint8 ``[N, 3, size, size]``, squashed to squares as in FedBN; ten classes by name.

    With FedBN's lists its training and test images, without them ``test_fraction`` of every class for testing.
    ``samples`` and ``validation``: a client's first training images to train on and its last to select on, in the order
    of FedBN's lists (62 and 50 are what its authors' loaders take of all); without the lists in one drawn at random.
    Raises :class:`UsageError` where files are missing, cannot be read, or show other classes, and for larger numbers.
    """
    domains: DomainFolders = CARD.locate("office-caltech10", root)
    names = list_categories(domains.folders.values())
    if len(names) != CARD.classes:
        raise UsageError(
            f"{domains.root} has {len(names)} class folders ({', '.join(names[:3])}, ...): Office-Caltech10 has the "
            "ten classes that Office-31 and Caltech-256 share; leave the others out"
        )
    labels = {name: label for label, name in enumerate(names)}
    found = find_fedbn_lists(domains.root, _CLIENTS)
    if found is None:
        clients, split = (
            list_from_folders(domains, labels, test_fraction),
            f"{test_fraction:g} of every class for testing",
        )
    else:
        lists = {client: {part: read_fedbn_list(file) for part, file in own.items()} for client, own in found.items()}
        clients, split = list_from_lists(domains, lists, labels), "FedBN's split"
    if samples is not None or validation is not None:
        clients = ends(clients if found is not None else mixed(clients), samples, validation)
    note = f"Office-Caltech10, {size} x {size} pixels, {split}"
    return read_listed(
        domains.root, clients, name="office-caltech10", class_names=names, size=size, note=note, progress=progress
    ).normalize(UNIT)
