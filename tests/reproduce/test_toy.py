"""FedBN's toy example: what figures 1 and 2 claim, and their marks."""

import numpy as np
import pytest

from fedshift.data.datasets.synthetic import CLIENTS, NOISE
from fedshift.report.style import figure_settings
from fedshift.reproduce.toy import GAMMA, W, compare_with_mean, compute_toy, draw_toy_panels

DEVIATIONS = list(CLIENTS.values())


@pytest.fixture(scope="module")
def toy():
    return compute_toy(0)


@pytest.fixture(scope="module")
def panels(toy):
    with figure_settings():
        return {panel.name: panel.figure for panel in draw_toy_panels(toy)}


def test_losses_are_the_expected_squares_of_gaussian_inputs(toy):
    """E (cos az - cos bz)^2 = 1 + (e^-2a^2 + e^-2b^2) / 2 - e^-(a-b)^2/2 - e^-(a+b)^2/2 for z ~ N(0, 1)."""

    def expected(a, b):
        squares = 1 + (np.exp(-2 * a**2) + np.exp(-2 * b**2)) / 2
        return squares - np.exp(-((a - b) ** 2) / 2) - np.exp(-((a + b) ** 2) / 2) + NOISE**2

    for client, deviation in enumerate(DEVIATIONS):
        np.testing.assert_allclose(toy.raw[client], expected(W * deviation, 1), atol=0.1)
        np.testing.assert_allclose(toy.normalized[client], expected(W, 1), atol=0.1)
        np.testing.assert_allclose(toy.surfaces[client], expected(np.outer(GAMMA, W), deviation), atol=0.15)
        np.testing.assert_array_equal(toy.scales[client], toy.surfaces[client, :, 100])
    assert W[100] == 1


def test_averaging_w_fails_on_raw_inputs_and_not_on_normalized_ones(toy):
    best, _, losses = compare_with_mean(W, toy.raw)
    np.testing.assert_allclose(best * DEVIATIONS, [1, 1], atol=0.05)
    assert losses.max() > 10 * toy.raw.min()
    assert compare_with_mean(W, toy.normalized)[2].max() < 0.02
    best, mean, averaged = compare_with_mean(GAMMA, toy.scales)
    np.testing.assert_allclose(best, DEVIATIONS, rtol=0.1)
    assert mean == pytest.approx(best.mean())
    assert toy.scales.min(axis=1).max() < 0.02 < 0.1 < averaged.min()


def marked(axes, marker):
    return [tuple(map(float, line.get_xydata()[0])) for line in axes.lines if line.get_marker() == marker]


def test_figure_1_marks_each_clients_best_w_and_the_loss_at_their_mean(toy, panels):
    for name, losses in (("toy-raw", toy.raw), ("toy-normalized", toy.normalized)):
        (axes,), (best, mean, left) = panels[name].axes, compare_with_mean(W, losses)
        for client, marker in enumerate("os"):
            assert marked(axes, marker) == [(best[client], losses[client].min()), (mean, left[client])]
        assert axes.get_ylim()[1] > losses.max()
    assert panels["toy-raw"].axes[0].get_ylim() == panels["toy-normalized"].axes[0].get_ylim()


def test_figure_2_marks_the_averaged_w_under_both_gammas_on_the_clients_errors(toy, panels):
    (best, mean, averaged), axes = compare_with_mean(GAMMA, toy.scales), panels["toy-surface"].axes[0]
    assert [marked(axes, marker) for marker in "os"] == [[(1, best[1])], [(1, mean)]]
    assert [text.get_text() for text in panels["toy-surface"].legends[0].get_texts()] == [
        f"own gamma {best[1]:.2f}: error {toy.scales[1].min():.3f}",
        f"averaged gamma {mean:.2f}: error {averaged[1]:.3f}",
    ]
    levels = axes.collections[0].levels
    assert levels[0] <= toy.surfaces[1].min() < toy.surfaces[1].max() <= levels[-1]
