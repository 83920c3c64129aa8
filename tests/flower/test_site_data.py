"""Tables, tasks and samples of several inputs at several sites: the bits of one process, or refused before training."""

import json
import random
import re
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import fedshift
from fedshift.config.spec import CompareSpec, RunSpec
from fedshift.data.assembly import read_folder
from fedshift.data.columns import Column
from fedshift.flower.coordinator.served import load_served
from fedshift.flower.messages import Exchange
from fedshift.flower.site.data import ALL_SITES, load_local
from fedshift.report.page import list_details, make_report
from fedshift.report.report import Report
from fedshift.results.summary import read_summary
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower.sites import allow, in_process, list_rows, make_site, same_as_in_process, serve, sites_at, spec_for

pytestmark = pytest.mark.usefixtures("machine")
WARDS = {"north": ("A", "B"), "rome": ("C", "A"), "west": ("B",)}
ORDER = {"north": ("age", "ward", "dose"), "rome": ("dose", "age", "ward"), "west": ("ward", "dose", "age")}


def write(place, name, labels=("ill", "well"), order=None, wards=None, rows=30, **further):
    """A hospital's table; some ages and wards are missing."""
    draw = random.Random(name)
    order = order or ORDER[name]
    lines = [",".join([*order, *further, "outcome"])]
    for row in range(rows):
        cells = {
            "age": "" if row % 7 == 3 else str(draw.randint(20, 90)), "dose": f"{draw.gauss(3, 1):.3f}",
            "ward": "" if row % 9 == 4 else draw.choice(wards or WARDS[name]),
        }  # fmt: skip
        more = [str(values[row % len(values)]) for values in further.values()]
        lines.append(",".join([*(cells[column] for column in order), *more, labels[draw.random() < 0.4]]))
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return place / f"{name}.csv"


def tables(folder, **changes):
    """What one process is told of the tables in ``folder``."""
    own = {"domains": None, "samples": None, "image_size": None, "target": "outcome"}
    return spec_for(method="fedavg", data=str(folder), **own | changes)


def hospitals(place, folder):
    return sites_at(place, folder, policy=allow().offering(target="outcome"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("labels", "classes", "meaning"),
    [
        ({"north": ("ill", "well"), "rome": ("dead", "well"), "west": ("ill", "well")}, None, ["dead", "ill", "well"]),
        ({"north": ("0", "1"), "rome": ("1", "2"), "west": ("0", "2")}, None, ["0", "1", "2"]),
        ({"north": ("0", "2"), "rome": ("0", "2"), "west": ("0", "2")}, 3, ["0", "1", "2"]),
        ({"north": ("-1", "10"), "rome": ("2", "10"), "west": ("-1", "2")}, 4, ["-1", "2", "10", "unseen 3"]),
    ],
)
def test_tables_are_what_they_are_in_one_process(labels, classes, meaning, tmp_path):
    for name, own in labels.items():
        write(tmp_path / "all", name, own)
    spec = tables(tmp_path / "all", classes=classes)
    heard = serve(spec, tmp_path, hospitals(tmp_path / "all", tmp_path))
    same_as_in_process(spec, tmp_path / "served")
    (asked,) = {json.dumps(question.facts["trial"]) for _, question in heard.grid.asked if question.kind == "train"}
    columns = {column["name"]: column["categories"] for column in json.loads(asked)["columns"]}
    assert columns == {"age": None, "ward": ["A", "B", "C"], "dose": None}
    assert list(columns) == list(ORDER["north"])
    assert json.loads(asked)["class_names"] == meaning


def test_a_site_is_one_client_of_one_table(tmp_path):
    path, spec = write(tmp_path / "t", "rome", clinic=("rome", "oslo")), tables(tmp_path, client_column="clinic")
    own = load_local(str(path), "oslo", spec, tmp_path / "site")  # the rows of which the column says so
    assert (own.names, sum(map(len, own.clients[0].splits.values()))) == (("oslo",), 15)
    with pytest.raises(UsageError, match="'paris'"):
        load_local(str(path), "paris", spec, tmp_path / "site")
    path = write(tmp_path / "t", "rome")  # without that column, the whole table
    for given, name, expected in ((path, "roma", "roma"), (path.parent, "roma", "roma"), (path, None, "rome")):
        found = load_local(str(given), name, spec, tmp_path / "site")
        assert found.names == (expected,)
        assert found.columns[-1] == Column(name="ward", categories=("A", "C"))
    write(tmp_path / "t", "north")
    with pytest.raises(UsageError, match=r"holds 2 tables \(north.csv, rome.csv\), but a site is one client"):
        load_local(str(tmp_path / "t"), "x", tables(tmp_path), tmp_path / "site")


def test_a_table_beside_class_folders_is_not_the_data(tmp_path):
    write(tmp_path / "images", "north")
    for k, part in enumerate(("train", "test") * 2):
        folder = tmp_path / "images" / part / "ab"[k // 2]
        folder.mkdir(parents=True)
        Image.new("L", (8, 8), k).save(folder / "1.png")
    found = load_local(str(tmp_path / "images"), "north", spec_for(data="", domains=None), tmp_path / "site")
    assert (found.sample_shape, found.columns, found.class_names) == ((1, 8, 8), (), ("a", "b"))


def test_text_that_names_single_rows_is_shown_to_the_site_alone(tmp_path):
    path, said = write(tmp_path, "north", patient=[f"P{row}x" for row in range(16)]), []
    site = make_site(path, "north", tmp_path, policy=allow().offering(target="outcome"), say=said.append)
    answer = site.answer(Exchange(kind="describe", facts={"spec": vars(tables("")), "labels": False}))
    assert answer.facts["why"] == "its data cannot be used (1 error): this site's log has the reason"
    assert "'patient' contains text with 16 different values in 30 rows, and the list of values would" in said[0]


def test_a_site_that_comes_later_fits_the_columns_or_is_not_admitted(tmp_path):
    for name in WARDS:
        write(tmp_path / "all", name)
    write(tmp_path / "all", "west", wards=("D", "B"))
    write(tmp_path / "all", "east", order=ORDER["west"], wards=("C",))
    sites = hospitals(tmp_path / "all", tmp_path)
    heard = serve(tables("", rounds=3, evaluate_every=1), tmp_path, sites, late={1, 4}, clients=2)
    assert "west is not admitted: 'west' has 'D' in column 'ward', which the others lack" in heard.notices
    people = json.loads((tmp_path / "served/machines/population.json").read_text())["clients"]
    assert [client["name"] for client in people] == ["north", "rome", "east"]
    both = ("north", "rome")
    assert heard.took_part == [both, both, (*both, "east")]  # it is greeted while a round goes on
    study = read_summary(tmp_path / "served")
    assert set(study.rows.query("client == 'east'")["round"]) == {3}
    assert "east" in study.clients


def test_a_table_that_has_changed_since_is_refused(tmp_path):
    path = write(tmp_path / "all", "north")
    columns = (Column(name="age"), Column(name="ward", categories=("A",)), Column(name="dose"))
    with pytest.raises(UsageError, match="column 'ward' holds 'B', but its categories in 'all sites'"):
        load_local(str(path), "north", tables(tmp_path), tmp_path / "site", replace(ALL_SITES, columns=columns))
    with pytest.raises(UsageError, match="digits lacks the columns and categories of all sites in their order"):
        load_local("digits", "pen", spec_for(), tmp_path / "site", replace(ALL_SITES, columns=columns))


SCALED = "regression(standardize=((1.0, 2.0), (0.0, 1.0)))"
HOSPITALS = {"north": 9, "south": 6}
INPUTS = [{"name": "ids", "shape": (5,), "kind": "integers"}, {"name": "age", "shape": (), "kind": "floats"}]


def convolutions(shape, classes):
    return nn.Sequential(nn.Conv2d(shape[0], 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, classes, 1))


def layers(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 4), nn.ReLU(), nn.Linear(4, outputs))


class Both(nn.Module):
    def __init__(self, shapes, classes):
        super().__init__()
        assert shapes == {"ids": (5,), "age": ()}
        self.embedding, self.norm, self.head = nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(5, classes)

    def forward(self, ids, age):
        return self.head(torch.cat([self.norm(self.embedding(ids).mean(1)), age[:, None]], dim=1))


def draw(task, count, seed):
    """Samples and labels: several inputs, images and masks, or images and two numbers or labels of each."""
    rng = np.random.default_rng(seed)
    if task == "inputs":
        return {"x.ids": rng.integers(0, 9, (count, 5)), "x.age": rng.normal(size=count), "y": np.arange(count) % 2}
    x = rng.normal(size=(count, 1, 4, 4)).astype(np.float32)
    if task is None:
        return {"x": x, "y": np.where(rng.random((count, 4, 4)) < 0.2, 255, x[:, 0] > 0).astype(np.uint8)}
    y = x[:, 0, 0, :2] if task.startswith("regression") else (x[:, 0, 0, :2] > 0)
    return {"x": x, "y": y.astype(np.float64)}


def experiment(task, folder, method="fedbn", patch=None):
    """Settings and sites of two hospitals, which have an .npz file each."""
    place, model = folder / "data", {"inputs": "Both", None: "convolutions"}.get(task, "layers")
    place.mkdir(parents=True)
    for seed, (name, count) in enumerate(HOSPITALS.items()):
        parts = {"train": draw(task, count, seed), "test": draw(task, 5, 10 + seed)}
        arrays = {key.replace("x", f"x_{part}").replace("y", f"y_{part}"): values
                  for part, held in parts.items() for key, values in held.items()}  # fmt: skip
        np.savez(place / f"{name}.npz", **arrays)
    code, kind = f"{__name__}:{model}", None if task == "inputs" else task
    own = {"rounds": 2, "batch_size": 4, "patch": patch, "lr": 0.1}
    spec = RunSpec(data=str(place), method=method, model=code, task=kind, **own)
    return spec, sites_at(place, folder, code=frozenset({code}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("task", "method", "patch"),
    [("inputs", "fedbn", None), ("multilabel", "fedavg", None), (SCALED, "fedprox", None), (None, "fedbn", "3,2")],
)
def test_sites_give_the_results_of_one_process_bit_for_bit(tmp_path, task, method, patch):
    spec, sites = experiment(task, tmp_path, method, patch)
    heard = serve(spec, tmp_path, sites)
    assert not heard.complaints
    same_as_in_process(spec, tmp_path / "served")
    found, expected = (read_summary(tmp_path / folder) for folder in ("served", "reference"))
    assert list_rows(found) == list_rows(expected)
    assert (found.task, found.metric) == (expected.task, expected.metric)
    assert found.task == {None: "segmentation", "inputs": "classification"}.get(task, task).partition("(")[0]
    assert load_served(tmp_path / "served", {spec.model}).data.schema.preparation.patched == bool(patch)
    if task == "inputs":
        assert list(map(asdict, read_folder(tmp_path / "data").inputs)) == INPUTS


def test_sites_whose_targets_are_scaled_by_their_own_spread_are_told_what_to_do(tmp_path):
    spec, sites = experiment("regression", tmp_path)
    said = r"'north' has targets for regression\(.*'south' has targets for regression.*standardize="
    with pytest.raises(FedshiftError, match=said):
        serve(spec, tmp_path, sites)


@pytest.mark.slow
@pytest.mark.parametrize("task", [None, "multilabel", SCALED])
def test_a_site_exports_models_of_masks_labels_and_numbers(task, tmp_path, monkeypatch):
    monkeypatch.setattr("fedshift.export.package.save_onnx", lambda *_, **__: "left out")
    (spec, sites), said = experiment(task, tmp_path, "fedavg" if task else "fedbn"), []
    sites[1].export, sites[1].say = tmp_path / "models", said.append
    serve(spec, tmp_path, sites)
    (folder,) = (tmp_path / "models").iterdir()
    model, x = fedshift.load(folder), np.zeros((1, 4, 4), np.float32)
    assert model.task == (task or "segmentation").partition("(")[0]
    shape = {None: (4, 4), SCALED: (2,)}.get(task, (len(model.predict(x)),))
    assert np.shape(model.predict(x)) == shape
    (tried,) = (line for line in said if "was tested on" in line)
    assert tried.endswith("as the run recorded.")


# The run directory where a run was coordinated: the server's model, and the tables that counts give.


@pytest.mark.slow
def test_the_server_model_of_a_run_across_machines_is_that_of_one_process(cli, tmp_path):
    spec = spec_for("fedavg", rounds=1, statistics="running")
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
    "two classes": ("inputs", {}, {"confusion"}, "decisions \\(thresholds need single samples' scores\\)"),
    "labels": ("multilabel", {}, {"recall", "classes"}, "would give: AUC and Brier score in classes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tables_that_counts_determine_are_those_of_one_process_and_others_are_named(kind, seeds, tmp_path):
    task, changes, expected, why = TABLES[kind]
    spec, sites = experiment(task, tmp_path, "fedavg") if task else (spec_for("fedbn", rounds=1, **changes), None)
    named = {name: value for name, value in vars(spec).items() if name not in ("method", "seeds")}
    compared = CompareSpec(**named | {"statistics": "running"}, methods=spec.method, seeds=seeds)
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
