"""`fedshift serve` and `join` for a user: refusals before anything starts, output, exit codes."""

import json
import os
import socket
import threading
from dataclasses import asdict
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedshift.cli.app import app
from fedshift.config.spec import RunOptions, RunSpec
from fedshift.experiments.callbacks import Callback
from fedshift.flower.server import serve as serving
from fedshift.flower.server.alerts import Alerts
from fedshift.flower.server.serve import ListenOptions, _Coordination
from fedshift.flower.site import join as joining
from fedshift.flower.site.join import CoordinatorLink
from fedshift.flower.transport.certificates import EndNotice
from fedshift.flower.transport.exchange import Exchange
from fedshift.flower.transport.firewall import GUARDED
from fedshift.flower.transport.programs import free_port
from fedshift.results.run_directory import acquire_lock
from fedshift.utils.errors import FedshiftError, UsageError


def reach(**changes):
    given = {"host": "127.0.0.1", "port": free_port(), "tls": None, "clients": 2, "seconds": 1.0, "wait": 1.0}
    return ListenOptions(**(given | changes))


@pytest.fixture
def tls(tmp_path):
    from fedshift.flower.transport.pki import make_authority

    make_authority(tmp_path / "tls", ["localhost"], ["north"])
    return tmp_path / "tls"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give either a settings file or --resume"),
        (["exp.toml", "--resume", "runs/a"], "give either a settings file or --resume"),
        (["exp.toml"], "give either --tls DIR"),
        (["exp.toml", "--tls", "x", "--insecure"], "give either --tls DIR"),
        (["exp.toml", "--insecure", "--min-clients", "0"], "min_clients=0: must be at least 1"),
        (["exp.toml", "--insecure", "--from-round", "1"], "from_round=1 goes back in a run: name it (--resume)"),
        (["exp.toml", "--insecure", "--max-share", "0"], "max_share=0: must be greater than 0 and at most 1"),
        (["exp.toml", "--insecure", "--host", "0.0.0.0"], "in plain text to other machines"),
        (["exp.toml", "--tls", "nowhere"], "contains no ca.crt"),
        (["nothing.toml", "--insecure"], "no settings file"),
        (["split.toml", "--insecure"], "split divides data that are in one place"),
        (["both.toml", "--insecure"], "has both method and methods"),
        (["wrong.toml", "--insecure"], "lrr"),
        (["exp.toml", "--insecure", "--log", "mlfow"], "unknown logger 'mlfow': did you mean 'mlflow'?"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(arguments, why, cli):
    Path("exp.toml").write_text("rounds = 1\n")
    Path("split.toml").write_text('split = "iid(clients=3)"\n')
    Path("both.toml").write_text('method = "fedbn"\nmethods = "fedavg"\n')
    Path("wrong.toml").write_text("lrr = 1\n")
    outcome = cli("serve", *arguments)
    assert outcome.code == 2
    assert why in outcome.err


def test_a_run_of_one_process_is_not_continued_across_machines(cli):
    Path("alone").mkdir()
    for name in ("config.toml", "study.json"):
        Path("alone", name).touch()
    outcome = cli("serve", "--resume", "alone", "--insecure")
    assert outcome.code == 2
    assert "alone was not run across machines: continue it with `fedshift run`" in " ".join(outcome.err.split())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["host:9091", "--data", "."], "give either --tls DIR and --key FILE"),
        (["nowhere", "--data", ".", "--insecure"], "'nowhere' is not an address"),
        (["host:0", "--data", ".", "--insecure"], "'host:0' is not an address"),
        (["host:9091", "--data", "absent", "--insecure"], "there is no"),
        (["host:9091", "--data", "./absent", "--tls", ".", "--key", "north.key"], "there is no"),
        (["host:9091", "--data", "digits", "--insecure"], "'digits' are several clients: choose one with --name"),
        (["host:9091", "--data", ".", "--insecure", "--key", "k"], "needs --tls"),
        (["host:9091", "--data", ".", "--insecure", "--keep-rounds", "-1"], "keep_rounds=-1, keep_gb=1: both must be"),
        (["host:9091", "--data", ".", "--tls", "."], "no ca.crt there"),
    ],
)
def test_what_cannot_join_is_said_at_once(arguments, why, cli):
    outcome = cli("join", *arguments)
    assert outcome.code == 2
    assert why in outcome.err
    assert not Path("sites").exists()


def test_a_key_that_is_not_there_is_named(tls):
    with pytest.raises(UsageError, match=r"absent.key: no such file"):
        CoordinatorLink(address="host:9091", tls=tls, key=tls / "absent.key", poll=None).check()


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
            reach(port=port).check()


def test_a_coordinator_without_any_nodes_key_is_refused(tls):
    reach(tls=tls).check()
    (tls / "nodes" / "north.pub").unlink()
    with pytest.raises(UsageError, match="contains no node's key"):
        reach(tls=tls).check()


def test_plain_text_to_other_machines_can_be_forced():
    with pytest.raises(UsageError):
        reach(host="0.0.0.0").check()
    reach(host="0.0.0.0", forced=True).check()


@pytest.mark.parametrize(
    ("host", "here"),
    [("0.0.0.0", "127.0.0.1:9"), ("::", "[::1]:9"), ("10.0.0.5", "10.0.0.5:9"), ("fe80::1", "[fe80::1]:9")],
)
def test_the_coordinator_reaches_itself(host, here):
    assert reach(host=host, port=9).local_address == here


class FakeProgram:
    """A SuperLink that runs until it is stopped; ``guarded``: with its guard in the way."""

    guarded = True

    def __init__(self, *_, **named):
        self.code, self.log, self.more = None, named["log"], named.get("more")
        FakeProgram.last = self
        if self.guarded:
            (named["home"] / GUARDED).touch()

    def wait(self, seconds):
        return self.code

    def stop(self):
        self.code = 0

    def last_message(self):
        return "killed"


class Watched(Callback):
    def __init__(self):
        self.heard = []

    def on_notice(self, text):
        self.heard.append(text)

    def on_round_end(self, done):
        self.heard.append(done.round)


ROUND = {"participants": ["a", "b"], "down": 1_500_000, "up": 900, "seconds": 2.0, "rows": []}


@pytest.fixture
def coordination(monkeypatch, tmp_path):
    """Runs a coordination whose app, started at each submission, is the next of ``scripts``."""

    def run(*scripts, stop=None):
        port, listening = free_port(), []
        remaining = list(scripts)

        def submit(config, **_):
            script = remaining.pop(0)

            def app():
                with Client(FakeProgram.last.more["FEDSHIFT_COORDINATOR"], family="AF_UNIX") as talk:
                    order = json.loads(talk.recv_bytes())
                    script(lambda *message: talk.send_bytes(json.dumps(message).encode()), talk, order)

            threading.Thread(target=app, daemon=True).start()

        monkeypatch.setattr(serving, "Program", FakeProgram)
        monkeypatch.setattr(serving, "submit", submit)
        listening.append(socket.create_server(("127.0.0.1", port)))
        watched = Watched()
        try:
            silent = Alerts(None, tmp_path, tmp_path)
            with _Coordination(RunSpec(), reach(port=port), tmp_path / "run", RunOptions(), silent) as work:
                return work.run(watched, stop or threading.Event()), watched.heard
        finally:
            listening[0].close()

    return run


def test_a_superlink_without_its_guard_is_stopped(coordination, monkeypatch):
    monkeypatch.setattr(FakeProgram, "guarded", False)
    with pytest.raises(FedshiftError, match=r"was stopped: it opened its port without fedshift's guard"):
        coordination()
    assert FakeProgram.last.code == 0


def test_on_a_slow_machine_flowers_programs_are_waited_for_longer(coordination, monkeypatch):
    given, clock = [], iter(range(0, 10**6, 30))
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    made = serving._Coordination._submit

    def submit(self):
        given.append(self._patience)
        made(self)

    monkeypatch.setattr(serving._Coordination, "_submit", submit)
    coordination(lambda tell, talk, order: tell("ended", True))
    assert given == [600.0]  # 20 times the 30 seconds that the SuperLink took


def test_what_the_coordinator_tells_is_shown(coordination, tmp_path):
    orders = []

    def script(tell, talk, order):
        orders.append(order)
        tell("on_notice", "a is connected")
        tell("on_round_end", {"round": 1, **ROUND})
        tell("ended", True)

    finished, heard = coordination(script)
    assert finished
    assert heard == ["a is connected", 1, "round 1: a, b took part; 1.50 MB down, 0.90 kB up, 2.0 s"]
    directory = str((tmp_path / "run").resolve())
    (order,) = orders
    assert json.loads(order.pop("settings")) == json.loads(json.dumps(asdict(RunSpec())))
    assert not Path(order.pop("home")).exists()
    assert order == {
        "directory": directory,
        "clients": 2,
        "seconds": 1.0,
        "wait": 1.0,
        "keys": None,
        "update_bound": 10.0,
        "max_share": 0.5,
        "code": [],
        "file": str(tmp_path / "run" / "config.toml"),  # of which no function is called that --code does not name
    }


def test_an_app_that_is_lost_is_started_again(coordination):
    lost = lambda tell, talk, order: tell("on_round_end", {"round": 1, **ROUND})  # noqa: E731
    finished, heard = coordination(lost, lambda tell, talk, order: tell("ended", True))
    assert finished
    assert heard[-1] == "Flower's programs exited (killed) and are restarted"


def test_an_app_that_is_lost_again_and_again_is_given_up(coordination):
    with pytest.raises(FedshiftError, match=r"exited 3 times without completing a round \(killed\)"):
        coordination(*[lambda tell, talk, order: None] * 3)


def test_an_app_that_gets_on_is_started_again_for_ever(coordination):
    lost = lambda tell, talk, order: tell("on_round_end", {"round": 1, **ROUND})  # noqa: E731
    finished, _ = coordination(*[lost] * 6, lambda tell, talk, order: tell("ended", True))
    assert finished


@pytest.mark.parametrize(("usage", "kind"), [(True, UsageError), (False, FedshiftError)])
def test_what_fails_there_fails_here(coordination, usage, kind):
    with pytest.raises(FedshiftError, match=r"^of no use$") as raised:
        coordination(lambda tell, talk, order: tell("failed", "of no use", usage))
    assert type(raised.value) is kind


def test_a_stop_is_passed_on_and_the_round_ends(coordination):
    stop = threading.Event()

    def script(tell, talk, order):
        stop.set()
        assert talk.recv_bytes() == b"stop"
        tell("ended", False)

    finished, _ = coordination(script, stop=stop)
    assert not finished


class Answering:
    """A site that answers with what it was asked."""

    def __init__(self):
        self.asked, self.heard = [], []
        self.say = self.heard.append

    def answer(self, asked):
        self.asked.append(asked)
        kind = "ended" if asked.kind == "end" else "echo"
        return Exchange(kind=kind, facts={**asked.facts, "run": asked.run}, arrays=asked.arrays)


@pytest.fixture
def door(tmp_path):
    made = joining._MessageSocket(Answering(), tmp_path / "talk")
    yield made
    made.close()


def ask(door, exchange):
    with Client(str(door.path), family="AF_UNIX") as talk:
        exchange.send(talk)
        return Exchange.receive(talk)


def test_a_message_that_is_handed_over_is_answered(door):
    import torch

    from fedshift.flower.transport.arrays import from_record, to_record

    state = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}
    answer = ask(door, Exchange(kind="train", facts={"round": 2}, arrays={"shared": to_record(state)}, run=5))
    assert (answer.kind, answer.facts) == ("echo", {"round": 2, "run": 5})
    found = from_record(answer.arrays["shared"])
    assert all(found[name].equal(tensor) for name, tensor in state.items())
    assert not door.over


def test_the_end_is_kept(door):
    ask(door, Exchange(kind="end", facts={"say": "it is over"}))
    assert door.over == "it is over"


def test_who_is_gone_before_the_answer_is_noticed_and_the_next_is_answered(door):
    with Client(str(door.path), family="AF_UNIX") as talk:
        talk.send_bytes(b"{")
    assert door.broken.wait(30)
    assert ask(door, Exchange(kind="train")).kind == "echo"


def node(outcomes):
    """A SuperNode that ends as ``outcomes`` say, one after another."""

    class Node(FakeProgram):
        def __init__(self, name, *arguments, **named):
            super().__init__(name, *arguments, **named)
            self.code = outcomes.pop(0)() if name == "flower-supernode" else None

    return Node


def test_a_supernode_that_ends_is_started_again_and_the_end_is_said(door, monkeypatch, tmp_path):
    def over():
        door.over = "finished"

    monkeypatch.setattr(joining, "Program", node([lambda: 1, lambda: 0, over]))
    monkeypatch.setattr("fedshift.flower.site.reasons.measure_offset", lambda address, secured: None)
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", lambda seconds: False)
    link = CoordinatorLink(address="host:9091", tls=None, key=None, poll=0.5)
    assert joining._watch(link, door, tmp_path, tmp_path / "log", stop, EndNotice(None, str)) == 0
    again = f"Flower's SuperNode ended (killed); it is started again (see {tmp_path / 'log'})"
    assert door.site.heard == [again, again, "finished"]
    assert FakeProgram.last.more == {"FEDSHIFT_SITE": str(door.path), "FEDSHIFT_POLL": "0.5"}


def test_ctrl_c_ends_a_site(door, monkeypatch, tmp_path):
    stop = threading.Event()
    monkeypatch.setattr(joining, "Program", node([stop.set]))
    link = CoordinatorLink(address="host:9091", tls=None, key=None, poll=None)
    assert joining._watch(link, door, tmp_path, tmp_path / "log", stop, EndNotice(None, str)) == 130


def test_two_sites_do_not_work_in_one_folder(tmp_path):
    with acquire_lock(tmp_path), pytest.raises(FedshiftError, match=f"in use by process {os.getpid()}: "):
        joining.join(CoordinatorLink(address="host:9091", tls=None, key=None, poll=None), Answering(), tmp_path, None)


def test_a_sites_folder_is_its_owners_alone(monkeypatch, tmp_path):
    folder = tmp_path / "sites" / "north"
    folder.mkdir(parents=True, mode=0o755)
    account = folder.with_name("account.json")
    site = SimpleNamespace(
        gate=SimpleNamespace(account=SimpleNamespace(check=account.touch)), export_latest=lambda: None
    )
    monkeypatch.setattr(joining, "_watch", lambda *_: 0)
    link = CoordinatorLink(address="host:9091", tls=None, key=None, poll=None)
    for where in (folder, folder.with_name("south")):
        assert joining.join(link, site, where, 1) == 0
        assert where.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in (account, folder / ".lock")] == [0o600, 0o600]
    (tmp_path / "after").touch()
    assert (tmp_path / "after").stat().st_mode & 0o777 != 0o600


def test_a_closing_text_is_cut_and_cleaned(door):
    ask(door, Exchange(kind="end", facts={"say": "over\x1b]0;mine\x07" + "x" * 10**6}))
    assert door.over.startswith("over ]0;mine xxx")
    assert len(door.over) < 600


def test_a_stopped_coordinator_tells_the_whole_command(monkeypatch, tmp_path):
    """The arguments of the printed command give the same options."""
    heard = []
    monkeypatch.setattr(serving, "serve", lambda spec, reach, place, directory, from_round: heard.append(reach) or 0)
    (tmp_path / "settings.toml").write_text('method = "fedbn"')
    monkeypatch.chdir(tmp_path)
    told = reach(
        host="0.0.0.0", clients=3, seconds=60.0, wait=7.5, update_bound=4.0, max_share=0.4, forced=True,
        metrics=free_port(),
    )  # fmt: skip
    for options in (told, ListenOptions(host="127.0.0.1", port=free_port(), tls=None, clients=2)):
        command, bound, _ = app.parse_args(["serve", "settings.toml", *options.flags.split()])
        assert command(*bound.args, **bound.kwargs) == 0
        assert heard[-1] == options
