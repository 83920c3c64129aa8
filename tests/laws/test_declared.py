"""Laws 3 and 5: strength 0 is the base, and differential privacy and robust aggregation refuse what is declared."""

import pytest
import torch
from torch import nn

from fedshift.core.declarations import GRAINS, Send
from fedshift.core.method import Method
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.rule import Declared, Rule
from fedshift.methods.dp import dp
from fedshift.methods.dp_sgd import dp_sgd
from fedshift.methods.geometric_median import geometric_median
from fedshift.methods.gn import gn
from fedshift.methods.harmofl import harmofl
from fedshift.methods.krum import krum
from fedshift.methods.median import median
from fedshift.methods.multi_krum import multi_krum
from fedshift.methods.trimmed_mean import trimmed_mean
from fedshift.utils.errors import UsageError
from tests.laws.conftest import FEDERATED, by_name

GUARDED = [dp, median, trimmed_mean, krum, multi_krum, geometric_median]
"""Methods that promise something about entries of the model alone."""


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def plan_of(method):
    return prepare(method, network(), optimizer=SGD(lr=0.1))


class Sends(Rule):
    """A rule that sends one number."""

    reveals: str

    def bind(self, plan):
        send = Send(shape=(), dtype=torch.float32, reveals=self.reveals)
        return Declared(self, memory={"sent": torch.zeros(())}, sends={"sent": send})

    def end(self, client):
        return client.memory, dict(client.memory)


class ChangesLoss(Rule):
    def loss(self, loss, step):
        return 2 * loss


class ChangesBatch(Rule):
    def batch(self, x, y, step):
        return 2 * x, y


class ReadsTargets(Rule):
    def bind(self, plan):
        return Declared(self, targets=True)


class ReadsFirst(Rule):
    def bind(self, plan):
        return Declared(self, samples_before_work=4)


class ChangesGradients(Rule):
    def gradients(self, grads, step):
        return {name: 2 * grad for name, grad in grads.items()}


@pytest.mark.parametrize("guard", GUARDED, ids=lambda guard: guard.__name__)
@pytest.mark.parametrize("reveals", GRAINS)
def test_dp_and_robust_aggregation_refuse_every_send(guard, reveals):
    with pytest.raises(UsageError, match=r"Sends sends more than the entries that .* \(sent\): remove one"):
        plan_of(guard().with_rule(Sends(reveals)))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "method", [each for each in FEDERATED if not any(rule.aggregates for rule in each.rules)], ids=by_name
)
def test_they_refuse_every_method_that_sends_and_no_other_for_it(trial, method):
    sends = any(bound.sends for bound in trial(method).plan.rules)
    for guard in (dp, median):
        try:
            trial(guard(method))
            said = ""
        except UsageError as error:
            said = str(error)
        assert ("sends more than the entries" in said) == sends, said


class KeepsWeight(Rule):
    def bind(self, plan):
        return Declared(self, params={"weight": torch.zeros(())})


def test_a_rule_s_own_entry_under_a_name_of_the_model_is_refused():
    network = nn.Sequential(nn.Linear(3, 3))
    network.register_parameter("keepsweight/weight", nn.Parameter(torch.zeros(())))
    with pytest.raises(UsageError, match="KeepsWeight declares its own entry 'keepsweight/weight', a name of"):
        prepare(Method().with_rule(KeepsWeight()), network, optimizer=SGD(lr=0.1))


@pytest.mark.parametrize("reveals", [grain for grain in GRAINS if grain != "update"])
def test_an_estimator_of_gradients_refuses_what_reveals_more_than_the_update(reveals):
    with pytest.raises(
        UsageError, match=f"dp_sgd combines .*sends information that does not follow from gradients .{reveals}: 'sent'"
    ):
        plan_of(dp_sgd(Method().with_rule(Sends(reveals))))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (ChangesLoss(), "changes the loss"),
        (ChangesBatch(), "changes the batch"),
        (ReadsTargets(), "reads the targets of all samples"),
        (ReadsFirst(), "runs the model on samples before local work"),
    ],
)
def test_an_estimator_of_gradients_refuses_rules_that_see_samples_beside_it(rule, why):
    with pytest.raises(
        UsageError, match=f"dp_sgd combines the gradients of single samples, and {type(rule).__name__} {why}"
    ):
        plan_of(dp_sgd(Method().with_rule(rule)))


def test_an_estimator_of_gradients_goes_with_what_follows_from_them():
    plan_of(dp_sgd(Method().with_rule(ChangesGradients()).with_rule(Sends("update"))))


def test_a_rule_of_strength_0_is_refused_for_what_it_sends_all_the_same(trial):
    with pytest.raises(UsageError, match="dp_sgd combines the gradients of single samples, and harmofl"):
        trial(dp_sgd(gn(harmofl(alpha=0.0))))
