"""The clients of an experiment as their coordinator knows them: names, numbers and shapes of samples, no sample."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from ...data.federation import ClientData, Federation
from ...data.files.images import sort_classes
from ...data.files.table_schema import Column, feature_offsets
from ...data.files.tables import number_classes
from ...data.samples import Samples
from ...utils.errors import FedshiftError
from ...utils.files import write_atomically
from ..transport.arrays import NUMPY_TYPES
from .merged_schema import is_possible, merge_columns, parse_columns

MOST_SAMPLES, MOST_VALUES, MOST_CLASSES, LONGEST_NAME = 10**8, 2**30, 10**6, 200
"""Samples of a site's part, values of a sample, classes, and signs of a name: more than any site has."""


@dataclass(frozen=True, kw_only=True)
class SiteDescription:
    """What a site says of itself: see :meth:`fedshift.flower.site.site.Site.answer`."""

    name: str
    version: str
    shape: tuple[int, ...]
    dtype: str
    classes: int
    class_names: tuple[str, ...]
    samples: Mapping[str, int]
    labels: tuple[int, ...] | None
    columns: tuple[Column, ...] = ()

    @staticmethod
    def of(facts: Mapping[str, Any]) -> SiteDescription:
        """From an answer's facts; raises :class:`FedshiftError` where they are not what a site says."""
        try:
            made = SiteDescription(
                name=str(facts["name"]), version=str(facts["version"]), shape=tuple(map(int, facts["shape"])),
                dtype=str(facts["dtype"]), classes=int(facts["classes"]),
                class_names=tuple(map(str, facts["class_names"])),
                samples={str(part): int(number) for part, number in facts["samples"].items()},
                labels=None if facts["labels"] is None else tuple(map(int, facts["labels"])),
                columns=parse_columns(facts.get("columns", ())),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FedshiftError(f"a site describes itself in a way that is not understood ({error!r})") from error
        made._check()
        return made

    def _check(self) -> None:
        """Raise :class:`FedshiftError` where a site cannot be so: the coordinator makes room for what is said."""
        if not (0 < len(self.name) <= LONGEST_NAME and self.name.isprintable()):
            raise FedshiftError(f"a site calls itself {self.name[:LONGEST_NAME]!r}: give it a short name (--name)")
        whole = {"train", "test"} <= self.samples.keys() <= {"train", "validation", "test"}
        if not whole or not all(0 < number <= MOST_SAMPLES for number in self.samples.values()):
            raise FedshiftError(
                f"site {self.name!r} says that it has {dict(self.samples)} samples: it needs some to train on, some to "
                f"test on, and at most {MOST_SAMPLES} of each"
            )
        if self.dtype not in NUMPY_TYPES or min(self.shape, default=1) < 1 or math.prod(self.shape) > MOST_VALUES:
            raise FedshiftError(
                f"site {self.name!r} says that its samples are {self.dtype} of shape {self.shape}: they must be of a "
                f"type that travels, and of at most {MOST_VALUES} values each"
            )
        if not is_possible(self.columns, self.shape):
            raise FedshiftError(
                f"site {self.name!r} says that it has {len(self.columns)} columns: its samples of shape {self.shape} "
                "do not fit them, or their names or categories are not what a table's are"
            )
        labels = self.labels
        counted = labels is None or (len(labels) == self.classes and sum(labels) == self.samples["train"])
        counted = counted and len(self.class_names) in (0, self.classes)
        if not (0 < self.classes <= MOST_CLASSES and counted and min(labels or (0,)) >= 0):
            raise FedshiftError(
                f"site {self.name!r} says that it has {self.classes} classes: its labels do not fit them"
            )


class RemoteFederation(Federation):
    """Clients whose samples are on other machines; here each sample is a zero and each label a count's."""

    @override
    @property
    def fingerprint(self) -> str:
        """What samples are: each site knows for itself whether its data are those that it began with."""
        dtype = self.clients[0].train.store.dtype
        columns = "".join(f", {column.name} {column.categories or ''}" for column in self.columns)
        return f"{self.sample_shape} {dtype}, {self.classes} classes {' '.join(self.class_names)}{columns}"


@dataclass(frozen=True, kw_only=True)
class ClientRegistry:
    """Which clients take part in the experiment ``experiment``, in the order in which they were admitted."""

    experiment: str
    clients: tuple[SiteDescription, ...] = ()

    @staticmethod
    def empty() -> ClientRegistry:
        """Nobody yet."""
        return ClientRegistry(experiment=secrets.token_hex(8))

    @staticmethod
    def read(path: Path) -> ClientRegistry:
        """What :meth:`write` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return ClientRegistry(experiment=found["experiment"], clients=tuple(map(SiteDescription.of, found["clients"])))

    def write(self, path: Path) -> None:
        """Write atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"experiment": self.experiment, "clients": [asdict(client) for client in self.clients]}
        write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())

    def add_clients(self, found: Iterable[SiteDescription], order: Sequence[str] = ()) -> ClientRegistry:
        """With those of ``found`` that are not in yet, in ``order`` as far as it goes, then by name."""
        known = {client.name for client in self.clients}
        place = {name: number for number, name in enumerate(order)}
        fresh = sorted(
            (client for client in found if client.name not in known),
            key=lambda client: (place.get(client.name, len(place)), client.name),
        )
        return replace(self, clients=(*self.clients, *fresh))

    def to_federation(self, classes: int | None) -> RemoteFederation:
        """The clients as a federation; ``classes``: how many there are, where the experiment says.

        Raises :class:`FedshiftError` naming two sites whose samples, columns or classes do not go together.
        """
        first = self.clients[0]
        for other in self.clients[1:]:
            if bool(other.columns) != bool(first.columns):
                raise FedshiftError(
                    f"of {first.name!r} and {other.name!r} only one has a table: give the data of all sites in the "
                    "same way"
                )
            if (not first.columns and other.shape != first.shape) or other.dtype != first.dtype:
                raise FedshiftError(
                    f"samples of {first.name!r} are {first.dtype} of shape {first.shape}, those of {other.name!r} "
                    f"{other.dtype} of shape {other.shape}: bring all to one shape (image_size in the settings, or "
                    "the same columns)"
                )
            if bool(other.class_names) != bool(first.class_names):
                raise FedshiftError(
                    f"of {first.name!r} and {other.name!r} only one has classes with names: give the data of all sites "
                    "in the same way"
                )
        columns = merge_columns({client.name: client.columns for client in self.clients})
        names, alike = self._class_names()
        found = max(len(names), *(client.classes for client in self.clients))
        if columns and (not alike or all(map(str.isdecimal, names))):
            found, _, names = number_classes(names, "the label", classes)
        if classes is not None and classes < found:
            raise FedshiftError(f"classes={classes}, but the sites have {found}: ask for as many")
        whole = RemoteFederation(name="sites", clients=(), classes=classes or found, class_names=names, columns=columns)
        return replace(whole, clients=tuple(_make_client(client, whole) for client in self.clients))

    def _class_names(self) -> tuple[tuple[str, ...], bool]:
        """Names of the classes of all sites, and whether each site has them all."""
        kinds = {client.class_names for client in self.clients}
        alike = len(kinds) == 1
        return (kinds.pop() if alike else sort_classes({name for kind in kinds for name in kind})), alike


def _make_client(described: SiteDescription, data: Federation) -> ClientData:
    """As a client; its labels count among those of all ``data``, as the site's own do (``local_data.meaning``)."""
    names, shape = data.meanings, (feature_offsets(data.columns)[-1],) if data.columns else described.shape
    strange = set(described.class_names).difference(names)
    if strange:
        raise FedshiftError(
            f"site {described.name!r} has a class {min(strange)!r}, which is not how labels are written"
        )
    own = torch.tensor([names.index(name) for name in described.class_names] or range(described.classes))
    zero = torch.zeros((1, *shape), dtype=getattr(torch, described.dtype))

    def split(part: str, number: int) -> Samples:
        counted = part == "train" and described.labels
        y = own.repeat_interleave(torch.tensor(described.labels)) if counted else torch.zeros(number).long()
        return Samples(x=zero, y=y, rows=torch.zeros(number, dtype=torch.int64))

    return ClientData(name=described.name, **{part: split(part, n) for part, n in described.samples.items()})
