"""Messages between coordinator and sites: facts as JSON, and named records of arrays; nothing else, no pickle.

Between machines an exchange is the content of one of Flower's messages; between two processes of a site it is a few
blocks of bytes on a local socket. Nothing here imports torch: the process that Flower starts for each message only
forwards it to the one that holds the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

FACTS = "fedshift"


class MalformedMessage(ValueError):
    """A message that is not fedshift's."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A question or an answer.

    Attributes:
        kind: the kind of question or answer.
        facts: JSON values by name.
        arrays: states by name, such as ``shared``.
        run: the number of Flower's run in which it arrived, from the SuperNode; not sent between machines.

    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)
    run: int = 0

    def content(self) -> RecordDict:
        """Return the exchange as the content of a message."""
        facts = ConfigRecord({FACTS: json.dumps({"kind": self.kind, **self.facts})})
        return RecordDict({"config": facts, **self.arrays})

    @staticmethod
    def of(content: RecordDict) -> Exchange:
        """Return the exchange in a message's content; raise :class:`MalformedMessage`."""
        try:
            facts = json.loads(str(content.config_records["config"][FACTS]))
            return Exchange(kind=str(facts.pop("kind")), facts=facts, arrays=dict(content.array_records))
        except Exception as error:  # whatever JSON can do to a parser
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
