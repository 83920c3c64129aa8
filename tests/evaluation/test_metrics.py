"""Evaluation: counts against a direct computation, and the area under the curve against scikit-learn."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, roc_auc_score
from torch import nn

from fedshift.core.kernel import init_server
from fedshift.core.loss import cross_entropy, focal, make_loss
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.work import Work
from fedshift.data.federation import ClientData, Federation
from fedshift.data.samples import Samples
from fedshift.evaluation import metrics as evaluation
from fedshift.evaluation.metrics import evaluate, evaluate_clients
from fedshift.experiments.factory import resolve_model
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.centralized import centralized
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbabu import fedbabu
from fedshift.methods.fedbn import fedbn
from fedshift.models.digits import small_cnn
from fedshift.results.schema import COLUMNS, compute_metric, rows_to_frame
from fedshift.tasks import CLASSIFICATION, classification
from fedshift.tasks.classification import mean_area
from tests.laws.course import make_trial


def plan_of(model, method=None):
    return prepare(method or fedavg(), model, optimizer=SGD(lr=0.0))


@pytest.fixture
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_cnn((3, 8, 8), 3)
        model(torch.randn(64, 3, 8, 8))  # moves the running statistics off their start
    return model


def test_counts_equal_a_direct_computation_over_more_than_one_batch(network, monkeypatch):
    random = np.random.default_rng(0)
    part = Samples(x=torch.from_numpy(random.integers(0, 256, (53, 3, 8, 8)).astype(np.uint8)), y=torch.arange(53) % 3)
    plan = plan_of(network)
    monkeypatch.setattr(evaluation, "BATCH", 10)
    row = evaluate(plan, plan.initial, part, CLASSIFICATION, 3)

    network.eval()
    with torch.no_grad():
        logits = network(part.x.double().div(127.5).sub(1).float()).double()
    guess = logits.argmax(1)
    assert row["samples"] == 53
    assert row["support"] == [18, 18, 17]
    assert row["hits"] == [int(((guess == k) & (part.y == k)).sum()) for k in range(3)]
    assert row["loss_sum"] == pytest.approx(
        float(nn.functional.cross_entropy(logits, part.y, reduction="sum")), rel=1e-5
    )
    assert row["auc"] == pytest.approx(roc_auc_score(part.y, logits.softmax(1), multi_class="ovr"), abs=1e-5)

    rows = rows_to_frame([{**dict.fromkeys(COLUMNS, 0), **row}])
    assert compute_metric(rows, "accuracy").item() == pytest.approx(accuracy_score(part.y, guess))
    assert compute_metric(rows, "balanced_accuracy").item() == pytest.approx(balanced_accuracy_score(part.y, guess))
    assert compute_metric(rows, "loss").item() == pytest.approx(row["loss_sum"] / 53)


def test_evaluation_changes_nothing(network):
    plan = plan_of(network)
    before = {name: tensor.clone() for name, tensor in plan.initial.items()}
    evaluate(plan, plan.initial, Samples(x=torch.zeros(3, 3, 8, 8), y=torch.arange(3)), CLASSIFICATION, 3)
    assert all(torch.equal(tensor, plan.initial[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    "loss", [make_loss(focal, weights=(1, 5, 2)), make_loss(cross_entropy, weights=(1, 5, 2), smoothing=0.3)], ids=str
)
def test_the_recorded_loss_is_plain_cross_entropy_whatever_is_trained_on(network, loss):
    part = Samples(x=torch.rand(9, 3, 8, 8, generator=torch.Generator().manual_seed(0)), y=torch.arange(9) % 3)
    plain, weighted = plan_of(network), prepare(fedavg(), network, optimizer=SGD(lr=0.0), loss=loss)
    assert evaluate(weighted, weighted.initial, part, CLASSIFICATION, 3) == evaluate(
        plain, plain.initial, part, CLASSIFICATION, 3
    )


def test_the_area_under_the_curve_of_a_few_classes_at_a_time_is_the_same(monkeypatch):
    random = torch.Generator().manual_seed(0)
    logits, y = torch.randn(40, 5, generator=random, dtype=torch.float64), torch.arange(40) % 5
    whole = mean_area(logits.softmax(1).T, y == torch.arange(5)[:, None])
    monkeypatch.setattr(classification, "RANKED", 80)
    assert mean_area(logits.softmax(1).T, y == torch.arange(5)[:, None]) == whole


def test_a_class_that_does_not_occur_counts_nothing(network):
    plan = plan_of(network)
    row = evaluate(
        plan, plan.initial, Samples(x=torch.zeros(4, 3, 8, 8), y=torch.tensor([0, 0, 2, 2])), CLASSIFICATION, 3
    )
    assert row["support"] == [2, 0, 2]
    assert row["auc"] == 0.5
    rows = rows_to_frame([{**dict.fromkeys(COLUMNS, 0), **row}])
    assert compute_metric(rows, "balanced_accuracy").item() == sum(row["hits"]) / 4


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy"])
def test_rows_of_training_loss_have_no_accuracy(metric):
    blank = dict.fromkeys(COLUMNS)
    rows = rows_to_frame(iter([blank, {**blank, "hits": [3, 0, 1], "support": [4, 0, 4]}, blank]))
    expected = [math.nan, 0.5, math.nan]
    assert compute_metric(rows, metric).tolist() == pytest.approx(expected, nan_ok=True)
    assert compute_metric(rows.iloc[[0]], metric).isna().all()


@pytest.fixture
def batches(monkeypatch):
    """The number of samples in each forward pass of evaluation."""
    sizes, real = [], evaluation.forward
    monkeypatch.setattr(evaluation, "forward", lambda plan, state, x: sizes.append(len(x)) or real(plan, state, x))
    return sizes


def clients_of(sizes, classes=3):
    """A federation of clients with ``sizes`` random test images in one array; the last two share their test data."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (sum(sizes), 3, 8, 8), generator=random).to(torch.uint8)
    y = torch.randint(0, classes, (len(x),), generator=random)
    rows = torch.arange(len(x)).split(sizes)
    tests = [Samples(x=x, y=y[index], rows=index) for index in rows]
    named = tuple(ClientData(name=f"c{n}", train=test, test=test) for n, test in enumerate([*tests, tests[-1]]))
    return Federation(name="many", clients=named, classes=classes)


def test_small_clients_share_forward_passes_of_the_shared_model_and_count_as_they_do_alone(
    network, batches, monkeypatch
):
    monkeypatch.setattr(evaluation, "BATCH", 50)
    plan, data = plan_of(network), clients_of([9, 20, 21, 1, 120, 30, 30, 5, 15, 8, 7])
    alone = [evaluate(plan, plan.initial, client.test, CLASSIFICATION, 3) for client in data.clients]
    batches.clear()
    rows = evaluate_clients(plan, init_server(plan), data, ("test",), lambda client: None)
    assert batches == [50, 1, 50, 50, 20, 30, 50, 15]  # 120 samples as they are alone, shared ones once
    assert [(row["client"], row["model"]) for row in rows] == [
        (name, model) for name in data.names for model in ("global", "personal")
    ]
    for place, row in enumerate(rows):
        same = alone[place // 2]
        assert row["loss_sum"] == pytest.approx(same["loss_sum"], rel=1e-6)
        assert {key: row[key] for key in same} == {**same, "loss_sum": row["loss_sum"]}
    assert rows[8]["loss_sum"] == alone[4]["loss_sum"]
    assert sum(row["auc"] is not None for row in rows) > 10


def test_large_samples_are_measured_a_few_at_a_time(network, batches, monkeypatch):
    monkeypatch.setattr(evaluation, "LARGE", 4 * 3 * 8 * 8 * 20)
    plan, data = plan_of(network), clients_of([45])
    evaluate(plan, plan.initial, data.clients[0].test, CLASSIFICATION, 3)
    assert batches == [20, 20, 5]


def test_a_model_that_looks_at_the_whole_batch_is_measured_client_by_client(batches):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3), nn.BatchNorm1d(3, track_running_stats=False))
    plan, data = plan_of(model), clients_of([9, 20, 5])
    rows = evaluate_clients(plan, init_server(plan), data, ("test",), lambda client: None)
    assert batches == [9, 20, 5]
    assert rows[2]["loss_sum"] == evaluate(plan, plan.initial, data.clients[1].test, CLASSIFICATION, 3)["loss_sum"]


def test_models_of_their_own_are_asked_for_and_measured_one_after_another(network, batches):
    plan, data = plan_of(network, fedbn()), clients_of([9, 20, 5])
    log = []

    def personal(client):
        log.append((client.name, len(batches)))
        return plan.initial

    rows = evaluate_clients(plan, init_server(plan), data, ("test",), personal)
    assert log == [("c0", 0), ("c1", 1), ("c2", 2), ("c3", 3)]
    assert [(row["client"], row["model"], row["samples"]) for row in rows] == [
        ("c0", "personal", 9), ("c1", "personal", 20), ("c2", "personal", 5), ("c3", "personal", 5),
    ]  # fmt: skip


def test_clients_that_never_trained_have_no_personal_model_of_their_own(network, tiny):
    plan = plan_of(network, fedbn())
    assert evaluate_clients(plan, init_server(plan), tiny, ("test",), lambda client: None) == []


def test_centralized_training_is_measured_on_each_client(network, tiny):
    plan = plan_of(network, centralized())
    rows = evaluate_clients(plan, init_server(plan), tiny, ("test",), lambda client: None)
    assert {row["client"] for row in rows} == set(tiny.names)
    assert {row["model"] for row in rows} == {"global", "personal"}


def test_single_samples_of_models_that_are_fine_tuned_for_use_are_recorded(tiny):
    settings = Settings(rounds=1, work=Work(batch_size=8, epochs=1))
    trial = Trial(fedbabu(rounds=1), resolve_model("auto", tiny.sample_shape, tiny.task), tiny, settings, 0)
    trial.advance()
    records = evaluation.record_clients(trial.plan, trial.server, trial.measured, trial.personal_state)
    assert {client for client, model in records if model == "personal"} == set(tiny.names)


def test_records_number_groups_and_never_name_them(tiny):
    first = tiny.clients[0]
    group = torch.arange(len(first.test)) // 2 + 70
    test = Samples(x=first.test.x, y=first.test.y, normalization=first.test.normalization, group=group)
    grouped = replace(first, test=test)
    data = replace(tiny, clients=(grouped, *tiny.clients[1:]))
    settings = Settings(rounds=1, work=Work(batch_size=8, epochs=1))
    trial = Trial(fedavg(), resolve_model("auto", data.sample_shape, data.task), data, settings, 0)
    records = evaluation.record_clients(trial.plan, trial.server, trial.measured, trial.personal_state)
    assert records[first.name, "personal"]["group"].tolist() == (group - 70).tolist()
    assert all("group" in each for each in records.values())


def test_personal_rows_are_of_a_clients_own_model_beside_those_of_the_servers():
    trial = make_trial(ditto())
    trial.advance()
    trial.advance()
    rows = {(row["client"], row["model"]): row["loss_sum"] for row in trial.evaluate() if row["split"] == "test"}
    for client in trial.data.clients:
        for model, state in (("global", trial.model_state()), ("personal", trial.model_state(client.name))):
            expected = evaluate(trial.plan, state, client.test, trial.data.task, trial.data.classes)["loss_sum"]
            assert rows[client.name, model] == pytest.approx(expected, rel=1e-9)
        assert rows[client.name, "global"] != rows[client.name, "personal"]
