"""PACS: seven kinds of things as photos, art paintings, cartoons and sketches (Li et al. 2017, arXiv:1710.03077).

The publisher lists 90 % of a domain's images in ``<domain>_train_kfold.txt`` and the others in
``<domain>_crossval_kfold.txt``; ``<domain>_test_kfold.txt`` is for a domain that was not trained on, and names all of
its images. Here every domain is trained on, so that the images for crossvalidation are the test images.

One sketch of a dog is left out, as in Dassl (Zhou et al. 2021, https://github.com/KaiyangZhou/Dassl.pytorch), which
lists it as faulty.
"""

from __future__ import annotations

from pathlib import Path

from ...utils.errors import UsageError
from ..federation import Federation
from ..files.image_tree import list_categories
from ..files.read_options import Progress
from ._card import Card
from ._file_lists import DomainFolders, find_domains, list_from_folders, list_from_lists, read_listed, read_text_lists

_CLIENTS = ("art_painting", "cartoon", "photo", "sketch")
_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")

_FAULTY = "sketch/dog/n02103406_4068-1.png"


def _find(folder: Path) -> DomainFolders | None:
    return find_domains(folder, _CLIENTS, ("kfold", "PACS", "PACS/kfold", "images", "images/kfold", "hub"))


CARD = Card(
    title="PACS, seven kinds of things as photos, art paintings, cartoons and sketches",
    clients=_CLIENTS,
    classes=7,
    samples="2,048, 2,344, 1,670 and 3,929 images of 227 x 227 pixels",
    license="none stated by the publishers",
    homepage="https://sketchx.eecs.qmul.ac.uk/downloads/",
    source="Li et al. 2017, ICCV, arXiv:1710.03077",
    layout=(
        "the folders art_painting, cartoon, photo and sketch (as published in kfold/) with a folder for each of the "
        "seven classes, and perhaps the lists photo_train_kfold.txt, photo_crossval_kfold.txt and so on"
    ),
    find=_find,
    hub="flwrlabs/pacs",
)


def pacs(root: Path, *, size: int = 227, test_fraction: float = 0.1, progress: Progress | None = None) -> Federation:
    """Four clients with images uint8 ``[N, 3, size, size]``, published with 227 pixels; seven classes by name.

    With the publisher's lists its images for training and crossvalidation, without them ``test_fraction`` of every
    class for testing. Raises :class:`UsageError` where files are missing, cannot be read, or show other classes.
    """
    domains: DomainFolders = CARD.locate("pacs", root)
    names = list_categories(domains.folders.values())
    if names != _CLASSES:
        raise UsageError(f"{domains.root} has the class folders {', '.join(names)}; PACS has {', '.join(_CLASSES)}")
    labels = {name: label for label, name in enumerate(_CLASSES)}
    lists = read_text_lists(domains, {"train": "{}_train_kfold.txt", "test": "{}_crossval_kfold.txt"})
    if lists:
        clients, split = list_from_lists(domains, lists, labels), "the publisher's split"
    else:
        clients, split = (
            list_from_folders(domains, labels, test_fraction),
            f"{test_fraction:g} of every class for testing",
        )
    clients = {name: [image for image in own if not image.path.endswith(_FAULTY)] for name, own in clients.items()}
    note = f"PACS, {size} x {size} pixels, {split}"
    return read_listed(
        domains.root, clients, name="pacs", class_names=_CLASSES, size=size, note=note, progress=progress
    )
