"""Tasks at several sites: the results of one process, bit for bit; sites whose tasks differ are refused by name."""

import re
from dataclasses import asdict

import numpy as np
import pytest
from torch import nn

import fedshift
from fedshift.config.spec import RunSpec
from fedshift.export.source import export_run
from fedshift.flower.server.registry import ClientRegistry, SiteDescription
from fedshift.flower.server.served import load_served
from fedshift.flower.site.site import Site
from fedshift.flower.transport.exchange import Exchange
from fedshift.results.summary import read_summary
from fedshift.tasks import Regression, Segmentation, describe_task
from fedshift.utils.errors import FedshiftError
from tests.flower.sites import RUN, SMALLEST, Heard, SiteGrid, coordinator, list_rows, same_as_in_process

pytestmark = pytest.mark.usefixtures("machine")

SCALED = "regression(standardize=((1.0, 2.0), (0.0, 1.0)))"


def convolutions(shape, classes):
    return nn.Sequential(nn.Conv2d(shape[0], 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, classes, 1))


def layers(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 4), nn.ReLU(), nn.Linear(4, outputs))


def draw(task, count, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 1, 4, 4)).astype(np.float32)
    if not task:
        y = np.where(rng.random((count, 4, 4)) < 0.2, 255, x[:, 0] > 0)
        return x, y.astype(np.uint8)
    y = x[:, 0, 0, :2] if task.startswith("regression") else (x[:, 0, 0, :2] > 0)
    return x, y.astype(np.float64)


def folders(task, place):
    """A directory with an .npz file of each client."""
    place.mkdir(parents=True)
    for seed, (name, count) in enumerate({"north": 9, "south": 6}.items()):
        (x, y), (x_test, y_test) = draw(task, count, seed), draw(task, 5, 10 + seed)
        np.savez(place / f"{name}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return place


def spec_of(task, place, method="fedbn", patch=None):
    model = layers if task else convolutions
    return RunSpec(
        data=str(place), method=method, model=f"{__name__}:{model.__name__}", task=task, rounds=2, batch_size=4,
        patch=patch, lr=0.1,
    )  # fmt: skip


def sites_in(place, folder):
    code = frozenset({f"{__name__}:convolutions", f"{__name__}:layers"})
    return {
        number: Site(str(file), file.stem, folder / file.stem, code=code, policy=SMALLEST)
        for number, file in enumerate(sorted(place.iterdir()), 1)
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("task", "method", "patch"),
    [(None, "fedbn", "3,2"), ("multilabel", "fedavg", None), (SCALED, "fedprox", None)],
)
def test_sites_give_the_results_of_one_process_bit_for_bit(tmp_path, task, method, patch):
    place = folders(task, tmp_path / "data")
    spec = spec_of(task, place, method, patch)
    grid = SiteGrid(sites_in(place, tmp_path / "sites"))
    heard = Heard()
    coordinator(spec, grid, tmp_path / "run", heard).run()
    assert all("is connected" in notice for notice in heard.notices[1:])
    same_as_in_process(spec, tmp_path / "run", tmp_path / "sites", tmp_path / "reference")
    found, expected = (read_summary(tmp_path / folder) for folder in ("run", "reference"))
    assert list_rows(found) == list_rows(expected)
    assert (found.task, found.metric) == (expected.task, expected.metric)
    assert found.task == (task or "segmentation").partition("(")[0]
    served = load_served(tmp_path / "run", {spec.model})
    assert served.data.schema.preparation.patched == bool(patch)


def test_sites_whose_targets_are_scaled_by_their_own_spread_are_told_what_to_do(tmp_path):
    place = folders("regression", tmp_path / "data")
    grid = SiteGrid(sites_in(place, tmp_path / "sites"))
    said = r"targets of 'north' are for regression\(.*'south' for regression.*standardize="
    with pytest.raises(FedshiftError, match=said):
        coordinator(spec_of("regression", place), grid, tmp_path / "run", Heard()).run()


def describe(name, task, **changes):
    facts = {
        "name": name, "version": "1", "shape": (1, 4, 4), "dtype": "float32", "classes": 2, "class_names": (),
        "samples": {"train": 3, "test": 3}, "labels": None, "task": task,
    }  # fmt: skip
    return SiteDescription.of({**facts, **changes})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"task": describe_task(Regression())}, r"targets of 'a' are for segmentation, targets of 'b' for regression"),
        ({"task": {"name": "os:system"}}, "task 'os:system' is not known here"),
        ({"task": {"name": "segmentation", "depth": 3}}, "task 'segmentation' has other fields here"),
        ({"classes": 3}, "'a' has 2 classes , and 'b' 3"),
    ],
)
def test_sites_whose_tasks_differ_are_refused_by_name(other, said):
    first = describe("a", describe_task(Segmentation()))

    def admit():
        second = describe("b", **{"task": first.task, **other})
        ClientRegistry(clients=(first, second)).to_federation(None)

    with pytest.raises(FedshiftError, match=said):
        admit()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "change",
    [
        {"hits": [1]}, {"predicted": [-1, 3]}, {"predicted": None}, {"samples": 4}, {"loss_sum": float("nan")},
        {"support": ["1", 2]},
    ],
    ids=str,
)  # fmt: skip
def test_counts_that_cannot_be_those_of_the_task_are_refused(tmp_path, change):
    place = folders(None, tmp_path / "data")
    grid = SiteGrid(sites_in(place, tmp_path / "sites"))

    def tamper(node, question, answer):
        if node == 1 and question.kind == "evaluate":
            answer.facts["rows"][0].update(change)
        return answer

    grid.tamper = tamper
    heard = Heard()
    coordinator(spec_of(None, place), grid, tmp_path / "run", heard).run()
    assert any(re.search("round 1: north is not measured: it", text) for text in heard.notices), heard.notices


def test_a_class_of_the_sites_machine_is_a_task_only_where_the_site_allows_it(tmp_path):
    place = folders(SCALED, tmp_path / "data")
    grid = SiteGrid(sites_in(place, tmp_path / "sites"))
    spec = spec_of("multiprocessing.pool:ThreadPool(processes=1)", place)
    answer = grid.sites[1].answer(Exchange(kind="describe", facts={"spec": asdict(spec), "labels": False}, run=RUN))
    assert answer.kind == "refused"
    assert "nobody allowed" in answer.facts["why"]


@pytest.mark.slow
def test_the_coordinators_model_of_patches_takes_images_of_any_size(tmp_path):
    place = folders(None, tmp_path / "data")
    spec, code = spec_of(None, place, "fedavg", "3,2"), {f"{__name__}:convolutions"}
    coordinator(spec, SiteGrid(sites_in(place, tmp_path / "sites")), tmp_path / "run", Heard()).run()
    report = export_run(load_served(tmp_path / "run", code), tmp_path / "run", tmp_path / "out", onnx=False)
    model, x = fedshift.load(report.directory), draw(None, 1, 3)[0]
    assert model.inputs.patched
    assert model.predict(x).shape == (1, 4, 4)
    assert model.predict(np.tile(x, (1, 1, 3, 2))).shape == (1, 12, 8)


@pytest.mark.slow
def test_a_site_exports_models_of_masks_labels_and_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("fedshift.export.package.save_onnx", lambda *_, **__: "left out")
    for number, task in enumerate((None, "multilabel", SCALED)):
        home, said = tmp_path / str(number), []
        place = folders(task, home / "data")
        sites = sites_in(place, home / "sites")
        sites[1].export, sites[1].say = home / "models", said.append
        coordinator(spec_of(task, place, "fedavg" if task else "fedbn"), SiteGrid(sites), home / "run", Heard()).run()
        (folder,) = (home / "models").iterdir()
        model, x = fedshift.load(folder), np.zeros((1, 4, 4), np.float32)
        assert model.task == (task or "segmentation").partition("(")[0]
        assert np.shape(model.predict(x)) == (
            (4, 4) if not task else (2,) if task == SCALED else (len(model.predict(x)),)
        )
        (tried,) = (line for line in said if "was tested on" in line)
        assert tried.endswith("as the run recorded.")
