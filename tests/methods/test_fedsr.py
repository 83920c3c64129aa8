"""FedSR equals a plain PyTorch loop with torch's distributions, on the same noise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

from fedshift.core.optimizer import SGD
from fedshift.methods.fedsr import fedsr
from fedshift.nn.dropout import draw_normal
from fedshift.utils.errors import UsageError
from fedshift.utils.state import clone
from tests.methods import plain
from tests.methods.plain import LR, largest_difference, mean, passes, step

SIZES, L2, CMI = {"a": 12, "b": 10}, 0.3, 0.05
DATA = plain.data(SIZES, (4,))


def network(shape=(4,), classes=3):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.Tanh(), nn.Linear(5, classes)).double()


def trial(method):
    return plain.trial(method, network, DATA, optimizer=SGD(lr=LR, momentum=0.9))


def test_rounds_equal_a_plain_loop_with_torchs_distributions():
    running = trial(fedsr(l2=L2, cmi=CMI, size=2))
    shared = clone(running.plan.initial)
    names = ["2.gaussian.weight", "2.gaussian.bias", "2.classifier.weight", "2.classifier.bias"]
    assert list(shared) == ["0.weight", "0.bias", *names]
    assert [tuple(shared[name].shape) for name in names] == [(4, 5), (4,), (3, 2), (3,)]
    own = {name: [torch.zeros(3, 2).double(), torch.ones(3, 2).double(), torch.ones(()).double()] for name in SIZES}
    for number in range(2):
        running.advance()
        states = {}
        for client in DATA.clients:
            w = {name: tensor.clone().requires_grad_() for name, tensor in shared.items()}
            means, deviations, scale = (each.requires_grad_() for each in own[client.name])
            sgd = torch.optim.SGD([*w.values(), means, deviations, scale], lr=LR, momentum=0.9)
            for done, (x, y) in enumerate(passes(client, number), start=3 * number):
                hidden = torch.tanh(F.linear(x, w["0.weight"], w["0.bias"]))
                given = F.linear(hidden, *(w[name] for name in names[:2]))
                center, deviation = given[:, :2], F.softplus(given[:, 2:])
                noise = draw_normal(running.engine.step_keys(client.name, [done])[0], 0, center.shape)
                z = center + deviation * noise
                target = Normal(means[y], F.softplus(deviations)[y])
                divergence = kl_divergence(Normal(scale * center, scale * deviation), target).sum(1).mean()
                loss = F.cross_entropy(F.linear(z, *(w[name] for name in names[2:])), y)
                step(sgd, loss + L2 * z.square().sum(1).sqrt().mean() + CMI * divergence)
            states[client.name] = {name: tensor.detach() for name, tensor in w.items()}
            own[client.name] = [each.detach() for each in (means, deviations, scale)]
        shared = mean([*states.values()], SIZES.values())
    assert largest_difference(running.server.shared, shared) <= 1e-9
    for client, expected in own.items():
        expected = dict(zip(("means", "deviations", "scale"), expected, strict=True))
        assert largest_difference(running.clients[client].memory[0], expected) <= 1e-9
    x = DATA.clients[0].test.x
    hidden = torch.tanh(F.linear(x, shared["0.weight"], shared["0.bias"]))
    center = F.linear(hidden, *(shared[name] for name in names[:2]))[:, :2]
    used = running.plan.module.eval()
    used.load_state_dict(running.model_state("a"))
    assert (used(x) - F.linear(center, *(shared[name] for name in names[2:]))).abs().max() <= 1e-9


def test_the_noise_is_standard_normal_and_a_function_of_its_key():
    drawn = draw_normal(torch.tensor(5), 0, (40_000,))
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1) < 0.02
    assert abs(float((drawn.abs() < 1).double().mean()) - 0.6827) < 0.01
    assert torch.equal(drawn, draw_normal(torch.tensor(5), 0, (40_000,)))
    assert abs(float((drawn * draw_normal(torch.tensor(6), 0, (40_000,))).mean())) < 0.02


def test_features_are_as_many_as_before_unless_their_number_is_given():
    assert trial(fedsr()).plan.initial["2.gaussian.weight"].shape == (10, 5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"l2": -1.0}, "fedsr: l2=-1 and cmi=0.0005: give 0 or more for each"),
        ({"cmi": -1.0}, "fedsr: l2=0.01 and cmi=-1: give 0 or more for each"),
        ({"size": 0}, "fedsr: size=0: give 1 or more"),
    ],
)
def test_arguments_without_sense_are_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        fedsr(**arguments)
