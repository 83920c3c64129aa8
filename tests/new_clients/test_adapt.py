"""``fedshift adapt``: a run's models for clients that it never saw, against the run's own measurements."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import copytree

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from scipy import stats

import fedshift
from fedshift.analysis.influence import find_influence
from fedshift.core.network import forward
from fedshift.data.assembly import federation
from fedshift.data.samples import Samples
from fedshift.evaluation.policy import parse_policies
from fedshift.experiments.restoration import load_experiment, restore_trial, select_trials
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.new_clients.policies import (
    UNCHANGED,
    applicable_policies,
    describe_needs,
    evaluate_model,
    make_models,
)
from fedshift.new_clients.policy_tables import (
    find_plain_choice,
    format_differences,
    mean_over_seeds,
    policy_differences,
    recommend,
    seed_table,
)
from fedshift.new_clients.site_data import describe_splits, find_overlap, load_site
from fedshift.results.schema import REESTIMATED, RUNNING, compute_metric, read_rows
from fedshift.utils.errors import FedshiftError, UsageError
from fedshift.utils.state import is_equal
from tests.conftest import ARRAYS, change_settings, write_npz

POLICIES = parse_policies(None)
LEFT = {"rounds": 2, "newcomers": "cid"}
BOTH, ENTRIES = "inputs, entries", "labels, entries"


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def no_onnx(monkeypatch):
    """Converting takes most of the time, and is tested elsewhere."""
    monkeypatch.setattr("fedshift.export.package.save_onnx", lambda *_, **__: "not here")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def run(make, kept, tiny_folder, tmp_path):
    """Run of three methods on two of the tiny clients, trained once, in a separate directory."""
    if not kept.exists():
        make(methods="fedavg,fedbn,fedwon", **LEFT).run(kept)
    copytree(kept, tmp_path / "run")
    change_settings(tmp_path / "run", data=str(tiny_folder))
    return tmp_path / "run"


def shot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# What a policy gives is what the run itself would have measured


@pytest.mark.slow
def test_the_models_are_those_of_a_run_with_the_client_as_newcomer_bit_for_bit(make, run, tiny_folder, tmp_path):
    spec, experiment = load_experiment(run)
    new = load_site(str(tiny_folder), spec, experiment.data.schema, "cid").client("cid")
    trial = restore_trial(experiment, run, "fedbn", 0)
    found = {model.policy: model for model in make_models(trial, {"cid": new.train}, POLICIES)}
    for policy in POLICIES:
        within, folder = make(methods="fedbn", unseen=policy, evaluate_every=2, **LEFT), tmp_path / policy
        within.run(folder)
        assert is_equal(found[policy].state, restore_trial(within, folder, "fedbn", 0).model_state("cid"))
        rows = read_rows(folder / "trials" / "fedbn-seed0" / "metrics.jsonl")
        row = next(row for row in rows if (row["client"], row["split"]) == ("cid", "test"))
        counted = evaluate_model(trial, found[policy], new)
        assert {key: counted[key] for key in ("hits", "support", "loss_sum", "samples", "auc")}.items() <= row.items()


def test_policies_start_from_the_global_model_with_the_statistics_that_are_reported(run, tiny):
    _, experiment = load_experiment(run)
    trial, train = restore_trial(experiment, run, "fedavg", 0), {"cid": tiny.client("cid").train}
    trial.statistics = RUNNING
    running = next(make_models(trial, train, [])).state
    trial.statistics = REESTIMATED
    (unchanged,) = make_models(trial, train, [])
    assert is_equal(unchanged.state, trial.model_state())
    assert all("running_" in name for name in running if not torch.equal(running[name], unchanged.state[name]))
    assert not is_equal(unchanged.state, running)


def test_the_command_prints_every_policy_of_every_method_and_changes_nothing_of_the_run(cli, run, tiny_folder):
    before = shot(run)
    outcome = cli("adapt", run, "--data", tiny_folder, "--clients", "c*")
    assert (outcome.code, outcome.err) == (0, "")
    assert shot(run) == before
    lines = [line.split() for line in outcome.out.splitlines()]
    titles = [" ".join(line[:2]) for line in lines if line and line[0] in ("fedavg:", "fedbn:", "fedwon:")]
    of_fedavg = [f"fedavg: {name}" for name in ("global", "mixed", "reestimate", "tent", "finetune", "finetune_bn")]
    assert titles == [*of_fedavg, *(f"fedbn: {p}" for p in POLICIES), "fedwon: global", "fedwon: finetune"]
    rows = read_rows(run / "trials" / "fedavg-seed0" / "metrics.jsonl")
    row = next(row for row in rows[::-1] if (row["client"], row["split"]) == ("cid", "test"))
    share = 100 * sum(row["hits"]) / sum(row["support"])
    unchanged = next(line for line in lines if line[:2] == ["fedavg:", "global"])
    assert unchanged[3:] == ["nothing", f"{share:.2f}"]
    assert "inputs: the new client's training inputs, without labels; labels: its" in outcome.out
    assert "not unknown" not in outcome.out


def test_a_client_whose_samples_the_run_has_is_called_known(cli, run, tiny_folder):
    outcome = cli("adapt", run, "--data", tiny_folder, "--policies", "average")
    assert "note: client 'ann' is not unknown: the run has its samples, as client 'ann'" in outcome.out
    assert "client 'cid' is not" not in outcome.out
    assert "reestimate" not in outcome.out.replace("--", "")


def test_a_new_client_on_another_scale_has_a_warning_before_its_results(cli, run, tmp_path):
    (tmp_path / "far").mkdir()
    x_train, y_train, x_test, y_test = ARRAYS["cid"]
    write_npz(tmp_path / "far" / "cid.npz", x_train=x_train // 32, y_train=y_train, x_test=x_test // 32, y_test=y_test)
    outcome = cli("adapt", run, "--data", tmp_path / "far", "--policies", "average")
    said = outcome.out.index("note: client 'cid': values are far from the training data's: channel 0: about")
    assert said < outcome.out.index("Test accuracy")
    assert "times smaller" in outcome.out


def test_samples_that_the_run_has_are_counted_whatever_part_they_were_in_and_label_they_have(run, tiny):
    _, experiment = load_experiment(run)
    ann, cid = tiny.client("ann"), tiny.client("cid")
    halves = [torch.cat([split.x[:6], other.x[:6]]) for split, other in ((ann.test, cid.test), (ann.train, cid.train))]
    mixed = federation({"new": (halves[0].numpy(), np.zeros(12, int), halves[1].numpy(), np.arange(12) % 2)})
    assert find_overlap(mixed, experiment) == [
        "client 'new' is not unknown: the run has 12 of its 24 samples, as client 'ann'"
    ]


@pytest.mark.slow
def test_policies_that_make_no_sense_are_told_by_method_and_one_named_twice_counts_once(cli, run, tiny_folder):
    words = ("adapt", run, "--data", tiny_folder, "--clients", "cid", "--policies")
    said = cli(*words, "nearest, reestimate,nearest").out
    assert "note: nearest: the one global model, shown unchanged, under fedavg, fedwon\n" in said
    assert "note: reestimate: there are no BatchNorm statistics under fedwon\n" in said
    assert said.count("fedbn: nearest") == 1
    assert "note: finetune_bn: there is no BatchNorm to train under fedwon\n" in cli(*words, "finetune_bn").out
    assert "note" not in cli(*words, "finetune").out


@pytest.mark.slow
def test_some_of_the_methods_and_seeds_alone(cli, make, tiny_folder, tmp_path):
    make(methods="fedbn,fedprox(mu=0.1),gn", seeds=2, **{**LEFT, "rounds": 1}).run(tmp_path / "run")
    words = ("adapt", tmp_path / "run", "--data", tiny_folder, "--clients", "cid", "--policies", "average")
    lines = cli(*words, "--methods", "fedprox*,gn", "--seeds", 1, "--save", "saved").out.splitlines()
    assert lines[1] == "Test accuracy in percent of new clients, one seed, last round"
    titles = [line.split()[0] for line in lines[2:] if "global model  " in line]
    assert titles == ["fedprox(mu=0.1):", "gn:"]
    assert [path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()] == ["cid"]
    assert "mean (std) over 2 seeds" in cli(*words, "--methods", "fedprox(mu=0.1)").out
    for asked, said in (
        (("--methods", "fedbm"), "unknown method 'fedbm': did you mean 'fedbn'? allowed are fedavg+gn, fedbn, fedprox"),
        (("--methods", "fedavg"), "unknown method 'fedavg': did you mean 'fedavg+gn'?"),
        (("--seeds", 3), "--seeds 3: the run has 2; give a number from 1 to that"),
    ):
        outcome = cli(*words, *asked)
        assert (outcome.code, said in outcome.err) == (2, True), outcome.err


def test_a_method_is_found_as_it_was_given_whatever_is_in_its_brackets(make):
    given = "fedprox(fedavg(weighting='uniform'), mu=0.1)"
    whole = make(methods=f"{given},fedbn,gn")
    assert [method.name for method in select_trials(whole, f"{given}, gn").methods] == [
        method.name for method in whole.methods[::2]
    ]


def test_a_run_of_a_device_that_is_not_here_is_adapted_on_the_processor_and_that_is_said(cli, run, tiny_folder):
    words = ("adapt", run, "--data", tiny_folder, "--clients", "cid", "--policies", "average", "--methods", "fedbn")
    plain = cli(*words).out
    change_settings(run, device="cuda:99")
    said = "note: the run was made on cuda:99, which cannot be used here: computed on cpu (--device)\n"
    assert cli(*words).out == plain + said
    assert cli(*words, "--device", "cpu").out == plain
    outcome = cli(*words, "--device", "cuda:99")
    assert (outcome.code, outcome.err.startswith("fedshift: device 'cuda:99' cannot be used here")) == (2, True)


@pytest.mark.slow
def test_a_trial_that_is_damaged_or_not_there_stops_no_other(cli, run, tiny_folder):
    words = ("adapt", run, "--data", tiny_folder, "--clients", "cid", "--policies", "average")
    checkpoint = run / "trials" / "fedbn-seed0" / "checkpoint.safetensors"
    whole = checkpoint.read_bytes()
    (states,) = checkpoint.parent.glob("*.states")
    flipped = bytearray(kept := states.read_bytes())
    flipped[len(kept) // 2] ^= 255
    for file, damaged, said in (
        (states, bytes(flipped), "is corrupt: what it holds of client"),
        (checkpoint, whole[:-9], "is corrupt or truncated"),
        (checkpoint, whole.replace(rb"\"format\": 6", rb"\"format\": 3"), "was written by another version of fedshift"),
        (checkpoint, None, "no checkpoint at"),
    ):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        outcome = cli(*words)
        assert (outcome.code, said in outcome.err) == (1, True), outcome.err
        assert outcome.err.startswith("fedshift: fedbn, seed 0, is left out: ")
        assert [f"{method}: global model" in outcome.out for method in ("fedavg", "fedwon")] == [True, True]
        states.write_bytes(kept)
    (run / "config.toml").unlink()
    assert "config.toml is missing, which records what was run: restore" in cli(*words).err


def test_rounds_that_a_run_has_not_done_are_told(cli, run, tiny_folder):
    change_settings(run, rounds=5)
    outcome = cli("adapt", run, "--data", tiny_folder, "--policies", "average", "--methods", "fedbn")
    assert "note: fedbn, seed 0: 2 of 5 rounds are done" in outcome.out
    partial = outcome.out.index("PARTIAL: 5 rounds were asked for, and so far fedbn has reached round 2.\n")
    assert partial < outcome.out.index("Test accuracy")


def test_a_client_of_one_sample_lacks_what_needs_several_and_the_others_have_it(run, tiny):
    _, experiment = load_experiment(run)
    trial, said = restore_trial(experiment, run, "fedbn", 0), []
    training = {"lone": tiny.client("cid").train.take(torch.tensor([0])), "cid": tiny.client("cid").train}
    made = {(model.client, model.policy) for model in make_models(trial, training, POLICIES, notices=said)}
    those = ("average", "nearest")
    assert made == {*(("lone", policy) for policy in those), *(("cid", policy) for policy in POLICIES)}
    assert said == [
        "client 'lone': one sample has no variance to normalize by, so without mixed, reestimate, tent, finetune, "
        "finetune_bn"
    ]
    with pytest.raises(UsageError, match="client 'lone' has one training sample"):
        next(make_models(trial, training, POLICIES))


@pytest.mark.slow
def test_more_rounds_of_finetuning_and_each_seed(cli, make, tiny_folder, tmp_path):
    make(methods="fedbn", seeds="3,4", **LEFT).run(tmp_path / "run")
    spec, experiment = load_experiment(tmp_path / "run")
    new = load_site(str(tiny_folder), spec, experiment.data.schema, "cid").client("cid")
    assert experiment.seeds == (3, 4)
    trial = restore_trial(experiment, tmp_path / "run", "fedbn", 4)
    one, two = (next(make_models(trial, {"cid": new.train}, ["finetune"], rounds=rounds)) for rounds in (1, 2))
    assert (one.seed, one.title, one.client) == (4, "fedbn: finetune", "cid")
    assert not torch.equal(one.state["conv1.weight"], two.state["conv1.weight"])
    saving = ("--rounds", 2, "--save", "saved", "--policy", "finetune")
    outcome = cli("adapt", tmp_path / "run", "--data", tiny_folder, "--clients", "cid", *saving)
    assert "mean (std) over 2 seeds" in outcome.out
    assert "finetune and finetune_bn: 2 rounds" in outcome.out
    first = next(
        make_models(restore_trial(experiment, tmp_path / "run", "fedbn", 3), {"cid": new.train}, ["finetune"], rounds=2)
    )
    assert is_equal(load_file(tmp_path / "saved" / "cid" / "weights.safetensors"), first.state)
    table = pd.read_csv(tmp_path / "saved" / "accuracy.csv", index_col=0)
    assert list(table.index) == ["cid", "macro"]
    assert table["fedbn: average seeds"].tolist() == [2, 2]


@pytest.mark.slow
def test_the_best_round_is_adapted_where_the_run_reports_it(make, tiny_folder, tmp_path):
    experiment = make(methods="fedbn", validation=0.2, select="best", evaluate_every=1, lr=0.5, rounds=4)
    experiment.run(tmp_path / "run")
    _, again = load_experiment(tmp_path / "run")
    best = restore_trial(again, tmp_path / "run", "fedbn", 0)
    last = replace(again, settings=replace(again.settings, select="last"))
    with pytest.raises(UsageError, match="another select"):
        restore_trial(last, tmp_path / "run", "fedbn", 0)
    rows = read_rows(tmp_path / "run" / "trials" / "fedbn-seed0" / "metrics.jsonl")
    frame = pd.DataFrame([row for row in rows if row["split"] == "validation"])
    means = frame.assign(value=compute_metric(frame, "accuracy")).groupby("round")["value"].mean()
    assert best.server.round == means.idxmax()


# What policies make sense, and what they need


INPUTS = dict.fromkeys(("mixed", "reestimate", "tent"), "inputs")
LABELS = dict.fromkeys(("finetune", "finetune_bn"), "labels")


@pytest.mark.parametrize(
    ("method", "wants"),
    [
        ("fedavg", {UNCHANGED: "", **INPUTS, **LABELS}),
        ("fedwon", {UNCHANGED: "", "finetune": "labels"}),
        ("gn", {UNCHANGED: "", "tent": "inputs", "finetune": "labels"}),
        (
            "fedbn",
            {"average": "entries", **dict.fromkeys(INPUTS, BOTH), **LABELS, "finetune": ENTRIES, "nearest": ENTRIES},
        ),
        ("silobn", {"average": "entries", **INPUTS, "mixed": BOTH, **LABELS, "finetune": ENTRIES, "nearest": ENTRIES}),
        ("ditto", {"average": "", **INPUTS, **LABELS, "nearest": ENTRIES}),
        ("fedper+gn", {"average": "entries", "tent": BOTH, "finetune": ENTRIES, "nearest": ENTRIES}),
    ],
)
def test_policies_that_make_sense_and_what_they_need(tiny, method, wants):
    from fedshift.models.digits import small_cnn

    plan = Trial(METHODS.parse_all(method)[0], small_cnn, tiny, Settings(rounds=1), 0).plan
    policies = applicable_policies(plan, POLICIES, tiny.task)
    assert {policy: ", ".join(describe_needs(plan, policy)) for policy in policies} == wants


def test_what_a_policy_replaces_is_not_all_that_a_method_keeps(tiny):
    from fedshift.models.digits import small_cnn

    plan = Trial(METHODS.parse_all("fedbn+fedper")[0], small_cnn, tiny, Settings(rounds=1), 0).plan
    assert describe_needs(plan, "finetune_bn") == ("labels", "entries")


def test_tables_are_means_over_seeds_and_pairs_are_clients():
    right = {("fedavg: global model", 0): (4, 6), ("fedavg: global model", 1): (6, 2), ("fedbn: average", 0): (9, 7),
             ("fedbn: average", 1): (7, 9)}  # fmt: skip
    rows = [
        {"title": title, "seed": seed, "client": client, "samples": 10, "loss_sum": 1.0, "auc": None,
         "hits": [hits, 0], "support": [5, 5]}
        for (title, seed), values in right.items()
        for client, hits in zip(("zoe", "ann"), values, strict=True)
    ]  # fmt: skip
    seeds = seed_table(rows, "accuracy")
    table = mean_over_seeds(seeds)
    assert list(table.index) == ["zoe", "ann", "macro"]
    assert table["fedavg: global model", "mean"].tolist() == pytest.approx([0.5, 0.4, 0.45])
    assert table["fedavg: global model", "std"].tolist() == pytest.approx(
        [np.std([0.4, 0.6], ddof=1), np.std([0.6, 0.2], ddof=1), np.std([0.5, 0.4], ddof=1)]
    )
    assert find_plain_choice(["fedbn: average", "gn: global model", "fedavg: global model"]) == "fedavg: global model"
    assert find_plain_choice(["fedbn: nearest", "fedbn: average"]) == "fedbn: average"


def test_clients_that_were_left_out_stand_for_others_and_intervals_hold_together():
    titles, clients = ["fedavg: global model", "fedbn: average", "fedbn: nearest", "fedbn: tent"], list("abcde")
    columns = pd.MultiIndex.from_product([titles, [0, 1]])
    seeds = pd.DataFrame(np.random.default_rng(2).random((5, 8)) / 9, index=clients, columns=columns)
    table = policy_differences(seeds, "accuracy")
    for title in titles[1:]:
        gaps = (seeds[title] - seeds[titles[0]]).mean(axis=1)
        half = stats.sem(gaps) * stats.t.ppf(1 - 0.05 / 6, 4)
        assert tuple(table.loc[title, ["difference", "low", "high"]]) == pytest.approx(
            (gaps.mean(), gaps.mean() - half, gaps.mean() + half)
        )
    assert format_differences(table, "accuracy", 5).note.endswith("and all 3 hold together (Bonferroni).")
    few = policy_differences(seeds.loc[["a", "b"]], "accuracy")
    assert few["low"].isna().all()
    assert "So few clients cannot decide 3 comparisons" in format_differences(few, "accuracy", 2).note


# Data without labels


@pytest.mark.slow
def test_statistics_from_unlabeled_data_are_those_from_the_same_data_with_labels(cli, run, tiny_folder, tmp_path):
    with np.load(tiny_folder / "cid.npz") as packed:
        np.savez(tmp_path / "scans.npz", x=packed["x_train"])
    words = ("adapt", run, "--policy", "reestimate", "--methods", "fedbn")
    outcome = cli(*words, "--unlabeled", "scans.npz", "--save", "without")
    assert (outcome.code, "scans: 33 training samples, 0 test" in outcome.out) == (0, True), outcome.err
    assert cli(*words, "--data", tiny_folder, "--clients", "cid", "--save", "with").code == 0
    one, other = (load_file(tmp_path / place / "weights.safetensors") for place in ("without/scans", "with/cid"))
    assert is_equal(one, other)
    assert not list((tmp_path / "without").glob("*.csv"))
    assert "Nothing was measured" in (tmp_path / "without/scans/README.md").read_text()
    several = cli("adapt", run, "--policy", "reestimate", "--unlabeled", "scans.npz", "--save", "several")
    assert (several.code, "the run has the methods fedavg, fedbn, fedwon" in several.err) == (2, True)


@pytest.mark.slow
def test_unlabeled_data_take_the_place_of_the_clients_own_where_no_labels_are_needed(run, tiny_folder, tmp_path):
    _, experiment = load_experiment(run)
    ann, cid = (experiment.data.client(name).train for name in ("ann", "cid"))
    trial = restore_trial(experiment, run, "fedbn", 0)
    plain = {model.policy: model.state for model in make_models(trial, {"ann": ann}, POLICIES)}
    given = {model.policy: model.state for model in make_models(trial, {"ann": ann}, POLICIES, inputs=cid)}
    of_cid = {model.policy: model.state for model in make_models(trial, {"cid": cid}, ["reestimate", "tent"])}
    for policy, state in of_cid.items():
        assert is_equal(given[policy], state)
        assert not is_equal(given[policy], plain[policy])
    assert all(is_equal(given[name], plain[name]) for name in ("average", "nearest", "finetune"))


def test_whether_broken_images_are_skipped_is_said_of_the_new_ones(cli, run, tmp_path):
    (tmp_path / "flat").mkdir()
    for shade in (0, 90, 180):
        Image.new("RGB", (8, 8), (shade, 60, shade)).save(tmp_path / "flat" / f"{shade}.png")
    (tmp_path / "flat" / "2.png").write_bytes(b"no image")
    words = ("adapt", run, "--unlabeled", "flat", "--methods", "fedbn", "--policy", "reestimate", "--save", "saved")
    assert "remove them, or leave them out (--on-data-error warn)" in cli(*words).err
    assert (
        "note: client 'flat': 1 of 4 files cannot be read, left out (2.png"
        in cli(*words, "--on-data-error", "warn").out
    )
    assert (tmp_path / "saved" / "flat" / "model.json").exists()


# Models as files, and the policy that is recommended


@pytest.mark.parametrize(
    ("asked", "title"),
    [((), "fedavg: global model"), pytest.param(("--policy", "fedbn: tent"), "fedbn: tent", marks=pytest.mark.slow)],
)
def test_the_saved_model_is_read_as_an_exported_one_and_its_card_names_the_evidence(
    cli, run, tiny_folder, asked, title
):
    """Nothing is learned in two rounds, so that only the default is recommended."""
    outcome = cli("adapt", run, "--data", tiny_folder, "--clients", "cid", "--save", "saved", *asked)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    (evidence,) = (line for line in lines if line.startswith("cid: ") and line.endswith("."))
    assert evidence.startswith(
        "cid: cannot tell: use fedavg: global model, the default (12 test samples: all intervals are too"
    )
    assert lines.index("cid: 33 training samples, 12 test samples") < lines.index(evidence)
    assert f"saved/cid: {title}, seed 0: model.json" in outcome.out
    card = " ".join(Path("saved/cid/README.md").read_text().split())
    assert f"{'Chosen by --policy. ' * bool(asked)}Evidence: {evidence.removeprefix('cid: ')}" in card
    spec, experiment = load_experiment(run)
    new = load_site(str(tiny_folder), spec, experiment.data.schema, "cid").client("cid")
    method, policy = title.split(": ")
    trial = restore_trial(experiment, run, method, 0)
    wanted = next(m for m in make_models(trial, {"cid": new.train}, ["tent"]) if m.policy == policy)
    images = list(ARRAYS["cid"][2])
    loaded = fedshift.load("saved/cid")
    with torch.no_grad():
        scores = forward(trial.plan, wanted.state, new.test.inputs(slice(None), trial.plan.dtype))
    assert torch.allclose(loaded(images), scores, atol=1e-5)
    Image.fromarray(images[0]).save("one.png")
    assert cli("predict", "saved/cid", "one.png", "--out", "answers").code == 0
    answers = pd.read_csv("answers/cases.csv")
    assert str(answers["prediction"][0]) == str(loaded.predict(images[0]))
    assert set(pd.read_csv("saved/accuracy.csv", index_col=0).index) == {"cid", "macro"}


def test_a_policy_to_save_that_gives_no_model_or_several_is_refused_before_any_is_made(cli, run, tiny_folder):
    for asked, said in (
        (
            "reestimate",
            "--policy 'reestimate': the run has the methods fedavg, fedbn, fedwon: name one, --policy 'feda",
        ),
        ("fedwon: reestimate", "gives no model of fedwon (reestimate: there are no BatchNorm statistics under fedwon)"),
        ("fedbn: global model", "--policy 'global model' gives no model of fedbn: choose another policy"),
        ("fedbm: tent", "unknown method 'fedbm': did you mean 'fedbn'?"),
        ("retent", "unknown policy for new clients 'retent': did you mean 'tent'?"),
    ):
        outcome = cli("adapt", run, "--data", tiny_folder, "--clients", "cid", "--save", "saved", "--policy", asked)
        assert (outcome.code, said in outcome.err) == (2, True), outcome.err
        assert "Test accuracy" not in outcome.out


def draw(random, count, gains=(0.0,) * 5, images=6, shared=1.0):
    """Rows and influences of ``count`` patients with ``images`` each, which the plain model gets right by chance."""
    patient = np.repeat(np.arange(count), images)
    hardness = shared * random.normal(size=count)[patient] + random.normal(size=len(patient))
    rows, influences = [], {}
    for number, gain in enumerate((0.0, *gains)):
        title = f"fedavg: {number}" if number else "fedavg: global model"
        right = hardness + random.normal(size=len(patient)) + 0.5 * shared * random.normal(size=count)[patient] < gain
        rows.append({"title": title, "seed": 0, "client": "zoe", "samples": len(right), "loss_sum": 1.0, "auc": None,
                     "hits": [int(right.sum())], "support": [len(right)]})  # fmt: skip
        records = {"right": right, "truth": np.zeros(len(right), int), "group": patient}
        influences[title, 0, "zoe"] = find_influence(records, "accuracy")
    return rows, influences


@pytest.mark.slow
def test_of_policies_that_differ_by_chance_one_in_twenty_is_recommended_and_one_that_gains_is_found():
    """Patients of several images, by simulation; intervals over images would be wrong in a third of the studies."""
    random, chosen = np.random.default_rng(0), {"none": [], "one": []}
    for _ in range(200):
        for kind, gains in (("none", (0.0,) * 5), ("one", (0.0, 0.0, 1.5))):
            title, evidence = recommend(*draw(random, 30, gains), "accuracy", "180 test samples of 30 patients")
            chosen[kind].append(title)
            assert ("cannot tell" in evidence) == (title == "fedavg: global model")
    assert 200 - chosen["none"].count("fedavg: global model") <= 17  # 10 are expected at most; 17 is beyond 0.99
    assert chosen["one"].count("fedavg: 3") >= 160


def test_nothing_is_recommended_below_ten_patients_or_without_results_of_single_samples():
    rows, influences = draw(np.random.default_rng(1), 9, (3.0,))
    title, evidence = recommend(rows, influences, "accuracy", "54 test samples of 9 patients")
    said = "54 test samples of 9 patients: an interval needs 10"
    assert (title, evidence) == (
        "fedavg: global model", f"cannot tell: use fedavg: global model, the default ({said})."
    )  # fmt: skip
    assert "results of single samples give no accuracy" in recommend(rows, {}, "accuracy", "many")[1]
    assert recommend(rows[:1], influences, "accuracy", "many") == (
        "fedavg: global model", "fedavg: global model is the only model.",
    )  # fmt: skip


def test_patients_of_a_new_site_are_counted_before_work_starts(tiny):
    cid = tiny.client("cid")
    grouped = [Samples(x=split.x, y=split.y, group=torch.arange(len(split)) // 3) for split in (cid.train, cid.test)]
    site = replace(tiny, clients=(replace(cid, train=grouped[0], test=grouped[1]), tiny.client("ann")))
    assert list(describe_splits(site)) == [
        "cid: 33 training samples of 11 patients, 12 test samples of 4 patients: no policy can be recommended below 10",
        "ann: 26 training samples, 12 test samples",
    ]


@pytest.mark.parametrize("seeds", [1, 6])
@pytest.mark.parametrize("grouped", [False, True])
def test_an_interval_is_students_over_patients_and_over_seeds_where_they_decide(seeds, grouped):
    """Errors of numbers, whose mean over patients of equally many samples is a plain mean."""
    random, patient, rows, influences = np.random.default_rng(3), np.repeat(np.arange(15), 4), [], {}
    loss = random.gamma(2, size=(3, seeds, 60))
    titles = ("fedavg: global model", "fedavg: tent", "fedavg: reestimate")
    for (title, seed), each in zip(product(titles, range(seeds)), loss.reshape(-1, 60), strict=True):
        rows.append({"title": title, "seed": seed, "client": "zoe", "samples": 60, "loss_sum": each.sum()})
        records = {"loss": each, "group": patient} if grouped else {"loss": each}
        influences[title, seed, "zoe"] = find_influence(records, "loss")
    table = policy_differences(seed_table(rows, "loss"), "loss", influences)
    for number, title in enumerate(titles[1:], 1):
        gap_SN = loss[number] - loss[0]
        units = gap_SN.mean(0).reshape(15, 4).mean(1) if grouped else gap_SN.mean(0)
        half = stats.sem(units) * stats.t.ppf(1 - 0.05 / 4, len(units) - 1)
        if seeds > 1:
            half = np.hypot(half, stats.sem(gap_SN.mean(1)) * stats.t.ppf(1 - 0.05 / 4, seeds - 1))
        row = table.loc[title]
        assert (row["low"], row["high"]) == pytest.approx((gap_SN.mean() - half, gap_SN.mean() + half))
        assert (row["units"], row["decided"]) == (len(units), seeds > 1)


def test_where_no_policy_gives_a_model_that_is_said(cli, make, tiny_folder, tmp_path):
    make(methods="fedper+gn", rounds=1, newcomers="cid").run(tmp_path / "run")
    outcome = cli("adapt", tmp_path / "run", "--data", tiny_folder, "--clients", "cid", "--policies", "reestimate")
    assert outcome.code == 2
    assert "no policy gives a model: reestimate: there are no BatchNorm statistics under fedper+gn" in outcome.err


# What is refused


REFUSED = [
    (["run"], "there is nothing to adapt to: give --data, or --unlabeled with --save and --policy"),
    (["run", "--unlabeled", "x.npz"], "--unlabeled alone measures nothing: say where its model goes (--save)"),
    (["run", "--unlabeled", "x.npz", "--save", "s"], "nothing to recommend a policy by: name it (--policy reestimate)"),
    (["run", "--unlabeled", "x.npz", "--save", "s", "--policy", "finetune"], "policy 'finetune' needs labels"),
    (
        ["run", "--data", "tiny", "--policy", "tent"],
        "--policy tent chooses the model to save: say where it goes (--save)",
    ),
    (["run", "--unlabeled", "x.npz", "--save", "s", "--clients", "a"], "--clients a chooses among the clients of"),
    (["run", "--data", "tiny", "--policies", "avrage"], "unknown policy for new clients 'avrage': did you mean"),
    (["run", "--data", "tiny", "--rounds", "0"], "rounds=0: must be at least 1"),
    (["run", "--data", "tiny", "--clients", "dan"], "unknown client 'dan'"),
    (["run", "--data", "tiny", "--save", "tiny"], "tiny contains other files: choose a directory that is new"),
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
    with pytest.raises(FedshiftError, match="fedbn, seed 0, has done no round: continue the run first"):
        next(make_models(trial, {"cid": experiment.data.client("cid").train}, POLICIES))


def test_where_finetuning_diverges_the_others_are_told(make):
    experiment = make(lr=1e20, rounds=1)
    trial = Trial(experiment.methods[0], experiment.model, experiment.data, experiment.settings, 0)
    trial.server = replace(trial.server, round=1)
    trial.clients.put({"ann": replace(trial.clients["ann"], steps=4)})
    said = []
    made = [
        model.policy
        for model in make_models(trial, {"cid": experiment.data.client("cid").train}, POLICIES, notices=said)
    ]
    assert made == [name for name in POLICIES if "finetune" not in name]
    assert said[0].startswith("fedbn, seed 0: training diverged: client 'cid'")
