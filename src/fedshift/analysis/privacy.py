"""Differential privacy of an aggregation that clips and adds noise, by the RDP accountant of Opacus.

Mironov 2017 (arXiv:1702.07476) and Mironov, Talwar, Zhang 2019 (arXiv:1908.10530): Renyi differential privacy of the
sampled Gaussian mechanism, composed over rounds. The numbers are for clients: neighbors are federations of which one
lacks a client of the other (whose change counts as zero), and each client takes part in a round independently (Poisson
sampling). Here a fixed number takes part, so below full participation epsilon is an approximation.
"""

from __future__ import annotations

import warnings
from decimal import ROUND_CEILING, Context
from typing import Protocol, runtime_checkable

from ..utils.errors import UsageError

ORDERS = [1 + k / 100 for k in range(1, 10)] + [1 + k / 10 for k in range(1, 110)]
ORDERS += [*range(12, 64), *range(64, 256, 16), *range(256, 1025, 64)]
"""Orders of Renyi differential privacy, of which the tightest is used: epsilon from below 0.1 to above 1,000."""

UPWARD = Context(prec=3, rounding=ROUND_CEILING)
"""Context that rounds epsilon up, so that the printed bound is valid."""


@runtime_checkable
class Mechanism(Protocol):
    """An aggregation that hides each client in Gaussian noise.

    ``noise_multiplier``: standard deviation over the largest norm of one client's change. ``delta``: probability with
    which epsilon may fail. ``secret``: whether the noise cannot be drawn again; otherwise it follows from the seed and
    the method.
    """

    @property
    def noise_multiplier(self) -> float: ...  # noqa: D102
    @property
    def delta(self) -> float: ...  # noqa: D102
    @property
    def secret(self) -> bool: ...  # noqa: D102


def compute_epsilon(noise_multiplier: float, sampling: float, rounds: int, delta: float) -> float:
    """Return epsilon at ``delta`` after ``rounds`` with ``noise_multiplier``, infinite without noise.

    ``sampling`` is the share of all clients that takes part. Raises :class:`UsageError` where Opacus is not installed.
    """
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise UsageError("epsilon takes Opacus, which is not installed: pip install 'fedshift[privacy]'") from error
    accountant = RDPAccountant()
    for _ in range(rounds):
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sampling)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an order at the end of the list is a looser bound, but a bound
        return max(0.0, float(accountant.get_epsilon(delta, alphas=ORDERS)))


def describe_guarantee(mechanism: Mechanism, sampling: float, rounds: int) -> str:
    """Return the guarantee of ``mechanism`` after ``rounds`` in words; arguments as in :func:`compute_epsilon`."""
    if not mechanism.noise_multiplier:
        return "noise_multiplier=0, so there is no differential privacy"
    said = "differentially private at the level of clients"
    try:
        spent = compute_epsilon(mechanism.noise_multiplier, sampling, rounds, mechanism.delta)
    except UsageError as error:
        said += f", but {error}"
    else:
        shown = float(UPWARD.create_decimal_from_float(spent))
        said = (
            f"(epsilon = {shown:g}, delta = {mechanism.delta:g})-{said} after {rounds} round{'s' * (rounds > 1)} (RDP "
            "accountant of Opacus)"
        )
        if sampling < 1:
            said += "; this assumes that the participants of each round are secret"
    if mechanism.secret:
        return said
    return (
        "not differentially private, since its noise is a function of the seed and the method, both of which the run "
        "directory holds: whoever has that can subtract the noise. It is for experiments that can be repeated; with "
        f"secret=True it would be {said}"
    )
