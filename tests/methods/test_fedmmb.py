"""FedMMB and FedSMB against Algorithm 1 of Nasirigerdeh et al. (arXiv:2011.07006) with softmax regression in NumPy."""

import numpy as np
import pytest
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedmmb import fedmmb
from fedshift.methods.fedsmb import fedsmb
from fedshift.utils.random_streams import stream
from fedshift.utils.state import is_equal
from tests.methods.plain import advance

SIZES, B, LR, SEED = {"a": 13, "b": 8, "c": 22}, 4, 0.3, 5
RNG = np.random.default_rng(1)
DATA = {
    name: (RNG.normal(shift, 1.0, (size, 3)), np.arange(size) % 4) for shift, (name, size) in enumerate(SIZES.items())
}


def trial(method, rounds=1, work=None):
    data = federation({name: (x, y, x, y) for name, (x, y) in DATA.items()})
    work = work or Work(batch_size=B, epochs=1)
    settings = Settings(rounds=rounds, work=work, optimizer=SGD(lr=LR), evaluate_every=99)
    return Trial(method, lambda shape, classes: nn.Linear(shape[0], classes).double(), data, settings, SEED)


def gradient(w, b, x, y):
    """Of the mean cross-entropy of softmax(x w' + b)."""
    scores = x @ w.T + b
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y), p.mean(0)


class Client:
    """Client function ``update`` of Algorithm 1, line by line."""

    def __init__(self, name, size, count):
        self.name, (self.x, self.y) = name, DATA[name]
        self.B, self.C, self.passes = size, count, 0
        self.shuffle_and_split()

    def shuffle_and_split(self):
        order = stream(SEED, "order", self.name, self.passes).permutation(len(self.y))
        self.batches = [order[start : start + self.B] for start in range(0, len(order), self.B)]
        self.passes += 1

    def update(self, i, w, b):
        T = -(-len(self.y) // self.B)
        f = -(-T // self.C)
        p = (i % f) * self.C
        q = min(p + self.C - 1, T - 1)
        n = 0
        for batch in self.batches[p : q + 1]:
            dw, db = gradient(w, b, self.x[batch], self.y[batch])
            w, b, n = w - LR * dw, b - LR * db, n + len(batch)
        if (i + 1) % f == 0:
            self.shuffle_and_split()
        return w, b, n


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 7])
def test_rounds_are_algorithm_1(batches):
    running = trial(fedmmb(batches=batches), rounds=9)
    w, b = (running.plan.initial[name].numpy() for name in ("weight", "bias"))
    clients = [Client(name, B, batches) for name in SIZES]
    for i in range(9):
        done = running.advance()
        uploads = [client.update(i, w, b) for client in clients]
        total = sum(n for _, _, n in uploads)
        w, b = (sum(upload[part] * upload[2] for upload in uploads) / total for part in (0, 1))
        assert [row["samples"] for row in done.rows if row["split"] == "train"] == [n for _, _, n in uploads]
        assert np.abs(running.server.shared["weight"].numpy() - w).max() <= 1e-12
        assert np.abs(running.server.shared["bias"].numpy() - b).max() <= 1e-12


def test_the_last_group_of_a_pass_is_smaller_and_weighs_less():
    running = trial(fedmmb(batches=3), rounds=4)
    used = [{r["client"]: r["samples"] for r in running.advance().rows if r["split"] == "train"} for _ in range(4)]
    # a has batches of 4, 4, 4, 1; b of 4, 4; c of 4, 4, 4, 4, 4, 2.
    assert used == [{"a": 12, "b": 8, "c": 12}, {"a": 1, "b": 8, "c": 10}] * 2


def test_one_batch_a_round_is_fedsmb():
    one, other = trial(fedmmb(batches=1), 5), trial(fedsmb(), 5)
    advance(one, other, rounds=5)
    assert is_equal(one.server.shared, other.server.shared)


def test_a_batch_size_of_its_own_comes_before_the_experiments():
    own, same = trial(fedmmb(batches=2, batch_size=3)), trial(fedavg(), work=Work(batch_size=3, batches=2))
    advance(own, same)
    assert is_equal(own.server.shared, same.server.shared)
    assert not is_equal(own.server.shared, trial(fedmmb(batches=2)).server.shared)
