"""The Python interface: its example, what a comparison gives back, and what it refuses."""

import dataclasses
import doctest
import gc
import inspect
import re
import shutil
import tomllib
from functools import partial
from pathlib import Path
from typing import get_type_hints
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedshift
from fedshift.api import runs
from fedshift.config.spec import CompareSpec
from fedshift.data.far_values import FarValues
from fedshift.evaluation.policy import parse_policies
from fedshift.experiments.callbacks import Callback
from fedshift.experiments.compare_arguments import CompareArguments
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.run_directory import RunDirectory
from fedshift.results.trial_records import load_facts
from fedshift.utils.errors import FedshiftError, UsageError
from tests.conftest import ARRAYS, images


@pytest.mark.slow
def test_the_example_of_the_module_is_true():
    assert doctest.testmod(runs).failed == 0
    assert len(doctest.DocTestFinder().find(runs)[0].examples) >= 4


def test_every_argument_of_compare_has_its_line():
    told = re.findall(r"^    (\w+): ", inspect.getdoc(fedshift.compare), re.MULTILINE)
    assert told[: -len(("UsageError", "FedshiftError"))] == list(inspect.signature(fedshift.compare).parameters)


def test_settings_of_compare_are_those_of_the_command_line():
    arguments, types = inspect.signature(fedshift.compare).parameters, get_type_hints(CompareSpec)
    beside = arguments.keys() - {each.name for each in dataclasses.fields(CompareSpec)}
    assert beside == {"out", "resume", "jobs", "progress", "callbacks", "stop"}
    wider = set(inspect.get_annotations(CompareArguments)) - beside
    for each in dataclasses.fields(CompareSpec):
        given = arguments[each.name]
        if each.name in ("methods", "data"):
            assert given.default is inspect.Parameter.empty
        else:
            assert given.default == each.default, each.name
        assert each.name in wider or given.annotation == types[each.name], each.name
    assert list(arguments)[:4] == ["methods", "data", "model", "seeds"]
    with pytest.raises(TypeError, match=r"compare\(\): missing a required argument: 'data'"):
        fedshift.compare("fedavg")
    with pytest.raises(TypeError, match=r"compare\(\): unknown argument 'batchsize': did you mean 'batch_size'"):
        fedshift.compare([], data=None, batchsize=3)


def test_all_that_is_promised_is_there():
    assert len(set(fedshift.__all__)) == len(fedshift.__all__)
    for name in fedshift.__all__:
        assert getattr(fedshift, name) is not None
        assert name in dir(fedshift)
    assert set(fedshift._MODULE) == set(fedshift.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'fedbm'"):
        fedshift.fedbm  # noqa: B018


@pytest.fixture(scope="module")
def compared():
    """FedAvg and FedBN over two seeds and two rounds, trained once."""
    data = fedshift.federation(ARRAYS, name="tiny")
    how = {"rounds": 2, "seeds": 2, "batch_size": 8, "statistics": "running"}
    return fedshift.compare([fedshift.fedavg(), fedshift.fedbn()], data=data, **how)


@pytest.mark.parametrize("module", ["", "aggregation", "flower", "models", "tasks"])
def test_what_completion_offers_is_public(module):
    """The package's own names, and no imports of others."""
    found = getattr(fedshift, module) if module else fedshift
    offered = [name for name in dir(found) if not name.startswith("_")]
    assert offered
    assert set(fedshift.__all__) <= set(offered) or module
    for name in offered:
        value = getattr(found, name)
        assert (
            name in getattr(found, "__all__", ()) or inspect.ismodule(value) or value.__module__.startswith("fedshift.")
        ), name
        assert not inspect.ismodule(value) or value.__name__.startswith("fedshift."), name


def test_history_is_the_metric_of_each_evaluated_round(compared):
    table, history = compared.table(), compared.history()
    assert list(history.columns) == ["method", "seed", "round", "client", "value"]
    last = history[history["round"] == history["round"].max()]
    for method in compared.summary.methods:
        for client in compared.summary.clients:
            values = last[(last["method"] == method) & (last["client"] == client)]["value"]
            assert values.mean() == pytest.approx(table.loc[client, (method, "mean")])
    with pytest.raises(UsageError, match="split"):
        compared.history(split="training")


def test_predictions_are_those_that_were_counted(compared, tiny):
    table = compared.table()
    for client in tiny.clients:
        samples = client.test.copy_rows(slice(None)).numpy()
        predicted = compared.predict("fedbn", client.name, samples, seed=0)
        hits = [name == str(label) for name, label in zip(predicted, client.test.y.tolist(), strict=True)]
        rows = compared.records.query(
            f"method == 'fedbn' and seed == 0 and client == '{client.name}' and split == 'test'"
        )
        counted = (
            rows[(rows["moment"] == "loaded") & (rows["model"] == "personal")].sort_values("round")["hits"].iloc[-1]
        )
        assert sum(hits) == sum(counted)
        assert compared.predict("fedbn", client.name, samples[0], seed=0) == predicted[0]
    assert len(table)


def test_the_model_of_the_server_predicts_where_all_clients_are_scaled_alike(compared, tiny):
    samples = tiny.client("bob").test.copy_rows(slice(0, 5)).numpy()
    alike = len({client.train.normalization for client in compared.experiment.data.clients}) == 1
    assert alike
    assert compared.predict("fedavg", None, samples) == compared.predict("fedavg", "bob", samples)
    with pytest.raises(UsageError, match="fedbn has no global model: name a client"):
        compared.predict("fedbn", None, samples)
    rng = np.random.default_rng(0)
    rows = {name: pd.DataFrame({"age": rng.normal(at, 1, 30), "ill": [0, 1] * 15}) for name, at in (("a", 0), ("b", 9))}
    scaled = fedshift.compare("fedavg", data=rows, target="ill", rounds=1)
    with pytest.raises(UsageError, match="name the client whose scaling these samples have, one of a, b"):
        scaled.predict("fedavg", None, pd.DataFrame({"age": [3.0]}))
    with pytest.warns(FarValues, match="column 'age': about .* larger") as warned:
        scaled.predict("fedavg", "b", pd.DataFrame({"age": [9000.0, 9001.0]}))
    assert warned[0].filename == __file__


def test_a_prediction_that_depends_on_other_samples_is_refused(tiny):
    def make(shape, classes):
        norm = nn.BatchNorm2d(2, track_running_stats=False)
        return nn.Sequential(nn.Conv2d(shape[0], 2, 3), norm, nn.Flatten(), nn.LazyLinear(classes))

    result = fedshift.compare("fedavg", data=tiny, model=make, rounds=1)
    with pytest.raises(UsageError, match="layer '1' normalizes by the batch"):
        result.predict("fedavg", "ann", tiny.client("ann").test.copy_rows(slice(0, 1)).numpy())


def test_tables_derive_from_the_records(compared):
    rows = compared.summary.rows
    last = rows[(rows["round"] == 2) & (rows["split"] == "test") & (rows["model"] == "personal")]
    table = compared.table()
    assert list(table.index) == ["ann", "bob", "cid", "macro", "pooled", "worst client"]
    for method in ("fedavg", "fedbn"):
        of = last[(last["method"] == method) & (last["client"] == "bob")]
        each = [sum(hits) / 12 for hits in of["hits"]]
        assert table.loc["bob", (method, "mean")] == pytest.approx(np.mean(each))
        assert table.loc["bob", (method, "std")] == pytest.approx(np.std(each, ddof=1))
    assert list(compared.table(model="global").columns.get_level_values("method").unique()) == ["fedavg"]
    assert (compared.table("loss") > 0).loc["macro", ("fedbn", "mean")]
    with pytest.raises(UsageError, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        compared.table("acuracy")


def test_differences_are_to_fedavg_or_the_first(compared):
    whole, other = compared.differences(), compared.differences("fedbn", metric="loss")
    assert [*whole.index] == [("fedavg", "fedbn", name) for name in ("mean over clients", "ann", "bob", "cid")]
    assert [*other.index.unique("method")] == ["fedavg"]
    loss = compared.table("loss")
    gap = loss.loc["macro", ("fedavg", "mean")] - loss.loc["macro", ("fedbn", "mean")]
    assert other["difference"].iloc[0] == pytest.approx(gap)


def test_cases_give_the_table_and_a_file(compared, cli, undrawn):
    cases = compared.cases()
    assert [*cases.columns[:7]] == ["method", "seed", "client", "case", "patient", "truth", "prediction"]
    right = (cases["truth"] == cases["prediction"]).groupby([cases["client"], cases["method"], cases["seed"]]).mean()
    means = right.groupby(["client", "method"]).mean()
    table = compared.table()
    assert all(
        means[client, method] == pytest.approx(table.loc[client, (method, "mean")]) for client, method in means.index
    )
    assert "Cases: " in cli("report", compared.directory, "--cases").out
    assert len(pd.read_csv(compared.directory / "tables" / "cases.csv")) == len(cases)
    for flag, told in (("--margin 0", "give a number above 0"), ("--margin 0.02", "")):
        outcome = cli("report", compared.directory, *flag.split())
        assert (outcome.code == 0, told in outcome.err) == (not told, True)


def test_the_report_is_written_where_asked(compared, tmp_path, undrawn):
    assert compared.report(tmp_path / "page.html") == tmp_path / "page.html"
    assert "<html" in (tmp_path / "page.html").read_text()


def test_models_are_those_that_were_measured(compared, tiny):
    rows = compared.summary.rows
    for method, client, model in (
        ("fedavg", None, "global"),
        ("fedbn", "cid", "personal"),
        ("fedavg", "bob", "personal"),
    ):
        for seed in (0, 1):
            network = compared.model(method, client, seed)
            assert not network.training
            data = tiny.client(client or "ann").test
            with torch.no_grad():
                guess = network(data.inputs(slice(None))).argmax(1)
            row = rows[
                (rows["method"] == method) & (rows["seed"] == seed) & (rows["round"] == 2) & (rows["split"] == "test")
                & (rows["client"] == (client or "ann")) & (rows["model"] == model)
            ].iloc[0]  # fmt: skip
            assert int((guess == data.y).sum()) == sum(row["hits"])


def test_models_of_different_clients_differ_where_they_should(compared):
    ann, bob = compared.model("fedbn", "ann").state_dict(), compared.model("fedbn", "bob").state_dict()
    same = {name for name, tensor in ann.items() if torch.equal(tensor, bob[name])}
    assert {name for name in ann if not name.startswith("bn")} == same - {"bn1.num_batches_tracked"} - {
        name for name in same if name.startswith("bn")
    }
    assert not torch.equal(ann["bn1.running_mean"], bob["bn1.running_mean"])
    assert torch.equal(ann["conv1.weight"], bob["conv1.weight"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"method": "fedbn"}, "fedbn has no global model: name a client, one of ann, bob, cid"),
        ({"method": "fedbm"}, "unknown method 'fedbm': did you mean 'fedbn'? allowed are fedavg, fedbn"),
        ({"method": "fedbn", "client": "bbo"}, "unknown client 'bbo': did you mean 'bob'? allowed are ann, bob, cid"),
        ({"method": "fedavg", "seed": 7}, "no seed 7 here: there are 0, 1"),
    ],
)
def test_models_that_do_not_exist_are_refused(compared, asked, said):
    with pytest.raises(UsageError) as refused:
        compared.model(**asked)
    assert str(refused.value) == said


@pytest.mark.slow
def test_each_policy_is_measured_on_a_client_that_comes_later_as_the_run_itself_would(tiny):
    new, settings = tiny.select_clients(["cid"]), {"rounds": 1, "seeds": 2, "batch_size": 8}
    both = [fedshift.fedavg(), fedshift.fedbn()]
    result = fedshift.compare(both, data=tiny.select_clients(["ann", "bob"]), **settings)
    table = result.adapt(new)
    assert list(table.index) == ["cid", "macro"]
    assert list(table.columns.unique(0)) == [
        *(f"fedavg: {name}" for name in ("global model", "mixed", "reestimate", "tent", "finetune", "finetune_bn")),
        *(f"fedbn: {policy}" for policy in parse_policies(None)),
    ]
    within = fedshift.compare(both, data=tiny, newcomers=["cid"], unseen="nearest", **settings).table()
    for title, method in (("fedavg: global model", "fedavg"), ("fedbn: nearest", "fedbn")):
        assert table.loc["cid", title].tolist() == within.loc["cid", method].tolist()
    same = fedshift.Comparison(result.experiment, result.directory)
    again = same.adapt(new, "reestimate, tent(steps=1)", methods="fedbn")
    pd.testing.assert_frame_equal(again, table[["fedbn: reestimate", "fedbn: tent"]])


def test_what_a_person_should_know_of_a_new_client_is_a_warning(compared, tiny, tmp_path):
    with pytest.warns(UserWarning, match="client 'bob' is not unknown: the run has its samples, as client 'bob'"):
        compared.adapt(tiny.select_clients(["bob"]), ["average"], methods="fedbn")
    few = tiny.select_clients(["cid"]).map_splits(lambda split: split.replace(x=255 - split.store)).limit_samples(1)
    with pytest.warns(UserWarning, match="client 'cid': one sample has no variance to normalize by, so without mixed"):
        table = compared.adapt(few, methods="fedbn", rounds=2)
    assert list(table.columns.unique(0)) == ["fedbn: average", "fedbn: nearest"]
    for asked, said in (
        ({"policies": "nearst"}, "unknown policy for new clients 'nearst': did you mean 'nearest'"),
        ({"methods": ["fedbm"]}, "unknown method 'fedbm': did you mean 'fedbn'"),
        ({"rounds": 0}, "rounds=0: must be at least 1"),
    ):
        with pytest.raises(UsageError, match=said):
            compared.adapt(few, **asked)
    part = fedshift.Comparison(compared.experiment, Path(shutil.copytree(compared.directory, tmp_path / "part")))
    (part.directory / "trials" / "fedbn-seed1" / "checkpoint.safetensors").unlink()
    with pytest.raises(FedshiftError, match="fedbn, seed 1, is left out: no checkpoint at"):
        part.adapt(few, "average", methods="fedbn")


@pytest.mark.slow
def test_what_clients_and_server_see_is_that_of_the_command_line(compared, make, tmp_path):
    make(methods="fedavg,fedbn", seeds=2, rounds=2).run(tmp_path / "run")
    from_disk, ours = fedshift.read_run(tmp_path / "run").features(samples=4), compared.features(samples=4)
    pd.testing.assert_frame_equal(ours.similarity, from_disk.similarity)
    pd.testing.assert_frame_equal(ours.distances, from_disk.distances)
    one = compared.features(samples=4, clients=["ann", "bob"], methods="fedbn", seeds=1)
    assert one.similarity["method"].tolist() == ["fedbn"]
    assert one.clients == ("ann", "bob")


def test_the_model_of_a_selected_run_is_that_of_the_reported_round(tiny, tmp_path):
    result = fedshift.compare(
        [fedshift.fedavg()], data=tiny.hold_out(0.3), rounds=6, lr=0.1, select="best", out=tmp_path / "run"
    )
    trial = tmp_path / "run" / "trials" / "fedavg-seed0"
    best = load_checkpoint(trial / "best.safetensors")
    assert best[1]["round"] < 6
    assert torch.equal(result.model("fedavg").state_dict()["conv1.weight"], best[0]["server/shared/conv1.weight"])


def test_a_temporary_directory_lives_as_long_as_the_result(tiny):
    result = fedshift.compare([fedshift.fedavg()], data=tiny, rounds=1)
    directory = result.directory
    assert directory.exists()
    del result
    gc.collect()
    assert not directory.exists()


def test_a_directory_of_ones_own_is_kept_and_resumed(tiny, tmp_path, assert_same):
    class Rounds(Callback):
        count = 0

        def on_round_end(self, done):
            self.count += 1

    settings = {"data": tiny, "optimizer": fedshift.SGD(lr=0.01, momentum=0.9, keep=True), "batch_size": 8}
    fedshift.compare([fedshift.fedbn()], **settings, rounds=1, out=tmp_path / "run")
    gc.collect()
    watch = Rounds()
    fedshift.compare([fedshift.fedbn()], **settings, rounds=3, out=tmp_path / "run", resume=True, callbacks=watch)
    assert watch.count == 2
    fedshift.compare([fedshift.fedbn()], **settings, rounds=3, out=str(tmp_path / "whole"))
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_the_same_call_gives_the_same_numbers_and_leaves_torchs_generator_alone(tiny):
    before = torch.random.get_rng_state()
    first, second = (fedshift.compare([fedshift.fedbn()], data=tiny, rounds=1) for _ in range(2))
    assert first.summary.rows.equals(second.summary.rows)
    assert torch.equal(before, torch.random.get_rng_state())


def test_arrays_of_ones_own_and_a_network_of_ones_own(tiny):
    random = np.random.default_rng(0)
    y = np.arange(20) % 2
    x = random.normal(size=(20, 4)) + 3 * y[:, None]
    made = []

    def network(shape, classes):
        made.append((shape, classes))
        return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))

    result = fedshift.compare(
        [fedshift.fedbn()], data=fedshift.federation({"a": (x, y, x, y), "b": (x - 1, y, x - 1, y)}), model=network,
        rounds=8, lr=0.1, batch_size=None,
    )  # fmt: skip
    assert set(made) == {((4,), 2)}
    assert result.table().loc["macro", ("fedbn", "mean")] > 0.9
    assert result.summary.rows["auc"].max() > 0.9


def slow():
    return fedshift.SGD(lr=0.1)


def scheduled():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    return torch.optim.lr_scheduler.StepLR(optimizer, 2).optimizer


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"methods": []}, "there is no method"),
        (
            {"methods": 3},
            "methods: 3 is not a method: give texts such as 'fedbn+fedprox(mu=0.1)', methods such as fedshift",
        ),
        ({"methods": ["fedavg", None]}, "methods: None is not a method: give texts"),
        ({"methods": [len]}, "methods: len (builtins) failed: len() takes exactly one argument"),
        ({"methods": [dict]}, "methods: {} is not a method"),
        ({"data": None}, "data of type NoneType: give a name, a directory, a Federation"),
        ({"data": 3}, "data of type int: give a name, a directory, a Federation"),
        ({"data": Path("nowhere")}, "data: there is no "),
        ({"rounds": "3"}, "rounds='3': should be a valid integer"),
        ({"rounds": 3.0}, "rounds=3.0: should be a valid integer"),
        ({"rounds": True}, "rounds=True: should be a valid integer"),
        ({"rounds": None}, "rounds=None: should be a valid integer"),
        ({"lr": "0.1"}, "lr='0.1': should be a valid number"),
        ({"lr": True}, "lr=True: should be a valid number"),
        ({"rounds": 2.5, "lr": -1.0}, "rounds=2.5: should be a valid integer; lr=-1.0: should be greater than or"),
        ({"allow_single_class": 1}, "allow_single_class=1: should be a valid boolean"),
        ({"allow_single_class": "yes"}, "allow_single_class='yes': should be a valid boolean"),
        ({"select": 3}, "select=3: should be 'last' or 'best'"),
        ({"engine": 3}, "engine=3: should be a valid string"),
        ({"device": 0}, "device=0: should be a valid string"),
        ({"split": lambda data: data}, "split=<function "),
        ({"domains": 3}, "domains=3: should be names of clients, in a list"),
        ({"moments": 3}, "moments=3: should be a valid string"),
        ({"batch_size": 2.5}, "batch_size=2.5: should be a valid integer"),
        ({"batch_size": True}, "batch_size=True: should be a valid integer"),
        ({"participation": True}, "participation=True: should be a valid number"),
        ({"participation": "half"}, "participation='half': should be a number, ordered or shuffled"),
        ({"seeds": True}, "seeds=True: should be a number of seeds, 1 or more, or the seeds themselves"),
        ({"seeds": 2.0}, "seeds=2.0: should be a number of seeds, 1 or more, or the seeds themselves"),
        ({"seeds": None}, "seeds=None: should be a number of seeds, 1 or more, or the seeds themselves"),
        ({"seeds": [0, 1.5]}, "seeds=[0, 1.5]: should be a number of seeds, 1 or more, or the seeds themselves"),
        ({"seeds": [-1]}, "seeds=[-1]: should be a number of seeds, 1 or more, or the seeds themselves"),
        ({"seeds": []}, "seeds=[]: should be a number of seeds, 1 or more, or the seeds themselves"),
        ({"seeds": [1, 1]}, "seeds=[1, 1]: should be a number of seeds, 1 or more, or the seeds themselves"),
        ({"newcomers": 3}, "newcomers=3: should be names of clients, in a list or a text with commas"),
        ({"newcomers": [3]}, "newcomers=[3]: should be names of clients"),
        ({"newcomers": ["bbo"]}, "unknown client 'bbo': did you mean 'bob'?"),
        ({"model": nn.Linear(2, 2)}, "model is a Linear: give a name, or a function (sample_shape, classes)"),
        ({"model": 3}, "model is a int: give a name, or a function"),
        ({"model": lambda: nn.Linear(2, 2)}, "takes 0 positional arguments but 2 were given): give a function"),
        (
            {"model": lambda shape, classes: 3},
            "the model's function made a int, not a torch.nn.Module: return the network in <lam",
        ),
        ({"loss": 3}, "loss=3 is not a loss: give a text such as 'cross_entropy'"),
        ({"loss": nn.MSELoss}, "loss MSELoss ("),
        ({"optimizer": 3}, "optimizer=3 is unknown: allowed are sgd and adamw"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer=LBFGS evaluates the loss"),
        ({"optimizer": fedshift.SGD(lr=0.1), "lr": 0.2}, "lr and optimizer=SGD(lr=0.1"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1), "lr": 0.01}, "lr and optimizer=SGD(lr=0.1"),
        (
            {"optimizer": slow(), "lr": 0.01},
            "keep=False, momentum=0.0, nesterov=False): lr=0.01 differs from the optimizer's",
        ),
        (
            {"optimizer": fedshift.SGD(lr=0.1, schedule=fedshift.Cosine(rounds=3)), "schedule": "constant"},
            "schedule and optimizer=SGD(",
        ),
        ({"optimizer": "sgd(momentum=0.5, momentum=0.9)"}, "an argument is given twice; sgd takes"),
        (
            {"optimizer": "tests.test_api:slow"},
            "lr=0.01 differs from the optimizer's: set lr only in the optimizer, or let what makes it take lr",
        ),
        ({"optimizer": scheduled()}, "optimizer=SGD differs in 'initial_lr' from a new one with its arguments: give"),
        ({"optimizer": fedshift.SGD(lr=0.1), "schedule": "step(every=2)"}, "schedule and optimizer=SGD(lr=0.1"),
        ({"schedule": 3}, "schedule=3 is not a schedule: give a text such as 'cosine(floor=0.1)', fedshift.Cosine"),
        (
            {"augment": lambda x, rng: x[:1]},
            "made torch.float32 [1, 3, 8, 8] of torch.float32 [2, 3, 8, 8]: return images",
        ),
        (
            {"augment": lambda x, rng: None},
            "made NoneType of torch.float32 [2, 3, 8, 8]: return images of the same kind",
        ),
        ({"augment": lambda x: x}, "called with images [2, 3, 8, 8] and a generator, failed: "),
        ({"augment": 3}, "augment=3 is not an augmentation: give a text such as 'flip(), rotate(degrees=30)'"),
        ({"out": 3}, "out=3: give a directory, or None"),
        ({"resume": 3}, "resume=3: give a directory, True or False"),
        ({"resume": True}, "resume=True: say which run to continue (out=DIRECTORY, or resume=DIRECTORY)"),
        ({"resume": "a", "out": "b"}, "out='b' and resume='a': a resumed run stays in its directory; give one"),
        ({"resume": "nowhere"}, "nowhere holds no run to resume: give the directory that holds its config.toml"),
        ({"progress": "yes"}, "progress='yes': give True or False"),
        ({"jobs": 0}, "jobs=0: give a number of trials of 1 or more, or 'auto'"),
        ({"jobs": "all"}, "jobs='all': give a number of trials of 1 or more, or 'auto'"),
        ({"callbacks": 3}, "callbacks=3 is not a callback: give a fedshift.Callback, a subclass, or a function"),
        ({"stop": True}, "stop=True: give an Event"),
    ],
)
def test_what_cannot_be_done_is_refused(tiny, changed, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        fedshift.compare(**{"methods": ["fedavg"], "data": tiny} | changed)
    assert said in str(refused.value)
    assert not any(tmp_path.iterdir())


def test_data_that_cannot_be_used_are_refused(tiny):
    with pytest.raises(UsageError, match="has no client: give it at least one"):
        fedshift.compare([fedshift.fedavg()], data=tiny.select_clients([]))
    x, y = np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.int64)
    lone = fedshift.federation({"a": (x, y, x, y)}, classes=2)
    with pytest.raises(UsageError, match="client 'a' has only class 0"):
        fedshift.compare([fedshift.fedavg()], data=lone)
    assert fedshift.compare([fedshift.fedavg()], data=lone, rounds=1, allow_single_class=True).table().size


def test_a_comparison_that_diverged_raises(tiny, tmp_path):
    with pytest.raises(FedshiftError, match="training diverged"):
        fedshift.compare([fedshift.fedavg()], data=tiny, lr=1e29, batch_size=8, out=tmp_path / "run")
    assert load_facts(tmp_path / "run" / "trials" / "fedavg-seed0" / "checkpoint.safetensors")["round"] == 0


def test_validation_accuracy_is_a_table_of_its_own_to_choose_by(tiny, tmp_path):
    result = fedshift.compare([fedshift.fedavg(), fedshift.single()], data=tiny.hold_out(0.25), rounds=2, out=tmp_path)
    table, rows = result.table(split="validation"), result.summary.lag
    rows = rows[(rows["split"] == "validation") & (rows["round"] == 2) & (rows["model"] == "personal")]
    for method, found in rows.groupby("method"):
        shares = [sum(hits) / samples for hits, samples in zip(found["hits"], found["samples"], strict=True)]
        assert table.loc["macro", (method, "mean")] == pytest.approx(sum(shares) / len(shares))
    with pytest.raises(UsageError, match="unknown split 'train': allowed are test, validation"):
        result.table(split="train")
    assert (
        fedshift.compare([fedshift.fedavg()], data=tiny, rounds=1)
        .table(split="validation")["fedavg"]["mean"]
        .isna()
        .all()
    )


def test_more_participants_than_clients_are_refused(tiny):
    with pytest.raises(UsageError, match="participation=9: only 3 clients train"):
        fedshift.compare([fedshift.fedavg()], data=tiny, rounds=1, participation=9)


# One run on the command line and in Python


def test_a_run_from_python_is_that_of_the_command_line_bit_for_bit(
    cli, unpublished, tiny_folder, tmp_path, assert_same
):
    settings = {"rounds": 2, "batch_size": 8, "lr": 0.03, "seeds": 2, "validation": 0.2, "select": "best"}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert cli("compare", "--data", tiny_folder, "--methods", "fedavg,fedbn", *flags, "--out", "theirs").code == 0
    fedshift.compare([fedshift.fedavg, "fedbn"], data=tiny_folder, **settings, out="ours")
    assert_same(tmp_path / "ours", tmp_path / "theirs")
    assert (tmp_path / "ours/config.toml").read_text() == (tmp_path / "theirs/config.toml").read_text()


@pytest.mark.slow
def test_a_run_from_python_is_continued_adapted_and_reported_on_the_command_line(
    cli, undrawn, tiny_folder, tmp_path, assert_same
):
    settings = {"data": str(tiny_folder), "batch_size": 8, "model": "small-cnn", "domains": ["ann", "bob"]}
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.02, betas=(0.8, 0.99))
    fedshift.compare(["fedbn"], **settings, optimizer=optimizer, rounds=1, out="run")
    fedshift.compare(["fedbn"], **settings, optimizer=optimizer, rounds=3, out="whole")
    outcome = cli("compare", "--resume", "run", "--rounds", 3)
    assert (outcome.code, outcome.err) == (0, "")
    assert_same(tmp_path / "run", tmp_path / "whole")
    assert "macro" in cli("report", "run").out
    outcome = cli("adapt", "run", "--data", tiny_folder, "--clients", "cid", "--policies", "average")
    assert (outcome.code, outcome.err) == (0, "")
    ours = fedshift.read_run("run").adapt({"cid": dict(np.load(tiny_folder / "cid.npz"))}, "average")
    assert f"{100 * ours.loc['cid', ('fedbn: average', 'mean')]:.2f}" in outcome.out


def network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))


@pytest.fixture
def own_run(tiny, tmp_path, monkeypatch):
    """A run whose network is a function of a notebook, and its data arrays in memory."""
    monkeypatch.setattr(network, "__module__", "__main__")
    fedshift.compare(["fedavg", "fedbn"], data=tiny, model=network, rounds=1, batch_size=8, out=tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "words", [("compare", "--resume", "run"), ("adapt", "run", "--data", "tiny"), ("features", "run")], ids=" ".join
)
def test_what_a_file_cannot_hold_is_said_where_it_is_needed(cli, own_run, tiny_folder, words):
    outcome = cli(*words)
    assert outcome.code == 2
    assert "run/config.toml: data was given from Python, a Federation 'tiny' of 3 clients, which no" in outcome.err
    written = tomllib.loads((own_run / "config.toml").read_text())
    assert written["python"]["model"].startswith("function network (")
    assert written["python"]["model"].endswith(f"test_api.py, line {network.__code__.co_firstlineno})")
    assert written["methods"] == "fedavg,fedbn"


@pytest.mark.slow
def test_what_a_file_cannot_hold_is_given_again(cli, undrawn, own_run, tiny, tmp_path):
    assert "macro" in cli("report", "run").out
    again = fedshift.read_run(own_run, data=tiny, model=network)
    assert list(again.table().columns.unique(0)) == ["fedavg", "fedbn"]
    assert isinstance(again.model("fedbn", client="ann")[1], nn.Linear)
    with pytest.raises(UsageError, match=r"config\.toml: model was given from Python, function network"):
        fedshift.read_run(own_run, data=tiny).model("fedbn", client="ann")
    longer = fedshift.compare(
        "fedavg,fedbn", data=tiny, model=network, rounds=2, batch_size=8, resume=own_run, progress=False
    )
    assert longer.records["round"].max() == 2
    rated = fedshift.read_run(longer.directory, data=tiny, model=network, optimizer=torch.optim.SGD, seeds=[0])
    assert rated.model("fedbn", client="ann")[1].weight.equal(longer.model("fedbn", client="ann")[1].weight)
    with pytest.raises(UsageError, match="unknown argument 'modle': did you mean 'model'"):
        fedshift.read_run(own_run, modle=network)
    with pytest.raises(UsageError, match="holds no run"):
        fedshift.read_run(tmp_path / "nowhere")


def test_a_run_of_the_command_line_is_read_in_python(cli, unpublished, tiny_folder, tmp_path):
    words = ("run", "--data", tiny_folder, "--method", "fedbn", "--rounds", 2, "--batch-size", 8, "--participation", 1)
    assert cli(*words, "--out", "run").code == 0
    result = fedshift.read_run("run")
    assert repr(result) == "<Comparison of fedbn on tiny in run>"
    assert result.experiment.settings.participation == 1
    trained = {name for rows in [result.records] for name in rows[rows["split"] == "train"]["client"]}
    assert not result.model("fedbn", client=min(trained)).training


# What is shown


@pytest.mark.slow
def test_printing_a_result_shows_the_tables_of_the_command_line(cli, undrawn, compared):
    shown = cli("report", compared.directory).out
    lines = str(compared).splitlines()
    notes = [line for line in lines if line.startswith("note: ")]
    assert notes == [f"note: {notice}" for notice in compared.summary.notices]
    assert len(notes) == 2
    assert lines[-2:] == notes  # information comes last
    assert lines[0].startswith("BatchNorm's running statistics lag behind the weights: ")
    assert "(those with re-estimated ones: on the page and in tables/accuracy-reestimated)" in lines[0]
    assert lines[1].startswith("Test accuracy of the personal model in percent with running BatchNorm statistics, mean")
    printed = list(filter(None, map(str.strip, lines[:-2])))
    assert all(line in shown for line in printed)
    assert len(printed) == len(list(filter(None, map(str.strip, shown.splitlines())))) - 1  # that of the page


def test_a_notebook_shows_the_same_as_html(compared):
    page = ElementTree.fromstring(compared._repr_html_())
    table = compared.table()
    rows = [[cell.text or cell[0].text for cell in row] for row in page.findall("table")[0].iter("tr")]
    assert rows[0] == ["client", "fedavg", "fedbn"]
    bob = table.loc["bob", "fedbn"]
    assert rows[2] == ["bob", rows[2][1], f"{100 * bob['mean']:.2f} ({100 * bob['std']:.2f})"]
    words = " ".join("".join(page.itertext()).split())
    for sentence in (
        "Test accuracy of the personal model in percent",
        "2 seeds and 1 difference cannot decide",
        "bold",
    ):
        assert sentence.lower() in words.lower()


def test_latex_is_the_table_for_a_paper(compared):
    whole, bare = compared.to_latex(), compared.to_latex(caption="")
    assert whole.startswith("% \\usepackage{booktabs}\n\\begin{table}")
    said = "percent with running BatchNorm statistics, mean (std) over 2 seeds, last round."
    assert rf"\caption{{Test accuracy of the personal model in {said}}}" in whole
    assert r"\label{tab:accuracy}" in whole
    assert bare.startswith(r"\begin{tabular}{lrr}")
    assert bare in whole
    bob = 100 * compared.table().loc["bob", "fedbn"]
    line = next(line for line in compared.to_latex(digits=1).splitlines() if line.startswith("bob"))
    assert rf"$\mathbf{{{bob['mean']:.1f}}} \pm {bob['std']:.1f}$" in line  # as good as FedAvg
    loss = compared.to_latex("loss", caption="Losses & more", label="losses")
    assert r"\caption{Losses \& more.}" in loss
    assert r"\label{losses}" in loss
    assert "FedBN" not in compared.to_latex(model="global")
    turned = compared.to_latex(transpose=True, names={"fedbn": "ours", "bob": "B"})
    assert r"method & ann & B & cid & macro" in turned
    assert [line.split(" & ")[0] for line in turned.splitlines() if " & " in line][1:] == ["FedAvg", "ours"]
    with pytest.raises(UsageError, match="'bab'"):
        compared.to_latex(names={"bab": "B"})
    with pytest.raises(UsageError, match="unknown model 'local'"):
        compared.to_latex(model="local")


def test_records_and_scope_are_frames(compared):
    assert compared.records.equals(compared.summary.rows)
    scope = compared.scope("fedbn")
    assert not scope.loc["bn1.running_mean", ["load", "send"]].any()
    assert scope.loc["conv1.weight", ["load", "send", "trained"]].all()
    with pytest.raises(UsageError, match="unknown method 'fedbm': did you mean 'fedbn'"):
        compared.scope("fedbm")


def test_progress_is_shown_where_asked_and_reaches_the_callback_too(tiny, capsys, Listener):
    listener = Listener()
    fedshift.compare("fedbn", data=tiny, rounds=2, evaluate_every=1, batch_size=8, progress=True, callbacks=[listener])
    said = capsys.readouterr().out
    assert "fedbn seed 0 round 2/2: loss " in said
    assert [done.round for done in listener.rounds] == [1, 2]
    assert all(f"note: {notice}" in said for notice in listener.notices)
    fedshift.compare("fedbn", data=tiny, rounds=1)
    assert capsys.readouterr().out == ""


def test_data_are_looked_at_as_a_run_would_have_them(tiny_folder, cli, tmp_path):
    data = fedshift.load_data(tiny_folder, samples=9, domains=["cid", "ann"], validation=0.5)
    assert str(data).splitlines()[2].split() == ["cid", "5", "4", "12", "3"]
    run = fedshift.compare("fedavg", data=data, rounds=1, lr=0.0)
    assert list(run.summary.clients) == ["cid", "ann"]
    with pytest.raises(UsageError, match="unknown setting of data 'sample': did you mean 'samples'"):
        fedshift.load_data(tiny_folder, sample=9)
    with pytest.raises(UsageError, match="samples='9': should be a valid integer"):
        fedshift.load_data(tiny_folder, samples="9")


# What goes wrong later


def test_what_was_done_before_an_interruption_is_kept_and_said(tiny, Listener):
    def interrupt(done):
        if done.round == 2:
            raise KeyboardInterrupt

    settings = {"data": tiny, "batch_size": 8, "evaluate_every": 1}
    with pytest.raises(KeyboardInterrupt) as stopped:
        fedshift.compare("fedbn", **settings, rounds=4, callbacks=Listener(interrupt))
    (note,) = stopped.value.__notes__
    directory = re.match(r"Completed work is saved: compare\(\.\.\., resume='(.+?)'\) continues it, read_run\(", note)[
        1
    ]
    assert fedshift.read_run(directory).records["round"].max() == 2
    resumed = fedshift.compare("fedbn", **settings, rounds=4, resume=directory)
    assert resumed.table().equals(fedshift.compare("fedbn", **settings, rounds=4).table())
    shutil.rmtree(directory)


def test_what_other_methods_did_before_one_diverged_is_kept(tiny, tmp_path):
    with pytest.raises(FedshiftError, match="training diverged") as failed:
        fedshift.compare("fedprox(mu=1e30),fedavg", data=tiny, rounds=2, batch_size=8, out=tmp_path / "run")
    assert f"resume='{tmp_path / 'run'}'" in failed.value.__notes__[0]
    rest = fedshift.read_run(tmp_path / "run")
    assert rest.table()["fedavg"]["mean"].notna().all()
    assert "note: fedprox(mu=1e30), seed 0: training diverged" in str(rest)
    with pytest.raises(FedshiftError, match="training diverged"):
        fedshift.compare("fedavg", data=tiny, lr=1e29, batch_size=8, out=tmp_path / "none")
    none = str(fedshift.read_run(tmp_path / "none")).splitlines()
    assert "No round was evaluated yet, so there is nothing to report." in none


def test_errors_of_the_run_directory_are_those_of_the_command_line(tiny, tmp_path):
    settings = {"data": tiny, "batch_size": 8, "rounds": 1, "out": tmp_path / "run"}
    fedshift.compare("fedbn", **settings)
    with pytest.raises(UsageError, match=r"already holds a run: continue it \(resume='.*/run'\), or choose another"):
        fedshift.compare("fedbn", **settings)
    with pytest.raises(UsageError, match="this run was begun with another optimizer: then"):
        fedshift.compare("fedbn", **settings, lr=0.5, resume=True)
    held = RunDirectory(tmp_path / "run", resume=True)
    with pytest.raises(FedshiftError, match="run is in use by process "):
        fedshift.compare("fedbn", **settings, resume=True)
    held.close()
    checkpoint = tmp_path / "run/trials/fedbn-seed0/checkpoint.safetensors"
    content = bytearray(checkpoint.read_bytes())
    content[-100] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(FedshiftError, match=r"checkpoint .* is corrupt"):
        fedshift.compare("fedbn", **settings, resume=True)


class Fragile(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.last = nn.Linear(192, classes)

    def forward(self, x):
        if len(x) > 9:  # in evaluation, not in training
            raise KeyError("twelve")
        return self.last(x.flatten(1))


def build(shape, classes):
    return nn.Linear(shape, classes)  # a tuple is no number of features


def test_an_error_in_ones_own_code_names_file_and_line(tiny):
    with pytest.raises(KeyError) as raised:
        fedshift.compare("fedavg", data=tiny, model=Fragile, rounds=1, batch_size=8)
    line = Fragile.forward.__code__.co_firstlineno + 2
    (note,) = (note for note in raised.value.__notes__ if "fedshift called" in note)
    assert f"test_api.py, line {line}, in forward" in note
    with pytest.raises(UsageError) as refused:
        fedshift.compare("fedavg", data=tiny, model=build)
    assert f"test_api.py, line {build.__code__.co_firstlineno + 1}, in build" in str(refused.value)


def test_threads_are_set_for_the_run_alone(tiny, monkeypatch):
    asked, before = [], torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    fedshift.compare("fedavg", data=tiny, rounds=1, threads=before + 1, engine="sequential")
    assert (asked[0], asked[-1]) == (before + 1, before)


@pytest.mark.slow
def test_a_method_is_called_as_it_was_typed_and_asked_for_by_its_name_too(tiny, tmp_path):
    result = fedshift.compare(["gn", "fedbn + fedprox(mu=1e-1)"], data=tiny, rounds=1, lr=0.01, out=tmp_path / "run")
    assert list(result.summary.methods) == ["gn", "fedbn+fedprox(mu=1e-1)"]
    x, y = images(20, 90, 77)
    new = {"new": (x[:12], y[:12], x[12:], y[12:])}
    for run in (result, fedshift.read_run(tmp_path / "run", data=tiny)):
        for typed, named in (("gn", "fedavg+gn"), ("fedbn+fedprox(mu=1e-1)", "fedbn+fedprox(mu=0.1)")):
            one, other = (run.model(text, client="ann").state_dict() for text in (typed, named))
            assert all(torch.equal(one[key], other[key]) for key in other)
            assert run.scope(typed).equals(run.scope(named))
            assert run.differences(typed).equals(run.differences(named))
            assert list(run.cross_site(methods=named).index.unique(0)) == [typed]
            assert all(title[0].startswith(typed) for title in run.adapt(new, "finetune", methods=named).columns)
            written = run.export(tmp_path / str(len(list(tmp_path.iterdir()))), method=named, client="ann", onnx=False)
            assert typed in (written / "README.md").read_text()
    with pytest.raises(UsageError, match=r"unknown method 'ln': allowed are fedavg\+gn, .*, gn$"):
        result.model("ln")
