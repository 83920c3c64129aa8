"""A site's policy file: what it offers, describes and forbids, for any settings of a coordinator.

``[data]`` is the offer: a coordinator's settings can ask for less, or for the same by name, but never for another
column, since whoever names the target of a table decides which values leave as names of classes. ``[told]`` limits
descriptions, and ``[limits]`` each experiment, each answer, and all answers together.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...analysis.privacy import Mechanism, compute_epsilon, find_mechanism
from ...config.spec import DataSpec
from ...core.declarations import Reveals
from ...core.plan import Plan
from ...data.columns import feature_slices
from ...data.federation import Federation
from ...results.disclosure import RECEIVERS, REVEALS
from ...tasks import CLASSIFICATION
from ...utils.errors import UsageError
from ...utils.files import read_text
from ..messages import RefusedMessage
from .record import Record, Spending
from .review import TrialReview

Spec = TypeVar("Spec", bound=DataSpec)
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
REPEATS = 2
"""How many times as often as planned an upload or a measurement may leave, since a lost one is asked for again."""
UPLOADS = 10_000
"""Default of the maximum total number of uploads of a site's data."""
IDENTIFIERS = frozenset(
    {"patient", "patients", "subject", "person", "name", "names", "surname", "forename", "firstname", "lastname",
     "fullname", "patientname", "email", "phone", "telephone", "address", "birthday", "birthdate", "dateofbirth", "dob",
     "pseudonym", "passport", "insurance"}
)  # fmt: skip
"""Names of columns that identify people, without spaces, signs and capitals."""
ENDINGS = frozenset({"id", "ids", "identifier", "uuid", "guid", "mrn", "ssn"})
"""Last words of such names, unless the word before is one of :data:`KINDS`."""
KINDS = frozenset({"class", "label", "category", "target", "outcome", "diagnosis"})


class Offer(BaseModel):
    """The data that a site offers, and the columns of a table that have a role; names must equal the settings'.

    Attributes:
        path: the data, as ``join --data``.
        target: column to predict; for several labels or numbers, columns separated by commas.
        columns: columns of a table that a model may see; by default all without a role.
        groups: column, or pattern of files' names, that never leaves and keeps samples of one patient together.
        split_column: column with train, validation or test.
        client_column: column with the site's name.
        task: prediction task, without arguments; by default the task of the data, for a table classification.

    """

    model_config = STRICT
    path: str | None = None
    target: str | None = None
    columns: Annotated[list[str] | None, Field(min_length=1)] = None
    groups: str | None = None
    split_column: str | None = None
    client_column: str | None = None
    task: str | None = None

    @model_validator(mode="after")
    def _refuse_identifiers(self) -> Offer:
        for name in (part.strip() for part in (self.target or "").split(",") if part.strip()):
            if is_identifier(name) or name in (self.groups, self.client_column, self.split_column):
                raise ValueError(
                    f"target {name!r} identifies patients or parts of the data, and a target's values leave the site "
                    "as names of classes: offer another column, or give this one a name that describes its content"
                )
            if self.columns and name in self.columns:
                raise ValueError(f"column {name!r} is the target: leave it out of columns")
        return self

    def apply(self, spec: Spec, *, table: bool) -> Spec:
        """Return settings with the site's own columns; raise :class:`RefusedMessage` naming what is not offered.

        ``table``: whether the data are a table, whose task must be offered too.
        """
        for key in ("target", "groups", "split_column", "client_column"):
            asked, offered = getattr(spec, key), getattr(self, key)
            if asked is not None and asked != offered:
                offers = f"offers {key} {offered!r}" if offered else f"offers no {key}"
                raise RefusedMessage(
                    f"this site {offers}, and {asked!r} was asked for: agree on it, and have the site offer it "
                    f"([data] {key} in its policy)"
                )
            spec = replace(spec, **{key: offered})
        asked = spec.task and spec.task.partition("(")[0].strip()
        if asked and asked != (self.task or (str(CLASSIFICATION) if table else asked)):
            raise RefusedMessage(
                f"this site offers task {self.task or str(CLASSIFICATION)!r}, and {asked!r} was asked for: have the "
                "site offer it ([data] task in its policy)"
            )
        return spec if asked else replace(spec, task=self.task)


class Told(BaseModel):
    """Contents of a description of the offered data.

    Attributes:
        class_counts: numbers of training samples by class, for losses with weights from them.
        round_to: these numbers are rounded down to multiples of this one; the rest counts to the most frequent class.
        fewest: a class, or a category of text, with fewer samples at this site is not disclosed: its data are refused.

    """

    model_config = STRICT
    class_counts: bool = True
    round_to: Positive = 1
    fewest: Positive = 1

    def round_counts(self, counts: list[int]) -> list[int]:
        """Round the numbers of training samples by class before they are disclosed; their sum stays the same."""
        rounded = [number - number % self.round_to for number in counts]
        rounded[counts.index(max(counts))] += sum(counts) - sum(rounded)
        return rounded

    def describe_counts(self) -> str:
        """Describe the precision of disclosed numbers by class."""
        return "exact" if self.round_to == 1 else f"rounded down to multiples of {self.round_to}"

    def check(self, data: Federation) -> None:
        """Raise :class:`UsageError` naming a class or category that describes too few samples of ``data``."""
        (client,) = data.clients
        if self.fewest == 1:
            return
        counts: dict[str, int] = {}
        if data.task == CLASSIFICATION:
            names = data.meanings or tuple(map(str, range(data.classes)))
            for part, split in client.splits.items():
                numbers = data.task.count_classes(split.y, data.classes).tolist()
                counts |= {f"class {names[k]!r} of the {part} data": number for k, number in enumerate(numbers)}
        for column, span in feature_slices(data.columns) if data.columns else ():
            for place, category in enumerate(column.categories or (), span.start):
                number = sum(int((split.read(slice(None))[:, place] > 0.5).sum()) for split in client.splits.values())
                counts[f"{category!r} in column {column.name!r}"] = number
        for name, number in counts.items():
            if 0 < number < self.fewest:
                raise UsageError(
                    f"{name} has {number} samples, and this site discloses at least {self.fewest} ([told] fewest): "
                    "group rare values, or leave them out"
                )


class Limits(BaseModel):
    """Limits of a site. Names are patterns, such as ``fed*`` or ``*running*``.

    Attributes:
        methods: methods that may be trained; each part of a composition must be among them.
        models: networks that may be trained.
        keep: entries, and other tensors that rules send, that never leave.
        reveals: the most that anything that leaves may reveal (:data:`~fedshift.results.disclosure.REVEALS`).
        passed_on: False: nothing leaves that other sites may receive as this one sent it.
        rounds: maximum number of rounds.
        sites: minimum number of sites that take part; with only two, each can compute the other's upload.
        epsilon: largest epsilon of differential privacy over all rounds, with ``secret`` noise, computed as if every
            site took part in each round.
        sample_epsilon: largest epsilon for each of the site's samples over all uploads of all experiments, with
            ``secret`` noise that the site draws; a repeated round counts again.
        least_samples: minimum number of different samples used for an upload, and of samples for a measurement.
        least_steps: minimum number of local steps before an upload; after one step, the upload is a gradient.
        uploads: maximum number of uploads over everything that the data ever took part in; by default twice ``rounds``
            or, without these, :data:`UPLOADS`.
        evaluations: the same for measurements.
        descriptions: the same for descriptions that differ.
        bytes_per_round: maximum bytes of entries that a round moves, to and from the site, repetitions included.

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
        if what == "uploads" and self.uploads is None:
            return UPLOADS if self.rounds is None else REPEATS * self.rounds
        return int(getattr(self, what))

    def refuse(self, limit: str, asked: str) -> NoReturn:
        """Raise :class:`RefusedMessage` naming ``limit``, its value, and what was ``asked``, with the fix."""
        value = self.most("uploads") if limit == "uploads" else getattr(self, limit)
        raise RefusedMessage(f"this site's policy has {limit} = {json.dumps(value)}, and {asked}")

    def check(self, review: TrialReview, record: Record, whole: Collection[TrialReview] = ()) -> None:
        """Raise :class:`RefusedMessage` naming the first limit that ``review`` exceeds, in any of its rounds.

        ``record``: what the data were used for so far. ``whole``: reviews of all methods of the experiment, by default
        of this one alone.
        """
        for part in re.split(r"\+(?![^(]*\))", review.plan.method.name):
            if self.methods is not None and not matches(part.partition("(")[0], self.methods):
                self.refuse("methods", f"method {part!r} is not among them")
        if self.models is not None and not matches(review.model, self.models):
            self.refuse("models", f"model {review.model!r} is not among them")
        if self.rounds is not None and review.rounds > self.rounds:
            self.refuse("rounds", f"{review.rounds} rounds are asked for")
        self.check_bytes(review.round_bytes)
        whole = whole or [review]
        self._check_planned("evaluations", sum(each.seeds * each.measured for each in whole), review, record)
        if not review.validates:  # else no entries leave, so that limits on sites, uploads and noise do not apply
            self._check_entries(review)
            self.check_size(*review.smallest_upload)
            self._check_planned("uploads", sum(each.seeds * each.uploads for each in whole), review, record)
            self._check_noise(review, whole, record)

    def check_upload(self, plan: Plan, uses: int, record: Record) -> None:
        """Raise :class:`RefusedMessage` if one more upload spends too much privacy, under any settings.

        ``uses``: uses in the coming round's passes (:func:`.review.passes_of_round`, :func:`.review.count_uses`).
        """
        self._check_samples(plan, uses, record.sum_spent(), "one more round")

    def check_size(self, samples: int, steps: int) -> None:
        """Raise :class:`RefusedMessage` if an upload uses too few different ``samples`` or ``steps``."""
        if samples < self.least_samples:
            fix = "train on more in a round (epochs, batches, steps, batch_size)"
            self.refuse("least_samples", f"an upload would use {samples} different samples: {fix}")
        if steps < self.least_steps:
            self.refuse(
                "least_steps",
                f"an upload would follow {steps} local step{'s' * (steps > 1)}, so that samples could be computed from "
                "it: take more steps in a round (epochs, batches, steps, or a smaller batch_size)",
            )

    def check_bytes(self, moved: int) -> None:
        """Raise :class:`RefusedMessage` if a round in which ``moved`` bytes go to and from the site moves too many."""
        if self.bytes_per_round is not None and moved > self.bytes_per_round:
            fix = "use a smaller model, or measure in fewer rounds (evaluate_every)"
            self.refuse("bytes_per_round", f"a round would move {moved} bytes to and from this site: {fix}")

    def check_count(self, what: Spending, record: Record) -> None:
        """Raise :class:`RefusedMessage` if as many of ``what`` left as may leave of the data in all."""
        if (before := record.count(what)) >= self.most(what):
            self.refuse(what, f"{before} of its data were sent")

    def _check_entries(self, review: TrialReview) -> None:
        """Check what leaves, what it reveals, and who receives it."""
        grains = list(REVEALS)
        for entry in review.leaving:
            named = f"{entry.name!r} of {entry.source}"
            if matches(entry.name, self.keep):
                self.refuse("keep", f"entry {entry.name!r} would leave: use a method that keeps it")
            if self.reveals is not None and grains.index(self.reveals) < grains.index(entry.reveals):
                self.refuse("reveals", f"{named} reveals {REVEALS[entry.reveals]}: use another method")
            if not self.passed_on and entry.receivers == "each":
                self.refuse("passed_on", f"{named} is received by {RECEIVERS['each']}: use another method")
        if self.sites is not None and review.sites < self.sites:
            self.refuse("sites", f"{review.sites} sites take part")

    def _check_planned(self, what: Spending, planned: int, review: TrialReview, record: Record) -> None:
        """Refuse an experiment that plans more of ``what`` than may leave in addition to those of other experiments."""
        before = record.count(what, without=review.experiment)
        if before + planned > self.most(what):
            self.refuse(what, f"{before} of its data were sent in other experiments, and {planned} are asked for")

    def _check_noise(self, review: TrialReview, whole: Collection[TrialReview], record: Record) -> None:
        """Check how much privacy all methods of an experiment spend."""
        told = f"{review.rounds} rounds"
        self._check_epsilon(
            "epsilon", "dp", find_mechanism(review.plan.method.rules, clients=True), review.rounds, told
        )
        before = record.sum_spent(without=review.experiment)
        before += sum(each.seeds * each.spent for each in whole) - review.spent
        self._check_samples(review.plan, review.uses, before, told)

    def _check_samples(self, plan: Plan, uses: int, spent: float, told: str) -> None:
        told += " and the other uploads of this site" if spent else ""
        mechanism = find_mechanism(plan.method.rules, clients=False)
        self._check_epsilon("sample_epsilon", "dp_sgd", mechanism, uses, told, spent)

    def _check_epsilon(
        self, limit: str, method: str, mechanism: Mechanism | None, uses: int, told: str, before: float = 0.0
    ) -> None:
        """Refuse unless ``uses`` of ``mechanism`` spend at most the epsilon of ``limit``, if there is one.

        ``told``: these uses, in words. ``before``: privacy spent by others (:func:`.review.compute_spent`).
        """
        if (most := getattr(self, limit)) is None:
            return
        if not (mechanism and mechanism.secret and mechanism.noise_multiplier):
            self.refuse(limit, f"the method has no secret noise: add {method}(secret=True, ...) to it")
        try:
            whole = before + uses / mechanism.noise_multiplier**2
            spent = compute_epsilon(1 / math.sqrt(whole), 1.0, 1, mechanism.delta)
        except UsageError as error:
            self.refuse(limit, f"epsilon cannot be computed: {error}")
        if spent > most:
            self.refuse(limit, f"{told} spend {spent:.3g}")


class SitePolicy(BaseModel):
    """A site's file; ``experiments``: patterns of names of those that may ask, as ``fedshift serve`` prints them."""

    model_config = STRICT
    experiments: list[str] = Field(default_factory=lambda: ["*"])
    data: Offer = Field(default_factory=Offer)
    told: Told = Field(default_factory=Told)
    limits: Limits = Field(default_factory=Limits)

    @staticmethod
    def read(path: Path) -> SitePolicy:
        """Return the policy in a TOML file; raise :class:`UsageError` naming its errors."""
        try:
            return SitePolicy.model_validate(tomllib.loads(read_text(path)))
        except OSError as error:
            raise UsageError(f"--policy {path} cannot be read ({error.strerror})") from error
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"--policy {path} is not a TOML file ({error})") from error
        except ValidationError as error:
            raise UsageError(f"--policy {path}: {_explain(error)}") from None

    def offering(self, **named: object) -> SitePolicy:
        """Return the policy with an offer that ``named`` adds to; None adds nothing.

        Raises :class:`UsageError` for a contradiction to the policy's file, or for an identifier as the target.
        """
        return self._with("data", named)

    def limiting(self, *, bytes_per_round: int | None) -> SitePolicy:
        """Return the policy with this limit; None changes nothing. Raises like :meth:`offering`."""
        return self._with("limits", {"bytes_per_round": bytes_per_round})

    def check_asker(self, experiment: str) -> None:
        """Raise :class:`RefusedMessage` unless ``experiment`` may ask."""
        if not matches(experiment, self.experiments):
            raise RefusedMessage(f"this site's policy does not allow experiment {experiment!r} (experiments)")

    def _with(self, table: str, named: Mapping[str, object]) -> SitePolicy:
        values, stated = {key: value for key, value in named.items() if value is not None}, getattr(self, table)
        for key, value in values.items():
            if (said := getattr(stated, key)) not in (None, value):
                raise UsageError(f"the policy's {key} is {said!r}, but the option names {value!r}: leave one out")
        try:
            return SitePolicy.model_validate(self.model_dump() | {table: stated.model_dump() | values})
        except ValidationError as error:
            raise UsageError(_explain(error)) from None


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether ``name`` matches one of ``patterns``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_identifier(column: str) -> bool:
    """Return whether ``column`` is named as identifiers of patients are, such as ``patient_id`` or ``Surname``."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).lower())
    named = words[-1:] and words[-1] in ENDINGS and not (len(words) > 1 and words[-2] in KINDS)
    return bool(named) or "".join(words) in IDENTIFIERS


def refuse_identifying_classes(data: Federation) -> None:
    """Raise :class:`UsageError` if the names of classes would name single samples rather than kinds of them."""
    (client,) = data.clients
    if data.task != CLASSIFICATION or not data.meanings:
        return
    kinds = len({label for split in client.splits.values() for label in split.y.tolist()})
    samples = sum(map(len, client.splits.values()))
    if kinds > 2 and 2 * kinds > samples:
        raise UsageError(
            f"the target has {kinds} different values in {samples} samples, so it is an identifier, and the list of "
            "them would leave this site: offer another target, or group its values"
        )


def _explain(error: ValidationError) -> str:
    """Return the errors of a policy, their places, and what may be set there."""
    tables: dict[str, type[BaseModel]] = {"data": Offer, "told": Told, "limits": Limits}
    lines = []
    for fault in error.errors():
        place = list(map(str, fault["loc"]))
        allowed = tables.get(place[0] if place else "", SitePolicy).model_fields
        names = f". It may set {', '.join(allowed)}" if fault["type"] == "extra_forbidden" else ""
        lines.append(f"{'.'.join(place)}: {fault['msg'].removeprefix('Value error, ')}{names}")
    return "; ".join(lines)
