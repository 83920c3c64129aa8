"""FedRep: the head first, then the body, against a plain PyTorch loop with two optimizers."""

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.methods.fedrep import fedrep
from tests.methods.plain import LR, average, data, largest_difference, loaded_with, passes, step, trial
from tests.methods.plain import deep_network as network

SIZES = {"a": 12, "b": 8}
DATA = data(SIZES, (4,))


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
    running = trial(
        fedrep(**arguments), network, DATA, work=Work(batch_size=4, epochs=2),
        optimizer=SGD(lr=LR, momentum=0.9, weight_decay=0.01),
    )  # fmt: skip
    models = {name: loaded_with(running.plan.initial, network) for name in SIZES}
    for number in range(3):
        running.advance()
        for client in DATA.clients:
            model, parts = models[client.name], ([], [])
            for name, parameter in model.named_parameters():
                parts[0 if name.startswith(head) else 1].append(parameter)
            sgd = [torch.optim.SGD(part, lr=LR, momentum=0.9, weight_decay=0.01) for part in parts]
            for done, (x, y) in enumerate(passes(client, 2 * number, 2 * number + 1)):
                model.zero_grad()
                step(sgd[0 if done < firsts[client.name] else 1], nn.functional.cross_entropy(model(x), y))
        average(models, SIZES, head)
    assert running.plan.personal == {name for name in running.plan.initial if name.startswith(head)}
    for name, model in models.items():
        assert largest_difference(running.model_state(name), model.state_dict()) <= 1e-12


def test_epochs_for_each_part_equal_a_plain_loop_of_as_many_passes():
    running = trial(fedrep(head_epochs=3, body_epochs=2), network, DATA, work=Work(batch_size=4, batches=1))
    models = {name: loaded_with(running.plan.initial, network) for name in SIZES}
    for number in range(3):
        running.advance()
        for client in DATA.clients:
            model = models[client.name]
            for is_head, epochs in ((True, range(3)), (False, range(3, 5))):
                parameters = [p for name, p in model.named_parameters() if name.startswith("5.") == is_head]
                sgd = torch.optim.SGD(parameters, lr=LR)
                for x, y in passes(client, *(5 * number + epoch for epoch in epochs)):
                    step(sgd, nn.functional.cross_entropy(model(x), y))
        average(models, SIZES, ("5.",))
    for name, model in models.items():
        assert largest_difference(running.model_state(name), model.state_dict()) <= 1e-12
