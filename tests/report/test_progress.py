"""A comparison that has not ended: its first line says so, and methods at different rounds are not compared."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from fedshift.report.concordance import concordance_table
from fedshift.report.differences import MEAN, compare_methods
from fedshift.report.page import make_report, render_page
from fedshift.report.progress import describe_falling, describe_partial, describe_reached, find_reached_rounds, is_even
from fedshift.report.publication import publish_summary
from fedshift.report.tables import describe_seeds
from tests.report.conftest import LAST

THREE = {**LAST, "fedprox": LAST["fedavg"]}


def before(method, seed, number):
    """Leave out what ``method`` measured under ``seed`` after round ``number``."""
    return lambda row: (row["method"], row["seed"]) != (method, seed) or row["round"] <= number


@pytest.fixture
def interrupted(make_study):
    """Stopped in fedbn's run of the last seed, which has reached round 2 of 4."""
    return make_study(THREE, rounds=4, keep=before("fedbn", 2, 2))


@pytest.fixture
def never_together(make_study):
    """fedbn is behind under every seed."""
    return make_study(rounds=4, keep=lambda row: row["method"] != "fedbn" or row["round"] <= 2)


LINE = (
    "PARTIAL: 4 rounds were asked for, and so far fedavg has reached round 4, fedbn has reached round 4 (seeds 0, 1) "
    "and has reached round 2 (seed 2), fedprox has reached round 4. Methods are compared only where both have reached "
    "the same round."
)


def test_the_line_says_which_runs_are_where(interrupted, make_study):
    assert describe_partial(interrupted) == LINE
    assert describe_partial(make_study()) == ""
    assert describe_partial(make_study(keep=lambda row: False)) == ""
    reached = {("fedavg", 0): 3, ("fedbn", 0): 0}
    assert describe_reached(reached, 9).startswith(
        "PARTIAL: 9 rounds were asked for, and so far fedavg has reached round 3, fedbn has not been evaluated. "
    )


def test_a_training_loss_that_still_falls_is_noted(make_study):
    study = make_study(rounds=20)
    assert describe_falling(study) == ""  # 1 / round
    rows = study.rows.copy()
    steady = (rows["split"] == "train") & (rows["method"] == "fedbn")
    rows.loc[steady, "loss_sum"] = (25.0 - rows["round"]) * rows["samples"]
    steady = replace(study, rows=rows)
    # means of rounds 17..20, 13..16 and of round 1: 6.5, 10.5 and 24
    assert "by this percentage of its whole fall: fedbn 23. Train" in describe_falling(steady)
    assert describe_falling(steady) in make_report(steady, whole=False).tables[0].text.note
    rows.loc[rows["seed"] == 1, "loss_sum"] = rows["samples"]
    assert describe_falling(replace(study, rows=rows)) == ""  # not for every seed
    assert describe_falling(make_study(rounds=9)) == ""


def test_runs_that_stopped_together_are_partial_and_are_compared(make_study):
    study = make_study(rounds=4, keep=lambda row: row["round"] <= 2)
    assert describe_partial(study) == (
        "PARTIAL: 4 rounds were asked for, and so far fedavg has reached round 2, fedbn has reached round 2."
    )
    assert is_even(find_reached_rounds(study))
    whole = make_study(rounds=4, keep=lambda row: row["round"] <= 2, names={"a": "a", "b": "b"})
    assert compare_methods(study).equals(compare_methods(whole))
    assert compare_methods(study).loc[("fedbn", MEAN), "seeds"] == 3


def test_claims_are_over_the_seeds_under_which_both_reached_the_same_round(interrupted, make_study):
    gaps = compare_methods(interrupted).xs(MEAN, level="client")
    two = compare_methods(make_study({name: runs[:2] for name, runs in THREE.items()}, rounds=4))
    assert gaps["seeds"].to_dict() == {"fedbn": 2, "fedprox": 3}
    assert gaps.loc["fedbn", "difference"] == two.loc[("fedbn", MEAN), "difference"]


def test_nothing_is_said_between_methods_that_never_reached_the_same_round(never_together):
    row = compare_methods(never_together).loc[("fedbn", MEAN)]
    assert row["seeds"] == 0
    assert row[["difference", "low", "high"]].isna().all()


def test_discordance_is_over_such_seeds_too(make_study):
    def pooled(study):
        object.__setattr__(study.methods["fedbn"], "pooled", True)
        return concordance_table(study)

    assert pooled(make_study(rounds=4))["seeds"].tolist() == [3]
    assert pooled(make_study(rounds=4, keep=before("fedbn", 2, 2)))["seeds"].tolist() == [2]


def test_every_table_begins_with_the_line_and_none_has_a_best_method(interrupted, tmp_path, undrawn):
    interrupted = replace(interrupted, target_metric=0.99)
    for table in make_report(interrupted, whole=False).list_tables("files"):
        assert table.text.partial == LINE, table.file
        assert not any(cell.best for row in table.text.rows for cell in row), table.file
    console = Console(width=400, record=True, file=StringIO())
    publish_summary(interrupted, tmp_path, console)
    printed = console.export_text()
    assert printed.startswith(LINE)
    assert "last evaluated round of each" in printed
    assert "not yet" in printed
    files = sorted((tmp_path / "tables").iterdir())
    assert {file.name for file in files} >= {"accuracy.csv", "accuracy.md", "accuracy.tex", "differences.csv"}
    for file in files:
        first = file.read_text().splitlines()[0]
        assert "PARTIAL: 4 rounds were asked for" in first, file.name
        text = file.read_text().replace(r"\par\textbf{PARTIAL: ", "")
        assert not any(sign in text for sign in (r"\textbf{", r"\mathbf{", "**")), file.name


def test_the_page_begins_with_the_line_and_has_no_headline(interrupted, undrawn):
    page = render_page(interrupted)
    main = page[page.index("<main>") :]
    assert re.match(r"<main>\s*<p class=\"partial\">PARTIAL: 4 rounds", main)
    assert 'class="lead"' not in page
    assert "<strong>" not in main
    beyond = render_page(replace(interrupted, rounds=2))
    assert 'class="partial"' in beyond  # the others went on beyond it


def test_a_complete_comparison_has_no_such_line(plain):
    assert "PARTIAL" not in plain.page


def test_captions_count_the_seeds_that_were_evaluated(make_study):
    assert describe_seeds(make_study()) == "mean (std) over 3 seeds"
    assert describe_seeds(make_study(keep=before("fedbn", 2, 0))) == "mean (std) over 2 to 3 seeds"
    assert describe_seeds(make_study(keep=lambda row: row["seed"] == 0)) == "one seed"


def test_figures_of_the_reported_round_say_it_too(interrupted):
    from fedshift.report.figures import make_figures

    titles = {name: figure.axes[0].get_title(loc="left") for name, figure in make_figures(interrupted).items()}
    titles |= {name: figure.axes[0].get_title() or titles[name] for name, figure in make_figures(interrupted).items()}
    assert titles["accuracy-bars"].startswith("PARTIAL: ")
    assert titles["traffic"].startswith("PARTIAL: ")
