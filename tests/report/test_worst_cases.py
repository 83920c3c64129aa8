"""Pictures of the worst test images: on a run's page, and by the example that draws them across methods."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedshift
from fedshift.data.pictures import draw_overlay
from fedshift.report.page import render_page
from fedshift.results.cases import rank_results, read_cases, read_pictures
from fedshift.results.summary import read_summary

SCRIPT = Path(__file__).parents[2] / "examples" / "worst_cases.py"


@pytest.mark.slow
def test_the_worst_cases_are_first_and_have_the_dice_that_the_run_counted(tmp_path, undrawn):
    run = tmp_path / "run"
    result = fedshift.compare(
        data="nuclei", domains=("fluor_696", "stain_violet"), methods="single,fedbn", model="unet-small(width=2)",
        rounds=2, batch_size=4, lr=0.3, out=run,
    )  # fmt: skip
    script = runpy.run_path(str(SCRIPT))
    cases = script["predict"](run, ["single"])
    records = result.summary.read_cases("single", 0).records  # of the reported BatchNorm statistics
    counted = []
    for client in ("fluor_696", "stain_violet"):
        counts = {name: values[:, 1] for name, values in records[client, "personal"].items() if values.ndim == 2}
        both = counts["support"] + counts["predicted"]
        counted += [
            (2 * hits / total, f"{client} {number}")
            for number, (hits, total) in enumerate(zip(counts["hits"], both, strict=True))
            if total
        ]
    assert [(pytest.approx(dice), name) for dice, name in sorted(counted)] == [case[:2] for case in cases]
    assert script["draw"](run, []).read_bytes().startswith(b"\x89PNG")


def make_run(out, y, model):
    rng = np.random.default_rng(0)
    clients = {name: rng.integers(0, 256, (12, 1, 8, 8), dtype=np.uint8) for name in ("a", "b")}
    data = {name: (x[:6], y(x[:6]), x[6:], y(x[6:])) for name, x in clients.items()}
    return data, fedshift.compare("single, fedavg", data=data, model=model, rounds=1, seeds=2, lr=0.3, out=out)


def list_captions(run, method):
    page = render_page(read_summary(run))
    worst = page[page.index('<h2 id="worst">') : page.index('<h2 id="clients">')].split("<h3>")
    return re.findall("<figcaption>(.*?)</figcaption>", next(part for part in worst if part.startswith(method)))


def test_a_picture_has_the_true_mask_beside_the_one_that_its_model_predicts(tmp_path, undrawn):
    data, result = make_run(
        tmp_path, lambda x: (x[:, 0] > 100).astype(np.uint8), lambda shape, classes: nn.Conv2d(1, classes, 3, padding=1)
    )
    folder = tmp_path / "trials" / "single-seed0"
    pictures, records = read_pictures(folder, 1), read_cases(folder).records
    dice, captions = [], list_captions(tmp_path, "single")
    for picture, caption in zip(pictures, captions, strict=True):
        x, mask = data[picture.client][2][picture.row], data[picture.client][3][picture.row]
        model = result.model("single", client=picture.client)
        test = result.experiment.data.client(picture.client).test
        predicted = model(test.inputs(torch.tensor([picture.row])))[0].argmax(0).to(torch.uint8).numpy()
        both = [draw_overlay(x.transpose(1, 2, 0), each, 2) for each in (mask, predicted)]
        assert np.array_equal(picture.image, np.concatenate(both, axis=1))
        total = int(mask.sum()) + int(predicted.sum())
        dice.append(2 * int((mask & predicted).sum()) / total)
        assert caption == f"{picture.client} {picture.row}: Dice {100 * dice[-1]:.1f} %"
    assert [picture.client for picture in pictures].count("a") == 2 == len(pictures) - 2
    assert dice == sorted(dice)
    assert np.nanmax(rank_results(records["a", "personal"])) == pytest.approx(
        1 - min(value for value, picture in zip(dice, pictures, strict=True) if picture.client == "a")
    )
    assert not (tmp_path / "trials" / "single-seed1" / "worst-cases.npz").exists()


def test_of_classes_the_errors_of_the_highest_loss_are_shown(tmp_path, undrawn):
    make_run(
        tmp_path,
        lambda x: (x[:, 0, 0, 0] % 3).astype(np.int64),
        lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)),
    )
    records = read_cases(tmp_path / "trials" / "fedavg-seed0").records
    expected = []
    for client in ("a", "b"):
        known = records[client, "personal"]
        wrong = sorted((-known["loss"][row], client, row) for row in np.flatnonzero(known["chosen"] != known["truth"]))
        expected += wrong[:2]
    captions = list_captions(tmp_path, "fedavg")
    assert len(captions) == len(expected) > 2
    for caption, (_, client, row) in zip(captions, sorted(expected), strict=True):
        known = records[client, "personal"]
        chosen, truth = int(known["chosen"][row]), int(known["truth"][row])
        sure = 100 / (1 + np.exp(-known["odds"][row, chosen]))
        assert caption == f"{client} {row}: predicted class {chosen} ({sure:.0f} %), true class {truth}"
