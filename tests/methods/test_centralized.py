"""Centralized training against a plain PyTorch loop over the union of all clients' data."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.agc import agc
from fedshift.methods.centralized import centralized
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedmmb import fedmmb
from fedshift.utils.random_streams import stream

SEED, B, LR = 3, 4, 0.1


def data(*sizes):
    rng = np.random.default_rng(0)
    arrays = {}
    for shift, (name, size) in enumerate(zip("abc", sizes, strict=False)):
        x, y = rng.normal(shift, 1 + shift, (size, 4)), np.arange(size) % 3
        arrays[name] = (x, y, x[:5], y[:5])
    return federation(arrays)


def network(shape=(4,), classes=3):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, classes)).double()


def trial(method, sizes=(12, 12, 12), rounds=3, **work):
    settings = Settings(
        rounds=rounds, work=Work(batch_size=B, **(work or {"epochs": 2})), optimizer=SGD(lr=LR, momentum=0.9),
        evaluate_every=1,
    )  # fmt: skip
    return Trial(method, network, data(*sizes), settings, SEED)


@pytest.mark.parametrize(("scaled", "size"), [(True, 3 * B), (False, B)])
@pytest.mark.parametrize("sizes", [(12, 12, 12), (14, 9, 5)], ids=["equal", "unequal"])
def test_a_round_is_plain_training_on_the_union(scaled, size, sizes):
    running = trial(centralized(scaled=scaled), sizes)
    model = network()
    model.load_state_dict(running.plan.initial)
    x = torch.cat([client.train.x for client in running.data.clients])
    y = torch.cat([client.train.y for client in running.data.clients])
    for number in range(3):
        running.advance()
        sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        for epoch in (2 * number, 2 * number + 1):
            order = torch.from_numpy(stream(SEED, "order", "pooled", epoch).permutation(len(y)))
            for batch in order.split(size):
                sgd.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                sgd.step()
    for name, tensor in model.state_dict().items():
        assert (running.server.shared[name] - tensor).abs().max() <= 1e-12, name
        assert all(torch.equal(running.model_state(client)[name], running.server.shared[name]) for client in "abc")


def test_scaled_batches_take_the_steps_of_one_client_over_the_samples_of_all():
    central, federated, small = trial(centralized()), trial(fedavg()), trial(centralized(scaled=False))
    rows = {}
    for each in (central, federated, small):
        rows[each] = [row for row in each.advance().rows if row["split"] == "train"]
    assert {client.steps for client in federated.clients.values()} == {6}
    assert {name: client.steps for name, client in central.clients.items()} == {"pooled": 6}
    assert {name: client.steps for name, client in small.clients.items()} == {"pooled": 18}
    assert [row["samples"] for row in rows[federated]] == [24, 24, 24]
    assert [row["samples"] for row in rows[central]] == [row["samples"] for row in rows[small]] == [72]


def test_groups_of_batches_are_scaled_too():
    central, federated = trial(centralized(fedmmb(batches=2))), trial(fedmmb(batches=2))
    for each in (central, federated):
        each.advance()
    assert {client.steps for client in (*central.clients.values(), *federated.clients.values())} == {2}
    assert central.plan.work == Work(batch_size=3 * B, batches=2)


def test_all_samples_in_one_batch_stay_all_samples():
    running = trial(centralized(fedmmb(batches=1, batch_size=0)))
    assert [row["samples"] for row in running.advance().rows if row["split"] == "train"] == [36]


def test_nothing_travels_and_every_client_is_measured_with_the_one_model():
    done = trial(centralized()).advance()
    assert (done.down, done.up, done.participants) == (0, 0, ("pooled",))
    measured = [row for row in done.rows if row["split"] == "test"]
    assert {(row["client"], row["model"]) for row in measured} == {
        (c, m) for c in "abc" for m in ("global", "personal")
    }
    assert all(row["samples"] == 5 for row in measured)


def test_local_rules_apply_to_pooled_training():
    plain = trial(centralized())
    plain.advance()
    other = trial(centralized(agc(clip=0.01)))
    other.advance()
    assert not torch.equal(other.server.shared["0.weight"], plain.server.shared["0.weight"])
