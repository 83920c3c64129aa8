"""A site's record says what left, counts it for all programs and wherever the data are, and shows later changes."""

import json
import shutil
import sqlite3
from contextlib import closing
from threading import Thread

import pytest

from fedshift.flower.messages import RefusedMessage, digest_records, from_record
from fedshift.flower.site.record import Record, RecordFailed, name_data
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower.sites import PHOTO, serve, sites_of, spec_for

EVENTS = ["describe", "train", "evaluate", "train", "evaluate", "evaluate"]
"""The last one measures with BatchNorm statistics that are estimated again."""


@pytest.fixture(scope="module")
def served(tmp_path_factory, machine):
    """The record of the site photo in a short experiment with FedBN, and what it answered."""
    folder, spec, answers = tmp_path_factory.mktemp("served"), spec_for(evaluate_every=1), []
    sites = sites_of(spec, folder)
    sites[PHOTO].account = folder / "photo.db"
    serve(spec, folder, sites, tamper=lambda node, question, answer: answers.append((node, answer)) or answer)
    return sites[PHOTO].account, [answer for node, answer in answers if node == PHOTO]


@pytest.fixture
def copy(served, tmp_path):
    return shutil.copy(served[0], tmp_path / "record.db")


def change(path, *statements):
    with closing(sqlite3.connect(path)) as file, file:
        for statement in statements:
            file.execute(statement)


def test_each_answer_is_there_with_what_left(served):
    path, answers = served
    entries = list(Record(path).read())
    left = [answer for answer in answers if answer.kind not in ("agreed", "told")]  # these disclose nothing
    assert [(entry.event, entry.round) for entry in entries] == list(zip(EVENTS, [None, 1, 1, 2, 2, 2], strict=True))
    for entry, answer in zip(entries, left, strict=True):
        told = json.loads(json.dumps(dict(answer.facts)))
        assert {key: entry.content[key] for key in entry.content.keys() - {"left", "discloses"}} == told
        assert entry.content.get("left", {}).keys() == answer.arrays.keys()
        for name, arrays in answer.arrays.items():
            assert entry.content["left"][name] == {
                "entries": len(arrays), "names": sorted(arrays), "digest": digest_records({"": arrays}),
                "bytes": sum(tensor.nbytes for tensor in from_record(arrays).values()),
            }  # fmt: skip
    assert not any("running_mean" in name for name in entries[1].content["left"]["shared"]["names"])


COLUMNS = (
    "time = '2020-01-01'", "event = 'train'", "trial = 'e/other'", "round = 7", "question = NULL", "uploads = 1",
    "evaluations = 0", "descriptions = 1", "spent = 0.5", "steps = 4", "bytes = bytes + 1",
    "content = replace(content, '\"test\"', '\"tesT\"')", "digest = 'x'",
)  # fmt: skip
INSERTED = (
    "UPDATE entry SET number = -number WHERE number > 2", "UPDATE entry SET number = 1 - number WHERE number < 0",
    "CREATE TABLE other AS SELECT * FROM entry WHERE number = 2", "UPDATE other SET number = 3",
    "INSERT INTO entry SELECT * FROM other",
)  # fmt: skip
CHANGES = (
    *(((f"UPDATE entry SET {value} WHERE number = 3",), 3) for value in COLUMNS), (INSERTED, 3),
    *(((f"DELETE FROM entry WHERE number = {number}",), number + 1) for number in (1, 3)),
)  # fmt: skip


@pytest.mark.parametrize(("statements", "number"), CHANGES)
def test_a_row_that_was_changed_removed_or_inserted_is_found(statements, number, copy):
    assert len(list(Record(copy).read())) == len(EVENTS)
    change(copy, *statements)
    with pytest.raises(FedshiftError, match=f"record.db: entry {number} or the one before was changed, removed or add"):
        list(Record(copy).read())


def test_programs_at_the_same_time_count_every_answer_and_none_too_many(tmp_path):
    """Each of four programs would send ten, and thirty are allowed; what one checks holds until its row is there."""

    def send(name):
        record = Record(tmp_path / "record.db", "data", "fingerprint")

        def check():
            if record.count("uploads") > 29:
                raise RefusedMessage("no more")

        for number in range(10):
            try:
                record.append("train", {}, check, trial="e/t", question=f"{name} {number}", uploads=1)
            except RefusedMessage:
                refused.append(name)

    refused, threads = [], [Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 10
    assert len(list(Record(tmp_path / "record.db").read())) == 30


def test_rows_of_trials_and_experiments_of_similar_names_are_not_taken_for_theirs(tmp_path):
    """Names are compared whole and with capitals, and none of their signs is a pattern."""
    record = Record(tmp_path / "record.db", "data", "fingerprint")
    for number, trial in enumerate(("e1/fed%2B-seed1", "e1/fed%2B-seed10", "E1/fed_2B-seed1", "e1/fedXX2B-seed1")):
        record.append("train", {}, trial=trial, question=str(number), uploads=1, spent=0.5)
    assert [record.count("uploads", trial=name) for name in ("e1/fed%2B-seed1", "e1/fed", "")] == [1, 0, 4]
    assert [record.count("uploads", without=name) for name in ("e1/", "E1/", "e/")] == [1, 3, 4]
    assert record.sum_spent(without="e1/") == 0.5


def test_data_that_moved_or_grew_keep_their_rows(tmp_path):
    place, moved, path = tmp_path / "images", tmp_path / "elsewhere", tmp_path / "record.db"
    place.mkdir()
    (place / "1.png").write_bytes(b"one")

    def send(data):
        record = Record(path, *name_data(str(data), None))
        record.append("train", {}, question=str(record.count("uploads")), uploads=1)
        return record.count("uploads")

    assert send(place) == 1
    (place / "2.png").write_bytes(b"two")  # grew
    assert send(place) == 2
    place.rename(moved)
    (moved / "2.png").rename(moved / "two.png")
    assert send(moved) == 3
    assert Record(path, "other", "data").count("uploads") == 0
    assert send(tmp_path / "unknown") == 1
    change(path, "INSERT INTO data SELECT DISTINCT book, 'both', 'same' FROM data WHERE place <> 'other'")
    merged = Record(path, "both", "same")  # data that were counted apart, until they turned out to be the same
    assert merged.count("uploads") == 3  # of which one question was asked of both
    assert len(list(merged.read())) == 4


@pytest.mark.parametrize("fault", ["a folder", "damaged", "another database"])
def test_a_record_that_is_damaged_or_cannot_be_written_is_named_before_work(fault, tmp_path, cli):
    path = tmp_path / "record.db"
    if fault == "a folder":
        path.mkdir()
    elif fault == "damaged":
        path.write_text("{}" * 999)
    else:
        change(path, "CREATE TABLE entry (number INTEGER)")
    with pytest.raises(UsageError, match=r"record.db, which counts what the data were used for, is damaged or cannot"):
        Record(path, "data", "fingerprint")
    done = cli("join", "localhost:1", "--insecure", "--data", "digits", "--name", "pen", "--account", path)
    assert done.code == 2
    assert "name another file (--account), or bring it back from a copy" in " ".join(done.err.split())
    assert "looking for the coordinator" not in done.out


def test_a_row_that_cannot_be_written_is_not_there(copy):
    record = Record(copy, "data", "fingerprint")
    change(copy, "CREATE TRIGGER full BEFORE INSERT ON entry BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    with pytest.raises(RecordFailed, match=r"cannot be written \(disk is full\), and nothing leaves without a row"):
        record.append("train", {}, question="q", uploads=1)
    change(copy, "DROP TRIGGER full")
    record.append("train", {}, question="q", uploads=1)
    assert len(list(record.read())) == len(EVENTS) + 1


def test_the_command_shows_and_verifies(served, cli, copy, tmp_path):
    done = cli("ledger", copy)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[: len(EVENTS)]] == list(map(str, range(1, len(EVENTS) + 1)))
    train = next(answer for answer in served[1] if answer.kind == "trained")
    assert f"/fedbn-seed0, round 1: {len(train.arrays['shared'])} entries, " in lines[1]
    assert lines[2].endswith("/fedbn-seed0, round 1: 1 measurements")
    assert any(line.startswith("left with a round's upload: ") and "of the model" in line for line in lines)
    assert "digits/photo: 2 uploads, 3 evaluations, 1 descriptions in all" in lines
    *_, last = Record(copy).read()
    assert " ".join(lines[-2:]).endswith(f"No entry was changed or removed; last digest: {last.digest}")
    shown = [json.loads(line) for line in cli("ledger", copy, "--json", "--since", 4).out.splitlines()]
    assert [(entry["number"], entry["event"]) for entry in shown] == [(5, "evaluate"), (6, "evaluate")]
    change(copy, "DELETE FROM entry WHERE number = 2")  # is found though it is not shown
    done = cli("ledger", copy, "--since", 4)
    assert (done.code, "entry 3 or the one before was changed, removed or added" in done.err) == (1, True)
    done = cli("ledger", tmp_path / "nothing.db")
    assert done.code == 2
    assert "is no record of a site: name record.db, which is next to" in " ".join(done.err.split())
    assert not (tmp_path / "nothing.db").exists()
