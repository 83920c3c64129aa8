"""FedRDN equals a plain loop that normalizes image by image, by the statistics of the client that is drawn for each."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.preparation import apply_surgery
from fedshift.core.work import Work
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedrdn import fedrdn
from fedshift.methods.harmofl import harmofl
from fedshift.nn.dropout import derive_key, draw_bits
from fedshift.utils.errors import UsageError
from tests.methods.plain import (
    LR,
    SHARES,
    SIZES,
    batches,
    copied,
    data,
    largest_difference,
    loaded_with,
    mean,
    network,
    trial,
)

NAMES = {"0.1.weight": "0.weight", "0.1.bias": "0.bias"}


def measure(images):
    """The means over images of each channel's mean and deviation."""
    m = [[float(channel.mean()) for channel in image] for image in images]
    s = [[float(channel.std()) for channel in image] for image in images]
    return (torch.tensor(each, dtype=torch.float64).mean(0) for each in (m, s))


def normalize(x, statistics):
    each = zip(x, statistics, strict=True)
    return torch.stack([(image - m[:, None, None]) / s[:, None, None] for image, (m, s) in each])


def renamed(state):
    return {NAMES.get(name, name): tensor for name, tensor in state.items() if not name.startswith("0.0.")}


def test_rounds_equal_a_plain_loop():
    running, steps = trial(fedrdn()), dict.fromkeys(SIZES, 0)
    bank = [tuple(measure(data().client(client).train.x)) for client in SIZES]
    server, drawn = renamed(running.plan.initial), []
    for number in range(3):
        running.advance()
        after = []
        for client, own in zip(SIZES, bank, strict=True):
            model = loaded_with(server)
            for x, y in batches(client, number):
                key = derive_key(running.engine.step_keys(client, [steps[client]])[0], "clientstatistics")
                drawing = bank if number else [own]  # nothing is known of others before the first upload
                chosen = [int(bits) % len(drawing) for bits in draw_bits(key, 0, len(y))]
                loss = F.cross_entropy(model(normalize(x, [drawing[k] for k in chosen])), y)
                for parameter, grad in zip(
                    model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
                ):
                    parameter.data -= LR * grad
                steps[client] += 1
                drawn += chosen if number else []
            after.append(copied(model))
        server = mean(after, SHARES.values())
    assert set(drawn) == {0, 1}
    assert largest_difference(renamed(running.server.shared), server) <= 1e-12
    used, plain = apply_surgery(fedrdn(), network()).eval(), loaded_with(server).eval()
    for client, statistics in zip(SIZES, bank, strict=True):
        used.load_state_dict(running.model_state(client))
        x = data().client(client).test.x
        assert (used(x) - plain(normalize(x, [statistics] * len(x)))).abs().max() <= 1e-12


def test_a_client_measures_once():
    """With one sample a batch and round, other rounds see other samples."""
    running = trial(fedrdn(samples=4), work=Work(batch_size=4, batches=1))
    running.advance()
    before = running.clients["a"].memory[0]
    running.advance()
    assert all(torch.equal(running.clients["a"].memory[0][kind], tensor) for kind, tensor in before.items())
    alone = trial(fedrdn())
    alone.advance()
    (bank,) = alone.server.memory
    x, y = data().client("a").train.x, data().client("a").train.y
    own = {f"0.0.{kind}": values[0] for kind, values in bank.items()}
    kept = {kind: values[:1] for kind, values in bank.items()}
    step = SimpleNamespace(server=kept, buffers=own, key=torch.tensor(7))
    assert (alone.plan.rules[0].rule.batch(x, y, step)[0] - x).abs().max() <= 1e-14


def test_a_channel_that_never_varies_is_divided_by_one():
    bound, x = trial(fedrdn()).plan.rules[0], torch.ones(3, 1, 4, 4, dtype=torch.float64)

    def run(hooks):
        for hook in hooks.values():
            hook(None, (x,))

    found = bound.rule.start(SimpleNamespace(memory=bound.memory, run=run))
    assert (float(found["mean"]), float(found["deviation"])) == (1.0, 1.0)


class Shifted(nn.Module):
    """Changes inputs before its first convolution sees them."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return self.layers(x + 1)


def shifted(shape, classes):
    return Shifted()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: apply_surgery(fedrdn(), nn.Linear(2, 2)), "first convolution sees, but the model has none"),
        (lambda: trial(fedrdn(harmofl())), r"write harmofl\+fedrdn"),
        (
            lambda: Trial(fedrdn(), shifted, data(), Settings(optimizer=SGD(lr=LR)), 0).advance(),
            "fedrdn normalizes the inputs of the model, but its first convolution sees them changed",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()
