"""Clients that never trained: what they are measured on under each policy, against formulas written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.means import weighted_mean
from fedshift.core.optimizer import SGD
from fedshift.core.schedule import Cosine
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.patches import Patches
from fedshift.data.samples import Samples, to_samples
from fedshift.evaluation.batch_norm import iterate_inputs, reestimate_statistics
from fedshift.evaluation.metrics import evaluate
from fedshift.evaluation.policy import SKIP, list_policies
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedper import fedper
from fedshift.methods.single import single
from fedshift.report.tables import list_shortfalls, seed_table
from fedshift.results.summary import read_summary
from fedshift.tasks import CLASSIFICATION
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from fedshift.utils.state import clone, is_equal

SIZES = {"a": 24, "b": 12, "new": 16}


def data():
    rng = np.random.default_rng(0)
    clients = {}
    for number, (name, size) in enumerate(SIZES.items()):
        y = np.arange(2 * size) % 2
        x = rng.normal(number, 1 + number, (2 * size, 4)) + 3 * y[:, None]
        clients[name] = (x[:size], y[:size], x[size:], y[size:])
    return federation(clients).check()


def network(shape, classes):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, classes)).double()


def trial(method, unseen, rounds=3, newcomers=("new",), model=network, seed=0, **changes):
    settings = Settings(**{
        "rounds": rounds, "work": Work(batch_size=8, epochs=1), "optimizer": SGD(lr=0.1), "newcomers": newcomers,
        "unseen": unseen, "evaluate_every": rounds, **changes,
    })  # fmt: skip
    made = Trial(method, model, data(), settings, seed)
    rows = [made.advance().rows for _ in range(rounds)][-1]
    return made, {row["client"] for row in rows if row["split"] == "test" and row["model"] == "personal"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", list_policies())
def test_a_newcomer_takes_no_part_in_training_whatever_is_asked_of_it(policy):
    with_it, _ = trial(fedbn(), policy, evaluate_every=1)
    without, _ = trial(fedbn(), "skip")
    alone = Trial(fedbn(), network, data().select_clients(["a", "b"]), without.settings.__class__(
        rounds=3, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.1)), 0)  # fmt: skip
    for _ in range(3):
        alone.advance()
    for name, tensor in alone.server.shared.items():
        assert torch.equal(with_it.server.shared[name], tensor)
        assert torch.equal(without.server.shared[name], tensor)
    assert with_it.clients.seen == ("a", "b")
    for name in ("a", "b"):
        assert is_equal(with_it.clients[name].personal, alone.clients[name].personal)
    assert torch.equal(with_it.plan.initial["1.running_mean"], torch.zeros(6).double())


def test_a_newcomers_validation_data_have_no_say_in_which_round_is_the_best():
    held_out = data().hold_out(0.25)
    settings = Settings(rounds=1, work=Work(epochs=1), newcomers=("new",), unseen="average", select="best")
    for method in (fedavg(), fedbn()):
        rows = Trial(method, network, held_out, settings, 0).advance().rows
        assert {row["client"] for row in rows if row["split"] == "validation"} == {"a", "b"}
        assert {row["client"] for row in rows if row["split"] == "test"} == set(SIZES)


def test_newcomers_that_one_method_cannot_measure_count_in_no_aggregate(make, tmp_path):
    make(methods="fedavg,fedbn", newcomers="cid", rounds=1).run(tmp_path / "run")
    study = read_summary(tmp_path / "run")
    table = seed_table(study)
    assert table.loc["cid"].notna().tolist() == [True, False]
    for method in ("fedavg", "fedbn"):
        assert table.loc["macro", (method, 0)] == table.loc[["ann", "bob"], (method, 0)].mean()
    assert "the same 2 of 3 clients" in list_shortfalls(study)[-1]


def test_skip_measures_only_clients_that_have_a_model_and_says_so():
    made, measured = trial(fedbn(), "skip")
    assert measured == {"a", "b"}
    with pytest.raises(UsageError, match="client 'new' has never trained, and fedbn keeps its models on clients"):
        made.model_state("new")


@pytest.mark.parametrize("policy", [SKIP, *list_policies()])
def test_a_method_with_one_global_model_measures_everyone_on_it(policy):
    made, measured = trial(fedavg(), policy)
    assert measured == set(SIZES)
    assert all(torch.equal(tensor, made.server.shared[name]) for name, tensor in made.model_state("new").items())


def test_average_is_the_shared_part_with_the_others_entries_weighted_by_samples():
    made, measured = trial(fedbn(), "average")
    assert measured == set(SIZES)
    state, a, b = (made.model_state(name) for name in ("new", "a", "b"))
    for entry in ("1.weight", "1.running_mean", "1.running_var"):
        assert (state[entry] - (24 * a[entry] + 12 * b[entry]) / 36).abs().max() <= 1e-14
    assert torch.equal(state["0.weight"], made.server.shared["0.weight"])


@pytest.mark.parametrize("policy", ["average", "reestimate"])
def test_average_counts_clients_equally_where_the_method_does(policy):
    made, _ = trial(fedbn(fedavg(weighting="uniform")), policy)
    state, a, b = (made.model_state(name) for name in ("new", "a", "b"))
    for entry in ("1.weight", "1.bias"):
        assert (a[entry] - b[entry]).abs().max() > 1e-3
        assert (state[entry] - (a[entry] + b[entry]) / 2).abs().max() <= 1e-14


def test_average_is_the_aggregations_mean_bit_for_bit_and_made_once_whoever_asks():
    made, _ = trial(fedbn(), "average")
    state, again = made.model_state("new"), made.model_state("new")
    mean = weighted_mean([made.clients[name].personal for name in "ab"], [24, 12])
    assert all(torch.equal(state[entry], tensor) for entry, tensor in mean.items())
    assert all(state[entry] is tensor for entry, tensor in again.items())
    made.advance()
    assert not torch.equal(made.model_state("new")["1.weight"], state["1.weight"])


@pytest.mark.parametrize("policy", list_policies())
def test_models_for_newcomers_do_not_depend_on_what_is_held_in_memory(policy):
    made, _ = trial(fedbn(), policy)
    poor = Trial(fedbn(), network, data(), made.settings, 0, client_memory=0)
    for _ in range(3):
        poor.advance()
    poor.clients.spill(3)
    state = poor.model_state("new")
    assert poor.clients.held == 0
    assert all(torch.equal(tensor, state[entry]) for entry, tensor in made.model_state("new").items())


def test_average_of_a_method_whose_server_holds_a_model_is_that_model():
    made, _ = trial(ditto(), "average")
    assert all(torch.equal(tensor, made.server.shared[name]) for name, tensor in made.model_state("new").items())
    assert not torch.equal(made.model_state("a")["0.weight"], made.server.shared["0.weight"])


def test_reestimated_statistics_are_those_of_the_newcomers_inputs_and_need_no_labels():
    made, _ = trial(fedbn(), "reestimate")
    state, averaged = made.model_state("new"), trial(fedbn(), "average")[0].model_state("new")
    x = data().client("new").train.x.double()
    hidden = x @ state["0.weight"].T + state["0.bias"]
    assert (state["1.running_mean"] - hidden.mean(0)).abs().max() <= 1e-12
    assert (state["1.running_var"] - hidden.var(0)).abs().max() <= 1e-12
    assert torch.equal(state["1.weight"], averaged["1.weight"])
    assert made.plan.module[1].momentum == 0.1


def convolving(shape, classes):
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, classes)).double()


@pytest.mark.parametrize("order", ["mixed", "by class"])
def test_statistics_of_many_batches_are_those_of_all_inputs_at_once_whatever_their_order(order):
    random = np.random.default_rng(1)
    y = np.arange(501) % 2 if order == "mixed" else np.sort(np.arange(501) % 2)  # the last batch would hold one
    x = random.normal(0, 1, (501, 4, 4)) + 5 * y[:, None, None]
    images = to_samples(x, y)
    plan = Trial(fedbn(), convolving, federation({"a": (x, y, x, y)}), Settings(rounds=1), 0).plan
    state = reestimate_statistics(plan, plan.initial, images)
    hidden = nn.functional.conv2d(images.x, state["0.weight"], state["0.bias"])
    assert (state["1.running_mean"] - hidden.mean((0, 2, 3))).abs().max() <= 1e-12
    assert (state["1.running_var"] - hidden.var((0, 2, 3))).abs().max() <= 1e-12
    assert all(torch.equal(state[name], plan.initial[name]) for name in ("0.weight", "1.weight", "3.bias"))
    without_labels = reestimate_statistics(plan, plan.initial, to_samples(x, 0 * y))
    assert is_equal(state, without_labels)


def test_statistics_of_cases_are_those_of_all_windows_that_cover_them(monkeypatch):
    def pointwise(shape, classes):
        return nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, classes, 1)).double()

    random = np.random.default_rng(3)
    size, extents = (4, 4), np.array([(9, 4), (6, 7), (3, 4), (8, 8), (5, 5)])
    x = torch.from_numpy(random.normal(0, 1, (5, 1, 9, 8))) + torch.arange(5.0).reshape(-1, 1, 1, 1)
    y = torch.zeros(5, 9, 8, dtype=torch.uint8)
    y[:, :2] = 1
    cases = Samples(x=x, y=y).replace(patches=Patches(size, extents))
    plan = Trial(
        fedbn(), pointwise, federation({"a": (x.numpy(), y.numpy(), x.numpy(), y.numpy())}), Settings(rounds=1), 0
    ).plan
    windows = []
    for case, (height, width) in zip(x, extents.tolist(), strict=True):
        for top in (0,) if height <= 4 else sorted({*range(0, height - 4, 2), height - 4}):
            for left in (0,) if width <= 4 else sorted({*range(0, width - 4, 2), width - 4}):
                window = torch.full((4, 4), float(case[0, :height, :width].min()), dtype=torch.float64)
                part = case[0, top : min(top + 4, height), left : min(left + 4, width)]
                window[: part.shape[0], : part.shape[1]] = part
                windows.append(window)
    values = torch.stack(windows)
    for bytes_of_batch in (2**24, 4 * 16 * 3):  # one batch, or batches of three
        monkeypatch.setattr("fedshift.evaluation.batch_norm.WINDOWS", bytes_of_batch)
        state = reestimate_statistics(plan, plan.initial, cases)
        assert float(state["0.running_mean"]) == pytest.approx(float(values.mean()))
        assert float(state["0.running_var"]) == pytest.approx(float(values.var()))
        given = torch.cat(list(iterate_inputs(plan, cases, 250, "any")))
        assert sorted(given.sum((1, 2, 3)).tolist()) == pytest.approx(sorted(values.sum((1, 2)).tolist()))
    assert [len(batch) for batch in iterate_inputs(plan, cases, 250, "any", batches=2)] == [3, 3]


def test_statistics_of_every_layer_are_those_of_all_inputs_one_layer_after_another():
    def deep(shape, classes):
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5), nn.Linear(5, classes),
        ).double()  # fmt: skip

    random = np.random.default_rng(2)
    x, y = random.normal(0.3, 2, (60, 6, 6)), np.arange(60) % 2
    plan = Trial(fedbn(), deep, federation({"a": (x, y, x, y)}), Settings(rounds=1), 0).plan
    state = reestimate_statistics(plan, plan.initial, to_samples(x, y))
    hidden = to_samples(x, y).x
    for number, layer in enumerate(plan.module):
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            flat = hidden.transpose(0, 1).flatten(1)
            assert (state[f"{number}.running_mean"] - flat.mean(1)).abs().max() <= 1e-12
            assert (state[f"{number}.running_var"] - flat.var(1)).abs().max() <= 1e-12
            flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, correction=0, keepdim=True) + layer.eps).sqrt()
            hidden = flat.reshape(hidden.transpose(0, 1).shape).transpose(0, 1)  # affine parameters are 1 and 0
        else:
            hidden = layer(hidden)
    moved = {name for name, tensor in state.items() if not torch.equal(tensor, plan.initial[name])}
    assert moved == {f"{number}.running_{kind}" for number in (1, 4, 8) for kind in ("mean", "var")}


def test_one_sample_has_no_statistics_and_leaves_the_average():
    plan = trial(fedbn(), "average")[0].plan
    assert is_equal(
        reestimate_statistics(plan, plan.initial, data().client("new").train.take(torch.tensor([0]))), plan.initial
    )


def by_hand(made, state, rounds, lr):
    """The newcomer's data in the run's batches, with torch's own layers and optimizer, from ``state``."""
    net, train = network((4,), 2), data().client("new").train
    net[2] = nn.Identity()
    net.load_state_dict(state)
    for number in range(rounds):
        optimizer = torch.optim.SGD(net.train().parameters(), lr=lr, momentum=0.9, weight_decay=0.01)
        order = stream(0, "order", "new", number).permutation(len(train))
        for batch in torch.from_numpy(order).split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(train.x[batch].double()), train.y[batch]).backward()
            optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("method", [fedavg(), fedbn(), single()], ids=lambda method: method.name)
def test_finetune_is_a_plain_loop_from_the_average_at_the_rate_of_the_last_round(method, rounds):
    def bare(shape, classes):
        net = network(shape, classes)
        net[2] = nn.Identity()
        return net

    optimizer = SGD(lr=0.1, momentum=0.9, weight_decay=0.01, schedule=Cosine(rounds=3))
    made, _ = trial(method, "finetune", model=bare, optimizer=optimizer)
    train = data().client("new").train
    average = made.make_unseen_state("average", "new", train)
    before = clone(average)
    state = made.make_unseen_state("finetune", "new", train, rounds)
    plain = by_hand(made, average, rounds, optimizer.lr_in_round(2))
    assert optimizer.lr_in_round(3) == 0 < optimizer.lr_in_round(2)
    assert max(float((state[name] - tensor).abs().max()) for name, tensor in plain.items()) <= 1e-12
    assert not torch.equal(state["0.weight"], average["0.weight"])
    assert not torch.equal(state["1.running_var"], average["1.running_var"])
    assert is_equal(average, before)
    assert is_equal(state, made.make_unseen_state("finetune", "new", train, rounds))


def test_finetune_draws_from_the_trials_own_streams():
    states = [trial(fedbn(), "finetune", seed=seed)[0] for seed in (0, 0, 1)]
    start, other = states[0], data().client("new").train
    assert is_equal(states[0].model_state("new"), states[1].model_state("new"))
    named = start.make_unseen_state("finetune", "elsewhere", other)
    assert not torch.equal(named["0.weight"], states[0].model_state("new")["0.weight"])


@pytest.mark.parametrize(
    "text",
    ["ditto", "fedper", "fedrep", "partialfed_adaptive", "partialfed_fix", "scaffold", "fixbn", "fedprox(mu=0.1)",
     "silobn+fedadam", "centralized"],
)  # fmt: skip
def test_finetune_trains_the_whole_model_under_every_kind_of_method(text):
    made, _ = trial(METHODS.parse_all(text)[0], "finetune")
    new = data().client("new").train
    average, tuned = (made.make_unseen_state(policy, "new", new, 3) for policy in ("average", "finetune"))
    assert tuned.keys() == average.keys()
    trained = [name for name in average if made.plan.trained >= {name}]
    assert trained
    assert not any(torch.equal(tuned[name], average[name]) for name in trained)
    fitted, before = (evaluate(made.plan, state, new, CLASSIFICATION, 2)["loss_sum"] for state in (tuned, average))
    assert fitted < before


def without_dropout(shape, classes):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes)).double()


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    ("text", "affine", "body"),
    [
        ("fedbn", "first", "shared"),
        ("fedbn+fedprox(mu=0.1)", "first", "shared"),
        ("fedbn+fedper", "first", "averaged"),
        ("silobn", "shared", "shared"),
        ("fedavg", "shared", "shared"),
        ("ditto", "shared", "shared"),
    ],
)
def test_finetune_bn_is_a_plain_loop_in_which_batch_norm_alone_requires_gradients(text, affine, body, rounds):
    optimizer = SGD(lr=0.1, momentum=0.9, weight_decay=0.01, schedule=Cosine(rounds=3))
    made, _ = trial(METHODS.parse_all(text)[0], "finetune_bn", model=without_dropout, optimizer=optimizer)
    train = data().client("new").train
    net, x = without_dropout((4,), 2), train.x.double()
    head = made.make_unseen_state("average", "new", train) if body == "averaged" else made.server.shared
    first = {**made.plan.initial, **(made.server.shared if affine == "shared" else {})}
    begin = {name: (first if name.startswith("1.") else head)[name] for name in net.state_dict()}
    hidden = x @ begin["0.weight"].T + begin["0.bias"]
    begin |= {"1.running_mean": hidden.mean(0), "1.running_var": hidden.var(0)}
    net.load_state_dict(begin)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.startswith("1."))
    for number in range(rounds):
        learned = [parameter for parameter in net.train().parameters() if parameter.requires_grad]
        plain = torch.optim.SGD(learned, lr=optimizer.lr_in_round(2), momentum=0.9, weight_decay=0.01)
        for batch in torch.from_numpy(stream(0, "order", "new", number).permutation(len(train))).split(8):
            plain.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), train.y[batch]).backward()
            plain.step()
    before = clone(made.server.shared)
    state = made.make_unseen_state("finetune_bn", "new", train, rounds)
    for name, tensor in net.state_dict().items():
        assert (state[name] - tensor).abs().max() <= 1e-9, name
        assert torch.equal(state[name], begin[name]) == (not name.startswith("1.")), name
    assert is_equal(made.server.shared, before)
    if rounds == 1:
        assert is_equal(state, made.model_state("new")) == (text != "fedavg")  # which has a model for everyone


def test_nearest_is_the_model_that_fits_the_newcomers_training_data_best():
    made, _ = trial(fedbn(), "nearest")
    new = data().client("new").train
    losses = {}
    for name in ("a", "b"):
        model = network((4,), 2)
        model.load_state_dict(made.model_state(name))
        losses[name] = nn.functional.cross_entropy(model.eval()(new.x.double()), new.y).item()
    best = min(losses, key=losses.get)
    assert all(torch.equal(tensor, made.model_state(best)[name]) for name, tensor in made.model_state("new").items())
    assert abs(losses["a"] - losses["b"]) > 1e-3


def test_a_model_whose_loss_is_no_number_is_not_the_nearest():
    made, _ = trial(fedbn(), "nearest")
    own = made.clients["a"]
    made.clients.put({"a": replace(own, personal=own.personal | {"1.weight": own.personal["1.weight"] * np.nan})})
    found = made.make_unseen_state("nearest", "new", data().client("new").train)
    assert is_equal(found, made.model_state("b"))


def test_clients_that_were_never_drawn_are_newcomers_until_they_are():
    _, measured = trial(single(), "average", rounds=1, newcomers=(), participation=1)
    assert measured == set(SIZES)
    assert len(trial(single(), "skip", rounds=1, newcomers=(), participation=1)[1]) == 1


def test_what_cannot_work_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match="unseen='reestimate': there are no BatchNorm statistics under fedper: use"):
        trial(fedper(), "reestimate", model=lambda shape, classes: nn.Linear(4, classes).double())
    with pytest.raises(UsageError, match="unseen='finetune_bn': there is no BatchNorm to train under fedper: use"):
        trial(fedper(), "finetune_bn", model=lambda shape, classes: nn.Linear(4, classes).double())
    few = data().limit_samples({"a": 24, "b": 12, "new": 1})
    with pytest.raises(UsageError, match="client 'new' has one training sample, over which batch normalization has no"):
        Trial(fedbn(), network, few, Settings(newcomers=("new",), unseen="finetune"), 0)
    with pytest.raises(UsageError, match="newcomers names every client"):
        trial(fedbn(), "average", newcomers=tuple(SIZES))
    with pytest.raises(UsageError, match="'nobody'"):
        trial(fedbn(), "average", newcomers=("nobody",))
    with pytest.raises(UsageError, match="unknown policy for new clients 'averag': did you mean 'average'"):
        Settings(unseen="averag")
