"""Folders of .npz files: what is read, and what is refused by the name of the file."""

import pickle
import zipfile

import numpy as np
import pytest

from fedshift.data.assembly import read_folder
from fedshift.utils.errors import UsageError


def test_a_folder_holds_the_same_federation_as_its_arrays(tiny, tiny_folder):
    read = read_folder(tiny_folder)
    assert read.fingerprint == tiny.fingerprint
    assert (read.name, read.names, read.classes) == ("tiny", ("ann", "bob", "cid"), 3)
    assert read_folder(tiny_folder, classes=5).classes == 5
    (tiny_folder / "bob.npz").write_text("nothing")
    assert read_folder(tiny_folder, ["cid"]).names == ("cid",)


def flip(file, start, stop):
    content = bytearray(file.read_bytes())
    content[start:stop] = bytes(byte ^ 255 for byte in content[start:stop])
    file.write_bytes(content)


def compress(file):
    with np.load(file) as packed:
        np.savez_compressed(file, **packed)


def add_text(file):
    with zipfile.ZipFile(file, "a") as packed:
        packed.writestr("y_train", "0 1 2")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file, _: file.write_text("x_train,y_train\n"), "without pickle (File is not a zip file): it is"),
        (lambda file, _: file.write_bytes(file.read_bytes()[:-200]), "without pickle (File is not a zip file"),
        (lambda file, _: file.write_bytes(pickle.dumps({"x_train": 0})), "without pickle (File is not a zip file"),
        (lambda _, rewrite: rewrite("bob", y_train=np.array([object()] * 17)), "without pickle (Object"),
        (lambda file, _: flip(file, 1000, 1001), "without pickle (Bad CRC-32"),
        (lambda file, _: (compress(file), flip(file, 200, 400)), "of numbers, without pickle"),
        (lambda _, rewrite: rewrite("bob", y_test=None), "has no array 'y_test', or file test/y.npy (it has x_tr"),
        (lambda file, rewrite: (rewrite("bob", y_train=None), add_text(file)), "labels: |S5 (b'0 1 2') where numbers"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_by_name(tiny_folder, rewrite, spoil, said):
    file = tiny_folder / "bob.npz"
    spoil(file, rewrite)
    with pytest.raises(UsageError) as refused:
        read_folder(tiny_folder)
    assert str(file) in str(refused.value)
    assert said in str(refused.value)


def test_a_pickle_inside_is_never_run(tiny_folder, rewrite, tmp_path):
    class Trap:
        def __reduce__(self):
            return (type(tmp_path).touch, (tmp_path / "ran",))

    rewrite("bob", x_train=np.array([Trap()], dtype=object))
    with pytest.raises(UsageError, match="without pickle"):
        read_folder(tiny_folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], r"holds no data: give a directory with client/class/\*.png"),
        (["0.png", "a/cat/.0.png", ".a/cat/0.png", "a/cat/0.txt"], "holds no data"),
        (["a.npz", "a.csv"], "holds arrays and tables: put each kind into its own directory"),
        (["north/cat/1.png", "a.npz"], "holds arrays and images or recordings in folders: put each kind"),
        (["north/cat/1.png", "a.csv"], "holds images or recordings in folders and tables: put each kind"),
    ],
)
def test_a_folder_without_data_or_with_two_kinds_of_data_is_refused(tmp_path, files, said):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"a,y\n1,0\n")
    with pytest.raises(UsageError, match=said):
        read_folder(tmp_path)


def test_a_name_that_cannot_be_shown_is_refused(tiny_folder):
    (tiny_folder / "bob.npz").rename(tiny_folder / "bob\udcf6.npz")
    with pytest.raises(UsageError, match=r"the name 'bob\\udcf6' of a client"):
        read_folder(tiny_folder).check()
