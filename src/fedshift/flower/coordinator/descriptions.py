"""The coordinator's knowledge of an experiment's clients: names, and numbers and shapes of samples, but no samples.

Columns and labels of tables at several sites are merged as if one process read all tables. A model identifies an input
by its position, so all sites must have the same columns. Each site reports the names of its columns and, for text, the
categories; every site reads its table with the sorted union of these categories.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import override

from ...config.spec import CompareSpec, RunSpec
from ...data.agreement import KINDS, refuse_other_labels, refuse_other_scales
from ...data.columns import Column, Holds, feature_offsets
from ...data.decoding import FileKind
from ...data.decoding.ranges import Window
from ...data.federation import PLURALS, ClientData, Federation
from ...data.files.listing import sort_classes
from ...data.inputs import MOST_INPUTS, require_layout
from ...data.readers.tables import MOST_CATEGORIES, number_classes
from ...data.samples import Samples
from ...experiments.factory import make_settings
from ...experiments.settings import Settings
from ...nn.several_inputs import Inputs
from ...tasks import CLASSIFICATION, TASKS, Task, describe_task, restore_task
from ...tasks.classification import FEW_CLASSES, MOST_CLASSES
from ...utils.checked_json import read_checked, write_checked
from ...utils.errors import FedshiftError
from ...utils.words import join_some
from ..messages import LONGEST_VALUE, NUMPY_TYPES, refusing

MOST_SAMPLES, MOST_VALUES, MOST_AXES, LONGEST_NAME, LONGEST_TEXT = 10**8, 2**30, 8, 200, 2000
"""Limits that no real site reaches: samples in a split, values and axes of a sample, characters in a site's name, and
in every other text."""
RETARGET = (
    "read the data of all sites in the same way (task in the settings; for numbers with a mean and deviation, which "
    "sites do not share: 'regression(standardize=((0.0, 1.0),))')"
)
"""Advice to sites whose targets differ."""
ONE_PIXEL = (1, 1, 1)
"""Shape of the blank masks for samples at other sites; the masks are never read."""
Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True)
class SiteDescription:
    """A site's description of itself (see :meth:`fedshift.flower.site.site.Site.answer`), without names of files.

    ``samples``: number in each split. ``labels``: number of training samples of each class; None: not disclosed.
    ``task``: name and fields. ``scale``: name of the samples' scaling in :data:`~fedshift.data.sources.SCALES`, if it
    does not depend on the samples. ``values``: kind of values of each split (:data:`~fedshift.data.agreement.KINDS`).
    ``files``, ``window``: kind of files, and the values that become -1 and 1, of a decoding.
    ``inputs``: layout of a sample's row if a network has several inputs. ``measures``: splits on which models may be
    measured. ``validates``: True for a site that does not train, and reports only its number of test samples.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    version: str
    shape: Annotated[tuple[Annotated[int, Field(gt=0, le=MOST_VALUES)], ...], Field(max_length=MOST_AXES)]
    dtype: str
    classes: Annotated[int, Field(gt=0, le=MOST_CLASSES)]
    class_names: tuple[str, ...]
    samples: Mapping[Split, Annotated[int, Field(gt=0, le=MOST_SAMPLES)]]
    labels: tuple[Annotated[int, Field(ge=0)], ...] | None
    columns: tuple[Column, ...] = ()
    task: Mapping[str, Any] = field(default_factory=lambda: describe_task(CLASSIFICATION))
    scale: str = ""
    values: Mapping[Split, str] = field(default_factory=dict)
    files: FileKind = "array"
    window: Window | None = None
    inputs: Annotated[Inputs, Field(max_length=MOST_INPUTS)] = ()
    measures: tuple[Literal["test", "validation"], ...] = ("test",)
    validates: bool = False

    @staticmethod
    def of(facts: Mapping[str, Any]) -> SiteDescription:
        """Return the description in an answer's facts; raise :class:`RefusedMessage` if no site can be like that."""
        name = facts.get("name")
        who = f"site {name[:LONGEST_NAME]!r}" if isinstance(name, str) else "a site without a name"
        with refusing(f"{who} describes itself wrongly: correct its data, or update fedshift there"):
            description = _DESCRIPTION.validate_python(facts)
            for what, fits, allowed in description._list_rules():
                if not fits:
                    raise FedshiftError(f"{what!r}: {allowed}, not {getattr(description, what)!r:.{LONGEST_VALUE}}")
            for text in _list_texts(facts):
                if not text.isprintable() or len(text) > LONGEST_TEXT:
                    raise FedshiftError(
                        f"text has at most {LONGEST_TEXT} characters, all printable, unlike {text[:LONGEST_VALUE]!r}"
                    )
            return description

    def _list_rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield fields, whether they fit each other, and what fits: the coordinator allocates memory based on them."""
        splits, labels, train = self.samples.keys(), self.labels, self.samples.get("train")
        if ":" not in str(self.task.get("name")):  # a name with a colon is a user's task, which the settings name
            restore_task(self.task)
        trains = not self.validates
        needed = splits - {"validation"} == {"train", "test"} if trains else splits == {"test"}
        yield "samples", needed, "a site that trains has 'train', 'test' and perhaps 'validation', another only 'test'"
        yield "measures", splits >= set(self.measures), "these are splits of its samples"
        yield "dtype", self.dtype in NUMPY_TYPES, f"one of {', '.join(NUMPY_TYPES)}"
        yield "shape", math.prod(self.shape) <= MOST_VALUES, f"a sample has at most {MOST_VALUES} values"
        yield "window", not self.window or self.window[0] < self.window[1], "two rising numbers"
        yield "values", set(self.values.values()) <= set(KINDS), f"each of {', '.join(KINDS)}"
        shapes, names = [each.shape for each in self.inputs], {each.name for each in self.inputs}
        sound = len(names) == len(shapes) and min((size for shape in shapes for size in shape), default=1) > 0
        sound &= not shapes or self.shape == (sum(map(math.prod, shapes)),)
        yield "inputs", sound, f"their names differ, and their sizes add up to the shape {self.shape} of a sample"
        lists = f"different names, and categories (1 to {MOST_CATEGORIES}), as wide as a sample, {self.shape}"
        yield "columns", _fit_shape(self.columns, self.shape), lists
        counted = trains and labels is not None and len(labels) == self.classes and sum(labels) == train
        yield "labels", labels is None or counted, f"numbers of each of {self.classes} classes that add up to {train}"
        yield "class_names", len(self.class_names) in (0, self.classes), f"{self.classes} names, or none"


_DESCRIPTION = TypeAdapter(SiteDescription)


def _list_texts(facts: object) -> Iterator[str]:
    """Yield all texts in JSON values, keys included."""
    if isinstance(facts, str):
        yield facts
    elif isinstance(facts, Mapping | list | tuple):
        for value in (*facts, *(facts.values() if isinstance(facts, Mapping) else ())):
            yield from _list_texts(value)


def _fit_shape(columns: Sequence[Column], shape: tuple[int, ...]) -> bool:
    """Return whether samples of ``shape`` can be rows of these columns; True if there are no columns."""
    lists = [column.categories for column in columns if column.categories is not None]
    sound = all(0 < len(some) <= MOST_CATEGORIES and len(set(some)) == len(some) for some in lists)
    names = {column.name for column in columns}
    return not columns or (sound and len(names) == len(columns) and shape == (feature_offsets(columns)[-1],))


class RemoteFederation(Federation):
    """Clients whose samples are on other machines; here samples are zeros, and only the counts of labels are real."""

    @override
    @property
    def digests(self) -> dict[str, str]:
        """Empty: each site compares its own."""
        return {}

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
        kept = read_checked(path, "start a new experiment: without the file, its sites cannot be recognized")
        return ClientRegistry(experiment=kept["experiment"], clients=tuple(map(SiteDescription.of, kept["clients"])))

    @property
    def training(self) -> tuple[SiteDescription, ...]:
        """The clients that train: all except those that only validate."""
        return tuple(client for client in self.clients if not client.validates)

    @property
    def versions(self) -> str:
        """The clients' versions of fedshift, formatted as ``version (clients), ...``."""
        versions = dict.fromkeys(client.version for client in self.clients)
        names = {version: [client.name for client in self.clients if client.version == version] for version in versions}
        return ", ".join(f"{version} ({join_some(names[version])})" for version in versions)

    def update_versions(self, known: Mapping[str, SiteDescription]) -> ClientRegistry:
        """Return the registry with the current versions of the clients in ``known``."""
        current = (replace(client, version=known.get(client.name, client).version) for client in self.clients)
        return replace(self, clients=tuple(current))

    def make_settings(self, spec: RunSpec | CompareSpec) -> Settings:
        """Return the settings of ``spec``, with clients that only validate as newcomers, so that they never train."""
        made = make_settings(spec, tuple(client.name for client in self.clients))
        validating = (client.name for client in self.clients if client.validates)
        return replace(made, newcomers=tuple(dict.fromkeys((*made.newcomers, *validating))))

    def write(self, path: Path) -> None:
        """Write the registry atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checked(path, {"experiment": self.experiment, "clients": list(map(asdict, self.clients))})

    def add_clients(self, added: Iterable[SiteDescription], order: Sequence[str] = ()) -> ClientRegistry:
        """Return the registry with the new clients of ``added``, sorted by their place in ``order``, then by name."""
        known = {client.name for client in self.clients}
        place = {name: number for number, name in enumerate(order)}
        new = [client for client in added if client.name not in known]
        new.sort(key=lambda client: (place.get(client.name, len(place)), client.name))
        return replace(self, clients=(*self.clients, *new))

    def to_federation(self, classes: int | None, task: str | None = None) -> RemoteFederation:
        """Return the clients as a federation; ``classes`` and ``task``: from the experiment's settings, or None.

        Raises :class:`FedshiftError` that names two sites if their samples, columns, tasks or classes are incompatible.
        """
        first, *others = self.clients
        kind = restore_task(first.task, TASKS.parse(task) if task else None)
        for other in others:
            require_layout(other.inputs, first.inputs, f"site {other.name!r}", f"site {first.name!r}")
            pairs = zip(_list_traits(first, kind), _list_traits(other, restore_task(other.task, kind)), strict=False)
            for (ours, fix), (theirs, _) in pairs:
                if ours != theirs:
                    raise FedshiftError(f"{first.name!r} has {ours}, but {other.name!r} has {theirs}: {fix}")
        values = {f"{c.name!r}, {split} data": kind for c in self.clients for split, kind in c.values.items()}
        refuse_other_scales(values, first.shape, half=first.scale == "half")
        columns = merge_columns({client.name: client.columns for client in self.clients})
        count, names = _merge_classes(self.clients, classes, kind)
        if classes is not None and classes < count:
            having = {name: [c.name for c in self.clients if name in c.class_names] for name in names}
            alone = (f"{name!r} only at {join_some(at)}" for name, at in having.items() if len(at) < len(self.clients))
            most = max(self.clients, key=lambda client: client.classes)
            why = join_some(alone) or f"{most.name!r} has {most.classes}"
            raise FedshiftError(
                f"classes={classes}, but the sites have {count} ({why}): rename classes that are spelled differently, "
                "or give that many"
            )
        federation = RemoteFederation(
            name="sites", clients=(), classes=classes or count, class_names=names, columns=columns, task=kind,
            inputs=first.inputs,
        )  # fmt: skip
        return replace(federation, clients=tuple(_make_client(client, federation) for client in self.clients))


def _list_traits(client: SiteDescription, kind: Task) -> Iterator[tuple[str, str]]:
    """Yield traits that all clients must share, each with advice for clients that differ."""
    form, shape = "give the data of all sites in the same form", "" if client.columns else f" of shape {client.shape}"
    yield f"targets for {_spell(kind)}", RETARGET
    if kind != CLASSIFICATION:
        yield f"{client.classes} {PLURALS[kind.output]} {', '.join(client.class_names)}", "give all sites the same"
    yield f"{'a' if client.columns else 'no'} table", form
    yield f"classes {'with' if client.class_names else 'without'} names", form
    yield f"{client.dtype} samples{shape}", "give all one type and shape (image_size in the settings, or same columns)"
    if client.dtype == "uint8":
        yield f"pixels scaled by {client.scale or 'its own images'}", "give one scaling (normalize in the settings)"
    elif client.window:
        low, high = client.window
        yield f"values from {low:g} to {high:g} as -1 to 1", "give one range (window in the settings, LOW,HIGH)"


def _spell(task: Task) -> str:
    """Format a task as in settings."""
    values = ((field.name, getattr(task, field.name), field.default) for field in fields(task))
    changed = ", ".join(f"{name}={value!r}" for name, value, default in values if value != default)
    return f"{task}({changed})" if changed else str(task)


def _merge_classes(
    clients: Sequence[SiteDescription], classes: int | None, kind: Task
) -> tuple[int, tuple[str, ...]]:  # fmt: skip
    """Return the number of classes at all sites, and their names; ``classes``: the number in the settings, or None."""
    lists = {client.class_names for client in clients}
    names = next(iter(lists)) if len(lists) == 1 else sort_classes({name for some in lists for name in some})
    count = max(len(names), *(client.classes for client in clients))
    if kind != CLASSIFICATION:
        return count, names
    refuse_other_labels({client.name: client.class_names for client in clients if client.class_names})
    if clients[0].columns and (len(lists) > 1 or all(map(str.isdecimal, names))):
        count, _, names = number_classes(names, "the label", classes)
    samples = sum(sum(client.samples.values()) for client in clients)
    if classes is None and count > max(FEW_CLASSES, samples):
        most = max(clients, key=lambda client: client.classes)
        raise FedshiftError(
            f"{most.name!r} has {most.classes} classes, but all sites together have {samples} samples: number classes "
            f"0, 1, 2, ..., or give their number in the settings (classes = {count})"
        )
    return count, names


def _make_client(described: SiteDescription, data: Federation) -> ClientData:
    """Return a site as a client; labels are numbered as in ``data``, which is how the site numbers them."""
    names, shape = data.meanings, (feature_offsets(data.columns)[-1],) if data.columns else described.shape
    if strange := set(described.class_names).difference(names):
        raise FedshiftError(
            f"site {described.name!r} has a class {min(strange)!r}, which is not a valid spelling of a label"
        )
    number_of = torch.tensor([names.index(name) for name in described.class_names] or range(described.classes))
    zero = torch.zeros((1, *shape), dtype=getattr(torch, described.dtype))

    def split(part: str, number: int) -> Samples:
        y = data.task.make_blank_targets(number, ONE_PIXEL, data.classes)
        if part == "train" and described.labels:
            y = number_of.repeat_interleave(torch.tensor(described.labels))
        return Samples(x=zero, y=y, rows=torch.zeros(1, dtype=torch.int64).expand(number))

    samples = {"train": 0, **described.samples}  # a client that only validates has no training samples
    return ClientData.from_splits(described.name, {part: split(part, n) for part, n in samples.items()})


def merge_columns(sites: Mapping[str, Sequence[Column]]) -> tuple[Column, ...]:
    """Return the merged columns of ``sites``: in the order of the first site, with the categories of all.

    ``sites`` maps a site's name to its columns. Raises :class:`FedshiftError` if two sites differ in the name or kind
    of a column (the message names both and the column), or if there are too many categories in total.
    """
    (first, columns), *others = sites.items()
    for other, theirs in others:
        for one, have, two, want in ((other, theirs, first, columns), (first, columns, other, theirs)):
            if lacking := {column.name for column in want} - {column.name for column in have}:
                raise FedshiftError(
                    f"{one!r} has no column {join_some(map(repr, sorted(lacking)))}, but {two!r} does: the tables of "
                    "all sites need columns of the same names (empty where there are no measurements)"
                )
    return tuple(_merge_column(column.name, sites) for column in columns)


def _merge_column(name: str, sites: Mapping[str, Sequence[Column]]) -> Column:
    """Return the column ``name`` for all sites; refuse text together with numbers, and truths together with numbers."""
    own = {site: column for site, columns in sites.items() for column in columns if column.name == name}
    holds = {column.holds if column.categories is None else "text": site for site, column in own.items()}
    numbers = [kind for kind in holds if kind != "text"]
    pairs = [("text", kind) for kind in numbers] + [("True and False", "numbers")]
    for one, other in pairs:
        if {one, other} <= holds.keys():
            other_in_words = "numbers (or nothing)" if one == "text" else "numbers other than 0 and 1"
            raise FedshiftError(
                f"column {name!r} contains {one} at {holds[one]!r}, but {other_in_words} at {holds[other]!r}: use one "
                "kind at all sites, or drop the column at all of them"
            )
    units = {column.unit: site for site, column in own.items()}
    if len(units) > 1:
        told = " and ".join(f"{unit or 'no unit'} ({site})" for unit, site in units.items())
        raise FedshiftError(f"column {name!r} is in {told}: give it one unit at all sites")
    if numbers:
        ranked: tuple[Holds, ...] = ("numbers", "True and False", "0 and 1")
        return Column(name=name, holds=next(kind for kind in ranked if kind in holds), unit=next(iter(units)))
    lists = {column.categories or () for column in own.values()}
    values = lists.pop() if len(lists) == 1 else tuple(sorted({value for some in lists for value in some}))
    if len(values) > MOST_CATEGORIES:
        raise FedshiftError(
            f"column {name!r} contains text with {len(values)} different values at all sites together, more than "
            f"{MOST_CATEGORIES}: use the same words at all sites, or drop the column at all of them"
        )
    return Column(name=name, categories=values)
