"""Images of the same classes in several styles, one client per style, in folders ``<style>/<class>/<file>``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ...utils.errors import UsageError
from ...utils.words import join_some
from ..federation import Federation
from ..files.images import list_categories
from ..files.read_options import Progress
from ..preparation import UNIT
from . import _file_lists as listing
from ._card import make_card, require_choices
from ._file_lists import DomainFolders, Lists, find_domains

_OFFICE = ("amazon", "caltech", "dslr", "webcam")
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_PACS = ("art_painting", "cartoon", "photo", "sketch")
_OFFICE_HOME = ("art", "clipart", "product", "real_world")
_VLCS = {"caltech": "Caltech101", "labelme": "LabelMe", "sun": "SUN09", "voc": "VOC2007"}
_TERRA = ("location_38", "location_43", "location_46", "location_100")

_FEDBN_TEN = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
_PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
_VLCS_CLASSES = ("bird", "car", "chair", "dog", "person")
_TERRA_CLASSES = (
    "bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel",
)  # fmt: skip
_FEDBN_SPLIT, _OWN_SPLIT = "FedBN's split", "the publisher's split"
_PACS_FAULTY = "sketch/dog/n02103406_4068-1.png"


def _find_named(
    folder: Path, clients: Iterable[str], spellings: Iterable[Iterable[str]], below: Sequence[str]
) -> DomainFolders | None:
    """Return the folders of ``clients``, whose names are in one of ``spellings``; see :func:`find_domains`."""
    for names in spellings:
        if found := find_domains(folder, names, below):
            return DomainFolders(root=found.root, folders=dict(zip(clients, found.folders.values(), strict=True)))
    return None


_OFFICES = [("amazon", caltech, "dslr", "webcam") for caltech in ("caltech", "caltech10")]
_HOMES = [("art", "clipart", "product", real) for real in ("real world", "real_world", "realworld")]
_HOME_PLACES = ("OfficeHomeDataset_10072016", "office_home", "hub")

OFFICE_CALTECH10 = make_card(
    "office-caltech10", find=lambda folder: _find_named(folder, _OFFICE, _OFFICES, ("office_caltech_10",))
)

DOMAINNET = make_card("domainnet", find=lambda folder: find_domains(folder, _DOMAINNET, ("DomainNet",)))

PACS = make_card(
    "pacs",
    find=lambda folder: find_domains(folder, _PACS, ("kfold", "PACS", "PACS/kfold", "images", "images/kfold", "hub")),
)


OFFICE_HOME = make_card("office-home", find=lambda folder: _find_named(folder, _OFFICE_HOME, _HOMES, _HOME_PLACES))

VLCS = make_card("vlcs", find=lambda folder: _find_named(folder, _VLCS, [_VLCS.values()], ("VLCS",)))

TERRA_INCOGNITA = make_card("terra-incognita", find=lambda folder: find_domains(folder, _TERRA, ("terra_incognita",)))


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
    domains: DomainFolders = OFFICE_CALTECH10.locate("office-caltech10", root)
    names = _list_classes(domains, "Office-Caltech10", 10)
    lists, limits = {_FEDBN_SPLIT: listing.read_fedbn_lists(domains)}, (samples, validation)
    made = _read(domains, "Office-Caltech10", names, lists, test_fraction, size, progress, limits=limits)
    return made.normalize(UNIT)


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
    domains: DomainFolders = DOMAINNET.locate("domainnet", root)
    there = list_categories(domains.folders.values())
    require_choices("classes", classes, there)
    if len(classes) < 2:
        raise UsageError(f"classes={classes}: name at least two")
    lists = {_FEDBN_SPLIT: listing.read_fedbn_lists(domains) if set(classes) <= set(_FEDBN_TEN) else {}}
    if not lists[_FEDBN_SPLIT]:
        lists[_OWN_SPLIT] = listing.read_text_lists(domains, {"train": "{}_train.txt", "test": "{}_test.txt"})
    title, limits = f"DomainNet, {len(classes)} classes", (samples, validation)
    return _read(domains, title, classes, lists, test_fraction, size, progress, limits=limits).normalize(UNIT)


def pacs(root: Path, *, size: int = 227, test_fraction: float = 0.1, progress: Progress | None = None) -> Federation:
    """Load PACS: seven kinds of objects as photos, art paintings, cartoons and sketches (Li et al. 2017).

    The publisher (arXiv:1710.03077) lists 90 % of a domain's images in ``<domain>_train_kfold.txt`` and the others in
    ``<domain>_crossval_kfold.txt``; ``<domain>_test_kfold.txt`` lists all images, for a domain that was not used in
    training. Here, every domain is used in training, so the crossval images are the test images. Without the lists,
    ``test_fraction`` of every class is used for testing. One sketch of a dog is excluded, as in Dassl (Zhou et al.
    2021, https://github.com/KaiyangZhou/Dassl.pytorch), which lists it as faulty.

    Returns four clients with images uint8 ``[N, 3, size, size]`` (published with 227 pixels); seven classes by name.
    Raises :class:`UsageError` for files that are missing, cannot be read or have other classes.
    """
    domains: DomainFolders = PACS.locate("pacs", root)
    _list_classes(domains, "PACS", _PACS_CLASSES)
    lists = listing.read_text_lists(domains, {"train": "{}_train_kfold.txt", "test": "{}_crossval_kfold.txt"})
    return _read(
        domains, "PACS", _PACS_CLASSES, {_OWN_SPLIT: lists}, test_fraction, size, progress, without=_PACS_FAULTY
    )


def office_home(
    root: Path, *, size: int = 224, test_fraction: float = 0.2, progress: Progress | None = None
) -> Federation:
    """Load Office-Home: 65 kinds of objects as art, clip art, product photos and photos (Venkateswara et al. 2017).

    The publisher (arXiv:1706.07522) has no split; ``test_fraction`` of every class is used for testing, by default 0.2
    as in DomainBed (Gulrajani and Lopez-Paz 2021, arXiv:2007.01434). Results and errors are the same as in
    :func:`pacs`, with 65 classes named after their folders.
    """
    domains: DomainFolders = OFFICE_HOME.locate("office-home", root)
    names = _list_classes(domains, "Office-Home", OFFICE_HOME.classes)
    return _read(domains, "Office-Home", names, {}, test_fraction, size, progress)


def vlcs(root: Path, *, size: int = 224, test_fraction: float = 0.2, progress: Progress | None = None) -> Federation:
    """Load VLCS: birds, cars, chairs, dogs and persons from four photo collections (Fang et al. 2013).

    The collections are Caltech101, LabelMe, SUN09 and VOC2007, in folders as DomainBed distributes them (Gulrajani and
    Lopez-Paz 2021, arXiv:2007.01434). They have no split: ``test_fraction`` of every class is used for testing. Results
    and errors are the same as in :func:`pacs`.
    """
    domains: DomainFolders = VLCS.locate("vlcs", root)
    _list_classes(domains, "VLCS", _VLCS_CLASSES)
    return _read(domains, "VLCS", _VLCS_CLASSES, {}, test_fraction, size, progress)


def terra_incognita(
    root: Path, *, size: int = 224, test_fraction: float = 0.2, progress: Progress | None = None
) -> Federation:
    """Load TerraIncognita: animals photographed by camera traps in four places (Beery et al. 2018, arXiv:1807.04975).

    The four places of Caltech Camera Traps and the ten classes are those that DomainBed uses, in folders as its
    download script writes them (Gulrajani and Lopez-Paz 2021, arXiv:2007.01434). They have no split: ``test_fraction``
    of every class is used for testing. Pictures of one burst may be on both sides. A place may lack classes. Results
    and errors are the same as in :func:`pacs`.
    """
    domains: DomainFolders = TERRA_INCOGNITA.locate("terra-incognita", root)
    _list_classes(domains, "TerraIncognita", _TERRA_CLASSES)
    return _read(domains, "TerraIncognita", _TERRA_CLASSES, {}, test_fraction, size, progress)


def _list_classes(domains: DomainFolders, title: str, expected: int | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the class folders; raise :class:`UsageError` unless they are ``expected``, or as many."""
    names = list_categories(domains.folders.values())
    if names != expected and len(names) != expected:
        known = f"{expected}" if isinstance(expected, int) else ", ".join(expected)
        raise UsageError(
            f"{domains.root} has {len(names)} class folders ({join_some(names)}); {title} has {known}: get it again, "
            "or leave the others out"
        )
    return names


def _read(
    domains: DomainFolders,
    title: str,
    classes: Sequence[str],
    lists: dict[str, Lists],
    fraction: float,
    size: int,
    progress: Progress | None,
    *,
    limits: tuple[int | None, int | None] = (None, None),
    without: str | None = None,
) -> Federation:
    """Read the images of ``classes`` using the first of ``lists`` that is not empty, or using folders.

    ``limits``: numbers of images for training and for validation. ``without``: end of the path of an image to exclude.
    """
    labels = {name: label for label, name in enumerate(classes)}
    split = next((split for split in lists if lists[split]), f"{fraction:g} of every class for testing")
    if split in lists:
        clients = listing.list_from_lists(domains, lists[split], labels)
    else:
        clients = listing.list_from_folders(domains, labels, fraction)
    if limits != (None, None):
        clients = listing.limit_lists(clients, *limits, shuffle=split != _FEDBN_SPLIT)
    if without:
        clients = {name: own[~own["path"].str.endswith(without)] for name, own in clients.items()}
    name, note = title.partition(",")[0].lower(), f"{title}, {size} x {size} pixels, {split}"
    return listing.read_listed(
        domains.root, clients, name=name, class_names=classes, size=size, note=note, progress=progress
    )
