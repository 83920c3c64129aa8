"""The command ``fedshift watch``: a page with a run's curves so far, served only to this machine's browser.

The server listens on 127.0.0.1, answers GET for one page, and checks the Host header, so that another site open in the
browser cannot read the page under another name (DNS rebinding).
"""

from __future__ import annotations

import socketserver
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from typing_extensions import override

from ..console.printing import Console
from ..console.terminal import print_line
from ..utils.errors import FedshiftError, UsageError
from .run import find_kind
from .sweep import read_sweep

if TYPE_CHECKING:
    from ..report.curves import CurvePoint

HOST = "127.0.0.1"
SECONDS = 3
"""Seconds between two requests of an open page."""
SHARE = 10
"""Minimum time between two versions of the page, as a multiple of the time to make one, to spare the run's CPUs."""
RECORDS = ("study.json", "notices.json", "done.json", "trials/*/rounds.jsonl")
"""Files of a run whose sizes and times show whether anything is new."""


def watch(directory: Path, *, port: int = 0) -> int:
    """Serve a live page with the curves of a run, on this machine only.

    Args:
        directory: Directory that run, compare, sweep or serve writes; the run may be active, stopped or finished.
        port: Port on 127.0.0.1; 0 chooses a free one.

    """
    if not 0 <= port < 2**16:
        raise UsageError(f"port {port}: give a number from 0, for any that is free, to {2**16 - 1}")
    page = LivePage(directory)
    page.check()
    try:
        server = PageServer(page, port)
    except OSError as error:
        raise UsageError(f"cannot listen on {HOST}:{port}: {error.strerror}; choose another (--port)") from error
    with server:
        print_line(Console(), f"{directory}: http://{HOST}:{server.server_port}/ shows the run; Ctrl-C ends this.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


class LivePage:
    """The page of a run directory, remade when records have changed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock, self._begun, self._number = Lock(), time.time_ns(), 0
        self._state: object = None
        self._due = 0.0
        self._points: tuple[CurvePoint, ...] = ()
        self._content = b""

    def check(self) -> None:
        """Raise :class:`UsageError` if the directory has no run and none is about to start there."""
        from ..results.run_directory import LOCK, MACHINES

        kind = find_kind(self.directory)
        if kind == "reproduce":
            raise UsageError(f"{self.directory} holds the runs of papers: give one of them, a directory in its runs/")
        if kind is None and not any((self.directory / name).exists() for name in ("config.toml", LOCK, MACHINES)):
            raise UsageError(
                f"{self.directory} holds no run: give a directory that `fedshift run`, `compare`, `sweep` or `serve` "
                "writes"
            )

    def read(self) -> tuple[str, bytes]:
        """Return the page's version and content."""
        with self._lock:
            if time.monotonic() >= self._due and (state := self._read_state()) != self._state:
                began, self._number = time.monotonic(), self._number + 1
                self._content = self._render().encode()
                self._state, self._due = state, time.monotonic() + SHARE * (time.monotonic() - began)
            return self._version, self._content

    @property
    def _version(self) -> str:
        return f'"{self._begun}-{self._number}"'

    def _read_state(self) -> object:
        from ..results.run_directory import is_in_use

        patterns = [pattern for name in RECORDS for pattern in (name, f"*/{name}")]
        files = [(path, path.stat()) for pattern in patterns for path in self.directory.glob(pattern)]
        return is_in_use(self.directory), [(path, stat.st_size, stat.st_mtime_ns) for path, stat in files]

    def _render(self) -> str:
        from ..report.live_page import LiveView, has_finished, render_live_page
        from ..results.run_directory import MACHINES, is_in_use

        remarks: tuple[str, ...] = ()
        expected = None
        try:
            self._points, expected = self._collect()
        except (FedshiftError, OSError) as error:
            remarks = (f"The records cannot be read at this moment: {error}",)
        if len(self._points) == 1:
            remarks += self._points[0].summary.notices
        if is_in_use(self.directory):
            state = "Running"
        elif len(self._points) == expected and all(has_finished(point.summary) for point in self._points):
            state = "Finished"
        else:
            state = "Waiting for clients, or stopped" if (self.directory / MACHINES).exists() else "Stopped"
        name = self.directory.resolve().name
        view = LiveView(name=name, state=state, points=self._points, remarks=remarks)
        return render_live_page(view, self._version, SECONDS)

    def _collect(self) -> tuple[tuple[CurvePoint, ...], int | None]:
        """Return the runs begun so far, and the total number if known."""
        from ..report.curves import CurvePoint
        from ..results.summary import read_summary

        kind = find_kind(self.directory)
        if kind == "run":
            return (CurvePoint({}, read_summary(self.directory)),), 1
        if kind == "sweep":
            from ..experiments.sweep import collect_points

            _, wanted = read_sweep(self.directory)
            return tuple(point for _, point in collect_points(wanted, self.directory)), len(wanted)
        if kind == "leave-out":
            parts = sorted(path.parent for path in self.directory.glob("without-*/study.json"))
            points = tuple(CurvePoint({"without": each.name.partition("-")[2]}, read_summary(each)) for each in parts)
            return points, len(points)
        return (), None


class PageServer(ThreadingHTTPServer):
    """Server of ``page`` on a local port of this machine."""

    def __init__(self, page: LivePage, port: int) -> None:
        self.page = page
        super().__init__((HOST, port), _Handler)

    @override
    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's also asks the name server for the machine's name
        self.server_name, self.server_port = HOST, int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    """Answers GET / with the page, or with "not modified"."""

    server: PageServer
    timeout = 10
    """Seconds after which a connection without a request is closed."""

    def do_GET(self) -> None:
        """Answer one request."""
        if self.headers.get("Host") not in [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]:
            self.send_error(HTTPStatus.FORBIDDEN, "Host is not this machine")
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            version, content = self.server.page.read()
            unchanged = self.headers.get("If-None-Match") == version
            self.send_response(HTTPStatus.NOT_MODIFIED if unchanged else HTTPStatus.OK)
            self.send_header("ETag", version)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.send_header("Referrer-Policy", "no-referrer")
            if not unchanged:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not unchanged:
                self.wfile.write(content)

    @override
    def version_string(self) -> str:
        return "fedshift"

    @override
    def log_message(self, *_: object) -> None:
        pass
