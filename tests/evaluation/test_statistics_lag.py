"""BatchNorm statistics that lag: models measured with re-estimated ones, and which are reported."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedshift
from fedshift.config.expressions import read_catalog
from fedshift.evaluation.batch_norm import list_batch_norms
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.report.lag import share_statistics
from fedshift.results.schema import choose_statistics
from fedshift.utils.errors import FedshiftError, UsageError

HOW = {"rounds": 2, "batch_size": 8, "lr": 0.05, "precision": "float64"}


def conv(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 6), nn.BatchNorm1d(6),
        nn.ReLU(), nn.Linear(6, classes),
    )  # fmt: skip


def cumulative(network, samples):
    """``network`` with the statistics that torch's BatchNorm averages without momentum over one batch."""
    for layer in network.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.reset_running_stats()
            layer.momentum = None
    with torch.no_grad():
        network.train()(samples.inputs(slice(None), torch.float64))
    return network.eval()


def accuracy(network, samples):
    with torch.no_grad():
        return float((network(samples.inputs(slice(None), torch.float64)).argmax(1) == samples.y).double().mean())


@pytest.mark.slow
def test_models_records_and_exports_have_the_statistics_that_torch_estimates_and_averages(tiny, tmp_path):
    methods = "fedavg,fedper,fedbn,silobn,gn"
    result = fedshift.compare(methods, data=tiny, model=conv, out=tmp_path, statistics="reestimated", **HOW)
    shown, plain = (result.table(moment=moment).xs("mean", axis=1, level="statistic") for moment in (None, "loaded"))
    clients = {client.name: client for client in result.experiment.data.clients}
    for method in methods.split(","):
        models = {name: result.model(method, client=name) for name in clients}
        kept = {name: models[name].state_dict() for name in clients}
        each = {name: cumulative(result.model(method, client=name), clients[name].train) for name in clients}
        for name, client in clients.items():
            state = dict(each[name].state_dict())
            for entry in [entry for entry in state if "running" in entry and method in ("fedavg", "fedper")]:
                weights = [len(other.train) for other in clients.values()]
                parts = [each[other].state_dict()[entry].numpy() for other in clients]
                state[entry] = torch.from_numpy(np.average(parts, axis=0, weights=weights))
            for entry in (entry for entry in state if "running" in entry):
                torch.testing.assert_close(kept[name][entry], state[entry], rtol=1e-9, atol=1e-12)
            assert shown.loc[name, method] == pytest.approx(accuracy(models[name].eval(), client.test), abs=1e-12)
            records = result.summary.read_cases(method, 0).records[name, "personal"]
            assert shown.loc[name, method] == pytest.approx(records["right"].mean(), abs=1e-12)
    assert shown["gn"].equals(plain["gn"])
    assert not shown.equals(plain)


@pytest.mark.parametrize("method", ["fedrod", "ditto", "fedper"])
def test_a_client_that_never_trained_is_measured_with_the_model_that_it_is_given(method, tiny):
    result = fedshift.compare(
        method, data=tiny, model=conv, newcomers="cid", unseen="average", statistics="reestimated", **HOW
    )
    test = tiny.client("cid").test
    with torch.no_grad():
        outputs = result.model(method, client="cid")(test.inputs(slice(None), torch.float64))
    loss = result.table("loss").loc["cid", (method, "mean")]
    assert loss == pytest.approx(nn.functional.cross_entropy(outputs, test.y).item(), rel=1e-6)


def test_statistics_are_chosen_without_test_data_recorded_and_found_again(tiny, tmp_path):
    def train(folder, data=tiny, **given):
        return fedshift.compare("fedavg,fedbn", data=data, model=conv, out=tmp_path / folder, **HOW, **given)

    auto, plain = train("auto"), train("plain", statistics="running")
    flipped = [replace(each, test=each.test.replace(y=torch.tensor([2, 0, 1])[each.test.y])) for each in tiny.clients]
    other = train("other", replace(tiny, clients=tuple(flipped)))
    assert auto.summary.statistics == other.summary.statistics == "reestimated"
    assert auto.summary.moves.equals(other.summary.moves)
    assert set(auto.summary.moves["split"]) == {"training"}
    assert json.loads((tmp_path / "auto" / "study.json").read_text())["trained"]["statistics"] == "reestimated"
    assert str(auto).startswith(
        "BatchNorm's running statistics lag behind the weights: with re-estimated ones, accuracy on "
    )
    assert (
        "values are with re-estimated statistics (those with running ones: on the page and in tables/accuracy-"
        in str(auto)
    )
    assert auto.records.equals(plain.records)
    assert plain.table().equals(auto.table(moment="loaded"))
    assert plain.table(moment="reestimated").equals(auto.table())
    several = [plain.summary, auto.summary]
    assert {each.statistics for each in share_statistics(several)} == {"reestimated"}
    several[0] = replace(several[0], unmeasured=("fedbn",))
    assert {each.statistics for each in share_statistics(several)} == {"running"}
    folder = tmp_path / "auto" / "trials" / "fedbn-seed0"
    files = {name: (folder / name).read_bytes() for name in ("statistics.json", "cases.npz")}
    for name in files:
        (folder / name).unlink()
    with pytest.raises(FedshiftError, match=r"statistics.json is missing: restore it from a copy, or have it measured"):
        auto.table()
    train("auto", resume=True)
    assert files == {name: (folder / name).read_bytes() for name in files}
    with pytest.raises(UsageError, match="was begun with 'auto', and statistics must not be chosen once results are"):
        train("auto", resume=True, statistics="running")


@pytest.mark.parametrize(
    ("metric", "before", "after", "heard"),
    [("accuracy", 0.5, 0.51, True), ("accuracy", 0.5, 0.4901, False), ("loss", 2.0, 1.98, True),
     ("loss", 2.0, 2.019, False), ("accuracy", 0.0, 0.0, False)],
)  # fmt: skip
def test_one_client_decides_for_all_methods_and_not_the_mean(metric, before, after, heard):
    rows = [("fedavg", 0, "a", "validation", before, after), ("fedavg", 0, "b", "validation", after, before)]
    moves = pd.DataFrame(rows, columns=["method", "seed", "client", "split", "running", "reestimated"])
    assert choose_statistics("auto", moves, (), metric) == ("reestimated" if heard else "running")
    assert choose_statistics("running", moves, (), metric) == "running"
    assert choose_statistics("reestimated", moves, ("fedbn",), metric) == "running"


@pytest.mark.parametrize(
    ("text", "measured"),
    [("fedavg", True), ("single", True), ("fixbn(switch=1)", False), ("hbn", False), ("gn", False),
     ("fixbn(switch=3)", True), ("centralized", True)],
)  # fmt: skip
def test_frozen_and_hybrid_statistics_do_not_lag(text, measured, tiny):
    (method,) = METHODS.parse_all(text)
    trial = Trial(method, conv, tiny, Settings(rounds=4, work=fedshift.Work(batch_size=8, epochs=1)), 0)
    trial.advance()
    trial.advance()
    renewed = trial.reestimate()
    assert (renewed is not None) == bool(trial.measure_lag((), renewed)["moves"]) == measured


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*read_catalog("methods")} - {"dp_sgd"}))  # which refuses BatchNorm
def test_every_method_can_be_measured_again_and_trains_as_before(name, tiny):
    (method,) = METHODS.parse_all(name)
    settings = Settings(rounds=2, work=fedshift.Work(batch_size=8, epochs=1))
    one, other = (Trial(method, conv, tiny, settings, 0) for _ in "ab")
    for trial in (one, other):
        trial.advance()
    rows = one.measure_lag((), renewed := one.reestimate())["rows"]
    assert (renewed is not None) == bool(list_batch_norms(one.plan))
    assert {row["client"] for row in rows if row["model"] == "personal"} == set(tiny.names if renewed else ())
    assert one.advance().rows == other.advance().rows
