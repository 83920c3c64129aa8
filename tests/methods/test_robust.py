"""Robust aggregations against brute force in NumPy and known answers; one arbitrary client moves none of them."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

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
