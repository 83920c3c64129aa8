"""The version of the package, and of its files while they are being edited."""

import re
from functools import cache
from pathlib import Path

__version__ = "0.1.0"


def find_series(version: str) -> str:
    """Return the part ``major.minor`` of a version, within which a run that has begun may go on; empty for none."""
    found = re.match(r"\d+\.\d+(?!\d)", version)
    return found[0] if found else ""


def is_own_series(version: str) -> bool:
    """Return whether ``version`` differs from this one by its patch at most."""
    return find_series(version) == find_series(__version__)


@cache
def find_newest_source() -> int:
    """Return when a module of the package last changed, in ns since the epoch: earlier timings are outdated."""
    return max(path.stat().st_mtime_ns for path in Path(__file__).parents[1].rglob("*.py"))
