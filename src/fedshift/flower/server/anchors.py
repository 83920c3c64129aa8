"""The coordinator's record of where each site's ledger stood, and its own head, which sites write into their ledgers.

A site that drops uploads from its ledger, with its key and the chain recomputed, contradicts this record; a coordinator
that drops a line of this record contradicts the ledgers of sites.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from ..transport.arrays import RefusedMessage
from ..transport.chain import Chain, Head, read_chain

FILE = "ledgers.jsonl"
"""The record in the directory of a run's machines."""


class Anchors:
    """The record of ``experiment`` in file ``path``, signed with the coordinator's ``key``.

    ``say`` tells of a ledger that lost lines.
    """

    def __init__(
        self, path: Path, experiment: str, key: ec.EllipticCurvePrivateKey | None, say: Callable[[str], None]
    ) -> None:
        self._chain, self._experiment, self._say = Chain(path, key), experiment, say
        self._heads = {
            str(entry.content["site"]): Head(number=entry.content["at"], digest=entry.content["digest"])
            for entry in read_chain(path)
        }

    @property
    def head(self) -> Head:
        """The head of this record."""
        return self._chain.head

    def note(self, site: str, told: object) -> None:
        """Write down where the ledger of ``site`` stands, as it ``told``.

        Raises :class:`RefusedMessage` if that is no head of a ledger.
        """
        try:
            head = Head.of(told)
        except ValueError as error:
            raise RefusedMessage(f"it does not say where its ledger stands ({error})") from error
        before = self._heads.get(site, Head())
        if head.number <= before.number and head != before:
            self._say(
                f"the ledger of {site} had {before.number} entries, and has {head.number} now: it was rewritten, or "
                "restored from an older copy"
            )
        self._heads[site] = head
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        said = {"event": "head", "time": time, "experiment": self._experiment, "site": site}
        self._chain.append({**said, "at": head.number, "digest": head.digest})
