"""FedAP equals a plain loop that mixes the clients' layers by the distances of their statistics."""

import numpy as np
import pytest
import torch

from fedshift.core.kernel import broadcast, client_init
from fedshift.methods.fedap import fedap
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedprox import fedprox
from fedshift.methods.harmofl import harmofl
from fedshift.utils.state import is_equal, pick
from tests.methods import plain
from tests.methods.plain import copied, largest_difference, loaded_with, train
from tests.methods.received import fold

OWN, MU = 0.3, 0.5
SIZES = {"a": 12, "b": 7, "c": 9, "d": 6}


@pytest.fixture(autouse=True)
def four_clients(monkeypatch):
    monkeypatch.setattr(plain, "SIZES", SIZES)
    monkeypatch.setattr(plain, "data", lambda sizes=None, make=plain.data: make(SIZES))


def distance(one, other):
    mean, std = (np.asarray(one[0]) - other[0], np.sqrt(one[1]) - np.sqrt(other[1]))
    return float(np.sqrt((mean**2).sum() + (std**2).sum()))


def near(shared):
    def penalty(model):
        return MU / 2 * sum(((p - shared[n]) ** 2).sum() for n, p in model.named_parameters() if n in shared)

    return penalty


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("participation", [1.0, 2])
@pytest.mark.parametrize("base", [fedavg(), fedprox(mu=MU)], ids=lambda method: method.name)
def test_it_equals_a_plain_loop(base, participation, engine):
    """With the proximal term, a client stays near its own mix."""
    running = plain.trial(fedap(base, self_weight=OWN), participation=participation, engine=engine)
    initial = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    layers = [name for name in initial if not name.startswith("1.")]
    norm = {client: {n: x for n, x in initial.items() if n.startswith("1.")} for client in SIZES}
    loads = {client: {name: initial[name] for name in layers} for client in SIZES}
    shared, passes, statistics, seen = dict(initial), dict.fromkeys(SIZES, 0), {}, set()
    for _ in range(5):
        took_part = sorted(running.advance().participants)
        uploads = {}
        for client in took_part:
            start = loads[client]
            extra = near(start) if base.name.startswith("fedprox") else lambda model: 0.0
            model = copied(train(loaded_with(start | norm[client]), client, passes[client], extra))
            norm[client] = {name: model[name] for name in norm[client]}
            uploads[client] = {name: model[name] for name in layers}
            statistics[client] = (model["1.running_mean"].numpy(), model["1.running_var"].numpy())
            passes[client] += 1
            seen.add(client)
        shared = plain.mean([uploads[c] for c in took_part], [SIZES[c] for c in took_part])
        for client in SIZES:
            if client not in seen:
                loads[client] = shared
                continue
            others = [c for c in took_part if c != client]
            inverse = {c: 1 / distance(statistics[client], statistics[c]) for c in others}
            part = OWN if client in took_part else 0.0
            weights = {c: (1 - part) * inverse[c] / sum(inverse.values()) for c in others}
            weights |= {client: OWN} if part else {}
            loads[client] = plain.mean([uploads[c] for c in weights], list(weights.values()))
        for client in SIZES:
            found = broadcast(running.server, client).shared
            assert largest_difference(pick(found, layers), loads[client]) <= 1e-9
            if client in seen:
                assert largest_difference(running.model_state(client), loads[client] | norm[client]) <= 1e-9
    assert seen == set(SIZES)
    assert (loads["a"]["0.weight"] - loads["b"]["0.weight"]).abs().max() > 1e-3
    assert running.model_state() is None


def test_the_server_keeps_the_uploads_of_one_round_and_a_row_of_weights_for_each_client():
    running = plain.trial(fedap(), participation=2)
    for _ in range(6):
        running.advance()
    mixes = running.server.mixes
    assert len(mixes.uploads) == 2
    assert mixes.weights.keys() == set(SIZES)
    assert all(row.keys() == {""} for row in mixes.weights.values())
    assert all(abs(float(row[""].sum()) - 1) < 1e-12 and len(row[""]) == 2 for row in mixes.weights.values())
    assert all(upload.keys() == running.plan.loaded for upload in mixes.uploads)


def test_a_client_alone_in_its_round_keeps_its_layers_and_one_that_never_took_part_loads_the_mean():
    running = plain.trial(fedap(), participation=1)
    (alone,) = running.advance().participants
    (upload,) = running.server.mixes.uploads
    absent = next(name for name in SIZES if name != alone)
    for name in (alone, absent):
        assert is_equal(pick(broadcast(running.server, name).shared, upload), upload)
    assert absent not in running.server.mixes.weights


def test_clients_with_equal_statistics_share_the_weight():
    running = plain.trial(fedap(self_weight=0.0))
    running.advance()
    states = [dict(running.plan.initial) for _ in range(3)]
    states[2] = states[2] | {"1.running_mean": torch.ones(3, dtype=torch.float64)}
    weights = fold(running.plan.rules[0].rule, states, dict(running.server.shared), network=running.plan).mixes
    assert weights["a"][""].tolist() == pytest.approx([0, 1, 0])
    assert weights["c"][""].tolist() == pytest.approx([0.5, 0.5, 0])


@pytest.mark.parametrize("participation", [1.0, 2])
def test_what_the_server_makes_of_measurements_stands_in_every_mix(participation):
    """HarmoFL's server sets the amplitudes, of which clients upload the zeros that they loaded: no mix brings these."""
    running = plain.trial(harmofl(fedap(), alpha=0.0, samples=4), participation=participation)
    for _ in range(3):
        running.advance()
        server = running.server
        (name,) = (entry for entry in server.shared if entry.endswith(".amplitude"))
        assert (server.shared[name] != 0).all()
        assert server.mixes is not None
        for client in running.train:
            assert torch.equal(broadcast(server, client).shared[name], server.shared[name])
            start = client_init(running.plan, running.clients[client], broadcast(server, client))
            assert torch.equal(start.rest[name], server.shared[name])
