"""Groups of samples that stay together, such as the images of one patient.

File names or a table determine them, or by default the subject in file names, as in BIDS,
``sub-01_T1w.nii.gz`` (Gorgolewski et al. 2016, "The brain imaging data structure", Scientific Data 3). Samples keep
numbers of groups, never names.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..utils.errors import Ref, UsageError
from ..utils.files import read_text
from .identity import clean_name, find_identity

MARK = "{group}"
"""Placeholder of the group in a pattern."""
TABLES = (".csv", ".tsv", ".txt")
"""Suffixes of tables of files and groups."""
SUBJECT = re.compile(r"(?:^|[/_])(sub-[A-Za-z0-9]+)(?=[/_.]|$)", re.IGNORECASE)
"""A subject in the name or path of a file."""


def find_groups(groups: str | None, files: Sequence[str]) -> NDArray[np.str_]:
    """Return the group of each of ``files``, paths below the directory of the clients; empty if there are none.

    Without ``groups``, it is the subject, if each file names one.

    Otherwise ``groups`` is a pattern such as ``{group}_*.png``, in which ``*`` matches anything: for the file's name
    or, if it contains ``/``, for its path. Or it is a ``.csv`` file with columns ``file`` (a path or a name) and
    ``group``, separated by commas, semicolons, tabs or bars. Raises :class:`UsageError` naming a file without a group.
    """
    if groups is None:
        subjects = [match[1] for match in map(SUBJECT.search, files) if match]
        return np.array(subjects if len(subjects) == len(files) else [], np.str_)
    if groups.lower().endswith(TABLES):
        found, count, first = _look_up(Path(groups), files)
        compared, why = list(files), f"of its {count} rows, none has it as file, with a group"
        why += f" (the first has {first!r})" if count else ""
    elif groups.count(MARK) == 1:
        compared = [file if "/" in groups else Path(file).name for file in files]
        texts = (re.escape(text).replace(r"\*", "[^/]*") for text in groups.split(MARK))
        pattern = re.compile("([^/]+?)".join(texts))
        found = [match[1] if (match := pattern.fullmatch(name)) else "" for name in compared]
        why = "paths are compared, as it has a /" if "/" in groups else "names without folders are compared"
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


def read_groups(values: Any, where: str) -> NDArray[np.str_]:
    """Return an array of groups as text; raise :class:`UsageError` for samples without one, called ``where``."""
    names = np.array(values)
    lacking = np.flatnonzero(pd.isna(names) | (names.astype(np.str_) == ""))
    if len(lacking):
        raise UsageError(
            f"{where}: {len(lacking)} of {len(names)} samples have no group, first row {lacking[0]} (counted from 0): "
            "give each one, or name no groups"
        )
    return names.astype(np.str_)


def _look_up(table: Path, files: Sequence[str]) -> tuple[list[str], int, str]:
    """Return the group of each file in ``table``, empty if it has none, the number of rows, and the first file."""
    rows = _read_rows(table)
    plain = {file: clean_name(file) for file in files}
    folded = Counter(name.casefold() for name in plain.values())
    named: dict[str, str] = {}
    for file, group in rows:
        name = clean_name(file.replace("\\", "/")).removeprefix("./")
        for key in {name, name.casefold()}:
            if named.setdefault(key, group) != group and key == name:
                raise UsageError(f"{table} gives {file!r} the groups {named[key]!r} and {group!r}: give it one")
    found = []
    for name in plain.values():
        keys = (name, *[name.casefold()] * (folded[name.casefold()] == 1))
        groups = (named.get(key) or named.get(key.rpartition("/")[2], "") for key in keys)
        found.append(next(filter(None, groups), ""))
    return found, len(rows), rows[0][0] if rows else ""


def _read_rows(table: Path) -> list[tuple[str, str]]:
    """Return the file and group of each row, however a spreadsheet separates them and spells their names."""
    lines = read_text(table).splitlines()
    if lines and lines[0].strip().strip('"').lower().startswith("sep="):
        lines = lines[1:]
    header = next(filter(str.strip, lines), "")
    separator = max(",;\t|", key=header.count)
    reader = csv.reader(filter(str.strip, lines), delimiter=separator, skipinitialspace=True)
    columns = [find_identity(name) for name in next(reader, [])]
    if not {"file", "group"} <= set(columns):
        raise UsageError(f"{table} has columns {', '.join(columns)}: give it the columns file and group")
    places = [columns.index(name) for name in ("file", "group")]
    rows = ([clean_name(cell) for cell in row] + [""] * len(columns) for row in reader)
    return [(row[places[0]], re.sub(r'^="(.*)"$', r"\1", row[places[1]])) for row in rows]


def number_groups(names: Sequence[str]) -> Tensor:
    """Return a number for each name, int64 ``[N]``, equal for equal names; below 0 and unique for empty ones."""
    array = np.array(names, np.str_)
    numbers = np.unique(array, return_inverse=True)[1].astype(np.int64)
    return torch.from_numpy(np.where(array == "", -1 - np.arange(len(array)), numbers))
