"""Law 5 and the rules' own: what a rule declares is what it does, and it leaves alone what is another's."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedshift.core.kernel import client_init, init_client, init_server
from fedshift.core.optimizer import SGD
from fedshift.core.rule import Folded, Rule, average
from fedshift.core.schedule import StepDecay
from fedshift.core.server_round import ClientSizes, fold, receive
from fedshift.core.step import compute_gradients, transform_gradients
from fedshift.engines import stepper
from fedshift.methods import METHODS as CATALOG
from fedshift.methods.agc import agc
from fedshift.methods.fedavg import fedavg
from fedshift.methods.feddyn import feddyn
from fedshift.methods.fedprox import fedprox
from fedshift.methods.scaffold import scaffold
from fedshift.nn import dropout
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.laws.conftest import FEDERATED, METHODS, by_name
from tests.laws.course import ROUNDS, make_plan, make_trial, unequal
from tests.laws.test_methods import ADDING
from tests.methods.others import ClipNorm, mixup, styles

SIZES = {"a": 21, "b": 16, "c": 9}
CHANGING = [agc(clip=0.05), fedprox(mu=0.5), scaffold(), feddyn(alpha=0.5), fedavg().with_rule(ClipNorm(0.1))]
"""Methods whose rules change gradients, as every such method of the catalog."""
WITH_RULES = [method for method in FEDERATED if method.rules]


def without_dropout(shape, classes):
    """Layers of the laws' network that draw nothing."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * shape[1] * shape[2], 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes),
    ).double()  # fmt: skip


def test_the_methods_that_change_gradients_are_those_of_the_catalog():
    known = {type(rule) for method in CHANGING for rule in method.rules}
    found = {
        type(bound.rule)
        for method in METHODS
        for plan in [make_plan(method)]
        for index, bound in enumerate(plan.rules)
        if index in plan.defines("gradients")
    }
    assert found == known - {ClipNorm}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("change", CHANGING, ids=lambda method: str(method.rules))
@pytest.mark.parametrize("method", ADDING, ids=by_name)
def test_no_rule_changes_the_gradients_of_anothers_parameters(method, change):
    """Nor those of another's network, unless it treats all networks alike."""
    try:
        plan = make_trial(replace(method, rules=(*method.rules, *change.rules))).plan
    except UsageError:  # as the composition tests demand
        return
    job = client_init(plan, init_client(plan), init_server(plan), planned_steps=9)
    grads = {name: torch.rand_like(tensor) for name, tensor in job.params.items()}
    found = transform_gradients(plan, job, grads, torch.tensor(3))
    alike = any(bound.rule.on_copies for bound in plan.rules)
    assert found.keys() == grads.keys()
    for bound in plan.rules:
        names = bound.names
        spared = bound.params if alike else {**bound.params, **bound.model}
        assert all(torch.equal(found[names[e]], grads[names[e]]) for e in spared if names[e] in grads)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("method", WITH_RULES, ids=by_name)
def test_the_server_computes_the_entries_that_a_rule_sets_and_no_others(course, method):
    running = course(method)
    plan, before = running.plan, running.start
    for number in range(1, ROUNDS + 1):
        moment = running[number]
        received = receive(sorted(moment.updates.items()), ClientSizes(plan, SIZES))
        mean = average(received) if plan.sent and not plan.method.aggregator else {}
        after = fold(plan, before, received, None if plan.method.aggregator else mean)
        moved = plan.trained & plan.loaded if plan.method.stepper else frozenset()
        others = mean.keys() - plan.made - moved
        assert all(torch.equal(after.shared[name], mean[name]) for name in others)
        assert all(torch.equal(moment.server.shared[name], after.shared[name]) for name in plan.made)
        assert all(map(is_equal, after.memory, moment.server.memory))
        for bound, state in zip(plan.rules, after.memory, strict=True):
            assert state.keys() == bound.server.keys()
            for name, first in bound.server.items():
                free = bound.growing.get(name, ())
                assert state[name].dtype == first.dtype
                lengths = zip(state[name].shape, first.shape, strict=True)
                assert all(now == was or axis in free for axis, (now, was) in enumerate(lengths)), name
        before = moment.server


@pytest.mark.sampled(24)
@pytest.mark.parametrize("method", METHODS, ids=by_name)
def test_another_key_of_a_step_changes_nothing_unless_draws_are_declared(method):
    plan = make_plan(method, without_dropout)
    client, x, y = init_client(plan), torch.rand(8, 1, 5, 5, dtype=torch.float64), torch.arange(8) % 3
    job = client_init(plan, client, init_server(plan), planned_steps=2)
    for phase in (None, *plan.phases["before"], *plan.phases["after"]):
        now = replace(job, separate_phase=phase)
        one, other = (compute_gradients(plan, now, x, y, torch.tensor(key)) for key in (1, 2**40 + 1))
        if not plan.draws:
            assert is_equal(one[0], other[0])
            assert is_equal(one[1], other[1])


def test_the_rules_that_draw_are_these():
    plans = [make_plan(method, without_dropout) for method in METHODS]
    drawing = {bound.rule.source_method for plan in plans for bound in plan.rules if bound.draws}
    assert drawing == {"feddg_elcfs", "partialfed_adaptive", "fedrdn"}


def find_owner():
    """The layer or rule that asked for a draw."""
    frame = sys._getframe(2)
    while not isinstance(frame.f_locals.get("self"), nn.Module | Rule):
        frame = frame.f_back
    return frame.f_locals["self"]


@pytest.mark.parametrize(
    ("text", "drawing"),
    [("fedrdn+feddg_elcfs", {"ClientStatistics", "SentAmplitudes"}), ("partialfed_adaptive", {"Gates"})],
)
def test_no_two_layers_or_rules_of_a_step_draw_alike(monkeypatch, text, drawing):
    running, owners, draw_bits = make_trial(CATALOG.parse(f"{text}+fedfa+fedsr")), {}, dropout.draw_bits

    def draw(key, call, count):
        owners.setdefault((int(key), call), set()).add(find_owner())
        return draw_bits(key, call, count)

    for module in [module for module in sys.modules.values() if getattr(module, "draw_bits", None) is draw_bits]:
        monkeypatch.setattr(module, "draw_bits", draw)
    for _ in range(2):  # feddg_elcfs draws from what others sent before
        running.advance()
    kinds = {type(owner).__name__ for asking in owners.values() for owner in asking}
    assert kinds == drawing | {"KeyedDropout", "FeatureAugmentation", "Sampler"}
    assert all(len(asking) == 1 for asking in owners.values())


def acts_in_steps(method):
    plan = make_plan(method)
    return bool(plan.defines("loss") or plan.defines("batch"))


ACTING = [method for method in METHODS if method.rules and acts_in_steps(method)]
DRAWING = [styles(), mixup()]
"""Methods of others that change batches."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ACTING + DRAWING, ids=by_name)
def test_recorded_steps_of_rules_are_the_others_bit_for_bit(course, monkeypatch, method):
    """Over rounds in which loaded entries, memories, the server's and the learning rate all change."""
    optimizer, made = SGD(lr=0.05, schedule=StepDecay(every=1, gamma=0.9)), []

    class Counted(stepper.Tape):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            made.append(self)

    def refuse(*given, **named):
        raise stepper.Untraceable

    ends = []
    for tape in (Counted, refuse):
        monkeypatch.setattr(stepper, "Tape", tape)
        running = make_trial(method, "stacked", data=unequal({"a": 16, "b": 16, "c": 8}), optimizer=optimizer)
        for _ in range(ROUNDS):
            running.advance()
        ends.append(running.to_tensors()[0])
    assert made
    assert is_equal(*ends)


@pytest.mark.parametrize("method", ADDING, ids=by_name)
def test_own_parameters_stay_within_their_bounds(course, method):
    running = course(method)
    for index, bound in enumerate(running.plan.rules):
        for number in range(1, ROUNDS + 1):
            for client in running[number].clients.values():
                for name, (least, most) in bound.limits.items():
                    value = client[f"memory/{running.plan.rule_names[index]}/{name}"]
                    assert bool((value >= least).all() and (value <= most).all()), name


def test_some_method_has_bounds():
    assert {bound.rule.source_method for m in ADDING for bound in make_plan(m).rules if bound.limits} == {
        "apfl", "fedala",
    }  # fmt: skip


class Peeks(Rule):
    """Reads ``what`` in the hook in which it may be read, without a declaration."""

    def __init__(self, hook, read):
        self.hook, self.read = hook, read

    def peek(self, hook, context):
        if hook == self.hook:
            self.read(context)

    def start(self, client):
        self.peek("start", client)
        return client.memory

    def batch(self, x, y, step):
        self.peek("batch", step)
        return x, y

    def loss(self, loss, step):
        self.peek("loss", step)
        return loss

    def gradients(self, grads, step):
        self.peek("gradients", step)
        return grads

    def fold(self, server):
        self.peek("fold", server)
        return Folded(server.memory)


READS = {
    "targets=True": ("start", lambda client: client.targets),
    "samples_before_work=samples": ("start", lambda client: client.run({})),
    "draws=True": ("batch", lambda step: step.key),
    "features='last'": ("loss", lambda step: step.features),
    "entries=True": ("fold", lambda server: server.received[0].entries),
}


@pytest.mark.parametrize("declaration", READS)
def test_what_is_read_without_a_declaration_is_refused_with_it(declaration):
    with pytest.raises(UsageError, match=re.escape(f"{declaration}")):
        make_trial(fedavg().with_rule(Peeks(*READS[declaration])), moments=("loaded",))
