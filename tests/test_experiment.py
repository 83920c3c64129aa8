"""Experiments: stopping and going on, what is measured of whom, sampling of clients, divergence, and selection."""

import json
import math
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.base.errors import FedshiftError, UsageError
from fedshift.build import experiment_of
from fedshift.checkpoint import load_checkpoint, save_checkpoint
from fedshift.config import CompareSpec, RunSpec
from fedshift.engines.loop import Diverged, step_
from fedshift.experiment import Observer, read_study
from fedshift.records import COLUMNS, read_rows
from fedshift.report.tables import reported_rounds
from fedshift.settings import Settings


@pytest.fixture
def make(tiny_folder):
    """An experiment on the tiny clients; several methods make a comparison."""

    def experiment(method="fedbn", **settings):
        several = "methods" in settings
        spec = CompareSpec if several else RunSpec
        chosen = {"data": str(tiny_folder), "rounds": 3, "batch_size": 8} | ({} if several else {"method": method})
        return experiment_of(spec(**(chosen | settings)))

    return experiment


class Listener(Observer):
    """Keeps the notices, and calls ``when`` as each round is saved."""

    def __init__(self, when=lambda done: None):
        self.notices, self.rounds, self.when = [], [], when

    def round(self, done):
        self.rounds.append(done)
        self.when(done)

    def notice(self, text):
        self.notices.append(text)


def rows_of(path: Path, trial: str):
    return read_rows(path / "trials" / trial / "metrics.jsonl")


# Stopping and going on

MANY = {
    "fedavg": {"method": "fedavg"},
    "fedbn, momentum kept": {"method": "fedbn", "momentum": 0.9, "keep_optimizer": True},
    "scaffold, two of three": {"method": "scaffold", "participation": 2, "evaluate_every": 1},
    "fedbn, one of three, best": {"participation": 1, "validation": 0.2, "select": "best", "batches": 2},
    "silobn+fedprox, adamw, cosine": {
        "method": "silobn+fedprox", "optimizer": "adamw", "lr": 0.001, "schedule": "cosine", "keep_optimizer": True,
        "participation": 0.5,
    },
    "centralized": {"method": "centralized", "epochs": 2},
    "single": {"method": "single", "batches": 3},
    "dropout": {"method": "fedavg", "model": "digit-cnn-dropout", "batches": 1, "batch_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("settings", MANY.values(), ids=MANY.keys())
def test_stopped_after_every_round_and_resumed_equals_uninterrupted(make, tmp_path, assert_same, settings):
    experiment = make(**({"rounds": 4} | settings))
    assert experiment.run(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    for time in range(4):
        stop = Event()
        finished = experiment.run(
            stopped, resume=time > 0, observer=Listener(lambda _, stop=stop: stop.set()), stop=stop
        )
        assert finished == (time == 3)
    assert_same(tmp_path / "whole", stopped)


def test_a_comparison_stopped_between_and_within_trials_equals_uninterrupted(make, tmp_path, assert_same):
    experiment = make(methods="fedavg,fedbn", seeds=2, rounds=2)
    experiment.run(tmp_path / "whole")
    for time in range(8):
        stop = Event()
        experiment.run(
            tmp_path / "stopped", resume=time > 0, stop=stop, observer=Listener(lambda _, stop=stop: stop.set())
        )
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    assert read_study(tmp_path / "whole").rows.equals(read_study(tmp_path / "stopped").rows)


def test_a_finished_run_resumed_does_nothing_and_may_be_given_more_rounds(make, tmp_path, assert_same):
    make(rounds=4, evaluate_every=1).run(tmp_path / "four")
    make(rounds=2, evaluate_every=1).run(tmp_path / "two")
    watch = Listener()
    assert make(rounds=2, evaluate_every=1).run(tmp_path / "two", resume=True, observer=watch)
    assert watch.rounds == []
    make(rounds=4, evaluate_every=1).run(tmp_path / "two", resume=True, observer=watch)
    assert [done.round for done in watch.rounds] == [3, 4]
    assert_same(tmp_path / "two", tmp_path / "four")


# Where a killed process may die, as Python that runs in it before the program: each counts what happens, and kills.
KILL = "import os, signal; die = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
IN_A_CLIENTS_WORK = KILL + (
    "import fedshift.engines.loop as loop; real, calls = loop.step_, []\n"
    "def step_(*given):\n"
    "    calls.append(1)\n"
    "    if len(calls) == {at}: die()\n"
    "    return real(*given)\n"
    "loop.step_ = step_\n"
)
BETWEEN_ROWS_AND_CHECKPOINT = KILL + (
    "import fedshift.experiment as e; real, calls = e.save_checkpoint, []\n"
    "def save(*given):\n"
    "    calls.append(1)\n"
    "    if len(calls) == {at}: die()\n"
    "    real(*given)\n"
    "e.save_checkpoint = save\n"
)
CHECKPOINT_HALF_WRITTEN = KILL + (
    "import fedshift.checkpoint as c; real, calls = c.save, []\n"
    "def save(*given, **more):\n"
    "    calls.append(1)\n"
    "    content = real(*given, **more)\n"
    "    if len(calls) != {at}: return content\n"
    "    class Half(bytes): pass\n"
    "    def write(path, content):\n"
    "        path.with_name(path.name + '.tmp').write_bytes(content[:len(content) // 2]); die()\n"
    "    c.write_atomically = write\n"
    "    return content\n"
    "c.save = save\n"
)
ROWS_HALF_WRITTEN = KILL + (
    "import fedshift.experiment as e; real, calls = e.append_rows, []\n"
    "def append(path, rows):\n"
    "    calls.append(1)\n"
    "    real(path, rows)\n"
    "    if len(calls) == {at}: path.write_bytes(path.read_bytes()[:-30]); die()\n"
    "e.append_rows = append\n"
)


@pytest.mark.parametrize(
    ("arguments", "moments"),
    [
        pytest.param(["--method", "fedavg"], [(ROWS_HALF_WRITTEN, 3)], id="fedavg"),
        pytest.param(
            ["--method", "fedbn", "--keep-optimizer", "--momentum", "0.9"],
            [(BETWEEN_ROWS_AND_CHECKPOINT, 2), (IN_A_CLIENTS_WORK, 20)],
            id="fedbn, momentum kept",
        ),
        pytest.param(
            ["--method", "scaffold", "--participation", "0.5"],
            [(IN_A_CLIENTS_WORK, 13)],
            id="scaffold, half of them",
        ),
        pytest.param(
            ["--method", "scaffold", "--participation", "2", "--seeds", "2"],
            [(CHECKPOINT_HALF_WRITTEN, 1), (ROWS_HALF_WRITTEN, 2), (IN_A_CLIENTS_WORK, 40)],
            id="scaffold, two of them, two seeds",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--method", "fedbn", "--model", "digit-cnn-dropout", "--batches", "2"],
            [(IN_A_CLIENTS_WORK, 9), (CHECKPOINT_HALF_WRITTEN, 1)],
            id="dropout",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_killed_at_any_moment_and_resumed_equals_uninterrupted(
    program, cli, unpublished, tiny_folder, tmp_path, assert_same, arguments, moments
):
    settings = ["run", "--data", tiny_folder, "--rounds", 4, "--batch-size", 8, *arguments]
    assert cli(*settings, "--out", tmp_path / "whole").code == 0
    killed = tmp_path / "killed"
    for number, (moment, at) in enumerate(moments):
        begin = [*settings, "--out", killed] if number == 0 else ["run", "--resume", killed]
        process = program(*begin, before=moment.format(at=at))
        _, errors = process.communicate()
        assert (process.returncode, errors) == (-signal.SIGKILL, "")
    assert cli("run", "--resume", killed).code == 0
    assert_same(tmp_path / "whole", killed)


def test_a_process_killed_from_outside_and_resumed_equals_uninterrupted(
    program, cli, unpublished, tiny_folder, tmp_path, assert_same
):
    settings = ["run", "--data", tiny_folder, "--method", "fedavg", "--batch-size", 8, "--rounds", 20]
    process = program(*settings, "--out", tmp_path / "killed", env=os.environ | {"PYTHONUNBUFFERED": "1"})
    for line in process.stdout:
        if "round 2/20" in line:  # rounds 4, 6, ... are evaluated too
            process.kill()
            break
    assert process.wait() == -signal.SIGKILL
    assert len(read_rows(tmp_path / "killed" / "trials" / "fedavg-seed0" / "rounds.jsonl")) >= 2
    assert cli("run", "--resume", tmp_path / "killed").code == 0
    assert cli(*settings, "--out", tmp_path / "whole").code == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")


# What resuming refuses


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lr": 0.02}, "begun with another optimizer: then 'SGD(lr=0.01"),
        ({"schedule": "cosine"}, "begun with another optimizer"),
        ({"keep_optimizer": True}, "begun with another optimizer"),
        ({"batch_size": 9}, "begun with another work: then 'Work(batch_size=8"),
        ({"model": "digit-cnn-bn"}, "begun with another model"),
        ({"domains": "ann,bob"}, "begun with another data"),
        ({"validation": 0.1}, "begun with another data"),
        ({"participation": 2}, "begun with another participation: then 'None', now '2'"),
        ({"rounds": 1}, "has done 2 rounds, more than rounds=1: ask for at least as many"),
    ],
)
def test_a_run_goes_on_only_as_it_was_begun_and_a_refusal_changes_nothing(make, tmp_path, changed, said):
    make(rounds=2).run(tmp_path / "run")

    def content():
        return {p: p.read_bytes() for p in sorted((tmp_path / "run").rglob("*")) if p.is_file() and p.name != ".lock"}

    before = content()
    with pytest.raises(UsageError) as refused:
        make(**({"rounds": 2} | changed)).run(tmp_path / "run", resume=True)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 500
    assert content() == before
    make(rounds=2).run(tmp_path / "run", resume=True)


def test_a_method_of_the_same_name_but_other_choices_is_another(make, tmp_path, monkeypatch):
    (tmp_path / "own_method.py").write_text(
        "from dataclasses import replace\nfrom fedshift import fedavg, fedprox\nmu = 0.1\n"
        "def mine():\n    return replace(fedprox(mu=mu), name='mine')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_method", raising=False)
    make("own_method:mine", rounds=1).run(tmp_path / "run")
    monkeypatch.setattr("own_method.mu", 0.2)
    with pytest.raises(UsageError, match=r"begun with another method: then .*mu=0\.1.*, now .*mu=0\.2"):
        make("own_method:mine", rounds=2).run(tmp_path / "run", resume=True)


def test_networks_with_the_same_tensors_but_other_layers_are_told_apart(make, tmp_path):
    def of(activation):
        made = make("fedavg", rounds=1)
        object.__setattr__(
            made, "model", lambda shape, classes: nn.Sequential(nn.Flatten(), activation, nn.Linear(192, classes))
        )
        return made

    of(nn.ReLU()).run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"begun with another model: then .*ReLU\(\).*now .*Tanh\(\)"):
        of(nn.Tanh()).run(tmp_path / "run", resume=True)


def test_a_checkpoint_of_another_seed_is_refused(make, tmp_path):
    make(rounds=1, seeds=2).run(tmp_path / "run")
    trials = tmp_path / "run" / "trials"
    (trials / "fedbn-seed0" / "checkpoint.safetensors").replace(trials / "fedbn-seed1" / "checkpoint.safetensors")
    with pytest.raises(UsageError, match="begun with another seed: then '0', now '1'"):
        make(rounds=1, seeds=2).run(tmp_path / "run", resume=True)


def test_a_damaged_checkpoint_is_refused_and_its_removal_begins_again(make, tmp_path, assert_same):
    make().run(tmp_path / "run")
    make().run(tmp_path / "other")
    checkpoint = tmp_path / "run" / "trials" / "fedbn-seed0" / "checkpoint.safetensors"
    content = bytearray(checkpoint.read_bytes())
    content[-5] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(FedshiftError, match="corrupt or truncated \\(its checksum does not match\\): restore the file"):
        make().run(tmp_path / "run", resume=True)
    checkpoint.unlink()
    make().run(tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", tmp_path / "other")


# Before anything starts


def test_what_does_not_fit_is_refused_before_anything_is_written(make, tmp_path):
    with pytest.raises(UsageError, match="batch_size=1, but batch normalization in this model has no variance"):
        make(batch_size=1).run(tmp_path / "run")
    with pytest.raises(UsageError, match="pools all data but keeps entries on clients"):
        make("centralized+fedbn").run(tmp_path / "run")
    with pytest.raises(UsageError, match="model small-cnn takes images of at least 4 x 4 pixels"):
        make(image_size=3).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"methods": "fedavg,fedbn,fedavg"}, "method 'fedavg' is given twice: give one of them another name"),
        ({"methods": "fedprox(mu=0.2),fedprox+fedprox(mu=0.2),fedprox(mu=0.2)"}, "is given twice"),
        ({"select": "best"}, "select='best' needs validation data, which the clients lack: hold some out"),
        ({"participation": 1.5}, "participation=1.5: give a whole number of clients, or a fraction below 1"),
        ({"epochs": 1, "batches": 1}, "epochs=1 and batches=1: give exactly one of the two"),
        ({"engine": "lop"}, "unknown engine 'lop': did you mean 'loop'?"),
        ({"device": "meta"}, "device 'meta' cannot be used here"),
        ({"device": "toaster"}, "device 'toaster' cannot be used here"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin': did you mean 'cosine'?"),
        ({"schedule": "constant,cosine"}, "schedule 'constant,cosine': give one, not 2"),
        ({"schedule": "step"}, "missing a required argument: 'every'"),
        ({"schedule": "step(every=0)"}, "every=0 must be at least 1"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum and nesterov belong to SGD"),
        ({"nesterov": True}, "nesterov needs a momentum above 0"),
        ({"method": "fedavg,fedbn"}, "run takes one method, not 'fedavg,fedbn': use `fedshift compare --methods`"),
        ({"data": "nowhere"}, "data 'nowhere': there is no directory /"),
        ({"data": "digits", "classes": 5}, "label 5 is out of range; labels must be 0..4"),
        ({"data": "digits", "domains": "pem"}, "unknown client 'pem': did you mean 'pen'?"),
        ({"domains": "ann,ann"}, "client name 'ann' occurs twice"),
        ({"domains": "bobby"}, "unknown domain 'bobby': did you mean 'bob'?"),
        ({"samples": 18}, "client 'bob' has 17 training samples, fewer than samples=18"),
        ({"samples": 1}, "has only class"),
        ({"validation": 0.99}, "leaves client 'ann' no training sample of 26"),
    ],
)
def test_settings_that_cannot_be_done_are_refused(make, settings, said):
    with pytest.raises(UsageError) as refused:
        make(**settings)
    assert said in str(refused.value)


def network_of(made):
    return lambda shape, classes: made


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (network_of("text"), "the model's function made a str, not a torch.nn.Module"),
        (lambda shape: nn.Flatten(), "the model cannot be made for samples of shape (3, 8, 8) and 3 classes"),
        (network_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 2))), "have shape (2,), but the data have 3 classes"),
        (network_of(nn.Conv2d(3, 3, 1)), "have shape (3, 8, 8), but the data have 3 classes: make it give (3,)"),
        (network_of(nn.Sequential(nn.Flatten(), nn.Linear(100, 3))), "refuses a sample of shape (3, 8, 8)"),
        (network_of(nn.Flatten()), "trains no parameter"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(make, tmp_path, model, said):
    experiment = make("fedavg")
    object.__setattr__(experiment, "model", model)
    with pytest.raises(UsageError) as refused:
        experiment.run(tmp_path / "run")
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


# Records

BOTH, GLOBAL_ONLY = {"global", "personal"}, {"global"}


@pytest.mark.parametrize(
    ("method", "models"),
    [
        ("fedavg", BOTH), ("fedprox", BOTH), ("scaffold", BOTH), ("centralized", BOTH),
        ("fedbn", {"personal"}), ("silobn", {"personal"}), ("single", {"personal"}),
    ],
)  # fmt: skip
def test_models_are_measured_exactly_where_they_exist(make, tmp_path, method, models):
    make(method, rounds=1, validation=0.2).run(tmp_path / "run")
    study = read_study(tmp_path / "run")
    loaded = study.rows[study.rows["moment"] == "loaded"]
    for client in ("ann", "bob", "cid"):
        for split in ("test", "validation"):
            found = loaded[(loaded["client"] == client) & (loaded["split"] == split)]
            assert sorted(found["model"]) == sorted(models)
            assert len({(row.loss_sum, tuple(row.hits)) for row in found.itertuples()}) == 1
    assert set(loaded["split"]) == {"test", "validation"}
    assert study.methods[method].has_global == ("global" in models)


def test_records_have_the_columns_and_counts_they_promise(make, tmp_path):
    experiment = make(methods="fedavg,fedbn,centralized", seeds=2, rounds=5, evaluate_every=2, validation=0.2)
    experiment.run(tmp_path / "run")
    study = read_study(tmp_path / "run")
    sizes = {
        client.name: {name: len(part) for name, part in client.splits.items()} for client in experiment.data.clients
    }
    assert tuple(study.rows.columns) == COLUMNS
    assert study.clients == sizes
    assert len(study.rows[["method", "seed", "round", "client", "split", "model", "moment"]].drop_duplicates()) == len(
        study.rows
    )
    for row in study.rows.itertuples():
        if row.moment == "loaded":
            assert row.round in (2, 4, 5)
            assert row.samples == sizes[row.client][row.split] == sum(row.support)
            truth = experiment.data.client(row.client).splits[row.split].y.bincount(minlength=3).tolist()
            assert row.support == truth
            assert all(0 <= hits <= support for hits, support in zip(row.hits, row.support, strict=True))
            assert 0 <= row.auc <= 1 if min(row.support) else math.isnan(row.auc)
            assert row.loss_sum > 0
        else:
            assert (row.moment, row.split, row.model) == ("trained", "train", "personal")
            pooled = sum(part["train"] for part in sizes.values())
            assert row.samples == (pooled if row.method == "centralized" else sizes[row.client]["train"])
            assert row.hits is None
            assert row.support is None
    trained = study.rows[study.rows["moment"] == "trained"]
    assert Counter(trained["round"]) == dict.fromkeys(range(1, 6), 2 * (3 + 3 + 1))
    assert set(trained[trained["method"] == "centralized"]["client"]) == {"pooled"}


def test_methods_of_one_seed_start_from_the_same_weights_and_seeds_do_not(make):
    experiment = make(methods="fedavg,fedbn", seeds=2)

    def initial(method, seed):
        return experiment._trial(experiment.methods[method], seed).plan.initial["conv1.weight"]

    assert torch.equal(initial(0, 0), initial(1, 0))
    assert not torch.equal(initial(0, 0), initial(0, 1))


def test_traffic_counts_what_travels(make, tmp_path):
    make(methods="fedavg,fedbn,single,centralized", rounds=1, participation=2).run(tmp_path / "run")
    study = read_study(tmp_path / "run")
    whole = sum(row["bytes"] for row in study.methods["fedavg"].entries)
    shared = sum(row["bytes"] for row in study.methods["fedbn"].entries if row["load"])
    moved = study.traffic.set_index("method")[["down", "up"]].T.to_dict("list")
    assert moved == {
        "fedavg": [2 * whole] * 2, "fedbn": [2 * shared] * 2, "single": [0, 0], "centralized": [0, 0],
    }  # fmt: skip
    assert 0 < shared < whole


# Sampling of clients


@pytest.mark.parametrize(
    ("share", "count"), [(None, 3), (1, 1), (2, 2), (9, 3), (0.5, 2), (0.1, 1), (1.0, 3), (0.4, 1)]
)
def test_as_many_clients_take_part_as_asked(share, count):
    settings, names = Settings(participation=share), ("ann", "bob", "cid")
    chosen = [settings.participants(0, number, names) for number in range(1, 60)]
    assert {len(round) for round in chosen} == {count}
    assert all(list(round) == sorted(set(round)) for round in chosen)
    assert set(names) == {name for round in chosen for name in round}
    assert chosen == [settings.participants(0, number, names) for number in range(1, 60)]
    assert count == 3 or chosen != [settings.participants(1, number, names) for number in range(1, 60)]


def test_each_client_is_as_likely_to_take_part():
    names = tuple("abcdefghij")
    drawn = Counter(name for n in range(2000) for name in Settings(participation=0.3).participants(0, n, names))
    assert set(drawn) == set(names)
    assert all(500 < count < 700 for count in drawn.values())  # 600 expected, standard deviation 20


@pytest.mark.parametrize("share", [0, -1, 1.5, 0.0])
def test_other_participation_is_refused(share):
    with pytest.raises(UsageError, match=f"participation={share}: give a number of clients"):
        Settings(participation=share)


@pytest.mark.parametrize("method", ["fedbn", "fedavg"])
def test_a_client_that_never_took_part_is_measured_only_where_it_has_a_model(make, tmp_path, method):
    watch = Listener()
    make(method, rounds=2, participation=1, first_seed=2, evaluate_every=1).run(tmp_path / "run", observer=watch)
    took_part = [done.participants[0] for done in watch.rounds]
    absent = {"ann", "bob", "cid"} - set(took_part)
    assert absent
    for number in (1, 2):
        rows = [
            r for r in rows_of(tmp_path / "run", f"{method}-seed2") if r["round"] == number and r["split"] == "test"
        ]
        have_one = set(took_part[:number]) if method == "fedbn" else {"ann", "bob", "cid"}
        assert {row["client"] for row in rows} == have_one
    said = [text for text in watch.notices if "never took part" in text]
    if method == "fedavg":
        assert said == []
    else:
        assert said == [
            "fedbn, seed 2: clients that never took part have no model of their own and are not counted: "
            f"{', '.join(sorted(absent))}"
        ]
        assert read_study(tmp_path / "run").notices == tuple(watch.notices)


# Batch normalization and a batch of one


def test_a_last_batch_of_one_sample_joins_the_one_before_and_is_said_once(make, tmp_path):
    watch = Listener()
    experiment = make(methods="fedavg,fedbn", seeds=2, rounds=2, batch_size=8)  # bob has 17, cid has 33 samples
    experiment.run(tmp_path / "run", observer=watch)
    said = [text for text in watch.notices if "the last batch would hold one sample" in text]
    assert [text.split("'")[1] for text in said] == ["bob", "cid"]
    assert read_study(tmp_path / "run").notices == tuple(watch.notices)
    assert {row["samples"] for row in rows_of(tmp_path / "run", "fedbn-seed0") if row["split"] == "train"} == {
        26,
        17,
        33,
    }


def test_a_last_batch_of_one_sample_is_kept_where_nothing_forbids_it(make, tmp_path):
    experiment = make("fedavg", rounds=1)
    object.__setattr__(experiment, "model", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(192, classes)))
    watch = Listener()
    experiment.run(tmp_path / "run", observer=watch)
    assert watch.notices == []
    _, facts = load_checkpoint(tmp_path / "run" / "trials" / "fedavg-seed0" / "checkpoint.safetensors")
    assert facts["steps"] == {"ann": 4, "bob": 3, "cid": 5}


def test_one_batch_joined_is_one_step_fewer(make, tmp_path):
    make("fedavg", rounds=1).run(tmp_path / "run")
    _, facts = load_checkpoint(tmp_path / "run" / "trials" / "fedavg-seed0" / "checkpoint.safetensors")
    assert facts["steps"] == {"ann": 4, "bob": 2, "cid": 4}


def test_a_client_of_one_sample_under_batch_normalization_is_refused(tiny_folder, rewrite, make, tmp_path):
    rewrite("bob", x_train=np.zeros((1, 8, 8, 3), np.uint8), y_train=np.zeros(1, np.int64))
    with pytest.raises(UsageError, match="client 'bob' has one training sample, over which batch normalization"):
        make(allow_single_class=True).run(tmp_path / "run")


# Divergence


def test_a_diverging_run_stops_and_keeps_the_round_before(make, tmp_path, monkeypatch):
    make(rounds=2).run(tmp_path / "good")
    experiment = make(rounds=4)
    watch = Listener(lambda done: done.round == 2 and monkeypatch.setattr("fedshift.engines.loop.step_", broken))

    def broken(plan, job, x, y, key):
        job, loss = step_(plan, job, x, y, key)
        return job, loss * float("nan") if job.done - job.start == 2 else loss

    with pytest.raises(Diverged) as failed:
        experiment.run(tmp_path / "run", observer=watch)
    assert "client 'ann', round 3, step 2 of 4: loss nan. Lower the learning rate, or check the data" in str(
        failed.value
    )
    kept = [load_checkpoint(tmp_path / run / "trials/fedbn-seed0/checkpoint.safetensors") for run in ("good", "run")]
    assert kept[1][1] == kept[0][1]
    assert all(torch.equal(tensor, kept[1][0][name]) for name, tensor in kept[0][0].items())
    assert {row["round"] for row in rows_of(tmp_path / "run", "fedbn-seed0")} == {1, 2}


def test_in_a_comparison_the_other_trials_go_on(make, tmp_path):
    watch = Listener()
    experiment = make(methods="fedavg,scaffold,fedprox(mu=1e30)", seeds=2, rounds=2)
    with pytest.raises(Diverged, match=r"training diverged: client '\w+', round \d, step \d of \d: "):
        experiment.run(tmp_path / "run", observer=watch)
    for seed in (0, 1):
        for method in ("fedavg", "scaffold"):
            assert {row["round"] for row in rows_of(tmp_path / "run", f"{method}-seed{seed}")} == {1, 2}
        said = [text for text in watch.notices if text.startswith(f"fedprox(mu=1e+30), seed {seed}: training diverged")]
        assert len(said) == 1
        assert said[0].endswith("Its numbers are those of the round before.")
    with pytest.raises(Diverged):
        experiment.run(tmp_path / "run", resume=True)


# Selection


def test_best_is_the_first_round_of_the_best_validation_accuracy_and_its_model_is_kept(make, tmp_path):
    settings = {"rounds": 12, "validation": 0.3, "evaluate_every": 2, "participation": 2, "lr": 0.1}
    for select in ("last", "best"):
        make(**settings, select=select).run(tmp_path / select)
    rows = rows_of(tmp_path / "best", "fedbn-seed0")
    reached = {}
    for number in range(2, 13, 2):
        found = [r for r in rows if (r["round"], r["split"], r["model"]) == (number, "validation", "personal")]
        reached[number] = (len(found), float(np.mean([sum(r["hits"]) / r["samples"] for r in found])))
    best = max(reached, key=reached.get)
    assert best < 12
    assert reported_rounds(read_study(tmp_path / "best")).tolist() == [best]
    assert reported_rounds(read_study(tmp_path / "last")).tolist() == [12]
    trial = tmp_path / "best" / "trials" / "fedbn-seed0"
    assert load_checkpoint(trial / "best.safetensors")[1]["round"] == best
    assert load_checkpoint(trial / "checkpoint.safetensors")[1]["round"] == 12
    assert not (tmp_path / "last" / "trials" / "fedbn-seed0" / "best.safetensors").exists()


def test_a_round_that_measured_fewer_clients_is_never_the_best(make, tmp_path):
    for seed in range(4):
        make(rounds=6, validation=0.3, participation=1, select="best", first_seed=seed, lr=0.0).run(
            tmp_path / str(seed)
        )
        found = load_checkpoint(tmp_path / str(seed) / "trials" / f"fedbn-seed{seed}" / "best.safetensors")[1]
        last = load_checkpoint(tmp_path / str(seed) / "trials" / f"fedbn-seed{seed}" / "checkpoint.safetensors")[1]
        assert found["steps"].keys() == last["steps"].keys()
        assert reported_rounds(read_study(tmp_path / str(seed))).tolist() == [found["round"]]


# What is written


def test_a_study_tells_all_that_was_run(make, tmp_path):
    experiment = make(methods="fedavg,fedbn", rounds=2, seeds=2)
    experiment.run(tmp_path / "run")
    study = read_study(tmp_path / "run")
    assert (study.name, study.seeds, study.rounds, study.select, study.classes) == ("tiny", (0, 1), 2, "last", 3)
    assert list(study.methods) == ["fedavg", "fedbn"]
    assert dict(study.config) == dict(experiment.config)
    assert {name: x.shape for name, x in study.samples.items()} == dict.fromkeys(("ann", "bob", "cid"), (8, 8, 8, 3))
    assert study.samples["bob"].dtype == np.uint8
    first = experiment.data.client("bob").test.x[0].permute(1, 2, 0).numpy()
    assert np.array_equal(study.samples["bob"][0], first)
    facts = json.loads((tmp_path / "run" / "study.json").read_text())
    assert facts["clients"]["bob"] == {"train": 17, "test": 12}


def test_float_images_and_features_are_shown_or_left_out(tmp_path):
    import fedshift

    random = np.random.default_rng(0)
    y = np.arange(12) % 3
    for x, shown in ((random.normal(size=(12, 8, 8)), (8, 8, 8, 1)), (random.normal(size=(12, 5)), None)):
        model = "small-cnn" if shown else (lambda shape, classes: nn.Linear(shape[0], classes))
        data, out = fedshift.federation({"a": (x, y, x, y)}), tmp_path / str(x.ndim)
        result = fedshift.compare([fedshift.fedavg()], data=data, model=model, rounds=1, out=out)
        assert {name: image.shape for name, image in result.study.samples.items()} == ({"a": shown} if shown else {})


def test_only_a_run_is_read(tmp_path):
    with pytest.raises(UsageError, match="holds no run: give a directory that `fedshift run` or `compare` wrote"):
        read_study(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="holds no run"):
        read_study(tmp_path / "file")
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(FedshiftError, match="is damaged"):
        read_study(tmp_path)


def test_a_damaged_best_checkpoint_is_written_anew(make, tmp_path, assert_same):
    settings = {"rounds": 4, "validation": 0.2, "select": "best"}
    make(**settings).run(tmp_path / "whole")
    stop = Event()
    make(**settings).run(tmp_path / "run", stop=stop, observer=Listener(lambda done: done.round == 1 and stop.set()))
    best = tmp_path / "run" / "trials" / "fedbn-seed0" / "best.safetensors"
    later = load_checkpoint(tmp_path / "whole" / "trials" / "fedbn-seed0" / "best.safetensors")
    save_checkpoint(best, *later)  # as if killed between writing the best of a later round and the checkpoint
    make(**settings).run(tmp_path / "run", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "run")
