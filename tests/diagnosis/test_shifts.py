"""Shifts between sites: areas against theory, false and true findings by simulation, sentences, and methods."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.data.assembly import federation
from fedshift.diagnosis import diagnose, shifts
from fedshift.diagnosis.shift_report import choose_methods, comparison_command, interpret, tabulate_shifts
from fedshift.diagnosis.shifts import ALL, SHIFTS, Diagnosis, bound_area, tell_apart
from fedshift.methods import METHODS
from fedshift.models.digits import small_cnn
from fedshift.models.mlp import abide_mlp
from fedshift.utils.errors import UsageError


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import diagnose as module

    return module


def make_rows(kind, random, count, shift):
    """Return samples of a task and their targets, with one ``shift`` against others."""
    if kind == "segmentation":
        shares = random.uniform(0.1, 0.5, count) + 0.3 * (shift == "label skew")
        y = np.zeros((count, 8, 8), np.uint8)
        for mask, share in zip(y, shares, strict=True):
            mask[: round(8 * share)] = 1
        x = 60 + 80 * y[:, None] + random.integers(0, 30, (count, 1, 8, 8))
        return (x // 2 + 80 if shift == "feature shift" else x).astype(np.uint8), y
    if kind == "regression":
        y = random.normal(size=(count, 2)) + 0.8 * (shift == "label skew")
        x, targets = y @ np.eye(2, 8), 1000 + 50 * y
    elif kind == "multilabel":
        targets = (random.random((count, 3)) < (0.8 if shift == "label skew" else 0.4)).astype(float)
        x = 3 * targets @ np.eye(3, 8)
    else:
        targets = random.choice(4, count, p=[0.7, 0.1, 0.1, 0.1] if shift == "label skew" else [0.25] * 4)
        x = 3 * np.eye(4, 8)[targets]
    x = x + random.normal(size=(count, 8))
    return (1.5 * x + 0.5 if shift == "feature shift" else x), targets


def make_sites(shift="none", kind="classification", sites=3, size=120, key=3):
    random, clients = np.random.default_rng(key), {}
    for place in range(sites):
        count = size * 3 if shift == "quantity skew" and place else size
        x, y = make_rows(kind, random, count, shift if place == 0 else "none")
        clients[f"c{place}"] = (x, y, x[:1], y[:1])
    return federation(clients, name="made", task=kind, classes=4 if kind == "classification" else None)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["classification", "segmentation", "multilabel", "regression"])
@pytest.mark.parametrize("shift", [*SHIFTS, "none"])
def test_of_every_task_the_shift_that_was_made_is_named_and_no_other(kind, shift):
    found = diagnose(make_sites(shift, kind), permutations=99)
    assert found.named == (() if shift == "none" else (shift,))
    if shift in SHIFTS[:2]:
        assert found.find(shift)["strongest"] == "c0"
        assert "held-out samples of c0" in " ".join(interpret(found))


@pytest.mark.slow
def test_patients_dealt_at_random_have_no_feature_shift_and_their_images_alone_seem_to(benchmark):
    assert benchmark.measure_false_shift(20) <= 0.1
    dealt = benchmark.make_study("nothing", 0)
    alone = [c.with_splits({n: s._replace(group=None) for n, s in c.splits.items()}) for c in dealt.clients]
    assert "feature shift" in diagnose(replace(dealt, clients=tuple(alone)), permutations=99).named
    found = [diagnose(benchmark.make_study("feature shift of 2", key), seed=key, permutations=99) for key in range(5)]
    assert sum("feature shift" in each.named for each in found) >= 4
    assert "80 patients: cannot tell" in " ".join(interpret(diagnose(dealt, permutations=99)))


@pytest.mark.slow
def test_the_p_value_is_that_of_chance_where_labels_differ_and_features_do_not():
    p = []
    for key in range(60):
        random = np.random.default_rng(key)
        y = random.integers(0, 3, 90)
        site = np.minimum(np.repeat([0, 1, 2], 30) + (y == 0) * (random.random(90) < 0.6), 2)
        p.append(tell_apart(3 * np.eye(3, 5)[y] + random.normal(size=(90, 5)), site, y, random, 99)[1]["p"])
    assert 4 <= sum(value <= 0.2 for value in p) <= 22  # 12 expected
    assert sum(value <= 0.05 for value in p) <= 8  # 3 expected


def test_the_area_of_one_normal_that_is_shifted_is_that_of_theory():
    random, site = np.random.default_rng(2), np.repeat([0, 1], 1500)
    found = tell_apart(random.normal(size=(3000, 1)) + site[:, None], site, np.zeros(3000, int), random, 99)[1]
    assert found["value"] == pytest.approx(norm.cdf(1 / np.sqrt(2)), abs=0.02)
    assert found["low"] < found["value"] < found["high"] < found["low"] + 0.06
    assert found["p"] == 0.01


def test_areas_are_means_of_scikit_learns_over_strata_and_folds():
    random = np.random.default_rng(3)
    own, scores = random.random((40, 1, 1)) < 0.4, random.normal(size=(40, 1, 1)).round(1)
    cells = [np.arange(25), np.arange(25, 40)]
    areas = [roc_auc_score(own[rows, 0, 0], scores[rows, 0, 0]) for rows in cells]
    weights = [own[rows].sum() * (~own[rows]).sum() / len(rows) for rows in cells]
    assert shifts._compare_ranks(scores, own, cells)[0, 0] == pytest.approx(np.average(areas, weights=weights))


@pytest.mark.parametrize(("area", "size"), [(0.5, 10), (0.8, 10), (0.8, 200), (1.0, 20)])
def test_the_interval_solves_newcombes_equation(area, size):
    def excess(true, sign):  # Hanley and McNeil 1982
        q1, q2 = true / (2 - true), 2 * true**2 / (1 + true)
        variance = (true * (1 - true) + (size - 1) * (q1 - true**2) + (size - 1) * (q2 - true**2)) / size**2
        return sign * (true - area) - norm.isf(0.025) * np.sqrt(variance)

    low, high = bound_area(area, 1 / (6 * size))
    assert low == pytest.approx(brentq(excess, 1e-9, area - 1e-9, args=(-1,)), abs=2e-3)
    assert high == pytest.approx(1.0 if area == 1 else brentq(excess, area + 1e-9, 1 - 1e-9, args=(1,)), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "shift"), [(8, 3.0), (20, 1.0), (20, 3.0)])
def test_intervals_cover_the_expected_area_of_another_draw_of_patients(size, shift):
    found = []
    for key in range(60):
        random, site = np.random.default_rng(key), np.repeat([0, 1], size)
        x = random.normal(size=(2 * size, 15))
        x[site == 0, 0] += shift
        found.append(tell_apart(x, site, np.zeros(2 * size, int), random, 99)[1])
    mean = np.mean([each["value"] for each in found])
    assert sum(each["low"] <= mean <= each["high"] for each in found) >= 54


def test_other_labels_for_the_same_look_are_a_feature_shift_that_says_so():
    data = make_sites(sites=3)
    swapped = data.clients[0].with_splits(
        {n: s.replace(y=torch.tensor([1, 0, 3, 2])[s.y]) for n, s in data.clients[0].splits.items()}
    )
    found = diagnose(replace(data, clients=(swapped, *data.clients[1:])), permutations=99)
    assert "feature shift" in found.named
    assert any("Other labels for the same look" in sentence for sentence in interpret(found))


def test_volumes_signals_and_several_inputs_are_compared():
    random = np.random.default_rng(0)
    for shape in ((2, 40), (1, 6, 6, 6)):
        parts = {f"c{k}": (random.normal(size=(60, *shape)) + k, np.arange(60) % 2) * 2 for k in (0, 1)}
        assert diagnose(federation(parts), permutations=99).named == ("feature shift",)
    several = {}
    for name, dark in (("a", 256), ("b", 128)):
        image = random.integers(0, dark, (60, 8, 8), dtype=np.uint8)
        several[name] = ({"image": image, "row": np.zeros((60, 2))}, np.arange(60) % 2) * 2
    assert diagnose(federation(several), permutations=99).named == ("feature shift",)


def test_digits_whose_looks_differ_have_a_feature_shift_in_each_pair_and_copies_are_one_row():
    source, clients = load_digits(), {}
    for place, look in enumerate((lambda x: x, lambda x: 16 - x, lambda x: x // 2)):
        x, y = (np.concatenate([values[place::3][:60]] * 2) for values in (look(source.images) * 15.9, source.target))
        clients[f"c{place}"] = (x.astype(np.uint8), y, x[:1].astype(np.uint8), y[:1])
    found = diagnose(federation(clients), permutations=99)
    assert (found.named, found.units) == (("feature shift",), 3 * 60)
    assert all(found.find("feature shift", sites)["value"] > 0.99 for sites in found.frame["sites"].unique())
    assert [row[3].text[:6] for row in tabulate_shifts(found).rows] == ["1.00 ("] * 4


def test_few_patients_and_what_cannot_be_tested_are_said():
    x = np.random.default_rng(9).normal(size=(40, 3))
    y = np.repeat([0, 1], 20)
    apart = diagnose(federation({"a": (x[:20], y[:20]) * 2, "b": (x[20:], y[20:]) * 2}), permutations=99)
    assert apart.named == ("label skew",)
    assert apart.find("feature shift")["verdict"] == "not testable"
    assert "Feature shift cannot be tested: no two sites have samples with similar targets" in " ".join(
        interpret(apart)
    )
    assert "--allow-single-class" in comparison_command(apart)
    same = diagnose(federation({"a": (x[:20], y[:20]) * 2, "b": (x[20:], y[:20]) * 2}, classes=2), permutations=99)
    assert "Label skew cannot be tested: all targets are equal." in list(interpret(same))
    few = diagnose(make_sites(sites=2, size=8), permutations=99)
    assert "Feature shift: 16 samples: cannot tell (AUC" in " ".join(interpret(few))


def test_many_clients_are_drawn_and_have_no_pairs():
    found = diagnose(make_sites("label skew", sites=22, size=10), permutations=99)
    assert found.units == 20 * 10
    assert set(found.frame["sites"]) == {ALL}
    assert "20 of 22 clients were drawn for the tests." in list(interpret(found))


def test_the_result_is_a_function_of_data_and_seed_and_fits_json():
    data, heard = make_sites(size=20), []
    first, again = (diagnose(data, seed=3, permutations=99).as_dict() for _ in range(2))
    assert json.loads(json.dumps(first, allow_nan=False)) == json.loads(json.dumps(again))
    other = diagnose(data, seed=4, permutations=99, progress=lambda *what: heard.append(what[1:]))
    assert other.as_dict() != first
    assert heard == [(step, 4) for step in range(1, 5)]


@pytest.mark.parametrize(("names", "options", "told"), [
    (["c0"], {}, "one client, 'c0'"), (None, {"permutations": 9}, "permutations=9"), (None, {"limit": 0}, "limit=0")
])  # fmt: skip
def test_wrong_use_is_refused(names, options, told):
    data = make_sites(size=20)
    with pytest.raises(UsageError, match=told):
        diagnose(data.select_clients(names or data.names), **options)


def find(data, **areas):
    """Return a diagnosis whose shifts have these areas, or this ratio."""
    rows = [{"sites": ALL, "shift": shift, "value": areas.get(shift.split()[0], 0.5),
             "verdict": "shift" if shift.split()[0] in areas else "none"} for shift in SHIFTS]  # fmt: skip
    return Diagnosis(data=data, frame=pd.DataFrame(rows), units=9, patients=False)


def test_methods_follow_the_shifts_their_sizes_and_the_number_of_clients(tiny):
    assert next(iter(choose_methods(find(tiny)))) == "fedavg"
    assert list(choose_methods(find(tiny, feature=0.9)))[:3] == ["fedavg", "fedbn", "fedwon"]
    skewed = list(choose_methods(find(tiny, feature=0.9, label=0.8)))
    assert skewed.index("fedwon") < skewed.index("gn") < skewed.index("fedrod")
    assert {"fedrod", "fednova"} < choose_methods(find(tiny, label=0.8, quantity=3)).keys()
    assert "fedrod" not in choose_methods(find(make_sites(kind="regression", size=9), label=0.8))
    many = find(make_sites(sites=22, size=9), feature=0.9)
    assert list(choose_methods(many)) == ["fedavg", "fedbabu", "gn"]  # vectors, and no state on a client


@pytest.mark.parametrize(("model", "shape"), [(small_cnn, (1, 8, 8)), (abide_mlp, (5,))])
def test_the_methods_fit_the_model(model, shape):
    x, y = np.zeros((6, *shape), np.float32), np.arange(6) % 2
    data = federation(dict.fromkeys("ab", (x, y, x, y)))
    chosen = [choose_methods(find(data, **dict.fromkeys(kinds, 0.9))) for kinds in (("label", "quantity"), ["feature"])]
    for method in METHODS.parse_all(",".join({name for each in chosen for name in each})):
        assert prepare(method, model(shape, 2), optimizer=SGD(lr=0.1), sample=torch.zeros(1, *shape)).trained


@pytest.mark.slow
def test_the_command_runs_and_gives_each_method_a_learning_rate_chosen_on_validation_data(
    cli, tiny, tiny_folder, monkeypatch, tmp_path, unpublished, undrawn
):
    monkeypatch.setattr("fedshift.diagnosis.shift_report.choose_methods", lambda _: {"fedavg": "", "fedbn": ""})
    monkeypatch.setattr("fedshift.diagnosis.shift_report.RATES", "0,0.1")
    command = comparison_command(find(tiny, feature=0.9), data=str(tiny_folder)).replace("--seeds 5", "--seeds 2")
    name, *arguments = shlex.split(command)
    outcome = cli(*arguments, "--rounds", 3, "--out", "out")
    assert (name, outcome.code, outcome.err) == ("fedshift", 0, ""), outcome.err
    header, _, *rows = (tmp_path / "out" / "tables" / "chosen.md").read_text().splitlines()
    assert header == "| method | lr | validation | test |"
    assert [row.split(" | ")[:2] for row in rows] == [["| fedavg", "0.1"], ["| fedbn", "0.1"]]
