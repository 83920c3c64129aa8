"""Questions of a coordinator beyond what a site offers, allows and agreed to, and the record of what left."""

import json
import os
import pty
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock

import pytest

from fedshift.config.spec import RunSpec
from fedshift.flower.messages import Exchange, RefusedMessage, digest_records, from_record
from fedshift.flower.site.gate import QUESTIONS, name_user
from fedshift.flower.site.policy import SitePolicy, Told, is_identifier
from fedshift.flower.site.record import Record, RecordFailed, name_data
from fedshift.utils.errors import FedshiftError, UsageError
from tests.conftest import images, write_npz
from tests.flower.processes import machines
from tests.flower.sites import PHOTO, allow, change, make_site, same_as_in_process, serve, sites_at, sites_of, spec_for
from tests.flower.test_site_data import tables, write

pytestmark = pytest.mark.usefixtures("machine")
UNUSABLE = "its data cannot be used (1 error): this site's log has the reason"


@pytest.fixture(scope="module")
def questions(tmp_path_factory, machine):
    """All that the site photo was asked in an experiment of two rounds on a network with a linear first layer."""
    grid = serve(spec_for("fedavg", model="fnn2", evaluate_every=1), tmp_path_factory.mktemp("asked")).grid
    return [question for node, question in grid.asked if node == PHOTO]


@pytest.fixture
def ask(questions):
    """Ask a site a question of ``kind``, with facts of its trial, its settings or itself changed; return the answer."""

    def answer(site, kind="train", **changes):
        like = "train" if kind == "review" else kind
        asked = next(question for question in questions if question.kind == like)
        return site.answer(replace(change(asked, **changes), kind=kind))

    return answer


def site_in(folder, name="photo", **named):
    return make_site("digits", name, folder, **named)


def entries(folder):
    return list(Record(folder / "record.db").read())


def count(folder, what="uploads"):
    """How many of ``what`` left, of the data of all sites whose record is in ``folder``."""
    return sum(int(text.split(f" {what}")[0].split()[-1]) for text in Record(folder / "record.db").list_totals())


def why(answer):
    assert answer.kind == "refused"
    assert not answer.arrays
    return answer.facts["why"]


# A site offers its target, columns and groups; nothing is described before it was asked.


@pytest.fixture
def hospital(tmp_path):
    """A table of forty patients, what its site said, and a function that describes it to a coordinator."""
    said = []
    table = write(
        tmp_path / "data", "north", rows=40, patient=[f"Anna {number}" for number in range(40)],
        hiv=["no"] * 37 + ["yes"] * 3, years=[40 + number % 23 for number in range(40)],
    )  # fmt: skip

    def describe(target=None, policy=None, confirm=None, **asked):
        spec = vars(RunSpec(data="", target=target, test_fraction=0.25, **asked))
        policy = policy or SitePolicy().offering(target="outcome", columns=["dose", "ward"], groups="patient")
        site = make_site(table, "north", tmp_path, policy=policy, say=said.append, confirm=confirm)
        return site.answer(Exchange(kind="describe", facts={"experiment": "e", "spec": spec, "labels": True}))

    describe.said = said
    return describe


def test_what_is_not_offered_is_not_described(hospital):
    for target in ("patient", "hiv"):
        answer = hospital(target)
        assert why(answer).startswith(f"this site offers target 'outcome', and {target!r} was asked for")
        assert "Anna" not in str(answer.facts)
    alone = hospital("hiv", policy=SitePolicy())
    assert why(alone).startswith("this site offers no target, and 'hiv' was asked for")
    roles = {"groups": "age", "split_column": "hiv", "client_column": "patient", "task": "multilabel"}
    for key, value in roles.items():
        said = why(hospital("outcome", **{key: value}))
        assert f"this site offers {'' if key in ('groups', 'task') else 'no '}{key}" in said
        assert value in said


def test_what_is_offered_is_described_and_the_site_says_exactly_what_left(hospital, tmp_path):
    told = hospital("outcome").facts
    assert [column["name"] for column in told["columns"]] == ["ward", "dose"]  # in the order of the table
    assert told["class_names"] == ("ill", "well")
    assert hospital().facts["class_names"] == ("ill", "well")  # the site's own target
    counts = f"training samples by class: {', '.join(map(str, told['labels']))} (exact)"
    for line in ("columns and their categories: ward (A, B); dose", "2 classes: ill, well", counts):
        assert f"disclosed to the coordinator: {line}" in hospital.said
    *_, entry = entries(tmp_path)
    assert entry.content["labels"] == told["labels"]
    assert "Anna" not in json.dumps(entry.content)


def test_columns_that_are_not_offered_are_not_read(tmp_path):
    """A site with more columns than it offers trains on what one process reads from a table without them."""
    policy = allow().offering(target="outcome", columns=["dose", "age", "ward"])
    for name in ("north", "rome"):
        write(tmp_path / "all", name)
        write(tmp_path / "more", name, number=range(100, 130))
    serve(tables(tmp_path / "all"), tmp_path, sites_at(tmp_path / "more", tmp_path, policy=policy))
    same_as_in_process(tables(tmp_path / "all"), tmp_path / "served")


def test_an_offer_that_cannot_be_described_is_named_at_the_site_alone(hospital):
    for target, column, named in (
        ("outcome", "crp", "has no column 'crp' for inputs"),
        ("years", "dose", "so it is an identifier, and the list of them would leave this site"),  # 23 values of 40 rows
    ):
        assert why(hospital(policy=SitePolicy().offering(target=target, columns=[column]))) == UNUSABLE
        assert named in hospital.said[-2]


def test_identifiers_are_no_targets_and_what_only_looks_like_one_may_be():
    for name in ("patient", "Patient_ID", "subjectId", "MRN", "surname", "date of birth", "uuid"):
        assert is_identifier(name)
    for name in ("outcome", "patient_outcome", "class_id", "covid", "solid", "age", "lipids", ""):
        assert not is_identifier(name)
    for offer in ({"target": "MRN"}, {"target": "case", "groups": "case"}):
        with pytest.raises(UsageError, match=f"target '{offer['target']}' identifies patients"):
            SitePolicy().offering(**offer)


def test_the_site_is_asked_before_the_first_description_and_once(hospital, tmp_path):
    shown = []
    no = lambda *asked: shown.append(asked)  # noqa: E731
    assert why(hospital(confirm=no)) == "whoever runs this site does not agree to describe its data"
    ((text, question),) = shown
    assert question == "Tell the coordinator this?"
    assert "2 classes: ill, well" in text
    yes = lambda *asked: shown.append(asked) or True  # noqa: E731
    for _ in range(2):  # a program that is started again does not ask again
        assert hospital(confirm=yes).kind == "described"
    assert len(shown) == 2
    assert hospital(confirm=yes, validation=0.2).kind == "described"  # another one
    assert len(shown) == 3
    consents = [entry for entry in entries(tmp_path) if "who" in entry.content]
    assert [entry.event for entry in consents] == ["declined", "agreed", "agreed"]
    assert consents[1].content == {"who": name_user(), "shown": text}


def test_numbers_are_rounded_and_rare_values_stay_as_the_site_has_it(hospital):
    exact = hospital().facts["labels"]
    rounded = hospital(policy=SitePolicy(told=Told(round_to=10)).offering(target="outcome", columns=["dose"]))
    assert rounded.facts["labels"] == Told(round_to=10).round_counts(exact)
    assert any("(rounded down to multiples of 10)" in line for line in hospital.said)
    none = hospital(policy=SitePolicy(told=Told(class_counts=False)).offering(target="outcome", columns=["dose"]))
    assert none.facts["labels"] is None
    rare = SitePolicy(told=Told(fewest=4)).offering(target="hiv", columns=["dose"])
    assert why(hospital(policy=rare)) == UNUSABLE
    assert "class 'yes' of the" in hospital.said[-2]
    assert "and this site discloses at least 4" in hospital.said[-2]
    ward = SitePolicy(told=Told(fewest=39)).offering(target="outcome", columns=["ward"], split_column=None)
    assert why(hospital(policy=ward)) == UNUSABLE
    for counts in (exact, [5, 5, 15], [0, 7, 1], [30, 20, 10], [1, 1]):
        found = Told(round_to=10).round_counts(counts)
        assert sum(found) == sum(counts)
        assert min(found) >= 0
        most = counts.index(max(counts))
        assert all(number % 10 == 0 for at, number in enumerate(found) if at != most)


def test_descriptions_that_differ_are_counted_and_one_again_is_not(ask, tmp_path):
    site = site_in(tmp_path, policy=allow(descriptions=2))
    for samples in (24, 20, 24, 20):
        assert ask(site, "describe", spec={"samples": samples}).kind == "described"
    said = why(ask(site, "describe", spec={"samples": 9}))
    assert "has descriptions = 2, and 2 of its data were sent" in said


# A raw image in one upload.


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ({"batch_size": 1, "batches": 1}, "has least_samples = 16, and an upload would use 1 different samples"),
        ({"batch_size": 1, "steps": 2}, "use 2 different samples"),
        ({"batch_size": 15, "steps": 1}, "use 9 different samples"),  # in the second round, refused before the first
        ({"samples": 8, "epochs": 40}, "use 8 different samples"),
        ({"batch_size": 24}, "follow 1 local step, so that samples could be computed from it"),
        ({"method": "fedsmb"}, "follow 1 local step"),
        ({"batch_size": 8}, ""), ({"batch_size": 12, "epochs": 3}, ""), ({"batch_size": 24, "epochs": 2}, ""),
    ],
)  # fmt: skip
def test_an_upload_from_which_samples_can_be_computed_does_not_leave_by_default(spec, limit, ask, tmp_path):
    answer = ask(site_in(tmp_path, policy=SitePolicy()), spec=spec)
    assert limit in why(answer) if limit else answer.kind == "trained"
    assert count(tmp_path) == (not limit)


# What the data were used for adds up over all experiments and programs.


def test_a_new_seed_or_name_has_no_new_allowance(ask, tmp_path):
    """Each trial is new to the site."""
    site = site_in(tmp_path, policy=allow(uploads=4))
    for seed in range(2):
        assert ask(site, trial={"seed": seed}, spec={"seeds": "0,1"}).kind == "trained"
    assert "the experiment has seeds 0, 1, and not 7" in why(ask(site, trial={"seed": 7}, spec={"seeds": "0,1"}))
    assert ask(site, trial={"experiment": "renamed"}, spec={"rounds": 1}).kind == "trained"
    for trial in ({"experiment": "again"}, {"experiment": "third", "seed": 1}):
        said = why(ask(site, trial=trial, spec={"seeds": "0,1", "rounds": 1}))
        assert "has uploads = 4, and 3 of its data were sent in other experiments, and 2 are asked" in said
    assert ask(site, trial={"experiment": "last"}, spec={"rounds": 1}).kind == "trained"
    assert "has uploads = 4, and 4 of its data were sent" in why(ask(site, spec={"rounds": 1}))


def test_a_comparison_that_is_longer_than_what_is_left_is_refused_before_its_first_upload(ask, tmp_path):
    spec = {"methods": "fedavg,fedprox,fedprox(mu=0.5)", "seeds": "0,1", "rounds": 3}
    for most in (17, 18):
        site = site_in(tmp_path / str(most), policy=allow(uploads=most))
        answers = [ask(site, "review", trial={"method": number}, spec=spec) for number in range(3)]
        assert [answer.kind for answer in answers] == ["agreed", "agreed", "agreed" if most == 18 else "refused"]
    assert count(tmp_path / "18") == 0
    said = why(ask(site_in(tmp_path / "alone", policy=allow(uploads=5)), "review", spec=spec))
    assert said.endswith("has uploads = 5, and 0 of its data were sent in other experiments, and 6 are asked for")


def test_the_rounds_and_measurements_of_a_policy_are_those_of_all_experiments(ask, tmp_path):
    """Two rounds, and as many again for lost answers: no experiment's name makes more of them."""
    site = site_in(tmp_path, policy=allow(rounds=2, evaluations=3))
    kinds = [ask(site, trial={"experiment": f"name{number}"}).kind for number in range(5)]
    assert kinds == ["trained"] * 3 + ["refused"] * 2  # the fourth would begin two rounds of which one is left
    assert count(tmp_path) == 3
    once = {"spec": {"rounds": 1}, "base": 0}
    kinds = [ask(site, "evaluate", trial={"experiment": f"name{number}"}, **once).kind for number in range(5)]
    assert kinds == ["evaluated"] * 3 + ["refused"] * 2
    again = site_in(tmp_path, policy=allow(evaluations=3))  # a program that is started again
    assert "has evaluations = 3, and 3 of its data were sent in other" in why(ask(again, "evaluate", **once))
    other = site_in(tmp_path, "print", policy=allow(evaluations=3))
    assert ask(other, "evaluate", base=0).kind == "evaluated"


def test_two_programs_on_the_same_data_share_what_is_left(ask, tmp_path):
    shared = {"account": tmp_path / "record.db", "policy": allow(uploads=2)}
    both, once = [site_in(tmp_path / name, **shared) for name in "ab"], {"rounds": 1, "seeds": "0,1"}
    assert [ask(site, trial={"seed": seed}, spec=once).kind for seed, site in enumerate(both)] == ["trained"] * 2
    for site in both:
        assert "2 of its data were sent" in why(ask(site, trial={"experiment": "more"}, spec=once))


# What was agreed is enforced on each message.


@pytest.mark.parametrize(("kind", "last"), [("train", 1), ("evaluate", 2)])
def test_rounds_beyond_the_settings_are_refused(kind, last, ask, tmp_path):
    site = site_in(tmp_path)
    for round in (-1, 2.0, last + 1, 12, True, None, "1"):
        assert "the experiment has 2 rounds, and the question is about the model" in why(ask(site, kind, round=round))
    assert ask(site, kind, round=last, base=0).kind != "refused"


def test_the_same_round_with_other_models_is_counted_and_a_question_again_is_not(ask, tmp_path):
    """Each of the learning rates makes another question of the same method and seed."""
    site = site_in(tmp_path)
    answers = [ask(site) for _ in range(3)]
    assert [answer.facts.get("why") for answer in answers] == [None] * 3
    assert len({str(answer.arrays["shared"]) for answer in answers}) == 1
    assert count(tmp_path) == 1
    answers = [ask(site, spec={"lr": 0.1 * (1 + number)}) for number in range(5)]
    assert [answer.kind for answer in answers] == ["trained"] * 3 + ["refused"] * 2  # twice as many as rounds
    assert why(answers[-1]) == "the experiment takes 2 uploads of this site, and it sent 4 (uploads)"


def test_a_question_that_is_asked_again_after_the_data_changed_is_counted(ask, tmp_path):
    """Uploads of 24, 23, 22 and 21 samples could be subtracted from one another."""
    (x, y), (x_test, y_test) = images(24, 0, 0), images(16, 0, 1)
    answers = []
    for samples in (24, 23, 24, 22, 21):
        write_npz(tmp_path / "photo.npz", x_train=x[:samples], y_train=y[:samples], x_test=x_test, y_test=y_test)
        site = make_site(tmp_path / "photo.npz", "photo", tmp_path, policy=allow(uploads=2))
        answers.append(ask(site, spec={"samples": None}))
    assert [answer.kind for answer in answers] == ["trained"] * 3 + ["refused"] * 2
    assert count(tmp_path) == 2


def test_what_the_settings_do_not_measure_is_not_measured(ask, tmp_path):
    site = site_in(tmp_path)
    for facts in ({"splits": ["train"]}, {"splits": ["test", "train"]}, {"moment": "yesterday"}, {"round": 0}):
        assert ask(site, "evaluate", **facts).kind == "refused"
    assert "nothing is measured on test samples" in why(ask(site, splits=["test"]))
    assert ask(site, splits=["test"], spec={"moments": "loaded,trained"}).kind == "trained"
    assert (count(tmp_path), count(tmp_path, "evaluations")) == (1, 1)
    few = ask(site_in(tmp_path, policy=allow(least_samples=150)), "evaluate", base=0, spec={"samples": None})
    assert why(few).endswith("has least_samples = 150, and a model would be measured on 140 test samples")


def test_the_operator_agrees_to_the_whole_question(ask, questions, tmp_path, monkeypatch):
    """Another experiment, more rounds, other settings or another coordinator: each is asked anew, and shown."""
    shown = []
    asks = lambda text, _: shown.append(text) or True  # noqa: E731
    for _ in range(2):  # a program that is started again does not ask again
        assert ask(site_in(tmp_path, confirm=asks, coordinator="here:9091")).kind == "trained"
    assert len(shown) == 1
    experiment = questions[0].facts["experiment"]
    assert f"experiment: {experiment}, of the coordinator here:9091" in shown[0]
    assert "rounds: 2, 2 with measurements" in shown[0]
    site = site_in(tmp_path, confirm=asks, coordinator="here:9091")
    for changed in ({"trial": {"experiment": "renamed"}}, {"spec": {"rounds": 12}}, {"spec": {"lr": 0.5}}):
        assert ask(site, **changed).kind == "trained"
    assert ask(site_in(tmp_path, confirm=asks, coordinator="there:9091")).kind == "trained"
    assert len(shown) == len(set(shown)) == 5
    consents = [entry.content for entry in entries(tmp_path) if entry.event == "agreed"]
    assert [content["shown"] for content in consents] == shown
    assert {content["who"] for content in consents} == {name_user()}
    del shown[:]
    site = site_in(tmp_path, "print", confirm=lambda *asked: shown.append(asked))
    for _ in range(2):  # who refused is not asked again
        assert why(ask(site)) == "whoever runs this site does not agree to the experiment"
    assert len(shown) == 1
    monkeypatch.setattr("getpass.getuser", Mock(side_effect=KeyError("getpwuid(): uid not found: 4711")))
    assert name_user() == f"user {os.getuid()}"


@pytest.mark.parametrize("kind", ["describe", "train", "evaluate"])
def test_experiments_may_be_named(kind, ask, questions, tmp_path):
    experiment = questions[0].facts["experiment"]
    ours, other = (allow().model_copy(update={"experiments": [name]}) for name in (experiment, "agreed*"))
    assert ask(site_in(tmp_path, policy=ours), kind, base=0).kind != "refused"
    said = why(ask(site_in(tmp_path, policy=other), kind))
    assert f"does not allow experiment {experiment!r} (experiments)" in said


# Every question passes the gate, whatever its kind.


def test_a_kind_that_declares_nothing_is_refused(questions, tmp_path):
    said = why(site_in(tmp_path).answer(replace(questions[1], kind="peek")))
    assert said.startswith("a question of kind 'peek' declares nothing that this site could allow")


@pytest.mark.parametrize("kind", sorted(QUESTIONS.keys() - {"tell"}))
def test_an_answer_beyond_what_its_kind_declares_does_not_leave(kind, ask, questions, tmp_path):
    shared = next(question for question in questions if question.kind == "train").arrays["shared"]
    site = site_in(tmp_path)
    for answer in (
        Exchange(kind=QUESTIONS[kind].answer, facts={"ages": [1, 2]}),
        Exchange(kind=QUESTIONS[kind].answer, arrays={"samples": shared}),
        Exchange(kind="another"),
    ):
        site._work = site._describe = lambda *_, answer=answer: answer
        assert "it does not leave" in why(ask(site, kind))
    assert count(tmp_path) == 0


@pytest.mark.parametrize("spare", [0, -1])
def test_a_round_moves_no_more_bytes_than_the_site_allows(ask, questions, tmp_path, spare):
    train, evaluate = (next(each for each in questions if each.kind == kind) for kind in ("train", "evaluate"))

    def count(message):
        return sum(len(array.data) for record in message.arrays.values() for array in record.values())

    asked = count(train) + count(evaluate)
    upload = count(ask(site_in(tmp_path / "free")))
    limited = site_in(tmp_path / "limited", policy=allow().limiting(bytes_per_round=asked + upload + spare))
    assert ask(limited).kind == "trained"
    measured = ask(limited, "evaluate", base=1)
    assert measured.kind == ("refused" if spare else "evaluated")
    if spare:
        assert f"= {asked + upload - 1}, and a round would move {asked + upload} bytes" in why(measured)
    planned = site_in(tmp_path / "planned", policy=allow(bytes_per_round=1000))
    assert "has bytes_per_round = 1000" in why(ask(planned))


def test_bytes_of_a_round_are_counted_whatever_is_asked_in_between(ask, tmp_path):
    site = site_in(tmp_path)
    assert [ask(site, round=round, base=round).kind for round in (0, 1)] == ["trained"] * 2
    with sqlite3.connect(tmp_path / "record.db") as file:
        ((most,),) = file.execute("SELECT max(bytes) FROM entry")
    limited = site_in(tmp_path / "limited", policy=allow().limiting(bytes_per_round=2 * most))
    kinds = [ask(limited, round=round, base=round).kind for round in (0, 1) * 3]
    assert kinds == ["trained"] * 4 + ["refused"] * 2


# Its record says what left, counts it for all programs and wherever the data are, and shows later changes.

EVENTS = ["describe", "train", "evaluate", "train", "evaluate", "evaluate"]
"""The last one measures with BatchNorm statistics that are estimated again."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, machine):
    """The record of the site photo in a short experiment with FedBN, and what it answered."""
    folder, spec, answers = tmp_path_factory.mktemp("served"), spec_for(evaluate_every=1), []
    sites = sites_of(spec, folder)
    sites[PHOTO].account = folder / "photo.db"
    serve(spec, folder, sites, tamper=lambda node, question, answer: answers.append((node, answer)) or answer)
    return sites[PHOTO].account, [answer for node, answer in answers if node == PHOTO]


@pytest.fixture
def copy(recorded, tmp_path):
    return shutil.copy(recorded[0], tmp_path / "record.db")


def execute(path, *statements):
    with closing(sqlite3.connect(path)) as file, file:
        for statement in statements:
            file.execute(statement)


def test_each_answer_is_there_with_what_left(recorded):
    path, answers = recorded
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
    execute(copy, *statements)
    with pytest.raises(FedshiftError, match=f"record.db: entry {number} or the one before was changed, removed or add"):
        list(Record(copy).read())


def test_programs_at_the_same_time_count_every_answer_and_none_too_many(tmp_path):
    """Each of four programs would send ten, and thirty are allowed; what one checks holds until its row is there."""

    def send(name):
        record, refused = Record(tmp_path / "record.db", "data", "fingerprint"), 0

        def check():
            if record.count("uploads") > 29:
                raise RefusedMessage("no more")

        for number in range(10):
            try:
                record.append("train", {}, check, trial="e/t", question=f"{name} {number}", uploads=1)
            except RefusedMessage:
                refused += 1
        return refused

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(send, range(4))) == 10
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
    execute(path, "INSERT INTO data SELECT DISTINCT book, 'both', 'same' FROM data WHERE place <> 'other'")
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
        execute(path, "CREATE TABLE entry (number INTEGER)")
    with pytest.raises(UsageError, match=r"record.db, which counts what the data were used for, is damaged or cannot"):
        Record(path, "data", "fingerprint")
    done = cli("join", "localhost:1", "--insecure", "--data", "digits", "--name", "pen", "--account", path)
    assert done.code == 2
    assert "name another file (--account), or bring it back from a copy" in " ".join(done.err.split())
    assert "looking for the coordinator" not in done.out


def test_a_row_that_cannot_be_written_is_not_there(copy):
    record = Record(copy, "data", "fingerprint")
    execute(copy, "CREATE TRIGGER full BEFORE INSERT ON entry BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    with pytest.raises(RecordFailed, match=r"cannot be written \(disk is full\), and nothing leaves without a row"):
        record.append("train", {}, question="q", uploads=1)
    execute(copy, "DROP TRIGGER full")
    record.append("train", {}, question="q", uploads=1)
    assert len(list(record.read())) == len(EVENTS) + 1


def test_the_command_shows_and_verifies(recorded, cli, copy, tmp_path):
    done = cli("ledger", copy)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[: len(EVENTS)]] == list(map(str, range(1, len(EVENTS) + 1)))
    train = next(answer for answer in recorded[1] if answer.kind == "trained")
    assert f"/fedbn-seed0, round 1: {len(train.arrays['shared'])} entries, " in lines[1]
    assert lines[2].endswith("/fedbn-seed0, round 1: 1 measurements")
    assert any(line.startswith("left with a round's upload: ") and "of the model" in line for line in lines)
    assert "digits/photo: 2 uploads, 3 evaluations, 1 descriptions in all" in lines
    *_, last = Record(copy).read()
    assert " ".join(lines[-2:]).endswith(f"No entry was changed or removed; last digest: {last.digest}")
    shown = [json.loads(line) for line in cli("ledger", copy, "--json", "--since", 4).out.splitlines()]
    assert [(entry["number"], entry["event"]) for entry in shown] == [(5, "evaluate"), (6, "evaluate")]
    execute(copy, "DELETE FROM entry WHERE number = 2")  # is found though it is not shown
    done = cli("ledger", copy, "--since", 4)
    assert (done.code, "entry 3 or the one before was changed, removed or added" in done.err) == (1, True)
    done = cli("ledger", tmp_path / "nothing.db")
    assert done.code == 2
    assert "is no record of a site: name record.db, which is next to" in " ".join(done.err.split())
    assert not (tmp_path / "nothing.db").exists()


# The command line.


def test_flags_and_file_make_one_offer(cli, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("fedshift.flower.site.join.join", lambda link, site, *_: made.append(site) or 0)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    policy = tmp_path / "site.toml"
    policy.write_text(f'[data]\npath = "{tmp_path / "t.csv"}"\ngroups = "case"\n[limits]\nrounds = 3\n')
    given = ("join", "localhost:1", "--insecure", "--state", tmp_path / "state", "--policy", policy)
    for more in ((), ("--validate-only",)):
        done = cli(*given, "--target", "b", "--columns", "a, c", "--task", "regression", *more)
        assert done.code == 0, done.err
    site, validates = made
    assert (site.validates, validates.validates) == (False, True)
    assert (site.data, site.policy.limits.rounds) == (str(tmp_path / "t.csv"), 3)
    offer = site.policy.data
    assert (offer.target, offer.columns, offer.groups, offer.task) == ("b", ["a", "c"], "case", "regression")
    assert site.account == tmp_path / "record.db"
    for flags, said in (
        (("--groups", "patient"), "the policy's groups is 'case', but the option names 'patient'"),
        (("--target", "case"), "data: target 'case' identifies patients"),
        (("--data", tmp_path), "the policy's path is"),
    ):
        done = cli(*given, *flags)
        assert (done.code, said in " ".join(done.err.split())) == (2, True), done.err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[data]\ntarget = "patient_id"', "data: target 'patient_id' identifies patients"),
        ('[data]\ntarget = "a"\ncolumns = ["a", "b"]', "column 'a' is the target: leave it out of columns"),
        ("[told]\nround = 3", "told.round: Extra inputs are not permitted. It may set class_counts, round_to, fewest"),
        ("rounds = 3", "rounds: Extra inputs are not permitted. It may set experiments, data, told"),
        ("[limits]\nrounds = 0", "limits.rounds: Input should be greater than or equal to 1"),
        ("[limits]\nround = 3", "limits.round: Extra inputs are not permitted. It may set methods, models, keep"),
        ("[limits]\nrounds", "is not a TOML file"),
        ('[limits]\nreveals = "all"', "reveals: Input should be 'update', 'client', 'class' or 'image'"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_name(text, why, tmp_path):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        SitePolicy.read(tmp_path / "site.toml")
    assert why in str(caught.value)


@pytest.mark.slow
def test_consent_is_asked_at_a_terminal_before_anything_leaves(tmp_path):
    with machines(tmp_path, spec_for(domains="pen,photo", rounds=1, evaluate_every=1)) as two:
        coordinator, photo = two.serve("--min-clients", 2), two.join("photo")
        terminal, two.stdin = pty.openpty()
        pen = two.join("pen", "--confirm")
        pen.says("Tell the coordinator this? [y/N]")
        coordinator.says("photo is connected")
        assert "pen is connected" not in coordinator.said
        os.write(terminal, b"y\n")
        coordinator.says("pen is connected")
        pen.says("Take part in it? [y/N]")
        assert not two.rounds_done
        os.write(terminal, b"y\n")
        assert [process.ends() for process in (coordinator, pen, photo)] == [0, 0, 0], coordinator.said
