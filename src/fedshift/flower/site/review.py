"""Review of an experiment before it trains at a site: its method as the site itself constructed it.

The coordinator's claims about it are not shown; :mod:`.policy` limits the same review, and :mod:`.gate` asks the
operator.
"""

from __future__ import annotations

import math
from collections import Counter
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
from ...core.work import Bounds
from ...evaluation.communication import describe_kept, downlink_bytes, list_disclosures
from ...experiments.description import describe_optimizer, describe_weighting, describe_work
from ...results.disclosure import Disclosure, group_disclosures
from ...utils.state import nbytes, pick

VALIDATES = "validates only"
"""Role of a site that trains nothing, in words."""


@dataclass(frozen=True, kw_only=True)
class TrialReview:
    """One method and seed of an experiment, before its first round at a site.

    ``plan``: the method on the site's network. ``model``: the network's name in the settings. ``seeds``, ``rounds``:
    their numbers in the settings. ``sites``: number of sites that take part. ``samples``: number of the site's training
    samples. ``copies``: how often the most frequent of these occurs. ``uncovered``: what depends on samples and is not
    covered by differential privacy. ``code``: functions on this machine that the settings may call. ``validates``:
    nothing is trained here, and no entries leave. ``trial``: name of experiment, method and seed. ``measured``: number
    of rounds after which models are measured. ``metrics``: what is measured in addition to loss and counts.
    """

    plan: Plan
    model: str
    rounds: int
    sites: int
    samples: int
    seeds: int = 1
    code: frozenset[str] = frozenset()
    validates: bool = False
    copies: int = 1
    uncovered: tuple[str, ...] = ()
    trial: str = ""
    measured: int = 0
    metrics: tuple[str, ...] = ()

    @property
    def experiment(self) -> str:
        """Beginning of the names of all trials of the experiment."""
        return f"{self.trial.partition('/')[0]}/"

    @property
    def passes(self) -> int:
        """Passes over the site's samples in all rounds."""
        return self.plan.work.passes(self.rounds, batches_of_pass(self.plan, self.samples))

    @property
    def uses(self) -> int:
        """Uses in all rounds (:func:`count_uses`)."""
        return count_uses(self.plan, self.passes, self.copies)

    @property
    def spent(self) -> float:
        """Privacy that all rounds spend (:func:`compute_spent`)."""
        return compute_spent(self.plan, self.uses)

    @property
    def smallest_upload(self) -> tuple[int, int]:
        """Fewest different samples, and fewest local steps, of an upload in any round."""
        bounds = self.plan.work.batch_bounds(self.samples, self.plan.smallest_batch)
        rounds = dict[int, range]()  # by the place in a pass where the round begins, after which rounds repeat
        done = 0
        while len(rounds) < self.rounds and done % len(bounds) not in rounds:
            steps = self.plan.work.steps_of_round(done, len(bounds))
            rounds[done % len(bounds)], done = steps, steps.stop
        return min(count_distinct(bounds, steps) for steps in rounds.values()), min(map(len, rounds.values()))

    @property
    def leaving(self) -> tuple[Disclosure, ...]:
        """Entries of the model, and other tensors that rules send, that leave the site each round."""
        return () if self.validates else list_disclosures(self.plan)

    @property
    def round_bytes(self) -> int:
        """Bytes of entries that a round moves to and from the site, measurement included if there are any."""
        server = init_server(self.plan)
        loaded = shown = downlink_bytes(self.plan, server)
        if self.plan.has_global:
            shown += nbytes(pick(server.shared, self.plan.sent)) - nbytes(pick(server.shared, self.plan.downloaded))
        sent = sum(entry.bytes for entry in self.leaving)
        return (0 if self.validates else loaded + sent) + (shown if self.measured else 0)

    @property
    def uploads(self) -> int:
        """Uploads that the settings ask for: one each round."""
        return 0 if self.validates else self.rounds

    @property
    def privacy(self) -> str:
        """The guarantee of differential privacy, in words."""
        if self.validates:
            return "nothing is trained on these data; counts are disclosed without noise"
        lines = []
        if mechanism := find_mechanism(self.plan.method.rules, clients=True):
            lines.append(describe_guarantee(mechanism, 1.0, self.rounds, self.uncovered))
        if mechanism := find_mechanism(self.plan.method.rules, clients=False):
            used = SampleUses(
                passes={"this site": self.passes}, copies=self.copies, squares=self.uses,
                assumes="no other site holds samples of this one",
            )  # fmt: skip
            lines.append(describe_sample_guarantee(mechanism, used, self.uncovered))
            lines += describe_delta(mechanism, {"this site": self.samples})
        return "; ".join(lines) or "no differential privacy"

    def describe(self, coordinator: str = "") -> str:
        """Return the review as lines of text; ``coordinator``: its address."""
        plan, leaving = self.plan, {entry.name for entry in self.leaving}
        staying = ", ".join(name for name in plan.initial if name not in leaving)
        groups = [f"leaves each round: {each}: {', '.join(each.names)}" for each in group_disclosures(self.leaving)]
        told = f"{', '.join(('loss', 'sizes', *self.metrics))} and counts by class of its test and validation samples"
        work, kept = f"this site {VALIDATES}: nothing is trained here", "nothing of this site"
        if not self.validates:
            work, kept = (
                f"a round: {describe_work(plan.work)}; {describe_optimizer(plan.optimizer)}",
                describe_kept(plan),
            )
            told = f"numbers of training samples and steps, mean training loss; {told}"
        return "\n".join((
            f"experiment: {self.experiment[:-1]}, of the coordinator {coordinator or 'in this process'}",
            f"method: {plan.method.label}, seed {plan.seed}; model: {self.model}",
            f"rounds: {self.rounds}, {self.measured} with measurements; sites: {self.sites}; {work}",
            f"weight of this site: {describe_weighting(plan.method)}",
            *(groups or ["leaves each round: nothing"]),
            f"kept by the server: {kept}",
            f"stays here: {staying or 'nothing'}",
            f"also disclosed: {told}, without noise",
            f"privacy: {self.privacy}",
            f"user-defined functions that may be called: {', '.join(sorted(self.code)) or 'none'}",
        ))  # fmt: skip


def batches_of_pass(plan: Plan, samples: int) -> int:
    """Return the number of batches in a pass over ``samples``; 1, with which passes are the most, where there are 0."""
    return len(plan.work.batch_bounds(samples, plan.smallest_batch)) if samples else 1


def passes_of_round(plan: Plan, samples: int, done: int, reached: int) -> int:
    """Return how often a round's upload uses each of a site's ``samples`` at most, beyond what is counted already.

    A pass uses each sample once and counts in the round that begins it, so that rounds that continue it add nothing,
    unless their steps are taken again, with new noise. ``done``: local steps before the round. ``reached``: local steps
    that are in the uploads counted so far.
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
    mechanism = find_mechanism(plan.method.rules, clients=False)
    if not (mechanism and mechanism.secret and mechanism.noise_multiplier):
        return 0.0
    return uses / mechanism.noise_multiplier**2


def count_distinct(bounds: Bounds, steps: range) -> int:
    """Return the least number of different samples in ``steps``, since batches of one pass share none."""
    used = Counter[int]()
    for step in steps:
        start, stop = bounds[step % len(bounds)]
        used[step // len(bounds)] += stop - start
    return max(used.values(), default=0)
