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
from ..transport.exchange import BACK

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
        self._heads, self._backs = dict[str, Head](), set[tuple[str, int]]()
        for said in (entry.content for entry in read_chain(path)):
            if said["event"] == "head":
                self._heads[said["site"]] = Head(number=said["at"], digest=said["digest"])
            else:
                self._backs.add((said["site"], said["had"]))

    @property
    def head(self) -> Head:
        """The head of this record."""
        return self._chain.head

    def note(self, site: str, told: object, back: object = None) -> None:
        """Write down where the ledger of ``site`` stands, as it ``told``.

        ``back``: how many entries of this record the site knew of (``had``), where it has fewer now (``has``).

        Raises :class:`RefusedMessage` if ``told`` is no head of a ledger, or ``back`` no such numbers.
        """
        try:
            head = Head.of(told)
        except ValueError as error:
            raise RefusedMessage(f"it does not say where its ledger stands ({error})") from error
        if back is not None:
            self._note_back(site, back)
        before = self._heads.get(site, Head())
        if head.number <= before.number and head != before:
            self._say(
                f"the ledger of {site} had {before.number} entries, and has {head.number} now: it was rewritten, or "
                "restored from an older copy"
            )
        self._heads[site] = head
        said = {"event": "head", "time": _now(), "experiment": self._experiment, "site": site}
        self._chain.append({**said, "at": head.number, "digest": head.digest})

    def _note_back(self, site: str, back: object) -> None:
        """Write down, once for each site, that this record went back."""
        had, has = (back.get(name) if isinstance(back, dict) else None for name in ("had", "has"))
        if not (type(had) is int and type(has) is int and 0 <= has < had < 2**63):
            raise RefusedMessage("it does not say how far this record went back")
        if (site, had) in self._backs:
            return
        self._backs.add((site, had))
        said = {"event": BACK, "time": _now(), "experiment": self._experiment, "site": site}
        self._chain.append({**said, "had": had, "has": has})
        self._say(
            f"{site} knows {had} entries of the record of ledgers, which had {has} when this run was continued: its "
            "directory was restored from an older copy, or the record was rewritten"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
