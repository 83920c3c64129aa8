"""The identity engine: equal to clients one by one where it is valid, and refused, saying why, where it is not."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.loss import LOSSES
from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.augmentation import AUGMENTATIONS
from fedshift.engines.identity import Identity
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedadam import fedadam
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fedsmb import fedsmb
from fedshift.methods.median import median
from fedshift.models.digits import small_cnn
from fedshift.utils.errors import UsageError
from fedshift.utils.state import clone


def plain(shape, classes):
    torch.manual_seed(1)
    layers = nn.Conv2d(shape[0], 3, 3), nn.GroupNorm(3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, classes)
    return nn.Sequential(*layers).double()


def normed(shape, classes):
    return nn.Sequential(nn.Conv2d(shape[0], 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, classes)).double()


def dropping(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36 * shape[0], classes)).double()


def clients(sizes=(21, 16, 9)):
    rng = np.random.default_rng(0)
    made = {}
    for number, size in enumerate(sizes):
        x, y = rng.integers(0, 256, (size, 3, 6, 6), dtype=np.uint8), np.arange(size) % 3
        made["abc"[number]] = (x, y, x, y)
    return federation(made)


def trial(engine, method=None, model=plain, **changes):
    settings = {"rounds": 5, "work": Work(batch_size=8, batches=1), "optimizer": SGD(lr=0.1), "evaluate_every": 5}
    return Trial(method or fedavg(), model, clients(), Settings(**{**settings, "engine": engine, **changes}), 3)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (fedsmb(), {}),
        (fedavg(weighting="uniform"), {"work": Work(batch_size=None, epochs=1)}),
        (fedavg(), {"work": Work(batch_size=None, batches=1)}),
        (fedavg(), {"work": Work(batch_size=8, steps=1)}),
        (fedavg(weighting="used"), {"work": Work(batch_size=8, steps=1)}),
        (fedavg(), {"optimizer": SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)}),
        (fedadam(), {}),
        (fedavg(), {"participation": 2, "augment": AUGMENTATIONS.parse("flip(), rotate(degrees=30)")}),
        (fedavg(), {"loss": LOSSES.parse("cross_entropy(weights='balanced')")}),
    ],
    ids=["fedsmb", "uniform", "unequal", "by samples", "by samples used", "momentum", "fedadam", "augmented", "loss"],
)
def test_a_round_equals_the_clients_one_by_one(method, changes):
    one, other = trial("sequential", method, **changes), trial("identity", method, **changes)
    for _ in range(4):
        expected, found = one.advance(), other.advance()
        for row, same in zip(expected.rows, found.rows, strict=True):
            assert (row["client"], row["samples"]) == (same["client"], same["samples"])
            assert abs(row["loss_sum"] - same["loss_sum"]) <= 1e-9
    for name, tensor in one.server.shared.items():
        assert (tensor - other.server.shared[name]).abs().max() <= 1e-12
    assert {name: client.steps for name, client in one.clients.items()} == {
        name: client.steps for name, client in other.clients.items()
    }


@pytest.mark.parametrize(
    ("method", "model", "changes", "why"),
    [
        (fedavg(), plain, {"work": Work(batch_size=8, epochs=1)}, "exactly one step per client and round"),
        (fedavg(), plain, {"optimizer": AdamW(lr=0.1)}, "SGD that is reset each round"),
        (fedavg(), plain, {"optimizer": SGD(lr=0.1, momentum=0.9, keep=True)}, "SGD that is reset each round"),
        (fedprox(mu=0.1), plain, {}, "only averages complete models, which fedprox\\(mu=0.1\\) does not"),
        (median(), plain, {}, "only averages complete models, which median does not"),
        (fedbn(), normed, {}, "only averages complete models, which fedbn does not"),
        (fedavg(), normed, {}, "processes samples independently"),
        (fedavg(), dropping, {}, "processes samples independently"),
    ],
    ids=["epochs", "adamw", "kept momentum", "rule", "aggregate", "personal", "batchnorm", "dropout"],
)
def test_it_is_refused_saying_why_where_it_is_not_valid(method, model, changes, why):
    with pytest.raises(UsageError, match=f"the identity engine .*{why}.*sequential engine") as refused:
        trial("identity", method, model, **changes)
    assert "or auto" in str(refused.value)


def test_asking_whether_the_engine_fits_leaves_the_plan_as_it_was(tiny):
    work = Work(batch_size=8, batches=1)
    trial = Trial(
        fedavg(), small_cnn, tiny, Settings(rounds=1, work=work, optimizer=SGD(lr=0.1), engine="sequential"), 0
    )
    before = clone(trial.plan.initial)
    assert "processes samples independently" in Identity.refusal(trial.plan, trial.train)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trial.plan.initial.items())
