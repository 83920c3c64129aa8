"""PartialFed-Adaptive: the choices at their extremes, and the logits' gradient against the estimator written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.kernel import client_final, client_init, init_client, init_server, personal_state
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.server_round import server_round
from fedshift.core.step import client_step_, compute_gradients
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.partialfed_adaptive import partialfed_adaptive
from fedshift.methods.partialfed_fix import partialfed_fix
from fedshift.methods.single import single
from fedshift.nn.dropout import derive_key, draw_bits
from fedshift.utils.errors import UsageError
from fedshift.utils.state import entries_under, is_equal
from tests.methods import plain
from tests.methods.plain import advance, data, loaded_with, network

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
LAYERS = ("0.", "1.", "4.")
"""Convolution, BatchNorm and head, in the order of the logits."""
LOGITS, LAST = "logits", "last"


DATA = data({"a": 12, "b": 8, "c": 10})


def trial(method):
    return plain.trial(method, network, DATA, optimizer=SGD(lr=0.1, momentum=0.9))


def forced(running, *keeps):
    """Make every client keep the layers for which ``keeps`` is true and load the others."""
    logits = torch.tensor([[-5.0, 5.0] if keep else [5.0, -5.0] for keep in keeps], dtype=torch.float64)
    for name, client in running.clients.items():
        running.clients.put({name: replace(client, memory=({**client.memory[0], LOGITS: logits.clone()},))})


@pytest.mark.parametrize(
    ("keeps", "same"),
    [
        ((False, False, False), partialfed_fix(layers="norm_statistics")),
        ((True, True, True), single()),
        ((False, True, False), partialfed_fix(layers="batch_norm")),
        ((False, False, True), partialfed_fix(layers="norm_statistics|last")),
        ((True, False, True), partialfed_fix(layers="0.*|4.*|norm_statistics")),
    ],
    ids=["load all", "keep all", "keep BatchNorm", "keep the head", "load BatchNorm alone"],
)
def test_choices_that_are_forced_give_other_methods_bit_for_bit(keeps, same):
    adaptive, other = trial(partialfed_adaptive()), trial(same)
    for _ in range(3):
        forced(adaptive, *keeps)
        advance(adaptive, other)
        forced(adaptive, *keeps)
        for name in "abc":
            assert is_equal(adaptive.model_state(name), other.model_state(name))
        shared = other.server.shared
        assert is_equal({name: adaptive.server.shared[name] for name in shared}, shared)
    assert adaptive.server.shared.keys() == adaptive.plan.initial.keys()


def test_the_first_round_has_nothing_to_choose_and_is_fedavgs():
    adaptive, average = trial(partialfed_adaptive()), trial(fedavg())
    advance(adaptive, average)
    assert is_equal(adaptive.server.shared, average.server.shared)
    assert not any(client.memory[0][LOGITS].any() for client in adaptive.clients.values())
    adaptive.advance()
    assert all(client.memory[0][LOGITS].all() for client in adaptive.clients.values())


def one_round(method, model, seeds=("a", "b")):
    """Plan, server and first client after a round of two clients with different batches."""
    plan = prepare(method, model, optimizer=SGD(lr=0.3))
    server, clients, updates = init_server(plan), {}, {}
    for number, name in enumerate(seeds):
        job = client_init(plan, init_client(plan), server, planned_steps=2)
        for at in range(2):
            job, _ = client_step_(plan, job, *batch(10 * number + at), torch.tensor(at))
        clients[name], updates[name] = client_final(plan, job)
    return plan, server_round(plan, server, updates, dict.fromkeys("ab", 1)), clients["a"], updates["a"]


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 1, 4, 4, generator=generator, dtype=torch.float64) + seed, torch.arange(5) % 3


def test_what_is_remembered_is_the_clients_last_own_model():
    plan, server, client, update = one_round(partialfed_adaptive(), network())
    assert is_equal(entries_under(LAST, client.memory[0]), update.shared)
    assert client.memory[0].keys() == {LOGITS, *(f"{LAST}/{name}" for name in plan.initial)}
    assert update.memory == ({},)
    statistics = {name: tensor for name, tensor in update.shared.items() if name.rpartition(".")[2] in STATISTICS}
    loaded = {**server.shared, **statistics}  # the client's own, whatever is loaded
    for choice, expected in ((-1.0, loaded), (0.0, loaded), (1.0, update.shared)):  # a tie loads
        logits = torch.tensor([[0.0, choice]] * 3, dtype=torch.float64)
        chosen = replace(client, memory=({**client.memory[0], LOGITS: logits},))
        assert is_equal(personal_state(plan, chosen, server), expected)
        job = client_init(plan, chosen, server)
        assert is_equal({name: {**job.params, **job.rest}[name] for name in plan.initial}, expected)


@pytest.mark.parametrize(("tau", "rate"), [(1.0, 10.0), (0.3, 2.0)])
def test_the_gradient_of_the_logits_is_that_of_the_straight_through_estimator(tau, rate):
    torch.manual_seed(0)
    plan, server, client, _ = one_round(partialfed_adaptive(tau=tau, rate=rate), network())
    kept, model = entries_under(LAST, client.memory[0]), network()
    x, y = batch(3)
    choices = set()
    for number in range(6):
        logits = torch.tensor(np.random.default_rng(number).normal(size=(3, 2)))
        client = replace(client, memory=({**client.memory[0], LOGITS: logits},))
        job = client_init(plan, client, server)
        key = torch.tensor(1000 + number)
        found = compute_gradients(plan, job, x, y, key)[0]

        uniform = (draw_bits(derive_key(key, "gates"), 0, 6).double() + 0.5) / 2**32
        scores = np.exp((logits.numpy() - np.log(-np.log(uniform.numpy().reshape(3, 2)))) / tau)
        soft = scores / scores.sum(1, keepdims=True)
        load = soft[:, 0] > soft[:, 1]
        choices.add(tuple(load))
        mixed = {  # forward: the layers that were drawn, all entries of a layer together
            name: (server.shared if load[number] else kept)[name]
            for number, layer in enumerate(LAYERS)
            for name in plan.initial
            if name.startswith(layer)
        }
        model.load_state_dict(mixed)
        model.train().zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        # backward: as if w = s * global + (1 - s) * kept with s = softmax((logits + noise) / tau), a layer at a time
        for layer, prefix in enumerate(LAYERS):
            along = sum(
                float((parameter.grad * (server.shared[name] - kept[name])).sum())
                for name, parameter in model.named_parameters()
                if name.startswith(prefix)
            )
            slope = soft[layer, 0] * soft[layer, 1] / tau
            expected = torch.tensor([slope, -slope]) * along
            assert (found[plan.rules[0].names[LOGITS]][layer] - expected).abs().max() <= 1e-10 * (
                1 + expected.abs().max()
            )
    assert len(choices) > 2


def test_the_weights_gradients_are_those_of_plain_training():
    plan, server, client, _ = one_round(partialfed_adaptive(), network())
    job = client_init(plan, client, server)
    model = loaded_with({name: {**job.params, **job.rest}[name] for name in plan.initial})
    x, y = batch(4)
    nn.functional.cross_entropy(model(x), y).backward()
    found, rest, _ = compute_gradients(plan, job, x, y, torch.tensor(0))
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter.grad).abs().max() <= 1e-12
    for name, buffer in model.named_buffers():  # moved once: the pass for the logits leaves statistics alone
        assert (rest[name] - buffer).abs().max() <= 1e-12


def test_other_parts_that_keep_entries_are_refused():
    for method in (partialfed_adaptive(fedbn()), partialfed_adaptive(single()), partialfed_fix(partialfed_adaptive())):
        with pytest.raises(UsageError, match="partialfed_adaptive chooses which layers to load"):
            prepare(method, network(), optimizer=SGD(lr=0.1))
