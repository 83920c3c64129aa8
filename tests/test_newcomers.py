"""Clients that never trained: what they are measured on under each policy, against formulas written out."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.base.errors import UsageError
from fedshift.core.aggregate import weighted_mean
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.federation import federation
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedper import fedper
from fedshift.methods.single import single
from fedshift.settings import Settings
from fedshift.trial import Trial

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


def trial(method, unseen, rounds=3, newcomers=("new",), model=network, **changes):
    settings = Settings(
        rounds=rounds, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.1), newcomers=newcomers, unseen=unseen,
        evaluate_every=rounds, **changes,
    )  # fmt: skip
    made = Trial(method, model, data(), settings, 0)
    rows = [made.advance().rows for _ in range(rounds)][-1]
    return made, {row["client"] for row in rows if row["split"] == "test" and row["model"] == "personal"}


def test_a_newcomer_takes_no_part_in_training_whatever_is_asked_of_it_later():
    with_it, _ = trial(fedbn(), "average")
    without, _ = trial(fedbn(), "skip")
    alone = Trial(fedbn(), network, data().only(["a", "b"]), without.settings.__class__(
        rounds=3, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.1)), 0)  # fmt: skip
    for _ in range(3):
        alone.advance()
    for name, tensor in alone.server.shared.items():
        assert torch.equal(with_it.server.shared[name], tensor)
        assert torch.equal(without.server.shared[name], tensor)
    assert with_it.clients.seen == ("a", "b")


def test_skip_measures_only_clients_that_have_a_model_and_says_so():
    made, measured = trial(fedbn(), "skip")
    assert measured == {"a", "b"}
    with pytest.raises(UsageError, match="client 'new' has never trained, and fedbn keeps its models on clients"):
        made.state_of("new")


@pytest.mark.parametrize("policy", ["skip", "average", "nearest", "reestimate"])
def test_a_method_with_one_global_model_measures_everyone_on_it(policy):
    made, measured = trial(fedavg(), policy)
    assert measured == set(SIZES)
    assert all(torch.equal(tensor, made.server.shared[name]) for name, tensor in made.state_of("new").items())


def test_average_is_the_shared_part_with_the_others_entries_weighted_by_samples():
    made, measured = trial(fedbn(), "average")
    assert measured == set(SIZES)
    state, a, b = (made.state_of(name) for name in ("new", "a", "b"))
    for entry in ("1.weight", "1.running_mean", "1.running_var"):
        assert (state[entry] - (24 * a[entry] + 12 * b[entry]) / 36).abs().max() <= 1e-14
    assert torch.equal(state["0.weight"], made.server.shared["0.weight"])


def test_average_is_the_aggregations_mean_bit_for_bit_and_made_once_whoever_asks():
    made, _ = trial(fedbn(), "average")
    state, again = made.state_of("new"), made.state_of("new")
    mean = weighted_mean([made.clients[name].personal for name in "ab"], [24, 12])
    assert all(torch.equal(state[entry], tensor) for entry, tensor in mean.items())
    assert all(state[entry] is tensor for entry, tensor in again.items())
    made.advance()
    assert not torch.equal(made.state_of("new")["1.weight"], state["1.weight"])


@pytest.mark.parametrize("policy", ["average", "nearest", "reestimate"])
def test_models_for_newcomers_do_not_depend_on_what_is_held_in_memory(policy):
    made, _ = trial(fedbn(), policy)
    poor = Trial(fedbn(), network, data(), made.settings, 0, client_memory=0)
    for _ in range(3):
        poor.advance()
    poor.clients.spill(3)
    state = poor.state_of("new")
    assert poor.clients.held == 0
    assert all(torch.equal(tensor, state[entry]) for entry, tensor in made.state_of("new").items())


def test_average_of_a_method_whose_server_holds_a_model_is_that_model():
    made, _ = trial(ditto(), "average")
    assert all(torch.equal(tensor, made.server.shared[name]) for name, tensor in made.state_of("new").items())
    assert not torch.equal(made.state_of("a")["0.weight"], made.server.shared["0.weight"])


def test_reestimated_statistics_are_those_of_the_newcomers_inputs_and_need_no_labels():
    made, _ = trial(fedbn(), "reestimate")
    state, averaged = made.state_of("new"), trial(fedbn(), "average")[0].state_of("new")
    x = data().client("new").train.x.double()
    hidden = x @ state["0.weight"].T + state["0.bias"]
    assert (state["1.running_mean"] - hidden.mean(0)).abs().max() <= 1e-12
    assert (state["1.running_var"] - hidden.var(0)).abs().max() <= 1e-12
    assert torch.equal(state["1.weight"], averaged["1.weight"])
    assert made.plan.module[1].momentum == 0.1


def test_nearest_is_the_model_that_fits_the_newcomers_training_data_best():
    made, _ = trial(fedbn(), "nearest")
    new = data().client("new").train
    losses = {}
    for name in ("a", "b"):
        model = network((4,), 2)
        model.load_state_dict(made.state_of(name))
        losses[name] = nn.functional.cross_entropy(model.eval()(new.x.double()), new.y).item()
    best = min(losses, key=losses.get)
    assert all(torch.equal(tensor, made.state_of(best)[name]) for name, tensor in made.state_of("new").items())
    assert abs(losses["a"] - losses["b"]) > 1e-3


def test_clients_that_were_never_drawn_are_newcomers_until_they_are():
    _, measured = trial(single(), "average", rounds=1, newcomers=(), participation=1)
    assert measured == set(SIZES)
    assert len(trial(single(), "skip", rounds=1, newcomers=(), participation=1)[1]) == 1


def test_what_cannot_work_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match="estimates BatchNorm statistics, of which the model has none under fedper"):
        trial(fedper(), "reestimate", model=lambda shape, classes: nn.Linear(4, classes).double())
    with pytest.raises(UsageError, match="newcomers names every client"):
        trial(fedbn(), "average", newcomers=tuple(SIZES))
    with pytest.raises(UsageError, match="'nobody'"):
        trial(fedbn(), "average", newcomers=("nobody",))
    with pytest.raises(UsageError, match="unknown policy for unseen clients 'averag': did you mean 'average'"):
        Settings(unseen="averag")
