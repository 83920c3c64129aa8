"""Epsilon against closed forms and numerical integration that share nothing with the accountant."""

from math import comb, exp, inf, log

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import norm

from fedshift.analysis.privacy import compute_epsilon, describe_guarantee
from fedshift.methods.dp import PrivateMean

DELTA = 1e-5


def converted(order, divergence, delta=DELTA):
    """Epsilon of a Renyi divergence (Balle et al. 2020, arXiv:1905.09982, theorem 21)."""
    return divergence + np.log((order - 1) / order) - (np.log(delta) + np.log(order)) / (order - 1)


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (1.0, 10), (4.0, 100), (0.3, 20), (60.0, 1), (1.1, 1000)])
def test_at_full_participation_it_is_the_closed_form_of_the_gaussian_mechanism(noise, rounds):
    orders = 1 + np.geomspace(1e-3, 2e3, 200_000)
    best = converted(orders, rounds * orders / (2 * noise**2)).min()
    assert best <= compute_epsilon(noise, 1.0, rounds, DELTA) <= best * 1.01


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (1.0, 10), (4.0, 100), (1.1, 1000)])
def test_it_bounds_the_exact_epsilon_of_the_gaussian_mechanism_from_above(noise, rounds):
    # Balle and Wang 2018, arXiv:1805.06530, theorem 8: rounds of noise are one of noise / sqrt(rounds).
    sigma = noise / rounds**0.5

    def excess(eps):
        tail = norm.logcdf(-1 / (2 * sigma) - eps * sigma)
        return norm.cdf(1 / (2 * sigma) - eps * sigma) - exp(eps + tail) - DELTA

    exact = brentq(excess, 0, 1e4)
    assert exact <= compute_epsilon(noise, 1.0, rounds, DELTA) <= 1.15 * exact


@pytest.mark.parametrize(("noise", "sampling", "rounds"), [(1.0, 0.1, 20), (2.0, 0.5, 50), (1.0, 0.01, 1000)])
def test_with_sampling_it_is_what_numerical_integration_gives(noise, sampling, rounds):
    z = np.linspace(-15 * noise, 15 * noise + 30, 20_001)
    moved = np.logaddexp(log(1 - sampling), log(sampling) + (2 * z - 1) / (2 * noise**2))

    def divergence(order):  # of the mixture (1 - q) N(0, s^2) + q N(1, s^2) from N(0, s^2)
        return (logsumexp(norm.logpdf(z, scale=noise) + order * moved) + log(z[1] - z[0])) / (order - 1)

    orders = np.arange(2, 30)
    best = min(converted(order, rounds * divergence(order)) for order in orders)
    found = compute_epsilon(noise, sampling, rounds, DELTA)
    assert found <= best * (1 + 1e-6)
    assert found >= best * 0.95  # orders between the integers are a little tighter
    order = 5  # the integral itself, by the binomial theorem
    terms = (
        comb(order, k) * (1 - sampling) ** (order - k) * sampling**k * exp((k * k - k) / (2 * noise**2))
        for k in range(order + 1)
    )
    assert divergence(order) == pytest.approx(log(sum(terms)) / (order - 1), rel=1e-9)


@pytest.mark.slow
def test_it_falls_with_noise_and_delta_and_grows_with_rounds_and_sampling():
    found = [
        [compute_epsilon(noise, 0.2, 10, DELTA) for noise in (8.0, 2.0, 0.5)],
        [compute_epsilon(1.0, 0.2, rounds, DELTA) for rounds in (1, 2, 100)],
        [compute_epsilon(1.0, sampling, 10, DELTA) for sampling in (0.01, 0.5, 1.0)],
        [compute_epsilon(1.0, 0.2, 10, delta) for delta in (1e-2, 1e-5, 1e-8)],
    ]
    for values in found:
        assert values == sorted(set(values))
    assert compute_epsilon(0.0, 1.0, 1, DELTA) == inf
    assert compute_epsilon(1e4, 1.0, 1, 0.1) == 0.0


def test_the_promise_says_for_whom_it_holds():
    public, secret = PrivateMean(1.0, 1.0, DELTA, secret=False), PrivateMean(1.0, 1.0, DELTA, secret=True)
    assert describe_guarantee(secret, 1.0, 1).endswith("after 1 round (RDP accountant of Opacus)")
    assert 21.44 < compute_epsilon(1.0, 1.0, 12, DELTA) < 21.45
    assert describe_guarantee(secret, 1.0, 12).startswith(
        "(epsilon = 21.5, delta = 1e-05)-differentially private"
    )  # rounded up
    said = describe_guarantee(public, 1.0, 3)
    assert said.startswith("not differentially private, since its noise is a function of the seed and the method")
    assert said.endswith(f"with secret=True it would be {describe_guarantee(secret, 1.0, 3)}")
    assert describe_guarantee(secret, 0.5, 3).endswith("the participants of each round are secret")
    assert "no differential privacy" in describe_guarantee(PrivateMean(1.0, 0.0, DELTA, secret=True), 1.0, 3)
