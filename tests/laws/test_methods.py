"""Laws 3 to 7: what methods reduce to, what leaves a client, and what stays."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.base.state import equal
from fedshift.core.folding import server_round
from fedshift.core.kernel import begin, finish
from fedshift.core.work import Work
from fedshift.data.federation import federation
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fixbn import fixbn
from fedshift.methods.scaffold import scaffold
from fedshift.methods.silobn import silobn
from fedshift.methods.single import single

BATCH_NORM = {"first", "downsample.1", "second"}


def updates_of(trial):
    """The uploads of one round, and the server they were made from."""
    working = {name: trial.clients[name] for name in trial.train}
    return {name: done.update for name, done in trial.engine.train(trial.server, working)}


def test_fedprox_without_its_term_is_fedavg(trial, engine):
    plain, proximal = trial(fedavg(), engine), trial(fedprox(mu=0.0), engine)
    for _ in range(2):
        plain.advance()
        proximal.advance()
    assert equal(plain.server.shared, proximal.server.shared)


def test_scaffolds_first_round_is_fedavgs(trial, engine):
    plain, controlled = trial(fedavg(), engine), trial(scaffold(), engine)
    plain.advance()
    controlled.advance()
    assert equal(plain.server.shared, controlled.server.shared)
    plain.advance()
    controlled.advance()
    assert not equal(plain.server.shared, controlled.server.shared)


def test_a_group_of_all_batches_is_one_epoch(trial, engine):
    both = (Work(batch_size=8, epochs=1), Work(batch_size=8, batches=99))
    epochs, groups = (trial(fedbn(), engine, work=work) for work in both)
    for _ in range(3):
        epochs.advance()
        groups.advance()
    assert equal(epochs.tensors()[0], groups.tensors()[0])


def test_single_mini_batches_of_equal_clients_are_one_centralized_step_on_the_union(trial, any_engine):
    rng = np.random.default_rng(5)
    arrays = {name: (rng.normal(size=(12, 1, 5, 5)), np.arange(12) % 3) for name in "abcd"}
    data = federation({name: (x, y, x, y) for name, (x, y) in arrays.items()})

    def plain(shape, classes):
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, classes)).double()

    smb = trial(fedavg(), any_engine, data=data, model=plain, work=Work(batch_size=None, batches=1))
    central = plain((1, 5, 5), 3)
    central.load_state_dict(smb.plan.initial)
    sgd = torch.optim.SGD(central.parameters(), lr=0.05)
    x = torch.from_numpy(np.concatenate([x for x, _ in arrays.values()]))
    y = torch.from_numpy(np.concatenate([y for _, y in arrays.values()]))
    for _ in range(5):
        smb.advance()
        sgd.zero_grad()
        nn.functional.cross_entropy(central(x), y).backward()
        sgd.step()
    for name, expected in central.state_dict().items():
        assert (smb.server.shared[name] - expected).abs().max() <= 1e-12


def test_what_leaves_a_client_is_what_the_scope_sends(trial, federated, engine):
    running = trial(federated, engine)
    running.advance()
    plan = running.plan
    for update in updates_of(running).values():
        assert update.shared.keys() == plan.sent
        for name in update.memory:
            entry = name.partition("/")[2]
            assert name.partition("/")[0] in {plan.rule_memory(i) for i in range(len(plan.method.rules))}
            assert entry not in plan.personal
    assert running.server.shared.keys() == plan.sent
    assert not {name.partition("/")[2] for name in running.server.memory} & plan.personal


def test_entries_are_kept_loaded_and_sent_as_declared(trial, federated):
    running = trial(federated)
    plan, client = running.plan, running.clients["a"]
    job = begin(plan, client, running.server)
    assert job.anchor.keys() == plan.loaded
    assert finish(plan, job)[0].personal.keys() == plan.personal == frozenset(plan.initial) - plan.loaded


def test_a_federation_of_one_client_is_that_clients_local_training(trial, engine):
    data = trial(fedavg()).data.only(["a"])
    for method in (fedavg(), fedbn(), silobn()):
        alone, federated = trial(single(), engine, data=data), trial(method, engine, data=data)
        for _ in range(3):
            alone.advance()
            federated.advance()
        assert equal(alone.state_of("a"), federated.state_of("a"))


def test_the_order_of_clients_changes_nothing(trial, federated, engine):
    forward = trial(federated, engine)
    backward = trial(federated, engine, data=forward.data.only(["c", "a", "b"]))
    for _ in range(2):
        forward.advance()
        backward.advance()
    assert equal(forward.server.shared, backward.server.shared)
    assert equal(forward.server.memory, backward.server.memory)
    assert all(equal(forward.state_of(name), backward.state_of(name)) for name in "abc")


def test_uploads_fold_alike_in_whatever_order_they_arrive(trial, federated):
    running = trial(federated)
    updates = updates_of(running)
    shuffled = {name: updates[name] for name in ("b", "c", "a")}
    first, second = (
        server_round(running.plan, running.server, each, dict.fromkeys("abc", 1)) for each in (updates, shuffled)
    )
    assert equal(first.shared, second.shared)
    assert equal(first.memory, second.memory)


def test_fedbn_keeps_every_batch_norm_whatever_its_name(trial, engine):
    running = trial(fedbn(), engine)
    running.advance()
    assert {name.rpartition(".")[0] for name in running.plan.personal} == BATCH_NORM
    assert not any(name.startswith(tuple(BATCH_NORM)) for name in running.server.shared)
    assert "subnet.weight" in running.server.shared
    states = [running.state_of(name) for name in "abc"]
    for entry in ("downsample.1.weight", "downsample.1.running_mean", "first.running_var"):
        assert not torch.equal(states[0][entry], states[1][entry])
        assert not torch.equal(states[1][entry], states[2][entry])
    assert all(torch.equal(state["subnet.weight"], running.server.shared["subnet.weight"]) for state in states)


def test_silobn_shares_affine_parameters_and_keeps_statistics(trial, engine):
    running = trial(silobn(), engine)
    running.advance()
    kept = {"running_mean", "running_var", "num_batches_tracked"}
    assert {name.rpartition(".")[2] for name in running.plan.personal} == kept
    assert {name.rpartition(".")[0] for name in running.plan.personal} == BATCH_NORM
    a, b = running.state_of("a"), running.state_of("b")
    assert torch.equal(a["first.weight"], b["first.weight"])
    assert not torch.equal(a["first.running_mean"], b["first.running_mean"])


def test_fixbns_statistics_do_not_move_once_frozen_and_normalize_in_training(trial, engine):
    running, plain = trial(fixbn(switch=2), engine), trial(fedavg(), engine)
    for _ in range(2):
        running.advance()
        plain.advance()
    assert equal(running.server.shared, plain.server.shared)
    before = dict(running.server.shared)
    for _ in range(2):
        running.advance()
    frozen = {
        name for name in before if name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert {name.rpartition(".")[0] for name in frozen} == BATCH_NORM
    assert all(torch.equal(before[name], running.server.shared[name]) for name in frozen)
    assert not torch.equal(before["first.weight"], running.server.shared["first.weight"])
    plain.advance()
    assert not torch.equal(plain.server.shared["first.running_mean"], before["first.running_mean"])


def test_fedavg_shares_statistics_too_and_counters_stay_integers(trial, engine):
    running = trial(fedavg(), engine)
    running.advance()
    assert not running.plan.personal
    counters = [running.server.shared[f"{layer}.num_batches_tracked"] for layer in sorted(BATCH_NORM)]
    # 3, 2 and 1 local batches (c's ninth sample joins its first eight), weighted 21 : 16 : 9.
    expected = round((3 * 21 + 2 * 16 + 1 * 9) / 46)
    assert all(counter.dtype == torch.int64 and counter == expected for counter in counters)


@pytest.mark.parametrize("method", [single(), fedbn(), silobn()], ids=lambda method: method.name)
def test_personal_methods_have_no_global_model(trial, method):
    running = trial(method)
    running.advance()
    assert running.state_of() is None


def test_training_alone_moves_nothing(trial):
    running = trial(single())
    done = running.advance()
    assert (done.down, done.up) == (0, 0)
    assert running.server.shared == {}
