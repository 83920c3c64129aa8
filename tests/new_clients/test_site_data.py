"""A new site's data for ``fedshift adapt``: converted to the run's kind, or refused; with labels and without."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedshift.config.spec import RunSpec
from fedshift.data.assembly import federation, read_folder
from fedshift.data.federation import ClientData, Federation
from fedshift.data.joining import join_schema
from fedshift.data.preparation import HALF, IMAGENET, UNIT
from fedshift.data.samples import Samples
from fedshift.data.sources import load_federation
from fedshift.new_clients.site_data import load_site, load_unlabeled
from fedshift.tasks import Multilabel, Regression, Segmentation
from fedshift.utils.errors import UsageError

TABLES = RunSpec(target="ill")


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


def pictures(folder, sizes, shade=0, mode="RGB", **options):
    """Images in ``folder``/<class>/ (or in it, where the class is ""), ``sizes``: class -> number."""
    random = np.random.default_rng(3)
    for category, count in sizes.items():
        (folder / category).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = random.integers(shade, 200, (8, 8, 3) if mode == "RGB" else (8, 8)).astype(np.uint8)
            image = Image.fromarray(pixels).resize(options.get("size", (8, 8)), Image.Resampling.NEAREST)
            image.save(folder / category / f"{number}.png")


# The new site's data


def test_a_site_is_brought_to_the_runs_size_channels_scale_and_classes(tiny, tmp_path):
    run = replace(tiny, class_names=("cat", "dog", "owl"), classes=3).normalize(IMAGENET)
    pictures(tmp_path / "new" / "north", {"dog": 5, "owl": 5}, mode="L", size=(16, 16))
    new = load_site(str(tmp_path / "new"), RunSpec(data="elsewhere", samples=3, domains="ann"), run.schema)
    north = new.client("north")
    assert (new.sample_shape, new.classes, new.class_names) == ((3, 8, 8), 3, ("cat", "dog", "owl"))
    assert sorted(set(north.train.y.tolist())) == [1, 2]
    assert north.train.normalization == IMAGENET
    assert torch.equal(north.train.x[:, 0], north.train.x[:, 2])
    own = load_site(str(tmp_path / "new"), RunSpec(normalize="unit"), run.normalize(UNIT).schema).client("north")
    assert own.train.normalization == UNIT
    alone = load_site(str(tmp_path / "new"), RunSpec(), run.normalize_clients().schema).client("north").train
    assert alone.inputs(slice(None)).mean((0, 2, 3)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"class_names": ("cat", "dog", "owl")},
            "new has a class 'yak', which is not among the classes of the run's data, tiny, cat",
        ),
        ({"classes": 1}, "new has labels up to 1, but the classes of the run's data, tiny, are 1"),
    ],
)
def test_classes_that_the_run_has_not_are_refused_naming_both(tiny, tmp_path, changed, said):
    pictures(tmp_path / "new" / "north", {"dog": 5, "yak": 5})
    with pytest.raises(UsageError, match=re.escape(said)):
        load_site(str(tmp_path / "new"), RunSpec(), replace(tiny, **changed).schema)


def test_samples_of_another_shape_are_refused_naming_both(tiny, tmp_path):
    random = np.random.default_rng(0)
    rows = random.normal(size=(6, 4)), np.arange(6) % 2
    run = federation({"a": (*rows, *rows)}, name="a table")
    (tmp_path / "new").mkdir()
    x = random.normal(size=(6, 5))
    np.savez(tmp_path / "new" / "north.npz", x_train=x, y_train=rows[1], x_test=x, y_test=rows[1])
    said = r"new, client 'north', train data: samples of shape \(5,\), but the run was trained on a table with samples"
    with pytest.raises(UsageError, match=said):
        load_site(str(tmp_path / "new"), RunSpec(), run.schema)
    with pytest.raises(UsageError, match=r"shape \(5,\), .* on tiny with samples of shape \(3, 8, 8\)"):
        load_site(str(tmp_path / "new"), RunSpec(), tiny.schema)


# Tables


def patients(key=0, count=60):
    """Return rows of a hospital: two numbers, two columns of text, and a label determined by them."""
    draw = np.random.default_rng(key)
    age, pain = draw.integers(20, 90, count), np.resize(["none", "typical", "atypical"], count)
    ill = np.where(age + 30 * (pain == "typical") > 65, "yes", "no")
    grade = np.resize(["1", "2", "unclear"], count)
    return pd.DataFrame({"age": age, "chol": draw.normal(200, 40, count), "pain": pain, "grade": grade, "ill": ill})


@pytest.fixture
def hospitals(tmp_path):
    """Federation of two hospitals' tables on which a run was made."""
    (tmp_path / "hospitals").mkdir()
    for key, name in enumerate(("bonn", "oslo")):
        patients(key).to_csv(tmp_path / "hospitals" / f"{name}.csv", index=False)
    return load_federation(str(tmp_path / "hospitals"), TABLES)


def arriving(tmp_path, frame, name="rome.csv"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    frame.to_csv(tmp_path / name, index=False)
    return str(tmp_path / name)


def test_a_tables_columns_are_found_by_name_and_get_the_runs_places(hospitals, tmp_path):
    assert [column.name for column in hospitals.columns] == ["age", "chol", "pain", "grade"]
    frame = patients(7)
    straight = load_site(arriving(tmp_path, frame), TABLES, hospitals.schema)
    mixed = load_site(
        arriving(tmp_path, frame[["grade", "ill", "pain", "chol", "age"]], "b/rome.csv"), TABLES, hospitals.schema
    )
    assert mixed.columns == straight.columns == hospitals.columns
    assert torch.equal(mixed.client("rome").train.x, straight.client("rome").train.x)
    test = straight.client("rome").test
    assert torch.equal(test.x[:, 2:5].sum(1), torch.ones(len(test)))
    assert straight.client("rome").train.x[:, :2].mean(0).abs().max() < 1e-6  # scaled by its own training rows


def test_categories_that_a_site_has_not_keep_their_places(hospitals, tmp_path):
    frame = patients(7).assign(grade=np.resize(["2", "1"], 60), pain=None)  # grade alone would be read as numbers
    rome = load_site(arriving(tmp_path, frame), TABLES, hospitals.schema).client("rome").train
    assert rome.shape == hospitals.sample_shape
    assert not rome.x[:, 2:5].any()
    assert (rome.x[:, 5] + rome.x[:, 6] == 1).all()
    assert not rome.x[:, 7].any()


def test_one_table_is_one_client_as_a_file_and_alone_in_a_directory(hospitals, tmp_path):
    one = load_site(arriving(tmp_path, patients(7)), TABLES, hospitals.schema)
    alone = load_site(str(Path(arriving(tmp_path, patients(7), "new/rome.csv")).parent), TABLES, hospitals.schema)
    assert one.names == alone.names == ("rome",)
    assert one.fingerprint == alone.fingerprint
    by_column = replace(TABLES, client_column="hospital")  # of a run on one table of all hospitals
    assert load_site(str(tmp_path / "rome.csv"), by_column, hospitals.schema).fingerprint == one.fingerprint
    named = arriving(tmp_path, patients(7).assign(hospital=np.repeat(["a", "b"], 30)), "two.csv")
    assert load_site(named, by_column, hospitals.schema).names == ("a", "b")
    with pytest.raises(UsageError, match="is a single table: say which column holds the client"):
        load_federation(str(tmp_path / "rome.csv"), TABLES)


def test_one_file_of_arrays_is_one_client(tiny, tiny_folder):
    new = load_site(str(tiny_folder / "cid.npz"), RunSpec(), tiny.schema)
    assert new.names == ("cid",)
    assert torch.equal(new.client("cid").train.x, tiny.client("cid").train.x)
    with pytest.raises(UsageError, match=r"cid\.npz is one client"):
        load_federation(str(tiny_folder / "cid.npz"), RunSpec())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"chol": None},
            "rome.csv does not have the columns of 'hospitals', the data that it joins: it has no 'chol'.",
        ),
        ({"bmi": 1, "unit": "mg"}, "it has 'bmi', 'unit' besides. Name columns alike"),
        ({"chol": None, "age": None, "years": 7}, "it has no 'age', 'chol' and has 'years' besides."),
        (
            {"pain": "severe"},
            "'pain' holds 'severe', but its categories in 'hospitals', the data that it joins, are aty",
        ),
        ({"chol": "high"}, "'chol' holds text such as 'high', but numbers in 'hospitals', the data that it joins"),
        (
            {"ill": None, "sick": "yes"},
            "rome.csv has no column 'ill' of 'hospitals', the data that it joins: ",
        ),
        (
            {"ill": "maybe"},
            "rome has a class 'maybe', which is not among the classes of the run's data, hospitals, no, yes: l",
        ),
        (
            {"ill": "0"},
            "rome has a class '0', which is not among the classes of the run's data, hospitals, no, yes",
        ),
    ],
)
def test_tables_that_do_not_fit_the_runs_are_refused_by_column(hospitals, tmp_path, changed, said):
    frame = patients(7).drop(columns=[name for name, value in changed.items() if value is None])
    path = arriving(tmp_path, frame.assign(**{name: value for name, value in changed.items() if value is not None}))
    with pytest.raises(UsageError, match=re.escape(said)):
        load_site(path, TABLES, hospitals.schema)


def test_numbers_where_the_run_has_text_are_refused(hospitals, tmp_path):
    patients(7).assign(grade=2).to_parquet(tmp_path / "rome.parquet", index=False)
    with pytest.raises(
        UsageError, match=r"column 'grade' holds numbers, but text in 'hospitals', .*give one of 1, 2, unc"
    ):
        load_site(str(tmp_path / "rome.parquet"), TABLES, hospitals.schema)


def test_labels_of_tables_count_by_value_where_no_class_has_a_name(tmp_path):
    (tmp_path / "runs").mkdir()
    for name in "ab":
        patients().assign(ill=np.resize([0, 1, 2], 60)).to_csv(tmp_path / "runs" / f"{name}.csv", index=False)
    run = load_federation(str(tmp_path / "runs"), TABLES)
    new = load_site(arriving(tmp_path, patients(7).assign(ill=np.resize([2, 1], 60))), TABLES, run.schema)
    assert (run.class_names, new.class_names, new.classes) == ((), (), 3)
    assert set(new.client("rome").train.y.tolist()) == {1, 2}


def test_tables_read_by_themselves_are_refused_where_their_columns_differ(hospitals, tmp_path):
    for name in "ab":
        arriving(tmp_path, patients(7)[["chol", "age", "pain", "grade", "ill"]], f"new/{name}.csv")
    choices = {"target": "ill", "scaling": TABLES.scaling}
    with pytest.raises(UsageError, match=r"in their order: first 'chol' where 'age' belongs\. Read it by those"):
        join_schema(read_folder(tmp_path / "new", **choices), hospitals.schema)
    assert join_schema(read_folder(tmp_path / "new", schema=hospitals.schema, **choices), hospitals.schema).names == (
        "a",
        "b",
    )
    shorter = replace(hospitals, columns=hospitals.columns[:2])
    with pytest.raises(UsageError, match=r"first nothing where 'pain' \(atypical, none, typical\) belongs"):
        join_schema(shorter, hospitals.schema)


# Images of another range or size


@pytest.mark.parametrize(
    ("ours", "scale", "theirs"),
    [("uint8", HALF, (0, 1)), ("uint8", IMAGENET, (-1, 1)), ("float32", HALF, (0, 255))],
)
def test_images_of_another_range_are_refused(ours, scale, theirs):
    random, y = np.random.default_rng(0), np.arange(6) % 2

    def images(kind, low, high):
        x = random.uniform(low, high, (6, 3, 8, 8)).astype(kind)
        return federation({"a": (x, y, x, y)}, name="some")

    run = images(ours, 0, 255 if ours == "uint8" else 1).normalize(scale)
    with pytest.raises(
        UsageError,
        match=r"the run's data: .*, but some, client .a., train data: .*pixels of 8 bits are scaled",
    ):
        join_schema(images("float32" if ours == "uint8" else "uint8", *theirs), run.schema)
    if scale == HALF and ours == "uint8":
        assert join_schema(images("float32", -1, 1), run.schema).clients[0].train.x.min() < 0


def test_images_of_several_sizes_are_brought_to_the_runs_and_that_is_said(tiny, tmp_path):
    pictures(tmp_path / "new" / "north", {"0": 4, "1": 4}, size=(9, 12))
    pictures(tmp_path / "new" / "south", {"0": 4, "1": 4}, size=(20, 11))
    new = load_site(str(tmp_path / "new"), RunSpec(), tiny.schema)
    assert new.sample_shape == (3, 8, 8)
    assert "images of several sizes are resized to 8 x 8 pixels" in new.notices


# Data without labels


@pytest.mark.parametrize(("mode", "size"), [("RGB", (8, 8)), ("L", (8, 8)), ("RGB", (20, 20))])
def test_a_flat_folder_is_read_as_class_folders_are(tiny, tmp_path, mode, size):
    pictures(tmp_path / "tree" / "north" / "train", {"0": 7}, mode=mode, size=size)
    pictures(tmp_path / "tree" / "north" / "test", {"0": 1}, mode=mode, size=size)
    pictures(tmp_path / "flat", {"": 7}, mode=mode, size=size)
    with_labels = load_site(str(tmp_path / "tree"), RunSpec(), tiny.schema).client("north").train
    without = load_unlabeled(tmp_path / "flat", RunSpec(), tiny.schema)
    assert torch.equal(without.inputs(slice(None)), with_labels.inputs(slice(None)))
    again = load_unlabeled(tmp_path / "flat", RunSpec(), tiny.schema)  # from the cache
    assert torch.equal(again.x, without.x)


@pytest.mark.parametrize("suffix", ["png", "nii"])
def test_images_of_any_size_join_a_run_on_patches_without_masks(tmp_path, suffix):
    random, flat = np.random.default_rng(0), tmp_path / "flat"
    flat.mkdir()
    for number in range(6):
        size = tuple(random.integers(6, 12, 2 if suffix == "png" else 3))
        for folder in ("images", "masks"):
            file = tmp_path / "run" / "a" / folder / f"{number}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            values = random.integers(0, 2 if folder == "masks" else 250, size).astype(np.uint8)
            if suffix == "png":
                Image.fromarray(values).save(file)
            else:
                nibabel = pytest.importorskip("nibabel")
                nibabel.save(nibabel.Nifti1Image(values, np.diag([1, 1, number % 2 + 1.0, 1])), file)
        shutil.copy(tmp_path / "run" / "a" / "images" / f"{number}.{suffix}", flat)
    spec = RunSpec(data=str(tmp_path / "run"), patch="5", spacing="1.5" if suffix == "nii" else None)
    run = load_federation(spec.data, spec)
    found, train = load_unlabeled(flat, spec, run.schema), run.clients[0].train
    assert found.shape == train.shape
    for number, row in enumerate(train.rows.tolist()):
        assert torch.equal(found.read_case(row)[0], train.read_case(number)[0])
    if suffix == "nii":
        (flat / "9.nii").write_bytes(b"no volume")
        with pytest.raises(UsageError, match=r"9\.nii: is not a NIfTI file"):
            load_unlabeled(flat, spec, run.schema)
        said, skipping = [], replace(spec, on_data_error="warn")
        assert len(load_unlabeled(flat, skipping, run.schema, notices=said)) == 6
        assert said[0].startswith("client 'flat': 1 of 7 files cannot be read, left out (9.nii: is not a NIfTI file")


def test_broken_images_of_a_flat_folder_are_refused_or_skipped(tiny, tmp_path):
    pictures(tmp_path / "flat", {"": 4})
    (tmp_path / "flat" / "2.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"1 of 4 files cannot be read: .*flat/2\.png: is not an image"):
        load_unlabeled(tmp_path / "flat", RunSpec(), tiny.schema)
    said = []
    assert len(load_unlabeled(tmp_path / "flat", RunSpec(on_data_error="warn"), tiny.schema, notices=said)) == 3
    assert said[0].startswith("client 'flat': 1 of 4 files cannot be read, left out (2.png: is not an image")
    (tmp_path / "flat" / "2.png").rename(tmp_path / "flat" / "2.webp")
    assert len(load_unlabeled(tmp_path / "flat", RunSpec(), tiny.schema, notices=said)) == 3
    assert said[1:] == ["client 'flat': 1 image in a format that is not read, left out (.webp)"]


def test_images_in_folders_of_the_folder_count_and_hidden_ones_do_not(tiny, tmp_path):
    pictures(tmp_path / "flat", {"": 2, "a/b": 3, "c": 1, ".trash": 4})
    assert len(load_unlabeled(tmp_path / "flat", RunSpec(), tiny.schema)) == 6


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty", "holds no image (.bmp,"),
        ("nowhere", "is no folder: give a folder of images, or an .npz file with an array x"),
        ("y.npz", "has no array 'x' (it has y)"),
        ("broken.npz", "cannot be read as arrays"),
        ("wide.npz", "samples of shape (5,), but the run was trained on tiny with samples of shape (3, 8, 8)"),
    ],
)
def test_unlabeled_data_that_cannot_be_used_are_refused(tiny, tmp_path, name, said):
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "y.npz", y=np.zeros(3))
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 5)))
    (tmp_path / "broken.npz").write_bytes(b"PK but no more")
    with pytest.raises(UsageError, match=re.escape(said)):
        load_unlabeled(tmp_path / name, RunSpec(), tiny.schema)


@pytest.mark.parametrize("task", [Segmentation(), Multilabel(), Regression(scales=((1.0, 2.0),) * 3)], ids=str)
def test_samples_without_targets_join_a_run_of_any_task(tmp_path, task):
    """Networks are adapted to their inputs; their targets are blank."""
    x, shape = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 3), dtype=np.uint8), (3, 6, 6)
    samples = Samples(x=torch.zeros(4, *shape, dtype=torch.uint8), y=task.make_blank_targets(4, shape, 3))
    client = ClientData(name="a", train=samples, test=samples)
    np.savez(tmp_path / "new.npz", x=x)
    run = Federation(name="run", clients=(client,), classes=3, task=task)
    found = load_unlabeled(tmp_path / "new.npz", RunSpec(), run.schema)
    assert torch.equal(found.x, torch.from_numpy(x).permute(0, 3, 1, 2))
    assert not found.y.any()
