"""Models that ``fedshift features`` takes from a trial, and the outputs of their convolutions."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.schedule import Cosine
from fedshift.core.work import Work
from fedshift.engines.engine import Diverged
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedwon import fedwon
from fedshift.methods.nonorm import nonorm
from fedshift.methods.single import single
from fedshift.models.digits import small_cnn
from fedshift.nn.scaled_std_conv import ScaledStdConv2d
from fedshift.representations.comparison import (
    choose_rows,
    list_convolutions,
    record_maps,
    select_inputs,
    train_models,
)


def trial_of(method, data, rounds=1, model=small_cnn, optimizer=SGD(lr=0.1)):  # noqa: B008 - a frozen value
    settings = Settings(rounds=rounds, engine="sequential", work=Work(batch_size=8, epochs=1), optimizer=optimizer)
    made = Trial(method, model, data, settings, 0)
    for _ in range(rounds):
        made.advance()
    return made


# Maps


class Odd(nn.Module):
    """Network whose layers are used in another order than registered, in place, and one convolution twice."""

    def __init__(self, shape, classes):
        super().__init__()
        self.third = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 1)
        self.first = nn.Conv2d(shape[0], 4, 3)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        x = self.act(self.first(x))
        x = self.act(self.third(self.act(self.second(self.act(self.third(x))))))
        return self.head(x.mean((2, 3)))


def test_maps_are_those_of_a_forward_pass_by_hand(tiny):
    trial = trial_of(fedavg(), tiny, model=Odd)
    state, x = trial.model_state(), select_inputs(trial.plan, tiny.clients[0], 5)
    assert list_convolutions(trial.plan, x) == ("first", "second", "third")
    seen = record_maps(trial.plan, state, x, ("first", "third"))
    first = F.conv2d(x, state["first.weight"], state["first.bias"])
    once = F.conv2d(first.relu(), state["third.weight"], state["third.bias"], padding=1)
    second = F.conv2d(once.relu(), state["second.weight"], state["second.bias"])
    last = F.conv2d(second.relu(), state["third.weight"], state["third.bias"], padding=1)
    assert (first < 0).any()  # so that an activation in place would show
    np.testing.assert_allclose(seen["first"], first.numpy(), atol=1e-6)
    np.testing.assert_allclose(seen["third"], last.numpy(), atol=1e-6)


def test_a_standardized_convolution_is_one_and_batchnorm_comes_after_the_maps(tiny):
    for method in (fedwon(), fedbn()):
        trial = trial_of(method, tiny)
        network, x = trial.make_network().eval(), select_inputs(trial.plan, tiny.clients[1], 5)
        state = trial.model_state("bob")
        network.load_state_dict(state)
        assert isinstance(network.conv2, ScaledStdConv2d) == (method.name == "fedwon")
        with torch.no_grad():
            expected = network[: [name for name, _ in network.named_children()].index("conv2") + 1](x)
        seen = record_maps(trial.plan, state, x, ("conv2",))
        np.testing.assert_allclose(seen["conv2"], expected.numpy(), atol=1e-6)
        assert list_convolutions(trial.plan, x)[-1] == "conv2"


def test_many_images_are_looked_at_in_parts_and_no_hook_stays(tiny, monkeypatch):
    trial = trial_of(nonorm(), tiny)
    x = select_inputs(trial.plan, tiny.clients[0], 12)
    whole = record_maps(trial.plan, trial.model_state(), x, ("conv1",))["conv1"]
    monkeypatch.setattr("fedshift.representations.comparison.BATCH", 5)
    np.testing.assert_allclose(record_maps(trial.plan, trial.model_state(), x, ("conv1",))["conv1"], whole, atol=1e-6)
    assert len(whole) == 12
    assert not any(layer._forward_hooks for layer in trial.plan.module.modules())


def test_images_are_drawn_without_repetition_the_same_in_every_trial(tiny):
    client = tiny.clients[0]
    drawn = choose_rows(client, 8)
    assert len(set(drawn.tolist())) == 8
    assert torch.equal(drawn, choose_rows(client, 8))
    assert torch.equal(drawn[:3], choose_rows(client, 3))
    assert sorted(choose_rows(client, 1000).tolist()) == list(range(len(client.test)))


# Models


def test_local_models_are_what_the_next_round_averages(tiny):
    trial = trial_of(fedavg(), tiny, rounds=2)
    server, local = train_models(trial, tiny.names)
    sizes = [len(client.train) for client in tiny.clients]
    trial.advance()
    for name, after in trial.server.shared.items():
        if after.is_floating_point():
            mean = sum(size * local[who][name].double() for size, who in zip(sizes, tiny.names, strict=True))
            torch.testing.assert_close(after.double(), mean / sum(sizes), atol=1e-6, rtol=0)
    assert not torch.equal(server["conv1.weight"], trial.server.shared["conv1.weight"])


@pytest.mark.parametrize("method", [fedbn(), ditto(), single()], ids=lambda method: method.name)
def test_a_personal_method_keeps_its_local_model_but_for_what_is_loaded_anew(method, tiny):
    trial = trial_of(method, tiny, rounds=2)
    _, local = train_models(trial, tiny.names)
    trial.advance()
    for name in tiny.names:
        after = trial.model_state(name)
        own = trial.plan.loaded if method.name == "fedbn" else frozenset()
        for entry in after.keys() - own:
            assert torch.equal(after[entry], local[name][entry]), entry
    assert len({local[name]["bn1.running_mean"].sum().item() for name in tiny.names}) == 3


def test_the_server_of_fedbn_gets_the_clients_entries_averaged_by_samples(tiny):
    trial = trial_of(fedbn(), tiny, rounds=2)
    (server, _), sizes = train_models(trial, tiny.names[:1]), [len(client.train) for client in tiny.clients]
    for entry in ("bn1.running_mean", "bn2.weight"):
        own = [trial.clients[name].personal[entry].double() for name in tiny.names]
        mean = sum(size * tensor for size, tensor in zip(sizes, own, strict=True)) / sum(sizes)
        torch.testing.assert_close(server[entry].double(), mean, atol=1e-6, rtol=0)
    assert torch.equal(server["conv1.weight"], trial.server.shared["conv1.weight"])


def test_the_further_round_learns_as_the_last_did_where_a_schedule_ends_at_zero(tiny):
    trial = trial_of(nonorm(), tiny, rounds=2, optimizer=SGD(lr=0.1, schedule=Cosine(rounds=2)))
    assert trial.plan.optimizer.lr_in_round(2) == 0
    server, local = train_models(trial, tiny.names[:2])
    one, other = (local[name]["conv2.weight"] for name in tiny.names[:2])
    assert not torch.equal(one, server["conv2.weight"])
    assert not torch.equal(one, other)


def test_a_further_round_that_diverges_names_the_method(tiny):
    trial = trial_of(nonorm(), tiny)
    trial.server.shared["conv1.weight"][0] = math.inf
    with pytest.raises(Diverged, match=r"^fedavg\+nonorm, seed 0, one round further than the run: training diverged"):
        train_models(trial, tiny.names)
