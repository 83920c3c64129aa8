"""A coordinator that goes back, to an older copy or to a checkpoint that was kept, and what sites keep for that."""

import shutil
from dataclasses import replace

import pytest
from torch import nn

from fedshift.core.kernel import init_client
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.flower.server.anchors import Anchors
from fedshift.flower.server.history import go_back
from fedshift.flower.site.account import read_books
from fedshift.flower.site.ledger import compare_anchors, read_ledger
from fedshift.flower.site.site_state import Retention, SiteState
from fedshift.flower.transport.arrays import RefusedMessage
from fedshift.flower.transport.chain import read_chain
from fedshift.methods.fedavg import fedavg
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower.processes import machines
from tests.flower.sites import RUN, Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for
from tests.flower.test_deployment import files  # noqa: F401 - a fixture

NETWORK = "tests.flower.gated:network"
OWN = {"model": NETWORK, "evaluate_every": 2}


@pytest.fixture
def state(tmp_path):
    """Makes the state of a trial, whose folder is among those of one experiment."""
    plan = prepare(fedavg(), nn.Linear(2, 2), optimizer=SGD(lr=0.1))

    def make(trial="a", **retention):
        made = SiteState(tmp_path / trial, "photo", plan, "data", Retention(**retention))
        made.after = lambda base, round, upload="": made.save(init_client(plan), base, round, upload)
        return made

    return make


def test_a_site_keeps_the_rounds_that_a_coordinator_may_go_back_to(state):
    kept = state(rounds=2)
    for round in range(1, 7):
        kept.after(round - 1, round)
    assert kept.list_rounds() == [2, 3, 4, 5, 6]  # the base, its successor and predecessor, and two more
    kept.after(3, 4)  # the coordinator went back; should that be a mistake, the rounds after it are there
    assert kept.list_rounds() == [2, 3, 4, 5, 6]
    kept.after(4, 7)  # the uploads of rounds 5 and 6 were not used
    assert kept.list_rounds() == [2, 3, 4, 7]


def test_states_take_no_more_of_the_disk_than_the_site_allows(state):
    one = state(rounds=50, bytes=10**9)
    for round in range(1, 9):
        one.after(round - 1, round)
    assert len(one.list_rounds()) == 8
    size = one._path(1).stat().st_size
    other = state("b", rounds=50, bytes=7 * size + 100)  # headers may differ by some bytes
    for round in range(1, 5):
        other.after(round - 1, round)
    assert other.list_rounds() == [1, 2, 3, 4]
    assert one.list_rounds() == [6, 7, 8]  # the last three of another trial stay
    other.after(4, 5)
    assert other.list_rounds() == [2, 3, 4, 5]


def test_a_state_of_another_past_is_not_used(state):
    kept = state()
    kept.after(0, 1, "a" * 64)
    kept.load_after(1, "a" * 64)
    kept.load_after(1)
    with pytest.raises(RefusedMessage, match="is of another round 1 than the coordinator's, which went back"):
        kept.load_after(1, "b" * 64)


@pytest.mark.parametrize("method", ["fedbn", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_a_coordinator_restored_from_an_older_copy_repeats_the_rounds_since(method, tmp_path, machine, cli):
    more = {"steps": 5, "batch_size": 5} if method == "scaffold" else {}
    spec, served, copy = spec_for(method, rounds=4, **OWN, **more), tmp_path / "served", tmp_path / "copy"
    grid, heard = SiteGrid(sites_of(spec, tmp_path, code=frozenset({NETWORK}))), Heard()
    heard.after = lambda done: done.round == 1 and shutil.copytree(served, copy)
    assert coordinator(spec, grid, served, heard).run()
    shutil.rmtree(served)
    shutil.move(copy, served)
    grid.run, heard, said = RUN + 1, Heard(), []
    grid.sites[2].say = said.append
    assert coordinator(spec, grid, served, heard).run()
    same_as_in_process(spec, served, tmp_path, tmp_path / "reference")
    # what is repeated is recorded as that, and counted
    assert [line.partition(":")[0] for line in said if "(again" in line] == [
        f"{method}, round {round} (again" for round in (2, 3, 4)
    ]
    (use,) = [use for book in read_books(tmp_path / "account.json")[0] for use in book.trials.values()
              if "photo" in "".join(book.paths)]  # fmt: skip
    assert (use.uploads, use.round) == (7, 4)
    out = cli("ledger", tmp_path / "photo").out
    assert "train, round 2 (again, after the coordinator went back from round 4): trained" in out
    assert out.count("(again") == 4
    # and both sides say that the coordinator's record went back
    ((back),) = [entry.content for entry in read_ledger(tmp_path / "photo") if entry.content["event"] == "went_back"]
    assert f"ledgers went back from {back['had']} entries to {back['has']}: it was restored from an older copy" in out
    (line,) = [line for line in said if "the coordinator's record" in line]
    assert line.startswith(f"the coordinator's record of ledgers had {back['had']} entries, and has {back['has']} now")
    told = [line for line in heard.notices if "directory was restored from an older copy" in line]
    assert len(told) == 3
    record = served / "machines" / "ledgers.jsonl"
    found = compare_anchors(list(read_ledger(tmp_path / "photo")), record, tmp_path / "photo")
    assert "It lacks " in found
    assert f"from {back['had']} entries to {back['has']}" in found


def test_a_record_that_is_said_to_have_gone_back_is_written_down_once(tmp_path):
    said, head = [], {"number": 1, "digest": "0" * 64}
    anchors = Anchors(tmp_path / "ledgers.jsonl", "e", None, said.append)
    for _ in range(3):
        anchors.note("north", head, {"had": 9, "has": 2})
    Anchors(tmp_path / "ledgers.jsonl", "e", None, said.append).note("north", head, {"had": 9, "has": 2})
    assert len(said) == 1
    assert [entry.content["event"] for entry in read_chain(tmp_path / "ledgers.jsonl")].count("went_back") == 1
    for nonsense in (7, {}, {"had": 2, "has": 9}, {"had": True, "has": 0}, {"had": 2**63, "has": 0}):
        with pytest.raises(RefusedMessage, match="it does not report how many entries this record has lost"):
            anchors.note("north", head, nonsense)


def flip(path):
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["a bit of the checkpoint", "records of a copy made while a round ended", "a state"])
def test_what_is_damaged_is_named_and_the_run_goes_on_from_the_round_before(what, tmp_path, machine):
    spec, served = spec_for(rounds=4, **OWN), tmp_path / "served"
    grid, heard = SiteGrid(sites_of(spec, tmp_path, code=frozenset({NETWORK}))), Heard()
    heard.after = lambda done: (heard.stop.set(), heard.changed.set()) if done.round == 3 else None
    assert not coordinator(spec, grid, served, heard).run()
    folder = served / "trials" / "fedbn-seed0"
    heard = Heard()
    if what == "a bit of the checkpoint":
        flip(folder / "checkpoint.safetensors")
        damaged = folder / "checkpoint.safetensors"
    elif what == "a state":
        (damaged,) = tmp_path.glob("photo/*/fedbn-seed0/state-3.safetensors")
        flip(damaged)
        with pytest.raises(FedshiftError, match="round 4: only 2 of 3 clients sent a usable upload"):
            coordinator(spec, grid, served, heard).run()
        assert any(f"in {damaged} cannot be read: " in line and "--from-round 2)" in line for line in heard.notices)
        with pytest.raises(UsageError, match=r"has no model of round 0, only of rounds 1, 2, 3: name one"):
            go_back(served, 0)
        go_back(served, 2)
    else:
        damaged = folder / "rounds.jsonl"
        damaged.write_text("".join(damaged.read_text().splitlines(keepends=True)[:2]))
    assert coordinator(spec, grid, served, heard).run()
    assert [done.round for done in heard.rounds] == [3, 4]
    assert any(str(damaged) in line for line in heard.notices)
    if what != "a state":
        assert any("The run continues from the previous checkpoint, after round 2" in line for line in heard.notices)
    same_as_in_process(spec, served, tmp_path, tmp_path / "reference")


def test_where_no_checkpoint_is_whole_nothing_is_changed(tmp_path, machine):
    spec, served = spec_for(rounds=1, **OWN), tmp_path / "served"
    assert coordinator(spec, SiteGrid(sites_of(spec, tmp_path, code=frozenset({NETWORK}))), served, Heard()).run()
    folder = served / "trials" / "fedbn-seed0"
    shutil.rmtree(folder / "history")
    with pytest.raises(UsageError, match="has no model of round 1, only of rounds none"):
        go_back(served, 1)
    flip(folder / "checkpoint.safetensors")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    grid = SiteGrid(sites_of(spec, tmp_path, code=frozenset({NETWORK})))
    with pytest.raises(FedshiftError, match=r"checkpoint\.safetensors is corrupt or truncated"):
        coordinator(replace(spec, rounds=2), grid, served, Heard()).run()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


COPY = "import subprocess, sys; subprocess.run(['cp', '-a', *sys.argv[1:]], check=True)"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedbn", "scaffold"])
def test_a_copy_that_is_six_rounds_old_goes_on_with_the_same_bits(method, tmp_path, files, cli):  # noqa: F811
    """Copied with `cp` while it runs, restored after `kill -9` of the coordinator; sites do nothing."""
    more = {"steps": 5, "batch_size": 5} if method == "scaffold" else {}
    own = {"data": files, "domains": "pen,photo", "samples": None, "image_size": None, "model": NETWORK}
    spec = spec_for(method, rounds=9, evaluate_every=3, **own, **more)
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
    same_as_in_process(spec, two.served, tmp_path, tmp_path / "reference")
    assert "directory was restored from an older copy" in coordinator.said
    record = two.served / "machines" / "ledgers.jsonl"
    done = cli("ledger", tmp_path / "photo", "--key", tmp_path / "tls" / "nodes" / "photo.pub", "--anchors", record)
    assert done.code == 0, done.err
    assert "(again, after the coordinator went back from round " in done.out
    assert "It lacks " in done.out
