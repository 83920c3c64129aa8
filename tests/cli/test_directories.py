"""A run does not depend on the directory in which it was started, nor on where it and its data are moved together."""

import shutil
import sys

import pytest

from fedshift.config.settings_file import read_run_settings

NETWORK = """
from torch import nn


def network(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, classes)
    )
"""
CODE = ("--code", "own_network_here:network")
WORDS = ("--data", "sites", "--model", "own_network_here:network", "--rounds", 2, "--batches", 1, "--batch-size", 8)


@pytest.fixture
def project(tiny_folder, tmp_path, monkeypatch, unpublished):
    """A directory with data and a network, in which a run was made, and another directory to go on from."""
    folder = tmp_path / "project"
    folder.mkdir()
    tiny_folder.rename(folder / "sites")
    (folder / "own_network_here.py").write_text(NETWORK)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.fixture
def run(project, cli, monkeypatch):
    monkeypatch.chdir(project)
    assert cli("run", *WORDS, "--split", "saved(path='sites.csv')", "--out", "out").code == 2  # there is none yet
    shutil.rmtree("out", ignore_errors=True)
    assert cli("run", *WORDS, "--split", "only(clients='*')", "--out", "first").code == 0
    (project / "first" / "split.csv").rename("sites.csv")
    assert cli("run", *WORDS, "--split", "saved(path='sites.csv')", "--out", "out").code == 0
    sys.modules.pop("own_network_here")
    sys.path.remove("")
    monkeypatch.chdir(project.parent / "elsewhere")
    return project / "out"


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True], ids=["as it was", "moved together"])
def test_a_run_goes_on_from_any_directory(cli, project, run, moved, monkeypatch, tmp_path):
    if moved:
        project.rename(tmp_path / "moved")
        run = tmp_path / "moved" / "out"
        monkeypatch.syspath_prepend(tmp_path / "moved")  # data are found again; of code only its old place is known
        (tmp_path / "moved" / "out" / "split.csv").rename(tmp_path / "kept")
        told = ("--split", f"saved(path='{tmp_path / 'moved' / 'sites.csv'}')")
    else:
        told = ()
    whole = (run / "trials" / "fedbn-seed0" / "metrics.jsonl").read_bytes()
    assert cli("run", "--resume", run, "--rounds", 3, *told, *CODE).err == ""
    assert (run / "trials" / "fedbn-seed0" / "metrics.jsonl").read_bytes().startswith(whole)
    settings = read_run_settings(run)
    assert settings.values["rounds"] == 3
    assert settings.values["data"] == str(run.parent / "sites")
    outcome = cli("features", run, "--samples", 2, "--out", tmp_path / "features", *CODE)
    assert (outcome.code, outcome.err) == (0, "")
    assert cli("report", run, *CODE).code == 0


@pytest.mark.slow
def test_data_that_moved_alone_are_asked_for_and_checked(cli, project, run, tmp_path, rewrite_arrays):
    (project / "sites").rename(tmp_path / "new place")
    adapt = ["adapt", run, "--data", "digits"]
    for words, flag in (
        (["run", "--resume", run], "--data"), (["features", run], "--run-data"), (adapt, "--run-data"),
    ):  # fmt: skip
        outcome = cli(*words, *CODE)
        assert outcome.code == 2
        assert outcome.err == (
            f"fedshift: the data of {run} were at {project}/sites, where there is nothing now: say where they are "
            f"({flag} PATH)\n"
        )
    assert cli("run", "--resume", run, "--data", tmp_path / "new place", *CODE).code == 0
    assert read_run_settings(run).values["data"] == str(tmp_path / "new place")
    words = ("features", run, "--samples", 2, "--out", tmp_path / "features", *CODE)
    assert cli(*words, "--run-data", tmp_path / "new place").code == 0
    new = ("adapt", run, "--data", tmp_path / "new place", "--clients", "bob", "--policies", "average", *CODE)
    assert cli(*new, "--run-data", tmp_path / "new place").code == 0
    rewrite_arrays(tmp_path / "new place" / "bob.npz")
    refused = cli(*words, "--run-data", tmp_path / "new place")
    assert refused.code == 2
    assert (
        f"new place does not hold the samples on which {run} was run: client 'bob', train samples were " in refused.err
    )
    assert refused.err.endswith(": give those (--run-data PATH)\n")
    assert (
        "begun with another version of the data of client 'bob', train samples: then "
        in cli("run", "--resume", run, "--data", tmp_path / "new place", *CODE).err
    )


@pytest.fixture
def rewrite_arrays():
    """Change one pixel in the training images of a client's file."""
    import numpy as np

    def change(file):
        with np.load(file) as packed:
            arrays = dict(packed)
        arrays["x_train"][0, 0, 0, 0] ^= 1
        np.savez(file, **arrays)

    return change


def test_a_sweep_goes_on_from_any_directory_and_repeats_nothing(cli, project, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    monkeypatch.setattr("fedshift.report.sweep_report.publish_sweep", lambda *_: None)
    shutil.copytree("sites", "others")
    words = ("--methods", "fedavg", "--rounds", 1, "--batches", 1, "--over", "data=sites,others")
    assert cli("sweep", *words, "--out", "swept").code == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    outcome = cli("sweep", "--resume", project / "swept")
    assert (outcome.code, "2 combinations of data, 0 to run" in outcome.out) == (0, True), outcome.err
    assert cli("report", project / "swept").code == 0
    assert cli("sweep", "--resume", project / "swept", "--rounds", 2).code == 0


def test_a_benchmark_is_found_again_where_its_root_was(cli, tmp_path, monkeypatch, unpublished):
    from fedshift.config.spec import RunSpec
    from fedshift.experiments.factory import anchor_paths

    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert anchor_paths(RunSpec(data="domainnet")).root is None  # nothing is there
    (tmp_path / "data").mkdir()
    assert anchor_paths(RunSpec(data="domainnet")).root == str(tmp_path / "data")
    assert anchor_paths(RunSpec(data="digits")) == RunSpec(data="digits")
    (tmp_path / "digits").mkdir()
    assert anchor_paths(RunSpec(data="digits")).data == "digits"  # the embedded ones, as without a run
    again = anchor_paths(RunSpec(data="domainnet"))
    monkeypatch.chdir("/")
    assert anchor_paths(again) == again
