"""Robust aggregations against brute force in NumPy and known answers; one arbitrary client moves none of them."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.server_round import server_round
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.geometric_median import geometric_median
from fedshift.methods.krum import krum
from fedshift.methods.median import median
from fedshift.methods.multi_krum import multi_krum
from fedshift.methods.trimmed_mean import trimmed_mean
from fedshift.utils.errors import UsageError
from tests.methods import received

ROBUST = [
    median(),
    trimmed_mean(trim=2),
    krum(num_malicious=1),
    multi_krum(num_malicious=1, num_selected=3),
    geometric_median(),
]
EACH = pytest.mark.parametrize("method", ROBUST, ids=lambda method: method.name)


def states(clients=7, seed=0):
    """What ``clients`` clients send: two trained entries, a statistic and a counter."""
    rng = np.random.default_rng(seed)
    return [
        {
            "w": torch.from_numpy(rng.normal(size=(2, 3))),
            "b": torch.from_numpy(rng.normal(size=(4,))),
            "mean": torch.from_numpy(rng.normal(size=(4,))),
            "count": torch.tensor(int(rng.integers(50))),
        }
        for _ in range(clients)
    ]


def fold(method, uploads, weights=None):
    names = {"w", "b"} & uploads[0].keys()
    return received.fold(method.aggregator, uploads, uploads[0], names=names, weights=weights).entries


def columns(uploads, name):
    return np.stack([state[name].numpy() for state in uploads]).astype(float)


def points(uploads):
    return np.stack([np.concatenate([state["w"].numpy().ravel(), state["b"].numpy()]) for state in uploads])


@pytest.mark.parametrize("clients", [1, 2, 5, 8])
def test_the_median_is_numpys(clients):
    uploads = states(clients)
    folded = fold(median(), uploads)
    for name in ("w", "b", "mean"):
        assert np.abs(folded[name].numpy() - np.median(columns(uploads, name), axis=0)).max() <= 1e-15
    assert int(folded["count"]) == round(float(np.median(columns(uploads, "count"))))


@pytest.mark.parametrize(("clients", "trim"), [(3, 1), (7, 1), (7, 3), (8, 2)])
def test_the_trimmed_mean_leaves_out_the_extremes_of_each_coordinate(clients, trim):
    uploads = states(clients)
    folded = fold(trimmed_mean(trim=trim), uploads, [0.9] + [0.1 / (clients - 1)] * (clients - 1))
    for name in ("w", "b", "mean"):
        stacked = columns(uploads, name).reshape(clients, -1)
        expected = [np.mean(sorted(values)[trim : clients - trim]) for values in stacked.T]
        assert np.abs(folded[name].numpy().ravel() - expected).max() <= 1e-15
    assert int(folded["count"]) == round(np.mean(sorted(columns(uploads, "count"))[trim : clients - trim]))


def scores(uploads, faulty):
    """Krum's score of each client: the least sum of squared distances to any n - f - 2 others, tried one by one."""
    at = points(uploads)
    found = []
    for i in range(len(at)):
        others = [float(((at[i] - at[j]) ** 2).sum()) for j in range(len(at)) if j != i]
        found.append(min(sum(chosen) for chosen in combinations(others, len(at) - faulty - 2)))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("clients", "faulty"), [(3, 0), (7, 0), (7, 2), (9, 3)])
def test_krum_takes_over_the_client_of_least_score(clients, faulty, seed):
    uploads = states(clients, seed)
    best = uploads[int(np.argmin(scores(uploads, faulty)))]
    folded = fold(krum(num_malicious=faulty), uploads)
    assert all(torch.equal(folded[name], best[name]) for name in best)
    assert folded["w"] is not best["w"]


@pytest.mark.parametrize(("clients", "faulty", "chosen"), [(5, 0, 2), (7, 1, 4), (9, 3, 4)])
def test_multi_krum_is_the_plain_mean_of_the_clients_of_least_score(clients, faulty, chosen):
    uploads = states(clients, 1)
    best = np.argsort(scores(uploads, faulty))[:chosen]
    folded = fold(
        multi_krum(num_malicious=faulty, num_selected=chosen), uploads, [0.9] + [0.1 / (clients - 1)] * (clients - 1)
    )
    for name in ("w", "b", "mean"):
        assert np.abs(folded[name].numpy() - columns(uploads, name)[best].mean(0)).max() <= 1e-15
    assert int(folded["count"]) == round(columns(uploads, "count")[best].mean())


@pytest.mark.parametrize("weights", [None, [0.3, 0.05, 0.2, 0.05, 0.1, 0.25, 0.05]], ids=["equal", "unequal"])
def test_the_geometric_median_minimizes_the_sum_of_distances(weights):
    uploads = states(7)
    share = np.array(weights or [1 / 7] * 7)

    def distances(z):
        return float(share @ np.linalg.norm(points(uploads) - z, axis=1))

    best = minimize(distances, points(uploads).mean(0), method="BFGS", options={"gtol": 1e-10}).x
    folded = fold(geometric_median(steps=200), uploads, weights)
    assert np.abs(points([folded])[0] - best).max() <= 1e-6
    assert distances(points([folded])[0]) <= distances(best) * (1 + 1e-12)
    assert distances(points([fold(geometric_median(), uploads, weights)])[0]) <= distances(best) * (1 + 1e-6)


def test_the_geometric_median_has_the_known_answers():
    def of(values, weights=None):
        return fold(geometric_median(steps=300), [{"w": torch.tensor(v, dtype=torch.float64)} for v in values], weights)

    # On a line it is the weighted median; of a square's corners, the center; of a triangle, the point of Torricelli.
    assert float(of([[0.0], [1.0], [2.0], [9.0], [50.0]])["w"]) == pytest.approx(2.0, abs=1e-5)
    assert float(of([[0.0], [1.0], [2.0]], [0.2, 0.2, 0.6])["w"]) == pytest.approx(2.0, abs=1e-5)
    square = of([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]], [0.25] * 4)["w"]
    assert (square - 1.0).abs().max() <= 1e-9
    triangle = of([[-1.0, 0.0], [1.0, 0.0], [0.0, 5.0]])["w"]  # all sides seen under 120 degrees
    assert (triangle - torch.tensor([0.0, 3**-0.5], dtype=torch.float64)).abs().max() <= 1e-9


def test_the_geometric_median_mixes_the_other_entries_in_the_same_shares():
    uploads = [{"w": torch.tensor([v]), "mean": torch.tensor([m])} for v, m in ((0.0, 10.0), (0.0, 20.0), (99.0, 1e6))]
    folded = fold(geometric_median(), uploads)
    assert float(folded["w"]) == pytest.approx(0.0, abs=1e-3)
    assert float(folded["mean"]) == pytest.approx(15.0, abs=0.1)


@EACH
@pytest.mark.parametrize("value", [1e9, -1e9])
def test_one_arbitrary_client_cannot_move_the_result(method, value):
    honest = states(7)
    for attacker in range(7):
        uploads = list(honest)
        uploads[attacker] = {
            name: torch.full_like(tensor, int(value) if name == "count" else value)
            for name, tensor in honest[attacker].items()
        }
        others = [state for at, state in enumerate(honest) if at != attacker]
        folded = fold(method, uploads)
        for name in ("w", "b", "mean", "count"):
            low, high = columns(others, name).min(0), columns(others, name).max(0)
            slack = 1.0 if method.name == "geometric_median" else 0.0  # shares fall with distance, but not to zero
            assert (low - slack <= folded[name].numpy()).all(), name
            assert (folded[name].numpy() <= high + slack).all(), name


@EACH
def test_every_entry_keeps_its_dtype_and_counters_stay_whole(method):
    uploads = [{"w": s["w"].half(), "b": s["b"].float(), "mean": s["mean"], "count": s["count"]} for s in states(7)]
    folded = fold(method, uploads)
    assert {name: tensor.dtype for name, tensor in folded.items()} == {
        "w": torch.float16, "b": torch.float32, "mean": torch.float64, "count": torch.int64,
    }  # fmt: skip
    assert folded["count"].shape == ()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            krum(num_malicious=1),
            r"Krum\(num_malicious=1, num_selected=1.*needs at least 5 clients in a round, but 4 take part",
        ),
        (multi_krum(num_selected=3), "needs at least 5 clients in a round, but 4 take part"),
        (trimmed_mean(trim=2), "needs at least 5 clients in a round, but 4 take part"),
    ],
    ids=["krum", "multi-krum", "trimmed mean"],
)
def test_too_few_clients_are_refused(method, message):
    x, y = np.zeros((4, 2)), np.arange(4) % 2
    data = federation(dict.fromkeys("abcdefgh", (x, y, x, y)))
    for participation, clients in ((4, "abcdefgh"), (0.5, "abcdefgh"), (None, "abcd")):
        settings = Settings(work=Work(batch_size=2, epochs=1), participation=participation)
        with pytest.raises(UsageError, match=message):
            Trial(method, lambda shape, classes: nn.Linear(2, classes), data.select_clients(clients), settings, seed=0)
    enough = Settings(work=Work(batch_size=2, epochs=1), participation=5)
    Trial(method, lambda shape, classes: nn.Linear(2, classes), data, enough, seed=0)


def poisoned(trial):
    """Fails where one client that adds 1e6 to all that it sends moves what the server holds."""
    server, clients = trial.server, {name: trial.clients[name] for name in trial.train}
    updates = {name: trained.update for name, trained in trial.engine.train(server, clients)}
    shared, *memory = ({n: t + 1e6 for n, t in x.items()} for x in (updates["a"].shared, *updates["a"].memory))
    wild = replace(updates["a"], shared=shared, memory=tuple(memory))
    after = server_round(trial.plan, server, updates | {"a": wild}, dict.fromkeys(trial.train, 8))
    held = [tensor for state in (after.shared, *after.memory) for tensor in state.values()]
    assert max(float(tensor.abs().max()) for tensor in held) < 10


def test_an_aggregation_alone_is_not_moved_by_a_client_that_adds_a_million():
    x, y = np.random.default_rng(0).normal(size=(8, 2)), np.arange(8) % 2
    data = federation(dict.fromkeys("abcdefg", (x, y, x, y)))
    settings = Settings(work=Work(batch_size=4, epochs=1), optimizer=SGD(lr=0.1))
    for method in ROBUST:
        poisoned(Trial(method, lambda shape, classes: nn.Linear(2, classes), data, settings, seed=0))
