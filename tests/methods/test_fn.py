"""FN equals a plain loop whose features have one length, which torch's RMSNorm gives too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.preparation import apply_surgery
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedsr import fedsr
from fedshift.methods.fn import FeatureScaling, fn
from fedshift.utils.errors import UsageError
from tests.methods.plain import LR, SHARES, SIZES, batches, copied, largest_difference, loaded_with, mean, trial

NAMES = {"4.classifier.weight": "4.weight", "4.classifier.bias": "4.bias"}


def predict(model, x):
    z = model[:4](x)
    return model[4](z / torch.sqrt((z**2).sum(1, keepdim=True) / z.shape[1]))


def test_rounds_equal_a_plain_loop():
    running = trial(fn())
    server = {NAMES.get(name, name): tensor for name, tensor in running.plan.initial.items()}
    for number in range(3):
        running.advance()
        after = []
        for client in SIZES:
            model = loaded_with(server)
            for x, y in batches(client, number):
                grads = torch.autograd.grad(F.cross_entropy(predict(model, x), y), [*model.parameters()])
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.data -= LR * grad
            after.append(copied(model))
        server = mean(after, SHARES.values())
    found = {NAMES.get(name, name): tensor for name, tensor in running.server.shared.items()}
    assert largest_difference(found, server) <= 1e-12
    used = apply_surgery(fn(), loaded_with(server)).eval()
    used.load_state_dict(running.model_state())
    x, _ = next(batches("a", 0))
    assert (used(x) - predict(loaded_with(server).eval(), x)).abs().max() <= 1e-12


def test_the_layer_is_torchs_rms_norm_and_no_loss_pulls_at_the_length():
    z = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    scaled = FeatureScaling()(z)
    assert (scaled - F.rms_norm(z, (7,), eps=0.0)).abs().max() <= 1e-14
    (grad,) = torch.autograd.grad(F.cross_entropy(scaled, torch.arange(5)), z)
    assert (grad * z).sum(dim=1).abs().max() <= 1e-15
    zeros = torch.zeros(2, 7, requires_grad=True)
    assert not FeatureScaling()(zeros).any()


@pytest.mark.parametrize("make", [lambda: fn(fedsr(size=5)), lambda: fedsr(fn(), size=5), lambda: fn(fedbn())])
def test_it_scales_what_the_classifier_reads_whatever_stands_before_it(make):
    running = trial(make())
    running.advance()
    read = []
    for layer in running.plan.layers:
        if isinstance(layer, nn.Linear) and layer.out_features == 3:
            layer.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    running.evaluate()
    (lengths,) = {round(float(length), 9) for z in read for length in z.square().mean(dim=1)}
    assert lengths == 1.0


@pytest.mark.parametrize(
    ("method", "model", "said"),
    [
        (fn(fn()), nn.Linear(2, 2), r"'fedavg\+fn\+fn': features are scaled twice"),
        (fn(), nn.Conv2d(1, 2, 3), "fn needs a linear classifier as the model's last layer, which is a Conv2d"),
    ],
)
def test_what_it_cannot_change_is_refused(method, model, said):
    with pytest.raises(UsageError, match=said):
        apply_surgery(method, model)
