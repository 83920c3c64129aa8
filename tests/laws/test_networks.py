"""Law 11: a network trains as it would in plain PyTorch, or is refused by the layer that prevents it."""
from contextlib import closing, nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.plan import forward
from fedshift.core.work import Work, iterate_batches
from fedshift.data.assembly import federation
from fedshift.methods.fedavg import fedavg
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import torch_stream
from tests.laws.course import make_trial
from tests.laws.networks import CATALOG, CLASSES, make

SEED, ROUNDS, BATCH, LR, MOMENTUM, DECAY = 3, 2, 4, 0.2, 0.9, 0.05
SIZES = {"s0": 11, "s1": 8}


def draw(shape, shift=0.0):
    rng, clients = np.random.default_rng(5), {}
    for place, (name, size) in enumerate(SIZES.items()):
        x = rng.normal(0.5 * place, 1 + place, (2 * size, *shape)) + (shift if place else 0)
        y = (x.reshape(len(x), -1)[:, 0] > 0) + np.arange(2 * size) % 2
        clients[name] = (x[:size], y[:size], x[size:], y[size:])
    return clients


def settings(engine):
    whole = engine == "identity"
    return {
        "rounds": ROUNDS, "optimizer": SGD(lr=LR, momentum=MOMENTUM, weight_decay=DECAY), "engine": engine,
        "work": Work(batch_size=None if whole else BATCH, epochs=1), "evaluate_every": 1, "moments": ("loaded",), "workers": 1,
        "seed": SEED,
    }  # fmt: skip


def average_by_hand(nets):
    """Set every network's state to the mean by samples: of statistics, counters and parameters; others stay."""
    states, total = {name: net.state_dict() for name, net in nets.items()}, sum(SIZES.values())
    parameters = {name for name, _ in nets["s0"].named_parameters()}
    for key, value in states["s0"].items():
        if not isinstance(value, torch.Tensor):
            continue
        if key in parameters or key.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked"):
            mean = sum(state[key].double() * SIZES[name] / total for name, state in states.items())
            for state in states.values():
                state[key].copy_(mean if value.is_floating_point() else mean.round())


def train_plainly(case, batch):
    """Return each client's network after plain rounds."""
    clients = draw(case.shape)
    nets = {name: make(case)(case.shape, CLASSES) for name in SIZES}
    steps = dict.fromkeys(SIZES, 0)
    for _ in range(ROUNDS):
        for name, net in nets.items():
            x, y = map(torch.from_numpy, clients[name][:2])
            size = batch or len(y)
            bounds = tuple((start, min(start + size, len(y))) for start in range(0, len(y), size))
            with torch_stream(SEED, "torch", name, steps[name]):
                net.train()
                sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
                todo = range(steps[name], steps[name] + len(bounds))
                for _, index in iterate_batches(SEED, name, len(y), bounds, todo):
                    sgd.zero_grad()
                    nn.functional.cross_entropy(net(x[index]), y[index]).backward()
                    sgd.step()
            steps[name] += len(bounds)
        average_by_hand(nets)
    return nets


@pytest.fixture(scope="module")
def plain():
    known = {}
    def get(name, batch):
        key = name, batch
        if key not in known:
            known[key] = train_plainly(CATALOG[name], batch)
        return known[key]
    return get

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["sequential", "stacked", "identity", "pool"])
@pytest.mark.parametrize("name", CATALOG)
def test_trains_as_in_plain_pytorch_or_is_refused(name, engine, plain):
    case = CATALOG[name]
    data = federation(draw(case.shape))
    try:
        trial = make_trial(fedavg(), model=make(case), data=data, **settings(engine))
        with closing(trial):
            for _ in range(ROUNDS):
                trial.advance()
    except UsageError as error:
        if case.refused is None and engine == "sequential":
            raise
        if engine == "sequential":
            import re
            assert re.search(case.refused, str(error), re.S), str(error)
        else:
            pytest.skip("REF " + str(error))
        return
    assert not case.refused, "not refused"
    nets = plain(name, None if engine == "identity" else BATCH)
    for client, net in nets.items():
        state = trial.model_state(client)
        want = {k: v for k, v in net.state_dict().items() if isinstance(v, torch.Tensor)}
        assert want.keys() >= state.keys()
        for key in state:
            assert state[key].dtype == want[key].dtype, key
            if state[key].is_sparse or torch.equal(state[key], want[key]): continue
            assert (state[key] - want[key]).abs().max() <= 1e-9, key
    x = torch.from_numpy(draw(case.shape)["s0"][2])[:6]
    if not case.draws:
        net = nets["s0"]
        for training in (False, True):
            with torch.no_grad():
                out = forward(trial.plan, {k: v.clone() for k, v in trial.model_state("s0").items()}, x.clone(), training=training)
                want = net.train(training)(x.clone())
            assert (out - want).abs().max() <= 1e-9, f"outputs {training}"
