"""Groups of samples that stay together, such as the images of one patient.

File names or a table determine them, or by default the subject in file names, as in BIDS,
``sub-01_T1w.nii.gz`` (Gorgolewski et al. 2016, "The brain imaging data structure", Scientific Data 3). Samples keep
numbers of groups, never names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..utils.errors import Ref, UsageError
from .formats import read_csv

MARK = "{group}"
"""Placeholder of the group in a pattern."""
SUBJECT = re.compile(r"(?:^|[/_])(sub-[A-Za-z0-9]+)(?=[/_.]|$)")
"""A subject in the name or path of a file."""


def find_groups(groups: str | None, files: Sequence[str]) -> NDArray[np.str_]:
    """Return the group of each of ``files``, paths below the directory of the clients; empty if there are none.

    Without ``groups``, it is the subject, if each file names one.

    Otherwise ``groups`` is a pattern such as ``{group}_*.png``, in which ``*`` matches anything: for the file's name
    or, if it contains ``/``, for its path. Or it is a ``.csv`` file with columns ``file`` (a path or a name) and
    ``group``. Raises :class:`UsageError` naming a file without a group.
    """
    if groups is None:
        subjects = [match[1] for match in map(SUBJECT.search, files) if match]
        return np.array(subjects if len(subjects) == len(files) else [], np.str_)
    if groups.lower().endswith(".csv"):
        rows = read_csv(Path(groups), "a table of files and groups", dict)
        if rows and not {"file", "group"} <= rows[0].keys():
            raise UsageError(f"{groups} has columns {', '.join(rows[0])}: give it the columns file and group")
        named = {row["file"]: row["group"] for row in rows}
        found = [named.get(file) or named.get(Path(file).name, "") for file in files]
        compared, why = list(files), f"of its {len(rows)} rows, none has it as file, with a group"
        why += f" (the first has {rows[0]['file']!r})" if rows else ""
    elif groups.count(MARK) == 1:
        compared = [file if "/" in groups else Path(file).name for file in files]
        pattern = _compile(groups)
        found = [match[1] if (match := pattern.fullmatch(name)) else "" for name in compared]
        why = "" if all(found) else _explain_mismatch(groups, compared[found.index("")])
    else:
        raise UsageError(
            f"{{}}: files have no columns: give a pattern of their names with {MARK} once, such as '{MARK}_*.png', or "
            "a .csv file with columns file and group",
            Ref(groups=groups),
        )
    if "" in found:
        matched = next(
            (f"; {name!r} has group {group!r}" for name, group in zip(compared, found, strict=True) if group), ""
        )
        raise UsageError(
            f"{{}} gives {found.count('')} of {len(files)} files no group, such as {compared[found.index('')]!r}: {why}"
            f"{matched}; give each file one",
            Ref(groups=groups),
        )
    return np.array(found)


def _compile(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a pattern, or its beginning, with the group as its first group."""
    parts = (re.escape(part).replace(r"\*", "[^/]*") for part in pattern.split(MARK))
    return re.compile("([^/]+?)".join(parts))


def _explain_mismatch(pattern: str, name: str) -> str:
    """Return the first text of ``pattern`` that ``name`` lacks in its place, and what is compared."""
    kind = "paths are compared, as the pattern has a /" if "/" in pattern else "names without folders are compared"
    begun = ""
    for text in re.split(rf"(\*|{re.escape(MARK)})", pattern):
        begun += text
        if not _compile(begun).match(name):
            return f"it has no {text!r} in that place ({kind})"
    return f"it goes on after {re.split(r'[*}]', pattern)[-1]!r} ({kind})"


def number_groups(names: Sequence[str]) -> Tensor:
    """Return a number for each name, int64 ``[N]``, equal for equal names; below 0 and unique for empty ones."""
    array = np.array(names, np.str_)
    numbers = np.unique(array, return_inverse=True)[1].astype(np.int64)
    return torch.from_numpy(np.where(array == "", -1 - np.arange(len(array)), numbers))
