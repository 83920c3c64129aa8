"""Policies without labels, against plain loops written out here; how policies are written; where they are refused."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.evaluation.policy import POLICIES, explain_inapplicable, list_policies, parse_policies
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.tasks import CLASSIFICATION, Multilabel, Regression, Segmentation
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from fedshift.utils.state import is_equal

SIZES = {"a": 24, "b": 12, "new": 19}


def data():
    rng = np.random.default_rng(3)
    clients = {}
    for number, (name, size) in enumerate(SIZES.items()):
        y = np.arange(2 * size) % 3
        x = rng.normal(number, 1 + number, (2 * size, 5)) + 2 * np.eye(5)[y]
        clients[name] = (x[:size], y[:size], x[size:], y[size:])
    return federation(clients).check()


def deep(shape, classes):
    """Two BatchNorm layers, so that the second sees what the first makes of the policy."""
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(),
        nn.Linear(7, classes),
    ).double()  # fmt: skip


def grouped(shape, classes):
    return nn.Sequential(
        nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, classes)
    ).double()


def plain(shape, classes):
    return nn.Linear(5, classes).double()


def trial(method, model=deep, unseen="average", rounds=3):
    settings = Settings(
        rounds=rounds, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.1), newcomers=("new",), unseen=unseen,
        evaluate_every=rounds,
    )  # fmt: skip
    made = Trial(METHODS.parse_all(method)[0], model, data(), settings, 5)
    for _ in range(rounds):
        made.advance()
    return made


def make(trial, policy, train=None):
    return trial.make_unseen_state(policy, "new", train or data().client("new").train)


def gap(one, other):
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one if "tracked" not in name)


def final_statistics(net, state, x):
    """``state`` with mean and unbiased variance of each BatchNorm layer's inputs, all of ``x`` normalized together."""
    hidden, state = x, dict(state)
    for number, layer in enumerate(net):
        if isinstance(layer, nn.BatchNorm1d):
            state[f"{number}.running_mean"], state[f"{number}.running_var"] = hidden.mean(0), hidden.var(0)
            hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + layer.eps).sqrt()
            hidden = hidden * state[f"{number}.weight"] + state[f"{number}.bias"]
        else:
            hidden = layer(hidden)
    return state


@pytest.mark.parametrize(
    ("method", "model", "normalization"),
    [("fedbn", deep, ("1.", "4.")), ("silobn", deep, ("1.", "4.")), ("fedavg", deep, ("1.", "4.")),
     ("ditto", deep, ("1.", "4.")), ("fedavg", grouped, ("1.", "3.")), ("fedper", grouped, ("1.", "3."))],
)  # fmt: skip
def test_tent_is_a_plain_loop_that_lowers_the_entropy_by_adam_over_normalization_alone(method, model, normalization):
    made = trial(method, model)
    net, x = model((5,), 3), data().client("new").train.x.double()
    start = make(made, "average")
    net.load_state_dict(start)
    learned = [parameter for name, parameter in net.named_parameters() if name.startswith(normalization)]
    optimizer = torch.optim.Adam(learned, lr=0.02)
    bounds = [(0, 6), (6, 12), (12, 19)] if model is deep else [(0, 6), (6, 12), (12, 18), (18, 19)]
    order = torch.from_numpy(stream(5, "tent").permutation(19))
    for first, last in bounds:  # one sample alone has no variance, and joins the batch before it
        for _ in range(2):
            probability = net.train()(x[order[first:last]]).exp()
            probability = probability / probability.sum(1, keepdim=True)
            optimizer.zero_grad()
            (-(probability * probability.log()).sum(1)).mean().backward()
            optimizer.step()
    wanted = {**start, **{name: parameter.detach() for name, parameter in net.named_parameters()}}
    with torch.no_grad():
        wanted = final_statistics(net, wanted, x)
    state = make(made, "tent(steps=2, lr=0.02, batch_size=6)")
    assert gap(state, wanted) <= 1e-9
    moved = {name for name in state if not torch.equal(state[name], start[name])}
    assert {name for name in moved if "running" not in name} == {
        name for name, _ in net.named_parameters() if name.startswith(normalization)
    }
    assert is_equal(make(made, "average"), start)


@pytest.mark.parametrize("method", ["fedbn", "silobn", "fedavg"])
@pytest.mark.parametrize(
    ("policy", "alpha"), [("mixed", 16 / 35), ("mixed(prior=4)", 4 / 23), ("mixed(alpha=0.3)", 0.3)]
)
def test_mixed_statistics_are_those_of_a_forward_pass_written_out(method, policy, alpha):
    made = trial(method)
    start, hidden = make(made, "average"), data().client("new").train.x.double()
    wanted, net = dict(start), deep((5,), 3)
    net.load_state_dict(start)
    for number, layer in enumerate(net):
        if isinstance(layer, nn.BatchNorm1d):
            mean = alpha * start[f"{number}.running_mean"] + (1 - alpha) * hidden.mean(0)
            variance = alpha * start[f"{number}.running_var"] + (1 - alpha) * hidden.var(0)
            wanted[f"{number}.running_mean"], wanted[f"{number}.running_var"] = mean, variance
            hidden = (hidden - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias
        else:
            hidden = layer(hidden)
        hidden = hidden.detach()
    assert gap(make(made, policy), wanted) <= 1e-9


def test_mixing_ends_at_the_stored_statistics_and_at_those_of_the_inputs():
    made = trial("fedbn")
    assert is_equal(make(made, "mixed(alpha=1)"), make(made, "average"))
    own, estimated = make(made, "mixed(alpha=0)"), make(made, "reestimate")
    assert all(torch.equal(own[f"1.running_{kind}"], estimated[f"1.running_{kind}"]) for kind in ("mean", "var"))
    assert is_equal(make(made, "mixed(prior=0)"), own)


@pytest.mark.parametrize("policy", [name for name in list_policies() if POLICIES.parse(name).data == "inputs"])
def test_no_label_has_a_say(policy):
    made, (one, other) = trial("fedbn"), (data().client(name).train for name in "ab")
    state = make(made, policy, one)
    assert is_equal(state, make(made, policy, one.replace(y=one.y % 2)))
    assert not is_equal(state, make(made, policy, other))


@pytest.mark.parametrize("policy", ["reestimate", "mixed", "tent"])
def test_one_sample_without_variance_leaves_the_average(policy):
    made = trial("fedbn")
    lone = data().client("new").train.take(torch.tensor([0]))
    assert is_equal(make(made, policy, lone), make(made, "average"))


class Auxiliary(nn.Module):
    """:func:`deep` with a layer that only training calls, and one that nothing calls."""

    def __init__(self, shape, classes):
        super().__init__()
        self.main, self.never = deep(shape, classes), nn.BatchNorm1d(6).double()
        self.aux = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, classes)).double()

    def forward(self, x):
        return self.main(x) + self.aux(x) if self.training else self.main(x)


@pytest.mark.parametrize("policy", ["reestimate", "mixed(alpha=0.0)", "finetune_bn", "tent"])
def test_layers_that_evaluation_does_not_call_keep_their_statistics(policy):
    made = trial("fedavg", Auxiliary)
    state, average = make(made, policy), make(made, "average")
    assert all(state[name].shape == tensor.shape for name, tensor in average.items())
    unused = [name for name in state if name.endswith(("_mean", "_var")) and not name.startswith("main")]
    assert policy == "finetune_bn" or all(torch.equal(state[name], average[name]) for name in unused)
    if policy == "reestimate":
        net = deep((5,), 3)
        net.load_state_dict({name[5:]: tensor for name, tensor in average.items() if name.startswith("main")})
        wanted = final_statistics(net.requires_grad_(False), net.state_dict(), data().client("new").train.x)
        assert gap(wanted, {name[5:]: tensor for name, tensor in state.items()}) < 1e-12


def test_a_policy_of_a_run_is_the_expression_without_its_defaults():
    made = trial("fedbn", unseen="tent( steps = 2, lr=0.001)", rounds=1)
    assert made.settings.unseen == "tent(steps=2)"
    assert made.identity["unseen"] == "tent(steps=2)"
    assert is_equal(made.model_state("new"), make(made, "tent(steps=2)"))
    assert parse_policies("mixed(alpha=0.5, prior=16.0), average,mixed(alpha=0.5)") == ("mixed(alpha=0.5)", "average")
    assert parse_policies(None) == list_policies()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tint", "unknown policy for new clients 'tint': did you mean 'tent'?"),
        ("tent(step=2)", "unknown argument 'step'; tent takes steps=1, lr=0.001, batch_size=64"),
        ("tent(steps=0)", "tent: steps=0 should be greater than or equal to 1"),
        ("tent(steps=1.5)", "tent: steps=1.5 should be a valid integer"),
        ("tent(lr=-1)", "tent: lr=-1 should be greater than 0"),
        ("tent(lr=True)", "tent: lr=True should be a valid number"),
        ("mixed(alpha=1.5)", "mixed: alpha=1.5 should be less than or equal to 1"),
        ("mixed(prior=-1)", "mixed: prior=-1 should be greater than or equal to 0"),
        ("nearest(by='statistics')", "unknown argument 'by'; nearest takes no arguments"),
        ("tent(steps=", "not closed"),
    ],
)
def test_a_policy_that_does_not_exist_is_refused_by_name(text, said):
    with pytest.raises(UsageError) as refused:
        parse_policies(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("method", "model", "unseen", "said"),
    [
        ("fedper", plain, "tent", "unseen='tent': there is no normalization with weight and bias under fedper: use"),
        ("fedper", grouped, "mixed", "unseen='mixed': there are no BatchNorm statistics under fedper: use 'average'"),
    ],
)
def test_a_policy_without_meaning_is_refused_before_anything_starts(method, model, unseen, said):
    with pytest.raises(UsageError) as refused:
        trial(method, model, unseen)
    assert said in str(refused.value)


def test_numbers_to_predict_have_no_entropy_to_lower():
    def model(shape, classes):
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))

    x = np.arange(24.0).reshape(12, 2)
    numbers = federation(dict.fromkeys("ab", (x, x[:, :1] / 9, x, x[:, :1])), task="regression")
    with pytest.raises(UsageError, match="unseen='tent': predictions of regression have no entropy under fedbn"):
        Trial(METHODS.parse_all("fedbn")[0], model, numbers, Settings(newcomers=("b",), unseen="tent"), 0)
    plan = Trial(METHODS.parse_all("fedbn")[0], model, numbers, Settings(newcomers=("b",), unseen="mixed"), 0).plan
    said = explain_inapplicable([plan], list_policies(), numbers.task)
    assert said == ["tent: predictions of regression have no entropy under fedbn"]
    with pytest.raises(UsageError, match="predictions of regression have no entropy"):
        Regression().entropy(torch.zeros(1, 1))


def test_entropies_are_those_of_the_distributions_that_the_outputs_spell():
    scores = 3 * torch.randn(4, 5, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    of_pixels = torch.distributions.Categorical(logits=scores.movedim(1, -1)).entropy()
    assert (Segmentation().entropy(scores) - of_pixels).abs().max() <= 1e-12
    flat = scores[:, :, 0, 0]
    assert (CLASSIFICATION.entropy(flat) - torch.distributions.Categorical(logits=flat).entropy()).abs().max() <= 1e-12
    labels = torch.distributions.Bernoulli(logits=flat).entropy().sum(1)
    assert (Multilabel().entropy(flat) - labels).abs().max() <= 1e-12
