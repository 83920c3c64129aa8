"""Fetching from a server in this process: whole, resumed, cut, refused, wrong; and from a stand-in for the hub."""

import errno
import hashlib
import io
import socket
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedshift.data import downloads as module
from fedshift.data.datasets._card import Card, Remote
from fedshift.data.downloads import fetch
from fedshift.data.files.listing import find_clients
from fedshift.utils.errors import FedshiftError, UsageError

CONTENT = np.random.default_rng(0).bytes(300_000)


class Server(ThreadingHTTPServer):
    """Serves CONTENT at /file.bin and notes what was asked; ``ranges``: whether it answers a part by a part."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []
        self.ranges, self.length, self.status, self.cut, self.shift = True, True, 200, 0, 0
        self.content = CONTENT

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        content, status, start = self.server.content, self.server.status, 0
        if status == 200 and wanted and self.server.ranges:
            start, status = int(wanted.removeprefix("bytes=").removesuffix("-")) + self.server.shift, 206
            if start >= len(content):
                status = 416
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if status >= 400:
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.server.length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : self.server.cut or None])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def card_of(url: str, **facts) -> Card:
    remote = Remote(url=url, name="part/file.bin", **{"sha256": hashlib.sha256(CONTENT).hexdigest()} | facts)
    return card(remotes=(remote,))


def card(**facts) -> Card:
    return Card(
        title="t", clients=("a",), classes=2, samples="s", license="l", source="s",
        homepage="https://publisher.example", layout="file.bin", **facts,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "bench" / "part" / "file.bin"


def begin(place: Path, content: bytes) -> Path:
    """Leave ``content`` as what an earlier fetching brought."""
    part = place.with_name("file.bin.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(content)
    return part


@pytest.mark.parametrize(
    "checksums",
    [{}, {"sha256": None, "md5": hashlib.md5(CONTENT).hexdigest().upper()}, {"sha256": None}, {"size": len(CONTENT)}],
)
def test_a_file_is_fetched_whole_and_nothing_else_is_left(server, tmp_path, place, checksums):
    heard = []
    files = fetch("bench", card_of(server.url, **checksums), tmp_path, progress=lambda *news: heard.append(news))
    assert files == [place]
    assert place.read_bytes() == CONTENT
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [place]
    assert heard[-1] == ("file.bin", len(CONTENT), len(CONTENT))


def test_a_server_that_does_not_say_how_much_is_believed_at_the_end(server, tmp_path, place):
    server.length, heard = False, []
    fetch("bench", card_of(server.url), tmp_path, progress=lambda *news: heard.append(news))
    assert place.read_bytes() == CONTENT
    assert heard[-1] == ("file.bin", len(CONTENT), 0)


def test_a_file_that_is_there_and_right_is_not_asked_for(server, tmp_path, place):
    place.parent.mkdir(parents=True)
    place.write_bytes(CONTENT)
    before = place.stat().st_mtime_ns
    assert fetch("bench", card_of(server.url), tmp_path) == [place]
    assert (server.asked, place.stat().st_mtime_ns) == ([], before)


def test_a_file_that_is_there_and_wrong_is_left_alone_and_named(server, tmp_path, place):
    place.parent.mkdir(parents=True)
    place.write_bytes(b"my own")
    with pytest.raises(
        FedshiftError, match=r"file.bin is not the published file \(its sha256 is .*, published is .*\): move"
    ):
        fetch("bench", card_of(server.url), tmp_path)
    assert (server.asked, place.read_bytes()) == ([], b"my own")


def test_a_cut_connection_is_an_error_and_the_next_fetching_goes_on_from_there(server, tmp_path, place):
    server.cut = 100_000
    with pytest.raises(FedshiftError) as cut:
        fetch("bench", card_of(server.url), tmp_path)
    assert server.url in str(cut.value)
    assert "the connection was cut after 100000 of 300000 bytes" in str(cut.value)
    assert "get it by hand (see https://publisher.example) and put it at " + str(place) in str(cut.value)
    assert not place.exists()
    server.cut, heard = 0, []
    fetch("bench", card_of(server.url), tmp_path, progress=lambda *news: heard.append(news))
    assert place.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-"]
    assert heard[0][1] > 100_000
    assert heard[-1] == ("file.bin", len(CONTENT), len(CONTENT))


def test_a_server_that_sends_no_parts_sends_the_whole_again(server, tmp_path, place):
    begin(place, b"x" * 70_000)
    server.ranges = False
    fetch("bench", card_of(server.url), tmp_path)
    assert place.read_bytes() == CONTENT
    assert server.asked == ["bytes=70000-"]


@pytest.mark.parametrize("size", [len(CONTENT), len(CONTENT) + 5])
def test_a_part_as_long_as_the_file_or_longer_is_begun_anew_where_the_server_has_no_more(server, tmp_path, place, size):
    begin(place, b"x" * size)
    fetch("bench", card_of(server.url), tmp_path)
    assert place.read_bytes() == CONTENT
    assert server.asked == [f"bytes={size}-", None]


def test_a_part_that_is_whole_by_its_published_size_is_taken_without_asking(server, tmp_path, place):
    begin(place, CONTENT)
    fetch("bench", card_of(server.url, size=len(CONTENT)), tmp_path)
    assert (place.read_bytes(), server.asked) == (CONTENT, [])


def test_another_part_than_was_asked_for_is_refused(server, tmp_path, place):
    part = begin(place, CONTENT[:1000])
    server.shift = 7
    with pytest.raises(FedshiftError, match="asked for bytes from 1000, the server sent others"):
        fetch("bench", card_of(server.url), tmp_path)
    assert part.read_bytes() == CONTENT[:1000]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"sha256": "0" * 64}, f"its sha256 is {hashlib.sha256(CONTENT).hexdigest()}, published is {'0' * 64}"),
        ({"sha256": None, "md5": "1" * 32}, f"its md5 is {hashlib.md5(CONTENT).hexdigest()}, published is {'1' * 32}"),
        ({"size": 12}, "it has 300000 bytes, published are 12"),
    ],
)
def test_a_file_that_is_not_the_published_one_is_not_kept(server, tmp_path, place, facts, said):
    with pytest.raises(FedshiftError) as wrong:
        fetch("bench", card_of(server.url, **facts), tmp_path)
    assert said in str(wrong.value)
    assert server.url in str(wrong.value)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_refusal_of_the_server_is_told(server, tmp_path):
    server.status = 404
    with pytest.raises(
        FedshiftError, match=r"file.bin cannot be fetched: the server answers 404 Not Found. Try later, or get"
    ):
        fetch("bench", card_of(server.url), tmp_path)


def test_no_server_is_told(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/file.bin"
        with pytest.raises(FedshiftError, match=r"127.0.0.1:[0-9]+/file.bin cannot be fetched: .*refused.*Try again"):
            fetch("bench", card_of(url), tmp_path)


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/file.bin"
        with pytest.raises(FedshiftError, match=r"cannot be fetched: .*timed out"):
            fetch("bench", card_of(url), tmp_path)


def test_a_full_disk_is_told_and_what_came_is_kept(server, tmp_path, place, monkeypatch):
    class Full(io.FileIO):
        def write(self, content):
            if self.tell() > 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content[:1000])

    usual = Path.open

    def opened(path, mode="r", *rest, **named):
        return Full(path, mode) if path.suffix == ".part" else usual(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(FedshiftError, match=r"cannot write .*file.bin.part: No space left on device. Make room"):
        fetch("bench", card_of(server.url), tmp_path)
    monkeypatch.undo()
    fetch("bench", card_of(server.url), tmp_path)
    assert (place.read_bytes(), server.asked) == (CONTENT, [None, "bytes=1000-"])


def test_a_place_that_cannot_be_written_is_told(server, tmp_path):
    (tmp_path / "bench").write_text("a file where a directory should be")
    with pytest.raises(FedshiftError, match=r"cannot write .*file.bin.part: .*choose another directory \(root\)"):
        fetch("bench", card_of(server.url), tmp_path)


def test_what_cannot_be_fetched_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="'bench' is made by fedshift itself: there is nothing to fetch"):
        fetch("bench", card(generated=True), tmp_path)
    with pytest.raises(
        UsageError, match=r"cannot be fetched: get it from https://publisher.example and put into .*bench file.bin"
    ):
        fetch("bench", card(), tmp_path)
    with pytest.raises(UsageError, match=r"'bench' cannot be fetched from huggingface\.co: get it"):
        fetch("bench", card_of("http://127.0.0.1:9/file.bin"), tmp_path, hub=True)


class ClassLabel:
    def __init__(self, *names):
        self.names = list(names)


class Rows(list):
    """As much of a data set of the package ``datasets`` as is used: rows, and features by column."""

    def __init__(self, features, rows):
        super().__init__(rows)
        self.features = features

    def cast_column(self, column, feature):
        assert feature == ("Image", False)
        assert column in self.features
        return self


def encoded(level: int, form: str = "PNG", mode: str = "RGB") -> dict[str, object]:
    with io.BytesIO() as file:
        Image.new(mode, (4, 3), level if mode == "L" else (level, 0, 0)).save(file, form)
        return {"bytes": file.getvalue(), "path": None}


@pytest.fixture
def hub(monkeypatch):
    """A package ``datasets`` whose data sets are what is put into the dictionary that the test gets."""
    known: dict[tuple[str, ...], object] = {}

    def load_dataset(*name):
        if name not in known:
            raise ConnectionError(f"no {name}")
        return known[name]

    package = types.SimpleNamespace(load_dataset=load_dataset, Image=lambda *, decode: ("Image", decode))
    monkeypatch.setitem(sys.modules, "datasets", package)
    return known


def test_domains_of_the_hub_become_a_directory_of_the_same_image_files(hub, tmp_path):
    features = {"image": None, "domain": None, "label": ClassLabel("dog", "cat")}
    pictures = [encoded(10), encoded(20, "JPEG"), encoded(30)]
    rows = [
        {"image": picture, "domain": domain, "label": label}
        for picture, domain, label in zip(pictures, ("photo", "photo", "sketch"), (0, 1, 1), strict=True)
    ]
    hub["lab/pets",] = {"train": Rows(features, rows)}
    heard = []
    files = fetch("pets", card(hub="lab/pets"), tmp_path, progress=lambda *news: heard.append(news))
    tree = tmp_path / "pets" / "hub"
    assert files == [tree]
    assert list(find_clients(tree)) == ["photo", "sketch"]
    wanted = ["photo/dog/000000.png", "photo/cat/000001.jpeg", "sketch/cat/000002.png"]
    assert {str(file.relative_to(tree)) for file in tree.rglob("*.*")} == set(wanted)
    for name, picture in zip(wanted, pictures, strict=True):
        assert (tree / name).read_bytes() == picture["bytes"]
    assert heard[-1] == ("images", 3, 3)
    hub.clear()  # what is there is not fetched again
    assert fetch("pets", card(hub="lab/pets"), tmp_path) == [tree]


def test_centers_and_splits_of_the_hub_become_folders(hub, tmp_path):
    features = {"image": None, "center": None, "label": None}
    hub["lab/skin",] = {
        split: Rows(features, [{"image": encoded(level), "center": 5, "label": 7}])
        for split, level in (("train", 1), ("test", 2))
    }
    fetch("skin", card(hub="lab/skin"), tmp_path)
    tree = tmp_path / "skin" / "hub"
    assert {str(file.relative_to(tree)) for file in tree.rglob("*.png")} == {
        "5/train/7/000000.png",
        "5/test/7/000000.png",
    }


@pytest.mark.parametrize(("mode", "column", "shape"), [("L", "image", (2, 3, 4)), ("RGB", "img", (2, 3, 4, 3))])
def test_a_single_data_set_of_the_hub_becomes_a_file_of_arrays(hub, tmp_path, mode, column, shape):
    features = {column: None, "label": ClassLabel("a", "b")}
    hub["lab/digits", "cropped"] = {
        split: Rows(features, [{column: encoded(level + label, mode=mode), "label": label} for label in (1, 0)])
        for split, level in (("train", 100), ("test", 200), ("extra", 50))
    }
    files = fetch("digits", card(hub="lab/digits:cropped"), tmp_path, hub=True)
    assert files == [tmp_path / "digits" / "digits.npz"]
    with np.load(files[0]) as arrays:
        assert sorted(arrays) == ["x_test", "x_train", "y_test", "y_train"]
        assert arrays["x_train"].shape == shape
        assert arrays["x_train"].dtype == np.uint8
        assert arrays["y_test"].tolist() == [1, 0]
        assert arrays["x_test"].reshape(2, 12, -1)[:, :, 0].tolist() == [[201] * 12, [200] * 12]


def test_without_the_package_a_person_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UsageError, match=r"'pets' from huggingface.co needs the package datasets: pip install 'fedshift\[hub\]'"
    ):
        fetch("pets", card(hub="lab/pets"), tmp_path)


def test_what_the_hub_does_not_give_is_told(hub, tmp_path):
    with pytest.raises(
        FedshiftError, match=r"datasets/lab/pets cannot be fetched: no .*get the files from https://publisher"
    ):
        fetch("pets", card(hub="lab/pets"), tmp_path)
    hub["lab/pets",] = {"train": Rows({"image": None, "domain": None}, [{"image": encoded(1), "domain": "a"}])}
    with pytest.raises(FedshiftError, match=r"is not as expected \('no column label or fine_label'\)"):
        fetch("pets", card(hub="lab/pets"), tmp_path)
    assert not (tmp_path / "pets" / "hub").exists()
