"""Updates that are too long are left out, honest ones of any size are not, and a bounded weight is told."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedshift.config.spec import RunSpec
from fedshift.core.states import ServerState, Update
from fedshift.flower.coordinator.rounds import UpdateLengths, describe_bound
from fedshift.flower.messages import from_record, to_record
from fedshift.results.checkpoint import load_checkpoint
from tests.flower.gated import NETWORK
from tests.flower.sites import PHOTO, same_as_in_process, serve, sites_at, spec_for

pytestmark = pytest.mark.usefixtures("machine")
WEIGHT, CLAIMED, BATCH = "1.weight", 400_000, 32
SERVER = ServerState(round=1, shared={"w": torch.zeros(4), "n": torch.zeros(1, dtype=torch.int64)})


def update(length, steps=1, memory=None):
    shared = {"w": torch.full((4,), length / 2), "n": torch.ones(1, dtype=torch.int64)}
    rules = () if memory is None else ({"c": torch.tensor([memory])},)
    return Update(shared=shared, memory=rules, weight=1.0, steps=steps)


@pytest.mark.parametrize(
    ("rounds", "outliers"),
    [
        ([{"a": 1.0, "b": 2.0, "c": 21.0}], {"c": 21 / 2}),
        ([{"a": 1.0, "b": 2.0, "c": 19.0}], {}),
        ([{"a": 2.0, "b": 2.0, "c": 1e-6}], {}),  # the tiny one must not make the two others stand out
        ([{"a": 1.0, "b": 1e30, "c": 1e30}], {}),  # two of three decide
        ([{"a": 1.0, "b": 1.0, "c": float("inf")}], {"c": float("inf")}),
        ([{"a": 1.0, "b": 21.0}], {"b": 21.0}),
        ([{"a": 1.0}, {"a": 9.0}], {}),  # alone: 9 times its own
        ([{"a": 1.0}, {"a": 9.0}, {"a": 91.0}], {"a": 91 / 9}),
        ([{"a": 1.0, "b": 2.0, "c": 0.5}, {"c": 19.0}], {}),  # alone: as long as others' were
        ([{"a": 1.0, "b": 2.0}, {"a": 0.1, "b": 0.01}, {"a": 1.0, "b": 0.01}], {}),  # it grows again
        ([{"a": 1.0, "b": 2.0}, {"a": 0.1, "b": 0.01}, {"a": 21.0, "b": 0.01}], {"a": 21 / 2}),
        ([{"a": 1.0, "b": 1.0, "c": 99.0}, {"a": 0.5, "b": 1.0, "c": 11.0}], {"c": 11.0}),  # no outlier is remembered
        ([{"a": 1.0, "b": 99.0}, {"a": 50.0}], {"a": 50.0}),  # nor does it excuse another later
        ([{"a": (1.51, 200), "b": (0.14, 2), "c": (0.13, 2)}], {}),  # a large site, which takes more steps
        ([{"a": (30.0, 200), "b": (0.14, 2), "c": (0.13, 2)}], {}),
        ([{"a": (150.0, 200), "b": (0.14, 2), "c": (0.13, 2)}], {"a": 150 / 200 / 0.07}),
        ([{"a": (0.14, 200), "b": (1.4, 2), "c": (1.4, 2)}], {}),  # a small site next to large ones
        ([{"a": (1.0, 1, 1e20), "b": (1.0, 1, 1.0), "c": (1.0, 1, 2.0)}], {"a": 1e20 / 2}),  # a rule's upload
    ],
)
def test_an_update_is_compared_with_the_longest_of_others_in_all_and_per_step(rounds, outliers):
    lengths = UpdateLengths(10.0)
    for some in rounds:
        sent = {name: update(*(each if isinstance(each, tuple) else (each,))) for name, each in some.items()}
        found = lengths.find_outliers(SERVER, sent)
        lengths = UpdateLengths(10.0, json.loads(json.dumps(lengths.longest)))  # as restored from a checkpoint
    assert found == pytest.approx(outliers)


def test_without_a_bound_nothing_is_left_out():
    assert UpdateLengths(0).find_outliers(SERVER, {"a": update(1.0), "b": update(1e30)}) == {}


@pytest.mark.parametrize("method", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_a_hospital_a_hundred_times_as_large_as_others_counts_in_full_as_in_one_process(method, tmp_path):
    (tmp_path / "data").mkdir()
    for seed, (name, count) in enumerate({"large": 400, "east": 8, "west": 8}.items()):
        y, random = np.arange(count) % 2, np.random.default_rng(seed)
        x = (random.normal(size=(count, 6)) + y[:, None]).astype(np.float32)
        np.savez(tmp_path / "data" / f"{name}.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    spec = RunSpec(data=str(tmp_path / "data"), method=method, model="linear", rounds=2, batch_size=4, evaluate_every=2)
    heard = serve(spec, tmp_path, sites_at(tmp_path / "data", tmp_path))
    assert heard.took_part == [("east", "large", "west")] * 2
    assert not [text for text in heard.notices if "left out" in text or "weighs" in text]
    same_as_in_process(spec, tmp_path / "served")


@pytest.mark.parametrize(("max_share", "share"), [(0.5, 1 / 2), (0.25, 1 / 3), (None, CLAIMED / (CLAIMED + 48))])
def test_a_site_that_claims_many_samples_decides_alone_unless_weights_are_bounded(max_share, share, tmp_path):
    def tamper(node, question, answer):
        if question.kind == "describe" and node == PHOTO:
            samples = {**answer.facts["samples"], "train": CLAIMED}
            return replace(answer, facts={**answer.facts, "samples": samples})
        if question.kind != "train":
            return answer
        state = from_record(answer.arrays["shared"])
        state[WEIGHT].fill_(1000.0 if node == PHOTO else 0.0)
        facts = answer.facts | ({"weight": float(CLAIMED), "steps": CLAIMED // BATCH} if node == PHOTO else {})
        return replace(answer, facts=facts, arrays={**answer.arrays, "shared": to_record(state)})

    spec = spec_for("fedavg", model=NETWORK, rounds=1, batch_size=BATCH)
    order = {} if max_share is None else {"max_share": max_share}
    heard = serve(spec, tmp_path, tamper=tamper, update_bound=0, **order)
    (file,) = tmp_path.glob("served/trials/*/checkpoint.safetensors")
    found = load_checkpoint(file)[0][f"server/shared/{WEIGHT}"]
    assert found.unique().tolist() == pytest.approx([1000 * share])
    counts = {0.5: "48", 0.25: "24"}
    assert [text for text in heard.notices if "weighs" in text] == [
        f"in averages weighted by samples, photo weighs {counts[bound]} in place of 400000 (--max-share {bound:g})"
        for bound in order.values()
    ]


def test_only_weights_that_are_bounded_are_told():
    assert not describe_bound({"a": 100, "b": 120, "c": 130}, 0.5)
    assert not describe_bound({"a": 1, "b": 90}, 0.5)
    assert not describe_bound({"a": 4000, "b": 500, "c": 500}, 1.0)
    assert "large weighs 1000 in place of 4000" in describe_bound({"large": 4000, "b": 500, "c": 500}, 0.5)
