"""Patches of cases against their definition, and windows against a loop over voxels in float64."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.assembly import read_folder
from fedshift.data.federation import ClientData, Federation
from fedshift.data.patches import Patches, extend, list_starts, parse_size, slide
from fedshift.data.samples import Samples, join_samples
from fedshift.experiments.settings import check_counts
from fedshift.tasks import Segmentation
from fedshift.tasks.own_metrics import OwnMetric
from fedshift.utils.errors import UsageError

SIZE = (4, 6)
KEY = (0, "a", 3)


def make_cases(extents, rare=()):
    """Cases whose values are the numbers of their pixels, from 1 on, padded to one size; class 1 at the end of some."""
    whole = np.max(extents, axis=0)
    x, y = torch.zeros(len(extents), 2, *whole), torch.full((len(extents), *whole), 255, dtype=torch.uint8)
    for number, (height, width) in enumerate(extents):
        values = torch.arange(1.0, height * width + 1).reshape(height, width)
        x[number] = 1
        x[number, 0, :height, :width], x[number, 1, :height, :width] = values, 1000 + values
        x[number, 1][x[number, 1] == 1] = 1001  # the lowest of the channel
        y[number, :height, :width] = 0
        if number in rare:
            y[number, height - 1, width - 1] = 1
    return Samples(x=x, y=y).replace(patches=Patches(SIZE, np.array(extents)))


def test_a_patch_is_a_part_of_its_case_with_its_mask():
    extents = [(9, 7), (4, 6), (3, 11), (2, 2)]
    samples = make_cases(extents, rare=range(4))
    assert samples.shape == (2, *SIZE)
    for number, (height, width) in enumerate(extents):
        seen = set()
        for step in range(90):
            index = torch.tensor([number])
            x, y = samples.read(index, (0, "a", step))[0], samples.targets(index, (0, "a", step))[0]
            inside = y != -100
            first = int(x[0, 0, 0]) - 1
            top, left = divmod(first, width)
            assert inside.sum() == min(height, SIZE[0]) * min(width, SIZE[1])  # as much of the case as fits
            assert max(top + SIZE[0] - height, left + SIZE[1] - width, 0) == max(SIZE[0] - height, SIZE[1] - width, 0)
            places = torch.nonzero(inside)
            assert torch.equal(x[0][inside], ((top + places[:, 0]) * width + left + places[:, 1] + 1).float())
            assert torch.equal(x[1][inside], x[0][inside] + 1000)
            assert (x[0][~inside] == 1).all()
            assert (x[1][~inside] == 1001).all()
            assert torch.equal(y == 1, x[0] == height * width)
            seen.add(first)
        assert len(seen) == math.prod(max(0, n - p) + 1 for n, p in zip((height, width), SIZE, strict=True))


def test_the_last_third_of_a_batch_is_centered_on_classes_and_single_samples_by_chance():
    extents = [(40, 40)] * 7
    samples = make_cases(extents, rare=(2, 4, 6))
    for step in range(10):
        held = (samples.targets(torch.arange(7), (0, "a", step)) == 1).flatten(1).any(dim=1)
        assert held[6]  # rows 5 and 6 of 7 are centered, and row 5 has no class
        assert held[:5].sum() <= 1  # by chance, of 35 x 37 places
    one = torch.tensor([6])
    alone = [bool((samples.targets(one, (0, "a", step)) == 1).any()) for step in range(300)]
    assert 0.24 < np.mean(alone) < 0.43  # 1/3 within four standard errors
    assert not (samples.targets(torch.tensor([2, 4, 6])) == 1).any()  # without a key none is centered
    samples.y[6, 0, 0], samples.y[6, 20, 20:29] = 3, 2  # classes are drawn before their voxels
    drawn = [samples.targets(torch.tensor([0, 6]), (1, "a", step))[1] for step in range(300)]
    shares = [np.mean([bool((y == value).any()) for y in drawn]) for value in (1, 2, 3)]
    assert all(0.22 < share < 0.45 for share in shares)


def test_a_patch_depends_on_its_key_and_row_alone():
    samples = make_cases([(30, 30)] * 6)
    batch = samples.read(torch.tensor([4, 1, 5]), KEY)
    assert torch.equal(samples.read(torch.tensor([1, 4, 0]), KEY)[:2], batch[[1, 0]])
    assert torch.equal(samples.take(torch.tensor([5, 4])).read(slice(1, 2), KEY)[0], batch[0])
    assert not torch.equal(samples.read(torch.tensor([4, 1, 5]), (0, "a", 4)), batch)
    assert not torch.equal(samples.read(torch.tensor([4, 1, 5]), (0, "b", 3)), batch)


def test_joined_cases_keep_their_sizes():
    one, other = make_cases([(9, 7), (3, 4)]), make_cases([(5, 12)], rare=(0,))
    joined = join_samples([one, other.take(torch.tensor([0])), one.take(torch.tensor([1]))])
    assert joined.whole_shape == (2, 9, 12)
    for number, (of, row) in enumerate([(one, 0), (one, 1), (other, 0), (one, 1)]):
        for found, expected in zip(joined.read_case(number), of.read_case(row), strict=True):
            assert torch.equal(found, expected)
    assert (joined.x[2, 0, 5:] == 1).all()
    alone = joined.take(torch.tensor([2])).copy_alone()
    assert torch.equal(alone.read_case(0)[0], other.read_case(0)[0])


def score(x):
    """Scores that depend on the whole window, and differ from window to window: a convolution and a mean."""
    kernel = torch.linspace(-1, 1, 2 * 1 * 3 ** x[0, 0].ndim, dtype=x.dtype).reshape(2, 1, *[3] * x[0, 0].ndim)
    convolve = torch.nn.functional.conv2d if x.ndim == 4 else torch.nn.functional.conv3d
    return convolve(x, kernel, padding=1) + x.flatten(1).mean(dim=1).reshape(-1, *[1] * (x.ndim - 1))


def average_windows(x, size):
    """Return the weighted mean of scores of ``x [C, ...]``, voxel by voxel, from positions and weights as MONAI's."""
    starts = []
    for n, width in zip(x.shape[1:], size, strict=True):
        step, axis = int(width * 0.5), []
        while not axis or axis[-1] + width < n:
            axis.append(min(len(axis) * step, n - width))
        starts.append(axis)
    totals, weights = np.zeros((2, *x.shape[1:])), np.zeros(x.shape[1:])
    for first in product(*starts):
        window = x[(slice(None), *(slice(a, a + n) for a, n in zip(first, size, strict=True)))]
        scores = score(torch.from_numpy(window)[None])[0].numpy()
        for place in product(*map(range, size)):
            distances = (((p - (n - 1) / 2) / (n / 8)) ** 2 for p, n in zip(place, size, strict=True))
            weight = max(math.exp(-sum(distances) / 2), 1e-3)
            voxel = tuple(np.add(first, place))
            totals[(slice(None), *voxel)] += weight * scores[(slice(None), *place)]
            weights[voxel] += weight
    return totals / weights


@pytest.mark.parametrize(
    ("places", "size"), [((13, 9), (6, 4)), ((8, 8), (8, 5)), ((21, 4), (5, 4)), ((7, 6, 9), (4, 3, 5))]
)
def test_windows_give_the_weighted_mean_of_a_loop_over_voxels(places, size):
    x = np.random.default_rng(0).normal(size=(1, *places))
    found = slide(score, torch.from_numpy(x)[None], size)[0]
    np.testing.assert_allclose(found, average_windows(x, size), atol=1e-6)


@pytest.mark.slow
def test_windows_give_what_those_of_monai_give():
    monai = pytest.importorskip("monai.inferers")
    x = torch.randn(1, 1, 13, 9, generator=torch.Generator().manual_seed(0))
    inferer = monai.SlidingWindowInferer((6, 4), 4, 0.5, mode="gaussian")
    torch.testing.assert_close(slide(score, x, (6, 4)), inferer(x, score), atol=1e-5, rtol=0)


def test_one_window_is_a_plain_pass_bit_for_bit():
    x = torch.randn(1, 1, 7, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(slide(score, x, (7, 9)), score(x))
    padded = extend(x[0], (8, 12))[None]
    assert torch.equal(slide(score, x, (8, 12)), score(padded)[..., :7, :9])
    assert padded.shape[2:] == (8, 12)
    assert (padded[..., 7:, :] == x.min()).all()
    assert list_starts((10, 3), (4, 5)) == [(0, 0), (2, 0), (4, 0), (6, 0)]


@pytest.fixture
def eyes(tmp_path):
    """Images of two clients of several sizes, with masks of 0 and 255."""
    rng = np.random.default_rng(0)
    for client, shapes in {"a": [(9, 7), (5, 8), (6, 6)], "b": [(12, 4), (3, 3), (4, 12)]}.items():
        for number, shape in enumerate(shapes):
            place = tmp_path / "eyes" / client / ("test" if number == 2 else "train")
            for kind, x in (("images", rng.integers(50, 200, (*shape, 3))), ("masks", 255 * rng.integers(0, 2, shape))):
                (place / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(x.astype(np.uint8)).save(place / kind / f"{number}.png")
    return tmp_path / "eyes"


def test_pictures_of_several_sizes_keep_them(eyes, tmp_path):
    for _ in range(2):  # decoded, and from the cache
        data = read_folder(eyes, patch="4", cache=tmp_path / "cache").check()
        assert {client.name: client.train.whole_shape for client in data.clients} == {"a": (3, 9, 8), "b": (3, 12, 12)}
        assert {client.train.shape for client in data.clients} == {(3, 4, 4)}
        for site, split in ((client, split) for client in data.clients for split in client.splits.values()):
            for number, row in enumerate(split.rows.tolist()):
                file, (x, y) = site.files[row], split.read_case(number)
                assert np.array_equal(x[0], np.asarray(Image.open(eyes / file)).transpose(2, 0, 1))
                assert np.array_equal(y[0] * 255, np.asarray(Image.open(eyes / file.replace("images", "masks"))))
    for options, message in (
        ({}, r"images differ in size: .* give one size for all \(image_size=64\), or train on patches \(patch=64\)"),
        ({"patch": (4, 4, 4)}, "patch='4,4,4' has 3 numbers, and samples have 2 axes"),
    ):
        with pytest.raises(UsageError, match=message):
            read_folder(eyes, **options)
    kept = data.describe_client(data.clients[1]).preparation
    assert type(kept).from_json(kept.to_json()) == kept
    assert kept.store(str(eyes / "b/train/images/0.png"))[0].shape == (1, 3, 12, 4)


def test_patches_are_of_images_with_masks():
    x = torch.zeros(4, 1, 6, 6)
    client = ClientData(name="a", train=Samples(x=x, y=torch.arange(4) % 2), test=Samples(x=x, y=torch.arange(4) % 2))
    with pytest.raises(UsageError, match="patch='4' is for images with masks, and own is for classification"):
        Federation(name="own", clients=(client,), classes=2).cut_patches((4,))
    for wrong in ("0", "4,4,4,4", "large", "1.5"):
        with pytest.raises(UsageError, match="give the voxels of a patch along columns, rows and slices"):
            parse_size(wrong)
    assert parse_size("64,48,32") == (32, 48, 64)
    masks = torch.zeros(4, 6, 6, dtype=torch.uint8)
    client = ClientData(name="a", train=Samples(x=x, y=masks), test=Samples(x=x, y=masks))
    data = Federation(name="own", clients=(client,), classes=2, task=Segmentation())
    assert data.cut_patches((4,)).client("a").train.shape == (1, 4, 4)
    own = Segmentation(requested=(OwnMetric(function=print, text="mine"),))
    with pytest.raises(UsageError, match="metric mine is computed for samples of one size"):
        check_counts(replace(data, task=own).cut_patches((4,)))
    resized = data.cut_patches((4,)).fit_images(9).client("a").train
    assert (resized.whole_shape, resized.patches.resized, resized.y.shape) == ((1, 9, 9), (9, 9), (4, 9, 9))
