"""Disclosures: what leaves a client in each round, as records and in words.

A site's consent, its policy and ledger, ``fedshift inspect`` and a run's page show these same records, which
:func:`fedshift.evaluation.communication.list_disclosures` derives from a method's plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

REVEALS = {
    "update": "nothing beyond the client's update",
    "client": "statistics of the client's data",
    "class": "statistics of single classes of the client's data",
    "image": "single samples of the client's data",
}
"""What a disclosure reveals, in words, from least to most."""
RECEIVERS = {
    "server": "only the server",
    "all": "the server; other clients only as combined over the clients of a round",
    "each": "the server; other clients also as one client sent it",
}
"""Who receives a disclosure, in words."""
MODEL = "the model"
"""Source of the model's entries."""


@dataclass(frozen=True, kw_only=True)
class Disclosure:
    """One tensor that leaves each client in each round.

    Attributes:
        name: its name, as in messages and ledgers.
        source: ``the model``, or the method whose rule sends it.
        shape: its shape.
        dtype: its type, without ``torch.``.
        bytes: its size, without the at most 1,024 bytes in which a message names shape and type.
        reveals: a key of :data:`REVEALS`.
        receivers: a key of :data:`RECEIVERS`.

    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    reveals: str
    receivers: str


@dataclass(frozen=True, kw_only=True)
class DisclosureGroup:
    """Disclosures of one source that reveal the same and have the same receivers."""

    members: tuple[Disclosure, ...]

    @property
    def source(self) -> str:
        """The method that sends them, or the model."""
        return self.members[0].source

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(each.name for each in self.members)

    @property
    def bytes(self) -> int:
        """Their size."""
        return sum(each.bytes for each in self.members)

    @property
    def reveals(self) -> str:
        """What they reveal, in words."""
        return REVEALS[self.members[0].reveals]

    @property
    def receivers(self) -> str:
        """Who receives them, in words."""
        return RECEIVERS[self.members[0].receivers]

    def __str__(self) -> str:
        count = len(self.members)
        what = "entry" if count == 1 else "entries"
        return (
            f"{count} {what} of {self.source}, {self.bytes:,} bytes, which reveal{'s' if count == 1 else ''} "
            f"{self.reveals}; received by {self.receivers}"
        )


def group_disclosures(disclosures: Iterable[Disclosure]) -> tuple[DisclosureGroup, ...]:
    """Return the disclosures in groups, each in its order."""
    groups: dict[tuple[str, str, str], list[Disclosure]] = {}
    for each in disclosures:
        groups.setdefault((each.source, each.reveals, each.receivers), []).append(each)
    return tuple(DisclosureGroup(members=tuple(members)) for members in groups.values())
