"""What the coordinator knows of an experiment's clients: names, and numbers and shapes of samples, but no samples.

Columns and labels of tables at several sites are merged as if one process read all tables. A model identifies an input
by its position, so all sites must have the same columns. Each site reports their names and, for text columns, their
categories; every site reads its table with the sorted union of these categories.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import override

from ...config.spec import CompareSpec, RunSpec
from ...data.agreement import KINDS, refuse_other_labels, refuse_other_scales
from ...data.columns import Column, Holds
from ...data.federation import PLURALS, ClientData, Federation
from ...data.files.images import sort_classes
from ...data.files.table_schema import MOST_CATEGORIES, feature_offsets
from ...data.readers.tables import number_classes
from ...data.samples import Samples
from ...experiments.factory import make_settings
from ...experiments.settings import Settings
from ...tasks import CLASSIFICATION, TASKS, Task, describe_task, restore_task
from ...tasks.classification import FEW_CLASSES, MOST_CLASSES
from ...utils.checked_json import read_checked, write_checked
from ...utils.errors import FedshiftError, UsageError
from ...utils.words import join_some
from ..transport.arrays import NUMPY_TYPES

MOST_SAMPLES, MOST_VALUES, MOST_AXES, LONGEST_NAME, LONGEST_TEXT = 10**8, 2**30, 8, 200, 2000
"""Limits that no real site reaches: samples in a split, values and axes of a sample, characters in a site's name,
and characters in names of classes, columns and categories."""


ONE_PIXEL = (1, 1, 1)
"""Shape of the blank masks made for samples at other sites; the masks are never read."""


@dataclass(frozen=True, kw_only=True)
class SiteDescription:
    """A site's description of itself (see :meth:`fedshift.flower.site.site.Site.answer`)."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    name: str
    version: str
    shape: tuple[int, ...]
    dtype: str
    classes: int
    class_names: tuple[str, ...]
    samples: Mapping[str, int]
    labels: tuple[int, ...] | None
    columns: tuple[Column, ...] = ()
    task: Mapping[str, Any] = field(default_factory=lambda: describe_task(CLASSIFICATION))
    """The federation's task: its name and fields."""
    scale: str = ""
    """Name of its samples' scaling in :data:`~fedshift.data.sources.SCALES`; empty if its samples determine it."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Kind of values of each split (:data:`~fedshift.data.agreement.KINDS`)."""
    validates: bool = False
    """True for a site that only validates: it trains nothing, and reports only its number of test samples."""

    @staticmethod
    def of(facts: Mapping[str, Any]) -> SiteDescription:
        """Return the description in an answer's facts; raise :class:`FedshiftError` if it is malformed."""
        try:
            made = _DESCRIPTION.validate_python(facts)
            made._check()
        except ValidationError as error:
            why = "; ".join(f"{'.'.join(map(str, each['loc']))!r}: {each['msg']}" for each in error.errors())
            raise FedshiftError(f"a site describes itself in a way that is not understood ({why})") from error
        except FedshiftError:
            raise
        except Exception as error:
            raise FedshiftError(
                f"a site describes itself in a way that is not understood ({type(error).__name__}: {error})"
            ) from error
        return made

    def _check(self) -> None:
        """Raise :class:`FedshiftError` if a description is impossible; the coordinator allocates memory based on it."""
        if not (0 < len(self.name) <= LONGEST_NAME and self.name.isprintable()):
            raise FedshiftError(f"a site calls itself {self.name[:LONGEST_NAME]!r}: give it a short name (--name)")
        texts = [*self.class_names, self.version, self.scale]
        texts += [text for column in self.columns for text in (column.name, *(column.categories or ()))]
        strange = next((text for text in texts if not text.isprintable() or len(text) > LONGEST_TEXT), None)
        if strange is not None:
            raise FedshiftError(
                f"site {self.name!r} has a class, column or category {strange[:LONGEST_NAME]!r}: it must have at most "
                f"{LONGEST_TEXT} letters, all printable"
            )
        if ":" not in str(self.task.get("name")):  # a name with a colon is a user's task, which the settings name
            restore_task(self.task)
        whole = {"train", "test"} <= self.samples.keys() <= {"train", "validation", "test"}
        if self.validates:
            whole = self.samples.keys() == {"test"} and self.labels is None
        if not whole or not all(0 < number <= MOST_SAMPLES for number in self.samples.values()):
            raise FedshiftError(
                f"site {self.name!r} says that it has {dict(self.samples)} samples: it needs some to train on "
                f"(unless it validates only), some to test on, and at most {MOST_SAMPLES} of each"
            )
        if len(self.shape) > MOST_AXES:
            raise FedshiftError(f"site {self.name!r} says that its samples have {len(self.shape)} axes")
        if self.dtype not in NUMPY_TYPES or min(self.shape, default=1) < 1 or math.prod(self.shape) > MOST_VALUES:
            raise FedshiftError(
                f"site {self.name!r} says that its samples are {self.dtype} of shape {self.shape}: they must be of a "
                f"type that travels, and of at most {MOST_VALUES} values each"
            )
        if not set(self.values.values()) <= set(KINDS) or not self.values.keys() <= {"train", "validation", "test"}:
            raise FedshiftError(f"site {self.name!r} says that its samples hold {dict(self.values)}: not known here")
        if not _fit_shape(self.columns, self.shape):
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


_DESCRIPTION = TypeAdapter(SiteDescription)
COLUMNS = TypeAdapter(tuple[Column, ...])
"""Parses transmitted columns: each has a ``name`` and ``categories`` (None for numbers)."""


class RemoteFederation(Federation):
    """Clients whose samples are on other machines; here, samples are zeros, and only the counts of labels are real."""

    @override
    @property
    def fingerprint(self) -> str:
        """Shape, type and classes of samples; each site checks for itself that its data have not changed."""
        dtype = self.clients[0].train.dtype
        columns = "".join(f", {column.name} {column.categories or ''}" for column in self.columns)
        task = "" if self.task == CLASSIFICATION else f", {describe_task(self.task)}"
        return f"{self.sample_shape} {dtype}, {self.classes} classes {' '.join(self.class_names)}{columns}{task}"


@dataclass(frozen=True, kw_only=True)
class ClientRegistry:
    """The clients of ``experiment``, in order of admission."""

    experiment: str = field(default_factory=lambda: secrets.token_hex(8))
    clients: tuple[SiteDescription, ...] = ()

    @staticmethod
    def read(path: Path) -> ClientRegistry:
        """Read a registry that :meth:`write` wrote; raise :class:`FedshiftError` if it is damaged."""
        found = read_checked(path, "start a new experiment: without it sites are not known again")
        return ClientRegistry(experiment=found["experiment"], clients=tuple(map(SiteDescription.of, found["clients"])))

    @property
    def training(self) -> tuple[SiteDescription, ...]:
        """The clients that train: all except those that only validate."""
        return tuple(client for client in self.clients if not client.validates)

    @property
    def validating(self) -> tuple[str, ...]:
        """Names of the clients that only validate, which are newcomers to the experiment."""
        return tuple(client.name for client in self.clients if client.validates)

    @property
    def versions(self) -> str:
        """The versions of fedshift of the clients, in words."""
        ran = dict.fromkeys(client.version for client in self.clients)
        names = {version: [client.name for client in self.clients if client.version == version] for version in ran}
        return ", ".join(f"{version} ({join_some(names[version])})" for version in ran)

    def update_versions(self, known: Mapping[str, SiteDescription]) -> ClientRegistry:
        """Return the registry with the versions that the clients in ``known`` have now."""
        clients = (
            replace(client, version=known[client.name].version) if client.name in known else client
            for client in self.clients
        )
        return replace(self, clients=tuple(clients))

    def make_settings(self, spec: RunSpec | CompareSpec) -> Settings:
        """Return the settings of ``spec``, with clients that only validate as newcomers, so that they never train."""
        made = make_settings(spec, tuple(client.name for client in self.clients))
        return replace(made, newcomers=tuple(dict.fromkeys((*made.newcomers, *self.validating))))

    def write(self, path: Path) -> None:
        """Write the registry atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"experiment": self.experiment, "clients": [asdict(client) for client in self.clients]}
        write_checked(path, content)

    def add_clients(self, found: Iterable[SiteDescription], order: Sequence[str] = ()) -> ClientRegistry:
        """Return the registry with the new clients in ``found``: those in ``order`` first, then the others by name."""
        known = {client.name for client in self.clients}
        place = {name: number for number, name in enumerate(order)}
        fresh = sorted(
            (client for client in found if client.name not in known),
            key=lambda client: (place.get(client.name, len(place)), client.name),
        )
        return replace(self, clients=(*self.clients, *fresh))

    def to_federation(self, classes: int | None, task: str | None = None) -> RemoteFederation:
        """Return the clients as a federation; ``classes`` and ``task``: from the experiment's settings, if given.

        Raises :class:`FedshiftError` naming two sites whose samples, columns, tasks or classes are incompatible.
        """
        first = self.clients[0]
        kind = restore_task(first.task, TASKS.parse(task) if task else None)
        for other in self.clients[1:]:
            asked = restore_task(other.task, kind)
            if describe_task(asked) != describe_task(kind):
                raise FedshiftError(
                    f"targets of {first.name!r} are for {_spell(kind)}, those of {other.name!r} for "
                    f"{_spell(asked)}: read the data of all sites alike (task in the settings; of numbers give "
                    "mean and deviation, which sites do not share: 'regression(standardize=((0.0, 1.0),))')"
                )
            if kind != CLASSIFICATION and (other.classes, other.class_names) != (first.classes, first.class_names):
                raise FedshiftError(
                    f"{first.name!r} has {first.classes} {PLURALS[kind.output]} {', '.join(first.class_names)}, and "
                    f"{other.name!r} {other.classes} {', '.join(other.class_names)}: give all sites the same"
                )
            for what, ours, theirs in (
                ("a table", first.columns, other.columns),
                ("classes with names", first.class_names, other.class_names),
            ):
                if bool(ours) != bool(theirs):
                    raise FedshiftError(
                        f"of {first.name!r} and {other.name!r} only one has {what}: give the data of all sites in the "
                        "same way"
                    )
            if (not first.columns and other.shape != first.shape) or other.dtype != first.dtype:
                raise FedshiftError(
                    f"samples of {first.name!r} are {first.dtype} of shape {first.shape}, those of {other.name!r} "
                    f"{other.dtype} of shape {other.shape}: bring all to one shape (image_size in the settings, or "
                    "the same columns)"
                )
            if first.dtype == "uint8" and other.scale != first.scale:
                raise FedshiftError(
                    f"pixels of {first.name!r} are scaled by {first.scale or 'its own images'}, those of "
                    f"{other.name!r} by {other.scale or 'its own images'}: give one scaling (normalize in the settings)"
                )
        if kind == CLASSIFICATION:
            try:
                refuse_other_labels({client.name: client.class_names for client in self.clients if client.class_names})
            except UsageError as error:
                raise FedshiftError(str(error)) from error
        values = {f"{c.name!r}, {part} data": kind for c in self.clients for part, kind in c.values.items()}
        try:
            refuse_other_scales(values, first.shape, half=first.scale == "half")
        except UsageError as error:
            raise FedshiftError(str(error)) from error
        columns = merge_columns({client.name: client.columns for client in self.clients})
        kinds = {client.class_names for client in self.clients}
        alike = len(kinds) == 1
        names = kinds.pop() if alike else sort_classes({name for kind in kinds for name in kind})
        found = max(len(names), *(client.classes for client in self.clients))
        if columns and kind == CLASSIFICATION and (not alike or all(map(str.isdecimal, names))):
            found, _, names = number_classes(names, "the label", classes)
        samples = sum(sum(client.samples.values()) for client in self.clients)
        if classes is None and kind == CLASSIFICATION and found > max(FEW_CLASSES, samples):
            most = max(self.clients, key=lambda client: client.classes)
            raise FedshiftError(
                f"{most.name!r} has {most.classes} classes, and all sites together {samples} samples: number classes "
                f"0, 1, 2, ..., or give their number in the settings (classes = {found})"
            )
        if classes is not None and classes < found:
            raise FedshiftError(f"classes={classes}, but the sites have {found}: ask for as many")
        whole = RemoteFederation(
            name="sites", clients=(), classes=classes or found, class_names=names, columns=columns, task=kind
        )
        return replace(whole, clients=tuple(_make_client(client, whole) for client in self.clients))


def _make_client(described: SiteDescription, data: Federation) -> ClientData:
    """Return a site as a client whose labels are numbered as in ``data``, as at the site itself (``relabel``)."""
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
        y = (
            own.repeat_interleave(torch.tensor(described.labels))
            if counted
            else data.task.make_blank_targets(number, ONE_PIXEL, data.classes)
        )
        return Samples(x=zero, y=y, rows=torch.zeros(1, dtype=torch.int64).expand(number))

    samples = {"train": 0, **described.samples}  # a client that only validates has no training samples
    return ClientData.from_splits(described.name, {part: split(part, n) for part, n in samples.items()})


def _spell(task: Task) -> str:
    """Return a task as it is written in settings."""
    values = ((field.name, getattr(task, field.name), field.default) for field in fields(task))
    changed = ", ".join(f"{name}={value!r}" for name, value, default in values if value != default)
    return f"{task}({changed})" if changed else str(task)


def _fit_shape(columns: Sequence[Column], shape: tuple[int, ...]) -> bool:
    """Return whether samples of ``shape`` can be rows of these columns; True if there are no columns."""
    lists = [column.categories for column in columns if column.categories is not None]
    sound = all(0 < len(some) <= MOST_CATEGORIES and len(set(some)) == len(some) for some in lists)
    names = [column.name for column in columns]
    return not columns or (sound and len(set(names)) == len(names) and shape == (feature_offsets(columns)[-1],))


def require_repeating(columns: Iterable[Column], rows: int) -> None:
    """Raise :class:`UsageError` if a list of categories would reveal individual rows of a site that has ``rows``."""
    for column in columns:
        if column.categories is not None and 2 * len(column.categories) > rows:
            raise UsageError(
                f"column {column.name!r} holds text, {len(column.categories)} different ones in {rows} rows, and the "
                "list of them would leave this site: group them, make them numbers, or leave the column out"
            )


def merge_columns(sites: Mapping[str, Sequence[Column]]) -> tuple[Column, ...]:
    """Return the merged columns of ``sites``: in the order of the first site, with the categories of all.

    ``sites`` maps a site's name to its columns. Raises :class:`FedshiftError` if two sites differ in the name or kind
    of a column (the message names the sites and the column), or if there are too many categories in total.
    """
    (first, columns), *others = sites.items()
    for other, theirs in others:
        for one, have, two, want in ((other, theirs, first, columns), (first, columns, other, theirs)):
            lacking = {column.name for column in want} - {column.name for column in have}
            if lacking:
                names = join_some(map(repr, sorted(lacking)))
                raise FedshiftError(
                    f"{one!r} has no column {names}, which {two!r} has: tables of all sites need the same columns, by "
                    "name (empty where something was not measured)"
                )
        kinds = {column.name: column.categories is None for column in theirs}
        for column in columns:
            if kinds[column.name] != (column.categories is None):
                text, number = (first, other) if kinds[column.name] else (other, first)
                raise FedshiftError(
                    f"column {column.name!r} holds text at {text!r}, but numbers (or nothing) at {number!r}: give it "
                    "one kind at all sites, or leave it out at all"
                )
    return tuple(_add_categories(column, sites) for column in columns)


def _merge_contents(name: str, sites: Mapping[str, Sequence[Column]]) -> Holds:
    """Return what a column of numbers holds at all sites; refuse True and False beside numbers other than 0 and 1."""
    held = {column.holds: site for site, columns in sites.items() for column in columns if column.name == name}
    if {"True and False", "numbers"} <= held.keys():
        raise FedshiftError(
            f"column {name!r} holds True and False at {held['True and False']!r}, but numbers other than 0 and 1 at "
            f"{held['numbers']!r}: give it one meaning at all sites, or leave it out at all"
        )
    return "numbers" if "numbers" in held else "True and False" if "True and False" in held else "0 and 1"


def _add_categories(column: Column, sites: Mapping[str, Sequence[Column]]) -> Column:
    if column.categories is None:
        return replace(column, holds=_merge_contents(column.name, sites))
    lists = {c.categories or () for site in sites.values() for c in site if c.name == column.name}
    if len(lists) == 1:
        return column
    found = sorted({value for some in lists for value in some})
    if len(found) > MOST_CATEGORIES:
        raise FedshiftError(
            f"column {column.name!r} holds text with {len(found)} different values at all sites together, more than "
            f"{MOST_CATEGORIES}: call the same thing alike at all sites, or leave the column out at all"
        )
    return Column(name=column.name, categories=tuple(found))
