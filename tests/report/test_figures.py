"""Figures: there for every study, without warnings, the same bytes each time, methods looking alike everywhere."""

from itertools import combinations

import pytest

from fedshift.records import Study
from fedshift.report import figures, save_figures
from fedshift.report.figures import MAX_CLIENTS, panels, svg
from fedshift.report.style import looks


def test_names(study):
    expected = ["accuracy-macro", "difference", "training-loss", "traffic"]
    expected += ["accuracy-client-01-a", "accuracy-client-02-b", "accuracy-bars", "samples"]
    assert list(figures(study)) == expected


def test_curve_shows_mean_and_extremes(study):
    axes = figures(study)["accuracy-macro"].axes[0]
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(67)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((32.5, 69))


def test_bars_show_the_table(study):
    axes = figures(study)["accuracy-bars"].axes[0]
    assert [bar.get_width() for bar in axes.containers[0]] == pytest.approx([52, 82, 67])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "macro"]


def test_samples_show_every_clients_images(study):
    axes = figures(study)["samples"].axes
    assert sum(len(panel.images) for panel in axes) == sum(map(len, study.samples.values()))
    first = next(iter(study.samples.values()))[0].squeeze()
    assert (axes[0].images[0].get_array() == first).all()
    assert [panel.texts[0].get_text() for panel in axes if panel.texts] == list(study.samples)


def test_descriptions_hold_the_numbers(study):
    texts = {panel.name: panel.description for panel in panels(study)}
    assert "fedavg 67.00 after round 2; fedbn 73.00" in texts["accuracy-macro"]
    assert "fedbn +6.00" in texts["difference"]
    assert "fedavg 67.00 at 3 kB" in texts["traffic"]


def test_no_two_methods_look_alike(make_study):
    study = make_study({f"method{number}": [] for number in range(28)})
    for first, second in combinations(looks(study).values(), 2):
        assert (first.color, first.dashes) != (second.color, second.dashes)


def test_a_method_keeps_its_look_when_others_have_no_data(make_study):
    study = make_study(keep=lambda row: row["method"] != "fedavg")
    line = figures(study)["accuracy-macro"].axes[0].lines[0]
    assert line.get_color() == looks(study)["fedbn"].color


def test_saved_twice_gives_the_same_bytes(study, tmp_path):
    first, second = (save_figures(study, tmp_path / name) for name in ("one", "two"))
    assert [path.suffix for path in first] == [".svg", ".png"] * (len(first) // 2)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_edge_cases_draw_without_warnings(edge_case: Study):
    for figure in figures(edge_case).values():
        assert figure.get_figwidth() == 4
        assert "<text" in svg(figure)


def test_many_clients_get_panels_up_to_a_limit(make_study):
    study = make_study()
    names = [f"client {number}" for number in range(MAX_CLIENTS + 3)]
    rows = study.rows[study.rows["client"] == "a"]
    fields = {
        name: getattr(study, name) for name in ("name", "methods", "seeds", "rounds", "select", "classes", "traffic")
    }
    many = Study(
        **fields,
        clients={name: {"test": 100} for name in names},
        rows=type(rows)([row | {"client": name} for name in names for row in rows.to_dict("records")]),
    )
    drawn = panels(many)
    assert sum("-client-" in panel.name for panel in drawn) == MAX_CLIENTS
