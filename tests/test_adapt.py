"""``fedshift adapt``: a run's models brought to clients that it never saw, against what the run itself says of them."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from fedshift.adaptation.policies import AS_IT_IS, measured_on, models, needs, policies_of
from fedshift.adaptation.site import site, unlabeled
from fedshift.adaptation.tables import differences, over_seeds, seed_table
from fedshift.base.errors import FedshiftError, UsageError
from fedshift.base.state import equal
from fedshift.build import methods
from fedshift.config import RunSpec
from fedshift.data.federation import federation
from fedshift.data.split import IMAGENET, UNIT
from fedshift.records import measured, read_rows
from fedshift.settings import Settings
from fedshift.trained import experiment_in, restored
from fedshift.trial import Trial

ROOT = Path(__file__).parents[1]
POLICIES = ["average", "reestimate", "nearest", "finetune"]
LEFT = {"rounds": 2, "newcomers": "cid"}


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(make, tmp_path):
    """A run of three methods on two of the tiny clients, in its directory."""
    make(methods="fedavg,fedbn,fedwon", **LEFT).run(tmp_path / "run")
    return tmp_path / "run"


def shot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def pictures(folder, sizes, shade=0, mode="RGB", **options):
    """Images in ``folder``/<class>/ (or in it, where the class is ""), ``sizes``: class -> number."""
    random = np.random.default_rng(3)
    for category, count in sizes.items():
        (folder / category).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = random.integers(shade, 200, (8, 8, 3) if mode == "RGB" else (8, 8)).astype(np.uint8)
            image = Image.fromarray(pixels).resize(options.get("size", (8, 8)), Image.Resampling.NEAREST)
            image.save(folder / category / f"{number}.png")


# What a policy gives is what the run itself would have measured


def test_the_models_are_those_of_a_run_with_the_client_as_newcomer_bit_for_bit(make, run, tiny_folder, tmp_path):
    spec, experiment = experiment_in(run)
    new = site(str(tiny_folder), spec, experiment.data, "cid").client("cid")
    trial = restored(experiment, run, "fedbn", 0)
    found = {model.policy: model for model in models(trial, {"cid": new.train}, POLICIES)}
    for policy in POLICIES:
        within, folder = make(methods="fedbn", unseen=policy, evaluate_every=2, **LEFT), tmp_path / policy
        within.run(folder)
        assert equal(found[policy].state, restored(within, folder, "fedbn", 0).state_of("cid"))
        rows = read_rows(folder / "trials" / "fedbn-seed0" / "metrics.jsonl")
        row = next(row for row in rows if (row["client"], row["split"]) == ("cid", "test"))
        counted = measured_on(trial, found[policy], new)
        assert {key: counted[key] for key in ("hits", "support", "loss_sum", "samples", "auc")}.items() <= row.items()


def test_the_command_prints_every_policy_of_every_method_and_changes_nothing_of_the_run(cli, run, tiny_folder):
    before = shot(run)
    outcome = cli("adapt", run, "--data", tiny_folder, "--clients", "c*")
    assert (outcome.code, outcome.err) == (0, "")
    assert shot(run) == before
    lines = [line.split() for line in outcome.out.splitlines()]
    titles = [" ".join(line[:2]) for line in lines if line and line[0] in ("fedavg:", "fedbn:", "fedwon:")]
    assert titles == ["fedavg: as", "fedavg: reestimate", "fedavg: finetune", *(f"fedbn: {p}" for p in POLICIES),
                      "fedwon: as", "fedwon: finetune"]  # fmt: skip
    rows = read_rows(run / "trials" / "fedavg-seed0" / "metrics.jsonl")
    row = next(row for row in rows[::-1] if (row["client"], row["split"]) == ("cid", "test"))
    share = 100 * sum(row["hits"]) / sum(row["support"])
    as_it_is = next(line for line in lines if line[:2] == ["fedavg:", "as"])
    assert as_it_is[4:] == ["nothing", f"{share:.2f}"]
    assert "inputs: the new client's training inputs, without labels; labels: its" in outcome.out
    assert "not unknown" not in outcome.out


def test_a_client_whose_samples_the_run_has_is_called_known(cli, run, tiny_folder):
    outcome = cli("adapt", run, "--data", tiny_folder, "--policies", "average")
    assert "note: client 'ann' is not unknown: the run has its samples, as client 'ann'" in outcome.out
    assert "client 'cid' is not" not in outcome.out
    assert "reestimate" not in outcome.out.replace("--", "")


def test_more_rounds_of_finetuning_and_each_seed(cli, make, tiny_folder, tmp_path):
    make(methods="fedbn", seeds=2, first_seed=3, **LEFT).run(tmp_path / "run")
    spec, experiment = experiment_in(tmp_path / "run")
    new = site(str(tiny_folder), spec, experiment.data, "cid").client("cid")
    assert experiment.seeds == (3, 4)
    trial = restored(experiment, tmp_path / "run", "fedbn", 4)
    one, two = (next(models(trial, {"cid": new.train}, ["finetune"], rounds=rounds)) for rounds in (1, 2))
    assert (one.seed, one.title, one.client) == (4, "fedbn: finetune", "cid")
    assert not torch.equal(one.state["conv1.weight"], two.state["conv1.weight"])
    outcome = cli(
        "adapt", tmp_path / "run", "--data", tiny_folder, "--clients", "cid", "--rounds", 2, "--save", "saved"
    )
    assert "mean (std) over 2 seeds" in outcome.out
    assert "finetune: 2 rounds" in outcome.out
    first = next(models(restored(experiment, tmp_path / "run", "fedbn", 3), {"cid": new.train}, ["finetune"], rounds=2))
    assert equal(load_file(tmp_path / "saved" / "fedbn" / "finetune" / "cid.safetensors"), first.state)
    table = pd.read_csv(tmp_path / "saved" / "accuracy.csv", index_col=0)
    assert list(table.index) == ["cid", "macro"]
    assert table["fedbn: average seeds"].tolist() == [2, 2]


def test_the_best_round_is_adapted_where_the_run_reports_it(make, tiny_folder, tmp_path):
    experiment = make(methods="fedbn", validation=0.2, select="best", evaluate_every=1, lr=0.5, rounds=4)
    experiment.run(tmp_path / "run")
    _, again = experiment_in(tmp_path / "run")
    best = restored(again, tmp_path / "run", "fedbn", 0)
    last = replace(again, settings=replace(again.settings, select="last"))
    with pytest.raises(UsageError, match="another select"):
        restored(last, tmp_path / "run", "fedbn", 0)
    rows = read_rows(tmp_path / "run" / "trials" / "fedbn-seed0" / "metrics.jsonl")
    frame = pd.DataFrame([row for row in rows if row["split"] == "validation"])
    means = frame.assign(value=measured(frame, "accuracy")).groupby("round")["value"].mean()
    assert best.server.round == means.idxmax()


# What policies make sense, and what they need


@pytest.mark.parametrize(
    ("method", "policies", "wants"),
    [
        ("fedavg", (AS_IT_IS, "reestimate", "finetune"), ("", "inputs", "labels")),
        ("fedwon", (AS_IT_IS, "finetune"), ("", "labels")),
        ("fedbn", POLICIES, ("entries", "inputs, entries", "labels, entries", "labels, entries")),
        ("silobn", POLICIES, ("entries", "inputs", "labels, entries", "labels, entries")),
        ("ditto", POLICIES, ("", "inputs", "labels, entries", "labels")),
        ("fedper+gn", ("average", "nearest", "finetune"), ("entries", "labels, entries", "labels, entries")),
    ],
)
def test_policies_that_make_sense_and_what_they_need(tiny, method, policies, wants):
    from fedshift.models.digits import small_cnn

    plan = Trial(methods(method)[0], small_cnn, tiny, Settings(rounds=1), 0).plan
    assert policies_of(plan, POLICIES) == tuple(policies)
    assert tuple(", ".join(needs(plan, policy)) for policy in policies) == wants


def test_tables_are_means_over_seeds_and_pairs_are_clients():
    right = {("fedavg: as it is", 0): (4, 6), ("fedavg: as it is", 1): (6, 2), ("fedbn: average", 0): (9, 7),
             ("fedbn: average", 1): (7, 9)}  # fmt: skip
    rows = [
        {"title": title, "seed": seed, "client": client, "samples": 10, "loss_sum": 1.0, "auc": None,
         "hits": [hits, 0], "support": [5, 5]}
        for (title, seed), values in right.items()
        for client, hits in zip(("zoe", "ann"), values, strict=True)
    ]  # fmt: skip
    seeds = seed_table(rows, "accuracy")
    table = over_seeds(seeds)
    assert list(table.index) == ["zoe", "ann", "macro"]
    assert table["fedavg: as it is", "mean"].tolist() == pytest.approx([0.5, 0.4, 0.45])
    assert table["fedavg: as it is", "std"].tolist() == pytest.approx(
        [np.std([0.4, 0.6], ddof=1), np.std([0.6, 0.2], ddof=1), np.std([0.5, 0.4], ddof=1)]
    )
    gap = differences(seeds).loc["fedbn: average"]
    assert (gap["difference"], gap["seeds"], gap["std"]) == pytest.approx((0.35, 2, np.std([0.3, 0.4], ddof=1)))
    alone = differences(seeds.loc[["zoe"]]).loc["fedbn: average"]
    assert (alone["difference"], alone["seeds"], alone["std"]) == pytest.approx((0.3, 2, np.std([0.5, 0.1], ddof=1)))


# The new site's data


def test_a_site_is_brought_to_the_runs_size_channels_scale_and_classes(tiny, tmp_path):
    run = replace(tiny, class_names=("cat", "dog", "owl"), classes=3).normalized(IMAGENET)
    pictures(tmp_path / "new" / "north", {"dog": 5, "owl": 5}, mode="L", size=(16, 16))
    new = site(str(tmp_path / "new"), RunSpec(data="elsewhere", samples=3, domains="ann"), run)
    north = new.client("north")
    assert (new.sample_shape, new.classes, new.class_names) == ((3, 8, 8), 3, ("cat", "dog", "owl"))
    assert sorted(set(north.train.y.tolist())) == [1, 2]
    assert north.train.normalization == IMAGENET
    assert torch.equal(north.train.x[:, 0], north.train.x[:, 2])
    own = site(str(tmp_path / "new"), RunSpec(normalize="unit"), run.normalized(UNIT)).client("north")
    assert own.train.normalization == UNIT
    alone = site(str(tmp_path / "new"), RunSpec(normalize="client"), run).client("north").train
    assert alone.inputs(slice(None)).mean((0, 2, 3)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"class_names": ("cat", "dog", "owl")}, "new has a class 'yak', which the run's data, tiny, have not: theirs"),
        ({"classes": 1}, "new has labels up to 1, but the run's data, tiny, have 1 classes"),
    ],
)
def test_classes_that_the_run_has_not_are_refused_naming_both(tiny, tmp_path, changed, said):
    pictures(tmp_path / "new" / "north", {"dog": 5, "yak": 5})
    with pytest.raises(UsageError, match=re.escape(said)):
        site(str(tmp_path / "new"), RunSpec(), replace(tiny, **changed))


def test_samples_of_another_shape_are_refused_naming_both(tiny, tmp_path):
    random = np.random.default_rng(0)
    rows = random.normal(size=(6, 4)), np.arange(6) % 2
    run = federation({"a": (*rows, *rows)}, name="a table")
    (tmp_path / "new").mkdir()
    x = random.normal(size=(6, 5))
    np.savez(tmp_path / "new" / "north.npz", x_train=x, y_train=rows[1], x_test=x, y_test=rows[1])
    said = r"new, client 'north', train data: samples of shape \(5,\), but the run was trained on a table with samples"
    with pytest.raises(UsageError, match=said):
        site(str(tmp_path / "new"), RunSpec(), run)
    with pytest.raises(UsageError, match=r"shape \(5,\), .* on tiny with samples of shape \(3, 8, 8\)"):
        site(str(tmp_path / "new"), RunSpec(), tiny)


# Data without labels


def test_statistics_from_unlabeled_data_are_those_from_the_same_data_with_labels(cli, run, tiny_folder, tmp_path):
    with np.load(tiny_folder / "cid.npz") as packed:
        np.savez(tmp_path / "scans.npz", x=packed["x_train"])
    assert cli("adapt", run, "--unlabeled", "scans.npz", "--save", "without").code == 0
    assert cli("adapt", run, "--data", tiny_folder, "--clients", "cid", "--save", "with").code == 0
    made = {path.relative_to(tmp_path / "without").as_posix() for path in (tmp_path / "without").rglob("*.safetensors")}
    assert made == {
        f"{kind}/scans.safetensors"
        for kind in ("fedavg/as-it-is", "fedavg/reestimate", "fedbn/average", "fedbn/reestimate", "fedwon/as-it-is")
    }
    for name in ("fedavg/reestimate", "fedbn/reestimate"):
        one, other = (load_file(tmp_path / kind / name / f"{client}.safetensors")
                      for kind, client in (("without", "scans"), ("with", "cid")))  # fmt: skip
        assert equal(one, other)
    assert not list((tmp_path / "without").glob("*.csv"))


def test_unlabeled_data_take_the_place_of_the_clients_own_for_reestimate_alone(run, tiny_folder, tmp_path):
    _, experiment = experiment_in(run)
    ann, cid = (experiment.data.client(name).train for name in ("ann", "cid"))
    trial = restored(experiment, run, "fedbn", 0)
    plain = {model.policy: model.state for model in models(trial, {"ann": ann}, POLICIES)}
    given = {model.policy: model.state for model in models(trial, {"ann": ann}, POLICIES, inputs=cid)}
    of_cid = next(models(trial, {"cid": cid}, ["reestimate"])).state
    assert equal(given["reestimate"], of_cid)
    assert not equal(given["reestimate"], plain["reestimate"])
    assert all(equal(given[name], plain[name]) for name in ("average", "nearest", "finetune"))


@pytest.mark.parametrize(("mode", "size"), [("RGB", (8, 8)), ("L", (8, 8)), ("RGB", (20, 20))])
def test_a_flat_folder_is_read_as_class_folders_are(tiny, tmp_path, mode, size):
    pictures(tmp_path / "tree" / "north" / "train", {"0": 7}, mode=mode, size=size)
    pictures(tmp_path / "tree" / "north" / "test", {"0": 1}, mode=mode, size=size)
    pictures(tmp_path / "flat", {"": 7}, mode=mode, size=size)
    with_labels = site(str(tmp_path / "tree"), RunSpec(), tiny).client("north").train
    without = unlabeled(tmp_path / "flat", RunSpec(), tiny)
    assert torch.equal(without.inputs(slice(None)), with_labels.inputs(slice(None)))
    again = unlabeled(tmp_path / "flat", RunSpec(), tiny)  # from the cache
    assert torch.equal(again.x, without.x)


def test_broken_images_of_a_flat_folder_are_refused_or_skipped(tiny, tmp_path):
    pictures(tmp_path / "flat", {"": 4})
    (tmp_path / "flat" / "2.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"1 of 4 images in .*flat cannot be read: 2\.png: is no image"):
        unlabeled(tmp_path / "flat", RunSpec(), tiny)
    assert len(unlabeled(tmp_path / "flat", RunSpec(broken="skip"), tiny)) == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty", "holds no image (.bmp,"),
        ("nowhere", "is no folder: give a folder in which images lie side by side, or an .npz file with an array x"),
        ("y.npz", "has no array 'x' (it has y)"),
        ("broken.npz", "cannot be read as arrays"),
        ("wide.npz", "samples of shape (5,), but the run was trained on tiny with samples of shape (3, 8, 8)"),
    ],
)
def test_unlabeled_data_that_cannot_be_used_are_refused(tiny, tmp_path, name, said):
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "y.npz", y=np.zeros(3))
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 5)))
    (tmp_path / "broken.npz").write_bytes(b"PK but no more")
    with pytest.raises(UsageError, match=re.escape(said)):
        unlabeled(tmp_path / name, RunSpec(), tiny)


# Models as files


def test_saved_models_say_whose_they_are_and_load_as_the_page_says(cli, run, tiny_folder, tmp_path, monkeypatch):
    assert cli("adapt", run, "--data", tiny_folder, "--clients", "cid", "--save", "adapted").code == 0
    file = tmp_path / "adapted" / "fedbn" / "reestimate" / "cid.safetensors"
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"method": "fedbn", "policy": "reestimate", "client": "cid", "seed": "0"}
    text, page = (ROOT / "docs" / "new-clients.md").read_text(), {}
    exec(next(body for body in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "def model_in" in body), page)
    network = page["model_in"](file, (3, 8, 8), 3)
    assert not network.training
    state = load_file(file)
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())


# What is refused


REFUSED = [
    (["run"], "there is nothing to adapt to: give --data, or --unlabeled with --save"),
    (["run", "--unlabeled", "x.npz"], "--unlabeled alone measures nothing: say where its models go (--save)"),
    (["run", "--unlabeled", "x.npz", "--save", "s", "--policies", "finetune"], "policy 'finetune' needs labels"),
    (["run", "--unlabeled", "x.npz", "--save", "s", "--clients", "a"], "--clients a chooses among the clients of"),
    (["run", "--data", "tiny", "--policies", "avrage"], "unknown policy for new clients 'avrage': did you mean"),
    (["run", "--data", "tiny", "--rounds", "0"], "rounds=0: must be at least 1"),
    (["run", "--data", "tiny", "--clients", "dan"], "unknown domain 'dan'"),
    (["run", "--data", "tiny", "--save", "tiny"], "tiny holds other files: choose a directory that is new"),
    (["tiny", "--data", "tiny"], "tiny holds no run: give a directory that `fedshift run` or `compare` wrote"),
    ([".", "--data", "tiny"], "holds no run: give a directory that `fedshift run` or `compare` wrote, such as run"),
]


def test_what_makes_no_sense_is_one_message(cli, run):
    for words, said in REFUSED:
        outcome = cli("adapt", *words)
        assert (outcome.code, outcome.out) == (2, "")
        assert said in outcome.err


def test_a_run_from_python_and_one_that_did_no_round_cannot_be_adapted(cli, make, tiny_folder, tmp_path):
    experiment = make(rounds=2)
    replace(experiment, config={}).run(tmp_path / "python")
    outcome = cli("adapt", "python", "--data", "tiny")
    assert (outcome.code, "does not say on which data it was run" in outcome.err) == (2, True)
    trial = Trial(experiment.methods[0], experiment.model, experiment.data, experiment.settings, 0)
    with pytest.raises(FedshiftError, match="fedbn, seed 0, has done no round: go on with the run first"):
        next(models(trial, {"cid": experiment.data.client("cid").train}, POLICIES))


def test_where_finetuning_diverges_the_others_are_told(make):
    experiment = make(lr=1e20, rounds=1)
    trial = Trial(experiment.methods[0], experiment.model, experiment.data, experiment.settings, 0)
    trial.server = replace(trial.server, round=1)
    trial.clients.put({"ann": replace(trial.clients["ann"], steps=4)})
    said = []
    made = [model.policy for model in models(trial, {"cid": experiment.data.client("cid").train}, POLICIES, say=said)]
    assert made == ["average", "reestimate", "nearest"]
    assert said[0].startswith("fedbn, seed 0: training diverged: client 'cid'")
