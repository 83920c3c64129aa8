"""What of a table or figure can be run here: a run for each cell, and for each point of a curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.spec import RunSpec
from ..utils.errors import UsageError
from .published_tables import Block, PublishedValue, Table, load_tables
from .recipes import (
    ReproductionOptions,
    StandIn,
    base_name,
    exact,
    find_recipe,
    find_stand_in,
    is_present,
    load_recipes,
    make_spec,
    move_to_stand_in,
)

FINAL, DISCORDANCE, ADAPTED = "final", "discordance", "adapted"
LOADED = "loaded"


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """A number of a table, ``printed``, and the run ``spec`` that gives it at ``client`` (None: the mean of all).

    ``measure`` says which of the run's numbers it is and ``moment`` when it is measured (see ``recipes.toml``);
    ``twin`` is the centralized run that it is measured against, and ``newcomer`` the data whose clients a finished
    run's model is adapted to.
    """

    row: int
    column: int
    printed: PublishedValue
    spec: RunSpec
    client: str | None
    measure: str = FINAL
    moment: str = LOADED
    twin: RunSpec | None = None
    newcomer: str | None = None

    @property
    def specs(self) -> tuple[RunSpec, ...]:
        """The runs that the number takes."""
        return (self.spec, self.twin) if self.twin else (self.spec,)


@dataclass(frozen=True, kw_only=True)
class PanelPlan:
    """A panel of a figure: ``y`` against ``x`` for ``points``, each with its keys; small panels ``by`` a key."""

    name: str
    x: str
    y: str
    by: str | None
    points: tuple[tuple[Mapping[str, Any], RunSpec], ...]


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """What can be run: ``cells`` of a block, ``panels`` of a figure; data that are ``missing``; ``notes`` on stand-ins.

    ``stood``: those of the notes that are on data, by the data in whose place others stand; each says which clients are
    left out and why. ``shown``: what stands in the place of clients' names, by these. ``asked``: the runs as the paper
    has them.
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
        """All runs, each once, in the order of cells and points."""
        of_cells = (spec for cell in self.cells for spec in cell.specs)
        of_panels = (spec for panel in self.panels for _, spec in panel.points)
        return tuple(dict.fromkeys(itertools.chain(of_cells, of_panels)))


def list_runnable() -> tuple[str, ...]:
    """Keys of the tables and figures that have a recipe."""
    return tuple(key for key, table in load_tables().items() if find_recipe(table) is not None)


def plan_block(table: Table, block: Block, way: ReproductionOptions) -> TablePlan:
    """The runs that ``table``'s recipe makes of ``block``. Raises :class:`UsageError` where there is no recipe."""
    recipe, found = _find_recipe(table), _DataLocator(way)
    cells, twins = [], _find_twins(recipe, block)
    for row, (keys, numbers) in enumerate(block.rows):
        coordinates = {**block.keys, **keys}
        for column, (name, printed) in enumerate(zip(block.columns, numbers, strict=True)):
            if printed is None:
                continue
            whole = {**coordinates, block.by: name} if block.by not in ("metric", "pair", "client") else coordinates
            measure = recipe.get("measures", {}).get(name, FINAL)
            if measure == ADAPTED and not found.is_available(recipe["adapted"]):
                continue
            asked = make_spec(recipe, whole, way)
            spec, stand = found.locate(asked, sized=block.by == "samples")
            client = name if block.by == "client" else coordinates.get("client", "average")
            client = None if client == "average" else str(client)
            if spec is None:
                continue
            if stand and client and measure != ADAPTED:
                if client not in stand.columns:
                    found.without(asked.data, client)
                client = stand.columns.get(client)
                if client not in str(spec.domains).split(","):
                    continue
            moment = LOADED if client and client == spec.newcomers else recipe.get("moment", LOADED)
            cell = CellPlan(
                row=row, column=column, printed=printed, spec=spec, client=client, measure=measure, moment=moment
            )
            if measure == ADAPTED:
                cell = replace(cell, newcomer=recipe["adapted"])
            if measure == DISCORDANCE:
                twin, _ = found.locate(make_spec(recipe, twins[_format_pair(coordinates)], way))
                cell = replace(cell, twin=twin)
            cells.append(cell)
    return TablePlan(cells=tuple(cells), **found.facts)


def plan_panels(table: Table, way: ReproductionOptions) -> TablePlan:
    """The runs that the panels of ``table``'s recipe take; no panels where it has none. Raises as :func:`plan_block`."""
    recipe, found = _find_recipe(table), _DataLocator(way)
    panels = []
    for panel in recipe.get("panels", ()):
        points: list[tuple[Mapping[str, Any], RunSpec]] = []
        over = panel.get("over", {})
        for values in itertools.product(*over.values()) if over else ():
            keys = dict(zip(over, values, strict=True))
            many = {**recipe, "evaluations": 30} if panel["x"] == "round" and "evaluations" not in recipe else recipe
            spec, _ = found.locate(make_spec(many, keys, way), sized="samples" in keys)
            if spec is not None:
                points.append((keys, spec))
        if points or not over:
            name = "-".join(filter(None, (table.name, panel.get("name"))))
            panels.append(PanelPlan(name=name, x=panel["x"], y=panel["y"], by=panel.get("by"), points=tuple(points)))
    return TablePlan(panels=tuple(panels), **found.facts)


def select_blocks(table: Table, version: str | None = None) -> list[Block]:
    """The blocks of one version of the table, by default the last; :class:`UsageError` where it has no such."""
    versions = list(dict.fromkeys(block.version for block in table.blocks))
    if version is not None and version not in versions:
        known = ", ".join(filter(None, versions)) or "one version only"
        raise UsageError(f"version={version!r}: {table.key} has {known}")
    wanted = version if version is not None else next(reversed(versions), "")
    return [block for block in table.blocks if block.version == wanted]


def make_plans(
    table: Table, way: ReproductionOptions, version: str | None = None
) -> Iterator[tuple[Block | None, TablePlan]]:
    """What is run of a table: a plan for each block, and for what is drawn (block None)."""
    for block in select_blocks(table, version):
        yield block, plan_block(table, block, way)
    if _find_recipe(table).get("panels"):
        yield None, plan_panels(table, way)


class _DataLocator:
    """Where data are, gathered over the runs of a plan: here, in place of others, or nowhere."""

    def __init__(self, way: ReproductionOptions) -> None:
        self._way = way
        self._missing: dict[str, None] = {}
        self._stood: dict[str, _Stood] = {}
        self._lighter_notes: dict[str, None] = {}
        self._asked: dict[RunSpec, None] = {}

    def locate(self, spec: RunSpec, *, sized: bool = False) -> tuple[RunSpec | None, StandIn | None]:
        """``spec`` on data that are here, None where there are none; and what they are in place of its own.

        ``sized``: it is about the number of samples, so that fewer do not do.
        """
        self._asked[spec] = None
        if is_present(spec.data, self._way.root):
            return self._lighter(exact(spec)), None
        stand = find_stand_in(spec.data, self._way.root)
        if stand is None:
            self._missing[base_name(spec.data)] = None
            return None, None
        stood = self._stood.setdefault(base_name(spec.data), _Stood(stand))
        if sized and (spec.samples or 0) > (stand.most or math.inf):
            stood.too_few.add(spec.samples or 0)
            return None, None
        stood.ask(spec.samples)
        return self._lighter(move_to_stand_in(spec, stand)), stand

    def without(self, data: str, client: str) -> None:
        """Note that nothing stands in for ``client`` of ``data``."""
        self._stood[base_name(data)].nobody[client] = None

    def is_available(self, data: str) -> bool:
        """Whether ``data`` are here, for which nothing stands in."""
        there = is_present(data, self._way.root)
        self._missing |= {} if there else {base_name(data): None}
        return there

    def _lighter(self, spec: RunSpec) -> RunSpec:
        other = load_recipes()["light"].get(spec.model) if self._way.light else None
        if other is None:
            return spec
        self._lighter_notes[f"{other} in place of {spec.model}"] = None
        return replace(spec, model=other)

    @property
    def facts(self) -> dict[str, Any]:
        """What a :class:`TablePlan` says beside its runs."""
        stood = {data: found.note for data, found in self._stood.items()}
        return {
            "missing": tuple(self._missing), "notes": (*dict.fromkeys(stood.values()), *self._lighter_notes),
            "stood": stood, "shown": {key: name for found in self._stood.values() for key, name in found.shown.items()},
            "asked": tuple(self._asked),
        }  # fmt: skip


class _Stood:
    """Data that stand in for a paper's, over the runs of a plan: who takes part in some, who is left out, and why.

    ``too_few``: samples a client that columns were to have, and that no client here has; ``nobody``: clients of the
    paper's that no other stands in for.
    """

    def __init__(self, stand: StandIn) -> None:
        self.too_few: set[int] = set()
        self.nobody: dict[str, None] = {}
        self._stand = stand
        self._used: set[str] = set()
        self._lacking: dict[str, set[int]] = {}

    def ask(self, samples: int | None) -> None:
        """Enter a run with so many training samples of each client."""
        enough = self._stand.enough(samples)
        self._used.update(enough)
        for column in self._stand.columns.keys() - enough:
            self._lacking.setdefault(column, set()).add(samples or 0)

    @property
    def shown(self) -> dict[str, str]:
        """The clients that take part, by whose place they take."""
        return {column: name for column, name in self._stand.columns.items() if column in self._used}

    @property
    def note(self) -> str:
        """What stands in for the paper's data, and what is left out of it."""
        stand = self._stand
        said = [stand.note.format(clients=", ".join(self.shown.values()))]
        for column, asked in sorted(self._lacking.items()):
            have = (
                f"{stand.columns[column]} has {stand.least[column]:,} training samples of the {_range(asked)} asked for"
            )
            said.append(f"{column} is left out{' of some runs' if column in self._used else ''}: {have}")
        said += [f"{client} is left out: nothing stands in for it" for client in self.nobody]
        if self.too_few:
            said.append(f"{_range(self.too_few)} samples a client are left out: there are {stand.most:,} at most")
        return "; ".join(said)


def _range(numbers: Collection[int]) -> str:
    """The least and the largest of ``numbers``, or the one that there is."""
    return " to ".join(f"{number:,}" for number in dict.fromkeys((min(numbers), max(numbers))))


def _find_recipe(table: Table) -> Mapping[str, Any]:
    recipe = find_recipe(table)
    if recipe is None:
        raise UsageError(f"{table.key} has no recipe: {', '.join(list_runnable())} have one")
    return recipe


def _format_pair(coordinates: Mapping[str, Any]) -> tuple[object, object]:
    return coordinates["data"], coordinates["model"]


def _find_twins(recipe: Mapping[str, Any], block: Block) -> Mapping[tuple[object, object], Mapping[str, Any]]:
    """The row of centralized training for each data set and model, where the block has a discordance."""
    rows: Iterable[Mapping[str, Any]] = ({**block.keys, **keys} for keys, _ in block.rows)
    if DISCORDANCE not in recipe.get("measures", {}):
        return {}
    return {_format_pair(row): row for row in rows if row["method"] == "centralized"}
