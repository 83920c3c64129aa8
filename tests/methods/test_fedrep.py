"""FedRep: the head first, then the body, against a plain PyTorch loop with two optimizers."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedrep import fedrep
from fedshift.utils.random_streams import stream

SIZES, SEED, LR = {"a": 12, "b": 8}, 6, 0.1


def network(shape=(4,), classes=3):
    return nn.Sequential(
        nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, classes)
    ).double()


def data():
    rng = np.random.default_rng(0)
    arrays = {name: (rng.normal(s, 1 + s, (n, 4)), np.arange(n) % 3) for s, (name, n) in enumerate(SIZES.items())}
    return federation({name: (x, y, x, y) for name, (x, y) in arrays.items()})


@pytest.mark.parametrize(
    ("arguments", "head", "firsts"),
    [
        ({}, ("5.",), {"a": 5, "b": 3}),  # 10 : 1 of 6 and of 4 steps, and one step at least for the body
        ({"head": 1, "body": 1}, ("5.",), {"a": 3, "b": 2}),
        ({"head": 1, "body": 2, "layers": 2}, ("3.", "5."), {"a": 2, "b": 1}),
        ({"head": 1, "body": 99, "layers": "1.*|5.*"}, ("1.", "5."), {"a": 1, "b": 1}),
    ],
    ids=["defaults", "half", "two layers", "pattern"],
)
def test_rounds_equal_a_plain_loop_with_an_optimizer_for_each_part(arguments, head, firsts):
    settings = Settings(
        rounds=3, work=Work(batch_size=4, epochs=2), evaluate_every=99,
        optimizer=SGD(lr=LR, momentum=0.9, weight_decay=0.01),
    )  # fmt: skip
    running = Trial(fedrep(**arguments), network, data(), settings, SEED)
    models = {name: network() for name in SIZES}
    for model in models.values():
        model.load_state_dict(copy.deepcopy(running.plan.initial))
    for number in range(3):
        running.advance()
        for client in data().clients:
            model, x, y = models[client.name], client.train.x, client.train.y
            parts = ([], [])
            for name, parameter in model.named_parameters():
                parts[0 if name.startswith(head) else 1].append(parameter)
            sgd = [torch.optim.SGD(part, lr=LR, momentum=0.9, weight_decay=0.01) for part in parts]
            done = 0
            for epoch in (2 * number, 2 * number + 1):
                for batch in torch.from_numpy(stream(SEED, "order", client.name, epoch).permutation(len(y))).split(4):
                    model.zero_grad()
                    nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                    sgd[0 if done < firsts[client.name] else 1].step()
                    done += 1
        for entry in running.plan.initial:
            if not entry.startswith(head):
                total = sum(models[name].state_dict()[entry].double() * size / 20 for name, size in SIZES.items())
                for model in models.values():
                    target = model.state_dict()[entry]
                    target.copy_(total if target.is_floating_point() else total.round())
    assert running.plan.personal == {name for name in running.plan.initial if name.startswith(head)}
    for name, model in models.items():
        for entry, tensor in model.state_dict().items():
            assert (running.model_state(name)[entry] - tensor).abs().max() <= 1e-12, (name, entry)


def test_epochs_for_each_part_equal_a_plain_loop_of_as_many_passes():
    epochs = 3, 2
    settings = Settings(rounds=3, work=Work(batch_size=4, batches=1), evaluate_every=99, optimizer=SGD(lr=LR))
    running = Trial(fedrep(head_epochs=3, body_epochs=2), network, data(), settings, SEED)
    models = {name: network() for name in SIZES}
    for model in models.values():
        model.load_state_dict(running.plan.initial)
    for number in range(3):
        running.advance()
        for client in data().clients:
            model, x, y = models[client.name], client.train.x, client.train.y
            for part, (begin_, end) in enumerate(((0, epochs[0]), (epochs[0], sum(epochs)))):
                parameters = [p for name, p in model.named_parameters() if name.startswith("5.") == (part == 0)]
                sgd = torch.optim.SGD(parameters, lr=LR)
                for epoch in range(sum(epochs) * number + begin_, sum(epochs) * number + end):
                    order = torch.from_numpy(stream(SEED, "order", client.name, epoch).permutation(len(y)))
                    for batch in order.split(4):
                        model.zero_grad()
                        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                        sgd.step()
        for entry in running.server.shared:
            total = sum(models[name].state_dict()[entry].double() * size / 20 for name, size in SIZES.items())
            for model in models.values():
                target = model.state_dict()[entry]
                target.copy_(total if target.is_floating_point() else total.round())
    for name, model in models.items():
        for entry, tensor in model.state_dict().items():
            assert (running.model_state(name)[entry] - tensor).abs().max() <= 1e-12, (name, entry)
