"""Groups of files that stay together (such as the images of one patient), by their paths or by a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..utils.errors import Ref, UsageError
from .formats import read_csv

MARK = "{group}"
"""What stands for the group in a pattern."""


def find_groups(groups: str | None, files: Sequence[str]) -> NDArray[np.str_]:
    """Return the group of each of ``files``, paths below the directory of the clients; empty without ``groups``.

    ``groups`` is a pattern such as ``{group}_*.png``, in which ``*`` stands for anything: of the file's name or, if it
    contains ``/``, of its path. Or it is a ``.csv`` file with columns ``file`` (a path or a name) and ``group``. Raises
    :class:`UsageError` naming a file without a group.
    """
    if groups is None:
        return np.empty(0, np.str_)
    if groups.lower().endswith(".csv"):
        rows = read_csv(Path(groups), "a table of files and groups", dict)
        if rows and not {"file", "group"} <= rows[0].keys():
            raise UsageError(f"{groups} has columns {', '.join(rows[0])}: give it the columns file and group")
        named = {row["file"]: row["group"] for row in rows}
        found = [named.get(file, named.get(Path(file).name, "")) for file in files]
    elif groups.count(MARK) == 1:
        parts = (re.escape(part).replace(r"\*", "[^/]*") for part in groups.split(MARK))
        pattern = re.compile("([^/]+?)".join(parts))
        matches = [pattern.fullmatch(file if "/" in groups else Path(file).name) for file in files]
        found = [match[1] if match else "" for match in matches]
    else:
        raise UsageError(
            f"{{}}: files have no columns: give a pattern of their names with {MARK} once, such as '{MARK}_*.png', or "
            "a .csv file with columns file and group",
            Ref(groups=groups),
        )
    if "" in found:
        raise UsageError(f"{{}} gives {files[found.index('')]} no group: give each file one", Ref(groups=groups))
    return np.array(found)
