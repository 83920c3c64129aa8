"""What FedBN printed, cell by cell, and runs with it (``test_values.py``: the files are whole)."""

import tomllib
from importlib.resources import files

FOLDER = files("fedshift.reproduce") / "values" / "fedbn"
FILES = {
    file.name.removesuffix(".toml"): tomllib.loads(file.read_text("utf-8"))
    for file in sorted(FOLDER.iterdir(), key=str)
}


def rows(name, version, **axes):
    """The cells of a version by method and column; ``axes`` choose among rows of one method."""
    found = {}
    for block in FILES[name]["values"]:
        for row in block["rows"]:
            if block["version"] == version and all(row[key] == value for key, value in axes.items()):
                found.setdefault(row["method"], {}).update(zip(block["columns"], row["cells"], strict=True))
    return found


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
