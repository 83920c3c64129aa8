"""Real processes, one on each machine: equal bits, kills, absence, suspended machines, keys that change, attacks."""

import json
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fedshift.data.nuclei import nuclei
from fedshift.results.summary import read_summary
from tests.conftest import write_npz
from tests.flower import cuts, kills
from tests.flower.processes import machines, make_key, until
from tests.flower.sites import list_rows, same_as_in_process, spec_for
from tests.flower.test_keys import hospital

LOOPBACK = {"127.0.0.1", "::1", "localhost", "0.0.0.0"}  # the last one: where the coordinator listens
NETWORK = "tests.flower.gated:network"
pytestmark = pytest.mark.slow


@pytest.fixture
def files(tmp_path):
    """A directory with each site's data, which processes read sooner than they make digits."""
    return kills.write_data(tmp_path)


def gated(files, **changes):
    """An experiment whose rounds can be held up at a site."""
    own = {"data": files, "model": NETWORK, "rounds": 3, "evaluate_every": 3}
    return spec_for(**own | {"samples": None, "image_size": None} | changes)


def end_well(coordinator, sites):
    """Wait for the end of all, which is a good one."""
    assert coordinator.ends() == 0, coordinator.said
    assert [site.ends() for site in sites] == [0] * len(sites), [site.said for site in sites]


def test_two_sites_with_keys_are_one_process_bit_for_bit_and_talk_to_nobody_else(tmp_path, files):
    spec = spec_for(data=files, domains="pen,photo", samples=None, image_size=None, rounds=2, evaluate_every=2)
    with machines(tmp_path, spec) as two:
        coordinator = two.serve("--min-clients", 2)
        sites = [two.join(name) for name in two.names]
        coordinator.says("round 1: pen, photo took part")
        assert [process.children for process in (coordinator, *sites)] == [[], [], []]
        if two.isolated:
            interfaces = Path(f"/proc/{coordinator.pid}/net/dev").read_text().splitlines()[2:]
            assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
        end_well(coordinator, sites)
        assert "in use" not in "".join(site.said for site in sites)
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")
    assert (two.served / "report.html").exists()
    connected = [json.loads(line) for line in two.watched.read_text().splitlines()]
    assert {host for host, _ in connected} <= LOOPBACK


def test_masks_of_three_hospitals_are_learned_as_in_one_process_bit_for_bit(tmp_path):
    folder, sources = tmp_path / "data", ("fluor_696", "stain_violet", "bright_1024")
    folder.mkdir()
    for hospital_name, source in zip(kills.NAMES, sources, strict=True):
        client = nuclei().limit_samples(8).client(source)
        parts = {"train": client.train, "test": client.test.take(torch.arange(6))}
        write_npz(
            folder / f"{hospital_name}.npz",
            **{f"{kind}_{part}": getattr(split, kind).numpy() for part, split in parts.items() for kind in "xy"},
        )
    settings = {"model": "unet-small(width=4)", "rounds": 2, "batch_size": 4, "samples": None, "image_size": None}
    spec = spec_for(data=str(folder), **settings)
    with machines(tmp_path, spec) as three:
        end_well(three.serve("--min-clients", 3), [three.join(name) for name in three.names])
        assert three.rounds == [three.names] * 2
    same_as_in_process(spec, three.served, tmp_path, tmp_path / "reference")
    found, expected = (read_summary(place) for place in (three.served, tmp_path / "reference"))
    assert (found.task, found.metric) == ("segmentation", "dice")
    assert list_rows(found) == list_rows(expected)


@pytest.mark.parametrize("victim", ["site", "coordinator"])
def test_what_is_killed_in_mid_round_goes_on_as_if_it_had_not_been(victim, tmp_path, files):
    spec = gated(files)
    with machines(tmp_path, spec) as three:
        three.hold("photo", 2)
        coordinator = three.serve("--min-clients", 3)
        sites = {name: three.join(name) for name in three.names}
        three.held("photo", sites["photo"])
        if victim == "site":
            sites["photo"].kill()
            coordinator.says("photo has left")
            three.release("photo")
            sites["photo"] = three.join("photo")
        else:
            coordinator.kill()
            three.release("photo")
            coordinator = three.serve("--min-clients", 3, resume=True)
        end_well(coordinator, sites.values())
        assert three.rounds == [three.names] * 3
    same_as_in_process(spec, three.served, tmp_path, tmp_path / "reference")


def test_random_kills_freezes_and_link_cuts_change_no_bit(tmp_path):
    assert kills.run(tmp_path, seed=0, faults=4)["faults"] > 0


def test_a_link_that_is_slow_and_cut_again_and_again_changes_no_bit(tmp_path):
    assert cuts.run(tmp_path, megabytes=16, rate=2)["cuts"] >= 4


def test_proxies_of_the_environment_and_ipv6_are_no_obstacle(tmp_path, files, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # where nothing listens
    monkeypatch.setenv("NO_PROXY", "localhost")
    spec = spec_for(data=files, domains="pen,photo", samples=None, image_size=None, rounds=1)
    with machines(tmp_path, spec) as two:
        two.host = "[::1]"
        end_well(two.serve("--min-clients", 2, "--host", "::"), [two.join(name) for name in two.names])


def test_in_plain_text_a_backbone_that_is_frozen_gives_the_bits_of_one_process(tmp_path):
    spec = spec_for(
        "fixbn(switch=0)", model="tests.flower.test_remote_engine:frozen_network", samples=24, domains="pen,photo"
    )
    with machines(tmp_path, spec, tls=False) as two:
        code = "--code", spec.model
        end_well(two.serve("--min-clients", 2, *code), [two.join(name, *code) for name in two.names])
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")


def test_a_site_that_is_gone_holds_nobody_up_and_takes_part_again_when_it_is_back(tmp_path, files):
    spec = gated(files, rounds=5, evaluate_every=5)
    with machines(tmp_path, spec) as three:
        three.hold("pen", 1)
        three.hold("photo", 2)
        coordinator = three.serve("--min-clients", 2)
        sites = {name: three.join(name) for name in ("pen", "photo")}
        three.held("pen", sites["pen"])
        sites["print"] = three.join("print")
        coordinator.says("print is connected")
        three.release("pen")
        three.hold("pen", 4)
        three.held("photo", sites["photo"])
        sites["photo"].kill()
        three.release("photo")
        coordinator.says("round 2: photo is left out: it has left")
        three.held("pen", sites["pen"])
        sites["photo"] = three.join("photo")
        coordinator.says("photo is connected", times=2)
        three.release("pen")
        end_well(coordinator, sites.values())
        others = ["pen", "print"]
        assert three.rounds == [["pen", "photo"], others, others, others, ["pen", "photo", "print"]]


def test_keys_are_replaced_and_removed_while_it_runs_with_a_certificate_of_a_hospitals_own_authority(tmp_path, files):
    with machines(tmp_path, gated(files, rounds=4, evaluate_every=4)) as three:
        keys = tmp_path / "tls"
        for file in hospital(tmp_path / "own", names=["localhost"]).iterdir():
            file.replace(keys / file.name)
        (keys / "ca.key").unlink()
        for name, batch in (("pen", 1), ("photo", 1), ("print", 2)):
            three.hold(name, batch)
        coordinator = three.serve("--min-clients", 1, seconds=1800)
        sites = {"pen": three.join("pen")}
        three.held("pen", sites["pen"])
        sites |= {name: three.join(name) for name in ("photo", "print")}
        coordinator.says("(3 connected)")
        three.release("pen")
        three.held("photo", sites["photo"])
        make_key(tmp_path, "photo")
        coordinator.says("the key of photo")
        three.release("photo")
        three.held("print", sites["print"])
        coordinator.says("photo is connected", times=2)
        (keys / "nodes" / "pen.pub").unlink()
        coordinator.says("the key of pen")
        sites["pen"].says("the coordinator does not know this key")
        three.release("print")
        end_well(coordinator, [sites[name] for name in ("photo", "print")])
        assert three.rounds == [["pen"], ["pen", "print"], ["pen", "print"], ["photo", "print"]]


def test_a_site_whose_memory_is_limited_says_so_and_the_others_go_on(tmp_path, files):
    """As with `ulimit -v`: 4 GiB more than it took when it had connected, and a network that asks for 8 GiB."""
    spec = gated(files, model="tests.flower.gated:hungry", rounds=2, evaluate_every=2)
    with machines(tmp_path, spec) as three:
        code = "--code", "tests.flower.gated:hungry"
        three.hold("pen", 1)
        coordinator = three.serve("--min-clients", 2, *code, seconds=1200)
        others = [three.join(name, *code) for name in ("pen", "print")]
        three.held("pen", others[0])
        photo = three.join("photo", *code)
        coordinator.says("photo is connected")
        pages = int(Path(f"/proc/{photo.pid}/statm").read_text().split()[0])
        resource.prlimit(photo.pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + 4 * 2**30,) * 2)
        three.release("pen")
        end_well(coordinator, [photo, *others])
        assert three.rounds == [["pen", "print"]] * 2
        assert "this site has too little memory for the train question: " in photo.said
        assert "photo is left out: this site has too little memory for the train question: " in coordinator.said


def test_a_suspended_machine_takes_part_again_without_any_action(tmp_path, files):
    """A site is frozen until the coordinator has missed it, and goes on rounds later."""
    spec = gated(files, rounds=6, evaluate_every=6)
    with machines(tmp_path, spec) as three:
        three.hold("pen", 2)
        coordinator = three.serve("--min-clients", 2, seconds=1200)
        sites = {name: three.join(name) for name in three.names}
        three.held("pen", sites["pen"])
        sites["photo"].signal(signal.SIGSTOP)
        coordinator.says("photo has left")
        three.release("pen")
        three.hold("pen", 4)
        three.held("pen", sites["pen"])
        sites["photo"].signal(signal.SIGCONT)
        coordinator.says("photo is connected", times=2)
        three.release("pen")
        end_well(coordinator, sites.values())
        rounds = list(map(sorted, three.rounds))
        assert ["pen", "print"] in rounds
        assert rounds[-1] == ["pen", "photo", "print"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler makes the library that moves the clock")
def test_a_site_whose_clock_is_off_takes_part_or_says_by_how_much(tmp_path, files):
    """Flower accepts 3 seconds ahead and 200 behind, and refuses 60 ahead, until that clock is set."""
    spec = gated(files, rounds=3, evaluate_every=3)
    with machines(tmp_path, spec) as three:
        for name, ahead in {"pen": 3, "photo": -200, "print": 60, "check": 60}.items():
            three.set_clock(name, ahead)
        three.hold("pen", 2)
        coordinator = three.serve("--min-clients", 2, seconds=1200)
        sites = {name: three.join(name) for name in three.names}
        three.held("pen", sites["pen"])
        sites["print"].says("set both by the network (timedatectl set-ntp true)")
        check = three.start("check", "join", three.address("print"), "--check", *three.secured("print"))
        assert check.ends() == 1
        for said in (sites["print"].said, check.said):
            seconds = re.search(r"this machine's clock is (\d+) seconds ahead of the", " ".join(said.split()))[1]
            assert 59 <= int(seconds) <= 66  # the time until the coordinator's answer counts, at most 5 seconds
        sites["print"].kill()
        three.set_clock("print", 0)
        sites["print"] = three.join("print")
        coordinator.says("print is connected")
        three.release("pen")
        end_well(coordinator, sites.values())
        assert three.rounds == [["pen", "photo"], ["pen", "photo"], three.names]
        assert not any("clock" in sites[name].said for name in ("pen", "photo"))


def test_with_too_few_sites_the_coordinator_stops_and_goes_on_when_one_is_back(tmp_path, files):
    """The site's program keeps trying: its operator does nothing."""
    spec = gated(files, domains="pen,photo", rounds=3, evaluate_every=3)
    with machines(tmp_path, spec) as two:
        two.hold("photo", 2)
        coordinator = two.serve("--min-clients", 2)
        sites = {name: two.join(name) for name in two.names}
        two.held("photo", sites["photo"])
        sites["photo"].kill()
        assert coordinator.ends() == 1
        assert "round 2: only 1 of 2" in " ".join(coordinator.said.split())
        two.release("photo")
        coordinator = two.serve("--min-clients", 2, resume=True)
        sites["photo"] = two.join("photo")
        end_well(coordinator, sites.values())
        assert two.rounds == [two.names] * 3
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")


def test_two_programs_on_one_directory_ctrl_c_twice_and_a_closed_terminal(tmp_path, files):
    spec = gated(files, domains="pen,photo", rounds=4, evaluate_every=4)
    with machines(tmp_path, spec) as two:
        two.hold("photo", 2)
        coordinator = two.serve("--min-clients", 2, seconds=1200)
        sites = {name: two.join(name) for name in two.names}
        two.held("photo", sites["photo"])
        words = "--tls", tmp_path / "tls", "--port", two.port + 1, "--code", NETWORK
        second = two.start("second", "serve", "--resume", two.served, *words)
        assert second.ends() == 1
        assert f"is in use by process {coordinator.pid}: " in second.said
        again = two.join("pen")
        assert again.ends() == 1
        assert f"is in use by process {sites['pen'].pid}: " in again.said
        coordinator.signal(signal.SIGINT)
        coordinator.says("Stopping after this round; press Ctrl-C again to stop at once.")
        coordinator.signal(signal.SIGINT)
        assert coordinator.ends() == 130
        assert "continue with: fedshift serve" in coordinator.said
        sites["photo"].signal(signal.SIGINT)
        sites["photo"].says("Leaving; press Ctrl-C again to stop at once.")
        assert sites["photo"].ends() == 130
        two.release("photo")
        two.hold("photo", 2)
        coordinator, sites["photo"] = two.serve("--min-clients", 2, resume=True, seconds=1200), two.join("photo")
        two.held("photo", sites["photo"])
        for process in (coordinator, sites["photo"]):  # whose terminals are closed
            process.signal(signal.SIGHUP)
            assert process.ends() == -signal.SIGHUP
        two.release("photo")
        coordinator, sites["photo"] = two.serve("--min-clients", 2, resume=True, seconds=1200), two.join("photo")
        until(lambda: coordinator.code is not None, "the end of", coordinator)
        end_well(coordinator, sites.values())
        assert two.rounds == [two.names] * 4
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")


FLOOD = """
import json, socket, ssl, sys, threading, time
host, port, root = "localhost", int(sys.argv[1]), sys.argv[2]
context = ssl.create_default_context(cafile=root)
head = b"POST /v1/fleet/push-object HTTP/1.1\\r\\nHost: x\\r\\ncontent-type: application/protobuf\\r\\n"
said, kept = [], []

def connect():
    return context.wrap_socket(socket.create_connection((host, port), timeout=120), server_hostname=host)

def push(declared):
    talk, size = connect(), 10**9
    try:
        talk.sendall(head + (f"content-length: {size}" if declared else "transfer-encoding: chunked").encode())
        talk.sendall(b"\\r\\n\\r\\n" if declared else b"\\r\\n\\r\\n%x\\r\\n" % size)
        for _ in range(size // 100_000):
            talk.sendall(bytes(100_000))
        said.append("took it all")
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
for number in range(600):
    try:
        kept.append(socket.create_connection((host, port), timeout=5))
    except OSError:
        pass
for task in tasks:
    task.join()
print(json.dumps(said))
"""
"""What strangers do: 60 uploads of 1 GB, half of them without a length, requests that never end, 600 connections."""


def memory_of(process, name):
    """The megabytes that a process has (VmRSS), or the most that it ever had (VmHWM)."""
    lines = dict(line.split(":") for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1e3


def test_strangers_take_little_memory_and_no_time_of_a_run(tmp_path, files):
    spec = gated(files, domains="pen,photo")
    with machines(tmp_path, spec) as two:
        two.hold("photo", 2)
        coordinator = two.serve("--min-clients", 2, seconds=900)
        sites = {name: two.join(name) for name in two.names}
        two.held("photo", sites["photo"])
        before = memory_of(coordinator.pid, "VmHWM")
        said = json.loads(two.run(FLOOD, str(two.port), str(tmp_path / "tls" / "ca.crt")))
        most = memory_of(coordinator.pid, "VmHWM")
        print(f"memory of the coordinator: {before:.0f} MB, and at most {most:.0f} MB under 60 uploads of 1 GB")
        assert most - before < 250  # asyncio has 256 KiB for each of 512 connections with TLS
        assert len(said) == 75
        assert {answer for answer in said if isinstance(answer, str)} == {"cut"}
        assert [ended for ended in said if isinstance(ended, list) and not ended[1]] == []
        two.release("photo")
        end_well(coordinator, sites.values())
        assert two.rounds == [["pen", "photo"]] * 3
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")
