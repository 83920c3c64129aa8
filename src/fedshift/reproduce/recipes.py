"""Recipes: settings of ``fedshift run`` for the keys of a paper's table, and substitutes for missing data.

``recipes.toml`` explains the format. Runs with equal settings are one run, within and across tables.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..config.expressions import EMBEDDED, list_catalog
from ..config.spec import RunSpec
from ..data.datasets._card import get_card
from ..utils.errors import UsageError
from .published_tables import Table

SETTINGS = frozenset(field.name for field in fields(RunSpec))
NESTED = ("methods", "keys", "on", "of", "measures")
"""Keys whose entries in a table are merged with its paper's one by one."""
LARGE = 4
"""Batch size above which FedWon clips gradients by default (arXiv:2306.05879, section 4)."""


@dataclass(frozen=True, kw_only=True)
class ReproductionOptions:
    """Options of a reproduction.

    ``root``: data directory; ``scale``: fraction of the rounds; ``seeds``: number of seeds; ``light``: use the networks
    of ``recipes.toml`` in place of the papers'; ``on_data_error``: treatment of errors in the data, as in a run.
    """

    root: Path
    scale: float = 1.0
    seeds: int = 1
    light: bool = False
    on_data_error: Literal["refuse", "warn", "ignore"] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise UsageError(f"scale={self.scale:g}: give a share of the rounds, above 0 and at most 1")
        if self.seeds < 1:
            raise UsageError(f"seeds={self.seeds}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """Data that replace a paper's data: changed ``settings``, the client for each of its ``columns``, and a ``note``.

    ``{clients}`` in the note is replaced by the participants. ``most``: maximum number of training samples of a client;
    ``least``: training samples of individual columns' clients, which are excluded from runs that require more.
    ``evaluations``: maximum number of evaluations in a run, if clients have many test samples.
    """

    note: str
    data: str
    columns: Mapping[str, str]
    most: int | None = None
    evaluations: int | None = None
    least: Mapping[str, int]
    models: Mapping[str, str]
    settings: Mapping[str, Any]

    def columns_with(self, samples: int | None) -> list[str]:
        """Return the columns whose clients have at least this many training samples (None: any number)."""
        return [column for column in self.columns if (samples or 0) <= self.least.get(column, math.inf)]


def run_name(spec: RunSpec) -> str:
    """Return a run's name, which depends on its settings but not on the location of the data or errors in them."""
    data = spec.data.removeprefix(str(spec.root))
    text = json.dumps({**asdict(spec), "data": data, "root": None, "on_data_error": None}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@cache
def load_recipes() -> Mapping[str, Any]:
    """Return all recipes, by paper and table."""
    return tomllib.loads(Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8"))


def find_recipe(table: Table) -> Mapping[str, Any]:
    """Return the recipe of ``table``, merged with its paper's."""
    of_paper = load_recipes()[table.paper]
    return _merge(of_paper["all"], of_paper[table.name])


@cache
def is_present(data: str, root: Path) -> bool:
    """Return whether the data with this name are under ``root`` or included in fedshift."""
    loader = list_catalog("data.datasets").get(base_name(data))
    if data in EMBEDDED or loader is None:
        return data in EMBEDDED
    call = ast.parse(data, mode="eval").body if "(" in data else None
    arguments = frozenset(each.arg for each in call.keywords if each.arg) if isinstance(call, ast.Call) else ()
    return get_card(loader).present(base_name(data), root, frozenset(arguments))


@cache
def find_stand_in(data: str, root: Path) -> StandIn | None:
    """Return the substitute for ``data`` that are not under ``root``, or None if there is none."""
    for entry in load_recipes()["stand_in"].get(base_name(data), ()):
        values = {"least": {}, "models": {}, "settings": {}, **entry, "data": str(entry["data"]).format(root=root)}
        if values.pop("files", False):
            present = all((root / f"{name}.npz").is_file() for name in entry["columns"].values())
        else:
            present = is_present(values["data"], root)
        if present:
            return StandIn(**values)
    return None


def make_spec(recipe: Mapping[str, Any], coordinates: Mapping[str, Any], options: ReproductionOptions) -> RunSpec:
    """Return the run of ``recipe`` for ``coordinates``: ``method``, ``data`` and the other keys of a row."""
    recipe = _merge(recipe, recipe.get("on", {}).get(coordinates.get("data", recipe.get("data")), {}))
    recipe = _merge(recipe, recipe.get("of", {}).get(coordinates.get("method"), {}))
    settings = {key: value for key, value in recipe.items() if key in SETTINGS}
    for key, value in coordinates.items():
        if key in SETTINGS:
            settings[key] = value
        templates = recipe.get("keys", {}).get(key, {})
        if templates and all(isinstance(each, Mapping) for each in templates.values()):
            templates = templates.get(str(value), {})
        values = {**coordinates, "last": value - 1 if isinstance(value, int) else value}
        settings |= {name: _parse_number(_fill_template(template, values)) for name, template in templates.items()}
    clip = coordinates.get("agc", settings.get("batch_size", 0) > LARGE)
    clip = recipe.get("clip") if clip is True else None if clip is False else clip
    method = str(settings["method"])
    settings["method"] = _fill_template(recipe.get("methods", {}).get(method, method), {**coordinates, "clip": clip})
    if clip and "agc" in coordinates and method != "fedwon":
        settings["method"] = f"agc(clip={clip})+{settings['method']}"
    if settings.keys() & {"batches", "steps"}:
        settings.pop("epochs", None)
        if method == "fedmmb":
            settings.pop("batches", None)
    if settings.get("epochs") == 1:  # the default, so that both have the same run
        settings.pop("epochs")
    rounds = max(1, math.floor(settings["rounds"] * options.scale + 0.5))
    settings |= {"rounds": rounds, "seeds": options.seeds}
    settings["root"] = None if settings["data"] in EMBEDDED else str(options.root)
    settings["on_data_error"] = options.on_data_error
    settings["allow_single_class"] = bool(settings.get("split"))
    settings["evaluate_every"] = max(1, rounds // recipe.get("evaluations", 1))
    settings["statistics"] = "running"  # as the papers measure
    return RunSpec(**{key: value for key, value in settings.items() if value not in ("", None)})


def select_published_samples(spec: RunSpec) -> RunSpec:
    """Return ``spec`` with the exact samples of its data that the papers' authors use."""
    subset = load_recipes()["subset"].get(spec.data, {}) if spec.samples else {}
    settings: dict[str, Any] = {key: text.format(samples=spec.samples) or None for key, text in subset.items()}
    return replace(spec, **settings)


def move_to_stand_in(spec: RunSpec, stand: StandIn) -> RunSpec:
    """Return ``spec`` with the substitute data, without clients that have fewer samples than it requires."""
    names = [stand.columns[column] for column in stand.columns_with(spec.samples)]
    newcomers = stand.columns[spec.newcomers] if spec.newcomers else None
    settings: dict[str, Any] = {"data": stand.data, "domains": ",".join(names), "newcomers": newcomers}
    if spec.samples and stand.most:
        settings["samples"] = min(spec.samples, stand.most)
    if stand.evaluations:
        settings["evaluate_every"] = max(spec.evaluate_every or 1, spec.rounds // stand.evaluations)
    settings["model"] = stand.models.get(spec.model, spec.model)
    settings["root"] = None if stand.data in EMBEDDED else spec.root
    settings |= {key: value or None for key, value in stand.settings.items()}
    return replace(spec, **settings)


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``own``, entry by entry for nested values."""
    whole = dict(base)
    for key, value in own.items():
        whole[key] = {**whole.get(key, {}), **value} if key in NESTED else value
    return whole


def base_name(data: str) -> str:
    """Return the name of data without its arguments."""
    return data.partition("(")[0]


def _fill_template(template: Any, values: Mapping[str, Any]) -> Any:
    return template.format(**values) if isinstance(template, str) else template


def _parse_number(value: Any) -> Any:
    """Return ``value``, converted to a number if it is the text of one."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return kind(value)
    return value
