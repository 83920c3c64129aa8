"""Images of the same classes under several looks, one client per look: Office-Caltech10, DomainNet and PACS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...utils.errors import UsageError, unknown_name
from ..federation import Federation
from ..files.images import list_categories
from ..files.read_options import Progress
from ..samples import UNIT
from ._card import make_card
from ._file_lists import (
    DomainFolders,
    ListedImage,
    Lists,
    find_domains,
    limit_lists,
    list_from_folders,
    list_from_lists,
    read_fedbn_lists,
    read_listed,
    read_text_lists,
)

_OFFICE = ("amazon", "caltech", "dslr", "webcam")
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_PACS = ("art_painting", "cartoon", "photo", "sketch")

_FEDBN_TEN = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
_PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
_PACS_FAULTY = "sketch/dog/n02103406_4068-1.png"


def _find_office(folder: Path) -> DomainFolders | None:
    for caltech in ("caltech", "caltech10"):
        found = find_domains(folder, ("amazon", caltech, "dslr", "webcam"), ("office_caltech_10",))
        if found is not None:
            return DomainFolders(root=found.root, folders=dict(zip(_OFFICE, found.folders.values(), strict=True)))
    return None


OFFICE_CALTECH10 = make_card("office-caltech10", find=_find_office)

DOMAINNET = make_card("domainnet", find=lambda folder: find_domains(folder, _DOMAINNET, ("DomainNet",)))

PACS = make_card(
    "pacs",
    find=lambda folder: find_domains(folder, _PACS, ("kfold", "PACS", "PACS/kfold", "images", "images/kfold", "hub")),
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
    """Load Office-Caltech10: ten kinds of objects under four looks (Gong et al. 2012, "Geodesic Flow Kernel", CVPR).

    Three domains of Office-31 (Saenko et al. 2010) and the same ten classes of Caltech-256 (Griffin et al. 2007).
    FedBN's authors publish the images together with a split, which is used where it is there (Li et al. 2021,
    arXiv:2102.07623, appendix D.3; https://github.com/med-air/FedBN). As in their loaders (federated/fed_office.py),
    pixels lie in [0, 1] and images are squashed to squares.

    Args:
        root: Directory of the data.
        size: Side of the images in pixels.
        samples: Number of a client's first training images to train on; None: all. Together with ``validation``, in
            the order of FedBN's lists (its authors' loaders take 62 and 50), or in a drawn order without the lists.
        validation: Number of a client's last training images to select on; None: none.
        test_fraction: Share of every class for testing, without FedBN's lists.
        progress: Called with ``(what is read, done, in all)``.

    Returns:
        Four clients with images uint8 ``[N, 3, size, size]``; ten classes by name.

    Raises:
        UsageError: Files are missing, cannot be read, or show other classes, or a client has too few images.

    """
    domains: DomainFolders = OFFICE_CALTECH10.locate("office-caltech10", root)
    names = list_categories(domains.folders.values())
    if len(names) != 10:
        raise UsageError(
            f"{domains.root} has {len(names)} class folders ({', '.join(names[:3])}, ...): Office-Caltech10 has the "
            "ten classes that Office-31 and Caltech-256 share; leave the others out"
        )
    fedbn = read_fedbn_lists(domains)
    clients, split = _list_images(domains, names, fedbn, {}, test_fraction)
    if samples is not None or validation is not None:
        clients = limit_lists(clients, samples, validation, shuffle=not fedbn)
    note = f"Office-Caltech10, {size} x {size} pixels, {split}"
    return read_listed(
        domains.root, clients, name="office-caltech10", class_names=names, size=size, note=note, progress=progress
    ).normalize(UNIT)


def domainnet(
    root: Path,
    *,
    classes: tuple[str, ...] = _FEDBN_TEN,
    size: int = 256,
    samples: int | None = None,
    validation: int | None = None,
    test_fraction: float = 0.2,
    progress: Progress | None = None,
) -> Federation:
    """Load DomainNet: everyday things under six looks (Peng et al. 2019, arXiv:1812.01754; "M3SDA").

    The publisher lists the images for training and testing of each domain, ``<domain>_train.txt`` and
    ``<domain>_test.txt`` with lines ``<domain>/<class>/<file> <label>``. FedBN takes ten of the 345 classes and
    publishes a split of those (Li et al. 2021, arXiv:2102.07623, appendix D.3; https://github.com/med-air/FedBN). As in
    its loaders (federated/fed_domainnet.py), pixels lie in [0, 1] and images are squashed to squares.

    FedBN's split comes first, then the publisher's lists; without either, ``test_fraction`` of every class is for
    testing. Labels are positions in ``classes``, by default FedBN's ten; FedBN's loaders take ``samples=105`` and
    ``validation=105``. Other arguments, results and errors are those of :func:`office_caltech10`; an unknown class is
    refused too.
    """
    domains: DomainFolders = DOMAINNET.locate("domainnet", root)
    there = list_categories(domains.folders.values())
    for name in classes:
        if name not in there:
            raise unknown_name("class", name, there)
    if len(set(classes)) < max(2, len(classes)):
        raise UsageError(f"classes={classes}: name at least two, each once")
    fedbn = read_fedbn_lists(domains) if set(classes) <= set(_FEDBN_TEN) else {}
    own = {} if fedbn else read_text_lists(domains, {"train": "{}_train.txt", "test": "{}_test.txt"})
    clients, split = _list_images(domains, classes, fedbn, own, test_fraction)
    if samples is not None or validation is not None:
        clients = limit_lists(clients, samples, validation, shuffle=not fedbn)
    note = f"DomainNet, {len(classes)} classes, {size} x {size} pixels, {split}"
    return read_listed(
        domains.root, clients, name="domainnet", class_names=classes, size=size, note=note, progress=progress
    ).normalize(UNIT)


def pacs(root: Path, *, size: int = 227, test_fraction: float = 0.1, progress: Progress | None = None) -> Federation:
    """Load PACS: seven kinds of things as photos, art paintings, cartoons and sketches (Li et al. 2017).

    The publisher (arXiv:1710.03077) lists 90 % of a domain's images in ``<domain>_train_kfold.txt`` and the others in
    ``<domain>_crossval_kfold.txt``; ``<domain>_test_kfold.txt`` names all images, for a domain that was not trained
    on. Here every domain is trained on, so the images for crossvalidation are the test images. Without the lists,
    ``test_fraction`` of every class is for testing. One sketch of a dog is left out, as in Dassl (Zhou et al. 2021,
    https://github.com/KaiyangZhou/Dassl.pytorch), which lists it as faulty.

    Returns four clients with images uint8 ``[N, 3, size, size]``, published with 227 pixels; seven classes by name.
    Raises :class:`UsageError` for files that are missing, cannot be read, or show other classes.
    """
    domains: DomainFolders = PACS.locate("pacs", root)
    names = list_categories(domains.folders.values())
    if names != _PACS_CLASSES:
        raise UsageError(
            f"{domains.root} has the class folders {', '.join(names)}; PACS has {', '.join(_PACS_CLASSES)}"
        )
    lists = read_text_lists(domains, {"train": "{}_train_kfold.txt", "test": "{}_crossval_kfold.txt"})
    clients, split = _list_images(domains, names, {}, lists, test_fraction)
    clients = {name: [image for image in own if not image.path.endswith(_PACS_FAULTY)] for name, own in clients.items()}
    note = f"PACS, {size} x {size} pixels, {split}"
    return read_listed(
        domains.root, clients, name="pacs", class_names=_PACS_CLASSES, size=size, note=note, progress=progress
    )


def _list_images(
    domains: DomainFolders, classes: Sequence[str], fedbn: Lists, published: Lists, fraction: float
) -> tuple[dict[str, list[ListedImage]], str]:
    """Return the images of ``classes`` by the first of the lists that is not empty, and the name of the split."""
    labels = {name: label for label, name in enumerate(classes)}
    for lists, split in ((fedbn, "FedBN's split"), (published, "the publisher's split")):
        if lists:
            return list_from_lists(domains, lists, labels), split
    return list_from_folders(domains, labels, fraction), f"{fraction:g} of every class for testing"
