"""A run directory where a run across machines was coordinated: the server's model, and the tables that counts give."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import fedshift
from fedshift.config.spec import CompareSpec
from fedshift.report.page import list_details, make_report
from fedshift.report.report import Report
from fedshift.results.summary import read_summary
from tests.flower.sites import in_process, serve, sites_at, spec_for

pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.slow
def test_the_server_model_of_a_run_across_machines_is_that_of_one_process(cli, tmp_path):
    spec = spec_for("fedavg", rounds=1)
    serve(spec, tmp_path)
    in_process(spec, tmp_path / "run")
    for run in ("served", "run"):
        done = cli("export", tmp_path / run, "--out", tmp_path / "made" / run, "--no-onnx")
        assert done.code == 0, done.err
        assert ("was tested on" in done.out) == (run == "run")
    served, alone = (load_file(tmp_path / "made" / run / "weights.safetensors") for run in ("served", "run"))
    assert served.keys() == alone.keys()
    assert all(torch.equal(served[name], alone[name]) for name in served)
    facts = [json.loads((tmp_path / "made" / run / "model.json").read_text()) for run in ("served", "run")]
    assert facts[1]["input"].pop("measured")  # which pixels are usual follows from training samples
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
def test_a_model_that_only_a_site_has_is_written_there(cli, tmp_path, method, changes, words, why):
    spec = spec_for(method, rounds=1, domains="pen,photo", **changes)
    serve(spec, tmp_path)
    done = cli("export", tmp_path / "served", "--out", tmp_path / "made", "--no-onnx", *words)
    assert (done.code, done.out) == (2, "")
    said = " ".join(done.err.split())
    assert f"{why}: `fedshift join ... --export DIRECTORY` writes each site's model there" in said
    assert not (tmp_path / "made").exists()


def write_labels(place, task):
    """An .npz file for each of two hospitals, with two classes, or three labels."""
    place.mkdir()
    for seed, (name, count) in enumerate({"north": 40, "south": 28}.items()):
        random = np.random.default_rng(seed)
        x = random.normal(size=(count, 6)).astype(np.float32)
        y = x[:, :3] + random.normal(size=(count, 3)) > 0.4
        y = y.astype(np.float64) if task == "multilabel" else y[:, 0].astype(np.int64)
        half = count // 2
        np.savez(place / f"{name}.npz", x_train=x[:half], y_train=y[:half], x_test=x[half:], y_test=y[half:])


def write_tables(directory):
    """Write the tables of a run, and return those of classes, with the sentences below the terminal's tables."""
    summary = read_summary(directory)
    Report(tables=tuple(list_details(summary))).write_tables(directory / "tables")
    files = [path for path in (directory / "tables").glob("*.csv") if path.stem.startswith(KINDS)]
    assert all(path.with_suffix(end).exists() for path in files for end in (".md", ".tex"))
    read = {path.stem: pd.read_csv(path, index_col=0) for path in files}
    return read, make_report(summary, whole=False).sentences


KINDS = ("classes", "confusion", "recall", "decisions")
TABLES = {
    "ten classes": (None, {}, {"recall"}, "confusion .*; classes .* the metric f1 counts"),
    "ten classes and f1": (
        None, {"metrics": "f1"}, {"recall", "classes"}, "confusion .*; AUC and Brier score in classes",
    ),
    "two classes": ("classification", {}, {"confusion"}, "decisions \\(thresholds need single samples' scores\\)"),
    "labels": ("multilabel", {}, {"recall", "classes"}, "would give: AUC and Brier score in classes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tables_that_counts_determine_are_those_of_one_process_and_others_are_named(kind, seeds, tmp_path):
    task, changes, expected, why = TABLES[kind]
    spec, sites = spec_for("fedbn", rounds=1, **changes), None
    if task:
        write_labels(tmp_path / "data", task)
        own = {"data": str(tmp_path / "data"), "domains": "north,south", "samples": None, "image_size": None}
        spec = spec_for("fedavg", rounds=1, model="linear", task=task, **own)
        sites = sites_at(tmp_path / "data", tmp_path)
    named = {name: value for name, value in vars(spec).items() if name not in ("method", "seeds")}
    compared = CompareSpec(**named, methods=spec.method, seeds=seeds)
    serve(compared, tmp_path, sites)
    in_process(compared, tmp_path / "reference")
    (found, told), (wanted, alone) = (write_tables(tmp_path / run) for run in ("served", "reference"))
    assert {name.partition("-")[0] for name in found} == expected
    for name, table in found.items():
        for column in table:
            if seeds > 1 and re.search(r"\b(low|high)\b", column):  # samples are not paired over seeds
                assert table[column].isna().all()
            else:
                pd.testing.assert_series_equal(table[column], wanted[name][column], rtol=1e-12)
    (line,) = [line for line in told if "which never leave a site" in line]
    assert re.search(why, line)
    lacking = {name.partition("-")[0] for name in wanted.keys() - found.keys()}
    assert {kind for kind in lacking if kind not in line} == set()
    assert not [line for line in alone if "never leave a site" in line]
