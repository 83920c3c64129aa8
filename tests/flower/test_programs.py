"""Flower's programs as children: what they may do, what they start, and how they end."""

import importlib
import io
import os
import socket
import subprocess
import sys
import tomllib
import warnings
import zipfile
from pathlib import Path

import httpx
import pytest

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

with warnings.catch_warnings():  # what Flower imports (typer, click) is no matter of ours
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import ExecutionSpec
    from flwr.supercore.superexec.executor.types import LaunchResultStatus

from fedshift.flower.site.join import CoordinatorLink
from fedshift.flower.transport import programs
from fedshift.flower.transport.exchange import accept_locally, connect_locally, listen_locally
from fedshift.flower.transport.forwarding import ForkExecutor
from fedshift.flower.transport.programs import (
    APP,
    Program,
    _resolve,
    connect,
    free_port,
    is_own,
    isolate,
    make_environment,
    submit,
)
from fedshift.utils.errors import FedshiftError, UsageError


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Starts ``code`` where one of Flower's programs would be started."""

    def start(code, **named):
        (tmp_path / "modules").mkdir(exist_ok=True)
        (tmp_path / "modules" / "stand_in.py").write_text(f"import os, sys, time\ndef main():\n    {code}\n")
        path = os.pathsep.join((str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")))
        monkeypatch.setitem(programs.PROGRAMS, "flwr", "stand_in:main")
        run = "import fedshift.flower.transport.programs as p; p.PROGRAMS['flwr'] = 'stand_in:main'; p.main()"
        started = subprocess.Popen

        def other(command, **rest):
            return started([*command[:3], run, *command[4:]], **rest)

        monkeypatch.setattr(programs.subprocess, "Popen", other)
        more = {"PYTHONPATH": path}
        return Program("flwr", ["a", "b"], home=tmp_path / "home", log=tmp_path / "log", more=more, **named)

    return start


def test_a_program_gets_its_arguments_and_what_it_says_is_kept(stand_in):
    program = stand_in("print('heard', sys.argv)")
    assert program.wait(60) == 0
    assert program.last_message() == "heard ['flwr', 'a', 'b']"
    program.stop()


def test_a_program_that_does_not_end_by_itself_is_ended(stand_in):
    program = stand_in("time.sleep(600)")
    assert program.code is None
    program.stop()
    assert program.code is not None
    assert program.last_message() == "it printed nothing"


def test_why_a_program_ended_is_what_it_said_of_that(stand_in):
    first = stand_in("print('Exit Code: 7', 'It was full.', '', sep=chr(10))")
    assert first.wait(60) == 0
    first.stop()
    told = "up\n\x1b[91mERROR \x1b[0m: Exit Code: 305\nIt failed.\n[code: 2004] So.\nIt could not.\n\nSee.\nINFO: down"
    program = stand_in(f"print({told!r})")
    assert program.wait(60) == 0
    assert program.last_message() == "It failed. [code: 2004] So."
    program.stop()
    last = stand_in(r"print('it is\x1b[0m over\nFor more information check: https://developer.mozilla.org')")
    assert last.wait(60) == 0
    assert last.last_message() == "it is over"
    last.stop()


CHILD = """
import sys, time, types
import fedshift.flower.transport.programs as programs
sys.modules["stand_in"] = types.SimpleNamespace(main=lambda: (print("up", flush=True), time.sleep(600)))
programs.PROGRAMS["flwr"] = "stand_in:main"
sys.argv[1:] = ["flwr"]
programs.main()
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[int(sys.argv[2])]
)
assert child.stdout.readline() == b"up\\n"
os.kill(os.getpid(), 9)
"""


def test_a_program_ends_with_whoever_started_it():
    """The parent is killed at once; the pipe's other end closes when its child is gone too."""
    reading, writing = os.pipe()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(writing)], pass_fds=[writing])
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b""
    assert parent.wait() == -9


INTERRUPTED = """
import os, signal, sys, threading, types
import fedshift.flower.transport.programs as programs
from flwr.supercore.exit import add_exit_handler, exit, register_signal_handlers
from flwr.supercore.telemetry import EventType

def run():
    exit.FORCE_EXIT_TIMEOUT_SECONDS = 0.1
    register_signal_handlers(event_type=EventType.RUN_SUPERNODE_LEAVE)
    add_exit_handler(lambda: os.kill(os.getpid(), signal.SIGINT), run_before_force_exit=True)
    threading.Thread(target=threading.Event().wait).start()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

sys.modules["stand_in"] = types.SimpleNamespace(run=run)
programs.PROGRAMS["flwr"] = "stand_in:run"
sys.argv[1:] = ["flwr"]
programs.main()
"""


@pytest.mark.slow
def test_a_program_that_two_threads_interrupt_ends(tmp_path):
    """A SuperNode that two threads end at the same moment, because its SuperLink no longer knows it."""
    environment = {**make_environment(tmp_path / "home", {}), "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdin=subprocess.PIPE, env=environment) as program:
        try:
            assert program.wait(60) == 0
        finally:
            program.kill()


@pytest.mark.parametrize(("code", "expected"), [("pass", 0), ("raise OSError('broken')", 1)])
def test_a_program_ends_when_it_returns_whatever_its_threads_do(code, expected, tmp_path):
    """A SuperNode whose connection breaks in a TLS handshake, as behind a proxy whose server is gone."""
    stand_in = f"""
import sys, threading, types
import fedshift.flower.transport.programs as programs
def run():
    threading.Thread(target=threading.Event().wait).start()
    {code}
sys.modules["stand_in"] = types.SimpleNamespace(run=run)
programs.PROGRAMS["flwr"] = "stand_in:run"
sys.argv[1:] = ["flwr"]
programs.main()
"""
    environment = {**make_environment(tmp_path / "home", {}), "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, "-c", stand_in], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as program:
        try:
            assert program.wait(60) == expected
        finally:
            program.kill()


def test_programs_phone_nobody_and_install_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    found = make_environment(tmp_path / "home", {"MORE": "1"})
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["FLWR_HOME"] == str(tmp_path / "home")
    assert found["MORE"] == "1"
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def test_programs_reach_this_machine_without_a_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://ann:secret@proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", "intranet.example.org")
    found = make_environment(tmp_path / "home", {}, "10.0.0.5")
    assert found["no_proxy"] == found["NO_PROXY"] == "intranet.example.org,localhost,127.0.0.1,::1,10.0.0.5"
    monkeypatch.setattr(os, "environ", found)
    with httpx.Client() as client:  # as Flower's programs
        for url, direct in (
            ("https://127.0.0.1:9091/v1", True), ("https://[::1]:9/", True), ("https://localhost:9/", True),
            ("https://10.0.0.5:9091/", True), ("https://10.0.0.6:9091/", False),
        ):  # fmt: skip
            assert (client._transport_for_url(httpx.URL(url)) is client._transport) == direct, url


def test_a_name_of_the_certificate_is_this_machine_for_programs_of_it(tmp_path, monkeypatch):
    name = "coordinator.example.org"
    found = make_environment(tmp_path / "home", {}, f"{name}=127.0.0.1")
    assert (found["FEDSHIFT_NEAR"], found["no_proxy"].endswith(f",{name}")) == (f"{name}=127.0.0.1", True)
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: asked.append((host, *rest)))
    _resolve(*found["FEDSHIFT_NEAR"].split("="))
    for host in (name, "other.example.org", None):
        socket.getaddrinfo(host, 9091)
    assert asked == [("127.0.0.1", 9091), ("other.example.org", 9091), (None, 9091)]


def test_a_site_says_that_a_proxy_is_on_the_way(monkeypatch):
    def route(address, tls=Path("pki")):
        return CoordinatorLink(address=address, tls=tls, key=None, poll=None).route

    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert route("far.example.org:9091") == ""
    monkeypatch.setenv("HTTPS_PROXY", "http://ann:secret@proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", "near.example.org")
    assert route("far.example.org:9091") == (
        " by the proxy proxy.example.org:3128, set in the environment (NO_PROXY=far.example.org connects directly)"
    )
    assert route("near.example.org:9091") == route("far.example.org:9091", tls=None) == ""
    monkeypatch.setenv("ALL_PROXY", "socks5://other.example.org:1080")
    assert "other.example.org:1080" in route("far.example.org:9091", tls=None)


def test_a_local_socket_may_have_any_path(tmp_path):
    folder = tmp_path / ("a" * 120)
    folder.mkdir()
    with listen_locally(folder / "talk") as listener:
        assert (folder / "talk").is_socket()
        with connect_locally(folder / "talk") as ours, accept_locally(listener) as theirs:
            ours.send_bytes(b"hello")
            assert theirs.recv_bytes() == b"hello"


def test_what_takes_tasks_needs_a_secret_that_only_this_user_reads(tmp_path):
    (flag, file) = isolate(tmp_path / "home")
    assert flag == "--superexec-auth-secret-file"
    assert Path(file).stat().st_mode & 0o777 == 0o600
    first = Path(file).read_bytes()
    assert len(first) == 32
    assert isolate(tmp_path / "home") == [flag, file]
    assert Path(file).read_bytes() == first
    assert Path(isolate(tmp_path / "other")[1]).read_bytes() != first


def task(kind=TaskType.CLIENT_APP):
    return ExecutionSpec(
        task_type=kind, runtime_api_address="127.0.0.1:9", token="secret", insecure=True, root_certificates_path=None,
        runtime_dependency_install=False, parent_pid=None, suppress_output=False, task_id=1,
    )  # fmt: skip


def test_only_tasks_of_one_kind_are_started():
    executor = ForkExecutor(TaskType.CLIENT_APP, lambda: None)
    assert executor.get_eligible_capacity(set(TaskType), insecure=True) == ({TaskType.CLIENT_APP}, set())
    for kind in set(TaskType) - {TaskType.CLIENT_APP}:
        assert executor.launch(task(kind)).status == LaunchResultStatus.FAILED


EXECUTOR = """
import os, signal, sys, time
from pathlib import Path
import fedshift.flower
from fedshift.flower.transport.forwarding import ForkExecutor
from tests.flower.test_programs import TaskType, task
def work():
    print(sys.argv[1:], Path("/proc/self/cmdline").read_bytes().count(b"sec" + b"ret"), flush=True)
    if sys.argv[-1] == "--insecure" and DIES:
        os.kill(os.getpid(), signal.SIGKILL)
executor = ForkExecutor(TaskType.CLIENT_APP, work)
executor.launch(task())
while executor._copies:
    executor.reconcile()
    time.sleep(0.01)
print("all is done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "code", "said"), [
    pytest.param(False, 0, "all is done", marks=pytest.mark.slow), (True, 1, "a process at work was killed (signal 9)"),
])  # fmt: skip
def test_a_copy_that_is_killed_is_noticed_and_no_token_is_on_a_command_line(dies, code, said):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(root)])}
    command = [sys.executable, "-W", "ignore", "-c", f"DIES = {dies}\n{EXECUTOR}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        heard = process.stdout.read().splitlines()
    argument = "['--runtime-api-address', '127.0.0.1:9', '--token', 'secret', '--insecure']"
    assert heard == [f"{argument} 0", said]
    assert process.returncode == code


def packed(files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


OWN = (APP / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's, of pathspec
def test_the_app_that_flower_packs_is_our_own():
    from flwr.cli.build import build_fab_from_disk

    assert is_own(build_fab_from_disk(APP))
    assert is_own(packed({"pyproject.toml": OWN, ".info/CONTENT": ""}))


@pytest.mark.parametrize(
    "foreign",
    [
        b"no archive",
        packed({"app.py": ""}),
        packed({"pyproject.toml": "not = = toml"}),
        packed({"pyproject.toml": "[project]\nname = 'other'"}),
        packed({"pyproject.toml": OWN.replace("fedshift.flower.server.coordinator:app", "os:abort")}),
        packed({"pyproject.toml": OWN, "fedshift/flower/server/coordinator.py": "app = None"}),
        packed({"pyproject.toml": OWN, "torch.py": "raise SystemExit"}),
    ],
)
def test_any_other_app_is_foreign(foreign):
    assert not is_own(foreign)


def test_flwr_is_told_where_the_superlink_is(tmp_path):
    connect(tmp_path, "127.0.0.1:9091", None)
    plain = tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]
    assert plain == {"default": "here", "here": {"address": "127.0.0.1:9091", "insecure": True}}
    connect(tmp_path, "127.0.0.1:9091", tmp_path / "ca.crt")
    secured = tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]["here"]
    assert secured == {"address": "127.0.0.1:9091", "root-certificates": str(tmp_path / "ca.crt")}


@pytest.mark.slow
def test_a_run_that_cannot_be_submitted_says_where_to_look(tmp_path):
    connect(tmp_path, f"127.0.0.1:{free_port()}", None)
    (tmp_path / "run.toml").write_text('fedshift = ""\n')
    with pytest.raises(FedshiftError, match=r"Flower could not submit a run \(.*see .*flwr.log"):
        submit(tmp_path / "run.toml", home=tmp_path, log=tmp_path / "flwr.log")


def test_a_program_that_takes_too_long_is_stopped_and_said(stand_in):
    slow = stand_in("time.sleep(60)")
    with pytest.raises(FedshiftError, match=r"could not submit a run within 0 seconds \(.*see .*log"):
        programs._finish(slow, "submit a run", 0.1)
    assert slow.code is not None


PARTS = [
    ("flwr.supernode.runtime.run_clientapp", "install_from_fab", "run_clientapp"),
    ("flwr.supernode.runtime.run_clientapp", "get_load_client_app_fn", "run_clientapp"),
    ("flwr.superlink.runtime.run_serverapp", "install_from_fab", "run_serverapp"),
    ("flwr.supercore.superexec.run_superexec", "get_executor", "run_superexec"),
    ("flwr.supernode.start_client_internal", "time", "start_client_internal"),
    ("flwr.supercore.heartbeat", "HEARTBEAT_DEFAULT_INTERVAL", ""),
    ("flwr.supernode.fleet_http_connection", "HEARTBEAT_DEFAULT_INTERVAL", ""),
    ("flwr.supernode.fleet_http_connection", "make_simple_http_retry_invoker", ""),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("module", "name", "reader"), PARTS)
def test_a_part_of_flower_is_replaced_or_nothing_starts(module, name, reader, monkeypatch):
    found = importlib.import_module(module)
    own = getattr(found, name)
    monkeypatch.setattr(found, name, own)  # put back afterwards
    programs.replace_part(module, name, "ours", used_by=reader)
    assert getattr(found, name) == "ours"
    found.__dict__[name] = own
    if reader:
        with monkeypatch.context() as patched:
            patched.setattr(found, reader, lambda: None)
            with pytest.raises(SystemExit, match=f"does not use {name}, which fedshift"):
                programs.replace_part(module, name, "ours", used_by=reader)
        assert getattr(found, name) is own
    monkeypatch.delattr(found, name)
    with pytest.raises(SystemExit, match=rf"{module} of flwr 1\.\d+.* does not use {name}, which fedshift replaces"):
        programs.replace_part(module, name, "ours", used_by=reader)


def test_a_cut_during_a_handshake_is_no_wrong_certificate(monkeypatch):
    connection = importlib.import_module("flwr.supernode.fleet_http_connection")
    name = "make_simple_http_retry_invoker"
    own = getattr(connection, name)
    monkeypatch.setattr(connection, name, own)  # put back afterwards
    programs.retry_after_cuts()
    errors = [
        httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)"),
        httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out"),
        httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired"),
    ]
    assert list(map(own().should_giveup, errors)) == [True, True, True]
    assert list(map(getattr(connection, name)().should_giveup, errors)) == [False, False, True]


def test_retries_that_cannot_be_set_start_nothing(monkeypatch):
    utils = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    monkeypatch.setattr(utils, "pull_objects", lambda ids, **how: None)
    with pytest.raises(SystemExit, match=r"pull_objects of flwr .* has no initial_backoff"):
        programs.poll_quickly()


@pytest.mark.parametrize("found", ["1.40.2", "1.43.0", "2.0"])
def test_a_version_of_flower_that_was_not_run_is_refused(found, monkeypatch):
    programs.check_flower()
    monkeypatch.setattr(programs, "version", lambda name: found)
    with pytest.raises(UsageError, match=rf"flwr {found} is installed, but .* was run with only 1.41 and 1.42"):
        programs.check_flower()


def test_a_supernode_asks_as_often_as_it_is_told(monkeypatch):
    from flwr.supernode import start_client_internal as node

    slept = []
    monkeypatch.setattr(node, "time", node.time)
    monkeypatch.setattr(programs.time, "sleep", slept.append)
    programs._poll_every(0.25)
    node.time.sleep(3)
    node.time.sleep(0.1)
    assert slept == [0.25, 0.1]
    assert node.time.monotonic() > 0
