"""What a run leaves for people: each client while they are few, their distribution when they are many."""

import io

import pytest
from rich.console import Console

from fedshift.report.publish import publish
from fedshift.report.tables import ONE_BY_ONE


@pytest.fixture
def published(tmp_path, undrawn):
    def run(study):
        console = Console(file=io.StringIO(), width=100)
        publish(study, tmp_path, console)
        tables = {path.name: path.read_text().splitlines() for path in (tmp_path / "tables").iterdir()}
        return console.file.getvalue(), tables

    return run


def test_few_clients_are_printed_one_by_one(published, make_crowd):
    said, tables = published(make_crowd(ONE_BY_ONE))
    assert all(f" client {number} " in said for number in range(ONE_BY_ONE))
    assert len(tables["accuracy.csv"]) == 1 + ONE_BY_ONE + 3
    assert len(tables["accuracy.md"]) == 2 + ONE_BY_ONE + 3


def test_of_many_clients_the_distribution_is_printed_and_each_is_in_the_csv(published, make_crowd, tmp_path):
    said, tables = published(make_crowd(ONE_BY_ONE + 1))
    assert "51 clients" in said
    assert "95 % quantile" in said
    assert " client 7 " not in said
    assert f"Each client is in {tmp_path / 'tables' / 'accuracy.csv'}." in said
    assert [line.split(",")[0] for line in tables["accuracy.csv"][1:4]] == ["client 0", "client 1", "client 2"]
    assert len(tables["accuracy.csv"]) == 1 + ONE_BY_ONE + 1 + 9
    assert len(tables["accuracy.md"]) == 2 + 9
