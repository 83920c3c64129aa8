"""Plans: the runs that a table or figure requires, one for each cell and each point of a curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.spec import RunSpec
from .published_tables import PICTURES, Block, Table
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
    the centralized run for comparison; ``newcomer`` names data to whose clients a finished run's model is adapted.
    """

    row: int
    column: int
    spec: RunSpec
    client: str | None
    measure: str = FINAL
    moment: str = LOADED
    twin: RunSpec | None = None
    newcomer: str = ""

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

    ``shown``: the replacement for each of the paper's clients.
    """

    cells: tuple[CellPlan, ...] = ()
    panels: tuple[PanelPlan, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    shown: Mapping[str, str] = field(default_factory=dict)

    @property
    def specs(self) -> tuple[RunSpec, ...]:
        """All runs without duplicates, in the order of cells and points."""
        of_cells = (spec for cell in self.cells for spec in cell.specs)
        of_panels = (spec for panel in self.panels for _, spec in panel.points)
        return tuple(dict.fromkeys(itertools.chain(of_cells, of_panels)))


def make_plans(table: Table, options: ReproductionOptions) -> list[tuple[Block, TablePlan]]:
    """Return a plan for each block of a table, and for the panels in its recipe, if any (:data:`.PICTURES`)."""
    recipe, plans = find_recipe(table), []
    for block in (*table.blocks, *([PICTURES] if recipe.get("panels") else [])):
        locator = _DataLocator(options)
        panels = tuple(_plan_panels(table, recipe, locator, options)) if block is PICTURES else ()
        cells = tuple(_plan_cells(recipe, block, locator, options))
        plans.append((block, locator.describe(TablePlan(cells=cells, panels=panels))))
    return plans


def _plan_cells(
    recipe: Mapping[str, Any], block: Block, locator: _DataLocator, options: ReproductionOptions
) -> Iterator[CellPlan]:
    twins = {(keys.get("data"), keys.get("model")): keys for keys in block.keyed if keys["method"] == "centralized"}
    for row, (keys, (_, numbers)) in enumerate(zip(block.keyed, block.rows, strict=True)):
        for column, (name, printed) in enumerate(zip(block.columns, numbers, strict=True)):
            if printed is None:
                continue
            keyed = {**keys, block.by: name} if block.by not in ("metric", "pair", "client") else keys
            measure = recipe.get("measures", {}).get(name, FINAL)
            newcomer = recipe["adapted"] if measure == ADAPTED else ""
            if newcomer and not is_present(newcomer, options.root):
                locator.missing[base_name(newcomer)] = None
                continue
            asked = make_spec(recipe, keyed, options)
            spec, substitute = locator.locate(asked, sized=block.by == "samples")
            client = name if block.by == "client" else keys.get("client", "average")
            client = None if client == "average" else str(client)
            if spec and substitute and client and not newcomer:
                client = locator.replace_client(asked, client, substitute)
                spec = spec if client in str(spec.domains).split(",") else None
            if spec is None:
                continue
            twin = twins[keys["data"], keys["model"]] if measure == DISCORDANCE else None
            yield CellPlan(
                row=row, column=column, spec=spec, client=client, measure=measure, newcomer=newcomer,
                moment=LOADED if client and client == spec.newcomers else recipe.get("moment", LOADED),
                twin=locator.locate(make_spec(recipe, twin, options))[0] if twin else None,
            )  # fmt: skip


def _plan_panels(
    table: Table, recipe: Mapping[str, Any], locator: _DataLocator, options: ReproductionOptions
) -> Iterator[PanelPlan]:
    for panel in recipe.get("panels", ()):
        points: list[tuple[Mapping[str, Any], RunSpec]] = []
        over = panel.get("over", {})
        default = {"evaluations": 30} if panel["x"] == "round" else {}
        for values in itertools.product(*over.values()) if over else ():
            keys = dict(zip(over, values, strict=True))
            spec, _ = locator.locate(make_spec({**default, **recipe}, keys, options), sized="samples" in keys)
            points += [(keys, spec)] if spec else []
        if points or not over:
            name = "-".join(filter(None, (table.name, panel.get("name"))))
            yield PanelPlan(name=name, x=panel["x"], y=panel["y"], by=panel.get("by"), points=tuple(points))


class _DataLocator:
    """Availability of data, collected over the runs of a plan: present, replaced by a substitute, or missing."""

    def __init__(self, options: ReproductionOptions) -> None:
        self._options = options
        self.missing: dict[str, None] = {}
        self._substitutions: dict[str, _Substitution] = {}
        self._lighter_notes: dict[str, None] = {}

    def locate(self, spec: RunSpec, *, sized: bool = False) -> tuple[RunSpec | None, StandIn | None]:
        """Return ``spec`` with available data (None if there are none), and the substitute for its own data, if any.

        ``sized``: the run compares numbers of samples, so that fewer are not acceptable.
        """
        if is_present(spec.data, self._options.root):
            return self._lighten(select_published_samples(spec)), None
        substitute, samples = find_stand_in(spec.data, self._options.root), spec.samples or 0
        if substitute is None:
            self.missing[base_name(spec.data)] = None
            return None, None
        substitution = self._substitutions.setdefault(base_name(spec.data), _Substitution(stand=substitute))
        if sized and samples > (substitute.most or math.inf):
            substitution.too_few.add(samples)
            return None, None
        substitution.samples.add(samples)
        return self._lighten(move_to_stand_in(spec, substitute)), substitute

    def replace_client(self, spec: RunSpec, client: str, stand: StandIn) -> str | None:
        """Return the replacement for ``client`` of the data in ``spec``; note if there is none."""
        if client not in stand.columns:
            self._substitutions[base_name(spec.data)].excluded[client] = None
        return stand.columns.get(client)

    def _lighten(self, spec: RunSpec) -> RunSpec:
        lighter = load_recipes()["light"].get(spec.model) if self._options.light else None
        if lighter is None:
            return spec
        self._lighter_notes[f"{lighter} in place of {spec.model}"] = None
        return replace(spec, model=lighter)

    def describe(self, plan: TablePlan) -> TablePlan:
        """Add missing data and substitutes to ``plan``."""
        notes = dict.fromkeys(substitution.note for substitution in self._substitutions.values())
        clients = (substitution.clients.items() for substitution in self._substitutions.values())
        shown = dict(itertools.chain.from_iterable(clients))
        return replace(plan, missing=tuple(self.missing), notes=(*notes, *self._lighter_notes), shown=shown)


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
        clauses = [stand.note.format(clients=", ".join(used.values()))]
        for column, name in sorted(stand.columns.items()):
            if asked := [samples for samples in self.samples if column not in stand.columns_with(samples)]:
                have = f"{name} has {stand.least[column]:,} training samples of the {_range(asked)} asked for"
                clauses.append(f"{column} is left out{' of some runs' if column in used else ''}: {have}")
        clauses += [f"{client} is left out: it has no substitute" for client in self.excluded]
        if self.too_few:
            clauses.append(f"{_range(self.too_few)} samples a client are left out: there are {stand.most:,} at most")
        return "; ".join(clauses)


def _range(numbers: Collection[int]) -> str:
    """Return the smallest and largest of ``numbers`` as text, or the only one."""
    return " to ".join(f"{number:,}" for number in dict.fromkeys((min(numbers), max(numbers))))
