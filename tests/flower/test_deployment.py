"""Real processes: a SuperLink and three SuperNodes with TLS and keys, what may be killed of them, and what is left."""

import json
from pathlib import Path

import pytest
import torch

from fedshift.data.nuclei import nuclei
from fedshift.results.summary import read_summary
from tests.conftest import images, write_npz
from tests.flower import kills
from tests.flower.processes import command_of, descendants, gone, kill, machines
from tests.flower.sites import list_rows, same_as_in_process, spec_for

KILLED = {
    "SuperNode": ("photo", "main() flower-supernode", "it is started again"),
    "message": ("photo", "main() flower-superexec", "it is started again"),  # its copy which waits for the answer
    "executor": ("photo", "main() flower-superexec", "work on a message ended"),
    "SuperLink": ("coordinator", "main() flower-superlink", "and are restarted"),
}
"""Whose child is killed, what its command names, and what is said then."""
LOOPBACK = {"127.0.0.1", "::1", "localhost", "0.0.0.0"}  # the last one: where the SuperLink listens


NAMES = ("pen", "photo", "print")


@pytest.fixture
def files(tmp_path):
    """A directory with each site's data, which processes read sooner than they make digits."""
    folder = tmp_path / "data"
    folder.mkdir()
    for place, name in enumerate(NAMES):
        (x, y), (x_test, y_test) = images(24, 50 * place, 2 * place), images(12, 50 * place, 2 * place + 1)
        write_npz(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return str(folder)


def gated(files, **changes):
    """An experiment whose rounds can be held up at a site."""
    own = {"data": files, "model": "tests.flower.gated:network", "rounds": 3, "evaluate_every": 3}
    return spec_for(**own | {"samples": None, "image_size": None} | changes)


@pytest.mark.slow
def test_two_sites_with_keys_are_one_process_bit_for_bit_and_talk_to_nobody_else(tmp_path, files):
    spec = spec_for(data=files, domains="pen,photo", samples=None, image_size=None, rounds=2, evaluate_every=2)
    with machines(tmp_path, spec) as two:
        coordinator = two.serve("--min-clients", 2)
        sites = [two.join(name) for name in two.names]
        coordinator.says("round 1: pen, photo took part")
        started = [descendants(process.pid) for process in (coordinator, *sites)]
        if two.isolated:
            interfaces = Path(f"/proc/{coordinator.pid}/net/dev").read_text().splitlines()[2:]
            assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites] == [0, 0]
        for processes in started:
            gone(processes)
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")
    assert (two.served / "report.html").exists()
    connected = [json.loads(line) for line in two.watched.read_text().splitlines()]
    assert {host for host, _ in connected} <= LOOPBACK
    assert {Path(name).name for _, name in connected} >= {"flower-supernode", "flwr", "flower-superexec"}


@pytest.mark.slow
def test_masks_of_three_hospitals_are_learned_as_in_one_process_bit_for_bit(tmp_path):
    folder, sources = tmp_path / "data", ("fluor_696", "stain_violet", "bright_1024")
    folder.mkdir()
    for hospital, source in zip(NAMES, sources, strict=True):
        client = nuclei().limit_samples(8).client(source)
        parts = {"train": client.train, "test": client.test.take(torch.arange(6))}
        write_npz(
            folder / f"{hospital}.npz",
            **{f"{kind}_{part}": getattr(split, kind).numpy() for part, split in parts.items() for kind in "xy"},
        )
    settings = {"model": "unet-small(width=4)", "rounds": 2, "batch_size": 4, "samples": None, "image_size": None}
    spec = spec_for(data=str(folder), **settings)
    with machines(tmp_path, spec) as three:
        coordinator = three.serve("--min-clients", 3)
        sites = [three.join(name) for name in three.names]
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites] == [0, 0, 0]
        assert three.rounds == [three.names] * 2
    same_as_in_process(spec, three.served, tmp_path, tmp_path / "reference")
    found, expected = (read_summary(place) for place in (three.served, tmp_path / "reference"))
    assert (found.task, found.metric) == ("segmentation", "dice")
    assert list_rows(found) == list_rows(expected)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["site", *KILLED, "coordinator"])
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
        elif victim == "coordinator":
            coordinator.kill()
            three.release("photo")
            coordinator = three.serve("--min-clients", 3, resume=True)
        else:
            place, name, consequence = KILLED[victim]
            whose = coordinator if place == "coordinator" else sites[place]
            kill(whose.child(name, first=victim == "executor"))
            whose.says(consequence)
            three.release("photo")
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites.values()] == [0, 0, 0]
        assert three.rounds == [three.names] * 3
    same_as_in_process(spec, three.served, tmp_path, tmp_path / "reference")


@pytest.mark.slow
def test_random_kills_freezes_and_link_cuts_change_no_bit(tmp_path):
    assert kills.run(tmp_path, seed=0, faults=4)["faults"] > 0


TAKE = """
import sys
import fedshift.flower
import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
asked = AcquireTaskRequest(supported_task_types=[sys.argv[3]]).SerializeToString()
answer = httpx.post(
    f"{sys.argv[1]}://{sys.argv[2]}/v1/runtime/acquire-task", content=asked, verify=False,
    headers={"content-type": "application/protobuf"},
)
print(answer.status_code)
"""
"""What asks one of Flower's programs for a task, as its SuperExec does, without the secret."""


@pytest.mark.slow
def test_another_account_of_a_machine_takes_no_task(tmp_path, files):
    with machines(tmp_path, gated(files, domains="pen,photo", rounds=1, evaluate_every=1)) as two:
        two.hold("photo", 1)
        coordinator = two.serve("--min-clients", 2)
        sites = {name: two.join(name) for name in two.names}
        two.held("photo", sites["photo"])
        for process, program, kind in (
            (sites["photo"], "main() flower-supernode", "flwr-clientapp"),
            (coordinator, "main() flower-superlink", "flwr-serverapp"),
        ):
            words = command_of(process.child(program)).split()
            address = f"127.0.0.1:{words[words.index('--port') + 1]}"
            assert two.run(TAKE, "http" if process is sites["photo"] else "https", address, kind) == "401"
        everything = [command_of(each) for each in descendants(coordinator.pid) | descendants(sites["photo"].pid)]
        assert not [command for command in everything if "--token" in command]
        two.release("photo")
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites.values()] == [0, 0]


@pytest.mark.slow
def test_proxies_of_the_environment_ipv6_and_a_long_folder_are_no_obstacle(tmp_path, files, monkeypatch):
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # where nothing listens
    monkeypatch.setenv("NO_PROXY", "localhost")
    spec = spec_for(data=files, domains="pen,photo", samples=None, image_size=None, rounds=1)
    with machines(tmp_path, spec) as two:
        two.host = "[::1]"
        coordinator = two.serve("--min-clients", 2, "--host", "::")
        sites = [two.join(name) for name in two.names]
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites] == [0, 0]
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_site_that_is_gone_holds_nobody_up_and_takes_part_again_when_it_is_back(tmp_path, files):
    spec = gated(files, rounds=5, evaluate_every=5)
    with machines(tmp_path, spec) as three:
        three.hold("pen", 1)
        three.hold("photo", 2)
        heard = tmp_path / "heard.jsonl"
        coordinator = three.serve("--min-clients", 2, "--alert", f"tee -a {heard}")
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
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites.values()] == [0, 0, 0]
        assert "photo has left (2 connected)" in coordinator.said
        alert = json.loads(heard.read_text().partition("}")[0] + "}")
        assert (alert["event"], alert["text"]) == ("left_out", "round 2: photo is left out: it has left")
        others = ["pen", "print"]
        assert three.rounds == [["pen", "photo"], others, others, others, ["pen", "photo", "print"]]
    assert [file.name for file in sorted(tmp_path.glob("photo/*/*/state-*"))] == [
        "state-1.safetensors", "state-5.safetensors",
    ]  # fmt: skip
