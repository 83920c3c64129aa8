"""A site's own record: every question of the coordinator and its answer, and who agreed to what.

It is a chain of signed JSON lines (:mod:`..transport.chain`), which a log collector can follow. An answer is sent only
after its line is on disk. Each answer contains the head of the chain, and each question the head of the coordinator's
record of these heads (:mod:`..server.anchors`), so that neither can rewrite its record unnoticed. Questions that nobody
signed are not written, since anyone could fill the disk with them; the account counts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord

from ...results.disclosure import Disclosure, group_disclosures
from ...utils.errors import FedshiftError
from ...utils.version import __version__
from ..transport.arrays import NUMPY_TYPES, RAW_TYPES
from ..transport.chain import Chain, Entry, Head, list_parts, read_chain
from ..transport.exchange import BACK, Exchange

FILE, KEYS = "ledger.jsonl", "ledger.pub"
NOWHERE: Mapping[str, int] = MappingProxyType({})
"""How far the coordinator's record went back if it did not."""
TRAINS, VALIDATES = "trains", "validates only"
"""Roles of a site."""


class Ledger:
    """The ledger in ``folder``; it appends lines signed with the site's ``key``.

    ``role``: what the site does, in words; it is written to each message's line.
    """

    def __init__(self, folder: Path, role: str = TRAINS, key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self.role, self._chain = role, Chain(folder / FILE)
        self._known: set[str] = set()
        # of each experiment: the last run, the most entries of its coordinator's record, and how far that went back
        self._told: dict[str, tuple[int, int, Mapping[str, int]]] = {}
        if key:
            self.sign_with(key)

    def sign_with(self, key: ec.EllipticCurvePrivateKey) -> None:
        """Sign all further lines with ``key``; its public key is kept next to the ledger."""
        _remember(self._chain.path.with_name(KEYS), key.public_key())
        self._chain.key = key

    def write(
        self, asked: Exchange, answer: Exchange, disclosed: Sequence[Disclosure] = (),
        coordinator: Mapping[str, Any] | None = None, reached: int = 0,
    ) -> Head:  # fmt: skip
        """Append a line for the question ``asked`` and its unsent ``answer``; return the head.

        ``disclosed``: what the answer's arrays reveal, and who receives them. ``coordinator``: head of its own record,
        and its version. ``reached``: last round with an earlier upload; a round up to it is marked ``again``.
        """
        trial, round = asked.facts.get("trial"), asked.facts.get("round")
        if asked.kind == "train" and isinstance(round, int):
            round += 1  # the question has the round of the model, where the next round starts
        entry: dict[str, Any] = {
            "event": "message", "time": _now(), "role": self.role, "version": __version__,
            "run": asked.run, "signer": asked.signer,
            "experiment": _experiment_of(asked.facts),
            "asked": asked.kind, "round": round,
            "settings": _digest_json(trial or asked.facts.get("spec")), "answered": answer.kind,
            "told": dict(answer.facts),
        }  # fmt: skip
        entry["left"] = {record: self._describe(entries) for record, entries in answer.arrays.items()}
        entry["discloses"] = list(map(str, group_disclosures(disclosed)))
        entry["coordinator"] = coordinator
        entry["again"] = reached if isinstance(round, int) and round + (asked.kind != "train") <= reached else None
        return self._chain.append(entry)

    def note_coordinator(self, asked: Exchange, head: Mapping[str, Any] | None) -> Mapping[str, int]:
        """Return how many entries the coordinator's own record had and has, if it went back before this run of it.

        A line is appended when that is first seen. Within one run, questions may arrive in another order than they
        were asked. ``head``: where the record ended when ``asked`` was asked.
        """
        experiment, number = _experiment_of(asked.facts), (head or {}).get("number")
        if not experiment or type(number) is not int:
            return NOWHERE
        run, highest, back = self._told.get(experiment) or self._find_told(experiment)
        if asked.run == run:
            self._told[experiment] = run, max(highest, number), back
            return back
        back = MappingProxyType({"had": highest, "has": number}) if number < highest else NOWHERE
        self._told[experiment] = asked.run, number, back
        if back:
            self._chain.append({"event": BACK, "time": _now(), "experiment": experiment, **back})
        return back

    def _find_told(self, experiment: str) -> tuple[int, int, Mapping[str, int]]:
        """Return the last run of ``experiment``, and how many entries the coordinator's record had then."""
        lines = [line for line in self._chain.read_latest() if line["event"] == "message"]
        told = [(line["run"], (line["coordinator"] or {}).get("number", 0)) for line in lines
                if line["experiment"] == experiment]  # fmt: skip
        last = told[-1][0] if told else 0
        return last, max((number for run, number in told if run == last), default=0), NOWHERE

    def write_consent(self, *, who: str, text: str, agreed: bool, digest: str) -> None:
        """Append a line for what the operator ``who`` was shown and answered; ``digest``: of the whole question."""
        self._chain.append(
            {"event": "consent", "time": _now(), "who": who, "agreed": agreed, "shown": text, "question": digest}
        )

    def _describe(self, entries: ArrayRecord) -> dict[str, Any]:
        """Return the number, size and digest of the entries sent, and their names unless an earlier line has them.

        The size counts their values, as in reviews and pages; a message adds a header to each.
        """
        names, content = sorted(entries), sha256()
        for name in names:
            content.update(name.encode() + b"\0" + entries[name].data)
        which = _digest_json(names)
        described = {
            "entries": len(names), "bytes": sum(map(_count_bytes, entries.values())),
            "digest": content.hexdigest(), "names_digest": which,
        }  # fmt: skip
        if which not in self._known:
            self._known.add(which)
            described["names"] = names
        return described


def read_ledger(path: Path, keys: Sequence[ec.EllipticCurvePublicKey] | None = None) -> Iterator[Entry]:
    """Yield the entries of the ledger at ``path``, a file or a site's folder, each after it is verified.

    ``keys``: the site's keys; None: the keys that it wrote next to its ledger.

    Raises :class:`FedshiftError` if there is no ledger, or at the first line that was changed or is not signed.
    """
    file = path / FILE if path.is_dir() else path
    if not list_parts(file):
        raise FedshiftError(f"{file} cannot be read (no such file): name a site's folder (join --state)")
    yield from read_chain(file, read_keys(file.with_name(KEYS)) if keys is None else keys)


def read_keys(path: Path) -> list[ec.EllipticCurvePublicKey]:
    """Return the public keys in the file ``path``, one a line; none if there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    keys = map(serialization.load_ssh_public_key, lines)
    return [key for key in keys if isinstance(key, ec.EllipticCurvePublicKey)]


def compare_anchors(entries: Sequence[Entry], path: Path, name: Path) -> str:
    """Return that a site's ``entries`` and the coordinator's record in ``path`` confirm each other, in words.

    ``name``: the site's folder, for messages.

    Raises :class:`FedshiftError` if they contradict each other: one of them was rewritten.
    """
    record = {entry.number: entry for entry in read_chain(path)}
    own = {entry.number: entry.digest for entry in entries}
    heads = [entry for entry in record.values() if entry.content["event"] == "head"]
    messages = [entry for entry in entries if entry.content["event"] == "message"]
    names = {entry.content["told"].get("name") for entry in messages}
    kept = [head for head in heads if head.content["site"] in names and head.content["at"] >= min(own)]
    for said in (head.content for head in kept):
        if own.get(said["at"]) != said["digest"]:
            raise FedshiftError(
                f"the coordinator was told at {said['time']} that entry {said['at']} of the ledger has the digest "
                f"{said['digest']}, but its digest in {name} is another: the ledger was rewritten"
            )
    if not kept:
        raise FedshiftError(f"{path} knows no entry of {name}: it is another site's, or the ledger was rewritten")
    experiments = {head.content["experiment"] for head in kept}
    backs = [entry.content for entry in (*entries, *record.values()) if entry.content["event"] == BACK]
    backs = [back for back in backs if back["experiment"] in experiments]
    undone = list[int]()
    for entry in messages:
        head = entry.content["coordinator"]
        if not (head and head["number"] and entry.content["experiment"] in experiments):
            continue
        if head["number"] > max(record):
            raise FedshiftError(
                f"entry {entry.number} of {name} was told of {head['number']} lines of the coordinator's record, and "
                f"{path} has {max(record)}: it was copied earlier (bring a new copy), or its last lines were dropped"
            )
        found = record.get(head["number"])
        if found is not None and found.digest == head["digest"]:
            continue
        if not any(back["has"] < head["number"] <= back["had"] for back in backs):
            raise FedshiftError(
                f"entry {entry.number} of {name} was told another head of the coordinator's record than {path} has: "
                "the record was rewritten, or restored from an older copy and never used since"
            )
        undone.append(entry.number)
    confirmed = f"The coordinator's record confirms {len(kept)} entries, and the ledger its heads."
    if not undone:
        return confirmed
    steps = ", ".join(f"at {back['time']} from {back['had']} entries to {back['has']}" for back in backs)
    return (
        f"{confirmed} It lacks {len(undone)} heads that entries {undone[0]} to {undone[-1]} were told, since it went "
        f"back ({steps}): it was restored from an older copy, or rewritten."
    )


def list_versions(entries: Iterable[Entry]) -> list[str]:
    """Describe which versions of fedshift answered and asked, with the first entry of each."""
    last, found = None, list[str]()
    for entry in entries:
        here, there = entry.content.get("version"), (entry.content.get("coordinator") or {}).get("version")
        if here and there and (here, there) != last:
            last = here, there
            found.append(f"from entry {entry.number} on: fedshift {here} here, {there} at the coordinator")
    return found


def count_bytes_left(entry: Entry) -> int:
    """Return the bytes of the entries that left with a line's answer."""
    return sum(int(record["bytes"]) for record in entry.content.get("left", {}).values())


def _experiment_of(facts: Mapping[str, Any]) -> str | None:
    experiment = (facts.get("trial") or facts).get("experiment")
    return experiment if isinstance(experiment, str) else None


def _remember(path: Path, key: ec.EllipticCurvePublicKey) -> None:
    """Add a key to the file of the site's public keys unless it contains the key."""
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    if line not in (path.read_bytes() if path.exists() else b""):
        with path.open("ab") as file:
            file.write(line)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _count_bytes(array: Array) -> int:
    """Return the bytes of an array's values."""
    return prod(array.shape) * {**NUMPY_TYPES, **RAW_TYPES}[array.dtype].itemsize


def _digest_json(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
