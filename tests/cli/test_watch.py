"""``fedshift watch``: what its page says of runs in every state, and whom its server answers."""

import http.client
import re
import signal
import threading
from contextlib import closing, contextmanager
from dataclasses import asdict
from threading import Event

import pytest

from fedshift.cli.watch import LivePage, PageServer
from fedshift.config.spec import CompareSpec, SweepSpec
from fedshift.results.run_directory import RunDirectory


def state(page):
    page.check()
    text = page.read()[1].decode()
    return text.partition('id="state">')[2].partition("<")[0], text


@pytest.mark.slow
def test_the_page_of_a_run_follows_its_records(make, tmp_path, Listener, monkeypatch):
    monkeypatch.setattr("fedshift.cli.watch.SHARE", 0)
    stop, run = Event(), tmp_path / "run"
    seen = Listener(lambda _: len(seen.rounds) == 4 and stop.set())  # in the first round of the second method
    experiment = make(methods="fedavg,fedbn", evaluate_every=1)
    experiment.run(run, callback=seen, stop=stop)
    page = LivePage(run)
    said, text = state(page)
    assert said == "Stopped"
    assert "<td>3 of 3</td>" in text
    assert "<td>1 of 3</td>" in text
    assert text.count("<svg ") == 2 + 3  # macro, training loss, three clients
    monkeypatch.setattr("fedshift.report.live_page.make_panels", lambda *_, **__: [])  # takes most of the time
    with closing(RunDirectory(run, resume=True)):
        assert state(page)[0] == "Running"
    experiment.run(run, resume=True)
    assert state(page)[0] == "Finished"
    assert page.read() == page.read()
    (run / "study.json").write_text("{")
    said, text = state(page)
    assert "The records cannot be read at this moment: " in text
    assert text.count("<td>3 of 3</td>") == 2


@pytest.mark.slow
def test_a_sweep_and_a_comparison_without_each_client_are_watched_as_one(make, tiny_folder, tmp_path):
    sweep = SweepSpec(data=str(tiny_folder), methods="fedbn", rounds=1, over=("lr=0.1,0.2",))
    for spec, folders in (
        (sweep, ("lr=0.1", "lr=0.2")),
        (CompareSpec(data=str(tiny_folder), methods="fedbn", rounds=1), ("without-ann", "without-bob")),
    ):
        out = tmp_path / type(spec).__name__
        with closing(RunDirectory(out, resume=False)) as directory:
            directory.write_settings({**asdict(spec), **({} if spec is sweep else {"leave_out": "ann,bob"})})
        for folder in folders:
            make(methods="fedbn", rounds=1).run(out / folder)
        said, page = state(LivePage(out))
        assert said == "Finished"
        assert page.count("<td>1 of 1</td>") == 2
        assert page.count("<svg ") == 2
        for folder in folders:
            assert f">{re.split('=|-', folder)[1]}</span></th>" in page


@pytest.fixture
def served(tmp_path):
    """The directory of a coordinator that waits for its first clients."""
    (tmp_path / "served" / "machines").mkdir(parents=True)
    return tmp_path / "served"


def test_a_coordinator_that_waits_for_its_first_clients_has_a_page(served):
    said, page = state(LivePage(served))
    assert said == "Waiting for clients, or stopped"
    assert "Nothing is recorded yet." in page


def test_what_cannot_be_watched_is_refused(cli, served, tmp_path):
    (tmp_path / "empty").mkdir()
    for place in ("empty", "nowhere"):
        assert "holds no run: give a directory that" in cli("watch", place).err
    (tmp_path / "papers" / "results" / "fedbn").mkdir(parents=True)
    (tmp_path / "papers" / "results" / "fedbn" / "a.json").write_text("{}")
    assert "papers holds the runs of papers: give one of them" in cli("watch", "papers").err
    assert "port 70000: give a number from 0" in cli("watch", served, "--port", 70000).err
    with PageServer(Page(), 0) as server:
        done = cli("watch", served, "--port", server.server_port)
    assert (done.code, done.out) == (2, "")
    assert f"cannot listen on 127.0.0.1:{server.server_port}: Address already in use; choose another" in done.err


@contextmanager
def serving(page):
    with PageServer(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Page:
    def read(self):
        return '"7"', "<p>ä</p>".encode()


@pytest.fixture
def ask():
    """Ask a server for its page; returns the answer and its content."""
    with serving(Page()) as server:

        def send(method="GET", path="/", **headers):
            with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)) as connection:
                connection.putrequest(method, path, skip_host=True)
                named = {"Host": f"127.0.0.1:{server.server_port}"} | {
                    k.replace("_", "-"): v for k, v in headers.items()
                }
                for name, value in named.items():
                    if value is not None:
                        connection.putheader(name, value.format(port=server.server_port))
                connection.endheaders()
                answer = connection.getresponse()
                return answer, answer.read()

        send.server = server
        yield send


def test_the_server_listens_on_this_machine_alone(ask):
    assert ask.server.server_address[0] == "127.0.0.1"
    assert ask.server.server_port == ask.server.server_address[1] > 0


def test_the_page_is_sent_once_for_each_version(ask):
    answer, content = ask()
    assert (answer.status, content.decode(), answer.getheader("ETag")) == (200, "<p>ä</p>", '"7"')
    assert answer.getheader("Cache-Control") == "no-store"
    assert answer.getheader("Access-Control-Allow-Origin") is None
    answer, content = ask(If_None_Match='"7"')
    assert (answer.status, content) == (304, b"")
    assert ask(If_None_Match='"6"')[0].status == 200


@pytest.mark.parametrize(
    "host", [None, "evil.example", "evil.example:{port}", "127.0.0.1", "localhost", "127.0.0.1:1", "0.0.0.0:{port}"]
)
def test_another_host_than_this_machine_is_refused(ask, host):
    answer, content = ask(Host=host)
    assert answer.status == 403
    assert "ä".encode() not in content
    assert ask(Host="localhost:{port}")[0].status == 200


@pytest.mark.parametrize("path", ["/study.json", "/../run/study.json", "/?x", "/index.html"])
def test_there_is_one_page(ask, path):
    assert ask(path=path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_understood(ask, method):
    answer, content = ask(method)
    assert answer.status == 501
    assert "ä".encode() not in content


@pytest.mark.slow
def test_ctrl_c_ends_it_with_zero(program, served):
    process = program("watch", served)
    line = process.stdout.readline()
    port = int(line.partition("http://127.0.0.1:")[2].partition("/")[0])
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/")
        assert b"Nothing is recorded yet." in connection.getresponse().read()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    assert line == f"{served}: http://127.0.0.1:{port}/ shows the run; Ctrl-C ends this.\n"
