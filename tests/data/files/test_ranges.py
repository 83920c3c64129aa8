"""Which values become -1 and 1: no hot pixel, empty image or small lesion decides, and all doors have one range."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.config.spec import DataSpec
from fedshift.data.decoding.ranges import choose_gray, count_levels
from fedshift.data.decoding.resizing import resample_image
from fedshift.data.decoding.volumes import decode_volume
from fedshift.data.preparation import Preparation
from fedshift.data.sources import load_federation
from fedshift.flower.coordinator.descriptions import ClientRegistry, SiteDescription
from fedshift.flower.site.data import load_local
from fedshift.new_clients.site_data import load_site, load_unlabeled
from fedshift.utils.errors import FedshiftError, UsageError
from tests.data.files.test_dicom import write_series

nibabel = pytest.importorskip("nibabel")
SIZE = 10


def draw(key, top=4096, shape=(16, 12)):
    return np.random.default_rng(key).integers(top // 4, top, shape).astype(np.uint16)


def save_gray(file, values):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(file)
    return file


def save_nifti(file, values, spacing=(1.0, 1.0, 1.0)):
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([*spacing, 1.0])), file)
    return file


# Gray of more than 8 bits


def spoil(values, share, value=65535):
    """Set this share of pixels, or one pixel, to a value."""
    flat = values.reshape(-1)
    flat[: max(1, int(share * flat.size))] = value
    return values


@pytest.mark.parametrize(
    ("images", "top"),
    [
        ([draw(0)] * 4, 4095),
        ([draw(0)] * 30 + [spoil(draw(1), 0)] * 6, 4095),
        ([spoil(draw(1), 0)] * 4, 65535),  # 1 of 192 pixels of each
        ([spoil(draw(1, shape=(16, 16)), 0)] * 4, 4095),  # 1 of 256
        ([draw(0), draw(1, 60000)], 65535),
        ([spoil(np.zeros((100, 100), np.uint16), 0.004, 60000)] * 3, 65535),  # a few spots on black
        ([np.zeros((4, 4), np.uint16)], 255),
        ([np.zeros((4, 4), np.uint16), draw(0, 1000)], 1023),
    ],
)
def test_the_fewest_bits_that_hold_all_but_a_few_pixels_are_chosen(images, top):
    """As by counting all pixels together."""
    window, said = choose_gray({"a": [*map(count_levels, images)]})
    together = np.concatenate([image.ravel() for image in images])
    above = (together > top).sum()
    assert window == (0.0, top)
    assert (f"; {above:,} of {(together > 0).sum():,} training pixels above 0 are beyond" in said) == (above > 0)
    assert above <= 0.005 * (together > 0).sum()


def make_gray(root, hot=0, top=4096, names="ab"):
    for client in names:
        for number in range(SIZE):
            values = draw([ord(client), number], top)
            values = spoil(values, 0) if client == "b" and number < hot else values
            save_gray(root / client / "xy"[number % 2] / f"{number}.png", values)
    return root


def test_hot_pixels_of_one_client_change_no_other_pixel_and_are_counted(tmp_path):
    clean, hot = (load_federation(str(make_gray(tmp_path / f"hot{count}", count)), DataSpec()) for count in (0, SIZE))
    assert {client.decoding.window for client in (*clean.clients, *hot.clients)} == {(0.0, 4095.0)}
    assert torch.equal(clean.client("a").train.x, hot.client("a").train.x)
    (differs,) = (clean.client("b").train.x != hot.client("b").train.x).flatten(1).sum(dim=1).unique().tolist()
    assert differs == 1
    assert any("8 of 3,072 training pixels above 0 are beyond and become 1" in said for said in hot.notices)
    wide = load_federation(str(tmp_path / f"hot{SIZE}"), DataSpec(window="0,65535"))
    expected = draw([ord("a"), 0]).astype(np.float64) / 65535 * 2 - 1
    apart = (wide.client("a").train.x[:, 0] - torch.from_numpy(expected)).abs().flatten(1).max(dim=1).values
    assert apart.min() < 1e-6


def test_all_clients_have_the_range_of_all_and_a_window_needs_deep_gray(tmp_path):
    make_gray(tmp_path / "run", names="a")
    make_gray(tmp_path / "run", top=16000, names="b")
    data = load_federation(str(tmp_path / "run"), DataSpec())
    assert {client.decoding.window for client in data.clients} == {(0.0, 16383.0)}
    assert any("alone would need 12 at 'a', 14 at 'b'" in said for said in data.notices)
    save_gray(tmp_path / "flat" / "a" / "x" / "0.png", np.zeros((4, 4), np.uint8))
    with pytest.raises(UsageError, match="is for gray of more than 8 bits, which the images of client 'a' are not"):
        load_federation(str(tmp_path / "flat"), DataSpec(window="0,100"))


# Medical images


def grow(share, background=0.0, low=500.0, high=900.0, shape=(20, 20, 20)):
    """Return a volume of one value but for this share of voxels."""
    values = np.full(shape, background, np.float32)
    count = int(share * values.size)
    values.reshape(-1)[3000 : 3000 + count] = np.linspace(low, high, count)
    return values


@pytest.mark.parametrize("spacing", [(), (1.5, 1.5, 1.5)], ids=["own-voxels", "resampled"])
@pytest.mark.parametrize(
    "values",
    [
        *(grow(share) for share in (0.0003, 0.001, 0.004, 0.006, 0.05)),
        grow(0.004, background=1000.0, low=0.0, high=100.0),
        grow(0.004, background=-1024.0),
        grow(0.004, low=-300.0, high=300.0),
    ],
    ids=["0.03%", "0.1%", "0.4%", "0.6%", "5%", "cold", "padding", "both-signs"],
)
def test_few_voxels_on_one_value_keep_their_contrast(tmp_path, values, spacing):
    """The range is that of the file's sorted other voxels, but for 0.5 % at each end, and of the background."""
    others = np.sort(values[values != np.median(values)].astype(float))
    cut = int(np.ceil(0.005 * (others.size - 1)))
    low, high = min(others[cut], np.median(values)), max(others[::-1][cut], np.median(values))
    x = decode_volume(save_nifti(tmp_path / "v.nii", values), spacing=spacing)
    turned = values.transpose(2, 1, 0)[None]
    seen = resample_image(turned, (1.0,) * 3, spacing) if spacing else turned
    expected = (np.clip(seen.astype(float), low, high) - low) / (high - low) * 2 - 1
    np.testing.assert_allclose(x, expected, atol=1e-5)


def test_a_sparse_channel_is_scaled_by_itself_and_dense_ones_by_percentiles(tmp_path):
    dense = np.random.default_rng(0).normal(100, 20, (20, 20, 20)).astype(np.float32)
    dense[0, 0, 0] = 1e6
    x = decode_volume(save_nifti(tmp_path / "v.nii.gz", np.stack([dense, grow(0.004)], axis=3)))
    low, high = np.percentile(dense, (0.5, 99.5))
    np.testing.assert_allclose(
        x[0], (np.clip((dense - low) / (high - low), 0, 1) * 2 - 1).transpose(2, 1, 0), atol=1e-5
    )
    assert (x[1] == -1).mean() > 0.99
    assert len(np.unique(x[1])) > 20


@pytest.mark.parametrize("empty", [False, True])
def test_ct_has_one_range_of_all_clients_that_an_empty_volume_does_not_change(tmp_path, empty):
    """The medians of each training volume's percentiles by NumPy."""
    ends = []
    for client, offset in (("a", 0), ("b", 500)):
        for number in range(3):
            values = draw([offset, number], 2000, (6, 5, 4)) + np.uint16(offset)
            values = np.zeros_like(values) if empty and number == 2 else values
            for split in ("train", "test")[: 1 + (number == 0)]:
                save_pair(tmp_path / "run" / client / split, number, values, ct=True)
            if values.any():
                ends.append(np.percentile(values - 1000.0, (0.5, 99.5)))
    data = load_federation(str(tmp_path / "run"), DataSpec())
    low, high = np.median(ends, axis=0)
    for client in data.clients:
        assert client.decoding.window == pytest.approx((low, high))
    assert any(said.startswith(f"CT: {low:g} to {high:g} become -1 to 1") for said in data.notices)


def test_ct_beside_files_that_name_no_unit_is_said(tmp_path):
    make_mr(make_ct(tmp_path / "run", names="a"), names="b")
    data = load_federation(str(tmp_path / "run"), DataSpec())
    assert {client.decoding.window for client in data.clients} == {None}
    assert any(said.startswith("3 of 6 medical images say that they are CT") for said in data.notices)


# Doors


def save_pair(folder, number, values, *, ct):
    """Write a series of CT, or NIfTI files, which name no unit, with masks."""
    if ct:
        write_series(folder / "images" / f"{number}", values, RescaleSlope=1, RescaleIntercept=-1000)
        write_series(folder / "masks" / f"{number}", values % 2)
    else:
        save_nifti(folder / "images" / f"{number}.nii.gz", values)
        save_nifti(folder / "masks" / f"{number}.nii.gz", (values % 2).astype(np.uint8))


def make_volumes(root, names="ab", brighter=0, *, ct):
    for client in names:
        for number in range(3):
            values = draw([ord(client), number], 2000, (6, 5, 4)) + np.uint16(brighter * (number > 0))
            save_pair(root / client, number, values, ct=ct)
    return root


make_ct, make_mr = partial(make_volumes, ct=True), partial(make_volumes, ct=False)


def make_pictures(root, names="ab", brighter=0):
    for client in names:
        for number in range(8):
            values = draw([ord(client), number // 2 * 2], 4000) + np.uint16(brighter * (number > 1))
            save_gray(root / client / "xy"[number % 2] / f"{number}.png", values)
    return root


@pytest.mark.parametrize(
    ("make", "first"), [(make_pictures, "x/0.png"), (make_ct, "images/0"), (make_mr, "images/0.nii.gz")]
)
def test_one_file_is_the_same_input_by_every_door(tmp_path, make, first):
    """The new client's other images are brighter, so its own range would differ."""
    run, new = make(tmp_path / "run"), make(tmp_path / "new", "c", brighter=30000)
    data, spec = load_federation(str(run), DataSpec()), DataSpec()
    schema, window = data.schema, data.clients[0].decoding.window
    file = new / "c" / first
    copied = Preparation.from_json(json.loads(json.dumps(schema.preparation.to_json())))
    expected = copied.scale(copied.store(str(file))[0])[0]
    same = copied.scale(copied.store(str(run / "a" / first))[0])[0]
    seen = [x for split in data.client("a").splits.values() for x in split.inputs(slice(None))]
    assert any(torch.equal(same, x) for x in seen)

    joined = load_site(str(new), spec, schema).client("c")
    assert any(torch.equal(expected, x) for split in joined.splits.values() for x in split.inputs(slice(None)))
    flat = new / "c" if make is make_pictures else new / "c" / "images"
    unlabeled = load_unlabeled(flat, spec, schema)
    assert any(torch.equal(expected, x) for x in unlabeled.inputs(slice(None)))
    told = replace(spec, window=f"{window[0]},{window[1]}") if window else spec
    local = load_local(str(new / "c"), "c", told, tmp_path / "site").client("c")
    assert any(torch.equal(expected, x) for split in local.splits.values() for x in split.inputs(slice(None)))


def test_sites_whose_own_images_give_other_ranges_are_refused_with_the_fix():
    facts = {
        "version": "1", "shape": [1, 8, 8], "dtype": "float32", "classes": 2, "class_names": ["x", "y"],
        "samples": {"train": 9, "test": 3}, "labels": None, "files": "integer",
    }  # fmt: skip
    sites = [SiteDescription.of(facts | {"name": f"s{top}", "window": [0, top]}) for top in (1023, 4095)]
    with pytest.raises(FedshiftError, match=r"'s1023' has values from 0 to 1023 .*'s4095' has .* \(window in the set"):
        ClientRegistry(clients=tuple(sites)).to_federation(None)
    ClientRegistry(clients=(sites[0], replace(sites[1], window=(0.0, 1023.0)))).to_federation(None)
