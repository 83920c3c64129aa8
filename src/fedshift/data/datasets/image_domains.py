"""Images of the same classes in several styles, one client per style, in folders ``<style>/<class>/<file>``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...utils.errors import UsageError
from ...utils.words import join_some
from ..federation import Federation
from ..files.listing import list_categories
from ..files.read_options import Progress
from ..preparation import UNIT
from . import _file_lists as listing
from ._card import make_card, require_choices
from ._file_lists import Folders, Lists, find_domains

_OFFICE = ("amazon", "caltech", "dslr", "webcam")
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_FEDBN_TEN = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
_FEDBN_SPLIT, _OWN_SPLIT = "FedBN's split", "the publisher's split"


def _find_office(folder: Path) -> Folders | None:
    for caltech in ("caltech", "caltech10"):
        if domains := find_domains(folder, ("amazon", caltech, "dslr", "webcam"), ("office_caltech_10",)):
            return dict(zip(_OFFICE, domains.values(), strict=True))
    return None


OFFICE_CALTECH10 = make_card("office-caltech10", find=_find_office)

DOMAINNET = make_card("domainnet", find=lambda folder: find_domains(folder, _DOMAINNET, ("DomainNet",)))


def office_caltech10(
    root: Path,
    *,
    size: int = 256,
    samples: int | None = None,
    validation: int | None = None,
    test_fraction: float = 0.2,
    progress: Progress | None = None,
) -> Federation:
    """Load Office-Caltech10: ten kinds of objects in four domains (Gong et al. 2012, "Geodesic Flow Kernel", CVPR).

    The domains are three of Office-31 (Saenko et al. 2010) and the same ten classes of Caltech-256 (Griffin et al.
    2007). FedBN's authors publish the images with a split, which is used if present (Li et al. 2021, arXiv:2102.07623,
    appendix D.3; https://github.com/med-air/FedBN). As in their loaders (federated/fed_office.py), pixels are in [0, 1]
    and images are resized to squares.

    Args:
        root: Directory of the data.
        size: Side of the images in pixels.
        samples: Number of training images per client, from the start of its list; None: all. The order is as in FedBN's
            lists (its authors' loaders use 62 samples and 50 for ``validation``), or random without the lists.
        validation: Number of validation images per client, from the end of its training list; None: no validation.
        test_fraction: Fraction of every class used for testing, if there are no lists from FedBN.
        progress: Called with ``(what is read, done, total)``.

    Returns:
        Four clients with images uint8 ``[N, 3, size, size]``; ten classes by name.

    Raises:
        UsageError: Files are missing, cannot be read or have other classes, or a client has too few images.

    """
    domains: Folders = OFFICE_CALTECH10.locate("office-caltech10", root)
    names = list_categories(domains.values())
    if len(names) != OFFICE_CALTECH10.classes:
        raise UsageError(
            f"{domains['amazon'].parent} has {len(names)} class folders ({join_some(names)}); Office-Caltech10 has 10: "
            "get it again, or leave the others out"
        )
    lists, limits = {_FEDBN_SPLIT: listing.read_fedbn_lists(domains)}, (samples, validation)
    return _read(domains, "Office-Caltech10", names, lists, limits, test_fraction, size, progress)


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
    """Load DomainNet: everyday objects in six domains (Peng et al. 2019, arXiv:1812.01754; "M3SDA").

    The publisher lists each domain's training and test images in ``<domain>_train.txt`` and ``<domain>_test.txt``, with
    lines ``<domain>/<class>/<file> <label>``. FedBN uses ten of the 345 classes and publishes a split of these (Li et
    al. 2021, arXiv:2102.07623, appendix D.3; https://github.com/med-air/FedBN). As in its loaders
    (federated/fed_domainnet.py), pixels are in [0, 1] and images are resized to squares.

    FedBN's split is used if present, otherwise the publisher's lists; without either, ``test_fraction`` of every class
    is used for testing. Labels are positions in ``classes``, by default FedBN's ten; FedBN's loaders use
    ``samples=105`` and ``validation=105``. Other arguments, results and errors are the same as in
    :func:`office_caltech10`; an unknown class also raises an error.
    """
    domains: Folders = DOMAINNET.locate("domainnet", root)
    require_choices("classes", classes, list_categories(domains.values()))
    if len(classes) < 2:
        raise UsageError(f"classes={classes}: name at least two")
    lists = {_FEDBN_SPLIT: listing.read_fedbn_lists(domains) if set(classes) <= set(_FEDBN_TEN) else {}}
    if not lists[_FEDBN_SPLIT]:
        lists[_OWN_SPLIT] = listing.read_publisher_lists(domains)
    title, limits = f"DomainNet, {len(classes)} classes", (samples, validation)
    return _read(domains, title, classes, lists, limits, test_fraction, size, progress)


def _read(
    domains: Folders,
    title: str,
    classes: Sequence[str],
    lists: dict[str, Lists],
    limits: tuple[int | None, int | None],
    fraction: float,
    size: int,
    progress: Progress | None,
) -> Federation:
    """Read the images of ``classes`` by the first of ``lists`` that is not empty, or by folders.

    ``limits``: numbers of images for training and for validation.
    """
    labels = {name: label for label, name in enumerate(classes)}
    split = next((split for split in lists if lists[split]), f"{fraction:g} of every class for testing")
    if split in lists:
        clients = listing.list_from_lists(domains, lists[split], labels)
    else:
        clients = listing.list_from_folders(domains, labels, fraction)
    if limits != (None, None):
        clients = listing.limit_lists(clients, *limits, shuffle=split != _FEDBN_SPLIT)
    name, note = title.partition(",")[0].lower(), f"{title}, {size} x {size} pixels, {split}"
    root = next(iter(domains.values())).parent
    return listing.read_listed(
        root, clients, name=name, class_names=classes, size=size, note=note, progress=progress
    ).normalize(UNIT)
