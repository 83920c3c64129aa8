"""The gate that every question to a site passes, and every answer from it, of any kind.

A kind of question declares the content of its answer and what it spends (:data:`QUESTIONS`); one that declares nothing
is refused. The gate compares each question with the site's policy, with what its operator agreed to (the whole
question: settings, rounds, experiment, the coordinator's key) and with what was sent before, and each answer with what
    its kind declares. Every answer is counted and written to the ledger before it leaves.
"""

from __future__ import annotations

import getpass
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from ...analysis.privacy import find_mechanism
from ...core.states import ClientState
from ...core.work import Bounds
from ...evaluation.communication import list_disclosures
from ...experiments.settings import Settings
from ...results.schema import REESTIMATED
from ..transport.arrays import RefusedMessage
from ..transport.exchange import BACK, HEAD, UPLOAD, Exchange, digest_record
from .account import Account, Book, Spending, TrialUse
from .ledger import NOWHERE, VALIDATES, Ledger
from .policy import REPEATS, SitePolicy
from .review import TrialReview, compute_spent, count_uses, passes_of_round

SPLITS = frozenset({"validation", "test"})
"""Samples on which a model may be measured."""
MOMENTS = ("loaded", REESTIMATED)
"""Models that a site measures when it is asked; ``trained`` ones are measured with an upload."""


@dataclass(frozen=True, kw_only=True)
class Asks:
    """Declaration of what a kind of question asks for.

    Attributes:
        answer: kind of the answer.
        facts: names of all facts that the answer may have.
        records: names of all records of arrays that it may have.
        spends: what is counted; None: nothing of the data leaves.
        of_trial: whether it is about a method and seed, which the operator and the policy must allow first.
        steps: whether local steps are taken for an upload; without them it leaves once, before round 1, and is computed
            from all training samples.

    """

    answer: str
    facts: frozenset[str]
    records: frozenset[str] = frozenset()
    spends: Spending | None = None
    of_trial: bool = False
    steps: bool = True


QUESTIONS: Mapping[str, Asks] = MappingProxyType({
    "describe": Asks(
        answer="described", spends="descriptions", facts=frozenset(
            {"name", "version", "shape", "dtype", "classes", "class_names", "columns", "samples", "labels", "task",
             "validates", "scale", "values", "inputs"}
        ),
    ),
    "introduce": Asks(
        answer="introduced", spends="uploads", of_trial=True, records=frozenset({"memory"}),
        facts=frozenset({"name", "round"}), steps=False,
    ),
    "train": Asks(
        answer="trained", spends="uploads", of_trial=True, records=frozenset({"shared", "memory"}),
        facts=frozenset({"name", "round", "weight", "steps", "loss_sum", UPLOAD, "rows"}),
    ),
    "evaluate": Asks(
        answer="evaluated", spends="evaluations", of_trial=True, facts=frozenset({"name", "round", "rows"}),
    ),
    "end": Asks(answer="ended", facts=frozenset({"say"})),
})  # fmt: skip
"""Every kind of question that a site answers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Data and steps that one question about a trial will use.

    Attributes:
        review: the trial, as the site constructed it.
        settings: its settings.
        samples: number of the site's training samples.
        bounds: first and last sample of each batch of a pass.
        steps: local steps of the round, counted from the trial's beginning.
        client: the client's state before the round.
        reached: last round with an earlier upload.

    """

    review: TrialReview
    settings: Settings
    samples: int = 0
    bounds: Bounds = ()
    steps: range = range(0)
    client: ClientState | None = None
    reached: int = 0

    @property
    def distinct(self) -> int:
        """Least number of different samples in the steps, since batches of one pass share none."""
        used = Counter[int]()
        for step in self.steps:
            start, stop = self.bounds[step % len(self.bounds)]
            used[step // len(self.bounds)] += stop - start
        return max(used.values(), default=0)


def name_user() -> str:
    """Return the name of the account that runs this program, or its number where it has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


@dataclass
class Confirmation:
    """Asks the site's operator before the first description and before each method and seed.

    ``ask`` shows a text, asks a question and returns whether the operator agreed. ``who``: the operator.
    """

    ask: Callable[[str, str], bool]
    who: str = field(default_factory=name_user)


@dataclass(kw_only=True)
class Gate:
    """The gate of one site.

    Args:
        policy: the site's policy.
        confirmation: asks the operator; None: nobody is asked.
        account: what the data were used for.
        ledger: the site's record.
        say: called with a line of text.

    """

    policy: SitePolicy
    confirmation: Confirmation | None
    account: Account
    ledger: Ledger
    say: Callable[[str], None]
    _refused: set[str] = field(default_factory=set)
    _back: Mapping[str, int] = field(default_factory=lambda: NOWHERE)
    _moved: tuple[str, int, int] = ("", 0, 0)

    def admit(self, question: Exchange) -> Asks:
        """Return what ``question`` asks for; raise :class:`RefusedMessage` unless it may ask for that here."""
        asks = QUESTIONS.get(question.kind)
        if asks is None:
            raise RefusedMessage(
                f"a question of kind {question.kind!r} declares nothing that this site could allow: it answers "
                f"{', '.join(QUESTIONS)}"
            )
        if asks.spends == "uploads" and self.ledger.role == VALIDATES:
            raise RefusedMessage(f"this site {VALIDATES} (join --validate-only): it trains nothing")
        facts = question.facts["trial"] if asks.of_trial else question.facts
        self.policy.check_asker(question, str(facts.get("experiment", "")))
        if asks.spends:
            self.policy.limits.check_count(asks.spends, self.account.book, 0 if asks.spends == "descriptions" else 1)
        return asks

    def agree(self, review: TrialReview, trial: Mapping[str, Any]) -> None:
        """Raise :class:`RefusedMessage` unless policy and operator allow ``review``, the review of ``trial``."""
        self.policy.limits.check(review, self.account.book)
        whole = {"trial": trial, "coordinator": review.coordinator, "data": self.account.fingerprint}
        refusal = "whoever runs this site does not agree to the experiment"
        self._confirm(whole, review.describe(), "Take part in it?", refusal)

    def check(self, asks: Asks, question: Exchange, work: Work) -> Work:
        """Return ``work`` with the round that was reached before.

        Raises :class:`RefusedMessage` if ``question`` goes beyond the trial's settings, or beyond the policy.
        """
        review, settings, round = work.review, work.settings, question.facts["round"]
        uploads, once = asks.spends == "uploads", asks.spends == "uploads" and not asks.steps
        last = 0 if once else settings.rounds - uploads
        if type(round) is not int or not (not uploads) <= round <= last:
            raise RefusedMessage(
                f"the experiment has {settings.rounds} rounds, and the question is about the model of round {round}"
            )
        splits, moment = question.facts.get("splits", ()), question.facts.get("moment", "loaded")
        after = round + uploads
        measures = settings.is_evaluated(after) and (
            "trained" in settings.moments if uploads else moment in MOMENTS and splits
        )
        if (splits or not uploads) and not (measures and set(splits) <= SPLITS):
            raise RefusedMessage(
                f"nothing is measured on {', '.join(map(str, splits))} samples ({moment}) after round {after} by the "
                "experiment's settings"
            )
        self._count_bytes(review.trial, after, question)
        book = self.account.book
        self._allow(asks, question, work, book)
        if uploads:
            steps = len(work.steps) if asks.steps else None
            self.policy.limits.check_size(work.distinct if asks.steps else work.samples, steps)
            self.policy.limits.check_upload(review.plan, self._count_uses(work, book), book)
        return replace(work, reached=book.trial(review.trial).round)

    def release(self, asks: Asks, question: Exchange, answer: Exchange, work: Work | None) -> Exchange:
        """Return ``answer`` once it is counted and in the ledger.

        Raises :class:`RefusedMessage` if it is not what its kind declares, or if too much was sent meanwhile.
        """
        beyond = [*sorted(answer.facts.keys() - asks.facts), *sorted(answer.arrays.keys() - asks.records)]
        if beyond or answer.kind != asks.answer:
            raise RefusedMessage(
                f"an answer {answer.kind!r} with {', '.join(beyond) or 'nothing else'} is not what a question "
                f"{question.kind!r} declares: it does not leave"
            )
        if asks.spends == "descriptions":
            self._release_description(question, answer)
        elif work is not None:
            self._count_bytes(*self._moved[:2], answer)
            self._count(asks, question, work, answer)
        return answer

    def _count_bytes(self, trial: str, round: int, message: Exchange) -> None:
        """Count the entries of a message in ``round``; raise :class:`RefusedMessage` if the round moves too much."""
        moved = sum(len(array.data) for record in message.arrays.values() for array in record.values())
        if (trial, round) == self._moved[:2]:
            moved += self._moved[2]
        self._moved = trial, round, moved
        self.policy.limits.check_bytes(moved)

    def record(
        self, question: Exchange, answer: Exchange, work: Work | None, coordinator: Mapping[str, Any] | None
    ) -> Exchange:
        """Return ``answer`` with the head of the ledger, in which it stands now.

        ``coordinator``: the head of its own record, which came with the question.
        """
        leaving = list_disclosures(work.review.plan) if work and answer.arrays else ()
        left = [each for each in leaving if each.once is not QUESTIONS[question.kind].steps]
        back = self.ledger.note_coordinator(question, coordinator)
        if back is not self._back:
            self._back = back
            self.say(
                f"the coordinator's record of ledgers had {back['had']} entries, and has {back['has']} now: it was "
                "restored from an older copy, or rewritten"
            )
        head = self.ledger.write(question, answer, left, coordinator, reached=work.reached if work else 0)
        return replace(answer, facts={**answer.facts, HEAD: head.facts(), **({BACK: dict(back)} if back else {})})

    def _release_description(self, question: Exchange, answer: Exchange) -> None:
        told = {key: value for key, value in answer.facts.items() if key != "version"}
        digest = _digest(told)
        lines = describe_description(answer.facts, self.policy.told.describe_counts())
        if digest not in self.account.book.descriptions:
            self.policy.limits.check_count("descriptions", self.account.book)
        whole = {"told": told, "coordinator": question.signer, "data": self.account.fingerprint}
        self._confirm(
            whole, "\n".join(lines), "Tell the coordinator this?",
            "whoever runs this site does not agree to describe its data",
        )  # fmt: skip

        def count(book: Book) -> None:
            if digest not in book.descriptions:
                self.policy.limits.check_count("descriptions", book)
                book.descriptions.append(digest)

        self.account.change(count)
        for line in lines:
            self.say(line)

    def _count(self, asks: Asks, question: Exchange, work: Work, answer: Exchange) -> None:
        """Count ``answer``, unless it is the last one again."""
        name = work.review.trial

        def count(book: Book) -> None:
            self._allow(asks, question, work, book)
            uses = self._count_uses(work, book) if asks.spends == "uploads" else 0
            use = book.trials.setdefault(name, TrialUse())
            again = self._is_again(asks, question, work, use)
            use.last[_key(question)] = _digest_question(question)
            if asks.spends == "uploads":
                use.uploads += not again
                use.evaluations += "rows" in answer.facts and not again
                use.spent += compute_spent(work.review.plan, uses)
                use.steps = max(use.steps, work.steps.stop)
                use.round = max(use.round, question.facts["round"] + asks.steps)
            else:
                use.evaluations += not again

        self.account.change(count)

    def _allow(self, asks: Asks, question: Exchange, work: Work, book: Book) -> None:
        """Raise :class:`RefusedMessage` if the trial, or all that the data took part in, has no answer left."""
        use, review = book.trial(work.review.trial), work.review
        if asks.spends is None or self._is_again(asks, question, work, use):
            return
        uploads = asks.spends == "uploads"
        planned = review.uploads if uploads else (1 + len(MOMENTS)) * review.measured
        sent = use.uploads if uploads else use.evaluations
        if sent >= REPEATS * planned:
            raise RefusedMessage(
                f"the experiment takes {planned} {asks.spends} of this site, and it sent {sent} ({asks.spends})"
            )
        self.policy.limits.check_count(asks.spends, book)

    def _is_again(self, asks: Asks, question: Exchange, work: Work, use: TrialUse) -> bool:
        """Return whether the question was the last of its kind, so that its answer is the same bits."""
        mechanism = find_mechanism((work.review.plan.method.gradient,))
        drawn = asks.spends == "uploads" and mechanism is not None and mechanism.secret
        return not drawn and use.last.get(_key(question)) == _digest_question(question)

    def _count_uses(self, work: Work, book: Book) -> int:
        review, done = work.review, work.client.steps if work.client else 0
        if not work.steps:
            return 0
        passes = passes_of_round(review.plan, work.samples, done, book.trial(review.trial).steps)
        return count_uses(review.plan, passes, review.copies)

    def _confirm(self, whole: Mapping[str, Any], text: str, asked: str, refusal: str) -> None:
        """Raise :class:`RefusedMessage` unless the operator agrees, now or before, to ``whole``, shown as ``text``."""
        if self.confirmation is None:
            return
        digest = _digest(whole)
        if digest in self.account.book.agreed:
            return
        if digest not in self._refused:
            agreed, who = self.confirmation.ask(text, asked), self.confirmation.who
            self.ledger.write_consent(who=who, text=text, agreed=agreed, digest=digest)
            if agreed:
                said = f"{who} at {datetime.now(UTC).isoformat(timespec='seconds')}"
                self.account.change(lambda book: book.agreed.update({digest: said}))
                return
            self._refused.add(digest)
        raise RefusedMessage(refusal)


def describe_description(facts: Mapping[str, Any], counts: str) -> list[str]:
    """Return everything that a description discloses, as lines of text; ``counts``: precision of numbers by class."""
    names, labels = facts["class_names"], facts["labels"]
    shape = " x ".join(map(str, facts["shape"])) or "one value"
    samples = ", ".join(f"{number} {part}" for part, number in facts["samples"].items())
    lines = [
        f"disclosed to the coordinator: name {facts['name']!r}; samples: {samples}; {facts['dtype']} of shape {shape}, "
        f"{', '.join(sorted(set(facts['values'].values()))) or 'of no known kind'}, scaled by "
        f"{facts['scale'] or 'the site itself'}; task {facts['task'].get('name')}",
        f"disclosed to the coordinator: {facts['classes']} "
        f"classes{': ' + ', '.join(names) if names else ', without names'}",
    ]  # fmt: skip
    if facts["columns"]:
        texts = [f"{each['name']} ({', '.join(each['categories'])})" if each["categories"] else each["name"]
                 for each in facts["columns"]]  # fmt: skip
        lines.append(f"disclosed to the coordinator: columns and their categories: {'; '.join(texts)}")
    told = "not disclosed" if labels is None else f"{', '.join(map(str, labels))} ({counts})"
    lines.append(f"disclosed to the coordinator: training samples by class: {told}")
    return lines


def _key(question: Exchange) -> str:
    return f"{question.kind} {question.facts.get('moment', '')}".strip()


def _digest_question(question: Exchange) -> str:
    arrays = {name: digest_record(record) for name, record in question.arrays.items()}
    return _digest({"facts": question.facts, "arrays": arrays})


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
