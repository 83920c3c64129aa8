"""Pictures of data: what is drawn is what was given, at every number of clients and classes, without warnings."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import AxesImage
from matplotlib.text import Text

from fedshift.report.figures import save_each
from fedshift.report.gallery import (
    COLUMNS,
    FEATURES,
    LINES,
    NAMED,
    class_chart,
    contact_sheet,
    effect_size,
    feature_chart,
    pick_samples,
)


def table(clients, classes, key=0):
    """Counts as a Dirichlet partition gives them."""
    rng = np.random.default_rng(key)
    rows = [rng.multinomial(rng.integers(20, 600), rng.dirichlet([0.3] * classes)) for _ in range(clients)]
    return pd.DataFrame(rows, index=[f"client {k}" for k in range(clients)], columns=[str(k) for k in range(classes)])


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text)]


def test_classes_are_picked_evenly_and_as_far_as_they_go():
    y = np.random.default_rng(0).permutation([0] * 50 + [3] * 2 + [5] * 20)
    chosen = pick_samples(y, per_class=9, total=12, rng=np.random.default_rng(1))
    assert len(set(chosen.tolist())) == 12
    assert y[chosen].tolist() == [0] * 5 + [3] * 2 + [5] * 5
    assert Counter(y[pick_samples(y, per_class=4, total=99, rng=np.random.default_rng(1))].tolist()) == {
        0: 4,
        3: 2,
        5: 4,
    }
    assert sorted(pick_samples(y, per_class=99, total=99, rng=np.random.default_rng(1))) == list(range(72))


def test_picking_is_a_draw_that_its_key_repeats():
    y = np.arange(600) % 6
    one, again, other = (pick_samples(y, per_class=3, total=18, rng=np.random.default_rng(key)) for key in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).any()
    seen = {pick_samples(y, per_class=1, total=2, rng=np.random.default_rng(key)).tolist()[0] % 6 for key in range(40)}
    assert len(seen) > 3  # where not all classes have room, it is not always the same that have


def test_a_sheet_shows_each_image_in_the_row_of_its_client_and_the_column_of_its_class():
    rng = np.random.default_rng(0)
    images = {
        "gray": rng.integers(0, 256, (3, 8, 8, 1)).astype(np.uint8),
        "color": rng.integers(0, 256, (2, 6, 12, 3)).astype(np.uint8),
    }
    labels = {"gray": ["ant", "cat", "cat"], "color": ["cat", "bee"]}
    figure = contact_sheet(images, labels, ["ant", "bee", "cat"], "Some beasts")
    shown = figure.axes[0].findobj(AxesImage)
    assert len(shown) == 5
    for drawn, image in zip(shown, [*images["gray"], *images["color"]], strict=True):
        assert (drawn.get_array() == image.squeeze()).all()
    boxes = [drawn.get_extent() for drawn in shown]  # left, right, bottom, top
    assert [int(left) for left, _, _, _ in boxes] == [0, 2, 2, 2, 1]
    assert [int(top) for _, _, _, top in boxes[:3]] == [0, 0, 1]
    assert min(box[3] for box in boxes[3:]) > max(box[2] for box in boxes[:3])
    left, right, bottom, top = boxes[3]
    assert (right - left) / (bottom - top) == pytest.approx(2)
    written = Counter(texts(figure))
    assert [written[text] for text in ("Some beasts", "ant", "bee", "cat", "gray", "color")] == [1] * 6
    assert written["none"] == 2  # gray has no bee, color no ant


def test_a_sheet_of_many_classes_says_each_images_class():
    classes = [f"class {k}" for k in range(COLUMNS + 1)]
    images = {"a": np.zeros((COLUMNS + 1, 4, 4, 3), np.uint8), "b": np.zeros((2, 4, 4, 3), np.uint8)}
    labels = {"a": classes, "b": [classes[7], classes[7]]}
    figure = contact_sheet(images, labels, classes, "Many")
    boxes = [drawn.get_extent() for drawn in figure.findobj(AxesImage)]
    assert [int(box[0]) for box in boxes] == [*range(COLUMNS), 0, 0, 1]
    assert Counter(texts(figure))["class 7"] == 3
    assert boxes[COLUMNS][3] > boxes[0][2]


def test_bubbles_have_the_counts_as_areas():
    counts = pd.DataFrame([[100, 0, 25], [0, 0, 50]], index=["a", "b"], columns=["x", "y", "z"])
    main, totals = class_chart(counts, "Counts").axes
    (dots,) = main.collections
    assert dots.get_offsets().tolist() == [[0, 0], [2, 0], [2, 1]]
    sizes = dots.get_sizes()
    assert (sizes / sizes[0]).tolist() == pytest.approx([1, 0.25, 0.5])
    assert [bar.get_width() for bar in totals.patches] == [125, 50]
    assert [label.get_text() for label in main.get_yticklabels()] == ["a", "b"]
    assert [label.get_text() for label in main.get_xticklabels()] == ["x", "y", "z"]


def test_the_bubbles_of_the_key_are_to_scale():
    figure = class_chart(table(5, 4), "Counts")
    dots = figure.axes[0].collections[0].get_sizes()
    (key,) = figure.legends
    for handle, text in zip(key.legend_handles, key.get_texts(), strict=True):
        share = int(text.get_text()) / table(5, 4).to_numpy().max()
        assert handle.get_markersize() ** 2 == pytest.approx(share * dots.max())


def test_many_classes_become_shares_of_each_named_client():
    counts = table(4, NAMED + 1)
    main = class_chart(counts, "Counts").axes[0]
    shares = main.images[0].get_array()
    assert np.allclose(shares, counts.div(counts.sum(axis=1), axis=0))
    assert [label.get_text() for label in main.get_yticklabels()] == list(counts.index)


@pytest.mark.parametrize("clients", [NAMED + 1, LINES, 10 * LINES + 7])
def test_many_clients_are_sorted_by_main_class_and_share_lines(clients):
    counts = table(clients, 5)
    figure = class_chart(counts, "Counts")
    shares = figure.axes[0].images[0].get_array()
    assert len(shares) == min(clients, LINES)
    assert np.allclose(shares.sum(axis=1), 1)
    if clients <= LINES:
        main = shares.argmax(axis=1)
        assert (np.diff(main) >= 0).all()
        for number in set(main):
            assert (np.diff(shares[main == number, number]) <= 1e-12).all()
        expected = counts.div(counts.sum(axis=1), axis=0).sum()
        assert np.allclose(shares.sum(axis=0), expected)
    assert any(f"{clients:,} clients" in text for text in texts(figure))


def test_effect_is_cohens_f():
    means = pd.DataFrame({"same": [1.0, 1.0], "apart": [0.0, 4.0], "flat": [2.0, 2.0], "split": [0.0, 1.0]})
    stds = pd.DataFrame({"same": [1.0, 2.0], "apart": [1.0, 1.0], "flat": [0.0, 0.0], "split": [0.0, 0.0]})
    assert effect_size(means, stds).to_dict() == {"same": 0, "apart": 2, "flat": 0, "split": np.inf}


def test_the_features_shown_are_those_that_differ_most():
    rng = np.random.default_rng(0)
    names = [f"column {k}" for k in range(FEATURES + 5)]
    means = pd.DataFrame(rng.normal(size=(3, len(names))) * np.arange(1, len(names) + 1), ["a", "b", "c"], names)
    stds = pd.DataFrame(np.ones_like(means), means.index, names)
    axes = feature_chart(means, stds, "Features").axes
    apart = means.std(ddof=0).sort_values(ascending=False)
    assert [panel.get_title(loc="left").split("  ")[0] for panel in axes] == list(apart.index[:FEATURES])
    for panel, name in zip(axes, apart.index, strict=False):
        assert panel.lines[0].get_xdata().tolist() == means[name].tolist()
        ((low, _), (high, _)), *_ = panel.collections[0].get_segments()
        assert (low, high) == pytest.approx((means[name]["a"] - 1, means[name]["a"] + 1))
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["a", "b", "c"]


def test_many_clients_features_are_ascending_lines():
    rng = np.random.default_rng(0)
    means = pd.DataFrame(rng.normal(size=(NAMED + 1, 2)), columns=["x", "y"])
    figure = feature_chart(means, means.abs() + 1, "Features")
    drawn = {panel.get_title(loc="left").split("  ")[0]: panel.lines[0].get_ydata().tolist() for panel in figure.axes}
    assert drawn == {name: sorted(means[name]) for name in ("x", "y")}
    assert any("25 clients" in text for text in texts(figure))


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (20, 20), (3, 100), (2000, 30)])
def test_charts_of_every_size_are_saved_within_page_width(clients, classes, tmp_path):
    figure = class_chart(table(clients, classes), "Counts of a federation")
    assert figure.get_figwidth() < 8.5
    assert [path.name for path in save_each({"classes": figure}, tmp_path)] == [
        "classes.svg",
        "classes.png",
        "classes.pdf",
    ]


@pytest.mark.slow
def test_saved_twice_gives_the_same_bytes_and_text_stays_text(tmp_path):
    written = []
    for name in ("one", "two"):
        image = np.random.default_rng(0).integers(0, 256, (1, 5, 5, 3)).astype(np.uint8)
        figure = contact_sheet({"名 <b>": image}, {"名 <b>": ["$x$"]}, ["$x$"], "A $title")
        written.append([path.read_bytes() for path in save_each({"sheet": figure}, tmp_path / name)])
    assert written[0] == written[1]
    assert b">$x$</text>" in written[0][0]


def test_counts_of_nothing_are_drawn():
    counts = pd.DataFrame(np.zeros((2, 3), int), index=["a", "b"], columns=["x", "y", "z"])
    assert class_chart(counts, "None").axes[0].collections[0].get_offsets().shape == (0, 2)
    many = pd.DataFrame(np.zeros((40, 3), int))
    assert class_chart(many, "None").axes[0].images[0].get_array().max() == 0
