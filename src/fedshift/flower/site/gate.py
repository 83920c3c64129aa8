"""The gate that every question to a site passes, and every answer and every text from it.

A kind of question declares the content of its answer and what it spends (:data:`QUESTIONS`); one that declares nothing
is refused. The gate compares each question with the site's policy, with what its operator agreed to (the whole
question: settings, rounds, experiment, the coordinator) and with what was sent before, and each answer with what its
kind declares. Every answer and every refusal is in the record, and shown at the site, before it leaves.
"""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from secrets import token_hex
from types import MappingProxyType
from typing import Any

from ...analysis.privacy import find_mechanism
from ...core.states import ClientState
from ...evaluation.communication import list_disclosures
from ...results.disclosure import group_disclosures
from ...results.schema import REESTIMATED
from ..messages import UPLOAD, Exchange, RefusedMessage, describe_entries, digest_records
from .policy import REPEATS, SitePolicy
from .record import Record, Spending
from .review import VALIDATES, TrialReview, compute_spent, count_distinct, count_uses, passes_of_round
from .trial import SiteTrial

SPLITS = ("validation", "test")
"""Samples on which a model may be measured."""
MOMENTS = ("loaded", REESTIMATED)
"""Models that a site measures when it is asked; ``trained`` ones are measured with an upload."""


@dataclass(frozen=True, kw_only=True)
class Asks:
    """Declaration of a kind of question: the kind of its answer, and all facts and records that this may have.

    ``spends``: what is counted; None: nothing of the data leaves. ``of_trial``: it is about a method and seed, which
    the operator and the policy must allow first.
    """

    answer: str
    facts: frozenset[str] = frozenset()
    records: frozenset[str] = frozenset()
    spends: Spending | None = None
    of_trial: bool = True

    @property
    def uploads(self) -> bool:
        """Whether the answer is an upload."""
        return self.spends == "uploads"


QUESTIONS: Mapping[str, Asks] = MappingProxyType({
    "describe": Asks(
        answer="described", spends="descriptions", of_trial=False, facts=frozenset(
            {"name", "version", "shape", "dtype", "classes", "class_names", "columns", "samples", "labels", "task",
             "validates", "scale", "values", "files", "window", "inputs", "measures"}
        ),
    ),
    "review": Asks(answer="agreed", facts=frozenset({"name"})),
    "train": Asks(
        answer="trained", spends="uploads", records=frozenset({"shared", "memory"}),
        facts=frozenset({"name", "round", "weight", "steps", "loss_sum", UPLOAD, "rows"}),
    ),
    "evaluate": Asks(answer="evaluated", spends="evaluations", facts=frozenset({"name", "round", "rows"})),
    "tell": Asks(answer="told", of_trial=False),
})  # fmt: skip
"""Every kind of question that a site answers; ``tell`` asks for nothing."""


def name_user() -> str:
    """Return the name of the account that runs this program, or its number where it has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


@dataclass(kw_only=True)
class Gate:
    """The gate of one site, with its ``policy`` and the ``record`` of what its data were used for.

    ``confirm``: shows the operator a text, asks a question, and returns whether the operator agrees; None: nobody is
    asked. ``say``: called with a line of text. ``validates``: whether the site only validates. ``coordinator``: address
    of the coordinator; consent and repeated answers are for this one only.
    """

    policy: SitePolicy
    confirm: Callable[[str, str], bool] | None
    record: Record
    say: Callable[[str], None]
    validates: bool = False
    coordinator: str = ""
    _declined: set[str] = field(default_factory=set)
    _reviews: dict[str, TrialReview] = field(default_factory=dict)

    def admit(self, question: Exchange) -> Asks:
        """Return what ``question`` asks for; raise :class:`RefusedMessage` unless it may ask for that here."""
        asks = QUESTIONS.get(question.kind)
        if asks is None:
            raise RefusedMessage(
                f"a question of kind {question.kind!r} declares nothing that this site could allow: it answers "
                f"{', '.join(QUESTIONS)}"
            )
        if asks.uploads and self.validates:
            raise RefusedMessage(f"this site {VALIDATES} (join --validate-only): it trains nothing")
        facts = question.facts["trial"] if asks.of_trial else question.facts
        self.policy.check_asker(str(facts.get("experiment", "")))
        return asks

    def agree(self, review: TrialReview, trial: Mapping[str, Any], data: str) -> None:
        """Raise :class:`RefusedMessage` unless policy and operator allow ``review``, the review of ``trial``.

        ``data``: fingerprint of the samples.
        """
        whole = {name: other for name, other in self._reviews.items() if other.experiment == review.experiment}
        whole[review.plan.method.name] = review
        self.policy.limits.check(review, self.record, whole.values())
        self._reviews = whole
        text = review.describe(self.coordinator)
        self._ask({"trial": trial, "data": data}, text, "Take part in it?", "the experiment")

    def check(self, asks: Asks, question: Exchange, trial: SiteTrial, client: ClientState | None) -> None:
        """Raise :class:`RefusedMessage` if ``question`` goes beyond the trial's settings, or beyond the policy.

        ``client``: the client's state before the round, for which steps are taken; None: none are.
        """
        limits, settings, round, uploads = self.policy.limits, trial.settings, question.facts["round"], asks.uploads
        if type(round) is not int or not (not uploads) <= round <= settings.rounds - uploads:
            raise RefusedMessage(
                f"the experiment has {settings.rounds} rounds, and the question is about the model of round {round}"
            )
        self._check_measurement(asks, question, trial)
        self._allow(question.kind, self._identify(question, trial), trial)
        self._count_bytes(trial, round + uploads, question)
        if client:
            bounds, steps = trial.list_steps(client)
            limits.check_size(count_distinct(bounds, steps), len(steps))
            limits.check_upload(trial.plan, self._count_uses(trial, client), self.record)

    def release(
        self, asks: Asks, question: Exchange, answer: Exchange, trial: SiteTrial | None, client: ClientState | None,
        data: str = "",
    ) -> Exchange:  # fmt: skip
        """Return ``answer`` once it is in the record.

        ``data``: fingerprint of the samples that a description is about. Raises :class:`RefusedMessage` if the answer
        is not what its kind declares, or if too much was sent meanwhile.
        """
        beyond = [*sorted(answer.facts.keys() - asks.facts), *sorted(answer.arrays.keys() - asks.records)]
        if beyond or answer.kind != asks.answer:
            raise RefusedMessage(
                f"an answer {answer.kind!r} with {', '.join(beyond) or 'nothing else'} is not what a question "
                f"{question.kind!r} declares: it does not leave"
            )
        if asks.spends == "descriptions":
            self._release_description(answer, data)
        elif asks.spends and trial:
            self._release_answer(asks, question, answer, trial, client)
        return answer

    def refuse(self, why: str, *, diverged: bool = False) -> Exchange:
        """Return a refusal with the text ``why``, which is shown and in the record once before it leaves."""
        text = _digest({"refused": why, "coordinator": self.coordinator})
        if not self.record.holds("refused", text):
            self.record.append("refused", {"why": why}, question=text)
        self.say(f"refused; disclosed to the coordinator: {why}")
        return Exchange(kind="refused", facts={"why": why, "diverged": diverged})

    def _release_description(self, answer: Exchange, data: str) -> None:
        told = {key: value for key, value in answer.facts.items() if key != "version"}
        lines, question = describe_description(answer.facts, self.policy.told.describe_counts()), _digest(told)
        self._allow("describe", question)
        self._ask({"told": told, "data": data}, "\n".join(lines), "Tell the coordinator this?", "describe its data")
        check = partial(self._allow, "describe", question)
        self.record.append("describe", answer.facts, check, descriptions=1, question=question)
        for line in lines:
            self.say(line)

    def _release_answer(
        self, asks: Asks, question: Exchange, answer: Exchange, trial: SiteTrial, client: ClientState | None
    ) -> None:
        round, asked = answer.facts["round"], self._identify(question, trial)
        columns: dict[str, Any] = {
            str(asks.spends): 1, "trial": trial.review.trial, "round": round, "question": asked,
            "bytes": self._count_bytes(trial, round, question, answer),
        }  # fmt: skip
        if asks.uploads:
            columns["evaluations"] = int("rows" in answer.facts)
        if client:
            columns["spent"] = compute_spent(trial.plan, self._count_uses(trial, client))
            columns["steps"] = trial.list_steps(client)[1].stop
        content = {**answer.facts, **_describe_upload(answer, trial)}
        self.record.append(question.kind, content, partial(self._allow, question.kind, asked, trial), **columns)

    def _check_measurement(self, asks: Asks, question: Exchange, trial: SiteTrial) -> None:
        """Refuse measurements that the settings do not plan, or on fewer samples than the policy asks for."""
        splits, moment = question.facts.get("splits", ()), question.facts.get("moment", "loaded")
        if asks.uploads and not splits:
            return
        after, least = question.facts["round"] + asks.uploads, self.policy.limits.least_samples
        planned = "trained" in trial.settings.moments if asks.uploads else moment in MOMENTS
        if not (trial.settings.is_evaluated(after) and planned and set(splits) <= set(SPLITS)):
            raise RefusedMessage(
                f"nothing is measured on {', '.join(map(str, splits))} samples ({moment}) after round {after} by the "
                "experiment's settings"
            )
        for split in splits:
            if (number := trial.samples.get(split, 0)) < least:
                self.policy.limits.refuse("least_samples", f"a model would be measured on {number} {split} samples")

    def _count_bytes(self, trial: SiteTrial, round: int, *messages: Exchange) -> int:
        """Return the bytes of entries in ``messages``; refuse them if the round has moved too many with them."""
        size = sum(message.size for message in messages)
        self.policy.limits.check_bytes(self.record.sum_bytes(trial.review.trial, round) + size)
        return size

    def _allow(self, kind: str, question: str, trial: SiteTrial | None = None) -> None:
        """Raise :class:`RefusedMessage` if the trial, or all that the data took part in, has no answer left."""
        spends = QUESTIONS[kind].spends
        if spends is None or self.record.holds(kind, question):
            return
        if trial:
            review, sent = trial.review, self.record.count(spends, trial=trial.review.trial)
            planned = review.uploads if spends == "uploads" else (1 + len(MOMENTS)) * review.measured
            if sent >= REPEATS * planned:
                raise RefusedMessage(
                    f"the experiment takes {planned} {spends} of this site, and it sent {sent} ({spends})"
                )
        self.policy.limits.check_count(spends, self.record)

    def _identify(self, question: Exchange, trial: SiteTrial) -> str:
        """Return what is the same for two questions whose answers to one coordinator are the same bits."""
        mechanism = find_mechanism(trial.plan.method.rules, clients=False)
        drawn = token_hex(8) if QUESTIONS[question.kind].uploads and mechanism and mechanism.secret else ""
        asked = {"facts": question.facts, "arrays": digest_records(question.arrays), "coordinator": self.coordinator}
        return _digest({**asked, "data": trial.data.fingerprint, "drawn": drawn})

    def _count_uses(self, trial: SiteTrial, client: ClientState) -> int:
        reached = self.record.reached(trial.review.trial)[1]
        passes = passes_of_round(trial.plan, trial.samples["train"], client.steps, reached)
        return count_uses(trial.plan, passes, trial.review.copies)

    def _ask(self, about: Mapping[str, Any], text: str, asked: str, refusal: str) -> None:
        """Raise :class:`RefusedMessage` unless the operator agrees, now or before, to ``about``, shown as ``text``."""
        digest = _digest({**about, "coordinator": self.coordinator})
        if self.confirm is None or self.record.holds("agreed", digest):
            return
        if digest not in self._declined:
            agreed, who = self.confirm(text, asked), name_user()
            self.record.append("agreed" if agreed else "declined", {"who": who, "shown": text}, question=digest)
            if agreed:
                return
            self._declined.add(digest)
        raise RefusedMessage(f"whoever runs this site does not agree to {refusal}")


def describe_description(facts: Mapping[str, Any], counts: str) -> list[str]:
    """Return everything that a description discloses, as lines of text; ``counts``: precision of numbers by class."""
    names, labels = facts["class_names"], facts["labels"]
    shape = " x ".join(map(str, facts["shape"])) or "one value"
    samples = ", ".join(f"{number} {part}" for part, number in facts["samples"].items())
    lines = [
        f"name {facts['name']!r}; samples: {samples}, models are measured on {', '.join(facts['measures']) or 'none'}; "
        f"{facts['dtype']} of shape {shape}, {', '.join(sorted(set(facts['values'].values()))) or 'of no known kind'}, "
        f"scaled by {facts['scale'] or 'the site itself'}{_describe_range(facts['window'])}; "
        f"task {facts['task'].get('name')}",
        f"{facts['classes']} classes{': ' + ', '.join(names) if names else ', without names'}",
    ]
    if facts["columns"]:
        held = {
            each["name"]: ", ".join(each["categories"] or filter(None, [each["unit"]])) for each in facts["columns"]
        }
        texts = [f"{name} ({some})" if some else name for name, some in held.items()]
        lines.append(f"columns and their categories: {'; '.join(texts)}")
    told = "not disclosed" if labels is None else f"{', '.join(map(str, labels))} ({counts})"
    lines.append(f"training samples by class: {told}")
    return [f"disclosed to the coordinator: {line}" for line in lines]


def _describe_range(window: Sequence[float] | None) -> str:
    return "" if window is None else f", {window[0]:g} to {window[1]:g} of its files as -1 to 1"


def _describe_upload(answer: Exchange, trial: SiteTrial) -> dict[str, Any]:
    """Return number, size, digest and names of the entries that leave with an answer, and what they reveal."""
    if not answer.arrays:
        return {}
    entries = {name: describe_entries(record) for name, record in answer.arrays.items()}
    return {"left": entries, "discloses": list(map(str, group_disclosures(list_disclosures(trial.plan))))}


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
