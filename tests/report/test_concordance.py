"""Discordance from records, by hand, and where it is shown."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from fedshift.report.concordance import concordance_table, describe_concordance, format_concordance_table
from fedshift.report.figures import make_panels
from fedshift.report.publication import publish_summary

# The mean loss of a client is 1 - accuracy, and half as many are right in the first of two rounds.
SCORES = {
    "fedsmb": [{"a": 50, "b": 240}, {"a": 40, "b": 240}],
    "fedavg": [{"a": 90, "b": 240}, {"a": 90, "b": 240}],
    "centralized": [{"a": 60, "b": 240}, {"a": 60, "b": 240}],
}


@pytest.fixture
def pooling(make_study):
    """A study in which the methods of these names pool all data."""

    def make(*pooled, scores=SCORES, **changes):
        made = make_study(scores, **changes)
        facts = {name: replace(fact, pooled=name in pooled) for name, fact in made.methods.items()}
        return replace(made, methods=facts)

    return make


def test_discordance_is_over_rounds_and_then_over_seeds(pooling):
    table = concordance_table(pooling("centralized"))
    assert list(table.index) == [("fedsmb", "centralized"), ("fedavg", "centralized")]
    # Macro losses differ by 0.05 and 0.025 under the first seed, by 0.1 and 0.05 under the second.
    first, second = (0.05**2 + 0.025**2) / 2, (0.1**2 + 0.05**2) / 2
    row = table.loc[("fedsmb", "centralized")]
    assert row["delta mean"] == pytest.approx((first + second) / 2)
    assert row["delta std"] == pytest.approx((second - first) / math.sqrt(2))
    assert (row["rounds"], row["seeds"]) == (2, 2)
    assert table.loc[("fedavg", "centralized"), "delta mean"] == pytest.approx((0.15**2 + 0.075**2) / 2)


def cells(study):
    table = format_concordance_table(concordance_table(study))
    return [[cell.text for cell in row] for row in table.rows]


def test_how_numbers_are_written(pooling):
    assert cells(pooling("centralized")) == [
        ["fedsmb", "centralized", "3.9e-03 (3.3e-03)", "2", "2", "-"],
        ["fedavg", "centralized", "1.4e-02 (0.0e+00)", "2", "2", "-"],
    ]
    single = pooling("centralized", scores={name: runs[:1] for name, runs in SCORES.items()})
    assert cells(single)[0][2] == "1.6e-03"


def test_a_verdict_is_a_claim_as_every_other(pooling):
    """Discordances (x^2 + x^2 / 4) / 2 of a macro difference of x, tested against 0.01 with the three pairs."""
    twin = {"centralized": [{"a": 60, "b": 240}] * 4}
    near = {"near": [{"a": 60 + gap, "b": 240} for gap in (2, 2, 4, 2)]}
    far = {"far": [{"a": 60 + gap, "b": 240} for gap in (36, 38, 40, 36)]}
    middle = {"middle": [{"a": 60 + gap, "b": 240} for gap in (16, 38, 30, 16)]}
    said = {row[0]: row[-1] for row in cells(pooling("centralized", scores=twin | near | far | middle))}
    same = cells(pooling("centralized", scores=twin | {"same": twin["centralized"]}))
    assert same == [["same", "centralized", "0.0e+00 (0.0e+00)", "2", "4", "concordant"]]
    assert said == {"near": "concordant", "far": "not concordant", "middle": "inconclusive"}


def test_only_rounds_and_clients_that_both_measured_count(pooling):
    study = pooling("centralized", keep=lambda row: (row["method"], row["round"]) != ("fedsmb", 1))
    row = concordance_table(study).loc[("fedsmb", "centralized")]
    assert (row["rounds"], row["delta mean"]) == (1, pytest.approx((0.05**2 + 0.1**2) / 2))
    assert "--evaluate-every 1" in describe_concordance(study, concordance_table(study))
    study = pooling("centralized", keep=lambda row: (row["method"], row["client"]) != ("centralized", "b"))
    assert concordance_table(study).loc[("fedavg", "centralized"), "delta mean"] == pytest.approx(
        (0.3**2 + 0.15**2) / 2
    )


def test_what_was_not_measured_has_no_verdict(pooling):
    study = pooling("centralized", keep=lambda row: row["method"] != "centralized")
    table = concordance_table(study)
    assert table["delta mean"].isna().all()
    assert cells(study)[0] == ["fedsmb", "centralized", "-", "0", "0", "-"]


@pytest.mark.parametrize("pooled", [(), tuple(SCORES)])
def test_there_is_none_without_both_kinds_of_methods(pooled, pooling):
    assert concordance_table(pooling(*pooled)).empty


def test_each_is_put_beside_every_pooled_method(pooling):
    assert list(concordance_table(pooling("centralized", "fedavg")).index) == [
        ("fedsmb", "fedavg"), ("fedsmb", "centralized"),
    ]  # fmt: skip


def published(study, folder, monkeypatch):
    monkeypatch.setattr("fedshift.report.publication.save_figures", lambda *_: None)
    console = Console(file=io.StringIO(), width=120)
    publish_summary(study, folder, console)
    return console.file.getvalue(), {path.name: path.read_text() for path in (folder / "tables").iterdir()}


def test_it_is_printed_written_shown_and_drawn(pooling, tmp_path, monkeypatch, blank):
    study = pooling("centralized")
    said, tables = published(study, tmp_path, monkeypatch)
    assert "that both evaluated; concordant below 0.01" in said
    assert tables["concordance.csv"].splitlines()[1] == "fedsmb,centralized,0.00390625,0.00331456303681194,2,2,,"
    assert "| fedsmb | centralized | 3.9e-03 (3.3e-03) |" in tables["concordance.md"]
    assert r"fedsmb & centralized & $3.9 \cdot 10^{-3} \pm 3.3 \cdot 10^{-3}$ &" in tables["concordance.tex"]
    page = (tmp_path / "report.html").read_text()
    assert '<figcaption id="table-concordance">Concordance with centralized training' in page
    assert "Test loss (macro): test loss (nats) over rounds" in page
    assert "fedsmb 0.375 after round 2" in {panel.name: panel.description for panel in make_panels(study)}["test-loss"]


def test_nothing_of_it_is_shown_without_a_pooled_method(pooling, tmp_path, monkeypatch, blank):
    said, tables = published(pooling(), tmp_path, monkeypatch)
    assert "oncordan" not in said + (tmp_path / "report.html").read_text()
    assert not any("concordance" in name for name in tables)
