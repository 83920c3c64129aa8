"""A stranger's FedNTD (Lee et al. 2022, arXiv:2106.03097), which distills the start model's logits of other classes."""

import pytest
import torch
from torch import nn

from fedshift import Rule
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from tests.methods import plain

BETA, TAU = 0.7, 2.0


class NotTrueDistillation(Rule):
    def loss(self, loss, step):
        others = torch.arange(step.outputs.shape[1] - 1)  # a mask has no size under vmap: skip the true class
        others = others + (others >= step.y[:, None])
        taught = step.run(step.start, training=False).outputs
        log_p, log_q = ((logits.gather(1, others) / TAU).log_softmax(1) for logits in (step.outputs, taught))
        return loss + BETA * TAU**2 * (log_q.exp() * (log_q - log_p)).sum(1).mean()


def distill(outputs, taught, y):
    """Return the authors' loss: the divergence of the student from the teacher among the classes that are not true."""
    others = nn.functional.one_hot(y, outputs.shape[1]) == 0
    log_p, q = ((logits[others].reshape(len(y), -1) / TAU).softmax(1) for logits in (outputs, taught))
    return BETA * TAU**2 * nn.functional.kl_div(log_p.log(), q, reduction="batchmean")


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
    states = [(running.server.shared, shared), *((running.clients[name].personal, clients[name]) for name in clients)]
    for state, expected in states:
        assert all((tensor - expected[name]).abs().max() <= 1e-12 for name, tensor in state.items())
