"""Images of the same classes in several styles, one client per style, in folders ``<style>/<class>/<file>``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from ...utils.errors import UsageError
from ...utils.random_streams import stream
from ...utils.words import join_some
from ..federation import Federation
from ..files.listing import list_categories, list_files
from ..formats import explain_errors, read_pickle
from ..partition import split_stratified
from ..preparation import UNIT
from ..source import Progress
from ._card import make_card, require_choices
from ._file_lists import COLUMNS, read_listed

_OFFICE = ("amazon", "caltech", "dslr", "webcam")
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_FEDBN_TEN = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
_SPLITS = {".pkl": "FedBN's split", ".txt": "the publisher's split"}
"""Whose split it is, by the suffix of its lists."""


def _find_domains(folder: Path, names: Iterable[str], below: str) -> dict[str, Path] | None:
    """Return the folders ``names`` (ignoring case) in ``folder`` or in ``below`` in it, or None unless all exist."""
    for root in filter(Path.is_dir, (folder, folder / below)):
        present = {sub.name.lower(): sub for sub in sorted(root.iterdir()) if sub.is_dir()}
        if all(name in present for name in names):
            return {name: present[name] for name in names}
    return None


def _find_office(folder: Path) -> dict[str, Path] | None:
    for caltech in ("caltech", "caltech10"):
        if domains := _find_domains(folder, ("amazon", caltech, "dslr", "webcam"), "office_caltech_10"):
            return dict(zip(_OFFICE, domains.values(), strict=True))
    return None


OFFICE_CALTECH10 = make_card("office-caltech10", find=_find_office)

DOMAINNET = make_card("domainnet", find=lambda folder: _find_domains(folder, _DOMAINNET, "DomainNet"))


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
    domains: dict[str, Path] = OFFICE_CALTECH10.locate("office-caltech10", root)
    names = list_categories(domains.values())
    if len(names) != OFFICE_CALTECH10.classes:
        raise UsageError(
            f"{domains['amazon'].parent} has {len(names)} class folders ({join_some(names)}); Office-Caltech10 has 10: "
            "get it again, or leave the others out"
        )
    limits = samples, validation
    return _read(domains, "Office-Caltech10", names, [".pkl"], limits, test_fraction, size, progress)


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
    domains: dict[str, Path] = DOMAINNET.locate("domainnet", root)
    require_choices("classes", classes, list_categories(domains.values()))
    if len(classes) < 2:
        raise UsageError(f"classes={classes}: name at least two")
    suffixes = [".pkl", ".txt"] if set(classes) <= set(_FEDBN_TEN) else [".txt"]
    title, limits = f"DomainNet, {len(classes)} classes", (samples, validation)
    return _read(domains, title, classes, suffixes, limits, test_fraction, size, progress)


def _read(
    domains: Mapping[str, Path],
    title: str,
    classes: Sequence[str],
    suffixes: Iterable[str],
    limits: tuple[int | None, int | None],
    fraction: float,
    size: int,
    progress: Progress | None,
) -> Federation:
    """Read the images of ``classes`` by the lists with the first of ``suffixes`` that exist, or by folders.

    ``limits``: numbers of images for training and for validation.
    """
    labels = {name: label for label, name in enumerate(classes)}
    lists = {suffix: listed for suffix in suffixes if (listed := _read_lists(domains, labels, suffix))}
    suffix = next(iter(lists), "")
    clients = lists[suffix] if lists else _list_folders(domains, labels, fraction)
    if limits != (None, None):
        clients = _limit_lists(clients, *limits, shuffle=suffix != ".pkl")
    split = _SPLITS.get(suffix, f"{fraction:g} of every class for testing")
    name, note = title.partition(",")[0].lower(), f"{title}, {size} x {size} pixels, {split}"
    root = next(iter(domains.values())).parent
    data = read_listed(root, clients, name=name, class_names=classes, size=size, note=note, progress=progress)
    return data.normalize(UNIT)


def _list_folders(domains: Mapping[str, Path], labels: Mapping[str, int], fraction: float) -> dict[str, pd.DataFrame]:
    """List every image in a class folder named in ``labels``; ``fraction`` of each class is used for testing.

    A client's folder that has train and test folders keeps this split.
    """
    lists = {}
    for client, folder in domains.items():
        files = [file for file in list_files(folder.parent, folder)[0] if file.category in labels]
        listed = pd.DataFrame([(f.path, labels[f.category], f.part or "train") for f in files], columns=COLUMNS)
        if "test" not in set(listed["part"]):
            drawn = split_stratified(listed["label"].to_numpy(), fraction, stream(0, "test", client))[1]
            listed.loc[drawn, "part"] = "test"
        lists[client] = listed
    return lists


def _read_lists(domains: Mapping[str, Path], labels: Mapping[str, int], suffix: str) -> dict[str, pd.DataFrame]:
    """Read ``<domain>_train<suffix>`` and ``<domain>_test<suffix>`` next to the domains; empty if any is missing.

    Only the end of their paths matters, ``<class>/<file>``, and classes in ``labels``.
    """
    lists = {
        client: {part: folder.parent / f"{client}_{part}{suffix}" for part in ("train", "test")}
        for client, folder in domains.items()
    }
    if not all(file.is_file() for files in lists.values() for file in files.values()):
        return {}
    read, listed = {".pkl": _read_fedbn_list, ".txt": _read_text_list}[suffix], {}
    for client, files in lists.items():
        ends = [(part, *end) for part, file in files.items() for end in read(file) if end[0] in labels]
        rows = [(f"{domains[client].name}/{kind}/{file}", labels[kind], part) for part, kind, file in ends]
        listed[client] = pd.DataFrame(rows, columns=COLUMNS)
    return listed


def _read_text_list(file: Path) -> list[list[str]]:
    """Return the ends of the paths in the publisher's list, lines ``<path> <label>``."""
    with explain_errors(file, "a list of images with lines <path> <label>"):
        lines = [line.rsplit(maxsplit=1) for line in file.read_text("utf-8").splitlines() if line.strip()]
        return [_cut_end(path) for path, label in lines if int(label) >= 0]


def _read_fedbn_list(file: Path) -> list[list[str]]:
    """Return the ends of the paths in FedBN's list (``data_utils`` in https://github.com/med-air/FedBN).

    It is a pickle of paths and names of classes, read without running code in it.
    """
    with explain_errors(file, "paths with names of classes"):
        paths, names = ([str(item) for item in column] for column in read_pickle(file))
        odd = [path for path, name in zip(paths, names, strict=True) if _cut_end(path)[0] != name]
        if odd:
            raise ValueError(f"{odd[0]!r} has another class than its folder")
        return [_cut_end(path) for path in paths]


def _cut_end(path: str) -> list[str]:
    kind, file = path.replace("\\", "/").split("/")[-2:]
    return [kind, file]


def _limit_lists(
    lists: Mapping[str, pd.DataFrame], samples: int | None, validation: int | None, *, shuffle: bool
) -> dict[str, pd.DataFrame]:
    """Keep each client's first ``samples`` training images (None: all), and its last ``validation`` for selection.

    FedBN's loaders select in this way. ``shuffle``: first shuffle the images by a draw keyed by the client's name, for
    lists that are sorted by class. Raises :class:`UsageError` if a client has fewer images.
    """
    for name, number in (("samples", samples), ("validation", validation)):
        if number is not None and number < 1:
            raise UsageError(f"{name}={number}: must be at least 1, or None")
    held, limited = validation or 0, {}
    for client, listed in lists.items():
        listed = listed.iloc[stream(0, "listed", client).permutation(len(listed))] if shuffle else listed
        train = listed[listed["part"] == "train"]
        kept = len(train) - held if samples is None else samples
        if not 0 < kept <= len(train) - held:
            raise UsageError(
                f"client {client!r} has {len(train)} training images, too few for samples={samples} and "
                f"validation={validation}: ask for fewer"
            )
        last = train[len(train) - held :].assign(part="validation")
        limited[client] = pd.concat([train[:kept], last, listed[listed["part"] != "train"]])
    return limited
