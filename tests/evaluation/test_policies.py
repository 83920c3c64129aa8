"""Policies without labels, against plain loops written out here; how policies are written; where they are refused."""

from dataclasses import replace
from functools import partial

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


def entropies(outputs):
    probability = outputs.exp() / outputs.exp().sum(1, keepdim=True)
    return -(probability * probability.log()).sum(1)


@pytest.mark.parametrize(
    ("method", "model", "reset"), [("fedbn", deep, 0.0), ("fedavg", deep, 0.79), ("fedper", grouped, 0.0)]
)
def test_sar_climbs_before_each_step_and_leaves_out_uncertain_predictions(method, model, reset):
    """``reset``: so high that some step of fedavg lets everything begin anew."""
    made, margin, rho = trial(method, model), 0.8, 0.3
    net, x = model((5,), 3), data().client("new").train.x.double()
    start = make(made, "average")
    order = torch.from_numpy(stream(5, "sar").permutation(19))
    bounds = [(0, 6), (6, 12), (12, 19)] if model is deep else [(0, 6), (6, 12), (12, 18), (18, 19)]
    limit, resets, left_out = margin * np.log(3), 0, 0

    def begin():
        net.load_state_dict(start)
        return torch.optim.SGD(learned, lr=0.05, momentum=0.9), None

    learned = [parameter for name, parameter in net.named_parameters() if name.startswith("1.")]
    optimizer, average = begin()
    for first, last in bounds:
        batch = x[order[first:last]]
        certain = entropies(net.train()(batch)) < limit
        left_out += int((~certain).sum())
        if not certain.any():
            continue
        grads = torch.autograd.grad(entropies(net(batch))[certain].mean(), learned)
        norm = sum(float(grad.square().sum()) for grad in grads) ** 0.5
        kept = [parameter.detach().clone() for parameter in learned]
        with torch.no_grad():
            for parameter, grad in zip(learned, grads, strict=True):
                parameter += rho / norm * grad
        above = entropies(net(batch))
        certain &= above < limit
        grads = torch.autograd.grad(above[certain].mean(), learned) if certain.any() else None
        with torch.no_grad():
            for parameter, value in zip(learned, kept, strict=True):
                parameter.copy_(value)
        if grads is None:
            continue
        for parameter, grad in zip(learned, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        value = float(above[certain].mean().detach())
        average = value if average is None else 0.9 * average + 0.1 * value
        if average < reset * np.log(3):
            resets += 1
            optimizer, average = begin()
    assert left_out > 0
    assert bool(resets) == bool(reset)
    wanted = {**start, **{name: parameter.detach() for name, parameter in net.named_parameters()}}
    with torch.no_grad():
        wanted = final_statistics(net, wanted, x)
    state = make(made, f"sar(lr=0.05, batch_size=6, margin={margin}, rho={rho}, reset={reset})")
    assert gap(state, wanted) <= 1e-9
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


def distances(made):
    """The distance of the new client from each client that trained, with the client's network in torch's own mode."""
    found, x = {}, data().client("new").train.x.double()
    for name in ("a", "b"):
        net, hidden, total = deep((5,), 3), x, 0.0
        net.load_state_dict(made.model_state(name))
        for layer in net.eval():
            if isinstance(layer, nn.BatchNorm1d):
                means = (hidden.mean(0) - layer.running_mean).square().sum()
                total += float((means + (hidden.std(0) - layer.running_var.sqrt()).square().sum()).sqrt())
            hidden = layer(hidden).detach()
        found[name] = total
    return found


@pytest.mark.parametrize("method", ["fedbn", "silobn", "fedbn+fedper"])
def test_the_nearest_by_statistics_and_the_weights_are_those_of_distances_written_out(method):
    made = trial(method)
    found = distances(made)
    nearest = min(found, key=found.get)
    assert abs(found["a"] - found["b"]) > 1e-3
    assert is_equal(make(made, "nearest_statistics"), made.model_state(nearest))
    inverse = {name: 1 / value for name, value in found.items()}
    state, server = make(made, "weighted"), made.server.shared
    kept = made.plan.personal
    for name in state:
        if name not in kept:
            assert torch.equal(state[name], server[name])
        elif "tracked" not in name:
            mean = sum(inverse[each] * made.clients[each].personal[name] for each in "ab") / sum(inverse.values())
            assert (state[name] - mean).abs().max() <= 1e-9


def test_a_client_whose_statistics_are_no_numbers_is_neither_nearest_nor_counted():
    made = trial("fedbn")
    own = made.clients["a"]
    broken = own.personal | {"1.running_mean": own.personal["1.running_mean"] * np.nan}
    made.clients.put({"a": replace(own, personal=broken)})
    for policy in ("nearest_statistics", "weighted"):
        assert is_equal(make(made, policy), made.model_state("b"))


def outputs_of(entries, x):
    """The network ``deep`` in evaluation, and the inputs of its BatchNorm layers."""
    seen = {}
    for number in (0, 1, 3, 4, 6):
        if number in (1, 4):
            seen[number] = x.detach()
            mean, variance = entries[f"{number}.running_mean"], entries[f"{number}.running_var"]
            x = (x - mean) / torch.sqrt(variance + 1e-5) * entries[f"{number}.weight"] + entries[f"{number}.bias"]
            x = x.clamp(min=0)
        else:
            x = x @ entries[f"{number}.weight"].T + entries[f"{number}.bias"]
    return x, seen


def gradients(loss, state, x):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items() if "tracked" not in name}
    made, seen = outputs_of(leaves, x)
    loss(made).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}, seen


def directions_of(state, x):
    def entropy(scores):
        return -(scores.softmax(1) * scores.log_softmax(1)).sum(1).mean()

    found, seen = gradients(entropy, state, x)
    for number, given in seen.items():
        found[f"{number}.running_mean"] = state[f"{number}.running_mean"] - given.mean(0)
        found[f"{number}.running_var"] = state[f"{number}.running_var"] - given.var(0)
    return found


def move(state, directions, rates):
    moved = {name: state[name] - rates[name] * direction for name, direction in directions.items()}
    return {name: x.clamp(min=0) if "running_var" in name else x for name, x in moved.items()}


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_atp_is_a_plain_loop_over_the_clients_that_trained(method):
    made = trial(method)
    start = make(made, "average")
    rates = {name: 0.0 for name in start if "tracked" not in name}
    for number in range(2):
        learned = []
        for client in ("a", "b"):
            train, own = data().client(client).train, dict(rates)
            order = torch.from_numpy(stream(5, "atp", client, number).permutation(len(train)))
            for part in order.split(10):
                x, loss = train.x[part].double(), partial(nn.functional.cross_entropy, target=train.y[part])
                directions = directions_of(start, x)
                found, _ = gradients(loss, move(start, directions, own), x)
                for name in own:
                    own[name] += 0.05 * float((found[name] * directions[name]).sum()) / found[name].numel() ** 0.5
            learned.append(own)
        rates = {name: (learned[0][name] + learned[1][name]) / 2 for name in rates}
    assert min(map(abs, rates.values())) > 1e-9
    x = data().client("new").train.x.double()
    wanted = move(start, directions_of(start, x), rates)
    state = make(made, "atp(rounds=2, lr=0.05, batch_size=10)")
    assert max(float((state[name] - tensor).abs().max()) for name, tensor in wanted.items()) <= 1e-9
    assert max(float((state[name] - start[name]).abs().max()) for name in wanted) > 1e-4


def test_a_client_that_never_trained_teaches_no_rate():
    made, other = trial("fedbn"), trial("fedbn")
    assert sorted(made._find_learning_data()) == ["a", "b"]
    assert is_equal(make(made, "atp(rounds=1)"), make(other, "atp(rounds=1)"))
    held = Trial(METHODS.parse_all("centralized")[0], deep, data().hold_out(0.25), made.settings, 5)
    assert {name: len(split) for name, split in held._find_learning_data().items()} == {"a": 6, "b": 3}


@pytest.mark.parametrize("policy", [name for name in list_policies() if POLICIES.parse(name).data == "inputs"])
def test_no_label_has_a_say(policy):
    made, (one, other) = trial("fedbn"), (data().client(name).train for name in "ab")
    state = make(made, policy, one)
    assert is_equal(state, make(made, policy, one.with_targets(one.y % 2)))
    assert not is_equal(state, make(made, policy, other))


@pytest.mark.parametrize("policy", ["reestimate", "mixed", "tent"])
def test_one_sample_without_variance_leaves_the_average(policy):
    made = trial("fedbn")
    lone = data().client("new").train.take(torch.tensor([0]))
    assert is_equal(make(made, policy, lone), make(made, "average"))


def test_a_policy_of_a_run_is_the_expression_without_its_defaults():
    made = trial("fedbn", unseen="tent( steps = 2, lr=0.001)", rounds=1)
    assert made.settings.unseen == "tent(steps=2)"
    assert made.identity["unseen"] == "tent(steps=2)"
    assert is_equal(made.model_state("new"), make(made, "tent(steps=2)"))
    assert parse_policies("mixed(alpha=0.5, prior=16.0), average,mixed(alpha=0.5)") == ("mixed(alpha=0.5)", "average")
    assert parse_policies(None) == tuple(name for name in list_policies() if name != "atp")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tint", "unknown policy for new clients 'tint': did you mean 'tent'?"),
        ("tent(step=2)", "unknown argument 'step'; tent takes steps=1, lr=0.001, batch_size=64"),
        ("tent(steps=0)", "tent: steps=0 should be greater than or equal to 1"),
        ("tent(steps=1.5)", "tent: steps=1.5 should be a valid integer"),
        ("tent(lr=-1)", "tent: lr=-1 should be greater than 0"),
        ("sar(margin=2)", "sar: margin=2 should be less than or equal to 1"),
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
        ("fedper", deep, "weighted", "unseen='weighted': clients keep no BatchNorm statistics to compare under fedper"),
        ("ditto", deep, "nearest_statistics", "clients keep no BatchNorm statistics to compare under ditto"),
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
    assert explain_inapplicable([plan], list_policies(), numbers.task) == [
        "atp and sar and tent: predictions of regression have no entropy under fedbn"
    ]
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
