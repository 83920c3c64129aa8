"""Heat maps and the choice by validation are those of studies worked out by hand."""

from dataclasses import replace

import pytest
from rich.console import Console

from fedshift.report.curves import CurvePoint
from fedshift.report.sweep_report import SweepResults, make_heat_maps, publish_sweep
from fedshift.report.target_metric import describe_target
from tests.report.conftest import in_errors

# Macro accuracy in percent of fedavg and fedbn, on test data and on validation data, for each pair of settings.
TESTED = {(1, 10): (50, 60), (1, 0): (55, 40), (2, 10): (90, 65), (2, 0): (42, 45)}
HELD = {(1, 10): (50, 60), (1, 0): (70, 40), (2, 10): (60, 80), (2, 0): (42, 45)}


@pytest.fixture
def pairs(make_study):
    """The sweep of two settings above, of one seed and round."""

    def score(values):
        return {m: [{"a": v, "b": 3 * v}] for m, v in zip(("fedavg", "fedbn"), values, strict=True)}

    def make(**fields):
        points = []
        for pair, values in TESTED.items():
            held = {m: [{k: [v] for k, v in run.items()} for run in runs] for m, runs in score(HELD[pair]).items()}
            study = make_study(score(values), rounds=1, validation=held, samples={}, **fields)
            points.append(CurvePoint(dict(zip(("epochs", "batch_size"), pair, strict=True)), study))
        return SweepResults(points=tuple(points), folders=tuple(f"{e}-{b}" for e, b in TESTED))

    return make


def test_a_heat_map_has_the_validation_values_of_every_pair_and_marks_the_best(pairs):
    maps = make_heat_maps(pairs())
    assert list(maps) == ["fedavg", "fedbn"]
    cells = {method: [[cell.text for cell in row] for row in table.rows] for method, table in maps.items()}
    assert maps["fedavg"].header == ("epochs \\ batch_size", "10", "full")
    assert cells["fedavg"] == [["1", "50.00", "♦ 70.00"], ["2", "60.00", "42.00"]]
    assert cells["fedbn"] == [["1", "60.00", "40.00"], ["2", "♦ 80.00", "45.00"]]


def test_without_validation_data_a_heat_map_has_test_values(pairs):
    sweep = pairs()
    points = tuple(
        CurvePoint(each.keys, replace(each.summary, rows=each.summary.rows[each.summary.rows["split"] != "validation"]))
        for each in sweep.points
    )
    cells = [[cell.text for cell in row] for row in make_heat_maps(replace(sweep, points=points))["fedavg"].rows]
    assert cells == [["1", "50.00", "55.00"], ["2", "90.00", "42.00"]]


def test_captions_name_the_statistics_of_batchnorm(pairs):
    sweep = pairs()
    again = [CurvePoint(p.keys, replace(p.summary, statistics="reestimated")) for p in sweep.points]
    assert "percent, one seed" in sweep.caption
    assert "percent with re-estimated BatchNorm statistics, one seed" in replace(sweep, points=(*again,)).caption
    assert "90 % with running BatchNorm statistics, over" in describe_target(again[0].summary, 0.9)
    assert "90 %, over" in describe_target(sweep.points[0].summary, 0.9)


@pytest.mark.slow
def test_of_errors_the_lowest_on_validation_data_is_chosen(pairs, tmp_path, undrawn):
    sweep = pairs()
    points = tuple(CurvePoint(point.keys, in_errors(point.summary)) for point in sweep.points)
    cells = [cell.text for row in make_heat_maps(replace(sweep, points=points))["fedavg"].rows for cell in row]
    assert cells == ["1", "10.000", "14.000", "2", "12.000", "♦ 8.400"]
    publish_sweep(replace(sweep, points=points), tmp_path, Console(quiet=True), {})
    assert "validation data are best, in units of the target" in (tmp_path / "sweep.html").read_text()


def test_all_methods_share_the_scale_of_shades(pairs):
    tones = {
        method: [cell.tone for row in table.rows for cell in row[1:]]
        for method, table in make_heat_maps(pairs()).items()
    }
    assert tones["fedavg"] == ["shade-1", "shade-4", "shade-2", "shade-0"]  # 40 is the lowest and 80 the highest
    assert tones["fedbn"] == ["shade-2", "shade-0", "shade-5", "shade-1"]


def test_of_errors_the_lowest_is_shaded_most(pairs):
    sweep = pairs()
    points = tuple(CurvePoint(point.keys, in_errors(point.summary)) for point in sweep.points)
    maps = make_heat_maps(replace(sweep, points=points))
    tones = {
        float(cell.text.lstrip("♦ ")): cell.tone for table in maps.values() for row in table.rows for cell in row[1:]
    }
    assert (tones[min(tones)], tones[max(tones)]) == ("shade-5", "shade-0")


def test_one_varied_setting_has_no_heat_map(pairs):
    sweep = pairs()
    assert make_heat_maps(replace(sweep, points=sweep.points[:2], folders=sweep.folders[:2])) == {}


@pytest.mark.slow
def test_the_page_names_the_best_by_validation_has_one_legend_and_answers_the_pointer(pairs, tmp_path):
    publish_sweep(pairs(), tmp_path, Console(quiet=True), {})
    text = (tmp_path / "sweep.html").read_text()
    assert "<strong>fedavg at epochs=1, batch_size=full; fedbn at epochs=2, batch_size=10</strong>" in text
    assert '<td class="shade-5">♦ 80.00</td>' in text
    assert "♦: best on validation data." in text
    assert text.count('<ul class="legend">') == 2  # methods, and values of the setting that has line styles
    assert ">fedbn, batch_size=full, round 1: 40.00</text>" in text
    assert "<script" not in text
    assert "://" not in text


@pytest.mark.slow
def test_a_sweep_without_validation_data_names_no_combination(pairs, tmp_path):
    publish_sweep(pairs(keep=lambda row: row["split"] != "validation"), tmp_path, Console(quiet=True), {})
    text = (tmp_path / "sweep.html").read_text()
    assert "No combination is named best, since no validation data were held out (--validation)" in text
    assert "♦" not in text
