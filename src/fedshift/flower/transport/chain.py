"""Records that are only appended to: JSON lines in a chain of digests, each signed with the writer's key.

Each line has a number and the SHA-256 of the line before, so that lines changed, removed or inserted later are
detected. Whoever recomputes the whole chain cannot sign it; whoever holds the key, too, cannot change the heads (number
and digest of the last line) that others keep. A file that grows beyond :data:`MOST_BYTES` is renamed after its last
number, and the chain goes on in a new one. The last line may be incomplete after a crash; it is removed.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ...utils.errors import FedshiftError, UsageError
from .signatures import SCHEME, fingerprint

BEGINNING = "0" * 64
"""The first line's value in place of a digest."""
MOST_BYTES = 2**24
"""Size beyond which a file is renamed and another one begun."""
_SIGNATURE = b', "signature": "'


@dataclass(frozen=True, kw_only=True)
class Head:
    """Where a chain ends: the number and digest of its last line; 0 for a chain without lines."""

    number: int = 0
    digest: str = BEGINNING

    def facts(self) -> dict[str, Any]:
        """Return the head as JSON values."""
        return {"number": self.number, "digest": self.digest}

    @staticmethod
    def of(facts: object) -> Head:
        """Return the head in what another machine sent; raise ``ValueError`` if there is none."""
        if not isinstance(facts, dict) or facts.keys() != {"number", "digest"}:
            raise ValueError("it has no number and digest")
        number, digest = facts["number"], facts["digest"]
        if type(number) is not int or not 0 <= number < 2**63 or not isinstance(digest, str) or len(digest) != 64:
            raise ValueError("its number or digest is invalid")
        int(digest, 16)
        return Head(number=number, digest=digest)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A verified line: its ``number`` from 1, its ``digest``, its ``content``, and the key that ``signed`` it or ""."""

    number: int
    digest: str
    content: Mapping[str, Any]
    signed: str


class Chain:
    """The chain in file ``path`` and in the files into which it was rotated; ``key`` signs what is appended."""

    def __init__(self, path: Path, key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self.path, self.key = path, key
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # the program was killed while writing
            with path.open("r+b") as file:
                file.truncate(len(whole))
        earlier = [part for part in list_parts(path) if part != path][-1:]
        lines = whole.splitlines() or [line for part in earlier for line in part.read_bytes().splitlines()]
        self.head = Head()
        if lines:
            last = _read_line(lines[-1], path, len(lines))
            self.head = Head(number=int(last["number"]), digest=_digest(lines[-1]))

    def append(self, content: Mapping[str, Any]) -> Head:
        """Write a line to disk; return the chain's new head."""
        if self.path.exists() and self.path.stat().st_size > MOST_BYTES:
            self.path.rename(self.path.with_stem(f"{self.path.stem}-{self.head.number:09}"))
        number, key = self.head.number + 1, self.key
        whose = fingerprint(key.public_key()) if key else ""
        link = {"number": number, "previous": self.head.digest, "key": whose}
        line = json.dumps({**content, **link}).encode()
        if key:
            signature = base64.b64encode(key.sign(line, SCHEME))
            line = line[:-1] + _SIGNATURE + signature + b'"}'
        with self.path.open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.head = Head(number=number, digest=_digest(line))
        return self.head

    def read_latest(self) -> list[dict[str, Any]]:
        """Return the lines of the current file and of the one before it, unverified."""
        parts = list_parts(self.path)[-2:]
        return [
            _read_line(line, part, place)
            for part in parts
            for place, line in enumerate(part.read_bytes().splitlines(), 1)
        ]


def list_parts(path: Path) -> list[Path]:
    """Return the files of the chain whose current file is ``path``, in order."""
    return [*sorted(path.parent.glob(f"{path.stem}-?????????{path.suffix}")), *([path] if path.exists() else [])]


def read_chain(path: Path, keys: Sequence[ec.EllipticCurvePublicKey] = ()) -> Iterator[Entry]:
    """Yield the lines of the chain in ``path``, each after it is verified.

    ``keys``: the writer's keys; each line must be signed with one of them. Without keys, signatures are not verified.

    Raises :class:`FedshiftError` at the first line that was changed, or that none of ``keys`` signed.
    """
    known, last = {fingerprint(key): key for key in keys}, None
    for part in list_parts(path):
        for place, line in enumerate(part.read_bytes().splitlines(), 1):
            content = _read_line(line, part, place)
            number, previous = content["number"], content["previous"]
            if last is None and number > 1:
                last = Head(number=number - 1, digest=previous)  # earlier files were taken elsewhere
            last = last or Head()
            if (number, previous) != (last.number + 1, last.digest):
                raise FedshiftError(
                    f"{part}: line {place} does not follow the line before it: one of them was changed, or lines "
                    "between them were removed or added"
                )
            if known:
                _verify(line, known.get(content["key"]), f"{part}: line {place}")
            last = Head(number=number, digest=_digest(line))
            yield Entry(number=number, digest=last.digest, content=content, signed=content["key"] if known else "")


def load_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key in ``path``, which holds a public key, a private key or a certificate."""
    from cryptography import x509

    content = path.read_bytes()
    for load in (
        serialization.load_ssh_public_key,
        lambda data: serialization.load_ssh_private_key(data, None).public_key(),
        lambda data: x509.load_pem_x509_certificate(data).public_key(),
    ):
        try:
            key = load(content)
        except (ValueError, UnsupportedAlgorithm):
            continue
        if isinstance(key, ec.EllipticCurvePublicKey):
            return key
    raise UsageError(f"{path} is neither a site's key nor a certificate: give the .pub file that `fedshift pki` made")


def _verify(line: bytes, key: ec.EllipticCurvePublicKey | None, where: str) -> None:
    body, found, signature = line.rpartition(_SIGNATURE)
    try:
        if not found or key is None:
            raise ValueError("no signature")
        key.verify(base64.b64decode(signature.removesuffix(b'"}')), body + b"}", SCHEME)
    except (ValueError, InvalidSignature) as error:
        raise FedshiftError(
            f"{where} is not signed with the writer's key: it was changed, or written by someone else"
        ) from error


def _read_line(line: bytes, part: Path, place: int) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(line)
        if type(content["number"]) is not int or not isinstance(content["previous"] + content["key"], str):
            raise TypeError("number, previous or key")
    except (ValueError, TypeError, KeyError) as error:
        raise FedshiftError(f"{part}, line {place} was changed: it is not an entry of a ledger") from error
    return content


def _digest(line: bytes) -> str:
    return sha256(line).hexdigest()
