"""FedMMB's printed values (arXiv:2011.07006): the files are whole, name what fedshift has, and agree with one another.

No column of this paper is an average of others, so there are no averages to check.
"""

import re
import tomllib
from itertools import product
from pathlib import Path

import pytest

from fedshift import reproduce
from fedshift.config.expressions import expressions, resolve
from fedshift.data.sources import SPLITS
from fedshift.reproduce import planning
from fedshift.reproduce.published_tables import find_table
from fedshift.reproduce.recipes import ReproductionOptions

FILES = {path.stem: path for path in sorted((Path(reproduce.__file__).parent / "values" / "fedmmb").glob("*.toml"))}
READ = {name: tomllib.loads(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
TABLES = {name: made for name, made in READ.items() if name.startswith("table")}
FIGURES = {name: made for name, made in READ.items() if name.startswith("figure")}
ROWS = [
    pytest.param(made, row, id=f"{name}-{place}")
    for name, made in TABLES.items()
    for place, row in enumerate(made["values"][0]["rows"])
]

HEAD = {"title": str, "where": str, "data": str, "model": str, "metric": str, "unit": str, "seeds": int, "note": str}
BLOCK = {"version": str, "page": int, "columns": list, "by": str, "rows": list}
ROW = {"method": str, "paper_name": str, "lr": float, "batch_size": int, "cells": list}
AXES = {"data": str, "model": str, "metric": str, "part": str}
AXES |= {"split": str, "clients": int, "batches": int, "epochs": int}
CELL = re.compile(r"^-?\d+(\.\d+)?( \(\d+(\.\d+)?\))?$")


def typed(found, needed, allowed=()):
    known = needed | dict(allowed)
    return needed.keys() <= found.keys() <= known.keys() and all(type(found[key]) is known[key] for key in found)


def cells(name, column, **where):
    """The numbers of a column in the rows that ``where`` describes, from top to bottom."""
    (block,) = READ[name]["values"]
    place = block["columns"].index(column)
    chosen = (row for row in block["rows"] if where.items() <= row.items())
    return [float(row["cells"][place]) for row in chosen if row["cells"][place]]


def test_tables_2_to_5_and_figures_1_to_4_are_there():
    assert list(FILES) == [*(f"figure{n}" for n in range(1, 5)), *(f"table{n}" for n in range(2, 6))]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_keys_of_one(name):
    made = READ[name]
    assert typed(made, HEAD | {"values": list})
    assert made["title"]
    assert re.fullmatch(r"section 4\.[123]", made["where"])
    (block,) = made["values"]
    assert typed(block, BLOCK)
    assert (block["version"], block["by"]) == ("", "metric")
    assert made["metric"] in block["columns"]
    for key in ("data", "model"):
        assert all((key in row) == (made[key] == "") for row in block["rows"])


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_what_is_drawn_and_claimed(name):
    made = READ[name]
    assert typed(made, HEAD | {"drawn": str, "claims": list})
    assert made["drawn"]
    assert made["claims"]
    assert all(re.search(r"\d", claim) for claim in made["claims"])


@pytest.mark.parametrize("made", READ.values(), ids=READ)
def test_the_heading_names_data_and_networks_that_fedshift_has(made):
    if made["data"]:
        resolve("data.datasets", made["data"])
    if made["model"]:
        resolve("models", made["model"])


@pytest.mark.parametrize(("made", "row"), ROWS)
def test_a_row_is_whole_and_names_what_fedshift_has(made, row):
    assert typed(row, ROW, AXES)
    resolve("methods", row["method"])
    resolve("models", made["model"] or row["model"])
    resolve("data.datasets", made["data"] or row["data"])
    columns = made["values"][0]["columns"]
    assert len(row["cells"]) == len(columns)
    assert all(cell == "" or CELL.match(cell) for cell in row["cells"])
    assert row["cells"][columns.index(row.get("metric", made["metric"]))]
    if row["method"] == "centralized":
        assert not {"split", "clients"} & row.keys()
    else:
        expressions("split", row["split"], SPLITS.__getitem__)
        assert row["split"] == "ham_non_iid()" or f"(clients={row['clients']}" in row["split"]


@pytest.mark.parametrize(("made", "row"), ROWS)
def test_what_the_paper_calls_a_row_agrees_with_its_settings(made, row):
    said = row["paper_name"]
    for letter, key in {"K": "clients", "B'?": "batch_size", "C": "batches", "E": "epochs"}.items():
        if found := re.search(rf"\b{letter}=(\d+)", said):
            assert row[key] == int(found[1])
    assert ("batches" in row, "epochs" in row) == (row["method"] == "fedmmb", row["method"] == "fedavg")
    if said.startswith("IID"):
        assert row["split"].startswith("iid(")
    if found := re.match(r"Non-IID-(\d)", said):
        assert row["split"].endswith(f"per_client={found[1]})")


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


def test_every_federation_is_concordant_and_the_worst_discordance_is_the_one_that_the_text_names():
    discordance = cells("table2", "discordance") + cells("table3", "discordance")
    assert len(discordance) == 16 + 6
    assert max(discordance) == 0.007
    assert max(cells("table2", "discordance")) == 0.0007


@pytest.mark.parametrize(("model", "data"), [*product(["fnn2", "cfnn3"], ["mnist", "fashion-mnist"])])
def test_concordant_federations_are_as_accurate_as_their_twin(model, data):
    (twin,) = cells("table2", "accuracy", model=model, data=data, method="centralized")
    found = cells("table2", "accuracy", model=model, data=data, method="fedsmb")
    assert len(found) == 4
    assert all(abs(each - twin) <= 0.0012 for each in found)


def test_only_iid_with_many_batches_reaches_the_baseline_and_more_batches_take_fewer_rounds():
    rows = READ["table4"]["values"][0]["rows"]
    reached = [row["paper_name"] for row in rows if float(row["cells"][1]) >= 0.7456]
    assert reached == ["IID, C=20", "IID, C=50"]
    for split in {row["split"] for row in rows}:
        assert (rounds := cells("table4", "rounds", split=split)) == sorted(rounds, reverse=True)
    assert cells("table4", "accuracy", split="labels(clients=10, per_client=4)") == [0.7295, 0.7284, 0.7230]
    assert cells("table4", "accuracy", split="labels(clients=10, per_client=2)") == [0.7260, 0.6906, 0.6591]


def test_table_5_repeats_a_row_of_table_4_and_fedmmb_is_best_in_both_parts():
    repeated = {"split": "labels(clients=10, per_client=2)", "method": "fedmmb", "batches": 20}
    for column in ("rounds", "accuracy"):
        assert cells("table5", column, **repeated) == cells("table4", column, **repeated)
    for part, metric, others in (("a", "accuracy", [0.6564, 0.6663, 0.6654]), ("b", "auc", [0.6931])):
        (best,) = cells("table5", metric, part=part, method="fedmmb")
        assert cells("table5", metric, part=part, method="fedavg") == others
        assert best > max(others)
    assert cells("table5", "auc") == [0.7431, 0.6931]


@pytest.mark.parametrize("name", FIGURES)
def test_numbers_of_three_digits_in_a_claim_are_cells_of_its_table(name):
    table = TABLES[{"figure1": "table2", "figure2": "table3", "figure3": "table4", "figure4": "table5"}[name]]
    printed = {cell for row in table["values"][0]["rows"] for cell in row["cells"]}
    claimed = set(re.findall(r"\b0\.\d{3,}", " ".join(READ[name]["claims"])))
    assert claimed
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
