"""Rules see the batch, the model's outputs and the input of a layer, from the pass that gives the loss."""

import pytest
import torch
from torch import nn

from fedshift.core.rule import Declared, Rule
from fedshift.methods.fedavg import fedavg
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.laws.course import make_trial, network, unequal

LR = 0.05


class CenterLoss(Rule):
    """Pulls what the layer ``features`` reads to zero, and counts labels; ``again``: from a second pass."""

    features: str = "last"
    again: bool = False

    def bind(self, plan):
        seen = {"seen": torch.zeros(3, dtype=torch.float64)}
        return Declared(self, buffers=seen, features=self.features)

    def loss(self, loss, step):
        step.own.buffers["seen"].add_(nn.functional.one_hot(step.y, 3).sum(0))
        made = step.run(step.params) if self.again else step
        return loss + 0.1 * made.features.square().mean() + 0.01 * made.outputs.square().mean()


def plain_round(layer: str) -> dict[str, torch.Tensor]:
    """A round of client ``a`` alone, by autograd and a hook, on the batches that the trial draws."""
    trial = make_trial(fedavg(), data=unequal().select_clients(["a"]), model=no_dropout)
    model = no_dropout((1, 5, 5), 3)
    model.load_state_dict(trial.plan.initial)
    seen = []
    dict(model.named_modules())[layer].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    batches = trial.engine.draw_batches("a", trial.clients["a"])
    for step, index in batches:
        x, y = trial.engine.load_batch("a", step, index)
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y) + 0.1 * seen[-1].square().mean()
        sgd.zero_grad()
        (loss + 0.01 * outputs.square().mean()).backward()
        sgd.step()
    return model.state_dict()


def no_dropout(shape, classes):
    model = network(shape, classes)
    model.dropout = nn.Identity()
    return model


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(("features", "layer"), [("last", "head"), ("subnet", "subnet")])
def test_a_rule_reads_the_input_of_a_layer(engine, features, layer):
    data = unequal().select_clients(["a"])
    trial = make_trial(fedavg().with_rule(CenterLoss(features)), engine, data=data, model=no_dropout)
    trial.advance()
    for name, expected in plain_round(layer).items():
        assert (trial.server.shared[name] - expected).abs().max() <= 1e-12, name


def test_another_pass_of_the_same_model_sees_the_same_under_dropout_too():
    trials = [make_trial(fedavg().with_rule(CenterLoss(again=again))) for again in (False, True)]
    for trial in trials:
        trial.advance()
    first, second = (trial.server.shared for trial in trials)
    assert all((tensor - second[name]).abs().max() <= 1e-12 for name, tensor in first.items())


class EvaluationLoss(Rule):
    """Keeps each client's entries before a first pass in evaluation mode, whether it left them, and the pass."""

    seen: list
    features: str = "head"

    def bind(self, plan):
        return Declared(self, features=self.features)

    def loss(self, loss, step):
        if step.steps == 0:
            state = step.params | step.buffers
            before = {name: tensor.clone() for name, tensor in state.items()}
            made = step.run(state, training=False)
            self.seen.append((before, is_equal(before, state), step.x, made.outputs))
        return loss


def test_a_pass_in_evaluation_mode_normalizes_by_running_statistics_and_writes_nothing():
    rule = EvaluationLoss([])
    make_trial(fedavg().with_rule(rule)).advance()
    for before, left, x, outputs in rule.seen[-3:]:
        model = network((1, 5, 5), 3)
        model.load_state_dict(before)
        assert (model.eval()(x) - outputs).abs().max() <= 1e-12
        assert left


@pytest.mark.parametrize("engine", ["sequential", "stacked", pytest.param("pool", marks=pytest.mark.slow)])
def test_a_rule_may_count_in_its_own_entries(engine):
    trial = make_trial(fedavg().with_rule(CenterLoss()), engine)
    trial.advance()
    trial.advance()
    for name, size in {"a": 21, "b": 16, "c": 9}.items():
        assert trial.clients[name].memory[0]["seen"].sum() == 2 * size


def test_a_layer_that_is_missing_or_never_called_is_refused():
    with pytest.raises(UsageError, match=r"reads the input of layer 'heat'.*similar names: head"):
        make_trial(fedavg().with_rule(CenterLoss("heat")))

    def idle(shape, classes):
        model = network(shape, classes)
        model.spare = nn.Linear(2, 2).double()
        return model

    with pytest.raises(UsageError, match="does not call in its forward pass"):
        make_trial(fedavg().with_rule(CenterLoss("last")), model=idle)
