"""What tests of the papers' values share."""

from pathlib import Path

import pytest

from fedshift.papers import plan
from fedshift.papers.recipe import Way
from fedshift.papers.tables import table


@pytest.fixture
def runs(monkeypatch):
    """The runs that a table or figure takes where all data are at hand, by its key."""
    monkeypatch.setattr(plan, "present", lambda data, root: True)
    return lambda key: {spec for _, made in plan.plans_of(table(key), Way(root=Path("data"))) for spec in made.specs}
