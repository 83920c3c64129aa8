"""The coordinator's knowledge of an experiment's clients: names, and numbers and shapes of samples, but no samples.

Columns and labels of tables at several sites are merged as if one process read all tables. A model identifies an input
by its position, so all sites must have the same columns. Each site reports the names of its columns and, for text, the
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
from ...data.inputs import MOST_INPUTS, require_layout
from ...data.readers.tables import number_classes
from ...data.samples import Samples
from ...experiments.factory import make_settings
from ...experiments.settings import Settings
from ...nn.several_inputs import Inputs
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
"""Shape of the blank masks for samples at other sites; the masks are never read."""


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
    """Name of the samples' scaling in :data:`~fedshift.data.sources.SCALES`; empty if the samples determine it."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Kind of values of each split (:data:`~fedshift.data.agreement.KINDS`)."""
    inputs: Inputs = ()
    """Layout of a sample's row if a network is given several inputs."""
    validates: bool = False
    """True for a site that only validates: it does not train, and reports only its number of test samples."""

    @staticmethod
    def of(facts: Mapping[str, Any]) -> SiteDescription:
        """Parse the description in an answer's facts; raise :class:`FedshiftError` if it is malformed."""
        try:
            description = _DESCRIPTION.validate_python(facts)
            description._check()
        except ValidationError as error:
            why = "; ".join(f"{'.'.join(map(str, each['loc']))!r}: {each['msg']}" for each in error.errors())
            raise FedshiftError(f"a site's description is malformed ({why})") from error
        except FedshiftError:
            raise
        except Exception as error:
            raise FedshiftError(f"a site's description is malformed ({type(error).__name__}: {error})") from error
        return description

    def _check(self) -> None:
        """Raise :class:`FedshiftError` if a description is impossible; the coordinator allocates memory based on it."""
        if not (0 < len(self.name) <= LONGEST_NAME and self.name.isprintable()):
            raise FedshiftError(
                f"the name of a site, {self.name[:LONGEST_NAME]!r}, is empty, too long or not printable: give it a "
                "short name (--name)"
            )
        texts = [*self.class_names, self.version, self.scale, *(each.name for each in self.inputs)]
        texts += [text for column in self.columns for text in (column.name, *(column.categories or ()))]
        strange = next((text for text in texts if not text.isprintable() or len(text) > LONGEST_TEXT), None)
        if strange is not None:
            raise FedshiftError(
                f"site {self.name!r} has a class, column or category {strange[:LONGEST_NAME]!r}: it must have at most "
                f"{LONGEST_TEXT} characters, all printable"
            )
        if ":" not in str(self.task.get("name")):  # a name with a colon is a user's task, which the settings name
            restore_task(self.task)
        complete = {"train", "test"} <= self.samples.keys() <= {"train", "validation", "test"}
        if self.validates:
            complete = self.samples.keys() == {"test"} and self.labels is None
        if not complete or not all(0 < number <= MOST_SAMPLES for number in self.samples.values()):
            raise FedshiftError(
                f"site {self.name!r} reports {dict(self.samples)} samples: it needs training samples (unless it only "
                f"validates) and test samples, at most {MOST_SAMPLES} of each"
            )
        if len(self.shape) > MOST_AXES:
            raise FedshiftError(
                f"site {self.name!r} reports samples with {len(self.shape)} axes: at most {MOST_AXES} are allowed"
            )
        if self.dtype not in NUMPY_TYPES or min(self.shape, default=1) < 1 or math.prod(self.shape) > MOST_VALUES:
            raise FedshiftError(
                f"site {self.name!r} reports samples of type {self.dtype} and shape {self.shape}: the type must be "
                f"{', '.join(NUMPY_TYPES)}, and a sample can have at most {MOST_VALUES} values"
            )
        sizes = [size for each in self.inputs for size in each.shape]
        if self.inputs and (
            len(self.inputs) > MOST_INPUTS
            or len({each.name for each in self.inputs}) < len(self.inputs)
            or min(sizes, default=1) < 1
            or self.shape != (sum(each.size for each in self.inputs),)
        ):
            raise FedshiftError(
                f"site {self.name!r} reports samples of shape {self.shape} with the inputs "
                f"{', '.join(map(str, self.inputs[:MOST_INPUTS]))}: their sizes must add up to it, and names differ"
            )
        if not set(self.values.values()) <= set(KINDS) or not self.values.keys() <= {"train", "validation", "test"}:
            raise FedshiftError(
                f"site {self.name!r} reports an unknown kind of values in its samples: {dict(self.values)}"
            )
        if not _fit_shape(self.columns, self.shape):
            raise FedshiftError(
                f"site {self.name!r} reports {len(self.columns)} columns: they do not match its samples of shape "
                f"{self.shape}, or their names or categories are invalid for a table"
            )
        labels = self.labels
        counted = labels is None or (len(labels) == self.classes and sum(labels) == self.samples["train"])
        counted = counted and len(self.class_names) in (0, self.classes)
        if not (0 < self.classes <= MOST_CLASSES and counted and min(labels or (0,)) >= 0):
            raise FedshiftError(f"site {self.name!r} reports {self.classes} classes, which do not match its labels")


_DESCRIPTION = TypeAdapter(SiteDescription)
COLUMNS = TypeAdapter(tuple[Column, ...])
"""Parses transmitted columns: each has a ``name`` and ``categories`` (None for numbers)."""


class RemoteFederation(Federation):
    """Clients whose samples are on other machines; here samples are zeros, and only the counts of labels are real."""

    @override
    @property
    def fingerprint(self) -> str:
        """Shape, type and classes of the samples; each site checks itself that its data have not changed."""
        dtype = self.clients[0].train.dtype
        columns = "".join(f", {column.name} {column.categories or ''}" for column in self.columns)
        task = "" if self.task == CLASSIFICATION else f", {describe_task(self.task)}"
        inputs = "".join(f", {each}" for each in self.inputs)
        return (
            f"{self.sample_shape} {dtype}, {self.classes} classes {' '.join(self.class_names)}{columns}{task}{inputs}"
        )


@dataclass(frozen=True, kw_only=True)
class ClientRegistry:
    """The clients of ``experiment``, in order of admission."""

    experiment: str = field(default_factory=lambda: secrets.token_hex(8))
    clients: tuple[SiteDescription, ...] = ()

    @staticmethod
    def read(path: Path) -> ClientRegistry:
        """Read a registry that :meth:`write` wrote; raise :class:`FedshiftError` if it is damaged."""
        fields = read_checked(path, "start a new experiment: without the file, its sites cannot be recognized")
        clients = tuple(map(SiteDescription.of, fields["clients"]))
        return ClientRegistry(experiment=fields["experiment"], clients=clients)

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
        """The clients' versions of fedshift, formatted as ``version (clients), ...``."""
        versions = dict.fromkeys(client.version for client in self.clients)
        names = {version: [client.name for client in self.clients if client.version == version] for version in versions}
        return ", ".join(f"{version} ({join_some(names[version])})" for version in versions)

    def update_versions(self, known: Mapping[str, SiteDescription]) -> ClientRegistry:
        """Return the registry with the current versions of the clients in ``known``."""
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

    def add_clients(self, added: Iterable[SiteDescription], order: Sequence[str] = ()) -> ClientRegistry:
        """Return the registry with the new clients of ``added``, sorted by their place in ``order``, then by name."""
        known = {client.name for client in self.clients}
        place = {name: number for number, name in enumerate(order)}
        new = sorted(
            (client for client in added if client.name not in known),
            key=lambda client: (place.get(client.name, len(place)), client.name),
        )
        return replace(self, clients=(*self.clients, *new))

    def to_federation(self, classes: int | None, task: str | None = None) -> RemoteFederation:
        """Return the clients as a federation; ``classes`` and ``task``: from the experiment's settings, or None.

        Raises :class:`FedshiftError` that names two sites if their samples, columns, tasks or classes are incompatible.
        """
        first = self.clients[0]
        kind = restore_task(first.task, TASKS.parse(task) if task else None)
        for other in self.clients[1:]:
            other_kind = restore_task(other.task, kind)
            if describe_task(other_kind) != describe_task(kind):
                raise FedshiftError(
                    f"targets of {first.name!r} are for {_spell(kind)}, targets of {other.name!r} for "
                    f"{_spell(other_kind)}: read the data of all sites in the same way (task in the settings; for "
                    "numbers with a mean and deviation, which sites do not share: "
                    "'regression(standardize=((0.0, 1.0),))')"
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
                        f"only one of {first.name!r} and {other.name!r} has {what}: give the data of all sites in the "
                        "same form"
                    )
            try:
                require_layout(other.inputs, first.inputs, f"site {other.name!r}", f"site {first.name!r}")
            except UsageError as error:
                raise FedshiftError(str(error)) from error
            if (not first.columns and other.shape != first.shape) or other.dtype != first.dtype:
                raise FedshiftError(
                    f"samples of {first.name!r} are {first.dtype} of shape {first.shape}, samples of {other.name!r} "
                    f"{other.dtype} of shape {other.shape}: give all sites one shape (image_size in the settings, or "
                    "the same columns)"
                )
            if first.dtype == "uint8" and other.scale != first.scale:
                raise FedshiftError(
                    f"pixels of {first.name!r} are scaled by {first.scale or 'its own images'}, pixels of "
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
        count = max(len(names), *(client.classes for client in self.clients))
        if columns and kind == CLASSIFICATION and (not alike or all(map(str.isdecimal, names))):
            count, _, names = number_classes(names, "the label", classes)
        samples = sum(sum(client.samples.values()) for client in self.clients)
        if classes is None and kind == CLASSIFICATION and count > max(FEW_CLASSES, samples):
            most = max(self.clients, key=lambda client: client.classes)
            raise FedshiftError(
                f"{most.name!r} has {most.classes} classes, but all sites together have {samples} samples: number "
                f"classes 0, 1, 2, ..., or give their number in the settings (classes = {count})"
            )
        if classes is not None and classes < count:
            having = {name: [c.name for c in self.clients if name in c.class_names] for name in names}
            most = max(self.clients, key=lambda client: client.classes)
            raise FedshiftError(
                f"classes={classes}, but the sites have {count} ("
                + (
                    join_some(
                        f"{name!r} only at {join_some(at)}"
                        for name, at in having.items()
                        if len(at) < len(self.clients)
                    )
                    or f"{most.name!r} has {most.classes}"
                )
                + "): rename classes that are spelled differently, or give that many"
            )
        federation = RemoteFederation(
            name="sites", clients=(), classes=classes or count, class_names=names, columns=columns, task=kind,
            inputs=first.inputs,
        )  # fmt: skip
        return replace(federation, clients=tuple(_make_client(client, federation) for client in self.clients))


def _make_client(described: SiteDescription, data: Federation) -> ClientData:
    """Return a site as a client; labels are numbered as in ``data``, which is how the site numbers them."""
    names, shape = data.meanings, (feature_offsets(data.columns)[-1],) if data.columns else described.shape
    strange = set(described.class_names).difference(names)
    if strange:
        raise FedshiftError(
            f"site {described.name!r} has a class {min(strange)!r}, which is not a valid spelling of a label"
        )
    number_of = torch.tensor([names.index(name) for name in described.class_names] or range(described.classes))
    zero = torch.zeros((1, *shape), dtype=getattr(torch, described.dtype))

    def split(part: str, number: int) -> Samples:
        counted = part == "train" and described.labels
        y = (
            number_of.repeat_interleave(torch.tensor(described.labels))
            if counted
            else data.task.make_blank_targets(number, ONE_PIXEL, data.classes)
        )
        return Samples(x=zero, y=y, rows=torch.zeros(1, dtype=torch.int64).expand(number))

    samples = {"train": 0, **described.samples}  # a client that only validates has no training samples
    return ClientData.from_splits(described.name, {part: split(part, n) for part, n in samples.items()})


def _spell(task: Task) -> str:
    """Format a task as in settings."""
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
                f"column {column.name!r} contains text with {len(column.categories)} different values in {rows} rows, "
                "and the list of values would leave this site: group them, convert them to numbers, or drop the column"
            )


def merge_columns(sites: Mapping[str, Sequence[Column]]) -> tuple[Column, ...]:
    """Return the merged columns of ``sites``: in the order of the first site, with the categories of all.

    ``sites`` maps a site's name to its columns. Raises :class:`FedshiftError` if two sites differ in the name or kind
    of a column (the message names both and the column), or if there are too many categories in total.
    """
    (first, columns), *others = sites.items()
    for other, theirs in others:
        for one, have, two, want in ((other, theirs, first, columns), (first, columns, other, theirs)):
            lacking = {column.name for column in want} - {column.name for column in have}
            if lacking:
                names = join_some(map(repr, sorted(lacking)))
                raise FedshiftError(
                    f"{one!r} has no column {names}, but {two!r} does: the tables of all sites need columns of the "
                    "same names (empty where there are no measurements)"
                )
        kinds = {column.name: column.categories is None for column in theirs}
        for column in columns:
            if kinds[column.name] != (column.categories is None):
                text, number = (first, other) if kinds[column.name] else (other, first)
                raise FedshiftError(
                    f"column {column.name!r} contains text at {text!r}, but numbers (or nothing) at {number!r}: use "
                    "one kind at all sites, or drop the column at all of them"
                )
    return tuple(_add_categories(column, sites) for column in columns)


def _merge_contents(name: str, sites: Mapping[str, Sequence[Column]]) -> Holds:
    """Return the contents of a numeric column at all sites; refuse a mix of True and False with other numbers."""
    held = {column.holds: site for site, columns in sites.items() for column in columns if column.name == name}
    if {"True and False", "numbers"} <= held.keys():
        raise FedshiftError(
            f"column {name!r} contains True and False at {held['True and False']!r}, but numbers other than 0 and 1 at "
            f"{held['numbers']!r}: use one meaning at all sites, or drop the column at all of them"
        )
    return "numbers" if "numbers" in held else "True and False" if "True and False" in held else "0 and 1"


def _add_categories(column: Column, sites: Mapping[str, Sequence[Column]]) -> Column:
    if column.categories is None:
        return replace(column, holds=_merge_contents(column.name, sites))
    lists = {c.categories or () for site in sites.values() for c in site if c.name == column.name}
    if len(lists) == 1:
        return column
    values = sorted({value for some in lists for value in some})
    if len(values) > MOST_CATEGORIES:
        raise FedshiftError(
            f"column {column.name!r} contains text with {len(values)} different values at all sites together, more "
            f"than {MOST_CATEGORIES}: use the same words at all sites, or drop the column at all of them"
        )
    return Column(name=column.name, categories=tuple(values))
