"""FedMMB's printed values (arXiv:2011.07006) agree with one another, and runs with them.

No column of this paper is an average of others, so there are no averages to check.
"""

import re
import tomllib
from pathlib import Path

import pytest

from fedshift import reproduce
from fedshift.reproduce import planning
from fedshift.reproduce.published_tables import find_table
from fedshift.reproduce.recipes import ReproductionOptions

FILES = {path.stem: path for path in sorted((Path(reproduce.__file__).parent / "values" / "fedmmb").glob("*.toml"))}
READ = {name: tomllib.loads(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
TABLES = {name: made for name, made in READ.items() if name.startswith("table")}
ROWS = [row for made in TABLES.values() for row in made["values"][0]["rows"]]


def cells(name, column, **where):
    """The numbers of a column in the rows that ``where`` describes, from top to bottom."""
    (block,) = READ[name]["values"]
    place = block["columns"].index(column)
    chosen = (row for row in block["rows"] if where.items() <= row.items())
    return [float(row["cells"][place]) for row in chosen if row["cells"][place]]


def test_what_the_paper_calls_a_row_agrees_with_its_settings():
    for row in ROWS:
        said = row["paper_name"]
        for letter, key in {"K": "clients", "B'?": "batch_size", "C": "batches", "E": "epochs"}.items():
            if found := re.search(rf"\b{letter}=(\d+)", said):
                assert row[key] == int(found[1])
        assert ("batches" in row, "epochs" in row) == (row["method"] == "fedmmb", row["method"] == "fedavg")
        assert ("split" in row) == ("clients" in row) == (row["method"] != "centralized")
        split = row.get("split", "")
        assert split in ("", "ham_non_iid()") or f"(clients={row['clients']}" in split
        if said.startswith("IID"):
            assert split.startswith("iid(")
        if found := re.match(r"Non-IID-(\d)", said):
            assert split.endswith(f"per_client={found[1]})")


@pytest.mark.parametrize(
    ("name", "axes", "count"),
    [
        ("table2", ("model", "data", "split", "clients"), 20),
        ("table3", ("split",), 7),
        ("table4", ("split", "batches"), 9),
        ("table5", ("data", "method", "batch_size"), 6),
    ],
)
def test_no_scenario_is_missing_or_there_twice(name, axes, count):
    rows = READ[name]["values"][0]["rows"]
    assert len({tuple(row.get(axis) for axis in axes) for row in rows}) == len(rows) == count


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


def test_table_5_repeats_a_row_of_table_4_and_fedmmb_is_best_in_both_parts():
    repeated = {"split": "labels(clients=10, per_client=2)", "method": "fedmmb", "batches": 20}
    for column in ("rounds", "accuracy"):
        assert cells("table5", column, **repeated) == cells("table4", column, **repeated)
    for part, metric, others in (("a", "accuracy", [0.6564, 0.6663, 0.6654]), ("b", "auc", [0.6931])):
        (best,) = cells("table5", metric, part=part, method="fedmmb")
        assert cells("table5", metric, part=part, method="fedavg") == others
        assert best > max(others)
    assert cells("table5", "auc") == [0.7431, 0.6931]


def test_numbers_of_three_digits_in_a_claim_are_cells_of_its_table():
    for figure, table in {"figure1": "table2", "figure2": "table3", "figure3": "table4", "figure4": "table5"}.items():
        printed = {cell for row in TABLES[table]["values"][0]["rows"] for cell in row["cells"]}
        claimed = set(re.findall(r"\b0\.\d{3,}", " ".join(READ[figure]["claims"])))
        assert claimed, figure
        assert claimed <= printed


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
