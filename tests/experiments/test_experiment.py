"""Experiments: what is measured of whom, divergence, selection, and what a study tells."""

import inspect
import math
import threading
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedshift.engines.engine import Diverged
from fedshift.engines.sequential import client_step_
from fedshift.experiments.callbacks import Callbacks
from fedshift.experiments.experiment import Callback, Experiment
from fedshift.report.tables import find_reported_rounds, seed_table
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.schema import COLUMNS, read_rows
from fedshift.results.summary import read_summary
from fedshift.utils.errors import FedshiftError, UsageError


def rows_of(path: Path, trial: str):
    return read_rows(path / "trials" / trial / "metrics.jsonl")


def test_a_study_says_which_clients_share_test_samples(make, tmp_path):
    for split, expected in ((None, {}), ("iid(clients=3, test='shared')", {"1": "0", "2": "0"})):
        folder = tmp_path / str(split)
        make(rounds=1, split=split).run(folder)
        shared = read_summary(folder).same_test
        assert {name[-1]: owner[-1] for name, owner in shared.items()} == expected


def test_a_study_records_the_most_frequent_training_class_of_each_client(make, tmp_path):
    experiment = make(rounds=1)
    experiment.run(tmp_path / "run")
    labels = {client.name: client.train.y.tolist() for client in experiment.data.clients}
    usual = {name: max(sorted(set(y)), key=y.count) for name, y in labels.items()}
    assert read_summary(tmp_path / "run").majority == usual


@pytest.mark.parametrize(("select", "statistics"), [("last", "running"), ("best", "reestimated")])
def test_records_of_single_samples_are_of_the_reported_round(make, tmp_path, select, statistics):
    """Each client's hits are those of its row, for the model that it uses and for the server's."""
    how = {"select": select, "statistics": statistics, "validation": 0.3}
    make(methods="fedavg, fedbn", rounds=3, evaluate_every=1, lr=0.3, seeds=1, **how).run(tmp_path / "run")
    summary = read_summary(tmp_path / "run")
    for (method, seed), number in find_reported_rounds(summary).items():
        cases = summary.read_cases(method, seed)
        rows = summary.lag if statistics == "reestimated" else summary.rows[summary.rows["moment"] == "loaded"]
        tested = rows[(rows["method"] == method) & (rows["round"] == number) & (rows["split"] == "test")]
        assert cases.round == number
        assert set(cases.records) == set(zip(tested["client"], tested["model"], strict=True))
        for row in tested.itertuples():
            records = cases.records[row.client, row.model]
            hits = np.bincount(records["truth"][records["right"]], minlength=len(row.hits))
            assert hits.tolist() == row.hits
            assert records["loss"].sum() == pytest.approx(row.loss_sum, rel=1e-4)


# Before anything starts


def test_what_does_not_fit_is_refused_before_anything_is_written(make, tmp_path):
    with pytest.raises(UsageError, match="batch_size=1, but BatchNorm in this model cannot compute a variance"):
        make(batch_size=1).run(tmp_path / "run")
    with pytest.raises(UsageError, match="pools all data but keeps entries on clients"):
        make("centralized+fedbn").run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"model small-cnn takes images \(C, H, W\) of at least 4 x 4 pixels"):
        make(image_size=3).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"methods": "fedavg,fedbn,fedavg"}, "method 'fedavg' is given twice: leave one out"),
        ({"methods": "fedprox(mu=0.2),fedprox+fedprox(mu=0.2),fedprox(mu=0.2)"}, "is given twice"),
        ({"methods": "gn,fedbn,fedavg + gn"}, "methods 'gn' and 'fedavg+gn' are both 'fedavg+gn': leave one out"),
        ({"select": "best"}, "select='best' needs validation data, which the clients lack: hold some out"),
        (
            {"operating_point": "sensitivity>=0.9"},
            "operating_point='sensitivity>=0.9' is chosen on validation data, which the clients lack: hold some out",
        ),
        ({"participation": 1.5}, "participation=1.5: give a whole number of clients, or a fraction up to 1.0"),
        ({"epochs": 1, "batches": 1}, "epochs=1 and batches=1: give exactly one of epochs, batches, steps"),
        ({"engine": "stack"}, "unknown engine 'stack': did you mean 'stacked'?"),
        ({"device": "meta"}, "device 'meta' cannot be used here"),
        ({"device": "toaster"}, "device 'toaster' cannot be used here"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin': did you mean 'cosine'?"),
        ({"schedule": "constant,cosine"}, "schedule 'constant,cosine': give one, not 2"),
        ({"schedule": "step"}, "argument 'every' is missing; step takes every, gamma=0.1"),
        ({"schedule": "step(every=0)"}, "every=0 must be at least 1"),
        ({"optimizer": "adamw(momentum=0.9)"}, "unknown argument 'momentum'; adamw takes"),
        ({"optimizer": "sgd(nesterov=True)"}, "nesterov needs a momentum above 0"),
        ({"method": "fedavg,fedbn"}, "run takes one method, not 'fedavg,fedbn': use `fedshift compare --methods`"),
        ({"data": "nowhere"}, "unknown data 'nowhere'"),
        ({"data": "digits", "classes": 5}, "label 5 is out of range; labels must be 0..4"),
        ({"data": "digits", "domains": "pem"}, "unknown client 'pem': did you mean 'pen'?"),
        ({"domains": "bobby"}, "unknown client 'bobby': did you mean 'bob'?"),
        ({"samples": 18}, "client 'bob' has 17 training samples, fewer than samples=18"),
        ({"samples": 1}, "has only class"),
        ({"validation": 0.99}, "leaves client 'ann' no training sample of 26"),
    ],
)
def test_settings_that_cannot_be_done_are_refused(make, settings, said):
    with pytest.raises(UsageError) as refused:
        make(**settings)
    assert said in str(refused.value)


class Segmenter(nn.Sequential):
    """A network that returns a dictionary, as torchvision's for segmentation do."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 3))

    def forward(self, x):
        scores = super().forward(x)
        return {"out": scores, "aux": scores}


def network_of(made):
    return lambda shape, classes: made


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (network_of("text"), "the model's function made a str, not a torch.nn.Module"),
        (lambda shape: nn.Flatten(), "the model cannot be made for samples of shape (3, 8, 8) and 3 classes"),
        (network_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 2))), "have shape (2,), but the data have 3 classes"),
        (network_of(nn.Conv2d(3, 3, 1)), "have shape (3, 8, 8), but the data have 3 classes: make it give (3,)"),
        (network_of(nn.Sequential(nn.Flatten(), nn.Linear(100, 3))), "rejects a sample of shape (3, 8, 8)"),
        (network_of(nn.Flatten()), "trains no parameter"),
        (
            network_of(Segmenter()),
            "the model Segmenter returned a dict with 'out', 'aux', not a tensor of class scores [samples, "
            "classes]: return only the scores, or select them by fedshift.models.take_output(network, 'out'); on the "
            "command line, --model \"take_output(package.module:function, output='out')\"",
        ),
        (
            network_of(nn.Sequential(nn.Flatten(2), nn.LSTM(64, 3))),
            "or select them by fedshift.models.take_output(network, 0);",
        ),
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
    study = read_summary(tmp_path / "run")
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
    study = read_summary(tmp_path / "run")
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
            assert 0 <= row.auc <= 1 if max(row.support) < row.samples else math.isnan(row.auc)
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


TRAINED = {"moments": "loaded,trained"}


@pytest.mark.slow
def test_models_after_local_work_are_measured_where_asked_for_and_change_nothing_else(make, tmp_path):
    asked = {"methods": "fedavg,fedbn,ditto,single,centralized", "rounds": 4, "evaluate_every": 2, "validation": 0.3}
    asked |= {"select": "best", "newcomers": "cid", "lr": 0.1}
    for name, more in (("plain", {}), ("both", TRAINED)):
        make(**asked, **more).run(tmp_path / name)
    plain, both = (read_summary(tmp_path / name) for name in ("plain", "both"))
    after = (both.rows["moment"] == "trained") & (both.rows["split"] != "train")
    pd.testing.assert_frame_equal(both.rows[~after].reset_index(drop=True), plain.rows)
    assert find_reported_rounds(both).equals(find_reported_rounds(plain))
    pd.testing.assert_frame_equal(seed_table(both), seed_table(plain))
    found = both.rows[after].set_index(["method", "round", "client", "split"])
    assert set(found["model"]) == {"personal"}
    clients = ("ann", "bob")  # newcomers do no work
    assert set(found.index) == set(product(both.methods, (2, 4), clients, ("test", "validation")))
    loaded = both.rows[(both.rows["moment"] == "loaded") & (both.rows["model"] == "personal")]
    loaded = loaded.set_index(["method", "round", "client", "split"]).loc[found.index, "loss_sum"]
    moved = (found["loss_sum"] - loaded).abs().groupby("method").max()
    assert (moved[["ditto", "single"]] == 0).all()  # what these clients use is not aggregated
    assert moved["centralized"] < 1e-3 < moved[["fedavg", "fedbn"]].min()
    best = [load_checkpoint(tmp_path / name / "trials/fedbn-seed0/best.safetensors")[1] for name in ("plain", "both")]
    assert best[0] == best[1]


def test_a_resumed_run_measures_after_local_work_as_an_uninterrupted_one(make, tmp_path, assert_same, Listener):
    asked = {"method": "fedbn", "evaluate_every": 1, "participation": 2, **TRAINED}
    make(**asked).run(tmp_path / "whole")
    stop = threading.Event()
    assert not make(**asked).run(tmp_path / "cut", callback=Listener(lambda done: stop.set()), stop=stop)
    make(**asked).run(tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")
    rows = [row for row in rows_of(tmp_path / "whole", "fedbn-seed0") if row["split"] == "test"]
    assert [row["round"] for row in rows if row["moment"] == "trained"] == [1, 1, 2, 2, 3, 3]


def test_auto_takes_an_engine_that_knows_clients_apart_where_they_are_measured(make, tmp_path):
    one_step = {"method": "fedsmb", "batches": 1, "rounds": 1, "model": "fnn2"}
    chosen = [make(**one_step, **more).make_trial("fedsmb", 0).engine_choice.engine for more in ({}, TRAINED)]
    assert chosen == ["identity", "sequential"]
    with pytest.raises(UsageError, match=r"moments='trained' measures .* the identity engine never computes: use the"):
        make(**one_step, **TRAINED, engine="identity").run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("moments", "said"),
    [
        ("trained", "moments='trained': tables report models just after aggregation: give loaded as well"),
        ("loaded,train", "unknown moment 'train'"),
    ],
)
def test_unknown_moments_are_refused(make, moments, said):
    with pytest.raises(UsageError, match=said):
        make(moments=moments)


def test_methods_of_one_seed_start_from_the_same_weights_and_seeds_do_not(make):
    experiment = make(methods="fedavg,fedbn", seeds=2)

    def initial(method, seed):
        return experiment.make_trial(experiment.methods[method].name, seed).plan.initial["conv1.weight"]

    assert torch.equal(initial(0, 0), initial(1, 0))
    assert not torch.equal(initial(0, 0), initial(0, 1))


def test_traffic_counts_what_travels(make, tmp_path):
    make(methods="fedavg,fedbn,single,centralized", rounds=1, participation=2).run(tmp_path / "run")
    study = read_summary(tmp_path / "run")
    whole = sum(row["bytes"] for row in study.methods["fedavg"].entries)
    shared = sum(row["bytes"] for row in study.methods["fedbn"].entries if row["load"])
    moved = study.traffic.set_index("method")[["down", "up"]].T.to_dict("list")
    assert moved == {
        "fedavg": [2 * whole] * 2, "fedbn": [2 * shared] * 2, "single": [0, 0], "centralized": [0, 0],
    }  # fmt: skip
    assert 0 < shared < whole


# Divergence


def test_a_diverging_run_stops_and_keeps_the_round_before(make, tmp_path, monkeypatch, Listener):
    make(rounds=2).run(tmp_path / "good")
    experiment = make(rounds=4)
    watch = Listener(
        lambda done: done.round == 2 and monkeypatch.setattr("fedshift.engines.sequential.client_step_", broken)
    )

    def broken(plan, job, x, y, key):
        job, loss = client_step_(plan, job, x, y, key)
        return job, loss * float("nan") if job.done - job.start == 2 else loss

    with pytest.raises(Diverged) as failed:
        experiment.run(tmp_path / "run", callback=watch)
    assert "client 'ann', round 3, step 2 of 4: loss nan. Lower the learning rate, or check the data" in str(
        failed.value
    )
    kept = [load_checkpoint(tmp_path / run / "trials/fedbn-seed0/checkpoint.safetensors") for run in ("good", "run")]
    assert kept[1][1] == kept[0][1]
    assert all(torch.equal(tensor, kept[1][0][name]) for name, tensor in kept[0][0].items())
    assert {row["round"] for row in rows_of(tmp_path / "run", "fedbn-seed0")} == {1, 2}


# Selection


def test_best_is_the_first_round_of_the_best_validation_accuracy_and_its_model_is_kept(make, tmp_path):
    settings = {"rounds": 12, "validation": 0.3, "evaluate_every": 2, "participation": 2, "lr": 0.1, "seeds": 2}
    for select in ("last", "best"):
        make(**settings, select=select).run(tmp_path / select)
    bests = []
    for seed in range(2):
        rows = rows_of(tmp_path / "best", f"fedbn-seed{seed}")
        reached = {}
        for number in range(2, 13, 2):
            found = [r for r in rows if (r["round"], r["split"], r["model"]) == (number, "validation", "personal")]
            reached[number] = (len(found), float(np.mean([sum(r["hits"]) / r["samples"] for r in found])))
        bests.append(max(reached, key=reached.get))
        trial = tmp_path / "best" / "trials" / f"fedbn-seed{seed}"
        assert load_checkpoint(trial / "best.safetensors")[1]["round"] == bests[-1]
        assert load_checkpoint(trial / "checkpoint.safetensors")[1]["round"] == 12
        assert not (tmp_path / "last" / "trials" / f"fedbn-seed{seed}" / "best.safetensors").exists()
    assert min(bests) < 12
    assert find_reported_rounds(read_summary(tmp_path / "best")).tolist() == bests
    assert find_reported_rounds(read_summary(tmp_path / "last")).tolist() == [12] * 2


@pytest.mark.slow
def test_a_round_that_measured_fewer_clients_is_never_the_best(make, tmp_path):
    for seed in range(4):
        make(rounds=6, validation=0.3, participation=1, select="best", seeds=[seed], lr=0.0).run(tmp_path / str(seed))
        trial = tmp_path / str(seed) / "trials" / f"fedbn-seed{seed}"
        (best, facts), (last, _) = (load_checkpoint(trial / f"{name}.safetensors") for name in ("best", "checkpoint"))
        assert torch.equal(best["clients/steps"] > 0, last["clients/steps"] > 0)
        assert find_reported_rounds(read_summary(tmp_path / str(seed))).tolist() == [facts["round"]]


# What is written


def test_float_images_and_features_are_shown_or_left_out(tmp_path):
    import fedshift

    random = np.random.default_rng(0)
    y = np.arange(12) % 3
    for x, shown in ((random.normal(size=(12, 8, 8)), (8, 8, 8, 1)), (random.normal(size=(12, 5)), None)):
        model = "small-cnn" if shown else (lambda shape, classes: nn.Linear(shape[0], classes))
        data, out = fedshift.federation({"a": (x, y, x, y)}), tmp_path / str(x.ndim)
        result = fedshift.compare([fedshift.fedavg()], data=data, model=model, rounds=1, out=out)
        assert {name: image.shape for name, image in result.summary.samples.items()} == ({"a": shown} if shown else {})


def test_only_a_run_is_read(tmp_path):
    with pytest.raises(UsageError, match="holds no run: give a directory that `fedshift run` or `compare` wrote"):
        read_summary(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="holds no run"):
        read_summary(tmp_path / "file")
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(FedshiftError, match="is damaged"):
        read_summary(tmp_path)


def test_each_trial_is_made_once(make, tmp_path, monkeypatch):
    made = []

    def count(self, method, seed, executor=None):
        made.append((method, seed))
        return make_trial(self, method, seed, executor)

    make_trial = Experiment.make_trial
    monkeypatch.setattr(Experiment, "make_trial", count)
    both = [(method, seed) for seed in (0, 1) for method in ("fedavg", "fedbn")]
    make(methods="fedavg,fedbn", seeds=2, rounds=1).run(tmp_path / "run")
    assert made == both
    made.clear()
    make(methods="fedavg,fedbn", seeds=2, rounds=2).run(tmp_path / "run", resume=True)
    assert made == both


def test_several_callbacks_hear_every_event():
    heard = []

    class Listening(Callback):
        def __getattribute__(self, name):
            return lambda *given: heard.append((name, *given))

    events = [name for name in vars(Callback) if not name.startswith("_")]
    for name in events:
        given = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
        getattr(Callbacks(Listening(), Listening()), name)(*given)
        assert heard[-2:] == [(name, *given)] * 2
    assert len(heard) == 2 * len(events) >= 14


def test_the_family_of_comparisons_is_recorded_and_stays(make, tmp_path):
    given = {"methods": "fedavg, fedprox(mu=0.1), fedbn", "rounds": 1}
    assert make(**given, compare_with="fedprox(mu=0.10)").run(tmp_path / "run")
    assert read_summary(tmp_path / "run").compare_with == "fedprox(mu=0.1)"
    for other, told in ((None, "compare_with='none'"), ("fedavg", "compare_with='fedavg'")):
        with pytest.raises(UsageError, match="begun to compare pairs with fedprox") as refused:
            make(**given, compare_with=other).run(tmp_path / "run", resume=True)
        assert str(refused.value).startswith(told)
    assert make(**given, compare_with="fedprox(mu=0.1)").run(tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match="begun with no margin, and a margin must not be chosen"):
        make(**given, compare_with="fedprox(mu=0.1)", margin=0.02).run(tmp_path / "run", resume=True)
    for other, told in (("single", "give one of several methods; here are fedavg"), ("fedbm", "did you mean 'fedbn'")):
        with pytest.raises(UsageError, match=told) as refused:
            make(**given, compare_with=other)
        assert "compare_with" in refused.value.settings
