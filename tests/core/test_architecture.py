"""What a checkpoint knows of the network that may go on with it: what matters to results, not how layers print."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedshift.core.architecture import architecture
from fedshift.core.work import Work
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.utils.errors import UsageError


class Counting(nn.Module):
    """A layer whose attributes change as it is called, as a network's own code may do."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.rate, self.calls = rate, 0

    def forward(self, x):
        self.calls += 1
        return x * self.rate


def network(_=None, classes=3, /, *, p=0.5, eps=1e-5, momentum=0.1, stride=1, act=F.relu, rate=0.5, slope=0.01, **more):
    activation = nn.LeakyReLU(slope)
    activation.act = act
    convolution = nn.Conv2d(3, 4, 3, stride=stride, padding=1, **more)
    return nn.Sequential(
        convolution, nn.BatchNorm2d(4, eps=eps, momentum=momentum), activation, nn.Dropout(p), Counting(rate),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes),
    )  # fmt: skip


def trial(data, **changes):
    return Trial(fedavg(), partial(network, **changes), data, Settings(rounds=2, work=Work(epochs=1, batch_size=8)), 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"p": 0.4}, "p=0.4"), ({"eps": 1e-3}, "eps=0.001"), ({"momentum": None}, "momentum=None"),
        ({"stride": 2}, "stride=(2, 2)"), ({"act": torch.tanh}, "act=tanh"), ({"rate": 0.25}, "rate=0.25"),
        ({"slope": 0.2}, "negative_slope=0.2"), ({"padding_mode": "circular"}, "padding_mode='circular'"),
        ({"act": partial(F.elu, alpha=np.float64(2))}, "act=(elu, (), (('alpha', 2.0)))"),
    ],
)  # fmt: skip
def test_what_matters_to_results_and_is_no_shape_is_described(changes, said):
    assert said in architecture(network(**changes))
    assert said not in architecture(network())


def test_a_checkpoint_of_another_model_is_refused_by_what_differs_and_not_by_how_layers_print(tiny, monkeypatch):
    before = trial(tiny)
    before.advance()
    stored = before.to_tensors()[1]
    with pytest.raises(UsageError, match=r"this run was begun with another model: then .*p=0.4"):
        trial(tiny, p=0.4).check_compatible(stored, 0)
    for kind in (nn.Dropout, nn.BatchNorm2d, nn.Conv2d, nn.Linear):
        monkeypatch.setattr(kind, "extra_repr", lambda self: "as another release prints it")
    trial(tiny).check_compatible(stored, 0)


def test_a_setting_that_a_release_of_torch_adds_is_not_compared_until_it_is_used():
    class Dropout(nn.Dropout):
        def __init__(self, p=0.5, inplace=False, scaled=True):
            super().__init__(p, inplace)
            self.scaled = scaled

    Dropout.__module__, Dropout.__qualname__ = "torch.nn.modules.elsewhere", "Dropout"
    assert architecture(Dropout(0.3)) == architecture(nn.Dropout(0.3)) == "torch.Dropout(p=0.3)"
    assert architecture(Dropout(0.3, scaled=False)) == "torch.Dropout(p=0.3, scaled=False)"


def test_shapes_types_and_shared_tensors_are_named():
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).double(), nn.Linear(2, 2, bias=False))
    tied[2].weight = tied[0].weight
    assert architecture(tied).splitlines() == [
        "torch.Sequential()",
        "0 torch.Linear(in_features=2, out_features=2) bias: none, weight: torch.float32(2, 2)",
        "1 torch.Linear(in_features=2, out_features=2) bias: none, weight: torch.float64(2, 2)",
        "2 torch.Linear(in_features=2, out_features=2) bias: none, weight: 0.weight",
    ]
