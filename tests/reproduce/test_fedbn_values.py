"""What FedBN printed: numbers agree with each other and with the text (``test_values.py``: the files are whole)."""

import re
import tomllib
from importlib.resources import files

import pytest

FOLDER = files("fedshift.reproduce") / "values" / "fedbn"
FILES = {
    file.name.removesuffix(".toml"): tomllib.loads(file.read_text("utf-8"))
    for file in sorted(FOLDER.iterdir(), key=str)
}
ROWS = {"table1": 4, "table11": 4, "table12": 2, "table13": 18, "table14": 15} | dict.fromkeys(
    ("table15", "table16", "table17"), 3
)
"""Rows of each table in one version, of table 1 for each of three benchmarks."""


def mean(cell):
    return float(cell.partition(" ")[0])


def rows(name, version, **axes):
    """The cells of a version by method and column; ``axes`` choose among rows of one method."""
    found = {}
    for block in FILES[name]["values"]:
        for row in block["rows"]:
            if block["version"] == version and all(row[key] == value for key, value in axes.items()):
                found.setdefault(row["method"], {}).update(zip(block["columns"], row["cells"], strict=True))
    return found


def test_tables_have_as_many_rows_and_digits_as_are_printed():
    for name, count in ROWS.items():
        assert [len(block["rows"]) for block in FILES[name]["values"]] == [count] * (3 if name == "table1" else 2)
        digits = 1 if name == "table1" else 2
        for cell in (cell for block in FILES[name]["values"] for row in block["rows"] for cell in row["cells"]):
            assert ("(" in cell) is (FILES[name]["seeds"] > 0)
            assert 10 < mean(cell) < 100
            assert all(len(number.partition(".")[2]) == digits for number in re.findall(r"[\d.]+", cell))


@pytest.mark.parametrize("version", ["v1", "final"])
def test_fedbn_has_the_same_cells_beside_centralized_training_and_beside_other_methods(version):
    assert rows("table12", version)["fedbn"] == rows("table11", version)["fedbn"]


@pytest.mark.parametrize("name", ["table15", "table16", "table17"])
def test_versions_agree_where_nothing_was_run_again(name):
    first, last = FILES[name]["values"]
    assert {**first, "version": "final"} == last


READ_BY_HAND = [
    ("table1", "v1", {}, "single", "dslr", "78.7 (1.3)"),
    ("table1", "v1", {}, "fedprox", "quickdraw", "54.4 (3.1)"),
    ("table1", "v1", {}, "fedavg", "UM_1", "70.7 (0.5)"),
    ("table1", "v1", {}, "fedbn", "UCLA_1", "65.5 (1.0)"),
    ("table11", "v1", {}, "fedavg", "svhn", "62.86 (1.49)"),
    ("table11", "final", {}, "fedbn", "svhn", "76.93 (0.25)"),
    ("table11", "final", {}, "fedprox", "mnist", "97.30 (0.17)"),
    ("table12", "final", {}, "centralized", "mnistm", "79.65 (0.24)"),
    ("table13", "v1", {"batch_size": 10, "epochs": 4}, "fedbn", "synthdigits", "86.99"),
    ("table13", "final", {"batch_size": 0, "epochs": 16}, "fedavg", "svhn", "71.56"),
    ("table14", "v1", {"client": "mnistm"}, "single", "74", "17.23"),
    ("table14", "final", {"client": "svhn"}, "fedbn", "743", "72.10"),
    ("table15", "final", {}, "fedbn", "synthdigits", "97.83"),
    ("table16", "v1", {}, "fedprox", "usps", "92.12"),
    ("table17", "final", {}, "fedavg", "global", "91.28"),
]


def test_cells_read_by_hand():
    for name, version, axes, method, column, cell in READ_BY_HAND:
        assert rows(name, version, **axes)[method][column] == cell


def test_rows_of_table_1_are_of_one_benchmark_each():
    assert [(block["data"], block["model"]) for block in FILES["table1"]["values"]] == [
        ("office-caltech10", "alexnet-bn"), ("domainnet", "alexnet-bn"), ("abide", "abide-mlp")
    ]  # fmt: skip


def test_sizes_of_clients_are_those_of_the_tables():
    assert FILES["table15"]["values"][1]["samples"] == [7943, 743, 39116, 5600, 5600]
    assert FILES["table16"]["values"][1]["samples"] == [79430, 7430, 391160, 56000, 56000]


def test_clients_of_unequal_size_have_all_that_the_sets_have(runs):
    found = runs("fedbn/table15") | runs("fedbn/table16")
    assert {spec.data for spec in found} == {"digits-five(samples=None)"}  # without it all have 7438
    assert {spec.split for spec in found} == {"sample(fraction=0.1), repeat()", "repeat()"}


def test_centralized_training_has_batches_of_32_and_not_32_a_client(runs):
    assert {(spec.method, spec.batch_size) for spec in runs("fedbn/table12")} == {
        ("centralized(scaled=False)", 32), ("fedbn", 32),
    }  # fmt: skip


def test_one_to_ten_clients_of_each_set_take_part(runs):
    counts = [spec.split[-4] for spec in runs("fedbn/figure4") if spec.split]
    assert sorted(counts) == sorted("0123456789" * 2)  # of two methods, the last client's number
