"""Folders of DICOM slices: the volumes that they are, in voxels and millimeters, and which are refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.data.assembly import read_folder
from fedshift.data.decoding import Decoding
from fedshift.data.decoding.dicom import read_series, stack_slices
from fedshift.data.decoding.images import Unreadable
from fedshift.data.decoding.volumes import READABLE, decode_volume, read_volume_header
from fedshift.data.preparation import Preparation
from fedshift.export.loading import ExportedModel
from fedshift.export.prediction import list_files, predict_files
from fedshift.utils.errors import UsageError
from tests.data.decoding.test_dicom_values import save

nibabel, pydicom = pytest.importorskip("nibabel"), pytest.importorskip("pydicom")
wrappers = pytest.importorskip("nibabel.nicom.dicomwrappers")
SHAPE = (5, 4, 3)  # columns, rows, slices
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
TRANSVERSE = LPS @ np.diag([0.5, 0.75, 3.0, 1.0])


def tilt(affine, degrees=20.0):
    angle = np.radians(degrees)
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    turn[:3, 3] = (7.0, -11.0, 23.0)
    return turn @ affine


SAGITTAL = tilt(np.array([[0, 0, 2.5, 0], [-0.6, 0, 0, 0], [0, -0.8, 0, 0], [0, 0, 0, 1.0]]))
"""Columns run to the back, rows to the feet, slices to the patient's right."""


def draw(seed=0, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, 4000, shape).astype(np.uint16)


def write_series(folder, values, affine=TRANSVERSE, change=lambda number: {}, **facts):
    """Write voxels ``[columns, rows, slices]``, which ``affine`` maps to RAS, in files named in another order.

    ``change``: function that returns attributes of a slice; None takes one away.
    """
    folder.mkdir(parents=True)
    edges = (LPS @ affine)[:3, :3]
    steps = np.linalg.norm(edges, axis=0)
    ds = pydicom.valuerep.format_number_as_ds
    facts = {
        "SeriesInstanceUID": pydicom.uid.generate_uid(), "PatientID": folder.name, "Modality": "CT",
        "PixelSpacing": [ds(float(steps[1])), ds(float(steps[0]))], "SliceThickness": 1, "InstanceNumber": 1,
        "ImageOrientationPatient": [ds(float(x)) for axis in (0, 1) for x in edges[:, axis] / steps[axis]],
    } | facts  # fmt: skip
    for number in range(values.shape[2]):
        place = [ds(float(x)) for x in (LPS @ affine @ (0, 0, number, 1))[:3]]
        own = {"ImagePositionPatient": place} | facts | change(number)
        save(folder / f"{(5 * number) % 7}.dcm", values[:, :, number].T, **own)
    return folder


def save_nifti(path, values, affine=TRANSVERSE):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)
    return path


@pytest.mark.parametrize("affine", [TRANSVERSE, tilt(TRANSVERSE), SAGITTAL], ids=["transverse", "tilted", "sagittal"])
def test_a_folder_of_slices_is_the_volume_that_nibabel_writes(tmp_path, affine):
    values = draw()
    slices, file = write_series(tmp_path / "s", values, affine), save_nifti(tmp_path / "n.nii", values, affine)
    one, other = read_volume_header(slices), read_volume_header(file)
    assert (one.shape, one.axes) == (other.shape, other.axes)
    np.testing.assert_allclose(one.spacing, other.spacing, atol=1e-4)
    np.testing.assert_allclose(one.affine, other.affine, atol=1e-4)
    assert np.array_equal(decode_volume(slices), decode_volume(file))
    first = next(each for each in slices.iterdir() if each.name == "0.dcm")
    wrapped = wrappers.wrapper_from_file(first)  # rows and columns to millimeters in LPS
    np.testing.assert_allclose((LPS @ wrapped.affine)[:3, :2], affine[:3, [1, 0]], atol=1e-6)


def test_slices_of_a_scanner_are_the_volume_that_another_library_reads(tmp_path):
    """SimpleITK 2.5.7's values and geometry for these slices, which pydicom brings for its own tests."""
    given = Path(pydicom.__file__).parent / "data/test_files/dicomdirtests/98892001/CT5N"
    for file in given.iterdir():
        shutil.copy(file, tmp_path / f"{file.name}.dcm")
    series = read_series(tmp_path, whole=True)
    affine = [[-0.488281, 0, 0, 72.199997], [0, -0.488281, 0, 143], [0, 0, 2.5, -1.2375], [0, 0, 0, 1]]
    assert np.array_equal(series.affine, affine)
    values = stack_slices(series)
    assert (values.shape, values.min(), values.max(), values.sum()) == ((5, 16, 16), -888, 85, -177320)


def test_values_are_in_hounsfield_units_by_the_slope_of_their_slice(tmp_path):
    stored = draw()

    def rescale(number):
        return {"RescaleSlope": number + 1, "RescaleIntercept": -1000}

    values = stored * np.array([1.0, 2, 3]) - 1000
    folder = write_series(tmp_path / "s", stored, LPS @ TRANSVERSE, rescale)
    expected = (np.clip(values, -160, 240) + 160) / 200 - 1
    np.testing.assert_allclose(decode_volume(folder, window=(-160, 240))[0], expected.transpose(2, 1, 0), atol=1e-6)


def write_case(client, number):
    mask = (draw(number + 50) > 2000).astype(np.uint8)
    write_series(client / "images" / f"case.{number}", draw(number), PatientID=f"p{number // 2}")
    return mask


def test_a_client_has_a_folder_for_each_case_and_masks_on_any_axes(tmp_path):
    client = tmp_path / "scans" / "a"
    for number in range(4):
        mask = write_case(client, number)
        if number == 0:
            write_series(client / "masks" / "case.0", mask)
        else:
            turned = nibabel.Nifti1Image(mask, TRANSVERSE).as_reoriented(np.array([[1, 1], [2, -1], [0, 1]]))
            save_nifti(client / "masks" / f"case.{number}.nii.gz", np.asarray(turned.dataobj), turned.affine)
    for data in (
        data_of_all := read_folder(tmp_path / "scans").check(),
        read_folder(client, schema=read_folder(client.parent).schema),
    ):
        (a,) = data.clients
        assert a.train.shape == (1, 3, 4, 5)
        assert not set(a.train.group.tolist()) & set(a.test.group.tolist())
        for row, y in zip(a.train.rows.tolist(), a.train.y, strict=True):
            assert torch.equal(y, torch.from_numpy(np.flip((draw(row + 50) > 2000).T, (1, 2)).copy()).to(y.dtype))
    for number, file in enumerate(sorted((client / "images" / "case.1").iterdir())):  # as exports name them
        file.rename(file.with_name(("IM0001", "1.2.840.17", "slice.ima")[number]))
    shutil.copy(client / "images" / "case.1" / "IM0001", client / "images" / "case.1" / "DICOMDIR")
    assert read_folder(tmp_path / "scans").fingerprint == data_of_all.fingerprint
    damaged = client / "images" / "case.1" / "IM0001"
    kept = damaged.read_bytes()
    damaged.write_bytes(b"no DICOM")
    (other,) = read_folder(tmp_path / "scans", on_data_error="ignore").clients
    assert len(other.train.group) == len(other.train)  # patients of the files that are left are still known
    damaged.write_bytes(kept)
    save_nifti(client / "masks" / "case.1.nii.gz", mask, SAGITTAL)
    with pytest.raises(UsageError, match=r"case\.1\.nii\.gz has .* but its image .*case\.1 "):
        read_folder(tmp_path / "scans")
    assert [file.name for file in list_files([client / "images" / "case.1"], READABLE)] == [
        "1.2.840.17", "IM0001", "slice.ima",
    ]  # fmt: skip
    (client / "images" / "notes").mkdir()
    with pytest.raises(UsageError, match="notes is a folder without DICOM files"):
        read_folder(tmp_path / "scans")
    (client / "images" / "notes" / "001.png").touch()
    with pytest.raises(UsageError, match=r"notes is a folder of pictures, .* write the slices of each case to one NIf"):
        read_folder(tmp_path / "scans")
    (tmp_path / "scans" / "participants.tsv").write_text("participant_id\n")
    with pytest.raises(UsageError, match="holds images or recordings in folders and tables: put each kind"):
        read_folder(tmp_path / "scans")


def on(place, **facts):
    return lambda number: facts if number == place else {}


def shift(number):
    return {"ImagePositionPatient": [0, number, 3 * number]}


FAULTS = {
    "several series": (
        on(1, SeriesInstanceUID="1.2"),
        r"differ in SeriesInstanceUID, 0.dcm and 5.dcm: put each series",
    ),
    "several patients": (on(1, PatientID="q"), r"differ in PatientID, 0.dcm and 5.dcm: put the slices"),
    "orientation": (on(1, ImageOrientationPatient=[0, 1, 0, 0, 0, 1]), "differ in ImageOrientationPatient, 0.dcm and"),
    "size": (on(2, Rows=5, Columns=4), r"differ in Rows, 0.dcm and 3.dcm \(4 and 5\)"),
    "pixel spacing": (on(2, PixelSpacing=[1, 1]), r"differ in PixelSpacing, .* \(0.75 x 0.5 and 1 x 1\)"),
    "a gap": (
        on(2, ImagePositionPatient=[0, 0, 9]),
        "has slices 3 mm from each other, but 6 mm between 5.dcm and 3.dcm",
    ),
    "a time series": (on(2, ImagePositionPatient=[0, 0, 3]), "two slices at one position, 3.dcm and 5.dcm"),
    "a tilted gantry": (shift, "shifted sideways by up to 2.0 mm, as by a tilted gantry"),
    "no position": (on(1, ImagePositionPatient=None), "has the slice 5.dcm, which has no ImagePositionPatient"),
    "frames": (on(1, NumberOfFrames=2), "has the slice 5.dcm, which has several frames or colors"),
    "a segmentation": (on(1, Modality="SEG"), "has the slice 5.dcm, which is a DICOM segmentation"),
    "contours": (lambda number: {"Modality": "RTSTRUCT"}, "has contours and no pixels"),
    "cut pixels": (on(1, PixelData=b"ab"), "has the slice 5.dcm, which is not a DICOM file that can be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_upright_stack_of_one_series_is_refused_by_slice(tmp_path, fault):
    change, message = FAULTS[fault]
    with pytest.raises(Unreadable, match=message):
        decode_volume(write_series(tmp_path / "s", draw(), change=change))


def test_rounded_positions_are_one_distance_and_other_files_are_refused(tmp_path):
    def round_position(number):
        return {"ImagePositionPatient": [0, 0, round(0.625 * number, 2)]}

    folder = write_series(tmp_path / "s", draw(), change=round_position)
    assert read_volume_header(folder).spacing == (0.625, 0.75, 0.5)
    (folder / "IM0001").write_bytes(b"")
    with pytest.raises(Unreadable, match="with IM0001, which is not a DICOM file"):
        read_volume_header(folder)
    with pytest.raises(Unreadable, match="a folder with a single slice"):
        read_volume_header(write_series(tmp_path / "t", draw(shape=(5, 4, 1))))


def test_predicted_masks_of_slices_lie_where_the_series_does(tmp_path):
    inputs = Preparation(shape=(1, 4, 3, 5), dtype="float32", decoding=Decoding(kind="volume"))
    description = {"classes": ["none", "bright"], "task": "segmentation", "input": inputs.to_json(),
                   "model": {"client": None, "method": "fedavg"}}  # fmt: skip
    model = ExportedModel(Path("model"), description, lambda x: torch.stack((-x[:, 0], x[:, 0]), dim=1))
    bright = draw(shape=(3, 4, 5)) > 2000
    folder = write_series(tmp_path / "scans" / "p", np.where(bright, 900, 100).astype(np.uint16), SAGITTAL)
    save_nifti(tmp_path / "masks" / "p.nii", bright.astype(np.uint8), SAGITTAL)
    for name, given in {"one": folder, "all": folder.parent}.items():
        (row,) = predict_files(model, [given], tmp_path / name, masks=tmp_path / "masks").rows
        made = nibabel.load(tmp_path / name / "p.nii.gz")
        np.testing.assert_allclose(made.affine, SAGITTAL, atol=1e-4)
        assert np.array_equal(np.asarray(made.dataobj), bright)
        assert np.array_equal(model.predict(folder), bright)
        assert (row["file"], row["dice bright"], row["hd95 mm bright"]) == (str(folder), 1, 0)
