"""What hears of a site that is left out, and that nothing which happens to it concerns the experiment."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

import pytest

from fedshift.flower.server import alerts
from fedshift.flower.server.alerts import FILE, MOST, Alerts, StallWatch, parse_target
from fedshift.utils.errors import UsageError


def test_a_command_hears_each_alert_as_json_and_no_more_than_so_many(tmp_path):
    heard = tmp_path / "heard"
    with Alerts(f"tee -a {heard}", tmp_path / "run", tmp_path) as sent:
        for number in range(MOST + 2):
            sent.send("left_out", f"round {number}: \x1b[2Jnorth is left out")
        sent._sent.clear()  # as if an hour had passed
        sent.send("stalled", "no round has ended")
    found = [json.loads(line + "}") for line in heard.read_text().split("}")[:-1]]
    assert [each["text"] for each in found[:MOST]] == [f"round {n}: north is left out" for n in range(MOST)]
    assert [(each["event"], each["dropped"]) for each in found[MOST - 1 :]] == [("left_out", 0), ("stalled", 2)]
    assert {each["run"] for each in found} == {str(tmp_path / "run")}
    assert [json.loads(line)["failed"] for line in (tmp_path / FILE).read_text().splitlines()] == [""] * (MOST + 1)


@pytest.mark.parametrize("status", [200, 302])
def test_an_address_hears_an_alert_and_sends_nobody_elsewhere(tmp_path, status):
    heard = []

    class Hears(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))["event"]))
            self.send_response(status)
            self.send_header("location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hears) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Alerts(f"http://127.0.0.1:{server.server_port}/hook", tmp_path, tmp_path) as sent:
            sent.send("diverged", "all of them")
        server.shutdown()
    assert heard == [("/hook", "diverged")]
    assert len(sent.take_failures()) == (status != 200)


@pytest.mark.parametrize("target", ["false", "sleep 60", "http://127.0.0.1:1/nobody"])
def test_an_alert_that_fails_is_told_and_stops_nothing(tmp_path, target, monkeypatch):
    monkeypatch.setattr(alerts, "SECONDS", 0.2)
    with Alerts(target, tmp_path, tmp_path) as sent:
        sent.send("failed", "it is over")
    assert "the alert 'failed' could not be sent" in sent.take_failures()[0]
    assert json.loads((tmp_path / FILE).read_text())["failed"]


@pytest.mark.parametrize("target", ["", "no-such-command -x", "https://", "'", "http:///path"])
def test_what_cannot_hear_is_refused_before_anything_starts(target):
    with pytest.raises(UsageError, match="--alert"):
        parse_target(target)


def test_a_stall_is_told_once_until_there_is_progress(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(alerts.time, "monotonic", lambda: clock[0])
    watch = StallWatch(10)
    said = []
    for clock[0], progress in (
        (50, False),
        (60, True),
        (69, False),
        (71, False),
        (99, False),
        (100, True),
        (111, False),
    ):
        if progress:
            watch.note()
        said.append(watch.is_due())
    assert said == [False, False, False, True, False, False, True]
