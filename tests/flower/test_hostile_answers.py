"""A site with a valid key that says anything: the round goes on without it, it is named, and no experiment ends."""

import json
import re

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from fedshift.flower.server.answers import RowReader
from fedshift.flower.transport.arrays import RefusedMessage
from fedshift.flower.transport.exchange import FACTS
from fedshift.results.checkpoint import load_checkpoint
from fedshift.tasks import METRICS, Classification, Multilabel, Regression, Segmentation
from fedshift.utils.printable import LONGEST, to_printable
from tests.flower import mutations
from tests.flower.mutations import DEEP, EVIL, OTHERS, PHOTO
from tests.flower.sites import Heard, SiteGrid, coordinator, sites_of, spec_for

ALL = ("pen", "photo", "print")


@pytest.fixture
def served(tmp_path, machine):
    """Run an experiment in which ``fault(question, answer)`` arrives from node PHOTO for questions of ``kind``."""

    def run(fault, *, kind="train", rounds=2, every=3, **changes):
        spec = spec_for(rounds=rounds, evaluate_every=every, **changes)
        grid, heard = SiteGrid(sites_of(spec, tmp_path)), Heard()

        def tamper(node, question, answer):
            return fault(question, answer) if (node, question.kind) == (PHOTO, kind) else answer

        grid.tamper = tamper
        assert coordinator(spec, grid, tmp_path / "served", heard, clients=2).run()
        tensors, _ = load_checkpoint(next((tmp_path / "served" / "trials").iterdir()) / "checkpoint.safetensors")
        assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())
        return heard

    return run


def text(change):
    """Answers whose JSON ``change`` makes of what it was."""

    def fault(question, answer):
        facts = {"kind": answer.kind, **answer.facts}
        return RecordDict({"config": ConfigRecord({FACTS: change(facts)}), **answer.arrays})

    return fault


def claimed(**facts):
    return text(lambda said: json.dumps(said | facts))


ANSWERS = {
    "nested": (text(lambda said: json.dumps(said)[:-1] + f', "weight": {DEEP}}}'), "RecursionError"),
    "huge": (text(lambda said: json.dumps(said | {"weight": 0})[:-1] + f', "weight": 1{"0" * 400}}}'), "'weight': "),
    "infinite": (claimed(weight=float("inf")), "'weight': Input should be a finite number"),
    "a sum of text": (claimed(loss_sum="12"), "'loss_sum': Input should be a valid number"),
    "a truth": (claimed(steps=True), "'steps': Input should be a valid integer"),
    "more than was asked": (claimed(accuracy=1.0), "'accuracy': Extra inputs are not permitted"),
    "no JSON": (text(lambda said: "{"), "a message that is not fedshift's"),
    "JSON of another kind": (text(lambda said: "[1]"), "a message that is not fedshift's"),
    "no facts": (lambda _, answer: RecordDict(), "a message that is not fedshift's"),
    "another content": (lambda *_: ValueError("Unexpected format for object head."), "Flower cannot read its answer"),
    "a terminal's codes": (claimed(kind="refused", why="\x1b[2Jgone\n\rhere"), "photo is left out: gone  here"),
}  # fmt: skip


def test_an_answer_of_another_form_is_refused_by_name_and_the_round_goes_on(served):
    """Each round has another one."""
    faults = list(ANSWERS.values())
    heard = served(lambda question, answer: faults[question.facts["round"]][0](question, answer), rounds=len(faults))
    assert [done.participants for done in heard.rounds] == [OTHERS] * len(faults)
    complaints = [text for text in heard.notices if "left out" in text]
    for number, (name, told) in enumerate(zip(ANSWERS, complaints, strict=True), 1):
        assert re.match(f"round {number}: photo is left out: ", told), (name, told)
        assert re.search(ANSWERS[name][1], told), (name, told)
    assert all(told.isprintable() and len(told) <= LONGEST + 3 for told in heard.notices)


MEASURED = {
    "text": {"hits": "many"},
    "texts": {"hits": ["1"] * 10},
    "more hits than samples": {"hits": [10**9] * 10},
    "negative hits": {"hits": [-3] * 10},
    "an area above one": {"auc": 7e10},
    "an infinite area": {"auc": float("inf")},
    "a list of areas": {"auc": [0.5]},
    "a negative loss": {"loss_sum": -1.0},
    "one more column": {"accuracy": 1.0},
}


def test_counts_that_no_prediction_gives_are_refused_by_name(served):
    """Each round has others."""

    def wrong(question, answer):
        changed = list(MEASURED.values())[question.facts["round"] - 1]
        return text(lambda said: json.dumps(said | {"rows": [row | changed for row in said["rows"]]}))(question, answer)

    heard = served(wrong, kind="evaluate", every=1, rounds=len(MEASURED))
    for number, (name, done) in enumerate(zip(MEASURED, heard.rounds, strict=True), 1):
        assert done.participants == ALL
        assert {row["client"] for row in done.rows if row["split"] == "test"} == set(OTHERS), name
        assert sum(told.startswith(f"round {number}: photo is not measured: ") for told in heard.notices) == 1, name


def test_a_model_measured_twice_is_refused(served):
    heard = served(text(lambda said: json.dumps(said | {"rows": said["rows"] * 2})), kind="evaluate", every=1)
    assert "round 2: photo is not measured: it measured one model twice on the same samples" in heard.notices


@pytest.mark.parametrize("rows", [lambda rows: [], lambda rows: [row for row in rows if row["split"] != "test"]])
def test_a_site_that_measures_nothing_of_what_was_asked_is_refused(rows, served):
    heard = served(text(lambda said: json.dumps(said | {"rows": rows(said["rows"])})), kind="evaluate", every=1)
    (told,) = [text for text in heard.notices if text.startswith("round 2: photo is not measured")]
    assert re.fullmatch(r".*: it measured nothing on its \w+ samples", told)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "value"), [
    pytest.param(name, value, marks=() if value % 3 == number else pytest.mark.slow)
    for number, name in enumerate(("classes", "samples", "task")) for value in range(len(EVIL))
])  # fmt: skip
def test_a_description_of_any_form_keeps_a_site_out_or_lets_it_in_and_ends_nothing(name, value, served):
    heard = served(claimed(**{name: EVIL[value]}), kind="describe", rounds=1)
    assert set(OTHERS) <= set(heard.rounds[0].participants)
    if "photo" not in heard.rounds[0].participants:
        assert any(re.search("number 2\\) does not take part|photo is not admitted", told) for told in heard.notices)


@pytest.mark.slow
@pytest.mark.parametrize("method", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_mutated_answers_end_no_experiment_and_every_refusal_has_the_sites_name(method, tmp_path, machine):
    outcome = mutations.Outcome()
    mutations.run(tmp_path / "rounds", method, outcome, rounds=20)
    mutations.run(tmp_path / "description", method, outcome, rounds=1, kinds=("describe",))
    assert outcome.holds, outcome
    assert outcome.answers == {"train": 20, "evaluate": 20, "describe": 1}
    assert outcome.refused.total() > 20
    assert all(text.isprintable() for text in outcome.notices)


def test_refusals_are_counted_by_the_sites_name():
    named = "round 3: photo is left out: entry 'fc.weight' of the upload holds NaN or infinity"
    assert mutations.shorten(mutations.COMPLAINT.fullmatch(named)["why"]) == "NaN or infinity"
    assert not mutations.COMPLAINT.fullmatch(named.replace("photo", "pen"))
    assert not mutations.COMPLAINT.fullmatch("a node (number 2) does not take part: no name")


def test_text_is_cut_and_cleaned():
    assert to_printable("a\x1b[31mb\r\nc") == "ab  c"
    assert to_printable("x" * 10_000) == "x" * LONGEST + "..."


REQUESTED = METRICS.parse_all("f1, top_k(k=3), brier, ece, average_precision")
TASKS = {
    "classification": (Classification(), (7,), lambda: torch.randint(0, 7, (50,)), 7),
    "requested": (Classification(requested=REQUESTED), (7,), lambda: torch.randint(0, 7, (50,)), 7),
    "segmentation": (Segmentation(), (3, 6, 5), lambda: torch.randint(0, 3, (50, 6, 5)), 3),
    "surfaces": (Segmentation(surface=True), (3, 6, 5), lambda: torch.randint(0, 3, (50, 6, 5)), 3),
    "multilabel": (Multilabel(), (4,), lambda: torch.randint(0, 2, (50, 4)).double(), 4),
    "regression": (Regression(), (2,), lambda: torch.randn(50, 2, dtype=torch.float64) * 100, 2),
}


@pytest.mark.parametrize("name", TASKS)
def test_counts_of_predictions_are_possible_and_pass_the_schema(name):
    task, shape, targets, outputs = TASKS[name]
    torch.manual_seed(0)
    reader = RowReader(task, outputs)
    for scale in (0.0, 1e-3, 1.0, 1e6):
        counts = task.measure(scale * torch.randn(50, *shape, dtype=torch.float64), targets(), outputs)
        assert task.may_have(counts)
        row = {"client": "a", "split": "test", "model": "personal", "moment": "loaded", **counts}
        read = reader.read(json.loads(json.dumps([row])), "a", {"test": 50}, "loaded")
        assert read == [row]
        with pytest.raises(RefusedMessage, match="its counts are impossible for its 49 samples"):
            reader.read([row], "a", {"test": 49}, "loaded")
