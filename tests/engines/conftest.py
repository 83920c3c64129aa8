"""Clients, a network and rounds for engines that train in other processes, the pool and Ray.

Networks and losses here are made inside functions: they travel whole, as those of a notebook, and so their misbehavior
can be a test's own.
"""

import os

import pytest
import torch
from torch import nn

from fedshift.core.kernel import init_client, init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.work import Work
from fedshift.data.federation import ClientData, Federation
from fedshift.data.samples import Samples
from fedshift.engines.engine import Diverged
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.utils.state import is_equal

SIZES = {"ann": 9, "bob": 17, "cid": 13}
BOB = 1
FEATURES = 300
PARENT = os.getpid()


def draw_samples():
    """Samples of all clients in one array, of which each client's split picks its own; the first feature names it."""
    x = torch.randn(sum(SIZES.values()), FEATURES, generator=torch.Generator().manual_seed(0))
    data, rows = {}, torch.arange(len(x)).split(list(SIZES.values()))
    for place, (name, size) in enumerate(SIZES.items()):
        x[rows[place], 0] = place
        data[name] = Samples(x=x, y=torch.arange(size) % 3, rows=rows[place])
    return data


DATA = draw_samples()


@pytest.fixture
def one_thread():
    """As a worker has, so that bits can be compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(trouble=None):
    """Linear layers (one large), BatchNorm, dropout, a draw of torch's own; ``trouble(place)`` comes up in workers."""
    parent = PARENT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(FEATURES, 128), nn.BatchNorm1d(128), nn.Linear(128, 3)
            self.dropout = nn.Dropout(0.3)

        def forward(self, x):
            if trouble and self.training and os.getpid() != parent:
                trouble(int(x[0, 0]))
            x = self.dropout(torch.relu(self.norm(self.first(x))))
            return self.last(x + 0.1 * torch.rand(x.shape) if self.training else x)

    return Net()


def when(marker, place, act):
    """``act`` for the client at ``place`` as long as the file ``marker`` exists."""

    def trouble(here):
        if here == place and marker.exists():
            act()

    return trouble


def trial(engine, trouble=None, method=None, seed=3, executor=None, **settings):
    clients = tuple(ClientData(name=name, train=train, test=train) for name, train in DATA.items())
    optimizer = SGD(lr=0.05, momentum=0.9, keep=True)
    chosen = {"rounds": 6, "work": Work(batch_size=5, epochs=1), "optimizer": optimizer, "workers": 2}
    return Trial(
        method or fedbn(), lambda shape, classes: network(trouble), Federation(name="t", clients=clients, classes=3),
        Settings(engine=engine, evaluate_every=6, **{**chosen, **settings}), seed, executor=executor,
    )  # fmt: skip


def plan_of(module=None, loss=nn.functional.cross_entropy, method=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = module or network()
    return prepare(method or fedavg(), module, work=Work(batch_size=5, epochs=1), optimizer=SGD(lr=0.05), loss=loss)


def outcomes(engine):
    """A round of each client's first work, by client, in the order in which they ended."""
    return dict(engine.train(init_server(engine.plan), {name: init_client(engine.plan) for name in DATA}))


def divergence_of(make):
    """What the engine that ``make`` makes of a plan says of clients of which one, cid, has an infinite loss."""
    engine = make(plan_of(loss=lambda outputs, y: (outputs if len(y) != 3 else outputs / 0).square().mean()))
    with pytest.raises(Diverged) as caught:  # only cid has a batch of 3
        outcomes(engine)
    engine.close()
    return type(caught.value), str(caught.value)


def rounds(trial, count):
    for _ in range(count):
        trial.advance()
    return trial.to_tensors()


def assert_rounds(found, count=1, **options):
    """``found`` is bit for bit where a sequential trial that nothing happened to is after ``count`` rounds."""
    tensors, facts = rounds(trial("sequential", **options), count)
    assert facts == found.to_tensors()[1]
    assert is_equal(found.to_tensors()[0], tensors)
