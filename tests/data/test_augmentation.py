"""Augmentations: each against another library or a plain loop, and what all of them promise."""

import colorsys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance
from scipy.ndimage import affine_transform, gaussian_filter

from fedshift.data import augmentation
from fedshift.data.augmentation import AUGMENTATIONS, augment_masks
from fedshift.tasks.segmentation import LEFT_OUT
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream

EVERY = (
    "flip", "flip(vertical=True)", "rotate(degrees=40)", "rotate(degrees=40, fill='reflection')", "scale(amount=0.3)",
    "shear(degrees=20)", "crop(padding=3)", "crop(padding=0.2, fill='border')", "color_jitter",
    "brightness_contrast", "erase(patches=3, size=4)", "sometimes(rotate(degrees=40), p=0.4)",
    "sequence(flip, crop(padding=1))", "noise(variance=0.5)", "blur", "lower_resolution", "gamma(inverted=True)",
    "crop(padding=40, fill='reflection')", "fedbn_office", "fedmmb_cifar", "flamby_isic", "nnunet",
)  # fmt: skip
WITHOUT_STRENGTH = (
    "flip(p=0)", "flip(p=0, vertical=True)", "rotate(degrees=0)", "scale(amount=0)", "shear(degrees=0)",
    "crop(padding=0)", "brightness_contrast(brightness=0, contrast=0)",
    "color_jitter(brightness=0, contrast=0, saturation=0, hue=0)", "sometimes(erase(size=4), p=0)",
    "noise(variance=0)", "gamma(bounds=(1, 1))", "lower_resolution(share=(1, 1))", "scale(amount=(1, 1))",
)  # fmt: skip


class Fixed:
    """Stands for a generator, and gives every image the draws written down, one a call."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def random(self, shape):
        return np.full(shape, self.draws.pop(0), float)

    def uniform(self, low, high, shape):
        return np.full(shape, low + (high - low) * self.draws.pop(0))


def images(count=6, channels=3, height=16, width=16, dtype=torch.float64):
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(0), dtype=dtype)


def key(*more):
    return stream(0, "augment", "client", *more)


# what all promise


@pytest.mark.sampled(44)
@pytest.mark.parametrize("text", EVERY)
@pytest.mark.parametrize("shape", [(5, 3, 16, 16), (1, 1, 9, 14), (2, 3, 1, 5), (2, 1, 4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_dtype_and_range_are_kept_and_the_batch_is_left_alone(text, shape, dtype):
    x = images(*shape, dtype=dtype)
    x[0, 0, 0, 0], x[-1] = 0, 1
    before = x.clone()
    augment = AUGMENTATIONS.parse(text)
    for step in range(5):
        out = augment(x, key(step))
        assert (out.shape, out.dtype) == (x.shape, dtype)
        assert 0 <= out.min() <= out.max() <= 1
    assert torch.equal(x, before)
    assert augment(torch.zeros(shape, device="meta"), key()).device.type == "meta"


@pytest.mark.parametrize("text", EVERY)
def test_an_image_is_a_function_of_the_key_and_not_of_others_with_parameters_of_its_own(text):
    x, augment = images(), AUGMENTATIONS.parse(text)
    assert torch.equal(augment(x, key(3)), AUGMENTATIONS.parse(text)(x, key(3)))
    assert any(not torch.equal(augment(x, key(3)), augment(x, key(step))) for step in range(4, 9))
    other = 1 - x
    other[2] = x[2]
    assert torch.equal(augment(x, key())[2], augment(other, key())[2])
    alike = x[:1].expand(40, -1, -1, -1)
    assert len(augment(alike, key()).flatten(1).unique(dim=0)) > 1


@pytest.mark.parametrize("text", EVERY)
def test_how_many_draws_are_made_depends_on_the_number_of_images_or_masks_alone(text):
    augment, after = AUGMENTATIONS.parse(text), []
    for x in (images(), torch.zeros(6, 1, 9, 12), torch.ones(6, 3, 20, 20), blocks()[1]):
        rng = key()
        augment(x, rng) if x.is_floating_point() else augment_masks(augment, x, rng)
        after.append(rng.random())
    assert len(set(after)) == 1


@pytest.mark.parametrize("text", EVERY)
def test_slices_of_a_volume_are_moved_alike_and_its_masks_with_them(text):
    x, augment = images(4, 2, 12, 10), AUGMENTATIONS.parse(text)
    thick = x[:, :, None].expand(-1, -1, 3, -1, -1)
    moved, flat = augment(thick, key(1)), augment(x, key(1))
    assert moved.shape == thick.shape
    if "noise" not in text and text != "nnunet":  # each voxel has its own
        torch.testing.assert_close(moved, flat[:, :, None].expand_as(moved), rtol=1e-9, atol=1e-9)
    _, y = blocks(4, 12)
    masks = augment_masks(augment, y[:, None].expand(-1, 3, -1, -1), key(1))
    assert torch.equal(masks, augment_masks(augment, y, key(1))[:, None].expand_as(masks))


@pytest.mark.parametrize("text", WITHOUT_STRENGTH)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_changes_bit_for_bit_where_the_strength_is_zero(text, channels, dtype):
    x = images(channels=channels, dtype=dtype)
    assert torch.equal(AUGMENTATIONS.parse(text)(x, key()), x)


# geometry


@pytest.mark.parametrize(("vertical", "expected"), [(True, (0.4, 0.2, 0.2, 0.2)), (False, (0.4, 0.6, 0, 0))])
def test_flips_are_torchs_each_way_equally_often(vertical, expected):
    x = images(600, 1, 4, 5)
    out = AUGMENTATIONS.parse(f"flip(p=0.6, vertical={vertical})")(x, key())
    ways = (x, x.flip(3), x.flip(2), x.flip(2, 3))
    shares = [(out == way).flatten(1).all(1).double().mean().item() for way in ways]
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(
    ("fill", "mode"), [("zeros", "grid-constant"), ("border", "nearest"), ("reflection", "mirror")]
)
@pytest.mark.parametrize(
    ("text", "draw", "into"),
    [
        ("rotate(degrees=50, fill={!r})", 0.2, None),
        ("scale(amount=0.4, fill={!r})", 0.9, np.eye(2) / 1.32),
        ("scale(amount=0.4, fill={!r})", 0.1, np.eye(2) / 0.68),
        ("shear(degrees=30, fill={!r})", 0.9, [[1, 0], [np.tan(np.deg2rad(24)), 1]]),
    ],
)
def test_geometry_is_scipys_on_images_that_are_not_square(text, draw, into, fill, mode):
    x = images(1, 1, 11, 18)
    if into is None:
        angle = np.deg2rad(-30)
        into = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    center = np.array([5, 8.5])
    expected = affine_transform(x[0, 0].numpy(), into, offset=center - into @ center, order=1, mode=mode)
    assert np.allclose(AUGMENTATIONS.parse(text.format(fill))(x, Fixed(draw))[0, 0], expected, atol=1e-12)


@pytest.mark.parametrize("angle", [1, 15, 30])
def test_angles_and_zooms_are_uniform_within_their_bounds(angle, seen):
    AUGMENTATIONS.parse(f"rotate(degrees={angle})")(torch.zeros(4000, 1, 2, 2), key())
    angles = np.rad2deg(np.arctan2(seen["into"][:, 1, 0], seen["into"][:, 0, 0]))
    assert np.abs(angles).max() <= angle
    assert np.percentile(angles, [25, 50, 75]) == pytest.approx([-angle / 2, 0, angle / 2], abs=angle / 12)
    AUGMENTATIONS.parse(f"scale(amount={angle / 100})")(torch.zeros(4000, 1, 2, 2), key())
    zooms = 1 / seen["into"][:, 0, 0] - 1
    assert np.percentile(zooms, [25, 50, 75]) == pytest.approx(np.array([-1, 0, 1]) * angle / 200, abs=angle / 1200)


@pytest.mark.parametrize(("fill", "mode"), [("zeros", "constant"), ("border", "edge"), ("reflection", "reflect")])
@pytest.mark.parametrize(("padding", "pads"), [(3, (3, 3)), (0.25, (2, 3))])
def test_a_crop_is_the_window_that_a_loop_cuts_from_the_padded_image(padding, pads, fill, mode):
    x = images(50, 3, 8, 12)
    out = AUGMENTATIONS.parse(f"crop(padding={padding}, fill={fill!r})")(x, key())
    rng = key()
    places = [(rng.random(50) * (2 * pad + 1)).astype(int) for pad in pads]
    for i, (top, left) in enumerate(zip(*places, strict=True)):
        padded = np.pad(x[i].numpy(), ((0, 0), (pads[0],) * 2, (pads[1],) * 2), mode=mode)
        assert np.array_equal(out[i], padded[:, top : top + 8, left : left + 12])
    assert {*places[0]} == {*range(2 * pads[0] + 1)}


@pytest.fixture
def seen(monkeypatch):
    """The matrices by which images are warped."""
    seen = {}
    monkeypatch.setattr(augmentation, "warp", lambda x, into, fill: seen.update(into=into) or x)
    return seen


# color


@pytest.mark.parametrize(
    ("name", "enhance"),
    [("brightness", ImageEnhance.Brightness), ("contrast", ImageEnhance.Contrast), ("saturation", ImageEnhance.Color)],
)
@pytest.mark.parametrize("draw", [0.0, 0.3, 1.0])
def test_brightness_contrast_and_saturation_are_pillows_with_pixels_of_eight_bits(name, enhance, draw):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    x = torch.from_numpy(pixels.transpose(2, 0, 1)[None] / 255)
    draws = [draw if name == other else 0.5 for other in ("brightness", "contrast", "saturation", "hue")]
    strengths = {other: 0.8 if name == other else 0 for other in ("brightness", "contrast", "saturation", "hue")}
    out = AUGMENTATIONS.parse(f"color_jitter({', '.join(f'{k}={v}' for k, v in strengths.items())})")(x, Fixed(*draws))
    expected = np.asarray(enhance(Image.fromarray(pixels)).enhance(0.2 + 1.6 * draw)) / 255
    assert np.allclose(out[0].permute(1, 2, 0), expected, atol=2 / 255)


@pytest.mark.parametrize("draw", [0.0, 0.21, 0.4, 0.73, 1.0])
def test_hue_is_colorsys_pixel_by_pixel(draw):
    x = images(1, 3, 6, 6)
    x[0, :, 0] = torch.tensor([[0, 1, 1, 0, 0.5, 1], [0, 1, 0, 0, 0.5, 0], [0, 1, 0, 1, 0.5, 1]], dtype=x.dtype)
    out = AUGMENTATIONS.parse("color_jitter(brightness=0, contrast=0, saturation=0, hue=0.5)")(
        x, Fixed(0.5, 0.5, 0.5, draw)
    )
    for row in range(6):
        for column in range(6):
            h, s, v = colorsys.rgb_to_hsv(*x[0, :, row, column].tolist())
            assert out[0, :, row, column].tolist() == pytest.approx(
                colorsys.hsv_to_rgb((h + draw - 0.5) % 1, s, v), abs=1e-12
            )


def test_images_that_are_not_rgb_have_contrast_about_the_mean_of_all_but_no_saturation_and_no_hue():
    x = images(channels=2)
    jitter = AUGMENTATIONS.parse("color_jitter(brightness=0, contrast=0.5, saturation=0.9, hue=0.5)")
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    assert torch.allclose(jitter(x, Fixed(0.5, 0.25, 0.1, 0.9)), mean + 0.75 * (x - mean), atol=1e-12)


def test_brightness_and_contrast_together_are_a_line_and_a_factor_is_never_negative():
    x = images()
    out = AUGMENTATIONS.parse("brightness_contrast(brightness=0.3, contrast=0.4)")(x, Fixed(0.75, 0.1))
    assert torch.allclose(out, (1.2 * x - 0.24).clamp(0, 1), atol=1e-12)
    least = AUGMENTATIONS.parse("color_jitter(brightness=2.0, contrast=0, saturation=0, hue=0)")
    assert not least(x, Fixed(0, 0.5, 0.5, 0.5)).any()
    assert torch.equal(least(x, Fixed(1 / 3, 0.5, 0.5, 0.5)), x)


# erasing and choosing


@pytest.mark.parametrize(("size", "sides"), [(3, (3, 3)), (0.25, (3, 5)), (0.01, (1, 1)), (99, (12, 20))])
def test_a_hole_is_a_black_rectangle_inside_the_image(size, sides):
    x = torch.ones(300, 3, 12, 20)
    out = AUGMENTATIONS.parse(f"erase(patches=1, size={size})")(x, key())
    for image in out:
        black = (image == 0).all(0).nonzero()
        assert len(black) == sides[0] * sides[1]
        assert tuple((black.amax(0) - black.amin(0) + 1).tolist()) == sides
        assert image.sum() == 3 * (240 - len(black))
    if size == 3:
        assert len(out.flatten(1).unique(dim=0)) > 130  # of 10 x 18 places


def test_one_to_so_many_holes_are_cut_each_as_often():
    x = torch.ones(400, 1, 200, 200)
    counts = (AUGMENTATIONS.parse("erase(patches=4, size=1)")(x, key()) == 0).flatten(1).sum(1)
    assert counts.max() == 4
    assert (counts.bincount() / 400).tolist() == pytest.approx([0, 0.25, 0.25, 0.25, 0.25], abs=0.07)


def test_noise_has_the_share_of_the_images_variance():
    x = 0.4 + 0.2 * images(40, 1, 32, 32)
    ratio = (AUGMENTATIONS.parse("noise(variance=0.5)")(x, key()) - x).flatten(1).var(1) / x.flatten(1).var(1)
    assert ratio.max() < 0.56
    assert ratio.mean().item() == pytest.approx(0.25, abs=0.05)


def test_blur_is_scipys():
    x = images(2, 2, 12, 9)
    out = AUGMENTATIONS.parse("blur(sigma=(0.5, 1.5))")(x, Fixed(0.7))
    expected = gaussian_filter(x.numpy(), (0, 0, 1.2, 1.2), mode="nearest", radius=5)
    np.testing.assert_allclose(out, expected, atol=1e-12)


def test_a_lower_resolution_is_a_grid_of_nearest_pixels_and_a_cubic_between():
    x = images(1, 2, 12, 8)
    out = AUGMENTATIONS.parse("lower_resolution(share=(0.25, 0.75))")(x, Fixed(0.5))
    fine = F.interpolate(x[:, :, 1::2, 1::2], (12, 8), mode="bicubic").clamp(0, 1)
    assert torch.equal(out, fine)


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize(("draws", "power"), [((0.2, 0.5), 0.85), ((0.7, 0.4), 1.2)])
def test_gamma_is_a_power_that_keeps_mean_and_spread(draws, power, inverted):
    x = 0.3 + 0.3 * images(1, 2, 6, 5)
    out = AUGMENTATIONS.parse(f"gamma(bounds=(0.7, 1.5), inverted={inverted})")(x, Fixed(*draws))
    values = 1 - x.numpy() if inverted else x.numpy()
    raised = ((values - values.min()) / np.ptp(values)) ** power
    expected = (raised - raised.mean()) / raised.std() * values.std() + values.mean()
    np.testing.assert_allclose(out, 1 - expected if inverted else expected, atol=1e-12)


def test_sometimes_leaves_the_other_images_bit_for_bit():
    x = images(300, 1, 4, 4)
    out = AUGMENTATIONS.parse("sometimes(brightness_contrast(brightness=0.5), p=0.3)")(x, key())
    assert (out == x).flatten(1).all(1).double().mean().item() == pytest.approx(0.7, abs=0.08)


def test_a_sequence_is_done_in_the_order_written():
    x, rng = images(), key()
    expected = AUGMENTATIONS.parse("crop(padding=2)")(AUGMENTATIONS.parse("flip")(x, rng), rng)
    assert torch.equal(AUGMENTATIONS.parse("flip, crop(padding=2)")(x, key()), expected)
    assert torch.equal(AUGMENTATIONS.parse("sequence(flip, crop(padding=2))")(x, key()), expected)
    assert AUGMENTATIONS.parse("none") is AUGMENTATIONS.parse("") is None
    assert not torch.equal(AUGMENTATIONS.parse("crop(padding=2), flip")(x, key()), expected)


# names


def test_recipes_are_what_their_papers_do():
    assert AUGMENTATIONS.parse("fedbn_office()") == AUGMENTATIONS.parse("flip(p=0.5), rotate(degrees=30.0)")
    assert AUGMENTATIONS.parse("fedmmb_cifar()").options.arguments["parts"][0] == AUGMENTATIONS.parse("flip(p=0.5)")
    isic = AUGMENTATIONS.parse("flamby_isic()").options.arguments["parts"]
    assert [part.options.arguments.get("p", 1) for part in isic] == [0.5, 0.5, 0.5, 0.5, 0.5, 1, 0.5]
    kinds = [part.options.arguments.get("augmentation", part).operation.__name__ for part in isic]
    assert kinds == ["scale", "rotate", "brightness_contrast", "flip", "shear", "crop", "erase"]
    hole = isic[-1].options.arguments["augmentation"](torch.ones(1, 1, 200, 200), Fixed(0, 0.5, 0.5))
    assert (hole == 0).sum() == 16 * 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flop", "unknown augmentation 'flop': did you mean 'flip'? allowed are blur, brightness_contrast"),
        ("flip(p=2)", "p=2 is not a probability: it must be in [0, 1]"),
        ("rotate(degrees=-3)", "rotate: degrees=-3 must lie in 0..180"),
        ("rotate(fill='white')", "rotate: fill='white' is unknown: allowed are zeros, border, reflection"),
        ("scale(amount=1)", "scale: amount=1 must lie in [0, 1)"),
        ("scale(amount=(2, 1))", "scale: amount=(2, 1) must lie in [0, 1) or be bounds above 0"),
        ("noise(variance=-1)", "noise: variance=-1 must be 0 or more"),
        ("blur(sigma=(0, 1))", "blur: sigma=(0, 1) must be 0 < low <= high"),
        ("shear(degrees=90)", "shear: degrees=90 must lie in [0, 90)"),
        ("crop(padding=-1)", "crop: padding=-1 must be whole pixels from 0 or a share in [0, 1)"),
        ("color_jitter(contrast=-0.1)", "color_jitter: contrast=-0.1 must be 0 or more"),
        ("color_jitter(hue=0.6)", "color_jitter: hue=0.6 must lie in [0, 0.5]"),
        ("brightness_contrast(contrast=2)", "brightness_contrast: contrast=2 must lie in [0, 1]"),
        ("erase(patches=0)", "erase: patches=0 must be a whole number from 1"),
        ("erase(size=0)", "erase: size=0 must be whole pixels from 1 or a share in (0, 1)"),
    ],
)
def test_what_cannot_be_done_is_refused_and_said(text, said):
    with pytest.raises(UsageError) as refused:
        AUGMENTATIONS.parse(text)
    assert said in str(refused.value)


# masks


def blocks(count=6, side=32):
    """Masks of four blocks with classes 0..3, and images whose brightness is (class + 1) / 8."""
    far = (torch.arange(side) >= 0.4 * side).long()
    y = (2 * far[:, None] + far).expand(count, -1, -1).clone()
    return (y[:, None].expand(-1, 3, -1, -1) + 1) / 8, y


@pytest.mark.parametrize("fill", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(
    "text",
    ["flip(vertical=True)", "rotate(degrees=40, {})", "scale(amount=0.3, {})", "shear(degrees=20, {})",
     "crop(padding=5, {})", "sometimes(rotate(degrees=40, {}), p=0.5)",
     "sequence(erase(patches=1, size=1), rotate(degrees=40, {}), flip())"],
)  # fmt: skip
def test_a_mask_stays_on_its_image(text, fill):
    augment, (x, y) = AUGMENTATIONS.parse(text.format(f"fill='{fill}'")), blocks()
    moved = augment_masks(augment, y, key(2))
    level = augment(x, key(2))[:, 0]  # the class again, from the image alone; 0 from outside
    assert not torch.equal(moved, y)
    level_of_mask = (moved.clamp(min=-1) + 1) / 8
    near = F.pad(level_of_mask[:, None], (1, 1, 1, 1), value=-1).unfold(2, 3, 1).unfold(3, 3, 1).flatten(4)[:, 0]
    inside = near.amin(-1) == near.amax(-1)  # away from edges, where images are interpolated
    wrong = (level - level_of_mask).abs() > 1e-5
    assert inside.float().mean() > 0.5
    assert (wrong & inside).sum() <= ("erase" in text) * 5 * len(y)
    assert bool((moved == LEFT_OUT).any()) == (fill == "zeros" and "{}" in text)


@pytest.mark.parametrize(
    "text", ["color_jitter", "brightness_contrast", "erase(patches=3, size=4)", "noise", "blur", "gamma"]
)
def test_colors_leave_masks(text):
    _, y = blocks()
    y[:, 3] = LEFT_OUT
    assert torch.equal(augment_masks(AUGMENTATIONS.parse(text), y, key(0)), y)
