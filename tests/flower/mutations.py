"""Mutated answers of a site that holds a valid key, and what becomes of each.

    python -m tests.flower.mutations --answers 10000

One of three sites answers every question with a true answer into which a few faults were put: anything in place of a
fact, bits of entries turned over, entries and records renamed, text cut or gone on with. Each experiment has another
method and loses no other site. Of fifty answers one is a description, in an experiment of one round. All follows from
the seed. An answer is refused (with the site's name), or used because what it says could be true; there is no third.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedshift.flower.server import nodes
from fedshift.flower.transport.exchange import FACTS
from tests.flower.sites import Heard, SiteGrid, coordinator, sites_of, spec_for

PHOTO, NAME, OTHERS = 2, "photo", ("pen", "print")
METHODS = ("fedavg", "scaffold", "fedper", "fpl", "fednova", "ditto", "fedproto", "feddyn")
ROUNDS = 245
"""Rounds of an experiment, each of an upload and measurements; with ten descriptions before it, 500 answers."""
DESCRIPTIONS = 10
KINDS = (
    "Flower cannot read its answer", "a message that is not fedshift's", "report of training is malformed",
    "report of measurements is malformed", "it answered ", "it sent no (shared|memory)",
    "it sent an unexpected record", "is not read", "takes .* bytes", "NaN or infinity", "is not in NumPy's format",
    "is declared as", "cannot be read", "lacks entry", "which does not belong there", "has shape", "has type",
    "times as long", "samples in .* steps", "counts are impossible", "it measured ", "has .* bytes, and the method",
    "the name of a site", "description is malformed", "' reports ",
    "does not have its key", "axes", "class, column or category", "measured one model twice",
    "task ", "the head of its ledger",
)  # fmt: skip
"""Reasons of refusals, as patterns."""
DEEP = "[" * 100_000 + "]" * 100_000
EVIL = (
    None, True, "many", "", -1, 0, 2**63, 10**400, 1e308, -1e-300, float("inf"), float("nan"), [], {}, [[1]], [None],
    "\x1b[2J\x1b]0;owned\x07", "x" * 100_000, "\N{RIGHT-TO-LEFT OVERRIDE}", {"a": {"b": [1, 2]}},
)  # fmt: skip
COMPLAINT = re.compile(
    r"(?:round \d+: )?photo (?:is left out|is not measured|is not admitted): (?P<why>.*)"
    r"|photo \(node number 2\) (?:does not take part:|claims to be) (?P<outside>.*)"
)
"""A refusal with the site's name, which for a node that has not yet described itself is that of its key."""


@dataclass
class Outcome:
    """Counts of answers; ``ended``: the errors of experiments that ended; ``silent``: neither refused nor used."""

    answers: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    used: Counter = field(default_factory=Counter)
    ended: list[str] = field(default_factory=list)
    others_lost: int = 0
    went_back: int = 0
    notices: list[str] = field(default_factory=list)

    @property
    def silent(self):
        """Answers that were neither refused nor used, but for those of rounds that were repeated."""
        return self.answers.total() - self.refused.total() - self.used.total()

    @property
    def holds(self):
        """Whether nothing ended, no other site lost a round, and each refusal has the site's name."""
        return not (self.ended or self.others_lost or self.silent)


def mutate(random, answer):
    """Return an answer with a few faults: anything in place of facts, bits of entries turned over, entries renamed."""
    facts, arrays = {"kind": answer.kind, **json.loads(json.dumps(answer.facts))}, dict(answer.arrays)
    for _ in range(random.randint(1, 3)):
        where = random.choice(["facts", "rows", "text", "entry", "record"])
        if where == "facts":
            facts[random.choice([*facts, "more"])] = random.choice(EVIL)
        elif where == "rows" and isinstance(facts.get("rows"), list) and facts["rows"]:
            row = random.choice(facts["rows"])
            if isinstance(row, dict):
                row[random.choice([*row, "more"])] = random.choice(EVIL)
        elif where == "record" and arrays:
            record = random.choice(list(arrays))
            arrays[random.choice(["shared", "memory", "more"])] = arrays.pop(record)
        elif where == "entry" and arrays:
            record = random.choice(list(arrays))
            if isinstance(arrays[record], ArrayRecord) and arrays[record]:
                arrays[record] = _mutate_entry(random, dict(arrays[record]))
    said = json.dumps(facts)
    if random.random() < 0.2:
        place = random.randrange(len(said))
        said = said[:place] + random.choice(["", "}", "[", "\\", "9" * 500, DEEP, "\x00"]) + said[place + 1 :]
    return RecordDict({"config": ConfigRecord({FACTS: said}), **arrays})


def _mutate_entry(random, entries):
    name = random.choice(list(entries))
    array, data = entries[name], bytearray(entries[name].data)
    for _ in range(random.randint(0, 8)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    entries[random.choice([name, name, name, "more"])] = Array(
        random.choice([array.dtype] * 4 + ["float64", "object", ""]),
        random.choice([array.shape] * 4 + [(), (-1,), (2**31 - 1,), (0,)]),
        random.choice([array.stype] * 4 + ["pickle", ""]),
        bytes(data[: random.choice([None, None, None, random.randrange(len(data))])]),
    )
    return ArrayRecord(entries)


def key_of(node):
    """Return what stands for the key of ``node``."""
    return f"key {node}".encode()


class KeyedGrid(SiteGrid):
    """Says which node holds which key, as Flower's grid does."""

    def get_nodes(self):
        """Return the connected nodes."""
        return [
            SimpleNamespace(node_id=node, last_activated_at="", public_key=key_of(node)) for node in self.get_node_ids()
        ]


def run(folder, seed, outcome, *, rounds, kinds=("train", "evaluate")):
    """Run one experiment in ``folder`` whose answers of ``kinds`` are mutated, and count into ``outcome``."""
    dice = random.Random(f"mutations {seed} {kinds}")
    spec = spec_for(METHODS[seed % len(METHODS)], rounds=rounds, evaluate_every=1, samples=8, model="fnn2")
    grid, heard, known, answers = KeyedGrid(sites_of(spec, folder)), Heard(), {}, Counter()

    def tamper(node, question, answer):
        if node != PHOTO or question.kind not in kinds:
            return answer
        answers[question.kind] += 1
        if answer.kind == "refused":  # it lost a round: what it would have said
            before = known[question.kind]
            answer = replace(before, facts=before.facts | {"round": answer.facts.get("round", 0)})
        known[question.kind] = answer
        return mutate(dice, answer)

    grid.tamper = tamper
    served = coordinator(spec, grid, folder / "served", heard, clients=2)
    served.nodes.keys = lambda: {site.name: key_of(node) for node, site in grid.sites.items()}
    try:
        finished = served.run()
    except Exception as error:
        outcome.ended.append(f"seed {seed}, {spec.method}: {type(error).__name__}: {error}")
    else:
        if not finished or len({done.round for done in heard.rounds}) < rounds:
            outcome.ended.append(f"seed {seed}, {spec.method}: {len(heard.rounds)} of {rounds} rounds")
    for done in heard.rounds:
        took_part, measured = set(done.participants), {row["client"] for row in done.rows if row["split"] == "test"}
        outcome.others_lost += len(set(OTHERS) - took_part) + len(set(OTHERS) - measured)
        if "train" in kinds:
            outcome.used["uploads"] += NAME in took_part
            outcome.used["measurements"] += NAME in measured
    outcome.answers += answers
    complaints = [found["why"] or found["outside"] for text in heard.notices if (found := COMPLAINT.fullmatch(text))]
    outcome.refused.update(map(shorten, complaints))
    if "describe" in kinds:
        outcome.used["descriptions"] += any(text.startswith("photo is connected") for text in heard.notices)
    outcome.went_back += sum("going back to the previous model" in text for text in heard.notices)
    outcome.notices += heard.notices


def shorten(why):
    """Return the kind of reason ``why`` is, without values."""
    for kind in KINDS:
        if re.search(kind, why):
            return kind
    return "another: " + why[:100]


def main():
    """Mutate as many answers as asked for, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcome, seed, began = Outcome(), given.seed, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        for number in ("_run_id", "_node_id", "_task_id"):
            patch.setattr(TaskIdentity, number, 1)
        patch.setattr(nodes, "POLL", 0.0)
        while (left := given.answers - outcome.answers.total()) > 0:
            with tempfile.TemporaryDirectory() as folder:
                for number in range(min(DESCRIPTIONS, left)):
                    place = Path(folder, f"description-{number}")
                    run(place, 1000 * seed + number, outcome, rounds=1, kinds=("describe",))
                rounds = min(ROUNDS, (left - DESCRIPTIONS + 1) // 2)
                if rounds > 0:
                    run(Path(folder, "rounds"), seed, outcome, rounds=rounds)
            seed += 1
            print(f"{outcome.answers.total()} answers, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"{outcome.answers.total()} mutated answers: {dict(outcome.answers)}")
    print(f"refused: {outcome.refused.total()}")
    for why, number in outcome.refused.most_common():
        print(f"{number:7} {why}")
    print(f"used, since they could be true: {outcome.used.total()} {dict(outcome.used)}")
    print(f"neither refused nor used: {outcome.silent}; rounds that were repeated: {outcome.went_back}")
    print(f"rounds without another site: {outcome.others_lost}; ended experiments: {len(outcome.ended)}")
    for text in outcome.ended:
        print(f"  {text}")
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
