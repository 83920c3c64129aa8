"""What Prometheus reads at the coordinator is the experiment's progress, and no other machine reads it."""

import http.client
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedshift.experiments.trial import RoundResult
from fedshift.flower.server.prometheus import serve_metrics
from fedshift.flower.transport.programs import free_port
from fedshift.utils.errors import UsageError


def read(port):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_progress_is_read_over_loopback_and_ends_with_the_run():
    port = free_port()
    with serve_metrics(port) as callback:
        callback.on_run_begin(["fedbn"], [3], 5, ["north", "south"], "accuracy")
        callback.on_trial_begin("fedbn", 3, 1)
        for number in (2, 3):
            callback.on_client_end("north", 0.5 / number)
            participants = ("north", "south")[: number - 1]
            callback.on_round_end(
                RoundResult(round=number, participants=participants, down=100, up=70, seconds=1.5, rows=[])
            )
        callback.on_notice("site south was left out")
        found = read(port)
        with socket.socket() as other:  # any other address of this machine is free
            other.bind(("127.0.0.2", port))
    assert found.pop(("fedshift_last_round_timestamp_seconds",)) > 1e9
    assert found == {
        ("fedshift_rounds_planned",): 5,
        ("fedshift_rounds_done", "fedbn", "3"): 3,
        ("fedshift_round_seconds",): 1.5,
        ("fedshift_sites",): 2,
        ("fedshift_training_loss", "north"): 0.5 / 3,
        ("fedshift_bytes_total", "up"): 140,
        ("fedshift_bytes_total", "down"): 200,
        ("fedshift_notices_total",): 1,
    }
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:9", 200),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_a_page_whose_name_points_here_reads_nothing(host, status):
    port = free_port()
    with serve_metrics(port) as callback:
        callback.on_client_end("north", 0.5)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics", headers={"Host": host.format(port=port)})
        answer = connection.getresponse()
        assert answer.status == status
        assert (b"north" in answer.read()) == (status == 200)
        connection.close()


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UsageError, match=f"--metrics {port}: cannot listen on 127.0.0.1:{port}"),
            serve_metrics(port),
        ):
            pass


def test_without_a_port_nothing_is_served():
    with serve_metrics(None) as callback:
        callback.on_trial_begin("fedbn", 0, 0)
