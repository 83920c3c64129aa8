"""Images that cannot be read, and the cache of those that can."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedshift.data.decoding.images as image_decoding
from fedshift.data.decoding import signals
from fedshift.data.decoding import volumes as volume_decoding
from fedshift.data.decoding.images import Unreadable, explain_unreadable
from fedshift.data.files import cache
from fedshift.data.readers import folders
from fedshift.utils.errors import UsageError
from tests.data.files.conftest import noise, refused, write

# Files that cannot be read


def text(file: Path):
    file.write_text("not an image")


def cut_short(file: Path):
    write(file, noise(40, 60, 3))
    file.write_bytes(file.read_bytes()[:-2000])


def damage(file: Path):
    pixels = bytearray(file.read_bytes())
    start = pixels.index(b"IDAT") + 4
    pixels[start : start + 8] = bytes(8)
    file.write_bytes(pixels)


def dangle(file: Path):
    file.unlink()
    file.symlink_to(file.with_name("gone.png"))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (text, "is not an image in format PNG, JPEG, TIFF, BMP"),
        (lambda file: file.write_bytes(b""), "is empty"),
        (cut_short, "truncated"),
        (lambda file: file.write_bytes(file.read_bytes()[:20]), "Truncated File Read"),
        (damage, "broken"),
        (lambda file: Image.new("L", (6, 4)).save(file, format="TGA"), "is not an image in format"),
        (dangle, "No such file or directory"),
        (lambda file: Image.new("1", (10000, 9000)).save(file), "could be decompression bomb"),  # Pillow warns
        (lambda file: Image.new("1", (20000, 9000)).save(file), "could be decompression bomb"),  # Pillow refuses
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name_or_left_out(read, root, spoil, why):
    bad = root / "color" / "cat" / "0.png"
    spoil(bad)
    for _ in range(2):  # decoded, and from the cache
        said = refused(read, domains=("color",), image_size=4)
        assert said.startswith(f"1 of 12 files cannot be read: {bad}: ")
        assert why in said
        assert said.endswith("; repair or remove them, or leave them out (on_data_error='warn')")
        data = read(domains=("color",), image_size=4, on_data_error="ignore")
        assert data.note == "11 images of 1 clients"
        assert "client 'color': 1 of 12 files cannot be read, left out (color/cat/0.png: " in data.faults[0]
        assert why in data.faults[0]
        rows = torch.cat([data.client("color").train.rows, data.client("color").test.rows])
        assert sorted(rows.tolist()) == list(range(1, 12))
        assert data.client("color").test.y.tolist() == [0, 1]


def test_a_client_of_broken_files_alone_is_refused(read, root):
    for file in (root / "gray").rglob("*.*"):
        text(file)
    for _ in range(2):  # decoded, and from the cache
        assert refused(read).startswith("10 of 22 files")
        said = refused(read, on_data_error="ignore")
        assert "client 'gray' has no sample for train among its 10: none of them can be read" in said
        assert "(gray/cat/0.png: is not an image in format PNG" in said
    assert read(domains=("color",)).note == "12 images of 1 clients"


# The cache


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Names of files in the order in which they are decoded."""
    names: list[str] = []
    decode = folders.decode
    monkeypatch.setattr(folders, "decode", lambda file, *how: names.append(file.name) or decode(file, *how))
    return names


@pytest.fixture
def entries(tmp_path):
    """The directories of what is kept in the cache."""
    return lambda: [file.parent for file in (tmp_path / "cache" / "images").rglob("output.pkl")]


def test_a_second_reading_opens_no_image(read, decoded, monkeypatch):
    first = read()
    assert len(decoded) == 22
    monkeypatch.setattr(Image, "open", None)
    second = read()
    assert len(decoded) == 22
    assert second.fingerprint == first.fingerprint
    assert (second.notices, second.note) == (first.notices, first.note)


def test_changed_new_removed_and_mended_files_are_noticed(read, root, decoded):
    """The other client is not decoded again."""
    whole = read().fingerprint
    stamp = (root / "gray" / "cat" / "0.png").stat().st_mtime_ns
    os.utime(root / "gray" / "cat" / "0.png", ns=(stamp, stamp + 1))
    read()
    assert len(decoded) == 22 + 10
    write(root / "gray" / "cat" / "new.png", noise(4, 6, key=99))
    assert read().note == "23 images of 2 clients"
    assert len(decoded) == 32 + 11
    text(root / "gray" / "cat" / "new.png")
    refused(read)
    (root / "gray" / "cat" / "new.png").unlink()
    assert read().fingerprint == whole
    assert len(decoded) == 43 + 10  # beside the broken file; those without it are known from before


def test_another_size_or_decoder_is_decoded_again_and_another_choice_of_clients_is_not(read, decoded, monkeypatch):
    read()
    read(domains=("gray",), classes=7, on_data_error="ignore")
    assert len(decoded) == 22
    read(image_size=5)
    assert len(decoded) == 44
    for library in ("pillow 99", "nibabel 99", "our decoders 99"):
        monkeypatch.setattr(cache, "_find_versions", lambda library=library: (library,))
        read()
    assert len(decoded) == 5 * 22


def test_equal_stamps_in_another_directory_are_other_images(read, tmp_path):
    for name, shade in (("one", 10), ("two", 200)):
        for i in range(2):
            os.utime(write(tmp_path / name / "a" / "x" / f"{i}.bmp", np.full((4, 6), shade, np.uint8)), (0, 0))
    assert (read(tmp_path / "one").clients[0].train.x == 10).all()
    assert (read(tmp_path / "two").clients[0].train.x == 200).all()


def test_writing_to_the_array_does_not_reach_the_cache(read):
    before = read()
    fingerprint = before.fingerprint
    before.clients[0].train.store.zero_()
    assert read().fingerprint == fingerprint


def test_a_reading_that_was_stopped_leaves_nothing_behind(read, decoded):
    def stop(what, done, total):
        if what == "images of gray":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(progress=stop)
    read()
    assert len(decoded) == 22 + 10  # the client that was finished is whole


@pytest.mark.parametrize("spoil", [
    lambda entry: (entry / "output.pkl").unlink(),
    lambda entry: (entry / "output.pkl").write_bytes(b""),
    lambda entry: (entry / "output.pkl").write_bytes((entry / "output.pkl").read_bytes()[:-300]),
    lambda entry: (entry / "metadata.json").write_text("{"),
])  # fmt: skip
def test_a_damaged_entry_is_made_again(read, entries, decoded, spoil):
    fingerprint = read().fingerprint
    for entry in entries():
        spoil(entry)
    assert read().fingerprint == fingerprint
    again = len(decoded)
    assert read().fingerprint == fingerprint
    assert len(decoded) == again


def test_threads_that_read_at_the_same_time_all_get_the_same(read):
    with ThreadPoolExecutor(4) as pool:
        readings = list(pool.map(lambda _: read(), range(4)))
    assert len({data.fingerprint for data in readings}) == 1
    assert all(data.notices == () for data in readings)


def test_without_a_cache_that_can_be_written_images_are_in_memory(read, tmp_path):
    (tmp_path / "occupied").write_text("a file where the cache would be")
    data = read(cache=tmp_path / "occupied")
    assert data.notices == (f"{tmp_path / 'occupied'} cannot be written (Not a directory): images are kept in memory",)
    assert data.fingerprint == read().fingerprint


@pytest.mark.filterwarnings("ignore:Unable to cache to disk")
def test_a_disk_that_is_full_is_survived(read, tmp_path, monkeypatch, decoded):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    for i in range(4):
        write(tmp_path / "deep" / "scan" / "only" / f"{i}.png", noise(4, 6, key=i, top=4096, dtype=np.uint16))
    whole = read(tmp_path / "deep")
    decoded.clear()
    monkeypatch.setattr("joblib.numpy_pickle.dump", fail)
    data = read(tmp_path / "deep", cache=tmp_path / "full")
    assert "cannot be written (no space, or no permission to write): images are kept in memory" in data.notices[-1]
    assert data.fingerprint == whole.fingerprint
    assert len(decoded) == 4


def test_progress_is_told_of_every_client(read, root):
    for i in range(6, 14):
        write(root / "gray" / "cat" / f"{i}.png", noise(4, 6, key=i))
    heard = []
    read(progress=lambda *told: heard.append(told))
    assert heard == [
        ("headers of color", 12, 12), ("headers of gray", 16, 18), ("headers of gray", 18, 18),
        ("images of color", 12, 12), ("images of gray", 16, 18), ("images of gray", 18, 18),
    ]  # fmt: skip


def test_a_file_that_cannot_be_opened_now_is_no_broken_file_and_is_not_remembered_as_one(read, monkeypatch):
    opened = image_decoding.open_regular

    def fail(file):
        if file.name == "2.tif":
            raise PermissionError(13, "Permission denied")
        return opened(file)

    with monkeypatch.context() as patched:
        patched.setattr(image_decoding, "open_regular", fail)
        assert "2.tif cannot be read now: Permission denied" in refused(read, on_data_error="ignore")
    assert read(on_data_error="ignore").note == "22 images of 2 clients"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError(errno.EIO, "Input/output error"), UsageError, "s.hea cannot be read now: Input/output error"),
        (MemoryError(), UsageError, "s.hea does not fit into memory"),
        (EOFError(), Unreadable, "is cut short"),
        (FileNotFoundError(errno.ENOENT, "No such file"), Unreadable, "that can be read (No such file)"),
        (ValueError("bad magic"), Unreadable, "is not a WFDB record that can be read (bad magic)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_only_a_file_that_is_damaged_for_good_may_be_left_out(error, kind, said):
    with pytest.raises(kind) as raised, explain_unreadable(Path("s.hea"), "a WFDB record"):
        raise error
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("module", "read", "name"),
    [(volume_decoding, volume_decoding.read_volume_header, "s.nii"), (signals, signals.read_signal_header, "s.hea")],
    ids=["volume", "signal"],
)
def test_a_share_that_is_away_for_a_moment_changes_no_data(module, read, name, monkeypatch, tmp_path):
    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(module, "require_regular", fail)
    with pytest.raises(UsageError, match="cannot be read now: Input/output error"):
        read(tmp_path / name)


# How much the cache may hold


def test_entries_beyond_the_limit_are_removed_but_those_of_this_run(read, entries, tmp_path, decoded, monkeypatch):
    for size in (4, 5):
        read(image_size=size)
    assert len(entries()) == 2 + 4  # headers, which do not depend on the size, and pixels
    monkeypatch.setenv(cache.VARIABLE, "0")
    data = read(image_size=6)
    assert 0 < cache.count_bytes(tmp_path / "cache") < 10**5
    assert len(decoded) == 3 * 22
    read(image_size=6)
    assert len(decoded) == 3 * 22
    cache.clear(tmp_path / "cache")
    assert cache.count_bytes(tmp_path / "cache") == 0
    assert data.fingerprint == read(image_size=6).fingerprint  # what is mapped stays


@pytest.mark.parametrize("given", ["-1", "nan", "much"])
def test_a_limit_that_is_no_number_is_refused(read, given, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, given)
    assert refused(read) == f"FEDSHIFT_CACHE_LIMIT={given}: give gigabytes, 0 or more, or inf for no limit"
