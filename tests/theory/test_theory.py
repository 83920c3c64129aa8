"""``fedshift theory``: the corollary on a thousand federations, the lemma's cases, output, figures and files."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedshift.cli.app import app, main
from fedshift.theory import TheorySettings, check_theory
from fedshift.theory.checks import (
    DEVIATIONS,
    CorollaryCheck,
    close_angle,
    compute_toy,
    make_cases,
    make_clients,
    try_corollary,
)
from fedshift.theory.figures import draw_panels
from fedshift.theory.ntk import smallest_eigenvalue
from fedshift.theory.rendering import render_theory
from fedshift.utils.errors import UsageError

SMALL = {"clients": 2, "samples": 4, "dimension": 4, "width": 64, "steps": 30, "draws": 20, "monte_carlo": 2000}
PAGE = Path(__file__).parents[2] / "docs" / "theory.md"


@pytest.fixture(scope="module")
def found():
    return check_theory(TheorySettings(**SMALL))


@pytest.mark.slow
def test_corollary_4_6_holds_on_300_federations_and_for_algorithm_1_of_all_of_lambda():
    corollary = try_corollary(TheorySettings(draws=300))
    assert corollary.magnitude.shape == (300, 2)
    assert corollary.count_violations(corollary.magnitude) == 0
    assert corollary.count_violations(corollary.run) == 0
    assert corollary.count_violations(corollary.joint) > 0  # the paper does not claim this
    assert (corollary.magnitude > 0).all()
    assert np.median(corollary.magnitude[:, 1] / corollary.magnitude[:, 0]) > 1.5


def test_a_violation_is_counted():
    pairs = np.array([[0.1, 0.2], [0.2, 0.1], [0.1, 0.1], [0.1, 0.1 - 1e-15]])
    assert CorollaryCheck.count_violations(pairs) == 1


@pytest.mark.parametrize("seed", range(3))
def test_lemma_4_3_and_what_happens_where_its_assumption_fails(seed):
    zero = {case.name: (abs(case.full) < 1e-12, abs(case.local) < 1e-12) for case in make_cases(seed)}
    assert zero == {
        "no two inputs parallel": (False, False),
        "x and 2x on one client": (True, True),
        "x and 2x on two clients, S proportional": (True, False),
        "x and 2x on two clients, S of other shape": (False, False),
        "x and -x on one client": (False, False),
        "5 pairs x and -x on one client": (True, True),
    }
    assert all(case.full > -1e-12 and case.local > -1e-12 for case in make_cases(seed))
    assert [case.assumes for case in make_cases(seed)] == [True, *[False] * 5]


def test_fedavgs_eigenvalue_vanishes_as_two_clients_inputs_close_and_fedbns_does_not():
    turned = close_angle(0)
    assert turned.full[-1] < 1e-7 < 1e-3 < turned.local[-1]
    assert turned.different[-1] > 1e-3
    near = np.log(turned.full[-6:])
    assert np.polyfit(np.log(turned.angle[-6:]), near, 1)[0] == pytest.approx(2, abs=0.1)  # as the angle's square


def test_averaging_w_fails_on_raw_inputs_and_not_on_normalized_ones():
    shown = compute_toy(0)
    best, _, losses = shown.best_frequencies(shown.raw)
    np.testing.assert_allclose(best * DEVIATIONS, [1, 1], atol=0.05)
    assert losses.max() > 10 * shown.raw.min()
    _, _, losses = shown.best_frequencies(shown.normalized)
    assert losses.max() < 0.02
    best, mean, own, averaged = shown.best_scales()
    np.testing.assert_allclose(best, DEVIATIONS, rtol=0.1)
    assert mean == pytest.approx(best.mean())
    assert own.max() < 0.02 < 0.1 < averaged.min()


def test_covariances_are_what_was_asked_for():
    alike, _ = make_clients(TheorySettings(heterogeneity=0.0, samples=4000, dimension=3, width=16))
    np.testing.assert_allclose(alike.covariance, np.broadcast_to(np.eye(3), (4, 3, 3)), atol=0.1)
    samples, targets = make_clients(TheorySettings(heterogeneity=3.0, samples=4000, dimension=3, width=16))
    values = np.linalg.eigvalsh(samples.covariance)
    assert values.min() > 0.9 * np.exp(-3) < 1.1 * np.exp(3) > values.max()
    assert (values.max(axis=1) / values.min(axis=1)).max() > 10
    assert targets.shape == (16000,)
    assert np.abs(targets).max() <= 1


@pytest.mark.slow
def test_the_study_is_its_seeds_alone(found):
    again, other = check_theory(TheorySettings(**SMALL)), check_theory(TheorySettings(**SMALL, seed=1))
    np.testing.assert_array_equal(again.limits.full, found.limits.full)
    np.testing.assert_array_equal(again.courses[2].measured, found.courses[2].measured)
    assert not np.array_equal(other.limits.full, found.limits.full)
    assert smallest_eigenvalue(found.limits.local) == pytest.approx(found.limits.own.min())


def test_steps_to_a_share_are_counted(found):
    course = found.courses[0]
    reached, expected = course.steps_to(0.5)
    assert course.measured[reached] <= 0.5 < course.measured[reached - 1]
    assert course.predicted[expected] <= 0.5 < course.predicted[expected - 1]
    assert course.steps_to(0.0) == (None, None)


def test_figures_show_the_numbers(found):
    shown = {panel.name: panel for panel in draw_panels(found)}
    assert list(shown) == ["corollary", "parallel", "training", "widths", "toy-raw", "toy-normalized", "toy-surface"]
    points = shown["corollary"].figure.axes[0].collections[0].get_offsets()
    np.testing.assert_allclose(points, found.corollary.magnitude)
    lines = shown["training"].figure.axes[0].lines
    np.testing.assert_allclose(lines[0].get_ydata(), found.courses[0].predicted)
    np.testing.assert_allclose(lines[1].get_ydata(), found.courses[0].measured)
    assert "0 of them are below" in shown["corollary"].description


def marked(axes, marker):
    return [tuple(map(float, line.get_xydata()[0])) for line in axes.lines if line.get_marker() == marker]


def test_figure_1_marks_each_clients_best_w_and_what_is_left_at_their_mean(found):
    shown = {panel.name: panel for panel in draw_panels(found)}
    for name, losses in (("toy-raw", found.toy.raw), ("toy-normalized", found.toy.normalized)):
        axes = shown[name].figure.axes[0]
        best, mean, left = found.toy.best_frequencies(losses)
        for client, marker in enumerate("os"):
            assert marked(axes, marker) == [(best[client], losses[client].min()), (mean, left[client])]
        assert axes.get_ylim()[1] > losses.max()
    assert shown["toy-raw"].figure.axes[0].get_ylim() == shown["toy-normalized"].figure.axes[0].get_ylim()


def test_figure_2_marks_the_averaged_w_under_both_gammas_on_the_clients_errors(found):
    panel = next(panel for panel in draw_panels(found) if panel.name == "toy-surface")
    axes = panel.figure.axes[0]
    best, mean, own, averaged = found.toy.best_scales()
    assert marked(axes, "o") == [(1, best[1])]
    assert marked(axes, "s") == [(1, mean)]
    told = [text.get_text() for text in panel.figure.legends[0].get_texts()]
    assert told == [
        f"own gamma {best[1]:.2f}: error {own[1]:.3f}", f"averaged gamma {mean:.2f}: error {averaged[1]:.3f}",
    ]  # fmt: skip
    levels = axes.collections[0].levels
    assert levels[0] <= found.toy.surfaces[1].min()
    assert levels[-1] >= found.toy.surfaces[1].max()


@pytest.mark.slow
def test_the_command_prints_and_writes(tmp_path, capsys, vector_only):
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with pytest.raises(SystemExit) as ended:
        main(["theory", *flags, "--out", str(tmp_path / "made")])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert re.search(r"G_inf \(the corollary\) +0 ", printed)
    assert re.search(r"x and 2x on two clients, S proportional +no +0 +0\.\d", printed)
    assert printed.count("kept") == 3
    told = json.loads((tmp_path / "made" / "theory.json").read_text())
    assert told["setting"]["clients"] == 2
    assert f"{told['limits']['lambda_min']['G_inf']:.5f}" in printed
    assert len(list((tmp_path / "made").glob("*.svg"))) == len(list((tmp_path / "made").glob("*.png"))) == 7


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--clients", "1"), ("--samples", "1"), ("--dimension", "1"), ("--width", "15"), ("--steps", "0"),
     ("--draws", "0"), ("--monte-carlo", "1"), ("--alpha", "0"), ("--heterogeneity", "9"), ("--seed", "-1"),
     ("--alpha", "nan"), ("--alpha", "1e+200"), ("--heterogeneity", "nan"), ("--width", "10000000")],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(flag, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["theory", flag, value])
    assert ended.value.code == 2
    assert f"{flag.removeprefix('--')}={value}" in capsys.readouterr().err
    with pytest.raises(UsageError):
        TheorySettings(**{flag.removeprefix("--").replace("-", "_"): float(value)})


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("fedshift.theory.check_theory", None)
    with pytest.raises(SystemExit) as ended:
        main(["theory", "--out", str(tmp_path / "file" / "made")])
    assert ended.value.code == 2
    assert "Not a directory: name a directory" in capsys.readouterr().err


def test_small_eigenvalues_are_told_from_none(found):
    limits = replace(found.limits, own=np.array([0.5, 1.2e-9, 2e-13, -1e-16]))
    told = [part for part in render_theory(replace(found, limits=limits)) if isinstance(part, str)]
    assert any(part.endswith("block of G_inf: 0.50000 1.2e-09 0 0") for part in told)
    assert any("30 steps with 64 neurons" in part for part in told)
    once = replace(found, setting=replace(found.setting, steps=1))
    assert any("1 step with 64 neurons" in part for part in render_theory(once) if isinstance(part, str))


def test_the_page_on_theory_names_commands_that_exist():
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert lines
    for line in lines:
        command, _, _ = app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
        assert command.__module__ in ("fedshift.cli.theory", "fedshift.cli.app")
