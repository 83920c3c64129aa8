"""Fetching from a server in this process: whole, resumed, cut, refused, wrong."""

import errno
import hashlib
import io
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedshift.data import downloads as module
from fedshift.data.datasets._card import Card, Remote
from fedshift.data.downloads import fetch
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
        return io.BufferedWriter(Full(path, mode)) if path.suffix == ".part" else usual(path, mode, *rest, **named)

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
