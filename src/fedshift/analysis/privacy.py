"""Differential privacy from clipping and noise, for clients and for samples, by the RDP accountant of Opacus.

Mironov 2017 (arXiv:1702.07476) and Mironov, Talwar, Zhang 2019 (arXiv:1908.10530): Renyi differential privacy of the
sampled Gaussian mechanism, composed over rounds. For clients, two federations are neighbors if one lacks a client of
the other (whose change counts as zero), and each client takes part in a round independently (Poisson sampling). Here a
fixed number takes part, so with less than full participation epsilon is an approximation.

For samples, two data sets are neighbors if in one the gradients of one sample count as zero; the number of samples is
public. An epoch is a partition into batches that does not depend on the samples, so that each sample is in one of its
steps: an epoch is one Gaussian mechanism, without sampling, and epsilon is not an approximation.

Copies of a sample, at one client or at several, count as zero together. A step whose batch holds j of them moves by up
to j clips, so that its Renyi divergence of order a is a j^2 / (2 z^2) (Mironov 2017, Corollary 3, for sensitivity j),
which equals j^2 steps with one copy; steps of all clients add up (Proposition 1).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from typing import Any, Protocol, runtime_checkable

from ..utils.errors import UsageError
from ..utils.words import join_choices

ORDERS = [1 + k / 100 for k in range(1, 10)] + [1 + k / 10 for k in range(1, 110)]
ORDERS += [*range(12, 64), *range(64, 256, 16), *range(256, 1025, 64)]
"""Orders of Renyi differential privacy; the tightest bound is used, for epsilon from below 0.1 to above 1,000."""

NAMED = 5
"""Maximum number of clients that a guarantee names."""
UPWARD = Context(prec=3, rounding=ROUND_CEILING)
"""Context that rounds epsilon up, so that the printed bound is valid."""


@runtime_checkable
class Mechanism(Protocol):
    """A rule that hides each client in Gaussian noise, as it ``aggregates``, or each sample.

    ``noise_multiplier``: standard deviation divided by the largest norm of a client's change or a sample's gradient.
    ``delta``: probability that epsilon fails. ``secret``: whether the noise cannot be reproduced; otherwise it is
    determined by the seed and the method.
    """

    @property
    def aggregates(self) -> bool: ...  # noqa: D102
    @property
    def noise_multiplier(self) -> float: ...  # noqa: D102
    @property
    def delta(self) -> float: ...  # noqa: D102
    @property
    def secret(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class SampleUses:
    """Numbers of times that the steps of a trial used the samples of its clients.

    Attributes:
        passes: Number of epochs of each client.
        copies: How often the most frequent sample occurs in the data of all clients.
        squares: The number of a sample's copies in a batch, squared and summed over the steps of all clients, for the
            sample that maximizes it; an upper bound suffices.
        assumes: The assumption about samples that were not compared with each other.

    """

    passes: Mapping[str, int]
    copies: int = 1
    squares: int = 0
    assumes: str = ""


def bound_squares(copies: int, batch_size: int | None) -> int:
    """Return the largest :attr:`SampleUses.squares` of one epoch with ``batch_size``; None: one batch."""
    whole, rest = divmod(copies, min(batch_size or copies, copies))
    return whole * min(batch_size or copies, copies) ** 2 + rest**2


def compute_epsilon(noise_multiplier: float, sampling: float, rounds: int, delta: float) -> float:
    """Return epsilon at ``delta`` after ``rounds`` with ``noise_multiplier``, infinite without noise.

    ``sampling`` is the fraction of all clients that take part. Raises :class:`UsageError` if Opacus is not installed.
    """
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise UsageError("epsilon needs Opacus, which is not installed: pip install 'fedshift[privacy]'") from error
    accountant = RDPAccountant()
    for _ in range(rounds):
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sampling)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an order at the end of the list gives a looser but valid bound
        return max(0.0, float(accountant.get_epsilon(delta, alphas=ORDERS)))


def find_mechanism(rules: Iterable[Any], *, clients: bool) -> Mechanism | None:
    """Return the first of a method's rules that hides ``clients``, otherwise samples, in noise; None: none does."""
    return next((rule for rule in rules if isinstance(rule, Mechanism) and rule.aggregates is clients), None)


def describe_guarantee(mechanism: Mechanism, sampling: float, rounds: int, uncovered: Sequence[str] = ()) -> str:
    """Describe the guarantee of ``mechanism`` for clients after ``rounds``.

    For arguments, see :func:`compute_epsilon`. ``uncovered``: what the guarantee does not cover.
    """
    span = f"at the level of clients after {rounds} round{'s' * (rounds > 1)}"
    assuming = "; this assumes that the participants of each round are secret" if sampling < 1 else ""
    return _describe(mechanism, sampling, rounds, span, assuming + _exclude(uncovered))


def _exclude(uncovered: Sequence[str]) -> str:
    return f"; it does not cover {join_choices(uncovered)}" if uncovered else ""


def describe_sample_guarantee(mechanism: Mechanism, used: SampleUses, uncovered: Sequence[str] = ()) -> str:
    """Describe the guarantee of ``mechanism`` for samples; ``uncovered``: what it does not cover."""
    passes = used.passes
    fewest, most = min(passes.values()), max(passes.values())
    times = f"{most} pass{'es' * (most > 1)} over"
    more = f"; this assumes that {used.assumes}" * bool(used.assumes) + _exclude(uncovered)
    if used.copies > 1:
        span = f"at the level of samples after {times} each client's data, in which a sample occurs up to "
        span += f"{used.copies} times"
        return _describe(mechanism, 1.0, used.squares, span, more)
    span = f"at the level of each client's samples after {times} its data"
    others = ""
    if fewest < most and mechanism.noise_multiplier:
        few = sorted(name for name, count in passes.items() if count == fewest)
        who = f"{len(few)} clients" if len(few) > NAMED else ", ".join(few)
        with suppress(UsageError):
            spent = _round_up(compute_epsilon(mechanism.noise_multiplier, 1.0, fewest, mechanism.delta))
            others = f"; epsilon = {spent} after {fewest} of {who}"
    return _describe(mechanism, 1.0, most, span, others + more)


def describe_delta(mechanism: Mechanism, samples: Mapping[str, int]) -> list[str]:
    """Return a sentence if the delta of ``mechanism`` is too large for some clients' ``samples``; empty otherwise.

    A mechanism that publishes a sample with probability delta fulfills the definition with epsilon 0; among n samples
    it publishes n delta of them on average (Dwork and Roth 2014, section 2.3), so that delta should be below 1 / n.
    """
    large = {name: count for name, count in samples.items() if count * mechanism.delta >= 1}
    if not large:
        return []
    who = f"{len(large)} clients" if len(large) > NAMED else ", ".join(sorted(large))
    most = max(large.values())
    return [
        f"delta = {mechanism.delta:g} is not below one in the number of samples of {who} ({most} at most), so that it "
        f"does not exclude that whole samples are revealed: give delta below {1 / most:.2g}"
    ]


def _round_up(epsilon: float) -> str:
    return f"{float(UPWARD.create_decimal_from_float(epsilon)):g}"


def _describe(mechanism: Mechanism, sampling: float, times: int, span: str, more: str) -> str:
    """Describe the guarantee after ``times`` uses of ``mechanism``; ``span``: its scope."""
    if not mechanism.noise_multiplier:
        return "noise_multiplier=0, so there is no differential privacy"
    try:
        spent = compute_epsilon(mechanism.noise_multiplier, sampling, times, mechanism.delta)
    except UsageError as error:
        guarantee = f"differentially private {span}, but {error}"
    else:
        guarantee = (
            f"(epsilon = {_round_up(spent)}, delta = {mechanism.delta:g})-differentially private {span} (RDP "
            f"accountant of Opacus){more}"
        )
    if mechanism.secret:
        return guarantee
    return (
        "not differentially private, since its noise is a function of the seed and the method, which are stored in the "
        "run directory: anyone with access to it can subtract the noise. It is for reproducible experiments; with "
        f"secret=True it would be {guarantee}"
    )
