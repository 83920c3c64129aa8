"""On a device that counts, every method trains as on the CPU, and the processor neither copies nor waits in a step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedshift.config.expressions import list_catalog

ROOT = Path(__file__).parents[2]
ABORTS = {"dp_sgd"}
"""What the fake device cannot run: torch.vmap over gradients of its tensors ends the process."""
METHODS = [name for name in list_catalog("methods") if name not in ABORTS]
COMPOSED = ["fedbn+fedprox(mu=0.1)", "silobn+scaffold", "ditto(epochs=2)+scaffold"]
COPIES, WAITS = 6, 1
"""Copies and waits that an engine may need for a chunk in a round, however many steps and lanes."""
RULES_COPIES, RULES_WAITS = 8, 3
"""Those that a rule may need for a client in a round: its first samples, and what depends on their values."""


def run(methods: list[str], engine: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.engines.fake_gpu", ";".join(methods), engine]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def count(counts: dict[str, Any], kinds: tuple[str, ...], where: tuple[str, ...]) -> int:
    """Return how often the package's files below ``where`` did this."""
    lines = (line.partition(": ") for line in counts["lines"])
    found = ((kind, line) for kind, _, line in lines if kind in kinds and line.startswith(where))
    return sum(counts["lines"][f"{kind}: {line}"] for kind, line in found)


def check(found: dict[str, Any], chunks: int) -> None:
    label = f"{found['method']}, {found['engine']}"
    assert found["gap"] < 1e-9, label
    few, many = found["counts"]["2"], found["counts"]["4"]
    for kind in ("to device", "to host", "waits"):
        assert few.get(kind, 0) == many.get(kind, 0), f"{label}: {kind} in a step: {many['lines']}"
    copies = ("to device", "to host")
    assert count(many, copies, ("engines/stacked", "engines/sequential")) <= COPIES * chunks, (label, many["lines"])
    assert count(many, ("waits",), ("engines/",)) <= WAITS * chunks, (label, many["lines"])
    clients = 3
    assert sum(many.get(kind, 0) for kind in copies) <= COPIES * chunks + RULES_COPIES * clients, (label, many["lines"])
    assert many.get("waits", 0) <= WAITS * chunks + RULES_WAITS * clients, (label, many["lines"])


def test_a_method_trains_as_on_the_cpu_with_no_copy_in_a_step() -> None:
    (found,) = run(["scaffold"], "stacked")
    check(found, chunks=1)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "chunks"), [("stacked", 1), ("sequential", 3)])
def test_every_method_trains_as_on_the_cpu_with_no_copy_in_a_step(engine: str, chunks: int) -> None:
    results = run([*METHODS, *COMPOSED], engine)
    assert [found["method"] for found in results] == [*METHODS, *COMPOSED]
    for found in results:
        check(found, chunks)
