"""Differential privacy: clipping in closed form, noise by its statistics, and nothing that gets around the two."""

import random
import sys

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn

from fedshift.core.declarations import Send
from fedshift.core.loss import cross_entropy, make_loss
from fedshift.core.optimizer import SGD
from fedshift.core.rule import Declared, Rule
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.experiment import Experiment
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.dp import dp
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fixbn import fixbn
from fedshift.methods.median import median
from fedshift.methods.scaffold import scaffold
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.methods import received
from tests.methods.plain import advance

INF = float("inf")
BEFORE = {
    "w": torch.arange(6, dtype=torch.float64).reshape(2, 3), "bn.running_mean": torch.zeros(2, dtype=torch.float64),
    "bn.running_var": torch.ones(2, dtype=torch.float64), "bn.num_batches_tracked": torch.tensor(7),
}  # fmt: skip


def fold(method, states, before=BEFORE, **known):
    return received.fold(method.aggregator, states, before, **known).entries


def moved(w=0.0, mean=0.0, var=0.0, count=0):
    """What a client sends whose entries moved by these numbers."""
    return {name: tensor + by for (name, tensor), by in zip(BEFORE.items(), (w, mean, var, count), strict=True)}


def test_changes_are_clipped_over_all_entries_together_and_counted_equally():
    changes = [(0.1, 0.2, 0.3), (2.0, -1.0, 0.5), (-30.0, 0.0, 0.0), (0.0, 0.0, 0.0)]
    folded = fold(dp(clipping_norm=1.5, noise_multiplier=0.0), [moved(*change, count=9) for change in changes])
    norms = [(6 * w**2 + 2 * mean**2 + 2 * var**2) ** 0.5 for w, mean, var in changes]
    assert sorted(norm > 1.5 for norm in norms) == [False, False, True, True]
    scaled = np.array([np.array(c) * min(1.0, 1.5 / n) if n else c for c, n in zip(changes, norms, strict=True)])
    for name, by in zip(("w", "bn.running_mean", "bn.running_var"), scaled.mean(axis=0), strict=True):
        assert (folded[name] - BEFORE[name] - by).abs().max() <= 1e-15, name
    assert int(folded["bn.num_batches_tracked"]) == 7  # the mean of the clients' counters would be 16


def noise_of(method, clients=4, size=100_000, **known):
    """What is added to two entries of zeros by a round in which no client changes anything."""
    before = {name: torch.zeros(2, size // 2, dtype=torch.float64) for name in "ab"}
    folded = fold(method, [before] * clients, before, **known)
    return np.stack([folded[name].numpy().ravel() for name in "ab"])


@pytest.mark.parametrize("secret", [False, True])
def test_noise_is_normal_with_the_standard_deviation_of_the_paper(secret, monkeypatch):
    monkeypatch.setattr("os.urandom", random.Random(0).randbytes)
    drawn = noise_of(dp(clipping_norm=3.0, noise_multiplier=0.5, secret=secret), clients=4)
    scaled = drawn / (0.5 * 3.0 / 4)
    assert abs(scaled.std() - 1) < 0.01
    assert abs(scaled.mean()) < 0.01
    assert kstest(scaled.ravel(), "norm").pvalue > 0.01
    assert abs(np.corrcoef(scaled)[0, 1]) < 0.01  # entries have draws of their own


def test_noise_comes_again_with_seed_and_round_unless_it_is_secret():
    for secret in (False, True):
        method = dp(noise_multiplier=1.0, secret=secret)
        first = noise_of(method, size=10, seed=1, round=2)
        assert (noise_of(method, size=10, seed=1, round=2) == first).all() == (not secret)
        assert not (noise_of(method, size=10, seed=2, round=2) == first).any()
        assert not (noise_of(method, size=10, seed=1, round=3) == first).any()


def test_noise_of_published_trials_cannot_be_combined_into_the_mean_without_noise():
    one, two = (trial(dp(clipping_norm=0.5, noise_multiplier=noise), rounds=1) for noise in (1.0, 2.0))
    clean = trial(dp(clipping_norm=0.5, noise_multiplier=0.0), rounds=1)
    advance(one, two, clean)
    weights = [each.server.shared["0.weight"] for each in (one, two, clean)]
    noise, twice = weights[0] - weights[2], weights[1] - weights[2]
    assert (2 * weights[0] - weights[1] - weights[2]).abs().max() > 0.1 * noise.abs().max()
    assert abs(torch.corrcoef(torch.stack([noise.ravel(), twice.ravel()]))[0, 1]) < 0.9
    again = trial(dp(clipping_norm=0.5, noise_multiplier=1.0), rounds=1)
    again.advance()
    assert torch.equal(again.server.shared["0.weight"], weights[0])


def test_a_variance_that_noise_makes_negative_stays_and_what_is_fixed_has_no_noise():
    before = {name: torch.full((1000,), 0.1) for name in ("bn.running_var", "bn.running_mean", "frozen")}
    folded = fold(dp(noise_multiplier=1.0), [before] * 2, before, fixed=frozenset({"frozen"}))
    stayed = folded["bn.running_var"] == before["bn.running_var"]
    assert 0.3 < stayed.float().mean() < 0.55  # P(0.1 + 0.5 z < 0) = 0.42
    assert (folded["bn.running_var"] > 0).all()
    assert (folded["bn.running_mean"] < 0).any()
    assert torch.equal(folded["frozen"], before["frozen"])
    assert folded["bn.running_var"].dtype == torch.float32


def network(shape, classes):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, classes), nn.Linear(classes, classes)).double()
    net[3].requires_grad_(False)
    return net


def data():
    rng = np.random.default_rng(0)
    sizes = {"a": 12, "b": 5, "c": 8}
    made = {name: (rng.normal(size=(size, 3)), np.arange(size) % 2) for name, size in sizes.items()}
    return federation({name: (x, y, x, y) for name, (x, y) in made.items()})


def trial(method, model=network, seed=0, **settings):
    settings = {"work": Work(batch_size=4, epochs=2), "optimizer": SGD(lr=0.1), "rounds": 4} | settings
    return Trial(method, model, data(), Settings(**settings), seed)


def test_without_noise_and_clip_it_is_fedavg_of_clients_that_count_equally():
    plain, private = trial(fedavg(weighting="uniform")), trial(dp(clipping_norm=INF, noise_multiplier=0.0))
    advance(plain, private, rounds=3)
    for name, tensor in plain.server.shared.items():
        if name.endswith("num_batches_tracked"):
            assert (int(tensor), int(private.server.shared[name])) == (12, 0)
        else:
            assert (tensor - private.server.shared[name]).abs().max() <= 1e-13, name


def test_statistics_that_are_frozen_get_no_noise():
    running = trial(fixbn(dp(noise_multiplier=0.1), switch=2))
    states = []
    for _ in range(4):
        running.advance()
        states.append({name: running.server.shared[name] for name in ("1.running_mean", "1.running_var")})
    assert not is_equal(states[0], states[1])
    assert is_equal(states[1], states[2])
    assert is_equal(states[2], states[3])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dp(clipping_norm=float("nan")), "clipping_norm=nan"),
        (lambda: dp(median()), "median already replaces the aggregation"),
        (lambda: trial(dp(scaffold())), r"'dp\+scaffold': scaffold sends more than the entries that dp clips"),
        (lambda: trial(scaffold(dp())), r"'scaffold\+dp': scaffold sends more than the entries that dp clips"),
    ],
)
def test_what_would_not_be_private_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


class Foreign(Rule):
    def bind(self, plan):
        return Declared(self, sends={"steps": Send(shape=(), dtype=torch.int64, reveals="update")})

    def end(self, client):
        return {}, {"steps": torch.tensor(client.steps)}


def test_a_rule_of_others_that_sends_is_refused():
    with pytest.raises(UsageError, match=r"Foreign sends more than the entries that dp clips, .* \(steps\)"):
        trial(dp().with_rule(Foreign()))
    trial(fedavg().with_rule(Foreign())).advance()


def test_weights_of_classes_that_come_from_all_clients_are_refused():
    def experiment(weights):
        settings = Settings(loss=make_loss(cross_entropy, weights=weights))
        return Experiment(methods=(fedavg(), fedbn(dp())), data=data(), model=network, settings=settings, seeds=(0,))

    for name in ("balanced", "inverse_frequency"):
        with pytest.raises(UsageError, match=rf"'fedbn\+dp': {name} weights come from all clients' label counts"):
            experiment(name)
    experiment((1.0, 2.0))


SPENT = (
    "(epsilon = 3.19, delta = 1e-05)-differentially private at the level of clients after 2 rounds (RDP accountant of "
    "Opacus); it does not cover measured losses and metrics"
)
KEPT = "what clients keep and the models that they use"
OTHERS = "the run's 7 other trials, whose epsilon adds up with this one"
REPEATABLE = (
    "not differentially private, since its noise is a function of the seed and the method, which are stored in the "
    "run directory: anyone with access to it can subtract the noise. It is for reproducible experiments; with "
    "secret=True it would be "
)


@pytest.mark.slow
def test_a_run_says_what_privacy_it_spent(make, tmp_path, Listener):
    heard = Listener()
    chosen = "fedavg, fedbn+dp(noise_multiplier=2.0), dp(noise_multiplier=2.0, secret=True), dp(noise_multiplier=0.0)"
    make(methods=chosen, rounds=2, seeds=2).run(tmp_path / "run", callback=heard)
    said = [notice for notice in heard.notices if "privacy" in notice or "private" in notice]
    assert said == [
        f"fedbn+dp(noise_multiplier=2.0): {REPEATABLE}{SPENT}, {KEPT} or {OTHERS}",
        f"dp(noise_multiplier=2.0, secret=True): {SPENT} or {OTHERS}",
        "dp(noise_multiplier=0.0): noise_multiplier=0, so there is no differential privacy",
    ]


def test_a_run_without_opacus_says_how_to_get_it(make, tmp_path, Listener, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    heard = Listener()
    make("dp", rounds=1).run(tmp_path / "run", callback=heard)
    assert "epsilon needs Opacus, which is not installed: pip install 'fedshift[privacy]'" in heard.notices[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("participation", "sampled"), [(1, True), ("shuffled", False)])
def test_taking_turns_is_no_sampling_that_hides_who_takes_part(make, tmp_path, participation, sampled, Listener):
    heard = Listener()
    make("dp(secret=True)", model="fnn2", participation=participation).run(tmp_path / "run", callback=heard)
    (said,) = (notice for notice in heard.notices if "differentially private" in notice)
    assert ("participants of each round are secret" in said) == sampled
