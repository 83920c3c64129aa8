"""Clients as tasks of a Ray cluster: the sequential engine's bits, and no round spoiled by a worker that dies.

Networks and losses here are made inside functions: they travel whole, and so their misbehavior can be a test's own.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

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
from fedshift.engines.ray import Ray
from fedshift.engines.sequential import Sequential
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.utils.errors import FedshiftError
from fedshift.utils.profiling import record_seconds
from fedshift.utils.state import is_equal

pytestmark = pytest.mark.xdist_group("ray")

SIZES = {"ann": 9, "bob": 17, "cid": 13}
PARENT = os.getpid()


def everything():
    """Samples of all clients in one array, which each client's split picks its own of."""
    x = torch.randn(sum(SIZES.values()), 20, generator=torch.Generator().manual_seed(0))
    data, rows = {}, torch.arange(len(x)).split(list(SIZES.values()))
    for place, (name, size) in enumerate(SIZES.items()):
        x[rows[place], 0] = place
        data[name] = Samples(x=x, y=torch.arange(size) % 3, rows=rows[place])
    return data


DATA = everything()
BOB = 1


@pytest.fixture(autouse=True)
def one_thread():
    """As a worker has, so that bits can be compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(trouble=None):
    """BatchNorm, dropout, a draw of torch's own; ``trouble(place)`` comes up in workers."""
    parent = PARENT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
            self.dropout = nn.Dropout(0.3)

        def forward(self, x):
            if trouble and self.training and os.getpid() != parent:
                trouble(int(x[0, 0]))
            x = self.dropout(torch.relu(self.norm(self.first(x))))
            return self.last(x + 0.1 * torch.rand(x.shape) if self.training else x)

    return Net()


def trial(engine="ray", trouble=None, seed=3, **settings):
    clients = tuple(ClientData(name=name, train=train, test=train) for name, train in DATA.items())
    chosen = {"rounds": 6, "work": Work(batch_size=5, epochs=1), "optimizer": SGD(lr=0.05, momentum=0.9, keep=True)}
    return Trial(
        fedbn(), lambda shape, classes: network(trouble), Federation(name="t", clients=clients, classes=3),
        Settings(engine=engine, evaluate_every=6, workers=2, **chosen, **settings), seed,
    )  # fmt: skip


def plan_of(module=None, loss=nn.functional.cross_entropy):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = module or network()
    return prepare(fedavg(), module, work=Work(batch_size=5, epochs=1), optimizer=SGD(lr=0.05), loss=loss)


def outcomes(engine):
    """A round of each client's first work, by client, in the order in which they ended."""
    return dict(engine.train(init_server(engine.plan), {name: init_client(engine.plan) for name in DATA}))


def assert_rounds(found, count, **options):
    """``found`` is bit for bit where a sequential trial is after ``count`` rounds."""
    expected = trial("sequential", **options)
    for _ in range(count):
        expected.advance()
    assert found.to_tensors()[1] == expected.to_tensors()[1]
    assert is_equal(found.to_tensors()[0], expected.to_tensors()[0])


def test_trials_that_take_turns_have_the_bits_of_the_sequential_engine():
    first, second = trial(), trial(seed=4)
    for _ in range(2):
        first.advance()
        second.advance()
    second.close()
    first.advance()
    assert_rounds(first, 3)
    assert_rounds(second, 2, seed=4)
    first.close()


def test_the_client_with_most_work_begins_and_workers_bound_how_many_run():
    engine = Ray(plan_of(), DATA, 0, workers=1)
    assert list(outcomes(engine)) == ["bob", "cid", "ann"]
    engine.close()


def test_only_a_clients_own_samples_travel():
    engine = Ray(plan_of(), DATA, 0, workers=2)
    outcomes(engine)
    for name, place in engine._samples.items():
        _, raw = sys.modules["ray"].get(place)
        assert sum(each.nbytes for each in raw) == SIZES[name] * (20 * 4 + 8)
    engine.close()


def test_seconds_of_the_workers_count_for_whoever_records():
    engine = Ray(plan_of(), DATA, 0, workers=2)
    with record_seconds() as seconds:
        outcomes(engine)
    assert {"hand over", "data", "forward and backward", "update"} <= seconds.keys()
    engine.close()


def test_divergence_is_told_as_by_the_sequential_engine():
    told = {}
    plan = plan_of(loss=lambda outputs, y: (outputs if len(y) != 3 else outputs / 0).square().mean())
    for engine in (Ray(plan, DATA, 0, 2), Sequential(plan, DATA, 0)):  # only cid has a batch of 3
        with pytest.raises(Diverged) as caught:
            outcomes(engine)
        told[type(engine)] = type(caught.value), str(caught.value)
        engine.close()
    assert told[Ray] == told[Sequential]
    assert "client 'cid', round 1, step 3 of 3" in told[Ray][1]


def when(marker, place, act):
    """``act`` for the client at ``place`` as long as the file ``marker`` exists."""

    def trouble(here):
        if here == place and marker.exists():
            act()

    return trouble


def confused():
    def act():
        raise KeyError("color")

    return act


def test_an_error_in_a_persons_code_says_what_and_where(tmp_path):
    marker = tmp_path / "now"
    running = trial(trouble=when(marker, BOB, confused()))
    marker.touch()
    with pytest.raises(RuntimeError) as caught:
        running.advance()
    said = f"KeyError: 'color'; in tests/engines/test_ray.py, line {confused().__code__.co_firstlineno + 1}, in act"
    assert (type(caught.value), str(caught.value)) == (RuntimeError, said)
    assert "in act" in caught.value.__notes__[0]
    assert running.server.round == 0
    marker.unlink()
    running.advance()
    assert_rounds(running, 1)
    running.close()


def test_a_worker_that_dies_is_named_and_spoils_nothing(tmp_path):
    marker = tmp_path / "now"
    running = trial(trouble=when(marker, BOB, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    running.advance()
    marker.touch()
    with pytest.raises(FedshiftError, match="trained client 'bob' in round 2 was lost") as caught:
        running.advance()
    assert type(caught.value) is FedshiftError
    assert "was lost (WorkerCrashedError: The worker died" in str(caught.value)
    assert "--engine sequential" in str(caught.value)
    marker.unlink()
    running.advance()
    assert_rounds(running, 2)
    running.close()


def test_a_round_stopped_half_way_leaves_no_answer_for_the_next():
    def stop(client, loss):
        raise KeyboardInterrupt

    running = trial()
    with pytest.raises(KeyboardInterrupt):
        running.advance(stop)
    assert running.server.round == 0
    running.advance()
    assert_rounds(running, 1)
    running.close()


def test_a_task_that_ray_cannot_run_is_named_with_its_last_words(monkeypatch):
    def elsewhere(*_):
        raise ModuleNotFoundError("No module named 'fedshift'")

    engine = Ray(plan_of(), DATA, 0, workers=2)
    outcomes(engine)
    lacking = sys.modules["ray"].remote(max_retries=0)(elsewhere)
    monkeypatch.setattr("fedshift.engines.ray._remote_task", lambda: lacking)
    with pytest.raises(FedshiftError, match=r"client '...' in round 1 was lost .*No module named 'fedshift'"):
        outcomes(engine)
    engine.close()


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import test_ray as tests
assert tests.trial("auto").engine_choice and "ray" not in sys.modules
running = tests.trial()
running.advance()
tests.assert_rounds(running, 1)
running.close()
import psutil, ray
print(ray.nodes()[0]["NodeManagerAddress"], [each.pid for each in psutil.Process().children(recursive=True)])
"""


@pytest.mark.slow
def test_a_cluster_of_its_own_is_of_the_loopback_leaves_no_file_at_home_and_ends_with_the_program(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, str(Path(__file__).parent)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    address, pids = done.stdout.split(maxsplit=1)
    assert (address, done.stderr) == ("127.0.0.1", "")
    assert list(tmp_path.iterdir()) == []
    started = json.loads(pids)
    assert len(started) > 2
    for pid in started:
        assert not Path(f"/proc/{pid}").exists()
