"""What tests of the papers' tables share."""

from pathlib import Path

import pytest

from fedshift.reproduce import measurements, page, planning, published_tables, recipes
from fedshift.reproduce.published_tables import Block, Table, find_table, parse_value
from fedshift.reproduce.recipes import ReproductionOptions


@pytest.fixture
def runs(monkeypatch):
    """The runs that a table or figure takes where all data are at hand, by its key."""
    monkeypatch.setattr(planning, "is_present", lambda data, root: True)
    return lambda key: {
        spec
        for _, plan in planning.make_plans(find_table(key), ReproductionOptions(root=Path("data")))
        for spec in plan.specs
    }


def make_small_table(
    cells=("50.0 (5.0)", "40.0", "45.0"), columns=("pen", "photo", "average"), methods=("fedavg", "fedbn"), **keys
):
    by = keys.pop("by", "client")
    rows = tuple(({"method": name, **keys}, tuple(map(parse_value, cells))) for name in methods)
    block = Block(version="", by=by, columns=columns, keys={"data": "digits"}, rows=rows)
    claims = ("It is <small>",)
    return Table(paper="fedbn", name="table99", title="Tiny", unit="percent", claims=claims, blocks=(block,))


@pytest.fixture
def tiny(monkeypatch):
    """The recipe of a table of two methods on two clients, to which a test may add."""
    settings = {
        "rounds": 2, "samples": 16, "lr": 0.05, "model": "small-cnn", "domains": "pen,photo", "data": "digits",
        "image_size": 8,
    }  # fmt: skip
    recipe = {}
    known = {"fedbn": {"all": settings, "table99": recipe}, "stand_in": {}, "subset": {}, "light": {}, "published": {}}
    for module in (recipes, measurements, planning):
        monkeypatch.setattr(module, "load_recipes", lambda: known)
    table = make_small_table()
    for module in (published_tables, page):
        monkeypatch.setattr(module, "load_tables", lambda: {table.key: table})
    return recipe
