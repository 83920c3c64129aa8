"""Images that cannot be read, and the cache of those that can."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedshift.data.decoding.images as image_decoding
import fedshift.data.files.image_store as image_store
from fedshift.data.assembly import read_source
from fedshift.data.decoding import signals
from fedshift.data.decoding import volumes as volume_decoding
from fedshift.data.decoding.images import Unreadable, explain_unreadable
from fedshift.data.source import ReadOptions
from fedshift.utils.errors import UsageError
from tests.data.files.conftest import noise, refused, samples, write

# Files that cannot be read


def text(file: Path):
    file.write_text("not an image")


def nothing(file: Path):
    file.write_bytes(b"")


def cut_short(file: Path):
    write(file, noise(40, 60, 3))
    file.write_bytes(file.read_bytes()[:-2000])


def cut_header(file: Path):
    file.write_bytes(file.read_bytes()[:20])


def damaged(file: Path):
    pixels = bytearray(file.read_bytes())
    start = pixels.index(b"IDAT") + 4
    pixels[start : start + 8] = bytes(8)
    file.write_bytes(pixels)


def of_another_format(file: Path):
    Image.new("L", (6, 4)).save(file, format="TGA")


def dangling(file: Path):
    file.unlink()
    file.symlink_to(file.with_name("gone.png"))


def large(file: Path):
    Image.new("1", (10000, 9000)).save(file)  # 90 million pixels, more than Pillow's limit of 89


def bomb(file: Path):
    Image.new("1", (20000, 9000)).save(file)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (text, "is not an image in format PNG, JPEG, TIFF, BMP"), (nothing, "is empty"), (cut_short, "truncated"),
        (cut_header, "Truncated File Read"), (damaged, "broken"), (of_another_format, "is not an image in format"),
        (dangling, "No such file or directory"), (large, "could be decompression bomb"),
        (bomb, "could be decompression bomb"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_by_name_or_left_out(read, root, spoil, why):
    bad = root / "color" / "cat" / "0.png"
    spoil(bad)
    for _ in range(2):  # decoded, and from the cache
        said = refused(read, image_size=4)
        assert said.startswith(f"1 of 22 files cannot be read: {bad}: ")
        assert why in said
        assert said.endswith("; repair or remove them, or leave them out (on_data_error='warn')")
        data = read(image_size=4, on_data_error="ignore")
        assert data.note == "21 images of 2 clients"
        assert "client 'color': 1 of 12 files cannot be read, left out (color/cat/0.png: " in data.faults[0]
        assert why in data.faults[0]
        rows = torch.cat([data.client("color").train.rows, data.client("color").test.rows])
        assert sorted(rows.tolist()) == list(range(1, 12))
        assert data.client("color").test.y.tolist() == [0, 1]


def test_of_many_broken_files_five_are_named_and_all_are_counted(read, root):
    for file in (root / "gray" / "cat").iterdir():
        text(file)
    cut_short(root / "color" / "cat" / "0.png")
    cut_short(root / "color" / "cat" / "4.PNG")
    said = refused(read, image_size=4)
    assert said.startswith("7 of 22 files cannot be read: ")
    assert " and 2 more; repair" in said
    assert said.count(str(root)) == 5


def test_a_client_of_broken_files_alone_is_refused(read, root):
    for file in (root / "gray").rglob("*.*"):
        text(file)
    for _ in range(2):  # decoded, and from the cache
        assert refused(read).startswith("10 of 22 files")
        said = refused(read, on_data_error="ignore")
        assert "client 'gray' has no sample for train among its 10: none of them can be read" in said
        assert "(gray/cat/0.png: is not an image in format PNG" in said
    assert read(domains=("color",)).note == "12 images of 1 clients"


def test_a_mended_file_is_read(read, root, content):
    bad = root / "gray" / "cat" / "0.png"
    good = bad.read_bytes()
    text(bad)
    refused(read)
    bad.write_bytes(good)
    client = read().client("gray")
    assert samples(client.train) + samples(client.test) == content("gray")


# The cache


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Names of files in the order in which they are decoded."""
    names: list[str] = []
    decode = image_store.decode_image

    def counted(file, **form):
        names.append(file.name)
        return decode(file, **form)

    monkeypatch.setattr(image_store, "decode_image", counted)
    return names


def test_a_second_reading_opens_no_image(read, decoded, monkeypatch):
    first = read()
    assert len(decoded) == 22
    monkeypatch.setattr(Image, "open", None)
    second = read()
    assert len(decoded) == 22
    assert second.fingerprint == first.fingerprint
    assert (second.notices, second.note) == (first.notices, first.note)


def test_a_changed_a_new_and_a_removed_file_are_noticed(read, root, decoded):
    read()
    stamp = (root / "gray" / "cat" / "0.png").stat().st_mtime_ns
    os.utime(root / "gray" / "cat" / "0.png", ns=(stamp, stamp + 1))
    read()
    assert len(decoded) == 22 + 10  # the other client is not decoded again
    write(root / "gray" / "cat" / "new.png", noise(4, 6, key=99))
    assert read().note == "23 images of 2 clients"
    assert len(decoded) == 32 + 11
    (root / "gray" / "cat" / "new.png").unlink()
    read()
    assert len(decoded) == 32 + 11  # known from before


def test_another_size_is_decoded_again_and_another_choice_of_clients_is_not(read, decoded):
    read()
    read(domains=("gray",), classes=7, on_data_error="ignore")
    assert len(decoded) == 22
    read(image_size=5)
    assert len(decoded) == 44


def test_equal_stamps_in_another_directory_are_other_images(read, root, tmp_path):
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


def test_a_reading_that_was_stopped_leaves_nothing_behind(read, tmp_path, decoded):
    def stop(what, done, total):
        if what == "images of gray":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(progress=stop)
    entries = list((tmp_path / "cache" / "images").iterdir())
    assert [len(list(entry.iterdir())) for entry in entries] == [2]  # the client that was finished, whole
    read()
    assert len(decoded) == 22 + 10


@pytest.mark.parametrize("spoil", [
    lambda entry: (entry / "facts.json").unlink(),
    lambda entry: (entry / "facts.json").write_text("{"),
    lambda entry: (entry / "facts.json").write_text("[]"),
    lambda entry: (entry / "facts.json").write_text(json.dumps({"other": 1})),
    lambda entry: (entry / "pixels.npy").unlink(),
    lambda entry: (entry / "pixels.npy").write_bytes((entry / "pixels.npy").read_bytes()[:-1]),
])  # fmt: skip
def test_a_damaged_entry_is_made_again(read, tmp_path, decoded, spoil):
    fingerprint = read().fingerprint
    for entry in (tmp_path / "cache" / "images").iterdir():
        spoil(entry)
    assert read().fingerprint == fingerprint
    assert len(decoded) == 44
    assert read().fingerprint == fingerprint
    assert len(decoded) == 44


def test_threads_that_read_at_the_same_time_all_get_the_same(read):
    with ThreadPoolExecutor(4) as pool:
        readings = list(pool.map(lambda _: read(), range(4)))
    assert len({data.fingerprint for data in readings}) == 1
    assert all(data.notices == () for data in readings)


def test_an_entry_that_another_process_finished_first_is_used(read, tmp_path):
    fingerprint = read(cache=tmp_path / "other").fingerprint

    def publish(what, done, total):
        if what.startswith("images"):
            for entry in (tmp_path / "other" / "images").iterdir():
                target = tmp_path / "cache" / "images" / entry.name
                if not target.exists():
                    entry.rename(target)

    assert read(progress=publish).fingerprint == fingerprint
    names = [entry.name for entry in (tmp_path / "cache" / "images").iterdir()]
    assert len(names) == 2
    assert not any(name.endswith(".tmp") for name in names)


def test_without_a_cache_that_can_be_written_images_are_in_memory(read, tmp_path):
    (tmp_path / "occupied").write_text("a file where the cache would be")
    data = read(cache=tmp_path / "occupied")
    assert data.notices == (f"{tmp_path / 'occupied'} cannot be written (Not a directory): images are kept in memory",)
    assert data.fingerprint == read().fingerprint


def test_a_place_that_something_else_takes_is_left_alone(read, tmp_path):
    fingerprint = read(domains=("gray",)).fingerprint
    (entry,) = (tmp_path / "cache" / "images").iterdir()
    entry.rename(tmp_path / "elsewhere")
    entry.write_text("something else")
    data = read(domains=("gray",))
    assert data.fingerprint == fingerprint
    assert data.notices[-1].endswith(f"({entry} cannot be read): images are kept in memory")
    assert [file.read_text() for file in (tmp_path / "cache" / "images").iterdir()] == ["something else"]


def test_a_disk_that_is_full_is_survived(read, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    for i in range(4):
        write(tmp_path / "deep" / "scan" / "only" / f"{i}.png", noise(4, 6, key=i, top=4096, dtype=np.uint16))
    whole = read(tmp_path / "deep")
    monkeypatch.setattr(os, "fsync", full)
    data = read(tmp_path / "deep", cache=tmp_path / "full")
    assert "No space left on device" in data.notices[-1]
    assert data.fingerprint == whole.fingerprint
    assert list((tmp_path / "full" / "images").iterdir()) == []


def test_progress_is_told_of_every_client(read, root):
    heard = []
    read(progress=lambda *told: heard.append(told))
    assert heard == [
        ("headers of color", 12, 12), ("headers of gray", 10, 10), ("images of color", 12, 12),
        ("images of gray", 10, 10),
    ]  # fmt: skip
    heard.clear()
    for i in range(6, 26):
        write(root / "gray" / "cat" / f"{i}.png", noise(4, 6, key=i))
    read(progress=lambda *told: heard.append(told))
    assert heard == [(what, done, 30) for what in ("headers of gray", "images of gray") for done in (16, 30)]


def test_a_file_that_cannot_be_opened_now_is_no_broken_file_and_is_not_remembered_as_one(tmp_path, monkeypatch):
    for label in ("cat", "dog"):
        (tmp_path / "own" / "north" / label).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(noise(6, 6)).save(tmp_path / "own" / "north" / label / f"{number}.png")
    opened = image_decoding.open_regular

    def refused(file):
        if file.name == "2.png":
            raise PermissionError(13, "Permission denied")
        return opened(file)

    reading = ReadOptions(cache=tmp_path / "cache", on_data_error="ignore")
    with monkeypatch.context() as patched:
        patched.setattr(image_decoding, "open_regular", refused)
        with pytest.raises(UsageError, match=r"2\.png cannot be read now: Permission denied"):
            read_source(tmp_path / "own", reading)
    assert sum(len(split) for split in read_source(tmp_path / "own", reading).clients[0].splits.values()) == 8


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


@pytest.fixture
def images(tmp_path) -> Path:
    """The directory of decoded images of what `read` reads."""
    return tmp_path / "cache" / "images"


@pytest.fixture
def one_program(monkeypatch):
    """Call it to begin another program, which has mapped nothing yet."""

    def begin():
        monkeypatch.setattr(image_store, "_mapped", set())

    begin()
    return begin


def used(images: Path, *names: str) -> None:
    """Make the entries ``names`` the most recently used ones of the directory, in this order."""
    for second, name in enumerate(names, start=1):
        os.utime(images / name, (second, second))


def test_entries_least_recently_used_make_room_for_a_new_one(read, root, tmp_path, images, monkeypatch, one_program):
    first, second = (entry.place.name for _ in [read()] for entry in image_store.entries(images))
    used(images, second, first)
    one_program()
    sizes = {entry.place.name: entry.size for entry in image_store.entries(images)}
    new = write(tmp_path / "new" / "a" / "x" / "0.png", noise(6, 6)).parent
    for number in range(1, 4):
        write(new / f"{number}.png", noise(6, 6, key=number))
    monkeypatch.setenv(image_store.VARIABLE, str((sizes[first] + 4 * 36) / 1e9))
    read(tmp_path / "new")
    left = [entry.place.name for entry in image_store.entries(images)]
    assert left[0] == first
    assert second not in left
    assert len(left) == 2


def test_reading_from_the_cache_makes_an_entry_the_last_used(read, images):
    read()
    place = image_store.entries(images)[0].place
    used(images, *(entry.place.name for entry in image_store.entries(images)))
    read(domains=("gray",))
    read(domains=("color",))
    assert [entry.used > 10**12 for entry in image_store.entries(images)] == [True, True]
    used(images, place.name)
    assert image_store.entries(images)[0].place == place


def test_what_the_program_itself_uses_is_not_removed(read, root, images, monkeypatch, one_program, decoded):
    monkeypatch.setenv(image_store.VARIABLE, "0")
    fingerprint = read().fingerprint
    assert len(image_store.entries(images)) == 2
    assert read().fingerprint == fingerprint
    assert len(decoded) == 22
    one_program()
    read(image_size=5)
    assert len(image_store.entries(images)) == 2  # of the other size alone


def test_an_entry_that_is_mapped_stays_readable_when_it_is_removed(read, images):
    fingerprint, data = read().fingerprint, read()
    image_store.clear(images)
    assert list(images.iterdir()) == []
    assert data.fingerprint == fingerprint


def test_what_a_crash_left_is_removed_after_a_day_and_what_is_being_written_is_not(read, images, monkeypatch):
    for name in ("old", "young"):
        (images / f"{name}.0.tmp").mkdir(parents=True)
        (images / f"{name}.0.tmp" / "pixels.npy").write_bytes(b"0")
    for path in (images / "old.0.tmp", images / "old.0.tmp" / "pixels.npy"):
        os.utime(path, (0, 0))
    os.utime(images / "young.0.tmp", (0, 0))  # a file in it was written a moment ago
    read()
    assert [path.name for path in images.iterdir() if path.suffix == ".tmp"] == ["young.0.tmp"]


def test_an_entry_that_is_removed_while_it_is_written_leaves_the_images_in_memory(read, images):
    fingerprint = read().fingerprint
    image_store.clear(images)
    data = read(progress=lambda what, *_: what.startswith("images") and image_store.clear(images))
    assert data.fingerprint == fingerprint


@pytest.mark.parametrize("given", ["-1", "nan", "much"])
def test_a_limit_that_is_no_number_is_refused(read, given, monkeypatch):
    monkeypatch.setenv(image_store.VARIABLE, given)
    assert refused(read) == f"FEDSHIFT_CACHE_LIMIT={given}: give gigabytes, 0 or more, or inf for no limit"


def test_an_entry_that_cannot_be_renamed_stays(read, images, monkeypatch):
    read()

    def refuse(*_):
        raise PermissionError(13, "in use")

    monkeypatch.setattr(Path, "rename", refuse)
    image_store.clear(images)
    assert len(image_store.entries(images)) == 2
    assert image_store.remove(images / "gone") is False
