"""A site's ledger says what left, and shows every later change."""

import json
from dataclasses import replace
from hashlib import sha256

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedshift.flower.server.anchors import Anchors
from fedshift.flower.site.account import read_books
from fedshift.flower.site.ledger import FILE, KEYS, Ledger, compare_anchors, read_ledger
from fedshift.flower.transport.arrays import RefusedMessage, from_record
from fedshift.flower.transport.chain import Chain, read_chain
from fedshift.flower.transport.exchange import Exchange
from fedshift.flower.transport.pki import make_authority
from fedshift.flower.transport.signatures import Signer, Verifier, fingerprint, load_private_key
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
        "evaluate",  # with re-estimated BatchNorm statistics
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
    assert "The chain is unbroken, and not signed: no key is known (--key); last digest: " in done.out
    found = [json.loads(line) for line in cli("ledger", served[0] / "photo", "--json").out.splitlines()]
    assert [entry["number"] for entry in found] == [1, 2, 3, 4, 5, 6, 7]
    (tmp_path / FILE).write_text("{}\n")
    assert "line 1 was changed" in cli("ledger", tmp_path).err
    assert "cannot be read" in cli("ledger", tmp_path / "nothing").err


@pytest.fixture
def signed(tmp_path, machine):
    """A folder with the sites of a short experiment whose questions and ledgers are signed, and all questions."""
    keys, spec = tmp_path / "tls", spec_for(rounds=1)
    make_authority(keys, [], ["pen", "photo", "print"])
    sites = sites_of(spec, tmp_path, checked=Verifier(keys / "ca.crt", "localhost"))
    for site in sites.values():
        site.key = load_private_key(keys / "nodes" / f"{site.name}.key")
    grid = SiteGrid(sites)
    served = coordinator(spec, grid, tmp_path / "run", Heard())
    served.nodes.signed = Signer(keys, RUN)
    assert served.run()
    return tmp_path, grid


RECORD = "run/machines/ledgers.jsonl"


def rewrite(folder, site, key, keep):
    """Compute the ledger of ``site`` anew, of the entries that ``keep`` allows, signed with ``key``."""
    contents = [dict(entry.content) for entry in read_ledger(folder / site, ())]
    (folder / site / FILE).unlink()
    chain = Chain(folder / site / FILE, key)
    for content in contents:
        if keep(content):
            chain.append(content)


def test_after_a_key_is_replaced_lines_are_signed_with_the_new_one_and_all_are_verified(tmp_path):
    first, second = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ledger = Ledger(tmp_path, key=first)
    ledger.write(Exchange(kind="describe"), Exchange(kind="described"))
    ledger.sign_with(second)
    ledger.write(Exchange(kind="train"), Exchange(kind="trained"))
    signed = [entry.signed for entry in read_ledger(tmp_path)]
    assert signed == [fingerprint(key.public_key()) for key in (first, second)]


def test_a_chain_that_was_computed_anew_is_found(signed, cli):
    """All uploads are dropped: without the key, with another one, and with the site's own."""
    folder, _ = signed
    path, anchors = folder / "photo", folder / RECORD
    key = folder / "tls" / "nodes" / "photo.key"
    done = cli("ledger", path, "--key", key.with_suffix(".pub"), "--anchors", anchors)
    assert done.code == 0, done.err
    assert f"each entry is signed with {fingerprint(load_private_key(key).public_key())}" in done.out
    assert "The coordinator's record confirms 5 entries, and the ledger its heads." in done.out
    assert "photo: 1 uploads, 2 measurements and 1 different descriptions in all, of 1 methods and seeds" in done.out

    def drop(content):
        return content["answered"] != "trained"

    rewrite(folder, "photo", None, drop)
    assert "line 1 is not signed with the writer's key" in cli("ledger", path).err
    rewrite(folder, "photo", ec.generate_private_key(ec.SECP384R1()), drop)
    assert "line 1 is not signed with the writer's key" in cli("ledger", path).err
    rewrite(folder, "photo", load_private_key(key), drop)
    assert cli("ledger", path).code == 0
    said = cli("ledger", path, "--anchors", anchors).err
    assert "the coordinator was told at" in said
    assert "the ledger was rewritten" in said
    rewrite(folder, "photo", load_private_key(key), lambda content: False)
    assert not (path / FILE).exists()
    assert "cannot be read" in cli("ledger", path, "--anchors", anchors).err


def test_a_line_whose_signature_is_that_of_another_is_found(signed):
    folder, _ = signed
    lines = (folder / "pen" / FILE).read_bytes().splitlines()
    mark = b', "signature": "'
    lines[-1] = lines[-1].rpartition(mark)[0] + mark + lines[-2].rpartition(mark)[2]
    (folder / "pen" / FILE).write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(FedshiftError, match=f"line {len(lines)} is not signed with the writer's key"):
        list(read_ledger(folder / "pen"))


def test_a_coordinator_that_drops_heads_is_found(signed):
    folder, _ = signed
    record = folder / RECORD
    contents = [dict(entry.content) for entry in read_chain(record)]
    assert {content["site"] for content in contents} == {"pen", "photo", "print"}
    record.unlink()
    chain = Chain(record)
    for content in contents[1:]:
        chain.append(content)
    for site in ("photo", "print"):
        with pytest.raises(FedshiftError, match="the record was rewritten"):
            compare_anchors(list(read_ledger(folder / site)), record, folder / site)


def test_a_record_that_was_copied_before_the_end_is_no_rewritten_one(signed):
    folder, _ = signed
    record = folder / RECORD
    record.write_bytes(b"".join(record.read_bytes().splitlines(keepends=True)[:4]))
    with pytest.raises(FedshiftError, match=r"lines of the coordinator's record, and .* has 4: it was copied earlier"):
        compare_anchors(list(read_ledger(folder / "photo")), record, folder / "photo")


def test_the_record_of_another_site_confirms_nothing(signed):
    folder, _ = signed
    entries = list(read_ledger(folder / "photo"))
    Anchors(folder / "other.jsonl", "e", None, print).note("worn", {"number": 1, "digest": "0" * 64})
    with pytest.raises(FedshiftError, match="knows no entry of"):
        compare_anchors(entries, folder / "other.jsonl", folder / "photo")


def test_questions_that_nobody_signed_are_counted_and_not_stored(signed, cli):
    folder, grid = signed
    site, before = grid.sites[2], (folder / "photo" / FILE).read_bytes()
    said = []
    site.say = said.append
    (question,) = [question for node, question in grid.asked if (node, question.kind) == (2, "train")]
    forged = replace(question, run=RUN, facts={**question.facts, "round": 1})
    for _ in range(12):
        answer = site.answer(forged)
        assert (answer.kind, dict(answer.arrays)) == ("refused", {})
        assert answer.facts.keys() == {"why"}
    assert (folder / "photo" / FILE).read_bytes() == before
    assert read_books(folder / "account.json")[1] == 12
    assert len(said) == 2  # the first and the tenth
    assert "12 questions were not signed by the coordinator, and refused" in cli("ledger", folder / "photo").out


def test_each_line_says_who_signed_the_question_and_where_the_coordinator_stands(signed):
    folder, _ = signed
    whose = fingerprint(Signer(folder / "tls", RUN).key.public_key())
    entries = [entry.content for entry in read_ledger(folder / "photo")]
    assert {entry["signer"] for entry in entries} == {whose}
    heads = {entry.number: entry.digest for entry in read_chain(folder / RECORD)}
    told = [entry["coordinator"] for entry in entries]
    assert told[0]["number"] == 0
    assert all(heads[head["number"]] == head["digest"] for head in told[1:])


def test_a_ledger_that_lost_lines_is_told_to_the_coordinator(tmp_path):
    said = []
    anchors = Anchors(tmp_path / "ledgers.jsonl", "e", None, said.append)
    digests = [f"{number:064x}" for number in range(4)]
    for number in (1, 2, 3):
        anchors.note("north", {"number": number, "digest": digests[number]})
    assert not said
    again = Anchors(tmp_path / "ledgers.jsonl", "e", None, said.append)
    again.note("north", {"number": 2, "digest": digests[2]})
    (line,) = said
    assert line.startswith("the ledger of north had 3 entries and now has 2: it was rewritten, or restored")
    for nonsense in (None, [], {}, {"number": True, "digest": digests[1]}, {"number": 4, "digest": "g" * 64},
                     {"number": 10**30, "digest": digests[1]}, {"number": -1, "digest": digests[1]}):  # fmt: skip
        with pytest.raises(RefusedMessage, match="it does not report the head of its ledger"):
            again.note("north", nonsense)


def test_a_long_ledger_goes_on_in_another_file(tmp_path, monkeypatch, cli):
    monkeypatch.setattr("fedshift.flower.transport.chain.MOST_BYTES", 2000)
    key = ec.generate_private_key(ec.SECP384R1())
    for _ in range(3):  # a program that is started again finds the end of the chain
        ledger = Ledger(tmp_path, key=key)
        for number in range(5):
            ledger.write(Exchange(kind="train", facts={"round": number}), Exchange(kind="refused"))
    parts = sorted(path.name for path in tmp_path.glob("ledger*.jsonl"))
    assert len(parts) > 3
    assert [entry.number for entry in read_ledger(tmp_path)] == list(range(1, 16))
    (tmp_path / parts[1]).rename(tmp_path / "taken")
    with pytest.raises(FedshiftError, match="line 1 does not follow the line before it"):
        list(read_ledger(tmp_path))
    (tmp_path / "taken").rename(tmp_path / parts[1])
    (tmp_path / parts[0]).unlink()
    done = cli("ledger", tmp_path, "--since", 13)
    assert done.code == 0, done.err
    assert "The first entry here is number " in done.out
    assert [line.split()[0] for line in done.out.splitlines() if "train" in line] == ["14", "15"]
    (tmp_path / FILE).unlink()  # right after a file was renamed
    assert Ledger(tmp_path, key=key)._chain.head.number == max(entry.number for entry in read_ledger(tmp_path))


def test_keys_beside_the_ledger_are_those_that_signed_it(tmp_path):
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]
    for key in (*keys, keys[0]):
        Ledger(tmp_path, key=key).write(Exchange(kind="end"), Exchange(kind="ended"))
    assert len((tmp_path / KEYS).read_bytes().splitlines()) == 2
    assert [entry.signed for entry in read_ledger(tmp_path)] == [
        fingerprint(key.public_key()) for key in (*keys, keys[0])
    ]
    with pytest.raises(FedshiftError, match="line 2 is not signed"):
        list(read_ledger(tmp_path, [keys[0].public_key()]))
