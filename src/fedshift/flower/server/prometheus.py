"""Prometheus metrics of a coordinator, on its machine's loopback interface (``fedshift serve --metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app, start_http_server
from typing_extensions import override

from ...experiments.callbacks import Callback
from ...experiments.trial import RoundResult
from ...utils.errors import UsageError

TRIAL = ("method", "seed")
HOSTS = ("127.0.0.1", "localhost")
"""Names of this machine in a request; a web page that reaches it by DNS rebinding sends the page's host instead."""


class Prometheus(Callback):
    """Callback whose ``registry`` exposes an experiment's progress as metrics with the prefix ``fedshift_``."""

    def __init__(self, end: datetime | None = None) -> None:
        self.registry = CollectorRegistry()
        self._planned = self._gauge("rounds_planned", "Rounds of each trial")
        self._done = self._gauge("rounds_done", "Completed and saved rounds of a trial", *TRIAL)
        self._seconds = self._gauge("round_seconds", "Seconds that the last round took")
        self._ended = self._gauge("last_round_timestamp_seconds", "Unix time when the last round ended")
        self._sites = self._gauge("sites", "Sites that participated in the last round")
        self._loss = self._gauge("training_loss", "Mean training loss of a site in its last round", "site")
        self._bytes = Counter(
            "fedshift_bytes",
            "Bytes of models transferred from (up) and to (down) sites",
            ["direction"],
            registry=self.registry,
        )
        if end:
            ends = self._gauge("certificate_end_timestamp_seconds", "Unix time when the certificate ends")
            ends.set(end.timestamp())
        self._notices = Counter("fedshift_notices", "Notices, such as sites that were left out", registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"fedshift_{name}", text, labels, registry=self.registry)

    @override
    def on_run_begin(self, methods: object, seeds: object, rounds: int, clients: object, metric: object) -> None:
        self._planned.set(rounds)

    @override
    def on_trial_begin(self, method: str, seed: int, done: int) -> None:
        self._trial = method, str(seed)
        self._done.labels(*self._trial).set(done)

    @override
    def on_client_end(self, client: str, loss: float) -> None:
        self._loss.labels(client).set(loss)

    @override
    def on_round_end(self, done: RoundResult) -> None:
        self._done.labels(*self._trial).set(done.round)
        self._seconds.set(done.seconds)
        self._ended.set_to_current_time()
        self._sites.set(len(done.participants))
        self._bytes.labels("up").inc(done.up)
        self._bytes.labels("down").inc(done.down)

    @override
    def on_notice(self, text: str) -> None:
        self._notices.inc()


@contextmanager
def serve_metrics(port: int | None, end: datetime | None = None) -> Iterator[Callback]:
    """Serve the metrics of the yielded callback at ``/metrics`` on loopback ``port``; None: serve nothing.

    ``end``: expiry of the coordinator's certificate, if it has one. Raises :class:`UsageError` if the port is in use.
    """
    if port is None:
        yield Callback()
        return
    callback = Prometheus(end)
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=callback.registry)
    except OSError as error:
        raise UsageError(
            f"--metrics {port}: cannot listen on 127.0.0.1:{port}: {error.strerror}; choose another"
        ) from error
    server.set_app(_refuse_other_hosts(make_wsgi_app(callback.registry)))
    try:
        yield callback
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _refuse_other_hosts(app: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``app`` in a check that a request names this machine; any port is accepted, since a tunnel may change it."""

    def check(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if str(environ.get("HTTP_HOST", "")).partition(":")[0] in HOSTS:
            answer: Iterable[bytes] = app(environ, start)
            return answer
        start("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"Host is not this machine\n"]

    return check
