"""How many functions a batch passes on its way through the reference engine."""

import sys
from pathlib import Path

from torch import nn

import fedshift
from fedshift.methods import METHODS
from tests.laws.course import make_trial

PACKAGES = tuple(str(Path(fedshift.__file__).parent / name) for name in ("core", "engines", "methods", "nn"))
FUNCTIONS, FILES = 25, 7


def network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes)).double()


def test_a_batch_passes_few_functions():
    """All that is called for the second batch counts, but for comprehensions, and what reads samples and keeps time."""
    running, called = make_trial(METHODS.parse("fedbn+moon"), model=network), [set()]

    def watch(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
            if code.co_name == "load_batch":
                called.append(set())
            elif code.co_name != "iterate":
                called[-1].add((Path(code.co_filename).name, code.co_qualname))

    sys.setprofile(watch)
    try:
        running.engine.train_client(running.server, "a", running.clients["a"])
    finally:
        sys.setprofile(None)
    _, _, second, _ = called
    assert {"client_step_", "PreviousModel.loss", "SGD.update_"} <= {name for _, name in second}
    assert len(second) <= FUNCTIONS, sorted(second)
    assert len({file for file, _ in second}) <= FILES
