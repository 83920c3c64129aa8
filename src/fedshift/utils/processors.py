"""Processors of this machine, and those available to this process: more threads than that slow torch down tenfold."""

from __future__ import annotations

from pathlib import Path


def available_processors() -> int:
    """Count the processors that the scheduler and the control group (a container) grant this process."""
    from joblib import cpu_count

    return int(cpu_count())


def describe_processors() -> str:
    """Return the processor models of this machine as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "vendor_id", "model\t"))}))
