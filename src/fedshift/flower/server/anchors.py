"""The coordinator's record of the heads of the sites' ledgers; sites write the head of this record into their ledgers.

If a site removes uploads from its ledger and recomputes the chain with its key, the ledger contradicts this record; if
a coordinator removes a line of this record, it contradicts the sites' ledgers.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from ..transport.arrays import RefusedMessage
from ..transport.chain import Chain, Head, read_chain
from ..transport.exchange import BACK

FILE = "ledgers.jsonl"
"""Name of the record in the machines' folder of a run."""


class Anchors:
    """The record of ``experiment`` in file ``path``, signed with the coordinator's ``key``.

    ``say`` is called with a message if a ledger, or this record, has lost entries.
    """

    def __init__(
        self, path: Path, experiment: str, key: ec.EllipticCurvePrivateKey | None, say: Callable[[str], None]
    ) -> None:
        self._chain, self._experiment, self._say = Chain(path, key), experiment, say
        self._heads, self._backs = dict[str, Head](), set[tuple[str, int]]()
        for event in (entry.content for entry in read_chain(path)):
            if event["event"] == "head":
                self._heads[event["site"]] = Head(number=event["at"], digest=event["digest"])
            else:
                self._backs.add((event["site"], event["had"]))

    @property
    def head(self) -> Head:
        """The head of this record."""
        return self._chain.head

    def note(self, site: str, reported: object, back: object = None) -> None:
        """Record the head of the ledger of ``site`` as the site ``reported`` it.

        ``back``: reported by a site that knows more entries of this record (``had``) than it contains (``has``).

        Raises :class:`RefusedMessage` if ``reported`` is not the head of a ledger, or ``back`` is malformed.
        """
        try:
            head = Head.of(reported)
        except ValueError as error:
            raise RefusedMessage(f"it does not report the head of its ledger ({error})") from error
        if back is not None:
            self._note_back(site, back)
        before = self._heads.get(site, Head())
        if head.number <= before.number and head != before:
            self._say(
                f"the ledger of {site} had {before.number} entries and now has {head.number}: it was rewritten, or "
                "restored from an older copy"
            )
        self._heads[site] = head
        event = {"event": "head", "time": _now(), "experiment": self._experiment, "site": site}
        self._chain.append({**event, "at": head.number, "digest": head.digest})

    def _note_back(self, site: str, back: object) -> None:
        """Record, once per site, that this record has lost entries."""
        had, has = (back.get(name) if isinstance(back, dict) else None for name in ("had", "has"))
        if not (type(had) is int and type(has) is int and 0 <= has < had < 2**63):
            raise RefusedMessage("it does not report how many entries this record has lost")
        if (site, had) in self._backs:
            return
        self._backs.add((site, had))
        event = {"event": BACK, "time": _now(), "experiment": self._experiment, "site": site}
        self._chain.append({**event, "had": had, "has": has})
        self._say(
            f"{site} knows {had} entries of the record of ledgers, which had {has} when this run was resumed: the run "
            "directory was restored from an older copy, or the record was rewritten"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
