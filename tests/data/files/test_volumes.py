"""NIfTI and DICOM files with masks: what of them reaches the network, and what is refused in one sentence."""

import gzip
import itertools
import os
import pickle
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import zoom

import fedshift
from fedshift.config.spec import DataSpec
from fedshift.data.assembly import read_folder
from fedshift.data.checks.quality import examine
from fedshift.data.decoding.images import Unreadable
from fedshift.data.decoding.resizing import resample_image, resample_mask
from fedshift.data.decoding.volumes import decode_mask, decode_volume, digest_voxels, read_volume_header
from fedshift.data.readers import folders
from fedshift.data.sources import load_federation
from fedshift.diagnosis.overview import describe_grids
from fedshift.tasks import Segmentation
from fedshift.utils.errors import UsageError
from tests.data.decoding.test_dicom_values import save as save_dicom

nibabel, pydicom = pytest.importorskip("nibabel"), pytest.importorskip("pydicom")
SHAPE = (6, 5, 4)  # of the file: right, anterior, superior
SPACING = (0.5, 2.0, 3.0)


def draw(stem, shape=SHAPE, classes=3):
    rng = np.random.default_rng([*map(ord, stem)])
    return rng.integers(-1000, 3000, shape).astype(np.int16), rng.integers(0, classes, shape).astype(np.uint8)


def affine(axes="RAS", spacing=SPACING, origin=(0.0, 0.0, 0.0)):
    ornt = nibabel.orientations.axcodes2ornt(axes)
    made = np.eye(4)
    made[:3, :3] = 0
    for axis, (to, flip) in enumerate(ornt):
        made[int(to), axis] = flip * spacing[axis]
    made[:3, 3] = origin
    return made


def save(path, values, matrix=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine() if matrix is None else matrix), path)


def save_pair(folder, stem, suffix=".nii.gz", image=None, mask=None):
    x, y = draw(stem)
    save(folder / "images" / f"{stem}{suffix}", x if image is None else image)
    save(folder / "masks" / f"{stem}.nii", y if mask is None else mask)


@pytest.fixture
def root(tmp_path):
    """Client a has parts, client b has none."""
    for part, stems in {"train": "pq", "test": "s"}.items():
        for stem in stems:
            save_pair(tmp_path / "scans" / "a" / part, stem)
    for stem in "uvw":
        save_pair(tmp_path / "scans" / "b", stem, ".nii")
    return tmp_path / "scans"


def refused(root, **options):
    with pytest.raises(UsageError) as error:
        read_folder(root, **options)
    return str(error.value)


def scaled(x):
    """Values as the network is given them, by their definition."""
    low, high = np.percentile(x, (0.5, 99.5))
    return (np.clip(x.astype(np.float64), low, high) - low) / (high - low) * 2 - 1


def test_volumes_are_read_when_they_are_needed_scaled_and_with_slices_first(root):
    data = read_folder(root).check()
    a, b = data.clients
    assert (data.task, data.classes, data.names) == (Segmentation(), 3, ("a", "b"))
    assert a.train.lazy
    assert a.train.shape == (1, 4, 5, 6)
    assert (len(a.train), len(a.test), len(b.train), len(b.test)) == (2, 1, 2, 1)
    for index, stem in enumerate("pq"):
        image, mask = draw(stem)
        np.testing.assert_allclose(a.train.inputs(slice(None))[index, 0], scaled(image).transpose(2, 1, 0), atol=1e-5)
        assert np.array_equal(a.train.y[index], mask.transpose(2, 1, 0))
    again = pickle.loads(pickle.dumps(a.train.store))
    assert torch.equal(again.read(torch.tensor([1])), a.train.store.read(torch.tensor([1])))


def test_volumes_and_masks_are_turned_to_the_axes_of_the_patient_and_so_are_digests(tmp_path):
    cube = draw("p", (9, 8, 7))[1]
    for axes in (axes for letters in itertools.product("RL", "AP", "SI") for axes in itertools.permutations(letters)):
        turn = nibabel.orientations.ornt_transform(*map(nibabel.orientations.axcodes2ornt, ("RAS", axes)))
        file = tmp_path / f"{''.join(axes)}.nii"
        nibabel.save(nibabel.Nifti1Image(cube, affine()).as_reoriented(turn), file)
        assert nibabel.aff2axcodes(nibabel.load(file).affine) == axes
        assert np.array_equal(decode_mask(file), cube.transpose(2, 1, 0))
        np.testing.assert_allclose(decode_volume(file)[0], scaled(cube).transpose(2, 1, 0), atol=1e-5)
    cube[0, 0, 0] += 1
    save(tmp_path / "other.nii", cube)
    assert len({digest_voxels(file) for file in tmp_path.glob("???.nii")}) == 1
    assert digest_voxels(tmp_path / "other.nii") != digest_voxels(file)


def test_channels_are_the_fourth_axis_and_an_axis_of_one_slice_is_left_out(tmp_path):
    for stem in "pqr":
        x, y = draw(stem, (6, 1, 4))
        save_pair(tmp_path / "c", stem, image=np.stack([x, 5 - x], axis=3), mask=y)
    (client,) = read_folder(tmp_path).check().clients
    assert client.train.shape == (2, 4, 6)
    x = client.train.inputs(slice(None))
    torch.testing.assert_close(x[:, 1], -x[:, 0], atol=1e-4, rtol=0)


def test_volumes_of_several_sizes_need_one_and_masks_keep_their_classes(root):
    save_pair(root / "a" / "train", "z", image=draw("z", (8, 5, 4))[0], mask=draw("z", (8, 5, 4))[1])
    assert "images differ in size: " in refused(root)
    assert "image_size=64" in refused(root)
    data = load_federation(str(root), DataSpec(image_size=6))
    assert any(" are resized to 6 x 6 x 6, which changes their proportions by " in each for each in data.notices)
    train = data.client("a").train
    assert train.shape == (1, 6, 6, 6)
    assert train.y.shape == (3, 6, 6, 6)
    assert set(train.y.unique().tolist()) == {0, 1, 2}


@pytest.mark.slow
def test_a_comparison_trains_a_network_of_volumes_and_measures_surfaces_in_millimeters(root):
    run = fedshift.compare(
        data=str(root), task="segmentation(surface=True)", methods="fedavg", model="unet-small(width=2)", rounds=1,
        batch_size=2,
    )  # fmt: skip
    assert run.experiment.data.task.spacing == SPACING[::-1]
    assert (run.table("surface_distance").loc[["a", "b"], ("fedavg", "mean")] > 0).all()


@pytest.fixture
def slices(tmp_path):
    """One client with DICOM images, whose masks are DICOM or PNG."""
    folder = tmp_path / "slices" / "d"
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for stem in "pqrs":
        x, y = draw(stem, (7, 8))
        save_dicom(folder / "images" / f"{stem}.dcm", x.astype(np.uint16))
        if stem in "pq":
            save_dicom(folder / "masks" / f"{stem}.dcm", y)
        else:
            Image.fromarray(y).save(folder / "masks" / f"{stem}.png")
    return tmp_path / "slices"


def test_dicom_images_have_masks_in_dicom_or_png(slices):
    (client,) = read_folder(slices).check().clients
    assert client.train.shape == (1, 7, 8)
    for split in client.splits.values():
        for x, y, row in zip(split.inputs(slice(None)), split.y, split.rows.tolist(), strict=True):
            image, mask = draw("pqrs"[row], (7, 8))
            np.testing.assert_allclose(x[0], scaled(image.astype(np.uint16)), atol=1e-5)
            assert np.array_equal(y, mask)


def test_dark_is_bright_in_inverted_images_which_have_no_window_and_not_in_masks(tmp_path):
    x, y = draw("p", (3, 7, 8))
    kinds = "MONOCHROME1", "MONOCHROME2"
    files = [save_dicom(tmp_path / f"{kind}.dcm", x.astype(np.uint16), photometric=kind) for kind in kinds]
    one, two = map(decode_volume, files)
    assert one.shape == (1, 3, 7, 8)
    np.testing.assert_allclose(one, -two, atol=1e-3)
    with pytest.raises(Unreadable, match="no window is defined"):
        decode_volume(files[0], window=(0.0, 2.0))
    assert np.array_equal(decode_mask(save_dicom(tmp_path / "mask.dcm", y, photometric=kinds[0])), y)


def test_a_missing_library_is_named_with_what_to_install(root, slices, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    assert "needs the package nibabel to be read: pip install 'fedshift[medical]'" in refused(root)
    assert "needs the package pydicom to be read: pip install 'fedshift[medical]'" in refused(slices)


def bomb(path):
    """A small file whose header says 8 GB."""
    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.float64)
    header.set_data_shape((1000, 1000, 1000))
    header.set_sform(affine(), 1)
    path.write_bytes(gzip.compress(header.binaryblock + bytes(1000)))


def claim(change):
    def spoil(path):
        image = nibabel.load(path)
        content = bytearray(gzip.decompress(path.read_bytes()))
        header = nibabel.Nifti1Header(bytes(content[:348]), check=False)
        change(header)
        content[:348] = header.binaryblock
        path.write_bytes(gzip.compress(bytes(content)))
        assert image.shape == SHAPE

    return spoil


FAULTS = {
    "bomb": (bomb, "says that it holds 1000 x 1000 x 1000 values of float64, 8.0 GB: at most 2.1 GB are unpacked"),
    "empty": (lambda path: path.write_bytes(b""), "is not a NIfTI file, or is cut short"),
    "text": (lambda path: path.write_bytes(gzip.compress(b"no volume" * 100)), "is not a NIfTI file, or is cut short"),
    "no gzip": (lambda path: path.write_bytes(b"no gzip" * 100), "is not a NIfTI file that can be read"),
    "cut gzip": (lambda path: path.write_bytes(path.read_bytes()[:120]), "is cut short"),
    "cut values": (
        lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:400])),
        "is not a NIfTI file that can be read (Expected 240 bytes",
    ),
    "long comments": (
        claim(lambda header: header.__setitem__("vox_offset", 1e9)),
        "says that its values begin at byte 1e+09",
    ),
    "more than gzip can hold": (
        claim(lambda header: header.__setitem__("dim", [3, 1000, 1000, 100, 1, 1, 1, 1])),
        "bytes cannot hold 1000 x 1000 x 100 values of int16",
    ),
    "colors": (claim(lambda header: header.__setitem__("datatype", 128)), "holds values of type"),
    "no direction": (
        claim(lambda header: header.set_sform(np.full((4, 4), np.nan), 1)),
        "does not say in which direction its axes point",
    ),
    "deflated": (
        lambda path: save_dicom(path, draw("p")[1], syntax=pydicom.uid.DeflatedExplicitVRLittleEndian),
        "is a deflated DICOM file, which does not say to what size it unpacks",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_volume_is_refused(tmp_path, fault):
    spoil, message = FAULTS[fault]
    file = tmp_path / ("q.dcm" if fault == "deflated" else "q.nii.gz")
    save(tmp_path / "q.nii.gz", draw("q")[0])
    spoil(file)
    with pytest.raises(Unreadable, match=re.escape(message)):
        read_volume_header(file), decode_volume(file)


@pytest.mark.parametrize("fault", ["text", "cut values"])  # in the header or later
def test_a_broken_volume_is_refused_by_name_or_left_out(root, fault):
    spoil, message = FAULTS[fault]
    file = root / "a" / "train" / "images" / "q.nii.gz"
    spoil(file)
    told = refused(root)
    assert f"1 of 12 files cannot be read: {file}: {message}" in told
    data = read_folder(root, on_data_error="ignore").check()
    assert len(data.client("a").train) == 1
    assert "client 'a': 1 of 6 files cannot be read, left out" in data.faults[0]


def test_masks_that_lie_otherwise_than_their_images_are_refused(root):
    file = root / "b" / "masks" / "v.nii"
    _, mask = draw("v")
    for values, matrix, message in (
        (mask[1:], None, "has 4 x 5 x 5 voxels, but its image"),
        (mask, affine("LAS"), "has axes that point LAS, but its image"),
        (mask, affine(spacing=(0.5, 2.0, 4.0)), "has a spacing of 4 x 2 x 0.5 mm, but its image"),
        (mask, affine(origin=(20.0, 0, 0)), "lies up to 20.0 mm elsewhere than its image"),
        (mask.astype(np.float32) + 0.5, None, "is a mask with the fraction 1.5: give class numbers in 0..255"),
        (np.stack([mask] * 2, axis=3), None, "is a mask with 2 channels"),
    ):
        save(file, values, matrix)
        told = refused(root)
        assert message in told
        assert str(file) in told


def test_channels_that_differ_and_pictures_among_volumes_are_refused(root):
    x, _ = draw("q")
    save(root / "a" / "train" / "images" / "q.nii.gz", np.stack([x, x], axis=3))
    told = refused(root)
    assert "4 x 5 x 6 voxels of 1 channel, and" in told
    assert "give all images the same number of channels and of axes" in told
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(root / "b" / "images" / "k.png")
    save(root / "b" / "masks" / "k.nii", draw("k")[1])
    assert "k.png is no NIfTI or DICOM file, and others are" in refused(root)


def test_images_of_one_dicom_patient_stay_together(slices):
    for stem, patient in zip("pqrs", ("patient 0", "patient 1", "patient 0 ", "patient 1"), strict=True):
        x, _ = draw(stem, (7, 8))
        save_dicom(slices / "d" / "images" / f"{stem}.dcm", x.astype(np.uint16), PatientID=patient)
    data = read_folder(slices)
    (client,) = data.clients
    assert {tuple(split.rows.tolist()) for split in client.splits.values()} == {(0, 2), (1, 3)}
    assert all(len(split.group.unique()) == 1 for split in client.splits.values())
    assert any("2 groups" in notice for notice in data.notices)
    assert "patient 1" not in repr(data)


def test_a_window_maps_its_values_to_minus_one_and_one(root):
    data = read_folder(root, window="-160,240")
    x, _ = draw("p")
    wanted = (np.clip(x.astype(np.float64), -160, 240) + 160) / 400 * 2 - 1
    stored = data.client("a").train.copy_rows(slice(None)).numpy()
    assert any(np.allclose(each[0], wanted.transpose(2, 1, 0), atol=1e-6) for each in stored)
    assert stored.min() == -1
    assert stored.max() == 1
    kept = data.describe_client(data.client("a")).preparation
    assert type(kept).from_json(kept.to_json()) == kept
    again, _ = kept.store(str(root / "a" / "train" / "images" / "p.nii.gz"))
    assert any(np.array_equal(again[0].numpy(), each) for each in stored)
    for wrong in ("240,-160", "soft tissue", "nan,1", "1"):
        assert refused(root, window=wrong).startswith(f"window={wrong!r}: give the values that become -1 and 1")


def test_values_and_classes_are_resampled_as_by_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 9, 14, 12)), rng.integers(0, 4, (9, 14, 12)).astype(np.uint8)
    grid = {"mode": "nearest", "grid_mode": True}
    for before, after, size, coarse in (
        ((2, 1, 1.2), (1.5, 1.3, 1), (12, 11, 14), False),
        ((5, 1, 1.2), (3, 1.3, 1), (15, 11, 14), True),  # the nearest slice
    ):
        factors = np.array(size) / y.shape
        steps = [((factors[0], 1, 1), 0), ((1, *factors[1:]), None)] if coarse else [(factors, None)]

        def expect(values, order, steps=steps):
            for each, degree in steps:
                values = zoom(values, each, order=order if degree is None else degree, **grid)
            return values

        made = resample_image(x, before, after)
        np.testing.assert_allclose(made, [expect(each, 3) for each in x], atol=1e-5)
        shares = np.stack([expect((y == value).astype(float), 1) - 1e-5 * value for value in range(4)])  # ties: lower
        assert np.array_equal(resample_mask(y, before, after), shares.argmax(axis=0))


def test_a_ramp_in_millimeters_is_the_same_ramp_at_another_spacing(tmp_path):
    slope = np.array([1.0, -2.0, 0.5])
    for stem, spacing, shape in (("p", (1.0, 1.0, 2.0), (48, 40, 24)), ("q", (2.0, 1.6, 1.5), (24, 25, 32))):
        matrix = affine("LAS", spacing, (20.0, -7.0, 3.0))
        places = np.stack(np.indices(shape), axis=-1) @ matrix[:3, :3].T + matrix[:3, 3]
        for part in ("train", "test"):
            folder = tmp_path / "ramps" / "a" / part
            save(folder / "images" / f"{stem}.nii", (places @ slope).astype(np.float32), matrix)
            save(folder / "masks" / f"{stem}.nii", (places[..., 0] > 0).astype(np.uint8), matrix)
    data = read_folder(tmp_path / "ramps", spacing="1.6,1.25,1.2", window="-300,300").check()
    assert "images are resampled to 1.6 x 1.25 x 1.2 mm (right, front, head)" in data.notices
    train, (depth, height, width) = data.client("a").train, (40, 32, 30)
    assert train.shape == (1, depth, height, width)
    for row, spacing, first, shape in ((0, (1, 1, 2), -27, (48, 40, 24)), (1, (2, 1.6, 1.5), -26, (24, 25, 32))):
        low = np.array([first, -7, 3]) - np.array(spacing) / 2  # the outer corner to the left, back and feet
        steps = np.array(shape) * spacing / (width, height, depth)
        grid = np.stack(np.indices((width, height, depth)), axis=-1)
        expected = ((low + (grid + 0.5) * steps) @ slope / 300).transpose(2, 1, 0)
        inner = (slice(10, -10),) * 3
        np.testing.assert_allclose(train.copy_rows(slice(None))[row, 0].numpy()[inner], expected[inner], atol=1e-5)
    kept = data.describe_client(data.client("a")).preparation
    assert type(kept).from_json(kept.to_json()) == kept
    again, _ = kept.store(str(tmp_path / "ramps" / "a" / "train" / "images" / "p.nii"))
    assert torch.equal(again[0], train.copy_rows(slice(0, 1))[0])


def test_the_median_spacing_is_that_of_files_outside_of_test_folders(root):
    for file in (root / "a" / "test").glob("*/*"):
        save(file, np.asarray(nibabel.load(file).dataobj), affine(spacing=(5, 5, 5)))
    with pytest.raises(UsageError, match="images differ in size at one spacing") as error:
        read_folder(root, spacing="median")
    assert "s.nii.gz would have 7 x 12 x 60 voxels" in str(error.value)  # 20, 25 and 30 mm at 3, 2 and 0.5 mm
    shutil.rmtree(root / "a")
    drawn = read_folder(root, image_size=4, test_fraction=0.4).clients[0]
    for number, row in enumerate([*drawn.train.rows.tolist(), *drawn.test.rows.tolist()]):
        for folder in ("images", "masks"):
            file = root / drawn.files[row].replace("images", folder)
            save(file, np.asarray(nibabel.load(file).dataobj), affine(spacing=(1, 1, [1, 2, 9][number])))
    assert "to 1 x 1 x 1.5 mm" in " ".join(read_folder(root, spacing="median", patch="2", test_fraction=0.4).notices)


def displace(root, sform, qform, **facts):
    """Write image u and its mask with these matrices, None for one that is not said, and ``facts`` of the header."""
    made = nibabel.Nifti1Image(draw("u")[0], affine())
    made.set_sform(sform, code=int(sform is not None))
    made.set_qform(qform, code=int(qform is not None))
    for name, value in facts.items():
        made.header[name] = value
    nibabel.save(made, root / "b" / "images" / "u.nii")
    nibabel.save(nibabel.Nifti1Image(draw("u")[1], made.header.get_best_affine()), root / "b" / "masks" / "u.nii")


def test_a_spacing_that_cannot_be_had_is_refused(root):
    for wrong in ("0", "1,2,3,4", "fine", "1,-1,1"):
        assert refused(root, spacing=wrong).startswith(f"spacing={wrong!r}: give the millimeters between voxels")
    assert "spacing='1,2' has 2 numbers, and images have 3 axes" in refused(root, spacing="1,2")
    assert "image_size=9 would stretch the voxels" in refused(root, spacing="1", image_size=9)
    displace(root, sform=None, qform=None)
    assert f"{root / 'b' / 'images' / 'u.nii'} does not say how far its voxels are apart" in refused(root, spacing="1")


def test_decoded_volumes_are_kept_in_the_cache_while_their_files_are_unchanged(root, monkeypatch):
    def read(**options):
        data = read_folder(root, domains=["b"], patch="2", **options)
        train = data.clients[0].train
        return data, [train.read_case(number)[0] for number in range(len(train))]

    (data, first), decoded = read(), []
    decode = folders.decode
    monkeypatch.setattr(folders, "decode", lambda file, *how: decoded.append(file.name) or decode(file, *how))
    assert all(map(torch.equal, read()[1], first))
    assert decoded == []
    file = root / data.clients[0].files[int(data.clients[0].train.rows[0])]
    save(file, 2 - draw("u")[0])
    os.utime(file, (1, 1))
    assert [torch.equal(*pair) for pair in zip(read()[1], first, strict=True)] == [False, True]
    assert decoded == [file.name]
    assert not any(map(torch.equal, read(window="0,1")[1], first))
    notice = read(cache=file)[0].notices[-1]
    assert notice.endswith("cannot be written (Not a directory): images are kept in memory")


def test_grids_that_differ_between_clients_are_noted(root):
    assert not any("voxels differ" in notice or "tilted" in notice for notice in read_folder(root).notices)
    cosine, sine = np.cos(np.radians(25)), np.sin(np.radians(25))
    turned = np.eye(4)
    turned[:2, :2] = [[cosine, -sine], [sine, cosine]]
    for folder in ("images", "masks"):
        for file in (root / "b" / folder).iterdir():
            made = affine(spacing=(1.0, 2.0, 3.0))
            save(file, np.asarray(nibabel.load(file).dataobj), turned @ made if file.name[0] == "u" else made)
    notices = read_folder(root).notices
    assert (
        "voxels differ between clients (medians, mm): 0.5 x 2 x 3 at 'a', 1 x 2 x 3 at 'b'; --spacing median"
        in " ".join(notices)
    )
    assert "client 'b': 1 of 3 images are tilted by up to 25 degrees against the patient's axes, and stay so" in notices
    resampled = read_folder(root, spacing="1", patch="2")
    assert not any("voxels differ" in notice for notice in resampled.notices)


NO_ROTATION = dict.fromkeys(("quatern_b", "quatern_c", "quatern_d"), 0.9)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"sform": affine(), "qform": affine()}, ""),
        ({"sform": affine(), "qform": affine(origin=(0.0, 3.0, 4.0))}, "lie up to 5.0 mm elsewhere by their qform"),
        ({"sform": affine(), "qform": affine(), **NO_ROTATION}, ""),
        ({"sform": None, "qform": None, "pixdim": [1, *SPACING, 1, 1, 1, 1]}, "do not say how their axes lie in the"),
    ],
)
def test_doubtful_places_of_images_are_noted(root, facts, said):
    displace(root, **facts)
    told = [notice for notice in read_folder(root).notices if notice.startswith("client")]
    assert [f"client 'b': 1 of 3 images {said}" in notice for notice in told] == [True] * bool(said)


def test_equal_voxels_under_other_headers_are_copies_and_values_that_are_no_numbers_do_not_end_the_check(root):
    image = nibabel.load(root / "a" / "train" / "images" / "p.nii.gz")
    save(root / "b" / "images" / "z.nii", np.asarray(image.dataobj), affine("LSP", (1.0, 1.0, 1.0)))
    save(root / "b" / "masks" / "z.nii", draw("p")[1], affine("LSP", (1.0, 1.0, 1.0)))
    turned = image.as_reoriented(np.array([[1, -1], [2, 1], [0, -1]]))
    save(root / "a" / "train" / "images" / "copy.nii.gz", np.asarray(turned.dataobj), turned.affine)
    save(root / "a" / "train" / "masks" / "copy.nii", draw("s")[1])
    broken = draw("q")[0].astype(np.float32)
    broken[0, 0, :2] = np.inf
    save(root / "a" / "train" / "images" / "q.nii.gz", broken)
    with pytest.raises(UsageError, match=r"q\.nii\.gz: has 2 voxels that are NaN or infinite; repair or remove"):
        read_folder(root, patch="2")
    data = read_folder(root, patch="2", on_data_error="warn")
    found = {finding.kind: finding for finding in examine(data).findings}
    assert {kind for kind, finding in found.items() if finding.severity == "error"} == {"left-out", "repeats", "shared"}
    assert "q.nii.gz: has 2 voxels that are NaN or infinite" in found["left-out"].text
    names = {kind: [place.partition(" (")[0] for place in found[kind].examples[0]] for kind in ("repeats", "shared")}
    assert names["repeats"] == ["a/train/images/copy.nii.gz", "a/train/images/p.nii.gz"]
    assert "b/images/z.nii" in names["shared"]
    table = describe_grids(data)
    assert [list(column.cells) for column in table.columns[2:4]] == [
        ["RAS 3, ILA 1", "RAS 3, LSP 1"], ["0.5 x 2 x 3", "0.5 to 1 x 1 to 2 x 1 to 3"],
    ]  # fmt: skip
