"""From a paper's table to the runs that give its numbers: each cell is a setting of ``fedshift run`` and a client.

A cell is keyed by its row, its column and its block; a key with a setting's name is that setting. Cells with equal
settings share a run, within a table and between tables.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..base.errors import UsageError
from ..config import RunSpec
from ..names import catalog
from ..sources import EMBEDDED
from .tables import Block, Printed, Table, tables

SETTINGS = frozenset(field.name for field in fields(RunSpec))
OWN = ("methods", "keys")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number of a table, ``printed``, and the run ``spec`` that gives it at ``client`` (None: the mean of all)."""

    row: int
    column: int
    printed: Printed
    spec: RunSpec
    client: str | None

    @property
    def run(self) -> str:
        """A name for the run, the same wherever the same settings are asked for."""
        text = json.dumps({**asdict(self.spec), "root": None}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a table is run here: ``root`` holds the data; ``scale`` shortens runs; ``seeds`` are how many."""

    root: Path
    scale: float = 1.0
    seeds: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise UsageError(f"scale={self.scale:g}: give a share of the rounds, above 0 and at most 1")
        if self.seeds < 1:
            raise UsageError(f"seeds={self.seeds}: must be at least 1")


@cache
def recipes() -> Mapping[str, Any]:
    """All recipes, by paper and table."""
    return tomllib.loads(Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8"))


def recipe_of(table: Table) -> Mapping[str, Any] | None:
    """The settings of ``table``, its paper's among them; None where there is no recipe."""
    of_paper = recipes().get(table.paper, {})
    if table.name not in of_paper:
        return None
    whole: dict[str, Any] = dict(of_paper["all"])
    for key, value in of_paper[table.name].items():
        whole[key] = {**whole.get(key, {}), **value} if key in OWN else value
    return whole


@cache
def present(data: str, root: Path) -> bool:
    """Whether the data of this name are under ``root``, or come with fedshift."""
    made = catalog("data.benchmarks").get(data)
    return data in EMBEDDED or (made is not None and import_module(made.__module__).CARD.present(data, root))


@cache
def stand_in(data: str, root: Path) -> Mapping[str, Any] | None:
    """What is used in place of ``data`` where it is not under ``root``; None where nothing is."""
    other = recipes()["stand_in"].get(data)
    if other is None or not all((root / f"{name}.npz").is_file() for name in other["columns"].values()):
        return None
    return other  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What of a block can be run: ``cells``; data that are ``missing``; ``notes`` on what stands in for what."""

    cells: tuple[Cell, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def planned(table: Table, block: Block, way: Way) -> Plan:
    """The runs that ``table``'s recipe makes of ``block``. Raises :class:`UsageError` where there is no recipe."""
    recipe = recipe_of(table)
    if recipe is None:
        raise UsageError(f"{table.key} has no recipe: {', '.join(runnable())} have one")
    found: list[Cell] = []
    missing: dict[str, None] = {}
    notes: dict[str, None] = {}
    for row, (keys, numbers) in enumerate(block.rows):
        for column, (name, printed) in enumerate(zip(block.columns, numbers, strict=True)):
            if printed is None or (block.by == "metric" and name != table.metric):
                continue
            coordinates = {**block.keys, **keys, block.by: name}
            data = str(coordinates["data"])
            spec, client = _spec(recipe, coordinates, way), coordinates.get("client", "average")
            if not present(data, way.root):
                other = stand_in(data, way.root)
                if other is None:
                    missing[data] = None
                    continue
                notes[other["note"]] = None
                spec = _elsewhere(spec, other, way.root)
                if client != "average":
                    client = other["columns"].get(client)
                    if client not in str(spec.domains).split(","):
                        continue
            who = None if client == "average" else str(client)
            found.append(Cell(row=row, column=column, printed=printed, spec=spec, client=who))
    return Plan(cells=tuple(found), missing=tuple(missing), notes=tuple(notes))


def runnable() -> tuple[str, ...]:
    """Keys of the tables that have a recipe."""
    return tuple(key for key, table in tables().items() if recipe_of(table) is not None)


def _spec(recipe: Mapping[str, Any], coordinates: Mapping[str, Any], way: Way) -> RunSpec:
    """The run that ``coordinates`` name."""
    settings = {key: value for key, value in recipe.items() if key not in OWN}
    method = str(coordinates["method"])
    settings["method"] = recipe.get("methods", {}).get(method, method).format(**coordinates)
    for key, value in coordinates.items():
        for setting, template in recipe.get("keys", {}).get(key, {key: value} if key in SETTINGS else {}).items():
            text = template.format(value=value, **coordinates) if isinstance(template, str) else template
            settings[setting] = _number(text)
    if "batches" in settings:
        settings.pop("epochs", None)
        if method == "fedmmb":
            settings.pop("batches")
    rounds = max(1, math.floor(settings["rounds"] * way.scale + 0.5))
    settings |= {"rounds": rounds, "seeds": way.seeds, "root": str(way.root), "evaluate_every": rounds}
    return RunSpec(**{key: value for key, value in settings.items() if value not in ("", None)})


def _number(value: Any) -> Any:
    """``value``, as a number where it is one written as text."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _elsewhere(spec: RunSpec, other: Mapping[str, Any], root: Path) -> RunSpec:
    """``spec`` on the data that stand in, without clients that have fewer samples than it asks for."""
    names = [
        file
        for column, file in other["columns"].items()
        if (spec.samples or math.inf) <= other["least"].get(column, math.inf)
    ]
    return replace(spec, data=str(other["data"]).format(root=root), domains=",".join(names), image_size=28)
