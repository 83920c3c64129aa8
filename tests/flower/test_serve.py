"""`fedshift serve` and `join` for a user: refusals before anything starts, output, Ctrl-C, exit codes, Prometheus."""

import http.client
import signal
import socket
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.app import ConfigRecord, Message, RecordDict
from prometheus_client.parser import text_string_to_metric_families

from fedshift.cli.app import app
from fedshift.config.settings_file import FILE
from fedshift.config.spec import RunOptions
from fedshift.experiments.trial import RoundResult
from fedshift.flower.coordinator import serve as serving
from fedshift.flower.coordinator.metrics import serve_metrics
from fedshift.flower.coordinator.remote_engine import RoundOptions
from fedshift.flower.coordinator.serve import ListenOptions, serve
from fedshift.flower.keys import make_certificate
from fedshift.flower.messages import Exchange
from fedshift.flower.site import join as joined
from fedshift.flower.site.record import Record, RecordFailed
from fedshift.results.checkpoint import load_checkpoint
from fedshift.utils.errors import UsageError
from tests.flower.sites import grid_of, same_as_in_process, spec_for

pytestmark = pytest.mark.usefixtures("machine")
LOCAL = ListenOptions(host="127.0.0.1", port=9091, tls=None)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give either a settings file or --resume"),
        (["exp.toml", "--resume", "runs/a"], "give either a settings file or --resume"),
        (["exp.toml", "--tls", "x", "--insecure"], "give either --tls DIR"),
        (["exp.toml", "--insecure", "--min-clients", "0"], "min_clients=0: must be at least 1"),
        (["exp.toml", "--insecure", "--from-round", "1"], "from_round=1 goes back in a run: name it (--resume)"),
        (["exp.toml", "--insecure", "--max-share", "0"], "max_share=0: must be greater than 0 and at most 1"),
        (["exp.toml", "--insecure", "--update-bound", "1"], "update_bound=1: must be greater than 1"),
        (["exp.toml", "--insecure", "--host", "0.0.0.0"], "in plain text to other machines"),
        (["exp.toml", "--tls", "nowhere"], "contains no ca.crt"),
        (["exp.toml", "--tls", "keys"], "contains no site's key"),
        (["nothing.toml", "--insecure"], "no settings file"),
        (["split.toml", "--insecure"], "split divides data that are in one place"),
        (["both.toml", "--insecure"], "has both method and methods"),
        (["wrong.toml", "--insecure"], "lrr"),
        (["exp.toml", "--insecure", "--log", "mlfow"], "unknown logger 'mlfow': did you mean 'mlflow'?"),
        (["--resume", "alone", "--insecure"], "alone was not run across machines: continue it with `fedshift run`"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(arguments, why, cli):
    Path("exp.toml").write_text("rounds = 1\n")
    Path("split.toml").write_text('split = "iid(clients=3)"\n')
    Path("both.toml").write_text('method = "fedbn"\nmethods = "fedavg"\n')
    Path("wrong.toml").write_text("lrr = 1\n")
    if "keys" in arguments:
        make_certificate(Path("keys"), ["localhost"])
    Path("alone").mkdir()
    for name in (FILE, "study.json"):
        Path("alone", name).touch()
    outcome = cli("serve", *arguments)
    assert outcome.code == 2
    assert why in " ".join(outcome.err.split())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["host:9091", "--data", "."], "give either --tls DIR"),
        (["nowhere", "--data", ".", "--insecure"], "'nowhere' is not an address"),
        (["host:9091", "--data", "absent", "--insecure"], "there is no"),
        (["host:9091", "--data", "digits", "--insecure"], "'digits' are several clients: choose one with --name"),
        (["host:9091", "--data", ".", "--insecure", "--key", "k"], "needs --tls"),
        (["host:9091", "--data", ".", "--insecure", "--keep-rounds", "2"], "keep_rounds=2: must be at least 3"),
        (["host:9091", "--data", ".", "--tls", "."], "no ca.crt there"),
        (["host:9091", "--insecure"], "no data are named: give --data, or path in [data] of the policy"),
        (["host:9091", "--data", ".", "--insecure", "--confirm"], "--confirm asks at a terminal, and there is none"),
    ],
)
def test_what_cannot_join_is_said_at_once(arguments, why, cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    outcome = cli("join", *arguments)
    assert outcome.code == 2
    assert why in outcome.err
    assert not Path("sites").exists()


@pytest.fixture
def run(tmp_path, monkeypatch, unpublished, capsys):
    """Serve three sites of this process; ``tamper(question, answer)`` gives what arrives in place of an answer."""
    spec = spec_for(rounds=3, evaluate_every=3)
    grid = grid_of(spec, tmp_path)

    @contextmanager
    def serve_nodes(*_):
        yield grid

    monkeypatch.setattr(serving, "serve_nodes", serve_nodes)

    def call(tamper=lambda question, answer: answer, *, resume=False, **rounds):
        grid.tamper = lambda node, question, answer: tamper(question, answer)
        served, rounds = tmp_path / "served", RoundOptions(**{"clients": 3} | rounds)
        code = serve(spec, LOCAL, rounds, RunOptions(resume=served if resume else None), served)
        return code, capsys.readouterr().out

    return SimpleNamespace(call=call, spec=spec, grid=grid, folder=tmp_path / "served")


def test_a_coordinator_says_each_round_and_its_files_are_its_owners_alone(run):
    code, said = run.call()
    assert code == 0
    for text in ("listening on 127.0.0.1:9091", "pen is connected, 24 training samples", "round 3: pen, "):
        assert text in said
    assert {path.stat().st_mode & 0o077 for path in run.folder.rglob("*")} == {0}
    with pytest.raises(UsageError, match="already holds a run: continue it"):
        run.call()


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_after_the_round_and_a_second_one_at_once_with_what_was_saved(presses, run, tmp_path):
    waiting = [signal.SIGINT] * presses

    def press(question, answer):
        while waiting and (question.kind, question.facts.get("round")) == ("train", 1):
            signal.raise_signal(waiting.pop())
        return answer

    code, said = run.call(press, update_bound=7.0)
    assert code == 130
    assert "Stopping after this round; press Ctrl-C again to stop at once." in said
    command = "fedshift serve --min-clients 3 --update-bound 7 --insecure --host 127.0.0.1 --port 9091 --resume "
    assert f"Completed work is saved; continue with: {command}{run.folder}" in said
    (file,) = run.folder.glob("trials/*/checkpoint.safetensors")
    assert load_checkpoint(file)[1]["round"] == {1: 2, 2: 1}[presses]
    assert run.call(resume=True)[0] == 0
    same_as_in_process(run.spec, run.folder)


def test_the_flags_of_a_stopped_coordinator_give_the_same_options(monkeypatch, tmp_path):
    heard = []
    monkeypatch.setattr(serving, "serve", lambda spec, *options: heard.append(options[:2]) or 0)
    (tmp_path / "settings.toml").write_text('method = "fedbn"')
    monkeypatch.chdir(tmp_path)
    listen = replace(LOCAL, host="0.0.0.0", port=9092, forced=True, metrics=9093)
    rounds = RoundOptions(clients=3, seconds=60.0, wait=7.5, update_bound=4.0, max_share=0.4)
    for options in ((listen, rounds), (LOCAL, RoundOptions(clients=2))):
        flags = [flag for each in options for flag in each.flags.split()]
        command, bound, _ = app.parse_args(["serve", "settings.toml", *flags])
        assert command(*bound.args, **bound.kwargs) == 0
        assert heard[-1] == options
    assert RoundOptions(clients=2).max_share == 1.0


OVER = Exchange(kind="tell", facts={"say": "it is \x1b[2Jfinished\u202e", "over": True})


class Connection:
    """Gives ``messages`` one after another, raises errors, calls functions, and keeps the answers that are sent."""

    def __init__(self, *messages):
        self.messages, self.sent = list(messages), []

    def receive(self):
        given = self.messages.pop(0) if self.messages else None
        if isinstance(given, Exception):
            raise given
        content = given() if callable(given) else given.content() if isinstance(given, Exchange) else given
        return None if content is None else Message(content, 7, "query")

    def send(self, reply, seconds):
        self.sent.append(Exchange.of(reply.content))


@pytest.fixture
def joining(cli, monkeypatch):
    """Join a coordinator to which each connection is one of ``connections``, or raises it; return what came of it."""

    def run(*connections):
        left = list(connections)

        @contextmanager
        def connect(*_, **__):
            made = left.pop(0)
            if isinstance(made, Exception):
                raise made
            yield made

        monkeypatch.setattr(joined, "connect", connect)
        monkeypatch.setattr(joined, "LONGEST_PAUSE", 0.01)
        monkeypatch.setenv("no_proxy", "")
        return cli("join", "localhost:1", "--insecure", "--data", "digits", "--name", "pen", "--threads", 1)

    return run


def test_a_site_says_what_the_coordinator_tells_it_and_leaves_at_the_end(joining, tmp_path):
    (tmp_path / "sites" / "pen").mkdir(mode=0o755, parents=True)
    connection = Connection(Exchange(kind="tell", facts={"say": "pen is left out: \x07why"}), OVER)
    done = joining(connection)
    assert done.code == 0, done.err
    assert [answer.kind for answer in connection.sent] == ["told", "told"]
    start = "message of the coordinator: "
    said = [line.partition(start)[2] for line in done.out.splitlines() if start in line]
    assert said == ["pen is left out:  why", "it is finished "]
    modes = {place: (tmp_path / "sites" / place).stat().st_mode & 0o777 for place in ("pen", "record.db", "pen/.lock")}
    assert list(modes.values()) == [0o700, 0o600, 0o600]
    (tmp_path / "after").touch()
    assert (tmp_path / "after").stat().st_mode & 0o777 != 0o600


def test_a_connection_that_fails_or_is_lost_is_made_again_until_ctrl_c(joining):
    done = joining(
        httpx.ReadError("nobody", request=httpx.Request("POST", "http://localhost:1")), Connection(OSError("cut off")),
        UsageError("pen.key is not a key"), Connection(lambda: signal.raise_signal(signal.SIGINT)),
    )  # fmt: skip
    assert done.code == 130, done.err
    for why in ("nobody", "cut off", "pen.key is not a key"):
        assert any(why in line and line.endswith("; connecting again") for line in done.out.splitlines()), why


def test_a_message_that_cannot_be_read_is_refused_on_record_and_the_next_one_answered(joining, tmp_path):
    strange = (RecordDict(), RecordDict({"config": ConfigRecord({"fedshift": "[1, 2"})}), Exchange(kind="\x1b[2J"))
    connection = Connection(*strange, OVER)
    assert joining(connection).code == 0
    assert [answer.kind for answer in connection.sent] == ["refused"] * 3 + ["told"]
    entries = list(Record(tmp_path / "sites" / "record.db").read())
    assert [entry.content["why"] for entry in entries] == [answer.facts["why"] for answer in connection.sent[:3]]


FATAL = {
    "receiving": (RuntimeError("quite unforeseen"), None), "connecting": (RuntimeError("quite unforeseen"), None),
    "reading": (RuntimeError("quite unforeseen"), "messages.Exchange.of"),
    "loading the key": (UnsupportedAlgorithm("quite unforeseen"), "site.join.CoordinatorLink.load_key"),
    "looking at certificates": (RuntimeError("quite unforeseen"), "keys.EndNotice.check"),
    "writing": (RecordFailed("record.db cannot be written: make room"), "site.record.Record.append"),
}  # fmt: skip


@pytest.mark.parametrize("where", FATAL)
def test_an_error_that_nobody_foresaw_ends_the_program_with_a_message_and_a_code(where, joining, monkeypatch):
    (error, place), made = FATAL[where], Connection(Exchange(kind="unknown"), OVER)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        if place:
            patch.setattr(f"fedshift.flower.{place}", fail)
        done = joining({"connecting": error, "receiving": Connection(error)}.get(where, made))
    assert done.code == 1
    name = "" if where == "writing" else f"{type(error).__name__}: "
    assert f"{name}{error}" in " ".join(done.err.split())
    assert made.sent == []
    assert joining(Connection(OVER)).code == 0  # nothing is left that would keep another program out


def ask(port, host):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics", headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_prometheus_reads_progress_over_loopback_until_the_run_ends_and_no_other_machine_does():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        named = pytest.raises(UsageError, match=f"--metrics {port}: cannot listen on 127.0.0.1:{port}")
        with named, serve_metrics(port):  # taken
            pass
    with serve_metrics(port) as callback:
        callback.on_run_begin(["fedbn"], [3], 5, ["north", "south"], "accuracy")
        callback.on_trial_begin("fedbn", 3, 1)
        for number in (2, 3):
            callback.on_client_end("north", 0.5 / number)
            sites = ("north", "south")[: number - 1]
            callback.on_round_end(RoundResult(round=number, participants=sites, down=100, up=70, seconds=1.5, rows=[]))
        callback.on_notice("site south was left out")
        (status, text), again = ask(port, "localhost"), ask(port, f"127.0.0.1:{port}")
        assert (status, again[0]) == (200, 200)
        for host in (f"evil.example:{port}", "127.0.0.1.evil.example", ""):  # a page whose name points here
            assert ask(port, host) == (403, "Host is not this machine\n")
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert found.pop(("fedshift_last_round_timestamp_seconds",)) > 1e9
    assert {name: value for name, value in found.items() if not name[0].endswith("_created")} == {
        ("fedshift_rounds_planned",): 5, ("fedshift_rounds_done", "fedbn", "3"): 3, ("fedshift_round_seconds",): 1.5,
        ("fedshift_sites",): 2, ("fedshift_training_loss", "north"): 0.5 / 3, ("fedshift_bytes_total", "up"): 140,
        ("fedshift_bytes_total", "down"): 200, ("fedshift_notices_total",): 1,
    }  # fmt: skip
    with socket.socket() as after:
        after.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        after.bind(("127.0.0.1", port))
    with serve_metrics(None) as callback:  # nothing is served
        callback.on_trial_begin("fedbn", 0, 0)
