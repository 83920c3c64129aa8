"""From what a paper's table is keyed by to settings of ``fedshift run``: the recipes, and what stands in for data.

How a recipe is written is said in ``recipes.toml``. Runs with equal settings are one run, within and between tables.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..config.expressions import list_catalog
from ..config.spec import RunSpec
from ..data.datasets._card import get_card
from ..data.sources import EMBEDDED
from ..utils.errors import UsageError
from .published_tables import Table

SETTINGS = frozenset(field.name for field in fields(RunSpec))
NESTED = ("methods", "keys", "on", "of", "measures")
"""What a table adds to its paper's, entry by entry."""
LARGE = 4
"""Batches above which FedWon clips gradients where a table does not say (arXiv:2306.05879, section 4)."""


@dataclass(frozen=True, kw_only=True)
class ReproductionOptions:
    """How tables are run here: ``root`` holds the data; ``scale`` shortens runs; ``seeds`` are how many.

    ``light``: on the networks that ``recipes.toml`` names in place of the papers'.
    """

    root: Path
    scale: float = 1.0
    seeds: int = 1
    light: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise UsageError(f"scale={self.scale:g}: give a share of the rounds, above 0 and at most 1")
        if self.seeds < 1:
            raise UsageError(f"seeds={self.seeds}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """Data in place of a paper's: settings that differ, what ``columns`` (clients) become, and a ``note`` on it.

    ``{clients}`` in the note stands for those that take part. ``most``: training samples of a client at most;
    ``least``: of single columns' clients, which are left out of runs that ask for more. ``evaluations``: how often a
    run is measured at most, where its clients have many test samples.
    """

    note: str
    data: str
    columns: Mapping[str, str]
    most: int | None = None
    evaluations: int | None = None
    least: Mapping[str, int]
    models: Mapping[str, str]
    settings: Mapping[str, Any]

    def enough(self, samples: int | None) -> list[str]:
        """Columns whose clients here have so many training samples (None: as many as there are)."""
        return [column for column in self.columns if (samples or 0) <= self.least.get(column, math.inf)]


def run_name(spec: RunSpec) -> str:
    """A name for a run, the same wherever the same settings are asked for, and wherever the data lie."""
    data = spec.data.removeprefix(str(spec.root))
    text = json.dumps({**asdict(spec), "data": data, "root": None}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@cache
def load_recipes() -> Mapping[str, Any]:
    """All recipes, by paper and table."""
    return tomllib.loads(Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8"))


def find_recipe(table: Table) -> Mapping[str, Any] | None:
    """The settings of ``table``, its paper's among them; None where there is no recipe."""
    of_paper = load_recipes().get(table.paper, {})
    return _merge(of_paper["all"], of_paper[table.name]) if table.name in of_paper else None


@cache
def is_present(data: str, root: Path) -> bool:
    """Whether the data of this name are under ``root``, or come with fedshift."""
    made = list_catalog("data.datasets").get(base_name(data))
    if data in EMBEDDED or made is None:
        return data in EMBEDDED
    written = ast.parse(data, mode="eval").body if data != base_name(data) else None
    arguments = frozenset(each.arg for each in written.keywords if each.arg) if isinstance(written, ast.Call) else ()
    return get_card(made).present(base_name(data), root, frozenset(arguments))


@cache
def find_stand_in(data: str, root: Path) -> StandIn | None:
    """What is used in place of ``data`` where they are not under ``root``; None where nothing is."""
    for other in load_recipes()["stand_in"].get(base_name(data), ()):
        files = other.get("files", False)
        if all((root / f"{name}.npz").is_file() for name in other["columns"].values() if files):
            known = {key: value for key, value in other.items() if key != "files"}
            named = str(other["data"]).format(root=root)
            if files or is_present(named, root):
                return StandIn(**{"least": {}, "models": {}, "settings": {}, **known, "data": named})
    return None


def make_spec(recipe: Mapping[str, Any], coordinates: Mapping[str, Any], way: ReproductionOptions) -> RunSpec:
    """The run that ``coordinates`` (``method``, ``data`` and whatever else a row is keyed by) name under ``recipe``."""
    recipe = _merge(recipe, recipe.get("on", {}).get(coordinates.get("data", recipe.get("data")), {}))
    recipe = _merge(recipe, recipe.get("of", {}).get(coordinates.get("method"), {}))
    settings = {key: value for key, value in recipe.items() if key in SETTINGS}
    for key, value in coordinates.items():
        if key in SETTINGS and key != "agc":
            settings[key] = value
        made = recipe.get("keys", {}).get(key, {})
        if made and all(isinstance(each, Mapping) for each in made.values()):
            made = made.get(str(value), {})
        known = {**coordinates, "last": value - 1 if isinstance(value, int) else value}
        settings |= {name: _parse_number(_fill_template(template, known)) for name, template in made.items()}
    clip = coordinates.get("agc", settings.get("batch_size", 0) > LARGE)
    clip = recipe.get("clip") if clip is True else None if clip is False else clip
    method = str(settings["method"])
    settings["method"] = _fill_template(recipe.get("methods", {}).get(method, method), {**coordinates, "clip": clip})
    if "agc" in coordinates and method != "fedwon":
        settings["agc"] = clip
    if "batches" in settings:
        settings.pop("epochs", None)
        if method == "fedmmb":
            settings.pop("batches")
    if settings.get("epochs") == 1:  # as where nothing is said, so that both are one run
        settings.pop("epochs")
    rounds = max(1, math.floor(settings["rounds"] * way.scale + 0.5))
    settings |= {"rounds": rounds, "seeds": way.seeds, "root": str(way.root)}
    settings["allow_single_class"] = bool(settings.get("split"))
    settings["evaluate_every"] = max(1, rounds // recipe.get("evaluations", 1))
    return RunSpec(**{key: value for key, value in settings.items() if value not in ("", None)})


def exact(spec: RunSpec) -> RunSpec:
    """``spec``, whose data are here, with the very samples that the papers' authors take of them."""
    own = load_recipes()["subset"].get(spec.data, {}) if spec.samples else {}
    settings: dict[str, Any] = {
        key: _fill_template(value, {"samples": spec.samples}) or None for key, value in own.items()
    }
    return replace(spec, **settings)


def move_to_stand_in(spec: RunSpec, stand: StandIn) -> RunSpec:
    """``spec`` on the data that stand in, without clients that have fewer samples than it asks for."""
    names = [stand.columns[column] for column in stand.enough(spec.samples)]
    newcomers = stand.columns[spec.newcomers] if spec.newcomers else None
    settings: dict[str, Any] = {"data": stand.data, "domains": ",".join(names), "newcomers": newcomers}
    if spec.samples and stand.most:
        settings["samples"] = min(spec.samples, stand.most)
    if stand.evaluations:
        settings["evaluate_every"] = max(spec.evaluate_every or 1, spec.rounds // stand.evaluations)
    settings["model"] = stand.models.get(spec.model, spec.model)
    settings |= {key: value or None for key, value in stand.settings.items()}
    return replace(spec, **settings)


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with what ``own`` says in place of it, entry by entry where that is nested."""
    whole = dict(base)
    for key, value in own.items():
        whole[key] = {**whole.get(key, {}), **value} if key in NESTED else value
    return whole


def base_name(data: str) -> str:
    """The name of data without its arguments."""
    return data.partition("(")[0]


def _fill_template(template: Any, values: Mapping[str, Any]) -> Any:
    return template.format(**values) if isinstance(template, str) else template


def _parse_number(value: Any) -> Any:
    """``value``, as a number where it is one written as text."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value
