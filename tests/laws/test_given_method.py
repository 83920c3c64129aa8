"""All laws run on a method from outside of the package, and name what it breaks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNTING = '''
from fedshift import Rule, method

class Counting(Rule):
    """Keeps a number outside of its memory."""
    steps = 0

    def loss(self, loss, step):
        Counting.steps += 1
        return loss * (1 + 0.1 * Counting.steps)

@method
def counting(base):
    return base.with_rule(Counting())
'''


@pytest.mark.slow
def test_all_laws_run_on_a_given_method_alone_and_those_that_it_breaks_are_named(tmp_path):
    (tmp_path / "counting_methods.py").write_text(COUNTING)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", "tests/laws"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "FEDSHIFT_LAWS": "counting_methods:counting"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.findall(r"^(PASSED|FAILED|SKIPPED|ERROR) tests/laws/\w+\.py::(\w+)\[(.*?)\]", ran.stdout, re.MULTILINE)
    broken = {law for outcome, law, _ in found if outcome == "FAILED"}
    assert {"test_resumed_equals_uninterrupted", "test_the_order_of_clients_changes_nothing"} <= broken
    assert all("counting" in case for _, _, case in found)
    assert {"sequential", "stacked", "pool", "ray"} <= {word for _, _, case in found for word in case.split("-")}
    assert len(found) >= 32
    assert len({law for outcome, law, _ in found if outcome == "PASSED"}) >= 6
