"""Tiny files in the layouts of published data without a name, arranged and read as docs/published-data.md says."""

import json
import re
import shlex
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedshift.config.spec import DataSpec
from fedshift.data.sources import load_federation

nibabel = pytest.importorskip("nibabel")
ROOT = Path(__file__).parents[2]
SPEC = spec_from_file_location("arrange", ROOT / "examples" / "arrange.py")
arrange = module_from_spec(SPEC)
SPEC.loader.exec_module(arrange)
RANDOM = np.random.default_rng(0)
COMMANDS = re.findall(r"^\| `?([\w-]+).*\| `--data (.*)` \|$", (ROOT / "docs" / "published-data.md").read_text(), re.M)


def picture(place, color):
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 6), color).save(place)


def volume(place, values):
    place.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([-1, -1, 1, 1])), place)


def styles(clients, classes):
    def write(root):
        for place, client in enumerate(clients):
            for label, name in enumerate(classes):
                for number in range(5):
                    picture(root / client / name / f"{number}.png", (40 * label, 40 * number, 40 * place))

    return write


def camelyon17(root):
    rows = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for slide in range(6):
        for number in range(4):
            node = f"patient_{slide:03d}_node_1"
            picture(root / "patches" / node / f"patch_{node}_x_{number}_y_7.png", (10 * slide, 99 * (number % 2), 0))
            rows.append(f"{number},{slide:03d},1,{number},7,{number % 2},{slide},{slide // 3},0")
    (root / "metadata.csv").write_text("\n".join(rows))


def cifar10_c(root):
    y = np.arange(100) % 10
    np.save(root / "labels.npy", np.tile(y, 5))
    for place, name in enumerate(arrange.CORRUPTIONS):
        x = np.full((500, 32, 32, 3), place, np.uint8)
        x[..., 0], x[..., 1] = np.arange(500)[:, None, None] // 100, np.tile(np.arange(100), 5)[:, None, None]
        np.save(root / f"{name}.npy", x)


def femnist(root):
    for part in ("train", "test"):
        (root / part).mkdir()
        users = {f"f000{k}": {"x": np.full((4, 784), 9 * k / 255).tolist(), "y": [0, 61, 5, 9]} for k in (1, 2)}
        (root / part / "all.json").write_text(json.dumps({"users": list(users), "user_data": users}))


def fundus(root):
    for domain in ("Domain1", "Domain2"):
        for part in ("train", "test"):
            for number in range(3):
                mask = np.full((20, 20), 255, np.uint8)
                mask[5:15, 5:15], mask[8:12, 8:12] = 128, 0
                place = root / domain / part / "ROIs"
                picture(place / "image" / f"g{number}.png", (number, 0, 0))
                Image.open(place / "image" / f"g{number}.png").resize((20, 20)).save(place / "image" / f"g{number}.png")
                (place / "mask").mkdir(exist_ok=True)
                Image.fromarray(mask).save(place / "mask" / f"g{number}.png")


def prostate(root):
    for site, word in (("BIDMC", "segmentation"), ("BMC", "Segmentation")):
        for number in range(5):
            volume(root / site / f"Case0{number}.nii.gz", RANDOM.integers(0, 900, (8, 7, 4)).astype(np.int16))
            volume(root / site / f"Case0{number}_{word}.nii.gz", RANDOM.integers(0, 3, (8, 7, 4)).astype(np.uint8))


def fets2022(root):
    names = [(1 + number // 3, f"FeTS2022_0000{number}") for number in range(6)]
    (root / "partitioning_1.csv").write_text("Partition_ID,Subject_ID\n" + "".join(f"{a},{b}\n" for a, b in names))
    for _, name in names:
        for kind in ("t1", "t1ce", "t2", "flair"):
            volume(root / name / f"{name}_{kind}.nii.gz", RANDOM.integers(0, 2000, (6, 5, 4)).astype(np.int16))
        volume(root / name / f"{name}_seg.nii.gz", RANDOM.choice(np.array([0, 1, 2, 4], np.uint8), (6, 5, 4)))


def ixi(root):
    rows = ["Patient ID,Split"]
    for number, hospital in enumerate(["Guys"] * 3 + ["HH"] * 3, start=1):
        name = f"IXI{number:03d}-{hospital}-0{number}"
        volume(root / name / "T1" / f"{name}_image.nii.gz", RANDOM.normal(size=(6, 5, 4)).astype(np.float32))
        volume(root / name / "label" / f"{name}_label.nii.gz", RANDOM.integers(0, 2, (6, 5, 4)).astype(np.uint8))
        rows.append(f"{number},{'test' if number % 3 == 0 else 'train'}")
    (root / "metadata_tiny.csv").write_text("\n".join(rows))


CASES = {
    "PACS": (styles(("art_painting", "cartoon"), ("dog", "elephant")), ("art_painting", "cartoon"), 2, [8, 2], ()),
    "Office-Home": (styles(("Art", "Real World"), ("Bed", "Mug")), ("Art", "Real World"), 2, [8, 2], ()),
    "VLCS": (styles(("Caltech101", "SUN09"), ("bird", "car")), ("Caltech101", "SUN09"), 2, [8, 2], ()),
    "TerraIncognita": (
        styles(("location_100", "location_38"), ("cat", "empty")), ("location_38", "location_100"), 2, [8, 2], (),
    ),
    "camelyon17": (camelyon17, ("hospital_0", "hospital_1"), 2, [8, 4], (3, 6, 6)),
    "cifar10-c": (cifar10_c, tuple(sorted(arrange.CORRUPTIONS)), 10, [16, 4], (3, 32, 32)),
    "femnist": (femnist, ("f0001", "f0002"), 62, [4, 4], (1, 28, 28)),
    "feddg-fundus": (fundus, ("Domain1", "Domain2"), 3, [3, 3], (3, 384, 384)),
    "feddg-prostate": (prostate, ("BIDMC", "BMC"), 2, [4, 1], (1, 64, 64, 64)),
    "fets2022": (fets2022, ("institution-1", "institution-2"), 4, [2, 1], (4, 96, 96, 96)),
    "fed-ixi": (ixi, ("Guys", "HH"), 2, [2, 1], (1, 48, 48, 48)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", CASES)
def test_data_are_read_as_the_page_says(tmp_path, name):
    write, clients, classes, counts, shape = CASES[name]
    published, out = tmp_path / "published", tmp_path / "arranged"
    published.mkdir(), out.mkdir()
    write(published)
    _, *words = shlex.split(dict(COMMANDS)[name])
    options = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    options = {key: int(value) if value.isdigit() else value for key, value in options.items()}
    if name in arrange.ARRANGE:
        arrange.ARRANGE[name](published, out)
    data = load_federation(str(out if name in arrange.ARRANGE else published), DataSpec(**options))
    assert (data.names, data.classes) == (clients, classes)
    assert [[len(split) for split in (client.train, client.test)] for client in data.clients] == [counts] * len(clients)
    assert not shape or data.sample_shape == shape


def test_every_data_set_of_the_page_is_read_in_a_test():
    assert {name for name, _ in COMMANDS} == CASES.keys()


def test_values_are_those_of_the_publisher(tmp_path):
    for name in ("cifar10-c", "feddg-fundus", "feddg-prostate", "fets2022"):
        (tmp_path / name).mkdir(), (tmp_path / f"{name}-out").mkdir()
        CASES[name][0](tmp_path / name)
        arrange.ARRANGE[name](tmp_path / name, tmp_path / f"{name}-out")
    seen = []
    for place, corruption in enumerate(arrange.CORRUPTIONS):
        with np.load(tmp_path / "cifar10-c-out" / f"{corruption}.npz") as arrays:
            x = np.concatenate([arrays["x_train"], arrays["x_test"]])
            assert (set(x[..., 0].flat), set(x[..., 2].flat)) == ({arrange.SEVERITY - 1}, {place})
            assert np.array_equal(x[:, 0, 0, 1] % 10, np.concatenate([arrays["y_train"], arrays["y_test"]]))
            seen += x[:, 0, 0, 1].tolist()
    assert sorted(seen) == [*range(100)]
    mask = np.asarray(Image.open(tmp_path / "feddg-fundus-out" / "Domain1" / "train" / "masks" / "g0.png"))
    assert np.bincount(mask.flat).tolist() == [300, 84, 16]
    was, now = (
        np.asarray(nibabel.load(tmp_path / place).dataobj)
        for place in ("feddg-prostate/BMC/Case01_Segmentation.nii.gz", "feddg-prostate-out/BMC/masks/Case01.nii.gz")
    )
    assert np.array_equal(now, was > 0)
    patient, made = tmp_path / "fets2022" / "FeTS2022_00004", tmp_path / "fets2022-out" / "institution-2"
    channels, mask = (nibabel.load(made / kind / "FeTS2022_00004.nii.gz") for kind in ("images", "masks"))
    t2 = nibabel.load(patient / "FeTS2022_00004_t2.nii.gz")
    assert np.array_equal(np.asarray(channels.dataobj)[..., 2], np.asarray(t2.dataobj))
    assert np.array_equal(channels.affine, t2.affine)
    tumor = np.asarray(nibabel.load(patient / "FeTS2022_00004_seg.nii.gz").dataobj)
    assert np.array_equal(np.asarray(mask.dataobj), np.where(tumor == 4, 3, tumor))
