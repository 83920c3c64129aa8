"""Processors available to this process: more threads than that slow torch down by an order of magnitude."""

from __future__ import annotations

import math
import os
from pathlib import Path

UNLIMITED = 2**16


def available_processors(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the processors that the scheduler and the control group (a container) grant this process."""
    schedulable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(schedulable, _cgroup_limit(cgroup)))


def _cgroup_limit(cgroup: Path) -> int:
    """Return the processors that ``cgroup`` (version 2, else 1) grants, rounded up, or :data:`UNLIMITED`."""
    first = cgroup / "cpu"
    for files in ([cgroup / "cpu.max"], [first / "cpu.cfs_quota_us", first / "cpu.cfs_period_us"]):
        if all(file.is_file() for file in files):
            quota, period = " ".join(file.read_text(encoding="utf-8") for file in files).split()
            return math.ceil(int(quota) / int(period)) if quota not in ("max", "-1") else UNLIMITED
    return UNLIMITED
