"""What tests of the papers' values share."""

from pathlib import Path

import pytest

from fedshift.reproduce import planning
from fedshift.reproduce.published_tables import find_table
from fedshift.reproduce.recipes import ReproductionOptions


@pytest.fixture
def runs(monkeypatch):
    """The runs that a table or figure takes where all data are at hand, by its key."""
    monkeypatch.setattr(planning, "is_present", lambda data, root: True)
    return lambda key: {
        spec
        for _, made in planning.make_plans(find_table(key), ReproductionOptions(root=Path("data")))
        for spec in made.specs
    }
