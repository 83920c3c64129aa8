"""One preparation for training, exported programs and new clients: files and JSON give the samples of a run."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.assembly import federation, read_folder
from fedshift.data.joining import join_schema
from fedshift.data.preparation import UNIT, Preparation
from fedshift.utils.errors import UsageError


def copy(preparation):
    """What another machine reads of it."""
    return Preparation.from_json(json.loads(json.dumps(preparation.to_json())))


def write_scans(root, top, kind=np.uint16, count=4):
    """Gray images of two classes; the largest training value is below ``top``."""
    random = np.random.default_rng(0)
    for client in "ab":
        for number in range(count):
            file = root / client / f"class {number % 2}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, top, (9, 7)).astype(kind)).save(file)
    return root


@pytest.mark.parametrize(("top", "kind"), [(256, np.uint8), (1024, np.uint16)])
def test_files_are_stored_as_in_the_run(tmp_path, top, kind):
    data = read_folder(write_scans(tmp_path, top, kind), image_size=8)
    client = data.client("a")
    preparation = copy(data.describe_client(client).preparation)
    files = [tmp_path / client.files[row] for row in client.train.rows.tolist()]
    stored, single = preparation.store(files)
    assert not single
    assert torch.equal(stored, client.train.x)
    assert torch.equal(preparation.store(Image.open(files[0]))[0], client.train.x[:1])
    assert torch.equal(preparation.scale(stored), client.train.inputs(slice(None)))


def test_images_of_another_depth_are_refused(tmp_path):
    deep = read_folder(write_scans(tmp_path / "deep", 4000))
    flat = read_folder(write_scans(tmp_path / "flat", 256, np.uint8))
    for data, other in ((deep, flat), (flat, deep)):
        folder = tmp_path / other.name / "a"
        with pytest.raises(UsageError, match=r"8-bit pixels.*gray of more|gray of more.*8-bit pixels"):
            data.describe_client(data.clients[0]).preparation.store(next(folder.rglob("*.png")))


def test_medical_images_are_stored_as_in_the_run(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    random = np.random.default_rng(0)
    for number in range(6):
        for folder, values in (("images", random.normal(size=(5, 6, 4))), ("masks", random.integers(0, 2, (5, 6, 4)))):
            file = tmp_path / "a" / folder / f"{number}.nii.gz"
            file.parent.mkdir(parents=True, exist_ok=True)
            turned = np.diag([-2.0, 1.0, 1.5, 1.0])
            nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), turned), file)
    data = read_folder(tmp_path, image_size=4)
    client = data.client("a")
    preparation = copy(data.describe_client(client).preparation)
    file = tmp_path / client.files[int(client.train.rows[0])]
    assert torch.equal(preparation.store(file)[0], client.train.copy_rows(slice(0, 1)))


def test_volumes_of_new_clients_are_scaled_as_the_runs_are():
    """8-bit volumes have a scaling, as images have."""
    x, y = np.random.default_rng(0).integers(0, 256, (6, 1, 4, 5, 6), dtype=np.uint8), np.arange(6) % 2
    run = federation({"a": (x, y, x, y)}).normalize(UNIT)
    new = join_schema(federation({"b": (x, y, x, y)}), run.schema)
    assert torch.equal(new.client("b").train.inputs(slice(None)), run.client("a").train.inputs(slice(None)))
