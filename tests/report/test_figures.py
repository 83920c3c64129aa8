"""Figures: there for every study, without warnings, the same bytes each time, methods looking alike everywhere."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from fedshift.report import figures, make_figures, save_figures
from fedshift.report.figures import make_panels, save_each, to_svg
from fedshift.report.style import figure_settings, make_panel, make_styles
from fedshift.report.tables import ONE_BY_ONE
from fedshift.results.cases import Cases
from tests.report.conftest import in_errors


@pytest.fixture(scope="module")
def drawn(make_study):
    return make_figures(make_study())


def test_names(drawn):
    expected = ["accuracy-macro", "training-loss", "traffic"]
    expected += ["accuracy-client-01-a", "accuracy-client-02-b", "accuracy-bars", "samples"]
    assert list(drawn) == expected


def test_curve_shows_mean_and_extremes(drawn):
    axes = drawn["accuracy-macro"].axes[0]
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(67)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((32.5, 69))


def test_bars_show_the_table(drawn):
    axes = drawn["accuracy-bars"].axes[0]
    assert [bar.get_width() for bar in axes.containers[0]] == pytest.approx([52, 82, 67])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "macro"]
    assert axes.get_xlim() == pytest.approx((0, 1.05 * (83 + 3)))  # fedbn's mean and deviation at b


def test_samples_show_every_clients_images(study, drawn):
    axes = drawn["samples"].axes
    assert sum(len(panel.images) for panel in axes) == sum(map(len, study.samples.values()))
    first = next(iter(study.samples.values()))[0].squeeze()
    assert (axes[0].images[0].get_array() == first).all()
    assert [panel.texts[0].get_text() for panel in axes if panel.texts] == list(study.samples)


def test_descriptions_hold_the_numbers(study):
    texts = {panel.name: panel.description for panel in make_panels(study)}
    assert "fedavg 67.00 after round 2; fedbn 73.00" in texts["accuracy-macro"]
    assert "fedavg 67.00 at 3 kB" in texts["traffic"]


def test_residuals_are_mean_errors_of_tenths_of_the_samples(study):
    rng = np.random.default_rng(0)
    target, error = rng.normal(size=(2, 30)), rng.normal(size=(2, 30))
    records = {
        (client, "personal"): {"target": target[number][:, None], "error": error[number][:, None]}
        for number, client in enumerate(study.clients)
    }
    known = replace(in_errors(study), read_cases=lambda *_: Cases(round=2, records=records))
    (panel,) = (panel for panel in make_panels(known) if panel.name == "residuals")
    order = np.argsort(np.tile(target.ravel(), len(study.seeds)), kind="stable")
    expected = np.tile(error.ravel(), len(study.seeds))[order].reshape(10, -1).mean(axis=1)
    assert [y for _, y, text in panel.points if text.startswith("fedavg")] == pytest.approx(expected.tolist())


def test_errors_are_drawn_as_they_are_on_an_axis_that_fits(study):
    panels = {panel.name: panel for panel in make_panels(in_errors(study))}
    assert not [name for name in panels if "accuracy" in name]
    assert "fedavg 14.900 after round 2" in panels["rmse-macro"].description
    assert panels["rmse-macro"].figure.axes[0].get_ylabel() == "test RMSE (units of the target)"
    assert panels["rmse-bars"].figure.axes[0].get_xlim()[1] < 40
    assert panels["training-loss"].figure.axes[0].get_ylabel() == "training loss"


def test_no_two_methods_look_alike(make_study):
    study = make_study({f"method{number}": [] for number in range(48)})
    styles = list(make_styles(study.methods).values())
    for first, second in combinations(styles, 2):
        assert (first.color, first.dashes) != (second.color, second.dashes)
    assert len({style.marker for style in styles[:12]}) == 12
    for first, second in combinations(styles[:12], 2):
        assert distance(first.color, second.color) > 17


def test_a_method_has_one_color_whatever_it_is_beside():
    found = [
        make_styles(["single", "fedavg", "fedbn+fedprox(mu=0.1)"]),
        make_styles(["fedbn+fedprox(mu=0.1)", "ditto", "fedavg", "single+tuned(lr=0.3)"]),
    ]
    assert [style.number for style in found[0].values()] == [0, 1, 2]  # where its bars are
    same = "fedavg", "fedbn+fedprox(mu=0.1)"
    for one, other in (*zip(same, same, strict=True), ("single", "single+tuned(lr=0.3)")):
        assert found[0][one] == replace(found[1][other], number=found[0][one].number)
    several = make_styles([*(f"fedbn(x={number})" for number in range(6)), "gn", *"abcdef"])
    assert len({each.color for each in list(several.values())[:12]}) == 12


def distance(one, other):
    """Return the distance of two colors in CIELAB (CIE 1976), the least for most people, deuteranopes and protanopes.

    The matrices are those of Machado et al. 2009, doi:10.1109/TVCG.2009.113, for severity 1, in linear sRGB.
    """
    deutan = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    protan = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    to_xyz = [[0.412456, 0.357576, 0.180437], [0.212673, 0.715152, 0.072175], [0.019334, 0.119192, 0.950304]]

    def to_lab(color, seen):
        rgb = np.array(to_rgb(color))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        xyz = np.array(to_xyz) @ np.clip(np.array(seen) @ linear, 0, 1) / (0.95047, 1, 1.08883)
        x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    return min(np.linalg.norm(to_lab(one, seen) - to_lab(other, seen)) for seen in (np.eye(3), deutan, protan))


def test_a_pdf_has_no_title_unless_it_marks_a_partial_run(tmp_path, monkeypatch):
    titles = {}
    for title in ("Accuracy", "PARTIAL: Accuracy"):
        with figure_settings():
            figure, axes = make_panel(title, "x", "y")
        shown = []
        monkeypatch.setattr(
            figure, "savefig", lambda *_, shown=shown, axes=axes, **__: shown.append(axes.get_title("left"))
        )
        save_each({"one": figure}, tmp_path)
        titles[title] = shown[-1], axes.get_title("left")
    assert titles == {"Accuracy": ("", "Accuracy"), "PARTIAL: Accuracy": ("PARTIAL: Accuracy", "PARTIAL: Accuracy")}


@pytest.mark.slow
def test_saved_twice_gives_the_same_bytes(study, tmp_path, monkeypatch):
    """Bars and images; the page, which is made twice too, has the other kinds."""
    monkeypatch.setattr(figures, "make_panels", lambda summary: [p for p in make_panels(summary) if "bars" in p.name])
    first, second = (save_figures(study, tmp_path / name) for name in ("one", "two"))
    names = ("accuracy-bars", "samples")
    assert [path.name for path in first] == [f"{name}.{kind}" for name in names for kind in ("svg", "png", "pdf")]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.slow
def test_edge_cases_draw_without_warnings(edge_case, shown, monkeypatch):
    monkeypatch.setattr(figures, "make_panels", lambda _: [])  # which the page has drawn
    named_otherwise = "a" not in edge_case.clients  # samples of all others are the same picture
    beside = [(figure, to_svg(figure)) for figure in make_figures(edge_case).values() if named_otherwise]
    assert len(beside) == named_otherwise
    for figure, text in shown.drawn + beside:
        assert figure.get_figwidth() == 4
        assert "<text" in text


def test_many_clients_get_panels_up_to_a_limit(make_crowd, monkeypatch):
    monkeypatch.setattr(figures, "PICTURED", 4)
    drawn = make_figures(make_crowd(7))
    assert sum("-client-" in name for name in drawn) == 4
    assert len(drawn["samples"].axes) == 4


@pytest.mark.slow
def test_more_clients_are_drawn_as_a_distribution(make_crowd):
    drawn = make_figures(make_crowd(202))
    assert list(drawn) == [
        "accuracy-macro", "training-loss", "traffic", "accuracy-low", "accuracy-clients", "samples",
    ]  # fmt: skip
    assert drawn["accuracy-low"].axes[0].lines[0].get_ydata() == pytest.approx([0, 5])
    axes = drawn["accuracy-clients"].axes[0]
    spans = [tuple(path.vertices[:, 0]) for lines in axes.collections for path in lines.get_paths()]
    assert spans == [pytest.approx((5, 95)), pytest.approx((25, 75))] * 2
    assert [line.get_xdata() for line in axes.lines] == [pytest.approx([50]), pytest.approx([0, 100])] * 2
    said = {panel.name: panel.description for panel in make_panels(make_crowd(202, seeds=2))}["accuracy-clients"]
    assert said.endswith(
        "of 202 clients at the reported round (means over seeds). "
        "fedavg from 0.00 to 100.00, median 50.00; fedbn from 0.00 to 100.00, median 50.00."
    )


@pytest.mark.slow
def test_figures_of_many_clients_stay_small(make_crowd):
    few, many = (
        sum(len(to_svg(panel.figure)) for panel in make_panels(make_crowd(count)))
        for count in (ONE_BY_ONE + 1, 20 * ONE_BY_ONE)
    )
    assert many < 1.1 * few


def test_unmeasured_methods_leave_their_row_empty(make_crowd):
    crowd = make_crowd(60)
    crowd = replace(crowd, rows=crowd.rows[crowd.rows["method"] != "fedavg"])
    axes = make_figures(crowd)["accuracy-clients"].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fedavg", "fedbn"]
