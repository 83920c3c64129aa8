"""Every task under a few methods: engines agree, resume is exact, and a plain loop of PyTorch gives the same."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.federation import ClientData, Federation
from fedshift.data.samples import Samples
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.feddg_elcfs import feddg_elcfs
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fedwon import fedwon
from fedshift.methods.harmofl import harmofl
from fedshift.methods.silobn import silobn
from fedshift.results.checkpoint import load_checkpoint
from fedshift.tasks import Multilabel, Regression, Segmentation, Task
from fedshift.utils.state import is_equal
from tests.laws.conftest import by_name
from tests.laws.test_engines import distance

METHODS = [fedavg(), fedbn(), fedprox(mu=0.1), silobn(), fedwon(), harmofl(), feddg_elcfs()]
TASKS = [Segmentation(), Multilabel(), Regression(scales=((1.0, 2.0), (0.0, 1.0)))]
OUTPUTS, ROUNDS = 2, 2


def convolutions(shape, classes):
    layers = nn.Conv2d(shape[0], 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, classes, 1)
    return nn.Sequential(*layers).double()


def layers(shape, classes):
    layers = nn.Conv2d(shape[0], 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, classes)
    return nn.Sequential(*layers).double()


def without_batches(shape, classes):
    layers = nn.Conv2d(shape[0], 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Tanh(), nn.Conv2d(3, classes, 1)
    return nn.Sequential(*layers).double()


def clients(task: Task) -> Federation:
    """Clients of unequal size and scale; a fifth of the masks' pixels is ignored, and one mask as a whole."""
    made = []
    for number, (name, size) in enumerate({"a": 11, "b": 8, "c": 5}.items()):
        random = torch.Generator().manual_seed(number)
        x = (1 + number) * torch.randn(2 * size, 1, 4, 4, generator=random, dtype=torch.float64)
        hints = x[:, 0] + torch.randn(x[:, 0].shape, generator=random) > 0
        if isinstance(task, Segmentation):
            y = hints.to(torch.uint8).masked_fill(torch.rand(hints.shape, generator=random) < 0.2, 255)
            y[0] = 255
        else:
            y = hints[:, 0, :OUTPUTS].float() + (0 if isinstance(task, Multilabel) else x[:, 0, 1, :OUTPUTS].float())
        train, test = (Samples(x=x[part], y=y[part]) for part in (slice(size), slice(size, None)))
        made.append(ClientData(name=name, train=train, test=test))
    return Federation(name="tasks", clients=tuple(made), classes=OUTPUTS, task=task).check()


def make(task: Task, method: Any, engine: str = "sequential", **changes: Any) -> Trial:
    given = {
        "rounds": ROUNDS, "work": Work(batch_size=4, epochs=1), "optimizer": SGD(lr=0.1, momentum=0.0),
        "engine": engine,
        "workers": 2 if engine == "pool" else None, "evaluate_every": ROUNDS, **changes,
    }  # fmt: skip
    model = given.pop("model", convolutions if isinstance(task, Segmentation) else layers)
    return Trial(method, model, clients(task), Settings(**given), 3)


@pytest.fixture(scope="module")
def reference() -> Callable[..., tuple[list, dict]]:
    """Rows and states of a trial on the sequential engine, which is run once."""
    known: dict[Any, Any] = {}

    def run(task, method):
        key = task.name, method.text
        if key not in known:
            running = make(task, method)
            rows = [running.advance().rows for _ in range(ROUNDS)]
            known[key] = rows, running.to_tensors()[0]
        return known[key]

    return run


def assert_alike(rows, others):
    for row, same in zip(rows, others, strict=True):
        assert row.keys() == same.keys()
        for name, value in row.items():
            assert same[name] == (pytest.approx(value, abs=1e-9) if isinstance(value, float) else value) or (
                isinstance(value, list) and same[name] == pytest.approx(value, abs=1e-9)
            )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS, ids=by_name)
@pytest.mark.parametrize("task", TASKS, ids=str)
def test_clients_side_by_side_equal_the_loop(task, method, reference):
    rows, tensors = reference(task, method)
    running = make(task, method, "stacked")
    for expected in rows:
        assert_alike(expected, running.advance().rows)
    assert distance(tensors, running.to_tensors()[0]) <= 1e-9


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("task", "method"), [(TASKS[0], METHODS[1]), (TASKS[2], METHODS[3])], ids=lambda value: by_name(value) or str(value)
)
def test_processes_equal_the_loop(task, method, reference):
    rows, tensors = reference(task, method)
    running = make(task, method, "pool")
    for expected in rows:
        assert_alike(expected, running.advance().rows)
    assert distance(tensors, running.to_tensors()[0]) <= 1e-9
    running.close()


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_one_step_on_all_batches_equals_the_loop(task):
    def plain(shape, classes):
        if isinstance(task, Segmentation):
            return without_batches(shape, classes)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, classes)).double()

    changes = {"work": Work(batch_size=4, batches=1), "model": plain}
    one, other = make(task, fedavg(), **changes), make(task, fedavg(), "identity", **changes)
    for _ in range(ROUNDS):
        assert_alike(one.advance().rows, other.advance().rows)
    assert distance(one.to_tensors()[0], other.to_tensors()[0]) <= 1e-9


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", METHODS, ids=by_name)
@pytest.mark.parametrize("task", TASKS, ids=str)
def test_resumed_equals_uninterrupted(task, method, reference, tmp_path):
    rows, tensors = reference(task, method)
    stopped, resumed = make(task, method), make(task, method)
    stopped.advance()
    stopped.save(tmp_path, "checkpoint.safetensors")
    resumed.restore(*load_checkpoint(tmp_path / "checkpoint.safetensors"), tmp_path)
    assert resumed.advance().rows == rows[1]
    assert is_equal(resumed.to_tensors()[0], tensors)


def cut(engine="sequential", method=METHODS[1], amount="epochs", backwards=False):
    """Return a trial on patches of the clients, in their order or ``backwards``."""
    data = clients(Segmentation()).cut_patches((3, 2))
    data = replace(data, clients=data.clients[::-1]) if backwards else data
    given = {"optimizer": SGD(lr=0.1), "engine": engine, "workers": 2 if engine == "pool" else None}
    model = convolutions if method is METHODS[1] else without_batches
    return Trial(method, model, data, Settings(rounds=ROUNDS, work=Work(batch_size=3, **{amount: 1}), **given), 3)


def test_patches_are_the_same_after_a_stop_and_whatever_the_order_of_clients(tmp_path):
    running, backwards, stopped, resumed = cut(), cut(backwards=True), cut(), cut()
    rows = [running.advance().rows for _ in range(ROUNDS)]
    deque((backwards.advance() for _ in range(ROUNDS)), maxlen=0)
    assert distance(backwards.server.shared, running.server.shared) <= 1e-12
    stopped.advance()
    stopped.save(tmp_path, "checkpoint.safetensors")
    resumed.restore(*load_checkpoint(tmp_path / "checkpoint.safetensors"), tmp_path)
    assert resumed.advance().rows == rows[1]
    assert is_equal(resumed.to_tensors()[0], running.to_tensors()[0])


@pytest.mark.parametrize(
    ("engine", "method", "amount"),
    [
        ("identity", METHODS[0], "batches"),
        pytest.param("stacked", METHODS[1], "epochs", marks=pytest.mark.slow),
        pytest.param("pool", METHODS[1], "epochs", marks=pytest.mark.slow),
    ],
)
def test_patches_are_the_same_on_every_engine(engine, method, amount):
    running, other = cut(method=method, amount=amount), cut(engine, method, amount)
    for _ in range(ROUNDS):
        assert_alike(running.advance().rows, other.advance().rows)
    assert distance(running.to_tensors()[0], other.to_tensors()[0]) <= (0 if engine == "pool" else 1e-9)
    other.close()


def test_segmentation_under_fedavg_is_a_plain_loop_of_pytorch():
    task = Segmentation()
    running = make(task, fedavg(), work=Work(batch_size=None, epochs=2))
    networks = {}
    data = clients(task)
    shared = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    total = sum(len(client.train) for client in data.clients)
    for _ in range(ROUNDS):
        measured = running.advance().rows
        for client in data.clients:
            network = convolutions((1, 4, 4), OUTPUTS)
            network.load_state_dict(shared)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            y = client.train.y.long()
            known = y != 255
            for _ in range(2):
                scores = network(client.train.x)
                p, given = scores.softmax(1)[:, 1][known], (y == 1)[known]
                dice = 1 - (2 * p[given].sum() + 1) / (p.sum() + given.sum() + 1)
                loss = nn.functional.cross_entropy(scores, y, ignore_index=255) + dice
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            networks[client.name] = network.state_dict()
        for name, tensor in shared.items():
            if tensor.is_floating_point():
                parts = [len(client.train) / total * networks[client.name][name] for client in data.clients]
                shared[name] = sum(parts)
    found = running.server.shared
    assert max(float((found[n] - shared[n]).abs().max()) for n in shared if shared[n].is_floating_point()) <= 1e-9
    network.load_state_dict(shared)
    row = next(row for row in measured if (row["client"], row["split"]) == ("b", "test"))
    with torch.no_grad():
        chosen = network.eval()(data.client("b").test.x).argmax(1)
    y = data.client("b").test.y
    hits = [int(((chosen == k) & (y == k)).sum()) for k in range(OUTPUTS)]
    predicted = [int(((chosen == k) & (y != 255)).sum()) for k in range(OUTPUTS)]
    assert (row["hits"], row["predicted"]) == (hits, predicted)
    assert row["support"] == [int((y == k).sum()) for k in range(OUTPUTS)]
