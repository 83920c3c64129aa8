"""Processors of this machine, and those available to this process: more threads than these slow torch down tenfold."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Directory of this process's control group in a container."""


def available_processors() -> int:
    """Count the processors that the scheduler and the control group (a container) grant this process."""
    from joblib import cpu_count

    return int(cpu_count())


def available_memory() -> float:
    """Return the bytes of free memory within a container's limit; infinity if Linux reports neither."""
    found = math.inf
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found = 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError):  # "max" is not a number
        limit, used = (int((CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        found = min(found, limit - used)
    return found


def describe_processors() -> str:
    """Return the processor models of this machine as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "vendor_id", "model\t"))}))
