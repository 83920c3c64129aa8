"""FLamby's Heart Disease: FedAvg, FedProx and SCAFFOLD by ``examples/flamby_heart.py``, and a plain PyTorch loop.

Both meet the accuracies that FLamby published (owkin/FLamby at edacf54, ``flamby/results``), where FEDSHIFT_DATA names
the directory of the data. The loop shares nothing with fedshift: FLamby's sigmoid and loss, and torch's orders.
"""

import importlib.util
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent.parent
DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))
PRESENT = os.environ.get("FEDSHIFT_DATA") and (DATA / "heart_disease.npz").is_file()
pytestmark = pytest.mark.skipif(not PRESENT, reason="FEDSHIFT_DATA has no heart_disease.npz")
SIZES = {"cleveland": (199, 104), "hungarian": (172, 89), "switzerland": (30, 16), "va": (85, 45)}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("flamby_heart", ROOT / "examples" / "flamby_heart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def endless(x, y):
    loader = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y).float()), batch_size=4, shuffle=True)
    while True:
        yield from loader


def train_plainly(clients, seed):
    """FedAvg in plain PyTorch; the accuracy of the server's model on each client's test patients."""
    torch.manual_seed(seed)
    server = nn.Linear(13, 1)
    batches = {name: endless(x, y) for name, (x, y, _, _) in clients.items()}
    for _ in range(15):
        total = [torch.zeros_like(tensor) for tensor in server.parameters()]
        for name, (x, *_) in clients.items():
            local = nn.Linear(13, 1)
            local.load_state_dict(server.state_dict())
            sgd = torch.optim.SGD(local.parameters(), lr=0.001)
            for inputs, labels in islice(batches[name], 100):
                sgd.zero_grad()
                nn.functional.binary_cross_entropy(torch.sigmoid(local(inputs)), labels).backward()
                sgd.step()
            for into, tensor in zip(total, local.parameters(), strict=True):
                into += tensor.detach() * len(x) / 486
        with torch.no_grad():
            for tensor, mean in zip(server.parameters(), total, strict=True):
                tensor.copy_(mean)
    with torch.no_grad():
        return {
            name: float(((torch.sigmoid(server(torch.tensor(x))).numpy() > 0.5) == y).mean())
            for name, (_, _, x, y) in clients.items()
        }


def assert_as_published(found, published, means):
    """Each client's within two of its test patients, the mean over clients within a point."""
    for name, (_, patients) in SIZES.items():
        assert abs(found[name] - published[name]) <= 2 / patients + 0.0005, (name, found[name], published[name])
    assert np.mean(list(found.values())) == pytest.approx(means, abs=0.01)


def test_the_split_is_flambys(example):
    clients = example.read_clients(DATA)
    assert {name: (len(x), len(tested)) for name, (x, _, tested, _) in clients.items()} == SIZES
    for x, *_ in clients.values():
        assert x.shape[1] == 13
        assert np.abs(x.mean(axis=0)).max() <= 1e-5


@pytest.mark.slow
def test_a_plain_loop_on_this_split_meets_what_flamby_published(example):
    clients = example.read_clients(DATA)
    seeds = [train_plainly(clients, seed) for seed in example.SEEDS]
    found = {name: float(np.mean([seed[name] for seed in seeds])) for name in SIZES}
    assert_as_published(found, {name: values[0] for name, values in example.PUBLISHED.items()}, 0.685)


@pytest.mark.slow
def test_fedavg_fedprox_and_scaffold_meet_what_flamby_published(example):
    accuracy = example.measure(DATA, "stacked")
    for at, (method, mean) in enumerate(zip(example.METHODS, (0.685, 0.685, 0.684), strict=True)):
        found = accuracy[method].mean(axis=1).to_dict()
        assert_as_published(found, {name: values[at] for name, values in example.PUBLISHED.items()}, mean)
