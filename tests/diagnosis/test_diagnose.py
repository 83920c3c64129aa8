"""Diagnosis of federations made with one known shift, or with none."""

import json
import math
import shlex
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from sklearn.datasets import load_digits

from fedshift.data.assembly import federation
from fedshift.data.digits import digits
from fedshift.diagnosis import diagnose
from fedshift.diagnosis.inputs import STEPS
from fedshift.diagnosis.rendering import comparison_command, render_diagnosis
from fedshift.utils.errors import UsageError


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Train the network, whose layers few tests ask for, for one step."""
    monkeypatch.setattr("fedshift.diagnosis.inputs.STEPS", 1)


@pytest.fixture
def trained(brief, monkeypatch):
    """Train the network as usual."""
    monkeypatch.setattr("fedshift.diagnosis.inputs.STEPS", STEPS)


KINDS = ("label skew", "feature shift", "quantity skew", "concept shift")


def vectors(shift, key, clients=4, size=240, classes=4):
    random = np.random.default_rng(key)
    centers = 3 * np.eye(classes, 8)
    parts = {}
    for place in range(clients):
        own = size * 2**place // 4 if shift == "quantity skew" else size
        shares = random.dirichlet(np.full(classes, 0.3)) if shift == "label skew" else np.full(classes, 1 / classes)
        y = random.choice(classes, own, p=shares)
        x = centers[y] + random.normal(size=(own, 8))
        if place == 0 and shift == "feature shift":
            x = 1.5 * x + 0.5
        if place == 0 and shift == "concept shift":
            y = y ^ 1
        parts[f"c{place}"] = (x, y, x[:1], y[:1])
    return federation(parts, name="made", classes=classes)


def images(shift, key, clients=4):
    source = load_digits()
    order = np.random.default_rng(key).permutation(1200)
    parts = {}
    for place, rows in enumerate(np.array_split(order, clients)):
        if shift == "quantity skew" and place:
            rows = rows[:60]
        if shift == "label skew":
            rows = order[(source.target[order] + place) % 5 < 3][place::clients]
        x, y = (source.images[rows] * 15.9).astype(np.uint8), source.target[rows]
        if place == 0 and shift == "feature shift":
            x = 80 + x // 2
        if place == 0 and shift == "concept shift":
            y = y ^ 1
        parts[f"c{place}"] = (x, y, x[:1], y[:1])
    return federation(parts, name="made", classes=10)


def rows_of(task, random, own, moved):
    """Samples of a task and their targets, the targets of one client ``moved``."""
    if task == "segmentation":
        shares = random.uniform(0.1, 0.5, own) + 0.3 * moved
        y = np.zeros((own, 8, 8), np.uint8)
        for mask, share in zip(y, shares, strict=True):
            mask[: round(8 * share)] = 1
        return (60 + 80 * y[:, None] + random.integers(0, 30, (own, 1, 8, 8))), y
    if task == "multilabel":
        y = (random.random((own, 3)) < (0.8 if moved else 0.4)).astype(float)
        return 3 * y @ np.eye(3, 8) + random.normal(size=(own, 8)), y
    y = random.normal(size=(own, 2)) + 0.8 * moved
    return y @ np.eye(2, 8) + random.normal(size=(own, 8)), 1000 + 50 * y


@pytest.mark.sampled(4)
@pytest.mark.parametrize("task", ["segmentation", "multilabel", "regression"])
@pytest.mark.parametrize("shift", [*KINDS[:3], "none"])
def test_of_other_tasks_too_one_shift_is_named_and_no_other(task, shift):
    random = np.random.default_rng(7)
    parts = {}
    for place in range(3):
        own = 60 * 3**place if shift == "quantity skew" else 120
        x, y = rows_of(task, random, own, moved=shift == "label skew" and place == 0)
        if shift == "feature shift" and place == 0:
            x = x // 2 + 80 if task == "segmentation" else 1.5 * x + 0.5
        parts[f"c{place}"] = (x.astype(np.uint8 if task == "segmentation" else np.float32), y, x[:1], y[:1])
    found = diagnose(federation(parts, task=task), permutations=99)
    wanted = "target skew" if (shift, task) == ("label skew", "regression") else shift
    assert found.named == (() if shift == "none" else (wanted,))
    text = printed(found)
    assert (
        f"Concept shift does not apply: the test compares the classes of similar samples, and {task} has none." in text
    )
    assert wanted not in ("label skew", "target skew") or "c0" in text.partition("Interpretation")[2].splitlines()[1]
    assert all(math.isfinite(value) for value in found.findings[0].evidence.clients)


def test_of_many_clients_the_targets_of_some_are_tested():
    random = np.random.default_rng(4)
    parts = {}
    for place in range(22):
        x, y = rows_of("regression", random, 30, moved=place == 0)
        parts[f"c{place}"] = (x, y, x[:1], y[:1])
    found = diagnose(federation(parts, task="regression"), permutations=99)
    clients = found["target skew"].evidence.clients
    assert [name for name, value in zip(found.clients, clients, strict=True) if value is not None] == list(found.tested)
    assert "Targets and features were tested on 20 of 22 clients" in found.notes[0]
    assert "By client" in printed(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [vectors, images])
@pytest.mark.parametrize("shift", KINDS)
def test_one_shift_is_named_and_no_other(make, shift):
    named = [diagnose(make(shift, key), seed=key, permutations=99).named for key in range(2)]
    assert named == [(shift,)] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [vectors, images])
def test_random_parts_of_one_whole_have_no_shift(make):
    assert [diagnose(make("none", key), seed=key, permutations=99).named for key in range(2)] == [()] * 2


@pytest.mark.slow
def test_five_looks_of_digits_are_feature_shift_whose_concepts_cannot_be_judged(trained):
    found = diagnose(digits(), permutations=99, limit=150)
    assert found.named == ("feature shift",)
    assert found["feature shift"].strength == "strong"
    assert found["concept shift"].evidence.p is None
    assert [layer.name for layer in found.layers] == ["bn1", "bn2", "bn3"]
    assert all(layer.evidence.p == 0.01 for layer in found.layers)
    assert "fedbn" in [each.method for each in found.advice.methods]


@pytest.mark.slow
def test_negatives_that_lie_among_other_classes_are_no_concept_shift_and_other_labels_still_are():
    source = load_digits()
    rows = np.random.default_rng(0).permutation(1760).reshape(4, -1)

    def found(swapped):
        parts = {}
        for place, own in enumerate(rows):
            x, y = (source.images[own] * 15.9).astype(np.uint8), source.target[own]
            y = y ^ 1 if swapped and place == 0 else y
            parts[f"c{place}"] = (255 - x if place % 2 else x, y, x[:1], y[:1])
        return diagnose(federation(parts, classes=10), permutations=99)

    alike, other = found(False), found(True)
    assert 0.8 < alike["feature shift"].evidence.statistic < 0.9  # below what counts as not overlapping
    assert alike["concept shift"].evidence.p is not None  # so that labels are compared
    assert alike.named == ("feature shift",)
    assert "concept shift" in other.named


@pytest.mark.slow
def test_features_of_a_network_do_as_well(trained):
    data = images("feature shift", 5)
    assert diagnose(data, permutations=99, features="network").named == ("feature shift",)


@pytest.mark.parametrize("words", [("data", "check"), ("diagnose",)])
def test_a_place_that_cannot_be_written_is_refused_first(words, cli, tmp_path):
    (tmp_path / "file").touch()
    outcome = cli(*words, "nowhere", "--json", "file/found.json")
    assert (outcome.code, "file is a file: choose another directory" in outcome.err) == (2, True)


def test_the_result_is_a_function_of_data_and_seed_and_fits_json():
    data = vectors("none", 6, size=60)
    first, again = (diagnose(data, seed=3, permutations=99).as_dict() for _ in range(2))
    assert json.loads(json.dumps(first)) == json.loads(json.dumps(again))
    assert diagnose(data, seed=4, permutations=99).as_dict() != first


def printed(found, **options):
    console = Console(width=160, file=StringIO())
    for part in render_diagnosis(found, **options):
        console.print(part)
    return console.file.getvalue()


def test_the_text_names_the_client_and_gives_the_command():
    text = printed(diagnose(vectors("concept shift", 8), permutations=99), data="'my sites'")
    assert "Concept shift, strong: among similar inputs, a label given by c0 is" in text
    assert "Feature shift is not found" in text
    assert "fedshift sweep --data 'my sites' --methods fedavg,ditto" in text
    assert "within classes predicted from the inputs" in text


@pytest.mark.slow
def test_the_command_runs_and_gives_each_method_a_learning_rate_chosen_on_validation_data(
    cli, tiny, tiny_folder, monkeypatch, tmp_path, unpublished, undrawn
):
    found = diagnose(tiny, permutations=99)
    found = replace(found, advice=replace(found.advice, methods=found.advice.methods[:3]))
    assert [each.method for each in found.advice.methods] == ["fedavg", "fedbn", "fedwon"]
    monkeypatch.setattr("fedshift.diagnosis.rendering.RATES", (0.0, 0.1))
    name, *arguments = shlex.split(comparison_command(found, data=str(tiny_folder)))
    outcome = cli(*arguments, "--rounds", 3, "--out", "out")
    assert (name, outcome.code, outcome.err) == ("fedshift", 0, "")
    header, _, *rows = (tmp_path / "out" / "tables" / "chosen.md").read_text().splitlines()
    assert header == "| method | lr | validation | test |"
    assert [row.split(" | ")[:2] for row in rows] == [["| fedavg", "0.1"], ["| fedbn", "0.1"], ["| fedwon", "0.1"]]


def test_what_cannot_be_tested_is_said():
    x = np.random.default_rng(9).normal(size=(40, 3))
    y = np.repeat([0, 1], 20)
    data = federation({"a": (x[:20], y[:20], x[:1], y[:1]), "b": (x[20:], y[20:], x[:1], y[:1])})
    found = diagnose(data, permutations=99)
    assert found.named == ("label skew",)
    text = printed(found)
    assert "Feature shift cannot be tested: no class has 8 samples in each of two clients." in text
    assert "Concept shift cannot be tested" in text
    assert "--allow-single-class" in text


def test_copies_of_samples_are_noted():
    data = vectors("none", 10, clients=2, size=60)
    twice = {c.name: (c.train.x[list(range(30)) * 2], c.train.y[list(range(30)) * 2], *[c.test.x, c.test.y])
             for c in data.clients}  # fmt: skip
    assert any(
        "60 of 120 samples are copies of another" in note for note in diagnose(federation(twice), permutations=99).notes
    )
    assert not diagnose(data, permutations=99).notes


def test_of_many_clients_some_are_drawn_for_features():
    found = diagnose(vectors("label skew", 11, clients=25, size=40), permutations=99)
    assert len(found.clients) == len(found["label skew"].evidence.clients) == 25
    assert len(found.tested) == len(found["feature shift"].evidence.clients) == 20
    assert "20 of 25 clients" in found.notes[0]
    assert set(found.tested) < set(found.clients)
    assert "By client" in printed(found)


def test_progress_counts_to_the_end():
    heard = []
    diagnose(vectors("none", 12, size=40), permutations=99, progress=lambda *what: heard.append(what))
    assert [(done, total) for _, done, total in heard] == [(step, 6) for step in range(1, 7)]


def test_wrong_use_is_refused():
    data = vectors("none", 13, size=40)
    with pytest.raises(UsageError, match="one client, 'c0'"):
        diagnose(data.select_clients(["c0"]))
    with pytest.raises(UsageError, match="allowed are network, pixels"):
        diagnose(data, features="sound")
    with pytest.raises(UsageError, match="permutations=9"):
        diagnose(data, permutations=9)
    with pytest.raises(UsageError, match="limit=0"):
        diagnose(data, limit=0)
