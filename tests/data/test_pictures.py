"""Samples as pictures: outlines of masks on their images."""

import numpy as np
import torch
from torch import nn

import fedshift
from fedshift.data.pictures import OUTLINES, draw_overlay, to_pictures
from fedshift.data.samples import Samples


def test_an_outline_is_the_outermost_pixels_of_a_region():
    mask = np.zeros((6, 7), np.uint8)
    mask[1:5, 1:5], mask[0, 6], mask[5] = 1, 2, 3
    drawn = draw_overlay(np.full((6, 7, 1), 200, np.uint8), mask, 3)
    bright = (drawn == 255).all(axis=2)
    colors = {tuple(int(c) for c in pixel) for pixel in drawn[~bright]}
    assert colors == set(OUTLINES[:2])
    expected = np.zeros((6, 7), bool)
    expected[1:5, 1:5], expected[2:4, 2:4], expected[0, 6] = True, False, True
    assert (bright == ~expected).all()  # class 3 is beyond the three classes
    assert tuple(drawn[0, 6]) == OUTLINES[1]


def test_dark_images_are_brightened_and_ignored_pixels_are_gray():
    image = np.random.default_rng(0).integers(0, 64, (20, 20, 3)).astype(np.uint8)
    mask = np.zeros((20, 20), np.uint8)
    mask[10:] = 255
    before = image.copy()
    drawn = draw_overlay(image, mask, 2)
    assert (image == before).all()
    assert drawn[:10].max() == 255
    assert (drawn[:10].astype(int) >= image[:10]).all()
    assert (drawn[10:].min(), drawn[10:].max()) == (64, 191)


def test_samples_with_masks_are_drawn_with_them_and_others_as_they_are():
    x = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    masks = (x[:, 0] > 128).to(torch.uint8)
    rows = torch.tensor([3, 1])
    images = x[rows].permute(0, 2, 3, 1).numpy()
    assert (to_pictures(Samples(x=x, y=torch.arange(5)), rows, 5) == images).all()
    drawn = to_pictures(Samples(x=x, y=masks), rows, 2)
    assert (drawn == [draw_overlay(*each, 2) for each in zip(images, masks[rows].numpy(), strict=True)]).all()


def test_pictures_show_the_slice_with_most_of_the_mask_and_its_outline():
    x, y = torch.zeros(1, 1, 4, 5, 6), torch.zeros(1, 4, 5, 6, dtype=torch.uint8)
    y[0, 2, 1:4, 1:4] = 1
    (picture,) = to_pictures(Samples(x=x, y=y), torch.tensor([0]), 2)
    assert picture.shape == (5, 6, 3)
    assert (picture == (230, 159, 0)).all(axis=2).sum() == 8  # the outline of 3 x 3 pixels


def test_a_run_keeps_pictures_of_test_samples_with_their_masks():
    masks = np.random.default_rng(0).integers(0, 2, (10, 8, 8))
    data = fedshift.federation({"one": (200 * masks, masks, 200 * masks, masks)})
    result = fedshift.compare(["fedavg"], data=data, model=lambda *_: nn.Conv2d(1, 2, 1), rounds=1, engine="sequential")
    pictures = result.summary.samples["one"]
    assert pictures.shape == (8, 8, 8, 3)
    assert (pictures == to_pictures(data.clients[0].test, slice(0, 8), 2)).all()
    assert (pictures[masks[:8] == 0] == 0).all()
