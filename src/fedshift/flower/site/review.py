"""How a site's operator sees an experiment before it trains: its method and seed as the site itself constructed them.

The coordinator's claims about them are not shown; :mod:`.policy` limits the same review, and :mod:`.gate` asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...analysis.privacy import (
    SampleUses,
    bound_squares,
    describe_delta,
    describe_guarantee,
    describe_sample_guarantee,
    find_mechanism,
)
from ...core.kernel import init_server
from ...core.plan import Plan
from ...evaluation.communication import describe_kept, downlink_bytes, list_disclosures
from ...experiments.description import describe_optimizer, describe_weighting, describe_work
from ...results.disclosure import Disclosure, group_disclosures
from ...utils.state import nbytes, pick
from .ledger import VALIDATES


@dataclass(frozen=True, kw_only=True)
class TrialReview:
    """One method and seed of an experiment, before its first round at a site.

    Attributes:
        plan: the method on the site's network.
        model: the network's name in the settings.
        seed: the seed.
        rounds: number of rounds in the settings.
        sites: number of sites that take part.
        code: functions on this machine that the settings may call.
        validates: whether the site only validates: nothing is trained here, and no entries leave.
        samples: number of the site's training samples; 0: unknown.
        copies: how often the most frequent of these occurs among them.
        uncovered: what depends on the site's samples and differential privacy does not cover.
        trial: name of experiment, method and seed.
        coordinator: fingerprint of the coordinator's key; empty: questions are not signed.
        measured: number of rounds after which the site's models are measured.
        metrics: metrics that are measured in addition to loss and counts.

    """

    plan: Plan
    model: str
    seed: int
    rounds: int
    sites: int
    code: frozenset[str] = frozenset()
    validates: bool = False
    samples: int = 0
    copies: int = 1
    uncovered: tuple[str, ...] = ()
    trial: str = ""
    coordinator: str = ""
    measured: int = 0
    metrics: tuple[str, ...] = ()

    @property
    def passes(self) -> int:
        """Passes over the site's samples in all rounds."""
        return self.plan.work.passes(self.rounds, batches_of_pass(self.plan, self.samples))

    @property
    def uses(self) -> int:
        """Uses in all rounds (:func:`count_uses`)."""
        return count_uses(self.plan, self.passes, self.copies)

    @property
    def leaving(self) -> tuple[Disclosure, ...]:
        """Entries of the model, and other tensors that rules send, that leave the site each round or before round 1."""
        return () if self.validates else list_disclosures(self.plan)

    @property
    def round_bytes(self) -> int:
        """Bytes of entries that a round moves to and from the site, measurement included if there are any."""
        server = init_server(self.plan)
        loaded = downlink_bytes(self.plan, server)
        shown = loaded
        if self.plan.has_global:
            shown += nbytes(pick(server.shared, self.plan.sent)) - nbytes(pick(server.shared, self.plan.received))
        sent = sum(each.bytes for each in self.leaving if not each.once)
        return (0 if self.validates else loaded + sent) + (shown if self.measured else 0)

    @property
    def uploads(self) -> int:
        """Uploads that the settings ask for: one each round and, if rules send something before round 1, one then."""
        return self.rounds + any(each.once for each in self.leaving)

    @property
    def privacy(self) -> str:
        """The guarantee of differential privacy, in words."""
        if self.validates:
            return "nothing is trained on these data; counts are disclosed without noise"
        said = []
        if mechanism := find_mechanism((self.plan.method.aggregate,)):
            said.append(describe_guarantee(mechanism, 1.0, self.rounds, self.uncovered))
        if mechanism := find_mechanism((self.plan.method.gradient,)):
            used = SampleUses(
                passes={"this site": self.passes},
                copies=self.copies,
                squares=self.uses,
                assumes="no other site holds samples of this one",
            )
            said.append(describe_sample_guarantee(mechanism, used, self.uncovered))
            said += describe_delta(mechanism, {"this site": self.samples})
        return "; ".join(said) or "no differential privacy"

    def describe(self) -> str:
        """Return the review as lines of text."""
        leaving = {each.name for each in self.leaving}
        staying = [name for name in self.plan.initial if name not in leaving]
        groups = [
            f"leaves {group.when}: {group}: {', '.join(group.names)}" for group in group_disclosures(self.leaving)
        ]
        counted = ", ".join(("loss", "sizes", *self.metrics))
        measured = f"{counted} and counts by class of its test and validation samples"
        told = f"numbers of training samples and steps, mean training loss; {measured}, without noise"
        work = f"a round: {describe_work(self.plan.work)}; {describe_optimizer(self.plan.optimizer)}"
        if self.validates:
            work, told = f"this site {VALIDATES}: nothing is trained here", f"{measured}, without noise"
        whose = f"the key {self.coordinator}" if self.coordinator else "no key: anyone could ask"
        return "\n".join(
            (
                f"experiment: {self.trial.partition('/')[0] or 'none'}; its coordinator has {whose}",
                f"method: {self.plan.method.label}, seed {self.seed}; model: {self.model}",
                f"rounds: {self.rounds}, {self.measured} with measurements; sites: {self.sites}; {work}",
                f"weight of this site: {describe_weighting(self.plan.method)}",
                *(groups or ["leaves each round: nothing"]),
                f"kept by the server: {'nothing of this site' if self.validates else describe_kept(self.plan)}",
                f"stays here: {', '.join(staying) or 'nothing'}",
                f"also disclosed: {told}",
                f"privacy: {self.privacy}",
                f"user-defined functions that may be called: {', '.join(sorted(self.code)) or 'none'}",
            )
        )


def batches_of_pass(plan: Plan, samples: int) -> int:
    """Return the number of batches in a pass over ``samples``; 1, with which passes are the most, where there are 0."""
    return len(plan.work.batch_bounds(samples, plan.smallest_batch)) if samples else 1


def passes_of_round(plan: Plan, samples: int, done: int, reached: int) -> int:
    """Return how often a round's upload uses each of a site's ``samples`` at most, beyond what is counted already.

    A pass uses each sample once and counts in the round that begins it, so that rounds that continue it add nothing,
    unless their steps are taken again, with new noise.

    Args:
        plan: the trial's plan.
        samples: number of the site's training samples.
        done: local steps before the round.
        reached: local steps that are in the uploads counted so far.

    """
    per_pass = batches_of_pass(plan, samples)
    before = math.ceil(done / per_pass) if done == reached else done // per_pass
    return math.ceil(plan.work.steps_of_round(done, per_pass).stop / per_pass) - before


def count_uses(plan: Plan, passes: int, copies: int) -> int:
    """Return how many passes over samples that differ spend at least what ``passes`` spend on one with ``copies``.

    ``copies``: how often the most frequent sample occurs at the site.
    """
    return passes * bound_squares(max(1, copies), plan.work.batch_size)


def compute_spent(plan: Plan, uses: int) -> float:
    """Return the privacy that ``uses`` (:func:`count_uses`) spend per sample; it adds up over rounds and experiments.

    A pass with noise multiplier z is a Gaussian mechanism and spends 1 / z^2: its Renyi divergence of order a is
    a / (2 z^2) (Mironov 2017, arXiv:1702.07476, Corollary 3), and divergences add up under composition (Proposition 1).
    The result is 0 without noise that a site can account for; a policy with ``sample_epsilon`` refuses this case.
    """
    mechanism = find_mechanism((plan.method.gradient,))
    if not (mechanism and mechanism.secret and mechanism.noise_multiplier):
        return 0.0
    return uses / mechanism.noise_multiplier**2
