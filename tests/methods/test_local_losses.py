"""Methods that change the local loss alone equal plain PyTorch loops with their losses written out."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

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
from fedshift.methods.fedprox import fedprox
from fedshift.methods.greg import greg
from fedshift.methods.moon import moon
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from fedshift.utils.state import is_equal
from tests.methods.plain import copied, mean, skewed_vectors, vector_network

SEED, LR, STRENGTH, TAU = 6, 0.1, 0.7, 2.0


def proximal(at, x, y):
    start = dict(at.teacher.named_parameters())
    loaded = {name: w for name, w in at.model.named_parameters() if not name.startswith(at.kept)}
    distance = sum((w - start[name].detach()).square().sum() for name, w in loaded.items())
    return F.cross_entropy(at.model(x), y) + STRENGTH / 2 * distance


def contrasted(at, x, y):
    z = at.model[:3](x)
    pull, push = (F.cosine_similarity(z, other[:3](x).detach()) for other in (at.teacher, at.previous))
    contrast = -torch.log((pull / TAU).exp() / ((pull / TAU).exp() + (push / TAU).exp()))
    return F.cross_entropy(at.model[3](z), y) + STRENGTH * contrast.mean()


def consistent(at, x, y):
    """A second network predicts with the statistics that were loaded."""
    shared = dict(at.model.named_parameters()) | dict(at.teacher.named_buffers())
    outputs = at.model(x), functional_call(vector_network().eval(), shared, (x,))
    logs = [F.log_softmax(each, dim=1) for each in outputs]
    both = [F.kl_div(*pair, reduction="batchmean", log_target=True) for pair in (logs, logs[::-1])]
    return F.cross_entropy(outputs[0], y) + STRENGTH * sum(both) / 2


def decorrelated(at, x, y):
    z = at.model[:3](x)
    covariance = torch.cov(z.T)
    deviations = (covariance.diagonal() + 1e-8).sqrt()
    correlations = covariance / deviations.outer(deviations)
    mean_square = correlations[~torch.eye(5, dtype=torch.bool)].square().mean()
    return F.cross_entropy(at.model[3](z), y) + STRENGTH * (len(x) - 1) ** 2 / len(x) * mean_square


def calibrated(at, x, y):
    """The paper's loss among the classes that the client has."""
    outputs, counts = at.model(x).T, torch.bincount(at.labels, minlength=4).tolist()
    logits = {i: outputs[i] - STRENGTH * n ** (-1 / 4) for i, n in enumerate(counts) if n}
    total = sum(logit.exp() for logit in logits.values())
    return -torch.stack([(logits[int(i)].exp() / total)[sample] for sample, i in enumerate(y)]).log().mean()


def distilled(at, x, y):
    """The authors' loss: the divergence of the student from the teacher among the classes that are not true."""
    outputs, others = at.model(x), F.one_hot(y, 4) == 0
    p, q = ((logits[others].reshape(len(y), 3) / TAU).softmax(1) for logits in (outputs, at.teacher(x).detach()))
    return F.cross_entropy(outputs, y) + STRENGTH * (q * (q / p).log()).sum(1).mean()


LOSSES = {
    proximal: lambda base: fedprox(base, mu=STRENGTH), contrasted: lambda base: moon(base, mu=STRENGTH, tau=TAU),
    decorrelated: lambda base: feddecorr(base, beta=STRENGTH), calibrated: lambda base: fedlc(base, tau=STRENGTH),
    distilled: lambda base: fedntd(base, beta=STRENGTH, tau=TAU), consistent: lambda base: greg(base, lam=STRENGTH),
}  # fmt: skip
KEPT = {fedavg: (), fedbn: ("1.",)}
CASES = [(loss, base) for loss in LOSSES for base in KEPT if (loss, base) != (consistent, fedbn)]


def trial(method, model=vector_network, data=None, **settings):
    chosen = {"rounds": 3, "work": Work(batch_size=4, epochs=1), "optimizer": SGD(lr=LR), "evaluate_every": 99}
    return Trial(method, model, data or skewed_vectors(), Settings(**chosen | settings), SEED)


def holding(state):
    model = vector_network()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(("loss", "base"), CASES, ids=[f"{loss.__name__}-{base.__name__}" for loss, base in CASES])
def test_rounds_equal_a_plain_loop(loss, base, engine):
    running = trial(LOSSES[loss](base()), engine=engine)
    shared, kept = running.plan.initial, KEPT[base]
    states = dict.fromkeys(running.train, shared)
    for number in range(3):
        running.advance()
        for client in skewed_vectors().clients:
            x, y, before = client.train.x, client.train.y, states[client.name]
            start = shared | {name: tensor for name, tensor in before.items() if name.startswith(kept)}
            model, teacher, previous = holding(start), holding(start).eval(), holding(before).eval()
            at = SimpleNamespace(model=model, teacher=teacher, previous=previous, labels=y, kept=kept)
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for batch in torch.from_numpy(stream(SEED, "order", client.name, number).permutation(len(y))).split(4):
                sgd.zero_grad()
                loss(at, x[batch], y[batch]).backward()
                sgd.step()
            states[client.name] = copied(model)
        shared = mean(list(states.values()), [12, 10])
    assert all((tensor - shared[name]).abs().max() <= 1e-12 for name, tensor in running.server.shared.items())
    for name, state in states.items():
        remembered = running.clients[name].memory[0] if loss is contrasted else {}
        for entry, tensor in (running.clients[name].personal | remembered).items():
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
