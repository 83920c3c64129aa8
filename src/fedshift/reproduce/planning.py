"""Plans: the runs that a table or figure requires, one for each cell and each point of a curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.spec import RunSpec
from ..utils.errors import UsageError
from .published_tables import Block, Table, load_tables
from .recipes import (
    ReproductionOptions,
    StandIn,
    base_name,
    find_recipe,
    find_stand_in,
    is_present,
    load_recipes,
    make_spec,
    move_to_stand_in,
    select_published_samples,
)

FINAL, DISCORDANCE, ADAPTED = "final", "discordance", "adapted"
LOADED = "loaded"


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """A number in a table, and the run ``spec`` that gives it for ``client`` (None: the mean of all).

    ``measure`` selects one of the run's numbers, and ``moment`` when it is measured (see ``recipes.toml``). ``twin`` is
    the centralized run for comparison; ``newcomer`` is the name of data to whose clients a finished run's model is
    adapted.
    """

    row: int
    column: int
    spec: RunSpec
    client: str | None
    measure: str = FINAL
    moment: str = LOADED
    twin: RunSpec | None = None
    newcomer: str | None = None

    @property
    def specs(self) -> tuple[RunSpec, ...]:
        """The runs that the number requires."""
        return (self.spec, self.twin) if self.twin else (self.spec,)


@dataclass(frozen=True, kw_only=True)
class PanelPlan:
    """A plot of ``y`` against ``x`` for ``points``, each with its keys, with a panel for each value of key ``by``."""

    name: str
    x: str
    y: str
    by: str | None
    points: tuple[tuple[Mapping[str, Any], RunSpec], ...]


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Runs for the ``cells`` of a block or the ``panels`` of a figure, ``missing`` data, and ``notes`` on stand-ins.

    ``stood``: notes by the name of the replaced data; each lists the excluded clients with the reason. ``shown``: the
    replacement for each of the paper's clients. ``asked``: the runs as in the paper.
    """

    cells: tuple[CellPlan, ...] = ()
    panels: tuple[PanelPlan, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stood: Mapping[str, str] = field(default_factory=dict)
    shown: Mapping[str, str]
    asked: tuple[RunSpec, ...] = ()

    @property
    def specs(self) -> tuple[RunSpec, ...]:
        """All runs without duplicates, in the order of cells and points."""
        of_cells = (spec for cell in self.cells for spec in cell.specs)
        of_panels = (spec for panel in self.panels for _, spec in panel.points)
        return tuple(dict.fromkeys(itertools.chain(of_cells, of_panels)))


def list_runnable() -> tuple[str, ...]:
    """Return the keys of the tables and figures that have a recipe."""
    return tuple(key for key, table in load_tables().items() if find_recipe(table) is not None)


def plan_block(table: Table, block: Block, options: ReproductionOptions) -> TablePlan:
    """Return the runs of ``block`` according to ``table``'s recipe. Raises :class:`UsageError` if there is none."""
    recipe, locator = _find_recipe(table), _DataLocator(options)
    cells, twins = [], _find_twins(recipe, block)
    for row, (keys, numbers) in enumerate(block.rows):
        coordinates = {**block.keys, **keys}
        for column, (name, printed) in enumerate(zip(block.columns, numbers, strict=True)):
            if printed is None:
                continue
            keyed = {**coordinates, block.by: name} if block.by not in ("metric", "pair", "client") else coordinates
            measure = recipe.get("measures", {}).get(name, FINAL)
            if measure == ADAPTED and not locator.is_available(recipe["adapted"]):
                continue
            asked = make_spec(recipe, keyed, options)
            spec, substitute = locator.locate(asked, sized=block.by == "samples")
            client = name if block.by == "client" else coordinates.get("client", "average")
            client = None if client == "average" else str(client)
            if spec is None:
                continue
            if substitute and client and measure != ADAPTED:
                if client not in substitute.columns:
                    locator.exclude(asked.data, client)
                client = substitute.columns.get(client)
                if client not in str(spec.domains).split(","):
                    continue
            moment = LOADED if client and client == spec.newcomers else recipe.get("moment", LOADED)
            twin = None
            if measure == DISCORDANCE:
                twin, _ = locator.locate(make_spec(recipe, twins[coordinates["data"], coordinates["model"]], options))
            cells.append(
                CellPlan(
                    row=row, column=column, spec=spec, client=client, measure=measure, moment=moment,
                    twin=twin, newcomer=recipe["adapted"] if measure == ADAPTED else None,
                )
            )  # fmt: skip
    return TablePlan(cells=tuple(cells), **locator.facts)


def plan_panels(table: Table, options: ReproductionOptions) -> TablePlan:
    """Return the runs of the panels in ``table``'s recipe, if any. Raises the same errors as :func:`plan_block`."""
    recipe, locator = _find_recipe(table), _DataLocator(options)
    panels = []
    for panel in recipe.get("panels", ()):
        points: list[tuple[Mapping[str, Any], RunSpec]] = []
        over = panel.get("over", {})
        for values in itertools.product(*over.values()) if over else ():
            keys = dict(zip(over, values, strict=True))
            default = {"evaluations": 30} if panel["x"] == "round" else {}
            spec, _ = locator.locate(make_spec({**default, **recipe}, keys, options), sized="samples" in keys)
            if spec is not None:
                points.append((keys, spec))
        if points or not over:
            name = "-".join(filter(None, (table.name, panel.get("name"))))
            panels.append(PanelPlan(name=name, x=panel["x"], y=panel["y"], by=panel.get("by"), points=tuple(points)))
    return TablePlan(panels=tuple(panels), **locator.facts)


def select_blocks(table: Table, version: str | None = None) -> list[Block]:
    """Return the blocks of one version of the table, by default the last.

    Raises :class:`UsageError` if the table does not have that version.
    """
    versions = list(dict.fromkeys(block.version for block in table.blocks))
    if version is not None and version not in versions:
        known = ", ".join(filter(None, versions)) or "one version only"
        raise UsageError(f"version={version!r}: {table.key} has {known}")
    wanted = version if version is not None else next(reversed(versions), "")
    return [block for block in table.blocks if block.version == wanted]


def make_plans(
    table: Table, options: ReproductionOptions, version: str | None = None
) -> Iterator[tuple[Block | None, TablePlan]]:
    """Yield a plan for each block of a table, and a plan for its panels (block None)."""
    for block in select_blocks(table, version):
        yield block, plan_block(table, block, options)
    if _find_recipe(table).get("panels"):
        yield None, plan_panels(table, options)


class _DataLocator:
    """Availability of data, collected over the runs of a plan: present, replaced by a substitute, or missing."""

    def __init__(self, options: ReproductionOptions) -> None:
        self._options = options
        self._missing: dict[str, None] = {}
        self._stood: dict[str, _Substitution] = {}
        self._lighter_notes: dict[str, None] = {}
        self._asked: dict[RunSpec, None] = {}

    def locate(self, spec: RunSpec, *, sized: bool = False) -> tuple[RunSpec | None, StandIn | None]:
        """Return ``spec`` with available data (None if there are none), and the substitute for its own data, if any.

        ``sized``: the run compares numbers of samples, so that fewer are not acceptable.
        """
        self._asked[spec] = None
        if is_present(spec.data, self._options.root):
            return self._lighten(select_published_samples(spec)), None
        substitute = find_stand_in(spec.data, self._options.root)
        if substitute is None:
            self._missing[base_name(spec.data)] = None
            return None, None
        substitution = self._stood.setdefault(base_name(spec.data), _Substitution(stand=substitute))
        if sized and (spec.samples or 0) > (substitute.most or math.inf):
            substitution.too_few.add(spec.samples or 0)
            return None, None
        substitution.samples.add(spec.samples or 0)
        return self._lighten(move_to_stand_in(spec, substitute)), substitute

    def exclude(self, data: str, client: str) -> None:
        """Record that there is no replacement for ``client`` of ``data``."""
        self._stood[base_name(data)].excluded[client] = None

    def is_available(self, data: str) -> bool:
        """Return whether ``data``, which have no substitute, are present."""
        present = is_present(data, self._options.root)
        self._missing |= {} if present else {base_name(data): None}
        return present

    def _lighten(self, spec: RunSpec) -> RunSpec:
        lighter = load_recipes()["light"].get(spec.model) if self._options.light else None
        if lighter is None:
            return spec
        self._lighter_notes[f"{lighter} in place of {spec.model}"] = None
        return replace(spec, model=lighter)

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of :class:`TablePlan` other than its runs."""
        notes = {data: substitution.note for data, substitution in self._stood.items()}
        clients = (substitution.clients.items() for substitution in self._stood.values())
        return {
            "missing": tuple(self._missing), "notes": (*dict.fromkeys(notes.values()), *self._lighter_notes),
            "stood": notes, "shown": dict(itertools.chain.from_iterable(clients)), "asked": tuple(self._asked),
        }  # fmt: skip


@dataclass(kw_only=True)
class _Substitution:
    """Substitute data over the runs of a plan: which clients take part in any run, and which are excluded and why.

    ``samples``: numbers of training samples per client that runs require; ``too_few``: numbers that no available client
    has; ``excluded``: the paper's clients without a substitute.
    """

    stand: StandIn
    samples: set[int] = field(default_factory=set)
    too_few: set[int] = field(default_factory=set)
    excluded: dict[str, None] = field(default_factory=dict)

    @property
    def clients(self) -> dict[str, str]:
        """The clients that take part, by the paper's client that they replace."""
        used = {column for samples in self.samples for column in self.stand.columns_with(samples)}
        return {column: name for column, name in self.stand.columns.items() if column in used}

    @property
    def note(self) -> str:
        """Sentence about the substitute data and excluded clients."""
        stand, used = self.stand, self.clients
        parts = [stand.note.format(clients=", ".join(used.values()))]
        for column, name in sorted(stand.columns.items()):
            if asked := [samples for samples in self.samples if column not in stand.columns_with(samples)]:
                have = f"{name} has {stand.least[column]:,} training samples of the {_range(asked)} asked for"
                parts.append(f"{column} is left out{' of some runs' if column in used else ''}: {have}")
        parts += [f"{client} is left out: it has no substitute" for client in self.excluded]
        if self.too_few:
            parts.append(f"{_range(self.too_few)} samples a client are left out: there are {stand.most:,} at most")
        return "; ".join(parts)


def _range(numbers: Collection[int]) -> str:
    """Return the smallest and largest of ``numbers`` as text, or the only one."""
    return " to ".join(f"{number:,}" for number in dict.fromkeys((min(numbers), max(numbers))))


def _find_recipe(table: Table) -> Mapping[str, Any]:
    recipe = find_recipe(table)
    if recipe is None:
        raise UsageError(f"{table.key} has no recipe: {', '.join(list_runnable())} have one")
    return recipe


def _find_twins(recipe: Mapping[str, Any], block: Block) -> Mapping[tuple[object, object], Mapping[str, Any]]:
    """Return the row of centralized training for each data set and model, if the block has a discordance."""
    rows: Iterable[Mapping[str, Any]] = ({**block.keys, **keys} for keys, _ in block.rows)
    if DISCORDANCE not in recipe.get("measures", {}):
        return {}
    return {(row["data"], row["model"]): row for row in rows if row["method"] == "centralized"}
