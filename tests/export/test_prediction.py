"""Files predicted by an exported model: masks on the grid of their images, and a row for every file."""

from itertools import permutations, product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedshift
from fedshift.data.columns import Column
from fedshift.data.decoding import Decoding
from fedshift.data.decoding.volumes import decode_mask
from fedshift.data.far_values import FarValues
from fedshift.data.preparation import FeatureScaling, Preparation
from fedshift.export.loading import ExportedModel
from fedshift.export.prediction import predict_files
from fedshift.results.cases import read_cases
from fedshift.utils.errors import UsageError

nibabel = pytest.importorskip("nibabel")
GEOMETRY = ("pixdim", "qform_code", "sform_code", "srow_x", "srow_y", "srow_z", "quatern_b", "qoffset_x", "xyzt_units")


def make_model(inputs, task="segmentation", classes=("none", "bright"), program=None):
    """Return a model for which pixels above the middle of the scale are bright."""
    description = {
        "classes": classes, "task": task, "input": inputs.to_json(), "model": {"client": None, "method": "fedavg"},
    }  # fmt: skip
    return ExportedModel(Path("model"), description, program or (lambda x: torch.stack((-x[:, 0], x[:, 0]), dim=1)))


def volumes(*shape):
    return make_model(Preparation(shape=(1, *shape), dtype="float32", decoding=Decoding(kind="volume")))


def pictures(height, width, **options):
    return make_model(
        Preparation(shape=(3, height, width), dtype="uint8", decoding=Decoding(kind="byte")),
        program=lambda x: torch.stack((127.5 - x[:, 0].float(), x[:, 0].float() - 127.5), dim=1), **options,
    )  # fmt: skip


def draw_volume(shape=(5, 4, 3), seed=0):
    """Return a volume that is bright in some of its voxels, and where."""
    bright = np.random.default_rng(seed).random(shape) < 0.4
    return np.where(bright, 900, 100).astype(np.int16), bright.astype(np.uint8)


def save(path, values, affine, units="mm", **codes):
    made = nibabel.Nifti1Image(values, affine)
    made.header.set_xyzt_units(units)
    made.header["descrip"] = b"a patient's name"
    for name, code in codes.items():
        made.header[name] = code
    path.parent.mkdir(exist_ok=True)
    nibabel.save(made, path)


def test_masks_have_the_voxels_and_the_header_of_their_image_in_every_orientation(tmp_path):
    model, (values, bright) = volumes(3, 4, 5), draw_volume()
    affine = np.diag([0.5, 2.0, 3.0, 1.0])
    affine[:3, 3] = (-7.0, 11.0, 23.0)
    straight = nibabel.Nifti1Image(values, affine)
    turns = list(product(permutations(range(3)), product((1, -1), repeat=3)))
    for number, (axes, flips) in enumerate(turns[::5]):  # each order of the axes, and each direction
        turned = straight.as_reoriented(np.stack((axes, flips), axis=1))
        save(
            tmp_path / "images" / f"{number:02}.nii.gz",
            np.asarray(turned.dataobj),
            turned.affine,
            qform_code=number % 4,
        )
    found = predict_files(model, [tmp_path / "images"], tmp_path / "out")
    assert (len(found.rows), found.failed) == (10, [])
    for image in (tmp_path / "images").iterdir():
        given, made = nibabel.load(image), nibabel.load(tmp_path / "out" / image.name)
        assert (made.shape, made.get_data_dtype()) == (given.shape, np.uint8)
        assert np.array_equal(made.affine, given.affine)
        assert all(np.array_equal(made.header[name], given.header[name]) for name in GEOMETRY)
        assert not made.header["descrip"].item()
        places = np.argwhere(np.asarray(made.dataobj)) @ made.affine[:3, :3].T + made.affine[:3, 3]
        true = np.argwhere(bright) @ affine[:3, :3].T + affine[:3, 3]
        assert {tuple(place) for place in places} == {tuple(place) for place in true}


def test_the_table_compares_each_mask_with_the_true_one(tmp_path):
    model, affine = volumes(3, 4, 5), np.diag([0.5, 2.0, 3.0, 1.0])
    values, bright = draw_volume()
    save(tmp_path / "images" / "a.nii", values, affine)
    save(tmp_path / "images" / "b.nii", values, np.diag([0.0005, 0.002, 0.003, 1.0]), units="meter")
    save(tmp_path / "images" / "c.nii", np.full_like(values, np.nan, np.float32), affine)
    (tmp_path / "images" / "d.nii").write_bytes(b"no volume")
    truth = bright.copy()
    truth[0] = 0
    for name, mask in {"a": truth, "b": bright, "c": truth, "d": truth}.items():
        save(tmp_path / "masks" / f"{name}.nii.gz", mask * 255, affine)
    found = predict_files(model, [tmp_path / "images"], tmp_path / "out", masks=tmp_path / "masks")
    table = pd.read_csv(found.table, index_col=0)
    table.index = [Path(file).name for file in table.index]
    assert table.loc["a.nii", "milliliters bright"] == pytest.approx(bright.sum() * 0.003)
    assert table.loc["b.nii", "milliliters bright"] == pytest.approx(bright.sum() * 0.003)
    both = int((bright & truth).sum())
    assert table.loc["a.nii", "dice bright"] == pytest.approx(2 * both / int(bright.sum() + truth.sum()))
    assert table.loc["b.nii", ["dice bright", "hd95 mm bright", "assd mm bright"]].tolist() == [1, 0, 0]
    assert table.loc["a.nii", "hd95 mm bright"] > 0
    assert table.status.to_list() == [
        "predicted", "predicted", "has 60 voxels that are NaN or infinite: give a file that the "
        "model takes, float32 [N, 1, 3, 4, 5], numbers as the run read them",
        "is not a NIfTI file, or is cut short",
    ]  # fmt: skip
    assert {file.name for file in (tmp_path / "out").glob("*.nii.gz")} == {"a.nii.gz", "b.nii.gz"}


def test_voxels_of_a_sheared_volume_have_the_volume_between_their_edges(tmp_path):
    values, bright = draw_volume()
    affine = np.diag([0.5, 2.0, 3.0, 1.0])
    affine[0, 1] = 0.4  # the second edge leans: it is longer, and the volume is the same
    save(tmp_path / "leaning.nii", values, affine)
    (row,) = predict_files(volumes(3, 4, 5), [tmp_path / "leaning.nii"], tmp_path / "out").rows
    assert row["milliliters bright"] == pytest.approx(bright.sum() * 0.003)


def test_the_table_has_what_was_predicted_before_an_interruption(tmp_path):
    for name in "ab":
        save(tmp_path / f"{name}.nii", draw_volume()[0], np.eye(4))

    def interrupt(_, done, __):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_files(volumes(3, 4, 5), [tmp_path / "a.nii", tmp_path / "b.nii"], tmp_path / "out", progress=interrupt)
    table = pd.read_csv(tmp_path / "out" / "cases.csv")
    assert table["mask"].tolist() == ["a.nii.gz"]


def test_pictures_of_any_size_have_masks_of_theirs_and_pixels_outside_of_the_field_of_view_do_not_count(tmp_path):
    pixels = np.zeros((8, 12), np.uint8)
    pixels[2:6, 4:8] = 255
    truth, field = pixels.copy(), np.full_like(pixels, 255)
    truth[:, 6:], field[:, 6:] = 0, 0  # the truth lacks what lies outside
    for name, values in {"images/eye.png": pixels, "masks/eye.tif": truth, "fov/eye.png": field}.items():
        (tmp_path / name).parent.mkdir()
        Image.fromarray(values).save(tmp_path / name)
    eye = [tmp_path / "images" / "eye.png"]
    (row,) = predict_files(pictures(16, 24), eye, tmp_path / "out", masks=tmp_path / "masks").rows
    assert np.array_equal(decode_mask(tmp_path / "out" / row["mask"]), pixels // 255)
    assert (row["dice bright"], row["hd95 pixels bright"], row["assd pixels bright"]) == (1, 0, 0)
    assert not {name for name in row if "milliliters" in name or "mm" in name}
    (tmp_path / "fov").rename(tmp_path / "views")
    (row,) = predict_files(pictures(16, 24), eye, tmp_path / "whole", masks=tmp_path / "masks").rows
    assert row["dice bright"] == pytest.approx(2 * 8 / (16 + 8))


def test_tables_are_predicted_in_the_forms_in_which_they_are_read_for_training(tmp_path):
    columns = (
        Column(name="age"),
        Column(name="smokes", holds="True and False"),
        Column(name="sex", categories=("f", "m")),
    )
    rows = make_model(
        Preparation(shape=(4,), dtype="float32", columns=columns), "regression", ("dose", "days"),
        lambda x: torch.stack((2 * x[:, 0] + x[:, 1], x[:, 3]), dim=1),
    )  # fmt: skip
    frame = pd.DataFrame({"ward": ["x", "y"], "sex": ["f", "m"], "smokes": [False, True], "age": [30, 40.5]})
    frame.to_csv(tmp_path / "a.csv", index=False, sep=";", decimal=",")
    frame.to_csv(tmp_path / "b.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "c.parquet")
    faults = {
        "sex,smokes,age\n": "has names of columns but no row", "sex,smokes\nf,0\n": "has no column 'age'",
        "sex,smokes,age\nf,0,1e60\n": "row 1: an infinite value in column 'age'", "sex,smokes,age\nf,0,old\n": "'old'",
        "sex,smokes,age\nx,0,3\n": "column 'sex' holds 'x', but its categories in ",
    }  # fmt: skip
    for number, text in enumerate(faults):
        (tmp_path / f"d{number}.csv").write_text(text)
    table = pd.read_csv(predict_files(rows, [tmp_path], tmp_path / "out").table)
    assert table[["row", "dose", "days"]].to_numpy()[:6].tolist() == [[0, 60, 0], [1, 82, 1]] * 3
    assert rows.predict(frame.astype(str)) == [[60, 0], [82, 1]]
    for row, said in (
        ({"age": 3, "sex": "f"}, "a row has no 'smokes': give every column, None where missing"),
        ({"age": 3, "sex": "x", "smokes": True}, "column 'sex' holds one of f, m, not 'x'"),
        ({"age": "old", "sex": "f", "smokes": True}, "column 'age' holds numbers, not 'old'"),
        ([[1, 2]], "a row is a list"),
    ):
        with pytest.raises(UsageError, match=said):
            rows(row)
    assert all(said in status for said, status in zip(faults.values(), table.status[6:], strict=True))


def test_images_with_a_class_have_it_in_the_table_and_outputs_that_are_no_numbers_have_none(tmp_path):
    for name, value in {"dark": 0, "light": 255, "none": 9}.items():
        Image.fromarray(np.full((4, 4), value, np.uint8)).save(tmp_path / f"{name}.png")
    one = pictures(4, 4, task="classification")
    mean = lambda x: torch.where(x.float().mean((1, 2, 3)) == 9, torch.nan, x.float().mean((1, 2, 3)))  # noqa: E731
    one._program = lambda x: torch.stack((127.5 - mean(x), mean(x) - 127.5), dim=1)
    (tmp_path / "odd.webp").write_bytes(b"RIFF")
    found = predict_files(one, [tmp_path], tmp_path / "folder")
    assert [Path(row["file"]).name for row in found.rows] == ["dark.png", "light.png", "none.png", "odd.webp"]
    assert pd.read_csv(found.table).prediction.to_list()[:2] == ["none", "bright"]
    assert "none.png has outputs of the model that are not numbers (NaN)" in found.failed[0]
    assert "odd.webp is not an image in format PNG," in found.failed[1]


def test_a_table_in_another_unit_has_a_warning_on_each_row_and_python_warns(tmp_path):
    scaling = FeatureScaling(fill=np.zeros(2), mean=np.array([75.0, 50.0]), std=np.array([15.0, 10.0]))
    columns = (Column(name="weight"), Column(name="age"))
    model = make_model(
        Preparation(shape=(2,), dtype="float32", columns=columns, scaling=scaling), "classification",
        program=lambda x: torch.stack((-x[:, 0], x[:, 0]), dim=1),
    )  # fmt: skip
    (tmp_path / "kg.csv").write_text("weight,age\n70,40\n,95\n")
    (tmp_path / "g.csv").write_text("weight,age\n70000,40\n80000,\n")
    found = predict_files(model, [tmp_path / "kg.csv", tmp_path / "g.csv"], tmp_path / "out")
    assert list(found.far) == [tmp_path / "g.csv"]
    told = "values are far from the training data's: column 'weight': about 1,000 times larger: mean 7.5e+04"
    assert found.far[tmp_path / "g.csv"].startswith(told)
    assert pd.read_csv(found.table).warning.isna().to_list() == [True, True, False, False]
    with pytest.warns(FarValues, match="weight") as warned:
        model.predict({"weight": 80_000, "age": 40})
    assert Path(warned[0].filename) == Path(__file__)


def test_what_cannot_be_predicted_is_refused_before_anything_is_written(tmp_path):
    model = pictures(4, 4)
    for place in ("one", "two", "masks"):
        (tmp_path / place).mkdir()
    for name in ("one/eye.png", "two/eye.png"):
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name)
    one, two, masks, out = (tmp_path / name for name in ("one", "two", "masks", "out"))
    classes = pictures(4, 4, task="classification")
    for used, files, options, message in (
        (model, [one, two], {}, "have the same name without folder and suffix"),
        (model, [masks], {}, "masks has no files of .nii"),
        (model, [one / "other.png"], {}, "other.png does not exist: give files"),
        (model, [one], {"masks": masks}, "masks has no files of"),
        (classes, [one], {"masks": two}, "is a model for classification: leave the masks out"),
    ):
        with pytest.raises(UsageError, match=message):
            predict_files(used, files, out, **options)
        assert not out.exists()


@pytest.mark.slow
def test_the_command_predicts_what_the_run_counted(cli, tmp_path):
    affine = np.diag([-0.5, 2.0, 3.0, 1.0])
    for number in range(10):
        for part, made in zip(("images", "masks"), draw_volume((8, 8, 8), number), strict=True):
            (tmp_path / "scans" / "a").mkdir(parents=True, exist_ok=True)
            save(tmp_path / "scans" / "a" / part / f"{number}.nii.gz", made, affine)
    result = fedshift.compare(
        data="scans", methods="fedavg", model="unet-small(width=2)", rounds=2, batch_size=2, lr=0.1, out="run"
    )
    client = result.experiment.data.client("a")
    result.export("model", client="a", onnx=False)
    files = [tmp_path / "scans" / client.files[row] for row in client.test.rows.tolist()]
    done = cli("predict", "model", *files, "--out", "out", "--masks", tmp_path / "scans" / "a" / "masks")
    assert done.code == 0, done.err
    records = read_cases(Path("run/trials/fedavg-seed0")).records["a", "personal"]
    table = pd.read_csv("out/cases.csv")
    hits, both = records["hits"][:, 1], records["support"][:, 1] + records["predicted"][:, 1]
    assert table["dice 1"].to_list() == (2 * hits / both).tolist()
    assert np.allclose(table["milliliters 1"], records["predicted"][:, 1] * 0.003)
    for file, name in zip(files, table["mask"], strict=True):
        assert np.array_equal(nibabel.load(Path("out", name)).dataobj, result.predict("fedavg", "a", file))
    (tmp_path / "scans" / "a" / "images" / "bad.nii").write_bytes(b"")
    done = cli("predict", "model", tmp_path / "scans" / "a" / "images", "--out", "all")
    assert done.code == 1
    assert "bad.nii is not a NIfTI file, or is cut short" in done.out
    assert "10 predicted, 1 refused" in done.out
