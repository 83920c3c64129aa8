"""The coordinator's port: what strangers reach and cost, what nodes get, and what is said when it cannot be opened."""

import asyncio
import re
import socket
import ssl
import threading
import time
import warnings
from base64 import b64encode
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import fedshift.flower  # isort: skip  (before anything of flwr: it keeps Flower quiet)

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedshift.flower import internals

with warnings.catch_warnings():  # what Flower imports (typer, click) is no matter of ours
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.app import Array, ArrayRecord, Message, RecordDict

    from fedshift.flower.coordinator import link
    from fedshift.flower.site.node import Connection, answer_all, connect

    for _name in internals.HOME:
        getattr(internals, _name)

from fedshift.flower.coordinator.link import Connections, find_place, serve_nodes
from fedshift.flower.keys import UNKNOWN, PublicKeys, load_private_key
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower.processes import free_port, make_key, make_keys

FLEET = "/v1/fleet/pull-messages"


class Port:
    """A coordinator's port in this process, with keys of north and south in ``folder``; ``grid``: its grid."""

    def __init__(self, folder, stack, host="localhost", tls=True):
        self.folder, self.host, self.port, self.said = folder, host, free_port(), []
        self.keys = PublicKeys(folder / "tls", self.said.append) if tls else None
        place = folder / "tls" if tls else None
        self.grid = stack.enter_context(serve_nodes(host, self.port, place, self.keys, folder / "superlink.log"))
        self.url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"
        self.context = ssl.create_default_context(cafile=folder / "tls" / "ca.crt") if tls else True

    def key(self, name):
        return load_private_key(self.folder / "keys" / f"{name}.key")

    def ask(self, headers, content=b"", path=FLEET):
        """The answer to a request."""
        headers = [
            ("content-type", "application/protobuf"),
            *(headers.items() if isinstance(headers, dict) else headers),
        ]
        return httpx.post(self.url + path, headers=headers, content=content, verify=self.context, trust_env=False)

    def connect(self, name):
        root = str(self.folder / "tls" / "ca.crt") if self.keys else None
        address = self.url.partition("//")[2]
        key = self.key(name) if self.keys else ec.generate_private_key(ec.SECP384R1())
        return connect(address, root, key, threading.Event(), register=root is None)

    def dial(self):
        """A connection with TLS, on which nothing is said yet."""
        plain = socket.create_connection(("localhost", self.port))
        return self.context.wrap_socket(plain, server_hostname="localhost")


def sign(key, *, by=None, ahead=0.0):
    """The headers of a node with ``key``, signed with the key ``by``, at a clock that is ``ahead`` seconds ahead."""
    stamp = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat()
    signature = (by or key).sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
    public = internals.public_key_to_bytes(key.public_key())
    encoded = {"flwr-public-key": public, "flwr-signature": signature}
    return {"flwr-timestamp": stamp, **{name: b64encode(value).decode() for name, value in encoded.items()}}


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Who this process is to Flower, put back afterwards."""
    for number in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(internals.TaskIdentity, number, 1)


@contextmanager
def opened(folder, **options):
    make_keys(folder, ["north", "south"], ["localhost", "::1"])
    with ExitStack() as stack:
        yield Port(folder, stack, **options)


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for number in ("_run_id", "_node_id", "_task_id"):
            patch.setattr(internals.TaskIdentity, number, 1)
        with opened(tmp_path_factory.mktemp("port")) as made:
            yield made


PATHS = [
    "/v1/control/start-run", "/v1/control/stop-run", "/v1/runtime/acquire-task", "/v1/runtime/push-messages", "/docs",
    "/redoc", "/openapi.json", "/v1/fleet", "/",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_node_reaches_only_what_nodes_need_and_a_stranger_nothing(port, path):
    assert port.ask(sign(port.key("north")), path=path).status_code == 404
    stranger = port.ask({}, path=path)
    assert (stranger.status_code, stranger.json()["detail"]) == (404, UNKNOWN)


def test_a_request_is_of_a_known_key_that_signed_it_now(port):
    north, other = port.key("north"), ec.generate_private_key(ec.SECP384R1())
    unsigned = {"flwr-public-key": sign(north)["flwr-public-key"]}
    cases = {
        404: [{}, sign(other), {"flwr-public-key": "no base64"}, [*sign(other).items(), *sign(north).items()]],
        401: [
            unsigned, sign(north, by=port.key("south")), sign(north, by=other), sign(north, ahead=6),
            sign(north, ahead=-306), sign(north) | {"flwr-timestamp": "now"},
            sign(north) | {"flwr-timestamp": "2026-01-01T00:00:00"}, sign(north) | {"flwr-signature": "no base64"},
        ],
    }  # fmt: skip
    for status, several in cases.items():
        for headers in several:
            answer = port.ask(headers)
            assert answer.status_code == status
            assert {*answer.headers} <= {"date", "content-length", "connection"}
    assert port.ask(sign(north), path="/v1/fleet/register-node").status_code in (401, 412)


def test_a_claimed_address_is_not_believed(port):
    before = dict(port_connections(port).homes)
    claimed = dict.fromkeys(("x-forwarded-for", "x-real-ip", "forwarded"), "10.0.0.7")
    port.ask(sign(port.key("north")) | claimed)
    assert {*port_connections(port).homes.values()} <= {"", *before.values()}


def port_connections(port):
    """The counts of a port's connections, as its listening socket has them."""
    calls = port.grid._client.GetNodes.__closure__
    server = next(cell.cell_contents for cell in calls if isinstance(cell.cell_contents, link._Server))
    return server.sockets[0].connections


def test_a_body_is_bounded_before_it_is_read(port):
    large = sign(port.key("north"))
    head = "".join(f"{name}: {value}\r\n" for name, value in large.items())
    for length in ("content-length: 1000000000", f"content-length: {2**24 + 1}", "transfer-encoding: chunked"):
        for headers, status in ((head, b"413"), ("", b"404")):
            with port.dial() as talk:
                talk.sendall(f"POST {FLEET} HTTP/1.1\r\nhost: x\r\n{headers}{length}\r\n\r\n".encode())
                assert talk.recv(12).endswith(status)


def test_more_of_one_keys_requests_at_a_time_are_refused_until_others_are_done(tmp_path):
    """Without a network: bodies that do not arrive."""
    make_keys(tmp_path, ["north"])
    known = PublicKeys(tmp_path / "tls", print)
    state, statuses = SimpleNamespace(get_node_id_by_public_key=lambda key: 1), []

    async def app(scope, receive, send):
        await receive()

    async def send(message):
        statuses.append(message.get("status"))

    async def ask():
        nodes, key = link.KnownNodes(app, state, known, {}), load_private_key(tmp_path / "keys" / "north.key")
        headers = [(name.encode(), value.encode()) for name, value in sign(key).items()]
        scope = {"headers": [*headers, (b"content-length", b"16777216")], "client": ("10.0.0.1", 5)}
        never = asyncio.Event()
        tasks = [asyncio.ensure_future(nodes(dict(scope), never.wait, send)) for _ in range(4)]
        await asyncio.sleep(0)
        await nodes(dict(scope), never.wait, send)
        assert statuses == [503, None]
        never.set()
        await asyncio.gather(*tasks)
        await nodes(dict(scope), never.wait, send)
        assert statuses == [503, None]

    asyncio.run(ask())


def test_a_slow_body_ends_as_if_the_node_had_gone(monkeypatch):
    monkeypatch.setattr(link, "BODY_SECONDS", 0.01)

    async def take():
        return await link._bound(lambda: asyncio.sleep(60))()

    assert asyncio.run(take()) == {"type": "http.disconnect"}


def test_keys_that_are_removed_replaced_or_added_count_at_once(tmp_path):
    with opened(tmp_path) as port:
        before = port.key("north")
        assert port.ask(sign(before)).status_code == 401  # known, but its node is not activated yet
        with port.connect("south") as south:
            assert south.receive() is None
            (tmp_path / "tls" / "nodes" / "south.pub").unlink()
            make_key(tmp_path, "north")
            make_key(tmp_path, "west")
            with pytest.raises(httpx.HTTPStatusError, match="404"):
                south.receive()
        assert port.ask(sign(before)).status_code == 404
        for name in ("north", "west"):
            with port.connect(name) as made:
                assert made.receive() is None


def hold(connections, places):
    """Open connections from ``places`` in turn as long as they are admitted; return how many each has."""
    held, refused = dict.fromkeys(places, 0), set()
    while refused != set(places):
        for place in places:
            if connections.admits(find_place(place)):
                connections.counts[find_place(place)] += 1
                held[place] += 1
            else:
                refused.add(place)
    return held


def test_strangers_leave_room_for_known_sites_and_for_this_machine():
    connections = Connections()
    assert hold(connections, ["10.0.0.1"]) == {"10.0.0.1": link.OF_ADDRESS}
    strangers = hold(connections, [f"10.1.0.{number}" for number in range(200)])
    assert sum(strangers.values()) + link.OF_ADDRESS == connections.most // 2
    assert not connections.admits("10.2.0.1")
    connections.homes[b"north"] = "10.2.0.1"
    assert connections.admits("10.2.0.1")
    assert all(connections.admits(find_place(here)) for here in ("127.0.0.1", "::1"))
    assert hold(connections, ["10.2.0.1"]) == {"10.2.0.1": connections.most // 2}
    assert not connections.admits("")
    assert find_place("2001:db8::1") == find_place("2001:db8::2:3") != find_place("2001:db8:0:1::1")


def test_connections_beyond_the_bounds_are_closed_before_tls_and_counted_until_they_end(tmp_path, monkeypatch):
    monkeypatch.setattr(link, "CONNECTIONS", 600)
    monkeypatch.setattr(link.resource, "getrlimit", lambda _: (24, 24))  # twelve connections
    with opened(tmp_path) as port, ExitStack() as stack:

        def is_open():
            talk = stack.enter_context(socket.create_connection(("127.0.0.1", port.port)))
            talk.settimeout(0.2)
            try:
                return talk.recv(1) != b""
            except TimeoutError:
                return True
            except ConnectionError:
                return False

        assert [is_open() for _ in range(14)] == [True] * 12 + [False] * 2
        stack.close()
        wait_until(lambda: port_connections(port).counts.total() == 0)
        with port.connect("north") as made:
            assert made.receive() is None


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_connection_without_a_signed_request_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(link, "HEAD_SECONDS", 1.0)
    with opened(tmp_path) as port, ExitStack() as stack:
        silent = stack.enter_context(socket.create_connection(("localhost", port.port)))  # no handshake
        idle, slow = stack.enter_context(port.dial()), stack.enter_context(port.dial())
        slow.sendall(f"POST {FLEET} HTTP/1.1\r\n".encode())
        with port.connect("north") as made:
            for talk in (silent, idle, slow):
                talk.settimeout(30)
                with suppress(ConnectionError):
                    assert talk.recv(1) == b""
            assert made.receive() is None
        wait_until(lambda: port_connections(port).counts.total() == 0)


def test_a_connection_is_cut_only_if_no_request_has_begun_since_the_last():
    """A request that begins at the moment of the check is in progress, although nobody has looked at its headers."""
    cut, former, new = [], {"path": "/"}, {"path": "/"}
    connection = link._Protocol.__new__(link._Protocol)
    connection.transport = SimpleNamespace(abort=lambda: cut.append(connection.scope))
    for before, scope in ((None, new), (former, new), (None, None), (former, former)):
        connection.scope = scope
        connection._check(before)
    assert cut == [None, former]


def roundtrip(port, made, array):
    """What comes back of a message with ``array`` that a node answers with its opposite."""
    with ExitStack() as stack:
        stop, failures = threading.Event(), []

        def work():
            def answer(question):
                stop.set()
                (record,) = question.content.array_records.values()
                opposite = ArrayRecord({"x": Array(-record["x"].numpy())})
                return Message(RecordDict({"a": opposite}), reply_to=question)

            try:
                answer_all(made, answer, stop, 0.02)
            except Exception as error:
                failures.append(error)

        internals.TaskIdentity.node_id = 1
        message = Message(RecordDict({"a": ArrayRecord({"x": Array(array)})}), made.node.node_id, "train", ttl=600)
        (number,) = port.grid.push_messages([message])
        thread = threading.Thread(target=work)
        thread.start()
        stack.callback(thread.join)
        replies = []
        while not replies and not failures:
            replies = list(port.grid.pull_messages([number]))
            time.sleep(0.02)
        assert not failures, failures
        return replies[0].content.array_records["a"]["x"].numpy()


@pytest.mark.parametrize("options", [{}, {"tls": False, "host": "127.0.0.1"}, {"host": "::1"}])
def test_a_message_goes_to_a_node_and_back(tmp_path, options):
    array = np.arange(4e6, dtype=np.float32)  # several of Flower's parts
    with opened(tmp_path, **options) as port, port.connect("north") as made:
        nodes = list(port.grid.get_nodes())
        assert [node.node_id for node in nodes] == [made.node.node_id]
        if port.keys:
            assert nodes[0].public_key == port.keys()["north"]
        np.testing.assert_array_equal(roundtrip(port, made, array), -array)
    assert "Activated node_id" in (tmp_path / "superlink.log").read_text()


def test_an_address_that_cannot_be_bound_is_named_with_the_reason(tmp_path):
    make_keys(tmp_path, ["north"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for host, number, said in (
            ("127.0.0.1", port, "Address already in use"), ("192.0.2.1", port, "Cannot assign requested address"),
            ("no-such-host.invalid", port, "Name or service not known|Temporary failure|nodename nor servname"),
        ):  # fmt: skip
            with (
                pytest.raises(UsageError, match=f"cannot listen on {host}:{number}: ({said}); choose another"),
                serve_nodes(host, number, None, None, tmp_path / "log"),
            ):
                pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_port_that_fails_later_is_noticed(tmp_path, monkeypatch):
    with opened(tmp_path) as port:
        assert list(port.grid.get_nodes()) == []

        def fail(*_):
            raise RuntimeError("made to order")

        monkeypatch.setattr(link.uvicorn.Server, "on_tick", fail)
        wait_until(lambda: "Server" not in {type(each).__name__[1:] for each in threading.enumerate()})
        for call in (port.grid.get_nodes, lambda: port.grid.pull_messages(["x"])):
            with pytest.raises(FedshiftError, match=r"port is closed \(RuntimeError: made to order\): .*--resume"):
                call()


class Failing:
    """A client whose requests fail as ``errors`` say, and then succeed."""

    def __init__(self, *errors):
        self.errors, self.count = list(errors), 0

    def PullMessages(self, request):  # noqa: N802
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return SimpleNamespace(messages_list=[])

    PushObject = PullMessages


def status_error(code):
    request = httpx.Request("POST", "https://localhost:9091")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(code, request=request))


@pytest.fixture
def hasty():
    """A stop event that waits for nothing."""
    return SimpleNamespace(wait=lambda seconds: False)


def test_a_request_that_is_cut_or_comes_at_a_busy_time_is_repeated(hasty):
    client = Failing(httpx.ReadError("cut"), *map(status_error, (502, 503, 504)), httpx.RemoteProtocolError("cut"))
    Connection(client, hasty, httpx.Headers()).call("PushObject", None)
    assert client.count == 6


FOR_GOOD = [
    ("PushObject", status_error(404), 1), ("PushObject", status_error(500), 1), ("PushObject", status_error(503), 10),
    ("PushObject", httpx.ConnectError("refused"), 10), ("PullMessages", httpx.ConnectError("refused"), 10),
    ("PullMessages", httpx.ReadError("a message may be lost"), 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "count"), FOR_GOOD)
def test_a_request_that_fails_for_good_is_raised(hasty, name, error, count):
    client = Failing(*[error] * 20)
    with pytest.raises(type(error)):
        Connection(client, hasty, httpx.Headers()).call(name, None)
    assert client.count == count


def test_what_is_no_coordinator_is_said(hasty):
    with pytest.raises(ConnectionError, match=r"no coordinator of fedshift .*: check the address"):
        Connection(Failing(ValueError("Invalid protobuf")), hasty, httpx.Headers()).call("PullMessages", None)


def test_an_unforeseen_failure_of_the_heartbeat_ends_the_next_call(hasty):
    made = Connection(SimpleNamespace(SendNodeHeartbeat=lambda _: 1 / 0), hasty, httpx.Headers())
    made.node = internals.Node(node_id=1)
    made.beat_until(SimpleNamespace(wait=lambda _: False, is_set=lambda: False))
    with pytest.raises(ZeroDivisionError):
        made.receive()


def test_no_other_file_names_what_is_inside_flower():
    source, public = Path(fedshift.flower.__file__).parents[1], r"flwr\.(app|clientapp|serverapp)[. ]"
    for path in source.rglob("*.py"):
        lines = [line for line in path.read_text().splitlines() if re.match(r"\s*(from|import) flwr\b", line)]
        assert [line for line in lines if not re.search(public, line)] == [], path


def test_each_name_from_inside_flower_is_there_and_one_that_is_not_is_named(monkeypatch):
    missing = [name for name in internals.HOME if not hasattr(internals, name)]
    assert missing == []
    assert version("flwr").startswith(internals.RELEASES)
    monkeypatch.setitem(internals.HOME, "gone", "flwr.common.constant")
    monkeypatch.setitem(internals.HOME, "moved", "flwr.common.nowhere")
    for name in ("gone", "moved"):
        with pytest.raises(UsageError, match=rf"flwr 1\.4.* has no {name} in flwr.common.* \(1\.41 or 1\.42\): pip"):
            getattr(internals, name)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = internals.other


def test_the_pages_state_the_bounds():
    docs = Path(__file__).parents[2] / "docs"
    operators, security = (" ".join((docs / f"{name}.md").read_text().split()) for name in ("operators", "security"))
    ahead, behind = internals.SYSTEM_TIME_TOLERANCE, internals.TIMESTAMP_TOLERANCE + internals.SYSTEM_TIME_TOLERANCE
    assert f"is {ahead} seconds or more ahead, or {behind} seconds or more behind" in operators
    assert f"connections before TLS: {link.CONNECTIONS}, or half of the open files" in security
    assert f"Strangers have half of them, and {link.OF_ADDRESS} from one address" in security
    assert f"headers may take {link.HEAD_SECONDS:.0f} seconds, a body {link.LARGEST // 2**20} MiB and ten" in security
    assert link.BODY_SECONDS == 600
