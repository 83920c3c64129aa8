"""A coordinator that goes back, to an older copy or to a checkpoint that was kept, and what sites keep for that."""

import shutil
import time
from dataclasses import replace

import pytest
from torch import nn

from fedshift.core.kernel import init_client
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.engines.sequential import Sequential
from fedshift.flower.coordinator.rounds import go_back
from fedshift.flower.messages import RefusedMessage
from fedshift.flower.site.record import Record
from fedshift.flower.site.state import SiteState
from fedshift.methods.fedavg import fedavg
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower.gated import NETWORK
from tests.flower.processes import machines
from tests.flower.sites import ALL, OTHERS, Heard, SiteGrid, same_as_in_process, serve, sites_of, spec_for

pytestmark = pytest.mark.usefixtures("machine")
OWN = {"model": NETWORK, "evaluate_every": 2}


def test_a_site_keeps_the_rounds_that_a_coordinator_may_go_back_to(tmp_path):
    plan = prepare(fedavg(), nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    kept = SiteState(tmp_path, "photo", plan, "data", keep=4)

    def save(base, round, upload=""):
        kept.save(init_client(plan), base, round, upload)
        return kept.list_rounds()

    for round in range(1, 7):
        rounds = save(round - 1, round)
    assert rounds == [3, 4, 5, 6]
    assert save(3, 4) == [3, 4, 5, 6]  # the coordinator went back; should that be a mistake, later rounds are there
    assert save(4, 7) == [3, 4, 7]  # the uploads of rounds 5 and 6 were not used
    kept.keep = 1
    assert save(7, 8, "a" * 64) == [4, 7, 8]  # the base, its successor and predecessor
    kept.load_after(8, "a" * 64)
    kept.load_after(8)
    with pytest.raises(RefusedMessage, match="is of another round 8 than the coordinator's, which went back"):
        kept.load_after(8, "b" * 64)


@pytest.mark.parametrize("method", ["fedbn", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_a_coordinator_restored_from_an_older_copy_repeats_the_rounds_since(method, tmp_path):
    more = {"steps": 5, "batch_size": 5} if method == "scaffold" else {}
    spec, served, copy = spec_for(method, rounds=4, **OWN, **more), tmp_path / "served", tmp_path / "copy"
    grid, said = SiteGrid(sites_of(spec, tmp_path)), []
    serve(spec, tmp_path, grid, after=lambda done: done.round == 1 and shutil.copytree(served, copy))
    shutil.rmtree(served)
    shutil.move(copy, served)
    grid.sites[2].say = said.append
    serve(spec, tmp_path, grid)
    same_as_in_process(spec, served)
    # what is repeated is said, and counted
    again = [line.partition(":")[0] for line in said if "(again" in line]
    assert again == [f"{method}, round {round} (again" for round in (2, 3, 4)]
    uploads = [entry.round for entry in Record(tmp_path / "record.db").read() if entry.event == "train"]
    assert sorted(uploads) == sorted([1, 2, 3, 4, 2, 3, 4] * 3)


def test_a_site_that_was_away_for_rounds_goes_on_where_it_was(tmp_path, monkeypatch):
    """The bits of one process in which that client takes no part in the same rounds; its program starts again."""
    spec = spec_for("ditto", model=NETWORK, rounds=6, evaluate_every=3)
    grid, away = SiteGrid(sites_of(spec, tmp_path)), range(2, 6)

    def after(done):
        grid.away = {2} if done.round + 1 in away else set()
        if done.round + 1 == away.stop:
            days_later = time.time() + 5 * 86400
            monkeypatch.setattr(time, "time", lambda: days_later)
            grid.sites[2] = sites_of(spec, tmp_path)[2]

    heard = serve(spec, tmp_path, grid, after=after, clients=2)
    assert heard.took_part == [ALL, *[OTHERS] * 4, ALL]
    for text in ("photo is away: rounds continue without it", "round 3: photo is not measured, because it is away"):
        assert heard.notices.count(text) == 1
    bases = [question.facts["base"] for node, question in grid.asked if (node, question.kind) == (2, "train")]
    assert bases == [0, 1]
    rounds = iter(range(1, 7))
    find = lambda self, names: OTHERS if next(rounds) in away else names  # noqa: E731
    monkeypatch.setattr(Sequential, "find_available", find)
    same_as_in_process(spec, tmp_path / "served")


def flip(path):
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["a bit of the checkpoint", "records of a copy made while a round ended", "a state"])
def test_what_is_damaged_is_named_and_the_run_goes_on_from_the_round_before(what, tmp_path):
    spec, served = spec_for(rounds=4, **OWN), tmp_path / "served"
    grid, heard = SiteGrid(sites_of(spec, tmp_path)), Heard()
    serve(spec, tmp_path, grid, heard=Heard().stop_after(3), ends=False)
    folder = served / "trials" / "fedbn-seed0"
    (state,) = tmp_path.glob("photo/*/fedbn-seed0/state-3.safetensors")
    damaged = {"a state": state, "a bit of the checkpoint": folder / "checkpoint.safetensors"}.get(what)
    if damaged:
        flip(damaged)
    else:
        damaged = folder / "rounds.jsonl"
        damaged.write_text("".join(damaged.read_text().splitlines(keepends=True)[:2]))
    if what == "a state":
        with pytest.raises(FedshiftError, match="round 4: only 2 of 3 clients sent a usable upload"):
            serve(spec, tmp_path, grid, heard=heard)
        lost = "the state of client 'photo' after round 3 cannot be read"
        assert any(lost in line and "--from-round 2)" in line for line in heard.notices)
        with pytest.raises(UsageError, match=r"has no model of round 0, only of rounds 1, 2, 3: name one"):
            go_back(served, 0)
        go_back(served, 2)
    heard = serve(spec, tmp_path, grid)
    assert [done.round for done in heard.rounds] == [3, 4]
    if what != "a state":
        assert any(str(damaged) in line for line in heard.notices)
        assert any("The run continues from the previous checkpoint, after round 2" in line for line in heard.notices)
    same_as_in_process(spec, served)


def test_where_no_checkpoint_is_whole_nothing_is_changed(tmp_path):
    spec, served = spec_for(rounds=1, **OWN), tmp_path / "served"
    serve(spec, tmp_path)
    folder = served / "trials" / "fedbn-seed0"
    shutil.rmtree(folder / "history")
    with pytest.raises(UsageError, match="has no model of round 1, only of rounds none"):
        go_back(served, 1)
    flip(folder / "checkpoint.safetensors")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FedshiftError, match=r"checkpoint\.safetensors is corrupt or truncated"):
        serve(replace(spec, rounds=2), tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


COPY = "import subprocess, sys; subprocess.run(['cp', '-a', *sys.argv[1:]], check=True)"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedbn", "scaffold"])
def test_a_copy_that_is_six_rounds_old_goes_on_with_the_same_bits(method, tmp_path):
    """Copied with `cp` while it runs, restored after `kill -9` of the coordinator; sites do nothing."""
    more = {"steps": 5, "batch_size": 5} if method == "scaffold" else {}
    spec = spec_for(method, rounds=9, evaluate_every=3, model=NETWORK, domains="pen,photo", **more)
    with machines(tmp_path, spec) as two:
        coordinator = two.serve("--min-clients", 2)
        sites = [two.join(name) for name in two.names]
        coordinator.says("round 1: ")
        two.run(COPY, two.served, tmp_path / "copy")
        copied = len((tmp_path / "copy" / "trials" / f"{method}-seed0" / "rounds.jsonl").read_text().splitlines())
        coordinator.says(f"round {copied + 6}: ")
        coordinator.kill()
        shutil.rmtree(two.served)
        shutil.move(tmp_path / "copy", two.served)
        coordinator = two.serve("--min-clients", 2, resume=True)
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites] == [0, 0]
        assert two.rounds == [two.names] * 9
    same_as_in_process(spec, two.served)
