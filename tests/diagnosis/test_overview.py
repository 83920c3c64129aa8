"""Tables and pictures of a federation's data: every client and number is present, and names are printed literally."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.image import AxesImage
from rich.console import Console

from fedshift.data.assembly import federation
from fedshift.data.checks.quality import examine
from fedshift.data.nuclei import nuclei
from fedshift.diagnosis import overview
from fedshift.diagnosis.overview import SHOWN, describe, draw_overview, render_quality

FILES = {name: [f"{name}.{kind}" for kind in ("svg", "png", "pdf")] for name in ("samples", "features", "classes")}


def printed(*parts):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    for part in parts:
        console.print(part)
    console.file.close()
    return console.export_text()


@pytest.fixture
def drawn(monkeypatch):
    """Return the saved figures, by name."""
    figures = {}
    save = overview.save_each
    monkeypatch.setattr(overview, "save_each", lambda made, place: figures.update(made) or save(made, place))
    return figures


def test_the_table_holds_every_clients_sizes(tiny):
    lines = [line.split() for line in printed(describe(tiny.hold_out(0.2))).splitlines()]
    assert lines[0] == ["tiny:", "3", "clients"]
    assert lines[1] == ["client", "train", "validation", "test", "classes", "sample"]
    shape = ["3", "x", "8", "x", "8", "uint8"]
    assert lines[2:5] == [["ann", "21", "5", "12", "3", *shape], ["bob", "14", "3", "12", "3", *shape],
                          ["cid", "26", "7", "12", "3", *shape]]  # fmt: skip
    assert lines[-1] == ["all", "61", "15", "36", "3", "of", "3"]


@pytest.fixture
def many(tiny):
    """More clients than are shown, all with the same test data."""
    first = tiny.clients[0]
    own = (first.train.take(torch.arange(26)) for _ in range(SHOWN + 5))
    return replace(tiny, clients=tuple(replace(first, name=f"[b]{k}", train=train) for k, train in enumerate(own)))


def test_the_table_of_many_clients_shows_the_first_and_sums_all(many):
    text = printed(describe(many))
    assert f"[b]{SHOWN - 1}" in text
    assert f"[b]{SHOWN} " not in text
    assert "and 5 more" in text
    assert text.splitlines()[-1].split()[:3] == ["all", f"{26 * (SHOWN + 5)}", "12"]


def test_what_the_check_found_is_said_with_fix_and_places(tiny):
    ann, bob, cid = tiny.clients
    x = ann.train.x.clone()
    x[3] = ann.test.x[6]
    faulty = replace(tiny, clients=(replace(ann, name="[red]ann", train=ann.train.replace(x=x)), bob, cid))
    quality = examine(faulty)
    text = " ".join(printed(*render_quality(quality)).split())
    assert all(finding.text in text and finding.fix in text for finding in quality.findings)
    assert "error Test samples are also in" in text
    assert "[red]ann test row 6 (label 0) = [red]ann train row 3 (label 0)" in text
    assert text.endswith("Found 1 error, 1 warning in 112 samples of 3 clients.")
    assert "Found nothing in 0 samples of 0 clients." in printed(
        *render_quality(replace(quality, findings=(), splits=()))
    )


@pytest.mark.slow
def test_pictures_of_images_are_written_and_show_training_images_by_class(tiny, many, tmp_path, drawn, unchanged):
    data = replace(tiny, class_names=("top", "mid", "low"))
    paths = draw_overview(data, tmp_path / "new" / "show")
    assert [path.name for path in paths] == [*FILES["samples"], *FILES["classes"]]
    shown = drawn["samples"].findobj(AxesImage)
    assert len(shown) == 3 * 3 * 3
    for place, client in enumerate(tiny.clients):
        for number, image in enumerate(shown[9 * place : 9 * place + 9]):
            same = (client.train.x.permute(0, 2, 3, 1).numpy() == image.get_array()).all(axis=(1, 2, 3))
            assert client.train.y[torch.from_numpy(same)].tolist() == [number // 3]
    assert [label.get_text() for label in drawn["classes"].axes[0].get_xticklabels()] == ["top", "mid", "low"]
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in draw_overview(data, tmp_path)] == first
    draw_overview(many, tmp_path)
    assert len(drawn["samples"].findobj(AxesImage)) == SHOWN * 3
    assert drawn["samples"].texts[0].get_text() == f"tiny: training samples, {SHOWN} of {SHOWN + 5} clients"
    assert drawn["classes"].axes[0].get_ylabel().startswith(f"{SHOWN + 5} clients")


@pytest.mark.slow
def test_pictures_of_vectors_show_the_columns_that_differ_and_images_of_floats_are_stretched(tmp_path, drawn):
    rng = np.random.default_rng(0)
    parts = {}
    for place, name in enumerate(("a", "b")):
        x = rng.normal(size=(20, 4)).astype(np.float32)
        x[:, 2] += 5 * place
        parts[name] = (x, np.arange(20) % 2, x[:4] + 1, np.arange(4) % 2)
    paths = draw_overview(federation(parts), tmp_path)
    assert [path.name for path in paths] == [*FILES["features"], *FILES["classes"]]
    panel = drawn["features"].axes[0]
    assert panel.get_title(loc="left").startswith("column 2")
    assert panel.lines[0].get_xdata() == pytest.approx([parts[name][0][:, 2].mean() for name in ("a", "b")], rel=1e-5)
    x = np.linspace(-3, 7, 20 * 3 * 4 * 4).reshape(20, 3, 4, 4).astype(np.float32)
    draw_overview(federation({"a": (x, np.arange(20) % 2, x[:2], np.arange(2))}), tmp_path)
    values = np.stack([image.get_array() for image in drawn["samples"].findobj(AxesImage)])
    assert (values.min(), values.max()) == (0, 255)


@pytest.mark.slow
def test_masks_are_outlined_and_counted_by_pixels(tmp_path, drawn):
    data = nuclei().select_clients(["bright_1024", "stain_white"])
    overview = printed(describe(data))
    shares = [float(client.train.y.float().mean()) for client in data.clients]
    for line, share, empty in zip(overview.splitlines()[2:], shares, (3, 0), strict=False):
        assert f"0: {1 - share:.1%}, 1: {share:.1%}" in line
        assert line.split()[-1] == str(empty)
    paths = draw_overview(data, tmp_path)
    assert [path.name for path in paths] == [*FILES["samples"], *FILES["classes"]]
    assert len(drawn["samples"].findobj(AxesImage)) == 2 * 24
    shaded = drawn["classes"].axes[0].findobj(AxesImage)[0].get_array()
    assert shaded[:, 1].tolist() == pytest.approx(shares)
