"""What happens to a study that runs for months: absence, suspended machines, little memory, two programs, terminals."""

import os
import re
import resource
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fedshift.engines.sequential import Sequential
from fedshift.flower.site.site import LESS_MEMORY
from tests.flower.processes import descendants, gone, machines, until
from tests.flower.sites import Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for
from tests.flower.test_deployment import files, gated  # noqa: F401 - a fixture

NETWORK = "tests.flower.gated:network"


def test_a_site_that_was_away_for_rounds_goes_on_where_it_was(tmp_path, machine, monkeypatch):
    """The bits of one process in which that client takes no part in the same rounds; its program starts again."""
    spec = spec_for("ditto", model=NETWORK, rounds=6, evaluate_every=6)
    sites = sites_of(spec, tmp_path, code=frozenset({NETWORK}))
    grid, heard, away = SiteGrid(sites), Heard(), range(2, 6)

    def after(done):
        grid.away = {2} if done.round + 1 in away else set()
        if done.round + 1 == away.stop:
            days_later = time.time() + 5 * 86400
            monkeypatch.setattr(time, "time", lambda: days_later)
            grid.sites[2] = sites_of(spec, tmp_path, code=frozenset({NETWORK}))[2]

    heard.after = after
    assert coordinator(spec, grid, tmp_path / "served", heard, clients=2).run()
    assert [len(done.participants) for done in heard.rounds] == [3, 2, 2, 2, 2, 3]
    bases = [question.facts["base"] for node, question in grid.asked if (node, question.kind) == (2, "train")]
    assert bases == [0, 1]
    rounds = iter(range(1, 7))
    others = ("pen", "print")
    find = lambda self, names: others if next(rounds) in away else names  # noqa: E731
    monkeypatch.setattr(Sequential, "find_available", find)
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_site_without_memory_says_so_and_the_others_go_on(tmp_path, machine, error):
    spec, said = spec_for(model=NETWORK, rounds=2, evaluate_every=2), []
    grid, heard = SiteGrid(sites_of(spec, tmp_path, code=frozenset({NETWORK}))), Heard()
    grid.sites[2].say = said.append

    def fail(*_):
        raise error

    grid.sites[2].answers["train"] = fail
    assert coordinator(spec, grid, tmp_path / "served", heard, clients=2).run()
    why = f"this site has too little memory for the train question: {LESS_MEMORY} ({type(error).__name__}: {error})"
    assert said.count(f"failed: {why}") == 2
    assert [line for line in heard.notices if "too little memory" in line] == [
        f"round {round}: photo is left out: {why}" for round in (1, 2)
    ]


@pytest.mark.slow
def test_a_site_whose_memory_is_limited_says_so_and_the_others_go_on(tmp_path, files):  # noqa: F811
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
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in (photo, *others)] == [0, 0, 0]
        assert three.rounds == [["pen", "print"]] * 2
        assert "this site has too little memory for the train question: " in photo.said
        assert "photo is left out: this site has too little memory for the train question: " in coordinator.said


@pytest.mark.slow
def test_a_suspended_machine_takes_part_again_without_any_action(tmp_path, files):  # noqa: F811
    """All programs of a site are frozen until the coordinator has missed them, and go on rounds later."""
    spec = gated(files, rounds=6, evaluate_every=6)
    with machines(tmp_path, spec) as three:
        three.hold("pen", 2)
        coordinator = three.serve("--min-clients", 2, seconds=1200)
        sites = {name: three.join(name) for name in three.names}
        three.held("pen", sites["pen"])
        frozen = [sites["photo"].pid, *descendants(sites["photo"].pid)]
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        coordinator.says("photo has left")
        three.release("pen")
        three.hold("pen", 4)
        three.held("pen", sites["pen"])
        for process in frozen:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        coordinator.says("photo is connected", times=2)
        three.release("pen")
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites.values()] == [0, 0, 0]
        rounds = list(map(sorted, three.rounds))
        assert ["pen", "print"] in rounds
        assert rounds[-1] == ["pen", "photo", "print"]
        assert "is started again" not in sites["photo"].said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler makes the library that moves the clock")
def test_a_site_whose_clock_is_off_takes_part_or_says_by_how_much(tmp_path, files):  # noqa: F811
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
        keys = tmp_path / "tls"
        secured = "--tls", keys, "--key", keys / "nodes" / "print.key"
        check = three.start("check", "check", f"{three.host}:{three._port}", *secured)
        assert check.ends() == 1
        for said in (sites["print"].said, check.said):
            seconds = re.search(r"this machine's clock is (\d+) seconds ahead of the", said)[1]
            assert 59 <= int(seconds) <= 66  # the time until the coordinator's answer counts, at most 5 seconds
            assert "which accepts less than 5 ahead and less than 305 behind" in " ".join(said.split())
        sites["print"].kill()
        three.set_clock("print", 0)
        sites["print"] = three.join("print")
        coordinator.says("print is connected")
        three.release("pen")
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites.values()] == [0, 0, 0]
        assert three.rounds == [["pen", "photo"], ["pen", "photo"], three.names]
        assert not any("clock" in sites[name].said for name in ("pen", "photo"))


@pytest.mark.slow
def test_with_too_few_sites_the_coordinator_stops_and_goes_on_when_one_is_back(tmp_path, files):  # noqa: F811
    """The site's program keeps trying: its operator does nothing."""
    spec = gated(files, domains="pen,photo", rounds=3, evaluate_every=3)
    with machines(tmp_path, spec) as two:
        two.hold("photo", 2)
        coordinator = two.serve("--min-clients", 2)
        sites = {name: two.join(name) for name in two.names}
        two.held("photo", sites["photo"])
        sites["photo"].kill()
        assert coordinator.ends() == 1
        assert "round 2: only 1 of 2 clients sent a usable upload, and 2 must (--min-clients)" in (
            coordinator.said.replace("\n", " ")
        )
        two.release("photo")
        coordinator = two.serve("--min-clients", 2, resume=True)
        sites["photo"] = two.join("photo")
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites.values()] == [0, 0]
        assert two.rounds == [two.names] * 3
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")


@pytest.mark.slow
def test_two_programs_on_one_directory_ctrl_c_twice_and_a_closed_terminal(tmp_path, files):  # noqa: F811
    spec = gated(files, domains="pen,photo", rounds=4, evaluate_every=4)
    with machines(tmp_path, spec) as two:
        two.hold("photo", 2)
        coordinator = two.serve("--min-clients", 2, seconds=1200)
        sites = {name: two.join(name) for name in two.names}
        two.held("photo", sites["photo"])
        # two programs on one directory
        second = two.start(
            "second", "serve", "--resume", two.served, "--tls", tmp_path / "tls", "--port", two._port + 1, "--code",
            NETWORK,
        )  # fmt: skip
        assert second.ends() == 1
        assert f"is in use by process {coordinator.pid}: " in second.said
        again = two.join("pen")
        assert again.ends() == 1
        assert f"is in use by process {sites['pen'].pid}: " in again.said
        # Ctrl-C twice at the coordinator, in mid-round
        started = descendants(coordinator.pid)
        coordinator.interrupt()
        coordinator.says("Stopping after this round; press Ctrl-C again to stop at once.")
        coordinator.interrupt()
        assert coordinator.ends() == 130
        assert "continue with: fedshift serve" in coordinator.said
        gone(started)
        # Ctrl-C twice at a site, in mid-round
        started = descendants(sites["photo"].pid)
        sites["photo"].interrupt()
        sites["photo"].says("Leaving; press Ctrl-C again to stop at once.")
        with suppress(ProcessLookupError):
            sites["photo"].interrupt()
        assert sites["photo"].ends() == 130
        gone(started)
        two.release("photo")
        two.hold("photo", 2)
        coordinator, sites["photo"] = two.serve("--min-clients", 2, resume=True, seconds=1200), two.join("photo")
        two.held("photo", sites["photo"])
        # the terminals of both are closed
        for process in (coordinator, sites["photo"]):
            started = descendants(process.pid)
            os.kill(process.pid, signal.SIGHUP)
            assert process.ends() == -signal.SIGHUP
            gone(started)
        two.release("photo")
        coordinator, sites["photo"] = two.serve("--min-clients", 2, resume=True, seconds=1200), two.join("photo")
        until(lambda: coordinator.code is not None, "the end of", coordinator)
        assert coordinator.code == 0, coordinator.said
        assert [site.ends() for site in sites.values()] == [0, 0]
        assert two.rounds == [two.names] * 4
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")
