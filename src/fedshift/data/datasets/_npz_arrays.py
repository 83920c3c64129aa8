"""Arrays of an ``.npz`` file, read without pickle."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ..formats import explain_errors


def read_arrays(file: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """The named arrays of ``file``; :class:`UsageError` naming the file where it lacks one or cannot be read."""
    with explain_errors(file, "an .npz file of arrays"), np.load(file, allow_pickle=False) as packed:
        missing = [name for name in names if name not in packed]
        if missing:
            raise UsageError(f"{file} has no array {missing[0]!r} (it has {', '.join(packed)}): get the file again")
        return {name: packed[name] for name in names}
