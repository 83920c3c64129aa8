"""A stranger's FedNTD (Lee et al. 2022, arXiv:2106.03097), which distills the start model's logits of other classes."""

import pytest
import torch
from torch import nn

from fedshift import Rule
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from tests.methods import plain

BETA, TAU = 0.7, 2.0


def distill(outputs, taught, y):
    """Return BETA TAU^2 times the divergence from the teacher's probabilities of the classes that are not true."""
    others = torch.nn.functional.one_hot(y, outputs.shape[1]) == 0
    student, teacher = (logits[others].reshape(len(y), -1) / TAU for logits in (outputs, taught))
    return (
        BETA
        * TAU**2
        * nn.functional.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
    )


class NotTrueDistillation(Rule):
    def loss(self, loss, step):
        others = torch.arange(step.outputs.shape[1] - 1)  # masks have no rule under vmap: shift past the true class
        others = others + (others >= step.y[:, None])
        taught = step.run(step.start, training=False).outputs
        student, teacher = (logits.gather(1, others) / TAU for logits in (step.outputs, taught))
        log_p, log_q = teacher.log_softmax(1), student.log_softmax(1)
        return loss + BETA * TAU**2 * (log_p.exp() * (log_p - log_q)).sum(1).mean()


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("base", [fedavg(), fedbn()], ids=lambda base: base.name)
def test_a_teacher_is_the_clients_start_model_and_stays_as_it_was(base, engine):
    running = plain.trial(base.with_rule(NotTrueDistillation()), engine=engine)
    kept = "1." if base.name == "fedbn" else "nothing"
    clients, shared = dict.fromkeys(plain.SIZES, running.plan.initial), running.plan.initial
    for number in range(3):
        running.advance()
        for name in plain.SIZES:
            sent = {entry: tensor for entry, tensor in shared.items() if not entry.startswith(kept)}
            start = clients[name] | sent
            model, teacher = plain.loaded_with(start), plain.loaded_with(start).eval()
            for x, y in plain.batches(name, number):
                outputs = model(x)
                loss = nn.functional.cross_entropy(outputs, y) + distill(outputs, teacher(x).detach(), y)
                moving = dict(model.named_parameters())
                for parameter, grad in zip(moving.values(), torch.autograd.grad(loss, moving.values()), strict=True):
                    parameter.data -= plain.LR * grad
            clients[name] = plain.copied(model)
        shared = plain.mean(list(clients.values()), list(plain.SIZES.values()))
    found = running.server.shared
    assert plain.largest_difference(found, {name: shared[name] for name in found}) <= 1e-12
    for name in plain.SIZES:
        own = running.clients[name].personal
        assert plain.largest_difference(own, {entry: clients[name][entry] for entry in own}) <= 1e-12 if own else True
