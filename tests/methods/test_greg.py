"""GReg equals a plain loop in which every batch passes a second network with the statistics that were loaded."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedshift.methods.fedbn import fedbn
from fedshift.methods.gn import gn
from fedshift.methods.greg import greg
from fedshift.utils.errors import UsageError
from tests.methods import plain
from tests.methods.plain import LR, SHARES, SIZES, batches, copied, largest_difference, loaded_with, trial

LAM, STATISTICS = 2.5, ("1.running_mean", "1.running_var")


@pytest.mark.parametrize("lam", [0.0, LAM])
def test_rounds_equal_a_plain_loop(lam):
    running = trial(greg(lam=lam))
    server = running.plan.initial
    for number in range(3):
        running.advance()
        after = []
        for client in SIZES:
            model = loaded_with(server)
            for x, y in batches(client, number):
                outputs = model(x)
                shared = dict(model.named_parameters()) | {name: server[name] for name in STATISTICS}
                outputs_shared = functional_call(plain.network().eval(), shared, (x,))
                logs = [F.log_softmax(each, dim=1) for each in (outputs, outputs_shared)]
                both = [F.kl_div(*pair, reduction="batchmean", log_target=True) for pair in (logs, logs[::-1])]
                loss = F.cross_entropy(outputs, y) + lam * sum(both) / 2
                grads = torch.autograd.grad(loss, [*model.parameters()])
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.data -= LR * grad
            after.append(copied(model))
        server = plain.mean(after, SHARES.values())
    assert largest_difference(running.server.shared, server) <= 1e-12


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: greg(lam=-1.0), "greg: lam=-1: give a finite strength, 0"),
        (lambda: trial(greg(fedbn())), "but fedbn keeps '1.num_batches_tracked' on clients: use one of the two"),
        (lambda: trial(greg(gn())), "GReg compares statistics of BatchNorm, which gn replaces"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()
