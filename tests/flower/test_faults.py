"""Whatever a site with a valid key does, the round closes without it, it is named, and the model is that of others."""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedshift.config.spec import RunSpec
from fedshift.core.states import ServerState, Update
from fedshift.engines.sequential import Sequential
from fedshift.flower.coordinator.answers import RowReader
from fedshift.flower.coordinator.rounds import UpdateLengths
from fedshift.flower.messages import FACTS, RefusedMessage, from_record, to_record
from fedshift.results.checkpoint import load_checkpoint
from fedshift.tasks import METRICS, Classification, Multilabel, Regression, Segmentation
from fedshift.utils.errors import FedshiftError
from fedshift.utils.printable import LONGEST
from tests.flower.gated import NETWORK
from tests.flower.sites import ALL, OTHERS, PHOTO, Heard, grid_of, same_as_in_process, serve, sites_at, spec_for

pytestmark = pytest.mark.usefixtures("machine")
SPEC = spec_for(model=NETWORK, rounds=3, evaluate_every=3)
WEIGHT, CLAIMED, BATCH = "1.weight", 400_000, 32
DEEP = "[" * 100_000 + "]" * 100_000
EVIL = (
    None, True, "many", "", -1, 0, 2**63, 10**400, 1e308, -1e-300, float("inf"), float("nan"), [], {}, [[1]], [None],
    "\x1b[2J\x1b]0;owned\x07", "x" * 100_000, "\N{RIGHT-TO-LEFT OVERRIDE}", {"a": {"b": [1, 2]}},
)  # fmt: skip


def from_photo(fault, kind="train", at=None):
    """``fault(question, answer)`` in place of answers of node PHOTO to ``kind``, in all rounds or those ``at``."""

    def tamper(node, question, answer):
        due = (node, question.kind) == (PHOTO, kind) and (at is None or question.facts["round"] in at)
        return fault(question, answer) if due else answer

    return tamper


def entry(change, name=WEIGHT):
    """Uploads in which an entry is what ``change`` makes of it."""

    def fault(question, answer):
        state = from_record(answer.arrays["shared"])
        state[name] = change(state.get(name, torch.zeros(16)))
        return replace(answer, arrays={**answer.arrays, "shared": to_record(state)})

    return fault


def claimed(**facts):
    return lambda question, answer: replace(answer, facts={**answer.facts, **facts})


def text(change):
    """Answers whose JSON ``change`` makes of what it was."""

    def fault(question, answer):
        facts = {"kind": answer.kind, **answer.facts}
        return RecordDict({"config": ConfigRecord({FACTS: change(facts)}), **answer.arrays})

    return fault


def declared(question, answer):
    """An entry of another shape than its bytes."""
    arrays = dict(answer.arrays["shared"])
    arrays[WEIGHT] = Array(arrays[WEIGHT].dtype, (2**30, 16), arrays[WEIGHT].stype, arrays[WEIGHT].data)
    return replace(answer, arrays={**answer.arrays, "shared": ArrayRecord(arrays)})


def beside(place, value):
    """An answer with another record, or a text beside the facts."""

    def fault(question, answer):
        content = answer.content()
        (content.config_records["config"] if place == "config" else content)["more"] = value
        return content

    return fault


UPLOADS = {
    "too much": (entry(lambda x: torch.zeros(10**6)), r"its upload has 4\d+ bytes, and .* at most \d+"),
    "a record more": (beside("", to_record({"x": torch.zeros(4)})), "it sent an unexpected record 'more'"),
    "numbers more": (beside("", MetricRecord({"x": [0.0] * 9})), "it has records that nobody asked for"),
    "long facts": (claimed(name="x" * 2**24), "its facts are not a text of at most 16777216 letters"),
    "NaN": (entry(lambda x: x * torch.nan), r"entry '1\.weight' of the upload holds NaN or infinity"),
    "false shape": (declared, r"entry '1\.weight' is declared as float32 of shape \(1073741824, 16\)"),
    "personal": (entry(lambda x: x, "2.weight"), r"has an entry '2\.weight', which does not belong there"),
    "huge weight": (claimed(weight=1e30), r"it reports 1e\+30 samples in 1 steps, but a round over its 24 has 24 in 1"),
    "no samples": (claimed(weight=0), "it reports 0 samples in 1 steps"),
    "huge steps": (claimed(steps=10**9), "it reports 24 samples in 1000000000 steps"),
    "another's": (claimed(name="pen"), r"it answered 'trained' as 'pen' for round \d+ instead"),
    "of another round": (claimed(round=99), "it answered 'trained' as 'photo' for round 99 instead"),
    "empty": (lambda _, answer: replace(answer, arrays={}), "it sent no memory and no shared entries"),
    "something else": (lambda _, answer: replace(answer, kind="evaluated"), "it answered 'evaluated' as"),
    "an error": (lambda *_: ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "it did not answer in time"),
    "a poison": (entry(lambda x: x + 1e30), "its update is .* times as long as the others', .* is 10"),
    "nested": (text(lambda said: json.dumps(said)[:-1] + f', "weight": {DEEP}}}'), "RecursionError"),
    "huge": (text(lambda said: json.dumps(said | {"weight": 0})[:-1] + f', "weight": 1{"0" * 400}}}'), "'weight': "),
    "infinite": (claimed(weight=float("inf")), "'weight': Input should be a finite number"),
    "a truth": (claimed(steps=True), "'steps': Input should be a valid integer"),
    "more than was asked": (claimed(accuracy=1.0), "'accuracy': Extra inputs are not permitted"),
    "no JSON": (text(lambda said: "{"), "a message that is not fedshift's"),
    "another content": (lambda *_: ValueError("Unexpected format for object head."), "Flower cannot read its answer"),
    "a terminal's codes": (text(lambda said: '{"kind": "refused", "why": "\\u001b[2Jgone\\n\\rhere"}'), "gone  here$"),
}  # fmt: skip


def test_an_upload_that_cannot_be_is_refused_by_name_and_moves_nothing(tmp_path):
    """Each round has another one, so that the model is that of the two others in one process."""
    faults = list(UPLOADS.values())
    spec = replace(SPEC, rounds=len(faults), evaluate_every=len(faults))
    wrong = from_photo(lambda asked, answer: faults[asked.facts["round"]][0](asked, answer))
    heard = serve(spec, tmp_path, tamper=wrong, clients=2)
    assert heard.took_part == [OTHERS] * len(faults)
    for number, ((name, (_, why)), told) in enumerate(zip(UPLOADS.items(), heard.complaints, strict=False), 1):
        assert re.match(f"round {number}: photo is left out: .*{why}", told), (name, told)
    assert [said for said in heard.told(PHOTO) if said in heard.complaints] == heard.complaints
    assert all(told.isprintable() and len(told) <= LONGEST + 3 for told in heard.notices)
    (file,) = tmp_path.glob("served/trials/*/checkpoint.safetensors")
    assert load_checkpoint(file)[1]["lengths"].keys() == set(OTHERS)
    same_as_in_process(replace(spec, domains=",".join(OTHERS)), tmp_path / "served")


def test_what_rules_upload_is_checked_as_entries_are(tmp_path):
    def wrong(question, answer):
        change = {1: torch.nan, 2: 1e20}[question.facts["round"]]
        state = {name: x + change for name, x in from_record(answer.arrays["memory"]).items()}
        return replace(answer, arrays={**answer.arrays, "memory": to_record(state)})

    heard = serve(replace(SPEC, method="scaffold"), tmp_path, tamper=from_photo(wrong, at=(1, 2)), clients=2)
    assert heard.took_part == [ALL, OTHERS, OTHERS]
    nan, long = heard.complaints[:2]
    assert re.match("round 2: photo is left out: entry .* of the upload's rule memory holds NaN", nan)
    assert re.match("round 3: photo is left out: its update is .* times as long as the others'", long)


@pytest.mark.parametrize("absent", ["silent", "left"])
def test_a_site_that_does_not_answer_loses_the_round_and_is_asked_again(absent, clock, tmp_path, monkeypatch):
    """The end is that of one process in which it takes no part in that round."""
    grid, rounds = grid_of(SPEC, tmp_path), iter((1, 2, 3))
    leave = from_photo(lambda *_: grid.away.update({PHOTO} if absent == "left" else ()), at=(1,))
    heard = serve(SPEC, tmp_path, grid, tamper=leave, after=lambda done: grid.away.clear(), clients=2)
    assert heard.took_part == [ALL, OTHERS, ALL]
    why = {"silent": "it did not answer in time", "left": "it has left"}[absent]
    assert heard.complaints == [f"round 2: photo is left out: {why}"]
    assert ("photo has left (2 connected)" in heard.notices) == (absent == "left")
    assert clock.seconds == pytest.approx({"silent": 5.0, "left": 0.0}[absent], abs=1.0)  # its deadline is 5
    monkeypatch.setattr(Sequential, "find_available", lambda self, names: OTHERS if next(rounds) == 2 else names)
    same_as_in_process(SPEC, tmp_path / "served")


def test_a_site_that_is_gone_is_not_asked_nor_are_too_few_waited_for_longer_than_a_round(clock, tmp_path):
    grid, heard = grid_of(SPEC, tmp_path), Heard()
    after = lambda done: grid.away.update({PHOTO} if done.round == 1 else {1, PHOTO})  # noqa: E731
    with pytest.raises(FedshiftError, match=r"2 sites must be connected .* after 5 seconds there are 1: print"):
        serve(SPEC, tmp_path, grid, heard=heard, after=after, clients=2)
    assert heard.took_part == [ALL, OTHERS]
    assert [asked.facts["round"] for at, asked in grid.asked if at == PHOTO and "round" in asked.facts] == [0]
    assert heard.notices.count("photo is away: rounds continue without it") == 1
    assert 5.0 <= clock.seconds < 7.0


def test_without_a_quorum_the_round_fails_the_model_stays_and_resume_goes_on(tmp_path):
    kept = "round 2: only 2 of 3 clients sent a usable upload, and 3 must (--min-clients). The model of round 1 is kept"
    with pytest.raises(FedshiftError, match=re.escape(kept)):
        serve(SPEC, tmp_path, tamper=from_photo(entry(lambda x: x * torch.nan), at=(1,)))
    tensors, facts = load_checkpoint(next(tmp_path.glob("served/trials/*/checkpoint.safetensors")))
    assert (facts["round"], set(facts["bases"].values())) == (1, {1})
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    serve(SPEC, tmp_path)
    same_as_in_process(SPEC, tmp_path / "served")


# Updates that are too long, and weights that are bounded.

SERVER = ServerState(round=1, shared={"w": torch.zeros(4), "n": torch.zeros(1, dtype=torch.int64)})


def update(length, steps=1, memory=None):
    shared = {"w": torch.full((4,), length / 2), "n": torch.ones(1, dtype=torch.int64)}
    rules = () if memory is None else ({"c": torch.tensor([memory])},)
    return Update(shared=shared, memory=rules, weight=1.0, steps=steps)


@pytest.mark.parametrize(
    ("rounds", "outliers"),
    [
        ([{"a": 1.0, "b": 2.0, "c": 21.0}], {"c": 21 / 2}),
        ([{"a": 1.0, "b": 2.0, "c": 19.0}], {}),
        ([{"a": 2.0, "b": 2.0, "c": 1e-6}], {}),  # the tiny one must not make the two others stand out
        ([{"a": 1.0, "b": 1e30, "c": 1e30}], {}),  # two of three decide
        ([{"a": 1.0, "b": 1.0, "c": float("inf")}], {"c": float("inf")}),
        ([{"a": 1.0, "b": 21.0}], {"b": 21.0}),
        ([{"a": 1.0}, {"a": 9.0}, {"a": 91.0}], {"a": 91 / 9}),
        ([{"a": 1.0, "b": 2.0, "c": 0.5}, {"c": 19.0}], {}),  # alone: as long as others' were
        ([{"a": 1.0, "b": 2.0}, {"a": 0.1, "b": 0.01}, {"a": 1.0, "b": 0.01}], {}),  # it grows again
        ([{"a": 1.0, "b": 2.0}, {"a": 0.1, "b": 0.01}, {"a": 21.0, "b": 0.01}], {"a": 21 / 2}),
        ([{"a": 1.0, "b": 1.0, "c": 99.0}, {"a": 0.5, "b": 1.0, "c": 11.0}], {"c": 11.0}),  # no outlier is remembered
        ([{"a": 1.0, "b": 99.0}, {"a": 50.0}], {"a": 50.0}),  # nor does it excuse another later
        ([{"a": (1.51, 200), "b": (0.14, 2), "c": (0.13, 2)}], {}),  # a large site, which takes more steps
        ([{"a": (150.0, 200), "b": (0.14, 2), "c": (0.13, 2)}], {"a": 150 / 200 / 0.07}),
        ([{"a": (0.14, 200), "b": (1.4, 2), "c": (1.4, 2)}], {}),  # a small site next to large ones
        ([{"a": (1.0, 1, 1e20), "b": (1.0, 1, 1.0), "c": (1.0, 1, 2.0)}], {"a": 1e20 / 2}),  # a rule's upload
    ],
)
def test_an_update_is_compared_with_the_longest_of_others_in_all_and_per_step(rounds, outliers):
    lengths = UpdateLengths(10.0)
    for some in rounds:
        sent = {name: update(*(each if isinstance(each, tuple) else (each,))) for name, each in some.items()}
        found = lengths.find_outliers(SERVER, sent)
        lengths = UpdateLengths(10.0, json.loads(json.dumps(lengths.longest)))  # as restored from a checkpoint
    assert found == pytest.approx(outliers)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_a_hospital_a_hundred_times_as_large_as_others_counts_in_full_as_in_one_process(method, tmp_path):
    (tmp_path / "data").mkdir()
    for seed, (name, count) in enumerate({"large": 400, "east": 8, "west": 8}.items()):
        y, random = np.arange(count) % 2, np.random.default_rng(seed)
        x = (random.normal(size=(count, 6)) + y[:, None]).astype(np.float32)
        np.savez(tmp_path / "data" / f"{name}.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    spec = RunSpec(data=str(tmp_path / "data"), method=method, model="linear", rounds=2, batch_size=4, evaluate_every=2)
    heard = serve(spec, tmp_path, sites_at(tmp_path / "data", tmp_path))
    assert heard.took_part == [("east", "large", "west")] * 2
    assert not [text for text in heard.notices if "left out" in text or "weighs" in text]
    same_as_in_process(spec, tmp_path / "served")


@pytest.mark.parametrize(("max_share", "share"), [(0.5, 1 / 2), (0.25, 1 / 3), (None, CLAIMED / (CLAIMED + 48))])
def test_a_site_that_claims_many_samples_decides_alone_unless_weights_are_bounded(max_share, share, tmp_path):
    def tamper(node, question, answer):
        if question.kind == "describe" and node == PHOTO:
            samples = {**answer.facts["samples"], "train": CLAIMED}
            return replace(answer, facts={**answer.facts, "samples": samples})
        if question.kind != "train":
            return answer
        state = from_record(answer.arrays["shared"])
        state[WEIGHT].fill_(1000.0 if node == PHOTO else 0.0)
        facts = answer.facts | ({"weight": float(CLAIMED), "steps": CLAIMED // BATCH} if node == PHOTO else {})
        return replace(answer, facts=facts, arrays={**answer.arrays, "shared": to_record(state)})

    spec = spec_for("fedavg", model=NETWORK, rounds=1, batch_size=BATCH)
    order = {} if max_share is None else {"max_share": max_share}
    heard = serve(spec, tmp_path, tamper=tamper, update_bound=0, **order)
    (file,) = tmp_path.glob("served/trials/*/checkpoint.safetensors")
    found = load_checkpoint(file)[0][f"server/shared/{WEIGHT}"]
    assert found.unique().tolist() == pytest.approx([1000 * share])
    counts = {0.5: "48", 0.25: "24"}
    assert [text for text in heard.notices if "weighs" in text] == [
        f"in averages weighted by samples, photo weighs {counts[bound]} in place of 400000 (--max-share {bound:g})"
        for bound in order.values()
    ]


def counts(**changed):
    return lambda rows: [row | changed for row in rows]


MEASURED = {
    "text": (counts(hits="many"), "'0.hits': Input should be a valid list, not 'many'"),
    "more hits than samples": (counts(hits=[10**9] * 10), "its counts are impossible for its"),
    "negative hits": (counts(hits=[-3] * 10), "'0.hits.0': Input should be greater than or equal to 0, not -3"),
    "an area above one": (counts(auc=7e10), "'0.auc': Input should be less than or equal to 1"),
    "an infinite area": (counts(auc=float("inf")), "'0.auc': "),
    "a negative loss": (counts(loss_sum=-1.0), "its counts are impossible for its"),
    "one more column": (counts(accuracy=1.0), "'0.accuracy': Extra inputs are not permitted"),
    "another size": (counts(samples=7), "its counts are impossible for its"),
    "too many classes": (counts(hits=[1] * 11), "'0.hits': List should have at most 10 items"),
    "NaN": (counts(loss_sum=float("nan")), "'0.loss_sum': Input should be a finite number"),
    "another model": (counts(model="best"), "'0.model': Input should be 'personal' or 'global'"),
    "no such split": (counts(split="train 2"), "it measured .* which was not requested"),
    "everything twice": (lambda rows: rows * 2, "it measured one model twice on the same samples"),
    "nothing": (lambda rows: [], r"it measured nothing on its \w+ samples"),
}


def test_measurements_that_no_prediction_gives_are_refused_by_name(tmp_path):
    """Each round has others."""

    def wrong(question, answer):
        change, _ = list(MEASURED.values())[question.facts["round"] - 1]
        return replace(answer, facts=answer.facts | {"rows": change(list(answer.facts["rows"]))})

    spec = spec_for(rounds=len(MEASURED), evaluate_every=1)
    heard = serve(spec, tmp_path, tamper=from_photo(wrong, "evaluate"), clients=2)
    for number, (name, done) in enumerate(zip(MEASURED, heard.rounds, strict=True), 1):
        assert done.participants == ALL
        assert {row["client"] for row in done.rows if row["split"] == "test"} == set(OTHERS), name
        (told,) = [said for said in heard.notices if said.startswith(f"round {number}: photo is not measured: ")]
        assert re.search(MEASURED[name][1], told), (name, told)


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
def test_counts_of_predictions_are_possible_and_pass_the_schema_and_others_do_not(name):
    task, shape, targets, outputs = TASKS[name]
    torch.manual_seed(0)
    reader = RowReader(task, outputs)
    for scale in (0.0, 1e-3, 1.0, 1e6):
        counts = task.measure(scale * torch.randn(50, *shape, dtype=torch.float64), targets(), outputs)
        row = {"client": "a", "split": "test", "model": "personal", "moment": "loaded", **counts}
        assert task.plausible(counts)
        assert reader.read(json.loads(json.dumps([row])), "a", {"test": 50}, "loaded") == [row]
        with pytest.raises(RefusedMessage, match="its counts are impossible for its 49 samples"):
            reader.read([row], "a", {"test": 49}, "loaded")
    wrong = ({"hits": [1]}, {"predicted": [-1, 3]}, {"predicted": None}, {"samples": 4}, {"support": ["1", 2]})
    for change in (*(wrong if "segmentation" in name else ()), {"loss_sum": float("nan")}):
        with pytest.raises(RefusedMessage):
            reader.read([row | change], "a", {"test": 50}, "loaded")


def test_a_description_of_any_form_keeps_a_site_out_or_lets_it_in_and_ends_nothing(tmp_path):
    """Sixty nodes beside the two that are honest, each with another description."""
    wrong = dict(enumerate([(name, value) for name in ("classes", "samples", "task") for value in EVIL], 10))
    sites = grid_of(spec_for(), tmp_path).sites

    def describe(node, question, answer):
        if node not in wrong or question.kind != "describe":
            return answer
        name, value = wrong[node]
        return text(lambda said: json.dumps(said | {"name": f"site {node}", name: value}))(question, answer)

    sites = {1: sites[1], 3: sites[3]} | dict.fromkeys(wrong, sites[PHOTO])
    heard = serve(spec_for(domains=None, rounds=1), tmp_path, sites, tamper=describe, clients=2)
    assert heard.took_part == [OTHERS]
    for node in wrong:
        said = rf"a node \(number {node}\) does not take part|site {node} is not admitted|round 1: site {node} is left"
        assert any(re.match(said, text) for text in heard.notices), wrong[node]


def mutate(dice, answer):
    """An answer with a few faults: anything in place of facts, bits of entries turned over, records renamed."""
    facts, arrays = {"kind": answer.kind, **json.loads(json.dumps(answer.facts))}, dict(answer.arrays)
    places = [facts, *(facts.get("rows") or ())]
    for _ in range(dice.randint(0, 2)):
        facts_or_row = dice.choice(places)
        facts_or_row[dice.choice([*facts_or_row, "more"])] = dice.choice(EVIL)
    for record in dice.sample(list(arrays), min(1, len(arrays)) * dice.randint(0, 1)):
        state = from_record(arrays.pop(record))
        for x in state.values():
            bits = x.reshape(-1).view(torch.uint8)
            bits[dice.randrange(len(bits))] ^= 1 << dice.randrange(8)
        arrays[dice.choice([record, record, "memory", "more"])] = to_record(state)
    said = json.dumps(facts)
    if dice.random() < 0.2:
        place = dice.randrange(len(said))
        said = said[:place] + dice.choice(["", "}", "[", "\\", "9" * 500, DEEP, "\x00"]) + said[place + 1 :]
    return RecordDict({"config": ConfigRecord({FACTS: said}), **arrays})


METHODS = ("fedavg", "scaffold", "fedper", "fpl", "fednova", "ditto", "fedproto", "feddyn")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_mutated_answers_are_refused_by_name_or_used_and_others_lose_nothing(method, tmp_path):
    """An answer is used only because what it says could be true; there is no third."""
    dice, known, rounds = random.Random(f"mutations {method}"), {}, 40
    answers = []

    def tamper(node, question, answer):
        if node != PHOTO or question.kind not in ("train", "evaluate"):
            return answer
        if answer.kind == "refused" and question.kind in known:  # it lost a round: what it would have said
            before, round = known[question.kind], question.facts["round"] + (question.kind == "train")
            answer = replace(before, facts=before.facts | {"round": round})
        known[question.kind] = answer
        answers.append(question.kind)
        return mutate(dice, answer)

    spec = spec_for(method, rounds=rounds, evaluate_every=1, samples=8, model="fnn2")
    heard = serve(spec, tmp_path, tamper=tamper, clients=2)
    assert {done.round for done in heard.rounds} == set(range(1, rounds + 1))
    measured = [{row["client"] for row in done.rows if row["split"] == "test"} for done in heard.rounds]
    assert all(set(OTHERS) <= set(who) for who in (*heard.took_part, *measured))
    used = sum("photo" in who for who in (*heard.took_part, *measured))
    refused = sum(
        re.match(r"round \d+: photo is (left out|not measured): ", said) is not None for said in heard.notices
    )
    assert used + refused == len(answers)
    assert refused > rounds - 1
    assert all(said.isprintable() for said in heard.notices)
