"""What a coordinator with a valid key asks beyond what a site offers, allows and agreed to."""

import json
import os
from dataclasses import replace
from threading import Thread

import pytest

from fedshift.config.spec import RunSpec
from fedshift.flower.site.account import Account, Book, TrialUse, fingerprint_files, name_data, read_books
from fedshift.flower.site.gate import QUESTIONS, Confirmation
from fedshift.flower.site.ledger import read_ledger
from fedshift.flower.site.offer import Told, is_identifier
from fedshift.flower.site.policy import Limits, SitePolicy
from fedshift.flower.site.site import Site
from fedshift.flower.transport.exchange import HEAD, Exchange
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower.sites import RUN, SMALLEST, Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for
from tests.flower.test_tables import tables, write

PHOTO = 2
SIGNER = "SHA256:coordinator"


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """All that the site photo was asked in an experiment of two rounds on a network with a linear first layer."""
    from flwr.supercore.task_identity import TaskIdentity

    folder = tmp_path_factory.mktemp("asked")
    with pytest.MonkeyPatch.context() as patch:
        for number in ("_run_id", "_node_id", "_task_id"):
            patch.setattr(TaskIdentity, number, 1)
        patch.setattr("fedshift.flower.server.nodes.POLL", 0.0)
        spec = spec_for("fedavg", model="fnn2", rounds=2, evaluate_every=1)
        grid = SiteGrid(sites_of(spec, folder))
        assert coordinator(spec, grid, folder / "served", Heard()).run()
    return [replace(question, signer=SIGNER, run=RUN) for node, question in grid.asked if node == PHOTO]


@pytest.fixture
def ask(questions, tmp_path):
    """Ask a site a question of ``kind``, with facts of its trial, its settings or itself changed; return the answer."""

    def answer(site, kind="train", *, trial=None, spec=None, **facts):
        like = "train" if kind == "introduce" else kind
        asked = replace(next(question for question in questions if question.kind == like), kind=kind)
        changed = {**asked.facts, **facts}
        if kind == "describe":
            changed["spec"] = {**changed["spec"], **(spec or {})}
        elif kind != "end":
            own = changed["trial"]
            changed["trial"] = {**own, "spec": {**own["spec"], **(spec or {})}, **(trial or {})}
        return site.answer(replace(asked, facts=changed))

    return answer


def site_in(folder, name="photo", policy=SMALLEST, **named):
    return Site("digits", name, folder / name, policy=policy, **named)


def allow(**limits):
    return SitePolicy(limits=Limits(**{"least_samples": 1, "least_steps": 1} | limits))


def why(answer):
    assert answer.kind == "refused"
    assert not answer.arrays
    return answer.facts["why"]


# Item 1: a site offers its target, columns and groups; nothing is described before it was asked.


@pytest.fixture
def hospital(tmp_path):
    """A table of forty patients, what its site said, and a function that describes it to a coordinator."""
    rows, said = 40, []
    draw = {
        "patient": [f"Anna {number}" for number in range(rows)], "hiv": ["no"] * 37 + ["yes"] * 3,
        "years": [40 + number % 23 for number in range(rows)], "number": list(range(1000, 1000 + rows)),
    }  # fmt: skip
    table = write(tmp_path / "data", "north", rows=rows)
    lines = table.read_text().splitlines()
    more = [",".join(str(values[row]) for values in draw.values()) for row in range(rows)]
    table.write_text("\n".join(f"{a},{b}" for a, b in zip(lines, [",".join(draw), *more], strict=True)) + "\n")

    def describe(target=None, policy=None, labels=True, confirm=None, **asked):
        spec = vars(RunSpec(data="", target=target, test_fraction=0.25, **asked))
        made = policy or SitePolicy().offering(target="outcome", columns=["dose", "ward"], groups="patient")
        site = Site(str(table), "north", tmp_path / "north", policy=made, say=said.append, confirmation=confirm)
        return site.answer(Exchange(kind="describe", facts={"experiment": "e", "spec": spec, "labels": labels}))

    describe.said, describe.table = said, table
    return describe


@pytest.mark.parametrize("target", ["patient", "hiv", "years", "ward"])
def test_a_target_that_is_not_offered_is_not_described(target, hospital):
    answer = hospital(target)
    assert why(answer).startswith(f"this site offers target 'outcome', and {target!r} was asked for")
    assert "Anna" not in str(answer.facts)
    alone = hospital(target, policy=SitePolicy())
    assert why(alone).startswith(f"this site offers no target, and {target!r} was asked for")


@pytest.mark.parametrize(
    "asked", [{"groups": "age"}, {"split_column": "hiv"}, {"client_column": "patient"}, {"task": "multilabel"}]
)
def test_other_roles_of_columns_are_offered_too(asked, hospital):
    (key, value) = next(iter(asked.items()))
    assert f"this site offers {'' if key in ('groups', 'task') else 'no '}{key}" in why(hospital("outcome", **asked))
    assert value in why(hospital("outcome", **asked))


def test_what_is_offered_is_described_and_the_site_says_exactly_what_left(hospital, tmp_path):
    told = hospital("outcome").facts
    assert [column["name"] for column in told["columns"]] == ["ward", "dose"]  # in the order of the table
    assert told["class_names"] == ("ill", "well")
    assert hospital().facts["class_names"] == ("ill", "well")  # the site's own target
    counts = f"training samples by class: {', '.join(map(str, told['labels']))} (exact)"
    for line in ("columns and their categories: ward (A, B); dose", "2 classes: ill, well", counts):
        assert f"disclosed to the coordinator: {line}" in hospital.said
    *_, entry = read_ledger(tmp_path / "north")
    assert entry.content["told"]["labels"] == told["labels"]
    assert "Anna" not in json.dumps(entry.content)


def test_columns_that_are_not_offered_are_not_read(tmp_path, machine):
    """A site with more columns than it offers trains on what one process reads from a table without them."""
    for name in ("north", "rome"):
        write(tmp_path / "all", name)
        write(tmp_path / "more", name, number=range(100, 130))
    policy = SMALLEST.offering(target="outcome", columns=["dose", "age", "ward"])
    sites = {
        number: Site(str(tmp_path / "more" / f"{name}.csv"), name, tmp_path / name, policy=policy)
        for number, name in enumerate(("north", "rome"), 1)
    }
    spec = tables(tmp_path / "all")
    assert coordinator(spec, SiteGrid(sites), tmp_path / "served", Heard()).run()
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")


def test_an_offered_column_that_the_table_lacks_is_named_at_the_site_alone(hospital):
    offer = SitePolicy().offering(target="outcome", columns=["dose", "crp"])
    assert why(hospital(policy=offer)) == "its data cannot be used: its log has the reason"
    assert "has no column 'crp' for inputs" in hospital.said[-1]


@pytest.mark.parametrize("name", ["patient", "Patient_ID", "subjectId", "MRN", "surname", "date of birth", "uuid"])
def test_identifiers_are_no_targets(name):
    assert is_identifier(name)
    with pytest.raises(UsageError, match="identifies patients"):
        SitePolicy().offering(target=name)


@pytest.mark.parametrize("name", ["outcome", "patient_outcome", "class_id", "covid", "solid", "age", "lipids", ""])
def test_what_only_looks_like_an_identifier_may_be_a_target(name):
    assert not is_identifier(name)


def test_the_column_of_groups_is_no_target():
    with pytest.raises(UsageError, match="target 'case' identifies patients"):
        SitePolicy().offering(target="case", groups="case")


def test_a_target_that_names_single_rows_is_refused_whatever_it_is_called(hospital):
    for target in ("number", "years"):  # of 40 rows, 40 and 23 different values
        answer = hospital(target, policy=SitePolicy().offering(target=target, columns=["dose"]))
        assert why(answer) == "its data cannot be used: its log has the reason"
    assert "so it is an identifier, and the list of them would leave this site" in hospital.said[-1]


def test_the_site_is_asked_before_the_first_description_and_once(hospital, tmp_path):
    shown = []
    no = Confirmation(lambda *asked: shown.append(asked), who="ida")
    assert why(hospital(confirm=no)) == "whoever runs this site does not agree to describe its data"
    ((text, question),) = shown
    assert question == "Tell the coordinator this?"
    assert "2 classes: ill, well" in text
    assert "columns and their categories: ward (A, B); dose" in text
    yes = Confirmation(lambda *asked: shown.append(asked) or True, who="ida")
    for _ in range(2):  # a program that is started again does not ask again
        assert hospital(confirm=yes).kind == "described"
    assert len(shown) == 2
    assert hospital(confirm=yes, validation=0.2).kind == "described"  # another one
    assert len(shown) == 3
    consents = [entry.content for entry in read_ledger(tmp_path / "north") if entry.content["event"] == "consent"]
    assert [(each["who"], bool(each["agreed"])) for each in consents] == [("ida", False), ("ida", True), ("ida", True)]
    assert consents[1]["shown"] == text


def test_numbers_are_rounded_and_rare_values_stay_as_the_site_has_it(hospital):
    exact = hospital().facts["labels"]
    rounded = hospital(policy=SitePolicy(told=Told(round_to=10)).offering(target="outcome", columns=["dose"]))
    assert rounded.facts["labels"] == Told(round_to=10).round_counts(exact)
    assert sum(rounded.facts["labels"]) == sum(exact)
    assert min(rounded.facts["labels"]) % 10 == 0
    assert any("(rounded down to multiples of 10)" in line for line in hospital.said)
    none = hospital(policy=SitePolicy(told=Told(class_counts=False)).offering(target="outcome", columns=["dose"]))
    assert none.facts["labels"] is None
    rare = SitePolicy(told=Told(fewest=4)).offering(target="hiv", columns=["dose"])
    assert why(hospital(policy=rare)) == "its data cannot be used: its log has the reason"
    assert "class 'yes' of the" in hospital.said[-1]
    assert "and this site discloses at least 4" in hospital.said[-1]
    ward = SitePolicy(told=Told(fewest=39)).offering(target="outcome", columns=["ward"], split_column=None)
    assert why(hospital(policy=ward)) == "its data cannot be used: its log has the reason"


@pytest.mark.parametrize("counts", [[5, 5, 15], [0, 7, 1], [30, 20, 10], [1, 1]])
def test_rounded_numbers_have_the_sum_and_are_not_negative(counts):
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
    assert "allows 2 descriptions of its data in all, and 2 were sent" in said


# Item 2: a raw image in one upload.


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ({"batch_size": 1, "batches": 1}, "use 1 different samples, and this site's policy asks for 16"),
        ({"batch_size": 1, "steps": 2}, "use 2 different samples"),
        ({"batch_size": 15, "steps": 1}, "use 15 different samples"),
        ({"samples": 8, "epochs": 40}, "use 8 different samples"),
        ({"batch_size": 24}, "follow 1 local step, so that samples could be computed from it"),
        ({"method": "fedsmb"}, "follow 1 local step"),
    ],
)
def test_an_upload_from_which_samples_can_be_computed_does_not_leave_by_default(spec, limit, ask, tmp_path):
    assert limit in why(ask(site_in(tmp_path, policy=SitePolicy()), spec=spec))
    assert read_books(tmp_path / "account.json")[0] == []


@pytest.mark.parametrize("spec", [{"batch_size": 8}, {"batch_size": 12, "epochs": 3}, {"batch_size": 24, "epochs": 2}])
def test_ordinary_work_is_allowed_by_default(spec, ask, tmp_path):
    assert ask(site_in(tmp_path, policy=SitePolicy()), spec=spec).kind == "trained"


def test_a_new_seed_or_name_has_no_new_allowance(ask, tmp_path):
    """Each trial is new to the site; what the data were used for adds up."""
    site = site_in(tmp_path, policy=allow(uploads=4))
    for number in range(2):
        assert ask(site, trial={"seed": number}).kind == "trained"
    assert ask(site, trial={"experiment": "renamed"}, spec={"rounds": 1}).kind == "trained"
    for trial in ({"seed": 7}, {"experiment": "again"}, {"experiment": "renamed", "seed": 1}):
        said = why(ask(site, trial=trial))
        assert "allows 4 uploads of its data in all, 3 were sent in other experiments, and 2 are asked" in said
    assert ask(site, trial={"seed": 7}, spec={"rounds": 1}).kind == "trained"
    assert "allows 4 uploads of its data in all, and 4 were sent" in why(ask(site, spec={"rounds": 1}))


def test_the_rounds_of_a_policy_are_those_of_all_experiments(ask, tmp_path):
    """Two rounds, and as many again for lost answers: no experiment's name makes more of them."""
    site = site_in(tmp_path, policy=allow(rounds=2))
    kinds = [ask(site, trial={"experiment": f"name{number}"}).kind for number in range(15)]
    assert kinds.count("trained") == 3  # the fourth would begin two rounds of which one is left
    assert read_books(tmp_path / "account.json")[0][0].count("uploads") == 3


def test_measurements_are_counted_in_all(ask, tmp_path):
    site = site_in(tmp_path, policy=allow(evaluations=3))
    kinds = [ask(site, "evaluate", base=0, trial={"seed": seed}).kind for seed in range(5)]
    assert kinds == ["evaluated"] * 3 + ["refused"] * 2
    again = site_in(tmp_path, policy=allow(evaluations=3))  # a program that is started again
    assert "allows 3 evaluations of its data in all, and 3 were sent" in why(ask(again, "evaluate", base=0))
    assert (
        ask(site_in(tmp_path, "print", policy=allow(evaluations=3)), "evaluate", base=0).kind == "evaluated"
    )  # other data


def test_two_programs_on_the_same_data_share_what_is_left(ask, tmp_path):
    one, two = site_in(tmp_path / "a", account=tmp_path / "account.json"), None
    one.policy = allow(uploads=2)
    two = site_in(tmp_path / "b", account=tmp_path / "account.json", policy=allow(uploads=2))
    assert ask(one, spec={"rounds": 1}).kind == ask(two, trial={"seed": 1}, spec={"rounds": 1}).kind == "trained"
    for site in (one, two):
        assert "2 were sent" in why(ask(site, trial={"seed": 2}, spec={"rounds": 1}))


def test_programs_at_the_same_time_count_every_answer(tmp_path):
    def use(name):
        account = Account(tmp_path / "account.json", "data", "fingerprint")
        for _ in range(20):
            account.change(lambda book: setattr(book.trials.setdefault(name, TrialUse()), "uploads",
                                                book.trial(name).uploads + 1))  # fmt: skip

    threads = [Thread(target=use, args=(f"trial{number % 2}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (book,), _ = read_books(tmp_path / "account.json")
    assert book.count("uploads") == 80


def test_data_that_moved_or_grew_keep_their_account(tmp_path):
    place, moved = tmp_path / "images", tmp_path / "elsewhere"
    place.mkdir()
    (place / "1.png").write_bytes(b"one")
    path = tmp_path / "account.json"

    def sent(data):
        account = Account(path, *name_data(str(data), None))
        account.change(lambda book: setattr(book.trials.setdefault("t", TrialUse()), "uploads", 1))
        return account.book

    before = fingerprint_files(place)
    sent(place)
    (place / "2.png").write_bytes(b"two")  # grew
    assert fingerprint_files(place) != before
    assert len(sent(place).fingerprints) == 2
    place.rename(moved)
    (moved / "2.png").rename(moved / "two.png")
    book = sent(moved)
    assert book.paths == [str(moved), str(place)]
    assert len(read_books(path)[0]) == 1
    other = Account(path, "other", "data")
    assert other.book == Book(paths=["other"], fingerprints=["data"])
    assert len(read_books(path)[0]) == 1


# Item 3: what was agreed is enforced on each message.


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("round", [-1, 2.0, 3, 12, True, None, "1"])
def test_rounds_beyond_the_settings_are_refused(kind, round, ask, tmp_path):
    assert "the experiment has 2 rounds, and the question is about the model" in why(
        ask(site_in(tmp_path), kind, round=round)
    )


def test_twelve_rounds_do_not_come_of_two(ask, tmp_path):
    site = site_in(tmp_path)
    kinds = [ask(site, round=number, base=0).kind for number in range(12)]
    assert kinds == ["trained"] * 2 + ["refused"] * 10


def test_the_same_round_with_other_models_is_counted(ask, tmp_path):
    """Each of the learning rates makes another question of the same method and seed."""
    site = site_in(tmp_path)
    answers = [ask(site, spec={"lr": 0.01 * (1 + number)}) for number in range(6)]
    assert [answer.kind for answer in answers] == ["trained"] * 4 + ["refused"] * 2  # twice as many as rounds
    assert why(answers[-1]) == "the experiment takes 2 uploads of this site, and it sent 4 (uploads)"


def test_a_question_that_is_asked_again_gives_the_same_answer_and_is_not_counted_again(ask, tmp_path):
    site = site_in(tmp_path)
    answers = [ask(site) for _ in range(9)]
    assert [answer.facts.get("why") for answer in answers] == [None] * 9
    assert len({str(answer.arrays["shared"]) for answer in answers}) == 1
    (book,), _ = read_books(tmp_path / "account.json")
    assert book.count("uploads") == 1


@pytest.mark.parametrize(
    "facts",
    [{"splits": ["train"]}, {"splits": []}, {"moment": "yesterday"}, {"round": 0}, {"splits": ["test", "train"]}],
)
def test_what_the_settings_do_not_measure_is_not_measured(facts, ask, tmp_path):
    assert ask(site_in(tmp_path), "evaluate", **facts).kind == "refused"


def test_measurements_come_with_an_upload_only_if_the_settings_say_so(ask, tmp_path):
    site = site_in(tmp_path)
    assert "nothing is measured on test samples" in why(ask(site, splits=["test"]))
    moments = {"moments": "loaded,trained"}
    assert ask(site, splits=["test"], spec=moments).kind == "trained"
    (book,), _ = read_books(tmp_path / "account.json")
    assert (book.count("uploads"), book.count("evaluations")) == (1, 1)


def test_the_operator_agrees_to_the_whole_question(ask, questions, tmp_path):
    """Another experiment, more rounds, other settings or another coordinator: each is asked anew, and shown."""
    shown = []
    asks = Confirmation(lambda text, _: shown.append(text) or True, who="ida")
    for _ in range(2):  # a program that is started again does not ask again
        assert ask(site_in(tmp_path, confirmation=asks)).kind == "trained"
    assert len(shown) == 1
    experiment = questions[0].facts["experiment"]
    assert f"experiment: {experiment}; its coordinator has the key {SIGNER}" in shown[0]
    assert "rounds: 2, 2 with measurements" in shown[0]
    site = site_in(tmp_path, confirmation=asks)
    for changed in ({"trial": {"experiment": "renamed"}}, {"spec": {"rounds": 12}}, {"spec": {"lr": 0.5}}):
        assert ask(site, **changed).kind == "trained"
    other = replace(next(question for question in questions if question.kind == "train"), signer="SHA256:other")
    assert site.answer(other).kind == "trained"
    assert len(shown) == 5
    assert len(set(shown)) == 5
    consents = [entry.content for entry in read_ledger(tmp_path / "photo") if entry.content["event"] == "consent"]
    assert [each["shown"] for each in consents] == shown
    assert {each["who"] for each in consents} == {"ida"}


def test_who_refused_is_not_asked_again_and_again(ask, tmp_path):
    shown = []
    site = site_in(tmp_path, confirmation=Confirmation(lambda *asked: shown.append(asked), who="ida"))
    for _ in range(3):
        assert why(ask(site)) == "whoever runs this site does not agree to the experiment"
    assert len(shown) == 1


def test_an_operator_without_a_name_is_a_number(monkeypatch):
    def nobody():
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert Confirmation(print).who == f"user {os.getuid()}"


def test_coordinators_and_experiments_may_be_named(ask, questions, tmp_path):
    experiment = questions[0].facts["experiment"]
    for kind in ("describe", "train", "evaluate"):
        ours = SMALLEST.model_copy(update={"coordinators": [SIGNER], "experiments": [experiment]})
        assert ask(site_in(tmp_path, policy=ours), kind, base=0).kind != "refused"
        theirs = SMALLEST.model_copy(update={"coordinators": ["SHA256:another"]})
        assert why(ask(site_in(tmp_path, policy=theirs), kind)) == (
            f"this site's policy does not allow the coordinator with the key {SIGNER} (coordinators)"
        )
        other = SMALLEST.model_copy(update={"experiments": ["agreed*"]})
        assert f"does not allow experiment {experiment!r} (experiments)" in why(
            ask(site_in(tmp_path, policy=other), kind)
        )


# Every question passes the gate, whatever its kind.


def test_every_kind_that_a_site_answers_declares_what_it_asks_for(tmp_path):
    assert site_in(tmp_path).answers.keys() == QUESTIONS.keys()


def test_a_kind_that_declares_nothing_is_refused(ask, questions, tmp_path):
    site, called = site_in(tmp_path), []
    site.answers["peek"] = lambda *_: called.append(1) or Exchange(kind="peeked")
    said = why(site.answer(replace(questions[1], kind="peek")))
    assert said.startswith("a question of kind 'peek' declares nothing that this site could allow")
    assert not called


@pytest.mark.parametrize("kind", QUESTIONS)
def test_an_answer_beyond_what_its_kind_declares_does_not_leave(kind, ask, questions, tmp_path):
    shared = next(question for question in questions if question.kind == "train").arrays["shared"]
    for answer in (
        Exchange(kind=QUESTIONS[kind].answer, facts={"ages": [1, 2]}),
        Exchange(kind=QUESTIONS[kind].answer, arrays={"samples": shared}),
        Exchange(kind="another"),
    ):
        site = site_in(tmp_path)
        site.answers[kind] = lambda *_, answer=answer: answer
        assert "it does not leave" in why(ask(site, kind))
    assert read_books(tmp_path / "account.json")[0] == []


def test_answers_say_where_the_ledger_stands(ask, tmp_path):
    site = site_in(tmp_path)
    heads = [ask(site, kind).facts[HEAD] for kind in ("describe", "train", "evaluate")]
    assert heads == [{"number": entry.number, "digest": entry.digest} for entry in read_ledger(tmp_path / "photo")]


# The command line.


@pytest.fixture
def made(monkeypatch):
    """The sites that ``fedshift join`` made."""
    sites = []
    monkeypatch.setattr("fedshift.flower.site.join.join", lambda link, site, *_: sites.append(site) or 0)
    return sites


def test_flags_and_file_make_one_offer(made, cli, tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    policy = tmp_path / "site.toml"
    policy.write_text(f'[data]\npath = "{tmp_path / "t.csv"}"\ngroups = "case"\n[limits]\nrounds = 3\n')
    given = ("join", "localhost:1", "--insecure", "--state", tmp_path / "state", "--policy", policy)
    done = cli(*given, "--target", "b", "--columns", "a, c", "--task", "regression")
    assert done.code == 0, done.err
    (site,) = made
    assert (site.data, site.policy.limits.rounds) == (str(tmp_path / "t.csv"), 3)
    offer = site.policy.data
    assert (offer.target, offer.columns, offer.groups, offer.task) == ("b", ["a", "c"], "case", "regression")
    assert site.account == tmp_path / "account.json"
    for flags, said in (
        (("--groups", "patient"), "the policy offers groups 'case', but the option names 'patient'"),
        (("--target", "case"), "data: target 'case' identifies patients"),
        (("--data", tmp_path), "the policy offers path"),
    ):
        done = cli(*given, *flags)
        assert (done.code, said in " ".join(done.err.split())) == (2, True), done.err
    policy.write_text("")
    done = cli(*given)
    assert (done.code, "no data are named: give --data, or path in [data]" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[data]\ntarget = "patient_id"', "data: target 'patient_id' identifies patients"),
        ('[data]\ntarget = "a"\ncolumns = ["a", "b"]', "column 'a' is the target: leave it out of columns"),
        ("[told]\nround = 3", "told.round: Extra inputs are not permitted. It may set class_counts, round_to, fewest"),
        ("rounds = 3", "rounds: Extra inputs are not permitted. It may set coordinators, experiments, data, told"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(text, why, tmp_path):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        SitePolicy.read(tmp_path / "site.toml")
    assert why in str(caught.value)


def test_an_account_that_cannot_be_written_is_named_before_work_starts(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written .*: name another file"):
        Account(tmp_path / "file" / "account.json", "data", "fingerprint").check()
    (tmp_path / "account.json").write_text("{}")
    with pytest.raises(FedshiftError, match="is damaged"):
        Account(tmp_path / "account.json", "data", "fingerprint").check()


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
        assert f"{asked + upload} bytes to and from this site, which allows {asked + upload - 1}" in why(measured)
    planned = site_in(tmp_path / "planned", policy=allow(bytes_per_round=1000))
    assert "(--max-bytes-per-round)" in why(ask(planned))
