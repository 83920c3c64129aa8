"""Laws 3 to 8: what methods reduce to, what leaves a client, what stays, and which parameters are a network's."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.kernel import broadcast, client_final, client_init, init_client, init_server
from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.server_round import server_round
from fedshift.core.step import transform_gradients, update_
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.methods.agc import _adaptive_clip_grad, agc
from fedshift.methods.apfl import apfl
from fedshift.methods.ditto import ditto
from fedshift.methods.fedap import fedap
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.feddyn import feddyn
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fixbn import fixbn
from fedshift.methods.scaffold import scaffold
from fedshift.methods.silobn import silobn
from fedshift.methods.single import single
from fedshift.results.checkpoint import load_checkpoint
from fedshift.utils.state import is_equal, nbytes, pick
from tests.laws.conftest import FEDERATED, by_name
from tests.laws.course import CONSTANTS, ROUNDS, client_tensors, make_plan, make_trial, unequal
from tests.methods.others import ClipNorm
from tests.methods.plain import advance

BATCH_NORM = {"first", "downsample.1", "second"}


@pytest.mark.sampled(1)
def test_fedprox_without_its_term_is_fedavg(trial, course, engine):
    proximal = trial(fedprox(mu=0.0), engine)
    advance(proximal, rounds=2)
    assert is_equal(course(fedavg(), engine)[2].server.shared, proximal.server.shared)


def test_scaffolds_first_round_is_fedavgs(course, engine):
    plain, controlled = course(fedavg(), engine), course(scaffold(), engine)
    assert is_equal(plain[1].server.shared, controlled[1].server.shared)
    assert not is_equal(plain[2].server.shared, controlled[2].server.shared)


@pytest.mark.sampled(2)
def test_a_group_of_all_batches_is_one_epoch(trial, course, engine):
    groups = trial(fedbn(), engine, work=Work(batch_size=8, batches=99))
    advance(groups, rounds=3)
    assert is_equal(course(fedbn(), engine)[3].tensors, groups.to_tensors()[0])


@pytest.mark.sampled(2)
def test_steps_of_a_pass_are_one_epoch_and_one_step_is_one_batch(trial, engine):
    data = unequal({"a": 16, "b": 16, "c": 16})
    for given, same in (({"steps": 2}, {"epochs": 1}), ({"steps": 1}, {"batches": 1})):
        one, other = (trial(fedbn(), engine, data=data, work=Work(batch_size=8, **work)) for work in (given, same))
        advance(one, other, rounds=2)
        assert is_equal(one.to_tensors()[0], other.to_tensors()[0])


def test_single_mini_batches_of_equal_clients_are_one_centralized_step_on_the_union(trial, any_engine):
    rng = np.random.default_rng(5)
    arrays = {name: (rng.normal(size=(12, 1, 5, 5)), np.arange(12) % 3) for name in "abcd"}
    data = federation({name: (x, y, x, y) for name, (x, y) in arrays.items()})

    def plain(shape, classes):
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, classes)).double()

    work = Work(batch_size=None, batches=1)
    smb = trial(fedavg(), any_engine, data=data, model=plain, work=work, moments=("loaded",))
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


@pytest.mark.sampled(10)
def test_what_leaves_a_client_is_what_the_scope_sends(course, federated, engine):
    running = course(federated, engine)
    plan = running.plan
    for number in range(1, ROUNDS + 1):
        moment = running[number]
        assert moment.updates.keys() == set("abc")
        for update in moment.updates.values():
            assert update.shared.keys() == plan.sent
            for bound, sent in zip(plan.rules, update.memory, strict=True):
                declared = {name: (send.shape, send.dtype, send.nbytes) for name, send in bound.sends.items()}
                assert declared == {name: (tuple(x.shape), x.dtype, x.nbytes) for name, x in sent.items()}
            assert not {name for state in update.memory for name in state} & plan.personal
        assert moment.server.shared.keys() == plan.sent
        assert not {name for state in moment.server.memory for name in state} & plan.personal


def test_a_client_is_sent_its_mix_and_no_upload_of_another(course, engine):
    running = course(fedap(), engine)
    loaded, layer = running.plan.loaded, "stem.weight"
    for number in range(1, ROUNDS + 1):
        server = running[number].server
        sent = {name: broadcast(server, name) for name in "abc"}
        for name, own in sent.items():
            assert own.mixes is None
            assert own.shared.keys() == server.shared.keys() == running.plan.sent
            assert is_equal(pick(own.shared, loaded), pick(running[number].states[name], loaded))
            assert nbytes(own.shared) == nbytes(server.shared)
            assert not any(torch.equal(own.shared[layer], upload[layer]) for upload in server.mixes.uploads)
        assert not torch.equal(sent["a"].shared[layer], sent["b"].shared[layer])
        assert is_equal(broadcast(server, "stranger").shared, server.shared)


@pytest.mark.sampled(6)
def test_entries_are_kept_loaded_and_sent_as_declared(course, federated):
    running = course(federated)
    plan = running.plan
    job = client_init(plan, running.clients["a"], running.start)
    assert job.global_params.keys() == plan.loaded
    assert client_final(plan, job)[0].personal.keys() == plan.personal == frozenset(plan.initial) - plan.loaded


@pytest.mark.sampled(1)
def test_a_federation_of_one_client_is_that_clients_local_training(trial, engine):
    data = trial(fedavg()).data.select_clients(["a"])
    for method in (fedavg(), fedbn(), silobn()):
        alone, federated = trial(single(), engine, data=data), trial(method, engine, data=data)
        advance(alone, federated, rounds=3)
        assert is_equal(alone.model_state("a"), federated.model_state("a"))


@pytest.mark.sampled(5)
def test_the_order_of_clients_changes_nothing(trial, course, federated, engine):
    """Not a bit, and so the engine repeats itself, too."""
    forward = course(federated, engine)[2]
    backward = trial(federated, engine, data=unequal().select_clients(["c", "a", "b"]))
    advance(backward, rounds=2)
    assert is_equal(forward.server.shared, backward.server.shared)
    assert all(map(is_equal, forward.server.memory, backward.server.memory))
    assert all(is_equal(forward.clients[name], client_tensors(backward, name)) for name in "abc")
    assert all(is_equal(forward.states[name], backward.model_state(name)) for name in "abc")


@pytest.mark.parametrize(
    "federated",
    [m if any(rule.keeps for rule in m.rules) else pytest.param(m, marks=pytest.mark.slow) for m in FEDERATED],
    ids=by_name,
)
def test_names_of_clients_and_layers_change_nothing(trial, tmp_path, federated):
    """Not a bit, stopped and resumed, even if they begin alike; batches of all samples are in no client's order."""

    class Net(nn.Module):
        def __init__(self, names):
            super().__init__()
            layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
            self.layers, self.pool = nn.ModuleDict(dict(zip(names, layers, strict=True))), nn.AdaptiveAvgPool2d(1)

        def forward(self, x):
            first, norm, last = self.layers.values()
            return last(self.pool(torch.relu(norm(first(x)))).flatten(1))

    plain, joined = ("abc", ("u", "v", "w")), (("a", "a/b", "a/b/c"), ("b", "b/c", "w"))
    states = []
    for names, layers in (plain, joined):
        changes = {"data": unequal(dict(zip(names, (21, 16, 9), strict=True))), "work": Work(batch_size=None, epochs=1)}
        first, second = (
            trial(federated, model=lambda *_, layers=layers: Net(layers).double(), **changes) for _ in "12"
        )
        if first.plan.draws or federated.name == "dp":
            pytest.skip("its draws depend on names")
        first.advance()
        first.save(tmp_path, "kept.safetensors")
        second.restore(*load_checkpoint(tmp_path / "kept.safetensors"), tmp_path)
        second.advance()
        states.append([[*second.model_state(name).values()] for name in names])
    assert all(torch.equal(one, other) for pair in zip(*states, strict=True) for one, other in zip(*pair, strict=True))


@pytest.mark.sampled(8)
def test_uploads_fold_alike_in_whatever_order_they_arrive(course, federated):
    running = course(federated)
    updates = running[1].updates
    shuffled = {name: updates[name] for name in ("b", "c", "a")}
    first, second = (
        server_round(running.plan, running.start, each, dict.fromkeys("abc", 1)) for each in (updates, shuffled)
    )
    assert is_equal(first.shared, second.shared)
    assert all(map(is_equal, first.memory, second.memory))


@pytest.mark.sampled(5)
def test_constants_keep_their_bits_everywhere(course, method, engine):
    last = course(method, engine)[ROUNDS]
    for state in (*last.states.values(), last.server.shared if not method.pooled else {}):
        assert all(torch.equal(state[name], value) for name, value in CONSTANTS.items() if name in state)
    assert all(CONSTANTS.keys() <= state.keys() for state in last.states.values())


def test_fedbn_keeps_every_batch_norm_whatever_its_name(course, engine):
    running = course(fedbn(), engine)
    shared, states = running[1].server.shared, list(running[1].states.values())
    assert {name.rpartition(".")[0] for name in running.plan.personal} == BATCH_NORM
    assert not any(name.startswith(tuple(BATCH_NORM)) for name in shared)
    assert "subnet.weight" in shared
    for entry in ("downsample.1.weight", "downsample.1.running_mean", "first.running_var"):
        assert not torch.equal(states[0][entry], states[1][entry])
        assert not torch.equal(states[1][entry], states[2][entry])
    assert all(torch.equal(state["subnet.weight"], shared["subnet.weight"]) for state in states)


def test_silobn_shares_affine_parameters_and_keeps_statistics(course, engine):
    running = course(silobn(), engine)
    kept = {"running_mean", "running_var", "num_batches_tracked"}
    assert {name.rpartition(".")[2] for name in running.plan.personal} == kept
    assert {name.rpartition(".")[0] for name in running.plan.personal} == BATCH_NORM
    a, b = (running[1].states[name] for name in "ab")
    assert torch.equal(a["first.weight"], b["first.weight"])
    assert not torch.equal(a["first.running_mean"], b["first.running_mean"])


def test_fixbns_statistics_do_not_move_once_frozen_and_normalize_in_training(trial, course, engine):
    running, plain = trial(fixbn(switch=2), engine), course(fedavg(), engine)
    advance(running, rounds=2)
    assert is_equal(running.server.shared, plain[2].server.shared)
    before = dict(running.server.shared)
    advance(running, rounds=2)
    frozen = {
        name for name in before if name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert {name.rpartition(".")[0] for name in frozen} == BATCH_NORM
    assert all(torch.equal(before[name], running.server.shared[name]) for name in frozen)
    assert not torch.equal(before["first.weight"], running.server.shared["first.weight"])
    assert not torch.equal(plain[3].server.shared["first.running_mean"], before["first.running_mean"])


def test_fedavg_shares_statistics_too_and_counters_stay_integers(course, engine):
    running = course(fedavg(), engine)
    assert not running.plan.personal
    counters = [running[1].server.shared[f"{layer}.num_batches_tracked"] for layer in sorted(BATCH_NORM)]
    # 3, 2 and 1 local batches (c's ninth sample joins its first eight), weighted 21 : 16 : 9.
    expected = round((3 * 21 + 2 * 16 + 1 * 9) / 46)
    assert all(counter.dtype == torch.int64 and counter == expected for counter in counters)


@pytest.mark.parametrize("method", [single(), fedbn(), silobn()], ids=lambda method: method.name)
def test_personal_methods_have_no_global_model(trial, method):
    running = trial(method)
    running.advance()
    assert running.model_state() is None


def test_training_alone_moves_nothing(trial):
    running = trial(single())
    done = running.advance()
    assert (done.down, done.up) == (0, 0)
    assert running.server.shared == {}


NETWORKS = {
    "personalmodel": ".+", "mixture": "(?!alpha).+", "personalhead": ".+", "localaggregation": "", "gates": "",
    "representation": "",
}  # fmt: skip
"""Of the parameters that each rule adds on clients, those that are another network's."""
DECAYED = NETWORKS | {"representation": ".+"}
"""Those that decay: FedSR's too, as in its authors' code, whose optimizer has one weight decay for all."""
ADDING = [method for method in FEDERATED if method.rules and any(make_plan(method).own_trained)]


def test_every_rule_that_adds_parameters_is_known():
    """A new one must say here whether its parameters are a network's and decay."""
    assert {rule for method in ADDING for rule in rules_that_add(method)} == NETWORKS.keys()


def rules_that_add(method):
    plan = make_plan(method)
    return {name for name, own in zip(plan.rule_names, plan.own_trained, strict=True) if own}


def told_apart(plan, table):
    """The names of the model's trained parameters and of those own ones that ``table`` lists, and all other names.

    Of a method that is tried from outside of the package, its declarations tell.
    """
    own = frozenset().union(*plan.own_trained)
    listed = set()
    for rule, bound in zip(plan.rule_names, plan.rules, strict=True):
        names = bound.names
        decayed = bound.params if table is DECAYED and any(phase.decay for phase in bound.phases) else ()
        known = table.get(rule, "|".join(map(re.escape, (*bound.model, *decayed))))
        listed |= {name for entry, name in names.items() if re.fullmatch(known, entry)} & own
    return plan.trained | listed, own - listed


WHEN = ("before", "during", "after")
OPTIMIZERS = {
    "sgd": (SGD(lr=0.1, momentum=0.5, weight_decay=0.3), torch.optim.SGD, {"momentum": 0.5}),
    "adamw": (AdamW(lr=0.1, weight_decay=0.3), torch.optim.AdamW, {}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("method", ADDING, ids=by_name)
def test_weight_decay_acts_on_networks_as_in_torchs_optimizer_with_two_groups(method, kind):
    optimizer, theirs, given = OPTIMIZERS[kind]
    plan = replace(make_plan(method), optimizer=optimizer)
    job = client_init(plan, init_client(plan), init_server(plan), planned_steps=9)
    job = replace(job, params={name: tensor * 0.9 for name, tensor in job.params.items()})  # within any bounds
    separate = (*plan.phases["before"], *plan.phases["after"])
    first = dict(reversed([each for when in WHEN for each in plan.phases[when]]))
    rates = {n: first[index].lr_scale for index, own in enumerate(plan.own_trained) for n in own}
    decayed, _ = told_apart(plan, DECAYED)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in job.params.items()}
    groups = [
        {"params": [leaf], "lr": 0.1 * rates.get(name, 1.0), "weight_decay": 0.3 * (name in decayed)}
        for name, leaf in leaves.items()
    ]
    reference = theirs(groups, **given)
    for _ in range(2):
        grads = {name: torch.rand_like(tensor) * 1e-3 for name, tensor in job.params.items()}
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        reference.step()
        for phase in (None, *separate):
            job = update_(plan, replace(job, separate_phase=phase), grads, job.rest, 1)
    bounded = [(bound.names, bound) for bound in plan.rules]
    bounds = {names[entry]: pair for names, bound in bounded for entry, pair in bound.limits.items()}
    for name, leaf in leaves.items():
        clamped = leaf.clamp(*bounds[name]) if name in bounds else leaf
        assert (job.params[name] - clamped).abs().max() <= 1e-12, name


@pytest.mark.parametrize("method", ADDING, ids=by_name)
def test_clipping_acts_on_networks_and_on_nothing_else_that_a_rule_adds(method):
    plan, found = make_trial(agc(method, clip=0.1)).plan, []
    for each in (make_plan(method), plan):
        job = client_init(each, init_client(each), init_server(each), planned_steps=9)
        grads = {name: torch.ones_like(tensor) for name, tensor in job.params.items()}
        found.append(transform_gradients(each, job, grads, torch.tensor(3)))
    bare, found = found
    clipped, others = told_apart(plan, NETWORKS)
    assert found.keys() == clipped | others
    for name in clipped:
        assert torch.equal(found[name], _adaptive_clip_grad(bare[name], job.params[name], 0.1)), name
    assert all(torch.equal(found[name], grads[name]) for name in others)


BESIDE = [agc(clip=0.05), fedprox(mu=0.5), scaffold(), feddyn(alpha=0.5), fedavg().with_rule(ClipNorm(0.1))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("other", BESIDE, ids=lambda method: str(method.rules))
@pytest.mark.parametrize("add", [ditto, apfl], ids=["ditto", "apfl"])
def test_a_rule_that_adds_a_network_leaves_the_servers_bits_alone(trial, other, add):
    alone, both = (trial(method, optimizer=SGD(lr=0.05, weight_decay=0.1)) for method in (other, add(other)))
    advance(alone, both, rounds=2)
    assert is_equal(alone.server.shared, both.server.shared)
