"""What strangers can take of a SuperLink's memory, connections and time."""

import json
from pathlib import Path

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

import pytest

from fedshift.flower.transport.connections import OF_ADDRESS, Connections, find_place
from tests.flower import cuts
from tests.flower.processes import machines
from tests.flower.sites import same_as_in_process
from tests.flower.test_deployment import files, gated  # noqa: F401  (a fixture)


class Peer:
    """A connection from ``place``."""

    def __init__(self, place, number):
        self.place, self.peer = place, (place, number)


def fill(connections, places):
    """Open connections from ``places`` in turn as long as they are admitted; return how many each has."""
    found = dict.fromkeys(places, 0)
    refused, number = set(), 0
    while refused != set(places):
        for place in places:
            if connections.admits(place, "10.9.9.9"):
                connections.add(Peer(find_place(place), number))
                found[place] += 1
            else:
                refused.add(place)
            number += 1
    return found


def test_strangers_leave_room_for_known_sites_and_for_this_machine():
    connections = Connections()
    assert fill(connections, ["10.0.0.1"]) == {"10.0.0.1": OF_ADDRESS}
    strangers = fill(connections, [f"10.1.0.{number}" for number in range(200)])
    assert sum(strangers.values()) + OF_ADDRESS == connections.most // 2
    assert not connections.admits("10.2.0.1", "10.9.9.9")
    connections.homes[b"north"] = "10.2.0.1"
    assert connections.admits("10.2.0.1", "10.9.9.9")
    for here in ("127.0.0.1", "::1", "10.9.9.9"):
        assert connections.admits(here, "10.9.9.9")
    assert fill(connections, ["10.2.0.1"]) == {"10.2.0.1": connections.most // 2}
    assert not connections.admits("127.0.0.1", "10.9.9.9")


def test_an_ipv6_network_counts_as_one_address():
    assert find_place("2001:db8::1") == find_place("2001:db8::2:3") != find_place("2001:db8:0:1::1")


FLOOD = """
import json, socket, ssl, sys, threading, time
host, port, root = "localhost", int(sys.argv[1]), sys.argv[2]
context = ssl.create_default_context(cafile=root)
head = b"POST /v1/fleet/push-object HTTP/1.1\\r\\nHost: x\\r\\ncontent-type: application/protobuf\\r\\n"
size, said = 15_500_000, []

def connect():
    return context.wrap_socket(socket.create_connection((host, port)), server_hostname=host)

def push(declared):
    talk = connect()
    try:
        talk.sendall(head + (f"content-length: {size}" if declared else "transfer-encoding: chunked").encode())
        talk.sendall(b"\\r\\n\\r\\n" if declared else b"\\r\\n\\r\\n%x\\r\\n" % size)
        for _ in range(size // 100_000 - 1):
            talk.sendall(bytes(100_000))
        time.sleep(10)
        said.append(talk.recv(12).decode())
    except OSError:
        said.append("cut")

def trickle(kind):
    talk = socket.create_connection((host, port)) if kind == "handshake" else connect()
    began = time.monotonic()
    try:
        talk.sendall({"handshake": b"\\x16", "headers": head, "body": head + b"content-length: 9000\\r\\n\\r\\n"}[kind])
        while time.monotonic() < began + 120:
            time.sleep(1)
            talk.sendall(b"" if kind == "handshake" else b"x")
            talk.settimeout(0.1)
            try:
                if not talk.recv(1):
                    break
            except TimeoutError:
                pass
    except OSError:
        pass
    said.append([kind, time.monotonic() - began < 60])

tasks = [threading.Thread(target=push, args=(number % 2 == 0,)) for number in range(60)]
tasks += [threading.Thread(target=trickle, args=(kind,)) for kind in ("handshake", "headers", "body") * 5]
for task in tasks:
    task.start()
for task in tasks:
    task.join()
print(json.dumps(said))
"""
"""What a stranger does: 60 uploads of 15.5 MB, half of them without a length, and requests that never end."""


def memory_of(process):
    """The megabytes of a process, and the most that it ever had."""
    lines = dict(line.split(":") for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return [int(lines[name].split()[0]) / 1e3 for name in ("VmRSS", "VmHWM")]


@pytest.mark.slow
def test_a_stranger_takes_little_memory_and_no_time_of_a_run(tmp_path, files):  # noqa: F811
    spec = gated(files, domains="pen,photo")
    with machines(tmp_path, spec) as two:
        two.hold("photo", 2)
        coordinator = two.serve("--min-clients", 2, seconds=900)
        sites = {name: two.join(name) for name in two.names}
        two.held("photo", sites["photo"])
        link = coordinator.child("main() flower-superlink")
        before, _ = memory_of(link)
        said = json.loads(two.run(FLOOD, str(two._port), str(tmp_path / "tls" / "ca.crt")))
        _, most = memory_of(link)
        print(f"memory of the SuperLink: {before:.0f} MB, and at most {most:.0f} MB under 60 uploads of 15.5 MB")
        assert most - before < 100
        assert len(said) == 75
        assert all(answer in ("HTTP/1.1 404", "cut") for answer in said if isinstance(answer, str))
        assert [ended for ended in said if isinstance(ended, list) and not ended[1]] == []
        two.release("photo")
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites.values()] == [0, 0]
        assert two.rounds == [["pen", "photo"]] * 3
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")


@pytest.mark.slow
def test_a_link_that_is_slow_and_cut_again_and_again_changes_no_bit(tmp_path):
    seen = cuts.run(tmp_path, megabytes=16, rate=2)
    assert seen["cuts"] >= 4
