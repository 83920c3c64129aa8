"""How a site approves an experiment before it trains: with a policy of limits, and by asking the site's operator.

Both see an experiment's method and seed as the site itself constructed them, not as the coordinator describes them.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...analysis.privacy import (
    Mechanism,
    SampleUses,
    bound_squares,
    compute_epsilon,
    describe_delta,
    describe_guarantee,
    describe_sample_guarantee,
    find_mechanism,
)
from ...core.declarations import Reveals
from ...core.plan import Plan
from ...evaluation.communication import describe_kept, list_disclosures
from ...experiments.description import describe_optimizer, describe_work
from ...results.disclosure import RECEIVERS, REVEALS, Disclosure, group_disclosures
from ...utils.checked_json import read_checked, write_checked
from ...utils.errors import UsageError
from ...utils.files import open_regular
from ..transport.arrays import RefusedMessage
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

    @property
    def passes(self) -> int:
        """Passes over the site's samples in all rounds."""
        return self.plan.work.passes(self.rounds, batches_of_pass(self.plan, self.samples))

    @property
    def uses(self) -> int:
        """Those of all rounds (:func:`count_uses`)."""
        return count_uses(self.plan, self.passes, self.copies)

    @property
    def leaving(self) -> tuple[Disclosure, ...]:
        """Entries of the model, and what rules send beside them, that leave the site each round or before round 1."""
        return () if self.validates else list_disclosures(self.plan)

    @property
    def privacy(self) -> str:
        """The guarantee of differential privacy, in words."""
        if self.validates:
            return "nothing is trained on these data; counts are told without noise"
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
        measured = "loss, sizes and counts by class of its test and validation samples"
        told = f"numbers of training samples and steps, mean training loss; {measured}, without noise"
        work = f"a round: {describe_work(self.plan.work)}; {describe_optimizer(self.plan.optimizer)}"
        if self.validates:
            work, told = f"this site {VALIDATES}: nothing is trained here", f"{measured}, without noise"
        return "\n".join(
            (
                f"method: {self.plan.method.label}, seed {self.seed}; model: {self.model}",
                f"rounds: {self.rounds}; sites: {self.sites}; {work}",
                *(groups or ["leaves each round: nothing"]),
                f"kept by the server: {'nothing of this site' if self.validates else describe_kept(self.plan)}",
                f"stays here: {', '.join(staying) or 'nothing'}",
                f"also told: {told}",
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


class PastUploads:
    """The uploads that a site has sent for each method and seed of an experiment, and the privacy that they spent.

    The counts are kept in the file ``path``, so that a restarted site continues them. An upload is counted before it is
    sent, and also if it is lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._trials: dict[str, dict[str, Any]] = {}
        if path.exists():
            fix = "remove it, if no limit of a policy depends on what this site sent before"
            self._trials = read_checked(path, fix)["trials"]
            if any("steps" not in each for each in self._trials.values()):
                raise UsageError(f"{path} is of an older version of fedshift, without numbers of steps: {fix}")

    def count(self, trial: str) -> int:
        """Return the number of uploads of ``trial``."""
        return int(self._trials.get(trial, {}).get("uploads", 0))

    def reached(self, trial: str) -> int:
        """Return the local steps up to which there are uploads of ``trial``."""
        return int(self._trials.get(trial, {}).get("steps", 0))

    def sum_spent(self, *, without: str | None = None) -> float:
        """Return the privacy spent by all uploads (:func:`compute_spent`) except those of trial ``without``."""
        return math.fsum(each["spent"] for name, each in self._trials.items() if name != without)

    def add(self, trial: str, spent: float, steps: int) -> None:
        """Count an upload of ``trial`` after ``steps`` steps, before it is sent, and the privacy that it spends."""
        before = self._trials.get(trial, {"uploads": 0, "spent": 0.0, "steps": 0})
        self._trials[trial] = {
            "uploads": before["uploads"] + 1, "spent": before["spent"] + spent, "steps": max(before["steps"], steps),
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_checked(self.path, {"trials": self._trials})


class SitePolicy(BaseModel):
    """A site's limits; a limit that is not given does not apply. Names are patterns, such as ``fed*`` or ``*running*``.

    Attributes:
        methods: methods that may be trained; each part of a composition must be among them.
        models: networks that may be trained.
        keep: entries, and what rules send beside them, that never leave.
        reveals: the most that anything that leaves may reveal: ``update``, ``client``, ``class`` or ``image``
            (:data:`~fedshift.results.disclosure.REVEALS`).
        passed_on: False: nothing leaves that other sites may receive as this one sent it.
        rounds: maximum number of rounds.
        sites: minimum number of sites that take part; with only two, each can compute the other's upload.
        epsilon: largest epsilon of differential privacy over all rounds, with ``secret`` noise; computed as if every
            site took part in each round.
        sample_epsilon: largest epsilon of differential privacy for each of the site's samples over all uploads of all
            experiments, with ``secret`` noise that the site draws; a repeated round counts again.

    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    methods: list[str] | None = None
    models: list[str] | None = None
    keep: list[str] = Field(default_factory=list)
    reveals: Reveals | None = None
    passed_on: bool = True
    rounds: Annotated[int, Field(ge=1)] | None = None
    sites: Annotated[int, Field(ge=1)] | None = None
    epsilon: Annotated[float, Field(gt=0)] | None = None
    sample_epsilon: Annotated[float, Field(gt=0)] | None = None

    @staticmethod
    def read(path: Path) -> SitePolicy:
        """Return the policy in a TOML file; raise :class:`UsageError` naming its errors."""
        try:
            with open_regular(path) as file:
                return SitePolicy.model_validate(tomllib.load(file))
        except OSError as error:
            raise UsageError(f"--policy {path} cannot be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"--policy {path} is no TOML file ({error})") from error
        except ValidationError as error:
            why = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            names = ", ".join(SitePolicy.model_fields)
            raise UsageError(f"--policy {path}: {why}. It may set {names}") from error

    def check(self, review: TrialReview, spent: float = 0.0) -> None:
        """Raise :class:`RefusedMessage` naming the first limit that ``review`` exceeds.

        ``spent``: privacy spent by uploads of other methods, seeds and experiments (:func:`compute_spent`).
        """
        for part in re.split(r"\+(?![^(]*\))", review.plan.method.name):
            if self.methods is not None and not _matches(part.partition("(")[0], self.methods):
                raise RefusedMessage(f"this site's policy does not allow method {part!r} (methods)")
        if self.models is not None and not _matches(review.model, self.models):
            raise RefusedMessage(f"this site's policy does not allow model {review.model!r} (models)")
        grains = list(REVEALS)
        for each in review.leaving:
            if _matches(each.name, self.keep):
                raise RefusedMessage(
                    f"by this site's policy entry {each.name!r} does not leave (keep): use a method that keeps it"
                )
            if self.reveals is not None and grains.index(self.reveals) < grains.index(each.reveals):
                raise RefusedMessage(
                    f"by this site's policy nothing leaves that reveals more than {REVEALS[self.reveals]} (reveals), "
                    f"and {each.name!r} of {each.source} reveals {REVEALS[each.reveals]}: use another method"
                )
            if not self.passed_on and each.receivers == "each":
                raise RefusedMessage(
                    f"by this site's policy no other site receives what this one sent (passed_on), and {each.name!r} "
                    f"of {each.source} is received by {RECEIVERS[each.receivers]}: use another method"
                )
        if self.rounds is not None and review.rounds > self.rounds:
            raise RefusedMessage(f"this site's policy allows {self.rounds} rounds, not {review.rounds} (rounds)")
        if review.validates:  # no entries leave, so that limits on sites and noise do not apply
            return
        if self.sites is not None and review.sites < self.sites:
            raise RefusedMessage(
                f"this site's policy asks for {self.sites} sites, and there are {review.sites} (sites)"
            )
        if self.epsilon is not None:
            mechanism = find_mechanism((review.plan.method.aggregate,))
            _check_epsilon("epsilon", "dp", self.epsilon, mechanism, review.rounds, f"{review.rounds} rounds")
        self._check_samples(review.plan, review.uses, spent, f"{review.rounds} rounds")

    def check_round(self, uploads: int, plan: Plan, uses: int, spent: float = 0.0) -> None:
        """Raise :class:`RefusedMessage` if a trial with ``uploads`` may send no more, whatever its settings say.

        A repeated round, for example after a lost answer, is one more upload, so twice as many uploads as rounds are
        allowed. ``uses``: those of the coming round's passes (:func:`passes_of_round`, :func:`count_uses`). ``spent``:
        privacy spent by all uploads of this site so far.
        """
        if self.rounds is not None and uploads >= 2 * self.rounds:
            raise RefusedMessage(
                f"this site's policy allows {self.rounds} rounds, and it sent {uploads} uploads (rounds)"
            )
        self._check_samples(plan, uses, spent, "one more round")

    def _check_samples(self, plan: Plan, uses: int, spent: float, told: str) -> None:
        if self.sample_epsilon is not None:
            mechanism = find_mechanism((plan.method.gradient,))
            told += " and what this site sent before" if spent else ""
            _check_epsilon("sample_epsilon", "dp_sgd", self.sample_epsilon, mechanism, uses, told, spent)


def _check_epsilon(
    limit: str, method: str, most: float, mechanism: Mechanism | None, uses: int, told: str, before: float = 0.0
) -> None:
    """Raise :class:`RefusedMessage` unless ``uses`` of ``mechanism`` spend at most epsilon ``most``.

    ``told``: these uses, in words. ``before``: privacy spent by others (:func:`compute_spent`).
    """
    if not (mechanism and mechanism.secret and mechanism.noise_multiplier):
        raise RefusedMessage(
            f"this site's policy asks for differential privacy with epsilon {most:g} or less ({limit}): add "
            f"{method}(secret=True, ...) to the method"
        )
    try:
        whole = before + uses / mechanism.noise_multiplier**2
        spent = compute_epsilon(1 / math.sqrt(whole), 1.0, 1, mechanism.delta)
    except UsageError as error:
        raise RefusedMessage(f"this site's policy asks for a known epsilon ({limit}), but {error}") from error
    if spent > most:
        raise RefusedMessage(f"this site's policy allows epsilon {most:g}, and {told} spend {spent:.3g} ({limit})")


@dataclass
class Confirmation:
    """Asks the site's operator before the first round of each method and seed, and remembers the answer.

    ``ask`` shows a text and returns whether the operator agreed.
    """

    ask: Callable[[str], bool]
    _answers: dict[str, bool] = field(default_factory=dict)

    def check(self, review: TrialReview) -> None:
        """Raise :class:`RefusedMessage` unless the operator agrees to the experiment in ``review``."""
        text = review.describe()
        if text not in self._answers:
            self._answers[text] = self.ask(text)
        if not self._answers[text]:
            raise RefusedMessage("whoever runs this site does not agree to the experiment")


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
