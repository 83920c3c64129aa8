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
from fedshift.utils.errors import FedshiftError, UsageError

CONTENT = np.random.default_rng(0).bytes(300_000)
SHA256, MD5 = hashlib.sha256(CONTENT).hexdigest(), hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT at /file.bin and counts how often it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.length, self.status, self.cut = 0, True, 200, len(CONTENT)
        self.url = f"http://127.0.0.1:{self.server_port}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked += 1
        self.send_response(self.server.status)
        if self.server.length:
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: self.server.cut])
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


def card(**facts) -> Card:
    return Card(
        title="t", clients=("a",), classes=2, samples="s", license="l", source="s",
        homepage="https://publisher.example", layout="file.bin", **facts,
    )  # fmt: skip


def fetch(url: str, root: Path, checksum: str = f"sha256:{SHA256}", **options) -> list[Path]:
    return module.fetch(
        "bench", card(remotes=(Remote(url=url, name="part/file.bin", checksum=checksum),)), root, **options
    )


@pytest.fixture
def place(tmp_path) -> Path:
    """Where the file belongs."""
    place = tmp_path / "bench" / "part" / "file.bin"
    place.parent.mkdir(parents=True)
    return place


def list_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("checksum", [f"sha256:{SHA256}", f"md5:{MD5.upper()}", ""])
def test_a_file_is_fetched_whole_once_and_nothing_else_is_left(server, tmp_path, checksum):
    heard = []
    (file,) = fetch(server.url, tmp_path, checksum, progress=lambda *news: heard.append(news))
    assert file == tmp_path / "bench" / "part" / "file.bin"
    assert file.read_bytes() == CONTENT
    assert list_files(tmp_path) == [file]
    assert heard[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert fetch(server.url, tmp_path, checksum) == [file]
    assert server.asked == 1


def test_a_server_that_does_not_say_how_much_is_believed_at_the_end(server, tmp_path):
    server.length, heard = False, []
    (file,) = fetch(server.url, tmp_path, progress=lambda *news: heard.append(news))
    assert file.read_bytes() == CONTENT
    assert heard[-1] == ("file.bin", len(CONTENT), 0)


def test_a_file_that_is_there_and_wrong_is_left_alone_and_named(server, tmp_path, place):
    place.write_bytes(b"my own")
    said = r"file.bin is not the published file \(its sha256 is .*, published is .*\): move"
    with pytest.raises(FedshiftError, match=said):
        fetch(server.url, tmp_path)
    assert (server.asked, place.read_bytes()) == (0, b"my own")


def test_a_cut_connection_is_an_error_and_nothing_is_left_of_it(server, tmp_path, place):
    server.cut = 100_000
    said = rf"{server.url} cannot be fetched: the connection was cut after 100000 of 300000 bytes.*get it by hand"
    with pytest.raises(FedshiftError, match=rf"{said} \(see https://publisher.example\) and put it at {place}"):
        fetch(server.url, tmp_path)
    assert list_files(tmp_path) == []


@pytest.mark.parametrize(("kind", "known"), [("sha256", SHA256), ("md5", MD5)])
def test_a_file_that_is_not_the_published_one_is_not_kept(server, tmp_path, kind, known):
    said = rf"{server.url} gave .*its {kind} is {known}, published is 0000\)"
    with pytest.raises(FedshiftError, match=said):
        fetch(server.url, tmp_path, f"{kind}:0000")
    assert list_files(tmp_path) == []


def test_a_refusal_of_the_server_is_told(server, tmp_path):
    server.status = 404
    said = r"file.bin cannot be fetched: the server answers 404 Not Found. Try later, or get"
    with pytest.raises(FedshiftError, match=said):
        fetch(server.url, tmp_path)


@pytest.mark.parametrize(("listens", "said"), [(False, "refused.*Try again"), (True, "timed out")])
def test_a_server_that_is_not_there_or_never_answers_is_given_up(tmp_path, monkeypatch, listens, said):
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if listens:
            mute.listen()
        with pytest.raises(FedshiftError, match=rf"127.0.0.1:[0-9]+/file.bin cannot be fetched: .*{said}"):
            fetch(f"http://127.0.0.1:{mute.getsockname()[1]}/file.bin", tmp_path)


def test_a_full_disk_is_told(server, tmp_path, place, monkeypatch):
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
        fetch(server.url, tmp_path)
    assert list_files(tmp_path) == []


def test_what_cannot_be_fetched_or_written_is_refused_with_what_to_do(server, tmp_path):
    with pytest.raises(UsageError, match="'bench' is made by fedshift itself: there is nothing to fetch"):
        module.fetch("bench", card(generated=True), tmp_path)
    said = r"cannot be fetched: get it from https://publisher.example and put into .*bench file.bin"
    with pytest.raises(UsageError, match=said):
        module.fetch("bench", card(), tmp_path)
    (tmp_path / "bench").write_text("a file where a directory should be")
    with pytest.raises(FedshiftError, match=r"cannot write .*file.bin.part: .*choose another directory \(root\)"):
        fetch(server.url, tmp_path)
