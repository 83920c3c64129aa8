"""The dry run: what a component does other than it declares is refused by name when a plan is prepared."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.cli.inspection import describe_method
from fedshift.core import dry_run
from fedshift.core.declarations import Send
from fedshift.core.method import method
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.rule import HOOKS, Declared, Folded, Rule
from fedshift.experiments.settings import Settings
from fedshift.methods.fedavg import fedavg
from fedshift.tasks import TASKS
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal

ONE = torch.ones(1)
SENT = Send.like({"one": ONE}, "client")


def rule(personalizes="", aggregates=False, moves=False, **given):
    """A rule with these declarations, and hooks as functions without ``self``."""
    declared = {name: value for name, value in given.items() if name in Declared.__dataclass_fields__}
    members = {name: staticmethod(act) for name, act in given.items() if name not in declared}
    members |= {"bind": lambda self, network: Declared(self, **declared), "personalizes": personalizes}
    return type("Faulty", (Rule,), members | {"aggregates": aggregates, "moves": moves})()


def prepared(*rules):
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return prepare(replace(fedavg(), rules=rules), network, optimizer=SGD(lr=0.1), sample=torch.zeros(1, 3))


def loss(act):
    return rule(loss=lambda loss, step: loss + act(step))


def grads(act):
    return rule(gradients=lambda grads, step: grads | act(grads["0.bias"]))


def end(kept, sent, **declared):
    return rule(end=lambda client: (kept, sent), **declared)


def without_bias(state, *_):
    return {name: tensor for name, tensor in state.items() if name != "0.bias"}


MEMORY = SERVER = {"one": ONE}
WRONG = {
    r"loss\(\): Faulty reads features ": loss(lambda step: step.run(step.params).features.sum()),
    r"gradients\(\): Faulty reads key": rule(gradients=lambda grads, step: grads | {"key": step.key}),
    r"start\(\): Faulty reads samples .*samples_before_work": rule(start=lambda client: {"n": ONE * client.samples}),
    r"start\(\): Faulty reads loss_at": rule(start=lambda client: {"n": client.loss_at({})} if client.round else {}),
    r"loss\(\): Faulty runs a model without '0.weight', which is trained": loss(
        lambda step: step.run({"0.bias": step.loaded["0.bias"]}).outputs.sum()
    ),
    r"loss\(\): Faulty runs a model without": loss(lambda step: step.loss_at({})),
    r"loss\(\): returns a tensor of shape \(2,\) .*: return one number": loss(lambda step: ONE.expand(2)),
    r"loss\(\): returns a float: return 1 tensor": rule(loss=lambda loss, step: 1.0),
    r"objective that does not depend on the loss": rule(loss=lambda loss, step: step.criterion(step.outputs, step.y)),
    r"loss\(\): returns an objective that does not": rule(loss=lambda loss, step: 0 * loss + step.outputs.sum()),
    r"loss\(\): returns a tensor with numbers that are not finite": loss(lambda step: step.outputs.sum() / 0),
    r"batch\(\): returns 'x' of shape \(2, 2\) .*, received as \(2, 3\)": rule(batch=lambda x, y, step: (x[:, 1:], y)),
    r"outputs\(\): returns 'outputs' of .*, received as \(2, 2\)": rule(outputs=lambda outputs, step: outputs[:1]),
    r"batch\(\): returns a Tensor: return 2 tensors": rule(batch=lambda x, y, step: x),
    r"gradients\(\): receives '0.bias' but does not return it": rule(gradients=without_bias),
    r"gradients\(\): returns '0.bias' of .*, received as \(4,\)": grads(lambda bias: {"0.bias": ONE}),
    r"gradients\(\): returns '0.bias' of .* float64, received .*32": grads(lambda bias: {"0.bias": bias.double()}),
    r"gradients\(\): returns '0.bias' with .* not finite": grads(lambda bias: {"0.bias": bias - np.inf}),
    r"gradients\(\): returns '0.bias' on meta, .* is on cpu": grads(lambda bias: {"0.bias": bias.to("meta")}),
    r"gradients\(\): returns a NoneType": rule(gradients=lambda grads, step: None),
    r"personalize\(\): returns 'one' .*, which it did not receive": rule(
        "use", personalize=lambda state, client: state | {"one": ONE}
    ),
    r"personalize\(\): receives '0.bias' but does not return": rule("start", personalize=without_bias),
    r"start\(\): declares 'one' but does not return it: Declared.memory": rule(memory=MEMORY, start=lambda client: {}),
    r"start\(\): returns a int": rule(start=lambda client: 3),
    r"keeps 'one' of shape \(2,\) .*, declared as .*: Declared.memory": end({"one": ONE.expand(2)}, {}, memory=MEMORY),
    r"keeps 'one' of .* float64, declared as .* float32: ": end({"one": ONE.double()}, {}, memory=MEMORY),
    r"keeps 'two' of .* without declaring it: Declared.memory": end({"two": ONE}, {}),
    r"end\(\): returns a dict: return 2 states": rule(end=lambda client: {}),
    r"end\(\): returns 'one' with numbers that are not finite": end({}, {"one": ONE / 0}, sends=SENT),
    r"keeps 'one' of shape \(2,\) .*: Declared.server must": rule(
        server=SERVER, fold=lambda server: Folded({"one": ONE.expand(2)})
    ),
    r"declares 'one' but does not keep it: Declared.server must": rule(server=SERVER, fold=lambda server: Folded({})),
    r"computes '2.bias' .* without declaring it: Declared.sets": rule(fold=lambda server: Folded({}, {"2.bias": ONE})),
    r"fold\(\): returns a dict": rule(fold=lambda server: {}),
    r"declares '0.bias' but does not compute it: what clients send must": rule(
        aggregates=True, fold=lambda server: Folded()
    ),
    r"fold\(\): returns '0.weight' with numbers that are not finite": rule(
        aggregates=True, fold=lambda server: Folded(entries={n: t / 0 for n, t in server.entries.items()})
    ),
    r"computes '0.weight' of shape \(1, 3\) .*, declared as \(4, 3\) .*: what clients load and train must": rule(
        moves=True, fold=lambda server: Folded(entries={n: t[:1] for n, t in server.changes.items()})
    ),
    r"Faulty declares 'one', which is no tensor on cpu": rule(memory={"one": ONE.to("meta")}),
    r"Faulty declares 'two', which is no tensor on cpu": rule(server={"one": ONE, "two": 1.0}),
    r"Faulty declares 'one', which is not torch.float32": rule(params={"one": ONE.double()}),
}  # fmt: skip


@pytest.mark.parametrize("why", WRONG)
def test_a_rule_that_does_other_than_it_declares_is_refused_by_rule_and_hook(why):
    with pytest.raises(UsageError, match=f"^method 'fedavg': .*{why}"):
        prepared(WRONG[why])


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_is_refused_with_its_place(hook):
    broken = rule("start" if hook == "personalize" else "", **{hook: lambda *given: {}["absent"]})
    with pytest.raises(
        UsageError, match=rf"Faulty.{hook}\(\) failed on generated samples.*: KeyError: 'absent'; in .*py"
    ):
        prepared(broken)


def draw():
    return torch.rand(()), random.random(), np.random.rand()  # noqa: NPY002 - rules may use it


def test_a_dry_run_leaves_generators_and_entries_alone():
    def write(client):
        draw()
        return {}, {"one": ONE * sum(draw())}

    seen = []
    for component in (end({}, {}), rule(end=write, sends=SENT)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        seen.append((prepared(component).initial, draw()))
    assert is_equal(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1]


@pytest.mark.parametrize("name", TASKS.names())
def test_generated_targets_fit_every_task(name):
    shape, classes, seen = (1, 4, 4) if name == "segmentation" else (4,), 1 if name == "survival" else 3, []
    watching = fedavg().with_rule(rule(loss=lambda loss, step: seen.append(step.y) or loss))
    network, task = nn.Conv2d(1, 3, 1) if len(shape) == 3 else nn.Linear(4, classes), TASKS.parse(name)
    options = {"loss": Settings().for_task(task).loss, "task": task, "classes": classes}
    prepare(watching, network, optimizer=SGD(lr=0.1), sample=torch.ones(1, *shape), **options)
    for y in seen:
        task.check_targets(y.to(torch.uint8) if len(shape) == 3 else y, shape, classes, "generated")


def test_a_plan_is_tried_once(monkeypatch):
    monkeypatch.setattr(dry_run, "_PASSED", set())
    seen = []
    counting = rule(loss=lambda loss, step: seen.append(0) or loss)
    for again in (counting, counting, rule(loss=counting.loss)):
        prepared(again)
    assert len(seen) == 2 * dry_run.CLIENTS * dry_run.ROUNDS


@method
def reads_key(base):
    return base.with_rule(rule(batch=lambda x, y, step: (x + step.key, y)))


def test_inspect_refuses_too():
    with pytest.raises(UsageError, match="Faulty reads key without declaring it"):
        list(describe_method("fnn2", "tests.core.test_dry_run:reads_key", (3,), 2))


class Tokens(nn.Module):
    """Embeds the first two numbers of a row."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(5, 2)

    def forward(self, rows):
        return self.head(torch.cat([self.embedding(rows[:, :2].long()).mean(1), rows[:, 2:]], 1))


@pytest.mark.parametrize("size", [-3.0, 30.0])
def test_generated_samples_keep_whole_numbers_valid(size):
    prepare(fedavg().with_rule(rule()), Tokens(), optimizer=SGD(lr=0.1), sample=torch.tensor([[9.0, 0.0, size]]))
