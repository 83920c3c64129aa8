"""Networks with several inputs: against a plain loop over the inputs, and a network that divides rows itself."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.work import iterate_batches
from fedshift.data.assembly import federation
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.scaffold import scaffold
from fedshift.models import NetworksOfInputs
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.laws.conftest import METHODS, by_name
from tests.laws.course import make_trial
from tests.methods.plain import advance

SHAPES = {"image": (1, 5, 5), "row": (3,), "site": (), "mask": (3,)}
REFUSED = ("fedrdn", "feddg_elcfs")
"""Methods that work on samples as images."""


class Several(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
        self.norm, self.last = nn.BatchNorm2d(4), nn.BatchNorm1d(6)
        self.row, self.site = nn.Linear(3, 4), nn.Embedding(5, 4)
        self.join, self.dropout, self.head = nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, classes)

    def forward(self, image, row, site, mask):
        assert (site.dtype, mask.dtype) == (torch.int64, torch.bool)
        seen = self.second(torch.relu(self.norm(self.first(image)))).mean(dim=(2, 3))
        joined = torch.relu(seen + self.row(row * mask) + self.site(site))
        return self.head(self.dropout(torch.relu(self.last(self.join(joined)))))


class Divided(Several):
    def forward(self, x):
        return super().forward(x[:, :25].reshape(-1, 1, 5, 5), x[:, 25:28], x[:, 28].long(), x[:, 29:] > 0.5)


def make_several(shapes, classes):
    assert shapes == SHAPES
    return Several(classes).double()


def make_divided(_, classes):
    return Divided(classes).double()


def draw(size, seed):
    rng, y = np.random.default_rng(seed), np.arange(size) % 3
    x = {
        "image": rng.normal(seed, 1, (size, 1, 5, 5)), "row": rng.normal(size=(size, 3)),
        "site": rng.integers(0, 5, size, dtype=np.int32), "mask": rng.random((size, 3)) < 0.6,
    }  # fmt: skip
    return x, y


def clients(**sizes):
    return {name: (*draw(size, seed), *draw(size, seed + 9)) for seed, (name, size) in enumerate(sizes.items())}


DATA = federation(clients(a=21, b=16, c=9)).check()
NETWORKS = NetworksOfInputs(make_several, DATA.inputs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("each", [each for each in METHODS if each.name not in REFUSED], ids=by_name)
def test_every_method_trains_the_network_that_divides_rows_itself(each):
    one, other = (make_trial(each, model=model, data=DATA) for model in (NETWORKS, make_divided))
    for trial in (one, other):
        advance(trial, trial)
    assert is_equal(one.to_tensors()[0], other.to_tensors()[0])


@pytest.mark.parametrize("each", [each for each in METHODS if each.name in REFUSED], ids=by_name)
def test_methods_that_work_on_images_refuse(each):
    with pytest.raises(UsageError, match="here each sample has the inputs 'image', 'row', 'site', 'mask': remove fed"):
        make_trial(each, model=NETWORKS, data=DATA)


@pytest.mark.parametrize("sizes", [{"a": 21}, {"a": 21, "b": 16}], ids=len)
def test_rounds_equal_a_plain_loop_over_the_inputs(sizes):
    given, start = clients(**sizes), make_several(SHAPES, 3)
    start.dropout = nn.Identity()
    model = NetworksOfInputs(lambda *_: copy.deepcopy(start), DATA.inputs)
    trial = make_trial(fedavg(), model=model, data=federation(given))
    models = {name: copy.deepcopy(start) for name in given}
    for number in range(2):
        trial.advance()
        for name, own in models.items():
            x, y = given[name][0], torch.from_numpy(given[name][1])
            sgd = torch.optim.SGD(own.parameters(), lr=0.05)
            bounds = tuple((first, min(first + 8, len(y))) for first in range(0, len(y), 8))
            steps = range(number * len(bounds), (number + 1) * len(bounds))
            for _, index in iterate_batches(3, name, len(y), bounds, steps):
                image, row, site, mask = (torch.from_numpy(each)[index] for each in x.values())
                sgd.zero_grad()
                nn.functional.cross_entropy(own(image, row, site.long(), mask), y[index]).backward()
                sgd.step()
        for key in start.state_dict():
            parts = {name: own.state_dict()[key] for name, own in models.items()}
            mean = sum(part.double() * sizes[name] for name, part in parts.items()) / sum(sizes.values())
            for part in parts.values():
                part.copy_(mean if part.is_floating_point() else mean.round())
    for key, expected in models["a"].state_dict().items():
        assert (trial.server.shared[key] - expected).abs().max() <= 1e-12, key


@pytest.mark.parametrize("engine", [pytest.param("pool", marks=pytest.mark.slow), "stacked"])
def test_engines_agree(engine):
    method = fedbn(scaffold())
    one, other = (make_trial(method, name, model=NETWORKS, data=DATA) for name in ("sequential", engine))
    advance(one, other, rounds=2)
    tensors = other.to_tensors()[0]
    for name, expected in one.to_tensors()[0].items():
        assert (tensors[name] - expected).abs().max() <= (0 if engine == "pool" else 1e-9), name
