"""FedMMB's printed values (arXiv:2011.07006), some as read again, and runs with them."""

import tomllib
from pathlib import Path

import pytest

from fedshift import reproduce
from fedshift.reproduce import planning
from fedshift.reproduce.published_tables import find_table
from fedshift.reproduce.recipes import ReproductionOptions

FILES = {path.stem: path for path in sorted((Path(reproduce.__file__).parent / "values" / "fedmmb").glob("*.toml"))}
READ = {name: tomllib.loads(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def cells(name, column, **where):
    """The numbers of a column in the rows that ``where`` describes, from top to bottom."""
    (block,) = READ[name]["values"]
    place = block["columns"].index(column)
    chosen = (row for row in block["rows"] if where.items() <= row.items())
    return [float(row["cells"][place]) for row in chosen if row["cells"][place]]


def test_some_cells_as_printed():
    assert cells("table2", "accuracy", method="centralized") == [0.9382, 0.8449, 0.9760, 0.8441]
    non_iid = {"model": "cfnn3", "split": "labels(clients=100, per_client=1)"}
    assert cells("table2", "discordance", **non_iid) == [2e-5, 5e-4]
    assert cells("table2", "accuracy", **non_iid) == [0.9763, 0.8442]
    assert cells("table2", "discordance", model="fnn2", split="iid(clients=10)") == [3e-7, 5e-6]
    assert cells("table3", "accuracy") == [0.7373, 0.7345, 0.7350, 0.7357, 0.7390, 0.7342, 0.7358]
    assert cells("table4", "rounds", split="iid(clients=10)") == [2471, 761, 341]
    assert cells("table4", "rounds", batches=5) == [2471, 2171, 3241]
    assert cells("table5", "rounds") == [1591, 1441, 1361, 1201, 241, 216]


@pytest.mark.parametrize("number", range(1, 5))
def test_a_figure_is_drawn_from_the_runs_of_the_table_that_has_its_numbers(number, runs):
    drawn, tabled = (runs(f"fedmmb/{name}") for name in (f"figure{number}", f"table{number + 1}"))
    assert len(drawn) == (20, 7, 9, 6)[number - 1]
    assert drawn == tabled


@pytest.mark.parametrize("name", ["table4", "table5"])
def test_runs_are_as_long_as_the_printed_rounds_and_measured_as_often(name, monkeypatch):
    monkeypatch.setattr(planning, "is_present", lambda data, root: True)
    ((block, made),) = planning.make_plans(find_table(f"fedmmb/{name}"), ReproductionOptions(root=Path("data")))
    measured = [cell for cell in made.cells if cell.measure == "rounds"]
    found = [(block.rows[cell.row][1][cell.column].mean, cell.spec) for cell in measured]
    assert len(found) == len(READ[name]["values"][0]["rows"])
    for printed, spec in found:
        assert printed <= spec.rounds
        assert (printed - 1) % spec.evaluate_every == 0  # the first round was measured too
