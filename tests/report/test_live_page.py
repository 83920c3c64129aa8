"""The page of a run as it goes: numbers worked out by hand, and curves of what is there."""

import re
from dataclasses import replace

from fedshift.report.curves import CurvePoint
from fedshift.report.live_page import LiveView, has_finished, render_live_page


def cut(study, method, seed, last):
    """The study in which one trial has got as far as round ``last``."""

    def keep(frame):
        return frame[(frame["method"] != method) | (frame["seed"] != seed) | (frame["round"] <= last)]

    return replace(study, rows=keep(study.rows), traffic=keep(study.traffic))


def render(*summaries, **fields):
    points = tuple(CurvePoint({"lr": place / 10} if len(summaries) > 1 else {}, s) for place, s in enumerate(summaries))
    return render_live_page(LiveView(name="runs/a", state="Running", points=points, **fields), '"1-1"', 3)


def cells(page):
    rows = re.findall(r"<tr><th scope=\"row\"><span>(.*?)</span></th>(.*?)</tr>", page)
    return [[first, *re.findall("<td>(.*?)</td>", rest)] for first, rest in rows]


def test_each_method_stands_at_its_finished_seeds_and_at_an_unfinished_one(study):
    page = render(cut(study, "fedbn", 2, 1))
    # macro of FedAvg: (50 % + 80 %) / 2, (52 % + 82 %) / 2, (54 % + 84 %) / 2; of FedBN: 70, 73, and half of 76
    assert cells(page) == [
        ["fedavg", "2, 2, 2 of 2", "67.00", "-"],
        ["fedbn", "2, 2, 1 of 2", "71.50", "38.00 in round 1"],
    ]
    assert page.count("<svg ") == 4  # macro, training loss, two clients
    assert "not significantly different" not in page


def test_a_run_without_a_round_has_no_curves(study):
    page = render(cut(cut(replace(study, seeds=(0,)), "fedavg", 0, 0), "fedbn", 0, 0), remarks=("<b>",))
    assert "<svg " not in render()
    assert "Nothing is recorded yet." in render()
    assert "Nothing is recorded yet." not in page
    assert "&lt;b&gt;" in page


def test_several_runs_share_figures(study, make_study):
    page = render(study, make_study({"fedavg": [{"a": 50, "b": 240}]}))
    assert [row[:2] for row in cells(page)] == [["0", "fedavg"], ["0", "fedbn"], ["0.1", "fedavg"]]
    assert page.count("<svg ") == 2


def test_a_run_has_finished_where_all_have_done_all_rounds(study):
    assert has_finished(study)
    assert not has_finished(cut(study, "fedbn", 2, 1))
    assert not has_finished(cut(study, "fedbn", 2, 0))
