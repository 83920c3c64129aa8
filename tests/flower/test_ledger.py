"""A site's ledger says what left, and shows every later change."""

import json
from hashlib import sha256

import pytest

from fedshift.flower.site.ledger import FILE, Ledger, read_ledger
from fedshift.flower.transport.arrays import from_record
from fedshift.flower.transport.exchange import Exchange
from fedshift.utils.errors import FedshiftError
from tests.flower.sites import RUN, Heard, SiteGrid, coordinator, sites_of, spec_for


@pytest.fixture
def served(tmp_path, machine):
    """A folder with the sites of a short experiment with FedBN, and what each node answered."""
    folder = tmp_path / "served"
    spec, answers = spec_for(rounds=2, evaluate_every=1), {}
    grid = SiteGrid(sites_of(spec, folder))
    grid.tamper = lambda node, question, answer: answers.setdefault(node, []).append((question, answer)) or answer
    assert coordinator(spec, grid, folder / "run", Heard()).run()
    return folder, answers


def test_each_message_is_there_with_what_was_told_and_what_left(served):
    folder, answers = served
    entries = list(read_ledger(folder / "photo"))
    assert [entry.content["asked"] for entry in entries] == [
        "describe",
        "train",
        "evaluate",
        "train",
        "evaluate",
        "evaluate",  # with BatchNorm statistics estimated anew
        "end",
    ]
    assert [entry.content["round"] for entry in entries] == [None, 1, 1, 2, 2, 2, None]
    for entry, (question, answer) in zip(entries, answers[2], strict=True):
        assert (entry.content["run"], entry.content["answered"]) == (RUN, answer.kind)
        assert entry.content["asked"] == question.kind
        told = json.loads(json.dumps(dict(answer.facts)))
        assert told.pop("ledger") == {"number": entry.number, "digest": entry.digest}
        assert entry.content["told"] == told
        for record, arrays in answer.arrays.items():
            digest = sha256(b"".join(name.encode() + b"\0" + arrays[name].data for name in sorted(arrays)))
            left = entry.content["left"][record]
            assert (left["entries"], left["digest"]) == (len(arrays), digest.hexdigest())
            assert left["bytes"] == sum(tensor.nbytes for tensor in from_record(arrays).values())
    names = [
        entry.content["left"]["shared"].get("names") for entry in entries if entry.content["answered"] == "trained"
    ]
    assert names[0] == sorted(answers[2][1][1].arrays["shared"])
    assert names[1] is None  # the same
    assert not any("running_mean" in name for name in names[0])


def test_a_line_that_was_changed_removed_or_inserted_is_found(served, tmp_path):
    lines = (served[0] / "pen" / FILE).read_bytes().splitlines(keepends=True)
    changed = [*lines[:2], lines[2].replace(b'"evaluate"', b'"evaluatE"'), *lines[3:]]
    for content, number in ((changed, 4), ([*lines[:2], *lines[3:]], 3), ([*lines[:3], lines[1], *lines[3:]], 4)):
        (tmp_path / FILE).write_bytes(b"".join(content))
        with pytest.raises(FedshiftError, match=f"line {number} does not follow the line before it"):
            list(read_ledger(tmp_path))
    (tmp_path / FILE).write_bytes(b"".join([lines[0], b"[]\n"]))
    with pytest.raises(FedshiftError, match="line 2 was changed"):
        list(read_ledger(tmp_path))


def test_after_a_crash_the_chain_goes_on(served, tmp_path):
    content = (served[0] / "pen" / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:-20])
    Ledger(tmp_path).write(Exchange(kind="train", run=8), Exchange(kind="refused", facts={"why": "x"}))
    entries = list(read_ledger(tmp_path))
    assert len(entries) == len(content.splitlines())
    assert entries[-1].content["run"] == 8


def test_the_command_shows_and_verifies(served, cli, tmp_path):
    done = cli("ledger", served[0] / "photo")
    assert done.code == 0, done.err
    assert "train, round 1: trained; shared: " in done.out
    assert "7 entries; " in done.out
    assert "The chain is whole, and not signed: no key is known (--key); last digest: " in done.out
    found = [json.loads(line) for line in cli("ledger", served[0] / "photo", "--json").out.splitlines()]
    assert [entry["number"] for entry in found] == [1, 2, 3, 4, 5, 6, 7]
    (tmp_path / FILE).write_text("{}\n")
    assert "line 1 was changed" in cli("ledger", tmp_path).err
    assert "cannot be read" in cli("ledger", tmp_path / "nothing").err
