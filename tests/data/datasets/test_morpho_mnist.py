"""Morpho-MNIST: what each perturbation does to strokes, and how digits are shared out among the clients."""

import gzip
import struct

import numpy as np
import pytest
import torch
from scipy.ndimage import binary_dilation, binary_erosion, distance_transform_edt, gaussian_filter, label, zoom
from sklearn.datasets import load_digits

from fedshift.data.datasets._morphology import KINDS, perturb, thin_to_skeleton
from fedshift.data.datasets.morpho_mnist import morpho_mnist
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream

EIGHT = np.ones((3, 3))


def handwriting(count):
    """Real digits brought to MNIST's size, uint8 [N, 28, 28] with an empty margin of four pixels, and labels."""
    data = load_digits()
    ink = np.stack([zoom(image, 2.5, order=1) for image in data.images[:count]]).clip(0, 16) / 16
    return (255 * np.pad(ink, ((0, 0), (4, 4), (4, 4)))).astype(np.uint8), data.target[:count]


DIGITS, LABELS = handwriting(60)


def bar(thickness=8, length=22):
    """One horizontal stroke."""
    image = np.zeros((1, 28, 28), np.uint8)
    top, left = (28 - thickness) // 2, (28 - length) // 2
    image[:, top : top + thickness, left : left + length] = 255
    return image


def changed(digits, kind, key=0):
    return perturb(digits, [kind] * len(digits), [stream(key, "test", kind, place) for place in range(len(digits))])


def ink(digits):
    return digits.sum(axis=(1, 2)) / 255


def pieces(image):
    return label(image > 100, EIGHT)[1]


def fine(digit):
    """The black and white digit of four times the size, by the two-dimensional steps of the authors' package."""
    enlarged = gaussian_filter(zoom(digit / 255, 4, order=3, mode="mirror", grid_mode=True), 8 / 6, mode="mirror")
    levels = np.floor(255 * enlarged.clip(0, 1))
    return levels >= levels.min() + (levels.max() - levels.min()) / 2


def coarse(image):
    smooth = gaussian_filter(image.astype(float), 8 / 6, mode="mirror")
    return (255 * zoom(smooth, 0.25, order=3, mode="mirror", grid_mode=True).clip(0, 1)).astype(np.uint8)


def disk(radius):
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return x * x + y * y <= radius * radius


def near(one, other):
    """Equal but for rounding: sums in another order may tip a level, or a point of the threshold."""
    return np.abs(one.astype(int) - other.astype(int)).max() <= 1 or np.mean(one != other) < 0.01


@pytest.mark.parametrize(("kind", "morph", "amount"), [("thin", binary_erosion, 0.7), ("thick", binary_dilation, 1.0)])
def test_thin_and_thick_are_erosion_and_dilation_by_a_disk(kind, morph, amount):
    for digit in DIGITS[:5]:
        image = fine(digit)
        half = distance_transform_edt(image)[thin_to_skeleton(image[None])[0]].mean()
        expected = coarse(morph(image, disk(int(amount * half)), border_value=kind == "thin"))
        assert near(changed(digit[None], kind)[0], expected)


def test_a_bar_is_thinned_by_seventy_percent_and_thickened_by_a_hundred():
    for kind, low, high in (("plain", 7.5, 8.5), ("thin", 2, 4), ("thick", 14, 17)):
        across = changed(bar(), kind)[0, :, 14].sum() / 255
        assert low < across < high


@pytest.mark.slow
def test_swelling_changes_one_place_and_adds_ink_to_the_whole():
    plain, swollen = changed(DIGITS, "plain"), changed(DIGITS, "swollen")
    assert ink(swollen).sum() > 1.1 * ink(plain).sum()
    long, center = bar(4, 26), []
    for key in range(8):
        differs = np.argwhere(np.abs(changed(long, "swollen", key)[0].astype(int) - changed(long, "plain")[0]) > 30)
        assert len(differs) > 0
        reach = 2 * 7 / 2 * np.sqrt(4) + 2  # the diameter for strokes of four pixels, and what smoothing adds
        assert np.ptp(differs, axis=0).max() <= reach
        center.append(differs[:, 1].mean())
    assert np.ptp(center) > 3  # elsewhere in another draw


@pytest.mark.slow
def test_fractures_cut_strokes():
    plain, fractured = changed(DIGITS, "plain"), changed(DIGITS, "fractured")
    assert (ink(fractured) < ink(plain)).all()
    assert (fractured.astype(int) <= plain.astype(int) + 12).all()
    more = [pieces(one) - pieces(other) for one, other in zip(fractured, plain, strict=True)]
    assert np.mean(np.array(more) > 0) > 0.5
    cuts = [pieces(changed(bar(4, 26), "fractured", key)[0]) for key in range(8)]
    assert min(cuts) >= 2
    assert max(cuts) == 4  # three cuts, where none falls on another


@pytest.mark.slow
def test_the_skeleton_lies_in_the_ink_and_keeps_its_pieces_and_holes():
    for digit in DIGITS:
        image = fine(digit)
        bones = thin_to_skeleton(image[None])[0]
        assert not (bones & ~image).any()
        assert label(bones, EIGHT)[1] == label(image, EIGHT)[1]
        assert label(~bones)[1] == label(~image)[1]
        assert bones.sum() < image.sum() / 5
        assert not (bones[1:, 1:] & bones[:-1, 1:] & bones[1:, :-1] & bones[:-1, :-1]).sum() > 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_digit_depends_on_its_own_stream_alone_and_odd_ones_are_survived(kind):
    six = changed(DIGITS[:6], kind)
    assert np.array_equal(six[:2], changed(DIGITS[:2], kind))
    assert np.array_equal(six, changed(DIGITS[:6], kind, 1)) == (kind in ("plain", "thin", "thick"))
    odd = np.zeros((3, 28, 28), np.uint8)  # empty, full and tiny
    odd[1] = odd[2, 13, 13] = 255
    done = changed(odd, kind)
    assert done.shape == (3, 28, 28)
    assert not done[0].any()


@pytest.fixture
def root(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=DIGITS[:40], y_train=LABELS[:40], x_test=DIGITS[40:], y_test=LABELS[40:])
    return tmp_path


def positions(split, plain):
    """Which digits a client has, by the labels' and the plain images' place in the data."""
    return [int(np.flatnonzero((plain == image).all(axis=(1, 2)))[0]) for image in split.x[:, 0].numpy()]


@pytest.mark.slow
def test_digits_are_shared_out_without_repeats_and_keep_their_labels(root):
    data = morpho_mnist(root)
    assert data.names == ("plain", "thin", "thick", "swollen", "fractured")
    assert {(len(client.train), len(client.test)) for client in data.clients} == {(8, 4)}
    for part, x, y in (("train", DIGITS[:40], LABELS[:40]), ("test", DIGITS[40:], LABELS[40:])):
        seen = []
        for client in data.clients:
            # A domain's look is known for every digit but where it is drawn; there the label tells enough.
            split = client.splits[part]
            if client.name in ("plain", "thin", "thick"):
                places = positions(split, changed(x, client.name))
                assert split.y.tolist() == y[places].tolist()
                seen += places
        assert len(seen) == len(set(seen)) == 3 * len(x) // 5
        counts = sum(np.bincount(client.splits[part].y, minlength=10) for client in data.clients)
        assert counts.tolist() == np.bincount(y, minlength=10).tolist()


@pytest.mark.slow
def test_global_and_local_mix_what_the_publisher_mixes(root):
    data = morpho_mnist(root, domains=("global", "local"))
    assert [len(client.train) for client in data.clients] == [20, 20]
    looks = {kind: {image.tobytes() for image in changed(DIGITS[:40], kind)} for kind in ("plain", "thin", "thick")}
    of_global, of_local = ([x.tobytes() for x in client.train.x[:, 0].numpy()] for client in data.clients)
    kinds = [next(kind for kind, images in looks.items() if image in images) for image in of_global]
    assert set(kinds) == {"plain", "thin", "thick"}
    unchanged = sum(image in looks["plain"] for image in of_local)
    assert 0 < unchanged < 20
    assert not any(image in looks["thin"] | looks["thick"] for image in of_local)


@pytest.mark.slow
def test_samples_are_the_first_of_a_clients_share(root):
    whole, few = (morpho_mnist(root, domains=["fractured", "thin"], samples=samples) for samples in (None, 5))
    for one, other in zip(few.clients, whole.clients, strict=True):
        assert torch.equal(one.train.x, other.train.x[:5])
        assert torch.equal(one.test.x, other.test.x)


def write_idx(folder, images, labels):
    folder.mkdir()
    for part, chosen in (("train", slice(0, 40)), ("t10k", slice(40, None))):
        for name, array in (("images-idx3", images[chosen]), ("labels-idx1", labels[chosen].astype(np.uint8))):
            head = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))


def test_published_images_are_taken_where_they_are_there(root):
    write_idx(root / "thic", 255 - DIGITS, LABELS)
    made, published = (morpho_mnist(root, domains=domains) for domains in (["thin", "plain"], ["thick", "plain"]))
    assert torch.equal(made.client("plain").train.x, published.client("plain").train.x)
    assert positions(published.client("thick").train, 255 - DIGITS[:40]) == positions(
        made.client("thin").train, changed(DIGITS[:40], "thin")
    )


def test_other_choices_are_refused(root):
    with pytest.raises(UsageError, match="unknown value of domains 'swell': did you mean 'swollen'"):
        morpho_mnist(root, domains=["swell"])
    with pytest.raises(UsageError, match="give one or more of plain, thin, thick, swollen, fractured, global, local"):
        morpho_mnist(root, domains=["thin", "thin"])
    with pytest.raises(UsageError, match="samples=21: 'thin' has 20 training digits"):
        morpho_mnist(root, domains=["thin", "plain"], samples=21)
    with pytest.raises(UsageError, match=r"benchmark 'morpho-mnist' is not in .*MNIST \(see mnist\), or the published"):
        morpho_mnist(root / "elsewhere")
