"""Tables of the papers run here: what is put beside what, what follows from it, and what is left when it is stopped."""

import json
import math
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedshift.analysis.similarity import compute_discordance
from fedshift.report.tables import metric_history
from fedshift.reproduce import figures, page, planning, published_tables, recipes, results, runner, time_estimates
from fedshift.reproduce.planning import make_plans
from fedshift.reproduce.published_tables import Block, PublishedValue, Table
from fedshift.reproduce.recipes import ReproductionOptions, run_name
from fedshift.reproduce.results import pending_runs, read_results, read_verdicts
from fedshift.reproduce.runner import rebuild, run_table
from fedshift.reproduce.time_estimates import TimeBudget
from fedshift.reproduce.verdict import ReproducedBlock, arrange_values, compare_values
from fedshift.results.summary import read_summary
from fedshift.utils.checked_json import read_checked, write_checked
from fedshift.utils.errors import FedshiftError, UsageError
from tests.conftest import ARRAYS

SETTINGS = {
    "rounds": 2, "samples": 16, "lr": 0.05, "model": "small-cnn", "domains": "pen,photo", "data": "digits",
    "image_size": 8,
}  # fmt: skip


def small(
    cells=("50.0 (5.0)", "40.0", "45.0"), columns=("pen", "photo", "average"), methods=("fedavg", "fedbn"), **keys
):
    by = keys.pop("by", "client")
    rows = tuple(({"method": name, **keys}, tuple(map(PublishedValue.of, cells))) for name in methods)
    block = Block(version="", page=0, by=by, columns=columns, keys={"data": "digits"}, rows=rows)
    return Table(
        paper="fedbn", name="table99", title="Tiny", where="", metric="accuracy", unit="percent", seeds=0, note="",
        drawn="", claims=("It is <small>",), blocks=(block,),
    )  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    """A table of two methods on two clients, with a recipe that a test may add to."""
    own = {}
    known = {"fedbn": {"all": SETTINGS, "table99": own}, "stand_in": {}, "subset": {}, "light": {}, "published": {}}
    monkeypatch.setattr(recipes, "load_recipes", lambda: known)
    monkeypatch.setattr(results, "load_recipes", lambda: known)
    made = small()
    monkeypatch.setattr(published_tables, "load_tables", lambda: {made.key: made})
    monkeypatch.setattr(page, "load_tables", lambda: {made.key: made})
    return own


def test_a_table_is_run_and_kept_and_not_run_again(tiny, tmp_path, monkeypatch):
    made, way = small(), ReproductionOptions(root=tmp_path, seeds=2)
    (found,) = run_table(made, way, tmp_path).blocks
    for row in (0, 1):
        pen, photo, average = (found.ours[row, column] for column in range(3))
        assert average.mean == pytest.approx((pen.mean + photo.mean) / 2)
        assert 0 <= pen.mean <= 100
        assert pen.std >= 0
    assert read_verdicts(made, tmp_path) == [f"{found.verdict} (scale 1)"]
    assert read_results(made, tmp_path) == [found]
    monkeypatch.setattr(runner, "make_checked", None)
    assert run_table(made, way, tmp_path).blocks == [found]
    assert rebuild(made, tmp_path).blocks == [found]
    fewer = replace(made, blocks=(replace(made.blocks[0], rows=made.blocks[0].rows[:1]),))
    for command in (read_results, rebuild, lambda made, place: run_table(made, way, place)):
        with pytest.raises(
            UsageError, match=r"table99-0.json has a number in row 2, column 1 of a table of 1 x 3: .* remove it"
        ):
            command(fewer, tmp_path)


def test_a_run_that_is_stopped_goes_on(tiny, tmp_path, Listener):
    made, way, stop = small(), ReproductionOptions(root=tmp_path), Event()
    specs = next(make_plans(made, way))[1].specs
    stop.set()
    assert run_table(made, way, tmp_path, stop=stop) is None
    assert not read_verdicts(made, tmp_path)
    assert rebuild(made, tmp_path) is None
    assert pending_runs(specs, tmp_path) == list(specs)
    heard = []
    second = Listener(lambda done: heard.append(done.round) or (len(heard) == 3 and stop.set()))
    stop.clear()
    assert run_table(made, way, tmp_path, callback=second, stop=stop) is None
    assert pending_runs(specs, tmp_path) == [specs[1]]
    (part,) = rebuild(made, tmp_path).blocks
    assert {row for row, _ in part.values} == {0}
    assert "Verdict (1 seed, 1 of 2 runs): " in part.summary
    (found,) = run_table(made, way, tmp_path).blocks
    assert not pending_runs(specs, tmp_path)
    assert {row for row, _ in found.values} == {0, 1}
    (tmp_path / "runs" / run_name(specs[1]) / "done.json").unlink()
    assert rebuild(made, tmp_path) is None  # less than is there
    assert read_results(made, tmp_path) == [found]


def test_figures_are_drawn_again_from_the_runs_that_have_ended(tiny, tmp_path, monkeypatch):
    over = {"method": ["fedavg"], "samples": [16, 32]}
    tiny["panels"] = [{"name": "b", "x": "samples", "y": "accuracy", "over": over}]
    made, way, shown = replace(small(), blocks=()), ReproductionOptions(root=tmp_path), []
    monkeypatch.setattr(figures, "_draw_panel", lambda _, panel, __: iter(shown.append(len(panel.points)) or ()))
    stop = Event()
    stop.set()
    assert run_table(made, way, tmp_path, stop=stop) is None
    (_, plan), *_ = make_plans(made, way)
    folder = tmp_path / "runs" / run_name(plan.specs[1])
    folder.mkdir(parents=True)
    write_checked(folder / "done.json", {"diverged": "as earlier ones wrote it"})
    rebuild(made, tmp_path)
    assert shown == [1]
    facts = json.loads((tmp_path / "results" / "fedbn" / "table99-pictures.json").read_text())
    assert facts["ended"] is False


@pytest.fixture
def leaking(tiny, rewrite, tmp_path, monkeypatch):
    """The same table on clients of which one is tested on samples that it trains on."""
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planning, "is_present", lambda data, root: True)
    x, y, *_ = ARRAYS["ann"]
    folder = rewrite("ann", x_test=x[:6], y_test=y[:6]).parent
    tiny |= {"domains": "", "samples": ""}
    made = small(columns=("ann", "bob", "average"))
    return replace(made, blocks=(replace(made.blocks[0], keys={"data": str(folder)}),))


@pytest.mark.slow
def test_errors_in_data_are_one_line_before_the_first_run_or_a_refusal(leaking, tmp_path, Listener):
    callback = Listener()
    heard = callback.notices
    way = ReproductionOptions(root=tmp_path, on_data_error="refuse")
    with pytest.raises(UsageError, match=r"^1 error in the data: Test samples are also in .*ann \(test\) 6 of 6"):
        run_table(leaking, way, tmp_path / "out", callback=callback)
    assert (heard, (tmp_path / "out").exists()) == ([], False)
    run_table(leaking, replace(way, on_data_error=None), tmp_path / "out", callback=callback)
    assert heard[0].startswith("1 error in the data: ")
    assert [line for line in heard if "in the data" in line] == heard[:1]
    assert sum(line.startswith("run ") for line in heard) == 2
    kept = [read_checked(path, "")["notices"][0] for path in (tmp_path / "out" / "runs").glob("*/notices.json")]
    assert kept == heard[:1] * 2
    heard.clear()
    run_table(leaking, replace(way, on_data_error="ignore", seeds=2), tmp_path / "out", callback=callback)
    assert not any("in the data" in line for line in heard)
    run_table(leaking, way, tmp_path / "out")  # nothing is left to run


def test_a_changed_bit_of_a_stored_result_is_refused_by_the_name_of_the_file(tiny, tmp_path, monkeypatch):
    tiny["panels"] = [{"name": "b", "x": "samples", "y": "accuracy", "over": {"method": ["fedavg"], "samples": [16]}}]
    monkeypatch.setattr(figures, "_draw_panel", lambda *_: iter(()))
    made, way, place = small(methods=("fedavg",)), ReproductionOptions(root=tmp_path), tmp_path / "here"
    run_table(made, way, place)
    readers = {"table99-0.json": read_results, "table99-pictures.json": figures.load_figures}
    for name, read in readers.items():
        path = place / "results" / "fedbn" / name
        whole = path.read_bytes()
        assert json.loads(whole)["scale"] == 1  # any reader of JSON can read it
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(FedshiftError, match=rf"{name} is damaged \(.*\): restore it from a copy, or remove it"):
                read(made, place)
        for command in (lambda: run_table(made, way, place), lambda: page.write_results_page(place)):
            with pytest.raises(FedshiftError, match=f"{name} is damaged"):
                command()
        path.unlink()
        run_table(made, way, place)
        assert path.read_bytes() == whole


def test_a_run_that_diverges_leaves_the_others(tiny, tmp_path):
    tiny["of"] = {"fedavg": {"lr": 1e20}}
    (found,) = run_table(small(), ReproductionOptions(root=tmp_path), tmp_path).blocks
    assert {row for row, _ in found.ours} == {1}
    specs = next(make_plans(small(), ReproductionOptions(root=tmp_path)))[1].specs
    facts = [read_checked(tmp_path / "runs" / run_name(spec) / "done.json", "") for spec in specs]
    assert ["diverged" in fact for fact in facts] == [True, False]


def test_best_and_rounds_and_discordance_come_from_the_records(tiny, tmp_path):
    tiny |= {
        "rounds": 4, "evaluations": 4, "batches": 1, "domains": "pen",
        "measures": {"accuracy": "best", "rounds": "rounds", "discordance": "discordance"},
    }  # fmt: skip
    made = small(("0.9", "0.1", "3"), ("accuracy", "discordance", "rounds"), ("centralized", "fedsmb"), by="metric")
    block = replace(made.blocks[0], keys={"data": "digits", "model": "small-cnn"})
    made = replace(made, blocks=(block,), unit="fraction")
    (found,) = run_table(made, ReproductionOptions(root=tmp_path), tmp_path).blocks
    central, federated = (
        read_summary(tmp_path / "runs" / run_name(spec))
        for spec in next(make_plans(made, ReproductionOptions(root=tmp_path)))[1].specs
    )
    accuracy = metric_history(federated).groupby("round")["value"].mean()
    assert found.ours[1, 0].mean == pytest.approx(accuracy.max())
    assert found.ours[1, 2].mean == accuracy.idxmax()
    losses = [metric_history(study, "loss").groupby("round")["value"].mean().tolist() for study in (federated, central)]
    assert found.ours[1, 1].mean == pytest.approx(compute_discordance(*losses))
    assert found.ours[0, 1].mean == 0
    assert found.concordant == (2, 2)


def compared(theirs, ours, by="client", columns=("pen",), own=True, **keys):
    """A block of one column whose rows the paper and we have; ours as numbers, or one a seed."""
    made = small(columns=columns, cells=("0",), by=by)
    rows = tuple(({"method": f"m{n}", **keys}, (PublishedValue.of(text),)) for n, text in enumerate(theirs))
    block = Block(version="", page=0, by=by, columns=columns, keys={}, rows=rows)
    values = {(row, 0): found if isinstance(found, tuple) else (found,) for row, found in enumerate(ours)}
    seeds = max(map(len, values.values()))
    return ReproducedBlock(table=made, block=block, scale=1, seeds=seeds, values=values, shown={}, own=own)


@pytest.mark.parametrize(
    ("theirs", "ours", "own", "verdict"),
    [
        (["50.0 (1.0)", "60.0 (1.0)"], [51.9, 58.1], True, "within the paper's spread"),
        (["50.0 (1.0)", "60.0 (1.0)"], [51.9, 58.1], False, "same order of methods"),  # other data
        (["50.0 (1.0)", "60.0 (1.0)"], [52.1, 60.0], True, "same order of methods"),
        (["50.0 (1.0)", "60.0 (1.0)"], [60.0, 50.0], True, "neither"),
        (["50.0", "60.0"], [50.0, 60.0], True, "same order of methods"),  # no spread, so nothing can be within it
        (["50.0", "60.0"], [50.0, 50.0], True, "neither"),
        (["50.0 (1.0)"], [60.0], True, "nothing to compare"),
        (["50.0 (3.0)"], [(56.0, 64.0)], True, "within the paper's spread"),  # 2 sqrt(3^2 + 32) = 12.8
        (["50.0 (3.0)"], [(59.0, 67.0)], True, "nothing to compare"),
        (["50.0 (0.0)"], [50.09], True, "within the paper's spread"),  # within twice half of the last digit
        (["50.0 (0.0)"], [50.11], True, "nothing to compare"),
    ],
)
def test_verdicts(theirs, ours, own, verdict):
    assert compared(theirs, ours, own=own).verdict == verdict


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, True), ({"own": False}, False), ({"scale": 0.5}, False),
        ({"notes": ("59,000 training samples of mnist's 60,000",)}, False),
    ],
)  # fmt: skip
def test_numbers_are_compared_where_network_data_and_rounds_are_the_papers(changes, numbers):
    found = replace(compared(["50.0 (1.0)", "60.0 (1.0)"], [51.0, 61.0]), **changes)
    assert (("difference" in compare_values(found).header), found.within[1] > 0) == (numbers, numbers)
    assert found.verdict == ("within the paper's spread" if numbers else "same order of methods")
    assert found.order == (1, 1)


def test_an_order_says_nothing_where_rounds_were_cut_to_less_than_a_quarter():
    clear = compared(["1", "2"], [(50.0, 51.0, 52.0), (60.1, 61.0, 61.9)])
    judged, short = (replace(clear, scale=scale) for scale in (0.25, 0.2499))
    assert (judged.verdict, judged.order, judged.claims) == ("same order of methods", (1, 1), (1, 0))
    assert (short.verdict, short.order, short.claims) == ("too short to judge", (0, 0), (0, 0))
    assert short.summary == (
        "Verdict (3 seeds, 0.25 of the rounds): too short to judge; the order of methods is not meaningful below "
        "0.25 of the rounds."
    )
    assert len(compare_values(short).rows) == 2  # the numbers stand there all the same


def test_a_concordance_of_too_few_rounds_is_no_verdict(tiny):
    tiny["measures"] = {"discordance": "discordance"}
    found = compared(["0.1", "0.1"], [0.0, 1e-6], by="metric", columns=("discordance",))
    assert (found.verdict, found.concordant) == ("concordant throughout", (2, 2))
    assert (replace(found, scale=0.01).verdict, replace(found, scale=0.01).concordant) == ("too short to judge", (0, 0))


def test_pairs_in_the_papers_order_are_counted():
    assert compared(["1", "2", "3", "3"], [1, 3, 2, 5]).order == (4, 5)  # the level pair does not count
    assert compared(["1", "2"], [5, 5]).order == (0, 1)
    assert compared(["1"], [5]).order == (0, 0)


def several(theirs, ours, columns, **keys):
    """A block of two methods and several columns, of which ``ours`` may lack some (None)."""
    rows = tuple(({"method": f"m{n}"}, tuple(map(PublishedValue.of, row))) for n, row in enumerate(theirs))
    block = Block(version="", page=0, by="client", columns=columns, keys={}, rows=rows)
    cells = {(r, c): (value,) for r, row in enumerate(ours) for c, value in enumerate(row) if value is not None}
    return ReproducedBlock(table=small(), block=block, scale=1, seeds=1, values=cells, shown={}, **keys)


def test_means_closer_than_half_a_printed_digit_are_level():
    columns = ("a", "b", "c")
    for third, pairs in (("50.1", 0), ("50.2", 1)):  # means 0.03 and 0.07 apart
        found = several([["50.0", "50.0", "50.0"], ["50.0", "50.0", third]], [[1, 1, 1], [2, 2, 2]], columns)
        assert found.order == (pairs, pairs)
    sums = [["66.6", "55.5", "84.3", "84.3"], ["84.3", "66.6", "55.5", "84.3"]]  # equal but for floating point
    assert several(sums, [[1] * 4, [2] * 4], ("a", "b", "c", "d")).order == (0, 0)


def test_the_papers_average_has_no_say_where_clients_have():
    theirs = [["50.0", "90.0", "70.0"], ["60.0", "20.0", "40.0"]]
    assert several(theirs, [[50, None, 50], [60, None, 60]], ("a", "b", "average")).order == (1, 1)
    assert several(theirs, [[None, None, 50], [None, None, 60]], ("a", "b", "average")).order == (0, 1)


def test_rows_are_compared_by_the_measure_that_a_recipe_names(tiny):
    tiny |= {"measures": {"rounds": "rounds", "accuracy": "best"}}
    made = several([["300", "70.0"], ["200", "60.0"]], [[30, 60], [20, 70]], ("rounds", "accuracy"))
    assert made.order == (0, 1)
    tiny["ranked"] = "rounds"
    assert made.order == (1, 1)


def test_an_order_is_claimed_where_seeds_bear_it_out():
    clear, even = (50.0, 51.0, 52.0), (60.1, 61.0, 61.9)
    assert compared(["1", "2"], [clear, even]).claims == (1, 0)
    assert compared(["2", "1"], [clear, even]).claims == (0, 1)
    assert (
        "corrected for their number: 1 in the paper's order, 0 against it"
        in compared(["1", "2"], [clear, even]).summary
    )
    gone = (math.nan, 51.0, 52.0, 53.0)  # a seed that diverged is left out of both
    paired = compared(["1", "2"], [gone, (0.0, 61.1, 62.0, 62.9)])
    assert paired.claims == (1, 0)
    assert paired.ours[0, 0].mean == 52
    wide = (40.0, 70.0, 71.0)
    assert compared(["1", "2"], [clear, wide]).claims == (0, 0)
    assert 2 * stats.t.sf(4 * math.sqrt(3), 2) == pytest.approx(0.02, abs=1e-3)  # gaps 3, 4, 5: mean 4, std 1
    assert compared(["1", "2"], [(0.0, 0.0, 0.0), (3.0, 4.0, 5.0)]).claims == (1, 0)
    three = compared(["1", "2", "3"], [(0.0, 0.0, 0.0), (3.0, 4.0, 5.0), (6.0, 8.0, 10.0)])
    assert three.claims == (0, 0)  # three pairs of p 0.02 each: 0.06 when corrected
    same = compared(["1", "2"], [clear, (51.0, 52.0, 53.0)])
    assert same.claims == (0, 0)  # equal differences, of unknown resolution
    assert replace(same, grid={(0, 0): 1e-3, (1, 0): 1e-3}).claims == (1, 0)
    assert replace(same, grid={(0, 0): 0.1, (1, 0): 0.1}).claims == (0, 0)
    few = compared(["1", "2"], [clear[:2], even[:2]])
    assert few.claims == (0, 0)
    assert "do not claim any order" in few.summary


def test_methods_are_ordered_where_all_else_is_equal(tiny):
    made = small(columns=("pen",), cells=("0",))
    keys = [{"method": "a", "epochs": 1}, {"method": "b", "epochs": 1}, {"method": "a", "epochs": 4}]
    theirs, ours = ("1", "2", "9"), (1.0, 2.0, 0.0)
    rows = tuple((key, (PublishedValue.of(text),)) for key, text in zip(keys, theirs, strict=True))
    block = Block(version="", page=0, by="client", columns=("pen",), keys={}, rows=rows)
    values = {(row, 0): (value,) for row, value in enumerate(ours)}
    found = ReproducedBlock(table=made, block=block, scale=1, seeds=1, values=values, shown={})
    assert found.order == (1, 1)
    tiny["within"] = []
    assert found.order == (1, 3)


def test_ours_stand_beside_theirs():
    half = math.sqrt(0.125)  # values so far apart on both sides have a deviation of 0.5
    shown = compare_values(compared(["50.0 (1.0)", "60.0"], [(51.5 - half, 51.5 + half), 58.0], epochs=4))
    assert [cell.text for cell in shown.rows[0]] == [
        "m0, epochs 4: pen",
        "51.50 (0.50)",
        "50.00 (1.00)",
        "+1.50",
        "within",
    ]
    assert [cell.text for cell in shown.rows[1]] == ["m1, epochs 4: pen", "58.00", "60.00", "\N{MINUS SIGN}2.00", ""]
    assert compare_values(compared(["50.0 (1.0)"], [51.5], own=False)).header == ("", "ours (stand-in)", "paper")
    small_numbers = compare_values(compared(["0.0000003"], [0.0000004]))
    assert [cell.text for cell in small_numbers.rows[0]][1:] == ["0.00000040", "0.00000030", "+0.00000010"]
    assert [cell.text for cell in compare_values(compared(["2471"], [20.0])).rows[0]][1:3] == ["20", "2471"]


def test_the_interval_of_a_difference_is_welchs_and_stands_beside_it():
    ours = (51.0, 53.0, 52.5)
    found = compared(["50.00 (1.00)", "52.00 (1.00)", "50.00"], [ours] * 3)
    found = replace(found, table=replace(found.table, seeds=5))
    test = stats.ttest_ind_from_stats(np.mean(ours), np.std(ours, ddof=1), 3, [50, 52], 1, 5, equal_var=False)
    shown = compare_values(found)
    assert shown.header[3:] == ("difference", "95% interval", "paper's spread")
    low, high = found.interval(0, 0)
    assert (low + high) / 2 == pytest.approx(np.mean(ours) - 50)
    assert shown.rows[0][4].text == f"+{low:.2f} to +{high:.2f}"
    assert [p < 0.05 for p in test.pvalue] == [True, False]
    assert found.consistent == (1, 2)
    assert found.interval(2, 0) is None
    assert "1 of 2 intervals of the difference contain 0" in found.summary
    for without in (replace(found, own=False), replace(found, table=replace(found.table, seeds=0))):
        assert without.consistent == (0, 0)
        assert "95% interval" not in compare_values(without).header


def test_the_grid_has_all_rows_and_columns_of_the_paper_ours_beside_theirs():
    made = compared(["50.0 (1.0)", "60.0", "70.0 (1.0)"], [53.5, 60.0])
    grid = arrange_values(made)
    assert (grid.columns, [name for name, _ in grid.rows]) == (("pen",), ["m0", "m1", "m2"])
    outside, same, missing = (cells[0] for _, cells in grid.rows)
    assert (outside.ours, outside.paper, outside.difference) == ("53.50", "50.00 (1.00)", "+3.50")
    assert (outside.sign, outside.spread) == ("above", "outside")
    assert (same.difference, same.sign, same.spread) == ("0.00", "", "")
    assert (missing.ours, missing.paper, missing.difference) == ("", "70.00 (1.00)", "")
    (_, (foreign,)), *_ = arrange_values(replace(made, own=False)).rows
    assert (foreign.difference, foreign.sign, foreign.spread) == ("+3.50", "", "")


def test_numbers_are_read_as_they_are_printed():
    assert PublishedValue.of("62.87 (1.49)") == PublishedValue(62.87, 1.49, 0.01)
    assert PublishedValue.of("2471").unit == 1
    assert math.isnan(PublishedValue.of("62.87").std)
    assert PublishedValue.of("") is None


@pytest.mark.slow
def test_panels_are_drawn_and_come_to_the_page(tiny, tmp_path):
    tiny |= {
        "panels": [
            {"name": "a", "x": "round", "y": "train_loss", "over": {"method": ["fedavg", "fedbn"]}},
            {"name": "b", "x": "samples", "y": "accuracy", "over": {"method": ["fedbn"], "samples": [16, 32]}},
            {"name": "c", "x": "client", "y": "accuracy", "over": {"method": ["fedavg", "fedbn"]}},
            {"name": "d", "x": "theory", "y": "toy-raw"},
            {"name": "e", "x": "features", "y": "maps-01", "over": {"method": ["fedavg", "fedbn"]}},
        ]
    }
    made, way = replace(small(), blocks=()), ReproductionOptions(root=tmp_path)
    done = run_table(made, way, tmp_path)
    names = [figure.picture.name for figure in done.figures]
    assert names == ["table99-a", "table99-b", "table99-c", "table99-d-toy-raw", "table99-e-maps-01-pen"]
    curves, sizes, bars, *pictured = done.figures
    (_, plan), *_ = make_plans(made, way)
    study = read_summary(tmp_path / "runs" / run_name(plan.panels[1].points[0][1]))
    accuracy = metric_history(study)["value"].mean()
    assert [row[0].text for row in sizes.numbers.rows] == ["fedbn, samples 16", "fedbn, samples 32"]
    assert float(sizes.numbers.rows[0][1].text) == pytest.approx(100 * accuracy, abs=0.01)
    assert [row[0].text for row in bars.numbers.rows] == ["fedavg", "fedbn"]
    assert len(curves.picture.figure.axes[0].lines) == 2
    assert all(drawn.numbers is None for drawn in pictured)
    for name in names:
        assert (tmp_path / "results" / "fedbn" / f"{name}.png").stat().st_size > 1000
    text = page.write_results_page(tmp_path).read_text()
    assert text.count("<svg") == len(names)
    assert "It is &lt;small&gt;" in text


def test_the_page_has_every_table_with_its_verdict(tiny, tmp_path):
    (found,) = run_table(small(), ReproductionOptions(root=tmp_path), tmp_path).blocks
    text = page.write_results_page(tmp_path).read_text()
    assert 'href="#fedbn-table99"' in text
    assert found.verdict in text
    assert "Too short to judge" not in text
    assert "Left out" not in text
    assert "fedbn: photo" in text
    assert "://" not in text


def test_a_table_that_was_cut_short_or_lacks_data_is_said_to_be_on_page_and_list(tiny, tmp_path, monkeypatch):
    tiny |= {"rounds": 8, "keys": {"data": {"away": {"data": "usps"}}}}
    first = small()
    rows = tuple(({**keys, "data": data}, cells) for keys, cells in first.blocks[0].rows for data in ("digits", "away"))
    made, way = (
        replace(first, blocks=(replace(first.blocks[0], rows=rows),)),
        ReproductionOptions(root=tmp_path, scale=0.125),
    )
    (found,) = run_table(made, way, tmp_path).blocks
    assert found.missing == ("usps",)
    assert read_results(made, tmp_path) == [found]
    assert read_verdicts(made, tmp_path) == ["too short to judge (scale 0.12)"]
    shown = page._make_entry(made, tmp_path)
    assert shown["blocks"][0][0].remarks == ["Left out: usps, which is missing and has no substitute."]
    monkeypatch.setattr(page, "load_tables", lambda: {made.key: made})
    text = page.write_results_page(tmp_path).read_text()
    assert '<p class="partial">Too short to judge: 0.12 of the paper' in text
    assert '<td class="warn">too short to judge</td>' in text
    assert "not run" in text  # the paper's rows whose data are missing


def test_a_budget_gives_each_table_a_share_of_the_rounds(tiny, tmp_path, monkeypatch):
    class Fixed:
        def estimate(self, specs):
            return sum(spec.rounds for spec in specs) * 90.0

    monkeypatch.setattr(time_estimates, "TimeEstimates", Fixed)
    tiny["rounds"] = 64  # two runs: 3.2 hours
    made, way = small(), ReproductionOptions(root=tmp_path)
    with TimeBudget(2.0, Event()) as whole:
        assert whole.fit_scale(made, way, tmp_path, 1).scale == 0.5
        assert whole.fit_scale(made, way, tmp_path, 4).scale == 0.125
    with TimeBudget(None, Event()) as endless:
        assert endless.fit_scale(made, way, tmp_path, 4) == way
    for spec in next(make_plans(made, way))[1].specs:
        folder = tmp_path / "runs" / run_name(spec)
        folder.mkdir(parents=True)
        write_checked(folder / "done.json", {})
    with TimeBudget(0.01, Event()) as spent:  # what is done costs nothing
        assert spent.fit_scale(made, way, tmp_path, 1).scale == 1


def test_a_budget_ends_what_runs(tmp_path):
    stop = Event()
    with TimeBudget(1e-9, stop) as spent:
        assert stop.wait(60)
        assert spent.over


@pytest.mark.slow
def test_the_command_runs_one_table_or_all(cli, tiny, monkeypatch):
    made = small()
    monkeypatch.setattr("fedshift.reproduce.published_tables.find_table", lambda key: made)
    monkeypatch.setattr("fedshift.reproduce.planning.load_tables", lambda: {made.key: made})
    ran = cli("reproduce", "fedbn/table99", "--out", "here")
    assert ran.code == 0, ran.err
    assert "fedbn: photo" in ran.out
    assert "Verdict (1 seed): " in ran.out
    assert "| fedbn: photo |" in Path("here/results/fedbn/table99.md").read_text()
    assert "fedbn: photo &" in Path("here/results/fedbn/table99.tex").read_text()
    every = cli("reproduce", "--all", "--out", "here", "--seeds", "2", "--hours", "1")
    assert every.code == 0, every.err
    assert "Verdict (2 seeds): " in every.out
    made_by = {path: path.read_bytes() for path in (Path("here/index.html"), *Path("here/results").rglob("*.*"))}
    for path in made_by:
        if path.suffix != ".json":
            path.unlink()
    again = cli("report", "here")
    assert again.code == 0, again.err
    assert "Verdict (2 seeds): " in again.out
    assert {path: path.read_bytes() for path in made_by} == made_by
    assert pd.read_json("here/results/fedbn/table99-0.json", typ="series")["seeds"] == 2
    listed = cli("reproduce", "--out", "here")
    assert listed.code == 0, listed.err
    assert "digits: here small-cnn: fedavg, fedbn" in " ".join(listed.out.split())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["fedbn/tabel11"], "fedbn/table11"),
        (["fedmmb/table2", "--root", "."], "fedmmb/table2 needs mnist and fashion-mnist"),
        (["fedbn/table11", "--version", "v9"], "fedbn/table11 has v1, final"),
        (["fedbn/table11", "--hours", "2"], "--hours belong to --all"),
        (["--present"], "--present and --hours belong to --all"),
        (["--all", "--hours", "0"], "--hours 0"),
        (["fedbn/table11", "--all"], "leave fedbn/table11 out"),
        (["--all", "--root", "."], "fedmmb/table2 needs mnist"),
    ],
)
def test_what_cannot_be_reproduced_is_said(arguments, why, cli):
    recipes.is_present.cache_clear()
    recipes.find_stand_in.cache_clear()
    outcome = cli("reproduce", *arguments)
    assert outcome.code == 2
    assert why in outcome.err


def test_missing_data_are_named(tmp_path):
    recipes.is_present.cache_clear()
    with pytest.raises(UsageError, match="fedwon/table11 needs fed-isic2019, not to be found under"):
        run_table(published_tables.find_table("fedwon/table11"), ReproductionOptions(root=tmp_path), tmp_path)
    assert figures.load_figures(published_tables.find_table("fedwon/table11"), tmp_path) is None
