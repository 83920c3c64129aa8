"""FedDG's fundus and prostate, FeTS 2022 and Fed-IXI from tiny files in their published layouts."""

import gzip

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.config.spec import DataSpec
from fedshift.data.datasets.medical import fed_ixi, feddg_fundus, feddg_prostate, fets2022
from fedshift.data.sources import load_federation
from fedshift.tasks import Segmentation
from fedshift.utils.errors import UsageError

nibabel = pytest.importorskip("nibabel")
SITES = ("BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL")


def draw(*key):
    return np.random.default_rng([sum(map(ord, str(part))) for part in key])


def save(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([-1, -1, 1, 1])), path)  # as the publishers': not turned


@pytest.fixture
def fundus(tmp_path):
    """Three images for training and one for testing of each domain: cup in disc, darker than the background."""
    for number in range(1, 5):
        for part, count in (("train", 3), ("test", 1)):
            for k in range(count):
                place = tmp_path / "Fundus" / f"Domain{number}" / part / "ROIs"
                mask = np.full((20, 20), 255, np.uint8)
                mask[5:15, 5:15], mask[8:12, 8:12] = 128, 0
                for kind, values in (("image", np.repeat((255 - mask)[..., None], 3, axis=2)), ("mask", mask)):
                    (place / kind).mkdir(parents=True, exist_ok=True)
                    Image.fromarray(values).save(place / kind / f"g_{part}_{k}.png")
    return tmp_path


def test_fundus_images_have_disc_and_cup_by_gray(fundus):
    data = feddg_fundus(fundus, size=10).check()
    assert data.names == ("drishti-gs", "rim-one-r3", "refuge", "refuge-validation")
    assert (data.task, data.classes, data.class_names) == (Segmentation(), 3, ("background", "disc", "cup"))
    for client in data.clients:
        assert (len(client.train), len(client.test)) == (3, 1)
        assert client.train.shape == (3, 10, 10)
        assert torch.bincount(client.train.y.flatten()).tolist() == [3 * 75, 3 * 21, 3 * 4]
    (fundus / "Fundus" / "Domain2" / "train" / "ROIs" / "mask" / "g_train_1.png").unlink()
    with pytest.raises(UsageError, match=r"client 'rim-one-r3': 1 of 4 images are not there, first .*g_train_1\.png"):
        feddg_fundus(fundus, size=10)


@pytest.fixture
def prostate(tmp_path):
    """Five patients of each site with four slices, of which the first shows no prostate; zones are 1 and 2."""
    for site in SITES:
        for k in range(5):
            random = draw(site, k)
            mask = random.integers(0, 3, (8, 8, 4)).astype(np.uint8)
            mask[..., 0] = 0
            name = "Segmentation" if site in ("BMC", "RUNMC") else "segmentation"
            save(tmp_path / site / f"Case0{k}.nii.gz", random.integers(0, 900, (8, 8, 4)).astype(np.int16))
            save(tmp_path / site / f"Case0{k}_{name}.nii.gz", mask)
    return tmp_path


def test_slices_with_prostate_are_images_and_a_patient_is_on_one_side(prostate):
    data = feddg_prostate(prostate, size=8).check()
    assert (data.names, data.classes) == (SITES, 2)
    for client in data.clients:
        assert (len(client.train), len(client.test)) == (12, 3)
        assert client.train.dtype == torch.uint8
        assert client.test.shape == (1, 8, 8)
    masks = [
        (np.asarray(nibabel.load(prostate / "HK" / f"Case0{k}_segmentation.nii.gz").dataobj) > 0).T[1:]
        for k in range(5)
    ]
    tested = data.client("HK").test.y.numpy()
    assert sum(np.array_equal(mask, tested) for mask in masks) == 1  # one whole patient


def test_volumes_of_the_prostate_are_read_when_they_are_needed(prostate):
    data = feddg_prostate(prostate, size=8, slices=False).check()
    train = data.client("UCL").train
    assert train.lazy
    assert train.shape == (1, 4, 8, 8)
    assert set(train.y.unique().tolist()) == {0, 1}
    (prostate / "UCL" / "Case03_segmentation.nii.gz").unlink()
    with pytest.raises(UsageError, match=r"Case03\.nii\.gz has no mask Case03_segmentation"):
        feddg_prostate(prostate)


@pytest.fixture
def fets(tmp_path):
    """Three patients of institution 1, two of institution 2."""
    place = tmp_path / "MICCAI_FeTS2022_TrainingData"
    place.mkdir()
    rows = [("1", "FeTS2022_00000"), ("2", "FeTS2022_00002"), ("1", "FeTS2022_00003"), ("1", "FeTS2022_00005"),
            ("2", "FeTS2022_00006")]  # fmt: skip
    (place / "partitioning_1.csv").write_text("Partition_ID,Subject_ID\n" + "".join(f"{a},{b}\n" for a, b in rows))
    for _, name in rows:
        for kind in ("t1", "t1ce", "t2", "flair"):
            values = draw(name, kind).integers(0, 2000, (6, 5, 4)).astype(np.int16)
            save(place / name / f"{name}_{kind}.nii.gz", values)
        mask = draw(name).choice(np.array([0, 1, 2, 4], np.uint8), (6, 5, 4))
        save(place / name / f"{name}_seg.nii.gz", mask)
    return tmp_path


def test_institutions_have_volumes_of_four_channels_and_the_enhancing_tumor_is_class_three(fets):
    data = fets2022(fets, size=None).check()
    assert (data.names, data.classes) == (("institution-1", "institution-2"), 4)
    first, second = data.clients
    assert (len(first.train), len(first.test), len(second.train), len(second.test)) == (2, 1, 1, 1)
    assert first.train.shape == (4, 4, 5, 6)
    place = fets / "MICCAI_FeTS2022_TrainingData" / "FeTS2022_00003"
    mask = np.asarray(nibabel.load(place / "FeTS2022_00003_seg.nii.gz").dataobj).T
    t2 = np.asarray(nibabel.load(place / "FeTS2022_00003_t2.nii.gz").dataobj).T
    splits = [(split, k) for split in first.splits.values() for k, row in enumerate(split.rows.tolist()) if row == 1]
    ((split, k),) = splits
    assert np.array_equal(split.y[k], np.where(mask == 4, 3, mask))
    ranks = split.inputs(torch.tensor([k]))[0, 2].numpy().clip(-0.99, 0.99)
    assert np.corrcoef(ranks.ravel(), t2.ravel())[0, 1] > 0.99
    resized = load_federation("fets2022", DataSpec(root=str(fets), image_size=3))
    assert resized.sample_shape == (4, 3, 3, 3)
    (place / "FeTS2022_00003_t1.nii.gz").unlink()
    with pytest.raises(UsageError, match=r"1 files are not there, first .*FeTS2022_00003_t1\.nii\.gz"):
        fets2022(fets)


@pytest.fixture
def ixi(tmp_path):
    place = tmp_path / "IXI_sample"
    for number, center in ((2, "Guys"), (12, "HH"), (13, "HH"), (16, "Guys"), (35, "IOP"), (230, "IOP")):
        name = f"IXI{number:03d}-{center}-0{number}"
        random = draw(name)
        save(place / name / "T1" / f"{name}_image.nii.gz", random.normal(size=(6, 5, 4)).astype(np.float32))
        save(place / name / "label" / f"{name}_label.nii.gz", random.integers(0, 2, (6, 5, 4)).astype(np.uint8))
    return tmp_path


def test_hospitals_of_ixi_have_flambys_split_or_one_of_their_own(ixi):
    table = ixi / "metadata_tiny.csv"
    table.write_text(
        "Patient ID,Manufacturer,Split\n2,0,test\n12,1,test\n13,1,train\n16,0,train\n35,2,train\n230,2,test\n"
    )
    data = fed_ixi(ixi, size=(3, 4, 5)).check()
    assert (data.names, data.classes, data.note) == (("Guys", "HH", "IOP"), 2, "Fed-IXI, FLamby's split")
    assert data.sample_shape == (1, 3, 4, 5)
    assert [client.files[int(client.test.rows[0])] for client in data.clients] == [
        "IXI002-Guys-02", "IXI012-HH-012", "IXI230-IOP-0230",
    ]  # fmt: skip
    table.write_text("Patient ID,Manufacturer,Split\n2,0,test\n")
    with pytest.raises(UsageError, match="does not say whether IXI012-HH-012 is for training or testing"):
        fed_ixi(ixi)
    table.unlink()
    assert "0.2 of each hospital's patients" in fed_ixi(ixi, size=4).note


def test_a_damaged_mask_is_named(ixi):
    file = next((ixi / "IXI_sample").glob("*HH*/label/*.nii.gz"))
    file.write_bytes(gzip.compress(b"no volume"))
    with pytest.raises(UsageError, match=f"1 files cannot be read, first {file}: is no NIfTI file, or is cut short"):
        fed_ixi(ixi)
