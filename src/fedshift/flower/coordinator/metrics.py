"""Prometheus metrics of a coordinator, on its machine's loopback interface (``fedshift serve --metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app, start_http_server
from typing_extensions import override

from ...experiments.callbacks import Callback
from ...experiments.trial import RoundResult
from ...utils.errors import UsageError


class Prometheus(Callback):
    """Callback whose ``registry`` exposes progress with the prefix ``fedshift_``; ``end``: of the certificate."""

    def __init__(self, end: datetime | None = None) -> None:
        self.registry = own = CollectorRegistry()
        trial, direction, site = ("method", "seed"), ("direction",), ("site",)
        self._planned = Gauge("fedshift_rounds_planned", "Rounds of each trial", registry=own)
        self._done = Gauge("fedshift_rounds_done", "Completed and saved rounds of a trial", trial, registry=own)
        self._seconds = Gauge("fedshift_round_seconds", "Seconds that the last round took", registry=own)
        self._ended = Gauge("fedshift_last_round_timestamp_seconds", "Unix time of the last round's end", registry=own)
        self._sites = Gauge("fedshift_sites", "Sites that participated in the last round", registry=own)
        self._loss = Gauge("fedshift_training_loss", "Mean training loss of a site's last round", site, registry=own)
        self._bytes = Counter("fedshift_bytes", "Bytes of models up from and down to sites", direction, registry=own)
        self._notices = Counter("fedshift_notices", "Notices, such as sites that were left out", registry=own)
        if end:
            name = "fedshift_certificate_end_timestamp_seconds"
            Gauge(name, "Unix time when the certificate ends", registry=own).set(end.timestamp())

    @override
    def on_run_begin(self, methods: object, seeds: object, rounds: int, clients: object, metric: object) -> None:
        self._planned.set(rounds)

    @override
    def on_trial_begin(self, method: str, seed: int, done: int) -> None:
        self._rounds = self._done.labels(method, str(seed))
        self._rounds.set(done)

    @override
    def on_client_end(self, client: str, loss: float) -> None:
        self._loss.labels(client).set(loss)

    @override
    def on_round_end(self, done: RoundResult) -> None:
        self._rounds.set(done.round)
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

    A request must name this machine, as a web page that reaches it by DNS rebinding does not; any port is accepted,
    since a tunnel may change it. ``end``: expiry of the coordinator's certificate. Raises :class:`UsageError` if the
    port is in use.
    """
    if port is None:
        yield Callback()
        return
    callback = Prometheus(end)
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=callback.registry)
    except OSError as error:
        why = f"cannot listen on 127.0.0.1:{port}: {error.strerror}; choose another"
        raise UsageError(f"--metrics {port}: {why}") from error
    metrics = make_wsgi_app(callback.registry)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if str(environ.get("HTTP_HOST", "")).partition(":")[0] in ("127.0.0.1", "localhost"):
            return metrics(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"Host is not this machine\n"]

    server.set_app(answer)
    try:
        yield callback
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
