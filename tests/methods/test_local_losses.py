"""FedDecorr, FedLC and FedNTD equal plain PyTorch loops with their losses written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.feddecorr import feddecorr
from fedshift.methods.fedlc import fedlc
from fedshift.methods.fedntd import fedntd
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from fedshift.utils.state import is_equal
from tests.methods.plain import copied, mean, skewed_vectors, vector_network

SEED, LR, STRENGTH, TAU = 6, 0.1, 0.7, 2.0


def decorrelated(model, teacher, x, y, counts):
    z = model[:3](x)
    covariance = torch.cov(z.T)
    deviations = (covariance.diagonal() + 1e-8).sqrt()
    correlations = covariance / deviations.outer(deviations)
    mean_square = correlations[~torch.eye(5, dtype=torch.bool)].square().mean()
    return F.cross_entropy(model[3](z), y) + STRENGTH * (len(x) - 1) ** 2 / len(x) * mean_square


def calibrated(model, teacher, x, y, counts):
    """The paper's loss among the classes that the client has."""
    logits = {i: outputs - STRENGTH * int(counts[i]) ** (-1 / 4) for i, outputs in enumerate(model(x).T) if counts[i]}
    total = sum(logit.exp() for logit in logits.values())
    return -torch.stack([(logits[int(i)].exp() / total)[sample] for sample, i in enumerate(y)]).log().mean()


def distilled(model, teacher, x, y, counts):
    """The authors' loss: the divergence of the student from the teacher among the classes that are not true."""
    outputs, others = model(x), F.one_hot(y, 4) == 0
    p, q = ((logits[others].reshape(len(y), 3) / TAU).softmax(1) for logits in (outputs, teacher(x).detach()))
    return F.cross_entropy(outputs, y) + STRENGTH * (q * (q / p).log()).sum(1).mean()


LOSSES = {
    decorrelated: lambda base: feddecorr(base, beta=STRENGTH), calibrated: lambda base: fedlc(base, tau=STRENGTH),
    distilled: lambda base: fedntd(base, beta=STRENGTH, tau=TAU),
}  # fmt: skip


def trial(method, model=vector_network, data=None, **settings):
    chosen = {"rounds": 3, "work": Work(batch_size=4, epochs=1), "optimizer": SGD(lr=LR), "evaluate_every": 99}
    return Trial(method, model, data or skewed_vectors(), Settings(**chosen | settings), SEED)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(("base", "kept"), [(fedavg(), ()), (fedbn(), ("1.",))], ids=["fedavg", "fedbn"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_rounds_equal_a_plain_loop(loss, base, kept, engine):
    running = trial(LOSSES[loss](base), engine=engine)
    shared = running.plan.initial
    states = dict.fromkeys(running.train, shared)
    for number in range(3):
        running.advance()
        for client in skewed_vectors().clients:
            x, y = client.train.x, client.train.y
            model, teacher = vector_network(), vector_network()
            for network in (model, teacher):
                network.load_state_dict(shared | {k: v for k, v in states[client.name].items() if k.startswith(kept)})
            teacher.eval()
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for batch in torch.from_numpy(stream(SEED, "order", client.name, number).permutation(len(y))).split(4):
                sgd.zero_grad()
                loss(model, teacher, x[batch], y[batch], torch.bincount(y, minlength=4)).backward()
                sgd.step()
            states[client.name] = copied(model)
        shared = mean(list(states.values()), [12, 10])
    assert all((tensor - shared[name]).abs().max() <= 1e-12 for name, tensor in running.server.shared.items())
    for name, state in states.items():
        for entry, tensor in running.clients[name].personal.items():
            assert (tensor - state[entry]).abs().max() <= 1e-12


def test_a_batch_of_one_sample_has_no_correlations():
    def linear(shape, classes):
        return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, classes)).double()

    plain, decorrelating = (
        trial(method, linear, work=Work(batch_size=1, epochs=1)) for method in (fedavg(), feddecorr())
    )
    plain.advance(), decorrelating.advance()
    assert is_equal(plain.server.shared, decorrelating.server.shared)


def test_two_classes_leave_nothing_to_distill():
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 2
    with pytest.raises(UsageError, match="needs 3 or more classes, but the model has 2: leave fedntd out"):
        trial(fedntd(), data=federation({"a": (x, y, x, y)})).advance()
