"""What every engine refuses: divergence, named by client, round and step."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.engines import ENGINES
from fedshift.engines.engine import Diverged
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.single import single

PROCESSES = {True: [pytest.mark.slow], False: []}


def trial(lr, engine, x_bad=None, method=None, work=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 4))
    y = np.arange(12) % 2
    bad = x if x_bad is None else x_bad
    data = federation({"good": (x, y, x, y), "bad": (bad, y, x, y)})
    settings = Settings(rounds=3, work=work or Work(batch_size=4, epochs=1), optimizer=SGD(lr=lr), engine=engine)
    return Trial(method or fedavg(), lambda shape, classes: nn.Linear(shape[0], classes), data, settings, 0)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_nan_loss_names_client_round_and_step_and_leaves_the_state(engine):
    running = trial(0.1, engine)
    running.advance()
    before = {name: tensor.clone() for name, tensor in running.server.shared.items()}
    running.train["bad"].x[:] = float("nan")
    with pytest.raises(Diverged, match=r"client 'bad', round 2, step 1 of 3: loss nan.*learning rate"):
        running.advance()
    assert running.server.round == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in running.server.shared.items())
    assert running.clients["good"].steps == 3


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        *(pytest.param(fedavg(), engine, marks=PROCESSES[engine in ("pool", "ray")]) for engine in sorted(ENGINES)),
        *((single(), engine) for engine in ("sequential", "stacked")),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_parameters_that_overflow_on_the_last_step_are_refused_too(method, engine):
    running = trial(1e20, engine, np.full((12, 4), 1e37), method, Work(batch_size=12, epochs=1))
    with pytest.raises(Diverged, match=r"client 'bad', round 1, step 1 of 1: weight not finite"):
        running.advance()


def test_values_whose_sum_overflows_are_not_refused():
    running = trial(0.0, "sequential")
    huge = {name: torch.full_like(tensor, 3e38) for name, tensor in running.server.shared.items()}
    huge["bias"].zero_()
    running.server.shared.update(huge)
    running.train["good"].x[:] = running.train["bad"].x[:] = 0
    running.advance()
    assert all(torch.equal(tensor, huge[name]) for name, tensor in running.server.shared.items())
