"""What a run leaves for people: each client while they are few, their distribution when they are many."""

import html
import io
from dataclasses import replace

import pandas as pd
import pytest
from rich.console import Console

from fedshift.report import figures, page
from fedshift.report.formatting import make_table
from fedshift.report.publication import publish_summary
from fedshift.report.report import ReportTable
from fedshift.report.tables import ONE_BY_ONE
from fedshift.utils.words import Information


@pytest.fixture
def published(tmp_path, undrawn):
    def run(study):
        console = Console(file=io.StringIO(), width=100)
        publish_summary(study, tmp_path, console)
        tables = {path.name: path.read_text().splitlines() for path in (tmp_path / "tables").iterdir()}
        return console.file.getvalue(), tables

    return run


def test_a_table_that_is_declared_once_is_in_every_form_and_others_only_in_their_places(
    published, make_study, tmp_path, monkeypatch
):
    new = ReportTable(
        file="new", caption="Declared once", text=make_table(("what", "value"), [("row", 4711)]),
        frame=pd.DataFrame({"value": [4711]}),
    )  # fmt: skip
    declared = page.list_tables
    monkeypatch.setattr(page, "list_tables", lambda *how: [*declared(*how), new])
    study = make_study(target_metric=0.6, notices=(Information("pairs of files"), "wrong masks"))
    said, files = published(study)
    shown = html.unescape((tmp_path / "report.html").read_text())
    tables = page.make_report(study).tables
    assert {"accuracy", "minus-fedavg", "minus-fedavg-clients", "target", "new"} < {table.file for table in tables}
    for table in tables:
        first = table.text.rows[0][1].text
        assert (table.caption in said.splitlines()) == ("terminal" in table.places), table.file
        assert (f'<figcaption id="table-{table.file}">{table.caption}<' in shown) == ("page" in table.places)
        for kind in ("md", "tex", *([] if table.frame is None else ["csv"])):
            assert (f"{table.file}.{kind}" in files) == ("files" in table.places), table.file
        if "files" in table.places:
            assert any(first in line for line in files[f"{table.file}.md"])
    assert "4711" in said
    first, last = shown.index("Read this first"), shown.index('<h2 id="notes">')
    assert "<li>wrong masks</li>" in shown[first:last]
    assert "pairs of files" not in shown[first:last]
    assert "<li>pairs of files</li>" in shown[last:]
    assert '<a href="#notes">Notes</a>' in shown
    assert files["new.csv"] == [",value", "0,4711"]


def test_page_and_files_share_figures_that_are_drawn_once(study, tmp_path, monkeypatch):
    drawn = []
    for module in (page, figures):
        monkeypatch.setattr(module, "make_panels", lambda _: drawn.append(1) or [])
    publish_summary(replace(study, samples={}), tmp_path, Console(file=io.StringIO()))
    assert drawn == [1]


def test_few_clients_are_printed_one_by_one(published, make_crowd):
    said, tables = published(make_crowd(ONE_BY_ONE))
    assert all(f" client {number} " in said for number in range(ONE_BY_ONE))
    assert len(tables["accuracy.csv"]) == 1 + ONE_BY_ONE + 3
    assert len(tables["accuracy.md"]) == 2 + ONE_BY_ONE + 3 + 2


def test_models_after_local_work_have_a_table_of_their_own_in_terminal_files_and_page(published, study, tmp_path):
    plain, tables = published(study)
    assert "local work" not in plain + (tmp_path / "report.html").read_text()
    assert "accuracy-trained.csv" not in tables
    rows = study.rows[(study.rows["split"] == "test") & (study.rows["model"] == "personal")]
    after = rows.assign(moment="trained", hits=[[hits[0], 0] for hits in rows["hits"]])
    said, tables = published(replace(study, rows=pd.concat([study.rows, after], ignore_index=True)))
    assert said.startswith(plain[: plain.index("Accuracy minus")].rstrip())
    assert "in percent just after local work, before aggregation, of clients that took part in the round, mean" in said
    assert tables["accuracy-trained.csv"][1].startswith("a,0.52,0.02,3,0.63,0.03,3")
    assert tables["accuracy-trained.csv"][2].startswith("b,0.5,0,3,0.5,0,3")
    assert tables["accuracy.csv"][2].startswith("b,0.82,0.02,3,0.83,0.03,3")
    page = (tmp_path / "report.html").read_text()
    assert "Test accuracy of the personal model in percent just after local work, before aggregation" in page
    assert "Loss, personal model just after local work, before aggregation" in page


def test_the_csv_has_what_the_most_frequent_class_reaches(published, make_study):
    """Of 80 + 20 and 150 + 150 test samples, the classes 1 and 0 are 20 and 150: 0.2, 0.5, and 170 of 400."""
    _, tables = published(make_study(majority={"a": 1, "b": 0}))
    header, *rows = (line.split(",") for line in tables["accuracy.csv"])
    assert header[-2:] == ["fedbn seeds", "most frequent class"]
    last = {row[0]: row[-1] for row in rows}
    assert last == {"a": "0.2", "b": "0.5", "macro": "0.35", "pooled": "0.425", "worst client": ""}


def test_of_many_clients_the_distribution_is_printed_and_each_is_in_the_csv(published, make_crowd, tmp_path):
    said, tables = published(make_crowd(ONE_BY_ONE + 1))
    assert "51 clients" in said
    assert "95 % quantile" in said
    assert " client 7 " not in said
    assert f"Each client is in {tmp_path / 'tables' / 'accuracy.csv'}." in said
    assert [line.split(",")[0] for line in tables["accuracy.csv"][1:4]] == ["client 0", "client 1", "client 2"]
    assert len(tables["accuracy.csv"]) == 1 + ONE_BY_ONE + 1 + 9
    assert len(tables["accuracy.md"]) == 2 + 9 + 2
