"""Models exported where a run across machines was coordinated: the server's, and no site's."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedshift
from tests.flower.sites import Heard, SiteGrid, coordinator, in_process, sites_of, spec_for


@pytest.mark.slow
def test_the_server_model_of_a_run_across_machines_is_that_of_one_process(cli, tmp_path, machine):
    spec = spec_for("fedavg", rounds=1)
    assert coordinator(spec, SiteGrid(sites_of(spec, tmp_path)), tmp_path / "served", Heard()).run()
    in_process(spec, tmp_path / "run")
    for run in ("served", "run"):
        done = cli("export", tmp_path / run, "--out", tmp_path / "made" / run, "--no-onnx")
        assert done.code == 0, done.err
        assert ("was tested on" in done.out) == (run == "run")
    served, alone = (load_file(tmp_path / "made" / run / "weights.safetensors") for run in ("served", "run"))
    assert served.keys() == alone.keys()
    assert all(torch.equal(served[name], alone[name]) for name in served)
    facts = [json.loads((tmp_path / "made" / run / "model.json").read_text()) for run in ("served", "run")]
    assert facts[0]["input"] == facts[1]["input"]
    assert facts[0]["classes"] == facts[1]["classes"]
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), np.uint8)
    first, second = (fedshift.load(tmp_path / "made" / run)(torch.from_numpy(images)) for run in ("served", "run"))
    assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))


@pytest.mark.parametrize(
    ("method", "changes", "words", "why"),
    [
        ("fedbn", {}, (), "fedbn has no global model, and clients' are not stored where the run was coordinated"),
        ("fedavg", {}, ("--client", "pen"), "clients' models are not stored where the run was coordinated"),
        ("fedavg", {"normalize": "client"}, (), "are scaled by values that only their sites know"),
    ],
)
def test_a_model_that_only_a_site_has_is_written_there(cli, tmp_path, machine, method, changes, words, why):
    spec = spec_for(method, rounds=1, domains="pen,photo", **changes)
    assert coordinator(spec, SiteGrid(sites_of(spec, tmp_path)), tmp_path / "served", Heard()).run()
    done = cli("export", tmp_path / "served", "--out", tmp_path / "made", "--no-onnx", *words)
    assert (done.code, done.out) == (2, "")
    said = " ".join(done.err.split())
    assert f"{why}: `fedshift join ... --export DIRECTORY` writes each site's model there" in said
    assert not (tmp_path / "made").exists()
