"""The Python interface: its example, what a comparison gives back, and what it refuses."""

import dataclasses
import doctest
import gc
import inspect
import re
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedshift
from fedshift import api
from fedshift.config.spec import SharedSpec
from fedshift.experiments.experiment import Observer
from fedshift.representations import compare_representations
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.trial_records import load_facts
from fedshift.utils.errors import FedshiftError, UsageError


def test_the_example_of_the_module_is_true():
    assert doctest.testmod(api).failed == 0
    assert len(doctest.DocTestFinder().find(api)[0].examples) >= 4


def test_every_argument_of_compare_has_a_line_of_its_own():
    told = re.findall(r"^    (\w+): ", inspect.getdoc(fedshift.compare), re.MULTILINE)
    assert told[: -len(("UsageError", "FedshiftError"))] == list(inspect.signature(fedshift.compare).parameters)


def test_settings_of_compare_are_those_of_the_command_line():
    arguments, types = inspect.signature(fedshift.compare).parameters, get_type_hints(SharedSpec)
    for each in dataclasses.fields(SharedSpec):
        assert (arguments[each.name].default, arguments[each.name].annotation) == (each.default, types[each.name])
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


@pytest.fixture
def compared(tiny):
    """FedAvg and FedBN over two seeds and two rounds."""
    return fedshift.compare([fedshift.fedavg(), fedshift.fedbn()], data=tiny, rounds=2, seeds=2, batch_size=8)


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
    assert list(compared.differences().index) == ["fedbn"]
    assert isinstance(compared.differences("fedbn"), pd.DataFrame)
    assert list(compared.differences("fedbn").index) == ["fedavg"]


def test_the_report_is_written_where_asked(compared, tmp_path):
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


def test_each_policy_is_measured_on_a_client_that_comes_later_as_the_run_itself_would(tiny):
    new, settings = tiny.select_clients(["cid"]), {"rounds": 1, "seeds": 2, "batch_size": 8}
    both = [fedshift.fedavg(), fedshift.fedbn()]
    result = fedshift.compare(both, data=tiny.select_clients(["ann", "bob"]), **settings)
    table = result.adapt(new)
    assert list(table.index) == ["cid", "macro"]
    assert list(table.columns.unique(0)) == [
        *(f"fedavg: {policy}" for policy in ("global model", "reestimate", "finetune", "finetune_bn")),
        *(f"fedbn: {policy}" for policy in ("average", "reestimate", "nearest", "finetune", "finetune_bn")),
    ]
    within = fedshift.compare(both, data=tiny, newcomers=["cid"], unseen="nearest", **settings).table()
    for title, method in (("fedavg: global model", "fedavg"), ("fedbn: nearest", "fedbn")):
        assert table.loc["cid", title].tolist() == within.loc["cid", method].tolist()
    again = fedshift.Comparison(result.experiment, result.directory).adapt(new, "reestimate", methods="fedbn")
    pd.testing.assert_frame_equal(again, table[["fedbn: reestimate"]])


def test_what_a_person_should_know_of_a_new_client_is_a_warning(compared, tiny):
    with pytest.warns(UserWarning, match="client 'bob' is not unknown: the run has its samples, as client 'bob'"):
        compared.adapt(tiny.select_clients(["bob"]), ["average"], methods="fedbn")
    few = tiny.select_clients(["cid"]).map_splits(lambda split: split.with_samples(255 - split.store)).limit_samples(1)
    with pytest.warns(UserWarning, match="client 'cid': one sample has no variance to normalize by, so without reest"):
        table = compared.adapt(few, methods="fedbn", rounds=2)
    assert list(table.columns.unique(0)) == ["fedbn: average", "fedbn: nearest"]
    for asked, said in (
        ({"policies": "nearst"}, "unknown policy for new clients 'nearst': did you mean 'nearest'"),
        ({"methods": ["fedbm"]}, "unknown method 'fedbm': did you mean 'fedbn'"),
        ({"rounds": 0}, "rounds=0: must be at least 1"),
    ):
        with pytest.raises(UsageError, match=said):
            compared.adapt(few, **asked)
    (compared.directory / "trials" / "fedbn-seed1" / "checkpoint.safetensors").unlink()
    with pytest.raises(FedshiftError, match="fedbn, seed 1, is left out: no checkpoint at"):
        compared.adapt(few, "average", methods="fedbn")


def test_what_clients_and_server_see_is_that_of_the_command_line(compared, make, tmp_path):
    make(methods="fedavg,fedbn", seeds=2, rounds=2).run(tmp_path / "run")
    from_disk, ours = compare_representations(tmp_path / "run", samples=4), compared.features(samples=4)
    assert ours.similarity == from_disk.similarity
    pd.testing.assert_frame_equal(ours.distances, from_disk.distances)
    one = compared.features(samples=4, clients=["ann", "bob"], methods="fedbn", seeds=1)
    assert {name: len(several) for name, several in one.similarity.items()} == {"fedbn": 1}
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
    class Rounds(Observer):
        count = 0

        def round(self, done):
            self.count += 1

    settings = {"data": tiny, "optimizer": fedshift.SGD(lr=0.01, momentum=0.9, keep=True), "batch_size": 8}
    fedshift.compare([fedshift.fedbn()], **settings, rounds=1, out=tmp_path / "run")
    gc.collect()
    watch = Rounds()
    fedshift.compare([fedshift.fedbn()], **settings, rounds=3, out=tmp_path / "run", resume=True, observer=watch)
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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"methods": []}, "no method is given"),
        ({"rounds": "3"}, "rounds='3': should be a valid integer"),
        ({"seeds": 0}, "seeds []: give at least one, each once"),
        ({"seeds": [1, 1]}, "seeds [1, 1]: give at least one, each once"),
        ({"rounds": 0}, "rounds=0: should be greater than or equal to 1"),
        ({"lr": -1.0}, "learning rate lr=-1: it must be a number of 0 or more"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"epochs": 1, "batches": 1}, "give exactly one of the two"),
        ({"participation": 1.5}, "participation=1.5: give a whole number of clients"),
        ({"evaluate_every": 0}, "evaluate_every=0: should be greater than or equal to 1"),
        ({"select": "bets"}, "unknown value of select 'bets': did you mean 'best'?"),
        ({"select": "best"}, "select='best' needs validation data"),
        ({"engine": "none"}, "unknown engine 'none'"),
        ({"model": "small-cn"}, "unknown model 'small-cn': did you mean 'small-cnn'?"),
        ({"model": nn.Linear(2, 2)}, "model is a Linear: give a name, or a function (sample_shape, classes)"),
        ({"model": 3}, "model is a int: give a name, or a function"),
    ],
)
def test_what_cannot_be_done_is_refused(tiny, changed, said):
    methods = changed.pop("methods", [fedshift.fedavg()])
    with pytest.raises(UsageError) as refused:
        fedshift.compare(methods, data=tiny, **changed)
    assert said in str(refused.value)


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
    table, rows = result.table(split="validation"), result.summary.rows
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
