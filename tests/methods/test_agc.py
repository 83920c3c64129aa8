"""Adaptive gradient clipping against FedWon's equation 4, unit by unit in plain Python, on autograd's gradients."""

import math

import pytest
import torch
from torch import nn

from fedshift.core.kernel import client_init, init_client, init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import apply_surgery, prepare
from fedshift.core.step import client_step_, compute_gradients
from fedshift.core.work import Work
from fedshift.methods.agc import agc
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedwon import fedwon
from fedshift.utils.checked_json import read_checked
from fedshift.utils.state import is_equal

CLIP, KEY = 0.3, torch.tensor(0)
HEAD = {"4.weight", "4.bias"}


def network():
    """Standardized convolutions (so with a gain), one of them with groups, and a linear layer."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 2, groups=2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    model = apply_surgery(fedwon(agc=None), model)
    with torch.no_grad():
        model[4].weight[1] = 0.0  # equation 4 then takes 1e-3 for the norm
        model[4].bias.mul_(3)
    return model


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (6,), generator=generator)


def autograd(model, seed):
    x, y = batch(seed)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def equation_4(gradient, weight, clip):
    """Clipped gradient, and for each unit whether it was clipped. A vector (bias, gain) is one unit."""
    g, w = gradient.detach().numpy().copy(), weight.detach().numpy()
    if w.squeeze().ndim < 2:
        g, w = g[None], w[None]
    hit = []
    for i in range(len(g)):
        norm_g = math.sqrt(sum(float(value) ** 2 for value in g[i].ravel()))
        norm_w = max(math.sqrt(sum(float(value) ** 2 for value in w[i].ravel())), 1e-3)
        hit.append(norm_g / norm_w > clip)
        if hit[-1]:
            g[i] *= clip * norm_w / norm_g
    return torch.from_numpy(g.reshape(weight.shape)), hit


def found(method, model, seed):
    plan = prepare(method, model, optimizer=SGD(lr=0.1))
    return compute_gradients(plan, client_init(plan, init_client(plan), init_server(plan)), *batch(seed), KEY)[0]


def test_each_unit_is_clipped_as_equation_4_says():
    model = network()
    clipped = found(agc(clip=CLIP), model, 0)
    hits = {}
    for name, gradient in autograd(model, 0).items():
        expected, hits[name] = equation_4(gradient, model.get_parameter(name), CLIP)
        assert (clipped[name] - expected).abs().max() <= 1e-14, name
    assert len(hits["0.weight"]) == 4
    assert len(hits["0.gain"]) == len(hits["0.bias"]) == len(hits["4.bias"]) == 1
    assert hits["4.weight"][1]  # the unit of zeros, to a norm of 3e-4
    assert float(clipped["4.weight"][1].norm()) == pytest.approx(CLIP * 1e-3, rel=1e-9)
    assert {True, False} == {hit for units in hits.values() for hit in units}
    assert any(set(units) == {True, False} for units in hits.values())  # units of one layer differ


def test_a_threshold_that_is_never_reached_changes_nothing():
    model = network()
    assert is_equal(found(agc(clip=1e9), model, 0), found(fedavg(), model, 0))


def test_the_last_layer_can_be_left_out():
    model = network()
    plain, all_clipped = found(fedavg(), model, 0), found(agc(clip=1e-3), model, 0)
    most_clipped = found(agc(clip=1e-3, classifier=False), model, 0)
    for name in plain:
        assert torch.equal(most_clipped[name], (plain if name in HEAD else all_clipped)[name]), name
        assert not torch.equal(plain[name], all_clipped[name]), name


@pytest.mark.parametrize("nesterov", [False, True])
def test_clipping_comes_before_momentum_and_weight_decay(nesterov):
    model = network()
    plan = prepare(agc(clip=CLIP), model, optimizer=SGD(lr=0.3, momentum=0.9, weight_decay=0.01, nesterov=nesterov))
    job = client_init(plan, init_client(plan), init_server(plan))
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    for number in range(4):
        job, _ = client_step_(plan, job, *batch(number), KEY)
        autograd(model, number)
        for parameter in model.parameters():
            parameter.grad, _ = equation_4(parameter.grad, parameter, CLIP)
        sgd.step()
    for name, parameter in model.named_parameters():
        assert (job.params[name] - parameter).abs().max() <= 1e-12, name


def test_it_takes_the_place_of_clipping_that_is_there():
    model = network()
    once, twice = found(agc(clip=0.05), model, 0), found(agc(agc(clip=0.001), clip=0.05), model, 0)
    assert is_equal(once, twice)
    assert len(agc(fedwon(), clip=0.05).rules) == len(fedwon(agc(clip=0.05)).rules) == 1
    assert [rule.clip for rule in (*agc(fedwon(), clip=0.05).rules, *fedwon(agc(clip=0.05)).rules)] == [0.05, 0.05]
    assert fedwon().rules[0].clip == 0.64
    assert fedwon(agc=None).rules == ()


def bare(shape=(3, 8, 8), classes=3):
    """A convolution that leaves its bias to BatchNorm, and one that has a bias."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(80, classes)
    )


def notices(method, size=32):
    plan = prepare(method, bare(), work=Work(batch_size=size, epochs=1), optimizer=SGD(lr=0.1))
    return [text for bound in plan.rules for text in bound.notices]


def test_parameters_that_start_at_zero_hardly_move_and_are_named():
    [said] = notices(fedwon())
    assert said.startswith("fedwon clips the gradients of 0.bias, which start at zero, to a norm of 0.00064 (clip *")
    [said] = notices(agc(clip=1.0))
    assert "1.bias" in said
    assert not notices(fedwon(agc=None))
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 3
    plan = prepare(fedwon(), bare().double(), optimizer=SGD(lr=0.1))
    job = client_init(plan, init_client(plan), init_server(plan))
    for _ in range(10):
        job, _ = client_step_(plan, job, x, y, KEY)
    assert 0 < job.params["0.bias"].norm() <= 10 * 0.1 * 0.64 * 1e-3
    assert (job.params["2.bias"] - plan.initial["2.bias"]).norm() > 10 * job.params["0.bias"].norm()


@pytest.mark.parametrize(("size", "said"), [(1, True), (4, True), (5, False), (None, False)])
def test_clipping_of_small_batches_which_the_paper_leaves_out_is_said(size, said):
    found = [text for text in notices(fedwon(), size) if "but FedWon's authors do not clip" in text]
    assert [text.partition(",")[0] for text in found] == [f"fedwon clips gradients of batches of {size}"] * said
    assert not notices(fedwon(agc=None), size)


def test_a_run_says_what_its_rules_have_to_say(make, tmp_path, Listener, unpublished):
    heard = Listener()
    make("fedwon", rounds=1, batch_size=4, seeds=2).run(tmp_path / "run", callback=heard)
    kept = read_checked(tmp_path / "run" / "notices.json", "")["notices"]
    assert heard.notices == kept
    assert [text.partition(", ")[0] for text in kept].count("fedwon clips gradients of batches of 4") == 1
