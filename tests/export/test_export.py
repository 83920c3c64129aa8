"""Exported models give the run's own figures, by torch alone, by ONNX's runtime and by ``fedshift.load``."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import fedshift
from fedshift.data.samples import resize
from fedshift.export.source import export_run
from fedshift.results.schema import read_rows
from fedshift.utils.errors import FedshiftError, UsageError
from tests.conftest import ARRAYS

METHODS = "fedavg,fedbn,fedwon,ditto"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def experiment(make, kept):
    """Four methods on the tiny clients, trained once; the run is in ``kept``."""
    made = make(methods=METHODS, seeds=2, rounds=2, lr=0.05, normalize="imagenet")
    if not kept.exists():
        made.run(kept)
    return made


@pytest.fixture
def without_onnx(monkeypatch):
    """Leave ONNX out, which takes most of the time."""
    monkeypatch.setattr("fedshift.export.package.save_onnx", lambda *_, **__: "left out")


def recorded(run, method, client, model="personal", seed=0):
    """The counts of right answers by class that the run recorded after its last round."""
    rows = read_rows(run / "trials" / f"{method}-seed{seed}" / "metrics.jsonl")
    key = (rows[-1]["round"], client, "test", model)
    return next(row["hits"] for row in rows if (row["round"], row["client"], row["split"], row["model"]) == key)


def right(scores, client):
    """The same counts from scores on the client's test images."""
    y = ARRAYS[client][3]
    return np.bincount(y[np.asarray(scores).argmax(1) == y], minlength=3).tolist()


def pixels(client):
    return ARRAYS[client][2]


ALONE = """
import sys, json, numpy, torch
sys.modules["fedshift"] = None  # an import of it fails
directory, images = sys.argv[1:]
x = torch.from_numpy(numpy.load(images))
program = torch.export.load(directory + "/program.pt2").module()
found = [program(x.permute(0, 3, 1, 2)).tolist()]
assert not [name for name in sys.modules if name.startswith("fedshift.")]
del sys.modules["fedshift"]
import fedshift
model = fedshift.load(directory)
print(json.dumps([*found, model(x.numpy()).tolist(), [model(image).tolist() for image in x.numpy()]]))
"""


def test_a_fresh_process_gives_the_logged_accuracy_by_torch_alone_and_by_load(
    experiment, kept, tmp_path, without_onnx
):
    export_run(experiment, kept, tmp_path / "model", method="fedbn", client="bob")
    np.save(tmp_path / "x.npy", pixels("bob"))
    words = [sys.executable, "-c", ALONE, tmp_path / "model", tmp_path / "x.npy"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    plain, loaded, one_by_one = json.loads(done.stdout)
    assert right(plain, "bob") == recorded(kept, "fedbn", "bob")
    assert plain == loaded
    assert right(one_by_one, "bob") == recorded(kept, "fedbn", "bob")


@pytest.mark.parametrize(("method", "client"), [("fedavg", None), ("fedwon", "cid"), ("ditto", "ann"), ("ditto", None)])
def test_every_kind_of_model_gives_the_recorded_counts(method, client, experiment, kept, tmp_path, without_onnx):
    report = export_run(experiment, kept, tmp_path / "model", method=method, client=client, seed=1)
    model = fedshift.load(tmp_path / "model")
    kind = "personal" if client else "global"
    for name in [client] if client else ARRAYS:
        assert right(model(pixels(name)), name) == recorded(kept, method, name, kind, seed=1)
    assert report.checks[0].endswith("as the run recorded.")
    # the weights are the network's own, which plain torch loads
    state = load_file(tmp_path / "model" / "weights.safetensors")
    assert ("conv1.gain" in state) == (method == "fedwon")
    assert ("bn1.weight" in state) == (method != "fedwon")
