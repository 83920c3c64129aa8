"""Messages between coordinator and sites: only facts as JSON and named records of arrays, without pickle.

Between machines, an exchange is the content of a Flower message; between two processes of a site, it is a few blocks of
bytes on a local socket. This module does not import torch: the process that Flower starts for each message only
forwards it to the process with the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

FACTS = "fedshift"
HEAD = "ledger"
"""Fact of a question or an answer: where the record of its sender stands (:class:`.chain.Head`)."""
VERSION = "version"
"""Fact of a question: the coordinator's version of fedshift."""
UPLOAD = "upload"
"""Fact of an upload, and of later questions: its digest, which identifies the client's state."""
BACK = "went_back"
"""Fact of an answer: the coordinator's record had (``had``) more entries before than the question states (``has``)."""
LONGEST_FACTS = 2**24
"""Maximum number of characters in an exchange's facts as JSON."""
LONGEST_ADDRESS = 100
"""Maximum number of bytes in a local socket's path; Linux allows 107."""


def listen_locally(path: Path) -> socket.socket:
    """Return a socket that listens at ``path``, which may have any length."""
    listener = socket.socket(socket.AF_UNIX)
    with _shorten(path) as address:
        listener.bind(address)
    listener.listen(128)
    return listener


def accept_locally(listener: socket.socket) -> Connection:
    """Return the next connection to ``listener``."""
    return Connection(listener.accept()[0].detach())


def connect_locally(path: Path) -> Connection:
    """Return a connection to the socket that listens at ``path``."""
    with socket.socket(socket.AF_UNIX) as made, _shorten(path) as address:
        made.connect(address)
        return Connection(made.detach())


@contextmanager
def _shorten(path: Path) -> Iterator[str]:
    """Yield an address for the socket at ``path``, through its folder's file descriptor if the path is long."""
    if len(os.fsencode(path)) <= LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class MalformedMessage(ValueError):
    """A message that is not from fedshift."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A question or an answer.

    Attributes:
        kind: the kind of question or answer.
        facts: JSON values by name.
        arrays: states by name, such as ``shared``.
        run: number of the Flower run in which it arrived, as the SuperNode reports; not sent between machines.
        signer: fingerprint of the key that signed it, once that is verified; never sent.

    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)
    run: int = 0
    signer: str = ""

    def content(self) -> RecordDict:
        """Return the exchange as the content of a message."""
        facts = ConfigRecord({FACTS: json.dumps({"kind": self.kind, **self.facts})})
        return RecordDict({"config": facts, **self.arrays})

    @staticmethod
    def of(content: RecordDict) -> Exchange:
        """Return the exchange in a message's content; raise :class:`MalformedMessage` if there is none."""
        try:
            config = content.config_records["config"]
            text = config[FACTS]
            if len(content) > 1 + len(content.array_records) or len(config) > 1:
                raise ValueError("it has records that nobody asked for")
            if not isinstance(text, str) or len(text) > LONGEST_FACTS:
                raise ValueError(f"its facts are not a text of at most {LONGEST_FACTS} letters")
            facts = json.loads(text)
            return Exchange(kind=str(facts.pop("kind")), facts=facts, arrays=dict(content.array_records))
        except Exception as error:  # untrusted JSON can make a parser fail in any way
            raise MalformedMessage(f"a message that is not fedshift's ({type(error).__name__}: {error})") from error

    def send(self, connection: Connection) -> None:
        """Write the exchange to a local socket."""
        arrays = {
            record: [(name, array.dtype, array.shape, array.stype) for name, array in content.items()]
            for record, content in self.arrays.items()
        }
        head = {"kind": self.kind, "facts": dict(self.facts), "arrays": arrays, "run": self.run}
        connection.send_bytes(json.dumps(head).encode())
        for content in self.arrays.values():
            for array in content.values():
                connection.send_bytes(array.data)

    @staticmethod
    def receive(connection: Connection) -> Exchange:
        """Read an exchange that :meth:`send` wrote."""
        head = json.loads(connection.recv_bytes())
        arrays = {
            record: ArrayRecord(
                {
                    name: Array(dtype, tuple(shape), stype, connection.recv_bytes())
                    for name, dtype, shape, stype in entries
                }
            )
            for record, entries in head["arrays"].items()
        }
        return Exchange(kind=head["kind"], facts=head["facts"], arrays=arrays, run=head["run"])


def digest_records(records: Mapping[str, ArrayRecord]) -> str:
    """Return a digest of all ``records`` of a message, by their names."""
    digests = {name: digest_record(record) for name, record in records.items()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def digest_record(record: ArrayRecord) -> str:
    """Return a digest of names, declared types and shapes, and bytes of all arrays in ``record``."""
    whole = hashlib.sha256()
    for name, array in record.items():
        head = json.dumps([name, array.dtype, list(array.shape), array.stype, len(array.data)])
        whole.update(head.encode())
        whole.update(array.data)
    return whole.hexdigest()
