"""FedBN's published splits of Office-Caltech10 and DomainNet: ``<domain>_train.pkl`` and ``<domain>_test.pkl``.

Each holds paths of images, from the directory above the data set's own, and the names of their classes (``data_utils``
in https://github.com/med-air/FedBN). They are pickles, and are read without running what stands in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...utils.errors import UsageError
from ..pickles import read_pickle

PARTS = ("train", "test")


def find_fedbn_lists(folder: Path, domains: Iterable[str]) -> dict[str, dict[str, Path]] | None:
    """The lists by domain and part, None unless all are in ``folder``."""
    lists = {domain: {part: folder / f"{domain}_{part}.pkl" for part in PARTS} for domain in domains}
    return lists if all(file.is_file() for parts in lists.values() for file in parts.values()) else None


def read_fedbn_list(file: Path) -> list[str]:
    """The paths in ``file``; :class:`UsageError` where it is no such list."""
    content = read_pickle(file)
    try:
        paths, names = ([str(item) for item in part] for part in content)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{file} holds no paths with names of classes: get it again") from error
    if len(paths) != len(names):
        raise UsageError(f"{file} holds {len(paths)} paths and {len(names)} names of classes: get it again")
    odd = [path for path, name in zip(paths, names, strict=True) if path.replace("\\", "/").split("/")[-2:-1] != [name]]
    if odd:
        raise UsageError(f"{file} gives {odd[0]!r} another class than its folder: get it again")
    return paths
