"""A round of FedAvg and of FedBN against a plain PyTorch loop that shares no code with the kernel.

The plain loop is what research code does: a module for each client, ``torch.optim.SGD``, ``state_dict`` averaging. Only
the order of samples is taken from fedshift.
"""

import copy
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations, count, islice

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD, as_optimizer
from fedshift.core.schedule import StepDecay
from fedshift.core.work import Work, iterate_batches
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fednova import fednova
from fedshift.methods.scaffold import scaffold
from fedshift.results.checkpoint import load_checkpoint
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from fedshift.utils.state import is_equal
from tests.core.test_optimizer import Leaky
from tests.laws.course import make_trial

SIZES = {"x": 40, "y": 24, "z": 13}
BATCH, SEED, LR, MOMENTUM, DECAY = 8, 11, 0.05, 0.9, 0.01


def model(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(6 * 16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, classes),
    )  # fmt: skip


def double_model(shape, classes):
    """A network in which no gradient is 0 but for rounding, which adaptive optimizers would magnify."""
    network = model(shape, classes).double()
    network[0].bias = network[5].bias = None
    return network


def linear(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, classes))


def data():
    rng = np.random.default_rng(1)
    clients = {}
    for shift, (name, size) in enumerate(SIZES.items()):
        x = rng.integers(0, 256 - 40 * shift, (size, 8, 8, 3), dtype=np.uint8)
        y = np.arange(size) % 4
        clients[name] = (x, y, x, y)
    return federation(clients)


def run_settings(**changes):
    defaults = {"rounds": 3, "optimizer": SGD(lr=LR, momentum=MOMENTUM, weight_decay=DECAY)}
    return Settings(**{"work": Work(batch_size=BATCH, epochs=1), **defaults, **changes})


def plain_sgd(params):
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def plain_rounds(trial, make, dtype=torch.float64, *, aggregate_last=True, optimizer=plain_sgd, keep=False):
    """The trial's rounds in plain PyTorch; the clients' models after the last aggregation, or just before it."""
    initial, kept, rounds = make((3, 8, 8), 4).to(dtype), {}, trial.settings.rounds
    initial.load_state_dict(trial.plan.initial)
    models = {client.name: copy.deepcopy(initial) for client in trial.data.clients}
    inputs = {c.name: (c.train.x.to(dtype) / 127.5 - 1.0, c.train.y) for c in trial.data.clients}
    local = set()
    if trial.plan.method.name == "fedbn":
        for prefix, layer in initial.named_modules():
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                local |= {f"{prefix}.{name}" for name in layer.state_dict()}
    steps = dict.fromkeys(models, 0)
    for number in range(rounds):
        for name, network in models.items():
            x, y = inputs[name]
            network.train()
            made = optimizer(network.parameters())
            made = kept.setdefault(name, made) if keep else made
            bounds = tuple((start, min(start + BATCH, len(y))) for start in range(0, len(y), BATCH))
            for _, index in iterate_batches(SEED, name, len(y), bounds, range(steps[name], steps[name] + len(bounds))):
                made.zero_grad()
                nn.functional.cross_entropy(network(x[index]), y[index]).backward()
                made.step()
            steps[name] += len(bounds)
        if number == rounds - 1 and not aggregate_last:
            break
        total = sum(SIZES.values())
        for key, value in initial.state_dict().items():
            if key in local:
                continue
            mean = sum(m.state_dict()[key].double() * SIZES[name] / total for name, m in models.items())
            for network in models.values():
                target = network.state_dict()[key]
                target.copy_(mean if value.is_floating_point() else mean.round())
    return models


@pytest.mark.parametrize("method", [fedavg(), fedbn()], ids=lambda method: method.name)
@pytest.mark.parametrize(("dtype", "rounds", "tolerance"), [(torch.float32, 1, 1e-6), (torch.float64, 3, 1e-12)])
def test_rounds_equal_a_plain_pytorch_loop(method, dtype, rounds, tolerance):
    trial = Trial(method, lambda *size: model(*size).to(dtype), data(), run_settings(rounds=rounds), SEED)
    expected = plain_rounds(trial, model, dtype)
    for _ in range(rounds):
        trial.advance()
    for name, network in expected.items():
        state = trial.model_state(name)
        assert state.keys() == network.state_dict().keys()
        for entry, tensor in network.state_dict().items():
            assert state[entry].dtype == tensor.dtype
            assert (state[entry].double() - tensor.double()).abs().max() <= tolerance, (name, entry)


@pytest.mark.parametrize(
    ("kind", "keep"),
    [
        (partial(torch.optim.RMSprop, lr=0.01, alpha=0.9, momentum=0.5), False),
        (partial(torch.optim.NAdam, lr=0.01), True),
        (partial(Leaky, lr=0.05, leak=0.3), True),
    ],
    ids=lambda kind: getattr(getattr(kind, "func", None), "__name__", ""),
)
def test_rounds_with_any_optimizer_of_torch_equal_a_plain_pytorch_loop_and_resume(kind, keep, tmp_path):
    settings = run_settings(optimizer=replace(as_optimizer(kind, lr=7.0), keep=keep))
    trial = Trial(fedbn(), double_model, data(), settings, SEED)
    expected = plain_rounds(trial, double_model, optimizer=kind, keep=keep)
    for number in range(3):
        trial.advance()
        if number == 0:
            trial.save(tmp_path, "checkpoint.safetensors")
    for name, network in expected.items():
        for entry, tensor in network.state_dict().items():
            assert (trial.model_state(name)[entry] - tensor).abs().max() <= 1e-12, (name, entry)
    resumed = Trial(fedbn(), double_model, data(), settings, SEED)
    resumed.restore(*load_checkpoint(tmp_path / "checkpoint.safetensors"), tmp_path)
    for _ in range(2):
        resumed.advance()
    assert is_equal(resumed.to_tensors()[0], trial.to_tensors()[0])


@pytest.mark.slow
def test_any_optimizer_of_torch_is_the_same_in_processes():
    optimizer = replace(as_optimizer(partial(Leaky, leak=0.3), lr=0.05), keep=True)
    trials = [
        Trial(fedbn(), double_model, data(), Settings(engine=engine, workers=2, optimizer=optimizer), SEED)
        for engine in ("sequential", "pool")
    ]
    for trial in trials:
        with closing(trial):
            trial.advance()
            trial.advance()
    assert is_equal(*(trial.to_tensors()[0] for trial in trials))


@pytest.mark.parametrize(
    ("method", "engine", "said"),
    [
        (fedavg(), "stacked", "the stacked engine cannot run torch.optim:NAdam.*: .*one client at a time"),
        (fedavg(), "identity", "the identity engine needs .*SGD"),
        (scaffold(), "sequential", "SGD.*not for torch.optim:NAdam"),
        (fednova(), "sequential", "SGD.*not for torch.optim:NAdam"),
        (fedavg(), "sequential", None),
    ],
    ids=str,
)
def test_what_needs_plain_steps_refuses_other_optimizers(method, engine, said):
    optimizer = as_optimizer(torch.optim.NAdam, lr=0.01)
    with nullcontext() if said is None else pytest.raises(UsageError, match=said):
        Trial(method, linear, data(), Settings(engine=engine, optimizer=optimizer, work=Work(steps=1)), SEED)


def endless_batches(name, samples):
    """Yield the indices of batches, pass after pass, as an endless data loader does."""
    for number in count():
        order = torch.from_numpy(stream(SEED, "order", name, number).permutation(samples))
        yield from torch.split(order, BATCH)


@pytest.mark.parametrize("weighting", ["auto", "used", "uniform"])
def test_rounds_of_steps_equal_a_plain_pytorch_loop_over_endless_batches(weighting):
    """Seven steps of clients with five, three and two batches a pass; weights from the definition of each."""
    settings = Settings(rounds=3, work=Work(batch_size=BATCH, steps=7), optimizer=SGD(lr=LR))
    trial = Trial(fedavg(weighting=weighting), lambda *size: model(*size).double(), data(), settings, SEED)
    central = model((3, 8, 8), 4).double()
    central.load_state_dict(trial.plan.initial)
    coming = {name: endless_batches(name, size) for name, size in SIZES.items()}
    for _ in range(3):
        states, weights = [], []
        for client in trial.data.clients:
            network, used = copy.deepcopy(central).train(), 0
            sgd = torch.optim.SGD(network.parameters(), lr=LR)
            for index in islice(coming[client.name], 7):
                sgd.zero_grad()
                x, y = client.train.x[index].double() / 127.5 - 1.0, client.train.y[index]
                nn.functional.cross_entropy(network(x), y).backward()
                sgd.step()
                used += len(y)
            states.append(network.state_dict())
            weights.append({"used": used, "uniform": 1}.get(weighting, len(client.train)))
        for name, tensor in central.state_dict().items():
            mean = sum(w * s[name].double() for w, s in zip(weights, states, strict=True)) / sum(weights)
            tensor.copy_(mean if tensor.is_floating_point() else mean.round())
        trial.advance()
    for name, tensor in central.state_dict().items():
        assert (trial.server.shared[name] - tensor).abs().max() <= 1e-12, name


@pytest.mark.parametrize("method", [fedavg(), fedbn()], ids=lambda method: method.name)
def test_models_just_after_local_work_are_those_of_a_plain_pytorch_loop_before_it_averages(method):
    settings = run_settings(evaluate_every=3, moments=("loaded", "trained"))
    trial = Trial(method, lambda *size: model(*size).double(), data(), settings, SEED)
    expected = plain_rounds(trial, model, aggregate_last=False)
    rows = [row for _ in range(3) for row in trial.advance().rows]
    found = [row for row in rows if (row["split"], row["moment"]) == ("test", "trained")]
    assert [(row["round"], row["client"], row["model"]) for row in found] == [(3, name, "personal") for name in SIZES]
    loaded = {row["client"]: row for row in rows if (row["model"], row["moment"]) == ("personal", "loaded")}
    for row in found:
        split = trial.data.client(row["client"]).test
        with torch.no_grad():
            logits = expected[row["client"]].eval()(split.x.double() / 127.5 - 1.0)
        assert sum(row["hits"]) == int((logits.argmax(1) == split.y).sum())
        total = float(nn.functional.cross_entropy(logits, split.y, reduction="sum"))
        assert row["loss_sum"] == pytest.approx(total, rel=1e-9)
        assert row["loss_sum"] != pytest.approx(loaded[row["client"]]["loss_sum"], rel=1e-3)


def test_a_schedule_begins_with_its_first_factor_and_goes_on_by_rounds():
    plain = make_trial(fedavg(), moments=("loaded",))
    halved = make_trial(fedavg(), moments=("loaded",), optimizer=SGD(lr=0.05, schedule=StepDecay(every=1, gamma=0.5)))
    equal = []
    for _ in range(2):
        plain.advance()
        halved.advance()
        equal.append(is_equal(plain.server.shared, halved.server.shared))
    assert equal == [True, False]


def test_what_a_step_draws_differs_by_client_and_step_and_comes_again():
    """Dropout masks are keyed by the step's key; an augmentation draws from a generator of its own for each step."""

    def lighten(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        return x + rng.random()

    plain, lit = (make_trial(fedavg(), data=data(), augment=each).engine for each in (None, lighten))
    places = [(name, step) for name in ("x", "y") for step in range(3)]

    def draw() -> tuple[list[int], list[float]]:
        keys = [int(plain.step_keys(name, [step])) for name, step in places]
        index = torch.arange(2)
        gains = [float((lit.load_batch(*at, index)[0] - plain.load_batch(*at, index)[0]).mean()) for at in places]
        return keys, gains

    keys, gains = draw()
    assert len(set(keys)) == len(places)
    assert min(abs(one - other) for one, other in combinations(gains, 2)) > 1e-3
    assert draw() == (keys, gains)
