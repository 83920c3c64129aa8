"""FedSR equals a plain PyTorch loop with torch's distributions, on the same noise."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedsr import fedsr
from fedshift.nn.dropout import draw_normal
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from fedshift.utils.state import clone

SIZES, SEED, LR, L2, CMI = {"a": 12, "b": 10}, 6, 0.1, 0.3, 0.05


def network(shape=(4,), classes=3):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.Tanh(), nn.Linear(5, classes)).double()


def data():
    rng = np.random.default_rng(0)
    arrays = {name: (rng.normal(s, 1 + s, (n, 4)), np.arange(n) % 3) for s, (name, n) in enumerate(SIZES.items())}
    return federation({name: (x, y, x, y) for name, (x, y) in arrays.items()})


def trial(method):
    settings = Settings(
        rounds=2, work=Work(batch_size=4, epochs=1), optimizer=SGD(lr=LR, momentum=0.9), evaluate_every=99
    )
    return Trial(method, network, data(), settings, SEED)


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
        for client in data().clients:
            x, y = client.train.x, client.train.y
            w = {name: tensor.clone().requires_grad_() for name, tensor in shared.items()}
            means, deviations, scale = (each.requires_grad_() for each in own[client.name])
            sgd = torch.optim.SGD([*w.values(), means, deviations, scale], lr=LR, momentum=0.9)
            order = torch.from_numpy(stream(SEED, "order", client.name, number).permutation(len(y))).split(4)
            for step, batch in enumerate(order, start=number * len(order)):
                hidden = torch.tanh(F.linear(x[batch], w["0.weight"], w["0.bias"]))
                given = F.linear(hidden, *(w[name] for name in names[:2]))
                mean, deviation = given[:, :2], F.softplus(given[:, 2:])
                noise = draw_normal(running.engine.step_keys(client.name, [step])[0], 0, mean.shape)
                z = mean + deviation * noise
                target = Normal(means[y[batch]], F.softplus(deviations)[y[batch]])
                divergence = kl_divergence(Normal(scale * mean, scale * deviation), target).sum(1).mean()
                loss = F.cross_entropy(F.linear(z, *(w[name] for name in names[2:])), y[batch])
                sgd.zero_grad()
                (loss + L2 * z.square().sum(1).sqrt().mean() + CMI * divergence).backward()
                sgd.step()
            states[client.name] = {name: tensor.detach() for name, tensor in w.items()}
            own[client.name] = [each.detach() for each in (means, deviations, scale)]
        for name in shared:
            shared[name] = sum(states[client][name] * size / 22 for client, size in SIZES.items())
    for name, tensor in running.server.shared.items():
        assert (tensor - shared[name]).abs().max() <= 1e-9, name
    for client in SIZES:
        found = running.clients[client].memory[0]
        for name, expected in zip(("means", "deviations", "scale"), own[client], strict=True):
            assert (found[name] - expected).abs().max() <= 1e-9, (client, name)
    x = data().clients[0].test.x
    hidden = torch.tanh(F.linear(x, shared["0.weight"], shared["0.bias"]))
    mean = F.linear(hidden, *(shared[name] for name in names[:2]))[:, :2]
    used = running.plan.module.eval()
    used.load_state_dict(running.model_state("a"))
    assert (used(x) - F.linear(mean, *(shared[name] for name in names[2:]))).abs().max() <= 1e-9


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
