"""Centralized training against a plain PyTorch loop over the union of all clients' data."""

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.methods.agc import agc
from fedshift.methods.centralized import centralized
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedmmb import fedmmb
from fedshift.utils.random_streams import stream
from fedshift.utils.state import is_equal
from tests.methods import plain
from tests.methods.plain import BATCH, LR, SEED, data, largest_difference, loaded_with, step
from tests.methods.plain import vector_network as network


def trial(method, sizes=(12, 12, 12), **work):
    work = Work(batch_size=BATCH, **(work or {"epochs": 2}))
    clients = data(dict(zip("abc", sizes, strict=True)), (4,))
    return plain.trial(method, network, clients, work=work, optimizer=SGD(lr=LR, momentum=0.9), evaluate_every=1)


@pytest.mark.parametrize(("scaled", "size"), [(True, 3 * BATCH), (False, BATCH)])
@pytest.mark.parametrize("sizes", [(12, 12, 12), (14, 9, 5)], ids=["equal", "unequal"])
def test_a_round_is_plain_training_on_the_union(scaled, size, sizes):
    running = trial(centralized(scaled=scaled), sizes)
    model = loaded_with(running.plan.initial, lambda: network(classes=3))
    x = torch.cat([client.train.x for client in running.data.clients])
    y = torch.cat([client.train.y for client in running.data.clients])
    for number in range(3):
        running.advance()
        sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        for epoch in (2 * number, 2 * number + 1):
            order = torch.from_numpy(stream(SEED, "order", "pooled", epoch).permutation(len(y)))
            for batch in order.split(size):
                step(sgd, nn.functional.cross_entropy(model(x[batch]), y[batch]))
    assert largest_difference(running.server.shared, model.state_dict()) <= 1e-12
    assert all(is_equal(running.model_state(client), running.server.shared) for client in "abc")


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
    assert central.plan.work == Work(batch_size=3 * BATCH, batches=2)


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
    assert all(row["samples"] == 4 for row in measured)


def test_local_rules_apply_to_pooled_training():
    plain = trial(centralized())
    plain.advance()
    other = trial(centralized(agc(clip=0.01)))
    other.advance()
    assert not torch.equal(other.server.shared["0.weight"], plain.server.shared["0.weight"])
