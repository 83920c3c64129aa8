"""BatchNorm statistics that lag: the part of the initial values, and models measured with statistics estimated anew."""

import pytest
import torch
from torch import nn

import fedshift
from fedshift.config.expressions import read_catalog
from fedshift.evaluation.batch_norm import list_batch_norms
from fedshift.evaluation.statistics_lag import remaining_part
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS

HOW = {"rounds": 2, "batch_size": 8, "lr": 0.05, "seeds": 1}


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
        network.train()(samples.inputs(slice(None)))
    return network.eval()


def accuracy(network, samples):
    with torch.no_grad():
        return float((network(samples.inputs(slice(None))).argmax(1) == samples.y).double().mean())


def test_initial_values_fade_as_torchs_own_layer_forgets_them(tiny):
    plan = Trial(fedshift.fedbn(), conv, tiny, Settings(rounds=1), 0).plan
    layer = nn.BatchNorm2d(4).double()
    for updates in range(40):
        assert abs(float(layer.running_var[0]) - remaining_part(plan, updates)) <= 1e-15
        layer(torch.zeros(2, 4, 3, 3, dtype=torch.float64))  # batches of variance 0: what is left is the initial 1
    for each in list_batch_norms(plan).values():
        each.momentum = None
    assert (remaining_part(plan, 0), remaining_part(plan, 1)) == (1, 0)


@pytest.mark.slow
def test_models_are_measured_again_as_torch_estimates_and_averages_their_statistics(tiny, tmp_path):
    result = fedshift.compare("fedavg,fedbn,silobn,gn", data=tiny, model=conv, out=tmp_path / "run", **HOW)
    plain, again = result.table(), result.table(moment="reestimated")
    clients = {client.name: client for client in result.experiment.data.clients}
    for name, client in clients.items():
        for method in ("fedbn", "silobn"):
            own = accuracy(cumulative(result.model(method, client=name), client.train), client.test)
            assert again.loc[name, (method, "mean")] == pytest.approx(own, abs=1e-12)
    state, total = result.model("fedavg").state_dict(), sum(len(client.train) for client in clients.values())
    each = {name: cumulative(result.model("fedavg"), client.train).state_dict() for name, client in clients.items()}
    for entry in (name for name in state if "running" in name):
        state[entry] = sum(each[name][entry] * len(clients[name].train) for name in clients) / total
    shared = result.model("fedavg")
    shared.load_state_dict(state)
    for name, client in clients.items():
        assert again.loc[name, ("fedavg", "mean")] == pytest.approx(accuracy(shared, client.test), abs=1e-12)
    assert again["gn"]["mean"].isna().all()
    lag = result.summary.lag
    assert set(lag["updates"]) == {4, 8}  # fedavg counts the mean of 8, 4 and 8 steps, fedbn the fewest
    assert dict(zip(lag["method"], lag["remaining"].round(12), strict=True))["fedbn"] == round(0.9**4, 12)
    said = " ".join(str(result).split())
    gains = 100 * (again.loc["macro"] - plain.loc["macro"]).unstack()["mean"]
    assert (
        f"running statistics, which still hold up to {100 * 0.9**4:.2g} percent of their initial values, do not" in said
    )
    for method in ("fedavg", "fedbn", "silobn"):
        value = 100 * again.loc["macro", (method, "mean")]
        assert (f"{method} {value:.2f} ({gains[method]:+.2f})".replace("-", "\N{MINUS SIGN}") in said) == (
            abs(gains[method]) >= 1
        )
    assert "BatchNorm lags: running statistics" in result.report().read_text()
    assert not (tmp_path / "run" / "trials" / "gn-seed0" / "statistics.json").exists()


def test_statistics_that_had_time_are_not_measured_again_nor_frozen_ones_nor_hybrid_ones(tiny):
    for text, epochs, measured in (
        ("fedavg", 1, True), ("fedbn", 1, True), ("fedbn", 40, False), ("fixbn(switch=1)", 1, False),
        ("hbn", 1, False), ("fedwon", 1, False), ("fixbn(switch=3)", 1, True),
    ):  # fmt: skip
        (method,) = METHODS.parse_all(text)
        trial = Trial(method, conv, tiny, Settings(rounds=4, work=fedshift.Work(batch_size=8, epochs=epochs)), 0)
        trial.advance()
        trial.advance()
        assert (trial.measure_lag() is not None) == measured, (text, epochs)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*read_catalog("methods")} - {"dp_sgd"}))  # which refuses BatchNorm
def test_every_method_can_be_measured_again_and_trains_as_before(name, tiny):
    (method,) = METHODS.parse_all(name)
    settings = Settings(rounds=2, work=fedshift.Work(batch_size=8, epochs=1))
    one, other = (Trial(method, conv, tiny, settings, 0) for _ in "ab")
    for trial in (one, other):
        trial.advance()
    lag = one.measure_lag()
    assert (lag is None) == (not list_batch_norms(one.plan))
    for row in lag["rows"] if lag else ():
        assert row["moment"] == "reestimated"
    if lag:
        assert {row["client"] for row in lag["rows"] if row["model"] == "personal"} == set(tiny.names)
    assert one.advance().rows == other.advance().rows
