"""A site's policy file: what it offers, discloses and forbids, independently of a coordinator's questions.

``[data]`` is the offer and ``[told]`` the limits of a description (:mod:`.offer`); ``[limits]`` bounds each experiment,
each upload, and all of them together.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from ...analysis.privacy import Mechanism, compute_epsilon, find_mechanism
from ...core.declarations import Reveals
from ...core.plan import Plan
from ...results.disclosure import RECEIVERS, REVEALS
from ...utils.errors import UsageError
from ...utils.files import open_regular
from ..transport.arrays import RefusedMessage
from ..transport.exchange import Exchange
from .account import Book, Spending
from .offer import STRICT, Offer, Told
from .review import TrialReview

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
REPEATS = 2
"""How many times as often as planned an upload or a measurement may leave, since a lost one is asked for again."""

UPLOADS = 10_000
"""Default of the maximum total number of uploads of a site's data."""


class Limits(BaseModel):
    """Limits of a site. Names are patterns, such as ``fed*`` or ``*running*``.

    Attributes:
        methods: methods that may be trained; each part of a composition must be among them.
        models: networks that may be trained.
        keep: entries, and other tensors that rules send, that never leave.
        reveals: the most that anything that leaves may reveal: ``update``, ``client``, ``class`` or ``image``
            (:data:`~fedshift.results.disclosure.REVEALS`).
        passed_on: False: nothing leaves that other sites may receive as this one sent it.
        rounds: maximum number of rounds.
        sites: minimum number of sites that take part; with only two, each can compute the other's upload.
        epsilon: largest epsilon of differential privacy over all rounds, with ``secret`` noise; computed as if every
            site took part in each round.
        sample_epsilon: largest epsilon of differential privacy for each of the site's samples over all uploads of all
            experiments, with ``secret`` noise that the site draws; a repeated round counts again.
        least_samples: minimum number of different samples used for an upload.
        least_steps: minimum number of local steps before an upload; after one step, the upload is a gradient.
        uploads: maximum number of uploads over everything that the data ever took part in; by default twice ``rounds``
            or, without these, :data:`UPLOADS`.
        evaluations: the same for measurements.
        descriptions: the same for descriptions that differ.
        bytes_per_round: maximum number of bytes of entries that a round moves, to and from the site together.

    """

    model_config = STRICT
    methods: list[str] | None = None
    models: list[str] | None = None
    keep: list[str] = Field(default_factory=list)
    reveals: Reveals | None = None
    passed_on: bool = True
    rounds: Positive | None = None
    sites: Positive | None = None
    epsilon: Annotated[float, Field(gt=0)] | None = None
    sample_epsilon: Annotated[float, Field(gt=0)] | None = None
    least_samples: Positive = 16
    least_steps: Positive = 2
    uploads: Count | None = None
    evaluations: Count = 20_000
    descriptions: Count = 20
    bytes_per_round: Positive | None = None

    def most(self, what: Spending) -> int:
        """Return how many of ``what`` may leave over everything that the data ever took part in."""
        if what != "uploads" or self.uploads is not None:
            found: int = getattr(self, what)
            return found
        return UPLOADS if self.rounds is None else REPEATS * self.rounds

    def check(self, review: TrialReview, book: Book) -> None:
        """Raise :class:`RefusedMessage` naming the first limit that ``review`` exceeds.

        ``book``: what the data were used for so far.
        """
        for part in re.split(r"\+(?![^(]*\))", review.plan.method.name):
            if self.methods is not None and not matches(part.partition("(")[0], self.methods):
                raise RefusedMessage(f"this site's policy does not allow method {part!r} (methods)")
        if self.models is not None and not matches(review.model, self.models):
            raise RefusedMessage(f"this site's policy does not allow model {review.model!r} (models)")
        grains = list(REVEALS)
        for each in review.leaving:
            if matches(each.name, self.keep):
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
        self.check_bytes(review.round_bytes)
        if review.validates:  # no entries leave, so that limits on sites, uploads and noise do not apply
            return
        if self.sites is not None and review.sites < self.sites:
            raise RefusedMessage(
                f"this site's policy asks for {self.sites} sites, and there are {review.sites} (sites)"
            )
        before, most = book.count("uploads", without=review.trial), self.most("uploads")
        if before + review.uploads > most:
            raise RefusedMessage(
                f"this site's policy allows {most} uploads of its data in all, {before} were sent in other "
                f"experiments, and {review.uploads} are asked for (uploads)"
            )
        if self.epsilon is not None:
            mechanism = find_mechanism((review.plan.method.aggregate,))
            _check_epsilon("epsilon", "dp", self.epsilon, mechanism, review.rounds, f"{review.rounds} rounds")
        spent = book.sum_spent(without=review.trial)
        self._check_privacy(review.plan, review.uses, spent, f"{review.rounds} rounds")

    def check_upload(self, plan: Plan, uses: int, book: Book) -> None:
        """Raise :class:`RefusedMessage` if one more upload spends too much privacy, under any settings.

        ``uses``: uses in the coming round's passes (:func:`.review.passes_of_round`, :func:`.review.count_uses`).
        """
        self._check_privacy(plan, uses, book.sum_spent(), "one more round")

    def check_size(self, samples: int, steps: int | None) -> None:
        """Raise :class:`RefusedMessage` if an upload uses too few different ``samples`` or ``steps``.

        ``steps``: None where no steps are taken.
        """
        if samples < self.least_samples:
            raise RefusedMessage(
                f"an upload would use {samples} different samples, and this site's policy asks for "
                f"{self.least_samples} (least_samples): train on more in a round (epochs, batches, steps, batch_size)"
            )
        if steps is not None and steps < self.least_steps:
            raise RefusedMessage(
                f"an upload would follow {steps} local step{'s' * (steps > 1)}, so that samples could be computed "
                f"from it, and this site's policy asks for {self.least_steps} (least_steps): take more steps in a "
                "round (epochs, batches, steps, or a smaller batch_size)"
            )

    def check_bytes(self, moved: int) -> None:
        """Raise :class:`RefusedMessage` if a round in which ``moved`` bytes go to and from the site moves too many."""
        if self.bytes_per_round is not None and moved > self.bytes_per_round:
            raise RefusedMessage(
                f"a round would move {moved} bytes to and from this site, which allows {self.bytes_per_round} "
                "(--max-bytes-per-round): use a smaller model, or measure in fewer rounds (evaluate_every)"
            )

    def check_count(self, what: Spending, book: Book, more: int = 1) -> None:
        """Raise :class:`RefusedMessage` if ``more`` of ``what`` are too many over all that the data took part in."""
        before, most = book.count(what), self.most(what)
        if before + more > most:
            raise RefusedMessage(
                f"this site's policy allows {most} {what} of its data in all, and {before} were sent ({what})"
            )

    def _check_privacy(self, plan: Plan, uses: int, spent: float, told: str) -> None:
        if self.sample_epsilon is not None:
            mechanism = find_mechanism((plan.method.gradient,))
            told += " and what this site sent before" if spent else ""
            _check_epsilon("sample_epsilon", "dp_sgd", self.sample_epsilon, mechanism, uses, told, spent)


class SitePolicy(BaseModel):
    """A site's file.

    Attributes:
        coordinators: keys of the coordinators that may ask, as `fedshift pki` prints them (``SHA256:...``); None: each
            whose certificate is of the site's authority.
        experiments: names of experiments that may ask, as ``fedshift serve`` prints them; patterns.
        data: what the site offers.
        told: limits of what a description may disclose.
        limits: what is not allowed.

    """

    model_config = STRICT
    coordinators: list[str] | None = None
    experiments: list[str] = Field(default_factory=lambda: ["*"])
    data: Offer = Field(default_factory=Offer)
    told: Told = Field(default_factory=Told)
    limits: Limits = Field(default_factory=Limits)

    @staticmethod
    def read(path: Path) -> SitePolicy:
        """Return the policy in a TOML file; raise :class:`UsageError` naming its errors."""
        try:
            with open_regular(path) as file:
                return SitePolicy.model_validate(tomllib.load(file))
        except OSError as error:
            raise UsageError(f"--policy {path} cannot be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"--policy {path} is not a TOML file ({error})") from error
        except ValidationError as error:
            raise UsageError(f"--policy {path}: {_explain(error)}") from None

    def offering(self, **named: object) -> SitePolicy:
        """Return the policy with an offer that ``named`` adds to; None adds nothing.

        Raises :class:`UsageError` for a contradiction to the policy's file, or for an identifier as the target.
        """
        given = {key: value for key, value in named.items() if value is not None}
        for key, value in given.items():
            if (own := getattr(self.data, key)) not in (None, value):
                raise UsageError(
                    f"the policy offers {key} {own!r}, but the option names {value!r}: leave one of them out"
                )
        try:
            offer = Offer.model_validate({**self.data.model_dump(), **given})
        except ValidationError as error:
            raise UsageError(_explain(error, "data")) from None
        return self.model_copy(update={"data": offer})

    def limiting(self, **named: int | None) -> SitePolicy:
        """Return the policy with limits that ``named`` makes tighter; None changes nothing."""
        given = {key: value for key, value in named.items() if value is not None}
        for key, value in given.items():
            if (own := getattr(self.limits, key)) is not None and own < value:
                raise UsageError(
                    f"the policy's {key} is {own}, but the option allows {value}: give no more than the policy"
                )
        try:
            limits = Limits.model_validate({**self.limits.model_dump(), **given})
        except ValidationError as error:
            raise UsageError(_explain(error, "limits")) from None
        return self.model_copy(update={"limits": limits})

    def check_asker(self, question: Exchange, experiment: str) -> None:
        """Raise :class:`RefusedMessage` unless this coordinator and this experiment may ask."""
        if self.coordinators is not None and question.signer not in self.coordinators:
            who = f"with the key {question.signer}" if question.signer else "without a key"
            raise RefusedMessage(f"this site's policy does not allow the coordinator {who} (coordinators)")
        if not matches(experiment, self.experiments):
            raise RefusedMessage(f"this site's policy does not allow experiment {experiment!r} (experiments)")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether ``name`` is like one of ``patterns``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _explain(error: ValidationError, table: str = "") -> str:
    """Return what is wrong with a policy, where, and what may be there."""
    told = []
    for each in error.errors():
        place = [part for part in (table, *map(str, each["loc"])) if part]
        tables: dict[str, type[BaseModel]] = {"data": Offer, "told": Told, "limits": Limits}
        holder = tables.get(place[0] if place else "", SitePolicy)
        why = f"{'.'.join(place)}: {each['msg'].removeprefix('Value error, ')}"
        names = f". It may set {', '.join(holder.model_fields)}" if each["type"] == "extra_forbidden" else ""
        told.append(why + names)
    return "; ".join(told)


def _check_epsilon(
    limit: str, method: str, most: float, mechanism: Mechanism | None, uses: int, told: str, before: float = 0.0
) -> None:
    """Raise :class:`RefusedMessage` unless ``uses`` of ``mechanism`` spend at most epsilon ``most``.

    ``told``: these uses, in words. ``before``: privacy spent by others (:func:`.review.compute_spent`).
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
